"""What gates, and runs that share a stack, cost in the training loop: ratios of a step to the dense network's.

    python benchmarks/training_speed.py --device cuda [--json FILE]

The dense network and the gated one (the second paper's model-wise constraint) are trained by the same loop in one
process, on real batches of MNIST; on a GPU the step is captured, as it is and compiled. Blocks of steps are
interleaved, and each ratio is the median over the rounds of a block's time to the dense block's beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from comparing import compared, steps, timed
from provenance import write

from ellzero.experiments.data import Dataset, load
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.trainer import Trainer

DENSE = {"placement": None, "at_most": None}


def measure(recipe: Recipe, dataset: Dataset, o: argparse.Namespace) -> dict[str, dict[str, float]]:
    device = dataset.train_x.device
    ways = {"as it is": False, "compiled": True} if o.compiled else {"as it is": False}
    kinds = {"dense": recipe.override(**DENSE, dual="auto", dual_lr=None), **{f"gated ×{n}": recipe for n in o.runs}}
    out: dict[str, dict[str, float]] = {}
    for way, compiled in ways.items():
        running, first = {}, {}
        for kind, one in kinds.items():
            count = int(kind.partition("×")[2] or 1)
            stack = [one.override(seed=seed, compile=compiled, epochs=1000) for seed in range(count)]
            running[kind] = steps(Trainer(stack, dataset))
            first[kind] = 10 * timed(running[kind], 10, device)  # compilation and capture are in here
        for kind, numbers in compared(running, o.steps, o.rounds, device).items():
            out[f"{kind}, {way}"] = {**numbers, "first_10_steps_seconds": first[kind]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    dataset = load(o.data, o.data_dir, o.device)
    numbers = {}
    for name in ("gallego-mlp", "gallego-lenet5"):
        numbers[name] = measure(get(name).override(data=o.data), dataset, o)
        for kind, n in numbers[name].items():
            print(
                f"{name:16} {kind:20} {n['milliseconds']:8.3f} ms  {n['ratio']:6.3f} × dense "
                f"({n['ratio_low']:.3f}–{n['ratio_high']:.3f}), first ten steps {n['first_10_steps_seconds']:.1f} s",
                flush=True,
            )
    if o.json is not None:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(o).items()}
        write(o.json, "training_speed", {"steps_of_networks": numbers}, options, o.device)


if __name__ == "__main__":
    main()
