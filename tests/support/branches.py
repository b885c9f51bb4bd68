"""Small networks with branches that can go as a whole, as users write them, and the copy of one masked by hand.

Nothing here asks the library where a branch ends: a test says whose output to multiply.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """As torchvision has it: a way around with a convolution where the shape changes, one ReLU for both places."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


class Basic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layer = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 6, 2))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Torch's own layers, with norms in front."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(x))  # type: ignore[no-any-return]


class Feed(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 3, hidden: int = 2):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Around(nn.Module):
    """A branch in a branch, and two branches in one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.outer, self.inner, self.last = nn.Linear(3, 3), Feed(), nn.Linear(3, 3)
        self.left, self.right = Feed(hidden=1), Feed(hidden=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.outer(x)
        x = x + self.last(y + self.inner(y))
        return self.head(x + (self.left(x) + self.right(x)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Experts that a router weighs, as a branch: each of them is one too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.router = nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.experts = nn.ModuleList(Feed(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        shares = self.router(x).softmax(-1)
        mixed = sum(shares[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts))
        return self.head(x + mixed)  # type: ignore[no-any-return]


class Refused(nn.Module):
    """A branch that cannot go as a whole, for the reason in `why`."""

    def __init__(self, why: str):
        super().__init__()
        self.why, self.stem, self.head = why, nn.Linear(2, 4), nn.Linear(4, 2)
        self.feed = Feed(4, 3)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = self.feed(x)
        match self.why:
            case "it serves twice":
                return self.head(x + y + self.feed(x.sin()))
            case "something else reads it":
                return self.head(x + y) + y[:, :2]
            case "it adds a number":
                return self.head(x + (y + 1.0))
            case "a norm follows, whatever its size":
                return self.head(x + y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight))
            case "a product is left":
                return self.head(x + F.linear(F.linear(x, self.feed.up.weight).relu(), self.feed.down.weight))
        return self.head(y)  # there is no way around it


def times(model: nn.Module, z: Mapping[str, Tensor]) -> nn.Module:
    """A copy in which what modules give, by their path, is multiplied."""
    out = copy.deepcopy(model)
    for path, factor in z.items():

        def hook(_: nn.Module, __: Any, made: Any, factor: Tensor = factor) -> Any:
            return (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor

        out.get_submodule(path).register_forward_hook(hook)
    return out
