"""Whether gates are noisy in training, and whether batch norm still remembers their noise.

Statistics gathered under noise are not those of the network in evaluation. How gates are drawn is not known here.
"""

from __future__ import annotations

import math
from typing import Self

from torch.nn.modules.batchnorm import _BatchNorm

from ellzero.gated.base.showing import Showing
from ellzero.gates.warning import warn

FORGOTTEN = 0.05  # the share of noisy batches in running statistics at which they count as those of the fixed network


class Fixing(Showing):
    """Around a `model` whose gates can be fixed.

    Attributes:
        fixed: whether gates have their test-time values in training too.
        drawn: whether they were ever drawn in a forward.
        noisy: whether they were, since batch-norm statistics were last gathered without noise. Who hands in
            `gate_noise` looks after the statistics too.
    """

    fixed = False
    drawn = False
    noisy = False
    _batches: tuple[int, ...] = ()  # that each batch norm had seen when gates were fixed
    _first: tuple[int, ...] = ()  # that it had seen when gates came

    def fix(self, fixed: bool = True) -> Self:
        """Ends the noise: gates have their test-time values in training too, whoever calls `train()`."""
        self.fixed = fixed
        self._batches = self._batches_seen()
        return self

    def note_draw(self, *, noisy: bool) -> None:
        """Remembers a draw. Neither flag is read here: a compiler would compile anew when it has changed."""
        object.__setattr__(self, "drawn", True)  # torch's own way looks for parameters first, in each step
        if noisy:
            object.__setattr__(self, "noisy", True)

    def train(self, mode: bool = True) -> Self:
        """As of any module; warns where evaluation would use statistics that were gathered under noise."""
        if self.training and not mode:
            self.warn_of_noise()
        return super().train(mode)

    def warn_of_noise(self) -> None:
        """Warns if batch-norm statistics are those of the noisy network."""
        if not self.noisy or not (norms := self._norms()):
            return
        none = (0,) * len(norms)
        fixed, first = (b if len(b) == len(norms) else none for b in (self._batches, self._first))
        ends = fixed if self.fixed else tuple(map(_seen, norms))
        noisy = [(n, end) for n, start, end in zip(norms, first, ends, strict=True) if end != start]  # not frozen ones
        if all(self.fixed and _share(n, _seen(n) - end) <= FORGOTTEN for n, end in noisy):
            return
        warn(
            "batch-norm statistics were gathered while gates were noisy, so that the error in evaluation is too high: "
            "call `l0.recalibrate(gated, batches)` first (`budget.finish(batches)` does), or train on with fixed gates"
        )

    def _batches_seen(self) -> tuple[int, ...]:
        return tuple(map(_seen, self._norms()))

    def _norms(self) -> list[_BatchNorm]:
        return [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def _seen(norm: _BatchNorm) -> int:
    seen = norm.num_batches_tracked
    return 0 if seen is None or seen.is_meta else int(seen)


def _share(norm: _BatchNorm, batches: int) -> float:
    """Of what was there before these batches, the share that is left in the running statistics."""
    if norm.momentum is None:  # a plain mean
        return 1 - batches / max(1, _seen(norm))
    return float(math.pow(1 - norm.momentum, batches))
