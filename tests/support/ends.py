"""Runs that are compared to the bit: what they leave, and recipes that have much to leave."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder

STEPS = 5  # of an epoch


GATED = Recipe(
    name="killed", network="lenet300", data="mnist5k", placement="per_layer", drop_rates={"*": 0.3}, cost="params",
    at_most=0.3, on="kept", dual="nupi", dual_lr=0.1, kp=2.0, nu=0.5, target_warmup=0.5, lr=1e-3, gate_lr=0.03,
    batch=20, epochs=5, ema=0.9, finalize=True, finetune_epochs=2,
)  # fmt: skip


WIDE = Recipe(
    name="wide", network="wrn-10-1", data="cifar10", dropout=0.3, drop_rates={"*": 0.3}, penalty=1e-4, optimizer="sgd",
    lr=0.05, gate_lr=0.5, nesterov=True, milestones=(1,), decay=0.2, l2=5e-4, batch=16, epochs=2, ema=0.8,
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
    assert [name for name in differences(folder, other) if not free.match(name)] == []
    assert without_seconds(folder.history()) == without_seconds(other.history())
    assert folder.results() is not None
    assert without_seconds(folder.results()) == without_seconds(other.results())
