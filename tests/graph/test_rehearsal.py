"""Trials: a removal that goes wrong on a copy freezes the axis, one that goes right does not; comparisons and masks
by hand.
"""

import copy
import io

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import ellzero as l0
from ellzero.graph import tracing
from ellzero.graph.axes import Graph
from ellzero.graph.plan import make_plan
from ellzero.graph.tracing import as_inputs
from ellzero.graph.trials.rehearsal import proven
from ellzero.graph.trials.running import agree
from ellzero.graph.trials.scenes import closed
from support.oracles import set_gates
from support.zoo import MLP, FeedForward, LeNet, ResNet


def reasons(model: nn.Module, x: Tensor) -> dict[str, str | None]:
    return {a.name: a.frozen for a in proven(model, l0.graph.trace(model, x), as_inputs(x)).axes}


@pytest.mark.slow
def test_what_can_be_removed_stays_free() -> None:
    for model, x in (
        (MLP(4, 5, 3), torch.zeros(2, 4)),
        (LeNet(), torch.zeros(2, 1, 14, 14)),
        (ResNet(), torch.zeros(2, 2, 6, 6)),
    ):
        before = {a.name: a.frozen for a in l0.graph.trace(model, x).axes}
        assert reasons(model, x) == before


def test_a_scale_by_the_width_is_found() -> None:
    """The trace sees a number; only a removal shows that it depends on how many units there are."""

    class Scaled(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            return self.layers[1](y / y.shape[1])

    assert reasons(Scaled(4, 5, 3), torch.zeros(2, 4))["layers.0"] == (
        "the model gives another output with a unit of it removed than with the unit closed: it goes by their number"
    )


def test_zero_weights_do_not_hide_a_wrong_answer() -> None:
    """A residual branch often starts at zero: then every removal seems right."""

    class Hidden(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = self.up(x)
            return self.head(x + self.down(y / y.shape[1]))

    model = Hidden()
    nn.init.zeros_(model.down.weight)
    assert "another output" in str(reasons(model, torch.ones(2, 3))["up"])


@pytest.mark.slow
def test_one_bad_axis_leaves_the_others() -> None:
    class Literal(MLP):
        def forward(self, x: Tensor) -> Tensor:
            for k, layer in enumerate(self.layers):
                x = layer(x)
                x = x.view(-1, 7) if k == 2 else x
            return x

    found = reasons(Literal(4, 5, 6, 7, 8, 9, 2), torch.zeros(2, 4))
    assert [n for n, why in found.items() if why is None] == ["layers.0", "layers.1", "layers.3", "layers.4"]
    assert "does not run with a unit of it removed (RuntimeError" in str(found["layers.2"])


@pytest.mark.slow
def test_the_model_and_the_random_state_are_left_alone() -> None:
    model = ResNet().train()
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.ones(2, 2, 6, 6)
    graph = l0.graph.trace(model, x)
    assert torch.equal(torch.get_rng_state(), generator)
    proven(model, graph, as_inputs(x))
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    assert all(torch.equal(state[k], t) for k, t in model.state_dict().items())


@pytest.mark.slow
def test_which_axes_can_vanish() -> None:
    def vanishing(model: nn.Module, x: Tensor) -> list[str]:
        return [a.name for a in proven(model, l0.graph.trace(model, x), as_inputs(x)).axes if a.can_vanish]

    assert vanishing(ResNet(), torch.zeros(2, 2, 6, 6)) == ["conv1"]
    assert vanishing(FeedForward(), torch.zeros(2, 3)) == ["up"]
    assert vanishing(LeNet(), torch.zeros(2, 1, 14, 14)) == []


def test_a_model_that_only_takes_float32_is_tried_in_float32() -> None:
    class Single(MLP):
        def forward(self, x: Tensor) -> Tensor:
            assert self.layers[0].weight.dtype == torch.float32
            return super().forward(x)

    assert reasons(Single(4, 5, 3), torch.zeros(2, 4))["layers.0"] is None


def test_closed_units_are_zeros_in_what_reads_them_and_come_back() -> None:
    model = MLP(2, 3, 2)
    graph = l0.graph.trace(model, torch.zeros(1, 2))
    alive = np.ones(graph.offsets[-1], dtype=bool)
    alive[1] = False
    before = copy.deepcopy(model.state_dict())
    with closed(model, graph, alive):
        expected = {name: t.clone() for name, t in before.items()}
        expected["layers.1.weight"][:, 1] = 0
        assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_closed_units_of_a_network_without_some_of_them() -> None:
    """The oracle: closed in the whole network, then removed."""
    model = MLP(2, 5, 2)
    graph = l0.graph.trace(model, torch.zeros(1, 2))
    done = np.ones(graph.offsets[-1], dtype=bool)
    done[[0, 3]] = False
    plan = make_plan(graph, done)
    small = copy.deepcopy(model)
    plan.apply(small)
    alive = done.copy()
    alive[2] = False
    with closed(model, graph, alive), closed(small, graph, alive, plan):
        assert torch.equal(small.layers[1].weight, model.layers[1].weight[:, [1, 2, 4]])
        assert not small.layers[1].weight[:, 1].any()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([1e6, 0.0], [1e6, 1e-4], True),  # relative to the largest entry
        ([1e-6, 0.0], [0.0, 0.0], False),
        ([float("nan")], [float("nan")], False),
        ([float("inf")], [1.0], False),
        ([1.0], [float("inf")], False),
        ([-float("inf"), 1.0], [-float("inf"), 1.0], True),  # a masked output
        ([-float("inf"), 1.0], [-float("inf"), 1.1], False),
        ([1.0], [1.0, 1.0], False),
        ([-1e9, 1.0], [-1e9, 1.1], False),  # what masks says nothing of the others
        ([torch.finfo(torch.float32).min, 1.0], [torch.finfo(torch.float32).min, 1.0], True),
        (
            [torch.finfo(torch.float32).min, -float("inf"), 1.0],
            [torch.finfo(torch.float32).min, -float("inf"), 2],
            False,
        ),
        ([1e9, 0.0], [1.0000001e9, 1e-2], False),
    ],
)
def test_agree(a: list[float], b: list[float], same: bool) -> None:
    assert agree([torch.tensor(a)], [torch.tensor(b)], 1e-9) is same


