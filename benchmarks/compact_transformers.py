"""How much of what a budget of MACs saves is saved in time: the compact GPT and ViT-Lite of the stored rows against the
dense networks, as they are and compiled.

    python benchmarks/compact_transformers.py [--device cuda] [--rows NAME ...] [--json FILE]

Each network has the widths that the row in results/ ended with, and random weights: what is measured is the shape.
Dense and compact run in turns in one process; the ratio is the median over pairs of neighbouring calls. "reached" is
the dense time divided by the compact one's, as a share of the dense MACs divided by the compact ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import write
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.data import stand_in
from ellzero.experiments.recipe import Recipe
from ellzero.out.latency.meter import interleaved

RESULTS = Path(__file__).parent.parent / "results"
ROWS = ("gpt-shakespeare/gpt-50-shakespeare", "vit-cifar10/vit-50-cifar10", "vit-cifar10/vit-30-cifar10")
BATCHES = {"cpu": (1, 8), "cuda": (64, 1024)}  # of texts, of images: about as long on either device


def networks(row: str) -> tuple[nn.Module, nn.Module, Tensor, float]:
    """The dense network, the compact one, an example, and the share of the MACs that is left."""
    record = json.loads((RESULTS / f"{row}.json").read_text(encoding="utf-8"))
    recipe, kept = Recipe.from_dict(record["recipe"]), record["seeds"][0]["architecture"]
    noise = stand_in(recipe.data, 1)
    torch.manual_seed(0)
    dense, example = recipe.facts.make(len(noise.classes)).eval(), noise.example(1)
    gated = l0.attach(l0.centred(dense, example), example, where=l0.shrinkable(streams=True))
    for name, gate in gated.named_gates():
        gate.close_(torch.randperm(gate.shape.numel()) >= kept[name])
    left = float(l0.macs(gated, kept=True)) / l0.dense(l0.macs, gated)
    return dense, l0.compact(gated).eval(), example, left


def measured(row: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of one row, as it is and compiled."""
    device = torch.device(options.device)
    *both, example, left = networks(row)
    batch = BATCHES[device.type][example.is_floating_point()]
    x = example.repeat(batch, *[1] * (example.dim() - 1)).to(device)
    found = []
    for way in ("as it is", "compiled"):
        calls = [partial(m.to(device) if way == "as it is" else torch.compile(m), x) for m in both]
        taken, small = interleaved(calls, device, rounds=options.rounds, warm_up=5)
        low, ratio, high = statistics.quantiles([s / d for s, d in zip(small, taken, strict=True)], n=4)
        reached = left / ratio
        found.append(
            {"row": row, "way": way, "batch": batch, "dense_ms": 1e3 * statistics.median(taken), "time_ratio": ratio}
            | {"quartiles": [low, high], "macs_ratio": left, "reached": reached}
        )
        print(
            f"{row.rpartition('/')[2]:<20} {way:<9} batch {batch}: dense {1e3 * statistics.median(taken):.2f} ms, "
            f"compact / dense {ratio:.3f} ({low:.3f}–{high:.3f}), MACs {left:.3f}, reached {100 * reached:.0f} %",
            flush=True,
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="files under results/, without their ending")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        rows = [found for row in options.rows for found in measured(row, options)]
    if options.json:
        write(options.json, "compact_transformers", {"rows": rows}, vars(options), options.device)


if __name__ == "__main__":
    main()
