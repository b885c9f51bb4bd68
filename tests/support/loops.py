"""A user's own loop under a budget, whose noise is the same in each step, however often it is stopped and taken up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ellzero as l0


@dataclass(frozen=True)
class Loop:
    """Gates, the budget that drives an optimizer over them, and the loss of a step of that number."""

    gated: l0.Gated
    budget: l0.Budget
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)  # the same noise, whoever draws it
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.step()

    def state(self) -> list[dict[str, Any]]:
        return copy.deepcopy([part.state_dict() for part in (self.budget, self.gated, self.optimizer)])

    def take_up(self, state: list[dict[str, Any]]) -> None:
        """Goes on from the state of another loop, in the order in which a user loads: the budget first."""
        for part, its in zip((self.budget, self.gated, self.optimizer), state, strict=True):
            part.load_state_dict(its)


def driven(gated: l0.Gated, optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], **options: Any) -> Loop:
    """A loop before its first step, under `l0.Budget(gated, **options)`."""
    budget = l0.Budget(gated, **options)
    budget.drive(optimizer)
    return Loop(gated, budget, optimizer, loss)
