"""Bernoulli gates: exactly 0 or 1 in training, learned by an estimator."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import AJAR, AbstractGate, Phi, check_mask
from ellzero.gates.estimators import AbstractEstimator, ScoreFunction, StraightThrough
from ellzero.gates.formulas import NOISE_EPS, promote
from ellzero.gates.hard_concrete import CLOSED, INIT_STD, check_drop_rate


class AbstractBernoulliGate(AbstractGate):
    """z ~ Bernoulli(π), π = σ(kφ); open at test time where π ≥ `threshold`.

    Args:
        shape: how many gates: an int, or a weight's shape.
        drop_rate: 1 − π at the start, in (0, 1); kφ starts at N(logit π, 0.01²).
        estimator: how φ gets its gradient.
        sharpness: k > 0.
        threshold: in (0, 1).
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        drop_rate: float,
        estimator: AbstractEstimator,
        sharpness: float,
        threshold: float,
    ) -> None:
        super().__init__(shape)
        check_drop_rate(drop_rate)
        if not isinstance(estimator, AbstractEstimator):
            raise TypeError(f"`estimator` must be one such as `StraightThrough()` or `ARM()`, got {estimator!r}")
        if not 0 < sharpness < math.inf:
            raise ValueError(f"`sharpness` must be positive and finite, got {sharpness}")
        if not 0 < threshold < 1:
            raise ValueError(f"`threshold` must lie in (0, 1), got {threshold}")
        self.estimator, self.sharpness, self.threshold = estimator, float(sharpness), float(threshold)
        self.needs_loss = estimator.needs_loss
        if isinstance(estimator, ScoreFunction):  # a moving average of losses: their sum, and its weight
            self.losses = nn.Parameter(torch.zeros(self.shape), requires_grad=False)
            self.seen = nn.Parameter(torch.zeros(self.shape), requires_grad=False)
        mean = math.log((1 - drop_rate) / drop_rate)
        self.log_odds = nn.Parameter(torch.empty(self.shape).normal_(mean, INIT_STD) / self.sharpness)

    @abstractmethod
    def at_test(self, pi: Tensor) -> Tensor:
        """The test-time value of an open gate."""

    @final
    def phi(self) -> Phi:
        return (self.log_odds,)

    def constants(self) -> tuple[Hashable, ...]:
        return self.estimator, self.sharpness, self.threshold

    @final
    def logit_from(self, phi: Phi) -> Tensor:
        """kφ, the logit of π."""
        return self.sharpness * promote(phi[0])

    @final
    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return self.estimator.draw(self.logit_from(phi), promote(u).clamp(min=NOISE_EPS))  # 0 opens what is closed

    @final
    def value_from(self, phi: Phi) -> Tensor:
        pi = self.prob_from(phi)
        return torch.where(pi >= self.threshold, self.at_test(pi), 0.0)

    @final
    def prob_from(self, phi: Phi) -> Tensor:
        return torch.sigmoid(self.logit_from(phi))

    @final
    @torch.no_grad()
    def learn_(self, u: Tensor, loss: Tensor, mirrored: Tensor | None) -> None:
        """Adds the estimator's gradient of E[loss] to that of φ; `u` is the noise that the gates were drawn from."""
        before = loss
        if isinstance(self.estimator, ScoreFunction):
            before = torch.where(self.seen > 0, self.losses / self.seen.clamp(min=1e-12), loss)
            self.losses.lerp_(loss.to(self.losses).expand(self.shape), 1 - self.estimator.decay)
            self.seen.lerp_(torch.ones_like(self.seen), 1 - self.estimator.decay)
        slope = self.estimator.slope(self.logit_from((self.log_odds,)), u, loss, mirrored, before)
        more = (self.sharpness * slope).to(self.log_odds.dtype)
        if self.log_odds.grad is None:
            self.log_odds.grad = more
        else:
            self.log_odds.grad += more

    @final
    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        check_mask(where, self.shape)
        edge = math.log(self.threshold / (1 - self.threshold))
        self.log_odds.masked_fill_(where, (min(edge, 0.0) + CLOSED) / self.sharpness)

    @final
    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        check_mask(where, self.shape)
        edge = math.log(self.threshold / (1 - self.threshold))
        ajar = max(edge, math.log(AJAR / (1 - AJAR))) + 0.1  # as little as the threshold allows
        self.log_odds.masked_fill_(where, (max(edge, 0.0) - CLOSED if wide else ajar) / self.sharpness)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, estimator={self.estimator}, threshold={self.threshold:g}"


@final
class BernoulliGate(AbstractBernoulliGate):
    """Bernoulli gates with π = σ(kφ), the problem of Louizos et al., eq. 3, before it is smoothed.

    The penalty is that of the hard concrete, λ|g|π (`l0_norm`). At test time π·1[π ≥ ½], as in the code of L0-ARM (Li
    & Ji, 2019), or 1[π ≥ ½]. Settings there: k = 7, Adam 1e-3 for weights and gates, drop rates 0.2 on inputs and 0.5
    elsewhere. Straight-through is a strong and cheap baseline. `ScoreFunction()`, `AR()` and `ARM()` need the value of
    the loss: the loop calls `l0.objectives.estimated_backward` instead of `backward()`, else φ feels the penalty alone.
    One draw is shared by the batch.

    Args:
        shape: how many gates: an int, or a weight's shape.
        drop_rate: 1 − π at the start, in (0, 1).
        estimator: `StraightThrough()`, `ScoreFunction()`, `AR()` or `ARM()`.
        sharpness: k > 0.
        threshold: π of an open gate at least, in (0, 1).
        scaled: whether an open gate is π at test time; else it is 1.

    Raises:
        ValueError: if an argument lies outside its range.

    Example:
        >>> gate = BernoulliGate(1000, drop_rate=0.2)
        >>> sorted(set(gate.sample().tolist()))
        [0.0, 1.0]
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        drop_rate: float = 0.5,
        estimator: AbstractEstimator = StraightThrough(),  # noqa: B008 (frozen)
        sharpness: float = 7.0,
        threshold: float = 0.5,
        scaled: bool = True,
    ) -> None:
        super().__init__(
            shape, drop_rate=drop_rate, estimator=estimator, sharpness=sharpness, threshold=threshold
        )  # fmt: skip
        self.scaled = bool(scaled)

    def constants(self) -> tuple[Hashable, ...]:
        return *super().constants(), self.scaled

    def at_test(self, pi: Tensor) -> Tensor:
        return pi if self.scaled else torch.ones_like(pi)
