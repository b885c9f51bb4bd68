"""How an optimizer's step moves gates: by Adam, with the gradient of a term added to theirs.

This file knows optimizers and gradients; it does not know what the term is, nor when gates have learned enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ellzero.gated.module import Gated
from ellzero.gates.abstract import AbstractGate, NoExpectation
from ellzero.gates.warning import warn
from ellzero.objectives.following import after_step, refuse_overlap, unwrapped
from ellzero.objectives.watching import listen

LOOKS, MANY = 20, 32  # steps; gates that together have a gradient in so many: most draws of open ones have none

_WAITING: weakref.WeakKeyDictionary[Gated, tuple[Callable[[], bool], int]] = weakref.WeakKeyDictionary()


@final
class Driver:
    """Takes part in every step of an optimizer: before it and after it.

    Args:
        gated: the network.
        optimizer: of its weights and gates. It passes over the gates, which an Adam of their own moves: so a schedule,
            momentum and weight decay do not reach them.
        term: what is added to the loss, or `None` where gates do not learn any more.
        then: what follows a step.
        gate_lr: the rate of the gates where `Gated.param_groups` was not told another one.

    Raises:
        ValueError: the optimizer does not have all gates and weights.
    """

    def __init__(
        self,
        gated: Gated,
        optimizer: torch.optim.Optimizer,
        term: Callable[[], Tensor | None],
        then: Callable[[], None],
        gate_lr: float,
    ) -> None:
        optimizer = unwrapped(optimizer)
        inside = refuse_without(gated, optimizer)
        refuse_overlap(gated)
        self.optimizer, self._term, self._then, self._gated = optimizer, term, then, gated
        # All of them, whether they learn or not: a state must fit before gates have settled and after it.
        self._phi: Sequence[nn.Parameter] = list(gated.gates.parameters())
        own = inside.get(id(self._phi[0]), optimizer.defaults)
        alike = {key: own[key] for key in ("betas", "eps") if isinstance(optimizer, torch.optim.Adam)}
        self.adam = torch.optim.Adam(self._phi, lr=own.get("gate_lr", gate_lr), **alike)
        self._gradients: list[Tensor | None] = []
        self._felt, self._looks = dict[str, Tensor](), LOOKS
        self._skips = False
        before = optimizer.register_step_pre_hook(self._before)
        self._hooks = [before, optimizer.register_step_post_hook(self._after)]

    def stop(self) -> None:
        """Leaves the optimizer alone from here on."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._take_gradients()
            return None

        def followed() -> Any:  # trainers hand the whole backward over as a closure
            loss = closure()
            self._take_gradients()
            return loss

        return (args[0],), {"closure": followed}

    @torch.enable_grad()  # some call `step()` without
    def _take_gradients(self) -> None:
        """Adds the term's gradient to that of the gates, and keeps both from the optimizer."""
        self._gradients = []
        # A fused optimizer unscales in its own kernel, and leaves a step out there: a scaler tells it both.
        scale, infinite = (vars(self.optimizer).get(name) for name in ("grad_scale", "found_inf"))
        self._skips = infinite is not None and bool(infinite)
        if not self._skips and (term := self._term()) is not None:
            if all(p.grad is None for p in self._phi):
                told = "call `gated(x)` in the loop, not the model itself, and `zero_grad()` after no `backward()`"
                if any(gate.needs_loss for _, gate in self._gated.named_gates()):
                    told = "they learn from the loss: call `l0.objectives.estimated_backward` in the loop"
                raise RuntimeError(f"the gates have no gradient: {told}")
            if self._looks:
                self._look()
            found = [p.grad if scale is None or p.grad is None else p.grad / scale for p in self._phi]
            learned = [p for p in self._phi if p.requires_grad]  # some say only what is closed for good
            slopes = dict(zip(learned, torch.autograd.grad(term, learned, allow_unused=True), strict=True))
            extra = [slopes.get(p) for p in self._phi]
            self._gradients = [b if a is None else a if b is None else a + b for a, b in zip(found, extra, strict=True)]
        for p in self._phi:
            p.grad = None  # the optimizer passes over it

    def _look(self) -> None:
        """Takes note of which gates the loss has a gradient for, and warns after some steps of those without any.
        Families that see weights learn through them.
        """
        learning = {
            name: [p for p in gate.parameters() if p.requires_grad]
            for name, gate in self._gated.named_gates()
            if gate.shape.numel() >= MANY and not gate.sees_weights
        }
        self._looks -= 1
        for name, own in learning.items():
            for p in own:
                if p.grad is not None:
                    self._felt[name] = p.grad.any() | self._felt.get(name, False)
        if self._looks:
            return
        gates = dict(self._gated.named_gates())
        unfelt = (name for name, own in learning.items() if own and not self._felt.get(name, False))
        if deaf := [name for name in unfelt if not _silent(gates[name])]:
            which = f"`{'`, `'.join(deaf[:3])}`" + (f" and {len(deaf) - 3} more" if len(deaf) > 3 else "")
            warn(
                f"no gradient of the loss has reached the gates of {which} in {LOOKS} steps, so that their price alone "
                "moves them: take `torch.no_grad()` or `detach()` from that part of the model; where its weights are "
                "frozen, `requires_grad_(False)` is enough"
            )

    def _after(self, _: torch.optim.Optimizer, __: Any, ___: Any) -> None:
        if self._gradients:
            for p, gradient in zip(self._phi, self._gradients, strict=True):
                p.grad = gradient
            self.adam.step()
            after_step(self._gated, self.optimizer)
            self.adam.zero_grad()  # used: a loop may clear the gradients of the model alone
        if not self._skips:
            self._then()


