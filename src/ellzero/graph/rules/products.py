"""Rules for products with a weight: linear layers, matrix products, embeddings."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from operator import itemgetter
from typing import Any

from ellzero.graph import values
from ellzero.graph.axes import Numbers
from ellzero.graph.rules.call import Call, couples, unknown
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
    carried[(x.ndim - 1,)] = values.solid(ties, weight, out)
    call.writer(weight, carried[(x.ndim - 1,)])
    call.multiplies(prod(x.shape[:-1]), weight, reading, carried[(x.ndim - 1,)])
    result = Value(call.shape, carried, x.why)
    return result if bias is None else values.elementwise(ties, [result, bias], call.shape)


@couples("matmul", "mm", "bmm")
def matmul(call: Call, a: Value, b: Value, *_: Any) -> Value | list[Value]:
    if min(a.ndim, b.ndim) < 2:
        return unknown(call, [a, b], f"{call.where} multiplies it with a vector")
    if b.ndim == 2 and b.source is not None:
        return _matrix_product(call, a, b, 0, 1)
    ties = call.ties
    reason = f"{call.where} contracts it with something that is not a parameter"
    # Rows come from the left operand, columns from the right one; the batch dimensions are element-wise. (No dimension
    # of the output is as large as 0: there an operand meets nothing.)
    rows = Value((*a.shape[:-1], 0), values.without(ties, a, [a.ndim - 1], reason), a.why)
    columns = Value((*b.shape[:-2], 0, b.shape[-1]), values.without(ties, b, [b.ndim - 2], reason), b.why)
    for v in (a, b):
        if v.source is not None:  # a weight on the left, or one of three dimensions: sliced with the axis, never gated
            for atoms in v.carried.values():
                ties.use(atoms, "rides")
    out = replace(values.elementwise(ties, [rows, columns], call.shape), why=Value.why)
    alone = [atoms for dims, atoms in out.carried.items() if dims[0] < len(call.shape) - 2]
    ties.heads.extend(alone)
    ties.attending.extend(alone if a.source is b.source is None else [])
    # Heads before places: MACs are counted along two axes.
    along = sorted(out.carried.items(), key=itemgetter(0))
    for _, atoms in along[2:]:
        ties.freeze(atoms, f"{call.where} multiplies along two other axes")
    sizes = [atoms for _, atoms in along[:2]]
    counted = {d for dims, _ in along[:2] for d in dims}
    plain = [size for d, size in enumerate(call.shape) if d not in counted]
    call.multiplies(prod(plain) * a.shape[-1], None, *sizes)
    return out


@couples("addmm", "baddbmm")
def addmm(call: Call, bias: Value, a: Value, b: Value, *_: Any) -> Value | list[Value]:
    out = matmul(call, a, b)
    return values.elementwise(call.ties, [out, bias], call.shape) if isinstance(out, Value) else out


@couples("embedding")
def embedding(call: Call, weight: Value, index: Value, *_: Any) -> Value:
    values.freeze(call.ties, weight, "the input picks single entries of it", [0])
    atoms = values.solid(call.ties, weight, 1)
    call.writer(weight, atoms)
    values.freeze(call.ties, index, f"{call.where} uses it as an index")
    return Value(call.shape, {(len(call.shape) - 1,): atoms})


@couples("einsum")
def einsum(call: Call, equation: str, operands: list[Value], *_: Any) -> Value | list[Value]:
    """A product of an activation and a parameter that sums over one letter; all else of it is frozen."""
    spelt = equation.replace(" ", "")
    parts, _arrow, out = spelt.partition("->")
    names = parts.split(",")
    sizes = {c: n for name, v in zip(names, operands, strict=True) for c, n in zip(name, v.shape, strict=False)}
    known = "->" in spelt and "." not in spelt and all(len(set(name)) == len(name) for name in names)
    if not known or len(operands) != 2:
        return unknown(call, operands, f"{call.where} writes its product in a way that is not followed")
    (x, weight), (at, of) = operands, names
    if weight.source is None:
        (weight, x), (of, at) = operands, names
    summed = [c for c in sizes if c not in out]
    matrix = weight.source is not None and x.source is None and weight.ndim == 2
    if not matrix or len(summed) != 1 or {*at} & {*of} != {*summed}:
        call.multiplies(prod(sizes.values()), None)
        return unknown(call, operands, f"{call.where} multiplies it with something that is not one matrix")
    ties, (c,) = call.ties, summed
    reading = values.solid(ties, weight, of.index(c))
    call.reader(weight, reading, values.single(ties, x, at.index(c)), x)
    carried: dict[values.Dims, Numbers] = {}
    for d, letter in enumerate(out):
        if letter in at and x.group(at.index(letter)) is not None:
            carried[(d,)] = values.solid(ties, x, at.index(letter))
        elif letter in of:
            carried[(d,)] = values.solid(ties, weight, of.index(letter))
            call.writer(weight, carried[(d,)])
    call.multiplies(prod(sizes[letter] for letter in at) // sizes[c], weight)
    return Value(call.shape, carried, x.why)
