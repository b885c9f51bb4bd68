"""Small networks that tests share: a few of each kind, some small enough to visit every state of their gates."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


# ---------------------------------------------------------------- of a few units


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
