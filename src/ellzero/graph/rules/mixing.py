"""Rules for what mixes units along a dimension: norms of channels, reductions, pooling, recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ellzero.graph import values
from ellzero.graph.rules.call import Call, axis, couples, tensors, unknown
from ellzero.graph.rules.entrywise import entrywise
from ellzero.graph.values import Value

ALONG_ONE = "log_softmax _log_softmax cumsum cumprod logcumsumexp sort"
RESAMPLERS = """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa"""
REDUCTIONS = "mean sum amax amin var std prod all any logsumexp max min argmax argmin norm linalg_vector_norm"


@couples("batch_norm", "instance_norm")
def unit_norm(call: Call, x: Value, *rest: Any) -> Value:
    """Statistics of one channel each: weight, bias and running statistics ride on the axis."""
    values.single(call.ties, x, 1)
    riders = [replace(v, shape=(*v.shape, *[1] * (x.ndim - 2))) for v in tensors(rest)]
    if call.op == "instance_norm":
        values.freeze(call.ties, x, call.mixes(), range(2, x.ndim))
    elif next(r for r in rest if isinstance(r, bool)):  # in training: over all examples and positions
        values.freeze(call.ties, x, call.mixes(), [0, *range(2, x.ndim)])
    return values.elementwise(call.ties, [x, *riders], call.shape)


@couples("_weight_norm")
def weight_norm(call: Call, v: Value, g: Value, dim: int = 0, *_: Any) -> Value:
    """A norm and a direction for each unit along `dim`: what a layer writes can go, what it reads is in the norm."""
    out = values.elementwise(call.ties, [v, g], call.shape)
    mixed = [d for d in range(v.ndim) if d != axis(dim, v.ndim)]
    return replace(out, carried=values.without(call.ties, out, mixed, call.mixes()), why=f"the output of {call.where}")


@couples("group_norm", sized=True)
def group_norm(call: Call, x: Value, groups: int, *rest: Any) -> Value:
    """Statistics of each group of channels by itself: a group goes as a whole, and leaves the others as they are."""
    values.single(call.ties, x, 1)
    riders = [replace(v, shape=(*v.shape, *[1] * (x.ndim - 2))) for v in tensors(rest)]
    out = values.elementwise(call.ties, [x, *riders], call.shape)
    call.numbers = (x.shape[1] // groups, *(r for r in rest if isinstance(r, float)))  # a group is as large as it was
    out = replace(out, carried=values.without(call.ties, out, range(2, x.ndim), call.mixes()))
    if groups == 1 < x.shape[1]:
        why = f"{call.mixes()}, which are one group: with more groups, whole ones could go"
        out = replace(out, carried=values.without(call.ties, out, [1], why))
    if (1,) in out.carried:
        rows = out.carried[(1,)].reshape(groups, -1)
        call.ties.tie(np.broadcast_to(rows[:, :1], rows.shape), rows)
    return replace(out, why=f"the output of {call.where}")


@couples(*ALONG_ONE.split())
def along_one(call: Call, x: Value, *rest: Any) -> list[Value]:
    dim = next((r for r in rest if isinstance(r, int) and not isinstance(r, bool)), -1)
    carried = values.without(call.ties, x, [axis(dim, x.ndim)], call.mixes())
    return [Value(shape, carried, f"the output of {call.where}") for shape in call.shapes]


@couples(*REDUCTIONS.split())
def reduction(call: Call, x: Value, *rest: Any) -> list[Value] | Value:
    if any(isinstance(r, Value) for r in rest):
        return entrywise(call, x, *rest)  # max(a, b), min(a, b)
    keep = len(call.shape) == x.ndim
    lists = [r for r in rest if isinstance(r, list | tuple)]
    number = next((r for r in rest if isinstance(r, int) and not isinstance(r, bool)), None)
    dims: Sequence[int] = lists[0] if lists and lists[0] else [number] if number is not None else range(x.ndim)
    if call.op in ("norm", "linalg_vector_norm") and not lists:
        dims = range(x.ndim)
    gone = sorted({axis(d, x.ndim) for d in dims}) if x.ndim else []
    if not keep and len(call.shape) != x.ndim - len(gone):
        return unknown(call, [x])
    carried = values.without(call.ties, x, gone, call.mixes())
    if not keep:
        carried = {tuple(d - sum(g < d for g in gone) for d in group): a for group, a in carried.items()}
    return [Value(shape, carried, x.why) for shape in call.shapes]


@couples(*(f"{kind}_pool{d}d" for d in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg", "adaptive_max")))
@couples(*(f"max_pool{d}d_with_indices" for d in (1, 2, 3)), *RESAMPLERS.split())
def over_space(call: Call, x: Value, *_: Any) -> list[Value]:
    """Acts on the last one, two or three dimensions, each channel by itself."""
    spatial = int(next(c for c in call.op if c.isdigit() and c != "0"))
    carried = values.without(call.ties, x, range(x.ndim - spatial, x.ndim), call.mixes())
    return [Value(shape, carried, "a dimension of space") for shape in call.shapes]


@couples("grid_sampler")
def sampled(call: Call, x: Value, grid: Value, *_: Any) -> Value:
    """Each channel by itself, at places that the grid tells."""
    values.freeze(call.ties, grid, f"{call.where} uses it as places")
    carried = values.without(call.ties, x, range(2, x.ndim), call.mixes())
    values.freeze(call.ties, x, call.mixes(), [0])
    return Value(call.shape, {g: a for g, a in carried.items() if 0 not in g}, "a dimension of space")


@couples("constant_pad_nd", "pad", *(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)))
def pad(call: Call, x: Value, amounts: Sequence[int], *_: Any) -> Value:
    padded = [x.ndim - 1 - k // 2 for k, n in enumerate(amounts) if n]
    return Value(call.shape, values.without(call.ties, x, padded, f"{call.where} pads it"), x.why)


@couples("roll", "flip")
def moved_along(call: Call, x: Value, *rest: Any) -> Value | list[Value]:
    dims = rest[-1] if isinstance(rest[-1], list | tuple) else [rest[-1]]
    if not dims:
        return unknown(call, [x])
    carried = values.without(call.ties, x, [axis(d, x.ndim) for d in dims], f"{call.where} moves its units")
    return Value(call.shape, carried, x.why)


@couples(*(name + cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")))
def recurrence(call: Call, x: Value, *rest: Any) -> list[Value]:
    """Every weight is used at every step; what the units mean to each other from step to step is not followed."""
    for weight in tensors(rest):
        if weight.source is not None and weight.ndim == 2:
            call.multiplies(prod(x.shape[:-1]), weight)
    return unknown(call, [x, *tensors(rest)], f"{call.where} carries it from step to step")
