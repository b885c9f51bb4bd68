"""How many entries are left: parameters and MACs of the network that removal would give, by which units are alive.

A weight counts Σ_o a_o · Σ_i a_i, a product of widths: one for each dimension that carries units, and in MACs one for
each set of units that it is applied along. Different units are independent, so E[n_out]·E[n_in] is expected. Where the
same units lie on several dimensions (residual streams), products of joint cumulants are added, one for each way to part
the widths: E[XYZ] = E[X] E[Y] E[Z] + E[X] κ(Y, Z) + … + κ(X, Y, Z). An open input u means that its unit m is, so κ
of n widths is Σ_(m,u) a_u κ_n(a_m) / a_m, with u = m for the unit itself, and κ_n the cumulant of a thing that is there
or not: of two widths Σ a_u (1 − a_m). The *population* is every unit that a gate can close, and every input of a weight
that gets a `Select`. What lies in a block counts if the block is open: the whole term is multiplied by that. This file
does not know gates, only whether (or how probably) something is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from ellzero.gated.alive import Liveness, product
from ellzero.graph.axes import Graph, Numbers
from ellzero.graph.plan import Plan

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Census:
    """Σ_t scale_t · Π_k Y[rows_kt] over terms t, where Y is X = constant + matrix · S and behind it the cumulants.

    S is the population summed by segment; a segment is a set of members of the population that count alike everywhere.

    Args:
        names: the module that each term belongs to.
        scale: what one entry costs in each term (0 dimensions left out).
        rows: by factor and term, rows of Y (row 0 is the constant 1).
        constant: what always stays, by row of X.
        matrix: how often a member of each segment counts in each row of X.
        segment: the segment of each member of the population.
        whole, part: the pairs (m, u) that meet in a term, u alive only if m is; once for each order of cumulants.
        bends: κ_n(p) / p for each pair, as the coefficients of a polynomial, the constants first.
        sort: the sort of each pair.
        joint: by cumulant and sort of pair, how often such a pair meets in it.
        units: unit number of the members that are units; the inputs of `inputs` follow.
        inputs: the weights whose inputs or outputs are members: name, dimension, number.
        sets: sets of blocks, one by row, filled up with the number of blocks; the first is empty.
        inside: for each term, in which set of blocks it lies.
    """

    names: tuple[str, ...]
    scale: Vector
    rows: Numbers
    constant: Vector
    matrix: Vector
    segment: Numbers
    whole: Numbers
    part: Numbers
    bends: Vector
    sort: Numbers
    joint: Vector
    units: Numbers
    inputs: tuple[tuple[str, int, int], ...]
    sets: Numbers
    inside: Numbers

    def kept(self, plan: Plan) -> Vector:
        """What each term costs in the network that `plan` leaves: exact."""
        y = np.concatenate([self.kept_widths(plan), np.zeros(len(self.joint))])  # of what is known, cumulants are 0
        out: Vector = self.scale * y[self.rows].prod(0) * self.kept_blocks(plan)
        return out

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

    def expected(self, alive: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """What each term costs in expectation where all blocks are open, given P(alive) of every member of the
        population.
        """
        with unrounded(alive):
            return self._expected(alive, tables)

    def _expected(self, alive: Tensor, tables: dict[str, Tensor]) -> Tensor:
        y = self.expected_widths(alive, tables)
        if len(tables["part"]):
            *lower, bend = tables["bends"].unbind()
            for coefficients in reversed(lower):
                bend = torch.addcmul(coefficients, bend, alive[tables["whole"]])
            sums = bend.new_zeros(tables["joint"].shape[1]).index_add(0, tables["sort"], alive[tables["part"]] * bend)
            y = torch.cat([y, tables["joint"] @ sums])
        terms = tables["scale"]
        for factors in y[tables["rows"]].unbind():
            terms = terms * factors
        return terms

    def expected_blocks(self, blocks: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """For each term P(all blocks that it lies in are open)."""
        padded = torch.cat([blocks, blocks.new_ones(1)])
        return product(padded[tables["sets"]], 1)[tables["inside"]]

    def expected_widths(self, alive: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """E[X], given P(alive) of every member of the population."""
        sums = alive.new_zeros(tables["matrix"].shape[1]).index_add(0, tables["segment"], alive)
        return torch.addmv(tables["constant"], tables["matrix"], sums)


def unrounded(like: Tensor) -> AbstractContextManager[None]:
    """Keeps autocast away, which would round what products of matrices count to bfloat16."""
    kind = like.device.type
    rounds = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if rounds else nullcontext()


class _Term(NamedTuple):
    """A product of rows, and the number of the set of blocks that it lies in."""

    name: str
    scale: float
    rows: tuple[int, ...]
    inside: int


class _Joint:
    """The cumulants of widths that count the same units.

    Args:
        counts: how often a member of each segment counts in each row.
        segment: the segment of each member.
        pairs: members (m, u) such that u is alive only if m is.
    """

    def __init__(self, counts: Vector, segment: Numbers, pairs: Numbers) -> None:
        self.counts, self.segment, self.pairs = counts, segment, pairs
        width = counts.shape[1] or 1
        numbers, self.sort = np.unique(segment[pairs[0]] * width + segment[pairs[1]], return_inverse=True)
        self.m, self.u = np.divmod(numbers, width)
        self.touched = [frozenset(np.flatnonzero(row[self.m] + row[self.u]).tolist()) for row in counts]
        self.rows: dict[tuple[int, ...], int] = {}
        self.met: dict[tuple[int, ...], Vector] = {}

    def meets(self, rows: tuple[int, ...]) -> bool:
        """Whether something counts in all these rows; in a single one it does."""
        if len(rows) > 1 and not frozenset.intersection(*(self.touched[row] for row in rows)):
            return False
        if len(rows) > 1 and rows not in self.met:
            m, u = (np.stack([self.counts[row][of] for row in rows]) for of in (self.m, self.u))
            # One row counts u, all others m.
            others = [u[k] * np.delete(m, k, 0).prod(0) for k in range(len(rows))]
            self.met[rows] = np.where(self.m == self.u, m.prod(0), sum(others))
        return len(rows) == 1 or bool(self.met[rows].any())

    def row(self, rows: tuple[int, ...]) -> int:
        """The number of a single row, or of the cumulant of several: those come behind all rows."""
        return rows[0] if len(rows) == 1 else self.rows.setdefault(rows, len(self.counts) + len(self.rows))

    def tables(self) -> tuple[Numbers, Numbers, Vector, Numbers, Vector]:
        """`whole`, `part`, `bends`, `sort` and `joint` of a `Census`."""
        top, count = max([2, *map(len, self.rows)]), 0
        parts = []
        for order in range(2, top + 1):
            met = np.array([self.met[rows] * (len(rows) == order) for rows in self.rows]).reshape(
                len(self.rows), len(self.m)
            )
            meets = np.asarray(met.any(0))
            here = np.flatnonzero(meets[self.sort])
            bend = np.pad(_cumulant(order), (0, top - order))
            sort = count + (np.cumsum(meets) - 1)[self.sort[here]]
            parts.append((*self.pairs[:, here], np.tile(bend[:, None], len(here)), sort, met[:, meets]))
            count += int(meets.sum())
        whole, part, bends, sorts, joint = (np.concatenate(of, -1) for of in zip(*parts, strict=True))
        return whole, part, bends, sorts, joint


class _Builder:
    def __init__(self, graph: Graph, live: Liveness) -> None:
        self.graph = graph
        self.units = live.decided
        self.member = np.full(graph.offsets[-1] + 1, -1)  # the last entry: unit -1
        self.member[self.units] = np.arange(len(self.units))
        self.inputs: dict[tuple[str, int], int] = {}
        self.size = len(self.units)
        for place, gates in live.entries.items():
            self.inputs[place] = self.size
            self.size += len(gates)
        self.rows: dict[bytes, int] = {}
        self.vectors: list[tuple[Numbers, Numbers]] = []
        self.row(np.array([-1]))  # row 0, the constant 1
        self.terms: list[_Term] = []
        self.gated = [(b, graph.blocks[b]) for b in np.flatnonzero(live.blocks < live.size).tolist()]
        self.sets: dict[tuple[int, ...], int] = {(): 0}

    def term(self, name: str, scale: float, along: Iterable[Numbers], blocks: Iterable[int]) -> None:
        """Adds the term of a product of widths, each by the members of the population that it counts."""
        rows = []
        for members in along:
            if (members >= 0).any():
                rows.append(self.row(members))
            else:
                scale *= members.size
        self.terms.append(_Term(name, scale, tuple(rows), self.sets.setdefault(tuple(blocks), len(self.sets))))

    def row(self, members: Numbers) -> int:
        """The number of the row that counts these members of the population (-1: always there)."""
        there, times = np.unique(members, return_counts=True)
        key = there.tobytes() + times.tobytes()
        if key not in self.rows:
            self.rows[key] = len(self.rows)
            self.vectors.append((there, times))
        return self.rows[key]

    def tensor(self, tensor: str, name: str, factor: float, along: Sequence[Numbers] = ()) -> None:
        """The terms that count the entries of one parameter, each costing `factor` for every unit of all `along`."""
        shape, sites = self.graph.shapes[tensor], self.graph.units.get(tensor, {})
        blocks = [number for number, block in self.gated if tensor in block.tensors]
        beside = [self.member[units] for units in along]
        joint = next((dims for dims in sites if len(dims) > 1), None)
        if joint is not None:
            table, lines = sites[joint], sites.get((0,), np.full(shape[0], -1))
            groups, which = np.unique(table, axis=0, return_inverse=True)
            for k, inside in enumerate(groups):
                own = [self.member[units] for units in (lines[which.reshape(-1) == k], inside)]
                self.term(name, factor * prod(shape[2:]), [*own, *beside], blocks)
            return
        own = []
        for (d,), units in sites.items():
            start = self.inputs.get((tensor, d))
            own.append(self.member[units] if start is None else start + np.arange(len(units)))
        factor *= prod(size for d, size in enumerate(shape) if (d,) not in sites)
        self.term(name, factor, [*own, *beside], blocks)

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
        joint = _Joint(*_distinct(self.vectors, self.size), self.pairs())
        terms = [
            _Term(t.name, t.scale, tuple(map(joint.row, sets)), t.inside)
            for t in self.terms
            for sets in _partings(t.rows)
            if all(map(joint.meets, sets))
        ]
        rows = np.zeros((max([1, *(len(t.rows) for t in terms)]), len(terms)), dtype=np.int64)
        for k, t in enumerate(terms):
            rows[: len(t.rows), k] = t.rows
        return Census(
            tuple(t.name for t in terms),
            np.array([t.scale for t in terms], dtype=np.float64),
            rows,
            np.array([float(times[there < 0].sum()) for there, times in self.vectors]),
            joint.counts,
            joint.segment,
            *joint.tables(),
            self.units,
            tuple((t, d, self.graph.shapes[t][d]) for t, d in self.inputs),
            self._sets(),
            np.array([t.inside for t in terms], dtype=np.int64),
        )

    def _sets(self) -> Numbers:
        out = np.full((len(self.sets), max(1, *map(len, self.sets))), len(self.graph.blocks))
        for row, blocks in enumerate(self.sets):
            out[row, : len(blocks)] = blocks
        return out


def _partings(rows: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to part rows into sets; first each by itself."""
    if not rows:
        yield []
    for sets in _partings(rows[1:]) if rows else ():
        yield [rows[:1], *sets]
        for k, one in enumerate(sets):
            yield [*sets[:k], (*rows[:1], *one), *sets[k + 1 :]]


