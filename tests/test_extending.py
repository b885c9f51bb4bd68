"""What CONTRIBUTING.md promises: a new family, rule, cost, network or data set is one file, and the rest goes on as
before.

The examples are those of the page itself; each is put into a module of its own and used as any of the library's is.
"""

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments import data, networks
from ellzero.experiments.data.downloads import Facts
from ellzero.experiments.networks import facts
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.loop import train
from ellzero.graph.rules.call import RULES
from support import ROOT
from support.zoo import mlp

pytestmark = pytest.mark.filterwarnings("ignore:`finalize` closed")  # ten steps learn nothing: it has much to close


def example(heading: str) -> dict[str, Any]:
    """The names that the first block of code under a heading of CONTRIBUTING.md defines."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page[page.index(f"\n## {heading}\n") :]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    module = ModuleType("addition")
    exec(block[1], vars(module))
    return vars(module)


def trained(model: nn.Module, x: Tensor, cost: l0.Cost = l0.params, **how: Any) -> l0.Gated:
    """A network with gates after ten steps towards half of its cost."""
    gated = l0.attach(model, x, **how)
    budget = l0.Constraint(cost, at_most=0.5, dual=l0.duals.GradientAscent(lr=1.0))
    optimizer = torch.optim.Adam(gated.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        (gated(x).square().mean() + budget(gated)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        budget.ascend()
    l0.finalize(gated, at_most=0.5, cost=cost, fill=True)
    return gated.eval()


def same_function(gated: l0.Gated, x: Tensor) -> None:
    """The compact network is the same function, and the report has its size."""
    small = l0.compact(gated)
    torch.testing.assert_close(small(x), gated(x))
    assert sum(p.numel() for p in small.parameters()) == l0.params(gated, kept=True) < l0.dense(l0.params, gated)
    assert str(l0.report(gated))


@pytest.mark.slow
def test_a_gate_family() -> None:
    x, family = torch.randn(8, 6), example("A gate family")["UniformGate"]
    gated = trained(mlp(6, 8, 7, 2), x, gate=family)
    assert {type(gate) for _, gate in gated.named_gates()} == {family}
    before = l0.params(gated, kept=True)
    for _, gate in gated.named_gates():
        gate.open_(~gate.open(), wide=True)
        assert bool((gate.value() > 0).all())
    assert l0.params(gated, kept=True) == l0.dense(l0.params, gated) > before
    l0.finalize(gated, at_most=0.5, fill=True)
    same_function(gated, x)


@pytest.fixture
def rules() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


class Crossed(nn.Module):
    """Two layers whose outputs meet in a cross product over dimension 1, which has three entries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.cross(self.a(x), self.b(x), dim=1))
        return out


@pytest.mark.slow
@pytest.mark.usefixtures("rules")
def test_a_rule_for_an_operation() -> None:
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match="there is no rule for `cross`"):
        l0.attach(Crossed(), x)
    example("A rule for an operation or a layer")
    gated = trained(Crossed(), x)
    (axis,) = (a for a in gated.axes if a.frozen is None)
    assert {s.tensor for s in axis.sites} == {"a.weight", "a.bias", "b.weight", "b.bias", "out.weight"}
    same_function(gated, x)


def test_a_cost() -> None:
    x, cost = torch.randn(8, 6), example("A cost")["megabytes"]
    gated = trained(mlp(6, 8, 7, 2), x, cost)
    assert cost(gated, kept=True) <= 0.5 * l0.dense(cost, gated)
    same_function(gated, x)


def stripes(_: Any) -> tuple[np.ndarray, ...]:
    """Images that are bright in their left or their right half: two classes."""
    y = (np.arange(32) % 2).astype(np.uint8)
    x = np.zeros((32, 1, 4, 6), dtype=np.uint8)
    x[y == 0, ..., :3] = x[y == 1, ..., 3:] = 200
    return x, y, x, y


@pytest.mark.slow
def test_a_network_and_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Facts((1, 4, 6), ("left", "right"), (0.4,), (0.4,), stripes)  # type: ignore[arg-type]
    monkeypatch.setitem(data.KNOWN, "stripes", known)
    monkeypatch.setattr(facts, "_KNOWN", list(facts._KNOWN))
    make: Callable[..., nn.Module] = lambda classes, dropout=0.0: nn.Sequential(nn.Flatten(), mlp(24, 9, 5, classes))  # noqa: E731
    tiny = facts.Network(
        name="tiny", title="Tiny", make=make, images=(1, 4, 6), compiling=(1000, 0.1), test_batch=100
    )  # fmt: skip
    facts.register("tiny", lambda _: tiny)
    assert networks.find("tiny") is tiny
    recipe = Recipe(
        name="new", network="tiny", data="stripes", placement="per_layer", cost="params", at_most=0.5, penalty=None,
        dual="auto", epochs=3, batch=8, finalize=True,
    )  # fmt: skip
    trainer = train([recipe], data.load("stripes"))
    gated = trainer.network(0)
    assert isinstance(gated, l0.Gated)
    assert l0.params(gated, kept=True) <= 0.5 * l0.dense(l0.params, gated)
    assert evaluation.results(trainer)[0]["costs"]["params"]["kept"] <= 0.5
    same_function(gated.eval(), torch.randn(5, 1, 4, 6))
