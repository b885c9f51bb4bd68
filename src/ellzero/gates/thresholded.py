"""Gates without an atom at zero: a threshold on their evidence says which are open at test time.

A Gaussian or log-normal multiplier is never exactly zero, so that P(z ≠ 0) = 1 and there is no expected cost. What is
open is a rule; what is closed for good is a mask. This file knows no family: those are in `families`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import AJAR, AbstractGate, NoExpectation, Phi, check_mask
from ellzero.gates.formulas import promote


class AbstractThresholdedGate(AbstractGate):
    """Gates that are open where their evidence lies above a bar and `keep` says so.

    The methods that a family provides say nothing of `keep`: they are asked of all gates, and count where it is 1.

    Args:
        shape: how many gates: an int, or a weight's shape.
        bar: the evidence that a gate must exceed to be open.

    Attributes:
        keep: 1, or 0 in a gate that is closed for good. It is a parameter that nothing trains: so it is stored,
            averaged and stacked as the others are.
        lacks: why there is no P(z ≠ 0), a clause.
    """

    lacks: ClassVar[str]

    def __init__(self, shape: int | Sequence[int], bar: float) -> None:
        super().__init__(shape)
        self.bar = float(bar)
        self.keep = nn.Parameter(torch.ones(self.shape), requires_grad=False)

    @abstractmethod
    def own(self) -> Phi:
        """The family's own parameters, each expanded to `shape`."""

    @abstractmethod
    def own_constants(self) -> tuple[Hashable, ...]:
        """What else its functions depend on."""

    @abstractmethod
    def noisy_from(self, own: Phi, u: Tensor) -> Tensor:
        """A draw in training."""

    @abstractmethod
    def mean_from(self, own: Phi) -> Tensor:
        """What stands for the noise at test time; not zero where the evidence lies above the bar."""

    @abstractmethod
    def signal_from(self, own: Phi) -> Tensor:
        """The evidence."""

    @abstractmethod
    def charge_from(self, own: Phi) -> Tensor:
        """The family's penalty."""

    @abstractmethod
    def reset_(self, where: Tensor, value: float) -> None:
        """Gives the gates in the mask a test-time value, with evidence above the bar."""

    @final
    def phi(self) -> Phi:
        return self.keep, *self.own()

    @final
    def constants(self) -> tuple[Hashable, ...]:
        return self.bar, *self.own_constants()

    @final
    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return _kept(phi, self.noisy_from(phi[1:], promote(u)))

    @final
    def value_from(self, phi: Phi) -> Tensor:
        own = phi[1:]
        return _kept(phi, torch.where(self.signal_from(own) > self.bar, self.mean_from(own), 0.0))

    @final
    def evidence_from(self, phi: Phi) -> Tensor:
        return _kept(phi, self.signal_from(phi[1:]))

    @final
    def complexity_from(self, phi: Phi) -> Tensor:
        return _kept(phi, self.charge_from(phi[1:]))

    @final
    def prob_from(self, phi: Phi) -> Tensor:
        raise NoExpectation(
            f"{type(self).__name__} has no expected cost, only a kept one: {self.lacks}; penalise `l0.complexity`, or "
            'bound what is kept: `Constraint(cost, at_most, on="kept")` or a `Budget`'
        )

    @final
    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        check_mask(where, self.shape)
        self.keep.masked_fill_(where, 0.0)

    @final
    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        check_mask(where, self.shape)
        self.keep.masked_fill_(where, 1.0)
        self.reset_(where, 1.0 if wide else AJAR)


def _kept(phi: Phi, x: Tensor) -> Tensor:
    return torch.where(phi[0] > 0.5, x, 0.0)
