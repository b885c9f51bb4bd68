"""Numbers over seeds: intervals against scipy's Student, the front against all pairs."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ellzero.experiments.store.statistics import difference, interval, pareto


@pytest.mark.parametrize("n", [2, 3, 5, 10, 11, 12, 20, 40, 500])
def test_the_interval_is_students(n: int) -> None:
    values = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).tolist()
    mean, half = interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=statistics.fmean(values), scale=stats.sem(values))
    assert mean == pytest.approx((low + high) / 2)
    assert half == pytest.approx((high - low) / 2, rel=1e-9)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 3), (3, 5), (10, 4)])
def test_the_interval_of_a_difference_is_welchs(n: int, m: int) -> None:
    draw = torch.Generator().manual_seed(n + m)
    left, right = (torch.randn(k, dtype=torch.float64, generator=draw).mul(k).tolist() for k in (n, m))
    mean, half = difference(left, right)
    low, high = stats.ttest_ind(left, right, equal_var=False).confidence_interval(0.95)
    assert mean == pytest.approx((low + high) / 2)
    assert half == pytest.approx((high - low) / 2, rel=1e-9)
    assert difference([1.0, 1.0], [3.0, 3.0]) == (-2.0, 0.0)
    assert math.isnan(difference([1.0], [3.0, 4.0])[1])


def test_one_value_has_no_interval() -> None:
    mean, half = interval([1.5])
    assert mean == 1.5
    assert math.isnan(half)


COORDINATE = st.integers(0, 6).map(float)  # few values, so that there are ties of all kinds


@pytest.mark.slow
@given(st.lists(st.tuples(COORDINATE, COORDINATE), max_size=30))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    expected = {k for k, p in enumerate(points) if not any(beats(q, p) for q in points)}
    found = pareto(points)
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [points[k] for k in found] == sorted(points[k] for k in found)


def test_a_point_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        pareto([(0.1, 1.0), (0.2, float("nan"))])
