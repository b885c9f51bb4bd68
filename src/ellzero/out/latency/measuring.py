"""How a network's time is measured over its widths: which networks are timed, and what table follows.

Units are closed and taken out of copies; the network itself is not touched. Sets of gates that move different widths
of one region are never narrowed together, all others are: so a deep network takes no more measurements than a shallow
one. Each curve begins with few widths and gets more where it bends. Last come some networks with all widths at random:
they fix each region's constant, and one factor for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from ellzero.gated.counting import Vector, count_widths
from ellzero.gated.module import Gated
from ellzero.graph.forwards.copying import duplicate, lean
from ellzero.graph.plan import Plan
from ellzero.graph.tracing import progress, telling
from ellzero.graph.trials.running import resized
from ellzero.out.compaction import fitted
from ellzero.out.latency.curves import constant
from ellzero.out.latency.regions import TOGETHER, Clock, Meter
from ellzero.out.latency.table import Region, Table, Where, Width, network_hash

JOINT = 8  # networks with all widths at random
PROBES = 16  # of each curve, where it bends
BENT, NOTICED = 0.02, 0.004  # of the curve's own time and of the network's: what is off by less is straight
Widths = dict[int, int]  # by placement, how many gates are open; all, where it is not named


@dataclass
class _Sample:
    """What was seen of one network: the rows of the census, the blocks that are gone, each region's share of time."""

    rows: Vector
    shares: dict[str, float]
    gone: frozenset[int] = frozenset()


@dataclass
class _Bracket:
    """Two widths between which a curve may bend: where to look, and how much time lies between them."""

    low: int
    high: int
    look: int
    rise: float


