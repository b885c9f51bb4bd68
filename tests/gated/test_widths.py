"""Products of more than two widths: a weight that is applied along gated units, and units that meet themselves.

Kept MACs are held against torch's own count on the compact network, expected ones against the sum over all states.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from support.oracles import HIDDEN, assert_counted, assert_same, by_name, every_state, scattered, set_gates


class Mixer(nn.Module):
    """Channels, and three layers that mix tokens in some way: the second one meets gated tokens and channels."""

    def __init__(self, channels: int = 8, hidden: tuple[int, int] = (4, 3)) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, channels), nn.Linear(channels, 3)
        sizes = (5, *hidden, 2)
        self.mix = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        for layer in self.mix:
            h = self.mixed(h, layer).tanh()
        out: Tensor = self.out(h)
        return out

    def mixed(self, h: Tensor, layer: nn.Module) -> Tensor:
        out: Tensor = layer(h.transpose(1, 2)).transpose(1, 2)
        return out


class FromTheLeft(Mixer):
    def mixed(self, h: Tensor, layer: nn.Module) -> Tensor:
        return layer.weight @ h  # type: ignore[operator,no-any-return]


class InLetters(Mixer):
    def mixed(self, h: Tensor, layer: nn.Module) -> Tensor:
        return torch.einsum("btc,st->bsc", h, layer.weight)


class PartOfWeights(Mixer):
    def mixed(self, h: Tensor, layer: nn.Module) -> Tensor:
        return (h.transpose(1, 2) @ (2 * layer.weight).T).transpose(1, 2)  # type: ignore[operator]


class InSpace(nn.Module):
    """Layers along the height and the width of an image: one reads and writes rows, along columns and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.rows, self.columns = nn.Linear(5, 4), nn.Linear(4, 3)
        self.further, self.last, self.end = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        layers = (self.rows, 1), (self.columns, 2), (self.further, 1), (self.last, 1), (self.end, 2), (self.out, 3)
        for layer, dim in layers:
            h = layer(h.transpose(dim, 3)).transpose(dim, 3).tanh()
        return h


class EachByItself(nn.Module):
    """A convolution over time of each gated channel, as if the channels were examples."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 6), nn.Linear(6, 2)
        self.up, self.down = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh().T.unsqueeze(1)
        out: Tensor = self.out(self.down(self.up(h).tanh()).squeeze(1).T)
        return out


class Outer(nn.Module):
    """Products of two layers' units, read along one of both: rows and columns that are gated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 5)
        self.read, self.then, self.out = nn.Linear(5, 3), nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh().transpose(1, 2) @ self.b(x).tanh()
        h = self.read(h).tanh()
        h = self.then(h.transpose(1, 2)).tanh()
        out: Tensor = self.out(h.transpose(1, 2))
        return out


