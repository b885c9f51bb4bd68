"""How many entries are left: parameters and MACs of the network that removal would give, by which units are alive.

A weight counts Σ_o a_o · Σ_i a_i over the two dimensions that carry units, E[n_out]·E[n_in] in expectation. Where the
same units lie on both (residual streams) an open input u means that its unit m is alive, so Σ_(m,u) (a_u − a_m a_u) is
added, with u = m for the unit itself. The *population* is every unit that a gate can close, and every input of a weight
that gets a `Select`. What lies in a block counts if the block is open: the whole term is multiplied by that. This file
does not know gates, only whether (or how probably) something is alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ellzero.gated.alive import Liveness, product
from ellzero.graph.axes import Graph, Numbers
from ellzero.graph.plan import Plan

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Census:
    """Σ_t scale_t · X[left_t] · X[right_t] over terms t, with X = constant + matrix · S.

    S is the population summed by segment; a segment is a set of members of the population that count alike everywhere.

    Args:
        names: the module that each term belongs to.
        scale: what one entry costs in each term (0 dimensions left out).
        left, right: rows of X for the two dimensions (row 0 is the constant 1).
        constant: what always stays, by row.
        matrix: how often a member of each segment counts in each row.
        segment: the segment of each member of the population.
        whole, part: the pairs (m, u) that meet in a term, u alive only if m is.
        twice: by term and sort of pair, how often such a pair meets in the term, times its scale.
        sort: the sort of each pair.
        units: unit number of the members that are units; the inputs of `inputs` follow.
        inputs: the weights whose inputs or outputs are members: name, dimension, number.
        sets: sets of blocks, one by row, filled up with the number of blocks; the first is empty.
        inside: for each term, in which set of blocks it lies.
    """

    names: tuple[str, ...]
    scale: Vector
    left: Numbers
    right: Numbers
    constant: Vector
    matrix: Vector
    segment: Numbers
    whole: Numbers
    part: Numbers
    twice: Vector
    sort: Numbers
    units: Numbers
    inputs: tuple[tuple[str, int, int], ...]
    sets: Numbers
    inside: Numbers

    def kept(self, plan: Plan) -> Vector:
        """What each term costs in the network that `plan` leaves: exact."""
        x = self.kept_widths(plan)
        return self.scale * x[self.left] * x[self.right] * self.kept_blocks(plan)

    def kept_blocks(self, plan: Plan) -> Vector:
        """For each term, whether all blocks that it lies in are left."""
        left: Numbers = np.where(np.isin(self.sets, list(plan.blocks)).any(1), 0, 1)
        return left[self.inside].astype(np.float64)

    def kept_widths(self, plan: Plan) -> Vector:
        """X in the network that `plan` leaves: how many members each row counts."""
        members = [plan.units[self.units]]
        for tensor, dim, size in self.inputs:
            stays = np.ones(size, dtype=bool)
            if dim in plan.rows.get(tensor, {}):
                stays[:] = False
                stays[plan.rows[tensor][dim]] = True
            members.append(stays)
        alive = np.concatenate(members).astype(np.float64)
        sums = np.bincount(self.segment, alive, self.matrix.shape[1])
        out: Vector = self.constant + self.matrix @ sums
        return out

    def tables(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arrays as tensors, for `expected`."""
        arrays = {k: a for k, a in vars(self).items() if isinstance(a, np.ndarray)}
        types = {k: dtype if a.dtype == np.float64 else None for k, a in arrays.items()}
        return {k: torch.as_tensor(a, device=device, dtype=types[k]) for k, a in arrays.items()}

    def expected(self, units: Tensor, inputs: list[Tensor], tables: dict[str, Tensor]) -> Tensor:
        """What each term costs in expectation where all blocks are open, given P(alive) of every unit and P(open) of
        the `inputs`.
        """
        alive = self.population(units, inputs, tables)
        x = self.expected_widths(alive, tables)
        terms = tables["scale"] * x[tables["left"]] * x[tables["right"]]
        if len(tables["part"]):
            more = alive[tables["part"]] * (1 - alive[tables["whole"]])
            sums = more.new_zeros(tables["twice"].shape[1]).index_add(0, tables["sort"], more)
            terms = terms + tables["twice"] @ sums
        return terms

    def expected_blocks(self, blocks: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """For each term P(all blocks that it lies in are open)."""
        padded = torch.cat([blocks, blocks.new_ones(1)])
        return product(padded[tables["sets"]], 1)[tables["inside"]]

    def population(self, units: Tensor, inputs: list[Tensor], tables: dict[str, Tensor]) -> Tensor:
        """P(alive) of every member: the units that a gate can close, then the `inputs`."""
        return torch.cat([units[tables["units"]], *inputs]) if inputs else units[tables["units"]]

    def expected_widths(self, alive: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """E[X], given P(alive) of every member of the population."""
        sums = alive.new_zeros(tables["matrix"].shape[1]).index_add(0, tables["segment"], alive)
        return torch.addmv(tables["constant"], tables["matrix"], sums)


class _Builder:
    def __init__(self, graph: Graph, live: Liveness) -> None:
        self.graph = graph
        gated = np.asarray((live.common < live.one).any(1))
        gated[live.several] = True
        self.units = np.flatnonzero(gated)
        self.member = np.full(graph.offsets[-1] + 1, -1)  # the last entry: unit -1
        self.member[self.units] = np.arange(len(self.units))
        self.inputs: dict[tuple[str, int], int] = {}
        self.size = len(self.units)
        for place, gates in live.entries.items():
            self.inputs[place] = self.size
            self.size += len(gates)
        self.rows: dict[bytes, int] = {}
        self.vectors: list[Numbers] = []
        self.row(np.array([-1]))  # row 0, the constant 1
        self.terms: list[tuple[str, float, int, int]] = []
        self.gated = [(b, graph.blocks[b]) for b in np.flatnonzero(live.blocks < live.size).tolist()]
        self.sets: dict[tuple[int, ...], int] = {(): 0}
        self.inside: list[int] = []  # of each term the number of the set of blocks that it lies in

    def term(self, name: str, scale: float, left: int, right: int, blocks: Iterable[int]) -> None:
        """Adds a term that lies in these blocks."""
        self.terms.append((name, scale, left, right))
        self.inside.append(self.sets.setdefault(tuple(blocks), len(self.sets)))

    def row(self, members: Numbers) -> int:
        """The number of the row that counts these members of the population (-1: always there)."""
        vector = np.bincount(members[members >= 0], minlength=self.size + 1)
        vector[self.size] = (members < 0).sum()
        if vector.tobytes() not in self.rows:
            self.rows[vector.tobytes()] = len(self.rows)
            self.vectors.append(vector)
        return self.rows[vector.tobytes()]

    def tensor(self, tensor: str, name: str, factor: float) -> None:
        """The terms that count the entries of one parameter, each entry costing `factor`."""
        shape, sites = self.graph.shapes[tensor], self.graph.units.get(tensor, {})
        blocks = [number for number, block in self.gated if tensor in block.tensors]
        joint = next((dims for dims in sites if len(dims) > 1), None)
        if joint is not None:
            table, lines = sites[joint], sites.get((0,), np.full(shape[0], -1))
            groups, which = np.unique(table, axis=0, return_inverse=True)
            for k, inside in enumerate(groups):
                rows = [self.row(self.member[units]) for units in (lines[which.reshape(-1) == k], inside)]
                self.term(name, factor * prod(shape[2:]), rows[0], rows[1], blocks)
            return
        dims = [(d, units) for (d,), units in sites.items()]
        rows = []
        for d, units in dims:
            members = self.member[units]
            if (tensor, d) in self.inputs:
                members = self.inputs[tensor, d] + np.arange(len(units))
            if (members >= 0).any():
                rows.append(self.row(members))
            else:
                factor *= len(units)
        factor *= prod(size for d, size in enumerate(shape) if d not in dict(dims))
        assert len(rows) <= 2, f"`{tensor}` has more than two dimensions that shrink"
        left, right = [*rows, 0, 0][:2]
        self.term(name, factor, left, right, blocks)

    def pairs(self) -> Numbers:
        """Members (m, u) such that u is alive only if m is: a unit and itself, a unit and an input that reads it."""
        own = np.arange(len(self.units))
        whole, part = [own], [own]
        for (tensor, dim), start in self.inputs.items():
            read = self.member[self.graph.units[tensor][(dim,)]]
            whole.append(read[read >= 0])
            part.append(start + np.flatnonzero(read >= 0))
        return np.stack([np.concatenate(whole), np.concatenate(part)])

    def build(self) -> Census:
        matrix = np.stack(self.vectors)
        columns, segment = _distinct(matrix[:, : self.size])
        counts = columns.astype(np.float64)
        scale = np.array([t[1] for t in self.terms], dtype=np.float64)
        left, right = (np.array([t[k] for t in self.terms], dtype=np.int64) for k in (2, 3))
        pairs = self.pairs()
        m, u = segment[pairs]
        met_by, sort = np.unique(m * (columns.shape[1] or 1) + u, return_inverse=True)
        m, u = np.divmod(met_by, columns.shape[1] or 1)
        met = counts[left][:, m] * counts[right][:, u]
        met = met + np.where(m == u, 0, counts[left][:, u] * counts[right][:, m])
        meets, sort = np.asarray(met.any(0)), sort.reshape(-1)
        here = meets[sort]
        return Census(
            tuple(t[0] for t in self.terms),
            scale,
            left,
            right,
            matrix[:, self.size].astype(np.float64),
            counts,
            segment,
            pairs[0, here],
            pairs[1, here],
            scale[:, None] * met[:, meets],
            (np.cumsum(meets) - 1)[sort[here]],
            self.units,
            tuple((t, d, self.graph.shapes[t][d]) for t, d in self.inputs),
            self._sets(),
            np.array(self.inside, dtype=np.int64),
        )

    def _sets(self) -> Numbers:
        out = np.full((len(self.sets), max(1, *map(len, self.sets))), len(self.graph.blocks))
        for row, blocks in enumerate(self.sets):
            out[row, : len(blocks)] = blocks
        return out


def _distinct(matrix: Numbers) -> tuple[Numbers, Numbers]:
    """The columns that differ, in order, and which of them each column is. Most are alike: a sort of few is quick."""
    first: dict[bytes, int] = {}
    of = [first.setdefault(column.tobytes(), len(first)) for column in np.ascontiguousarray(matrix.T)]
    places = np.unique(np.array(of, dtype=np.int64), return_index=True)[1]
    columns, segment = np.unique(matrix[:, places], axis=1, return_inverse=True)
    return columns, segment.reshape(-1)[np.array(of, dtype=np.int64)]


def count_params(graph: Graph, live: Liveness) -> Census:
    """One term per parameter: its entries."""
    builder = _Builder(graph, live)
    for tensor in graph.parameters:
        builder.tensor(tensor, tensor.rpartition(".")[0] or tensor, 1.0)
    return builder.build()


def count_units(graph: Graph, live: Liveness) -> Census:
    """One term per axis and per weight with a `Select`: the units and inputs that gates decide about."""
    builder = _Builder(graph, live)
    for k, (axis, start) in enumerate(zip(graph.axes, graph.offsets, strict=False)):
        members = builder.member[start : start + axis.size]
        if (members >= 0).any():
            blocks = [number for number, block in builder.gated if k in block.axes]
            builder.term(axis.name, 1.0, builder.row(members), 0, blocks)
    for (tensor, dim), start in builder.inputs.items():
        rows = builder.row(start + np.arange(graph.shapes[tensor][dim]))
        blocks = [number for number, block in builder.gated if tensor in block.tensors]
        builder.term(tensor.rpartition(".")[0] or tensor, 1.0, rows, 0, blocks)
    return builder.build()


def count_macs(graph: Graph, live: Liveness) -> Census | None:
    """One term per multiplication of the traced forward: its multiply-accumulates for one example."""
    if graph.products is None:
        return None
    builder = _Builder(graph, live)
    for p in graph.products:
        if p.tensor is not None:
            builder.tensor(p.tensor, p.name, p.factor)
        else:
            rows = [builder.row(builder.member[a]) if a is not None else 0 for a in (p.left, p.right)]
            blocks = [number for number, block in builder.gated if block.holds(p.name)]
            builder.term(p.name, p.factor, rows[0], rows[1], blocks)
    return builder.build()
