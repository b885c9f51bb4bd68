"""`Latency`: the time that a network takes, as a cost like any other.

It asks a table for times and a `Gated` for widths: in expectation along chords, which have a gradient everywhere, and
as kept along the measured lines. How a table is measured is in `measuring.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from ellzero.gated.alive import product
from ellzero.gated.counting import Census, Vector, count_widths, unrounded
from ellzero.gated.module import Gated
from ellzero.gates.warning import warn
from ellzero.graph.plan import Plan
from ellzero.graph.tracing import Inputs, batch_size
from ellzero.graph.trials.running import resized
from ellzero.objectives.checking import check_count
from ellzero.objectives.costs import kept_terms, matching
from ellzero.out.compaction import refuse_unfit
from ellzero.out.files import write_text, writing
from ellzero.out.latency.curves import Curves, chords
from ellzero.out.latency.measuring import measured, timed
from ellzero.out.latency.table import Table, Where, network_hash


@final
class Latency:
    """The seconds of one evaluation forward, as a cost: `Budget(gated, latency=0.5)`, `Constraint(latency, 0.5)`.

    Made by `measure` or `load`. Called on a `Gated`, it gives the expected time, differentiable; with `kept=True` that
    of the network that `compact` would give. Both are of the device, batch, type and threads that it was measured with
    (`where`), whatever the network computes on now.

    Args:
        table: what was measured.
        clock: gives the time in seconds where a network is timed again, when the gates of a `Budget` settle; without
            one the table is trusted.

    Attributes:
        table: what was measured, as plain data.
    """

    __name__ = "latency"

    def __init__(self, table: Table, clock: Callable[[], float] | None = None) -> None:
        self._loaded = False  # from a file, so that it may be of another machine
        self._clock = clock
        self.take(table)

    @classmethod
    def measure(
        cls,
        gated: Gated,
        *,
        device: torch.device | str | None = None,
        batch: int | None = None,
        dtype: torch.dtype | None = None,
        store: Path | str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Latency:
        """Times a network over its widths, in place: copies of it in which units are closed and taken out.

        The network, its gates and torch's random numbers stay as they are. Keep the machine quiet meanwhile.

        Args:
            gated: the network.
            device: where it is to be fast; where its parameters are if `None`.
            batch: on how many examples at once; as many as in the example input if `None`.
            dtype: in numbers of this type; in its own if `None`.
            store: a folder. A table of this network, device, batch, type and threads that is there already is used
                again; else the new one is stored there.
            clock: gives the time in seconds.

        Raises:
            ValueError: gates are on single weights, which no time depends on.

        Example:
            >>> from ellzero.gated.attaching import attach
            >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
            >>> gated = attach(net, torch.zeros(32, 64))
            >>> latency = Latency.measure(gated)
            >>> latency
            Latency(Sequential: ... on ..., batch 32, float32, ...)
            >>> bool(latency(gated) <= latency.table.seconds)
            True
        """
        refuse_unfit(gated)
        if any(len(p.shape) > 1 for p in gated.placements):
            raise ValueError("`gated` must have gates on units: no time depends on single weights, which stay as zeros")
        batch = batch_size(gated.example_inputs) if batch is None else check_count("batch", batch)
        reference = next(p for p in gated.model.parameters() if p.is_floating_point())
        home = reference.device if device is None else _indexed(torch.device(device))
        where = Where.here(home, batch, reference.dtype if dtype is None else dtype)
        path = None if store is None else Path(store) / f"{network_hash(gated)}-{where.key()}.json"
        if path is not None and path.exists():
            return cls(_read(path), clock)
        table = measured(gated, where, home, clock)
        if path is not None:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, table.json())
        return cls(table, clock)

    @classmethod
    def load(cls, path: Path | str) -> Latency:
        """A table that `save` wrote. Where it is used with another device, batch, type or threads, a warning says so.

        Raises:
            ValueError: the file has something else in it.
        """
        loaded = cls(_read(Path(path)), time.perf_counter)
        loaded._loaded = True
        return loaded

    def save(self, path: Path | str) -> None:
        """Writes the table as JSON."""
        write_text(Path(path), self.table.json())

    def take(self, table: Table) -> None:
        """Goes on with another table: a run that is taken up keeps the one that it began with."""
        self.table = table
        self._key = ("latency", table.json())  # what networks remember it by

    def __call__(self, gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
        """The seconds that a network takes.

        Args:
            gated: the network.
            kept: with what is open at test time.
            only: pattern of names of layers: their part of the time, that depends on gates.

        Raises:
            ValueError: the table is of another network.
        """
        beside = self._beside(gated)
        if kept:
            times = kept_terms(self._key, gated, beside.kept)
        else:
            alive = gated.liveness.population(gated.prob_open(), gated.tables)
            with unrounded(alive):
                times = beside.chords.times(beside.census.expected_widths(alive, beside.tables))
            if beside.chords.sets.numel():
                times = beside.chords.within(times, gated.liveness.open_blocks(gated.prob_open(), gated.tables))
        shares = (beside.lines if kept else beside.chords).shares.to(times.device)
        seconds, factor = self.table.seconds, self.table.factor
        if only is None:
            return seconds * (1 - factor * (shares - times).sum())
        key = (*self._key, only, times.device)
        if key not in gated.memo:  # once: no captured step can bring it to the device
            named = matching([r.name for r in self.table.regions], only, "a layer whose time depends on gates")
            with torch.inference_mode(False):
                gated.memo[key] = torch.tensor([k for k, c in enumerate(named) if c], device=times.device)
        return seconds * factor * times[gated.memo[key]].sum()

    def timed(self, gated: Gated) -> float | None:
        """The share of the dense network's time that a network takes as its gates are open now, measured; `None` where
        that cannot be measured: the table is plain data, or of another device or setting.
        """
        where = self.table.where
        if self._clock is None or where.kind not in ("cpu", _accelerator()):
            return None
        device = _indexed(torch.device(where.kind))
        if where.differences(Where.here(device, where.batch, where.numbers)):
            return None
        return timed(gated, where, device, self._clock)

    def setting(self, gated: Gated) -> tuple[Inputs, torch.device, torch.dtype]:
        """What it was measured with: the example input in its batch, the device and the type.

        Raises:
            ValueError: there is no such device here.
        """
        where = self.table.where
        if where.kind not in ("cpu", _accelerator()):
            raise ValueError(f"`latency` was measured on {where.device}, and there is no {where.kind} device here")
        return resized(gated.example_inputs, where.batch), torch.device(where.kind), where.numbers

    def __repr__(self) -> str:
        t, w = self.table, self.table.where
        told = f"{t.model}: {1e3 * t.seconds:.3g} ms on {w.device}, batch {w.batch}, {w.dtype}, "
        return f"Latency({told}{f'{w.threads} threads, ' if w.threads else ''}torch {w.torch_version})"

    def _beside(self, gated: Gated) -> _Beside:
        """The table beside a network, once; refused if it is of another."""
        found: _Beside | None = gated.memo.get(self._key)
        if found is None:
            self._refuse_other(gated)
            census, home = count_widths(gated.graph, gated.liveness), gated.tables["ends"]
            rows, blocks = len(census.constant), len(gated.liveness.blocks)
            homes = home, torch.zeros((), dtype=torch.float64)
            with torch.inference_mode(False):
                lines = (_Lines.of(self.table, rows, blocks, x, chord=x is home) for x in homes)
                found = gated.memo[self._key] = _Beside(census, census.tables(home.device, home.dtype), blocks, *lines)
        return found

    def _refuse_other(self, gated: Gated) -> None:
        table = self.table
        if (here := network_hash(gated)) != table.network:
            raise ValueError(
                f"`latency` must be measured on this network, {type(gated.model).__name__} {here}, got a table of "
                f"another: {table.model} {table.network}"
            )
        if self._loaded and (other := table.where.differences(Where.of(gated))):
            self._loaded = False  # once is enough
            warn(f"times were measured elsewhere, and may be others here: {'; '.join(other)}")


@dataclass(frozen=True, eq=False)
class _Lines:
    """The curves of all regions as tensors, chords or as measured."""

    curves: Curves  # one for each width
    sums: Tensor  # by width, the rows of the census that it is made of
    constants: Tensor  # of each region, and so the next two
    shares: Tensor
    rests: Tensor
    index: Tensor  # by region its widths; the number after the last for none
    region: Tensor  # of each width
    sets: Tensor  # by region the blocks that it lies in; the number after the last for none

    @classmethod
    def of(cls, table: Table, rows: int, blocks: int, like: Tensor, *, chord: bool) -> _Lines:
        along = [w for r in table.regions for w in r.along]
        knots = [(np.array(w.widths), np.array(w.shares)) for w in along]
        region = [k for k, r in enumerate(table.regions) for _ in r.along]
        index = np.full((len(table.regions), max([1, *(len(r.along) for r in table.regions)])), len(along))
        sets = np.full((len(table.regions), max((len(r.blocks) for r in table.regions), default=0)), blocks)
        for k in range(len(table.regions)):
            mine = np.flatnonzero(np.array(region) == k)
            index[k, : len(mine)] = mine
            sets[k, : len(table.regions[k].blocks)] = table.regions[k].blocks
        sums = np.zeros((len(along), rows))
        for k, width in enumerate(along):
            sums[k, list(width.rows)] = 1
        numbers = [sums, *([getattr(r, key) for r in table.regions] for key in ("constant", "share", "rest"))]
        return cls(
            Curves.of([chords(k) if chord else k for k in knots], like.device, like.dtype),
            *(torch.as_tensor(np.asarray(n), device=like.device, dtype=like.dtype) for n in numbers),
            *(torch.as_tensor(np.asarray(k), device=like.device, dtype=torch.int64) for k in (index, region, sets)),
        )

    def times(self, rows: Tensor) -> Tensor:
        """Each region's share of the dense time, at these rows of the census."""
        spans = self.shares - self.constants
        ratios = (self.curves.at(self.sums @ rows) - self.constants[self.region]) / spans[self.region]
        return self.constants + spans * product(torch.cat([ratios, ratios.new_ones(1)])[self.index], 1)

    def within(self, times: Tensor, opens: Tensor) -> Tensor:
        """These times of regions, where blocks are only so probably open."""
        opens = product(torch.cat([opens, opens.new_ones(1)])[self.sets], 1)
        return self.rests + opens * (times - self.rests)

    def gone(self, rows: Tensor) -> Tensor:
        """Which regions have a width of 0, and are not there any more."""
        empty = self.sums @ rows == 0
        return torch.cat([empty, empty.new_zeros(1)])[self.index].any(1)


@dataclass(frozen=True, eq=False)
class _Beside:
    """A table beside a network."""

    census: Census
    tables: dict[str, Tensor]
    blocks: int
    chords: _Lines
    lines: _Lines

    def kept(self, plan: Plan) -> Vector:
        """Each region's share of the dense time, in the network that `plan` leaves."""
        rows = torch.as_tensor(self.census.kept_widths(plan))
        times = torch.where(self.lines.gone(rows), 0.0, self.lines.times(rows))
        if self.lines.sets.numel():
            opens = ~np.isin(np.arange(self.blocks), list(plan.blocks))
            times = self.lines.within(times, torch.as_tensor(opens).to(times))
        out: Vector = times.numpy()
        return out


def _read(path: Path) -> Table:
    try:
        return Table.parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def _accelerator() -> str | None:
    return None if (found := torch.accelerator.current_accelerator()) is None else found.type


def _indexed(device: torch.device) -> torch.device:
    """With its number, as tensors have it."""
    return torch.zeros(0, device=device).device