@torch.no_grad()
def _silent(gate: AbstractGate) -> bool:
    """Whether so few draws are not 1 that it says nothing if none has a gradient: some 20 are between for one at 0."""
    try:
        return LOOKS * float((1 - gate.prob_open()).sum()) < 0.25
    except NoExpectation:
        return False


def refuse_without(gated: Gated, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Refuses an optimizer without all gates and weights: it would move something else. Gives the group of each.

    Raises:
        ValueError: naming what is missing.
    """
    inside = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in gated.named_parameters() if p.requires_grad and id(p) not in inside]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        hint = "; where several share them, use `budget.term()` and `budget.step()` in place of `drive`"
        if gated.taken is not None:
            hint = "; the network got smaller since: make it now, or drive it before that"
        raise ValueError(
            "`optimizer` must have weights and gates, as in `torch.optim.AdamW(gated.param_groups(lr=1e-3))`, "
            f"got one without {', '.join(missing[:3])}{more}{hint}"
        )
    return inside


def rate_of(gated: Gated, optimizer: torch.optim.Optimizer | None, usual: float) -> float:
    """The rate at which an Adam moves the gates, which for it is about how far they go in a step; else the `usual` one.

    A schedule may have lowered it: then the one that it began with.
    """
    optimizer, own = optimizer and unwrapped(optimizer), {id(p) for p in gated.gates.parameters()}
    if not isinstance(optimizer, torch.optim.Adam):
        return usual
    groups = [group for group in optimizer.param_groups if any(id(p) in own for p in group["params"])]
    return usual if not groups else float(max(groups[0]["lr"], groups[0].get("initial_lr", 0.0)))


def remind(gated: Gated, waits: Callable[[], bool]) -> None:
    """Warns once where an optimizer moves a network whose budget still waits, as `waits` says, which must not hold
    it: else a loop without `drive` would hear of it at the end of all training. In its second step: torch takes one
    by itself where it loads the state of an optimizer that is new.
    """
    _WAITING[gated] = waits, 0
    listen(_hear)


def _hear(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for gated, (waits, heard) in [] if torch.compiler.is_compiling() else list(_WAITING.items()):  # mostly none
        if not waits():
            del _WAITING[gated]
        elif gated.fixed or any(p.grad is not None for p in gated.gates.parameters()):
            own = {id(p) for p in gated.parameters()}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                _WAITING[gated] = waits, heard + 1
                if not heard:
                    continue
                del _WAITING[gated]
                warn("nothing moves the budget: call `budget.drive(optimizer)` before the loop")
