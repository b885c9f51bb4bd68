"""Gaussian multipliers, z ~ N(μ, σ²), and Gaussian noise on weights: what families of each share. What they charge is
in `families`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import Phi
from ellzero.gates.formulas import normal, promote
from ellzero.gates.hard_concrete import INIT_STD
from ellzero.gates.thresholded import AbstractThresholdedGate


class AbstractGaussianGate(AbstractThresholdedGate):
    """z ~ N(μ, σ²), at test time μ where log α = log σ²/μ² < `threshold`; μ ~ N(1, 0.01²), log σ² ~ N(−9, 0.01²) at
    the start.

    Args:
        shape: how many gates: an int, or a weight's shape.
        threshold: log α of an open gate at most.

    Attributes:
        tiny: what is added to μ² under the logarithm.
    """

    tiny: ClassVar[float]
    lacks: ClassVar[str] = "a Gaussian multiplier is never zero"

    def __init__(self, shape: int | Sequence[int], *, threshold: float = 0.0) -> None:
        super().__init__(shape, bar=bar_of(threshold))
        self.threshold = float(threshold)
        self.mu = nn.Parameter(torch.empty(self.shape).normal_(1.0, INIT_STD))
        self.log_var = nn.Parameter(torch.empty(self.shape).normal_(-9.0, INIT_STD))

    @final
    def own(self) -> Phi:
        return self.mu, self.log_var

    @final
    def own_constants(self) -> tuple[Hashable, ...]:
        return ()

    @final
    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        mu, sigma = promote(own[0]), (promote(own[1]) / 2).exp()
        return mu + sigma * normal(u).to(mu.dtype)

    @final
    def mean_from(self, own: Phi) -> Tensor:
        return promote(own[0])

    @final
    def signal_from(self, own: Phi) -> Tensor:
        return (-self.log_alpha_from(own) / 2).exp()

    @final
    def log_alpha_from(self, own: Phi) -> Tensor:
        """log α = log σ²/μ² of (μ, log σ²)."""
        return promote(own[1]) - (promote(own[0]).square() + self.tiny).log()

    @final
    @torch.no_grad()
    def reset_(self, where: Tensor, value: float) -> None:
        self.mu.masked_fill_(where, value)
        self.log_var.masked_fill_(where, min(-9.0, self.threshold - 2.0) + 2 * math.log(value))

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, threshold={self.threshold:g}"


class AbstractWeightNoiseGate(AbstractThresholdedGate):
    """w ~ N(θ, σ²), one gate per weight: θ is the model's own weight, log σ² the gate's parameter `log_var`."""

    sees_weights: ClassVar[bool] = True
    per_weight: ClassVar[bool] = True
    adds: ClassVar[bool] = True
    lacks: ClassVar[str] = "a weight with Gaussian noise is never zero"
    log_var: nn.Parameter

    @final
    def own(self) -> Phi:
        return self.log_var, self.members.squares()

    @final
    def spread_from(self, phi: Phi) -> Tensor:
        """σ of the noise, not √(α·θ²), whose gradient has no end at θ = 0."""
        return torch.where(phi[0] > 0.5, (promote(phi[1]) / 2).exp(), 0.0)

    @final
    def mean_from(self, own: Phi) -> Tensor:
        return torch.ones_like(promote(own[0]))


def bar_of(threshold: float) -> float:
    """The evidence |μ|/σ at which log α is at the threshold."""
    if not math.isfinite(threshold):
        raise ValueError(f"`threshold` must be finite, got {threshold}")
    return math.exp(-threshold / 2)
