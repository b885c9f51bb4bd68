"""A copy that borrows its weights computes what a whole copy does, and no weight of the user's moves."""

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.axes import Graph
from ellzero.graph.plan import make_plan
from ellzero.graph.tracing import as_inputs, trace
from ellzero.graph.trials import running
from ellzero.graph.trials.rehearsal import proven
from ellzero.graph.trials.running import agree
from ellzero.graph.trials.scenes import Loans, Scene, left_out, loans, staged
from support.zoo import LeNet, ResNet


class Reread(nn.Module):
    """Reads one weight of its own layer, and one of two that are the same outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.linear(self.a(x).relu(), self.b.weight).relu()
        out: Tensor = self.c(h)
        return out


def scenes(model: nn.Module, x: Tensor) -> tuple[Graph, Scene, Scene]:
    """The graph, and the model in float64 with its weights lent and with weights of its own."""
    graph = trace(model, x)
    made = [staged(model, as_inputs(x), 0, lent) for lent in (loans(model, graph, torch.float64, 0), Loans())]
    for scene in made:
        scene.to(torch.float64)
    return graph, made[0], made[1]


@pytest.mark.parametrize(("build", "x"), [(LeNet, torch.randn(2, 1, 14, 14)), (ResNet, torch.randn(2, 2, 6, 6))])
def test_borrowed_weights_make_what_own_weights_make(build: type[nn.Module], x: Tensor) -> None:
    model = build().double().eval()  # in float64 both are disturbed alike, to the bit
    before = {name: p.clone() for name, p in model.named_parameters()}
    graph, lent, own = scenes(model, x.double())
    assert lent.loans.weights
    assert not own.loans.weights
    alive = torch.rand(graph.offsets[-1], generator=torch.Generator().manual_seed(0)).numpy() < 0.6
    plan = make_plan(graph, alive, refuse=False)
    assert torch.equal(lent.masked(graph, plan.units)[0][0], own.masked(graph, plan.units)[0][0])
    masked, small = staged(model, lent.inputs, 0, lent.loans).both(graph, plan)
    assert agree(masked, small.masked(graph, plan.units)[0], 1e-12)
    again = lent.removed(plan).model.state_dict()
    assert all(torch.equal(t, again[name]) for name, t in small.model.state_dict().items())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_borrowed_weight_is_no_number_where_its_layer_does_not_run() -> None:
    model = LeNet().eval()
    graph, lent, _ = scenes(model, torch.randn(2, 1, 14, 14))
    lent.masked(graph, make_plan(graph, graph.placed | True).units)
    for name in lent.loans.weights:
        weight = lent.model.get_parameter(name)
        assert weight.shape == model.get_parameter(name).shape
        assert weight.dtype == torch.float64
        assert weight.isnan().all()
        assert weight.untyped_storage().nbytes() == 8


def test_a_weight_that_is_read_outside_of_its_layer_is_not_lent() -> None:
    model = Reread().eval()
    assert set(loans(model, trace(model, torch.randn(2, 4)), torch.float64, 0).weights) == {"a.weight", "c.weight"}


def test_a_large_network_is_tried_out_on_borrowed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ResNet().eval(), torch.randn(2, 2, 6, 6)
    usual = proven(model, trace(model, x), as_inputs(x))
    monkeypatch.setattr(running, "LARGE", 0)
    asked: list[str] = []
    made = Loans.made
    monkeypatch.setattr(Loans, "made", lambda self, name, *room: asked.append(name) or made(self, name, *room))
    found = proven(model, trace(model, x), as_inputs(x))
    assert asked
    assert [(a.frozen, a.can_vanish) for a in found.axes] == [(a.frozen, a.can_vanish) for a in usual.axes]


class Tokens(nn.Module):
    """A stream with a block on it and a head: the head's inputs all stay behind a LayerNorm, and its outputs are the
    network's.
    """

    def __init__(self, *, last: int = 0, twice: bool = False, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), norm(6)
        self.up, self.down, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 30, bias=False)
        self.last, self.twice = last, twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        inner = self.up(self.norm(h)).relu()
        h = h + self.down(inner) + (inner[:, -self.last :].mean(1, keepdim=True) if self.last else 0)
        out: Tensor = self.head(self.norm(h))
        return out.sin() if self.twice else out


def test_last_layers_are_left_out_where_their_inputs_tell_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LARGE", 0)
    x = torch.randn(2, 4)
    for model, ends in ((Tokens(), ("head",)), (Tokens(twice=True), ()), (ResNet(), ())):
        example = torch.randn(2, 2, 6, 6) if isinstance(model, ResNet) else x
        assert loans(model.eval(), trace(model, example), torch.float64, 0).ends == ends
    asked: list[str] = []
    made = Loans.made
    monkeypatch.setattr(Loans, "made", lambda self, name, *room: asked.append(name) or made(self, name, *room))
    for last in (0, 4):  # the last four of nine units are others of fewer, which the head's input tells
        model = Tokens(last=last).eval()
        found = {a.name: a.frozen for a in proven(model, trace(model, x), as_inputs(x)).axes}
        assert (found["up"] is None) is (last == 0)
        assert "head.weight" not in asked
        assert "up.weight" in asked


def test_what_stays_of_the_input_of_a_last_layer_tells_its_output() -> None:
    model = Tokens(norm=nn.RMSNorm).double().eval()
    graph, lent, own = scenes(model, torch.randn(2, 4).double())
    assert lent.loans.ends == ("head",)
    (k,) = (k for k, a in enumerate(graph.axes) if a.closing)
    alive = graph.placed | True
    alive[graph.offsets[k] + 1 : graph.offsets[k] + 4] = False
    plan = make_plan(graph, alive)
    kept = plan.rows["head.weight"][1]
    assert len(kept) == 3
    masked, small = lent.both(graph, plan)
    there = nn.functional.linear(masked[0], own.model.get_parameter("head.weight").detach()[:, kept])
    assert agree([there], own.masked(graph, plan.units)[0], 1e-12)
    assert agree(masked, small.masked(graph, plan.units)[0], 1e-12)
    assert small.model.get_parameter("head.weight").shape == (30, 3)
    assert small.model.get_parameter("head.weight").isnan().all()
    # What is not zero where units are closed reaches the output: then it is looked at as well.
    shut = {"head": ~alive[graph.units["head.weight"][1,]]}
    for x, size in ((torch.ones(2, 6), 6), (torch.ones(2, 6) * ~torch.as_tensor(shut["head"]), 3)):
        with left_out(lent.model, ["head"], shut) as outputs:
            assert outputs(lent.model.get_submodule("head")(x))[0].shape == (2, size)


@pytest.mark.parametrize("last", [0, 4])
def test_a_stream_that_a_norm_reads_is_found_as_without_its_head(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Tokens(last=last, norm=nn.RMSNorm).eval(), torch.randn(2, 4)
    usual = proven(model, trace(model, x), as_inputs(x))
    monkeypatch.setattr(running, "LARGE", 0)
    found = proven(model, trace(model, x), as_inputs(x))
    assert [(a.frozen, a.can_vanish) for a in found.axes] == [(a.frozen, a.can_vanish) for a in usual.axes]


class Repeats(nn.Module):
    """Repeats a row for each example, unless there is one; or, where it is to, does something else then."""

    def __init__(self, otherwise: bool) -> None:
        super().__init__()
        self.a, self.b, self.row = nn.Linear(4, 6), nn.Linear(6, 2), nn.Parameter(torch.randn(1, 6))
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        row = self.row if n == 1 else self.row.expand(n, -1)
        row = row.sin() if self.otherwise and n == 1 else row
        out: Tensor = self.b(self.a(x).relu() + row)
        return out


@pytest.mark.filterwarnings("ignore:with a batch of 1")
@pytest.mark.parametrize("otherwise", [False, True])
def test_that_nothing_is_repeated_for_one_example_is_no_other_way(otherwise: bool) -> None:
    gated = l0.attach(Repeats(otherwise), torch.randn(2, 4))
    assert gated.graph.turns == (("a batch of 1",) if otherwise else ())
