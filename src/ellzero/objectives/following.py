"""What gates do after each step of an optimizer: proximal steps on weights, clamps on their own parameters.

Most families do nothing. For the others `follow` hangs `after_step` on an optimizer, so that a loop stays as it is; a
`Budget` that drives an optimizer does so too. This file knows optimizers; what a family does is its own business.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ellzero.gated.module import Gated
from ellzero.gates.abstract import AbstractGate


def follow(gated: Gated, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Lets the gates act after every step of an optimizer, as their family wants: once, before the loop.

    Args:
        gated: the network.
        optimizer: of its weights.

    Returns:
        A handle; its `remove()` ends it.

    Raises:
        ValueError: two sets of gates would act on one weight.

    Example:
        >>> import ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> gated = l0.attach(model, (torch.randn(1, 4),), gate=l0.gates.GroupLassoGate)
        >>> sgd = torch.optim.SGD(gated.param_groups(lr=0.1))
        >>> handle = follow(gated, sgd)
        >>> (gated(torch.randn(3, 4)).square().mean() + l0.complexity(gated)).backward()
        >>> sgd.step()  # weights take a step, then shrink towards zero, group by group
    """
    refuse_overlap(gated)
    gated.followed = True

    def hook(stepped: torch.optim.Optimizer, *_: Any) -> None:
        infinite = vars(stepped).get("found_inf")  # a fused optimizer leaves a step out in its own kernel
        if infinite is None or not bool(infinite):
            after_step(gated, stepped)

    return unwrapped(optimizer).register_step_post_hook(hook)


def after_step(gated: Gated, optimizer: torch.optim.Optimizer) -> None:
    """What `follow` does after each step, for loops that would rather call it: before gradients are cleared."""
    gated.followed = True
    acting = [gate for _, gate in gated.named_gates() if gate.acts_after_steps]
    if acting:
        members = dict(gated.model.named_parameters())
        groups = {id(p): group for group in unwrapped(optimizer).param_groups for p in group["params"]}
        for gate in acting:
            found = [groups.get(id(members[name])) for name in _tensors(gate)]
            gate.after_step(length(optimizer, [group for group in found if group is not None]))


def length(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> float | Tensor | None:
    """How far the weights of these groups go along a constant gradient in one step; `None` if that is not one number.

    With momentum μ it is lr/(1 − μ): so a proximal step of this length and the optimizer's own rest at one place.

    Raises:
        ValueError: the groups have different rates.
    """
    if not isinstance(unwrapped(optimizer), torch.optim.SGD) or not groups or any(g["maximize"] for g in groups):
        return None
    lengths = [g["lr"] * ((1 - g["dampening"]) / (1 - g["momentum"]) if g["momentum"] else 1.0) for g in groups]
    if any(float(other) != float(lengths[0]) for other in lengths[1:]):
        raise ValueError("`optimizer` must have one rate for the weights that one set of gates counts, got several")
    first: float | Tensor = lengths[0]
    return first


def refuse_overlap(gated: Gated) -> None:
    """Refuses gates that would act on weights on which others act: one step after the other is none of both."""
    acting = [gate for _, gate in gated.named_gates() if gate.acts_after_steps]
    twice = [name for name, n in Counter(name for gate in acting for name in _tensors(gate)).items() if n > 1]
    if twice:
        raise ValueError(f"`gated` must have one set of gates that acts on each weight, got several on `{twice[0]}`")


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that takes the step, of one that is wrapped, as Accelerate does it."""
    while isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _tensors(gate: AbstractGate) -> tuple[str, ...]:
    return gate.members.names() if gate.sees_weights else ()