class Cubic(nn.Module):
    """A layer from a stream to itself, along the same stream: k³ MACs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.into, self.square = nn.Linear(3, width), nn.Linear(width, width, bias=False)
        self.along, self.out = nn.Linear(width, 2), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        h = h.unsqueeze(2) * h.unsqueeze(1)
        h = h + self.square(h)
        out: Tensor = self.out(self.along(h).transpose(1, 2))
        return out


TOKENS, STREAM = torch.randn(2, 5, 6, dtype=torch.float64), l0.shrinkable(streams=True)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, object, int]] = {
    "tokens": (Mixer, TOKENS, l0.shrinkable(), 3),
    "tokens, by layer": (Mixer, TOKENS, l0.per_layer(), 3),
    "from the left": (FromTheLeft, TOKENS, l0.shrinkable(), 3),
    "in letters": (InLetters, TOKENS, l0.shrinkable(), 3),
    "computed weights": (PartOfWeights, TOKENS, l0.shrinkable(), 1),
    "in space": (InSpace, torch.randn(2, 5, 4, 3, dtype=torch.float64), l0.shrinkable(), 4),
    "as examples": (EachByItself, torch.randn(7, 3, dtype=torch.float64), l0.shrinkable(), 2),
    "outer product": (Outer, torch.randn(2, 6, 3, dtype=torch.float64), l0.shrinkable(), 3),
    "cubes": (Cubic, torch.randn(2, 3, dtype=torch.float64), STREAM, 3),
    "cubes, by layer": (Cubic, torch.randn(2, 3, dtype=torch.float64), l0.per_layer(), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kept_macs_are_those_that_torch_counts(case: str) -> None:
    model, x, where, widths = CASES[case]
    torch.manual_seed(0)
    gated = l0.attach(model().double().eval(), x, where=where).eval()  # type: ignore[arg-type]
    census = gated.census["macs"]
    assert census is not None
    assert len(census.rows) >= widths
    sizes = {name: gate.shape.numel() for name, gate in gated.named_gates()}
    for seed in range(3):
        numbers = np.random.default_rng(seed)
        # Two stay: of a sum over one, `einsum` makes an element-wise product, which torch does not count.
        closed = {name: numbers.permutation(n)[: numbers.integers(1, n - 1)].tolist() for name, n in sizes.items()}
        set_gates(gated, closed, seed)
        small = l0.compact(gated)
        assert_same(small(x), gated(x))
        assert_counted(gated, small, (x,))


def mixed(opens: dict[str, list[bool]]) -> int:
    c, a, b = (sum(opens[name]) for name in ("into", "mix.0", "mix.1"))
    return 30 * c + 5 * a * c + a * b * c + 2 * b * c + 6 * c


def outer(opens: dict[str, list[bool]]) -> int:
    a, b, read = (sum(opens[name]) for name in ("a", "b", "read"))
    return 2 * 3 * (a + b) + 2 * a * b + a * b * read + 2 * a * read + 4 * read


def cubed(opens: dict[str, list[bool]]) -> int:
    k = sum(opens["into"])
    return 3 * k + k**3 + 2 * k**2 + 4 * k


def cubed_by_layer(opens: dict[str, list[bool]]) -> int:
    into, square, along, out = (np.array(opens[name]) for name in ("into", "square", "along", "out"))
    k = (square | along | out).sum()  # a unit is there if any of three reads it
    return int(k * into.sum() + square.sum() * k * k + 2 * along.sum() * k + 4 * out.sum())


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], object, Callable[[dict[str, list[bool]]], int]]] = {
    "tokens": (lambda: Mixer(3, (3, 2)), (1, 5, 6), HIDDEN, mixed),
    "from the left": (lambda: FromTheLeft(2, (2, 2)), (1, 5, 6), HIDDEN, mixed),
    "outer product": (Outer, (1, 2, 3), l0.shrinkable(), outer),
    "cubes": (Cubic, (1, 3), STREAM, cubed),
    "cubes, by layer": (lambda: Cubic(2), (1, 3), l0.per_layer(), cubed_by_layer),
}


@pytest.mark.parametrize("case", SMALL)
def test_expected_macs_are_the_mean_over_all_states(case: str) -> None:
    model, shape, where, by_hand = SMALL[case]
    torch.manual_seed(0)
    gated = scattered(l0.attach(model().double().eval(), torch.zeros(shape).double(), where=where))  # type: ignore[arg-type]
    mean = sum(weight * by_hand(by_name(gated, state)) for state, weight in every_state(gated))
    assert l0.macs(gated).item() == pytest.approx(mean, rel=1e-12)
    total = sum(l0.objectives.costs.breakdown(l0.macs, gated).values())
    assert total == pytest.approx(mean, rel=1e-12)


def test_closing_one_gate_saves_what_the_gradient_says() -> None:
    """A cost is linear in each gate, cubes too."""
    gated = l0.attach(Cubic().double(), torch.zeros(1, 3).double(), where=STREAM)
    opens = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    sizes = [cubed({"into": [True] * k}) for k in range(5)]
    saved = l0.objectives.costs.savings(l0.macs, gated, opens)
    assert saved.tolist() == pytest.approx([sizes[3] - sizes[2]] * 2 + [sizes[4] - sizes[3]] + [sizes[3] - sizes[2]])
