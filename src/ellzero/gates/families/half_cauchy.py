"""Half-Cauchy scales, the horseshoe of Bayesian compression (BC-GHS, Louizos et al., 2017)."""

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

_HALF = 0.5 * (1 + math.log(2))
FARTHEST, LEAST, MOST = 40.0, -20.0, 3.0  # |m|, and log v, beyond which nothing is followed: exponents stay finite


@final
class HalfCauchyGate(AbstractThresholdedGate):
    """z = √(a·b) ~ C⁺(0, τ) under the prior, a ~ Γ(½, scale τ²), b ~ IG(½, 1); q(a) and q(b) are log-normal (Louizos,
    Ullrich & Welling, *Bayesian Compression for Deep Learning*, 2017).

    With q = LN(m, v): KL to Γ(½, c) is −½m + e^(m + v/2)/c + ½·log c − ½·log v − ½(1 + log 2), to IG(½, 1) it is ½m +
    e^(−m + v/2) − ½·log v − ½(1 + log 2); log z ~ N(½(m_a + m_b), ¼(v_a + v_b)). At test time E z where −log of the
    mode, v − m of log z, is below `threshold`. BC-GHS has three kinds of gates on a weight: these on units (τ = 1), one
    for a whole layer (`placements.shared`, `scale=1e-5, threshold=None`), and `GaussianWeightGate`. It starts with a
    at its prior and E log z = 0: elsewhere the first KL is 1/τ². No code of it is public; its authors set thresholds by
    eye for each layer; the default lies in the valley that −log of the mode has after 200 epochs on MNIST. One draw is
    shared by the batch.

    Args:
        shape: how many gates: an int, or a weight's shape.
        scale: τ, at least 1e-6.
        threshold: −log mode of an open gate at most; `None` for gates that are all open.

    Raises:
        ValueError: if an argument lies outside its range.

    Example:
        >>> gate = HalfCauchyGate(3)
        >>> bool(gate.open().all()), gate.value().round(decimals=1).tolist()
        (True, [1.0, 1.0, 1.0])
    """

    lacks: ClassVar[str] = "a log-normal multiplier is never zero"

    def __init__(self, shape: int | Sequence[int], *, scale: float = 1.0, threshold: float | None = 1.0) -> None:
        if not 1e-6 <= scale < math.inf:
            raise ValueError(f"`scale` must be at least 1e-6 and finite, got {scale}")
        if threshold is not None and not math.isfinite(threshold):
            raise ValueError(f"`threshold` must be finite or None, got {threshold}")
        super().__init__(shape, bar=0.0 if threshold is None else math.exp(-threshold))
        self.scale, self.threshold = float(scale), threshold
        prior = math.log(self.scale**2 / 2)  # log of the mean of a under its prior, c/2
        self.m_a = nn.Parameter(torch.empty(self.shape).normal_(prior, INIT_STD))
        self.m_b = nn.Parameter(torch.empty(self.shape).normal_(-prior, INIT_STD))
        self.log_v_a = nn.Parameter(torch.empty(self.shape).normal_(-9.0, INIT_STD))
        self.log_v_b = nn.Parameter(torch.empty(self.shape).normal_(-9.0, INIT_STD))

    def own(self) -> Phi:
        return self.m_a, self.m_b, self.log_v_a, self.log_v_b

    def own_constants(self) -> tuple[Hashable, ...]:
        return (self.scale,)

    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        m, v = _of_log(own)
        return (m + v.sqrt() * normal(u).to(m.dtype)).exp()

    def mean_from(self, own: Phi) -> Tensor:
        m, v = _of_log(own)
        return (m + v / 2).exp()

    def signal_from(self, own: Phi) -> Tensor:
        m, v = _of_log(own)
        return (m - v).exp()

    def charge_from(self, own: Phi) -> Tensor:
        (m_a, m_b), (v_a, v_b), c = _locations(own), _variances(own), self.scale**2
        gamma = -m_a / 2 + (m_a + v_a / 2).exp() / c + math.log(c) / 2 - v_a.log() / 2 - _HALF
        inverse = m_b / 2 + (-m_b + v_b / 2).exp() - v_b.log() / 2 - _HALF
        return gamma + inverse

    @torch.no_grad()
    def reset_(self, where: Tensor, value: float) -> None:
        """E z = value, or a little above what the threshold asks for."""
        prior, v = math.log(self.scale**2 / 2), math.exp(-9.0) / 2  # of log z: ¼ of two
        m = math.log(max(value, 1.1 * self.bar) if value < 1 else 1.0) - v / 2
        for parameter, number in zip(self.own(), (prior, 2 * m - prior, -9.0, -9.0), strict=True):
            parameter.masked_fill_(where, number)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, scale={self.scale:g}, threshold={self.threshold}"


def _locations(own: Phi) -> tuple[Tensor, Tensor]:
    return promote(own[0]).clamp(-FARTHEST, FARTHEST), promote(own[1]).clamp(-FARTHEST, FARTHEST)


def _variances(own: Phi) -> tuple[Tensor, Tensor]:
    return promote(own[2]).clamp(LEAST, MOST).exp(), promote(own[3]).clamp(LEAST, MOST).exp()


def _of_log(own: Phi) -> tuple[Tensor, Tensor]:
    """Mean and variance of log z."""
    (m_a, m_b), (v_a, v_b) = _locations(own), _variances(own)
    return (m_a + m_b) / 2, (v_a + v_b) / 4
