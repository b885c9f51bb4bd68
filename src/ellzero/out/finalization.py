"""Brings the kept cost within its target: `finalize` closes units, and `revive` opens one where none is left.

It decides which units to close or open, and asks the costs what that changes. It does not know how gates work, nor when
training ends.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.gates.warning import warn
from ellzero.graph.plan import even_out
from ellzero.objectives.costs import Cost, dense, floor, kept, l0_norm, name_of, only, params, savings, unwrapped
from ellzero.out.compaction import refuse_unfit
from ellzero.out.latency.cost import Latency
from ellzero.out.latency.widening import widened

MUCH = 0.2  # of the dense cost: what `finalize` may close without a word
STEP, WIDE = 8, 64  # uniform widths are multiples of this, in layers with at least so many units
Uniform = Literal["blocks"] | None


def finalize(
    gated: Gated,
    at_most: float | Mapping[str, float],
    cost: Cost = params,
    *,
    fill: bool = False,
    uniform: Uniform = None,
) -> None:
    """Closes units until the *kept* cost is within the target: control becomes a guarantee.

    Closes the units with the lowest evidence per cost saved first. A unit weighs more the fewer are left in its
    placement, and one always stays: the one with most evidence, of those that the placements before still lead to.
    What must keep as many units in each of its parts, as the groups of a convolution, loses one unit of each at once.
    Changes the gates in place, and no weights.

    Args:
        gated: the network.
        at_most: fraction of the dense cost in (0, 1], or fractions by pattern as in `Constraint`.
        cost: `params`, `macs`, `units` or `l0_norm`.
        fill: also open closed units, by little (`AbstractGate.open_`): one of each placement that has none, as `revive`
            does, then those with most evidence per cost, while they fit. A budget that is not used is error for
            nothing. This changes what the network computes; tune it afterwards.
        uniform: "blocks" to leave as many units open in all placements of one size whose names differ in numbers alone,
            such as the layers of a transformer: multiples of 8 of 64 or more. What that opens, opens by little too.

    Raises:
        ValueError: the target lies below what the gates can reach; nothing is changed.
    """
    if not callable(cost):
        raise TypeError(f"`cost` must be a cost such as `l0.macs`, got {cost!r}")
    refuse_unfit(gated)
    before = float(kept(cost)(gated))
    bring_within(gated, {cost: at_most}, fill=fill, uniform=uniform)
    closed = (before - float(kept(cost)(gated))) / dense(cost, gated)
    if closed > MUCH and gated.drawn and not gated.fixed:  # in a loop, and not by hand
        warn(
            f"`finalize` closed {100 * closed:.0f} % of the dense `{name_of(cost)}` at once, which training had kept: "
            "train longer or under a `Budget`, or tune the network from here on"
        )


def bring_within(
    gated: Gated, bounds: Mapping[Cost, float | Mapping[str, float]], *, fill: bool, uniform: Uniform = None
) -> None:
    """Closes units until every kept cost is within its target, as `finalize` does for one cost."""
    refuse_unfit(gated)
    _check_uniform(uniform)
    targets = [target for cost, at_most in bounds.items() for target in _targets(gated, at_most, cost)]
    for target in targets:
        fraction = target.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"`at_most` is a fraction of the dense cost in (0, 1], got {fraction!r}")
    opens = gated.opens()
    with torch.no_grad():
        opens = _revived(gated, opens) if fill else opens
        last = _one_of_each(gated, opens, gated.evidence())
        for target in targets:
            opens = _closed_until(target, opens, last)
        if fill:
            opens = _filled(targets, opens)
        if fill and any(isinstance(unwrapped(target.cost)[0], Latency) for target in targets):
            opens = widened(gated, opens, lambda more: all(t.kept(more) <= t.most for t in targets))
        if uniform:
            opens = _uniform(targets, opens, fill)
    _put(gated, opens)


def revive(gated: Gated) -> None:
    """Opens, by little, one unit of every placement that is closed as a whole: the one with most evidence.

    A layer that is closed as a whole can still open while its gates are noisy; where they are fixed it is lost.

    Example:
        >>> from torch import nn
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> for _, gate in gated.named_gates():
        ...     gate.close_(torch.tensor([True, True, True]))
        >>> revive(gated)
        >>> int(gated.opens().sum())
        1
    """
    refuse_unfit(gated)
    with torch.no_grad():
        _put(gated, _revived(gated, gated.opens()))


def refuse_unreachable(
    gated: Gated, at_most: float | Mapping[str, float], cost: Cost = params, *, uniform: Uniform = None
) -> None:
    """Refuses, before any training, a target that `finalize` could not reach: one below what is kept with one unit in
    each placement.

    Args:
        gated: the network; it is left as it is, and what its gates say now does not matter.
        at_most: as in `finalize`.
        cost: as in `finalize`.
        uniform: as in `finalize`; then what is kept with the least of such widths counts.

    Raises:
        ValueError: naming the least fraction that `at_most` can be.

    Example:
        >>> from torch import nn
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> refuse_unreachable(gated, 10 / 23)  # of 15 + 8 parameters, 5 + 4 are left with one unit
        >>> refuse_unreachable(gated, 8 / 23)
        Traceback (most recent call last):
        ValueError: `at_most` must be at least 0.3913 of the dense cost, what is left with ...
    """
    _check_uniform(uniform)
    everything = torch.ones_like(gated.opens(), dtype=torch.bool)
    for target in _targets(gated, at_most, cost):
        worth = -target.savings(everything)
        cheapest = _one_of_each(gated, everything, worth)
        if uniform:
            families = _families(gated)
            cheapest = _widths(families, [_step(family) for family in families], worth)
        least = target.kept(cheapest) / dense(target.counted, gated)
        if target.fraction < least * (1 - 1e-6):  # room for rounding
            raise target.unreachable(least)


@final
@dataclass(frozen=True)
class _Target:
    """The most that may be kept of a cost. Which gates are open is told by one flat vector over all placements."""

    gated: Gated
    cost: Cost
    fraction: float
    only: str | None = None  # pattern of what counts

    @property
    def counted(self) -> Cost:
        return only(self.cost, self.only)

    @property
    def most(self) -> float:
        return self.fraction * dense(self.counted, self.gated)

    def kept(self, opens: Tensor) -> float:
        """What is kept with these gates open."""
        with self.gated.assuming(opens):
            return float(kept(self.counted)(self.gated))

    def savings(self, opens: Tensor) -> Tensor:
        """What closing each gate alone saves."""
        return savings(self.counted, self.gated, opens)

    def unreachable(self, least: float) -> ValueError:
        where = "" if self.only is None else f" for {self.only!r}"
        _, layers = floor(kept(self.counted), self.gated)
        return ValueError(
            f"`at_most`{where} must be at least {least:.4g} of the dense cost, what is left with all but the last "
            f"units closed, got {self.fraction:g}" + (f"; it is in {', '.join(layers[:5])}" if layers else "")
        )


def _targets(gated: Gated, at_most: float | Mapping[str, float], cost: Cost) -> list[_Target]:
    if not isinstance(at_most, Mapping):
        return [_Target(gated, cost, at_most)]
    return [_Target(gated, cost, fraction, only) for only, fraction in at_most.items()]


def _put(gated: Gated, opens: Tensor) -> None:
    for mine, (_, gate) in zip(gated.slices(), gated.named_gates(), strict=True):
        wanted = opens[mine].reshape(gate.shape)
        gate.close_(gate.open() & ~wanted)
        gate.open_(~gate.open() & wanted)


def _check_uniform(uniform: object) -> None:
    if uniform not in (None, "blocks"):
        raise ValueError(f"`uniform` must be None or 'blocks', got {uniform!r}")


def _families(gated: Gated) -> list[list[slice]]:
    """Placements of one size whose names differ in numbers alone."""
    found: dict[tuple[str, torch.Size], list[slice]] = defaultdict(list)
    for mine, (name, gate) in zip(gated.slices(), gated.named_gates(), strict=True):
        found[re.sub(r"\d+", "#", name), gate.shape].append(mine)
    return list(found.values())


def _step(family: list[slice]) -> int:
    return STEP if family[0].stop - family[0].start >= WIDE else 1


def _widths(families: list[list[slice]], widths: list[int], worth: Tensor) -> Tensor:
    """In each placement of a family, the worthiest open: as many as its width."""
    opens = torch.zeros_like(worth, dtype=torch.bool)
    for family, width in zip(families, widths, strict=True):
        for mine in family:
            opens[mine][torch.argsort(worth[mine], descending=True, stable=True)[:width]] = True
    return opens


def _uniform(targets: list[_Target], opens: Tensor, fill: bool) -> Tensor:
    """As many open gates in all placements of a family: their mean, then a step less or more until targets are met."""
    gated = targets[0].gated
    there = ~torch.as_tensor(gated.gone(), device=opens.device)
    evidence = gated.evidence().clamp(min=torch.finfo(torch.float32).tiny)
    worth = torch.where(there, evidence, -1.0)
    families = _families(gated)
    steps = [_step(family) for family in families]
    most = [
        min(int(there[mine].sum()) for mine in family) // step * step
        for family, step in zip(families, steps, strict=True)
    ]
    means = [sum(int(opens[mine].sum()) for mine in family) / len(family) for family in families]
    widths = [min(top, max(step, round(n / step) * step)) for n, step, top in zip(means, steps, most, strict=True)]

    def moved(k: int, by: int) -> list[int]:
        return [width + by * step * (i == k) for i, (width, step) in enumerate(zip(widths, steps, strict=True))]

    def rate(k: int, by: int, target: _Target) -> float:
        """Evidence per cost between here and a step less or more, higher the fewer units there are."""
        here, new = (_widths(families, some, worth) for some in (widths, moved(k, by)))
        cost, part = abs(target.kept(here) - target.kept(new)), families[k][0]
        share = (part.stop - part.start) / max(1, widths[k])
        return float(evidence[here ^ new].sum()) * share / cost if cost else -by * torch.inf

    while over := [t for t in targets if t.kept(_widths(families, widths, worth)) > t.most]:
        may = {k: rate(k, -1, over[0]) for k in range(len(families)) if widths[k] > steps[k]}
        if not may or min(may.values()) == torch.inf:
            raise over[0].unreachable(over[0].kept(_widths(families, widths, worth)) / over[0].most * over[0].fraction)
        widths = moved(min(may, key=lambda k: may[k]), -1)
    while fill:
        fits = [k for k in range(len(families)) if widths[k] + steps[k] <= most[k]]
        fits = [k for k in fits if all(t.kept(_widths(families, moved(k, 1), worth)) <= t.most for t in targets)]
        may = {k: rate(k, 1, targets[0]) for k in fits}
        if not may:
            break
        widths = moved(max(may, key=lambda k: may[k]), 1)
    return _widths(families, widths, worth)


def _among(candidates: Tensor, opens: Tensor, mine: slice, gated: Gated) -> Tensor:
    """Of a placement's candidates those that matter beside the gates that are open; all, if none does."""
    savings = _Target(gated, params, 1.0).savings(opens)
    matter = candidates & (savings[mine] > 0)
    return matter if bool(matter.any()) else candidates


