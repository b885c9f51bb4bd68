"""Heads that are given something each, as slopes of ALiBi, go once attention keeps their numbers.

The oracle is a copy whose output projections are multiplied by hand.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from support.oracles import assert_counted, assert_same, set_gates, settled


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Attention(nn.Module):
    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat, self.heads, self.size = flat, 4, 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, self.heads, 3, self.size).permute(3, 0, 2, 1, 4)
        if self.flat:  # batch and heads in one, as in BLOOM
            q, k, v = (a.reshape(b * self.heads, t, self.size) for a in (q, k, v))
            y = (torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(-1) @ v).view(b, self.heads, t, self.size)
        else:
            y = (q @ k.transpose(2, 3) + bias).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(b, t, self.heads * self.size))  # type: ignore[no-any-return]


class Sloped(nn.Module):
    """Slopes are computed once, from the number of heads, for all layers."""

    def __init__(self, shape: str, named: bool) -> None:
        super().__init__()
        self.shape, self.named, self.heads = shape, named, 4
        self.layers = nn.ModuleList(Attention(shape == "batch and heads") for _ in range(2))
        self.head = nn.Linear(8, 3)

    def slopes(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).to(x)
        bias = (2.0 ** -torch.arange(1, self.heads + 1)).to(x)[:, None, None] * places
        if self.shape == "four":
            return bias.expand(len(x), -1, x.shape[1], -1)
        return bias.repeat(len(x), 1, 1) if self.shape == "batch and heads" else bias

    def forward(self, x: Tensor) -> Tensor:
        bias = self.slopes(x)
        for layer in self.layers:
            x = layer(x, bias=bias) if self.named else layer(x, bias)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "named"), [("heads", False), ("batch and heads", True), ("four", True), ("four", False)]
)
def test_heads_take_their_slopes_along(shape: str, named: bool) -> None:
    model: Any = settled(Sloped(shape, named))
    with pytest.raises(ValueError, match=r"as a slope of ALiBi, could follow in a buffer of it, or by `l0.numbered`"):
        l0.attach(model, draw(2, 5, 8))
    found: Any = l0.numbered(model, draw(4, 4, 8))  # as many examples and places as heads
    assert torch.equal(found(draw(3, 7, 8)), model(draw(3, 7, 8)))
    gated = l0.attach(found, draw(2, 5, 8)).eval()
    for closed in ({"layers.0.qkv": [0, 2], "layers.1.qkv": [3]}, {"layers.1.qkv": [0, 1, 3]}):
        z = set_gates(gated, closed)
        small, hand = l0.compact(gated), copy.deepcopy(model)
        with torch.no_grad():
            for k, layer in enumerate(hand.layers):
                layer.out.weight.mul_(z[f"layers.{k}.qkv"].repeat_interleave(2))
        for x in (draw(2, 5, 8), draw(3, 7, 8), draw(1, 4, 8)):
            assert_same(gated(x), hand(x))
            assert_same(small(x), hand(x))
        assert_counted(gated, small, (draw(2, 5, 8),))
    assert small.layers[1].heads_left.numbers.tolist() == [2]


class Own(nn.Module):
    """Attention that makes by itself what its heads meet."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.heads = made, 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, self.heads, 3, 2).permute(3, 0, 2, 1, 4)
        bias = 2.0 ** -torch.arange(1, self.heads + 1).to(x)
        if self.made == "angles":
            bias = torch.view_as_real(torch.ones(self.heads, dtype=torch.complex128)).sum(-1)
        y = (q @ k.transpose(2, 3) + bias[:, None, None]).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, self.heads * 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("made", "hint"), [("slopes", ": what a head has of its own"), ("angles", "")])
def test_numbers_are_advised_where_they_help_alone(made: str, hint: str) -> None:
    model: Any = settled(nn.Sequential(Own(made)))
    frozen = {a.name: a.frozen for a in l0.graph.trace(model, draw(2, 5, 8)).axes}["0.qkv"]
    assert "it meets the output of" in str(frozen)
    assert (": what a head" in str(frozen)) == bool(hint)
    assert "l0.numbered" not in str(frozen)


def test_without_such_heads_it_says_so() -> None:
    with pytest.raises(ValueError, match="no attention is given something for each of its heads"):
        l0.numbered(nn.Linear(8, 4), draw(2, 8).float())
