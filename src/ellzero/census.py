"""How many entries are left: parameters and MACs of the network that removal would give, as functions of which units are alive.

The entries of a weight are counted by a product of two sums, one over each of its labelled dimensions: Σ_o a_o · Σ_i a_i. In expectation over independent
units that is E[n_out]·E[n_in], and Σ_o Σ_i a_o a_i + Σ_u c_u c'_u (a_u − a_u²) where units lie on both dimensions (residual streams: a unit is
not independent of itself). The *population* is every unit that a gate can close, and every input of a weight that gets a `Select`.
This file counts; it does not know gates, only whether (or how probably) something is alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ellzero.axes import Graph, Labels
from ellzero.liveness import Liveness
from ellzero.removal import Plan

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Census:
    """Σ_t scale_t · X[left_t] · X[right_t] over terms t, with X = constant + matrix · S and S the population summed by segment.

    A segment is a set of members of the population that count alike everywhere.

    Args:
        names: the module that each term belongs to.
        scale: what one entry costs in each term (0 dimensions left out).
        left: row of X for the first dimension.
        right: row of X for the second one (row 0 is the constant 1).
        constant: what always stays, by row.
        matrix: how often a member of each segment counts in each row.
        twice: by term and segment, scale · c · c' of units that lie on both dimensions.
        segment: the segment of each member of the population.
        units: unit number of the members that are units; the inputs of `inputs` follow.
        inputs: the weights whose inputs are members: name, reading dimension, number.
    """

    names: tuple[str, ...]
    scale: Vector
    left: Labels
    right: Labels
    constant: Vector
    matrix: Vector
    twice: Vector
    segment: Labels
    units: Labels
    inputs: tuple[tuple[str, int, int], ...]

    def kept(self, plan: Plan) -> Vector:
        """What each term costs in the network that `plan` leaves: exact."""
        members = [plan.units[self.units]]
        for tensor, dim, size in self.inputs:
            stays = np.ones(size, dtype=bool)
            if dim in plan.rows.get(tensor, {}):
                stays[:] = False
                stays[plan.rows[tensor][dim]] = True
            members.append(stays)
        alive = np.concatenate(members).astype(np.float64)
        sums = np.bincount(self.segment, alive, self.matrix.shape[1])
        x = self.constant + self.matrix @ sums
        return self.scale * x[self.left] * x[self.right]

    def tables(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arrays as tensors, for `expected`."""
        arrays = {k: getattr(self, k) for k in ("scale", "left", "right", "constant", "matrix", "twice", "segment", "units")}
        return {k: torch.as_tensor(a, device=device, dtype=dtype if a.dtype == np.float64 else None) for k, a in arrays.items()}

    def expected(self, units: Tensor, inputs: list[Tensor], tables: dict[str, Tensor]) -> Tensor:
        """What each term costs in expectation.

        Args:
            units: P(alive) of every unit of the graph.
            inputs: P(open) of the inputs of each weight in `inputs`.
            tables: from `tables()`.
        """
        alive = torch.cat([units[tables["units"]], *inputs]) if inputs else units[tables["units"]]
        zero = alive.new_zeros(self.matrix.shape[1])
        sums = zero.index_add(0, tables["segment"], alive)
        x = torch.addmv(tables["constant"], tables["matrix"], sums)
        terms = tables["scale"] * x[tables["left"]] * x[tables["right"]]
        if self.twice.any():
            terms = terms + tables["twice"] @ zero.index_add(0, tables["segment"], alive - alive.square())
        return terms


