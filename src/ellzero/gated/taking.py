"""What is left of placements when units are taken out of a live model for good.

Gates, their noise and all that counts stay those of the whole network; only what the gates multiply gets smaller. This
file knows placements and plans; `Gated.shrink` carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph, Site
from ellzero.graph.plan import Mask, Plan


def refuse_replaced(model: nn.Module, graph: Graph, placements: Sequence[Placement]) -> None:
    """Refuses weights that cannot be multiplied or cut any more: of layers that were quantised or wrapped since."""
    lying = [s for a in graph.axes if a.frozen is None for s in a.sites] + [s for p in placements for s in p.multiplies]
    now = dict(model.named_parameters(remove_duplicate=False))
    for tensor in dict.fromkeys(s.tensor for s in lying if s.tensor in graph.parameters):
        if tensor not in now or not (now[tensor].is_floating_point() or now[tensor].is_complex()):
            layer = type(model.get_submodule(tensor.rpartition(".")[0])).__name__
            what = f"now in {now[tensor].dtype}" if tensor in now else f"no parameter any more, in a {layer}"
            raise ValueError(
                f"`{tensor}`, which gates close units of, is {what}: attach gates to the network as it was, load the "
                "state of these (`gated.gates.state_dict()`) there, and use that"
            )


def refuse_taking(
    model: nn.Module, graph: Graph, placements: Sequence[Placement], plan: Plan, taken: Plan | None
) -> None:
    """Refuses a plan that a live model cannot follow, after `taken` was followed before."""
    refuse_replaced(model, graph, placements)
    named = model.named_parameters(remove_duplicate=False)
    left = {id(p): plan.rows.get(n, {}).get(0) for n, p in named if n in plan.rows or n in plan.columns}
    for name, module in model.named_modules():
        if not isinstance(module, _ConvNd) or module.groups == 1:
            continue
        rows = [left[id(p)] for p in module.parameters() if id(p) in left]
        if rows and not module.groups == module.in_channels == module.out_channels:
            raise ValueError(f"`{name}` is a grouped convolution, which cannot shrink in steps unless it is depthwise")
        if any(index is None or len(index) < 2 for index in rows):  # sizes would not say any more what it was
            raise ValueError(f"`{name}` is depthwise, which cannot be seen any more where one channel is left")
    if plan.selects or plan.scatters or plan.closed or plan.blocks:
        raise ValueError("`plan` must take out units and leave layers and single inputs, got one that does not")
    if taken is not None and (plan.units & ~taken.units).any():
        raise ValueError("`plan` must not bring back a unit that was taken out before, got one that does")


def remaining(placement: Placement, plan: Plan | None) -> Placement:
    """The placement on the tensors that `plan` leaves; gates keep their numbers."""
    if plan is None:
        return placement

    def cut(site: Site) -> Site:
        return replace(site, units=plan.cut(site.units, site.tensor, site.dims))

    return replace(
        placement, multiplies=tuple(map(cut, placement.multiplies)), counts=tuple(map(cut, placement.counts))
    )


def idle(present: Sequence[Placement]) -> Mask:
    """For every gate, flat, whether there is nothing that it multiplies."""
    parts = []
    for placement in present:
        mask = np.ones(prod(placement.shape), dtype=bool)
        for site in placement.multiplies:
            mask[site.units[site.units >= 0]] = False
        parts.append(mask)
    return np.concatenate(parts)
