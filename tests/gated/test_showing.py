"""What tools see of a gated network: the signature and the plain data of its model, and no method that has no gates."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0


class Asking(nn.Module):
    """A model with arguments of every kind, data, a method and a property."""

    kind = "asking"

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 4}
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    @property
    def width(self) -> int:
        return self.body.out_features

    def describe(self) -> str:
        return "without gates"

    def forward(self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0, **more: Any) -> Any:
        out = self.head(torch.relu(self.body(x))) * scale
        return out if labels is None else (nn.functional.cross_entropy(out, labels), out)


def attached() -> l0.Gated:
    return l0.attach(Asking(), torch.zeros(2, 3))


def test_the_signature_is_that_of_the_model() -> None:
    gated = attached()
    theirs = inspect.signature(gated.model.forward).parameters
    ours = dict(inspect.signature(gated.forward).parameters)
    assert ours.pop("gate_noise").kind is inspect.Parameter.KEYWORD_ONLY
    assert ours == dict(theirs)
    assert list(ours) == list(theirs)
    assert "labels" in inspect.signature(type(gated).forward).parameters  # some ask the class
    assert (
        "labels"
        not in inspect.signature(
            l0.attach(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2)).forward
        ).parameters
    )


def test_it_is_a_gated_all_the_same() -> None:
    one, two = attached(), attached()
    assert isinstance(one, l0.Gated)
    assert type(one) is type(two)
    assert type(one).__name__ == "GatedAsking"
    assert repr(one).startswith("Gated(\n  (model): Asking(")


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copies_show_the_same(clone: Any) -> None:
    gated = attached().eval()
    other = clone(gated)
    assert type(other) is type(gated)
    assert torch.equal(other(torch.ones(1, 3), scale=2.0), gated(torch.ones(1, 3), scale=2.0))


def test_plain_data_of_the_model_is_there_and_its_methods_are_not() -> None:
    gated = attached()
    assert (gated.kind, gated.width, gated.config) == ("asking", 4, {"width": 4})
    for name in ("describe", "body", "missing"):
        with pytest.raises(AttributeError, match=name):
            getattr(gated, name)
    with pytest.raises(AttributeError, match=r"`gated\.model\.describe` is the model's own, without gates"):
        _ = gated.describe


@pytest.fixture
def _fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_named_arguments_go_through_a_compiler_and_an_export() -> None:
    gated, x = attached().eval(), torch.randn(2, 3)
    compiled = torch.compile(gated, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x=x, scale=3.0), gated(x, scale=3.0))
    program = torch.export.export(gated, (), {"x": x, "scale": 3.0})
    torch.testing.assert_close(program.module()(x=x, scale=3.0), gated(x, scale=3.0))
