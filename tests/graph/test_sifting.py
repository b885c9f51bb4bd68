"""Halving: against who is known to fail, and with how few trials that is found out."""

from collections.abc import Sequence

import pytest

from ellzero.graph.trials.drawing import sifted


@pytest.mark.parametrize(
    ("at_once", "later"), [((), ()), ((3, 9), ()), ((), (5,)), ((0, 1, 2, 30), (8,)), (range(32), ())]
)
def test_what_fails_is_found_and_dear_trials_are_few(at_once: Sequence[int], later: Sequence[int]) -> None:
    asked, reasons = [], {}

    def first(axes: Sequence[int]) -> str | None:
        return "at once" if set(at_once) & set(axes) else None

    def whole(axes: Sequence[int]) -> str | None:
        asked.append(axes)
        return first(axes) or ("later" if set(later) & set(axes) else None)

    good = [(100, 101)]
    found = sifted([(k,) for k in range(32)], good, first, whole, reasons)
    assert found == good + [(k,) for k in range(32) if k not in {*at_once, *later}]
    assert reasons == dict.fromkeys(at_once, "at once") | dict.fromkeys(later, "later")
    assert len(asked) <= 2 + 11 * len(later)  # two for each halving of 32, and one
