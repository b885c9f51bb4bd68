"""What gates that nobody moves any more still multiply: worked out once, and nothing where they are 1.

Gates that have settled are 1 or 0, and what is 0 has mostly left the network. So a step of it costs what one of the
small plain network does. This file decides when that may be relied on; `multiplying.py` says what is left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ellzero.gated.base.asking import Asking
from ellzero.gated.multiplying import Held, Target, hold
from ellzero.gates.abstract import values


class _Known(NamedTuple):
    """What is left to multiply, of gates with these constants and numbers, in which version and at which place."""

    constants: list[Any]
    numbers: list[Tensor]
    written: list[tuple[int, int]]
    held: dict[str, Held]

    def fits(self, constants: list[Any], numbers: list[Tensor]) -> bool:
        """Whether these are the same tensors, and none was written to or laid elsewhere since."""
        same = len(numbers) == len(self.numbers) and all(a is b for a, b in zip(numbers, self.numbers, strict=True))
        return same and self.written == _written(numbers) and self.constants == constants


class Holding(Asking):
    """Around gates that may stay as they are.

    Attributes:
        still: whether gates have settled, so that what they multiply need not be worked out anew in each step of
            training; a `Budget` says so. Whoever moves them all the same is noticed, but for what goes past torch's
            own count of writes: `.data`, numpy, a fused optimizer. Evaluation, compilation and export never go by it.
    """

    still = False
    on_activations: bool
    _targets: dict[str, Target]
    _known: _Known | None = None

    def acting(self) -> dict[str, Held] | None:
        """The weights that gates multiply for as long as they stay as they are, with what.

        `None` where they are not that simple: on activations, closed by weights, or made of modules of their own.
        """
        gates = self._gates()
        if self.on_activations or any(gate.sees_weights or gate._modules for gate in gates):
            return None
        with torch.inference_mode(False), torch.no_grad():
            return hold(self._targets, values(gates), self.tables)

    def held(self) -> dict[str, Held] | None:
        """The same in a step of training, while nobody moves the gates and no gradient reaches them; else `None`."""
        # A compiler could not see that they are moved; what is evaluated or exported is not to rely on a memory.
        if not (self.still and self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return None
        gates = self._gates()
        numbers: list[Tensor] = [p for gate in gates for p in gate._parameters.values() if p is not None]
        # Other tensors than parameters are there for one call, of `torch.func` perhaps.
        if any(type(p) is not nn.Parameter or p.requires_grad for p in numbers):
            return None
        numbers += [b for gate in gates for b in gate._buffers.values() if b is not None]
        if any(t.is_inference() for t in numbers):  # torch counts no writes into them
            return None
        constants = [gate.constants() for gate in gates]
        if self._known is None or not self._known.fits(constants, numbers):
            try:
                held, written = self.acting(), _written(numbers)
            except RuntimeError:  # fake tensors, or those that `torch.func.vmap` stacks, have no numbers to look at
                return None
            if held is None:
                return None
            self._known = _Known(constants, numbers, written, held)
        return self._known.held

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: nobody has said that its gates stay as they are. It works out anew what costs remember, of which
        torch cannot copy what was made inside `torch.func`.
        """
        return {k: v for k, v in self.__dict__.items() if k not in ("still", "_known")} | {"memo": {}}


def _written(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(t._version, t.data_ptr()) for t in tensors]
