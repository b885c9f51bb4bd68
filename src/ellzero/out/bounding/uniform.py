"""As many open gates in all placements whose names differ in numbers alone, such as the layers of a transformer.

Gates of whole blocks are left as they are. This file knows placements as slices of one flat vector, and targets.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor

from ellzero.gated.module import Gated
from ellzero.out.bounding.targets import Target, of_blocks

STEP, WIDE = 8, 64  # uniform widths are multiples of this, in layers with at least so many units


def families_of(gated: Gated) -> list[list[slice]]:
    """Placements of one size whose names differ in numbers alone."""
    found: dict[tuple[str, torch.Size], list[slice]] = defaultdict(list)
    whole = of_blocks(gated)
    for mine, (name, gate) in zip(gated.slices(), gated.named_gates(), strict=True):
        if bool(whole[mine].any()):
            continue
        found[re.sub(r"\d+", "#", name), gate.shape].append(mine)
    return list(found.values())


def step_of(family: list[slice]) -> int:
    """What the widths of a family are multiples of."""
    return STEP if family[0].stop - family[0].start >= WIDE else 1


def opened(families: list[list[slice]], widths: list[int], worth: Tensor, others: Tensor) -> Tensor:
    """In each placement of a family, the worthiest open: as many as its width. Beside them what `others` opens."""
    opens = others.clone()
    for family, width in zip(families, widths, strict=True):
        for mine in family:
            opens[mine][torch.argsort(worth[mine], descending=True, stable=True)[:width]] = True
    return opens


def uniformly(targets: list[Target], opens: Tensor, fill: bool) -> Tensor:
    """As many open gates in all placements of a family: their mean, then a step less or more until targets are met."""
    gated = targets[0].gated
    there = ~torch.as_tensor(gated.gone(), device=opens.device)
    evidence = gated.evidence().clamp(min=torch.finfo(torch.float32).tiny)
    worth = torch.where(there, evidence, -1.0)
    families, others = families_of(gated), opens & of_blocks(gated)
    steps = [step_of(family) for family in families]
    most = [
        min(int(there[mine].sum()) for mine in family) // step * step
        for family, step in zip(families, steps, strict=True)
    ]
    means = [sum(int(opens[mine].sum()) for mine in family) / len(family) for family in families]
    widths = [min(top, max(step, round(n / step) * step)) for n, step, top in zip(means, steps, most, strict=True)]

    def moved(k: int, by: int) -> list[int]:
        return [width + by * step * (i == k) for i, (width, step) in enumerate(zip(widths, steps, strict=True))]

    def rate(k: int, by: int, target: Target) -> float:
        """Evidence per cost between here and a step less or more, higher the fewer units there are."""
        here, new = (opened(families, some, worth, others) for some in (widths, moved(k, by)))
        cost, part = abs(target.kept(here) - target.kept(new)), families[k][0]
        share = (part.stop - part.start) / max(1, widths[k])
        return float(evidence[here ^ new].sum()) * share / cost if cost else -by * torch.inf

    while over := [t for t in targets if t.kept(opened(families, widths, worth, others)) > t.most]:
        may = {k: rate(k, -1, over[0]) for k in range(len(families)) if widths[k] > steps[k]}
        if not may or min(may.values()) == torch.inf:
            raise over[0].unreachable(
                over[0].kept(opened(families, widths, worth, others)) / over[0].most * over[0].fraction
            )
        widths = moved(min(may, key=lambda k: may[k]), -1)
    while fill:
        fits = [k for k in range(len(families)) if widths[k] + steps[k] <= most[k]]
        fits = [k for k in fits if all(t.kept(opened(families, moved(k, 1), worth, others)) <= t.most for t in targets)]
        may = {k: rate(k, 1, targets[0]) for k in fits}
        if not may:
            break
        widths = moved(max(may, key=lambda k: may[k]), 1)
    return opened(families, widths, worth, others)
