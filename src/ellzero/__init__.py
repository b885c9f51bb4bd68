"""Learn sparse neural networks: gates on any `nn.Module`, trained under an L0 penalty or a constraint, and a smaller
plain network out of it.
"""

from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement, per_layer, shrinkable, weights
from ellzero.gates.abstract import AbstractGate, NoExpectation
from ellzero.gates.distributions import BinaryConcrete, HardConcrete, Logistic, Rectified
from ellzero.gates.hard_concrete import HardConcreteGate, Median, Noiseless
from ellzero.gates.rectified import RectifiedGate
from ellzero.graph.axes import Axis, Graph, Site
from ellzero.graph.plan import ClosedAxisError, Plan
from ellzero.graph.tracing import TraceError, trace
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.costs import breakdown, dense, floor, l0_norm, l2_norm, macs, params, units
from ellzero.objectives.duals import ExponentiatedAscent, ExtrapolationFromPast, GradientAscent, LinearWarmup, NuPI
from ellzero.objectives.extragradient import extra_gradient_step
from ellzero.objectives.penalty import Penalty
from ellzero.out.compaction import CompactionError, compact, fold
from ellzero.out.finalization import finalize
from ellzero.out.reporting import Report, report
from ellzero.out.saving import load, save

__version__ = "0.1.0"
__all__ = [
    "AbstractGate",
    "Axis",
    "BinaryConcrete",
    "ClosedAxisError",
    "CompactionError",
    "Constraint",
    "ExponentiatedAscent",
    "ExtrapolationFromPast",
    "Gated",
    "GradientAscent",
    "Graph",
    "HardConcrete",
    "HardConcreteGate",
    "LinearWarmup",
    "Logistic",
    "Median",
    "NoExpectation",
    "Noiseless",
    "NuPI",
    "Penalty",
    "Placement",
    "Plan",
    "Rectified",
    "RectifiedGate",
    "Report",
    "Site",
    "TraceError",
    "attach",
    "breakdown",
    "compact",
    "dense",
    "extra_gradient_step",
    "finalize",
    "floor",
    "fold",
    "l0_norm",
    "l2_norm",
    "load",
    "macs",
    "params",
    "per_layer",
    "report",
    "save",
    "shrinkable",
    "trace",
    "units",
    "weights",
]
