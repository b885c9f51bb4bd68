"""LeNet-300-100 and LeNet-5-Caffe, for MNIST; plain `nn.Module`s that know nothing of gates, data or training."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments.networks.facts import Network, register, scaled_widths


@final
class LeNet300(nn.Module):
    """LeNet-300-100 (LeCun et al., 1998): a perceptron with 300 and 100 hidden units, or a share of these; 266,610
    parameters.
    """

    def __init__(self, classes: int = 10, share: float = 1.0) -> None:
        super().__init__()
        first, second = scaled_widths((300, 100), share)
        self.fc1 = nn.Linear(784, first)
        self.fc2 = nn.Linear(first, second)
        self.fc3 = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 1, 28, 28), or of their pixels (N, 784)."""
        h = F.relu(self.fc1(x.flatten(1)))
        h = F.relu(self.fc2(h))
        logits: Tensor = self.fc3(h)
        return logits


@final
class LeNet5(nn.Module):
    """LeNet-5 as Caffe has it: 20 and 50 maps, each pooled, then 500 units, or a share of these; 431,080 parameters,
    2.293 M MACs.
    """

    def __init__(self, classes: int = 10, share: float = 1.0) -> None:
        super().__init__()
        first, second, hidden = scaled_widths((20, 50, 500), share)
        self.conv1 = nn.Conv2d(1, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * 4 * 4, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 1, 28, 28)."""
        h = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = F.max_pool2d(F.relu(self.conv2(h)), 2)
        h = F.relu(self.fc1(h.flatten(1)))
        logits: Tensor = self.fc2(h)
        return logits


def _register(name: str, title: str, make: Callable[..., nn.Module]) -> None:
    # What compiling takes and saves was seen on an H200, for a run alone; those of a stack save more.
    network = Network(
        name=name,
        title=title,
        make=lambda classes, dropout=0.0: make(classes),
        narrower=make,
        images=(1, 28, 28),
        compiling=(20_000, 0.4),
        test_batch=10_000,
    )
    register(name, lambda _: network)


_register("lenet300", "MLP 784-300-100", LeNet300)
_register("lenet5", "LeNet-5", LeNet5)
