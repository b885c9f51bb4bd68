"""Small runs on a few images of MNIST, and when two runs are the same to rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

import ellzero as l0
from ellzero.experiments.data import Dataset, load
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.trainer import Trainer
from support.narrow import NARROW

CPU = torch.device("cpu")


TRAIN = 250


BATCH = 50


@cache
def data() -> Dataset:
    whole = load("mnist5k")
    train_x, train_y = whole.train_x[:TRAIN], whole.train_y[:TRAIN]
    return replace(whole, train_x=train_x, train_y=train_y, test_x=whole.test_x[:100], test_y=whole.test_y[:100])


def recipe(**changes: Any) -> Recipe:
    basis: dict[str, Any] = {
        "name": "tiny", "network": NARROW.name, "data": "mnist5k", "batch": BATCH, "epochs": 1,
        "lr": 1e-3, "gate_lr": 1e-2,
    }  # fmt: skip
    if changes.get("placement", "") is not None and "at_most" not in changes:
        basis["penalty"] = 0.1
    return Recipe(**basis | changes)


def trained(*recipes: Recipe) -> Trainer:
    trainer = Trainer(recipes, data())
    for _ in range(recipes[0].epochs):
        list(train_epoch(trainer))
    return trainer


def same(trainer: Trainer, expected: dict[str, Tensor], run: int = 0, atol: float = 2e-5) -> None:
    """Equal to rounding, as far as Adam lets it be: it divides by the gradient's size, so a gradient that is nothing
    but rounding becomes a step. What is allowed is a fiftieth of a step.
    """
    values = trainer.runs.values()
    assert {n.removeprefix("network.") for n in values} == set(expected)
    for name, value in values.items():
        mine = value.detach() if trainer.runs.size == 1 else value[run].detach()
        torch.testing.assert_close(mine, expected[name.removeprefix("network.")], rtol=1e-5, atol=atol, msg=name)


def set_open(gated: l0.Gated, closed: dict[str, list[int]]) -> None:
    """Closes these gates, and opens all others."""
    with torch.no_grad():
        for name, gate in gated.named_gates():
            shut = torch.zeros(gate.shape, dtype=torch.bool)
            shut[closed.get(name, [])] = True
            gate.log_alpha.copy_(torch.where(shut, -10.0, 10.0))  # type: ignore[operator]


def by_name(trainer: Trainer, run: int | None = None) -> dict[str, Tensor]:
    values = trainer.runs.values()
    return {n.removeprefix("network."): (v if run is None else v[run]).detach().clone() for n, v in values.items()}
