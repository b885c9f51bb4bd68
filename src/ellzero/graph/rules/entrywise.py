"""Rules for what acts entry by entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ellzero.graph import values
from ellzero.graph.rules.call import Call, axis, couples, tensors
from ellzero.graph.values import Value

UNARY = """relu relu6 gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu selu celu softplus mish
log_sigmoid threshold hardshrink softshrink exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow abs neg
sin cos tan asin acos atan sinh cosh erf erfc clamp clamp_min clamp_max clip sign sgn floor
ceil round trunc frac reciprocal nan_to_num logical_not bitwise_not isnan isinf isfinite
positive zeros_like ones_like full_like empty_like fill zero
fake_quantize_per_tensor_affine"""
BENDING = frozenset(UNARY.split())  # but for a few
DRAWN = "rand_like randn_like bernoulli"
DRAWN_IN_TRAINING = "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout rrelu"
BINARY = """mul multiply div divide true_divide floor_divide remainder fmod maximum minimum fmax fmin eq ne lt le gt ge
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill lerp
addcmul addcdiv atan2 copysign hypot xlogy copy"""


@couples(*UNARY.split(), *BINARY.split())
def entrywise(call: Call, *args: Any) -> list[Value]:
    return [values.elementwise(call.ties, tensors(args), shape) for shape in call.shapes]


@couples(*DRAWN.split(), *DRAWN_IN_TRAINING.split())
def drawn(call: Call, *args: Any) -> list[Value]:
    """With a number drawn for each entry: in evaluation, a unit that goes would move those of all others."""
    out = [values.elementwise(call.ties, tensors(args), shape) for shape in call.shapes]
    if call.evaluates and (call.op in DRAWN.split() or any(a is True for a in args)):
        for value in out:
            values.freeze(call.ties, value, f"{call.where} draws a number for each of its units, in evaluation too")
    return out


@couples("clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "lift_fresh_copy")
def same(call: Call, x: Value, *_: Any) -> Value:
    """The same numbers: what was a parameter still is one."""
    return x


@couples("add", "sub", "rsub", "subtract")
def addition(call: Call, a: Any, b: Any, *_: Any) -> Value:
    out = values.elementwise(call.ties, tensors((a, b)), call.shape)
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return out
    ways, ties = [x.lineage & ~y.lineage for x, y in ((a, b), (b, a))], call.ties
    parts = all(way & ties.contracting and not way & ties.bending for way in ways)  # of one layer: an adapter, say
    if a.lineage & b.lineage & ~ties.leaves and (ways[0] | ways[1]) & ties.contracting and not parts:
        # Both were computed from one activation, a weight on one of the ways, and are added up: a residual stream.
        both = [g for g in out.carried if values.carries(a, g, out) and values.carries(b, g, out)]
        ties.streams.extend(out.carried[g] for g in both)
    return out


@couples("prelu")
def prelu(call: Call, x: Value, weight: Value, *_: Any) -> Value:
    if weight.shape == (1,):  # one slope for all units
        if weight.source is not None:
            call.ties.ignored.extend(weight.carried.values())
        return values.elementwise(call.ties, [x], call.shape)
    lift = replace(weight, shape=(*weight.shape, *[1] * (x.ndim - 2)))  # the weight lies along dimension 1
    return values.elementwise(call.ties, [x, lift], call.shape)


@couples("glu")
def glu(call: Call, x: Value, dim: int = -1, *_: Any) -> Value:
    dim = axis(dim, x.ndim)
    half = x.shape[dim] // 2
    parts = [values.take(x, dim, np.arange(k * half, (k + 1) * half)) for k in (0, 1)]
    return values.elementwise(call.ties, parts, call.shape)
