"""What a training loop forgets, seen from a term of its loss.

A term sees its network in every step. So it can tell that the network never ran with its gates, that nothing moves
them, that weight decay does, or that the loss reaches layers which the example did not: mistakes that no error shows,
only a network that is useless or not smaller. This file knows no costs.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ellzero.gated.base.asking import sums
from ellzero.gated.module import Gated
from ellzero.gates.warning import warn

PATIENCE = 100  # calls: more than anyone accumulates gradients over
listen = cache(register_optimizer_step_post_hook)  # once each: who does not know the optimizer hears those of all
LOOKS = 20  # steps that move gates: tasks may take turns
# Networks in a loss, and in how many of these steps they are still looked at.
_NEW: weakref.WeakKeyDictionary[Gated, int] = weakref.WeakKeyDictionary()


@final
class Watch:
    """Counts the calls of one term in training, and warns once of what is missing beside them."""

    def __init__(self) -> None:
        self._calls = 0
        self._moves: tuple[int, ...] = ()  # of the gates at the first call

    def look(self, gated: Gated, ascends: int | None = None) -> None:
        """Takes note of one call in training; `ascends` is how often multipliers have been moved, if there are any."""
        if not gated.training or not torch.is_grad_enabled() or gated.fixed:
            return
        self._calls += 1
        if self._calls == 1:
            self._moves = moves(gated)
            _NEW.setdefault(gated, LOOKS)  # a penalty may be made anew in each step
            listen(_hear)
        elif self._calls == 2:
            if not gated.drawn:
                warn("the network has not run with its gates: call `gated(x)` in the loop, not the model itself")
            if not gated.followed and any(gate.acts_after_steps for _, gate in gated.named_gates()):
                warn("gates act after each step, and nobody calls them: `l0.objectives.follow(gated, optimizer)` does")
            if not gated.estimated and any(gate.needs_loss for _, gate in gated.named_gates()):
                warn("gates learn from the loss, and nobody tells it: call `l0.objectives.estimated_backward`")
        elif self._calls == PATIENCE:
            if moves(gated) == self._moves:
                warn("nothing has moved the gates: give the optimizer `gated.param_groups(…)`, not the model's own")
            if ascends == 0:
                warn("nothing has moved the multipliers: call `ascend()`, or a budget's `step()`, after each step")


def moves(gated: Gated) -> tuple[int, ...]:
    """Another number after whatever is written to the gates: torch does not count what a fused optimizer writes."""
    counted = sum(p._version for p in gated.gates.parameters())
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return (counted,)  # nobody can look at a number then
    try:
        return counted, *sums(gated.gates)
    except RuntimeError:  # nor under `torch.func.vmap`, or where tensors are fake
        return (counted,)


def _hear(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warns, in the first steps that move gates, of weight decay on them that nobody asked for, and of layers that the
    loss reaches and the example did not.
    """
    for gated, left in [] if torch.compiler.is_compiling() else list(_NEW.items()):
        if not left or gated.fixed:  # mostly so: nothing here may take time in each step
            continue
        moved = {id(p) for p in gated.gates.parameters() if p.grad is not None}
        groups = [group for group in optimizer.param_groups if any(id(p) in moved for p in group["params"])]
        if not groups:
            continue
        if left == LOOKS and any(group.get("weight_decay") and group.get("name") != "gates" for group in groups):
            warn("weight decay pulls on the gates: give the optimizer `gated.param_groups(…)`, which keeps it off them")
        found = _beside(gated)
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            warn(
                f"the loss reaches `{found[0]}`{more}, and the example of `attach` did not: if it reads units that "
                "have gates, these do not act there; then give `attach` an example that goes this way too"
            )
        _NEW[gated] = 0 if found else left - 1


def _beside(gated: Gated) -> list[str]:
    """The parameters that learn though the example did not reach them, and that may read or lie on units with gates:
    one of their dimensions is as long as one that gates multiply.
    """
    if not gated.graph.unreached:
        return []
    members = dict(gated.model.named_parameters())
    sites = (site for placement in gated.placements for site in placement.multiplies if site.tensor in members)
    lengths = {members[site.tensor].shape[dim] for site in sites for dim in site.dims}
    others = ((name, members[name]) for name in gated.graph.unreached if name in members)
    return [name for name, p in others if lengths & {*p.shape} and p.grad is not None and bool(p.grad.any())]
