"""`Latency` against a clock that is made up here: layers say how long they take, as a function of their widths.

No test looks at a real clock.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.objectives.costs import floor
from ellzero.out.latency import measuring
from ellzero.out.latency.curves import Curves, chords, constant
from ellzero.out.latency.table import Table, Where, network_hash

NOW = [0.0]
Seconds = Callable[[int, int], float]


def clock() -> float:
    return NOW[0]


def linear(x: int, y: int) -> float:
    return 0.5 + 0.003 * x * y + 0.01 * x + 0.02 * y


def stairs(x: int, y: int) -> float:
    """Widths go to multiples of 16."""
    return 0.5 + 0.003 * (-(-x // 16) * 16) * (-(-y // 16) * 16)


class Timed(nn.Linear):
    """A linear layer that takes as long as `seconds` says."""

    seconds: Seconds = staticmethod(linear)

    def forward(self, x: Tensor) -> Tensor:
        NOW[0] += self.seconds(self.in_features, self.out_features)
        return super().forward(x)


class Stepped(Timed):
    seconds: Seconds = staticmethod(stairs)


class Watched(Timed):
    """Takes longer while somebody watches it."""

    def forward(self, x: Tensor) -> Tensor:
        NOW[0] += 2.0 if self._forward_pre_hooks else 0.0
        return super().forward(x)


class Branch(nn.Module):
    """A residual branch that can vanish."""

    def __init__(self, layer: type[Timed] = Timed) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = layer(6, 12), layer(12, 40), layer(40, 12), layer(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(x + self.down(self.up(x).relu()))
        return out


@functools.cache
def _graph(layer: type[Timed], sizes: tuple[int, ...]) -> l0.graph.Graph:
    return l0.attach(_chain(layer, sizes), torch.randn(2, sizes[0]).double()).graph


def _chain(layer: type[Timed], sizes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for a, b in itertools.pairwise(sizes) for part in (layer(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).double()


def chain(layer: type[Timed] = Timed, *sizes: int) -> l0.Gated:
    sizes = sizes or (8, 64, 48, 4)
    return l0.attach(_chain(layer, sizes), torch.randn(2, sizes[0]).double(), graph=_graph(layer, sizes))


@functools.cache
def _table(layer: type[Timed], sizes: tuple[int, ...]) -> Table:
    return l0.Latency.measure(chain(layer, *sizes), clock=clock).table


def measured(layer: type[Timed] = Timed, *sizes: int) -> l0.Latency:
    return l0.Latency(_table(layer, sizes))


def takes(network: nn.Module, width: int) -> float:
    before = NOW[0]
    network(torch.zeros(1, width, dtype=next(network.parameters()).dtype))
    return NOW[0] - before


def close_all_but(gated: l0.Gated, *widths: int) -> None:
    """The first so many of each axis stay."""
    for (_, gate), width in zip(gated.named_gates(), widths, strict=True):
        gate.open_(torch.ones(gate.shape, dtype=torch.bool), wide=True)
        gate.close_(torch.arange(gate.shape.numel()) >= width)


# ---- what a clock said comes back -----------------------------------------------------------------------------------


def test_the_dense_network_takes_what_the_clock_said() -> None:
    gated, latency = chain(), measured()
    assert latency.table.seconds == pytest.approx(takes(gated.model, 8))
    assert l0.dense(latency, gated) == pytest.approx(takes(gated.model, 8))
    assert latency.table.factor == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("widths", [(64, 48), (32, 24), (5, 48), (64, 5), (1, 1), (37, 11)])
def test_a_layer_that_depends_on_both_its_widths_is_recovered_at_joint_widths(widths: tuple[int, int]) -> None:
    gated, latency = chain(), measured()
    close_all_but(gated, *widths)
    assert float(latency(gated, kept=True)) == pytest.approx(takes(l0.compact(gated), 8), rel=2e-3)


def test_a_staircase_is_followed_where_it_bends_with_few_networks() -> None:
    gated, latency = chain(Stepped), measured(Stepped)
    for widths in [(64, 48), (63, 48), (50, 48), (48, 48), (47, 40), (33, 17), (32, 16), (17, 33), (16, 5)]:
        close_all_but(gated, *widths)
        assert float(latency(gated, kept=True)) == pytest.approx(takes(l0.compact(gated), 8), rel=0.02)
    assert latency.table.networks <= 2 * (4 + measuring.PROBES) + measuring.JOINT


def test_what_watching_costs_is_taken_out_by_the_one_factor() -> None:
    gated, latency = chain(Watched), measured(Watched)
    assert latency.table.factor > 1.3
    close_all_but(gated, 20, 30)
    assert float(latency(gated, kept=True)) == pytest.approx(takes(l0.compact(gated), 8), rel=5e-3)


def test_a_branch_that_is_gone_takes_no_time() -> None:
    torch.manual_seed(0)
    gated = l0.attach(Branch(), torch.randn(2, 6))
    latency = l0.Latency.measure(gated, clock=clock)
    for width in (40, 21, 1, 0):
        close_all_but(gated, width)
        small = l0.compact(gated)
        assert float(latency(gated, kept=True)) == pytest.approx(takes(small, 6), rel=2e-3)
    assert takes(small, 6) == pytest.approx(linear(6, 12) + linear(12, 3))


@pytest.mark.slow
def test_a_branch_that_is_gone_takes_no_time_at_any_width_of_its_stream() -> None:
    torch.manual_seed(0)
    gated = l0.attach(Branch(), torch.randn(2, 6), where=l0.shrinkable(streams=True))
    latency = l0.Latency.measure(gated, clock=clock)
    widths = {name: {12: 7, 40: 0}[gate.shape.numel()] for name, gate in gated.named_gates()}
    close_all_but(gated, *widths.values())
    small = l0.compact(gated)
    assert takes(small, 6) == pytest.approx(linear(6, 7) + linear(7, 3))
    assert float(latency(gated, kept=True)) == pytest.approx(takes(small, 6), rel=5e-3)


class Added(nn.Module):
    """Two branches that can go as a whole. Each sum takes a while, whether its branch is there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Timed(6, 12), Timed(12, 3)
        self.branches = nn.ModuleList(nn.Sequential(Timed(12, 40), nn.ReLU(), Timed(40, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for branch in self.branches:
            x = x + branch(x)
            NOW[0] += 0.25
        out: Tensor = self.last(x)
        return out


@pytest.mark.slow
def test_the_time_of_a_block_goes_with_it() -> None:
    torch.manual_seed(0)
    gated = l0.attach(Added().double(), torch.randn(2, 6).double(), where=l0.shrinkable(blocks=True))
    latency = l0.Latency.measure(gated, clock=clock)
    blocks = {p.name: p.block for p in gated.placements}
    assert sorted(blocks.values(), key=str) == [0, 1, None, None]
    for closed, widths in itertools.product([(), (0,), (1,), (0, 1)], [(40, 40), (20, 7)]):
        left = iter(widths)
        close_all_but(gated, *(next(left) if b is None else int(b not in closed) for b in blocks.values()))
        small = l0.compact(gated)
        assert float(latency(gated, kept=True)) == pytest.approx(takes(small, 6), rel=5e-3)
    assert takes(small, 6) == pytest.approx(linear(6, 12) + linear(12, 3) + 0.5)
    again = l0.Latency(Table.parsed(latency.table.json()))
    assert float(again(gated, kept=True)) == float(latency(gated, kept=True))
    close_all_but(gated, 40, 40, 1, 1)
    budget = l0.Budget(gated, at_most={latency: 0.4}, steps=20)
    small = trained(gated, budget, steps=20, width=6)
    assert takes(small, 6) <= 0.41 * takes(Added().double(), 6)


@pytest.mark.slow
def test_in_expectation_a_block_takes_its_time_as_often_as_it_is_open() -> None:
    torch.manual_seed(0)
    blocks = l0.attach(Added().double(), torch.randn(2, 6).double(), where=lambda g: l0.shrinkable(blocks=True)(g)[2:])
    latency = l0.Latency.measure(blocks, clock=clock)
    p = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    with blocks.assuming(p):
        seconds = latency(blocks)
    one = linear(12, 40) + linear(40, 12)
    assert seconds.item() == pytest.approx(linear(6, 12) + linear(12, 3) + 0.5 + 1.1 * one, rel=1e-6)
    assert torch.autograd.grad(seconds, p)[0].tolist() == pytest.approx([one, one], rel=1e-6)


class TimedAlong(nn.Linear):
    """A linear layer that takes longer the more it is applied along."""

    def forward(self, x: Tensor) -> Tensor:
        NOW[0] += 0.5 + 0.01 * x.shape[1] * self.in_features * self.out_features
        return super().forward(x)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.mix, self.out = Timed(6, 24), TimedAlong(5, 5), Timed(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mix(self.into(x).relu().transpose(1, 2)).transpose(1, 2))
        return out


def test_a_layer_takes_longer_along_more_units() -> None:
    torch.manual_seed(0)
    gated = l0.attach(Tokens().double(), torch.randn(2, 5, 6).double())
    latency = l0.Latency.measure(gated, clock=clock)
    for width in (24, 13, 5):
        close_all_but(gated, width)
        before, small = NOW[0], l0.compact(gated, verify=False)
        before = NOW[0]
        small(torch.zeros(1, 5, 6).double())
        assert float(latency(gated, kept=True)) == pytest.approx(NOW[0] - before, rel=2e-3)
    assert float(latency(gated, kept=True, only="mix")) == pytest.approx(0.5 + 0.01 * 5 * 25, rel=1e-2)


def test_parts_are_named_by_their_layers() -> None:
    gated, latency = chain(), measured()
    total = float(latency(gated, kept=True))
    assert float(latency(gated, kept=True, only="2")) == pytest.approx(linear(64, 48), rel=2e-3)
    parts = sum(float(latency(gated, kept=True, only=name)) for name in "024")
    assert parts == pytest.approx(total, rel=2e-3)
    with pytest.raises(ValueError, match="`only` must match the name of a layer whose time depends on gates"):
        latency(gated, only="5")


# ---- expectation and its gradient -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [Timed, Stepped])
def test_the_gradient_is_that_of_the_chords_and_dies_nowhere(layer: type[Timed]) -> None:
    gated, latency = chain(layer), measured(layer)
    p = torch.rand(gated.liveness.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = (0.2 + 0.7 * p).requires_grad_()
    with gated.assuming(p):
        value = latency(gated)
        (gradient,) = torch.autograd.grad(value, p)
    assert bool((gradient > 0).all())
    for k in (0, 63, 64, 111):
        step = torch.zeros_like(p)
        step[k] = 1e-4
        with torch.no_grad(), gated.assuming(p + step):
            up = float(latency(gated))
        with torch.no_grad(), gated.assuming(p - step):
            down = float(latency(gated))
        assert float(gradient[k]) == pytest.approx((up - down) / 2e-4, rel=1e-6)


def test_on_a_flat_step_the_gradient_is_the_slope_of_the_staircase_as_a_whole() -> None:
    gated, latency = chain(Stepped), measured(Stepped)
    p = torch.ones(gated.liveness.size, dtype=torch.float64).requires_grad_()
    with gated.assuming(p):
        (gradient,) = torch.autograd.grad(latency(gated), p)
    # Of 64 units, each a 16th of a step: 0.003 · 16 · 16 in the layer before, 0.003 · 16 · 48 in the one behind.
    assert float(gradient[0]) == pytest.approx(0.003 * 16 + 0.003 * 48, rel=0.01)


def test_in_expectation_it_is_a_line_between_the_ends_of_a_linear_clock() -> None:
    """With one width open for certain, the time is linear in the other: what is expected is exact."""
    gated, latency = chain(), measured()
    p = torch.ones(gated.liveness.size, dtype=torch.float64)
    p[:64] = 0.3
    with gated.assuming(p):
        n = 0.3 * 64
        exact = linear(8, n) + linear(n, 48) + linear(48, 4)  # type: ignore[arg-type]
        assert float(latency(gated)) == pytest.approx(exact, rel=2e-3)


def test_chords_join_flat_pieces_and_keep_the_ends() -> None:
    x, y = chords((np.arange(9.0), np.array([1.0, 1, 1, 2, 2, 2, 3, 3, 3])))
    assert (x[0], x[-1], y[0], y[-1]) == (0, 8, 1, 3)
    assert (np.diff(y) / np.diff(x) >= 0.25 * 2 / 8).all()
    x, y = chords((np.array([1.0, 2.0]), np.array([3.0, 2.0])))  # narrower is slower: it does not pay, but has a side
    assert y[1] == 2
    assert 0 < y[1] - y[0] < 1e-5


def test_curves_of_different_lengths_are_read_as_numpy_does() -> None:
    knots = [(np.array([0.0, 1, 4]), np.array([1.0, 2, 8])), (np.array([2.0, 6]), np.array([5.0, 1]))]
    curves = Curves.of(knots, torch.device("cpu"), torch.float64)
    for a, b in ((0.0, 2.0), (0.5, 3.0), (1.0, 6.0), (3.9, 5.5), (4.0, 2.1)):
        expected = [float(np.interp(x, *knot)) for x, knot in zip((a, b), knots, strict=True)]
        assert curves.at(torch.tensor([a, b], dtype=torch.float64)).tolist() == pytest.approx(expected)


def test_the_constant_of_a_bilinear_time_is_found() -> None:
    def t(x: float, y: float) -> float:
        return 2 + 0.5 * x * y + 3 * x + 1 * y

    places = [(3.0, 7.0), (9.0, 2.0), (5.0, 5.0)]
    ratios = [np.array([t(x, 10), t(10, y)]) / t(10, 10) for x, y in places]
    found = constant(np.array([t(x, y) for x, y in places]), ratios, t(10, 10))
    assert found == pytest.approx(2 - 3 * 1 / 0.5, abs=0.01)  # δ − βγ/α


# ---- budgets --------------------------------------------------------------------------------------------------------


def trained(gated: l0.Gated, budget: l0.Budget, steps: int = 40, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-3))
    budget.drive(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        gated(torch.randn(16, width).double()).square().mean().backward()
        optimizer.step()
    return budget.finish()


def test_a_budget_is_met_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l0.Latency, "measure", functools.partial(l0.Latency.measure, clock=clock))
    gated = chain()
    whole = takes(gated.model, 8)
    budget = l0.Budget(gated, latency=0.5, steps=40)
    assert "latency at most 50 %" in repr(budget)
    small = trained(gated, budget)
    assert 0.48 * whole <= takes(small, 8) <= 0.503 * whole
    assert budget.metrics()["latency/kept"] == pytest.approx(takes(small, 8) / whole, rel=3e-3)


class Fast(Timed):
    """Has a kernel of its own for small layers: what two widths take together is not in their curves."""

    seconds: Seconds = staticmethod(lambda x, y: linear(x, y) * (0.4 if x < 80 and y < 80 else 1.0))


BUMPS = np.random.default_rng(3).normal(0, 0.6, 100)


class Bumpy(Timed):
    """Fewer units may take longer."""

    seconds: Seconds = staticmethod(
        lambda x, y: 2 + 0.002 * x * y + (BUMPS[x] if x != 8 else 0) + (BUMPS[(y + 30) % 100] if y != 4 else 0)
    )


def test_where_no_unit_alone_saves_time_several_do() -> None:
    gated, latency = chain(Bumpy), measured(Bumpy)
    with torch.no_grad():
        for seed, (_, gate) in enumerate(gated.named_gates()):
            gate.log_alpha.copy_(torch.randn(gate.shape, generator=torch.Generator().manual_seed(seed)) + 3)
    narrow = copy.deepcopy(gated)
    close_all_but(narrow, 1, 1)
    bound = float(latency(narrow, kept=True)) / l0.dense(latency, gated) + 0.01
    l0.finalize(gated, at_most=bound, cost=latency)
    assert 0.9 * bound <= float(latency(gated, kept=True)) / l0.dense(latency, gated) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("bound", [np.float32(0.2), 0.45])  # any number is measured
def test_what_no_table_tells_is_measured_when_gates_settle(bound: float) -> None:
    """By its table alone the network would take half of what it may, and have its error for nothing. No network takes
    between 0.28 and 0.45 of the time, so that the nearest below stays there: never an error in the middle of a run.
    """
    taken, table = [], measured(Fast, 8, 96, 96, 4).table
    for told in (clock, None):
        gated = chain(Fast, 8, 96, 96, 4)
        whole = takes(gated.model, 8)
        small = trained(gated, l0.Budget(gated, {l0.Latency(table, told): bound}, steps=40))
        taken.append(takes(small, 8) / whole)
    by_clock, by_table = taken
    assert by_table < 0.6 * bound
    assert by_clock == pytest.approx(0.2, rel=0.02) if bound < 0.3 else 0.26 < by_clock < 0.3


class FastSteps(Timed):
    """A staircase, whose small layers have a kernel of their own."""

    seconds: Seconds = staticmethod(lambda x, y: (4 * stairs(x, y) - 1.5) * (0.4 if x < 40 and y < 40 else 1.0))


SIZES = 8, 48, 48, 4


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.19, 0.22])
def test_a_bound_is_met_beyond_steps_that_are_far_by_the_table(bound: float) -> None:
    """The first aims beyond what was timed give the same network again, which takes half of what it may."""
    gated, table = chain(FastSteps, *SIZES), measured(FastSteps, *SIZES).table
    whole = takes(gated.model, 8)
    small = trained(gated, l0.Budget(gated, {l0.Latency(table, clock): bound}, steps=40))
    assert 0.94 * bound < takes(small, 8) / whole <= 1.02 * bound


@pytest.mark.slow
@pytest.mark.parametrize("other", [0.9, 1.0], ids=["a table that nobody measures", "a bound that asks nothing"])
def test_two_bounds_of_time_of_which_one_cannot_be_aimed_at(other: float) -> None:
    gated, table = chain(FastSteps, *SIZES), measured(FastSteps, *SIZES).table
    whole = takes(gated.model, 8)
    beside = l0.Latency(table, None if other < 1 else clock)
    small = trained(gated, l0.Budget(gated, {l0.Latency(table, clock): 0.22, beside: other}, steps=40))
    assert takes(small, 8) / whole == pytest.approx(0.22, rel=0.05)


def test_on_a_staircase_widths_go_to_the_edge_of_a_step() -> None:
    gated, latency = chain(Stepped), measured(Stepped)
    whole = takes(gated.model, 8)
    small = trained(gated, l0.Budget(gated, {latency: 0.5}, steps=40))
    assert takes(small, 8) <= 0.505 * whole
    assert [small[0].out_features % 16, small[2].out_features % 16] == [0, 0]


@pytest.mark.slow
def test_units_up_to_the_edge_of_a_step_come_back_whatever_the_evidence() -> None:
    """Also where a step is the target, so that no time is left for a unit by its chord."""
    gated, latency = chain(Stepped), measured(Stepped)
    close_all_but(gated, 48, 32)
    step = float(latency(gated, kept=True)) / l0.dense(latency, gated)
    for seed, at_most in enumerate((0.6, 0.6, step, step, step, step)):
        torch.manual_seed(seed)
        for _, gate in gated.named_gates():
            nn.init.normal_(gate.log_alpha, 1.0, 2.0)
        l0.finalize(gated, at_most, cost=latency, fill=True)
        assert [int(part.sum()) % 16 for part in gated.by_placement(gated.opens()).values()] == [0, 0]
        assert float(latency(gated, kept=True)) <= at_most * l0.dense(latency, gated)


@pytest.mark.filterwarnings("ignore:no gate has moved")
def test_finalize_and_constraint_take_it_as_any_cost() -> None:
    gated, latency = chain(), measured()
    l0.finalize(gated, 0.4, cost=latency)
    assert float(latency(gated, kept=True)) <= 0.4 * l0.dense(latency, gated)
    constraint = l0.Constraint(latency, 0.6)
    assert "latency, at_most=0.6" in repr(constraint.bind(gated))
    with torch.no_grad():
        assert float(l0.Penalty(latency, weight=2.0)(gated)) == pytest.approx(2 * float(latency(gated)))


def test_a_run_that_is_taken_up_goes_on_with_its_own_table() -> None:
    gated, latency = chain(), measured()
    budget = l0.Budget(gated, {latency: 0.5}, steps=40)
    other = l0.Latency(replace(latency.table, seconds=2 * latency.table.seconds))
    again = l0.Budget(chain(), {other: 0.5}, steps=40)
    again.load_state_dict(budget.state_dict())
    assert other.table == latency.table


# ---- files, and what is refused -------------------------------------------------------------------------------------


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    gated, latency = chain(), measured()
    latency.save(tmp_path / "table.json")
    again = l0.Latency.load(tmp_path / "table.json")
    assert again.table == latency.table
    assert float(again(gated, kept=True)) == float(latency(gated, kept=True))
    stored = json.loads((tmp_path / "table.json").read_text())
    assert {"network", "seconds", "factor", "regions", "where", "checks"} < stored.keys()
    assert stored["where"].keys() == {"kind", "device", "batch", "dtype", "threads", "torch_version"}


def test_a_stored_table_is_used_again_and_not_for_another_batch(tmp_path: Path) -> None:
    gated = chain(Timed, 4, 6, 3)
    first = l0.Latency.measure(gated, store=tmp_path / "tables", clock=clock)

    def never() -> float:
        raise AssertionError("measured again")

    assert l0.Latency.measure(gated, store=tmp_path / "tables", clock=never).table == first.table
    assert len(list((tmp_path / "tables").iterdir())) == 1
    with pytest.raises(AssertionError, match="measured again"):
        l0.Latency.measure(gated, batch=7, store=tmp_path / "tables", clock=never)


def test_the_batch_is_that_which_the_network_sees() -> None:
    seen = []

    class Sees(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            NOW[0] += 1.0
            return super().forward(x)

    gated = l0.attach(nn.Sequential(Sees(3, 4), nn.ReLU(), Sees(4, 2)), torch.randn(2, 3))
    seen.clear()
    latency = l0.Latency.measure(gated, batch=5, clock=clock)
    assert set(seen) == {5}
    assert latency.table.where.batch == 5


def test_a_table_from_elsewhere_says_so_once(tmp_path: Path) -> None:
    gated, latency = chain(), measured()
    where = replace(latency.table.where, device="CPU of old", threads=96)
    l0.Latency(replace(latency.table, where=where)).save(tmp_path / "table.json")
    other = l0.Latency.load(tmp_path / "table.json")
    with pytest.warns(UserWarning, match="device CPU of old, not .*; threads 96, not "):
        other(gated)
    other(gated)
    other(chain())  # warnings are errors


def test_another_network_is_refused_in_one_line() -> None:
    latency = measured()
    with pytest.raises(ValueError, match=r"`latency` must be measured on this network, .* got a table of another") as e:
        l0.Budget(chain(Timed, 8, 64, 47, 4), {latency: 0.5}, steps=10)
    assert "\n" not in str(e.value)


def test_a_network_that_has_shrunk_is_the_same_one() -> None:
    gated = chain()
    before = network_hash(gated)
    close_all_but(gated, 30, 20)
    gated.shrink(gated.plan())
    assert network_hash(gated) == before
    assert float(measured()(gated, kept=True)) == pytest.approx(takes(gated.model, 8), rel=2e-3)


def test_a_target_below_what_was_measured_is_refused() -> None:
    gated, latency = chain(), measured()
    least, _ = floor(functools.partial(latency, kept=True), gated)
    with pytest.raises(ValueError, match=r"at_most` must be at least 0.*; times are those of Latency\(.*batch 2, "):
        l0.Budget(gated, {latency: 0.9 * least / latency.table.seconds}, steps=10)


@pytest.mark.parametrize("fraction", [0, 1.5, float("nan")])
def test_what_is_no_fraction_is_refused_before_anything_is_measured(fraction: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(l0.Latency, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="fraction of the dense cost"):
        l0.Budget(chain(), latency=fraction, steps=10)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no time depends on single weights"):
        l0.Latency.measure(l0.attach(nn.Linear(3, 2), torch.zeros(1, 3), where=l0.weights("*")))
    with pytest.raises(ValueError, match="`batch` must be a positive integer, got 0"):
        l0.Latency.measure(chain(), batch=0)
    with pytest.raises(TypeError, match="`gated` must be what `attach` returned"):
        l0.Latency.measure(nn.Linear(3, 2))  # type: ignore[arg-type]
    (tmp_path / "other.json").write_text('{"format": "other", "format_version": 1}')
    with pytest.raises(ValueError, match=r"other.json'.* must be what `Latency.save` wrote"):
        l0.Latency.load(tmp_path / "other.json")


def test_measuring_leaves_everything_as_it_was() -> None:
    gated = chain(Timed, 4, 6, 3)
    gated.train()
    gated.model[1].eval()
    before = {name: t.clone() for name, t in gated.state_dict().items()}
    modes = [m.training for m in gated.modules()]
    parameters, random = [id(p) for p in gated.parameters()], torch.get_rng_state()
    l0.Latency.measure(gated, dtype=torch.float32, clock=clock)
    l0.Latency.measure(gated, clock=clock)
    assert all(torch.equal(t, before[name]) for name, t in gated.state_dict().items())
    assert [m.training for m in gated.modules()] == modes
    assert [id(p) for p in gated.parameters()] == parameters
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_pre_hooks for m in gated.modules())
    assert not gated.drawn
    assert next(gated.parameters()).dtype == torch.float64


def test_a_network_that_writes_into_its_input_or_draws_numbers_is_left_alone_too() -> None:
    class Writes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            NOW[0] += 1.0
            out: Tensor = super().forward(x.mul_(2))
            return out + 0 * torch.rand(())

    gated = l0.attach(Writes(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(2, 3))
    before, random = gated.example_inputs[0][0].clone(), torch.get_rng_state()
    l0.Latency.measure(gated, clock=clock)
    assert torch.equal(gated.example_inputs[0][0], before)
    assert torch.equal(torch.get_rng_state(), random)


def test_report_shows_predicted_beside_measured() -> None:
    gated, latency = chain(), measured()
    close_all_but(gated, 32, 24)
    found = l0.report(gated, speed=latency)
    assert found.speed is not None
    assert found.speed.predicted_s == float(latency(gated, kept=True))
    assert "than measured" in str(found)
    assert json.loads(found.json())["speed"]["predicted_s"] > 0
    elsewhere = l0.Latency(replace(latency.table, where=Where("xpu", "an XPU", 2, "float64", 0, "2")))
    with pytest.raises(ValueError, match="measured on an XPU, and there is no xpu device here"):
        l0.report(gated, speed=elsewhere)
