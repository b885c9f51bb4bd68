"""A contest: one method at one share of a network's MACs, with all its seeds; a row of the arena's table.

Here it is what is to be done, and how one seed of it is done. When and in which process is not known here.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from ellzero.experiments import networks
from ellzero.experiments.arena import counting, ours, rivals, scratch
from ellzero.experiments.arena.bout import Bout, Method
from ellzero.experiments.arena.loop import BATCH, DECAY, RATE, Loop
from ellzero.experiments.data import KNOWN, Dataset, Tensors
from ellzero.experiments.store.provenance import provenance
from ellzero.out import saving

Record = dict[str, Any]
OURS, DENSE = "budget", "dense"
METHODS: dict[str, Method] = {
    OURS: ours.budget,
    **ours.FAMILIES,
    **ours.CHANGED,
    **ours.HIDDEN,
    **ours.INPUTS,
    **rivals.RIVALS,
    "narrow": scratch.narrow,
    **scratch.SHAPES,
    DENSE: scratch.dense,
}


@final
@dataclass(frozen=True)
class Contest:
    """One method, one network, one share of its MACs."""

    network: str
    method: str
    at_most: float  # of the dense MACs; 1 of the dense network
    data: str
    epochs: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not 0 < self.at_most <= 1 or (self.at_most == 1) != (self.method == DENSE):
            raise ValueError(f"`at_most` must be in (0, 1), and 1 of the dense network alone, got {self.at_most}")
        if self.epochs < 2:
            raise ValueError(f"`epochs` must be at least 2: some methods train twice, got {self.epochs}")
        images = networks.find(self.network).images
        if self.data in KNOWN and images not in (None, KNOWN[self.data].shape):
            raise ValueError(f"`data` must have images of {images} for `{self.network}`, got {self.data!r}")

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.network}-{100 * self.at_most:02.0f}-{self.method}"

    @property
    def needs(self) -> str | None:
        """The name of the contest whose networks it starts from."""
        return replace(self, method=OURS).name if self.method in scratch.SHAPES else None

    def settings(self) -> Record:
        """All that decides what comes out, but the seed."""
        loop = {"batch": BATCH, "lr": RATE, "weight_decay": DECAY, "optimizer": "sgd", "schedule": "cosine"}
        return {"name": self.name, **asdict(self), **loop}

    def fought(self, seed: int, dataset: Dataset, found: Path) -> Record:
        """What came out of one seed. The file `found` is of the network that `budget` finds, and others start from."""
        if not isinstance(dataset, Tensors):
            raise TypeError(f"`data` must be in memory, got {type(dataset).__name__}")
        torch.manual_seed(seed)
        loop = Loop(dataset, self.epochs, seed)
        bout = Bout(networks.find(self.network), self.at_most, loop, found)
        start = time.perf_counter()
        network = METHODS[self.method](bout)
        seconds = time.perf_counter() - start
        whole, kept = (counting.macs(n, bout.example) for n in (bout.dense(), network))
        error = loop.error(network)
        if self.method == OURS:
            found.parent.mkdir(parents=True, exist_ok=True)
            saving.save(network.cpu(), found)
        return {
            "seed": seed,
            "error_last": error,
            "macs": {"dense": whole, "kept": kept / whole},
            "params": sum(p.numel() for p in network.parameters()),
            "steps": loop.taken,
            "precision": "bfloat16" if loop.half else "float32",
            "seconds": loop.seconds,
            "seconds_in_all": seconds,  # attaching and pruning counted in
            "shapes": {name: list(p.shape) for name, p in network.named_parameters() if p.ndim > 1},
            "about": provenance(dataset.device),
        }
