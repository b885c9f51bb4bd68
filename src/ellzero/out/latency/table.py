"""What was measured of a network's time, as plain data: a table, its JSON, and which network and machine it is of."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ellzero.gated.module import Gated
from ellzero.graph.tracing import batch_size
from ellzero.graph.trials.fingerprint import layers
from ellzero.out.latency.meter import device_name

FORMAT = {"format": "ellzero.latency", "format_version": 1}


@dataclass(frozen=True)
class Width:
    """A width that a region's time depends on, and the region's time along it, where all other widths are dense."""

    rows: tuple[int, ...]  # of the census of widths: the width is their sum
    widths: tuple[float, ...]  # from the smallest to the dense one
    shares: tuple[float, ...]  # the region's time at each, as shares of the dense network's


@dataclass(frozen=True)
class Region:
    """A layer and what follows it up to the next."""

    name: str  # of the layer
    share: float  # of the dense network's time
    constant: float  # that of `curves`
    along: tuple[Width, ...]  # the widths that its time depends on
    blocks: tuple[int, ...] = ()  # numbers of the gated blocks that it lies in
    rest: float = 0.0  # what it takes once one of them is gone, as the sum does that the block was a part of


@dataclass(frozen=True)
class Where:
    """What a time depends on beside the network: a kind of device as torch calls it, its name, and so on."""

    kind: str
    device: str
    batch: int
    dtype: str
    threads: int
    torch_version: str

    @classmethod
    def here(cls, device: torch.device, batch: int, dtype: torch.dtype) -> Where:
        threads = torch.get_num_threads() if device.type == "cpu" else 0  # else they do not compute
        name = str(dtype).removeprefix("torch.")
        return cls(device.type, device_name(device), batch, name, threads, torch.__version__)

    @classmethod
    def of(cls, gated: Gated) -> Where:
        """Where a network computes now, on a batch like its example's."""
        reference = next(p for p in gated.model.parameters() if p.is_floating_point())
        return cls.here(reference.device, batch_size(gated.example_inputs), reference.dtype)

    @property
    def numbers(self) -> torch.dtype:
        """The type of its numbers, as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def key(self) -> str:
        """For the name of a file."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    def differences(self, other: Where) -> list[str]:
        """What is another there, in words."""
        mine, its = asdict(self), asdict(other)
        words = {name: name.replace("_version", "") for name in mine if name != "kind"}
        return [f"{word} {mine[name]}, not {its[name]}" for name, word in words.items() if mine[name] != its[name]]


@dataclass(frozen=True)
class Table:
    """All that a `Latency` knows."""

    network: str  # hash of the network, its gates included
    model: str  # class of the network
    where: Where
    seconds: float  # of the dense network
    factor: float  # by which the effects of all regions are multiplied, so that they meet the whole network's time
    regions: tuple[Region, ...]  # those whose time depends on gates
    checks: tuple[tuple[float, float], ...]  # at some joint widths, the time predicted and measured, of the dense one's
    networks: int  # how many networks were timed

    def json(self) -> str:
        """All of it as a JSON object."""
        return json.dumps({**FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def parsed(cls, text: str) -> Table:
        """A table from its JSON.

        Raises:
            ValueError: it is something else.
        """
        try:
            data = json.loads(text)
            if {key: data[key] for key in FORMAT} != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, version {data['format_version']!r}")
            return cls._of({key: value for key, value in data.items() if key not in FORMAT})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a table of latencies must be what `Latency.save` wrote, got another: {error}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Table:
        def width(w: dict[str, Any]) -> Width:
            return Width(tuple(w["rows"]), tuple(w["widths"]), tuple(w["shares"]))

        def region(r: dict[str, Any]) -> Region:
            return Region(**{**r, "along": tuple(map(width, r["along"])), "blocks": tuple(r["blocks"])})

        regions = tuple(map(region, data["regions"]))
        checks = tuple((float(a), float(b)) for a, b in data["checks"])
        return cls(**{**data, "regions": regions, "checks": checks, "where": Where(**data["where"])})


def network_hash(gated: Gated) -> str:
    """Tells networks apart by their layers, tensors, products and gates; one that has shrunk is what it was."""
    graph = gated.graph
    products = [(p.name, p.factor, p.tensor, [a.size for a in p.along]) for p in graph.products or ()]
    kinds = {name: layer["kind"] for name, layer in layers(gated.model).items()}
    placements = [(p.name, list(p.shape)) for p in gated.placements]
    shapes = {name: list(shape) for name, shape in graph.shapes.items()}
    text = json.dumps([kinds, shapes, products, placements], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
