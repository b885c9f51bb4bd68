"""Bayesian compression with a normal-Jeffreys prior, BC-GNJ of Louizos et al. (2017): the part on units."""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from ellzero.gates.abstract import Phi
from ellzero.gates.families.sparse_vd import log_uniform_kl
from ellzero.gates.gaussian import AbstractGaussianGate


@final
class GNJGate(AbstractGaussianGate):
    """z ~ N(μ, σ²) under p(z) ∝ 1/|z|, one gate per unit (Louizos, Ullrich & Welling, *Bayesian Compression for Deep
    Learning*, 2017).

    Charged is the KL of Sparse VD at log α = log σ² − log μ². At test time μ where log α < `threshold`. The whole
    method also has noise on the weights behind the gates, `GaussianWeightGate`: placements of both, and
    `gate={"*.weight": GaussianWeightGate, "*": GNJGate}`. Without it this is a prior on units alone. Settings: from
    scratch, Adam 1e-3, KL/N with a warm-up; μ ~ N(1, 0.01²), log σ² ~ N(−9, 0.01²). Its authors set the threshold by
    eye for each layer (−2.8, −3 and −5 in their tutorial): `threshold` by pattern. log α ends up in two heaps, near −5
    and 4.5, so that any threshold between gives the same, but in the last layer. Authors draw per
    example, as `attach(…, per_example=True)` does; one draw for the batch prunes as far, at about 0.2 % more error.

    Args:
        shape: how many gates: an int, or a weight's shape.
        threshold: log α of an open gate at most.

    Raises:
        ValueError: if `threshold` is not finite.

    Example:
        >>> round(GNJGate(1000).complexity().mean().item(), 1)
        5.1
    """

    tiny: ClassVar[float] = 1e-8  # as in the authors' code

    def charge_from(self, own: Phi) -> Tensor:
        return log_uniform_kl(self.log_alpha_from(own))
