"""Which units are alive, given which gates are open: the one formula behind expected costs, kept costs and compaction.

A unit is alive if any weight entry that reads it is open, and an entry is open if all gates on it are. With
independent gates, P(alive) = Π_common p · (1 − Π_entries (1 − Π_rest p)), where the common gates act on every entry
that reads the unit; at p ∈ {0, 1} it says which units are kept. It is exact when no gate but the common ones acts on
two entries of a unit, and `attach` refuses placements where one does. This file knows gates as numbers only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph, Numbers


def product(x: Tensor, dim: int) -> Tensor:
    """Π along one dimension, by halves. `torch.prod` looks for zeros in its backward, which makes a GPU wait."""
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        pairs = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = pairs if x.shape[dim] == 2 * half else torch.cat([pairs, x.narrow(dim, 2 * half, 1)], dim)
    return x.squeeze(dim)


@dataclass(frozen=True, eq=False)
class Column:
    """Unstructured gates of one weight: an input is read if any gate of its column (along `dim`) is open."""

    start: int
    shape: tuple[int, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class Liveness:
    """Index tables into the vector `[p, columns…, 1, 0]`, where p holds P(open) of all gates, by placement.

    Args:
        size: number of gates.
        one: index of the 1 (that of the 0 follows it).
        columns: unstructured weights whose columns count as one gate each.
        common: for each unit the gates that all its readers share, padded with the index of 1.
        several: units with readers that differ beyond the common gates.
        rest: for each of them, by entry, the further gates on it; entries padded with the index of 0.
        entries: for each weight that gets a `Select` or a `Scatter`, and its dimension, the gates on each of its inputs
            or outputs.
        blocks: for each block of the graph the gate that opens it, or the number of gates. What lies in a block is
            alive if it is alive by all of the above, and the block is open.
    """

    size: int
    one: int
    columns: tuple[Column, ...]
    common: Numbers
    several: Numbers
    rest: Numbers
    entries: dict[tuple[str, int], Numbers]
    blocks: Numbers

    def tables(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arrays as tensors, for `extend`, `units` and `inputs`."""
        arrays = {"decided": self.decided, "common": self.common[self.decided]}
        arrays |= {"several": np.searchsorted(self.decided, self.several), "rest": self.rest, "blocks": self.blocks}
        arrays |= {f"entries {name} {dim}": index for (name, dim), index in self.entries.items()}
        moved = {k: torch.as_tensor(a, device=device) for k, a in arrays.items()}
        return moved | {"ends": torch.tensor([1.0, 0.0], device=device, dtype=dtype)}

    def extend(self, p: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """`p` with the columns' probabilities, 1 and 0 behind it."""
        parts = [p]
        for c in self.columns:
            block = p[c.start : c.start + prod(c.shape)].reshape(c.shape).movedim(c.dim, 0).reshape(c.shape[c.dim], -1)
            parts.append(1 - product(1 - block, 1))
        return torch.cat([*parts, tables["ends"]])

    @cached_property
    def decided(self) -> Numbers:
        """The units that gates decide about."""
        decided = np.asarray((self.common < self.one).any(1))
        decided[self.several] = True
        return np.flatnonzero(decided)

    def decided_units(self, extended: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """P(alive) of the units that gates decide about. Of the others there may be far more, and each would add its
        nothing to the gradient of one number, one after the other.
        """
        alive = extended[tables["common"]]
        alive = alive[:, 0] if self.common.shape[1] == 1 else product(alive, 1)
        if len(self.several):
            read = 1 - product(1 - product(extended[tables["rest"]], 2), 1)
            alive = alive.index_put((tables["several"],), alive[tables["several"]] * read)
        return alive

    def units(self, extended: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """P(alive) of every unit of the graph."""
        whole = extended.new_ones(len(self.common))
        return whole.index_put((tables["decided"],), self.decided_units(extended, tables))

    def inputs(self, extended: Tensor, tables: dict[str, Tensor]) -> list[Tensor]:
        """P(open) of every input of each weight that gets a `Select`, or output of one that gets a `Scatter`."""
        return [product(extended[tables[f"entries {name} {dim}"]], 1) for name, dim in self.entries]

    def population(self, p: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """P(alive) of all that gates decide about, given P(open) of every gate: units, then inputs."""
        extended = self.extend(p, tables)
        units, inputs = self.decided_units(extended, tables), self.inputs(extended, tables)
        return torch.cat([units, *inputs]) if inputs else units

    def open_blocks(self, p: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """P(open) of every block of the graph, given that of every gate."""
        return torch.cat([p, p.new_ones(1)])[tables["blocks"]]

    def closed_blocks(self, opens: Tensor, tables: dict[str, Tensor]) -> list[int]:
        """The numbers of the blocks that are closed, given which gates are open."""
        return np.flatnonzero(self.open_blocks(opens, tables).cpu().numpy() == 0).tolist()

    def weakest(self, evidence: Tensor) -> npt.NDArray[np.float64]:
        """For each unit the least evidence of the gates that all its readers share, which chooses among closed ones."""
        numbers = evidence.double().cpu().numpy()
        if (bad := np.flatnonzero(np.isnan(numbers))).size:
            found = f"{bad.size} of {numbers.size} that are NaN, the first is number {bad[0]}"
            order = "in the order of `named_gates()`; one loss that is not finite does that"
            raise ValueError(f"gates must be open or closed, got {found} {order}")
        padded = np.concatenate([numbers, np.full(self.one + 2 - len(numbers), np.inf)])
        return np.asarray(padded[self.common].min(1))


def liveness(graph: Graph, placements: Sequence[Placement]) -> Liveness:
    """Works out for every unit and every input which gates decide about it, or refuses the placements."""
    size = sum(prod(p.shape) for p in placements)
    columns, acting = _acting(graph, placements, size)
    one = size + sum(c.shape[c.dim] for c in columns)
    zero = one + 1
    # For every unit, the sets of gates that decide about each entry that reads it.
    readers: dict[int, set[frozenset[int]]] = defaultdict(set)
    at: dict[str, list[frozenset[int]]] = {}
    entries: dict[tuple[str, int], Numbers] = {}
    frozen = graph.on(lambda axis: axis.frozen is not None)
    for tensor, dims in {(t, dims): None for t, sites in graph.closing.items() for dims in sites} | acting:
        whole = graph.units[tensor][dims]
        units = graph.closing.get(tensor, {}).get(dims, np.full(whole.shape, -1))
        if (tensor, dims) not in acting:  # it reads whatever the gates say
            for unit in np.unique(units[units >= 0]).tolist():
                if not frozen[unit]:
                    readers[unit].add(frozenset())
            continue
        positions = np.arange(units.size)
        if len(dims) > 1:  # the rows of one group read the same units
            _, positions = np.unique(whole, return_index=True)
        lists = [g.ravel()[positions].tolist() for g in acting[tensor, dims]]
        decides = [frozenset(g for g in gates if g >= 0) for gates in zip(*lists, strict=True)]
        if dims == graph.reading.get(tensor):
            at[tensor] = decides
        elif (tensor, dims) in graph.written:
            entries[tensor, dims[0]] = _lines(decides, one)
        for unit, gates in zip(units.flat[positions].tolist(), decides, strict=True):
            if unit >= 0 and not frozen[unit]:
                readers[unit].add(gates)
    for served in graph.served:
        for head, queries in zip(served.heads.tolist(), served.queries.tolist(), strict=True):
            readers[head] = set().union(*(readers.get(query, {frozenset()}) for query in queries))
    shared, several = _decided(readers, graph.offsets[-1])
    for tensor, gates_of in at.items():
        dims = graph.reading[tensor]
        if len(dims) > 1 or tensor not in graph.in_own_module or not any(gates_of):
            continue
        units = graph.units[tensor][dims].tolist()
        here = graph.closing.get(tensor, {}).get(dims, np.full(len(units), -1)) >= 0  # else closed where it is written
        lines = zip(units, here.tolist(), gates_of, strict=True)
        if any(gates != shared[u] or u in several for u, reads, gates in lines if u >= 0 and (reads or gates)):
            entries[tensor, dims[0]] = _lines(gates_of, one)
    common = _lines(shared, one)
    rest = _padded(list(several.values()), one, zero)
    several_units = np.array(list(several), dtype=np.int64)
    return Liveness(size, one, tuple(columns), common, several_units, rest, entries, _opening(graph, placements, size))


def _opening(graph: Graph, placements: Sequence[Placement], none: int) -> Numbers:
    """For each block the gate that opens it, or `none`."""
    out = np.full(len(graph.blocks), none)
    starts = accumulate((prod(p.shape) for p in placements), initial=0)
    for placement, start in zip(placements, starts, strict=False):
        if placement.block is not None:
            if placement.shape != (1,) or out[placement.block] != none:
                raise ValueError(f"`where` must put one gate on a block, and `{placement.name}` is not the only one")
            out[placement.block] = start
    return out


def _acting(
    graph: Graph, placements: Sequence[Placement], width: int
) -> tuple[list[Column], dict[tuple[str, tuple[int, ...]], list[Numbers]]]:
    """The columns of unstructured weights, numbered from `width`, and for each weight the gates along its dimensions:
    at its inputs, or where it writes what a norm looks at.
    """
    columns: list[Column] = []
    acting: dict[tuple[str, tuple[int, ...]], list[Numbers]] = defaultdict(list)
    starts = accumulate((prod(p.shape) for p in placements), initial=0)
    for placement, start in zip(placements, starts, strict=False):
        for site in placement.multiplies if placement.block is None else ():
            shape, dims = graph.shapes[site.tensor], graph.reading.get(site.tensor)
            places = graph.closing.get(site.tensor, {})
            if dims == site.dims or site.dims in places or (site.tensor, site.dims) in graph.written:
                acting[site.tensor, site.dims].append(np.where(site.units < 0, -1, site.units + start))
            elif len(site.dims) != len(shape):
                raise ValueError(
                    f"`where` lets gates `{placement.name}` multiply dimensions {site.dims} of `{site.tensor}`, "
                    "which do not contract"
                )
            elif dims is not None and len(dims) == 1:
                columns.append(Column(start, shape, dims[0]))
                acting[site.tensor, dims].append(np.arange(width, width + shape[dims[0]]))
                width += shape[dims[0]]
    return columns, acting


def _decided(
    readers: Mapping[int, set[frozenset[int]]], count: int
) -> tuple[list[frozenset[int]], dict[int, list[frozenset[int]]]]:
    """For each unit the gates that all its readers share; and where readers differ beyond them, the further gates."""
    shared: list[frozenset[int]] = [frozenset()] * count
    several: dict[int, list[frozenset[int]]] = {}
    for unit, sets in readers.items():
        common = frozenset.intersection(*sets)
        shared[unit] = common
        if len(sets) > 1 and all(further := [s - common for s in sets]):
            if sum(map(len, further)) > len(frozenset.union(*further)):
                raise ValueError(
                    "`where` lets one gate decide about some of the entries that read a unit, beside other gates"
                )
            several[unit] = further
    return shared, several


def _lines(sets: Sequence[frozenset[int]], one: int) -> Numbers:
    """Sets of gates as an array (unit, gate): missing gates are certain."""
    width = max(map(len, sets), default=1) or 1
    if width == 1:  # nearly always
        return np.fromiter((next(iter(s), one) for s in sets), np.int64, len(sets))[:, None]
    return _padded([[s] for s in sets], one, one)[:, 0]


def _padded(sets: Sequence[Sequence[frozenset[int]]], one: int, zero: int) -> Numbers:
    """Sets of gates as an array (unit, entry, gate): missing gates are certain, missing entries impossible."""
    entries = max((len(s) for s in sets), default=1)
    gates = max((len(g) for s in sets for g in s), default=1) or 1
    out = np.full((len(sets), entries, gates), one)
    for k, unit in enumerate(sets):
        if len(unit) < entries:
            out[k, len(unit) :] = zero
        for line, members in enumerate(unit):
            if members:
                out[k, line, : len(members)] = sorted(members)
    return out
