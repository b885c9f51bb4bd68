"""What gates cost in training: the ratio gated/dense of one full Adam step at batch 100, by CPU time.

    python benchmarks/step_overhead.py [--blocks 60] [--steps 40] [--json FILE]
    python benchmarks/step_overhead.py --families [--json FILE]

Dense and gated steps run in interleaved blocks in one process, one thread, and each ratio is the median over pairs of
neighbouring blocks, with the quartiles beside it. "Gated" is everything a user of a constraint does: draw the gates,
run, add the constraint, backward, Adam, `ascend()`. `shrinkable` has gates on hidden units alone (`inputs=False`; its
default on the MLP has the gates of `per_layer`, which are on the inputs too). "Compiled" compiles the loss on both
sides; Adam stays as it is.
"By hand" is the least that such a step can take: written for the MLP alone, with all gates in one tensor and as few
operations as there can be, without modules, checks or names. A goal below it cannot be met on the machine at hand.
`--families` measures other gate families instead, each in the step that a recipe of its own has: its penalty, noise as
its authors draw it, what it does after a step; against the dense step by the same optimizer.
Peak memory is that of live tensors during a step (weights, gradients, moments, activations), counted at every
operation.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import write
from torch import nn

import ellzero as l0
from ellzero.experiments.data import stand_in
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.trainer import Trainer
from ellzero.out.latency.meter import interleaved


class MLP(nn.Sequential):
    """784-300-100-10."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
        )


class LeNet5(nn.Sequential):
    """LeNet-5-Caffe: 20-50-800-500."""

    def __init__(self) -> None:
        convolutions = [
            nn.Conv2d(1, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


Step = Callable[[], None]


def dense_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compiled: bool) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = maybe_compiled(compiled, lambda: F.cross_entropy(model(x), y))

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def gated_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, compiled: bool, where: Any) -> Step:
    gated = l0.attach(model, (x,), where=where).train()
    budget = l0.Constraint(l0.l0_norm, at_most=0.3).bind(gated)
    optimizer = torch.optim.Adam(gated.param_groups(), lr=1e-3)
    loss = maybe_compiled(compiled, lambda: F.cross_entropy(gated(x), y) + budget(gated))

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        budget.ascend()

    return step


def step_by_hand(model: MLP, x: torch.Tensor, y: torch.Tensor, compiled: bool, inputs: bool) -> Step:
    """What `gated_step` does, for the MLP alone; `inputs` says whether its inputs have gates (`per_layer`)."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    behind = layers[0 if inputs else 1 :]
    sizes = [layer.in_features for layer in behind]
    log_alpha = nn.Parameter(torch.full((sum(sizes),), math.log(0.95 / 0.05)))
    share = torch.cat([torch.full((layer.in_features,), float(layer.out_features)) for layer in behind])
    share, multiplier, beta, gamma, zeta = share / share.sum(), torch.zeros(()), 2 / 3, -0.1, 1.1
    optimizer = torch.optim.Adam([{"params": list(model.parameters())}, {"params": [log_alpha]}], lr=1e-3)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.logit(torch.rand(sum(sizes)), 1e-6)
        stretched = torch.rsub(torch.sigmoid((noise + log_alpha) / beta), gamma, alpha=gamma - zeta)
        z = F.hardtanh(stretched, 0.0, 1.0).split_with_sizes(sizes)
        h = F.linear(x.flatten(1), layers[0].weight * z[0] if inputs else layers[0].weight, layers[0].bias)
        h = F.linear(F.relu(h), layers[1].weight * z[-2], layers[1].bias)
        h = F.linear(F.relu(h), layers[2].weight * z[-1], layers[2].bias)
        gap = torch.sigmoid(log_alpha - beta * math.log(-gamma / zeta)) @ share - 0.3
        return F.cross_entropy(h, y) + multiplier * gap, gap.detach()

    run = torch.compile(forward) if compiled else forward

    def step() -> None:
        optimizer.zero_grad()
        loss, gap = run()
        loss.backward()
        optimizer.step()
        multiplier.add_(gap, alpha=1e-4).masked_fill_(gap <= 0, 0.0)

    return step


# Families and their recipes: network and data are ours here, the gates, noise and optimizer theirs.
FAMILIES = {
    "hard concrete": "louizos-mlp",
    "dropout": "dropout-mlp",
    "generalized dropout": "gd-mlp",
    "SBP": "sbp-mlp",
    "group lasso": "gl-mlp",
    "Sparse VD": "sparse-vd-mlp",
    "BC-GNJ": "bc-gnj-mlp",
    "BC-GHS": "bc-ghs-mlp",
}


def family_step(network: str, name: str, dense: bool) -> Step:
    """A step of the recipe's own trainer, one run of it, or of the same without gates."""
    recipe = get(FAMILIES[name]).override(
        network=network, data="mnist5k", batch=100, ema=None, drop_rates={"*": 0.5}, weights_first=0.0,
        most_noise=None, threshold=None, compile=False, penalty=1.0,
    )  # fmt: skip
    if dense:
        plain = {"optimizer": recipe.optimizer, "lr": recipe.lr, "batch": 100, "scaling": recipe.scaling}
        recipe = Recipe.from_dict(
            {"name": "dense", "network": network, "data": "mnist5k", "placement": None, "compile": False, **plain}
        )
    trainer = Trainer([recipe], stand_in("mnist5k", images=100))
    trainer.runs.train()
    index, noise = (drawn[0] for drawn in trainer.supply.epoch(0))

    def step() -> None:
        trainer.take(index, noise)

    return step


