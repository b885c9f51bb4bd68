"""Random networks, each traced once, and all that must hold of any: its units are those of its program, it is masked,
compacted and counted exactly, and it shrinks in steps as it does at once.

The oracle is the program that the network was drawn as (`support.fuzz`), which shares nothing with the library.
"""

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.plan import make_plan
from ellzero.out import shrinking
from support.fuzz import Drawn, drawn_networks
from support.oracles import assert_counted, assert_same, masked_by_hand, same, set_gates, settled


def masked_by_units(model: Drawn, gated: l0.Gated, z: dict[str, Tensor]) -> nn.Module:
    """The hand-masked copy: which gate each layer's inputs read is told by the network itself, not by the library."""
    rows, reads, _, _ = model.units()
    value: dict[int, Tensor] = {}
    axes = {a.name: a for a in gated.axes}
    for name, gates in z.items():
        for site in axes[name].sites if name in axes else ():
            layer = site.tensor.removeprefix("layers.").removesuffix(".weight")
            if site.dims == (0,) and site.tensor.endswith(".weight") and (layer, 0) in rows:
                for row, unit in enumerate(site.units.tolist()):
                    if unit >= 0:
                        assert torch.equal(value.setdefault(rows[layer, row], gates[unit]), gates[unit]), (
                            "one unit, two gates"
                        )
    one = torch.ones((), dtype=torch.float64)
    factors = {name: torch.stack([value.get(u, one) for u in units]) for name, units in reads.items()}
    for name in factors:  # what the layer itself reads of the data has gates of its own
        factors[name] = factors[name] * z.get(f"layers.{name}.inputs", one)
    return masked_by_hand(model, factors, {name: {f"layers.{name}": same} for name in factors})


KINDS = {"reads", "keeps", "depth", "sum", "into", "scale", "cat", "halves", "shuffle", "flatten", "last", "mean"}
UNSEEN = "the example input does not show whether the output depends on it"


def assert_unseen(model: Drawn, x: Tensor, units: Iterable[int]) -> None:
    """What the library says it cannot see, as behind a dead ReLU: without each of these units alone the output on the
    example is the same.
    """
    _, reads, _, _ = model.units()
    for unit in units:
        factors = {name: torch.tensor([float(u != unit) for u in us]).double() for name, us in reads.items()}
        hand = masked_by_hand(model, factors, {name: {f"layers.{name}": same} for name in factors})
        with torch.no_grad():
            assert_same(hand(x), model(x), 1e-11)


def assert_units_of_the_program(model: Drawn, graph: l0.graph.Graph) -> None:
    """Two rows of two weights are one unit exactly if the program says so."""
    rows, reads, _, _ = model.units()
    ours: dict[int, set[int]] = {}
    for (layer, row), unit in rows.items():
        ours.setdefault(unit, set()).add(int(graph.units[f"layers.{layer}.weight"][(0,)][row]))
    for layer, units in reads.items():
        tensor = f"layers.{layer}.weight"
        if graph.reading[tensor] == (1,):
            for column, unit in enumerate(units):
                ours.setdefault(unit, set()).add(int(graph.units[tensor][(1,)][column]))
    written = set(rows.values())
    assert all(len(ours[u]) == 1 for u in written), "one unit of the program, several of the graph"
    assert len({next(iter(ours[u])) for u in written}) == len(written), "several units of the program, one of the graph"


def assert_found(model: Drawn, gated: l0.Gated, x: Tensor) -> None:
    """Every unit between input and output has a gate, and no other, but for what the example does not show."""
    rows, reads, first, last = model.units()
    hidden = [a for a in gated.axes if a.frozen == UNSEEN]
    free = sum(a.size for a in gated.axes if a.frozen is None)
    assert free + sum(a.size for a in hidden) == len({u for us in reads.values() for u in us} - first - last)
    written = [s.tensor.split(".")[1] for a in hidden for s in a.sites if s.dims == (0,)]
    assert_unseen(model, x, {unit for (layer, _), unit in rows.items() if layer in written})


def some_closed(gated: l0.Gated, random: np.random.Generator) -> tuple[dict[str, list[int]], int]:
    """Gates to close by placement, and in how many placements those are all."""
    closed, emptied = {}, 0
    axes = {a.name: a for a in gated.axes}
    for name, gate in gated.named_gates():
        order = random.permutation(gate.shape.numel())
        every = random.random() < (0.0 if name not in axes else 0.3 if axes[name].can_vanish else 0.05)
        closed[name] = order[: len(order) if every else random.integers(0, len(order))].tolist()
        emptied += every
    return closed, emptied


