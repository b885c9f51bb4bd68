"""Rules for convolutions: plain, transposed, grouped, depthwise."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ellzero.graph import values
from ellzero.graph.axes import Numbers, Role
from ellzero.graph.rules.call import Call, couples
from ellzero.graph.values import Value


@couples("conv1d", "conv2d", "conv3d", "convolution", sized=True)
def convolution(call: Call, x: Value, weight: Value, bias: Value | None = None, *rest: Any) -> Value:
    groups = next((r for r in reversed(rest) if isinstance(r, int) and not isinstance(r, bool)), 1)
    return _convolve(call, x, weight, bias, groups, any(r is True for r in rest))


@couples("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", sized=True)
def transposed_convolution(call: Call, x: Value, weight: Value, bias: Value | None = None, *rest: Any) -> Value:
    groups = next((r for r in rest if isinstance(r, int)), 1)  # stride, padding, output_padding are lists
    return _convolve(call, x, weight, bias, groups, True)


def _convolve(call: Call, x: Value, weight: Value, bias: Value | None, groups: int, transposed: bool) -> Value:
    ties, spatial = call.ties, weight.ndim - 2
    channel = x.ndim - spatial - 1
    into, out = (0, 1) if transposed else (1, 0)
    what = values.single(ties, x, channel)
    values.freeze(ties, x, f"{call.where} convolves along it", range(channel + 1, x.ndim))
    if weight.source is not None:  # places in a kernel are no units
        ties.ignored.extend(atoms for dims, atoms in weight.carried.items() if min(dims) > 1)
    n_in, n_out = x.shape[channel], call.shape[channel]
    if groups == 1:
        call.reader(weight, values.solid(ties, weight, into), what, x)
        writes = values.solid(ties, weight, out)
        call.writer(weight, writes)
    elif groups == n_in:
        # Depthwise: row c (rows c·m … for a multiplier m) has channel c alone. The kernel lies *on* the axis.
        writes = _depthwise(call, weight, what, n_in, n_out, transposed, x)
    else:
        writes = _grouped(call, x, weight, what, groups, n_in, n_out, transposed)
    examples, along = values.extent(x, range(channel))
    call.multiplies(prod((x.shape if transposed else call.shape)[channel + 1 :]) * examples, weight, along)
    carried = {g: a for g, a in x.carried.items() if max(g) < channel} | {(channel,): writes}
    result = Value(call.shape, carried, "a dimension of space")
    if bias is None:
        return result
    return values.elementwise(ties, [result, replace(bias, shape=(*bias.shape, *[1] * spatial))], call.shape)


def _depthwise(
    call: Call, weight: Value, what: Numbers | None, n_in: int, n_out: int, transposed: bool, x: Value
) -> Numbers:
    ties = call.ties
    own = values.solid(ties, weight, 0)
    if transposed and n_out != n_in:  # weight (in, multiplier): the outputs of one input are its multiplier columns
        own = np.repeat(own, n_out // n_in)
    if weight.source is not None and (1,) in weight.carried:
        ties.ignored.append(weight.carried[(1,)])
    if what is None:
        ties.freeze(own, f"it reads {x.why}")
    else:
        ties.tie(own, np.repeat(what, n_out // n_in))
    call.writer(weight, own, "rides")
    return own


def _grouped(
    call: Call, x: Value, weight: Value, what: Numbers | None, groups: int, n_in: int, n_out: int, transposed: bool
) -> Numbers:
    """A weight's column j reads channel j *of its row's group*: the site is an index map over (row, column)."""
    ties = call.ties
    stored = [weight.carried.get((d,), np.array([])) for d in (0, 1)]  # a table lies on the dimensions as they are
    name = weight.source
    if name is None or not all(np.array_equal(a, ties.atoms(name, d)) for d, a in enumerate(stored)):
        values.freeze(ties, weight, f"{call.where} has groups and a weight that is computed, or laid out anew")
        weight = replace(weight, source=None)
    if what is None:
        what = ties.fresh(n_in)
        ties.freeze(what, f"it reads {x.why}")
    inside = what.reshape(groups, n_in // groups)
    if transposed:  # weight (in, out / groups): rows read, and which output a column writes depends on the row
        rows = values.solid(ties, weight, 0)
        call.reader(weight, rows, what, x)
        writes = ties.fresh(n_out)
        table = np.repeat(writes.reshape(groups, -1), n_in // groups, axis=0)
        role: Role = "writes"
    else:
        rows = writes = values.solid(ties, weight, 0)
        call.writer(weight, writes)
        table = np.repeat(inside, n_out // groups, axis=0)
        role = "reads"
    if weight.source is not None:
        ties.ignored.append(ties.atoms(weight.source, 1))
        ties.table(weight.source, (0, 1), table, role)
        call.reads += (weight.source,)
    ties.balances += [inside, writes.reshape(groups, -1)]
    return writes
