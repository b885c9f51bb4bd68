"""Times as functions of widths: lines through measured points, the chords that gradients follow, and how they combine.

The time of a region of the network (a layer and what follows it up to the next) depends on several widths x_i, as that
of a convolution on channels in and out. With the curve F_i of each width, measured where all others are dense, the time
D there, and one constant c,

    T(x) = c + (D − c) · Π_i (F_i(x_i) − c) / (D − c).

That is exact for T = αxy + βx + γy + δ, whatever the numbers, and a staircase in one width stays one at any other. This
file knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ellzero.gated.counting import Vector

FLAT = 0.25  # of the mean slope: what is flatter is part of a longer chord
FAR = 20.0  # times D, for the constant: so far below, factors nearly add up
LEAST = 1e-6  # of the time, over the whole width: the slope of what does not pay, so that it has a side
Knots = tuple[Vector, Vector]  # widths, from the smallest to the dense one, and times


def chords(knots: Knots) -> Knots:
    """Of the points on a curve those whose chords all rise: on the flat steps of a staircase a gradient would die.

    From the dense end each chord goes as far down as it takes to be no flatter than a quarter of the mean: to the far
    side of a step.

    Example:
        >>> x, y = chords((np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([1.0, 2.0, 2.0, 3.0, 3.0])))
        >>> x.tolist(), y.tolist()
        ([1.0, 3.0, 5.0], [1.0, 2.0, 3.0])
    """
    x, y = knots
    rise = max(y[-1] - y[0], LEAST * abs(y[-1]))
    least = FLAT * rise / (x[-1] - x[0])
    taken = [len(x) - 1]
    for k in range(len(x) - 2, -1, -1):
        if y[taken[-1]] - y[k] >= least * (x[taken[-1]] - x[k]):
            taken.append(k)
    while len(taken) > 1 and taken[-1] and y[taken[-1]] - y[0] < least * (x[taken[-1]] - x[0]):
        taken.pop()  # what is left at the narrow end is flat, and joins the chord before
    chosen = sorted({0, *taken})
    heights = y[chosen]
    heights[0] = min(heights[0], heights[1] - least * (x[chosen[1]] - x[0]))
    return x[chosen], heights


@dataclass(frozen=True, eq=False)
class Curves:
    """Many lines through points, each evaluated at a place of its own."""

    x: Tensor  # by curve, its widths, padded with ∞
    y: Tensor  # its times, padded with anything
    last: Tensor  # the number of its last point

    @classmethod
    def of(cls, knots: Sequence[Knots], device: torch.device, dtype: torch.dtype) -> Curves:
        """Lays curves of different lengths out side by side."""
        longest = max((len(x) for x, _ in knots), default=0)
        xs, ys = np.full((len(knots), longest), np.inf), np.zeros((len(knots), longest))
        for row, (x, y) in enumerate(knots):
            xs[row, : len(x)], ys[row, : len(x)] = x, y
        last = torch.tensor([[len(x) - 1] for x, _ in knots], device=device, dtype=torch.int64).reshape(-1, 1)
        points = [torch.as_tensor(a, device=device, dtype=dtype) for a in (xs, ys)]
        return cls(points[0], points[1], last)

    def at(self, where: Tensor) -> Tensor:
        """The value of each curve at its place; beyond its ends it goes straight on."""
        below = self.x < where.detach().unsqueeze(1)
        right = below.sum(1, keepdim=True).clamp(min=1).minimum(self.last)
        (x0, x1), (y0, y1) = ([a.gather(1, k).squeeze(1) for k in (right - 1, right)] for a in (self.x, self.y))
        return y0 + (where - x0) * (y1 - y0) / (x1 - x0)


def constant(times: Vector, ratios: Sequence[Vector], dense: float) -> float:
    """The constant c with which the times of joint widths are met best.

    Args:
        times: measured, one for each choice of widths.
        ratios: for each choice the curves there, F_i(x_i) / D.
        dense: D.
    """
    if not len(times) or dense <= 0:
        return 0.0
    curves = np.stack(ratios)
    highest = max(0.0, float(curves.min()) - 0.01)  # above it, a factor would be negative
    tried = np.concatenate([-np.geomspace(FAR, 0.01, 40), np.linspace(0.0, highest, 40)])
    for _ in range(4):
        factors = (curves[None] - tried[:, None, None]) / (1 - tried)[:, None, None]
        misses = np.abs(tried[:, None] + (1 - tried)[:, None] * factors.prod(2) - times / dense).sum(1)
        best = int(np.argmin(misses))
        low, high = tried[max(0, best - 1)], tried[min(best + 1, len(tried) - 1)]
        found, tried = float(tried[best]), np.linspace(low, high, 20)
    return dense * found
