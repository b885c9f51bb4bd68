"""Rules for products with a weight: linear layers, matrix products, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from string import ascii_letters
from typing import Any

import numpy as np

from ellzero.graph import values
from ellzero.graph.axes import Numbers, Served
from ellzero.graph.rules.call import Call, couples, tensors, unknown
from ellzero.graph.values import Value


@couples("linear")
def linear(call: Call, x: Value, weight: Value, bias: Value | None = None, *_: Any) -> Value:
    return _matrix_product(call, x, weight, 1, 0, bias)


def _matrix_product(call: Call, x: Value, weight: Value, into: int, out: int, bias: Value | None = None) -> Value:
    """`x` times a two-dimensional weight that contracts its dimension `into` and writes `out`."""
    ties = call.ties
    reading = values.solid(ties, weight, into)
    call.reader(weight, reading, values.single(ties, x, x.ndim - 1), x)
    carried = {g: a for g, a in x.carried.items() if x.ndim - 1 not in g}
    positions, along = values.extent(x, range(x.ndim - 1))
    carried[(x.ndim - 1,)] = values.solid(ties, weight, out)
    call.writer(weight, carried[(x.ndim - 1,)])
    call.multiplies(positions, weight, along)
    result = Value(call.shape, carried, x.why)
    return result if bias is None else values.elementwise(ties, [result, bias], call.shape)


@couples("matmul", "mm", "bmm")
def matmul(call: Call, a: Value, b: Value, *_: Any) -> Value | list[Value]:
    if min(a.ndim, b.ndim) < 2:
        return not_followed(call, a, b, reason=f"{call.where} multiplies it with a vector")
    if b.ndim == 2 and b.source is not None:
        return _matrix_product(call, a, b, 0, 1)
    summed = [v.group(v.ndim + d) for v, d in ((a, -1), (b, -2)) if v.source is None]
    if len(summed) == 1 and len(summed[0] or ()) < 2:  # units that lie on heads too stay whole
        return _several_matrices(call, a, b)
    ties = call.ties
    reason = f"{call.where} contracts it with something that is not a parameter"
    # Rows come from the left operand, columns from the right one; the batch dimensions are element-wise. (No dimension
    # of the output is as large as 0: there an operand meets nothing.)
    rows = Value((*a.shape[:-1], 0), values.without(ties, a, [a.ndim - 1], reason), a.why)
    columns = Value((*b.shape[:-2], 0, b.shape[-1]), values.without(ties, b, [b.ndim - 2], reason), b.why)
    if a.source is b.source is None and rows.ndim == columns.ndim:
        _serve(call, rows, columns)
    for v in (a, b):
        if v.source is not None:  # a weight on the left, or one of three dimensions: sliced with the axis, never gated
            for atoms in v.carried.values():
                ties.use(atoms, "rides")
    out = replace(values.elementwise(ties, [rows, columns], call.shape), why=Value.why)
    alone = [atoms for dims, atoms in out.carried.items() if dims[0] < len(call.shape) - 2]
    ties.heads.extend(alone)
    ties.attending.extend(alone if a.source is b.source is None else [])
    entries, along = values.extent(out, range(out.ndim))
    call.multiplies(entries * a.shape[-1], None, along)
    return out


@couples("tensordot", "inner", "dot", "mv")
def not_followed(call: Call, a: Value, b: Value, *_: Any, reason: str | None = None) -> list[Value]:
    """A product whose MACs count, and nothing more: of M·K and K·N numbers come M·N, by M·K·N of them."""
    call.multiplies(round(sqrt(prod(a.shape) * prod(b.shape) * prod(call.shape))), None)
    return unknown(call, [a, b], reason)


@couples("bilinear")
def bilinear(call: Call, a: Value, b: Value, weight: Value, *rest: Any) -> list[Value]:
    call.multiplies(prod(a.shape[:-1]), weight)
    return unknown(call, [a, b, weight, *tensors(rest)])


def _serve(call: Call, rows: Value, columns: Value) -> None:
    """Where heads of keys or values are repeated, one for each of several queries: these may go one by one."""
    for d in range(rows.ndim - 2):
        queries, group = rows.carried.get((d,)), columns.group(d)
        if queries is None or group is None or columns.shape[d] != rows.shape[d]:
            continue
        lines = np.moveaxis(columns.carried[group], group.index(d), 0).reshape(len(queries), -1)
        times = len(lines) // len(np.unique(lines[:, 0]))
        if (
            (times == 1 and not call.ties.serves_one)
            or len(np.unique(queries)) < len(queries)
            or not np.array_equal(lines, np.repeat(lines[::times], times, 0))
        ):
            continue
        values.narrow(call.ties, columns, [other for other in group if other != d])
        heads = columns.carried.pop((d,))[::times]
        columns.shape = (*columns.shape[:d], 0, *columns.shape[d + 1 :])  # there it meets nothing
        call.ties.served.append(Served(call.module, heads, queries.reshape(-1, times)))


def _several_matrices(call: Call, a: Value, b: Value) -> Value:
    """A parameter on the left, or with a matrix for each entry of a batch, as for each of several experts: it reads
    along what is summed over, and writes along its other dimension.
    """
    ties, left = call.ties, a.source is not None
    x, weight = (b, a) if left else (a, b)
    into, out, summed = (-1, -2, -2) if left else (-2, -1, -1)
    reading, writing = (values.solid(ties, weight, weight.ndim + d) for d in (into, out))
    what = values.single(ties, x, x.ndim + summed)
    call.reader(weight, reading, what, x)
    call.writer(weight, writing)
    other = -1 if left else -2
    values.narrow(ties, x, [x.ndim + other])
    ones = (Value((*v.shape[:-2], 0, 0), v.carried, v.why, v.source) for v in (x, weight))
    batches = [replace(v, carried={g: t for g, t in v.carried.items() if max(g) < v.ndim - 2}) for v in ones]
    made = values.elementwise(ties, batches, call.shape)
    ties.heads.extend(made.carried.values())
    rest: dict[values.Dims, Numbers] = {
        (len(call.shape) + other,): x.carried[g] for g in x.carried if g == (x.ndim + other,)
    }
    beside = {g: t for g, t in made.carried.items() if not values.carries(batches[1], g, made)} | rest
    entries, along = values.extent(replace(made, carried=beside), range(made.ndim))
    whole = Value(ties.shapes[weight.source or ""], weight.carried, source=weight.source)
    if weight.group(0) is None:  # experts that were picked: how many there are to pick from costs nothing
        whole = Value((len(writing), len(reading)), {(0,): writing, (1,): reading}, source=weight.source)
    call.multiplies(entries * x.shape[summed] / prod(whole.shape), whole, along)
    return replace(made, carried={**made.carried, **rest, (len(call.shape) + out,): writing}, why=x.why)


@couples("addmm", "baddbmm")
def addmm(call: Call, bias: Value, a: Value, b: Value, *_: Any) -> Value | list[Value]:
    out = matmul(call, a, b)
    return values.elementwise(call.ties, [out, bias], call.shape) if isinstance(out, Value) else out


@couples("_grouped_mm")
def grouped(call: Call, x: Value, weight: Value, *rest: Any) -> list[Value]:
    call.multiplies(x.shape[0] / (weight.shape[0] if weight.ndim > 2 else 1), weight)
    why = f'{call.where} takes widths in steps of 16 bytes alone: set `experts_implementation="batched_mm"`'
    return unknown(call, [x, weight, *tensors(rest)], why)


@couples("embedding")
def embedding(call: Call, weight: Value, index: Value, *_: Any) -> Value:
    values.freeze(call.ties, weight, "the input picks single entries of it", [0])
    atoms = values.solid(call.ties, weight, 1)
    call.writer(weight, atoms)
    values.freeze(call.ties, index, f"{call.where} uses it as an index")
    return Value(call.shape, {(len(call.shape) - 1,): atoms})


@couples("einsum")
def einsum(call: Call, equation: str, operands: list[Value], *_: Any) -> Value | list[Value]:
    """A product of two: with a parameter, one letter of which reads and others may be written; else as of matrices."""
    names, out = _spelt_out(equation.replace(" ", ""), operands)
    lengths = [(c, n) for name, v in zip(names, operands, strict=True) for c, n in zip(name, v.shape, strict=True)]
    sizes = {c: max(n for other, n in lengths if other == c) for c, _ in lengths}
    same = all(sizes[c] == n for c, n in lengths)
    if not same or len(operands) != 2 or any(len(set(name)) < len(name) for name in names):
        _count(call, names, out, sizes)
        return unknown(call, operands, f"{call.where} writes its product in a way that is not followed")
    (x, weight), (at, of) = operands, names
    if weight.source is None:
        (weight, x), (of, at) = operands, names
    if weight.source is not None and x.source is None and not {*at} & {*of} & {*out} and {*at} & {*of}:
        return _read_by_letters(call, x, weight, at, of, out)
    for v in operands:
        for atoms in v.carried.values() if v.source is not None else ():
            call.ties.use(atoms, "rides")
    reason = f"{call.where} contracts it with something that is not a parameter"
    placed = [_by_letters(call, v, name, out, reason) for v, name in zip(operands, names, strict=True)]
    made = replace(values.elementwise(call.ties, placed, call.shape), why=Value.why)
    both = {d for d, c in enumerate(out) if all(c in name for name in names)}
    alone = [atoms for dims, atoms in made.carried.items() if both.intersection(dims)]
    call.ties.heads.extend(alone)
    call.ties.attending.extend(alone if not any(v.source for v in operands) else [])
    entries, along = values.extent(made, range(made.ndim))
    call.multiplies(
        entries * prod(n for c, n in sizes.items() if c not in out and all(c in n for n in names)), None, along
    )
    return made


def _spelt_out(equation: str, operands: list[Value]) -> tuple[list[str], str]:
    """The letters of each operand and of what comes out, where dots stand for some, or what comes out is left open."""
    parts, arrow, out = equation.partition("->")
    names = parts.split(",")
    spare = [c for c in ascii_letters if c not in equation]
    dots = [v.ndim - len(name) + 3 if "..." in name else 0 for name, v in zip(names, operands, strict=True)]
    meant = "".join(spare[: max(dots)])
    names = [name.replace("...", meant[len(meant) - n :]) for name, n in zip(names, dots, strict=True)]
    letters = "".join(names)
    alone = "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c not in meant))
    return names, out.replace("...", meant) if arrow else meant + alone


def _count(call: Call, names: Sequence[str], out: str, sizes: Mapping[str, int]) -> None:
    """The MACs of a product that is not followed, from left to right. What one alone has is summed before."""
    done = names[0]
    for k, name in enumerate(names[1:], 2):
        later = out + "".join(names[k:])
        call.multiplies(prod(sizes[c] for c in {*done, *name} if c in later or (c in done and c in name)), None)
        done = "".join(c for c in dict.fromkeys(done + name) if c in later)


def _by_letters(call: Call, v: Value, name: str, out: str, reason: str) -> Value:
    """An operand as it lies along the output's letters; where it has none of them it meets nothing (a size of 0)."""
    carried = values.without(call.ties, v, [d for d, c in enumerate(name) if c not in out], reason)
    placed: dict[values.Dims, Numbers] = {}
    for dims, atoms in carried.items():
        order = sorted(dims, key=lambda d: out.index(name[d]))
        placed[tuple(out.index(name[d]) for d in order)] = atoms.transpose([dims.index(d) for d in order])
    return Value(tuple(v.shape[name.index(c)] if c in name else 0 for c in out), placed, v.why)


def _read_by_letters(call: Call, x: Value, weight: Value, at: str, of: str, out: str) -> Value:
    """A parameter reads along the first letter that both have and that carries units; the other sums are frozen."""
    ties, shared = call.ties, [c for c in of if c in at]
    letter = next((c for c in shared if x.group(at.index(c)) is not None), shared[0])
    reading, what = values.solid(ties, weight, of.index(letter)), values.single(ties, x, at.index(letter))
    call.reader(weight, reading, what, x)
    reason = f"{call.where} sums over it and over another axis"
    kept = _by_letters(call, replace(x, carried={g: a for g, a in x.carried.items() if at.index(letter) not in g}),
                       at, out, reason)  # fmt: skip
    values.freeze(ties, weight, reason, [d for d, c in enumerate(of) if c not in out and c != letter])
    carried = dict(kept.carried)
    for d, c in enumerate(out):
        if c in of:
            carried[(d,)] = values.solid(ties, weight, of.index(c))
            call.writer(weight, carried[(d,)])
    positions, along = values.extent(kept, [d for d, c in enumerate(out) if c not in of])
    call.multiplies(positions, weight, along)
    return Value(call.shape, carried, x.why)
