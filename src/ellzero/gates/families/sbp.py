"""Structured Bayesian pruning of Neklyudov et al. (2017): truncated log-normal multipliers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import Phi
from ellzero.gates.formulas import NOISE_EPS
from ellzero.gates.thresholded import AbstractThresholdedGate

LOWEST, HIGHEST = -20.0, 0.0  # a and b: log z lies between them
_MOST = 5.0  # μ and log σ are kept between `LOWEST` and this, as in the authors' code


@final
class SBPGate(AbstractThresholdedGate):
    """z = exp(y), y ~ N(μ, σ²) truncated to [a, b] = [−20, 0], under a log-uniform prior (Neklyudov et al., *Structured
    Bayesian Pruning via Log-Normal Multiplicative Noise*, 2017).

    With A = (a − μ)/σ, B = (b − μ)/σ and Z = Φ(B) − Φ(A):
    KL = −log σ − log Z − (Aφ(A) − Bφ(B))/2Z + log(b − a) − ½·log 2πe; E z = e^(μ + σ²/2)·[Φ(B − σ) − Φ(A − σ)]/Z;
    SNR = E z/√Var z, which is 1/3 under the prior. At test time E z where SNR > `threshold`. No prior on weights.
    Settings: μ = 0, log σ = −5; the penalty is `Penalty(l0.complexity, weight=1 / N)`; start from trained weights;
    gates learn ten times as fast. All is computed in float64: in float32 the moments overflow at σ > 6.6.

    Args:
        shape: how many gates: an int, or a weight's shape.
        threshold: the SNR of an open gate, not negative.

    Raises:
        ValueError: if `threshold` lies outside its range.

    Example:
        >>> round(SBPGate(1).complexity().item(), 2)
        7.27
    """

    rate_ratio: ClassVar[float] = 10.0
    lacks: ClassVar[str] = "a log-normal multiplier is never zero"

    def __init__(self, shape: int | Sequence[int], *, threshold: float = 1.0) -> None:
        if not 0 <= threshold < math.inf:
            raise ValueError(f"`threshold` must be a signal-to-noise ratio, not negative, got {threshold}")
        super().__init__(shape, bar=threshold)
        self.mu = nn.Parameter(torch.zeros(self.shape))
        self.log_sigma = nn.Parameter(torch.full(self.shape, -5.0))

    def own(self) -> Phi:
        return self.mu, self.log_sigma

    def own_constants(self) -> tuple[Hashable, ...]:
        return ()

    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        mu, sigma, low, high = _standard(own)
        below = torch.special.ndtr(low)
        t = below + u.double().clamp(NOISE_EPS, 1 - NOISE_EPS) * (torch.special.ndtr(high) - below)
        y: Tensor = mu + sigma * torch.special.ndtri(t.clamp(1e-300, 1 - 1e-16))
        return y.clamp(LOWEST, HIGHEST).exp().to(own[0].dtype)

    def mean_from(self, own: Phi) -> Tensor:
        return _log_moment(own, 1).exp().to(own[0].dtype)

    def signal_from(self, own: Phi) -> Tensor:
        # E z²/(E z)² − 1 is the variance over the squared mean; below 1e-14 it is rounding.
        variance = torch.expm1(_log_moment(own, 2) - 2 * _log_moment(own, 1)).clamp(min=1e-14)
        return variance.rsqrt().to(own[0].dtype)

    def charge_from(self, own: Phi) -> Tensor:
        _, sigma, low, high = _standard(own)
        log_mass = _log_mass(low, high)
        edges = (low * _over_mass(low, log_mass) - high * _over_mass(high, log_mass)) / 2
        constant = math.log(HIGHEST - LOWEST) - 0.5 * math.log(2 * math.pi * math.e)
        return (constant - sigma.log() - log_mass - edges).to(own[0].dtype)

    @torch.no_grad()
    def reset_(self, where: Tensor, value: float) -> None:
        narrow = -math.log1p(self.bar) - 2.0  # log σ at which the SNR, about 1/σ, lies well above the threshold
        self.mu.masked_fill_(where, math.log(value) + (1e-3 if value < 1 else 0.0))
        self.log_sigma.masked_fill_(where, LOWEST if value == 1 else narrow)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, threshold={self.bar:g}"


def _standard(own: Phi) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """μ, σ, A and B, in float64."""
    mu, sigma = own[0].double().clamp(LOWEST, _MOST), own[1].double().clamp(LOWEST, _MOST).exp()
    return mu, sigma, (LOWEST - mu) / sigma, (HIGHEST - mu) / sigma


def _log_moment(own: Phi, order: int) -> Tensor:
    """log E z^k = kμ + k²σ²/2 + log [Φ(B − kσ) − Φ(A − kσ)]/Z."""
    mu, sigma, low, high = _standard(own)
    shifted = _log_mass(low - order * sigma, high - order * sigma)
    return order * mu + order**2 * sigma**2 / 2 + shifted - _log_mass(low, high)


def _log_mass(low: Tensor, high: Tensor) -> Tensor:
    """log [Φ(high) − Φ(low)], where low is not far above zero."""
    upper = _log_ndtr(high)
    return upper + torch.log1p(-(_log_ndtr(low) - upper).exp())


def _over_mass(x: Tensor, log_mass: Tensor) -> Tensor:
    """φ(x)/Z."""
    return (-(x**2) / 2 - 0.5 * math.log(2 * math.pi) - log_mass).exp()


def _log_ndtr(x: Tensor) -> Tensor:
    """log Φ(x). `torch.special.log_ndtr` has no rule for `vmap`."""
    far = torch.special.erfcx(-x.clamp(max=0.0) / math.sqrt(2)).div(2).log() - x.clamp(max=0.0) ** 2 / 2
    near = torch.log1p(-torch.special.erfc(x.clamp(min=0.0) / math.sqrt(2)) / 2)
    return torch.where(x < 0, far, near)
