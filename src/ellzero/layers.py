"""Everything that depends on the type of an operation or a layer: how it couples dimensions, what it multiplies, how
it is resized.

`@couples("linear", …)` registers the rule of an ATen operation: a function of the traced arguments that ties labels
and returns the output `Value`. `@resizes(nn.Linear, …)` registers what to set on a module after its tensors were
sliced. An operation without a rule freezes whatever reaches it, with that reason; nothing is ever taken for
element-wise because it looks so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from torch import nn

from ellzero import labels as lb
from ellzero.axes import Labels, Role, Ties
from ellzero.labels import Value


@dataclass
class Call:
    """One operation in the trace: where it says what it ties, its name for messages, the module it runs in, and its
    output shapes.
    """

    ties: Ties
    op: str
    module: str
    shapes: list[tuple[int, ...]]
    batch: int
    count_macs: bool = True
    reads: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def where(self) -> str:
        return f"`{self.op}`" + (f" in `{self.module}`" if self.module else "")

    def multiplies(
        self, factor: float, weight: Value | None, left: Labels | None = None, right: Labels | None = None
    ) -> None:
        """Records MACs: `factor` for each entry of `weight`, or of `left` × `right` where it is no whole parameter.

        Per example, so the example's batch is divided out.
        """
        if not self.count_macs:
            return
        source = weight.source if weight is not None else None
        name = (source.rpartition(".")[0] or source) if source else self.module
        if weight is not None and source and prod(weight.shape) == prod(self.ties.shapes[source]):
            self.ties.products.append((name, factor / self.batch, source, None, None))
        else:
            kernel = prod(weight.shape[2:]) if weight is not None else 1
            self.ties.products.append((name, factor * kernel / self.batch, None, left, right))

    def reader(self, weight: Value, atoms: Labels, what: Labels | None, x: Value) -> None:
        """A contracting dimension of `weight`, whose atoms are `atoms`, reads `what` (the labels of `x` there)."""
        if what is None:
            self.ties.freeze(atoms, f"it reads {x.why}")
        else:
            self.ties.tie(atoms, what)
        if weight.source is None:
            self.ties.freeze(atoms, f"{self.where} reads it by a weight that is computed, not a parameter")
        else:
            self.ties.use(atoms, "reads")
            self.reads += (weight.source,)

    def writer(self, weight: Value, atoms: Labels, role: Role = "writes") -> None:
        if weight.source is not None:
            self.ties.use(atoms, role)

    def mixes(self) -> str:
        return f"{self.where} mixes its units"


Rule = Callable[..., Value | list[Value]]
RULES: dict[str, Rule] = {}
RESIZERS: dict[type[nn.Module], Callable[[Any], None]] = {}


def couples(*ops: str) -> Callable[[Rule], Rule]:
    """Registers the rule of the ATen operations with these names (without overload and trailing underscore)."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def resizes(*types: type[nn.Module]) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers how a module's attributes follow from the shapes of its tensors."""

    def register(fix: Callable[[Any], None]) -> Callable[[Any], None]:
        RESIZERS.update(dict.fromkeys(types, fix))
        return fix

    return register


def resize(module: nn.Module) -> None:
    """Brings a module's attributes in line with its sliced tensors; a type without a resizer has none that matter."""
    for kind in type(module).__mro__:
        if kind in RESIZERS:
            RESIZERS[kind](module)
            return


def unknown(call: Call, values: Sequence[Value], reason: str | None = None) -> list[Value]:
    """What happens to an operation without a rule: all that reaches it is frozen, and what comes out is plain."""
    reason = reason or f"there is no rule for {call.where}"
    for value in values:
        lb.freeze(call.ties, value, reason)
    return [Value(shape, why=f"the output of {call.where}") for shape in call.shapes]


def tensors(args: Sequence[Any]) -> list[Value]:
    found: list[Value] = []
    for a in args:
        found += [a] if isinstance(a, Value) else tensors(a) if isinstance(a, list | tuple) else []
    return found


