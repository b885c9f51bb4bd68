"""Random networks, and what in them belongs together by a second reading that shares nothing with the library."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn


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
            op = draw(st.sampled_from(["last"] * (channels > 1) + ["mean", "flatten"]))
            x = net.add(op, None, (channels * (1 if op == "mean" else height**2), 0), x)
    if net.shapes[x][1] and draw(st.booleans()):
        x = net.add("flatten", None, (net.shapes[x][0] * net.shapes[x][1] ** 2, 0), x)
    layer(x, 2)
    return net
