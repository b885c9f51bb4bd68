"""What a network costs, and what is added to the loss for it: a penalty, or a constraint with multipliers."""

from ellzero.objectives.extragradient import extra_gradient_step

__all__ = ["extra_gradient_step"]
