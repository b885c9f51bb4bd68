"""Gates on a model: where they go, what is alive behind them, what it counts, and the module that runs with them."""

from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement, Where, per_layer, shrinkable, weights

__all__ = ["Gated", "Placement", "Where", "attach", "per_layer", "shrinkable", "weights"]
