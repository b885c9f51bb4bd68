"""Brings the kept cost within its target: `finalize` closes units, and `revive` opens one where none is left.

It decides which units to close or open, and asks the costs what that changes. It does not know how gates work, nor when
training ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Literal

import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.gated.taking import idle, remaining
from ellzero.gates.warning import warn
from ellzero.objectives.checking import Bound, Bounds, check_fractions
from ellzero.objectives.costs import Cost, dense, kept, l0_norm, name_of, params, savings, unwrapped
from ellzero.out.bounding.targets import Sets, Target, asleep, of_blocks, sets_of, targets_of, weighed
from ellzero.out.bounding.uniform import families_of, opened, uniformly
from ellzero.out.compaction import refuse_unfit
from ellzero.out.latency.cost import Latency
from ellzero.out.latency.widening import widened

SEVERAL = 64  # units or more that are to come back do so together
MUCH = 0.2  # of the dense cost: what `finalize` may close without a word
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
    A block that has a gate may go as a whole: its evidence is the odds of its gate times that of all units in it.
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
        ValueError: `at_most` is no fraction, or below what the gates can reach; nothing is changed.
    """
    if not callable(cost):
        raise TypeError(f"`cost` must be a cost such as `l0.macs`, got {cost!r}")
    refuse_unfit(gated)
    check_fractions(at_most)
    before = float(kept(cost)(gated))
    learned = gated.has_learned() or any(gate.sees_weights for _, gate in gated.named_gates())  # these may have
    bring_within(gated, {cost: at_most}, fill=fill, uniform=uniform)
    closed = (before - float(kept(cost)(gated))) / dense(cost, gated)
    if closed > MUCH and gated.drawn and not gated.fixed:  # in a loop, and not by hand
        warn(
            f"`finalize` closed {100 * closed:.0f} % of the dense `{name_of(cost)}` at once, which training had kept: "
            "train longer or under a `Budget`, or tune the network from here on"
        )
    if closed and not learned:
        warn("no gate has moved since `attach`, so that nothing was learned about what `finalize` closes: train first")


def bring_within(gated: Gated, bounds: Bounds, *, fill: bool, uniform: Uniform = None) -> None:
    """Closes units until every kept cost is within its target, as `finalize` does for one cost."""
    refuse_unfit(gated)
    _check_uniform(uniform)
    targets = [target for cost, at_most in bounds.items() for target in targets_of(gated, at_most, cost)]
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
            opens = uniformly(targets, opens, fill)
    _put(gated, opens)


def revive(gated: Gated) -> None:
    """Opens, by little, one unit of every placement that is closed as a whole: the one with most evidence.

    A block that is closed by its own gate stays so.

    A layer that is closed as a whole can still open while its gates are noisy; where they are fixed it is lost.

    Example:
        >>> from torch import nn
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
        >>> for _, gate in gated.named_gates():
        ...     gate.close_(torch.tensor([True, True, True]))
        >>> revive(gated)
        >>> int(gated.opens().sum())
        1
    """
    refuse_unfit(gated)
    with torch.no_grad():
        _put(gated, _revived(gated, gated.opens()))