def test_agree_on_integers_and_empty_tensors() -> None:
    assert agree([torch.tensor([1, 2])], [torch.tensor([1, 2])], 1e-9)
    assert not agree([torch.tensor([1, 2])], [torch.tensor([1, 3])], 1e-9)
    assert agree([torch.zeros(0, 3)], [torch.zeros(0, 3)], 1e-9)


def test_a_graph_without_axes_is_fine() -> None:
    model = nn.Linear(2, 2)
    assert proven(model, Graph((), {}), as_inputs(torch.zeros(1, 2))).axes == ()


class Counting(nn.Module):
    """Counts how often it runs on numbers, apart from those of an export."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.ran: list[int] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "Counting":
        twin = Counting(copy.deepcopy(self.model, memo))
        twin.ran = self.ran  # all copies count together
        return twin

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            self.ran.append(sum(p.numel() for p in self.model.parameters()) * len(x))
        out: Tensor = self.model(x)
        return out


@pytest.mark.slow
def test_how_often_a_large_network_runs() -> None:
    """In units of one forward on the example, by the multiplications of fully connected layers."""
    model = Counting(nn.Sequential(nn.Linear(8, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.ReLU(), nn.Linear(1200, 2)))
    x = torch.randn(2, 8)
    model(x)
    (one,) = model.ran
    gated = l0.attach(model, x)
    assert sum(model.ran) - one < 10 * one
    set_gates(gated.eval(), {"model.0": range(600), "model.2": range(600)})
    model.ran.clear()
    l0.compact(gated)
    assert sum(model.ran) <= 2 * one


def test_a_line_of_progress_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, and nowhere else; the clock is the test's own."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = [0.0]
    monkeypatch.setattr(tracing.time, "monotonic", lambda: now[0])
    for stream, seconds, shown in (
        (Terminal(), 4.0, ""),
        (Terminal(), 6.0, "\rellzero: at work\033[K"),
        (io.StringIO(), 6.0, ""),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        now[0] = 1.0
        with tracing.telling():
            now[0] += seconds
            tracing.progress("at work")
            assert stream.getvalue() == shown
        assert stream.getvalue() == shown + ("\r\033[K" if shown else "")
