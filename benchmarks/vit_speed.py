"""Training time of ViT-Lite with gates that settle, relative to the dense network: the steps of its two phases.

    python benchmarks/vit_speed.py --device cuda [--json FILE]

The dense network, the gated one and the one that its gates left (as a stored row of `vit-cifar10` says) are trained by
the same loop in one process. Blocks of steps are interleaved, and each ratio is the median over the rounds of a block's
time to the dense block's beside it. The images are noise of the shape of CIFAR-10. The whole run is that of the row's
recipe: gated steps until its gates settle, small ones from there on. Steps are compiled where that run would compile
them. Compilation is what the first steps took beyond others, capture included; the run counts it, for each network
once. What the compiler takes to start, whatever it compiles, counts for neither.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from comparing import compared, steps, timed
from provenance import write

from ellzero.experiments.data import Dataset, stand_in
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import events
from ellzero.experiments.train.policy import Policy
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated

FIRST = 5  # steps that compile and capture
ROW = Path(__file__).parent.parent / "results" / "vit-cifar10" / "vit-50-cifar10.json"
CLEAR = 5.0  # log α of an open gate; that of a closed one is its negative
PHASES = "dense", "gated", "settled"
IMAGES = 50_000  # of CIFAR-10


def settle(trainer: Trainer, left: Mapping[str, int]) -> dict[str, Any]:
    """Lets the gates settle with so many units of each layer open, the first ones; what that left."""
    gated = cast(Gated, trainer.runs.template.network)
    with torch.no_grad():
        for name, gate in gated.named_gates():
            log_alpha = cast(torch.Tensor, gate.log_alpha).view(-1)
            log_alpha.fill_(-CLEAR)
            log_alpha[: left[name]] = CLEAR
    events.settle(trainer)
    event, trainer.event = trainer.event, None
    assert event is not None
    return {"widths": event["widths"], "macs": event["macs"]["after"]}


def measure(row: Recipe, left: Mapping[str, int], o: argparse.Namespace, dataset: Dataset) -> dict[str, dict[str, Any]]:
    dense = get("vit-cifar10").override(network=row.network, precision=o.precision, batch=row.batch)
    endless = {"precision": o.precision, "epochs": 100_000}
    running, first, out = {}, {}, dict[str, dict[str, Any]]()
    if dataset.device.type == "cuda":
        torch.compile(torch.sin)(torch.ones(8, device=dataset.device, requires_grad=True)).sum().backward()
    for phase in PHASES:
        recipe = dense if phase == "dense" else row
        begins = (row.settle_at or 0) if phase == "settled" else 0
        compiles = Policy(recipe, IMAGES, on_gpu=dataset.device.type == "cuda").compiles(begins)
        settles = {} if phase == "dense" else {"settle_at": 99_999}
        trainer = Trainer([recipe.override(**endless, **settles, compile=compiles)], dataset)
        out[phase] = settle(trainer, left) if phase == "settled" else {"macs": 1.0}
        out[phase]["compiled"] = compiles
        running[phase] = steps(trainer)
        first[phase] = FIRST * timed(running[phase], FIRST, dataset.train_x.device)
    for phase, numbers in compared(running, o.steps, o.rounds, dataset.train_x.device).items():
        usual = FIRST * numbers["milliseconds"] / 1e3
        out[phase] |= {**numbers, "compilation_seconds": max(0.0, first[phase] - usual)}
    return out


def whole(row: Recipe, found: Mapping[str, Mapping[str, Any]], images: int) -> dict[str, float]:
    """Seconds of the row's training and of the dense network's, and their ratio."""
    steps_of, learning = images // row.batch, row.settle_at or 0
    epochs = {"dense": row.epochs, "gated": learning, "settled": row.epochs - learning}
    seconds = {
        phase: n * steps_of * found[phase]["milliseconds"] / 1e3 + found[phase]["compilation_seconds"]
        for phase, n in epochs.items()
    }
    ours = seconds["gated"] + seconds["settled"]
    return {"dense_seconds": seconds["dense"], "seconds": ours, "ratio": ours / seconds["dense"]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--row", type=Path, default=ROW, help="the json of a row with gates")
    parser.add_argument("--images", type=int, default=12_800, help="of noise")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=50, help="in a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(words)
    record = json.loads(o.row.read_text(encoding="utf-8"))
    row = Recipe.from_dict(record["recipe"]).override(batch=o.batch)
    found = measure(row, record["seeds"][0]["architecture"], o, stand_in("cifar10", o.images, o.device))
    for phase, n in found.items():
        print(
            f"{phase:8} {100 * n['macs']:5.1f} % of MACs {n['milliseconds']:9.3f} ms  "
            f"{n['ratio']:6.3f} × dense ({n['ratio_low']:.3f}–{n['ratio_high']:.3f}), "
            f"{'compilation' if n['compiled'] else 'capture, not compiled'} {n['compilation_seconds']:.1f} s",
            flush=True,
        )
    run = whole(row, found, IMAGES)
    print(f"{row.name}: {row.epochs} epochs take {run['ratio']:.3f} of the dense seconds, compilation counted in")
    if o.json is not None:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(o).items()}
        numbers = {"images_are": "noise", "row": row.name, "steps": found, "run": run}
        write(o.json, "vit_speed", numbers, options | {"row": o.row.name}, o.device)


if __name__ == "__main__":
    main()
