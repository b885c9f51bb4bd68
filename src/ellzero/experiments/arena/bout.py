"""A bout: one method, one network, one share of its MACs, one seed. What the method is, is not known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor, nn

from ellzero.experiments.arena import counting
from ellzero.experiments.arena.loop import Loop
from ellzero.experiments.networks import Network


@final
@dataclass(frozen=True)
class Bout:
    """What a method gets."""

    network: Network
    at_most: float  # of the dense MACs
    loop: Loop
    found: Path | None = None  # the file of the network that `budget` found with the same seed, for `shape`

    @property
    def classes(self) -> int:
        """How many there are."""
        return len(self.loop.dataset.classes)

    @property
    def example(self) -> Tensor:
        """One image, as a network takes it."""
        return self.loop.example[:1]

    def dense(self) -> nn.Module:
        """The network with new weights, on the device."""
        return self.network.make(self.classes).to(self.example.device)

    @property
    def most(self) -> int:
        """The MACs that are allowed."""
        return int(self.at_most * counting.macs(self.dense(), self.example))


Method = Callable[[Bout], nn.Module]
