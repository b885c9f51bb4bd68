"""Runs that are compared to the bit, or in float64: recipes, what a run leaves, runs that shrink, settle and stop."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ellzero.experiments.data import Dataset, stand_in
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, saver
from ellzero.experiments.train.loop import Stopped, train, train_epoch
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.gated.module import Gated
from ellzero.out.latency.cost import Latency
from support.narrow import NARROW
from support.noise import quartered

STEPS = 5  # of an epoch


GATED = Recipe(
    name="killed", network=NARROW.name, data="mnist5k", placement="per_layer", drop_rates={"*": 0.3}, cost="params",
    at_most=0.3, on="kept", dual="nupi", dual_lr=0.1, kp=2.0, nu=0.5, target_warmup=0.5, lr=1e-3, gate_lr=0.03,
    batch=20, epochs=5, ema=0.9, finalize=True, finetune_epochs=2,
)  # fmt: skip


WIDE = Recipe(
    name="wide", network="wrn-10-1", data="cifar10", dropout=0.3, drop_rates={"*": 0.3}, penalty=1e-4, optimizer="sgd",
    lr=0.05, gate_lr=0.5, nesterov=True, milestones=(1,), decay=0.2, l2=5e-4, batch=8, epochs=2, ema=0.8,
    augment=True, finetune_epochs=1, recalibrate=True,
)  # fmt: skip


def newest(folder: Folder) -> Path:
    return folder.checkpoints / f"step-{checkpoint.steps(folder.checkpoints)[-1]:09d}.safetensors"


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{path}.{key}")
    else:
        yield path, value


def bits(value: Any) -> Any:
    return (value.dtype, value.shape, value.numpy().tobytes()) if isinstance(value, Tensor) else value


def without_checksum(line: str) -> dict[str, Any]:
    """A record of a history as lines of before have it, so that a test can change it."""
    record: dict[str, Any] = json.loads(line)
    record.pop("crc32", None)
    return record


def differences(folder: Folder, other: Folder) -> list[str]:
    """Names of what is not the same in the newest checkpoints, to the bit."""
    ours, theirs = (dict(leaves(checkpoint.load(f.checkpoints).state)) for f in (folder, other))
    assert any(isinstance(value, Tensor) for value in ours.values())
    return [name for name in {**ours, **theirs} if bits(ours.get(name)) != bits(theirs.get(name))]


def assert_same_end(folder: Folder, other: Folder, *, unseeded: bool = False) -> None:
    """Everything that a finished run leaves, but for the clock. What differs is named.

    Args:
        folder: one of them.
        other: the other.
        unseeded: whether Python's and numpy's generators, which no run uses, began anywhere.
    """
    assert newest(folder).name == newest(other).name
    free = re.compile(r"\.own\.\d+\.random\.(python|numpy)\." if unseeded else r"$.")
    unlike = [name for name in differences(folder, other) if not free.match(name)]
    assert not unlike, unlike
    assert without_seconds(folder.history()) == without_seconds(other.history())
    assert folder.results() is not None
    assert without_seconds(folder.results()) == without_seconds(other.results())


@contextmanager
def time_by_weights() -> Iterator[Callable[[nn.Module, Tensor], float]]:
    """Times are measured by a clock that goes on by every layer's entries, whatever they take; the block is given what
    says how long a network takes by it.
    """
    now, plain = [0.0], Latency.measure

    def tick(layer: nn.Module, *_: object) -> None:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            now[0] += (100 + layer.weight.numel()) / 2**20  # exactly

    def seconds(network: nn.Module, x: Tensor) -> float:
        began = now[0]
        network(x)
        return now[0] - began

    hook = register_module_forward_hook(tick)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Latency, "measure", partial(plain, clock=lambda: now[0]))
        try:
            yield seconds
        finally:
            hook.remove()


@cache
def images(name: str, device: str = "cpu") -> Dataset:
    return quartered(16, device) if name == "cifar10" else stand_in(name, images=16, device=device)


def recipe(network: str, **changes: Any) -> Recipe:
    basis: dict[str, Any] = {
        "name": "small", "network": network, "data": "cifar10" if network.startswith("wrn") else "mnist5k",
        "drop_rates": {"*": 0.1}, "batch": 8, "epochs": 3, "lr": 1e-3, "gate_lr": 1e-2,
        "shrink_at": (1,), "shrink_checks": 1, "shrink_multiple": 1, "shrink_gain": 0.0,
    }  # fmt: skip
    if "at_most" not in changes:
        basis["penalty"] = 0.1
    return Recipe(**basis | changes)


def gated_of(trainer: Trainer) -> Gated:
    return cast(Gated, trainer.runs.template.network)


def close(gated: Gated, closed: dict[str, list[int]]) -> None:
    for name, gate in gated.named_gates():
        mask = torch.zeros(gate.shape, dtype=torch.bool, device=next(gate.parameters()).device)
        mask[closed.get(name, [])] = True
        gate.close_(mask)


def doubled(r: Recipe, closed: dict[str, list[int]]) -> Trainer:
    """A trainer that computes in float64, with some gates closed from the beginning."""
    trainer = in_float64(Trainer([r], images(r.data)))
    close(gated_of(trainer), closed)
    return trainer


def in_float64(trainer: Trainer) -> Trainer:
    batch = trainer.supply.batch

    def exact(index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = batch(index)
        return x.double(), y

    trainer.supply.batch = exact  # type: ignore[method-assign]
    trainer.runs.double()
    average = trainer.average
    average.tensors = {name: value.double() for name, value in average.tensors.items()}
    dual = trainer.lagrangian
    dual.prices, dual.member, dual.goal = dual.prices.double(), dual.member.double(), dual.goal.double()
    dual.multiplier = dual.multiplier.double()
    dual.memory = {name: value.double() for name, value in dual.memory.items()}
    trainer.step.clock = trainer.step.clock.double()
    trainer.prepare()  # what a compiled step must know beforehand is known for a dtype
    return trainer


def losses(trainer: Trainer, epochs: int) -> list[float]:
    return [float(loss) for _ in range(epochs) for loss in train_epoch(trainer)]


WRN = {"blocks.0.conv1": [0, 3, 4, 5, 11], "blocks.1.conv1": [*range(20)], "blocks.2.conv1": [63]}


WRN_UNITS = {"blocks.0.conv1": 5, "blocks.1.conv1": 20, "blocks.2.conv1": 1}


MAPS = {"conv1": [0, 1, 2, 7], "conv2": [4, 5, 49]}


# The gates of a map's positions are closed as well: where the map is gone, so are they.
POSITIONS = {**MAPS, "fc1": [16 * u + k for u in (4, 5, 49) for k in range(16)] + [3], "fc2": [*range(100, 400)]}


SGD = {"optimizer": "sgd", "lr": 0.05, "gate_lr": 1.0}


RUNS: dict[str, tuple[Recipe, dict[str, list[int]], dict[str, int]]] = {
    "wide, nesterov, eq. 17, average": (
        recipe("wrn-10-1", placement="blocks", nesterov=True, l2=5e-3, l2_gated_factor=1.5, ema=0.9, **SGD),
        WRN, WRN_UNITS,
    ),
    "wide, adam, constraints": (
        recipe("wrn-10-1", at_most={"blocks.*": 0.5}, dual="ascent", dual_lr=0.1), WRN, WRN_UNITS
    ),
    "wide, sgd, eq. 17 without gates, kept macs": (
        recipe("wrn-10-1", placement="blocks", l2=5e-3, detach_l2=True, cost="macs", at_most=0.3, on="kept", **SGD),
        WRN, WRN_UNITS,
    ),
    "per layer, adam, average": (
        recipe("lenet5", placement="per_layer", ema=0.9, samples=2),
        POSITIONS, {"conv1": 4, "conv2": 3, "fc1": 300},
    ),
    "shrinkable, sgd, params": (
        recipe("lenet5", cost="params", at_most=0.3, **SGD),
        {**MAPS, "fc1": [*range(99)]}, {"conv1": 4, "conv2": 3, "fc1": 99},
    ),
    "perceptron, extra-gradient": (
        recipe("lenet300", placement="per_layer", at_most=0.5, dual="nupi", kp=0.5, dual_lr=0.1, extra_gradient=True),
        {"fc1": [0, 500], "fc2": [*range(0, 300, 2)], "fc3": [7]}, {"fc1": 150, "fc2": 1},
    ),
}  # fmt: skip


def begun(r: Recipe, path: Path) -> Folder:
    """A run before its first step, with gates in all states."""
    folder = Folder.create(path, [r])
    trainer = Trainer([r], images(r.data))
    for _, gate in gated_of(trainer).named_gates():
        n = gate.shape.numel()
        with torch.no_grad():
            gate.log_alpha.copy_(torch.tensor([7 * (5 * k % n) / n - 4 for k in range(n)]))  # type: ignore[operator]
    saver.save(trainer, folder)
    return folder


def interrupted(folder: Folder, steps: int, whole: Trainer) -> Trainer:
    """The run of a folder, stopped after so many steps and taken up again: to the bit the one that was not."""
    with pytest.raises(Stopped):
        train(folder.recipes, images("cifar10"), folder, watchers=[Stop(steps)])
    again = train(folder.recipes, images("cifar10"), folder)
    ours, theirs = dict(leaves(saver.state(again))), dict(leaves(saver.state(whole)))
    free = {name for name in ours if ".random." in name or name == ".seconds"}
    assert [n for n in {**ours, **theirs} if n not in free and bits(ours.get(n)) != bits(theirs.get(n))] == []
    assert without_seconds(again.history) == without_seconds(whole.history) == without_seconds(folder.history())
    assert without_seconds(folder.results()) == without_seconds(evaluation.results(whole))
    return again


class Stop(AbstractWatcher):
    """Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None:
        pass

    def step(self, done: int) -> None:
        if done == self.steps:
            signal.raise_signal(signal.SIGINT)

    def note(self, records: list[dict[str, Any]]) -> None:
        pass

    def end(self) -> None:
        pass


SETTLING = recipe(
    "wrn-10-1", placement="blocks", penalty=None, cost="l0_norm", at_most={f"blocks.{k}.conv1": 0.3 for k in range(3)},
    dual="ascent", dual_lr=1.0, gate_lr=1.0, epochs=5, shrink_at=(), settle_at=2, shrink_multiple=4, l2=5e-4,
    l2_gated_factor=0.5, optimizer="sgd", lr=0.05, nesterov=True, milestones=(4,), decay=0.1, augment=True, ema=0.5,
    recalibrate=True,
)  # fmt: skip
