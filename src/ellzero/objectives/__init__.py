"""What a network costs, and what is added to the loss for it: a penalty, or a constraint with multipliers."""

from ellzero.objectives.constraint import Constraint
from ellzero.objectives.duals import (
    AbstractDual,
    ExponentiatedAscent,
    ExtrapolationFromPast,
    GradientAscent,
    LinearWarmup,
    NuPI,
)
from ellzero.objectives.extragradient import extra_gradient_step
from ellzero.objectives.penalty import Penalty

__all__ = [
    "AbstractDual",
    "Constraint",
    "ExponentiatedAscent",
    "ExtrapolationFromPast",
    "GradientAscent",
    "LinearWarmup",
    "NuPI",
    "Penalty",
    "extra_gradient_step",
]