def _revived(gated: Gated, opens: Tensor) -> Tensor:
    """With one more gate open in each placement of which none is open that matters beside the placements before."""
    opens, evidence = opens.clone(), gated.evidence()
    there = ~torch.as_tensor(gated.gone(), device=opens.device)
    for mine in gated.slices():
        ahead = opens.clone()
        ahead[mine.stop :] = True  # whatever comes after it
        among = _among(there[mine], ahead, mine, gated)
        if bool(among.any()) and not bool((opens[mine] & among).any()):
            opens[mine][torch.where(among, evidence[mine], -torch.inf).argmax()] = True
    return opens


def _one_of_each(gated: Gated, opens: Tensor, worth: Tensor) -> Tensor:
    """One open gate of each placement that has any, the worthiest of those that matter beside the placements before.

    Where gates act within others, as those of single inputs within a map's, the two that are left belong together.
    """
    left = opens.clone()
    for mine in gated.slices():
        among = _among(left[mine], left, mine, gated)
        best = torch.where(among, worth[mine], -torch.inf).argmax()
        left[mine] &= torch.arange(len(among), device=left.device) == best
    return left


@final
@dataclass(frozen=True)
class _Sets:
    """Which gates close, or open, together: as many units must be left in each part of a balance (the groups of a
    convolution, the halves of a `chunk`), so that one unit alone saves nothing. All others are sets of one.

    Args:
        of: for each gate the number of its set, that of one of its gates.
        there: which gates are open, or closed on units that stay all the same, to fill up a part.
        loose: gates in balances which no sets of them exhaust: balances that cross, or units under several gates.
    """

    of: Tensor
    there: Tensor
    loose: Tensor

    def sums(self, numbers: Tensor, where: Tensor) -> Tensor:
        """By set, the sum over those of its gates that are somewhere."""
        return torch.zeros_like(numbers).index_add(0, self.of, torch.where(where, numbers, 0))

    def single(self) -> _Sets:
        """Each gate by itself."""
        return replace(self, of=torch.arange(len(self.of), device=self.of.device))


