"""Numbers over seeds: means with their intervals, and the points that no other beats. It does not know what of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); NaN for a single value."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.nan
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # slow to import, and rarely needed

    return mean, float(stdtrit(count - 1, 0.975)) * statistics.stdev(values) / math.sqrt(count)


def difference(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Difference of two means, left − right, and half the width of its 95 % confidence interval (Welch's t); NaN where
    one has a single value.
    """
    mean = statistics.fmean(left) - statistics.fmean(right)
    if min(len(left), len(right)) < 2:
        return mean, math.nan
    from scipy.special import stdtrit

    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (left, right)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return mean, 0.0
    degrees = total**2 / sum(part**2 / count for part, count in parts)
    return mean, float(stdtrit(degrees, 0.975)) * math.sqrt(total)


def with_interval(values: Sequence[float], digits: str = ".2f") -> str:
    """Mean ± half the 95 % interval, as a table has it."""
    mean, half = interval(values)
    return f"{mean:{digits}}" if math.isnan(half) else f"{mean:{digits}} ± {half:{digits}}"


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The positions of the points that no other beats, by rising first number; equal points are on the front together.

    Both numbers, such as cost and error, are the better the less they are, and must be finite.
    """
    for point in points:
        if not all(map(math.isfinite, point)):
            raise ValueError(f"`points` must be finite numbers, got {point}")
    out: list[int] = []
    for at in sorted(range(len(points)), key=lambda k: points[k]):
        if not out or points[at][1] < points[out[-1]][1] or points[at] == points[out[-1]]:
            out.append(at)
    return out
