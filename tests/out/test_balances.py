"""Parts that must keep as many units: groups of a convolution, halves of a `chunk`, shuffles. What comes back and what
`finalize` closes, against enumeration; the author says which units lie in which part, and torch counts.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.plan import even_out
from support.oracles import assert_counted, assert_same, masked_by_hand, numel, same, set_gates, settled

GATES: dict[str, l0.Gated] = {}


class Joined(nn.Module):
    """Layers of unequal price: the second group of `mix` reads the cheap one and a third of the dear one."""

    def __init__(self) -> None:
        super().__init__()
        self.dear, self.cheap = nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(4, 2, 1)
        self.mix = nn.Conv1d(8, 2, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([self.dear(x).relu(), self.cheap(x).relu()], 1))


class C2f(nn.Module):
    """YOLOv8's: halves of one layer, of which a block reads the second, and one layer all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.out = nn.Conv1d(4, 8, 1), nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.stem(x).relu().chunk(2, 1))
        return self.out(torch.cat([*parts, self.block(parts[-1]).relu()], 1))


class Aggregated(nn.Module):
    """A block of ResNeXt with six groups of three between two layers, and a layer without groups behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.grouped = nn.Conv1d(4, 18, 1), nn.Conv1d(18, 18, 1, groups=6)
        self.up, self.head = nn.Conv1d(18, 6, 1), nn.Conv1d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.grouped(self.down(x).relu()).relu()).relu())


def chained(*groups: int) -> nn.Sequential:
    """Grouped convolutions on the same twelve channels, not all with the same groups."""
    return nn.Sequential(nn.Conv1d(4, 12, 1, groups=2), nn.ReLU(), nn.Conv1d(12, groups[0], 1, groups=groups[0]))


HALVES = np.arange(12).reshape(2, 6)
NETS: dict[str, tuple[Any, list[np.ndarray]]] = {  # with the parts of the gates, in the order of `named_gates`
    "groups": (lambda: chained(4), [HALVES, np.arange(12).reshape(4, 3)]),
    "crossing groups": (lambda: chained(3), [HALVES, np.arange(12).reshape(3, 4)]),
    "unequal prices": (Joined, [np.arange(8).reshape(2, 4)]),
    "halves": (C2f, [np.arange(8).reshape(2, 4)]),
}


def gated_of(name: str, model: Any) -> l0.Gated:
    """Traced once; gates are set anew by each test."""
    if name not in GATES:
        GATES[name] = l0.attach(settled(model()), torch.randn(2, 4, 4, dtype=torch.float64))
    return GATES[name]


def cost_of(gated: l0.Gated, opens: Tensor, cost: Any = l0.params) -> float:
    with gated.assuming(opens.double()):
        return float(cost(gated, kept=True))


def balanced(parts: list[np.ndarray], opens: np.ndarray) -> bool:
    return all(len(set(opens[rows].sum(1))) == 1 for rows in parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_as_little_comes_back_as_can_be(name: str) -> None:
    """Of all ways to make the parts equal again the cheapest, whatever the evidence says."""
    model, parts = NETS[name]
    gated = gated_of(name, model)
    draw, closed = np.random.default_rng(1), 0
    some = {"groups": [0, 4, 8, 9], "unequal prices": [0, 4, 6, 7], "halves": [0, 5]}.get(name, [1])
    for seed, shut in enumerate([np.array(some), *(draw.permutation(gated.liveness.size)[:4] for _ in range(4))]):
        set_gates(gated, {k: shut_in(gated, k, shut) for k, _ in gated.named_gates()}, seed)
        opens = gated.opens().numpy()
        least = np.inf
        for back in itertools.product((False, True), repeat=len(shut)):
            tried = opens.copy()
            tried[shut] = back
            if balanced(parts, tried):
                least = min(least, cost_of(gated, torch.as_tensor(tried)))
        small = l0.compact(gated, verify=seed == 0)
        assert numel(small) == least
        assert_counted(gated, small, (torch.randn(2, 4, 4, dtype=torch.float64),))
        closed += numel(small) < numel(gated.model)
    assert closed or name == "crossing groups"  # of which six go at once, or none


def shut_in(gated: l0.Gated, name: str, shut: np.ndarray) -> list[int]:
    """Which gates of a placement are among those with these numbers."""
    start = 0
    for other, gate in gated.named_gates():
        if other == name:
            return [int(k) - start for k in shut if start <= k < start + gate.shape.numel()]
        start += gate.shape.numel()
    raise KeyError(name)


CROSSED = {  # balances that share units: rows and columns of a square, of a shuffle; parts within parts
    "square": [np.arange(9).reshape(3, 3), np.arange(9).reshape(3, 3).T],
    "shuffle": [np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4)],
    "within": [np.arange(8).reshape(2, 4), np.arange(8).reshape(4, 2)],
}


@pytest.mark.parametrize("name", CROSSED)
def test_balances_that_cross_are_evened_out_with_as_few_units_as_can_be(name: str) -> None:
    parts, draw = CROSSED[name], np.random.default_rng(0)
    n = parts[0].size
    states = [np.array(s) for s in itertools.product((False, True), repeat=n)]
    states = [s for s in states if balanced(parts, s)]
    for share in (0.1, 0.3, 0.5, 0.7) * 10:
        mask = draw.random(n) < share
        done = mask.copy()
        even_out(done, parts, draw.random(n))
        assert balanced(parts, done)
        assert (done | ~mask).all()
        assert done.sum() == min(s.sum() for s in states if (s | ~mask).all())


def by_levels(evidence: Tensor) -> Iterator[Tensor]:
    """What can be left of `Aggregated` without regret: so many in each part, those with most evidence."""
    parts = [evidence[:18].reshape(6, 3), evidence[18:36].reshape(6, 3), evidence[36:].reshape(1, 6)]
    for left in itertools.product(range(1, 4), range(1, 4), range(1, 7)):
        yield torch.cat(
            [(p.argsort(1).argsort(1) >= p.shape[1] - n).flatten() for p, n in zip(parts, left, strict=True)]
        )


@pytest.mark.slow
@pytest.mark.parametrize("at_most", [0.9, 0.8, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_finalize_closes_one_unit_of_each_group_and_leaves_the_most_evidence(at_most: float, seed: int) -> None:
    """Closed one by one, units without groups went first, because theirs were the only savings that showed."""
    gated = gated_of("aggregated", Aggregated)
    set_gates(gated, {}, seed)
    evidence, most = gated.evidence().detach(), at_most * l0.dense(l0.params, gated)
    best = max(float(evidence[s].sum()) for s in by_levels(evidence) if cost_of(gated, s) <= most)
    l0.finalize(gated, at_most)
    small = l0.compact(gated)
    assert numel(small) <= most
    assert_counted(gated, small, (torch.randn(2, 4, 4, dtype=torch.float64),))
    assert float(evidence[gated.opens()].sum()) == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("cost", [l0.params, l0.macs, l0.units, l0.l0_norm], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", [*NETS, "aggregated"])
@pytest.mark.parametrize("fill", [False, True], ids=["closing", "filling"])
def test_finalize_is_within_its_target_and_leaves_no_room(name: str, cost: Any, fill: bool) -> None:
    """Also where some units are closed before, so that others of their parts are there for nothing."""
    gated = gated_of(name, Aggregated if name == "aggregated" else NETS[name][0])
    draw = np.random.default_rng(2)
    for at_most, share in ((0.8, 0.0), (0.6, 0.2), (0.75, 0.5)):
        n = gated.liveness.size
        shut = np.flatnonzero(draw.random(n) < share)
        set_gates(gated, {k: shut_in(gated, k, shut) for k, _ in gated.named_gates()}, 3)
        before, most = gated.opens(), at_most * l0.dense(cost, gated)
        if cost_of(gated, gated.opens(), cost) > most and name == "crossing groups" and cost is not l0.l0_norm:
            continue  # six of twelve go at once, or none
        l0.finalize(gated, at_most, cost, fill=fill)
        opens = gated.opens()
        assert cost_of(gated, opens, cost) <= most
        for unit in torch.nonzero(~opens if fill else before & ~opens).flatten().tolist():
            again = opens.clone()
            again[unit] = True
            assert cost_of(gated, again, cost) > most
        assert_counted(gated, l0.compact(gated, verify=False), (torch.randn(2, 4, 4, dtype=torch.float64),))


class Excited(nn.Module):
    """A block of RegNet-Z: groups between two layers, with a squeeze-and-excitation branch that reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.grouped, self.up = nn.Conv1d(4, 6, 1), nn.Conv1d(6, 6, 1, groups=2), nn.Conv1d(6, 4, 1)
        self.squeeze, self.excite = nn.Conv1d(6, 2, 1), nn.Conv1d(2, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(self.down(x).relu()).relu()
        return x + self.up(y * self.excite(self.squeeze(y.mean(2, keepdim=True)).relu()).sigmoid())


def test_groups_that_read_nothing_any_more_give_their_bias() -> None:
    """One channel of each group had to stay, and whoever read the groups beside was a trial for `attach`."""
    model, x = settled(Excited()), torch.randn(2, 4, 4, dtype=torch.float64)
    gated = l0.attach(model, x)
    assert all(a.can_vanish for a in gated.axes if a.frozen is None)
    z = set_gates(gated, {"down": range(6)})
    small = l0.compact(gated)
    assert type(small.grouped).__name__ == "Closed"
    readers = {"down": {"grouped": same}, "grouped": {"squeeze": same, "up": same}, "squeeze": {"excite": same}}
    assert_same(small(x), masked_by_hand(model, z, readers)(x))
    assert_counted(gated, small, (x,))
