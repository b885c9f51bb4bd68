"""Two small networks: the layers of LeNet-300-100 a tenth as wide, so that what is saved after every step is a tenth as
large; and one hidden layer, so that a compiler has little to compile.

Importing this file registers them as "narrow" and "shallow", for recipes in this process and in its forks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.experiments.networks import facts


class Narrow(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 32), nn.Linear(32, 12), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(h)))
        return logits


class Shallow(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 8, bias=False), nn.Linear(8, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


NARROW = facts.Network(
    name="narrow", title="MLP 784-32-12", make=lambda classes, dropout=0.0: Narrow(classes), images=(1, 28, 28),
    compiling=(20_000, 0.4), test_batch=10_000,
)  # fmt: skip
facts.register("narrow", lambda _: NARROW)
SHALLOW = facts.Network(
    name="shallow", title="MLP 784-8", make=lambda classes, dropout=0.0: Shallow(classes), images=(1, 28, 28),
    compiling=(20_000, 0.4), test_batch=10_000,
)  # fmt: skip
facts.register("shallow", lambda _: SHALLOW)
