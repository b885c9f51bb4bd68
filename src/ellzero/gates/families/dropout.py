"""Plain dropout as a gate family: what both papers compare the cost of training with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ellzero.gates.abstract import AbstractGate, Phi, check_mask
from ellzero.gates.formulas import promote


@final
class DropoutGate(AbstractGate):
    """z ~ Bernoulli(1 − p)/(1 − p) in training, 1 at test time (Srivastava et al., 2014; Louizos et al., fig. 3).

    P(z ≠ 0) = 1 − p, so that the expected cost is that of a network with dropout in training; what is kept is all.
    It learns nothing: a penalty or constraint on it moves nothing. The usual p: 0.2 on inputs, 0.5 on hidden units, 0.3
    in a WRN. One draw is shared by the batch, where `nn.Dropout` draws for every example.

    Args:
        shape: how many gates: an int, or a weight's shape.
        p: the rate, in [0, 1).

    Raises:
        ValueError: if `p` lies outside its range.

    Example:
        >>> DropoutGate(3, p=0.2).value()
        tensor([1., 1., 1.])
    """

    def __init__(self, shape: int | Sequence[int], *, p: float = 0.5) -> None:
        super().__init__(shape)
        if not 0 <= p < 1:
            raise ValueError(f"`p` must lie in [0, 1), got {p}")
        self.p = float(p)
        # 1 − p, or 0 in a gate that is closed for good. Nothing trains it.
        self.rate = nn.Parameter(torch.full(self.shape, 1 - self.p), requires_grad=False)

    def phi(self) -> Phi:
        return (self.rate,)

    def constants(self) -> tuple[Hashable, ...]:
        return ()

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        rate = promote(phi[0])
        return torch.where(u < rate, 1 / rate.clamp(min=torch.finfo(rate.dtype).tiny), 0.0)

    def value_from(self, phi: Phi) -> Tensor:
        return (phi[0] > 0).to(promote(phi[0]).dtype)

    def prob_from(self, phi: Phi) -> Tensor:
        return promote(phi[0])

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        check_mask(where, self.shape)
        self.rate.masked_fill_(where, 0.0)

    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        check_mask(where, self.shape)
        self.rate.masked_fill_(where, 1.0 if wide else 1 - self.p)  # a value of 1 it has in any case

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, p={self.p:g}"
