"""What a network takes is measured when its gates settle, and the choice is made again until that is what it may be.

A table adds up layers, each with a time for every width. A device may have another mind: a kernel for two widths
together, a fixed cost of every launch. So the network that was chosen by a table is timed beside the dense one, and the
table's one factor moves until both agree. Processes that train together go by what the first of them measures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.out.latency.cost import Latency

CLOSE = 0.02  # what a time may miss its bound by, of the bound
ROUNDS, CHOICES = 8, 24  # networks that are timed at most; and that are chosen, some of which come again


class _Tried(NamedTuple):
    """A network that was timed: what it misses its bounds by, its units, and the aims that it was chosen by."""

    miss: float
    opens: Tensor
    aims: list[float]


class _Aim:
    """Where to aim with a table so that the clock says `most`. All aims are by the table as it was at first.

    Attributes:
        aim: where it aims now.
        low, high: an aim that gives a network within the bound, and one from which on networks take too long.
        seen: what was measured of each network that was timed, and what the table says of it.
    """

    def __init__(self, cost: Latency, most: float) -> None:
        self.cost, self.most, self.factor = cost, most, cost.table.factor
        self.aim, self.low, self.high = most, 0.0, 1.0
        self.seen: list[tuple[float, float]] = []

    def look(self, gated: Gated) -> float:
        """Times the network, and tells by what share of the bound it misses; 0 where that cannot be measured.

        Anything above a bound is worse than anything below it.
        """
        share: float | None = agreed(self.cost.timed(gated))
        if share is None:
            return 0.0
        told = float(self.cost(gated, kept=True)) / self.cost.table.seconds
        self.seen.append((share, 1 - (1 - told) * self.factor / self.cost.table.factor))
        off = share / self.most - 1
        if off > CLOSE:
            self.high = min(self.high, self.seen[-1][1])
            return 1 + off
        self.low = max(self.low, self.aim)
        return abs(off)

    def move(self) -> None:
        """Aims between two networks that were timed, or beyond them in proportion, but never where it has been."""
        if not self.seen:  # it cannot be measured here; another bound can
            return
        shares, told = zip(*sorted(self.seen), strict=True)
        end = 0 if self.most < shares[0] else -1
        aim = float(np.interp(self.most, shares, told))
        if not shares[0] <= self.most <= shares[-1]:
            aim = told[end] * self.most / shares[end]
        self.take(aim if self.low < aim < self.high else (self.low + self.high) / 2)

    def move_on(self) -> None:
        """Aims half-way to what takes too long: the same network came again, as on a step of a staircase."""
        self.low = max(self.low, self.aim)
        self.take((self.low + self.high) / 2)

    def take(self, aim: float) -> None:
        """Goes on with a table that calls the bound what it calls the aim now; the dense network is no aim."""
        if aim >= 1:
            return
        self.aim = aim
        self.cost.take(replace(self.cost.table, factor=self.factor * (1 - self.most) / (1 - aim)))


def chosen_by_the_clock(gated: Gated, bounds: Mapping[Any, Any], choose: Callable[[], None]) -> None:
    """Chooses what is kept until it takes what it may, as measured; the nearest of a few, where none meets it.

    Args:
        gated: the network, which `choose` changes.
        bounds: the fraction of each cost; those of a `Latency` as a whole are measured.
        choose: closes and opens units, by the tables as they are.
    """
    aims = [_Aim(cost, most) for cost, most in bounds.items() if isinstance(cost, Latency) and isinstance(most, float)]
    before, tried = copy.deepcopy(gated.gates.state_dict()), list[_Tried]()
    for _ in range(CHOICES if aims else 0):
        try:
            choose()
        except ValueError:  # out of reach, by the last aim
            if not tried:
                raise
            break
        opens = gated.opens().cpu()
        again = any(torch.equal(opens, one.opens) for one in tried)
        if not again:
            tried.append(_Tried(max(aim.look(gated) for aim in aims), opens, [aim.aim for aim in aims]))
        if (
            len(tried) == ROUNDS
            or tried[-1].miss <= CLOSE
            or all(aim.high - aim.low < CLOSE * aim.most for aim in aims)
        ):
            break
        for aim in aims:
            aim.move_on() if again else aim.move()
        gated.gates.load_state_dict(before)
    if tried:
        for aim, at in zip(aims, min(tried, key=lambda one: one.miss).aims, strict=True):
            aim.take(at)
        gated.gates.load_state_dict(before)
    choose()


def agreed(said: Any) -> Any:
    """What the first of all processes says; what is said, where there is one alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return said
    words = [said]
    dist.broadcast_object_list(words, src=0)
    return words[0]