def compacts(model: Drawn, gated: l0.Gated, z: dict[str, Tensor], x: Tensor, others: Tensor) -> bool:
    """Gated, masked by hand and compact agree, and costs are those of what came out; False where it is refused."""
    hand = masked_by_units(model, gated, z)
    with torch.no_grad():
        assert_same(hand(others), gated(others), 1e-11)
        try:
            small = l0.compact(gated)
        except l0.graph.ClosedAxisError:  # the output has lost the input
            assert_same(hand(others[:1]).expand(3, *hand(others).shape[1:]), hand(others))
            return False
        assert_same(hand(others), small(others), 1e-11)
    assert_counted(gated, small, (x,))
    return True


def assert_shrinks_in_steps_as_at_once(model: Drawn, x: Tensor, graph: l0.graph.Graph, seed: int) -> None:
    """Takes ever more units out of a network, and each time as many out of one that is still whole."""
    gated = l0.attach(copy.deepcopy(model), x, where=l0.shrinkable(streams=True), graph=graph)
    draw = np.random.default_rng(seed)
    alive: Any = np.ones(graph.offsets[-1], dtype=bool)
    for _ in range(3):
        alive = alive & (draw.random(len(alive)) < 0.7)
        present = shrinking.there(gated)
        kept = alive & present
        for axis, start in zip(gated.axes, graph.offsets, strict=False):
            here = np.arange(start, start + axis.size)
            if not kept[here].any():
                kept[here[present[here]][0]] = True
        plan = make_plan(graph, kept, evidence=np.where(present, 0.0, -np.inf), refuse=False)
        gated.shrink(plan)
        at_once = copy.deepcopy(model)
        plan.apply(at_once)
        ours, theirs = gated.model.state_dict(), at_once.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert str(gated.model) == str(at_once)
        for name, tensor in model.state_dict().items():
            back = plan.spread(name, plan.slice(name, tensor), tuple(tensor.shape))
            assert torch.equal(plan.slice(name, back), plan.slice(name, tensor))
            assert back.count_nonzero() <= plan.slice(name, tensor).numel()


@pytest.mark.slow(first=True)
@pytest.mark.timeout(1200)
def test_random_networks() -> None:
    """24 of them, each with gates on its residual streams and without; `tools/fuzz.py` draws thousands."""
    seen = {streams: {"compared": 0, "refused": 0, "vanished": 0} for streams in (True, False)}
    shrunk, kinds = [], set[str]()

    @settings(max_examples=24, derandomize=True, database=None, phases=[Phase.generate])
    @given(drawn_networks(), st.integers(0, 2**31))
    def check(model: Drawn, seed: int) -> None:
        settled(model, seed)
        kinds.update(op for op, *_ in model.program)
        channels, size = model.shapes[0]
        shape = (channels, size, size) if size else (channels,)
        draw = torch.Generator().manual_seed(seed)
        x, others = (torch.randn(n, *shape, dtype=torch.float64, generator=draw) for n in (2, 3))
        graph = None
        for streams, counts in seen.items():
            try:
                gated = l0.attach(model, x, where=l0.shrinkable(streams=streams), graph=graph).eval()
            except ValueError as error:
                if "nothing to gate" not in str(error):
                    raise
                if streams:
                    assert_units_of_the_program(model, l0.graph.trace(model, x))
                    if not model.grouped:  # dead as a whole, or there is nothing between input and output
                        _, reads, first, last = model.units()
                        assert_unseen(model, x, {u for us in reads.values() for u in us} - first - last)
                break
            if streams:
                graph = gated.graph
                assert_units_of_the_program(model, graph)
                if not model.grouped:
                    assert_found(model, gated, x)
                if not any(getattr(layer, "groups", 1) > 1 for layer in model.modules()):
                    assert_shrinks_in_steps_as_at_once(model, x, graph, seed)
                    shrunk.append(seed)
            closed, emptied = some_closed(gated, np.random.default_rng(seed))
            counts["vanished"] += emptied
            compared = compacts(model, gated, set_gates(gated, closed, seed), x, others)
            counts["compared" if compared else "refused"] += 1

    check()
    for counts in seen.values():
        assert counts["compared"] >= 17
        assert counts["refused"] >= 1
        assert counts["vanished"] >= 3
    assert len(shrunk) >= 9
    assert kinds == KINDS
