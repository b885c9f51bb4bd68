"""Shrinking while training: `propose` says which units could go for good, `carry_out` takes them out of a live run.

It is a removal plan, as in `compact`, of the network as it was in the beginning: costs, targets and noise never change
their meaning. This file does not know when to shrink, nor recipes, files or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ellzero.gated.counting import Vector
from ellzero.gated.module import Gated
from ellzero.gates.abstract import NoExpectation
from ellzero.graph.plan import Mask, Plan, make_plan


def propose(gated: Gated, closed: Mask, multiple: int = 1) -> Plan:
    """The plan that takes out every unit which these gates close, but for what rounding keeps.

    The width of every axis is rounded up to a multiple, as far as there are units; the most probable of the closed
    ones stay for that. So the last units of an axis always stay. Single inputs and outputs behind gates of their own
    (a `Select` or `Scatter` in `compact`) stay as well: they save next to nothing. A unit that is several entries
    everywhere, such as a head, counts as so many.
    """
    with torch.no_grad():
        opens = torch.as_tensor(~closed).to(gated.tables["ends"])
        extended = gated.liveness.extend(opens, gated.tables)
        kept = gated.liveness.units(extended, gated.tables).cpu().numpy() > 0.5
        gone = gated.liveness.closed_blocks(opens, gated.tables)
        probable = _probable(gated)
    for block in gone:  # one unit of each axis stays, as of others
        kept &= ~gated.graph.inside(block)
    present = there(gated)
    kept &= present
    for axis, start in zip(gated.axes, gated.graph.offsets, strict=False):
        here = np.arange(start, start + axis.size)
        rest = here[present[here] & ~kept[here]]
        entries = gcd(*(int((site.units >= 0).sum()) // axis.size for site in axis.sites))
        step = multiple // gcd(multiple, entries)
        wanted = max(1, -(-int(kept[here].sum()) // step)) * step - int(kept[here].sum())
        kept[rest[np.argsort(-probable[rest], kind="stable")[:wanted]]] = True
    return make_plan(gated.graph, kept, evidence=np.where(present, probable, -np.inf), refuse=False)


def _probable(gated: Gated) -> Vector:
    """P(alive) of every unit or, of gates without an expectation, the evidence for it."""
    try:
        return gated.alive()[0].double().cpu().numpy()
    except NoExpectation:
        return gated.liveness.weakest(gated.evidence())


def there(gated: Gated) -> Mask:
    """For every unit of the graph, whether the model still has it."""
    return np.ones(gated.graph.offsets[-1], dtype=bool) if gated.taken is None else gated.taken.units.copy()


def planned(gated: Gated, units: Mask) -> Plan:
    """The plan that leaves just these units, as `there` gave them."""
    return make_plan(gated.graph, units, refuse=False)


def widths(gated: Gated, plan: Plan) -> dict[str, int]:
    """How many units of every axis that gates decide about a plan leaves."""
    census = gated.census["units"]
    assert census is not None
    decided = np.isin(np.arange(gated.graph.offsets[-1]), census.units)
    spans = zip(gated.axes, gated.graph.offsets, strict=False)
    return {a.name: int(plan.units[s : s + a.size].sum()) for a, s in spans if decided[s : s + a.size].any()}


def event(gated: Gated, plan: Plan) -> dict[str, Any]:
    """What a plan would change, as plain data: widths, and the model's MACs as fractions of the dense network's."""
    census = gated.census["macs"]
    if census is None:
        raise ValueError("`gated` must have been traced for its MACs, and its axes were given by hand")
    whole = planned(gated, np.ones(len(plan.units), dtype=bool))
    now = whole if gated.taken is None else gated.taken
    dense, before, after = (float(census.kept(p).sum()) for p in (whole, now, plan))
    left = widths(gated, plan)
    removed = {name: width - left[name] for name, width in widths(gated, now).items()}
    return {"removed": removed, "widths": left, "macs": {"before": before / dense, "after": after / dense}}


@torch.no_grad()
def carry_out(
    network: nn.Module,
    gated: Gated,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    average: dict[str, Tensor],
    correction: float = 1.0,
) -> None:
    """Takes units out of a live run, in place; the rest of it is as it was. A plan that does not fit changes nothing.

    `network` is what the optimizer moves, `gated` in it; `average` an averaged copy of its parameters by their names,
    or empty. What Adam or SGD remembers of a parameter, and the average, are sliced as it is. Of a gate that goes the
    optimizer remembers nothing, and it is closed in the average as well, which is divided by `correction` where it is
    used.
    """
    old = dict(network.named_parameters())
    names = {id(p): name for name, p in gated.named_parameters()}
    inside = {name: names[id(p)] for name, p in old.items()}
    refuse_uncut(network, gated, optimizer)
    refuse_listeners(gated, plan, optimizer)
    step = gated.shrink(plan)
    gone = _gone(gated)
    new: Mapping[str, Any] = dict(network.named_parameters())
    states = {name: optimizer.state.pop(p) for name, p in old.items() if p in optimizer.state}
    replaced = {id(p): new[name] for name, p in old.items()}
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(p), p) for p in group["params"]]

    def follow(name: str, tensor: Tensor, key: str = "") -> Tensor:
        """What has an entry for each of a parameter's: sliced as that was, and laid out in memory as it is."""
        if new[name] is old[name]:
            return tensor
        sliced = _sliced(step, inside[name].removeprefix("model."), tensor, key, correction)
        return torch.empty_like(new[name], dtype=tensor.dtype).copy_(sliced)

    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape == old[name].shape:
                state[key] = follow(name, value, key)
                if inside[name] in gone:
                    state[key].masked_fill_(gone[inside[name]], 0)
        optimizer.state[new[name]] = state
    for name, value in average.items():
        average[name] = follow(name, value)
        if inside[name] in gone:
            average[name] = torch.where(gone[inside[name]], new[name] * correction, average[name])


