"""What each operation does to the units that lie along its arguments: one file per kind of operation."""

from ellzero.graph.rules import (  # noqa: F401 (they register)
    attention,
    convolutions,
    entrywise,
    mixing,
    products,
    routing,
    shapes,
)
from ellzero.graph.rules.call import RULES, SIZED, Call, couples, tensors, unknown
from ellzero.graph.rules.closing import zero
from ellzero.graph.rules.mixing import REDUCTIONS
from ellzero.graph.rules.norms import mean_square, written_out
from ellzero.graph.rules.shapes import PICKS

__all__ = [
    "PICKS",
    "REDUCTIONS",
    "RULES",
    "SIZED",
    "Call",
    "couples",
    "mean_square",
    "tensors",
    "unknown",
    "written_out",
    "zero",
]
