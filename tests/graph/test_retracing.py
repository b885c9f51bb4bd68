"""What a removal does to a forward that looks at places: said by hand, and seen by structure alone."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ellzero.graph.plan import make_plan
from ellzero.graph.tracing import as_inputs, trace
from ellzero.graph.trials.retracing import strays


class Places(nn.Module):
    """Eight hidden units, which a forward turns round by half of them, or shuffles."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if self.how == "turned":
            left, right = h.chunk(2, 1)
            return self.b(torch.cat([right, left], 1))  # type: ignore[no-any-return]
        out: Tensor = self.b(h)
        return (
            out
            if self.how == "plain"
            else out + h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1).sum(1, keepdim=True)
        )


def said(how: str, gone: list[int]) -> str | None:
    """What is said of a removal of these units, for each of which a row and a column are taken out."""
    model, x = Places(how), torch.randn(2, 4)
    traced = trace(model, (x,))
    free = replace(traced, balances=()).with_axes(
        replace(axis, frozen=None) for axis in traced.axes
    )  # whatever it says
    units = np.ones(free.offsets[-1], dtype=bool)
    units[free.units["a.weight"][(0,)][gone]] = False
    small, plan = copy.deepcopy(model), make_plan(free, units, refuse=False)
    plan.apply(small)
    assert small.a.out_features == small.b.in_features == 8 - len(gone)
    return strays(traced, plan, small, as_inputs(x), {})


@pytest.mark.parametrize("gone", [[0], [0, 1], [1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_what_looks_at_no_place_stays(gone: list[int]) -> None:
    assert said("plain", gone) is None


def test_units_that_a_removal_brings_together_are_seen() -> None:
    """Turned round by three, the fifth unit comes to where the fourth is read."""
    assert said("turned", [0, 4]) is None  # one of each half: all meet as before
    assert "other units of it meet" in (said("turned", [0, 1]) or "")


def test_units_that_are_taken_for_others_are_seen() -> None:
    """Shuffled, 2 to 7 come as 2, 5, 3, 6, 4, 7, where they came as 4, 5, 2, 6, 3, 7: no weight reads them there."""
    assert said("shuffled", [0, 4]) is None
    assert "takes other units" in (said("shuffled", [0, 1]) or "")
