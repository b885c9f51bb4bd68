"""Stochastic gates of Yamada et al. (2020): a clamped Gaussian with a fixed scale."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import AJAR, AbstractGate, Phi, check_mask
from ellzero.gates.formulas import normal, promote
from ellzero.gates.hard_concrete import CLOSED, INIT_STD


@final
class STGGate(AbstractGate):
    """z = clamp(μ + σε + ½, 0, 1), ε ~ N(0, 1), σ fixed (Yamada et al., *Feature Selection using Stochastic Gates*).

    P(z ≠ 0) = Φ((μ + ½)/σ); at test time clamp(μ + ½, 0, 1). It has atoms at 0 and 1 as the hard concrete has, and
    takes its place as it is. Settings of its authors: σ = 0.5, μ ~ 0.01·N(0, 1), so that every gate starts half open.
    Their λ is not comparable between models: it weighs a mean over features in regression, a sum in the Cox model.

    Args:
        shape: how many gates: an int, or a weight's shape.
        start: μ at the start, of which 0.01·N(0, 1) is added; at ½ and above the network computes what it did.
        sigma: σ > 0.

    Raises:
        ValueError: `sigma` is not positive, or `start` is not finite.

    Example:
        >>> round(STGGate(1000).prob_open().mean().item(), 2)
        0.84
    """

    def __init__(self, shape: int | Sequence[int], *, start: float = 0.0, sigma: float = 0.5) -> None:
        super().__init__(shape)
        if not 0 < sigma < math.inf:
            raise ValueError(f"`sigma` must be positive and finite, got {sigma}")
        if not math.isfinite(start):
            raise ValueError(f"`start` must be finite, got {start}")
        self.sigma = float(sigma)
        self.mu = nn.Parameter(torch.empty(self.shape).normal_(start, INIT_STD))

    def phi(self) -> Phi:
        return (self.mu,)

    def constants(self) -> tuple[Hashable, ...]:
        return (self.sigma,)

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        mu = promote(phi[0])
        return (mu + self.sigma * normal(u).to(mu.dtype) + 0.5).clamp(0, 1)

    def value_from(self, phi: Phi) -> Tensor:
        return (promote(phi[0]) + 0.5).clamp(0, 1)

    def prob_from(self, phi: Phi) -> Tensor:
        prob: Tensor = torch.special.ndtr((promote(phi[0]) + 0.5) / self.sigma)
        return prob

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        check_mask(where, self.shape)
        self.mu.masked_fill_(where, -0.5 + CLOSED * self.sigma)

    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        check_mask(where, self.shape)
        self.mu.masked_fill_(where, 0.5 - CLOSED * self.sigma if wide else AJAR - 0.5)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, sigma={self.sigma:g}"
