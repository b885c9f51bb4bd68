"""How hard multipliers press, in short runs: the README's loop with the pace of `Budget`, and with others.

    python benchmarks/pacing.py --data mnist-split --json results/benchmarks/pacing.json    # half an hour on one core
    python benchmarks/pacing.py --data mnist-split --epochs 5 10 --paces "gates at 0.1" --json FILE

An MLP 784-300-100 and LeNet-5 on 4,000 images of MNIST, batches of 100, Adam with a cosine. `SelfPacedAscent` begins
at 0.1 and counts a violation as half an e-fold at most. Beside it is the same ascent that begins lower or higher, and
the one that counts all of a violation. `gates at 0.1` lets gates move by 0.1 in a step at most, and the multiplier
follows their rate: only runs in which gates learn for less than 250 steps differ. Told are the error of the small
network, and the least share of the MACs that was kept while gates learned: far below the budget, the network is
destroyed before it settles, and what is opened again has not learned with it. `mnist-split` tests on training images
that are held out, so that no setting is chosen by a test image; without it the images are those in the package.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import provenance
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments import networks
from ellzero.experiments.data import Tensors, load
from ellzero.out.bounding.pacing import gate_rate, steps_of_learning

BATCH, IMAGES = 100, 4000
PACES: dict[str, dict[str, float]] = {  # what is changed of the multipliers' ascent
    "default": {},
    "from 0.05": {"start": 0.05, "counts": 0.5},
    "from 0.2": {"start": 0.2, "counts": 0.5},
    "unbounded": {"start": 0.1},
}
RATES = {"gates at 0.1": 0.1}  # what is changed of the gates' rate: the highest


def run(network: str, data: Tensors, macs: float, epochs: int, seed: int, pace: str) -> tuple[float, float]:
    """Trains once: the error in percent, and the least share of the MACs while gates learned."""
    torch.manual_seed(seed)
    images, tests = (data.scaled(x, "standard") for x in (data.train_x[:IMAGES], data.test_x))
    gated = l0.attach(networks.find(network).make(10), (images[:2],))
    steps = epochs * (len(images) // BATCH)
    rate = min(RATES.get(pace, math.inf), gate_rate(steps_of_learning(steps)))
    budget = l0.Budget(gated, macs=macs, steps=steps, gate_lr=rate)
    (constraint,) = budget.constraints
    if changed := PACES.get(pace):
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
    parser.add_argument("--networks", nargs="+", default=["lenet300", "lenet5"])
    parser.add_argument("--data", default="mnist5k")
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 10, 40])
    parser.add_argument("--at-most", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--paces", nargs="+", choices=[*PACES, *RATES], default=list(PACES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "gates settle after")
    torch.set_num_threads(1)
    data: Any = load(asked.data)
    rows = []
    for network, epochs, macs, pace in product(asked.networks, asked.epochs, asked.at_most, asked.paces):
        seeds = range(asked.seeds)
        errors, least = zip(*(run(network, data, macs, epochs, seed, pace) for seed in seeds), strict=True)
        row = {"network": network, "epochs": epochs, "at_most": macs, "pace": pace}
        rows.append({**row, "errors": errors, "least_kept": least})
        spread = statistics.stdev(errors) / math.sqrt(len(errors)) if len(errors) > 1 else math.nan
        kept = 100 * statistics.fmean(least)
        told = f"{statistics.fmean(errors):5.2f} ± {spread:.2f} % error, least kept {kept:5.1f} % of the MACs"
        print(f"{network:8} {epochs:3} epochs, {100 * macs:3.0f} %, {pace:12}: {told}", flush=True)
    if asked.json is not None:
        provenance.write(asked.json, "pacing", {"rows": rows}, vars(asked))


if __name__ == "__main__":
    main()
