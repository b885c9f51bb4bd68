"""What gates that nobody moves any more still multiply: worked out once, and nothing where they are 1.

Gates that have settled are 1 or 0, and what is 0 has mostly left the network. So a step of it costs what one of the
small plain network does. This file decides when that may be relied on; `multiplying.py` says what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ellzero.gated.base.asking import Asking
from ellzero.gated.multiplying import Held, Target, hold
from ellzero.gates.abstract import values


class _Known(NamedTuple):
    """What is left to multiply, of which numbers in the gates, and in which version."""

    numbers: list[Tensor]
    versions: list[int]
    held: dict[str, Held]


class Holding(Asking):
    """Around gates that may stay as they are.

    Attributes:
        still: whether nobody moves the gates any more. Who says so is a `Budget`, or a trainer of recipes; torch counts
            what is written into a tensor, but for what goes past it by `.data`.
    """

    still = False
    _targets: dict[str, Target]
    _known: _Known | None = None

    def held(self) -> dict[str, Held] | None:
        """The weights that gates still multiply, with what; `None` where gates may move, or a gradient reaches them."""
        if not self.still:
            return None
        if torch.compiler.is_compiling():  # which knows no versions: who says `still` has looked at them
            return None if self._known is None else self._known.held
        gates = self._gates()
        numbers = [t for g in gates for t in (*g._parameters.values(), *g._buffers.values()) if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in numbers):
            return None
        if any(type(t) not in (nn.Parameter, Tensor) or t.is_inference() for t in numbers):
            return None  # put there for one call, or shared by processes
        if any(gate.sees_weights for gate in gates):
            return None
        versions, known = [t._version for t in numbers], self._known
        if (
            known is None
            or versions != known.versions
            or any(a is not b for a, b in zip(numbers, known.numbers, strict=True))
        ):
            with torch.no_grad():
                known = _Known(numbers, versions, hold(self._targets, values(gates), self.tables))
            self._known = known
        return known.held
