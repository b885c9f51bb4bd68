"""Gates of a rectified base distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from ellzero.gates.abstract import AJAR, AbstractGate, Phi, check_mask
from ellzero.gates.distributions import Rectified
from ellzero.gates.formulas import hard_concrete_prob_nonzero, promote
from ellzero.gates.hard_concrete import CLOSED, INIT_STD, check_drop_rate


@final
class RectifiedGate(AbstractGate):
    """Gates z = clamp(s, 0, 1) with s from a location-scale family (Louizos et al., section 2.1, eqs. 5–8).

    The test-time value is clamp(loc, 0, 1).

    Args:
        shape: how many gates: an int, or a weight's shape.
        base: a class `base(loc, scale)` with `cdf` and `icdf`, symmetric about `loc`: `torch.distributions.Normal`, or
            `Logistic` of this package.
        drop_rate: p in (0, 1); loc starts so that P(open) is the one a hard concrete gate starts with.
        scale: the scale at the start; None takes the one at which p = 1/2 starts from loc = 1/2, where as many
            gates are exactly one as exactly zero, again as in the hard concrete.
        learn_scale: learn the scale too, one per gate, as exp(`log_scale`).

    Raises:
        ValueError: if an argument lies outside its range.

    Example:
        >>> gate = RectifiedGate(3, base=Normal, drop_rate=0.5)
        >>> gate.value().round(decimals=1).tolist()
        [0.5, 0.5, 0.5]
    """

    loc: nn.Parameter
    log_scale: Tensor

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        base: Callable[..., Distribution] = Normal,
        drop_rate: float = 0.5,
        scale: float | None = None,
        learn_scale: bool = True,
    ) -> None:
        super().__init__(shape)
        check_drop_rate(drop_rate)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"`scale` must be positive and finite, got {scale}")
        self.base = base
        standard = base(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))

        def loc_for(p: float) -> float:
            """The location, in units of the scale, at which P(s > 0) is that of a hard concrete of drop rate p."""
            log_alpha = torch.tensor(math.log((1 - p) / p), dtype=torch.float64)
            return float(standard.icdf(hard_concrete_prob_nonzero(log_alpha, 2 / 3, -0.1, 1.1)))

        scale = 0.5 / loc_for(0.5) if scale is None else scale
        self.loc = nn.Parameter(torch.empty(self.shape).normal_(loc_for(drop_rate) * scale, INIT_STD * scale))
        log_scale = torch.full(self.shape, math.log(scale))
        if learn_scale:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    def phi(self) -> Phi:
        return self.loc, self.log_scale

    def constants(self) -> tuple[Hashable, ...]:
        return (self.base,)

    def _distribution(self, phi: Phi) -> Rectified:
        return Rectified(self.base(promote(phi[0]), promote(phi[1]).exp(), validate_args=False), validate_args=False)

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return self._distribution(phi).icdf(u)

    def value_from(self, phi: Phi) -> Tensor:
        return self._distribution(phi).noiseless

    def prob_from(self, phi: Phi) -> Tensor:
        return self._distribution(phi).prob_nonzero

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        check_mask(where, self.shape)
        closed = CLOSED * promote(self.log_scale).exp()
        self.loc.copy_(torch.where(where, closed.to(self.loc.dtype), self.loc))

    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        check_mask(where, self.shape)
        self.loc.copy_(torch.where(where, torch.tensor(1.0 if wide else AJAR).to(self.loc), self.loc))

    def extra_repr(self) -> str:
        name = getattr(self.base, "__name__", repr(self.base))
        return f"{tuple(self.shape)}, base={name}, learn_scale={isinstance(self.log_scale, nn.Parameter)}"
