"""Group lasso (Yuan & Lin, 2006), as Wen et al. (2016) use it for structured sparsity: no noise, a proximal step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import Phi
from ellzero.gates.thresholded import AbstractThresholdedGate


@final
class GroupLassoGate(AbstractThresholdedGate):
    """A gate that is 1 as long as a weight of its group is not zero; charged c_g·‖w_g‖₂ (Wen et al., *Learning
    Structured Sparsity in Deep Neural Networks*, 2016).

    The group is what the gate counts. c_g = √|g|, or 1 as in the authors' code. Its price λ, of a `Penalty` or the
    multiplier of a `Constraint` on what is kept, acts after each step of the optimizer, by the proximal operator w_g ←
    w_g·max(0, 1 − ηλc_g/‖w_g‖), which makes exact zeros; the loss's own backward passes nothing of it to the weights.
    So the loop must be followed (`l0.objectives.follow`), and the optimizer must be SGD: by Adam's steps, of which
    each weight has its own length, the Euclidean operator closes nothing or the wrong groups. With momentum μ, η is
    lr/(1 − μ), so that the weights rest where loss + λ·Σ c_g‖w_g‖ is least. The survivors are shrunk too: tune them
    afterwards with fixed gates. A group whose weights are zero cannot be opened again.

    Args:
        shape: how many gates: an int, or a weight's shape.
        by_size: whether c_g is √|g|; else it is 1.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        >>> charged = attach(net, torch.zeros(1, 2), gate=GroupLassoGate).complexity()
        >>> torch.allclose(charged, 2**0.5 * net[1].weight.norm(dim=0))
        True
    """

    sees_weights: ClassVar[bool] = True
    acts_after_steps = True
    lacks: ClassVar[str] = "without noise a group is there or not"

    def __init__(self, shape: int | Sequence[int], *, by_size: bool = True) -> None:
        super().__init__(shape, bar=0.0)
        self.by_size = bool(by_size)
        # Zero always; its gradient is the price of its group.
        self.pull = nn.Parameter(torch.zeros(self.shape))

    def own(self) -> Phi:
        # What the weights feel of their norm they feel in `after_step`, and not in a backward.
        return self.pull, self.members.squares().detach(), self.members.sizes().to(self.pull.dtype)

    def own_constants(self) -> tuple[Hashable, ...]:
        return (self.by_size,)

    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        return torch.where(own[1] > 0, self.mean_from(own), 0.0)

    def mean_from(self, own: Phi) -> Tensor:
        return 1 + 0 * own[0]  # a backward must reach every parameter, as others count on

    def signal_from(self, own: Phi) -> Tensor:
        return own[1].sqrt().to(own[0].dtype)

    def charge_from(self, own: Phi) -> Tensor:
        pull, squares, sizes = own
        return (sizes.sqrt() if self.by_size else 1.0) * (squares.sqrt().to(pull.dtype) + pull)

    @torch.no_grad()
    def after_step(self, step: float | Tensor | None) -> None:
        """The proximal step, for the price that the last backward put on each group."""
        if step is None:
            raise ValueError(
                "`optimizer` must be SGD for GroupLassoGate: its proximal step is as long as the step of the weights, "
                "and in other optimizers each weight has a step of its own"
            )
        if self.pull.grad is not None:
            norm = self.members.squares().sqrt()
            factor = 1 - step * self.pull.grad / norm.clamp(min=torch.finfo(norm.dtype).tiny)
            self.members.scale_(factor.clamp(0.0, 1.0))
        self.pull.zero_()

    def reset_(self, where: Tensor, value: float) -> None:
        """Nothing: an open gate is 1, and a group whose weights are zero stays closed."""

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, by_size={self.by_size}"
