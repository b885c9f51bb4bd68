"""Networks small enough to visit every state of their gates, and the few handles that tests of gates share."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0
from ellzero.gated.module import Gated


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Sequential:
    """LeNet-5-Caffe, as in both papers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


class ConvNet(nn.Module):
    """conv 1 → 3, norm, conv 3 → 2, norm, pooled, linear 2 → 2; images of 4 × 4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 2)
        for norm in (self.norm1, self.norm2):  # a closed channel must not leave its beta behind
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Flattened(nn.Module):
    """Two convolutions and a layer that reads single positions of the flattened maps (two of them per map)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 2, 2), nn.Conv1d(2, 2, 2)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv2(torch.relu(self.conv1(x)))).flatten(1))


class Residual(nn.Module):
    """A stream of three units with a square block, a block with two hidden units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.square = nn.Linear(2, 3), nn.Linear(3, 3)
        self.up, self.down = nn.Linear(3, 2), nn.Linear(2, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.square(torch.relu(x))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x)


class SquareStream(nn.Module):
    """A stream with one square block: under `per_layer` two layers read it, with gates of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.square, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(x + self.square(x))


class TwoReaders(nn.Module):
    """Three units that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.left(x), self.right(x)


class Concat(nn.Module):
    """Two branches of two and three units, side by side in front of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.left(x)), torch.relu(self.right(x))], 1))


class Grouped(nn.Module):
    """conv 1 → 4, grouped 4 → 4 in two groups, conv 4 → 1; signals of length 3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped, self.last = nn.Conv1d(1, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.grouped(torch.tanh(self.first(x)))))


class Tied(nn.Module):
    """Two readers of one axis that share their weight, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.a(h) + 2 * self.b(h * h)


class Shared(nn.Module):
    """One layer called twice, on two axes that it thereby makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.both, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.both(torch.relu(self.one(x)))) + self.both(torch.tanh(self.two(x))))


def scattered(gated: Gated, spread: float = 2.0) -> Gated:
    """Gates all over: nearly open, nearly closed and between."""
    for _, gate in gated.named_gates():
        nn.init.normal_(gate.log_alpha, std=spread)
    return gated


def set_gates(gated: Gated, opens: Sequence[bool]) -> None:
    """Test-time gates exactly 1 where `opens` says so, and exactly 0 elsewhere."""
    rest = torch.tensor([8.0 if o else -8.0 for o in opens])
    with torch.no_grad():
        for _, gate in gated.named_gates():
            n = gate.shape.numel()
            gate.log_alpha.copy_(rest[:n].reshape(gate.shape))
            rest = rest[n:]
    assert not len(rest)


def every_state(gated: Gated) -> Iterator[tuple[tuple[bool, ...], float]]:
    """Every state of all gates, with its probability: the product over gates of P(open) or P(closed)."""
    p = gated.prob_open().tolist()
    for state in itertools.product((False, True), repeat=len(p)):
        weight = 1.0
        for is_open, q in zip(state, p, strict=True):
            weight *= q if is_open else 1 - q
        yield state, weight


def by_name(gated: Gated, state: Sequence[bool]) -> dict[str, list[bool]]:
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
