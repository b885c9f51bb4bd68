"""Fits in Lightning, as a user writes them, and the plain loop that they must be.

Importing Lightning takes ten seconds: tests import this file when they run, not when they are collected.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ellzero as l0
from ellzero.integrations.lightning import BudgetCallback

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()
EPOCHS = 20  # of two batches


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))


@functools.cache  # tracing takes half a second
def traced() -> l0.Gated:
    return l0.attach(mlp(), X[:2])


class Classifier(lightning.LightningModule):
    """As a user writes one, but that it seeds the noise of every batch."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.net = copy.deepcopy(traced()) if network is None else network

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        torch.manual_seed(100 * self.global_step + index)
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("error", (self.net(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(sgd, EPOCHS)}


class Notes(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[dict[str, float]] = []

    name, version = "notes", 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.append(metrics)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=32)


def callback(**options: Any) -> BudgetCallback:
    return BudgetCallback(X[:2], **{"network": "net", "macs": 0.4, "learning": 0.5, **options})


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "log_every_n_steps": 1}
    keeps = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    where = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": keeps}
    return lightning.Trainer(callbacks=list(callbacks), **{**quiet, **where, **options})


def fitted(module: Any = None, *others: Any, options: dict[str, Any] | None = None, **budget: Any) -> BudgetCallback:
    ours = callback(**budget)
    trainer(ours, *others, **(options or {})).fit(Classifier() if module is None else module, loader())
    return ours


def by_hand(accumulate: int = 1, clip: float | None = None, autocast: bool = False) -> l0.Budget:
    gated = copy.deepcopy(traced())
    budget = l0.Budget(gated, macs=0.4, learning=0.5, steps=EPOCHS * 2 // accumulate)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    budget.drive(optimizer)
    gated.train()
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader()):
            torch.manual_seed(100 * budget.done + index)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(gated(x), y) / accumulate
            loss.backward()
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(gated.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return budget


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def share(small: nn.Module) -> float:
    return sum(p.numel() for p in small.parameters() if p.ndim > 1) / (6 * 16 + 16 * 12 + 12 * 2)
