"""An exponential moving average of parameters, corrected for where it began.

This file knows tensors by name; it does not know networks, recipes or steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor


@final
class Average:
    """a ← d·a + (1 − d)·v from a = 0, to be divided by 1 − d^t after t updates (Louizos et al., their code).

    Args:
        values: what is averaged, by name.
        decay: d in (0, 1); None for no average.
        begins: the step at which it begins; 0 for at once.

    Attributes:
        tensors: a, by name; empty if there is no average.
        active: whether it is under way. One that begins later is switched on by who knows that it is time.
    """

    def __init__(self, values: Mapping[str, Tensor], decay: float | None, begins: int = 0) -> None:
        self.decay, self.begins = decay or 0.0, begins
        self.tensors = {n: torch.zeros_like(v) for n, v in values.items()} if decay else {}
        self.active = bool(self.tensors) and begins == 0

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Takes in the values after a step, if it is active."""
        if self.active:
            torch._foreach_lerp_(list(self.tensors.values()), [v.detach() for v in values.values()], 1 - self.decay)

    def correction(self, clock: Tensor) -> float:
        """What it is to be divided by after so many steps."""
        return float(1 - self.decay ** max(0.0, float(clock) - self.begins))

    def counting(self, values: Mapping[str, Tensor], clock: Tensor) -> dict[str, Tensor]:
        """The values that count: the average, corrected, where there is one by now; else the values themselves."""
        correction = self.correction(clock)
        if not self.active or correction == 0:
            return {n: v.detach() for n, v in values.items()}
        return {n: v / correction for n, v in self.tensors.items()}
