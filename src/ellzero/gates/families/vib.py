"""The variational information bottleneck of Dai et al. (2018): Gaussian multipliers."""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor
from torch.nn.functional import softplus

from ellzero.gates.abstract import Phi
from ellzero.gates.gaussian import AbstractGaussianGate


@final
class VIBGate(AbstractGaussianGate):
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
    tiny: ClassVar[float] = 1e-12

    def charge_from(self, own: Phi) -> Tensor:
        return softplus(-self.log_alpha_from(own)) / 2
