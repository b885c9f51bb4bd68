"""Does a network take as long as `l0.Latency` says, and does a budget of time pay over one of MACs?

    python benchmarks/latency_budget.py [--device cuda] [--json FILE] [--only predict train] [--networks lenet5 vit]

predict   LeNet-5, a ResNet and a ViT are measured once; then networks with other random widths, none of which the table
          has seen, are timed in turns with the dense one. Beside the prediction's error stands that of their MACs.
train     LeNet-5 on mnist5k under `Budget(latency=…)` and under `Budget(macs=…)` at several shares, in one loop: test
          error and measured time of each. The time of MACs at equal error is read off the line through their means.

Keep the machine quiet. Where others use it, `--clock thread` counts the seconds that the calling thread computed, with
one thread: what else runs is then in the numbers by the caches alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from own_loop import ResNet
from provenance import write
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments import data
from ellzero.out.latency.meter import interleaved
from ellzero.out.latency.table import Table

CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}
Clock = Callable[[], float]


def lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = width // heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer for images of 32 by 32, in patches of 4."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 4, 4), nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.last(self.norm(self.blocks(x)).mean(1))
        return out


def cases(kind: str, small: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """What makes each network, and the shape of its batch: as large as the device is."""
    if small:
        sizes: tuple[int, ...] = (2, 2, 2, 4, 16, 2, 1)
    else:
        sizes = (64, 16, 8, 32, 128, 4, 4) if kind == "cpu" else (8192, 1024, 256, 64, 384, 6, 6)
    return {
        "lenet5": (lenet5, (sizes[0], 1, 28, 28)),
        "resnet": (partial(ResNet, 10, sizes[3]), (sizes[1], 3, 32, 32)),
        "vit": (partial(ViT, *sizes[4:]), (sizes[2], 3, 32, 32)),
    }


def shares(networks: list[nn.Module], x: Tensor, rounds: int, clock: Clock) -> list[float]:
    """The time of each but the first, as a share of the first's: medians of rounds in turns."""
    with torch.no_grad():
        calls = [partial(network.eval(), x) for network in networks]
        first, *others = interleaved(calls, x.device, rounds=rounds, warm_up=3, clock=clock)
    return [statistics.median(a / b for a, b in zip(other, first, strict=True)) for other in others]


def narrowed(gated: l0.Gated, random: np.random.Generator) -> None:
    """Leaves a random share of each set of gates open, in place."""
    for _, gate in gated.named_gates():
        size = gate.shape.numel()
        order = torch.as_tensor(random.permutation(size))
        gate.open_(torch.ones(size, dtype=torch.bool, device=gate.log_alpha.device), wide=True)
        closed = order >= max(1, round(float(random.uniform(0.1, 1)) * size))
        gate.close_(closed.to(gate.log_alpha.device))


