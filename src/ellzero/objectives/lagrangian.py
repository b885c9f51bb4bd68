"""The Lagrangian as arithmetic on small tensors: prices and multipliers on costs, and how multipliers move.

A run's objective is its loss plus Σ_p price_p·cost_p, plus Σ_g λ_g·(Σ_p member_gp·cost_p − ε_g): Louizos et al., eq. 9,
and Gallego-Posada et al., eq. 6, in one form, for a stack of runs; `Constraint` is the same in a loop of one's own.
Costs are fractions of a dense cost. This file knows no networks, gates, recipes or data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from ellzero.objectives.duals import AbstractDual, AbstractWarmup


@final
class Lagrangian:
    """Prices, constraints and multipliers of a stack of runs, which share every operation.

    Args:
        prices: on the parts of the cost vector, (runs, parts).
        member: what each part is of each constraint, (runs, constraints, parts).
        goal: ε, (runs, constraints); 1 where a run has fewer constraints than others: that one always holds.
        dual: how the multipliers move.
        warmup: how the targets come down to `goal`; at once if None.
        rising: which prices rise from zero, (parts,), after how many steps they begin to, and in how many they do.
        begins: after how many steps targets begin to come down.

    Attributes:
        multiplier: λ, (runs, constraints).
        memory: what the dual optimizer remembers, by name, in the same shape.

    Example:
        >>> from ellzero.objectives.duals import GradientAscent
        >>> one, half = torch.ones(1, 2), torch.tensor([[[0.5, 0.5]]])
        >>> run = Lagrangian(one, half, torch.tensor([[0.25]]), GradientAscent(), None, (one > 0, 0, 0), begins=0)
        >>> run.gaps(torch.tensor([[0.5, 1.0]]), torch.tensor(0.0))
        tensor([[0.5000]])
    """

    def __init__(
        self,
        prices: Tensor,
        member: Tensor,
        goal: Tensor,
        dual: AbstractDual,
        warmup: AbstractWarmup | None,
        rising: tuple[Tensor, float, float],
        begins: int,
    ) -> None:
        self.rising = rising if sum(rising[1:]) > 0 else None
        self.prices, self.member, self.goal, self.dual, self.warmup = prices, member, goal, dual, warmup
        self.begins = begins
        self.multiplier = torch.zeros_like(goal)
        self.memory = {name: torch.zeros_like(goal) for name in dual.memory}

    def gaps(self, cost: Tensor, clock: Tensor) -> Tensor:
        """By how much every constraint is violated (eq. 5), of costs (runs, parts): (runs, constraints)."""
        return (self.member * cost.unsqueeze(-2)).sum(-1) - self.targets_at(clock)

    def __call__(self, cost: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the loss of every run, and the gaps."""
        seen = self.gaps(cost, clock)
        return (self.prices_at(clock) * cost).sum(-1) + (self.multiplier * seen).sum(-1), seen

    def prices_at(self, clock: Tensor) -> Tensor:
        """The prices in force after `clock` steps."""
        if self.rising is None:
            return self.prices
        which, after, steps = self.rising
        # Without steps to rise in, the price is there in the first one after those without.
        share = (clock - after + (0 if steps else 1)).div(steps or 1).clamp(0, 1)
        return torch.where(which, self.prices * share, self.prices)

    def targets_at(self, clock: Tensor) -> Tensor:
        """The targets in force after `clock` steps."""
        if self.warmup is None:
            return self.goal
        return self.warmup.target(self.goal, (clock - self.begins).clamp(min=0) if self.begins else clock)

    def ascend(self, violation: Tensor, clock: Tensor, first: bool) -> None:
        """Moves the multipliers along the gaps that were seen."""
        self.dual.step(self.multiplier, self.dual.measured(violation, self.targets_at(clock)), self.memory, first)

    def duals(self) -> list[Tensor]:
        """All that `ascend` moves."""
        return [self.multiplier, *self.memory.values()]

    def state(self) -> dict[str, Any]:
        """What changes in training."""
        return {"multiplier": self.multiplier, "memory": dict(self.memory)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up a state, in place: a captured step goes on with the same tensors."""
        self.multiplier.copy_(state["multiplier"])
        for name, tensor in self.memory.items():
            tensor.copy_(state["memory"][name])
