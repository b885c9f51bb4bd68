"""Counting entries, against slicing every parameter by hand and summing over all states."""

import itertools
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ellzero as l0
from ellzero.gated.counting import count_params
from ellzero.graph.plan import make_plan
from support import traced
from support.oracles import counted_macs, settled
from support.zoo import Concat, ConvNet, Flattened, Grouped, Residual, SquareStream, lenet, mlp


def entries(gated: l0.Gated, alive: np.ndarray, inputs: dict[tuple[str, int], np.ndarray]) -> int:
    """Parameters left, counted entry by entry: an entry stays if everything it lies on does."""
    total = 0
    for tensor in gated.graph.parameters:
        stays = np.ones(gated.graph.shapes[tensor], dtype=bool)
        for dims, units in gated.graph.units.get(tensor, {}).items():
            on = alive[units] | (units < 0)
            if len(dims) == 1 and (tensor, dims[0]) in inputs:
                on = inputs[tensor, dims[0]]
            stays &= on.reshape([stays.shape[d] if d in dims else 1 for d in range(stays.ndim)])
        total += int(stays.sum())
    return total


class Blocks(nn.Module):
    """A stream of `width` with blocks of some hidden sizes, some of them square."""

    def __init__(self, width: int, hidden: list[int]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, width), nn.Linear(width, 2)
        self.square = nn.Linear(width, width)
        self.up = nn.ModuleList(nn.Linear(width, h) for h in hidden)
        self.down = nn.ModuleList(nn.Linear(h, width) for h in hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.square(torch.tanh(x))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


@pytest.mark.slow
@given(st.integers(1, 3), st.lists(st.integers(1, 2), max_size=2), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=15)
def test_expected_entries_are_the_mean_over_all_states(width: int, hidden: list[int], streams: bool, seed: int) -> None:
    torch.manual_seed(seed)
    options = {"where": l0.shrinkable(streams=streams or not hidden, inputs=False)}
    gated = traced.attached(Blocks(width, hidden), torch.zeros(2, 2), **options)
    p = torch.rand(gated.liveness.size, dtype=torch.float64)
    mean = 0.0
    for state in itertools.product((0.0, 1.0), repeat=len(p)):
        with gated.assuming(torch.tensor(state)):
            units, _ = gated.alive()
        weight = torch.where(torch.tensor(state) > 0, p, 1 - p).prod().item()
        mean += weight * entries(gated, units.numpy() > 0.5, {})
    gated.double()
    with gated.assuming(p):
        assert l0.params(gated).item() == pytest.approx(mean, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [
        (ConvNet(), (1, 4, 4), {}),
        (Grouped(), (1, 3), {}),
        (Concat(), (2,), {}),
        (Residual(), (2,), {"where": l0.shrinkable(streams=True)}),
        (SquareStream(), (2,), {"where": l0.per_layer}),
        (Flattened(), (1, 4), {"where": l0.per_layer}),
    ],
)
def test_expectation_at_certain_gates_is_the_count(
    model: nn.Module, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    gated = l0.attach(model, torch.zeros(2, *shape), **options)  # type: ignore[arg-type]
    for state in itertools.product((0.0, 1.0), repeat=gated.liveness.size):
        with gated.assuming(torch.tensor(state)):
            units, inputs = gated.alive()
            read = {t: x.numpy() > 0.5 for t, x in zip(gated.liveness.entries, inputs, strict=True)}
            assert l0.params(gated).item() == entries(gated, units.numpy() > 0.5, read)


@pytest.mark.slow
def test_units_that_count_alike_are_summed_once() -> None:
    """Sums run over the population once, however many weights there are: a segment per sort of unit."""
    gated = traced.attached(lenet(), torch.zeros(1, 1, 28, 28), where=l0.per_layer)
    census = gated.census["params"]
    assert census is not None
    assert sorted(np.bincount(census.segment)) == [20, 50, 500, 800]
    assert not census.joint.size  # no weight has one axis on both of its dimensions


def test_pairs_are_kept_only_where_they_meet() -> None:
    gated = l0.attach(SquareStream(), torch.zeros(2, 2), where=l0.per_layer)
    census = gated.census["params"]
    assert census is not None
    names = [n for n, rows in zip(census.names, census.rows.T, strict=True) if (rows >= len(census.constant)).any()]
    assert names == ["square"]  # rows are units, columns the inputs that read them
    assert len(census.part) == 3


def test_terms_carry_the_names_of_layers() -> None:
    gated = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    census = count_params(gated.graph, gated.liveness)
    assert census.names == ("0", "0", "2", "2")
    macs = gated.census["macs"]
    assert macs is not None
    assert macs.names == ("0", "2")


def test_parameters_of_the_model_itself_carry_their_own_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(2, 3), nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) @ self.w

    gated = l0.attach(Bare(), torch.zeros(2, 2))
    assert l0.objectives.costs.breakdown(l0.params, gated).keys() == {"a", "w"}
    assert l0.dense(partial(l0.params, only="w"), gated) == 6
    assert l0.dense(l0.macs, gated) == 12


@pytest.mark.slow
def test_macs_are_per_example_whatever_the_batch() -> None:
    for batch in (1, 5):
        gated = traced.attached(lenet(), torch.zeros(batch, 1, 28, 28))
        # by hand: 24² · 20 · 25, 8² · 50 · 20 · 25, 800 · 500, 500 · 10
        assert l0.dense(l0.macs, gated) == 288_000 + 1_600_000 + 400_000 + 5_000


def test_parameters_that_the_example_does_not_reach_are_counted_as_they_are() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.spare = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    gated = l0.attach(Spare(), torch.zeros(2, 2))
    assert l0.objectives.costs.floor(l0.params, gated) == (56 + 2, ["spare", "b"])


def test_counting_takes_no_memory_for_what_many_groups_do_not_read() -> None:
    """A matrix of all groups by all units had 700 MB for a RegNet-Z, and took most of the time of its `attach`."""
    groups, width = 96, 768
    layers = [nn.Conv1d(4, width, 1), nn.Conv1d(width, width, 1, groups=groups), nn.Conv1d(width, 2, 1)]
    model = nn.Sequential(*layers)
    gated = l0.attach(model, torch.zeros(2, 4, 2))
    tracemalloc.start()
    try:
        census = count_params(gated.graph, gated.liveness)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2 * groups * 2 * width  # of one such matrix
    kept = census.kept(make_plan(gated.graph, np.ones(gated.graph.offsets[-1], dtype=bool)))
    assert kept.sum() == sum(p.numel() for p in model.parameters())


class Positions(nn.Module):
    """Products of positions alone, once for a batch or once for each example; of activations; and of two weights."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each, self.place, self.a, self.b = each, nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)
        self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(0, 1, 5 * 4, dtype=x.dtype).reshape(1, 5, 4)
        table = self.place(places.repeat(len(x), 1, 1) if self.each else places)
        y = torch.tanh(self.a(x) + table)
        return self.b(y + (y @ table.transpose(1, 2)).softmax(-1) @ table + y @ (self.left @ self.right))


@pytest.mark.parametrize("each", [False, True])
def test_what_is_done_once_for_a_batch_counts_once_for_an_example(each: bool) -> None:
    """torch counts the multiplications of one example."""
    model = settled(Positions(each))
    by_torch = counted_macs(model, (torch.zeros(1, 5, 3, dtype=torch.float64),))
    for batch in (1, 2, 3):
        gated = l0.attach(model, torch.randn(batch, 5, 3, dtype=torch.float64))
        assert l0.dense(l0.macs, gated) == by_torch
