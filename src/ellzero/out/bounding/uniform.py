"""As many open gates in all placements whose names differ in numbers alone, such as the layers of a transformer.

Gates of whole blocks are left as they are. This file knows placements as slices of one flat vector, and targets.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.out.bounding.targets import Target, of_blocks

STEP, WIDE = 8, 64  # uniform widths are multiples of this, in layers with at least so many units


@dataclass(frozen=True)
class Family:
    """Placements of one size whose names differ in numbers alone.

    Args:
        members: which gates each has.
        widths: how many of them may be open, the least first: of so many heads of keys so many queries each, or (1, n).
        rows: of queries that share heads of keys, by the first gate of their placement, the gates of each head.
    """

    members: list[slice]
    widths: list[tuple[int, int]]
    rows: dict[int, Tensor]

    def nearest(self, width: float) -> int:
        """The number of the width that is nearest; of two, that which is an even multiple of the least."""
        all_of = [heads * each for heads, each in self.widths]
        return min(range(len(all_of)), key=lambda k: (abs(all_of[k] - width), all_of[k] // all_of[0] % 2))

    def worthiest(self, mine: slice, width: tuple[int, int], worth: Tensor) -> Tensor:
        """So many gates of one placement: of the worthiest heads of keys the worthiest queries."""
        heads, each = width
        rows = self.rows.get(mine.start, torch.arange(mine.start, mine.stop, device=worth.device)[None])
        rows = rows[torch.argsort(worth[rows].sum(1), descending=True, stable=True)[:heads]]
        order = torch.argsort(worth[rows], dim=1, descending=True, stable=True)[:, :each]
        chosen: Tensor = rows.gather(1, order).flatten()
        return chosen


def _queries(gated: Gated) -> dict[int, tuple[Tensor, int]]:
    """The gates of the queries that share heads of keys, by the first gate of their placement; and how many of each
    head stay at least.
    """
    live, found, starts = gated.liveness, {}, {mine.start for mine in gated.slices()}
    for served in gated.graph.served:
        gates = live.common[served.queries]
        if gates.shape[2] == 1 and gates.max() < live.size and int(gates.min()) in starts:
            here = torch.as_tensor(gates[:, :, 0], device=gated.tables["ends"].device)
            found[int(gates.min())] = here, served.least
    return found


def families_of(gated: Gated) -> list[Family]:
    """The placements, by their names."""
    found: dict[tuple[str, torch.Size], list[slice]] = defaultdict(list)
    whole, queries = of_blocks(gated), _queries(gated)
    there = ~torch.as_tensor(gated.gone(), device=whole.device)
    for mine, (name, gate) in zip(gated.slices(), gated.named_gates(), strict=True):
        if not bool(whole[mine].any()):
            found[re.sub(r"\d+", "#", name), gate.shape].append(mine)
    return [_family(members, there, queries) for members in found.values()]


def _family(members: list[slice], there: Tensor, queries: dict[int, tuple[Tensor, int]]) -> Family:
    shared = {mine.start: queries[mine.start] for mine in members if mine.start in queries}
    if len(shared) < len(members):
        step = STEP if members[0].stop - members[0].start >= WIDE else 1
        most = min(int(there[mine].sum()) for mine in members)
        return Family(members, [(1, n) for n in range(step, most + 1, step)], {})
    rows = {start: gates for start, (gates, _) in shared.items()}
    least = max(few for _, few in shared.values())
    heads = min(int(there[gates].any(1).sum()) for gates in rows.values())
    most = min(int(there[gates].sum(1).max()) for gates in rows.values())
    widths: list[tuple[int, int]] = []
    # A query has as many weights as a head of keys and values: the widths with most queries for their weights.
    for h, n in sorted(itertools.product(range(1, heads + 1), range(least, most + 1)), key=_weights):
        if not widths or h * n > prod(widths[-1]):
            widths.append((h, n))
    return Family(members, widths, rows)


def _weights(width: tuple[int, int]) -> tuple[int, int]:
    heads, queries = width
    return heads * queries + heads, -heads * queries


def opened(families: list[Family], widths: list[tuple[int, int]], worth: Tensor, others: Tensor) -> Tensor:
    """In each placement of a family, the worthiest open: as many as its width. Beside them what `others` opens."""
    opens = others.clone()
    for family, width in zip(families, widths, strict=True):
        for mine in family.members:
            opens[family.worthiest(mine, width, worth)] = True
    return opens


def uniformly(targets: list[Target], opens: Tensor, fill: bool) -> Tensor:
    """As many open gates in all placements of a family: their mean, then a step less or more until targets are met."""
    gated = targets[0].gated
    there = ~torch.as_tensor(gated.gone(), device=opens.device)
    evidence = gated.evidence().clamp(min=torch.finfo(torch.float32).tiny)
    worth = torch.where(there, evidence, -1.0)
    families, others = families_of(gated), opens & of_blocks(gated)
    at = [f.nearest(sum(int(opens[mine].sum()) for mine in f.members) / len(f.members)) for f in families]

    def opening(at: list[int]) -> Tensor:
        return opened(families, [f.widths[k] for f, k in zip(families, at, strict=True)], worth, others)

    def moved(k: int, by: int) -> list[int]:
        return [number + by * (i == k) for i, number in enumerate(at)]

    def rate(k: int, by: int, target: Target) -> float:
        """Evidence per cost between here and a step less or more, higher the fewer units there are."""
        here, new = opening(at), opening(moved(k, by))
        cost, part = abs(target.kept(here) - target.kept(new)), families[k].members[0]
        share = (part.stop - part.start) / max(1, prod(families[k].widths[at[k]]))
        return float(evidence[here ^ new].sum()) * share / cost if cost else -by * torch.inf

    while over := [t for t in targets if t.kept(opening(at)) > t.most]:
        may = {k: rate(k, -1, over[0]) for k in range(len(families)) if at[k]}
        if not may or min(may.values()) == torch.inf:
            raise over[0].unreachable(over[0].kept(opening(at)) / over[0].most * over[0].fraction)
        at = moved(min(may, key=lambda k: may[k]), -1)
    while fill:
        fits = [k for k, family in enumerate(families) if at[k] + 1 < len(family.widths)]
        fits = [k for k in fits if all(t.kept(opening(moved(k, 1))) <= t.most for t in targets)]
        may = {k: rate(k, 1, targets[0]) for k in fits}
        if not may:
            break
        at = moved(max(may, key=lambda k: may[k]), 1)
    return opening(at)
