"""How hard multipliers press, in short runs: the README's loop with the pace of `Budget`, and with two others.

    python benchmarks/pacing.py --json results/benchmarks/pacing.json

An MLP 784-300-100 on 4,000 images of MNIST, batches of 100, Adam with a cosine. `SelfPacedAscent` begins at 0.05 and
counts a violation as half an e-fold at most. Beside it is the same ascent that begins at 0.5, and the one that counts
all of a violation too. Told are the test error of the small network, and the least share of the MACs that was kept
while gates learned: far below the budget, the network is destroyed before it settles, and what is opened again has not
learned with it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import provenance
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.data import Tensors, load

BATCH = 100
PACES: dict[str, dict[str, float]] = {  # what is changed of the multipliers' ascent
    "default": {},
    "from 0.5": {"start": 0.5, "counts": 0.5},
    "from 0.5, unbounded": {"start": 0.5},
}


def run(data: Tensors, macs: float, epochs: int, seed: int, pace: str) -> tuple[float, float]:
    """Trains once: the error in percent, and the least share of the MACs while gates learned."""
    torch.manual_seed(seed)
    images, tests = (data.scaled(x, "standard") for x in (data.train_x, data.test_x))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    gated = l0.attach(model, (images[:2],), where=l0.shrinkable(inputs=False))  # as when the results were stored
    steps = epochs * (len(images) // BATCH)
    budget = l0.Budget(gated, macs=macs, steps=steps)
    (constraint,) = budget.constraints
    if changed := PACES[pace]:
        constraint.dual = l0.duals.ExponentiatedAscent(constraint.dual.rate, **changed)
    optimizer = torch.optim.Adam(gated.param_groups(lr=2e-3))
    budget.drive(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    least = 1.0
    for _ in range(epochs):
        for index in torch.randperm(len(images))[: steps // epochs * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(gated(images[index]), data.train_y[index]).backward()
            if budget.phase == "learning" and budget.done % 5 == 0:
                least = min(least, budget.metrics()["macs/kept"])
            optimizer.step()
            schedule.step()
    return error(budget.finish().eval(), tests, data.test_y), least


@torch.no_grad()
def error(network: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * float((network(x).argmax(1) != y).double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--at-most", type=float, nargs="+", default=[0.05, 0.1, 0.3])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "gates settle after")
    torch.set_num_threads(1)
    data: Any = load("mnist5k")
    rows = []
    for epochs in asked.epochs:
        for macs in asked.at_most:
            for pace in PACES:
                errors, least = zip(*(run(data, macs, epochs, seed, pace) for seed in range(asked.seeds)), strict=True)
                row = {"epochs": epochs, "at_most": macs, "pace": pace}
                rows.append({**row, "errors": errors, "least_kept": least})
                spread = statistics.stdev(errors) / math.sqrt(len(errors)) if len(errors) > 1 else math.nan
                kept = 100 * statistics.fmean(least)
                told = f"{statistics.fmean(errors):5.2f} ± {spread:.2f} % error, least kept {kept:5.1f} % of the MACs"
                print(f"{epochs:3} epochs, {100 * macs:3.0f} %, {pace:20}: {told}", flush=True)
    if asked.json is not None:
        provenance.write(asked.json, "pacing", {"rows": rows}, vars(asked))


if __name__ == "__main__":
    main()
