"""What each operation does to the units that lie along its arguments: one file per kind of operation."""

from ellzero.graph.rules import (  # noqa: F401 (they register)
    attention,
    convolutions,
    entrywise,
    mixing,
    norms,
    products,
    routing,
    shapes,
)
