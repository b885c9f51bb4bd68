"""Widths that pay: on a staircase, units up to the edge of a step take no time, and chords do not see that.

This file knows a target only by what fits into it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ellzero.gated.module import Gated


def widened(gated: Gated, opens: Tensor, fits: Callable[[Tensor], bool]) -> Tensor:
    """Opens as many more units of each placement as fit, those with most evidence first.

    Args:
        gated: the network; it is left as it is.
        opens: which gates are open. A placement of which none is stays closed.
        fits: whether so many may be open.
    """
    evidence = torch.where(torch.as_tensor(gated.gone(), device=opens.device), -torch.inf, gated.evidence())
    closed = torch.where(opens, -torch.inf, evidence)
    for mine in sorted(gated.slices(), key=lambda mine: -float(closed[mine].max())):
        order = torch.argsort(closed[mine], descending=True, stable=True)
        least, most = 0, int(closed[mine].isfinite().sum()) if bool(opens[mine].any()) else 0
        while least < most:
            count = (least + most + 1) // 2
            least, most = (count, most) if fits(_more(opens, mine, order[:count])) else (least, count - 1)
        opens = _more(opens, mine, order[:least])
    return opens


def _more(opens: Tensor, mine: slice, which: Tensor) -> Tensor:
    out = opens.clone()
    out[mine][which] = True
    return out
