"""Whether a network with units removed goes on doing what the whole one does, operation by operation.

A forward is Python and may look at sizes: `x[:, :8]`, `x / x.shape[1]`, `if x.shape[1] > 8`. The example may hide what
comes of it, behind a `where`, an `argmax` or a `clamp` that does not act. So the small network is traced as the whole
one was, and the two are compared step by step: the same operations, told the same numbers, on the units that are left.
This file looks at no number that flows through a network.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import zip_longest
from math import prod

import numpy as np
from torch import nn

from ellzero.graph.axes import Graph, Layout, Numbers, Served, Step
from ellzero.graph.plan import Mask, Plan
from ellzero.graph.ties import Ties, classes
from ellzero.graph.tracing import Inputs, TraceError, shapes, walk
from ellzero.graph.trials.running import Renamed, same_numbers

Shares = Mapping[int, tuple[int, int]]  # by head of keys: how many queries it served, and serves
_NONE = Step(())
_RESHAPES = dict.fromkeys(("view", "_unsafe_view", "_reshape_alias"), "reshape")  # one thing by several names


def strays(graph: Graph, plan: Plan, small: nn.Module, inputs: Inputs, renamed: Renamed) -> str | None:
    """How the forward of `small`, on which `plan` was carried out, departs from the traced one; None if it does not.
    `renamed` tells of numbers in `small` what they were.
    """
    ties = Ties(shapes(small), graph.parameters, like=graph.steps, serves_one=bool(graph.served))
    try:
        walk(small, ties, inputs, time.monotonic() + 600)
    except TraceError as error:
        return f"the model cannot be traced with a unit of it removed ({error})"
    units = _units(graph, plan, ties)
    if units is None:
        return "other units of it meet with a unit of it removed"
    shares = {head: (s.queries.shape[1], _share(s, plan.units)) for s in graph.served for head in s.heads.tolist()}
    for whole, left in zip_longest(graph.steps, ties.steps, fillvalue=_NONE):
        if _RESHAPES.get(whole.op, whole.op) != _RESHAPES.get(left.op, left.op):
            return f"the model takes another path with a unit of it removed (`{left.op}` instead of `{whole.op}`)"
        if not same_numbers(whole.numbers, left.numbers, renamed):
            return f"`{whole.op}` gets another number with a unit of it removed ({whole.numbers} become {left.numbers})"
        some = shares if shares and any(_of_heads(layout, shares) for layout in whole.made) else {}
        if not all(_same(a, b, plan.units, units, some, whole.op) for a, b in zip_longest(whole.made, left.made)):
            return f"`{whole.op}` takes other units with a unit of it removed: it looks at places, not at shares"
    return None


def _units(graph: Graph, plan: Plan, ties: Ties) -> Numbers | None:
    """For each atom of the small network its unit in the whole one, or -1: in two rows, which are one but where a lone
    unit is left of an axis. That may lie on units which cannot go, as a head on the entries of its values. None where
    other units are tied that are two.
    """
    known = np.full(ties.count, -1)
    for name, dim in ties.first:
        if (dim,) in graph.units.get(name, {}):
            known[ties.atoms(name, dim)] = plan.cut(graph.units[name][(dim,)], name, (dim,))
    for (name, dims, _), atoms in ties.tables.items():
        known[atoms] = plan.cut(graph.units[name][dims], name, dims)
    root = classes(ties.count, ties.pairs)
    last, first = np.full(ties.count, -1), np.full(ties.count, len(plan.units))
    np.maximum.at(last, root, known)
    np.minimum.at(first, root[known >= 0], known[known >= 0])
    first, last = np.minimum(first, last)[root], last[root]
    sizes = [a.size for a in graph.axes]
    lone = np.repeat(np.add.reduceat(plan.units, graph.offsets[:-1], dtype=int) == 1, sizes) & plan.units
    stays = graph.on(lambda axis: axis.frozen is not None)
    stays[[head for s in graph.served for head in s.heads]] = False  # these go with their queries
    right = (known < 0) | (known == first) | (known == last)
    right &= (first == last) | (lone[first] & stays[last]) | (stays[first] & lone[last])
    head = np.append(np.arange(len(plan.units)), -1)  # of each query; another unit is its own
    for served in graph.served:
        head[served.queries] = served.heads[:, None]
    meet = ((last[s.heads][:, None], head[last[s.queries]]) for s in ties.served)
    fit = all(((a == b) | (a < 0) | (b < 0)).all() for a, b in meet)
    return np.stack([first, last]) if right.all() and fit else None


def _share(served: Served, kept: Mask) -> int:
    """How many queries each head of keys has that is left."""
    return int(kept[served.queries].sum(1).max())


def _of_heads(layout: Layout, shares: Shares) -> bool:
    return any(numbers.flat[0] in shares for numbers in layout[1].values() if numbers.size)


def _same(whole: Layout | None, left: Layout | None, kept: Mask, units: Numbers, shares: Shares, op: str) -> bool:
    """Whether what is left of a tensor has the units that stay, in their order, and all else. Heads of keys may lie
    there once for each of the queries that they serve.
    """
    if whole is None or left is None or len(whole[0]) != len(left[0]):
        return False
    (shape, carried), (sizes, there) = whole, left
    carried = {dims: numbers for dims, numbers in carried.items() if not (numbers < 0).all() or not numbers.size}
    there = {dims: atoms for dims, atoms in there.items() if (units[:, atoms.ravel()] >= 0).any()}
    plain = [d for d in range(len(shape)) if not any(d in dims for dims in carried)]
    for dims, numbers in carried.items():
        stays = numbers[kept[numbers] | (numbers < 0)]
        was, now = shares.get(int(numbers.flat[0]), (1, 1)) if numbers.size else (1, 1)
        if prod(sizes[d] for d in dims) != len(stays) and len(stays) % was == 0:
            stays = np.repeat(stays.reshape(-1, was)[:, :1], now, 1).ravel() if _once_each(stays, was) else stays
        if prod(sizes[d] for d in dims) != len(stays):
            return False
        # With a single unit left, a reshape may see no units in a dimension where it saw some.
        if dims in there and not _are(units[:, there[dims].ravel()], stays):
            return False
    repeats = set(shares.values()) if op == "expand" else set()
    return all(shape[d] == sizes[d] or (shape[d], sizes[d]) in repeats for d in plain)


def _are(units: Numbers, these: Numbers) -> bool:
    """Whether units, of which one of two rows counts, are these."""
    return units.shape[1] == len(these) and bool((units == these).any(0).all())


def _once_each(units: Numbers, times: int) -> bool:
    """Whether each lies there so many times, one after the other."""
    rows = units.reshape(-1, times)
    return bool((rows == rows[:, :1]).all())
