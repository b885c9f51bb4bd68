"""Bayesian compression with a normal-Jeffreys prior, BC-GNJ of Louizos et al. (2017): the part on units."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import Phi
from ellzero.gates.families.sparse_vd import log_uniform_kl
from ellzero.gates.families.vib import bar_of
from ellzero.gates.formulas import normal, promote
from ellzero.gates.hard_concrete import INIT_STD
from ellzero.gates.thresholded import AbstractThresholdedGate

TINY = 1e-8  # added to μ² under a logarithm, as in the authors' code


@final
class GNJGate(AbstractThresholdedGate):
    """z ~ N(μ, σ²) under p(z) ∝ 1/|z|, one gate per unit (Louizos, Ullrich & Welling, *Bayesian Compression for Deep
    Learning*, 2017).

    Charged is the KL of Sparse VD at log α = log σ² − log μ². At test time μ where log α < `threshold`. The whole
    method also has noise on the weights behind the gates, `GaussianWeightGate`: placements of both, and
    `gate={"*.weight": GaussianWeightGate, "*": GNJGate}`. Without it this is a prior on units alone. Settings: from
    scratch, Adam 1e-3, KL/N with a warm-up; μ ~ N(1, 0.01²), log σ² ~ N(−9, 0.01²). Its authors set the threshold by
    eye for each layer (−2.8, −3 and −5 in their tutorial): `threshold` by pattern. log α ends up in two heaps, near −5
    and 4.5, so that any threshold between gives the same, but in the last layer. One draw is shared by the batch, where
    theirs is drawn per example, which prunes as far, at about 0.2 % more error.

    Args:
        shape: how many gates: an int, or a weight's shape.
        threshold: log α of an open gate at most.

    Raises:
        ValueError: if `threshold` is not finite.

    Example:
        >>> round(GNJGate(1000).complexity().mean().item(), 1)
        5.1
    """

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
        return (-_log_alpha(own) / 2).exp()

    def charge_from(self, own: Phi) -> Tensor:
        return log_uniform_kl(_log_alpha(own))

    @torch.no_grad()
    def reset_(self, where: Tensor, value: float) -> None:
        self.mu.masked_fill_(where, value)
        self.log_var.masked_fill_(where, min(-9.0, self.threshold - 2.0) + 2 * math.log(value))

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, threshold={self.threshold:g}"


def _log_alpha(own: Phi) -> Tensor:
    return promote(own[1]) - (promote(own[0]).square() + TINY).log()
