"""Sparse variational dropout of Molchanov et al. (2017): Gaussian noise on every weight."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ellzero.gates.abstract import Phi
from ellzero.gates.formulas import promote
from ellzero.gates.gaussian import AbstractWeightNoiseGate, bar_of

TINY = 1e-16  # added to θ² under a logarithm
FARTHEST = 8.0  # |log α| beyond which the KL is not followed


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(θ, αθ²) ‖ p(|w|) ∝ 1/|w|), up to a constant that makes it 0 for α → ∞ (Molchanov et al., 2017).

    −KL ≈ k₁·σ(k₂ + k₃·log α) − ½·log(1 + 1/α) − k₁, to 0.01 nats.
    """
    return 0.63576 * torch.sigmoid(-1.87320 - 1.48695 * log_alpha) + softplus(-log_alpha) / 2


@final
class SparseVDGate(AbstractWeightNoiseGate):
    """w ~ N(θ, σ²) under p(|w|) ∝ 1/|w|, one gate per weight (Molchanov et al., *Variational Dropout Sparsifies Deep
    Neural Networks*, 2017).

    θ is the model's own weight, log σ² the gate's parameter (the additive form: dw/dθ has no noise in it), log α = log
    σ² − log θ². Charged is the approximation of the KL in `log_uniform_kl`, with log α clipped to ±8. At test time θ
    where log α < `threshold`. Settings: from scratch, Adam 1e-3, log σ² = −10, θ ~ N(0, 0.01²), and
    `Penalty(l0.complexity, weight=r / N)` with r from 0 to 1 in the first epochs; the learning rate must fall to zero
    in the end, where most of the pruning happens. Authors draw per example, by local reparametrisation, as
    `attach(…, per_example=True)` does; else one draw of the weights is shared by the batch, which prunes an MLP as far,
    at about 0.15 % more error.

    Args:
        shape: the weight's, with `where=l0.weights("fc*.weight")`.
        threshold: log α of an open gate at most.
        start: log σ² at the start.
        clip: whether the mean of a weight beyond the threshold is zero in training too, as in the authors' code; its
            noise stays.

    Raises:
        ValueError: if `threshold` or `start` is not finite; when attached, if it is not on single weights.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> from ellzero.gated.placements import weights
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> gated = attach(net, torch.zeros(1, 4), where=weights("1.weight"), gate=SparseVDGate)
        >>> int(gated.opens().sum())
        6
    """

    def __init__(
        self, shape: int | Sequence[int], *, threshold: float = 3.0, start: float = -10.0, clip: bool = True
    ) -> None:
        super().__init__(shape, bar=bar_of(threshold))
        if not math.isfinite(start):
            raise ValueError(f"`start` must be finite, got {start}")
        self.threshold, self.clip = float(threshold), bool(clip)
        self.log_var = nn.Parameter(torch.full(self.shape, float(start)))

    def own_constants(self) -> tuple[Hashable, ...]:
        return (self.clip,)

    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        if not self.clip:
            return self.mean_from(own)
        return torch.where(self.signal_from(own) > self.bar, self.mean_from(own), 0.0)

    def signal_from(self, own: Phi) -> Tensor:
        return (-_log_alpha(own) / 2).exp()

    def charge_from(self, own: Phi) -> Tensor:
        return log_uniform_kl(_log_alpha(own).clamp(-FARTHEST, FARTHEST))

    @torch.no_grad()
    def reset_(self, where: Tensor, value: float) -> None:
        """An open gate is 1; of a weight that is zero none is."""
        least = (self.members.squares() + TINY).log() + min(self.threshold, 0.0) - FARTHEST
        self.log_var.copy_(torch.where(where, torch.minimum(self.log_var, least.to(self.log_var)), self.log_var))

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, threshold={self.threshold:g}, clip={self.clip}"


def _log_alpha(own: Phi) -> Tensor:
    """log α = log σ² − log θ² of φ = (log σ², θ²)."""
    log_var = promote(own[0])
    return log_var - (own[1] + TINY).log().to(log_var.dtype)
