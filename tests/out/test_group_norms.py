"""Group norms: whole groups of channels go, and the network gives what a copy masked by hand gives.

What comes in has another batch size and other image sizes than the example.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.plan import make_plan
from ellzero.out import saving
from support import traced
from support.loops import Loop, driven
from support.oracles import (
    Readers,
    assert_counted,
    assert_same,
    between,
    each,
    every_state,
    masked_by_hand,
    measured,
    numel,
    open_exactly,
    same,
    set_gates,
    settled,
)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def stack(*middle: nn.Module, width: int = 12, last: nn.Module | None = None) -> nn.Module:
    """A convolution, what lies between, and who reads it."""
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *middle, last or nn.Conv2d(width, 5, 3))


class Written(nn.Module):
    """A group norm as a function, with its number of groups stored, a share of the channels, or a literal."""

    def __init__(self, how: str, weights: bool = True) -> None:
        super().__init__()
        self.how, self.parts, self.first, self.last = how, 4, nn.Conv2d(3, 12, 3), nn.Conv2d(12, 5, 1)
        self.size = 4  # as large by chance, and another thing
        self.weight, self.bias = (nn.Parameter(torch.ones(12)) if weights else None for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        groups = {"stored": self.parts, "share": x.shape[1] // 3, "literal": 4, "hidden": 2}[self.how]
        y = F.group_norm(x, num_groups=groups, weight=self.weight, bias=self.bias)
        return self.last(torch.where(x.abs() < 1e9, x, y) if self.how == "hidden" else y.relu()) / self.size


class Activated(nn.GroupNorm):
    """A group norm with a forward of its own, as timm has one: told the number that it keeps, or a literal."""

    def __init__(self, *sizes: int, told: int | None = None, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        if self.told is None and self.affine:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).relu()
        return (super().forward(x) if self.told is None else F.group_norm(x, 4, self.weight, self.bias)).relu()


class Joined(nn.Module):
    """The skip of a U-Net: a normed map is laid beside another one, and both are normed again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.one = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(3, 6)
        self.deep, self.two = nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8)
        self.both, self.up = nn.GroupNorm(7, 14), nn.Conv2d(14, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.one(self.down(x)).relu()
        deep = self.two(self.deep(skip)).relu()
        return self.up(self.both(torch.cat([skip, F.interpolate(deep, size=skip.shape[2:])], 1)))


class Block(nn.Module):
    """A residual branch with a norm inside it and one on the stream."""

    def __init__(self, groups: int = 3, **options: Any) -> None:
        super().__init__()
        self.stem, self.before, self.a = nn.Conv2d(2, 6, 1), nn.GroupNorm(3, 6), nn.Conv2d(6, 6, 3, padding=1)
        self.inside, self.b, self.head = nn.GroupNorm(groups, 6, **options), nn.Conv2d(6, 6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.b(self.inside(self.a(self.before(x).relu())).relu())
        return self.head(x.mean((2, 3)))


Case = tuple[Callable[[], nn.Module], dict[str, list[int]], Readers, dict[str, tuple[int, int]]]
CASES: dict[str, Case] = {
    "plain": (
        lambda: stack(nn.GroupNorm(4, 12), nn.ReLU()), {"0": [0, 2]}, {"0": {"3": each(3)}}, {"1": (2, 6)},
    ),
    "without weights": (
        lambda: stack(nn.GroupNorm(4, 12, affine=False), nn.ReLU()), {"0": [1]}, {"0": {"3": each(3)}}, {"1": (3, 9)},
    ),
    "a forward of its own": (
        lambda: stack(Activated(4, 12)), {"0": [0, 2]}, {"0": {"2": each(3)}}, {"1": (2, 6)},
    ),
    "a forward of its own without weights": (
        lambda: stack(Activated(4, 12, affine=False)), {"0": [3]}, {"0": {"2": each(3)}}, {"1": (3, 9)},
    ),
    "each channel alone": (
        lambda: stack(nn.GroupNorm(12, 12), nn.ReLU()), {"0": [0, 7]}, {"0": {"3": same}}, {"1": (10, 10)},
    ),
    "depthwise between": (
        lambda: stack(nn.GroupNorm(6, 12), nn.Conv2d(12, 12, 3, groups=12), nn.GroupNorm(3, 12), nn.SiLU()),
        {"0": [1]}, {"0": {"5": each(4)}}, {"1": (4, 8), "3": (2, 8)},
    ),
    "the coarsest of two": (
        lambda: stack(nn.GroupNorm(6, 12), nn.ReLU(), nn.GroupNorm(4, 12)),
        {"0": [1]}, {"0": {"4": each(6)}}, {"1": (3, 6), "3": (2, 6)},
    ),
    "flattened": (
        lambda: stack(nn.GroupNorm(3, 12), nn.ReLU(), nn.Flatten(), last=nn.Linear(12 * 36, 5)),
        {"0": [2]}, {"0": {"4": each(4 * 36)}}, {"1": (2, 8)},
    ),
    "a convolution in groups": (
        lambda: stack(nn.GroupNorm(6, 12), nn.ReLU(), nn.Conv2d(12, 4, 3, groups=2), last=nn.Conv2d(4, 5, 1)),
        {"0": [1, 5]}, {"0": {"3": each(2)}, "3": {"4": same}}, {"1": (4, 8)},
    ),
    "transposed": (
        lambda: stack(nn.ConvTranspose2d(12, 8, 2, 2), nn.GroupNorm(4, 8), nn.ReLU(), last=nn.Conv2d(8, 5, 1)),
        {"0": [3], "1": [0]}, {"0": {"1": same}, "1": {"4": each(2)}}, {"2": (3, 6)},
    ),
    "side by side": (
        Joined, {"down": [1], "deep": [0, 3]},
        {
            "down": {"deep": each(2), "up": lambda z: between(0, 8)(each(2)(z))},
            "deep": {"up": lambda z: between(6, 0)(each(2)(z))},
        },
        {"one": (2, 4), "two": (2, 4), "both": (4, 8)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_groups_that_are_closed_go(case: str) -> None:
    make, closed, readers, left = CASES[case]
    model = settled(make())
    gated = l0.attach(model, draw(2, 3, 6, 6)).eval()
    assert [name for name, _ in gated.named_gates()] == list(readers)
    z = set_gates(gated, closed)
    small = l0.compact(gated)
    norms: dict[str, Any] = {path: small.get_submodule(path) for path in left}
    assert {path: (m.num_groups, m.num_channels) for path, m in norms.items()} == left
    hand = masked_by_hand(model, z, readers)
    for x in (draw(2, 3, 6, 6), draw(3, 3, *(6, 6) if case == "flattened" else (9, 8))):
        assert_same(gated(x), hand(x))
        assert_same(small(x), hand(x))
    assert_counted(gated, small, (draw(2, 3, 6, 6),))
    assert not torch.allclose(hand(x), model(x), atol=1e-3)
    assert numel(small) < numel(model)


@pytest.mark.parametrize("weights", [True, False])
def test_a_number_of_groups_that_a_module_keeps_follows(weights: bool) -> None:
    model = settled(Written("stored", weights))
    gated = l0.attach(model, draw(2, 3, 6, 6)).eval()
    z = set_gates(gated, {"first": [0, 3]})
    small: Any = l0.compact(gated)
    assert (small.parts, small.size) == (2, 4)
    x = draw(3, 3, 7, 5)
    assert_same(small(x), masked_by_hand(model, z, {"first": {"last": each(3)}})(x))
    assert_counted(gated, small, (draw(2, 3, 6, 6),))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: stack(nn.GroupNorm(1, 12)), "`0`: `group_norm` in `1` mixes its units, which are one group"),
        (lambda: Written("literal"), "`group_norm` is told its number of groups: use an `nn.GroupNorm`.*in `self`"),
        (lambda: stack(Activated(4, 12, told=4)), "`0`: `group_norm` in `1` is told its number of groups: use an"),
        (lambda: Written("hidden"), "`first`: `group_norm` is told its number of groups: use an `nn.GroupNorm`"),
        (lambda: Written("share"), "`first`: `group_norm` is told its number of groups: use an `nn.GroupNorm`"),
        (lambda: stack(nn.GroupNorm(4, 12), nn.GroupNorm(3, 12)), "`0`: the groups of its norms make one unit of it"),
        (lambda: stack(nn.GroupNorm(2, 12), last=nn.Conv2d(12, 4, 1, groups=4)), "`0`: groups and cuts along it"),
    ],
)
def test_what_cannot_go_says_why(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        l0.attach(settled(make()), draw(2, 3, 6, 6))


class Seam(nn.Module):
    """Three groups over two maps of six channels: one of the first, one of the second, one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.last = (
            nn.Conv2d(3, 6, 3),
            nn.Conv2d(3, 6, 3),
            nn.GroupNorm(3, 12),
            nn.Conv2d(12, 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.cat([self.a(x), self.b(x)], 1)))


def test_a_group_across_a_seam_goes_from_both_sides() -> None:
    model = settled(Seam())
    gated = l0.attach(model, draw(2, 3, 6, 6)).eval()
    z = set_gates(gated, {"a#2": [0]})
    small: Any = l0.compact(gated)
    assert (small.a.out_channels, small.b.out_channels, small.norm.num_groups) == (4, 4, 2)
    readers = {"a": between(0, 8), "a#2": between(4, 4), "b": between(8, 0)}
    hand = masked_by_hand(model, z, {name: {"last": lambda z, f=f: f(each(4)(z))} for name, f in readers.items()})
    assert_same(small(draw(3, 3, 5, 8)), hand(draw(3, 3, 5, 8)))
    assert_counted(gated, small, (draw(2, 3, 6, 6),))


def test_streams_go_by_groups_too() -> None:
    model = settled(Block())
    gated = l0.attach(model, draw(2, 2, 4, 4), where=l0.shrinkable(streams=True)).eval()
    z = set_gates(gated, {"stem": [1], "a": [0]})
    small: Any = l0.compact(gated)
    assert (small.before.num_groups, small.inside.num_groups, small.head.in_features) == (2, 2, 4)
    x = draw(3, 2, 5, 7)
    assert_same(small(x), masked_by_hand(model, z, {"stem": {"a": each(2), "head": each(2)}, "a": {"b": each(2)}})(x))
    assert_counted(gated, small, (draw(2, 2, 4, 4),))


def test_costs_are_those_of_the_networks_that_come_out() -> None:
    """Expected: the mean over all states, each by its probability, of what comes out; the branch may be gone."""
    gated = l0.attach(settled(Block()), draw(1, 2, 3, 3)).eval()
    assert [gate.shape.numel() for _, gate in gated.named_gates()] == [3]
    expected = [float(cost(gated).detach()) for cost in (l0.params, l0.macs)]
    states = list(every_state(gated))
    mean = np.zeros(2)
    for state, weight in states:
        open_exactly(gated, state)
        small = l0.compact(gated)
        mean += weight * np.array(measured(small, draw(1, 2, 3, 3)))
        assert isinstance(small.inside, nn.GroupNorm) == any(state)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_finalize_closes_whole_groups() -> None:
    gated = l0.attach(settled(stack(nn.GroupNorm(4, 12), nn.ReLU())), draw(2, 3, 6, 6)).eval()
    set_gates(gated, {})
    l0.finalize(gated, at_most=0.6, cost=l0.macs)
    small: Any = l0.compact(gated)
    assert (small[1].num_groups, small[0].out_channels) == (2, 6)


@pytest.mark.parametrize("affine", [True, False])
def test_what_is_left_is_saved_and_loaded(affine: bool, tmp_path: Path) -> None:
    gated = l0.attach(settled(Block(affine=affine)), draw(2, 2, 4, 4)).eval()
    set_gates(gated, {"a": [1]})
    small, file = l0.compact(gated), tmp_path / "small.safetensors"
    saving.save(small, file)
    there = saving.load(Block(affine=affine), file)
    assert (there.inside.num_groups, there.inside.num_channels) == (2, 4)
    assert_same(there.double().eval()(draw(3, 2, 5, 5)), small(draw(3, 2, 5, 5)))
    with pytest.raises(ValueError, match="`inside` has channels of a group 2, here 3"):
        saving.load(Block(2, affine=affine), file)


@pytest.mark.parametrize("affine", [True, False])
def test_a_removal_that_is_undone_gives_the_groups_back(affine: bool) -> None:
    model = settled(Block(affine=affine))
    graph = l0.attach(model, draw(2, 2, 4, 4)).graph
    axis = next(k for k, a in enumerate(graph.axes) if a.name == "a" and a.frozen is None)
    alive = np.ones(graph.offsets[-1], dtype=bool)
    alive[graph.offsets[axis]] = False
    plan = make_plan(graph, alive)
    plan.apply(model)
    assert (model.inside.num_groups, model.inside.num_channels) == (2, 4)
    plan.undo(model, graph.shapes)
    assert (model.inside.num_groups, model.inside.num_channels, model.a.out_channels) == (3, 6, 6)


def budgeted(**options: Any) -> Loop:
    torch.manual_seed(0)
    gated = traced.attached(Block(affine=False).double(), draw(2, 2, 4, 4)).train()
    sgd = torch.optim.SGD(gated.param_groups(lr=1e-2), momentum=0.9)
    x, y = draw(4, 2, 4, 4), draw(4, 2)
    return driven(gated, sgd, lambda _: (gated(x) - y).square().mean(), macs=0.75, steps=40, learning=0.5, **options)


@pytest.mark.slow
def test_groups_leave_the_live_network_and_a_loop_goes_on() -> None:
    networks: list[Any] = []
    for shrink in (True, False):
        loop = budgeted(shrink=shrink)
        loop.train(range(32))
        state = loop.state()
        assert (loop.gated.model.inside.num_groups < 3) == shrink
        loop.train(range(32, 40))
        networks.append(loop.budget.finish())
        if shrink:
            other = budgeted()
            other.take_up(state)
            other.train(range(32, 40))
            networks.append(other.budget.finish())
    x = draw(3, 2, 5, 5)
    assert len({m.inside.num_groups for m in networks}) == 1
    assert torch.equal(networks[0](x), networks[1](x))
    assert_same(networks[0](x), networks[2](x))
