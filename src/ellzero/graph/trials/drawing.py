"""Which units a trial takes out: some of each axis, as many of each part that must keep as many. And which sets of axes
pass trials together, by halving: few trials where few fail. So do the layers that pick what they read of the network's
own input.

This file knows models as scenes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from ellzero.graph.axes import Graph, Numbers
from ellzero.graph.plan import Mask, make_plan
from ellzero.graph.standins.layers import put_select
from ellzero.graph.tracing import first_line
from ellzero.graph.trials.running import agree
from ellzero.graph.trials.scenes import Scene

HowMuch = Literal["one", "half", "many", "some", "uneven", "most"]
Together = tuple[int, ...]  # axes of which as many units must stay, by number
Test = Callable[[Sequence[int]], str | None]  # why axes fail together, if they do


def drawn(graph: Graph, left: Mask, axes: Sequence[Sequence[Numbers]], much: HowMuch, seed: int) -> Mask:
    """What stays if one of what is left of each axis goes, half, many, one or many, any number or all but one; as many
    of each group of a convolution. "Many" is uneven: what is as large as something else by chance must not stay so. And
    it leaves the ends: who takes the first or last ones by their number, or draws a number for each, gets others.

    Args:
        graph: with its heads of keys, some of which go with all their queries.
        left: the units that are there.
        axes: of each axis its `cells`.
        much: how much goes.
        seed: of what is drawn.
    """
    random = np.random.default_rng(seed)
    alive = left.copy()
    for of_axis in axes:
        there = [cell[alive[cell]] for cell in of_axis]
        parts = int(np.gcd.reduce([len(cell) for cell in there]))
        many = min(round(parts * random.uniform(0.4, 0.9)), max(parts - 2, 1))
        wanted = {"one": 1, "half": parts // 2, "many": many, "some": random.choice([1, many]), "most": parts - 1}
        taken = int(random.integers(parts)) if much == "uneven" else min(max(wanted[much], 1), parts - 1)
        for cell in there:
            order = random.permutation(cell)
            if much == "many" and len(cell) > 1:
                order = np.concatenate([cell[1:2], random.permutation(cell[2:-1]), cell[:1], cell[-1:]])
                order = order if len(cell) > 2 else cell
            alive[order[: len(cell) // parts * taken]] = False
    asked = np.concatenate([np.zeros(0, int), *(cell for of_axis in axes for cell in of_axis)])
    for served in graph.served:
        rows = random.permutation(served.queries[alive[served.queries].any(1)])
        if len(rows) and np.isin(rows[0, 0], asked):
            gone = {"one": 0, "half": len(rows) // 2, "many": int(len(rows) > 1), "most": len(rows) - 1}
            alive[rows[: gone.get(much, int(random.integers(len(rows))))]] = False
    return alive


def cells(graph: Graph, span: slice) -> list[Numbers]:
    """The units of an axis, in sets that lie in the same groups of all grouped convolutions, and of all
    heads of keys."""
    place: list[list[int]] = [[] for _ in range(span.stop - span.start)]
    for balance in (*graph.balances, *(s.queries for s in graph.served)):
        here = (balance >= span.start) & (balance < span.stop)
        for number in np.flatnonzero(here.any(1)).tolist():
            for unit in np.unique(balance[number][here[number]]).tolist():
                place[unit - span.start].append(number)
    cells: dict[tuple[int, ...], list[int]] = {}
    for unit, numbers in enumerate(place, span.start):
        cells.setdefault(tuple(numbers), []).append(unit)
    return [np.array(cell) for cell in cells.values()]


def together(graph: Graph, axes: Sequence[int]) -> list[Together]:
    """The axes in sets that balances hold together: none of a set can shrink where another one cannot."""
    of_unit = np.append(np.repeat(np.arange(len(graph.axes)), [a.size for a in graph.axes]), -1)
    sets = [{k} for k in axes]
    for balance in graph.balances:
        held = set(np.unique(of_unit[balance]).tolist())
        touched = [s for s in sets if s & held]
        sets = [s for s in sets if not s & held] + ([set.union(*touched)] if touched else [])
    return sorted(tuple(sorted(s)) for s in sets)


def sift(
    new: Sequence[Together],
    good: list[Together],
    test: Test,
    reasons: dict[int, str],
) -> list[Together]:
    """As many of `new` as pass the test together with `good`."""
    if not new:
        return good
    failure = test([k for s in (*good, *new) for k in s])
    if failure is None:
        return [*good, *new]
    if len(new) == 1:
        reasons.update(dict.fromkeys(new[0], failure))
        return good
    middle = len(new) // 2
    return sift(new[middle:], sift(new[:middle], good, test, reasons), test, reasons)


def sifted(
    new: Sequence[Together], good: list[Together], first: Test, whole: Test, reasons: dict[int, str]
) -> list[Together]:
    """The same for a test that is dear, and `first` a part of it that most of what fails does not pass."""
    if not new or whole([k for s in (*good, *new) for k in s]) is None:
        return [*good, *new]
    left = sift(new, good, first, reasons)[len(good) :]
    return sift(left, good, whole, reasons)


def picking(graph: Graph, scene: Scene, tolerance: float) -> Graph:
    """The graph whose layers keep all of the network's input that they read where one with a part of it goes wrong.

    A forward may ask a layer how wide its input is (`view(-1, self.fc1.in_features)`), or have numbers for each.
    """
    given = np.array([a.given for a in graph.axes for _ in range(a.size)] + [True])  # the last: unit -1
    flat = sorted(t for t in graph.in_own_module & graph.reading.keys() if len(graph.shapes[t]) == 2)
    layers = [t for t in flat if graph.shapes[t][1] > 1 and given[graph.units[t][graph.reading[t]]].all()]
    ends = tuple(path for path in scene.loans.ends if f"{path}.weight" not in layers)
    scene = replace(scene, last=None, small=None, loans=replace(scene.loans, ends=ends))
    reasons: dict[int, str] = {}
    sets = [(k,) for k in range(len(layers))]
    sift(sets, [], lambda some: _fails([layers[k] for k in some], graph, scene, tolerance), reasons)
    why = {layers[k]: f"; {failure}" for k, failure in reasons.items()}
    told = ["".join(why.get(s.tensor, "") for s in a.readers if a.given) for a in graph.axes]
    axes = [replace(a, frozen=f"{a.frozen}{more}") if more else a for a, more in zip(graph.axes, told, strict=True)]
    return replace(graph, axes=tuple(axes), in_own_module=graph.in_own_module - why.keys()) if why else graph


def _fails(layers: Sequence[str], graph: Graph, scene: Scene, tolerance: float) -> str | None:
    """How it goes wrong that these layers pick some of their inputs, if it does."""
    random, alive = np.random.default_rng(0), np.ones(graph.offsets[-1], dtype=bool)
    read = {t: graph.units[t][graph.reading[t]] for t in layers}
    for units in read.values():
        there = np.unique(units[units >= 0])
        alive[random.permutation(there)[: max(1, round(0.4 * len(there)))]] = False
    entries = {(t, graph.reading[t][0]): alive[units] | (units < 0) for t, units in read.items()}
    plan, (masked, _) = make_plan(graph, np.ones_like(alive), entries=entries), scene.masked(graph, alive)
    try:
        small = replace(scene, small=None).removed(replace(plan, selects={}))
        for name, (index, width) in plan.selects.items():  # now that its weight is there, which may have been lent
            put_select(small.model.get_submodule(name.rpartition(".")[0]), torch.as_tensor(index), width)
        removed, _ = small.masked(graph, plan.units)
    except Exception as error:
        return f"the model does not run with a part of it ({first_line(error)})"
    same = agree(masked, removed, tolerance)
    return None if same else "the model gives another output with a part of it than with zeros in its place"