def refuse_unreachable(gated: Gated, at_most: Bound, cost: Cost = params, *, uniform: Uniform = None) -> None:
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
        >>> gated = attach(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
        >>> refuse_unreachable(gated, 8 / 17)  # of 9 + 8 parameters, 3 + 4 are left with one unit
        >>> refuse_unreachable(gated, 6 / 17)
        Traceback (most recent call last):
        ValueError: `at_most` must be at least 0.4118 of the dense cost, what is left with ...
    """
    _check_uniform(uniform)
    everything = torch.ones_like(gated.opens(), dtype=torch.bool)
    for target in targets_of(gated, at_most, cost):
        worth = -target.savings(everything)
        cheapest = _one_of_each(gated, everything, worth)
        if uniform:
            families = families_of(gated)
            cheapest = opened(families, [family.widths[0] for family in families], worth, everything & False)
        least = target.kept(cheapest) / dense(target.counted, gated)
        if target.fraction < least * (1 - 1e-6):  # room for rounding
            raise target.unreachable(least)


def _put(gated: Gated, opens: Tensor) -> None:
    for mine, (_, gate) in zip(gated.slices(), gated.named_gates(), strict=True):
        wanted = opens[mine].reshape(gate.shape)
        gate.close_(gate.open() & ~wanted)
        gate.open_(~gate.open() & wanted)


def _check_uniform(uniform: object) -> None:
    if uniform not in (None, "blocks"):
        raise ValueError(f"`uniform` must be None or 'blocks', got {uniform!r}")


def _among(candidates: Tensor, opens: Tensor, mine: slice, gated: Gated) -> Tensor:
    """Of a placement's candidates those that matter beside the gates that are open; all, if none does."""
    matter = candidates & (savings(params, gated, opens)[mine] > 0)
    return matter if bool(matter.any()) else candidates


def _revived(gated: Gated, opens: Tensor) -> Tensor:
    """With one more gate open in each placement of which none is open that matters beside the placements before."""
    opens, evidence = opens.clone(), gated.evidence()
    there = ~torch.as_tensor(gated.gone(), device=opens.device)
    whole = of_blocks(gated)
    for mine in (mine for mine in gated.slices() if not bool(whole[mine].any())):
        ahead = opens.clone() | whole
        ahead[mine.stop :] = True  # whatever comes after it
        among = _among(there[mine], ahead, mine, gated)
        if bool(among.any()) and not bool((opens[mine] & among).any()):
            opens[mine][torch.where(among, evidence[mine], -torch.inf).argmax()] = True
    return opens


def _one_of_each(gated: Gated, opens: Tensor, worth: Tensor) -> Tensor:
    """One open gate of each placement that has any, the worthiest of those that matter beside the placements before.

    Where gates act within others, as those of single inputs within a map's, the two that are left belong together. Of
    whole blocks none need be left, of experts as many as a router picks.
    """
    left, whole = opens | of_blocks(gated), of_blocks(gated)
    for placement, mine in zip(gated.placements, gated.slices(), strict=True):
        if bool(whole[mine].any()):
            continue
        among = _among(left[mine], left, mine, gated)
        best = torch.where(among, worth[mine], -torch.inf).argsort(descending=True, stable=True)
        left[mine] &= torch.isin(
            torch.arange(len(among), device=left.device), best[: gated.graph.picked.get(placement.name, 1)]
        )
    return left & ~whole


def _closed_until(target: Target, opens: Tensor, last: Tensor) -> Tensor:
    """Closes units, but none of the `last`, until the target is met.

    Near the end a large unit may save more than is to be saved: closing it, and opening again what then fits, is tried
    beside closing smaller ones. What leaves more is taken.
    """
    most, current = target.most, target.kept(opens)
    if current <= most:
        return opens
    evidence = target.gated.evidence().clamp(min=torch.finfo(torch.float32).tiny)
    before, opens = opens, opens & ~_dead(target, opens)
    current = target.kept(opens)
    sets = sets_of(target, opens, torch.where(opens, evidence, -torch.inf), closing=True)
    found = list[Tensor]()
    while current > most:
        saving, worth = target.savings(sets.there), sets.sums(weighed(target.gated, evidence, opens), opens)
        may = (worth > 0) & (sets.sums(evidence, opens & ((saving <= 0) | last)) == 0)
        if not bool(may.any()):
            if torch.equal(sets.of, sets.single().of):
                opens = _leap(target, opens, last, current)
                current = target.kept(opens)
            sets = replace(sets.single(), there=opens)
            continue
        saving = sets.sums(saving, sets.there)
        fits = may & (saving <= current - most)
        if bool(fits.any()) and bool((may & ~fits).any()):
            useful = saving.clamp(min=1e-30, max=current - most)
            score = _scores(torch.where(may, worth / useful, torch.inf), opens, sets, target.gated)
            if not bool(fits[least := score.argmin()]):
                fewer = opens & ~(sets.there & (sets.of == least))
                if target.kept(fewer) <= most:  # which is estimated for more than one gate, and for a time
                    found.append(_refilled(target, fewer, closed=before & ~fewer & ~_dead(target, fewer)))
        may = fits if bool(fits.any()) else may & (saving <= saving[may].min())
        score = _scores(torch.where(may, worth / saving.clamp(min=1e-30), torch.inf), opens, sets, target.gated)
        order = torch.argsort(score, stable=True)[: int(may.sum())]
        # Half of the way at once, then savings are worked out anew; in the end one by one, so that nothing is closed
        # for nothing.
        many = max(1, int((torch.cumsum(saving[order], 0) <= 0.5 * (current - most)).sum()))
        while True:
            stays = sets.there & ~torch.isin(sets.of, order[:many])
            stays &= ~_dead(target, opens & stays)
            current = target.kept(opens & stays)
            if current >= most or many == 1:
                break
            many //= 2  # together they take others along
        sets, opens = replace(sets, there=stays), opens & stays
    found.append(_refilled(target, opens, closed=before & ~opens & ~_dead(target, opens)))
    return max(found, key=lambda opens: _left(target.gated, evidence, opens))


def _dead(target: Target, opens: Tensor) -> Tensor:
    """Gates of single weights that removal takes with a unit, open or closed: `l0_norm` would count them as kept."""
    gated, dead = target.gated, torch.zeros_like(opens)
    single = [len(gate.shape) > 1 for _, gate in gated.named_gates()]
    if unwrapped(target.cost)[0] is l0_norm and any(single):
        more = True
        while more:  # with weights that go others have nothing left to read
            with gated.assuming(opens & ~dead):
                plan = gated.plan(refuse=False)
            gone = torch.as_tensor(idle([remaining(p, plan) for p in gated.placements])).to(dead)
            more = False
            for mine in compress(gated.slices(), single):
                more |= bool((gone[mine] & opens[mine] & ~dead[mine]).any())
                dead[mine] |= gone[mine]
    return dead


def _left(gated: Gated, evidence: Tensor, opens: Tensor) -> float:
    """How much of what there was evidence for is open: a logarithm for each placement, all alike, however wide."""
    there = torch.where(opens & ~asleep(gated, opens), evidence, 0).double()
    tiny = torch.finfo(torch.float32).tiny
    return sum(float(there[mine].sum().clamp(min=tiny).log()) for mine in gated.slices())


def _leap(target: Target, opens: Tensor, last: Tensor, current: float) -> Tensor:
    """Closes the fewest units of a placement that save something together, where none does alone: a time that was
    measured has plateaus. Of all placements in which there are such, those with the least evidence for what they save.
    """
    evidence, found = target.gated.evidence(), list[tuple[float, Tensor]]()
    for mine in target.gated.slices():
        spare = opens & ~last
        spare[: mine.start] = spare[mine.stop :] = False
        order = torch.where(spare, evidence, torch.inf).argsort(stable=True)[: int(spare.sum())]
        many = 1
        while many < 2 * len(order):
            fewer = opens.clone()
            fewer[order[:many]] = False
            if (saved := current - target.kept(fewer)) > 0:
                found.append((float(evidence[order[:many]].sum()) / saved, fewer))
                break
            many *= 2
    if found:
        return min(found, key=lambda leap: leap[0])[1]
    if (least := target.kept(last)) > target.most:
        raise target.unreachable(target.fraction * min(least, current) / target.most)
    return opens & last


def _scores(single: Tensor, opens: Tensor, sets: Sets, gated: Gated) -> Tensor:
    """Evidence per cost of every set, higher the fewer are left beside it when its turn comes, as the first step of
    log(n): no placement is used up before the others, also when many units are closed at once.
    """
    each = single[sets.of]
    scores = each.clone()
    for mine in gated.slices():
        turn = torch.argsort(torch.argsort(each[mine], stable=True), stable=True)
        scores[mine] = each[mine] * len(turn) / (opens[mine].sum() - turn).clamp(min=1)
    return torch.full_like(single, torch.inf).scatter_reduce(0, sets.of, scores, "amin")


def _filled(targets: list[Target], opens: Tensor) -> Tensor:
    """Opens what fits into every target, as far as the target counts it."""
    for target in targets:
        before = opens
        # Nothing that costs nothing: an input of a map that is closed would be open on paper alone.
        closed = ~opens & ((target.savings(opens) > 0) | asleep(target.gated, opens))
        closed &= ~torch.as_tensor(target.gated.gone(), device=opens.device)  # nothing is left there to open
        closed &= ~_dead(target, opens)
        others = [(other, max(other.most, other.kept(before))) for other in targets if other is not target]
        opens = _refilled(target, before.clone(), closed, others)
    return opens


def _refilled(target: Target, opens: Tensor, closed: Tensor, others: Sequence[tuple[Target, float]] = ()) -> Tensor:
    """Opens, of what is `closed`, what still fits: the last unit to be closed may have been a large one. What the
    others keep stays within their limits.
    """

    def fits(more: Tensor, now: float) -> bool:
        return now <= most and all(other.kept(more) <= limit for other, limit in others)

    evidence = target.gated.evidence()
    candidates = closed.clone()
    most, current = target.most, target.kept(opens)
    sets = sets_of(target, opens, torch.where(closed, evidence, -torch.inf), closing=False)
    free = closed & sets.there  # they fill up a part of a balance, and are there anyway
    if fits(opens | free, target.kept(opens | free)):
        opens = opens | free
    closed, price, share = closed & ~free, None, 0.5
    while bool((closed & ~asleep(target.gated, opens)).any()):
        price = sets.sums(target.savings(sets.there), ~sets.there) if price is None else price
        closed &= (price <= most - current)[sets.of]
        awake = closed & ~asleep(target.gated, opens)
        if not bool(awake.any()):
            break
        worth = sets.sums(weighed(target.gated, evidence, opens), awake) / price.clamp(min=1e-30)
        # Where many are to come back, the best of them come together, up to half of the way.
        worth = torch.where(sets.sums(awake.double(), awake) > 0, worth, -torch.inf)
        order = torch.argsort(worth, descending=True, stable=True)
        within = torch.cumsum(price[order], 0) <= share * (most - current)
        best = order[within & worth[order].isfinite()]
        if len(best) >= SEVERAL:
            mine = torch.isin(sets.of, best) & closed
            if fits(opens | mine, now := target.kept(opens | mine)):
                current, opens, closed, price = now, opens | mine, closed & ~mine, None
                sets = replace(sets, there=sets.there | torch.isin(sets.of, best))
                continue
            share /= 2  # together they cost more than each alone
        mine = sets.of == sets.of[torch.where(awake, worth[sets.of], -torch.inf).argmax()]
        more = opens | (mine & closed)
        if fits(more, now := target.kept(more)):  # it may cost more than its gradient says: a layer that returns
            current, opens, price = now, more, None
            sets = replace(sets, there=sets.there | mine)
        closed = closed & ~mine
    # Where balances cross, a unit may fit though its set does not.
    again = bool((candidates & sets.loose).any())
    while again:
        again = False
        for k in torch.argsort(evidence, descending=True).tolist():
            if candidates[k] and sets.loose[k] and not opens[k]:
                opens[k] = True
                opens[k] = there = fits(opens, target.kept(opens))
                again |= there
    return opens
