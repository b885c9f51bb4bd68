"""`finalize`: closes units until the kept cost is within its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.objectives.costs import Cost, dense, floor, params
from ellzero.out.compaction import _check


def finalize(gated: Gated, at_most: float | Mapping[str, float], cost: Cost = params, *, fill: bool = False) -> None:
    """Closes units until the *kept* cost is within the target: control becomes a guarantee.

    Those go first that save most cost for the least evidence, a unit weighing more the fewer are left in its set, and
    never the last one of a set: the one with most evidence, of those that the sets before still lead to. The gates are
    changed in place; weights are not.

    Args:
        gated: the network.
        at_most: fraction of the dense cost in (0, 1], or fractions by pattern as in `Constraint`.
        cost: `params`, `macs`, `units` or `l0_norm`.
        fill: also open closed units, by little (`AbstractGate.open_`): one of each set that has none, as `revive` does,
            then those with most evidence for their cost first, while they fit, since a budget that is not used is error
            for nothing. This changes what the network computes; tune it afterwards.

    Raises:
        ValueError: the target lies below what the gates can reach; nothing is changed.
    """
    _check(gated)
    if not callable(cost):
        raise TypeError(f"`cost` must be a cost such as `l0.macs`, got {cost!r}")
    targets = dict(at_most) if isinstance(at_most, Mapping) else {None: at_most}
    for fraction in targets.values():
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"`at_most` is a fraction of the dense cost in (0, 1], got {fraction!r}")
    opens = gated.opens()
    with torch.no_grad():
        opens = _revived(gated, opens) if fill else opens
        last = _one_of_each(gated, opens, gated.evidence())
        for only, fraction in targets.items():
            opens = _closed_until(gated, opens, last, cost, only, fraction)
        if fill:
            opens = _filled(gated, opens, cost, targets)
    _put(gated, opens)


def revive(gated: Gated) -> None:
    """Opens, by little, one unit of every set that is closed as a whole: the one with most evidence.

    A layer that is closed as a whole can still open while its gates are noisy; where they are fixed it is lost.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> for _, gate in gated.named_gates():
        ...     gate.close_(torch.tensor([True, True, True]))
        >>> revive(gated)
        >>> int(gated.opens().sum())
        1
    """
    _check(gated)
    with torch.no_grad():
        _put(gated, _revived(gated, gated.opens()))


def _put(gated: Gated, opens: Tensor) -> None:
    start = 0
    for _, gate in gated.named_gates():
        mine = opens[start : start + gate.shape.numel()].reshape(gate.shape)
        gate.close_(gate.open() & ~mine)
        gate.open_(~gate.open() & mine)
        start += gate.shape.numel()


def _revived(gated: Gated, opens: Tensor) -> Tensor:
    """With one more open in each set of which none is open that matters beside the sets before."""
    opens, start, evidence = opens.clone(), 0, gated.evidence()
    there = ~torch.as_tensor(gated.gone(), device=opens.device)
    for _, gate in gated.named_gates():
        mine = slice(start, start := start + gate.shape.numel())
        ahead = opens.clone()
        ahead[start:] = True  # whatever comes after it
        matter = there[mine] & (_savings(gated, ahead, params, None)[mine] > 0)
        among = matter if bool(matter.any()) else there[mine]
        if bool(among.any()) and not bool((opens[mine] & among).any()):
            opens[mine][torch.where(among, evidence[mine], -torch.inf).argmax()] = True
    return opens


def refuse_unreachable(gated: Gated, at_most: float | Mapping[str, float], cost: Cost = params) -> None:
    """Says no, before any training, to a target that `finalize` could not reach after it: one below what is kept with
    one unit in each set of gates.

    Args:
        gated: the network; it is left as it is, and what its gates say now does not matter.
        at_most: as in `finalize`.
        cost: as in `finalize`.

    Raises:
        ValueError: naming the least fraction that `at_most` can be.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> refuse_unreachable(gated, 10 / 23)  # of 15 + 8 parameters, 5 + 4 are left with one unit
        >>> refuse_unreachable(gated, 8 / 23)
        Traceback (most recent call last):
        ValueError: `at_most` must be at least 0.3913 of the dense cost, what is left with ...
    """
    everything = torch.ones_like(gated.opens(), dtype=torch.bool)
    for only, fraction in (at_most if isinstance(at_most, Mapping) else {None: at_most}).items():
        cheapest = _one_of_each(gated, everything, -_savings(gated, everything, cost, only))
        least = _kept(gated, cheapest, cost, only) / dense(cost, gated, only)
        if fraction < least * (1 - 1e-6):  # room for rounding
            raise _unreachable(gated, cost, only, least, fraction)


def _one_of_each(gated: Gated, opens: Tensor, worth: Tensor) -> Tensor:
    """One open gate of each set that has any, the worthiest of those that matter beside the sets before: where gates
    act within others, as those of single inputs within a map's, the two that are left belong together.
    """
    left, start = opens.clone(), 0
    for _, gate in gated.named_gates():
        mine = slice(start, start := start + gate.shape.numel())
        matter = left[mine] & (_savings(gated, left, params, None)[mine] > 0)
        among = matter if bool(matter.any()) else left[mine]
        best = torch.where(among, worth[mine], -torch.inf).argmax()
        left[mine] &= torch.arange(len(among), device=left.device) == best
    return left


def _unreachable(gated: Gated, cost: Cost, only: str | None, least: float, fraction: float) -> ValueError:
    where = "" if only is None else f" for {only!r}"
    _, layers = floor(cost, gated, only, kept=True)
    return ValueError(
        f"`at_most`{where} must be at least {least:.4g} of the dense cost, what is left with all but the last units "
        f"closed, got {fraction:g}" + (f"; it is in {', '.join(layers[:5])}" if layers else "")
    )


def _kept(gated: Gated, opens: Tensor, cost: Cost, only: str | None) -> float:
    with gated.assuming(opens):
        return float(cost(gated, kept=True, only=only) if only is not None else cost(gated, kept=True))


def _closed_until(gated: Gated, opens: Tensor, last: Tensor, cost: Cost, only: str | None, fraction: float) -> Tensor:
    target = fraction * dense(cost, gated, only)
    current = _kept(gated, opens, cost, only)
    evidence = gated.evidence().clamp(min=torch.finfo(torch.float32).tiny)
    sizes = torch.tensor([g.shape.numel() for _, g in gated.named_gates()], device=opens.device)
    member = torch.repeat_interleave(torch.arange(len(sizes), device=opens.device), sizes)
    before, opens = opens, opens.clone()
    while current > target:
        saving = _savings(gated, opens, cost, only)
        counts = torch.bincount(member[opens], minlength=len(sizes))
        may = opens & (saving > 0) & ~last
        if not bool(may.any()):
            raise _unreachable(gated, cost, only, fraction * current / target, fraction)
        fits = may & (saving <= current - target)  # near the end, smaller units instead of one that overshoots
        may = fits if bool(fits.any()) else may & (saving <= saving[may].min())
        score = _scores(torch.where(may, evidence / saving.clamp(min=1e-30), torch.inf), member, sizes, counts)
        order = torch.argsort(score, stable=True)[: int(may.sum())]
        # Half of the way at once, then savings are worked out anew; in the end one by one, so that nothing is closed
        # for nothing.
        many = max(1, int((torch.cumsum(saving[order], 0) <= 0.5 * (current - target)).sum()))
        opens[order[:many]] = False
        current = _kept(gated, opens, cost, only)
    return _refilled(gated, closed=before & ~opens, opens=opens, cost=cost, only=only, target=target)


def _filled(gated: Gated, opens: Tensor, cost: Cost, targets: Mapping[Any, float]) -> Tensor:
    """Opens what fits into every target, as far as the target counts it."""
    for only, fraction in targets.items():
        target = fraction * dense(cost, gated, only)
        before = opens.clone()
        # Nothing that costs nothing: an input of a map that is closed would be open on paper alone.
        closed = ~opens & (_savings(gated, opens, cost, only) > 0)
        closed &= ~torch.as_tensor(gated.gone(), device=opens.device)  # nothing is left there to open
        opens = _refilled(gated, closed=closed, opens=opens.clone(), cost=cost, only=only, target=target)
        others = [(o, f) for o, f in targets.items() if o != only]
        if any(
            _kept(gated, opens, cost, o) > max(f * dense(cost, gated, o), _kept(gated, before, cost, o))
            for o, f in others
        ):
            opens = before  # targets that overlap: this one stays unfilled rather than break another
    return opens


def _scores(single: Tensor, member: Tensor, sizes: Tensor, counts: Tensor) -> Tensor:
    """Evidence for its cost of every unit, more the fewer are left beside it when its turn comes, as the first step of
    log(n): no set is used up before the others, also when many units are closed at once.
    """
    scores = single.clone()
    for number, (size, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
        mine = torch.nonzero(member == number).flatten()
        turn = torch.argsort(torch.argsort(single[mine], stable=True), stable=True)
        scores[mine] = single[mine] * size / (count - turn).clamp(min=1)
    return scores


def _refilled(gated: Gated, *, closed: Tensor, opens: Tensor, cost: Cost, only: str | None, target: float) -> Tensor:
    """Opens again what still fits: the last unit to be closed may have been a large one, and a budget that is not
    used is error for nothing.
    """
    evidence = gated.evidence()
    candidates = closed.clone()
    current = _kept(gated, opens, cost, only)
    while bool(closed.any()):
        price = _savings(gated, opens, cost, only)
        closed &= price <= target - current
        if not bool(closed.any()):
            break
        best = int(torch.where(closed, evidence / price.clamp(min=1e-30), -torch.inf).argmax())
        closed[best] = False
        opens[best] = True
        now = _kept(gated, opens, cost, only)
        if now > target:  # what comes back may cost more than its gradient says: padded groups, a layer that returns
            opens[best] = False
        else:
            current = now
    # A closed unit that fills up a group of a convolution is there anyway, and costs less than its gradient says.
    more = bool(gated.graph.balances)
    while more:
        more = False
        for k in torch.argsort(evidence, descending=True).tolist():
            if candidates[k] and not opens[k]:
                opens[k] = True
                opens[k] = fits = _kept(gated, opens, cost, only) <= target
                more |= fits
    return opens


def _savings(gated: Gated, opens: Tensor, cost: Cost, only: str | None) -> Tensor:
    """What closing each gate alone saves: costs are linear in each gate, so the gradient at the present state is the
    difference.
    """
    with torch.enable_grad():
        p = opens.to(gated.tables["ends"].dtype).requires_grad_()
        with gated.assuming(p):
            value = cost(gated, only=only) if only is not None else cost(gated)
        (gradient,) = torch.autograd.grad(value, p)
    return gradient
