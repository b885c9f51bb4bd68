"""The variational information bottleneck of Dai et al. (2018): Gaussian multipliers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ellzero.gates.abstract import Phi
from ellzero.gates.formulas import normal, promote
from ellzero.gates.hard_concrete import INIT_STD
from ellzero.gates.thresholded import AbstractThresholdedGate

TINY = 1e-12  # added to μ² under a logarithm


@final
class VIBGate(AbstractThresholdedGate):
    """z ~ N(μ, σ²), charged ½·log(1 + μ²/σ²) (Dai et al., *Compressing Neural Networks using the Variational
    Information Bottleneck*, 2018).

    At test time μ where log α = log σ²/μ² < `threshold`. Settings: μ ~ N(1, 0.01²), log σ² ~ N(−9, 0.01²), trained
    weights to start from, gates ten times as fast as weights, `Penalty(l0.complexity, weight=γ)` with γ = 1e-4 on
    MNIST, 1e-5 … 3e-5 on CIFAR; their γ of a map is multiplied by its positions: `weight={"conv1": 64 * γ, …}`. In
    their code α is the inverse of the paper's. One draw is shared by the batch, where theirs is drawn per example.

    Args:
        shape: how many gates: an int, or a weight's shape.
        threshold: log α of an open gate at most.

    Raises:
        ValueError: if `threshold` is not finite.

    Example:
        >>> round(VIBGate(1000).complexity().mean().item(), 1)
        4.5
    """

    rate_ratio: ClassVar[float] = 10.0
    lacks: ClassVar[str] = "a Gaussian multiplier is never zero"

    def __init__(self, shape: int | Sequence[int], *, threshold: float = 0.0) -> None:
        super().__init__(shape, bar=bar_of(threshold))
        self.threshold = float(threshold)
        self.mu = nn.Parameter(torch.empty(self.shape).normal_(1.0, INIT_STD))
        self.log_var = nn.Parameter(torch.empty(self.shape).normal_(-9.0, INIT_STD))

    def own(self) -> Phi:
        return self.mu, self.log_var

    def own_constants(self) -> tuple[Hashable, ...]:
        return ()

    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        mu, sigma = promote(own[0]), (promote(own[1]) / 2).exp()
        return mu + sigma * normal(u).to(mu.dtype)

    def mean_from(self, own: Phi) -> Tensor:
        return promote(own[0])

    def signal_from(self, own: Phi) -> Tensor:
        return (-log_alpha(own) / 2).exp()

    def charge_from(self, own: Phi) -> Tensor:
        return softplus(-log_alpha(own)) / 2

    @torch.no_grad()
    def reset_(self, where: Tensor, value: float) -> None:
        self.mu.masked_fill_(where, value)
        self.log_var.masked_fill_(where, min(-9.0, self.threshold - 2.0) + 2 * math.log(value))

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, threshold={self.threshold:g}"


def log_alpha(own: Phi) -> Tensor:
    """log α = log σ²/μ² of φ = (μ, log σ²)."""
    return promote(own[1]) - (promote(own[0]).square() + TINY).log()


def bar_of(threshold: float) -> float:
    """The evidence |μ|/σ at which log α is at the threshold."""
    if not math.isfinite(threshold):
        raise ValueError(f"`threshold` must be finite, got {threshold}")
    return math.exp(-threshold / 2)
