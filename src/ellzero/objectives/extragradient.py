"""Extra-gradient: every step is taken with the gradient at a look-ahead.

This file knows optimizers and tensors, and of a constraint only how its multipliers move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ellzero.objectives.constraint import Constraint


def extra_gradient_step(
    constraint: Constraint, optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]
) -> Tensor:
    """One extra-gradient step of weights, gates and multipliers (Korpelevich, 1976; Gallego-Posada et al., sec. 3.3).

    With ω = (θ, φ, λ) and F the gradients of the Lagrangian (descent in θ and φ, ascent in λ): ω' = ω − η·F(ω), then
    ω ← ω − η·F(ω'). It replaces `backward()`, `optimizer.step()` and `ascend()`, at two gradients and a copy of the
    parameters per step. Any optimizer whose `step()` needs no closure will do: the look-ahead is a full step of it,
    undone before the second. What the optimizer remembers (momentum, Adam's moments and step count) is undone too, and
    so takes in the second gradient alone, once per step; ExtraAdam of Gidel et al. takes in both. The same holds for
    the dual optimizer; Korpelevich's own is `GradientAscent(restarts=False)`.

    Args:
        constraint: the constraint in the Lagrangian.
        optimizer: the optimizer of weights and gates.
        closure: evaluates the Lagrangian, loss + constraint(gated); clearing gradients and `backward()` are done here.
            It is called twice: gates draw new noise and batch-norm statistics move each time.

    Returns:
        The Lagrangian at the starting point, detached.

    Raises:
        RuntimeError: if the closure does not call the constraint in training mode. Parameters, the optimizer's state
            and the multipliers are as before then, and after any error of the closure.

    Example:
        >>> import torch, ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(3, 4)
        >>> gated = l0.attach(model, (x,))
        >>> budget = l0.Constraint(l0.params, at_most=0.5)
        >>> adam = torch.optim.Adam(gated.parameters())
        >>> value = l0.objectives.extra_gradient_step(budget, adam, lambda: gated(x).square().mean() + budget(gated))
        >>> int(adam.state[next(gated.parameters())]["step"])
        1
    """

    def gradient() -> Tensor:
        optimizer.zero_grad()
        lagrangian = closure()
        lagrangian.backward()
        return lagrangian.detach()

    value = gradient()
    with looking_ahead(optimizer, constraint.duals()):
        optimizer.step()
        constraint.climb()
        gradient()
    constraint.ascend()
    optimizer.step()
    return value


@contextmanager
def looking_ahead(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
    """Undoes, at its end, what is done to parameters, to what their optimizer remembers and to `tensors`.

    Gradients stay. All is undone in place, so that a captured step goes on with the same tensors.

    Args:
        optimizer: of the parameters.
        tensors: what else is undone.
    """
    moved = [*tensors, *(p.detach() for group in optimizer.param_groups for p in group["params"])]
    before = [t.clone() for t in moved]
    known = {
        p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for p, s in optimizer.state.items()
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(moved, before, strict=True):
                tensor.copy_(value)
            for parameter, state in list(optimizer.state.items()):
                if parameter not in known:  # it began to remember here
                    del optimizer.state[parameter]
                    continue
                for key, value in known[parameter].items():
                    own = state[key]
                    if isinstance(value, Tensor) and isinstance(own, Tensor):
                        own.copy_(value)
                    else:
                        state[key] = value