def in_a_group() -> bool:
    """Of one process too: DDP holds on to the parameters there as well."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_uncut(network: nn.Module, gated: Gated, optimizer: torch.optim.Optimizer, then: str = "") -> None:
    """Refuses gates that cannot go one by one, and what an optimizer remembers in another shape than a parameter's;
    `then` says what to do.
    """
    for name, gate in gated.named_gates():
        for key, parameter in gate.named_parameters():
            if parameter.shape != gate.shape:
                raise ValueError(f"gates `{name}` share `{key}`, so that none of them can be closed alone")
    for name, p in network.named_parameters():
        for key, value in optimizer.state[p].items() if p in optimizer.state else ():
            if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:  # of Adafactor or L-BFGS, say
                kind = type(optimizer).__name__
                raise ValueError(
                    f"{kind} remembers `{key}` of `{name}` in a shape of its own, which cannot be cut{then}"
                )


def refuse_listeners(gated: Gated, plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses to replace parameters that somebody else holds: a hook would fall silent, a list would be of old ones."""
    step = plan.beyond(gated.taken)
    members = gated.model.named_parameters(remove_duplicate=False)
    own = {id(p): (name, p) for name, p in members if name in step.rows or name in step.columns}
    for name, p in own.values():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"a hook waits for the gradient of `{name}`, and would not hear of what takes its place")
    for key, value in vars(optimizer).items() if optimizer is not None else ():
        inside = [*tree_leaves(value), *(value if isinstance(value, Mapping) else ())]
        if key not in ("param_groups", "state") and any(id(leaf) in own for leaf in inside):
            raise ValueError(f"{type(optimizer).__name__} keeps parameters in `{key}`, beside its `param_groups`")
        others = [leaf.state for leaf in inside if isinstance(leaf, torch.optim.Optimizer)]
        if any(state[p] is not optimizer.state.get(p) for state in others for _, p in own.values() if p in state):  # type: ignore[union-attr]
            raise ValueError(f"{type(optimizer).__name__} has another optimizer in `{key}`, which would not follow")


def _sliced(step: Plan, name: str, tensor: Tensor, key: str, correction: float) -> Tensor:
    """What is left of what an optimizer remembers as `key` or, without one, of an average. Where a norm's weight is
    larger now, its slope is smaller by as much.
    """
    out = step.slice(name, tensor)
    norm = next((n for n in step.norms if n.weight == name), None)
    if norm is None:
        return out
    if key:
        return out / norm.scale ** (2 if "sq" in key else 1)
    return norm.scaled(out / correction) * correction if correction else out  # an average that begins now is zero


def _gone(gated: Gated) -> dict[str, Tensor]:
    """For each parameter of gates, by its name in `gated`, which entries belong to gates that nothing is left of."""
    gone = gated.by_placement(torch.as_tensor(gated.gone(), device=gated.tables["ends"].device))
    gates = zip(gated.gates, gated.named_gates(), strict=True)
    return {f"gates.{key}.{own}": gone[name] for key, (name, gate) in gates for own, _ in gate.named_parameters()}
