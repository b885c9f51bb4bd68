"""How the gradient of a loss reaches gates that are drawn as 0 or 1, where no path leads through the draw.

An estimator is a choice apart from the family: Louizos et al., section 2.1, name the score function and the
straight-through estimator for eq. 3, and take neither. z = 1[u < π] with π = σ(l); all gradients here are with respect
to the logit l. This file knows numbers; `objectives/estimating.py` has the step that hands the loss over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor


class AbstractEstimator(ABC):
    """How gates that are 0 or 1 learn.

    Attributes:
        needs_loss: whether the gradient is made of the value of the loss, by `objectives.estimated_backward`, and not
            by the backward of the draw.
        antithetic: whether it also needs the loss of the mirrored draw, 1[1 − u < π]: a second forward.
    """

    needs_loss: ClassVar[bool] = True
    antithetic: ClassVar[bool] = False

    def draw(self, logit: Tensor, u: Tensor) -> Tensor:
        """z = 1[u < π], without a gradient."""
        return (u < torch.sigmoid(logit)).to(logit.dtype)

    @abstractmethod
    def slope(self, logit: Tensor, u: Tensor, loss: Tensor, mirrored: Tensor | None, baseline: Tensor) -> Tensor:
        """An estimate of the gradient of E[loss] with respect to each logit.

        Args:
            logit: of each gate.
            u: the noise that the gates were drawn from.
            loss: of the draw, a scalar.
            mirrored: the loss of the mirrored draw, if it is asked for.
            baseline: a moving average of the losses before this one.
        """


@final
@dataclass(frozen=True)
class StraightThrough(AbstractEstimator):
    """z = 1[u < π], and in the backward dz/dπ = 1 (Bengio et al., 2013). Cheap; biased unless the loss is linear."""

    needs_loss: ClassVar[bool] = False

    def draw(self, logit: Tensor, u: Tensor) -> Tensor:
        pi = torch.sigmoid(logit)
        return (u < pi).to(pi.dtype) + (pi - pi.detach())

    def slope(self, logit: Tensor, u: Tensor, loss: Tensor, mirrored: Tensor | None, baseline: Tensor) -> Tensor:
        return torch.zeros_like(logit)  # all is in the backward


@final
@dataclass(frozen=True)
class ScoreFunction(AbstractEstimator):
    """(f(z) − b)·(z − π), REINFORCE with a moving average b of losses before (Williams, 1992; Louizos et al., eq. 3).

    Args:
        decay: of the moving average, in [0, 1).
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"`decay` must lie in [0, 1), got {self.decay}")

    def slope(self, logit: Tensor, u: Tensor, loss: Tensor, mirrored: Tensor | None, baseline: Tensor) -> Tensor:
        return (loss - baseline) * (self.draw(logit, u) - torch.sigmoid(logit))


@final
@dataclass(frozen=True)
class AR(AbstractEstimator):
    """f(1[u < π])·(1 − 2u), augment–REINFORCE: one forward (Yin & Zhou, 2019; L0-ARM, Li & Ji, 2019)."""

    def slope(self, logit: Tensor, u: Tensor, loss: Tensor, mirrored: Tensor | None, baseline: Tensor) -> Tensor:
        return loss * (1 - 2 * u)


@final
@dataclass(frozen=True)
class ARM(AbstractEstimator):
    """(f(1[u > 1 − π]) − f(1[u < π]))·(u − ½), augment–REINFORCE–merge (Yin & Zhou, 2019; Li & Ji, 2019, eq. 8).

    The two draws differ in few gates when π is near 0 or 1, so that its variance is low. Its noise is one number for
    all gates: in a wide network with small batches, gates that do not matter drift.
    """

    antithetic: ClassVar[bool] = True

    def slope(self, logit: Tensor, u: Tensor, loss: Tensor, mirrored: Tensor | None, baseline: Tensor) -> Tensor:
        assert mirrored is not None
        return (mirrored - loss) * (u - 0.5)
