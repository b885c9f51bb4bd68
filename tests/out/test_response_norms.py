"""Channels behind a global response norm go, exactly, once `l0.centred` has made its eps a number that can follow.

The oracle is a copy with hooks of the test's own: what the norm is given, and the bias that it adds, times the gates.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from support.formers import Responding
from support.oracles import HIDDEN, assert_counted, assert_same, set_gates, settled


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Response(nn.Module):
    """As in ConvNeXt V2, with channels last, or first as others have it. Its eps is large enough to matter."""

    def __init__(self, width: int, last: bool) -> None:
        super().__init__()
        shape = (1, 1, 1, width) if last else (1, width, 1, 1)
        self.last = last
        self.beta, self.gamma = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(1, 2) if self.last else (2, 3), keepdim=True)
        return self.gamma * (x * (size / (size.mean(-1 if self.last else 1, keepdim=True) + 0.3))) + self.beta + x


class Block(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.norm = last, Response(6, last)
        self.up: nn.Module = nn.Linear(3, 6) if last else nn.Conv2d(3, 6, 1)
        self.down: nn.Module = nn.Linear(6, 2) if last else nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if self.last else x
        return self.down(self.norm(F.gelu(self.up(x))))  # type: ignore[no-any-return]


def test_a_norm_that_a_function_holds_is_replaced_there_too() -> None:
    """Or the compact network would go on with the norm, and the weights, of another one."""
    model: Any = settled(nn.Sequential(Responding(8, 6)))
    with pytest.raises(ValueError, match=r"`mean` in `0.norm` mixes its units, which `l0.centred` may do away with"):
        l0.attach(model, draw(2, 5, 8), where=HIDDEN)
    gated = l0.attach(l0.centred(model, draw(2, 5, 8)), draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"0.up": [0, 2, 3]})["0.up"]
    small: Any = l0.compact(gated)
    hand = copy.deepcopy(model)
    hand[0].runs = lambda x, m=hand[0]: m.down(m.norm(F.gelu(z * m.up(x))))
    with torch.no_grad():
        hand[0].norm.beta.mul_(z)
    assert_same(small(draw(3, 7, 8)), hand(draw(3, 7, 8)))
    out = small(draw(3, 7, 8))
    with torch.no_grad():
        small[0].norm.beta.add_(1)
    assert (small(draw(3, 7, 8)) - out).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("last", [True, False])
def test_channels_behind_a_response_norm_go(last: bool) -> None:
    model: Any = settled(Block(last))
    found: Any = l0.centred(model, draw(2, 3, 4, 4))
    assert found.state_dict().keys() == model.state_dict().keys()
    assert_same(found(draw(3, 3, 5, 4)), model(draw(3, 3, 5, 4)))
    gated = l0.attach(found, draw(2, 3, 4, 4)).eval()
    z = set_gates(gated, {"up": [0, 2, 3]})["up"]
    hand, small = copy.deepcopy(model), l0.compact(gated)
    lying = z if last else z.reshape(-1, 1, 1)
    with torch.no_grad():
        hand.norm.beta.mul_(lying)
        hand.up.weight.mul_(z.reshape(-1, *[1] * (hand.up.weight.ndim - 1)))
        hand.up.bias.mul_(z)
    for x in (draw(2, 3, 4, 4), draw(3, 3, 5, 4)):
        assert_same(gated(x), hand(x))
        assert_same(small(x), hand(x))
    assert small.norm.gamma.numel() == 3
    assert small.norm.eps == pytest.approx(0.6)
    assert_counted(gated, small, (draw(2, 3, 4, 4),))


class Other(Response):
    """One that is none: it divides by the largest."""

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (size / (size.amax(-1, keepdim=True) + 0.3))) + self.beta + x


def test_what_only_looks_like_one_is_left_as_it_is() -> None:
    model = Block(last=True)
    model.norm = Other(6, last=True)
    with pytest.raises(ValueError, match="no stream whose norms could do without a mean"):
        l0.centred(settled(model), draw(2, 3, 4, 4))