def _cumulant(order: int) -> Vector:
    """κ_n(p) / p of what is there with probability p, as coefficients of a polynomial: κ_(n+1) = p (1 − p) κ_n'."""
    out = Polynomial([0.0, 1.0])
    for _ in range(1, order):
        out = Polynomial([0.0, 1.0, -1.0]) * out.deriv()
    return np.asarray(out.coef[1:], dtype=np.float64)


def _distinct(rows: Sequence[tuple[Numbers, Numbers]], size: int) -> tuple[Vector, Numbers]:
    """How often a member of each segment counts in each row, and the segment of each member, in the order of columns.

    Rows are many where groups are, and count few members each: no matrix of all of both is made.
    """
    counted: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for row, (there, times) in enumerate(rows):
        for member, n in zip(there.tolist(), times.tolist(), strict=True):
            if member >= 0:
                counted[member].append((-row, n))  # the first row that differs is the one that counts
    columns = list(map(tuple, counted))
    distinct = {column: k for k, column in enumerate(sorted(set(columns)))}
    counts = np.zeros((len(rows), len(distinct)))
    for column, k in distinct.items():
        for row, n in column:
            counts[-row, k] = n
    return counts, np.array([distinct[column] for column in columns], dtype=np.int64)


def count_params(graph: Graph, live: Liveness) -> Census:
    """One term per parameter: its entries."""
    builder = _Builder(graph, live)
    for tensor in graph.parameters:
        builder.tensor(tensor, tensor.rpartition(".")[0] or tensor, 1.0)
    return builder.build()


