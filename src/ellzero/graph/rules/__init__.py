"""What each operation does to the units that lie along its arguments: one file per kind of operation."""

from ellzero.graph.rules import attention, convolutions, entrywise, mixing, products, shapes  # noqa: F401 (they register)
from ellzero.graph.rules.call import RULES, SIZED, Call, couples, tensors, unknown
from ellzero.graph.rules.closing import zero
from ellzero.graph.rules.mixing import REDUCTIONS
from ellzero.graph.rules.norms import mean_square, written_out

__all__ = [
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