def predicted(name: str, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """One network: how long it took to measure, and predicted against measured at widths that were not seen."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    make, shape = cases(device.type, options.small)[name]
    model, x = make().to(device).eval(), torch.randn(shape, device=device)
    gated = l0.attach(model, (x,))
    start = time.perf_counter()
    latency = l0.Latency.measure(gated, clock=clock)
    took, table, random = time.perf_counter() - start, latency.table, np.random.default_rng(1)
    whole = l0.dense(l0.macs, gated)
    rows: list[dict[str, float]] = []
    while len(rows) < options.checks:
        networks = [model]
        made = []
        for _ in range(min(4, options.checks - len(rows))):
            narrowed(gated, random)
            networks.append(l0.compact(gated, verify=False))
            time_, macs = (float(cost(gated, kept=True)) for cost in (latency, l0.macs))
            made.append({"predicted": time_ / table.seconds, "macs": macs / whole})
        measured = shares(networks, x, options.rounds, clock)
        rows += [row | {"measured": share} for row, share in zip(made, measured, strict=True)]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    by_macs = [abs(row["macs"] / row["measured"] - 1) for row in rows]
    return {
        "network": name, "batch": shape[0], "dense_s": table.seconds, "took_s": took, "networks": table.networks,
        "factor": table.factor, "median_error": statistics.median(errors), "worst_error": max(errors),
        "within_5_percent": sum(e <= 0.05 for e in errors) / len(errors),
        "median_error_of_macs": statistics.median(by_macs), "rows": rows,
    }  # fmt: skip


def trained(
    dataset: data.Dataset, bound: dict[str, float], seed: int, options: argparse.Namespace, table: Table, clock: Clock
) -> dict[str, Any]:
    """One run of the loop: its error, and the network."""
    device, batch = torch.device(options.device), 64
    torch.manual_seed(seed)
    model = lenet5().to(device)
    x, y = dataset.train_x[: options.images], dataset.train_y[: options.images]
    gated = l0.attach(model, (data.scaled(x[:1], (0.1307,), (0.3081,)),))
    per_epoch = len(x) // batch
    at_most = {l0.Latency(table, clock): bound["at_most"]} if "at_most" in bound else None
    budget = l0.Budget(gated, at_most, macs=bound.get("macs"), steps=options.epochs * per_epoch)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-3))
    budget.drive(optimizer)
    gated.train()
    for _ in range(options.epochs):
        for some in torch.randperm(len(x), device=device)[: per_epoch * batch].split(batch):
            loss = F.cross_entropy(gated(data.scaled(x[some], (0.1307,), (0.3081,))), y[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    small = budget.finish().eval()
    with torch.no_grad():
        wrong = small(data.scaled(dataset.test_x, (0.1307,), (0.3081,))).argmax(1) != dataset.test_y
    macs = float(l0.macs(gated, kept=True)) / l0.dense(l0.macs, gated)
    return {"seed": seed, "error": 100 * float(wrong.float().mean()), "macs": macs, "small": small, "gated": gated}


def compared(options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """A budget of time against budgets of MACs."""
    device = torch.device(options.device)
    dataset = data.load("mnist5k", device=device)
    _, shape = cases(device.type, options.small)["lenet5"]
    x = torch.randn(shape, device=device)
    gated = l0.attach(lenet5().to(device), (x[:1],))
    latency = l0.Latency.measure(gated, batch=shape[0], clock=clock)
    # A table of its own for each: a budget puts it right where its network arrives.
    bounds = [("latency", share, {"at_most": share}) for share in options.latency]
    bounds += [("macs", share, {"macs": share}) for share in options.macs]
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        runs = [
            {"cost": cost, "at_most": share, **trained(dataset, bound, seed, options, latency.table, clock)}
            for cost, share, bound in bounds
        ]
        for run in runs:  # each beside the dense network
            small, owner = run.pop("small"), run.pop("gated")
            (run["measured"],) = shares([lenet5().to(device), small], x, options.rounds, clock)
            run["predicted"] = float(latency(owner, kept=True)) / latency.table.seconds
            print(
                f"{run['cost']:<8} {run['at_most']:<5} seed {seed}: error {run['error']:.2f} %, "
                f"MACs {run['macs']:.3f}, time predicted {run['predicted']:.3f}, measured {run['measured']:.3f}",
                flush=True,
            )
        rows += runs
    return {"rows": rows, "at_equal_error": equal_error(rows)}


def equal_error(rows: list[dict[str, Any]]) -> list[dict[str, float | None]]:
    """Of each budget of time its mean error and time, and the time of MACs at that error; none beyond their line."""

    def means(cost: str) -> list[tuple[float, float]]:
        bounds = sorted({row["at_most"] for row in rows if row["cost"] == cost})
        runs = [[row for row in rows if (row["cost"], row["at_most"]) == (cost, bound)] for bound in bounds]
        return [tuple(statistics.mean(row[key] for row in run) for key in ("error", "measured")) for run in runs]  # type: ignore[misc]

    line = sorted(means("macs"))
    out: list[dict[str, float | None]] = []
    for error, seconds in means("latency"):
        inside = len(line) > 1 and line[0][0] <= error <= line[-1][0]
        at = float(np.interp(error, *zip(*line, strict=True))) if inside else None
        out.append({"error": error, "latency_budget": seconds, "macs_budget": at})
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=["predict", "train"], choices=["predict", "train"])
    parser.add_argument("--networks", nargs="+", default=["lenet5", "resnet", "vit"])
    parser.add_argument("--checks", type=int, default=16, help="networks that are predicted and timed")
    parser.add_argument("--rounds", type=int, default=31, help="timings of each")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--latency", type=float, nargs="+", default=[0.5, 0.3])
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5, 0.25, 0.12])
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the script")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args(arguments)
    clock, found = CLOCKS[options.clock], dict[str, Any]()
    if options.clock == "thread":
        torch.set_num_threads(1)
    if "predict" in options.only:
        found["predict"] = []
        for name in options.networks:
            row = predicted(name, options, clock)
            found["predict"].append(row)
            print(
                f"{name:<7} batch {row['batch']}: dense {1e3 * row['dense_s']:.2f} ms, {row['networks']} networks "
                f"timed in {row['took_s']:.0f} s; off by {100 * row['median_error']:.1f} % (median), "
                f"{100 * row['worst_error']:.1f} % (worst), MACs by {100 * row['median_error_of_macs']:.0f} %",
                flush=True,
            )
    if "train" in options.only:
        found["train"] = compared(options, clock)
        for row in found["train"]["at_equal_error"]:
            at = "beyond their line" if row["macs_budget"] is None else f"{row['macs_budget']:.3f}"
            print(f"at {row['error']:.2f} % error: time {row['latency_budget']:.3f} under a budget of time, MACs: {at}")
    if options.json:
        write(options.json, "latency_budget", found, vars(options), options.device)


if __name__ == "__main__":
    main()