def families(blocks: int, steps: int) -> list[dict[str, Any]]:
    """The rows of `--families`, printed as they come."""
    rows = []
    print(f"{'network':9} {'family':20} {'dense ms':>9} {'gated/dense':>12} {'quartiles':>14}")
    for network, title, share in (("lenet300", "MLP", 1), ("lenet5", "LeNet-5", 4)):
        for name in FAMILIES:
            pair = family_step(network, name, dense=True), family_step(network, name, dense=False)
            ms, (middle, low, high) = ratios(pair, blocks, max(1, steps // share))
            print(f"{title:9} {name:20} {ms:9.3f} {middle:12.3f} {low:6.3f} – {high:5.3f}", flush=True)
            row = {"network": title, "family": name, "dense_ms": ms, "ratio": middle, "quartiles": [low, high]}
            rows.append(row)
    return rows


def hidden() -> Any:
    """`shrinkable` without gates on the inputs, which `per_layer` has."""
    return l0.shrinkable(inputs=False)


WHERE = {"shrinkable": hidden, "per_layer": l0.per_layer}  # by the names in the stored rows


def maybe_compiled(compiled: bool, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return torch.compile(loss) if compiled else loss


def ratios(steps: Sequence[Step], blocks: int, calls: int) -> Any:
    """The first step, the dense one, in milliseconds, and median and quartiles of each other/dense over interleaved
    blocks.
    """
    gc.collect()
    gc.disable()
    times = interleaved(steps, torch.device("cpu"), rounds=blocks, warm_up=2, calls=calls, clock=time.process_time)
    gc.enable()
    found = []
    for other in times[1:]:
        low, middle, high = statistics.quantiles([g / d for d, g in zip(times[0], other, strict=True)], n=4)
        found.append((middle, low, high))
    return 1e3 * statistics.median(times[0]), *found


def _named(middle: float, low: float, high: float) -> dict[str, Any]:
    return {"by_hand": middle, "by_hand_quartiles": [low, high]}


def peak_bytes(make: Callable[[], Step]) -> int:
    """The most memory that tensors take during a step: what stays between steps, and the peak of what the step
    allocates.
    """
    step = make()
    for _ in range(3):
        step()
    gc.collect()
    tensors = (t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))
    resident = sum(t.untyped_storage().nbytes() for t in tensors if not t.is_meta)  # those take none
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return resident + peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60, help="interleaved pairs of blocks")
    parser.add_argument(
        "--steps", type=int, default=40, help="steps in a block of the MLP (a quarter of it for LeNet-5)"
    )
    parser.add_argument("--families", action="store_true", help="other gate families instead")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if options.families:
        found = families(options.blocks, options.steps)
        if options.json:
            write(options.json, "step_overhead", {"families": found}, vars(options))
        return
    x, y = torch.randn(100, 1, 28, 28), torch.randint(10, (100,))
    # First, while nothing else is in memory.
    dense = peak_bytes(partial(dense_step, LeNet5(), x, y, False))
    gc.collect()
    gated = peak_bytes(partial(gated_step, LeNet5(), x, y, False, l0.per_layer()))
    rows = []
    cases = [
        ("MLP", MLP, "shrinkable", False, 1.20),
        ("MLP", MLP, "per_layer", False, 1.32),
        ("MLP", MLP, "shrinkable", True, 1.10),
        ("MLP", MLP, "per_layer", True, 1.10),
        ("LeNet-5", LeNet5, "shrinkable", False, 1.03),
        ("LeNet-5", LeNet5, "per_layer", False, 1.03),
    ]
    print(f"torch {torch.__version__}, one thread of {platform.machine()}, batch 100, Adam, l0_norm constraint")
    print(
        f"{'network':9} {'placement':11} {'mode':9} {'dense ms':>9} {'gated/dense':>12} {'quartiles':>14} {'goal':>6} "
        f"{'by hand':>8}"
    )
    for name, make, where, compiled, goal in cases:
        steps = options.steps if name == "MLP" else max(1, options.steps // 4)
        three = [dense_step(make(), x, y, compiled), gated_step(make(), x, y, compiled, WHERE[where]())]
        if make is MLP:
            three.append(step_by_hand(MLP(), x, y, compiled, inputs=where == "per_layer"))
        ms, (middle, low, high), *least = ratios(three, options.blocks, steps)
        mode = "compiled" if compiled else "eager"
        print(
            f"{name:9} {where:11} {mode:9} {ms:9.3f} {middle:12.3f} {low:6.3f} – {high:5.3f} {goal:6.2f} "
            + "".join(f"{by_hand:8.3f}" for by_hand, *_ in least),
            flush=True,
        )
        rows.append(
            {
                "network": name,
                "placement": where,
                "mode": mode,
                "dense_ms": ms,
                "ratio": middle,
                "quartiles": [low, high],
                **{key: value for by_hand in least for key, value in _named(*by_hand).items()},
            }
        )
    print(
        f"peak memory of a step, LeNet-5, per_layer: {gated / dense:.3f} of dense ({dense / 2**20:.1f} MiB), goal 1.10"
    )
    if options.json:
        write(options.json, "step_overhead", {"rows": rows, "peak_memory_ratio": gated / dense}, vars(options))


if __name__ == "__main__":
    main()
