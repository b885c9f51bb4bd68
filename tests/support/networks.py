"""Small networks that tests share, and the oracle of all removal tests: a copy whose *activations* are masked by hand.

The library multiplies gates into weights and finds out by itself where. `masked_by_hand` does neither: the test says
which layer reads which
gates, and hooks multiply that layer's input. So the two can only agree if the library found what the test's author
knows.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
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
    a, b = a.detach(), b.detach()
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
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
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
        self.embed, self.up, self.down, self.head = (
            nn.Linear(3, width),
            nn.Linear(width, inner),
            nn.Linear(inner, width),
            nn.Linear(width, 2),
        )

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


# ---------------------------------------------------------------- random networks


class Drawn(nn.Module):
    """A network that runs a drawn program, and can tell by a second reading of it which channels belong together.

    Every instruction makes a new value from earlier ones: `(op, layer, *sources)`. `units()` reads the same program
    on lists of channel
    numbers instead of tensors. It shares nothing with the library, so that the two can be compared.
    """

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.layers = nn.ModuleDict()
        self.program: list[tuple[Any, ...]] = []
        self.shapes: list[tuple[int, int]] = [(channels, size)]  # channels and height (= width); height 0 is a vector
        self.grouped = False

    def add(self, op: str, layer: nn.Module | None, shape: tuple[int, int], *sources: int) -> int:
        """Appends an instruction; returns the number of the value that it makes."""
        name = f"{op}{len(self.program)}"
        if layer is not None:
            self.layers[name] = layer
        self.program.append((op, name, *sources))
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for op, name, *sources in self.program:
            a = [values[s] for s in sources]
            match op:
                case "reads" | "keeps" | "depth":
                    out = self.layers[name](a[0])
                case "sum":
                    out = a[0] + a[1]
                case "into":
                    a[1] += a[0]
                    out = a[1]
                case "scale":
                    out = a[0] * a[1].sigmoid().reshape(*a[1].shape, *[1] * (a[0].ndim - 2))
                case "cat":
                    out = torch.cat(a, 1)
                case "halves":
                    left, right = a[0].chunk(2, 1)
                    out = left.sigmoid() * right
                case "shuffle":
                    out = F.channel_shuffle(a[0], 2)
                case "flatten":
                    out = a[0].flatten(1)
                case "last":
                    out = a[0].permute(0, 2, 3, 1).reshape(len(x), -1)
                case "mean":
                    out = a[0].mean((2, 3))
            values.append(out)
        return values[-1]

    def units(self) -> tuple[dict[tuple[str, int], int], dict[str, list[int]], set[int], set[int]]:
        """What belongs together.

        Returns:
            The unit of each (layer, row), for each layer that reads the unit of each input, the units of the
            network's input, and
            those of its output.
        """
        count = self.shapes[0][0]
        parent = list(range(count))

        def find(u: int) -> int:
            while parent[u] != u:
                u = parent[u]
            return u

        def tie(us: Sequence[int], vs: Sequence[int]) -> None:
            for u, v in zip(us, vs, strict=True):
                parent[find(u)] = find(v)

        values = [list(range(count))]
        rows: dict[tuple[str, int], int] = {}
        reads: dict[str, list[int]] = {}
        for (op, name, *sources), (width, _height) in zip(self.program, self.shapes[1:], strict=True):
            a = [values[s] for s in sources]
            match op:
                case "reads":
                    reads[name] = a[0]
                    out = list(range(len(parent), len(parent) + width))
                    parent.extend(out)
                    rows |= {(name, k): u for k, u in enumerate(out)}
                case "depth":
                    times = width // len(a[0])
                    out = [u for u in a[0] for _ in range(times)]
                    rows |= {(name, k): u for k, u in enumerate(out)}
                case "keeps" | "mean":
                    out = a[0]
                case "sum" | "into" | "scale":
                    tie(a[0], a[1])
                    out = a[0]
                case "cat":
                    out = [u for part in a for u in part]
                case "halves":
                    tie(a[0][:width], a[0][width:])
                    out = a[0][:width]
                case "shuffle":
                    tie(a[0][: width // 2], a[0][width // 2 :])
                    out = [a[0][k % 2 * (width // 2) + k // 2] for k in range(width)]
                case "flatten" | "last":
                    size = self.shapes[sources[0]][1] ** 2
                    out = [u for u in a[0] for _ in range(size)] if op == "flatten" else a[0] * size
            values.append(out)
        settled = {place: find(u) for place, u in rows.items()}
        reading = {name: [find(u) for u in us] for name, us in reads.items()}
        return settled, reading, {find(u) for u in values[0]}, {find(u) for u in values[-1]}


ACTIVATIONS = (nn.ReLU, nn.Sigmoid, nn.GELU, nn.Tanh, nn.SiLU, nn.Softplus, nn.Identity)


@st.composite
def drawn_networks(draw: st.DrawFn) -> Drawn:
    """Random networks: depth, widths, norms, activations, residuals, concatenations, groups, pooling, flattening."""
    size = draw(st.sampled_from([0, 4, 5]))
    net = Drawn(draw(st.integers(1, 3)), size)
    wide = st.integers(1, 6)

    def layer(source: int, width: int, groups: int = 1) -> int:
        channels, height = net.shapes[source]
        bias = draw(st.booleans())
        if height == 0:
            return net.add("reads", nn.Linear(channels, width, bias=bias), (width, 0), source)
        kernel = draw(st.sampled_from([1, 3]))
        return net.add(
            "reads",
            nn.Conv2d(channels, width, kernel, padding=kernel // 2, groups=groups, bias=bias),
            (width, height),
            source,
        )

    def dressed(source: int) -> int:
        """A norm, an activation, or neither."""
        channels, height = net.shapes[source]
        if draw(st.booleans()):
            kind = nn.BatchNorm1d if height == 0 else draw(st.sampled_from([nn.BatchNorm2d, nn.InstanceNorm2d]))
            norm = kind(channels, affine=True)
            source = net.add("keeps", norm, (channels, height), source)
        kind = draw(st.sampled_from(ACTIVATIONS))
        return net.add("keeps", kind(), (channels, height), source)

    x = dressed(layer(0, draw(wide)))
    for _ in range(draw(st.integers(1, 4))):
        channels, height = net.shapes[x]
        options = ["plain", "residual", "cat", "excite"]
        options += ["halves"] * (channels % 2 == 0) + ["shuffle"] * (channels % 2 == 0 and height > 0)
        options += ["groups", "pool", "down"] * (height > 3) + ["depth"] * (height > 0 and channels > 1)
        kind = draw(st.sampled_from(options))
        if kind == "plain":
            x = dressed(layer(x, draw(wide)))
        elif kind == "residual":
            branch = layer(dressed(layer(dressed(x), draw(wide))), channels)
            x = net.add(draw(st.sampled_from(["sum", "into"])), None, (channels, height), x, branch)
        elif kind == "cat":
            parts = (
                [x, dressed(layer(x, draw(wide)))]
                if draw(st.booleans())
                else [layer(x, draw(wide)), dressed(layer(x, draw(wide)))]
            )
            x = net.add("cat", None, (sum(net.shapes[p][0] for p in parts), height), *parts)
        elif kind == "excite":
            pooled = net.add("mean", None, (channels, 0), x) if height else x
            scale = layer(dressed(layer(pooled, draw(wide))), channels)
            x = net.add("scale", None, (channels, height), x, scale)
        elif kind == "halves":
            x = net.add("halves", None, (channels // 2, height), x)
        elif kind == "shuffle":
            x = net.add("shuffle", None, (channels, height), x)
        elif kind == "depth":
            times = draw(st.integers(1, 2))
            conv = nn.Conv2d(channels, channels * times, 3, padding=1, groups=channels)
            x = dressed(net.add("depth", conv, (channels * times, height), x))
        elif kind == "groups":
            groups = draw(st.integers(2, 3))
            net.grouped = True
            x = layer(dressed(layer(x, groups * draw(st.integers(2, 3)))), groups * draw(st.integers(1, 3)), groups)
        elif kind == "pool":
            x = net.add("keeps", draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))(2), (channels, height // 2), x)
        elif kind == "down":
            op = draw(st.sampled_from(["flatten", "mean"] + ["last"] * (channels > 1)))
            x = net.add(op, None, (channels * (1 if op == "mean" else height**2), 0), x)
    if net.shapes[x][1] and draw(st.booleans()):
        x = net.add("flatten", None, (net.shapes[x][0] * net.shapes[x][1] ** 2, 0), x)
    layer(x, 2)
    return net
