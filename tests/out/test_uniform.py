"""`uniform="blocks"`: layers whose names differ in numbers alone keep as many units, within the target, and fill it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0


class Blocks(nn.Module):
    """Two residual branches of one width, and a last one of another."""

    def __init__(self, wide: int, last: int = 6) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(4, wide) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(wide, 4) for _ in range(2))
        self.end = nn.Sequential(nn.Linear(4, last), nn.ReLU(), nn.Linear(last, 2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        out: Tensor = self.end(x)
        return out


@functools.cache
def traced(wide: int) -> l0.Gated:
    return l0.attach(Blocks(wide), torch.randn(2, 4))


def gated(wide: int = 64) -> l0.Gated:
    """With evidence that differs, and much more for the first branch than for the second."""
    torch.manual_seed(0)
    out = copy.deepcopy(traced(wide))
    for name, gate in out.named_gates():
        nn.init.normal_(gate.log_alpha, 3.0 if name == "up.0" else -1.0, 2.0)
    return out


def widths(network: nn.Module) -> tuple[int, int, int]:
    return network.up[0].out_features, network.up[1].out_features, network.end[0].out_features


def size(wide: int, last: int) -> int:
    """Parameters with these widths."""
    return 2 * (9 * wide + 4) + 7 * last + 2


@pytest.mark.slow
@pytest.mark.parametrize("at_most", [0.15, 0.3, 0.5, 0.77, 1.0])
def test_like_layers_keep_as_many_units_and_fill_the_target(at_most: float) -> None:
    network = gated()
    evidence = dict(zip(("up.0", "up.1"), network.evidence()[:128].split(64), strict=True))
    before = widths(l0.compact(network))
    assert before[0] != before[1]
    l0.finalize(network, at_most, uniform="blocks", fill=True)
    small = l0.compact(network)
    first, second, last = widths(small)
    most = at_most * size(64, 6)
    assert first == second
    assert first % 8 == 0
    assert size(first, last) == sum(p.numel() for p in small.parameters()) <= most
    assert first == 64 or size(first + 8, last) > most
    assert last == 6 or size(first, last + 1) > most
    for name, gate in network.named_gates():
        if name in evidence:  # those with most evidence
            assert gate.open().nonzero()[:, 0].tolist() == sorted(evidence[name].topk(first).indices.tolist())


def test_without_filling_nothing_but_the_mean_opens() -> None:
    network = gated()
    opens = network.opens()[:128].view(2, 64).sum(1).tolist()
    l0.finalize(network, 1.0, uniform="blocks")
    assert widths(l0.compact(network))[:2] == (8 * round(sum(opens) / 16),) * 2


def test_a_target_below_the_least_widths_is_refused() -> None:
    least = size(8, 1) / size(64, 6)
    l0.Budget(gated(), params=1.001 * least, steps=4, uniform="blocks")
    with pytest.raises(ValueError, match=r"`params` must be at least 0\.1"):
        l0.Budget(gated(), params=0.999 * least, steps=4, uniform="blocks")
    network = gated()
    before = network.opens()
    with pytest.raises(ValueError, match=r"`at_most` must be at least 0\.1"):
        l0.finalize(network, 0.999 * least, uniform="blocks")
    assert torch.equal(network.opens(), before)


def test_a_budget_hands_over_uniform_layers() -> None:
    network = gated(wide=16)  # fewer than 64: single units
    budget = l0.Budget(network, params=0.5, steps=6, uniform="blocks")
    optimizer = torch.optim.Adam(network.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for _ in range(6):
        network(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second, last = widths(budget.finish())
    assert first == second
    assert size(first, last) <= 0.5 * size(16, 6) < size(first + 1, last)
    other = l0.Budget(gated(wide=16), params=0.5, steps=6)
    with pytest.raises(ValueError, match="whose `uniform` is blocks, not None"):
        other.load_state_dict(budget.state_dict())


def test_what_is_no_such_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="`uniform` must be None or 'blocks', got True"):
        l0.Budget(gated(), params=0.5, steps=4, uniform=True)
    with pytest.raises(ValueError, match="`uniform` must be None or 'blocks', got 'layers'"):
        l0.finalize(gated(), 0.5, uniform="layers")
