"""Features and pixels that a linear layer with more inputs than outputs reads have gates by default.

Which layers these are is told by hand; what is left is held against a copy whose inputs are masked by hand, in float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from support.oracles import assert_counted, assert_same, counted_macs, masked_by_hand, same, set_gates, settled
from support.zoo import mlp


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Net(nn.Module):
    """Layers by their names, and a forward over them."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Tensor) -> Tensor:
        return self.way(self, *args)


def both(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two inputs, each with a layer of its own."""
    out: Tensor = m.out(torch.cat([m.wide(x).tanh(), m.flat(y).tanh()], -1))
    return out


def twice(m: Any, x: Tensor) -> Tensor:
    """Two layers that read the same input; one of them as a norm leaves it."""
    out: Tensor = m.out(m.wide(m.norm(x)).tanh()) + m.skip(x)
    return out


def added(m: Any, x: Tensor) -> Tensor:
    """A sum onto the input, which is a stream and no input any more."""
    out: Tensor = m.out(x + m.down(m.up(x).tanh()))
    return out


def looked_at(m: Any, x: Tensor, words: Tensor) -> Tensor:
    """An image and words: neither is read by a linear layer."""
    out: Tensor = m.out(torch.cat([m.conv(x).flatten(1).tanh(), m.table(words)], -1))
    return out


def seen(m: Any, x: Tensor) -> Tensor:
    """A convolution and a linear layer that read the same features."""
    out: Tensor = m.conv(x.transpose(1, 2)).transpose(1, 2) + m.wide(x)
    return out


def made_of(m: Any, x: Tensor, words: Tensor) -> Tensor:
    """A layer that reads features and units side by side."""
    out: Tensor = m.out(m.wide(torch.cat([x, m.table(words)], -1)).tanh())
    return out


LINEAR, WORDS = nn.Linear, torch.arange(3)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, int]]] = {
    "more inputs": (lambda: mlp(6, 5, 2), (draw(3, 6),), {"0": 6}),
    "square": (lambda: mlp(5, 5, 2), (draw(3, 5),), {}),
    "fewer": (lambda: mlp(4, 5, 2), (draw(3, 4),), {}),
    "one layer": (lambda: LINEAR(6, 2), (draw(3, 6),), {"weight": 6}),
    "an autoencoder": (lambda: mlp(9, 3, 9), (draw(3, 9),), {"0": 9}),
    "a sequence": (lambda: mlp(6, 4, 2), (draw(3, 5, 6),), {"0": 6}),
    "two inputs": (
        lambda: Net(both, wide=LINEAR(7, 4), flat=LINEAR(3, 5), out=LINEAR(9, 2)), (draw(3, 7), draw(3, 3)),
        {"wide": 7},
    ),
    "one input, two layers": (
        lambda: Net(twice, norm=nn.BatchNorm1d(6), wide=LINEAR(6, 5), skip=LINEAR(6, 2), out=LINEAR(5, 2)),
        (draw(3, 6),), {"wide": 6, "skip": 6},
    ),
    "beside a square one": (
        lambda: Net(twice, norm=nn.Identity(), wide=LINEAR(6, 6), skip=LINEAR(6, 2), out=LINEAR(6, 2)),
        (draw(3, 6),), {},
    ),
    "beside a convolution": (lambda: Net(seen, conv=nn.Conv1d(6, 2, 1), wide=LINEAR(6, 2)), (draw(3, 5, 6),), {}),
    "behind a norm that mixes": (
        lambda: Net(twice, norm=nn.LayerNorm(6), wide=LINEAR(6, 5), skip=LINEAR(6, 2), out=LINEAR(5, 2)),
        (draw(3, 6),), {"skip": 6},
    ),
    "a stream": (lambda: Net(added, up=LINEAR(6, 4), down=LINEAR(4, 6), out=LINEAR(6, 2)), (draw(3, 6),), {"up": 6}),
    "a convolution and an embedding": (
        lambda: Net(looked_at, conv=nn.Conv1d(9, 2, 3), table=nn.Embedding(6, 3), out=LINEAR(5, 2)),
        (draw(3, 9, 3), WORDS), {},
    ),
    "features and units": (
        lambda: Net(made_of, wide=LINEAR(9, 4), table=nn.Embedding(6, 3), out=LINEAR(4, 2)), (draw(3, 6), WORDS), {},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_default_gates_lie_on_the_inputs_of_layers_with_more_inputs_than_outputs(case: str, tmp_path: Path) -> None:
    make, args, wide = CASES[case]
    model = settled(make())
    names = {f"{layer}.inputs": size for layer, size in wide.items()}
    graph = l0.attach(model, args, where=l0.shrinkable(inputs=True, parts=True)).graph
    hidden = {p.name for p in l0.shrinkable(inputs=False)(graph)}
    default, every = (w(graph) for w in (l0.shrinkable(), l0.shrinkable(inputs=True)))
    assert {p.name: p.shape[0] for p in default if p.name not in hidden} == names
    assert {p.name for p in every} >= {p.name for p in default} == hidden | names.keys()
    if not names:
        return
    gated = l0.attach(model, args, graph=graph, where=lambda g: [p for p in default if p.name in names]).eval()
    z = set_gates(gated, {name: range(0, size, 2) for name, size in names.items()})
    readers = {name: {"" if layer == "weight" else layer: same} for name, layer in zip(names, wide, strict=True)}
    theirs = masked_by_hand(model, z, readers)(*args)
    small = l0.compact(gated)
    assert_same(gated(*args), theirs)
    assert_same(small(*args), theirs)
    assert_counted(gated, small, args)
    l0.save(small, tmp_path / "small")
    assert_same(l0.load(settled(make()), tmp_path / "small")(*args), theirs)


def test_parts_have_gates_on_all_inputs_unless_these_are_to_stay() -> None:
    x = torch.zeros(2, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2))

    def names(**options: Any) -> set[str]:
        return {p.name for p in l0.attach(model, x, where=l0.shrinkable(parts=True, **options)).placements}

    assert names() == names(inputs=True) == {"0.inputs", "2.inputs"}
    assert names(inputs=False) == {"2.inputs"}


@pytest.mark.slow
@pytest.mark.parametrize("apply", ["weights", "activations"])
def test_a_budget_over_a_wide_input_ends_within_its_macs_and_finds_the_features(apply: Any) -> None:
    """Of 60 features two tell the class; the README's loop."""
    torch.manual_seed(0)
    x = torch.randn(2048, 60)
    y = (x[:, 3] * x[:, 41] > 0).long()
    model = nn.Sequential(nn.Linear(60, 24), nn.ReLU(), nn.Linear(24, 2))
    dense = counted_macs(model, (x,))
    gated, steps = l0.attach(model, x[:2], apply=apply), 400
    budget = l0.Budget(gated, macs=0.1, steps=steps)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        F.cross_entropy(gated(x[rows]), y[rows]).backward()
        optimizer.step()
    small: Any = budget.finish().eval()
    assert counted_macs(small, (x,)) <= 0.1 * dense
    assert {3, 41} <= set(small[0].select.index.tolist())
    assert len(small[0].select.index) < 30
    assert float((small(x).argmax(1) == y).float().mean()) > 0.9
