"""Is a budget any good in a loop of one's own? A ResNet with batch norm, one plain loop, equal epochs for everybody.

    python benchmarks/own_loop.py [--device cuda] [--epochs 8] [--seeds 0 1 2] [--at-most 0.5 0.3 0.15] [--json FILE]
    python benchmarks/own_loop.py --show FILES... [--json FILE]    # the table of stored runs; kept together in one file

At each share of the MACs, all in the same number of epochs:
  budget      `l0.Budget` from the first step on
  continued   the dense network for half of the epochs, then `l0.Budget` in the other half
  magnitude   the dense network for half of the epochs, then Torch-Pruning's group magnitude, then the other half
  narrow      the same network, uniformly narrower
and the dense network itself. SGD with momentum and a cosine schedule for each phase, flips and shifts. Errors are of
the last epoch, on test images that nothing was chosen by; seconds are of training; latency is relative to the dense
network, interleaved, in evaluation. `--data cifar100` or fewer `--images` are for choosing settings, so that the
numbers that are reported are of other data. Torch-Pruning is the package `torch-pruning`.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import write
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0
from ellzero.experiments import data
from ellzero.out.latency.meter import interleaved

BATCH, LR, DROP = 128, 0.1, 0.05
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)  # of CIFAR-10, and near enough for CIFAR-100
METHODS = ("dense", "budget", "continued", "magnitude", "narrow")


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.short(x))


class ResNet(nn.Module):
    """Three stages of blocks, as a user would write it: no gate in sight."""

    def __init__(self, classes: int, width: float = 32, blocks: int = 2) -> None:
        super().__init__()
        widths = [max(1, round(width * 2**stage)) for stage in range(3)]
        self.first = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        layers, before = [], widths[0]
        for stage, channels in enumerate(widths):
            for block in range(blocks):
                layers.append(Block(before, channels, 2 if stage and not block else 1))
                before = channels
        self.blocks = nn.Sequential(*layers)
        self.last = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)).mean((2, 3)))


def macs(network: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(x[:1])
    return counter.get_total_flops() / 2


class Loop:
    """The user's own: it knows nothing of gates."""

    def __init__(self, dataset: data.Dataset, options: argparse.Namespace, seed: int, device: torch.device) -> None:
        images, epochs = options.images, options.epochs
        self.device, self.epochs, self.seconds = device, epochs, 0.0
        self.x, self.y = dataset.train_x[:images], dataset.train_y[:images]
        self.test_x, self.test_y = dataset.test_x[: options.test_images], dataset.test_y[: options.test_images]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.steps = len(self.x) // BATCH  # of an epoch

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True)

    def train(self, network: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
        total = epochs * self.steps
        warm = max(1, total // 10)
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: min(1, (k + 1) / warm) * (1 + math.cos(math.pi * k / total)) / 2
        )
        network.train()
        self._wait()
        start = time.perf_counter()
        for _ in range(epochs):
            order = torch.randperm(len(self.x), generator=self.generator, device=self.device)
            for batch in order[: self.steps * BATCH].split(BATCH):
                loss = F.cross_entropy(network(self._augmented(self.x[batch])), self.y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rates.step()
        self._wait()
        self.seconds += time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _augmented(self, x: Tensor) -> Tensor:
        flipped = torch.rand(len(x), 1, 1, 1, generator=self.generator, device=self.device) < 0.5
        x = torch.where(flipped, x.flip(3), x)
        down, right = torch.randint(-4, 5, (2,), generator=self.generator, device=self.device).tolist()
        return data.scaled(torch.roll(x, (down, right), (2, 3)), MEAN, STD)

    @torch.no_grad()
    def error(self, network: nn.Module) -> float:
        network.eval()
        wrong = 0
        for x, y in zip(self.test_x.split(1000), self.test_y.split(1000), strict=True):
            wrong += int((network(data.scaled(x, MEAN, STD)).argmax(1) != y).sum())
        return 100 * wrong / len(self.test_y)


def plain(loop: Loop, network: nn.Module, epochs: int) -> nn.Module:
    decay = [{"params": list(network.parameters()), "weight_decay": 5e-4}]
    loop.train(network, loop.optimizer(decay), epochs)
    return network


def budgeted(
    loop: Loop, network: nn.Module, epochs: int, at_most: float, streams: bool, drop: float, **options: Any
) -> nn.Module:
    gate = partial(l0.HardConcreteGate, drop_rate=drop)
    where = l0.shrinkable(streams=streams)
    gated = l0.attach(network, (data.scaled(loop.x[:2], MEAN, STD),), gate=gate, where=where)
    budget = l0.Budget(gated, macs=at_most, steps=epochs * loop.steps, **options)
    optimizer = loop.optimizer(gated.param_groups(lr=LR, weight_decay=5e-4))
    budget.drive(optimizer)
    loop.train(gated, optimizer, epochs)
    return budget.finish()


def magnitude(loop: Loop, network: nn.Module, at_most: float) -> nn.Module:
    """Torch-Pruning, as its README has it: group magnitude, global, in small steps until the MACs fit."""
    import torch_pruning as tp

    x = data.scaled(loop.x[:1], MEAN, STD)
    whole = macs(network, x)
    pruner = tp.pruner.BasePruner(
        network, x, importance=tp.importance.GroupMagnitudeImportance(p=2), global_pruning=True, iterative_steps=400,
        pruning_ratio=1.0, max_pruning_ratio=0.98, ignored_layers=[network.last],
    )  # fmt: skip
    while macs(network, x) > at_most * whole:
        pruner.step()
    return network


def narrowed(make: Callable[[float], nn.Module], at_most: float, x: Tensor) -> nn.Module:
    """The widest of the uniformly narrower networks that fits."""
    whole = macs(make(1.0), x)
    shares = [k / 64 for k in range(1, 65)]
    fitting = bisect.bisect_right(shares, at_most * whole, key=lambda share: macs(make(share), x))
    return make(shares[max(0, fitting - 1)])


def run(method: str, at_most: float, loop: Loop, make: Callable[[float], nn.Module], **options: Any) -> nn.Module:
    half = loop.epochs // 2
    x = data.scaled(loop.x[:1], MEAN, STD)
    match method:
        case "budget":
            return budgeted(loop, make(1.0), loop.epochs, at_most, **options)
        case "continued":
            return budgeted(loop, plain(loop, make(1.0), half), loop.epochs - half, at_most, **options)
        case "magnitude":
            return plain(loop, magnitude(loop, plain(loop, make(1.0), half), at_most), loop.epochs - half)
        case "narrow":
            return plain(loop, narrowed(make, at_most, x), loop.epochs)
    return plain(loop, make(1.0), loop.epochs)


def latency(networks: dict[str, nn.Module], x: Tensor, device: torch.device) -> dict[str, float]:
    """Of each, relative to the dense network."""
    with torch.no_grad():
        calls = [partial(network.eval(), x) for network in networks.values()]
        taken = dict(zip(networks, interleaved(calls, device, rounds=15, warm_up=3), strict=True))
    return {
        name: statistics.median(a / b for a, b in zip(seconds, taken["dense"], strict=True))
        for name, seconds in taken.items()
    }


def stored(files: list[Path]) -> list[dict[str, Any]]:
    """Runs as they were written, one by one or together."""
    read = [json.loads(path.read_text()) for path in files]
    return [run for one in read for run in one.get("runs", [one])]


def show(runs: list[dict[str, Any]]) -> str:
    """Mean errors over seeds, in markdown: a row per method, settings and share of the MACs."""
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        o = run["options"]
        settings = [f"{key} {o[key]}" for key in ("learning", "gate_lr") if o[key] is not None]
        settings += [f"drop {o['drop']}"] * (o["drop"] != DROP) + ["streams"] * o["streams"]
        for row in run["rows"]:
            key = (o["data"], f"{o['epochs']:>2}", str(o["width"]), f"{row['at_most']:.2f}", row["method"])
            cells.setdefault((*key, ", ".join(settings)), []).append(row)
    lines = ["| data | epochs | width | MACs at most | method | settings | error % | of each seed | MACs kept % |"]
    lines.append("|---|---:|---:|---:|---|---|---:|---|---:|")
    for key, rows in sorted(cells.items()):
        rows = sorted(rows, key=lambda row: row["seed"])
        kept = 100 * max(row["macs"] for row in rows)
        each = " / ".join(f"{row['error']:.2f}" for row in rows)
        lines.append(
            f"| {' | '.join(key)} | {statistics.mean(row['error'] for row in rows):.2f} | {each} | {kept:.2f} |"
        )
    return "\n".join(lines)


def together(runs: list[dict[str, Any]]) -> str:
    """All runs in one text, a line each."""
    return '{"benchmark": "own_loop", "runs": [\n' + ",\n".join(json.dumps(run) for run in runs) + "\n]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="cifar10", choices=["cifar10", "cifar100"])
    parser.add_argument("--images", type=int, default=50_000, help="to train on")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=32, help="maps of the first stage")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-most", type=float, nargs="+", default=[0.5, 0.3, 0.15])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--learning", type=float, help="share of a budget's steps in which gates learn")
    parser.add_argument("--gate-lr", type=float, help="rate of a budget's gates")
    parser.add_argument("--drop", type=float, default=DROP, help="drop rate that gates start with")
    parser.add_argument("--streams", action="store_true", help="gate residual streams too")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--show", type=Path, nargs="+", help="print stored runs instead")
    options = parser.parse_args()
    if options.show:
        runs = stored(options.show)
        print(show(runs))
        if options.json:
            options.json.write_text(together(runs))
        return
    device = torch.device(options.device)
    dataset = data.load(options.data, device=device)
    named = ("learning", "gate_lr", "streams", "drop")
    chosen = {key: getattr(options, key) for key in named if getattr(options, key) is not None}
    x = data.scaled(dataset.test_x[:128], MEAN, STD)
    rows: list[dict[str, Any]] = []

    def make(share: float) -> nn.Module:
        return ResNet(len(dataset.classes), options.width * share).to(device)

    print(f"{options.data}, {options.images} images, {options.epochs} epochs, torch {torch.__version__}, {device}")
    print(f"{'method':<10} {'at most':>8} {'seed':>4} {'error %':>8} {'MACs %':>7} {'seconds':>8} {'latency':>8}")
    for seed in options.seeds:
        networks: dict[str, nn.Module] = {}
        made: list[dict[str, Any]] = []
        for method in options.methods:
            for at_most in [1.0] if method == "dense" else options.at_most:
                torch.manual_seed(seed)
                loop = Loop(dataset, options, seed, device)
                network = run(method, at_most, loop, make, **chosen)
                share = macs(network, x) / macs(make(1.0), x)
                networks["dense" if method == "dense" else f"{method} {at_most}"] = network
                made.append({"method": method, "at_most": at_most, "seed": seed, "error": loop.error(network)})
                made[-1] |= {"macs": share, "seconds": loop.seconds}
        networks.setdefault("dense", make(1.0))
        times = latency(networks, x, device)
        for row in made:
            row["latency"] = times["dense" if row["method"] == "dense" else f"{row['method']} {row['at_most']}"]
            numbers = f"{row['error']:8.2f} {100 * row['macs']:7.2f} {row['seconds']:8.1f} {row['latency']:8.3f}"
            print(f"{row['method']:<10} {row['at_most']:>8} {seed:>4} {numbers}", flush=True)
        rows += made
        if options.json:
            settings = {key: value for key, value in vars(options).items() if key != "show"}
            write(options.json, "own_loop", {"rows": rows}, settings, options.device)


if __name__ == "__main__":
    main()
