"""Oracles that tests share: a copy whose *activations* are masked by hand, every state of the gates, torch's counter.

The library multiplies gates into weights and finds out by itself where. `masked_by_hand` does neither: the test says
which layer reads which gates, and hooks multiply that layer's input. So the two can only agree if the library found
what the test's author knows.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0

HIDDEN = l0.shrinkable(inputs=False)  # where a test counts the gates of units, and few of them read many inputs

Spread = Callable[[Tensor], Tensor]
Readers = Mapping[str, Mapping[str, Spread]]  # placement -> layer that reads it -> how z lies on the layer's input


def same(z: Tensor) -> Tensor:
    return z


def each(times: int) -> Spread:
    """Every unit is a block of entries: a map that was flattened."""
    return lambda z: z.repeat_interleave(times)


def tiled(times: int) -> Spread:
    """The units come round again and again: a flattened map with channels last."""
    return lambda z: z.repeat(times)


def between(before: int, after: int) -> Spread:
    """Other inputs lie before and after: a concatenation."""
    return lambda z: torch.cat([z.new_ones(before), z, z.new_ones(after)])


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64 and evaluation, with numbers everywhere that would show a mistake: no zero bias, no unit variance."""
    generator = torch.Generator().manual_seed(seed)
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
            elif buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return model


def set_gates(gated: l0.Gated, closed: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Gives every gate a test-time value in (0, 1] and closes those that are named. Returns the values by name."""
    generator = torch.Generator().manual_seed(seed)
    for name, gate in gated.named_gates():
        mask = torch.zeros(gate.shape.numel(), dtype=torch.bool)
        mask[list(closed.get(name, ()))] = True
        with torch.no_grad():
            gate.log_alpha.copy_(4 * torch.rand(gate.shape, generator=generator, dtype=torch.float64) - 1)
        gate.close_(mask.reshape(gate.shape))
    unknown = closed.keys() - dict(gated.named_gates()).keys()
    assert not unknown, f"no gates {unknown}, only {list(dict(gated.named_gates()))}"
    return {name: gate.value().detach() for name, gate in gated.named_gates()}


def masked_by_hand(model: nn.Module, z: Mapping[str, Tensor], readers: Readers) -> nn.Module:
    """A copy of the dense model in which each reader's input is multiplied by the gates that the test says it reads."""
    out = copy.deepcopy(model)
    for name, layers in readers.items():
        for path, spread in layers.items():
            factor = spread(z[name])
            layer: Any = out.get_submodule(path)
            if not isinstance(layer, nn.Linear):  # channels first
                factor = factor.reshape(-1, *[1] * (layer.weight.ndim - 2))

            def hook(_: nn.Module, args: tuple[Tensor, ...], factor: Tensor = factor) -> tuple[Tensor, ...]:
                return (args[0] * factor, *args[1:])

            layer.register_forward_pre_hook(hook)
    return out


def assert_same(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    """Equal to 1e-12 of the largest entry."""
    assert a.shape == b.shape
    a, b = a.detach(), b.detach()
    scale = max(1.0, float(a.abs().max())) if a.numel() else 1.0
    assert float((a - b).abs().max()) <= tolerance * scale if a.numel() else True


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def counted_macs(model: Callable[..., Any], args: Sequence[Any]) -> float:
    """MACs of one forward by torch's own counter, which sees attention in its plain form only."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(*args)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() / 2


def assert_counted(gated: l0.Gated, small: nn.Module, args: Sequence[Any]) -> None:
    """Kept cost is that of the network that came out, to the unit."""
    assert float(l0.params(gated, kept=True)) == numel(small)
    if gated.graph.products is not None:
        kept = float(l0.macs(gated, kept=True)) * args[0].shape[0]
        assert kept == pytest.approx(counted_macs(small, args), rel=1e-12)


# ---------------------------------------------------------------- states of gates


def scattered(gated: l0.Gated, spread: float = 2.0) -> l0.Gated:
    """Gates all over: nearly open, nearly closed and between."""
    for _, gate in gated.named_gates():
        nn.init.normal_(gate.log_alpha, std=spread)
    return gated


def open_exactly(gated: l0.Gated, opens: Sequence[bool]) -> None:
    """Test-time gates exactly 1 where `opens` says so, and exactly 0 elsewhere."""
    rest = torch.tensor([8.0 if o else -8.0 for o in opens])
    with torch.no_grad():
        for _, gate in gated.named_gates():
            n = gate.shape.numel()
            gate.log_alpha.copy_(rest[:n].reshape(gate.shape))
            rest = rest[n:]
    assert not len(rest)


def every_state(gated: l0.Gated) -> Iterator[tuple[tuple[bool, ...], float]]:
    """Every state of all gates, with its probability: the product over gates of P(open) or P(closed)."""
    p = gated.prob_open().tolist()
    for state in itertools.product((False, True), repeat=len(p)):
        weight = 1.0
        for is_open, q in zip(state, p, strict=True):
            weight *= q if is_open else 1 - q
        yield state, weight


def by_name(gated: l0.Gated, state: Sequence[bool]) -> dict[str, list[bool]]:
    out, start = {}, 0
    for name, gate in gated.named_gates():
        out[name] = list(state[start : start + gate.shape.numel()])
        start += gate.shape.numel()
    return out


def measured(model: nn.Module, x: Tensor) -> tuple[int, float]:
    """Parameters, and MACs for one example by torch's own counter."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() / 2 / len(x)


COSTS = (l0.params, l0.macs, l0.units)
