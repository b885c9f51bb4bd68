"""Step times of WRN-28-10 as ratios to the dense network: gated, and shrunk to 35 % and 20 % of its hidden widths.

    python benchmarks/wrn_speed.py --device cuda [--json FILE]

All are trained by the same loop in one process (bfloat16, channels last, batch 128); on a GPU the step is captured, as
it is and compiled. Blocks of steps are interleaved, and each ratio is the median over the rounds of a block's time to
the dense block's beside it. The images are noise of the shape of CIFAR-10, cropped and mirrored: what a step costs does
not depend on what is in them. For a shrunk network units are taken out of the gated one as `events.shrink` does it:
all but the first of each hidden layer, widths rounded up to a multiple. Compilation is what the first steps took beyond
others, capture included.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from comparing import compared, steps, timed
from provenance import write

from ellzero.experiments.data import Dataset, stand_in
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import events
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated

FIRST = 5  # steps that compile and capture
SHARES = {"gated": 1.0, "shrunk to 35 %": 0.35, "shrunk to 20 %": 0.2}


def recipes(o: argparse.Namespace, compiled: bool) -> dict[str, Recipe]:
    """The dense network, and the gated one under the second paper's constraints of 20 % for each hidden layer."""
    blocks = (int(o.network.split("-")[1]) - 4) // 2
    same = {"network": o.network, "batch": o.batch, "precision": o.precision, "channels_last": True}
    same |= {"epochs": 100_000, "milestones": (), "compile": compiled}
    gated = get("gallego-wrn-20-cifar10").override(
        at_most={f"blocks.{block}.conv1": 0.2 for block in range(blocks)},
        shrink_checks=1,
        shrink_multiple=o.multiple,
        shrink_gain=0.0,
        **same,
    )
    return {"dense": get("wrn-cifar10").override(**same), **{kind: gated for kind in SHARES if kind in o.kinds}}


def shrink(trainer: Trainer, share: float) -> dict[str, Any]:
    """Takes out all but this share of every hidden layer; what that left."""
    gates = cast(Gated, trainer.runs.template.network).named_gates()
    sizes = [gate.shape.numel() for _, gate in gates]
    trainer.closed_for = np.concatenate([np.arange(n) >= math.ceil(share * n) for n in sizes]).astype(np.int64)
    events.shrink(trainer)
    event, trainer.event = trainer.event, None
    assert event is not None
    return {"widths": event["widths"], "macs": event["macs"]["after"]}


def measure(o: argparse.Namespace, dataset: Dataset, compiled: bool) -> dict[str, dict[str, Any]]:
    device = dataset.train_x.device
    running, first, out = {}, {}, dict[str, dict[str, Any]]()
    for kind, recipe in recipes(o, compiled).items():
        trainer = Trainer([recipe], dataset)
        out[kind] = {"macs": 1.0}
        if SHARES.get(kind, 1.0) < 1:
            out[kind] = shrink(trainer, SHARES[kind])
        running[kind] = steps(trainer)
        first[kind] = FIRST * timed(running[kind], FIRST, device)
    for kind, numbers in compared(running, o.steps, o.rounds, device).items():
        usual = FIRST * numbers["milliseconds"] / 1e3
        out[kind] |= {**numbers, "compilation_seconds": max(0.0, first[kind] - usual)}
    return out


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="wrn-28-10")
    parser.add_argument("--kinds", nargs="+", choices=SHARES, default=list(SHARES), help="beside the dense one")
    parser.add_argument("--images", type=int, default=12_800, help="of noise")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--multiple", type=int, default=32, help="of the widths that are left")
    parser.add_argument("--steps", type=int, default=50, help="in a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-it-is", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(words)
    if not (o.as_it_is or o.compiled):
        parser.error("--as-it-is or --compiled must be on (the latter is by default on a GPU alone), got neither")
    dataset = stand_in("cifar10", o.images, o.device)
    numbers = {}
    for way, wanted in {"as it is": o.as_it_is, "compiled": o.compiled}.items():
        if not wanted:
            continue
        numbers[way] = measure(o, dataset, way == "compiled")
        for kind, n in numbers[way].items():
            print(
                f"{kind:16} {way:9} {100 * n['macs']:5.1f} % of MACs {n['milliseconds']:9.3f} ms  "
                f"{n['ratio']:6.3f} × dense ({n['ratio_low']:.3f}–{n['ratio_high']:.3f}), "
                f"compilation and capture {n['compilation_seconds']:.1f} s",
                flush=True,
            )
    if o.json is not None:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(o).items()}
        write(o.json, "wrn_speed", {"images_are": "noise", "steps": numbers}, options, o.device)


if __name__ == "__main__":
    main()
