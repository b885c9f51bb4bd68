"""Rules for norms over all units of an axis: in one operation, or written out as a square, a mean and a root.

A root mean square lets units go that are zero: with k of D left, a weight that is √(D/k) times as large and an eps that
is D/k times as large give the same. So the eps must be a number that the module keeps, not one in its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ellzero.graph import values
from ellzero.graph.axes import EPS, Norm, Numbers
from ellzero.graph.rules.call import Call, axis, couples, tensors
from ellzero.graph.values import Value

_CASTS = ("to", "_to_copy", "type_as", "clone", "contiguous")


@couples("layer_norm")
def layer_norm(call: Call, x: Value, over: Sequence[int], weight: Value | None = None, *rest: Any) -> Value:
    atoms = x.carried.get((x.ndim - 1,))
    if len(over) > 1 or atoms is None or weight is None or weight.source is None:
        return _mixed(call, x, over, weight, *rest)
    call.looks_at(x, atoms)
    eps = next((a for a in rest if type(a) is float), 1e-5)  # torch's own, where none is given
    call.ties.norms.append(Norm(call.module, "eps", weight.source, atoms, centres=True, eps=eps))
    call.ties.freeze(atoms, f"{call.mixes()} and subtracts their mean, which `l0.centred` may do away with")
    return _mixed(call, x, over, weight, *rest)


def _mixed(call: Call, x: Value, over: Sequence[int], *rest: Any) -> Value:
    """Of units that lie on other dimensions too, as those of heads do, whole ones can go."""
    dims = range(x.ndim - len(over), x.ndim)
    values.narrow(call.ties, x, dims)
    out = values.elementwise(call.ties, [x, *tensors(rest)], call.shape)
    return replace(out, carried=values.without(call.ties, out, dims, call.mixes()), why=f"the output of {call.where}")


@couples("rms_norm", sized=True)
def rms_norm(
    call: Call, x: Value, over: Sequence[int], weight: Value | None = None, eps: float | None = None, *_: Any
) -> Value:
    source = None if weight is None else weight.source
    if len(over) > 1 or x.group(x.ndim - 1) != (x.ndim - 1,) or not _follows(call, x, source, eps):
        return _mixed(call, x, over, weight)
    return values.elementwise(call.ties, [x, *tensors([weight])], call.shape)


@couples("response_norm")
def response_norm(call: Call, x: Value, weight: Value, bias: Value, eps: float, dim: int) -> Value:
    """Of each channel over space, by the mean of those of all channels."""
    dim = axis(dim, x.ndim)
    out = values.elementwise(call.ties, [x, weight, bias], call.shape)
    atoms = out.carried.get((dim,))
    values.freeze(call.ties, out, call.mixes(), [d for d in range(1, x.ndim) if d != dim])
    if atoms is not None and weight.source is not None:
        call.looks_at(x, atoms)
        call.ties.norms.append(Norm(call.module, "eps", weight.source, atoms, power=1.0))
    else:
        values.freeze(call.ties, out, call.mixes())
    return out


@dataclass(frozen=True)
class WrittenOut:
    """A norm that is written out: the parameter that it multiplies by, what is added to that, and its eps."""

    weight: str
    offset: float
    eps: float


def mean_square(call: Call, norm: WrittenOut, x: Value, *_: Any) -> Value:
    """The mean of a norm that is written out, along the last dimension."""
    last = x.ndim - 1
    carried = {g: a for g, a in x.carried.items() if last not in g}
    if x.group(last) != (last,) or not _follows(call, x, norm.weight, norm.eps, norm.offset):
        carried = values.without(call.ties, x, [last], call.mixes())
    return Value(call.shape, carried, x.why)


def _follows(call: Call, x: Value, weight: str | None, eps: float | None, offset: float = 0.0) -> bool:
    """Notes a norm along the last dimension whose weight and eps can follow what is left of it; else says why not."""
    atoms: Numbers = x.carried[(x.ndim - 1,)]
    kept = [k for k, v in call.settings.items() if EPS.search(k) and v == eps and type(v) in (float, type(None))]
    if weight is None:
        call.ties.freeze(atoms, f"{call.mixes()} and has no weight of its own, which could follow what is left of them")
    elif len(kept) != 1:
        call.ties.freeze(
            atoms, f"{call.mixes()}, and its module keeps no `eps`, which could follow what is left of them"
        )
    else:
        call.looks_at(x, atoms)
        call.ties.norms.append(Norm(call.module, kept[0], weight, atoms, offset))
        return True
    return False


def written_out(graph: fx.Graph, names: Mapping[str, str]) -> dict[fx.Node, WrittenOut]:
    """The means in a graph that belong to a norm, x · rsqrt(mean(x²) + eps) · weight along the last dimension.

    Args:
        graph: of a forward.
        names: of the placeholders that are parameters.
    """
    found = {}
    for mean in graph.nodes:
        if _op(mean) == "mean" and (norm := _norm(mean, names)) is not None:
            found[mean] = norm
    return found


def _norm(mean: fx.Node, names: Mapping[str, str]) -> WrittenOut | None:
    square, *rest = mean.args
    x = _squared(square)
    if x is None or len(rest) < 2 or rest[1] is not True or not _last(rest[0], mean):
        return None
    total = _next(mean)
    if _op(total) != "add" or not isinstance(eps := _other(total, mean), float):
        return None
    root = _next(total)
    power = _op(root) == "pow" and root.args[1] == -0.5
    if _op(root) == "sqrt":
        scaled = _next(root)
        fits = _op(scaled) == "div" and _stripped(scaled.args[0]) is x
    else:
        scaled = _next(root) if power or _op(root) == "rsqrt" else None
        fits = _op(scaled) == "mul" and _stripped(_other(scaled, root)) is x
    out = _next(scaled) if fits else None
    if _op(out) != "mul":
        return None
    weight, offset = _stripped(_other(out, scaled)), 0.0
    if _op(weight) == "add" and len(numbers := [a for a in weight.args if isinstance(a, int | float)]) == 1:
        weight, offset = _stripped(_other(weight, numbers[0])), float(numbers[0])
    if not isinstance(weight, fx.Node) or weight.name not in names:
        return None
    return WrittenOut(names[weight.name], offset, eps)


def _op(node: Any) -> str:
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return node.target._schema.name.split("::")[-1]


def _next(node: Any) -> Any:
    """The one operation that uses a node, behind casts; None if there are several."""
    while node is not None:
        users = _users(node)
        node = users[0] if len(users) == 1 else None
        if _op(node) not in _CASTS:
            break
    return node


def _users(node: fx.Node) -> list[fx.Node]:
    """What uses a node, but for casts that changed nothing, so that nobody uses them."""
    return [user for user in node.users if user.users or _op(user) not in _CASTS]


def _other(node: Any, one: Any) -> Any:
    """The argument of two that is not this one."""
    rest = [a for a in node.args[:2] if a is not one and _stripped(a) is not one]
    return rest[0] if len(rest) == 1 and not node.kwargs else None


def _stripped(node: Any) -> Any:
    """What a node was before casts."""
    while _op(node) in _CASTS:
        node = node.args[0]
    return node


def _squared(node: Any) -> Any:
    """What a node is the square of, if it is one and nobody else looks at it."""
    node = _stripped(node)
    if not isinstance(node, fx.Node) or len(_users(node)) != 1:
        return None
    if _op(node) == "square" or (_op(node) == "pow" and node.args[1] == 2):
        return _stripped(node.args[0])
    if _op(node) == "mul" and node.args[0] is node.args[1]:
        return _stripped(node.args[0])
    return None


def _last(dims: Any, mean: fx.Node) -> bool:
    ndim = mean.meta["val"].ndim
    return isinstance(dims, list | tuple) and [axis(d, ndim) for d in dims] == [ndim - 1]