def _sets(target: _Target, opens: Tensor, worth: Tensor, *, closing: bool) -> _Sets:
    """Takes balances apart into sets of as few units as there can be in each: of those that are left in the network,
    from the set that is worth least (`closing`), or of the others, from the set that is worth most.
    """
    live, graph = target.gated.liveness, target.gated.graph
    of, there, loose = np.arange(live.size), opens.cpu().numpy().copy(), np.zeros(live.size, dtype=bool)
    balanced = [] if unwrapped(target.cost)[0] is l0_norm else graph.balanced  # it counts gates, whatever stays
    alone = (live.common[:, 1:] == live.one).all(1)
    alone[live.several] = False
    gate = np.where(alone & (live.common[:, 0] < live.size), live.common[:, 0], -1)  # that decides about a unit
    order = np.where(gate < 0, np.inf, worth.double().cpu().numpy()[gate] * (1 if closing else -1))
    with target.gated.assuming(opens):
        kept = target.gated.plan(refuse=False).units if balanced else alone
    for balances in balanced:
        units = np.unique(np.concatenate([b.ravel() for b in balances]))
        if units[0] < 0 or (gate[units] < 0).any():
            deciding = live.common[units[units >= 0]]
            loose[deciding[deciding < live.size]] = True
            continue
        loose[gate[units]] = len(balances) > 1
        there[gate[units]] |= kept[units]
        done = ~kept if closing else kept.copy()
        while len(left := units[~done[units]]):
            before = done.copy()
            done[left[np.argmin(order[left])]] = True
            even_out(done, balances, order)
            together = gate[done & ~before]
            of[together] = together.min()
    return _Sets(*(torch.as_tensor(x, device=opens.device) for x in (of, there, loose)))


