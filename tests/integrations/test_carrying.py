"""A budget's state in its network's state dict: what is written, what a fresh network makes of it, what is refused."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.integrations.carrying import KEY, Carrier
from support import ROOT

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Tied(nn.Module):
    """Two heads that are one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 12), nn.ReLU())
        self.head, self.again = nn.Linear(12, 2), nn.Linear(12, 2)
        self.again.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h) + self.again(h)


@functools.cache  # tracing takes half a second
def traced(width: int) -> l0.Gated:
    return l0.attach(Tied(width), X[:2])


def carried(steps: int, width: int = 16, shrink: bool = True) -> tuple[l0.Gated, l0.Budget]:
    gated = copy.deepcopy(traced(width))
    gated.train()
    budget = l0.Budget(gated, macs=0.4, steps=20, learning=0.5, shrink=shrink)
    Carrier.of(gated).begin(budget)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(gated(X), Y).backward()
        optimizer.step()
    return gated, budget


def fresh(width: int = 16) -> l0.Gated:
    gated = copy.deepcopy(traced(width))
    Carrier.of(gated)
    return gated


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "net."])
@pytest.mark.parametrize("steps", [5, 15], ids=["learning", "tuning"])
def test_a_fresh_network_becomes_what_was_saved(steps: int, prefix: str) -> None:
    gated, budget = carried(steps)
    state = gated.state_dict() if not prefix else nn.ModuleDict({"net": gated}).state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    assert prefix + "model.again.weight" not in state  # once, under its first name
    other = fresh()
    root = nn.ModuleDict({"net": other}) if prefix else other
    root.load_state_dict(state, strict=bool(prefix))
    for key, value in gated.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[key], value)
    found = Carrier.of(other).found
    assert found is not None
    assert found["done"] == steps
    assert (other.taken is None) == (steps == 5)
    with torch.no_grad():
        assert torch.equal(other.eval()(X), gated.eval()(X))
    assert str(budget).startswith("Budget(macs at most 40 %")


def test_copies_and_finished_budgets_carry_nothing() -> None:
    gated, budget = carried(15)
    assert KEY in gated.state_dict()
    assert KEY not in copy.deepcopy(gated).state_dict()
    budget.finish()
    assert KEY not in gated.state_dict()


def test_another_network_is_refused_and_nothing_changes() -> None:
    saved, _budget = carried(15)
    state: dict[str, Any] = saved.state_dict()
    other = fresh(width=20)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="`state_dict` is of another network: it had"):
        other.load_state_dict(state, strict=False)
    other = fresh()
    with pytest.raises(ValueError, match=r"`state_dict` is of another network: missing \['model\.body\.0\.bias'\]"):
        other.load_state_dict({k: v for k, v in state.items() if k != "model.body.0.bias"}, strict=False)
    with pytest.raises(ValueError, match=r"`body\.0\.bias` has shape \(1,\), here"):
        other.load_state_dict({**state, "model.body.0.bias": torch.zeros(1)}, strict=False)
    assert other.taken is None
    assert Carrier.of(other).found is None
    assert before.keys() == other.state_dict().keys()


@pytest.mark.parametrize("shrink", [True, False], ids=["shrunk", "masked"])
def test_what_has_left_does_not_come_back(shrink: bool) -> None:
    young, _young = carried(5, shrink=shrink)
    early = young.state_dict()
    gated, budget = carried(15, shrink=shrink)
    before = copy.deepcopy(gated.model.state_dict())
    with pytest.raises(ValueError, match="is of step 5, before the gates settled: it fits a fresh network"):
        gated.load_state_dict(early, strict=False)
    assert all(torch.equal(before[key], value) for key, value in gated.model.state_dict().items())
    budget.finish()


def test_a_run_that_begins_anew_must_not_have_loaded_another() -> None:
    saved, _budget = carried(15)
    state = saved.state_dict()
    gated = fresh()
    gated.load_state_dict(state, strict=False)
    budget = l0.Budget(gated, macs=0.4, steps=20, learning=0.5)
    with pytest.raises(ValueError, match="got one of step 15 in a run that begins anew"):
        Carrier.of(gated).resume(budget, resumed=False)


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_package_is_one_line_that_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{name}.pytorch", None)
    monkeypatch.delitem(sys.modules, f"ellzero.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs \w+: pip install 'ellzero\[{name}\]'$"):
        importlib.import_module(f"ellzero.integrations.{name}")


def test_nothing_else_imports_these_packages() -> None:
    wanted = re.compile(r"^\s*(import|from) (lightning|transformers|accelerate|ellzero\.integrations)\b", re.MULTILINE)
    house = ROOT / "src" / "ellzero"
    files = [p for p in house.rglob("*.py") if "integrations" not in p.relative_to(house).parts]
    assert [str(path) for path in files if wanted.search(path.read_text(encoding="utf-8"))] == []
