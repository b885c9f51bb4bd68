"""Learn sparse neural networks: gates on any `nn.Module`, trained under an L0 penalty or a constraint, and a smaller
plain network out of it.
"""

from ellzero.axes import Axis, Graph, Site
from ellzero.compact import CompactionError, compact, finalize, fold
from ellzero.costs import breakdown, dense, floor, l0_norm, l2_norm, macs, params, units
from ellzero.distributions import BinaryConcrete, HardConcrete, Logistic, Rectified
from ellzero.gated import Gated, attach
from ellzero.gates import AbstractGate, HardConcreteGate, Median, NoExpectation, Noiseless, RectifiedGate
from ellzero.objectives import (
    Constraint,
    ExponentiatedAscent,
    ExtrapolationFromPast,
    GradientAscent,
    LinearWarmup,
    NuPI,
    Penalty,
    extra_gradient_step,
)
from ellzero.placements import Placement, per_layer, shrinkable, weights
from ellzero.removal import ClosedAxisError, Plan
from ellzero.report import Report, report
from ellzero.saving import load, save
from ellzero.trace import TraceError, trace

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
