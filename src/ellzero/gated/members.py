"""The weights that gates count, as a family sees them: one norm and one number per gate.

A family that looks at weights (group lasso, weights with noise) gets a `Counted` when it is attached. It holds modules,
not tensors, so that it sees whatever stands in for their parameters in a call. This file does not know why they look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from ellzero.gated.placements import Placement
from ellzero.gates.abstract import AbstractGate
from ellzero.gates.formulas import promote


class _Site(NamedTuple):
    holder: nn.Module
    key: str
    dims: tuple[int, ...]  # along which gates lie
    gates: Tensor | None  # the gate of each entry along them, None where they come in order

    def weight(self) -> Tensor:
        found = self.holder._parameters[self.key]
        assert found is not None
        return found


@final
class Counted:
    """The weights that the gates of one placement count, in the model as it is now: the `Members` of its gates."""

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        self.shape, self._device = placement.shape, device
        self._names = tuple(site.tensor for site in placement.counts)
        self._sites: list[_Site] = []
        n = prod(placement.shape)
        for site in placement.counts:
            path, _, key = site.tensor.rpartition(".")
            units = np.where(site.units < 0, n, site.units).ravel()
            index = None if np.array_equal(units, np.arange(n)) else torch.as_tensor(units, device=device)
            self._sites.append(_Site(model.get_submodule(path), key, site.dims, index))

    def names(self) -> tuple[str, ...]:
        return self._names

    def squares(self) -> Tensor:
        return self._summed([_along(promote(site.weight()).square(), site.dims) for site in self._sites])

    def sizes(self) -> Tensor:
        """How many weights there are for each gate: those that have been taken out do not count."""
        counts = []
        for site in self._sites:
            shape = site.weight().shape
            along = [shape[d] for d in site.dims]
            counts.append(torch.full(along, prod(shape) / prod(along), device=self._device))
        return self._summed(counts)

    @torch.no_grad()
    def scale_(self, factor: Tensor) -> None:
        """Multiplies the weights of each gate, in place; those without a gate stay."""
        extended = torch.cat([factor.reshape(-1), factor.new_ones(1)])
        for site in self._sites:
            weight = site.weight()
            mine = extended[:-1] if site.gates is None else extended[site.gates]
            shape = [size if d in site.dims else 1 for d, size in enumerate(weight.shape)]
            weight.detach().mul_(mine.reshape(shape).to(weight.dtype))

    def _summed(self, parts: Iterable[Tensor]) -> Tensor:
        """Sums by gate what lies along the dimensions of each site."""
        n, total = prod(self.shape), None
        for site, part in zip(self._sites, parts, strict=True):
            by_gate = part.reshape(-1)
            if site.gates is not None:
                by_gate = part.new_zeros(n + 1).index_add(0, site.gates, by_gate)[:n]
            total = by_gate if total is None else total + by_gate
        assert total is not None, "a placement counts something"
        return total.reshape(self.shape)


def _along(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The tensor, summed over all other dimensions."""
    others = [d for d in range(tensor.ndim) if d not in dims]
    return tensor.sum(others) if others else tensor


def show_members(
    model: nn.Module, placements: Sequence[Placement], gates: Sequence[AbstractGate], device: torch.device
) -> None:
    """Shows the weights to those gates whose family looks at them.

    Raises:
        ValueError: a placement counts nothing, so that there is nothing to see, or more than one weight for a gate of a
            family that is for single ones.
    """
    for placement, gate in zip(placements, gates, strict=True):
        if gate.sees_weights:
            if not placement.counts:
                raise ValueError(f"`{placement.name}` must count weights for {type(gate).__name__}, got none")
            single = all(len(s.dims) == model.get_parameter(s.tensor).ndim for s in placement.counts)
            if gate.per_weight and not single:
                raise ValueError(
                    f"`where` must put {type(gate).__name__} on single weights, as `l0.weights(...)` does, got "
                    f"`{placement.name}`, whose gates count several"
                )
            gate.bind(Counted(model, placement, device))
