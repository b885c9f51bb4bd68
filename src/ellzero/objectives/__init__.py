"""What a network costs, and what is added to the loss for it: a penalty, or a constraint with multipliers."""

from ellzero.objectives.estimating import estimated_backward
from ellzero.objectives.extragradient import extra_gradient_step
from ellzero.objectives.following import after_step, follow

__all__ = ["after_step", "estimated_backward", "extra_gradient_step", "follow"]