def count_widths(graph: Graph, live: Liveness) -> Census:
    """The terms of parameters, and of what they are applied along: all widths that a layer's time depends on."""
    builder = _Builder(graph, live)
    for tensor in graph.parameters:
        builder.tensor(tensor, tensor.rpartition(".")[0] or tensor, 1.0)
    for p in graph.products or ():
        if p.tensor is not None and p.along:
            builder.tensor(p.tensor, p.name, p.factor, p.along)
    return builder.build()


def count_units(graph: Graph, live: Liveness) -> Census:
    """One term per axis and per weight with a `Select`: the units and inputs that gates decide about."""
    builder = _Builder(graph, live)
    for k, (axis, start) in enumerate(zip(graph.axes, graph.offsets, strict=False)):
        members = builder.member[start : start + axis.size]
        if (members >= 0).any():
            blocks = [number for number, block in builder.gated if k in block.axes]
            builder.term(axis.name, 1.0, [members], blocks)
    for (tensor, dim), start in builder.inputs.items():
        members = start + np.arange(graph.shapes[tensor][dim])
        blocks = [number for number, block in builder.gated if tensor in block.tensors]
        builder.term(tensor.rpartition(".")[0] or tensor, 1.0, [members], blocks)
    return builder.build()


def count_macs(graph: Graph, live: Liveness) -> Census | None:
    """One term per multiplication of the traced forward: its multiply-accumulates for one example."""
    if graph.products is None:
        return None
    builder = _Builder(graph, live)
    for p in graph.products:
        if p.tensor is not None:
            builder.tensor(p.tensor, p.name, p.factor, p.along)
        else:
            blocks = [number for number, block in builder.gated if block.holds(p.name)]
            builder.term(p.name, p.factor, [builder.member[units] for units in p.along], blocks)
    return builder.build()
