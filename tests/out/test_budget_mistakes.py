"""Mistakes around a `Budget`: each is told in one line where it happens, and nothing is lost."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ellzero as l0
from support import traced

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


def begun(
    make: Any = torch.optim.Adam, steps: int = 8, **options: Any
) -> tuple[l0.Gated, l0.Budget, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    gated = traced.attached(model, X[:2], gate=partial(l0.HardConcreteGate, drop_rate=0.1))
    gated.train()
    budget = l0.Budget(gated, **{"macs": 0.4, "learning": 0.5, **options}, steps=steps)
    return gated, budget, make(gated.parameters(), lr=1e-2)


def train(gated: l0.Gated, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(gated(X), Y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(loss)  # type: ignore[arg-type]


def test_a_term_that_would_count_twice_is_refused() -> None:
    _, budget, adam = begun()
    budget.drive(adam)
    with pytest.raises(RuntimeError, match=r"`term\(\)` must not be added where `drive` does it already"):
        budget.term()
    with pytest.raises(RuntimeError, match=r"`step\(\)` must not be called where an optimizer is driven"):
        budget.step()
    assert budget.done == 0


def test_a_step_without_the_term_is_refused() -> None:
    gated, budget, adam = begun()
    (F.cross_entropy(gated(X), Y) + budget.term()).backward()
    adam.step()
    budget.step(adam)
    with pytest.raises(RuntimeError, match=r"must follow a loss with `\+ budget.term\(\)`, got none since"):
        budget.step(adam)
    assert budget.done == 1


@pytest.mark.parametrize(("whole", "reason"), [(False, "nothing has moved them"), (True, "too few steps")])
def test_gates_that_no_optimizer_has_are_noticed_when_they_settle(whole: bool, reason: str) -> None:
    gated, budget, _ = begun(steps=4)
    adam = torch.optim.Adam((gated if whole else gated.model).parameters(), lr=1e-2)
    for _ in range(2):
        (F.cross_entropy(gated(X), Y) + budget.term()).backward()
        adam.step()
        if budget.done == 0:
            budget.step(adam)
    with pytest.warns(UserWarning, match=f"gates settle after 2 steps with 100 % .*: {reason}"):
        budget.step(adam)


def test_gates_that_are_left_in_evaluation_are_noticed() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    gated.eval()
    with pytest.raises(RuntimeError, match=r"call `gated.train\(\)` after each evaluation"):
        train(gated, adam, 1)
    gated.train()
    train(gated, adam, 8)
    assert budget.phase == "tuning"


@pytest.mark.parametrize("gone", ["ema", "masked", "pace"])
def test_the_state_of_another_version_is_refused(gone: str) -> None:
    _, budget, _ = begun()
    state = budget.state_dict()
    del state[gone]
    with pytest.raises(ValueError, match=f"must be of a `Budget` of this version, got one without `{gone}`"):
        budget.load_state_dict(state)


def test_what_was_before_the_settling_is_not_handed_over() -> None:
    gated, budget, adam = begun(shrink=False)  # with masks, any state fits
    budget.drive(adam)
    train(gated, adam, 2)
    early, network = copy.deepcopy(budget.state_dict()), copy.deepcopy(gated.state_dict())
    train(gated, adam, 6)
    late = copy.deepcopy(gated.state_dict())
    with pytest.raises(ValueError, match="is of step 2, before the gates settled: it fits a fresh network"):
        budget.load_state_dict(early)
    gated.load_state_dict(network)
    with pytest.raises(RuntimeError, match=r"keeps 100 % of `macs`, more than 40 %: a state from before"):
        budget.finish()
    gated.load_state_dict(late)
    small = budget.finish()
    assert sum(p.numel() for p in small.parameters() if p.ndim > 1) <= 0.4 * (48 + 48 + 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "key"), [(torch.optim.Adafactor, "row_var"), (torch.optim.LBFGS, "d")], ids=["adafactor", "lbfgs"]
)
def test_an_optimizer_that_cannot_forget_units_keeps_them_as_masks(make: Any, key: str) -> None:
    gated, budget, optimizer = begun(make)
    budget.drive(optimizer)
    train(gated, optimizer, 8)
    assert f"{make.__name__} remembers `{key}` of " in str(budget.masked)
    small = budget.finish()
    assert sum(p.numel() for p in small.parameters() if p.ndim > 1) <= 0.4 * (48 + 48 + 12)
    with torch.no_grad():
        torch.testing.assert_close(small(X), gated(X))


@pytest.mark.filterwarnings("always:gates settle after")
def test_warnings_point_to_the_loop_and_come_once() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(gated, adam, 8)
    assert [(w.filename, str(w.message)[:12]) for w in said] == [(__file__, "gates settle")]
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    gated = l0.attach(model, X)
    adam = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget = l0.Budget(gated, macs=0.9, steps=2).drive(adam)
    train(gated, adam, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        budget.finish()
    assert [(w.filename, str(w.message)[:21]) for w in said] == [(__file__, "batch-norm statistics")]


def test_a_loop_without_drive_hears_of_it_in_the_second_step() -> None:
    gated, _, adam = begun()
    dense = torch.optim.SGD(gated.model.parameters(), lr=0.1)
    F.cross_entropy(gated.model(X), Y).backward()
    dense.step()  # of weights alone, before gates are used: nothing is amiss
    train(gated, adam, 1)  # nor in one, as torch takes by itself where it loads a state
    with pytest.warns(
        UserWarning, match=r"^nothing moves the budget: call `budget.drive\(optimizer\)` before the loop$"
    ):
        train(gated, adam, 1)
    train(gated, adam, 1)  # once


def test_neither_a_driven_loop_nor_one_with_the_term_is_reminded() -> None:
    for driven in (True, False):
        gated, budget, adam = begun()
        if driven:
            budget.drive(adam)
            train(gated, adam, 2)
        else:
            (F.cross_entropy(gated(X), Y) + budget.term()).backward()
            adam.step()
            budget.step(adam)
            (F.cross_entropy(gated(X), Y) + budget.term()).backward()
            adam.step()
            budget.step(adam)
        assert budget.done == 2


def test_states_in_another_order_are_refused_with_the_right_one() -> None:
    gated, budget, adam = begun(steps=8)
    budget.drive(adam)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of haste
        train(gated, adam, 6)
    saved, states = gated.state_dict(), budget.state_dict()
    fresh, other, early = begun(steps=8)
    with pytest.raises(ValueError, match=r"has shape .*, here it is .*; .*load the budget's state first$"):
        fresh.load_state_dict(saved)
    other.load_state_dict(states)
    with pytest.raises(ValueError, match=r"got one without model.*; the network got smaller since: make it now, or"):
        other.drive(early)
    fresh.load_state_dict(saved)
    other.drive(torch.optim.Adam(fresh.parameters(), lr=1e-2))
