"""A bound on what is kept of a cost, and which gates close or open together on the way to it.

Which gates are open is told by one flat vector over all placements. This file closes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement
from ellzero.gates.abstract import NoExpectation
from ellzero.graph.plan import even_out
from ellzero.objectives.checking import Bound
from ellzero.objectives.costs import Cost, dense, floor, kept, l0_norm, name_of, only, savings, unwrapped


@final
@dataclass(frozen=True)
class Target:
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


def targets_of(gated: Gated, at_most: Bound, cost: Cost) -> list[Target]:
    """The targets that one cost has: of all of it, or of parts by their pattern."""
    groups: Mapping[Any, float] = at_most if isinstance(at_most, Mapping) else {None: at_most}
    return [Target(gated, cost, fraction, only) for only, fraction in groups.items()]


@torch.no_grad()
def shares(gated: Gated, cost: Cost, bound: Bound) -> Iterator[tuple[str, float, float]]:
    """The name of each bound of a cost, what is kept of it now, and what may be, as fractions of the dense cost."""
    for target in targets_of(gated, bound, cost):
        share = float(kept(target.counted)(gated)) / dense(target.counted, gated)
        yield name_of(cost) + ("" if target.only is None else f" of {target.only}"), share, target.fraction


@final
@dataclass(frozen=True)
class Sets:
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

    def single(self) -> Sets:
        """Each gate by itself."""
        return replace(self, of=torch.arange(len(self.of), device=self.of.device))


def sets_of(target: Target, opens: Tensor, worth: Tensor, *, closing: bool) -> Sets:
    """Takes balances apart into sets of as few units as there can be in each: of those that are left in the network,
    from the set that is worth least (`closing`), or of the others, from the set that is worth most.
    """
    live, graph = target.gated.liveness, target.gated.graph
    of, there, loose = np.arange(live.size), opens.cpu().numpy().copy(), np.zeros(live.size, dtype=bool)
    counts_gates = unwrapped(target.cost)[0] is l0_norm  # whatever stays
    balanced, served = ([], ()) if counts_gates else (graph.balanced, graph.served)
    alone = (live.common[:, 1:] == live.one).all(1)
    alone[live.several] = False
    gate = np.where(alone & (live.common[:, 0] < live.size), live.common[:, 0], -1)  # that decides about a unit
    order = np.where(gate < 0, np.inf, worth.double().cpu().numpy()[gate] * (1 if closing else -1))
    with target.gated.assuming(opens):
        kept = target.gated.plan(refuse=False).units if balanced or served else alone
    there_is = [(s, kept[s.queries].any(1)) for s in served]
    for s, has in there_is if not closing else ():  # of a head of keys that is gone, one query may come back
        loose[live.common[s.queries[~has]][live.common[s.queries[~has]] < live.size]] = True
    rows = [([s.queries[has]], s.least) for s, has in there_is if has.any()]
    for balances, least in [*((b, 1) for b in balanced), *rows]:
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
            if closing and (~done[balances[0]]).sum(1).max() < least:  # so few do not stay
                done[units] = True
            together = gate[done & ~before]
            of[together] = together.min()
    return Sets(*(torch.as_tensor(x, device=opens.device) for x in (of, there, loose)))


def of_blocks(gated: Gated) -> Tensor:
    """Which gates open and close a whole block."""
    parts = [torch.full((mine.stop - mine.start,), p.block is not None) for mine, p in _placed(gated)]
    return torch.cat(parts).to(gated.tables["ends"].device)


def asleep(gated: Gated, opens: Tensor) -> Tensor:
    """Which gates lie in a block that is closed, where it does not matter whether they are open."""
    out = torch.zeros_like(opens, dtype=torch.bool)
    for whole, inside in _inside(gated):
        if not bool(opens[whole]):
            out |= inside
    return out


def weighed(gated: Gated, evidence: Tensor, opens: Tensor) -> Tensor:
    """The evidence for each gate; that for a block's, as odds, times the evidence for all open gates that lie in it."""
    out, gates = evidence.clone(), [gate for _, gate in gated.named_gates()]
    at = {mine.start: gate for mine, gate in zip(gated.slices(), gates, strict=True)}
    for whole, inside in _inside(gated):
        out[whole] *= float(evidence[inside & opens].sum()) or 1.0
        with suppress(NoExpectation):  # P is about 1 for all that are open: by it alone the block with dear units went
            closed = 1 - at[whole].prob_open().reshape(())
            out[whole] /= closed.clamp(min=torch.finfo(closed.dtype).eps)
    return out


def _placed(gated: Gated) -> list[tuple[slice, Placement]]:
    return list(zip(gated.slices(), gated.placements, strict=True))


def _inside(gated: Gated) -> list[tuple[int, Tensor]]:
    """The gate of each block, and which gates multiply what lies in it alone."""
    if "inside blocks" not in gated.memo:
        found = []
        for whole, block in ((mine.start, p.block) for mine, p in _placed(gated) if p.block is not None):
            tensors, inside = gated.graph.blocks[block].tensors, torch.zeros_like(gated.opens(), dtype=torch.bool)
            for mine, p in _placed(gated):
                inside[mine] = p.block is None and all(site.tensor in tensors for site in p.multiplies)
            found.append((whole, inside))
        gated.memo["inside blocks"] = found
    known: list[tuple[int, Tensor]] = gated.memo["inside blocks"]
    return known
