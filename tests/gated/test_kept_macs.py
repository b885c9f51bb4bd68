"""Kept MACs under `per_layer` where units are repeated, taken by a stride, and go around a block by a projection.

A count of 4,098 where torch counted 3,522 was once reported of such networks: here they are, in every order.
"""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from support.oracles import assert_counted, set_gates

X = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Orders(nn.Module):
    """Linear layers with a repetition, a stride and a residual block between them, in the order that is told."""

    def __init__(self, order: tuple[str, ...], how: str, projects: bool) -> None:
        super().__init__()
        self.order, self.how, width = order, how, 8
        self.first = nn.Linear(5, width)
        for what in order:
            if what == "block":
                self.inner, self.outer = nn.Linear(width, 6), nn.Linear(6, width)
                self.shortcut = nn.Linear(width, width) if projects else nn.Identity()
            width = {"again": 2 * width, "stride": -(-width // 2)}.get(what, width)
        self.last, self.head = nn.Linear(width, 7), nn.Linear(7, 3)

    def again(self, h: Tensor) -> Tensor:
        if self.how == "repeat":
            return h.repeat(1, 2)
        return h.repeat_interleave(2, 1) if self.how == "interleave" else torch.cat([h, h.cos()], 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        for what in self.order:
            if what == "block":
                h = self.outer(self.inner(h).tanh()) + self.shortcut(h)
            else:
                h = self.again(h) if what == "again" else h[:, ::2]
        out: Tensor = self.head(self.last(h).tanh())
        return out


class Maps(nn.Module):
    """Maps of a strided convolution, repeated, read by another one and by linear layers with a projection."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.next = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(8, 6, 3, 2, 1)
        self.inner, self.outer, self.shortcut = nn.Linear(24, 6), nn.Linear(6, 5), nn.Linear(24, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).tanh()
        h = h.repeat(1, 2, 1, 1) if self.how == "repeat" else h.repeat_interleave(2, 1)
        h = self.next(h).tanh().flatten(1)
        out: Tensor = self.head(self.outer(self.inner(h).tanh()) + self.shortcut(h))
        return out


def counted(model: nn.Module, x: Tensor) -> None:
    """Closes gates at random, and holds what is counted against what torch counts."""
    gated = l0.attach(model.double().eval(), x, where=l0.per_layer()).eval()
    sizes = {name: gate.shape.numel() for name, gate in gated.named_gates()}
    for seed in range(4):
        numbers = np.random.default_rng(seed)
        closed = {name: numbers.permutation(n)[: numbers.integers(0, n)].tolist() for name, n in sizes.items()}
        set_gates(gated, closed, seed)
        assert_counted(gated, l0.compact(gated), (x,))
        assert seed or float(l0.macs(gated, kept=True)) < float(l0.dense(l0.macs, gated))


# Each order with and without a projection, and each way to repeat with both: those do not see each other.
CASES = [
    (order, ("repeat", "interleave", "cat")[(k + projects) % 3], bool(projects))
    for k, order in enumerate(permutations(("again", "stride", "block")))
    for projects in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "how", "projects"), CASES, ids=lambda v: "-".join(v) if type(v) is tuple else None)
def test_kept_macs_are_those_that_torch_counts(order: tuple[str, ...], how: str, projects: bool) -> None:
    torch.manual_seed(0)
    counted(Orders(order, how, projects), X)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["repeat", "interleave"])
def test_kept_macs_of_strided_convolutions_with_repeated_maps(how: str) -> None:
    torch.manual_seed(0)
    counted(Maps(how), torch.randn(2, 3, 8, 8, dtype=torch.float64))