@dataclass
class _Line:
    """The curve of one placement: the time at the widths that were asked for, and where it is to be asked next."""

    size: int
    times: dict[int, float] = field(default_factory=dict)
    brackets: list[_Bracket] = field(default_factory=list)

    def begin(self) -> None:
        """All brackets between what is known."""
        for low, high in pairwise(sorted(self.times)):
            if high - low >= max(2, self.size // 32):
                self.brackets.append(_Bracket(low, high, _between(low, high), np.inf))

    def next(self, count: int) -> list[_Bracket]:
        """Takes brackets out: those with most time in them, the widest first."""
        self.brackets.sort(key=lambda b: (b.rise, b.high - b.low))
        taken, self.brackets = self.brackets[-count:], self.brackets[:-count]
        return taken

    def answer(self, bracket: _Bracket, time: float) -> None:
        """Splits a bracket in which the curve is not straight, and goes on where it rises."""
        low, high, look = bracket.low, bracket.high, bracket.look
        straight = np.interp(look, [low, high], [self.times[low], self.times[high]])
        self.times[look] = time
        little = max(NOTICED, BENT * max(self.times.values()))
        if abs(time - straight) > little:
            for a, b in ((low, look), (look, high)):
                rise = abs(self.times[b] - self.times[a])
                if b - a > 1 and rise > little:
                    self.brackets.append(_Bracket(a, b, _edge(a, b), rise))


def _between(a: int, b: int) -> int:
    """A width near the middle, one above a round number: there a step shows most."""
    grain = 1 << max(0, ((b - a) // 3).bit_length() - 1)
    k = (a + b) // 2 // grain * grain + 1
    return k if a < k < b else (a + b) // 2


def _edge(a: int, b: int) -> int:
    """Where a step may be, in a bracket that has one: beside a round number at its ends, or in between."""
    return b - 1 if b % 8 == 1 else a + 1 if a % 8 == 0 and a else _between(a, b)


class Survey:
    """Measures one network, of which nothing changes: on a device of the kind that `where` says, in its batch and
    numbers. `clock` gives the time in seconds.
    """

    def __init__(self, gated: Gated, where: Where, device: torch.device, clock: Clock) -> None:
        self.gated = gated if gated.taken is None else gated.expanded()
        self.census = count_widths(self.gated.graph, self.gated.liveness)
        self.sizes = [gate.shape.numel() for _, gate in gated.named_gates()]
        self.blocks = {p.block: n for n, p in enumerate(gated.placements) if p.block is not None}  # and their gates
        reference = next(p for p in self.gated.model.parameters() if p.is_floating_point())
        self.model = self.gated.model
        if (reference.device, reference.dtype) != (device, where.numbers):
            self.model = duplicate(self.model).to(device, where.numbers)
        inputs = fitted(resized(self.gated.example_inputs, where.batch), device, where.numbers)
        self.where = where
        self.meter = Meter(lean(self.model).eval(), inputs, device, clock)
        self.full, self.networks = self.census.kept_widths(self._plan({})), 0
        self.samples: list[_Sample] = []

    # ---- networks --------------------------------------------------------------------------------------------------

    def _opens(self, widths: Widths) -> Tensor:
        """Spread over an axis, so that its parts lose as many; nested, and alike for axes of one size."""
        masks = []
        for number, size in enumerate(self.sizes):
            order = np.argsort(np.arange(size) * 0.6180339887498949 % 1, kind="stable")
            masks.append(np.isin(np.arange(size), order[: widths.get(number, size)]))
        return torch.as_tensor(np.concatenate(masks), dtype=torch.float64)

    def _plan(self, widths: Widths) -> Plan:
        with self.gated.assuming(self._opens(widths)):
            return self.gated.plan(refuse=False)

    def _small(self, plan: Plan) -> nn.Module:
        small = lean(self.model).eval()
        plan.apply(small)
        return small

    def _measure(self, asked: Sequence[Widths], what: str) -> list[_Sample]:
        """The regions of networks with these widths."""
        out = []
        for some in _some(asked):
            progress(f"timing the network: {what}, {self.networks} so far")
            plans = [self._plan(widths) for widths in some]
            dense, *found = self.meter.regions([self._small(plan) for plan in plans])
            self.networks += len(plans)
            self.samples.append(_Sample(self.full, dense))
            seen = zip(plans, found, strict=True)
            out += [_Sample(self.census.kept_widths(plan), s, frozenset(plan.blocks)) for plan, s in seen]
        self.samples += out
        return out

    def now(self) -> float:
        """The share of the dense network's time that the network takes as its gates are open now."""
        (share,) = self.meter.whole([self._small(self.gated.plan(refuse=False))])
        return share

    # ---- what depends on what --------------------------------------------------------------------------------------

    def _moved(self) -> list[set[int]]:
        """For each row of the census the placements that change it."""
        moved: list[set[int]] = [set() for _ in self.full]
        for number, size in enumerate(self.sizes):
            if number not in self.blocks.values():
                rows = self.census.kept_widths(self._plan({number: size // 2}))
                for row in np.flatnonzero(rows != self.full).tolist():
                    moved[row].add(number)
        return moved

    def _regions(self, moved: Sequence[set[int]]) -> dict[str, list[tuple[set[int], set[int]]]]:
        """By region the widths that its time depends on: rows of the census, and the placements that change them.

        Rows that a placement changes together are one width: a stream that a layer reads and writes.
        """
        out: dict[str, list[tuple[set[int], set[int]]]] = {}
        for name, factors in zip(self.census.names, self.census.rows.T.tolist(), strict=True):
            widths = out.setdefault(name, [])
            for row in factors:
                if row < len(moved) and moved[row]:  # behind them are cumulants, of the same widths
                    rows, movers = {row}, set(moved[row])
                    for other in [w for w in widths if w[1] & movers]:
                        widths.remove(other)
                        rows, movers = rows | other[0], movers | other[1]
                    widths.append((rows, movers))
        return {name: widths for name, widths in out.items() if widths or self._around(name)}

    def _around(self, name: str) -> tuple[int, ...]:
        """The gated blocks that a region lies in."""
        return tuple(b for b in self.blocks if self.gated.graph.blocks[b].holds(name))

    def _colours(self, regions: dict[str, list[tuple[set[int], set[int]]]]) -> list[list[int]]:
        """Placements that may be narrowed together: no two of them change different widths of one region."""
        apart: list[set[int]] = [set() for _ in self.sizes]
        for widths in regions.values():
            for _, movers in widths:
                for mover in movers:
                    apart[mover] |= {o for _, others in widths if others is not movers for o in others}
        colours: list[list[int]] = []
        for number in {m for widths in regions.values() for _, movers in widths for m in movers}:
            fits = (c for c in colours if not apart[number] & set(c))
            home = next(fits, None)
            if home is None:
                colours.append(home := [])
            home.append(number)
        return colours

    # ---- the table -------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Measures, and puts it together."""
        regions = self._regions(self._moved())
        for number, colour in enumerate(colours := self._colours(regions)):
            self._follow(colour, regions, f"part {number + 1} of {len(colours) + 1}")
        alone = self._measure([{n: 0} for n in self.blocks.values()], "blocks")
        joint, whole = self._joint(sorted(n for c in colours for n in c), f"part {len(colours) + 1}, all widths")
        found = [r for name, widths in regions.items() if (r := self._region(name, widths)) is not None]
        found = _with_rests(found, dict(zip(self.blocks, alone, strict=True)))
        effects = np.array([sum(r.share - _time(r, s) for r in found) for s in joint])
        factor = _factor(effects, np.array(whole))
        predicted = (1 - factor * effects).tolist()
        return Table(
            network_hash(self.gated), type(self.gated.model).__name__, self.where, self.meter.seconds, factor,
            tuple(found), tuple(zip(predicted, whole, strict=True)), self.networks,
        )  # fmt: skip

    def _follow(self, colour: list[int], regions: dict[str, list[tuple[set[int], set[int]]]], what: str) -> None:
        """Measures the curves of placements that are narrowed together: few widths first, then more where they bend."""
        lines = {n: _Line(self.sizes[n]) for n in colour}
        mine = {n: [name for name, widths in regions.items() if any(n in m for _, m in widths)] for n in colour}

        def told(sample: _Sample, number: int) -> float:
            return sum(sample.shares.get(name, 0.0) for name in mine[number])

        first = [{n: round(share * self.sizes[n]) or (share > 0) for n in colour} for share in (0, 1e-9, 0.25, 0.5)]
        for widths, sample in zip(first, self._measure(first, what), strict=True):
            for n, k in widths.items():
                lines[n].times[int(k)] = told(sample, n)
        dense = [s for s in self.samples if np.array_equal(s.rows, self.full)][-1]
        for n, line in lines.items():
            line.times[line.size] = told(dense, n)
            line.begin()
        for _ in range(PROBES // TOGETHER):
            asked = {n: line.next(TOGETHER) for n, line in lines.items()}
            count = max(map(len, asked.values()))
            networks = [{n: b[k].look for n, b in asked.items() if k < len(b)} for k in range(count)]
            for k, sample in enumerate(self._measure(networks, what)):
                for n, brackets in asked.items():
                    if k < len(brackets):
                        lines[n].answer(brackets[k], told(sample, n))

    def _joint(self, numbers: Sequence[int], what: str) -> tuple[list[_Sample], list[float]]:
        """Networks with all widths at random: the times of their regions, and of the whole."""
        random = np.random.default_rng(0)
        shares = [np.full(len(numbers), share) for share in (0.5, 0.25)]
        shares += [random.uniform(0.15, 1, len(numbers)) for _ in range(JOINT - 2)]
        asked = [{n: max(1, round(s * self.sizes[n])) for n, s in zip(numbers, some, strict=True)} for some in shares]
        for widths in asked[JOINT // 2 :]:
            widths |= {n: int(random.random() < 0.5) for n in self.blocks.values()}
        samples, whole = self._measure(asked, what), []
        for some in _some(asked):
            whole += self.meter.whole([self._small(self._plan(widths)) for widths in some])
        return samples, whole

    def _region(self, name: str, widths: list[tuple[set[int], set[int]]]) -> Region | None:
        """The curves of one region, from all that was seen of it with all blocks; `None` if it never ran."""
        samples = [s for s in self.samples if not s.gone]
        seen = [s for s in samples if (s.rows == self.full).all()]
        share = statistics.median(s.shares.get(name, 0.0) for s in seen)
        if share <= 0:
            return None
        rows = [sorted(r) for r, _ in widths]
        full = np.array([self.full[r].sum() for r in rows])
        places = np.array([[s.rows[r].sum() for r in rows] for s in samples])
        times = np.array([s.shares.get(name, 0.0) for s in samples])
        along = []
        for k, mine in enumerate(rows):
            alone = (np.delete(places, k, 1) == np.delete(full, k)).all(1)
            points = {x: statistics.median(times[alone & (places[:, k] == x)]) for x in sorted({*places[alone, k]})}
            points[full[k]] = share
            along.append(Width(tuple(mine), tuple(map(float, points)), tuple(map(float, points.values()))))
        along = [w for w in along if len(w.widths) > 1]
        together = ((places != full).sum(1) > 1) & (places > 0).all(1)
        ratios = [
            np.array([np.interp(s.rows[list(w.rows)].sum(), w.widths, w.shares) / share for w in along])
            for s, take in zip(samples, together, strict=True)
            if take
        ]
        fixed = constant(times[together], ratios, share) if len(along) > 1 else 0.0
        blocks = self._around(name)
        return Region(name, share, fixed, tuple(along), blocks) if along or blocks else None


def _with_rests(regions: Sequence[Region], alone: dict[int, _Sample]) -> list[Region]:
    """Gives the last region of each block what stays of the block's time, by the network that is without it alone."""
    out = list(regions)
    for block, sample in alone.items():
        mine = [k for k, r in enumerate(out) if block in r.blocks]
        if mine:
            rest = sum(out[k].share for k in mine) - (1 - sum(sample.shares.values()))
            out[mine[-1]] = replace(out[mine[-1]], rest=max(0.0, rest))
    return out


def _time(region: Region, sample: _Sample) -> float:
    """A region's share of the dense time, in a network that was seen."""
    if sample.gone.intersection(region.blocks):
        return region.rest
    places = [float(sample.rows[list(w.rows)].sum()) for w in region.along]
    if not all(places):
        return 0.0
    c, span = region.constant, region.share - region.constant
    values = [np.interp(x, w.widths, w.shares) for x, w in zip(places, region.along, strict=True)]
    return float(c + span * np.prod([(value - c) / span for value in values]))


def _factor(effects: Vector, whole: Vector) -> float:
    """By what effects are multiplied so that 1 − effects meets the whole network's times: the least sum of |misses|, as
    shares of these times. It is a weighted median, which one bad measurement does not move.
    """
    ratios, weights = (1 - whole)[effects > 0] / effects[effects > 0], (effects / whole)[effects > 0]
    if not len(ratios):
        return 1.0
    order = np.argsort(ratios)
    half = int(np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2))
    return float(max(ratios[order][half], 0.0))


def _some(asked: Sequence[Widths]) -> Iterable[Sequence[Widths]]:
    """As many as are timed together."""
    return (asked[k : k + TOGETHER] for k in range(0, len(asked), TOGETHER))


def measured(gated: Gated, where: Where, device: torch.device, clock: Clock) -> Table:
    """Measures a network's table."""
    with telling(), torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        return Survey(gated, where, device, clock).table()


def timed(gated: Gated, where: Where, device: torch.device, clock: Clock) -> float:
    """Measures a network as its gates are open now, as a share of the dense one's time."""
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        return Survey(gated, where, device, clock).now()
