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

    def fits(self, numbers: list[Tensor]) -> bool:
        """Whether these are the same tensors, and none was written to since."""
        both = zip(numbers, self.numbers, self.versions, strict=False)
        return len(numbers) == len(self.numbers) and all(a is b and a._version == v for a, b, v in both)


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
        owned = (own for gate in self._gates() for own in (gate._parameters, gate._buffers))
        numbers = [t for own in owned for t in own.values() if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in numbers):
            return None
        known = self._known
        if known is None or not known.fits(numbers):
            if not self._can_be_held(numbers):
                return None
            with torch.no_grad():
                held = hold(self._targets, values(self._gates()), self.tables)
            self._known = known = _Known(numbers, [t._version for t in numbers], held)
        return known.held

    def _can_be_held(self, numbers: list[Tensor]) -> bool:
        """Not where they were put there for one call or are shared by processes, nor where weights close gates."""
        plain = all(type(t) in (nn.Parameter, Tensor) and not t.is_inference() for t in numbers)
        return plain and not any(gate.sees_weights for gate in self._gates())
