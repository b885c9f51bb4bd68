"""Rules for what moves entries and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import numpy as np

from ellzero.graph import values
from ellzero.graph.axes import Numbers
from ellzero.graph.rules.call import SIZED, Call, axis, couples, tensors, unknown
from ellzero.graph.values import Value

BY_NUMBER = "picks units by their number"


@couples(
    "view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as", "_reshape_alias", sized=True
)
def reshape(call: Call, x: Value, *_: Any) -> Value | list[Value]:
    if prod(call.shape) != prod(x.shape):
        return unknown(call, [x], f"{call.where} reads its bits as numbers of another size")
    return values.reshape(call.ties, x, call.shape)


@couples("squeeze", "unsqueeze")
def ones(call: Call, x: Value, dim: Any = None, *_: Any) -> Value:
    if call.op == "unsqueeze":
        return values.insert(x, axis(dim, x.ndim + 1))
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for d in sorted({axis(d, x.ndim) for d in dims if x.shape[d] == 1}, reverse=True):
        x = values.drop(call.ties, x, d, f"{call.where} takes its only unit out")
    return x


@couples("view_as_complex", "view_as_real")
def pairs(call: Call, x: Value, *_: Any) -> Value:
    """Two numbers as one, or one as two: units that lie along a pair are one."""
    if call.op == "view_as_real":
        return replace(values.insert(x, x.ndim), shape=call.shape)
    return values.drop(call.ties, x, x.ndim - 1, f"{call.where} makes one of two numbers")


@couples("permute", "transpose", "t", "numpy_T", "mT", "swapaxes", "swapdims", "movedim", "moveaxis")
def permutation(call: Call, x: Value, *args: Any) -> Value | list[Value]:
    order = list(range(x.ndim))
    if call.op == "permute":
        order = [axis(d, x.ndim) for d in args[0]]
    elif call.op in ("t", "numpy_T"):
        order.reverse()
    elif call.op in ("transpose", "swapaxes", "swapdims", "mT"):
        a, b = (-2, -1) if call.op == "mT" else args[:2]
        a, b = axis(a, x.ndim), axis(b, x.ndim)
        order[a], order[b] = order[b], order[a]
    else:
        source, target = ([a] if isinstance(a, int) else list(a) for a in args[:2])
        rest = [d for d in order if d not in {axis(s, x.ndim) for s in source}]
        for s, t in sorted(zip(source, target, strict=True), key=lambda p: axis(p[1], x.ndim)):
            rest.insert(axis(t, x.ndim), axis(s, x.ndim))
        order = rest
    return values.permute(x, order)


@couples("slice", "narrow", "select", sized=True)
def part(
    call: Call, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *_: Any
) -> Value | list[Value]:
    dim, size = axis(dim, x.ndim), x.shape[axis(dim, x.ndim)]
    if call.op == "select":
        return values.drop(call.ties, x, dim, f"{call.where} picks one unit by its number")
    if not isinstance(start, int | None) or not isinstance(end, int | None):
        return unknown(call, [x])
    index = np.arange(size)
    index = index[start : start + end] if call.op == "narrow" else index[start:end:step]  # type: ignore[operator]
    group = x.group(dim)
    if group is None or len(index) == size:
        return values.take(x, dim, index)
    if step == 1:
        _cut(call, x, dim, [int(index[0]), int(index[-1]) + 1] if len(index) else [])
    elif dim in group[1:]:  # inside of units that lie on an outer dimension, such as heads: whole ones go
        values.narrow(call.ties, x, [dim])
        return values.take(x, dim, index)
    elif len(index) * step == size:  # every n-th: whole rows of n go, or stay
        rows = values.solid(call.ties, x, dim).reshape(-1, step)
        call.ties.tie(np.broadcast_to(rows[:, :1], rows.shape), rows)
    else:
        return unknown(call, [x], f"{call.where} {BY_NUMBER}")
    call.ties.placed.append(x.carried[x.group(dim) or group])
    return values.take(x, dim, index)


def _cut(call: Call, x: Value, dim: int, places: Sequence[int]) -> None:
    """A cut at a share of the size, such as its half, is at the same unit again if as many stay in each such part."""
    atoms = x.carried.get((dim,))
    if atoms is not None and gcd(x.shape[dim], *places) < len(atoms):
        call.ties.cuts.append((atoms, places))


@couples("chunk", "unsafe_chunk")
@couples("split", "split_with_sizes", "tensor_split", "unsafe_split", sized=True)
def parts(call: Call, x: Value, *rest: Any) -> list[Value] | Value:
    if not x.ndim:
        return unknown(call, [x])
    dim = next((d for d in range(x.ndim) if any(s[d] != x.shape[d] for s in call.shapes)), None)
    if dim is None:
        return [x]
    ends = np.cumsum([s[dim] for s in call.shapes])
    _cut(call, x, dim, ends.tolist())
    if call.op in SIZED or ends[0] * len(ends) != ends[-1]:  # `chunk` into equal parts is a share by itself
        call.ties.placed.extend(atoms for dims, atoms in x.carried.items() if dim in dims)
    return [values.take(x, dim, np.arange(e - s[dim], e)) for e, s in zip(ends, call.shapes, strict=True)]


@couples("unbind")
def unbind(call: Call, x: Value, dim: int = 0, *_: Any) -> list[Value]:
    one = values.drop(call.ties, x, axis(dim, x.ndim), f"{call.where} picks its units one by one")
    return [replace(one) for _ in call.shapes]


@couples("cat", "concat", "concatenate")
def cat(call: Call, parts: Sequence[Value], dim: int = 0, *_: Any) -> Value:
    parts = [v for v in parts if v.shape != (0,)]  # an old habit of torch: empty vectors vanish
    return values.concat(call.ties, parts, axis(dim, len(call.shape)), call.shape)


@couples("stack")
def stack(call: Call, parts: Sequence[Value], dim: int = 0, *_: Any) -> Value:
    dim = axis(dim, len(call.shape))
    return values.concat(call.ties, [values.insert(v, dim) for v in parts], dim, call.shape)


@couples("expand", "expand_as", "broadcast_to", sized=True)
def expand(call: Call, x: Value, *_: Any) -> Value:
    """All entries along a new length are the same: any of them can go with what they meet, as masks do with heads."""
    out = values.elementwise(call.ties, [x], call.shape)
    shift, first = out.ndim - x.ndim, not all(map(call.ties.is_spare, x.carried.values()))  # that of units is a batch
    for d, size in enumerate(call.shape):
        if size > 1 and (0 < d < shift or (d >= shift + first and x.shape[d - shift] == 1)):  # a new first one, too
            out.carried[(d,)] = call.ties.spare(size)
    return out


@couples("zeros", "ones", "new_zeros", "new_ones", "empty", "new_empty", sized=True)
def filled(call: Call, *_: Any) -> Value:
    """The same everywhere, or to be filled: any entry can go with what it meets, as that of a state that begins with
    nothing, and as keys that are put together in place.
    """
    carried: dict[values.Dims, Numbers] = {
        (d,): call.ties.spare(size) for d, size in enumerate(call.shape) if d and size > 1
    }
    return Value(call.shape, carried, f"the output of {call.where}")


@couples("repeat", "tile", "repeat_interleave")
def repeat(call: Call, x: Value, times: Any, dim: Any = None, *_: Any) -> Value | list[Value]:
    if call.op == "repeat_interleave":
        if not isinstance(times, int) or not isinstance(dim, int):
            return unknown(call, [x])
        dim = axis(dim, x.ndim)
        call.numbers = (dim,)  # and not how often, which shows in how large it becomes
        if group := x.group(dim):
            call.ties.placed.append(x.carried[group])
            return values.take(x, dim, np.repeat(np.arange(x.shape[dim]), times))
        return _lone(call, replace(x, shape=call.shape), [dim] if dim and x.shape[dim] == 1 else [])
    for _new in range(len(call.shape) - x.ndim):
        x = values.insert(x, 0)
    lone = [d for d, size in enumerate(call.shape) if d and x.shape[d] == 1 < size and x.group(d) is None]
    often = [size // n for size, n in zip(call.shape, x.shape, strict=True)]
    call.numbers = tuple(0 if d in lone else n for d, n in enumerate(often))
    for d, n in enumerate(often):
        if n > 1:
            if group := x.group(d):
                call.ties.placed.append(x.carried[group])
            x = values.take(x, d, np.tile(np.arange(x.shape[d]), n))
    return _lone(call, x, lone)


def _lone(call: Call, x: Value, dims: Sequence[int]) -> Value:
    """The same for each entry along these dimensions, as a head of keys for all: each goes with what it meets."""
    spare: dict[values.Dims, Numbers] = {(d,): call.ties.spare(x.shape[d]) for d in dims if x.shape[d] > 1}
    call.ties.placed.extend(spare.values())
    return replace(x, carried={**x.carried, **spare})


@couples("pixel_shuffle")
def pixel_shuffle(call: Call, x: Value, r: int, *_: Any) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = values.reshape(call.ties, x, (*lead, c // r**2, r, r, h, w))
    x = values.permute(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return values.reshape(call.ties, x, call.shape)


@couples("pixel_unshuffle")
def pixel_unshuffle(call: Call, x: Value, r: int, *_: Any) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = values.reshape(call.ties, x, (*lead, c, h // r, r, w // r, r))
    x = values.permute(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return values.reshape(call.ties, x, call.shape)


@couples("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: Call, x: Value, groups: int, *_: Any) -> Value:
    order = np.arange(x.shape[1]).reshape(groups, -1).T.ravel()
    atoms = values.single(call.ties, x, 1)
    if atoms is not None:
        # After a removal the shuffle deals out whatever is there: the same places must stay in each group.
        inside = atoms.reshape(groups, -1)
        call.ties.tie(np.broadcast_to(inside[:1], inside.shape), inside)
    return values.take(x, 1, order)


PICKS = ("index", "index_select")


@couples(*PICKS)
def picked(call: Call, x: Value, *rest: Any) -> Value | list[Value]:
    """Entries by their numbers: what lies where numbers pick is frozen, all else is carried on."""
    index = rest[0] if call.op == "index" else [*[None] * axis(rest[0], x.ndim), rest[1]]
    dims = [d for d, i in enumerate(index) if i is not None]
    given = tensors([index])
    told, here = [i.numbers for i in given if i.numbers is not None], x.carried.get(tuple(dims))
    alone = len(dims) == len(given) == 1
    if alone and not told and given[0].ndim == len(given[0].carried) == 1 and x.group(dims[0]) is None:
        # Each entry comes by a number of its own, as one of heads that are left: with the number it goes.
        return Value(call.shape, {**x.carried, (dims[0],): given[0].carried[(0,)]}, x.why)
    for numbers in given:
        values.freeze(call.ties, numbers, f"{call.where} uses it as an index")
    follows = alone and told and here is not None and len(here) == len(told[0])  # as many are there as are told of
    for atoms in told if not follows else ():
        call.ties.freeze(atoms, f"{call.where} {BY_NUMBER}")
    if not dims or dims[-1] - dims[0] >= len(dims):  # torch puts what is picked in front then
        return unknown(call, [x])
    if follows and here is not None:
        call.ties.tie(here, told[0])
        carried = {g: a for g, a in x.carried.items() if g != (dims[0],)}
    else:
        carried = values.without(call.ties, x, dims, f"{call.where} {BY_NUMBER}")
    shift = len(call.shape) - x.ndim
    carried = {tuple(d + shift * (d > dims[-1]) for d in g): a for g, a in carried.items()}
    experts = x.source if dims == [0] and x.ndim == 3 == len(call.shape) else None  # each is still a matrix of its own
    return Value(call.shape, carried, x.why, experts)


@couples("index_add", "index_copy")
def put(call: Call, x: Value, dim: int, index: Value, source: Value, *_: Any) -> Value:
    """Entries put at their numbers along one dimension: what lies there is frozen, all else meets entry by entry."""
    dim = axis(dim, x.ndim)
    values.freeze(call.ties, index, f"{call.where} uses it as an index")
    rest = []
    for value in (x, source):
        carried = values.without(call.ties, value, [dim], f"{call.where} puts entries at units by their number")
        rest.append(Value((*value.shape[:dim], 1, *value.shape[dim + 1 :]), carried, value.why))
    out = values.elementwise(call.ties, rest, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    out.shape = call.shape
    return out


@couples("gather")
def gathered(call: Call, x: Value, dim: int, index: Value, *_: Any) -> Value | list[Value]:
    """What lies where entries are looked up is frozen. Elsewhere the index meets it entry by entry, and must be the
    same for all units, as one that was expanded.
    """
    dim = axis(dim, x.ndim)
    if [n for d, n in enumerate(x.shape) if d != dim] != [n for d, n in enumerate(index.shape) if d != dim]:
        return unknown(call, [x, index], f"{call.where} looks entries up by numbers, which it has for some of them")
    why = f"{call.where} looks entries up by numbers along it"
    rest = [Value(call.shape, values.without(call.ties, v, [dim], why), v.why) for v in (index, x)]
    return values.elementwise(call.ties, rest, call.shape)


@couples("im2col", sized=True)
def windows(call: Call, x: Value, kernel: Sequence[int], *_: Any) -> Value:
    """The windows of an image, each channel's places in a window one after the other."""
    space = range(x.ndim - 2, x.ndim)
    carried = values.without(call.ties, x, space, f"{call.where} cuts windows along it")
    flat = Value((*x.shape[:-2], 1), carried)
    wide = values.take(flat, x.ndim - 3, np.repeat(np.arange(x.shape[-3]), prod(kernel)))
    return Value(call.shape, wide.carried, "a dimension of space")
