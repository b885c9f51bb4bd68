"""What a network costs, and what is added to the loss for it: a penalty, or a constraint with multipliers."""

from ellzero.objectives.constraint import Constraint
from ellzero.objectives.duals import (
    AbstractDual,
    AbstractWarmup,
    ExponentiatedAscent,
    ExtrapolationFromPast,
    GeometricWarmup,
    GradientAscent,
    LinearWarmup,
    NuPI,
    SelfPacedAscent,
)
from ellzero.objectives.extragradient import extra_gradient_step
from ellzero.objectives.penalty import Penalty

__all__ = [
    "AbstractDual",
    "AbstractWarmup",
    "Constraint",
    "ExponentiatedAscent",
    "ExtrapolationFromPast",
    "GeometricWarmup",
    "GradientAscent",
    "LinearWarmup",
    "NuPI",
    "Penalty",
    "SelfPacedAscent",
    "extra_gradient_step",
]
