"""LeNet-300-100 and LeNet-5-Caffe, for MNIST; plain `nn.Module`s that know nothing of gates, data or training."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments.networks.facts import Network, register


@final
class LeNet300(nn.Module):
    """LeNet-300-100 (LeCun et al., 1998): a perceptron with 300 and 100 hidden units, 266,610 parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 1, 28, 28), or of their pixels (N, 784)."""
        h = F.relu(self.fc1(x.flatten(1)))
        h = F.relu(self.fc2(h))
        logits: Tensor = self.fc3(h)
        return logits


@final
class LeNet5(nn.Module):
    """LeNet-5 as Caffe has it: 20 and 50 maps, each pooled, then 500 units; 431,080 parameters, 2.293 M MACs."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, 1, 28, 28)."""
        h = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = F.max_pool2d(F.relu(self.conv2(h)), 2)
        h = F.relu(self.fc1(h.flatten(1)))
        logits: Tensor = self.fc2(h)
        return logits


def _register(name: str, title: str, make: Callable[[int], nn.Module]) -> None:
    # What compiling takes and saves was seen on an H200, for a run alone; those of a stack save more.
    network = Network(
        name=name,
        title=title,
        make=lambda classes, dropout=0.0: make(classes),
        images=(1, 28, 28),
        compiling=(20_000, 0.4),
        test_batch=10_000,
    )
    register(name, lambda _: network)


_register("lenet300", "MLP 784-300-100", LeNet300)
_register("lenet5", "LeNet-5", LeNet5)
