"""Numbers over seeds: means with their intervals, and the points that no other beats. What they measure is not known
here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); NaN for a single value.

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> mean, round(half, 3)
        (2.0, 2.484)
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.nan
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # slow to import, and rarely needed

    return mean, float(stdtrit(count - 1, 0.975)) * statistics.stdev(values) / math.sqrt(count)


def with_interval(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± half the 95 % interval, as a table has it.

    Example:
        >>> with_interval([1.0, 2.0, 3.0]), with_interval([1.5])
        ('2.00 ± 2.48', '1.50')
    """
    mean, half = interval(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats: none is as good in both numbers and better in one. By rising first number; equal
    points are on the front together.

    Args:
        points: two numbers each, both the better the less they are, such as cost and error.

    Returns:
        Their positions.

    Raises:
        ValueError: a number is not finite.

    Example:
        >>> pareto([(0.4, 1.8), (0.2, 2.0), (0.3, 1.5), (0.3, 1.6)])
        [1, 2]
    """
    for point in points:
        if not all(map(math.isfinite, point)):
            raise ValueError(f"`points` must be finite numbers, got {point}")
    out: list[int] = []
    for at in sorted(range(len(points)), key=lambda k: points[k]):
        if not out or points[at][1] < points[out[-1]][1] or points[at] == points[out[-1]]:
            out.append(at)
    return out