def axis(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


# ---------------------------------------------------------------- entry by entry

UNARY = """relu relu6 gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu selu celu softplus mish
log_sigmoid threshold hardshrink softshrink rrelu exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow abs neg
sin cos tan asin acos atan sinh cosh erf erfc clamp clamp_min clamp_max clip dropout feature_dropout alpha_dropout
feature_alpha_dropout native_dropout bernoulli sign sgn floor ceil round trunc frac reciprocal nan_to_num logical_not
bitwise_not isnan isinf isfinite positive zeros_like ones_like full_like rand_like randn_like empty_like fill zero
fake_quantize_per_tensor_affine"""
BINARY = """mul multiply div divide true_divide floor_divide remainder fmod maximum minimum fmax fmin eq ne lt le gt ge
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill lerp
addcmul addcdiv atan2 copysign hypot xlogy"""


@couples(*UNARY.split(), *BINARY.split())
def entrywise(call: Call, *args: Any) -> list[Value]:
    values = tensors(args)
    return [lb.elementwise(call.ties, values, shape) for shape in call.shapes]


@couples(
    "clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "float", "half", "double", "lift_fresh_copy"
)
def same(call: Call, x: Value, *_: Any) -> Value:
    """The same numbers: what was a parameter still is one."""
    return x


@couples("add", "sub", "rsub", "subtract")
def addition(call: Call, a: Any, b: Any, *_: Any) -> Value:
    out = lb.elementwise(call.ties, tensors((a, b)), call.shape)
    if isinstance(a, Value) and isinstance(b, Value) and a.lineage & b.lineage & ~call.ties.leaves:
        # Both were computed from one activation, and they are added up: a residual stream.
        both = [g for g in out.labels if _labelled(a, g, out) and _labelled(b, g, out)]
        call.ties.streams.extend(out.labels[g] for g in both)
    return out


def _labelled(value: Value, group: lb.Dims, out: Value) -> bool:
    return any(value.group(d - out.ndim + value.ndim) is not None for d in group if d >= out.ndim - value.ndim)


@couples("prelu")
def prelu(call: Call, x: Value, weight: Value, *_: Any) -> Value:
    if weight.shape == (1,):  # one slope for all units
        if weight.source is not None:
            call.ties.ignored.extend(weight.labels.values())
        return lb.elementwise(call.ties, [x], call.shape)
    lift = replace(weight, shape=(*weight.shape, *[1] * (x.ndim - 2)))  # the weight lies along dimension 1
    return lb.elementwise(call.ties, [x, lift], call.shape)


@couples("glu")
def glu(call: Call, x: Value, dim: int = -1, *_: Any) -> Value:
    dim = axis(dim, x.ndim)
    half = x.shape[dim] // 2
    parts = [lb.take(call.ties, x, dim, np.arange(k * half, (k + 1) * half)) for k in (0, 1)]
    return lb.elementwise(call.ties, parts, call.shape)


# ---------------------------------------------------------------- weights


@couples("linear")
def linear(call: Call, x: Value, weight: Value, bias: Value | None = None, *_: Any) -> Value:
    return _matrix_product(call, x, weight, 1, 0, bias)


def _matrix_product(call: Call, x: Value, weight: Value, into: int, out: int, bias: Value | None = None) -> Value:
    """`x` times a two-dimensional weight that contracts its dimension `into` and writes `out`."""
    ties = call.ties
    reading = lb.solid(ties, weight, into)
    call.reader(weight, reading, lb.single(ties, x, x.ndim - 1), x)
    labels = {g: a for g, a in x.labels.items() if x.ndim - 1 not in g}
    labels[(x.ndim - 1,)] = lb.solid(ties, weight, out)
    call.writer(weight, labels[(x.ndim - 1,)])
    call.multiplies(prod(x.shape[:-1]), weight, reading, labels[(x.ndim - 1,)])
    result = Value(call.shape, labels, x.why)
    return result if bias is None else lb.elementwise(ties, [result, bias], call.shape)


@couples("matmul", "mm", "bmm")
def matmul(call: Call, a: Value, b: Value, *_: Any) -> Value | list[Value]:
    if a.ndim < 1 or b.ndim < 1 or b.ndim == 1 or a.ndim == 1:
        return unknown(call, [a, b], f"{call.where} multiplies it with a vector")
    if b.ndim == 2 and b.source is not None:
        return _matrix_product(call, a, b, 0, 1)
    ties, n = call.ties, len(call.shape)
    reason = f"{call.where} contracts it with something that is not a parameter"
    left = lb.without(ties, a, [a.ndim - 1], reason)
    right = lb.without(ties, b, [b.ndim - 2], reason)
    for v in (a, b):
        if v.source is not None:  # a weight on the left, or one of three dimensions: sliced with the axis, never gated
            for atoms in v.labels.values():
                ties.use(atoms, "rides")
    # Rows come from the left operand, columns from the right one; the batch dimensions are element-wise.
    rows = Value((*a.shape[:-1], 1), left, a.why)
    columns = Value((*b.shape[:-2], 1, b.shape[-1]), right, b.why)
    out = Value(call.shape)
    for operand in (rows, columns):
        shift = n - operand.ndim
        for group, atoms in operand.labels.items():
            moved = tuple(d + shift for d in group)
            if any(d < n - 2 for d in moved):
                ties.freeze(atoms, f"{call.where} takes it as a batch dimension")
            else:
                out.labels[moved] = atoms
    side = [out.labels.get((d,)) for d in (n - 2, n - 1)]
    sizes = [ties.fresh(call.shape[d]) if s is None else s for d, s in zip((n - 2, n - 1), side, strict=True)]
    call.multiplies(prod(call.shape[:-2]) * a.shape[-1], None, *sizes)
    return out


@couples("addmm")
def addmm(call: Call, bias: Value, a: Value, b: Value, *_: Any) -> Value | list[Value]:
    out = matmul(call, a, b)
    return lb.elementwise(call.ties, [out, bias], call.shape) if isinstance(out, Value) else out


@couples("embedding")
def embedding(call: Call, weight: Value, index: Value, *_: Any) -> Value:
    lb.freeze(call.ties, weight, "the input picks single entries of it", [0])
    atoms = lb.solid(call.ties, weight, 1)
    call.writer(weight, atoms)
    lb.freeze(call.ties, index, f"{call.where} uses it as an index")
    return Value(call.shape, {(len(call.shape) - 1,): atoms})


@couples("conv1d", "conv2d", "conv3d", "convolution")
def convolution(call: Call, x: Value, weight: Value, bias: Value | None = None, *rest: Any) -> Value:
    spatial = weight.ndim - 2
    groups = next((r for r in reversed(rest) if isinstance(r, int) and not isinstance(r, bool)), 1)
    transposed = any(r is True for r in rest)
    return _convolve(call, x, weight, bias, spatial, groups, transposed)


@couples("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call, x: Value, weight: Value, bias: Value | None = None, *rest: Any) -> Value:
    groups = next((r for r in rest if isinstance(r, int)), 1)  # stride, padding, output_padding are lists
    return _convolve(call, x, weight, bias, weight.ndim - 2, groups, True)


def _convolve(
    call: Call, x: Value, weight: Value, bias: Value | None, spatial: int, groups: int, transposed: bool
) -> Value:
    ties = call.ties
    channel = x.ndim - spatial - 1
    into, out = (0, 1) if transposed else (1, 0)
    what = lb.single(ties, x, channel)
    lb.freeze(ties, x, f"{call.where} convolves along it", range(channel + 1, x.ndim))
    if weight.source is not None:
        ties.ignored.extend(ties.atoms(weight.source, d) for d in range(2, weight.ndim))
    n_in, n_out = x.shape[channel], call.shape[channel]
    if groups == 1:
        call.reader(weight, lb.solid(ties, weight, into), what, x)
        writes = lb.solid(ties, weight, out)
        call.writer(weight, writes)
    elif groups == n_in:
        # Depthwise: row c (rows c·m … for a multiplier m) has channel c alone. The kernel lies *on* the axis.
        writes = _depthwise(call, weight, what, n_in, n_out, transposed, x)
    else:
        writes = _grouped(call, x, weight, what, groups, n_in, n_out, transposed)
    positions = prod(x.shape[channel + 1 :] if transposed else call.shape[channel + 1 :]) * prod(x.shape[:channel])
    call.multiplies(positions, weight, writes, lb.solid(ties, weight, into))
    labels = {g: a for g, a in x.labels.items() if max(g) < channel}
    labels[(channel,)] = writes
    result = Value(call.shape, labels, "a dimension of space")
    if bias is None:
        return result
    return lb.elementwise(ties, [result, replace(bias, shape=(*bias.shape, *[1] * spatial))], call.shape)


def _depthwise(
    call: Call, weight: Value, what: Labels | None, n_in: int, n_out: int, transposed: bool, x: Value
) -> Labels:
    ties = call.ties
    own = lb.solid(ties, weight, 0)
    if transposed and n_out != n_in:  # weight (in, multiplier): the outputs of one input are its multiplier columns
        own = np.repeat(own, n_out // n_in)
    if weight.source is not None:
        ties.ignored.append(ties.atoms(weight.source, 1))
    if what is None:
        ties.freeze(own, f"it reads {x.why}")
    else:
        ties.tie(own, np.repeat(what, n_out // n_in))
    call.writer(weight, own, "rides")
    return own


def _grouped(
    call: Call, x: Value, weight: Value, what: Labels | None, groups: int, n_in: int, n_out: int, transposed: bool
) -> Labels:
    """A weight's column j reads channel j *of its row's group*: the site is an index map over (row, column)."""
    ties = call.ties
    if weight.source is None:
        lb.freeze(ties, weight, f"{call.where} has groups and a weight that is computed, not a parameter")
    if what is None:
        what = ties.fresh(n_in)
        ties.freeze(what, f"it reads {x.why}")
    inside = what.reshape(groups, n_in // groups)
    if transposed:  # weight (in, out / groups): rows read, and which output a column writes depends on the row
        rows = lb.solid(ties, weight, 0)
        call.reader(weight, rows, what, x)
        writes = ties.fresh(n_out)
        table = np.repeat(writes.reshape(groups, -1), n_in // groups, axis=0)
        role: Role = "writes"
    else:
        rows = writes = lb.solid(ties, weight, 0)
        call.writer(weight, writes)
        table = np.repeat(inside, n_out // groups, axis=0)
        role = "reads"
    if weight.source is not None:
        ties.ignored.append(ties.atoms(weight.source, 1))
        ties.table(weight.source, (0, 1), table, role)
        call.reads += (weight.source,)
    ties.balances.append(inside)
    ties.balances.append(writes.reshape(groups, -1))
    return writes


# ---------------------------------------------------------------- normalisation


@couples("batch_norm", "instance_norm")
def unit_norm(call: Call, x: Value, *rest: Any) -> Value:
    """Statistics of one channel each: weight, bias and running statistics ride on the axis."""
    lb.single(call.ties, x, 1)
    riders = [replace(v, shape=(*v.shape, *[1] * (x.ndim - 2))) for v in tensors(rest)]
    if call.op == "instance_norm":
        lb.freeze(call.ties, x, call.mixes(), range(2, x.ndim))
    return lb.elementwise(call.ties, [x, *riders], call.shape)


@couples("layer_norm", "rms_norm")
def layer_norm(call: Call, x: Value, over: Sequence[int], *rest: Any) -> Value:
    out = lb.elementwise(call.ties, [x, *tensors(rest)], call.shape)
    dims = range(x.ndim - len(over), x.ndim)
    return replace(out, labels=lb.without(call.ties, out, dims, call.mixes()), why=f"the output of {call.where}")


@couples("group_norm")
def group_norm(call: Call, x: Value, groups: int, *rest: Any) -> Value:
    lb.single(call.ties, x, 1)
    riders = [replace(v, shape=(*v.shape, *[1] * (x.ndim - 2))) for v in tensors(rest)]
    out = lb.elementwise(call.ties, [x, *riders], call.shape)
    mixed = range(1 if groups < x.shape[1] else 2, x.ndim)
    return replace(out, labels=lb.without(call.ties, out, mixed, call.mixes()), why=f"the output of {call.where}")


@couples(
    "softmax",
    "log_softmax",
    "_softmax",
    "_log_softmax",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "sort",
    "topk",
    "local_response_norm",
)
def along_one(call: Call, x: Value, *rest: Any) -> list[Value]:
    numbers = [r for r in rest if isinstance(r, int) and not isinstance(r, bool)]
    dim = numbers[1] if call.op == "topk" and len(numbers) > 1 else numbers[0] if numbers else -1
    if call.op == "sort":
        dim = numbers[0] if numbers else -1
    labels = lb.without(call.ties, x, [axis(dim, x.ndim)], call.mixes())
    return [Value(shape, labels, f"the output of {call.where}") for shape in call.shapes]


# ---------------------------------------------------------------- reductions, pooling, space


@couples(
    "mean",
    "sum",
    "amax",
    "amin",
    "var",
    "std",
    "prod",
    "all",
    "any",
    "logsumexp",
    "max",
    "min",
    "argmax",
    "argmin",
    "norm",
    "linalg_vector_norm",
)
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
    labels = lb.without(call.ties, x, gone, call.mixes())
    if not keep:
        labels = {tuple(d - sum(g < d for g in gone) for d in group): a for group, a in labels.items()}
    return [Value(shape, labels, x.why) for shape in call.shapes]


POOLS = [f"{a}_pool{d}d" for d in (1, 2, 3) for a in ("max", "avg", "adaptive_avg", "adaptive_max")]
RESAMPLERS = [
    f"upsample_{kind}"
    for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
]


@couples(
    *POOLS,
    *RESAMPLERS,
    *(f"max_pool{d}d_with_indices" for d in (1, 2, 3)),
    "_upsample_nearest_exact2d",
    "_upsample_bilinear2d_aa",
)
def over_space(call: Call, x: Value, *_: Any) -> list[Value]:
    """Acts on the last one, two or three dimensions, each channel by itself."""
    spatial = int(next(c for c in call.op if c.isdigit() and c != "0"))
    labels = lb.without(call.ties, x, range(x.ndim - spatial, x.ndim), call.mixes())
    return [Value(shape, labels, "a dimension of space") for shape in call.shapes]


@couples(
    "constant_pad_nd",
    "pad",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
)
def pad(call: Call, x: Value, amounts: Sequence[int], *_: Any) -> Value:
    padded = [x.ndim - 1 - k // 2 for k, n in enumerate(amounts) if n]
    return Value(call.shape, lb.without(call.ties, x, padded, f"{call.where} pads it"), x.why)


@couples("roll", "flip")
def moved_along(call: Call, x: Value, *rest: Any) -> Value | list[Value]:
    dims = rest[-1] if isinstance(rest[-1], list | tuple) else [rest[-1]]
    if not dims:
        return unknown(call, [x])
    return Value(
        call.shape, lb.without(call.ties, x, [axis(d, x.ndim) for d in dims], f"{call.where} moves its units"), x.why
    )


@couples("scaled_dot_product_attention")
def attention(call: Call, q: Value, k: Value, v: Value, *rest: Any) -> Value:
    reason = f"attention heads of {call.where} cannot be gated yet"
    for value in (q, k, v, *tensors(rest)):
        lb.freeze(call.ties, value, reason)
    batch, n, m = prod(q.shape[:-2]), q.shape[-2], k.shape[-2]
    call.multiplies(batch * n * m * (q.shape[-1] + v.shape[-1]), None)
    return Value(call.shape, why=f"the output of {call.where}")


@couples("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrence(call: Call, x: Value, *rest: Any) -> list[Value]:
    """Every weight is used at every step; what the units mean to each other from step to step is not followed."""
    for weight in tensors(rest):
        if weight.source is not None and weight.ndim == 2:
            call.multiplies(prod(x.shape[:-1]), weight)
    return unknown(call, [x, *tensors(rest)], f"{call.where} carries it from step to step")


# ---------------------------------------------------------------- layout


@couples("view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as", "_reshape_alias")
def reshape(call: Call, x: Value, *_: Any) -> Value:
    return lb.reshape(call.ties, x, call.shape)


@couples("squeeze", "unsqueeze")
def ones(call: Call, x: Value, dim: Any = None, *_: Any) -> Value:
    if call.op == "unsqueeze":
        return lb.insert(x, axis(dim, x.ndim + 1))
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for d in sorted({axis(d, x.ndim) for d in dims if x.shape[d] == 1}, reverse=True):
        x = lb.drop(call.ties, x, d, f"{call.where} takes its only unit out")
    return x


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
    return lb.permute(x, order)


@couples("slice", "narrow", "select")
def part(
    call: Call, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *_: Any
) -> Value | list[Value]:
    dim, size = axis(dim, x.ndim), x.shape[axis(dim, x.ndim)]
    if call.op == "select":
        return lb.drop(call.ties, x, dim, f"{call.where} picks one unit by its number")
    if not isinstance(start, int | None) or not isinstance(end, int | None):
        return unknown(call, [x])
    index = np.arange(size)
    index = index[start : start + end] if call.op == "narrow" else index[start:end:step]  # type: ignore[operator]
    return lb.take(call.ties, x, dim, index)


@couples("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split")
def parts(call: Call, x: Value, *rest: Any) -> list[Value] | Value:
    if not x.ndim:
        return unknown(call, [x])
    differs = [d for d in range(x.ndim) if any(s[d] != x.shape[d] for s in call.shapes)]
    if not differs:
        return [x]
    dim = differs[0]
    ends = np.cumsum([s[dim] for s in call.shapes])
    return [lb.take(call.ties, x, dim, np.arange(e - s[dim], e)) for e, s in zip(ends, call.shapes, strict=True)]


@couples("unbind")
def unbind(call: Call, x: Value, dim: int = 0, *_: Any) -> list[Value]:
    one = lb.drop(call.ties, x, axis(dim, x.ndim), f"{call.where} picks its units one by one")
    return [replace(one) for _ in call.shapes]


@couples("cat", "concat", "concatenate")
def cat(call: Call, values: Sequence[Value], dim: int = 0, *_: Any) -> Value:
    values = [v for v in values if v.shape != (0,)]  # an old habit of torch: empty vectors vanish
    return lb.concat(call.ties, values, axis(dim, len(call.shape)), call.shape)


@couples("stack")
def stack(call: Call, values: Sequence[Value], dim: int = 0, *_: Any) -> Value:
    dim = axis(dim, len(call.shape))
    return lb.concat(call.ties, [lb.insert(v, dim) for v in values], dim, call.shape)


@couples("expand", "expand_as", "broadcast_to")
def expand(call: Call, x: Value, *_: Any) -> Value:
    return lb.elementwise(call.ties, [x], call.shape)


@couples("repeat", "tile", "repeat_interleave")
def repeat(call: Call, x: Value, times: Any, dim: Any = None, *_: Any) -> Value | list[Value]:
    if call.op == "repeat_interleave":
        if not isinstance(times, int) or not isinstance(dim, int):
            return unknown(call, [x])
        dim = axis(dim, x.ndim)
        return lb.take(call.ties, x, dim, np.repeat(np.arange(x.shape[dim]), times))
    for _new in range(len(call.shape) - x.ndim):
        x = lb.insert(x, 0)
    for d, size in enumerate(call.shape):
        if size != x.shape[d]:
            x = lb.take(call.ties, x, d, np.tile(np.arange(x.shape[d]), size // x.shape[d]))
    return x


@couples("pixel_shuffle")
def pixel_shuffle(call: Call, x: Value, r: int, *_: Any) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = lb.reshape(call.ties, x, (*lead, c // r**2, r, r, h, w))
    x = lb.permute(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return lb.reshape(call.ties, x, call.shape)


@couples("pixel_unshuffle")
def pixel_unshuffle(call: Call, x: Value, r: int, *_: Any) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    x = lb.reshape(call.ties, x, (*lead, c, h // r, r, w // r, r))
    x = lb.permute(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return lb.reshape(call.ties, x, call.shape)


@couples("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: Call, x: Value, groups: int, *_: Any) -> Value:
    c = x.shape[1]
    order = np.arange(c).reshape(groups, c // groups).T.ravel()
    lb.single(call.ties, x, 1)
    atoms = x.labels.get((1,))
    if (
        atoms is not None
    ):  # after a removal the shuffle deals out whatever is there: the same places must stay in each group
        inside = atoms.reshape(groups, -1)
        call.ties.tie(np.broadcast_to(inside[:1], inside.shape), inside)
    return lb.take(call.ties, x, 1, order)


# ---------------------------------------------------------------- resizing modules


@resizes(nn.Linear)
def _linear(m: nn.Linear) -> None:
    m.out_features, m.in_features = m.weight.shape


@resizes(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(m: nn.Conv2d) -> None:
    if m.groups > 1 and m.groups == m.in_channels:
        m.groups = m.weight.shape[0] // (m.out_channels // m.in_channels)
    m.out_channels, m.in_channels = m.weight.shape[0], m.weight.shape[1] * m.groups


@resizes(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _conv_transpose(m: nn.ConvTranspose2d) -> None:
    if m.groups > 1 and m.groups == m.in_channels:
        m.groups = m.weight.shape[0]
    m.in_channels, m.out_channels = m.weight.shape[0], m.weight.shape[1] * m.groups


@resizes(
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
def _norm(m: nn.BatchNorm2d) -> None:
    size = next((t.shape[0] for t in (m.weight, m.running_mean) if t is not None), m.num_features)
    m.num_features = size


@resizes(nn.GroupNorm)
def _group_norm(m: nn.GroupNorm) -> None:
    if m.weight is not None:
        if m.num_groups == m.num_channels:
            m.num_groups = m.weight.shape[0]
        m.num_channels = m.weight.shape[0]


@resizes(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(m: nn.LayerNorm) -> None:
    if m.weight is not None:
        m.normalized_shape = tuple(m.weight.shape)


@resizes(nn.Embedding, nn.EmbeddingBag)
def _embedding(m: nn.Embedding) -> None:
    m.num_embeddings, m.embedding_dim = m.weight.shape


@resizes(nn.PReLU)
def _prelu(m: nn.PReLU) -> None:
    m.num_parameters = m.weight.shape[0]
