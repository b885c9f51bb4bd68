"""The rule for attention that is one operation: it speaks as the products and the softmax that it is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ellzero.graph import values
from ellzero.graph.axes import Graph
from ellzero.graph.rules.call import Call, couples
from ellzero.graph.rules.products import matmul
from ellzero.graph.values import Value


@couples("scaled_dot_product_attention")
def attention(
    call: Call,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Value:
    """Each head by itself: what lies on the heads is carried on, the dimensions of one head are one unit."""
    call.numbers = (dropout, is_causal, scale)  # whether heads are in groups shows in how many there are
    if grouped:  # each head of keys and values serves several of queries, one after the other; a lone one serves all
        times = {x.shape[-3]: q.shape[-3] // x.shape[-3] for x in (k, v) if x.shape[-3] > 1}
        k, v = (
            values.take(x, x.ndim - 3, np.repeat(np.arange(n), times.get(n, 1))) for x in (k, v) for n in (x.shape[-3],)
        )
    turned = values.permute(k, [*range(k.ndim - 2), k.ndim - 1, k.ndim - 2])
    product = replace(call, shapes=[(*call.shape[:-1], k.shape[-2])])
    scores = matmul(product, q, turned)
    call.reads += product.reads
    assert isinstance(scores, Value)
    if mask is not None:
        scores = values.elementwise(call.ties, [scores, mask], product.shape)
    weights = replace(scores, carried=values.without(call.ties, scores, [scores.ndim - 1], call.mixes()))
    if call.evaluates and dropout:
        values.freeze(call.ties, weights, f"{call.where} draws a number for each of its units, in evaluation too")
    out = matmul(call, weights, v)
    assert isinstance(out, Value)
    return replace(out, why=f"the output of {call.where}")


def attended(graph: Graph) -> set[int]:
    """The units that torch's own attention gives out, such as heads: without any it ends the process on a GPU."""
    made = [layout for step in graph.steps if step.op == "scaled_dot_product_attention" for _, layout in step.made]
    return {unit for layout in made for units in layout.values() for unit in units.ravel().tolist() if unit >= 0}