def _closed_until(target: _Target, opens: Tensor, last: Tensor) -> Tensor:
    """Closes units, but none of the `last`, until the target is met."""
    most, current = target.most, target.kept(opens)
    if current <= most:
        return opens
    evidence = target.gated.evidence().clamp(min=torch.finfo(torch.float32).tiny)
    before, opens = opens, opens.clone()
    sets = _sets(target, opens, torch.where(opens, evidence, -torch.inf), closing=True)
    while current > most:
        saving, worth = target.savings(sets.there), sets.sums(evidence, opens)
        may = (worth > 0) & (sets.sums(evidence, opens & ((saving <= 0) | last)) == 0)
        if not bool(may.any()):
            if torch.equal(sets.of, sets.single().of):
                raise target.unreachable(target.fraction * current / most)
            sets = replace(sets.single(), there=opens)
            continue
        saving = sets.sums(saving, sets.there)
        fits = may & (saving <= current - most)  # near the end, smaller units instead of one that overshoots
        may = fits if bool(fits.any()) else may & (saving <= saving[may].min())
        score = _scores(torch.where(may, worth / saving.clamp(min=1e-30), torch.inf), opens, sets, target.gated)
        order = torch.argsort(score, stable=True)[: int(may.sum())]
        # Half of the way at once, then savings are worked out anew; in the end one by one, so that nothing is closed
        # for nothing.
        many = max(1, int((torch.cumsum(saving[order], 0) <= 0.5 * (current - most)).sum()))
        stays = sets.there & ~torch.isin(sets.of, order[:many])
        sets, opens = replace(sets, there=stays), opens & stays
        current = target.kept(opens)
    return _refilled(target, opens, closed=before & ~opens)


