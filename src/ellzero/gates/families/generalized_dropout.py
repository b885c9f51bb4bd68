"""Generalized dropout of Srinivas & Babu (2016): Bernoulli gates under a Beta prior on their rates."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import final

from torch import Tensor
from torch.nn.functional import logsigmoid

from ellzero.gates.abstract import Phi
from ellzero.gates.estimators import AbstractEstimator, StraightThrough
from ellzero.gates.families.bernoulli import AbstractBernoulliGate
from ellzero.gates.formulas import promote

FARTHEST = 10.0  # |logit θ| beyond which the prior pushes no further


@final
class GeneralizedDropoutGate(AbstractBernoulliGate):
    """z ~ Bernoulli(θ) with −log Beta(θ; a, b) as the penalty (Srinivas & Babu, *Generalized Dropout*, 2016).

    −log p(θ) = (1 − a)·log θ + (1 − b)·log(1 − θ) + log B(a, b), charged by `l0.complexity`. a = b = 1 is their
    Dropout++ (rates are learned, nothing is pushed), a, b < 1 their SAL, which drives θ to 0 or 1. At test time θ
    where θ ≥ `threshold`. With a ≈ 0 the penalty has no floor: it stops at |logit θ| = 10. No code of theirs is known:
    a = 1e-4, b = 0.5 and a start at θ = 0.63 are those of the one re-run that is (`Variational_Dropouts`), which uses
    a concrete relaxation per example instead of straight-through, a threshold of 1e-3, and keeps far more than was
    published. One draw is shared by the batch.

    Args:
        shape: how many gates: an int, or a weight's shape.
        a: of the Beta prior, positive.
        b: of the Beta prior, positive.
        drop_rate: 1 − θ at the start, in (0, 1).
        estimator: how θ gets its gradient.
        threshold: θ of an open gate at least, in (0, 1).

    Raises:
        ValueError: if an argument lies outside its range.

    Example:
        >>> bool((GeneralizedDropoutGate(3, a=1.0, b=1.0).complexity() == 0).all())
        True
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        a: float = 1e-4,
        b: float = 0.5,
        drop_rate: float = 0.368,
        estimator: AbstractEstimator = StraightThrough(),  # noqa: B008 (frozen)
        threshold: float = 0.5,
    ) -> None:
        super().__init__(shape, drop_rate=drop_rate, estimator=estimator, sharpness=1.0, threshold=threshold)
        for name, value in (("a", a), ("b", b)):
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive and finite, got {value}")
        self.a, self.b = float(a), float(b)

    def constants(self) -> tuple[Hashable, ...]:
        return *super().constants(), self.a, self.b

    def at_test(self, pi: Tensor) -> Tensor:
        return pi

    def complexity_from(self, phi: Phi) -> Tensor:
        logit = promote(phi[0]).clamp(-FARTHEST, FARTHEST)
        normalizer = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
        return (1 - self.a) * logsigmoid(logit) + (1 - self.b) * logsigmoid(-logit) + normalizer

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, a={self.a:g}, b={self.b:g}"
