"""A fixed price on a cost.

This file knows costs as functions of a `Gated`; it does not know gates, layers or training loops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Self, final

import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.objectives.checking import (
    WeakMemory,
    check_cost,
    check_count,
    check_groups,
    counts_by_module,
    dense_of,
    refuse_unmoved,
)
from ellzero.objectives.costs import Cost, called, l0_norm, name_of, of_parts
from ellzero.objectives.watching import Watch


@final
class Penalty:
    """A fixed price on a cost, added to the loss: λ·cost, or Σ_p λ_p·cost_p ("λ sep.") (Louizos et al., eqs. 3 and 9).

    λ has units 1/cost: the papers' λ = c/N, with N training samples, multiplies the expected *number* of weights, and
    the loss beside it is a mean over samples. `l0.Penalty(l0.l0_norm, weight=0.1 / N)` is the first paper's λ = 0.1/N.

    Args:
        cost: what is penalised: `l0_norm`, `l2_norm`, `params`, `macs`, `units`, or a function like them.
        weight: λ ≥ 0 for the whole model; or `{pattern: λ}` with a λ per group of gates, for costs that count by
            gate. Patterns are those of `fnmatch`, over gate names, and each gate must match exactly one.

    Raises:
        TypeError: if `cost` is not callable.
        ValueError: if a weight is negative or not finite, or there are several for a cost that counts by module; on
            the first call, if a gate matches no pattern or several.

    Example:
        >>> import torch, ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> gated = l0.attach(model, (torch.randn(1, 4),))
        >>> torch.equal(l0.Penalty(l0.l0_norm, weight=0.5)(gated), 0.5 * l0.l0_norm(gated))
        True
    """

    def __init__(self, cost: Cost, weight: float | Mapping[str, float]) -> None:
        check_cost(cost)
        self.cost = cost
        self._weights = check_groups("weight", "`weight` must be a non-negative number", weight, lambda x: x >= 0)
        if None not in self._weights and counts_by_module(cost):
            raise ValueError(f"`weight` must be one number for {name_of(cost)}, which counts by module, got {weight!r}")
        self._checked = WeakMemory()
        self._watch = Watch()

    @property
    def weight(self) -> float | dict[str, float]:
        """λ, as given."""
        return self._weights.get(None, self._weights)  # type: ignore[arg-type]

    @classmethod
    def aic(cls, n_samples: int, cost: Cost = l0_norm) -> Self:
        """Akaike's criterion per sample, λ = 1/N: −log-likelihood + number of parameters, divided by N."""
        return cls(cost, 1 / check_count("n_samples", n_samples))

    @classmethod
    def bic(cls, n_samples: int, cost: Cost = l0_norm) -> Self:
        """The Bayesian criterion per sample, λ = ln N / 2N: −log-likelihood + ½·ln N per parameter, divided by N."""
        return cls(cost, math.log(check_count("n_samples", n_samples)) / (2 * n_samples))

    def __call__(self, gated: Gated) -> Tensor:
        """The term to add to the loss: a differentiable scalar."""
        if not torch.compiler.is_compiling():
            self._bind(gated)
            self._watch.look(gated)
        if None in self._weights:
            return self._weights[None] * called(self.cost, gated)
        parts = zip(self._weights.values(), of_parts(self.cost, self._weights, gated), strict=True)
        return torch.stack([weight * cost for weight, cost in parts]).sum()

    def __repr__(self) -> str:
        return f"Penalty({name_of(self.cost)}, weight={self.weight})"

    def _bind(self, gated: Gated) -> None:
        if not self._checked.holds(gated):
            if None not in self._weights:
                self._check_patterns(gated)
            refuse_unmoved(self.cost, gated)
            self._checked.keep(gated)

    def _check_patterns(self, gated: Gated) -> None:
        patterns = [p for p in self._weights if p is not None]
        matches = {name: [p for p in patterns if fnmatchcase(name, p)] for name, _ in gated.named_gates()}
        wrong = [f"{name} matches {found or 'none'}" for name, found in matches.items() if len(found) != 1]
        if wrong:
            raise ValueError(
                f"`weight` must have exactly one pattern for each gate, got {patterns}: {'; '.join(wrong)}"
            )
        for pattern in patterns:
            dense_of("weight", self.cost, gated, pattern)
