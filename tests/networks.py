"""Small networks that tests share, and the oracle of all removal tests: a copy whose *activations* are masked by hand.

The library multiplies gates into weights and finds out by itself where. `masked_by_hand` does neither: the test says which layer reads which
gates, and hooks multiply that layer's input. So the two can only agree if the library found what the test's author knows.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0

Spread = Callable[[Tensor], Tensor]
Readers = Mapping[str, Mapping[str, Spread]]  # set of gates -> layer that reads it -> how z lies on the layer's input


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
    scale = max(1.0, float(a.abs().max())) if a.numel() else 1.0
    assert float((a - b).abs().max()) <= tolerance * scale if a.numel() else True


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def counted_macs(model: nn.Module, args: Sequence[Any]) -> float:
    """MACs of one forward by torch's own counter, which sees attention in its plain form only."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(*args)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() / 2


# ---------------------------------------------------------------- networks


class MLP(nn.Module):
    def __init__(self, *sizes: int, activation: type[nn.Module] = nn.ReLU):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class LeNet(nn.Module):
    """LeNet-5 in small: two convolutions, a flatten, two linear layers."""

    def __init__(self, maps: tuple[int, int] = (4, 5), hidden: int = 6):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, maps[0], 3), nn.Conv2d(maps[0], maps[1], 3)
        self.fc1, self.fc2 = nn.Linear(maps[1] * 4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class ResNet(nn.Module):
    """A stem, a residual block with batch norm, a second block that changes the width, and a head."""

    def __init__(self, width: int = 6, inner: int = 5, in_place: bool = False):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(inner), nn.Conv2d(inner, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 3)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        if self.in_place:
            out += x
        else:
            out = x + out
        return self.head(F.relu(self.norm(out)).mean((2, 3)))


class FeedForward(nn.Module):
    """A transformer's feed-forward part on a residual stream, without a norm."""

    def __init__(self, width: int = 5, inner: int = 7):
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Linear(3, width), nn.Linear(width, inner), nn.Linear(inner, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(torch.sigmoid(self.up(x))))


class SqueezeExcite(nn.Module):
    """A convolution scaled channel by channel by what two small layers make of its mean."""

    def __init__(self, width: int = 6, squeezed: int = 4):
        super().__init__()
        self.conv1 = nn.Conv2d(2, width, 3)
        self.squeeze, self.excite = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.conv2 = nn.Conv2d(width, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.conv2(x * scale)
