"""What a training loop forgets, seen from a term of its loss.

A term sees its network in every step. So it can tell that the network never ran with its gates, or that nothing moves
them: mistakes that no error shows, only a network that is useless or not smaller. This file knows no costs.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import final

import torch

from ellzero.gated.module import Gated

_WARN = partial(warnings.warn, stacklevel=3)
PATIENCE = 100  # calls: more than anyone accumulates gradients over


@final
class Watch:
    """Counts the calls of one term in training, and warns once of what is missing beside them."""

    def __init__(self) -> None:
        self._calls = 0
        self._moves = 0  # how often gates had been written to at the first call

    def look(self, gated: Gated, ascends: int | None = None) -> None:
        """Takes note of one call in training; `ascends` is how often multipliers have been moved, if there are any."""
        if not gated.training or not torch.is_grad_enabled() or gated.fixed:
            return
        self._calls += 1
        if self._calls == 1:
            self._moves = _moves(gated)
        elif self._calls == 2:
            if not gated.drawn:
                _WARN("the network has not run with its gates: call `gated(x)` in the loop, not the model itself")
            if not gated.followed and any(gate.acts_after_steps for _, gate in gated.named_gates()):
                _WARN("gates act after each step, and nobody calls them: `l0.objectives.follow(gated, optimizer)` does")
            if not gated.estimated and any(gate.needs_loss for _, gate in gated.named_gates()):
                _WARN("gates learn from the loss, and nobody tells it: call `l0.objectives.estimated_backward`")
        elif self._calls == PATIENCE:
            if _moves(gated) == self._moves:
                _WARN("nothing has moved the gates: give the optimizer `gated.param_groups(…)`, not the model's own")
            if ascends == 0:
                _WARN("nothing has moved the multipliers: call `ascend()` after each `optimizer.step()`")


def _moves(gated: Gated) -> int:
    return sum(p._version for p in gated.gates.parameters())
