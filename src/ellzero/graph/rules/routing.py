"""Rules for routers: which experts a token goes to is told by numbers, and numbers follow the experts that are there.

An expert is closed by its share (`trials/routing.py`): its logit is lower than all others then, a softmax makes zero of
it, and it is picked last. So it can go, as long as there are as many left as are picked.
"""

from __future__ import annotations

from typing import Any

from ellzero.graph import values
from ellzero.graph.axes import Numbers
from ellzero.graph.rules.call import Call, axis, couples
from ellzero.graph.rules.mixing import along_one
from ellzero.graph.values import Value


@couples("with_shares")
def with_shares(call: Call, logits: Value, share: Value) -> Value:
    """Adds the logarithm of the share that each expert along the last dimension may have, which is its gate."""
    out = values.elementwise(call.ties, [logits, share], call.shape)
    values.freeze(call.ties, out, f"{call.where} is told of experts alone", range(out.ndim - 1))
    return out


@couples("softmax", "_softmax")
def softmax(call: Call, x: Value, dim: int, *_: Any) -> Value | list[Value]:
    """Over all experts: those that are closed have no part in it."""
    if x.zero == "low" and _lowest(x, dim) is not None:
        return Value(call.shape, dict(x.carried), x.why)
    return along_one(call, x, dim)


@couples("topk")
def topk(call: Call, x: Value, k: int, dim: int = -1, largest: bool = True, *_: Any) -> Value | list[Value]:
    """The experts with the largest shares, by number."""
    atoms = _lowest(x, dim)
    if atoms is None or not largest:
        return along_one(call, x, dim)
    call.ties.least.append((atoms, k))
    carried = {g: a for g, a in x.carried.items() if axis(dim, x.ndim) not in g}
    made = [Value(shape, dict(carried), f"the output of {call.where}") for shape in call.shapes]
    made[1].numbers = atoms
    return made


def _lowest(x: Value, dim: int) -> Numbers | None:
    """The units along a dimension, if those that are closed have the lowest entries."""
    return x.carried.get((axis(dim, x.ndim),)) if x.zero in ("low", "share") else None
