"""The removal plan as data, and the layers that stand in: against indexing by hand, and against the layers that they
replace.
"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.axes import Graph
from ellzero.graph.plan import ClosedAxisError, Plan, make_plan
from ellzero.graph.standins.layers import Closed, Select, put_closed, put_select
from support.oracles import settled
from support.zoo import MLP, LeNet, ResNet


def graph_of(model: nn.Module, x: Tensor) -> Graph:
    return l0.attach(model, x, where=l0.shrinkable(streams=True)).graph


def without(graph: Graph, **closed: list[int]) -> np.ndarray:
    alive = np.ones(graph.offsets[-1], dtype=bool)
    for axis, start in zip(graph.axes, graph.offsets, strict=False):
        alive[[start + u for u in closed.get(axis.name, [])]] = False
    return alive


def test_plan_is_what_indexing_does() -> None:
    model = settled(LeNet())
    graph = graph_of(model, torch.zeros(2, 1, 14, 14, dtype=torch.float64))
    plan = make_plan(graph, without(graph, conv1=[3], conv2=[0, 2]))
    small = copy.deepcopy(model)
    plan.apply(small)
    maps, inputs = [1, 3, 4], [k for k in range(20) if k // 4 in (1, 3, 4)]
    assert torch.equal(small.conv1.weight, model.conv1.weight[[0, 1, 2]])
    assert torch.equal(small.conv2.weight, model.conv2.weight[maps][:, [0, 1, 2]])
    assert torch.equal(small.conv2.bias, model.conv2.bias[maps])
    assert torch.equal(small.fc1.weight, model.fc1.weight[:, inputs])
    assert torch.equal(small.fc2.weight, model.fc2.weight)


def test_a_plan_also_slices_gradients_and_optimizer_state() -> None:
    """What came out of a step on the dense network is, sliced, what a step on the sliced one would go on with."""
    model = settled(LeNet())
    x = torch.randn(2, 1, 14, 14, dtype=torch.float64)
    graph = graph_of(model, x)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    plan = make_plan(graph, without(graph, conv2=[0, 2]))
    small = copy.deepcopy(model)
    plan.apply(small)
    for (name, old), new in zip(model.named_parameters(), small.parameters(), strict=True):
        for tensor in (old, old.grad, optimizer.state[old]["exp_avg"]):
            assert plan.slice(name, tensor).shape == new.shape
        assert torch.equal(plan.slice(name, old), new)


def test_tied_weights_stay_tied() -> None:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 2)
            self.d.weight = self.c.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x).relu()) * self.d(self.b(x))

    model = settled(Twin())
    graph = graph_of(model, torch.zeros(2, 3, dtype=torch.float64))
    plan = make_plan(graph, without(graph, a=[0, 1]))
    plan.apply(model)
    assert model.d.weight is model.c.weight
    assert (model.b.out_features, model.d.in_features) == (3, 3)


def test_flags_of_parameters_stay() -> None:
    model = settled(MLP(3, 5, 2))
    model.layers[0].weight.requires_grad_(False)
    graph = graph_of(model, torch.zeros(2, 3, dtype=torch.float64))
    make_plan(graph, without(graph, **{"layers.0": [0]})).apply(model)
    assert not model.layers[0].weight.requires_grad
    assert model.layers[1].weight.requires_grad
    assert all(isinstance(p, nn.Parameter) and p.is_contiguous() for p in model.parameters())


def test_frozen_axes_stay_whatever_is_said() -> None:
    model = settled(MLP(3, 5, 2))
    graph = graph_of(model, torch.zeros(2, 3, dtype=torch.float64))
    nothing = np.zeros(graph.offsets[-1], dtype=bool)
    plan = make_plan(graph, nothing, refuse=False)
    for axis, start in zip(graph.axes, graph.offsets, strict=False):
        assert plan.units[start : start + axis.size].sum() == (axis.size if axis.frozen else 1)


def test_a_closed_axis_is_named_and_all_of_them_are() -> None:
    model = settled(MLP(3, 5, 4, 2))
    graph = graph_of(model, torch.zeros(2, 3, dtype=torch.float64))
    alive = without(graph, **{"layers.0": [*range(5)], "layers.1": [*range(4)]})
    with pytest.raises(ClosedAxisError, match=r"axis `layers\.0` and every unit of axis `layers\.1`"):
        make_plan(graph, alive)


def test_the_unit_with_most_evidence_comes_back() -> None:
    model = settled(MLP(3, 5, 2))
    graph = graph_of(model, torch.zeros(2, 3, dtype=torch.float64))
    evidence = np.zeros(graph.offsets[-1])
    evidence[3] = 1.0
    plan = make_plan(graph, without(graph, **{"layers.0": [*range(5)]}), evidence=evidence, refuse=False)
    assert plan.units[:5].tolist() == [False, False, False, True, False]


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=12, max_size=12), st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_groups_are_filled_up_with_the_best(alive: list[bool], evidence: list[int]) -> None:
    """Every group keeps as many as the fullest, all that were alive, and of the others those with most evidence."""
    graph = Graph((l0.graph.Axis("a", 12, ()),), {}, balances=(np.arange(12).reshape(3, 4),))
    kept = make_plan(graph, np.array(alive), evidence=np.array(evidence, dtype=float), refuse=False).units.reshape(3, 4)
    before = np.array(alive).reshape(3, 4)
    if not before.any():
        before = before.copy()
        before.flat[int(np.argmax(evidence))] = True  # one stays of an axis that cannot vanish
    assert set(kept.sum(1)) == {before.sum(1).max()}
    assert (kept | ~before).all()
    for row, was, worth in zip(kept, before, np.array(evidence).reshape(3, 4), strict=True):
        back, gone = worth[row & ~was], worth[~row]
        assert not len(back) or not len(gone) or back.min() >= gone.max()


def test_slices_of_a_grouped_convolution() -> None:
    """Which column goes differs from group to group."""
    weight = torch.arange(24.0).reshape(4, 3, 2)
    plan = Plan(np.ones(0, dtype=bool), {"w": {0: np.array([0, 3])}}, {"w": np.array([[0, 2], [1, 2]])})
    assert torch.equal(plan.slice("w", weight), torch.stack([weight[0][[0, 2]], weight[3][[1, 2]]]))


@pytest.mark.parametrize(
    ("layer", "shape", "dim"),
    [(nn.Linear(6, 2), (3, 6), -1), (nn.Conv1d(6, 2, 3), (3, 6, 5), 1), (nn.Conv2d(6, 2, 3), (3, 6, 5, 5), 1)],
)
def test_select_picks_the_inputs_of_its_layer(layer: nn.Module, shape: tuple[int, ...], dim: int) -> None:
    index = torch.tensor([0, 2, 5])
    x = torch.randn(shape)
    masked = torch.zeros_like(x)
    masked.index_copy_(dim, index, x.index_select(dim, index))
    expected = layer(masked)
    layer.weight = nn.Parameter(layer.weight.index_select(1, index).detach())
    if not isinstance(layer, nn.Linear):
        layer.in_channels = 3
    put_select(layer, index, 6)
    torch.testing.assert_close(layer(x), expected)
    assert isinstance(layer.select, Select)
    for wrong in (torch.cat([x, x], dim), x.narrow(dim, 0, 3)):  # wide enough to pick from, or what is picked already
        with pytest.raises(ValueError, match=f"must be 6 wide, of which 3 are picked, got {wrong.shape[dim]}"):
            layer(wrong)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)  # the hook goes along


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda bias: (nn.Linear(4, 5, bias=bias), (2, 3, 4)),
        lambda bias: (nn.Conv1d(4, 5, 3, stride=2, padding=1, bias=bias), (2, 4, 9)),
        lambda bias: (nn.Conv2d(4, 5, (3, 2), stride=(2, 1), padding=(0, 3), dilation=(2, 1), bias=bias), (2, 4, 9, 8)),
        lambda bias: (nn.Conv2d(4, 5, (4, 3), padding="same", dilation=2, bias=bias), (2, 4, 9, 8)),
        lambda bias: (nn.Conv2d(4, 5, 3, padding=1, padding_mode="circular", bias=bias), (4, 9, 8)),
        lambda bias: (nn.Conv3d(4, 5, 2, bias=bias), (2, 4, 3, 4, 5)),
    ],
    ids=["linear", "conv1d", "conv2d", "same", "unbatched", "conv3d"],
)
def test_closed_layer_gives_what_a_layer_of_zeros_gives(make, bias: bool) -> None:  # type: ignore[no-untyped-def]
    layer, shape = make(bias)
    nn.init.zeros_(layer.weight)
    x = torch.randn(shape)
    torch.testing.assert_close(Closed(layer, 5)(x), layer(x))
    channel = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim
    nothing = x.narrow(channel, 0, 0)
    torch.testing.assert_close(Closed(layer, 5)(nothing), layer(x))  # nothing comes in any more


def test_closed_layer_takes_the_place_and_mode_of_its_layer() -> None:
    model = ResNet().eval()
    put_closed(model, "conv2")
    put_closed(model, "norm2")
    assert isinstance(model.conv2, Closed)
    assert isinstance(model.norm2, nn.Identity)
    assert not model.conv2.training
