"""The Lagrangian as arithmetic on small tensors: prices and multipliers on costs, and how multipliers move.

A run's objective is its loss plus Σ_p price_p·cost_p, plus Σ_g λ_g·(Σ_p member_gp·cost_p − ε_g): Louizos et al., eq. 9,
and Gallego-Posada et al., eq. 6, in one form. All functions act on the last dimensions: without a leading one they are
those of a single run (`Constraint`), with one those of a stack of runs (`Lagrangian`). Costs are fractions of a dense
cost. This file knows no networks, gates, recipes or data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from ellzero.objectives.duals import AbstractDual, AbstractWarmup


def targets(goal: Tensor, warmup: AbstractWarmup | None, clock: Tensor) -> Tensor:
    """The targets in force after `clock` steps, on the way to `goal`."""
    return goal if warmup is None else warmup.target(goal, clock)


def gaps(cost: Tensor, target: Tensor, member: Tensor | None = None) -> Tensor:
    """By how much each constraint is violated, Σ_p member_gp·cost_p − ε_g (eq. 5).

    Args:
        cost: fractions of the dense cost, (…, parts).
        target: ε, (…, constraints).
        member: what each part is of each constraint, (…, constraints, parts); the identity if None.

    Example:
        >>> gaps(torch.tensor([0.5, 1.0]), torch.tensor([0.25]), torch.tensor([[0.5, 0.5]]))
        tensor([0.5000])
    """
    return (cost if member is None else (member * cost.unsqueeze(-2)).sum(-1)) - target


def weighted(weight: Tensor, amount: Tensor) -> Tensor:
    """What is added to the loss: prices on costs, Σ_p price_p·cost_p, or multipliers on gaps, Σ_g λ_g·gap_g."""
    return weight @ amount if amount.ndim == 1 else (weight * amount).sum(-1)


def ascend(
    dual: AbstractDual,
    multiplier: Tensor,
    memory: Mapping[str, Tensor],
    violation: Tensor,
    target: Tensor,
    *,
    first: bool,
) -> None:
    """Moves multipliers, and what their optimizer remembers, along the violations (eq. 7), in place."""
    dual.step(multiplier, dual.measured(violation, target), memory, first=first)


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
    """

    def __init__(
        self,
        prices: Tensor,
        member: Tensor,
        goal: Tensor,
        dual: AbstractDual,
        warmup: AbstractWarmup | None = None,
        rising: tuple[Tensor, float, float] | None = None,
        begins: int = 0,
    ) -> None:
        self.rising = rising if rising is not None and sum(rising[1:]) > 0 else None
        self.prices, self.member, self.goal, self.dual, self.warmup = prices, member, goal, dual, warmup
        self.begins = begins
        self.multiplier = torch.zeros_like(goal)
        self.memory = {name: torch.zeros_like(goal) for name in dual.memory}

    def gaps(self, cost: Tensor, clock: Tensor) -> Tensor:
        """By how much every constraint is violated by these cost vectors: (runs, parts) to (runs, constraints)."""
        return gaps(cost, self.targets_at(clock), self.member)

    def __call__(self, cost: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the loss of every run, and the gaps."""
        seen = self.gaps(cost, clock)
        return weighted(self.prices_at(clock), cost) + weighted(self.multiplier, seen), seen

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
        return targets(self.goal, self.warmup, (clock - self.begins).clamp(min=0) if self.begins else clock)

    def ascend(self, violation: Tensor, clock: Tensor, first: bool) -> None:
        """Moves the multipliers along the gaps that were seen."""
        ascend(self.dual, self.multiplier, self.memory, violation, self.targets_at(clock), first=first)

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
