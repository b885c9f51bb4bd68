"""Learn sparse neural networks: gates on any `nn.Module`, trained under an L0 penalty or a constraint, and a smaller
plain network out of it.

What most loops need is here. The rest is in its room: `l0.gates`, `l0.graph`, `l0.duals`, `l0.distributions`.
"""

from typing import TYPE_CHECKING

from ellzero import gates, graph, renamed
from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement, per_layer, shrinkable, weights
from ellzero.gates import distributions
from ellzero.gates.abstract import AbstractGate
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.objectives import duals
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.costs import Cost, dense, l0_norm, l2_norm, macs, params, units
from ellzero.objectives.duals import AbstractDual
from ellzero.objectives.penalty import Penalty
from ellzero.out.budget import Budget
from ellzero.out.compaction import compact, fold
from ellzero.out.finalization import finalize
from ellzero.out.reporting import report
from ellzero.out.saving import load, save
from ellzero.out.settling import recalibrate

__version__ = "0.1.0"
__all__ = [
    "AbstractDual",
    "AbstractGate",
    "Budget",
    "Constraint",
    "Cost",
    "Gated",
    "HardConcreteGate",
    "Penalty",
    "Placement",
    "attach",
    "compact",
    "dense",
    "distributions",
    "duals",
    "finalize",
    "fold",
    "gates",
    "graph",
    "l0_norm",
    "l2_norm",
    "load",
    "macs",
    "params",
    "per_layer",
    "recalibrate",
    "report",
    "save",
    "shrinkable",
    "units",
    "weights",
]
if not TYPE_CHECKING:  # to a type checker `__getattr__` would mean that every name is there
    __getattr__ = renamed.attribute
renamed.watch_imports()