def _scores(single: Tensor, opens: Tensor, sets: _Sets, gated: Gated) -> Tensor:
    """Evidence per cost of every set, higher the fewer are left beside it when its turn comes, as the first step of
    log(n): no placement is used up before the others, also when many units are closed at once.
    """
    each = single[sets.of]
    scores = each.clone()
    for mine in gated.slices():
        turn = torch.argsort(torch.argsort(each[mine], stable=True), stable=True)
        scores[mine] = each[mine] * len(turn) / (opens[mine].sum() - turn).clamp(min=1)
    return torch.full_like(single, torch.inf).scatter_reduce(0, sets.of, scores, "amin")


def _filled(targets: list[_Target], opens: Tensor) -> Tensor:
    """Opens what fits into every target, as far as the target counts it."""
    for target in targets:
        before = opens
        # Nothing that costs nothing: an input of a map that is closed would be open on paper alone.
        closed = ~opens & (target.savings(opens) > 0)
        closed &= ~torch.as_tensor(target.gated.gone(), device=opens.device)  # nothing is left there to open
        opens = _refilled(target, opens.clone(), closed)
        others = [other for other in targets if other is not target]
        if any(other.kept(opens) > max(other.most, other.kept(before)) for other in others):
            opens = before  # targets that overlap: this one stays unfilled rather than break another
    return opens


def _refilled(target: _Target, opens: Tensor, closed: Tensor) -> Tensor:
    """Opens, of what is `closed`, what still fits: the last unit to be closed may have been a large one."""
    evidence = target.gated.evidence()
    candidates = closed.clone()
    most, current = target.most, target.kept(opens)
    sets = _sets(target, opens, torch.where(closed, evidence, -torch.inf), closing=False)
    free = closed & sets.there  # they fill up a part of a balance, and are there anyway
    if target.kept(opens | free) <= most:
        opens = opens | free
    closed = closed & ~free
    while bool(closed.any()):
        price = sets.sums(target.savings(sets.there), ~sets.there)
        closed &= (price <= most - current)[sets.of]
        if not bool(closed.any()):
            break
        worth = sets.sums(evidence, closed) / price.clamp(min=1e-30)
        mine = sets.of == sets.of[torch.where(closed, worth[sets.of], -torch.inf).argmax()]
        now = target.kept(opens | (mine & closed))
        if now <= most:  # what comes back may cost more than its gradient says: a layer that returns
            current, opens = now, opens | (mine & closed)
            sets = replace(sets, there=sets.there | mine)
        closed = closed & ~mine
    # Where balances cross, a unit may fit though its set does not.
    more = bool((candidates & sets.loose).any())
    while more:
        more = False
        for k in torch.argsort(evidence, descending=True).tolist():
            if candidates[k] and sets.loose[k] and not opens[k]:
                opens[k] = True
                opens[k] = fits = target.kept(opens) <= most
                more |= fits
    return opens
