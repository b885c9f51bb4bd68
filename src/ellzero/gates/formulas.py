"""The formulas of both papers as functions of tensors: what gates and distributions share."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

NOISE_EPS = 1e-6  # uniform noise is kept this far from 0 and 1, where float32 has no logit

# β is a float or a tensor, γ and ζ are floats. No step depends on data, so they compile and vmap.


def promote(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay what they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def normal(u: Tensor) -> Tensor:
    """Standard normal noise from uniform noise."""
    noise: Tensor = torch.special.ndtri(promote(u).clamp(NOISE_EPS, 1 - NOISE_EPS))
    return noise


def binary_concrete_sample(u: Tensor, log_alpha: Tensor, beta: float | Tensor) -> Tensor:
    """s = σ((logit u + log α) / β) from uniform noise u (eq. 10)."""
    return torch.sigmoid((torch.logit(promote(u), NOISE_EPS) + promote(log_alpha)) / beta)


def stretch_and_clamp(s: Tensor, gamma: float, zeta: float) -> Tensor:
    """z = clamp(s(ζ − γ) + γ, 0, 1) (eqs. 10 and 11)."""
    # Both in one kernel each, hardtanh in the backward too: γ − (γ − ζ)s, and clamp, whose backward takes five.
    return hardtanh(torch.rsub(s, gamma, alpha=gamma - zeta), 0.0, 1.0)


def hard_concrete_sample(u: Tensor, log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
    """z from uniform noise u (eqs. 10 and 11).

    Example:
        >>> hard_concrete_sample(torch.tensor([0.1, 0.5, 0.9]), torch.zeros(3), 2 / 3, -0.1, 1.1)
        tensor([0.0000, 0.5000, 1.0000])
    """
    return stretch_and_clamp(binary_concrete_sample(u, log_alpha, beta), gamma, zeta)


def hard_concrete_prob_nonzero(log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
    """P(z ≠ 0) = σ(log α − β log(−γ/ζ)) (eq. 12)."""
    return torch.sigmoid(promote(log_alpha) - beta * math.log(-gamma / zeta))


def hard_concrete_noiseless(log_alpha: Tensor, gamma: float, zeta: float) -> Tensor:
    """The test-time value ẑ = clamp(σ(log α)(ζ − γ) + γ, 0, 1) (eq. 13)."""
    return stretch_and_clamp(torch.sigmoid(promote(log_alpha)), gamma, zeta)


def hard_concrete_median(log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
    """The median of z, clamp(σ(log α / β)(ζ − γ) + γ, 0, 1): eqs. 10 and 11 at u = 1/2."""
    return stretch_and_clamp(torch.sigmoid(promote(log_alpha) / beta), gamma, zeta)


def check_stretch(gamma: float, zeta: float) -> None:
    """Refuses an interval (γ, ζ) that does not contain [0, 1]."""
    if not -math.inf < gamma < 0:
        raise ValueError(f"`gamma` must be negative, got {gamma}")
    if not 1 < zeta < math.inf:
        raise ValueError(f"`zeta` must be greater than 1, got {zeta}")