class _Builder:
    def __init__(self, graph: Graph, live: Liveness) -> None:
        self.graph = graph
        gated = (live.common < live.one).any(1)
        gated[live.several] = True
        self.units = np.flatnonzero(gated)
        self.member = np.full(graph.offsets[-1] + 1, -1)  # the last entry: unit -1
        self.member[self.units] = np.arange(len(self.units))
        self.inputs: dict[str, int] = {}
        self.size = len(self.units)
        for tensor, gates in live.entries.items():
            self.inputs[tensor] = self.size
            self.size += len(gates)
        self.rows: dict[bytes, int] = {}
        self.vectors: list[Labels] = []
        self.row(np.zeros(0, dtype=np.int64), 1)
        self.terms: list[tuple[str, float, int, int]] = []

    def row(self, members: Labels, constant: int) -> int:
        """The number of the row that counts these members of the population (-1: always there), and `constant` more."""
        vector = np.bincount(members[members >= 0], minlength=self.size + 1).astype(np.int32)
        vector[self.size] = constant + (members < 0).sum()
        if vector.tobytes() not in self.rows:
            self.rows[vector.tobytes()] = len(self.rows)
            self.vectors.append(vector)
        return self.rows[vector.tobytes()]

    def tensor(self, tensor: str, name: str, factor: float) -> None:
        """The terms that count the entries of one parameter, each entry costing `factor`."""
        shape, sites = self.graph.shapes[tensor], self.graph.labels.get(tensor, {})
        joint = next((dims for dims in sites if len(dims) > 1), None)
        if joint is not None:
            table, lines = sites[joint], sites.get((0,), np.full(shape[0], -1))
            rest = prod(shape[2:])
            groups, which = np.unique(table, axis=0, return_inverse=True)
            for k, inside in enumerate(groups):
                here = np.flatnonzero(which.reshape(-1) == k)
                self.terms.append((name, factor * rest, self.row(self.member[lines[here]], 0), self.row(self.member[inside], 0)))
            return
        dims = [(d, units) for (d,), units in sites.items()]
        rows = []
        for d, units in dims:
            members = self.member[units]
            if tensor in self.inputs and (d,) == self.graph.reading[tensor]:
                members = self.inputs[tensor] + np.arange(len(units))
            if (members >= 0).any():
                rows.append(self.row(members, 0))
            else:
                factor *= len(units)
        factor *= prod(size for d, size in enumerate(shape) if d not in dict(dims))
        assert len(rows) <= 2, f"`{tensor}` has more than two dimensions that shrink"
        self.terms.append((name, factor, *([*rows, 0, 0][:2])))  # type: ignore[arg-type]

    def product(self, name: str, factor: float, left: Labels | None, right: Labels | None) -> None:
        rows = [self.row(self.member[a], 0) if a is not None else 0 for a in (left, right)]
        self.terms.append((name, factor, rows[0], rows[1]))

    def build(self) -> Census:
        matrix = np.stack(self.vectors)
        columns, segment = np.unique(matrix[:, : self.size], axis=1, return_inverse=True)
        names, scale, left, right = ([t[k] for t in self.terms] for k in range(4))
        scales = np.array(scale, dtype=np.float64)
        counts = columns.astype(np.float64)
        twice = scales[:, None] * counts[left] * counts[right]
        return Census(
            tuple(names),
            scales,
            np.array(left, dtype=np.int64),
            np.array(right, dtype=np.int64),
            matrix[:, self.size].astype(np.float64),
            counts,
            twice,
            segment.reshape(-1),
            self.units,
            tuple((t, self.graph.reading[t][0], self.graph.shapes[t][self.graph.reading[t][0]]) for t in self.inputs),
        )


def count_params(graph: Graph, live: Liveness) -> Census:
    """One term per parameter: its entries."""
    builder = _Builder(graph, live)
    for tensor in graph.parameters:
        builder.tensor(tensor, tensor.rpartition(".")[0] or tensor, 1.0)
    return builder.build()


def count_units(graph: Graph, live: Liveness) -> Census:
    """One term per axis and per weight with a `Select`: the units and inputs that gates decide about."""
    builder = _Builder(graph, live)
    for axis, start in zip(graph.axes, graph.offsets, strict=False):
        members = builder.member[start : start + axis.size]
        if (members >= 0).any():
            builder.terms.append((axis.name, 1.0, builder.row(members, 0), 0))
    for tensor, start in builder.inputs.items():
        size = graph.shapes[tensor][graph.reading[tensor][0]]
        builder.terms.append((tensor.rpartition(".")[0] or tensor, 1.0, builder.row(start + np.arange(size), 0), 0))
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
            builder.product(p.name, p.factor, p.left, p.right)
    return builder.build()
