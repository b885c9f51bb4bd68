"""What is left of a network, and why not less: `report(gated)` as a table, as markdown, as JSON.

Every count is given three ways: *dense*, as *expected* over the gates, and as *kept* by their test-time values, as in
what `compact` returns. What is alive and what it costs is asked of the `Gated` and of `costs.py`.
"""

from __future__ import annotations

import json
import statistics
from abc import ABC
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import torch
from torch import Tensor

from ellzero.gated.counting import Vector
from ellzero.gated.module import Gated
from ellzero.gates.abstract import NoExpectation
from ellzero.graph.axes import Axis, Kind
from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.plan import ClosedAxisError
from ellzero.graph.tracing import batch_size, mode
from ellzero.objectives.costs import Cost, l0_norm, macs, params
from ellzero.out.compaction import fitted, refuse_unfit, without_closed
from ellzero.out.latency.cost import Latency
from ellzero.out.latency.meter import device_name, interleaved
from ellzero.out.tables import NUMBER, families, layers_of, new_table, render, span

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Literal["gated", "frozen", "not gated", "closed"]
MANY = 12  # axes at most that are listed one by one; of more, those of repeated layers share a line
_LISTED = 24  # layers at most whose numbers stand one after the other


@dataclass(frozen=True)
class AbstractCount(ABC):
    """One count, three ways."""

    name: str  #: what is counted: an axis, a layer, a placement, a total
    dense: int  #: in the dense network
    expected: float | None  #: in expectation over the gates; `None` for gates that have none (`NoExpectation`)
    kept: int  #: by the gates' test-time values


@final
@dataclass(frozen=True)
class Count(AbstractCount):
    """A total, or the inputs of one layer."""


@final
@dataclass(frozen=True)
class AxisRow(AbstractCount):
    """The units of one axis."""

    state: State  #: `"closed"` is gated with every unit closed
    why: str | None  #: a sentence, for every state but `"gated"`
    kind: Kind = "units"  #: `"heads"` of attention, a residual `"stream"`, or else `"units"` of a layer


@final
@dataclass(frozen=True)
class GateRow(AbstractCount):
    """The gates of one placement: how many there are, are expected to be open, are open at test time."""

    family: str  #: the gates' class and constants, the test-time rule among them


@final
@dataclass(frozen=True)
class Speed:
    """Measured seconds of one evaluation forward, medians of interleaved runs of both networks on the example input."""

    dense_s: float
    compact_s: float
    ratio: float  #: `dense_s / compact_s`, how many times faster the compact one ran
    runs: int  #: of each
    batch: int  #: examples in the input
    device: str
    threads: int  #: of the CPU, that torch used
    predicted_s: float | None = None  #: of the compact network, by a `Latency`


@final
@dataclass(frozen=True)
class Report:
    """What `report` returns: plain data, printed as a table."""

    model: str  #: class of the network
    axes: tuple[AxisRow, ...]  #: units by axis
    inputs: tuple[Count, ...]  #: inputs by layer, where a `Select` picks them one by one; so outputs with a `Scatter`
    gates: tuple[GateRow, ...]  #: gates by placement
    params: Count  #: parameters of the network
    macs: Count | None  #: multiply-accumulates for one example; `None` if the axes were given by hand
    l0_norm: Count  #: weights that are not zero, among those that gates count
    unreached: tuple[str, ...]  #: parameters that the example input does not reach, and that stay as they are
    turns: tuple[str, ...]  #: what makes the forward take another way than with the example
    refusal: str | None  #: why `compact` would refuse the network as it is
    speed: Speed | None  #: if it was asked for and `compact` did not refuse
    full: bool = False  #: whether tables list every axis, however many there are

    def json(self) -> str:
        """All fields but `full` as a JSON object; keys are the names of the fields, and every axis is listed."""
        fields = {key: value for key, value in asdict(self).items() if key != "full"}
        return json.dumps({"format": "ellzero.report", "format_version": 1, **fields}, indent=2)

    def markdown(self) -> str:
        """The same tables as markdown."""
        parts = []
        for title, header, rows in self._tables():
            lines = [header, ["---"] + ["---:"] * 3 + ["---"] * (len(header) - 4), *rows]
            body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
            parts.append(f"**{title}**\n\n{body}")
        return "\n\n".join(parts + self._notes()) + "\n"

    def __rich__(self) -> RenderableType:
        from rich.console import Group  # here, since it takes as long to import as half of the library
        from rich.text import Text

        parts: list[RenderableType] = []
        for title, header, rows in self._tables():
            table = new_table(title, header, fold=True)
            for column in table.columns[1:4]:  # the counts
                column.justify, column.no_wrap = "right", True
            for row in rows:
                table.add_row(*map(Text, row))  # as text: a name such as "[0]" is no markup
            parts.append(table)
        return Group(*parts, *map(Text, self._notes()))

    def __str__(self) -> str:
        return render(self)

    _repr_markdown_ = markdown

    @property
    def folds(self) -> bool:
        """Whether axes of repeated layers share a line."""
        return not self.full and len(self.axes) > MANY

    def _tables(self) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        """Title, header and rows of every table."""
        counts, by_layer = ["dense", "expected", "kept"], ["kept in each layer"] * self.folds
        yield f"{self.model}: units by axis", ["axis", *counts, "state"], axis_lines(self.axes, fold=self.folds)
        if self.inputs:
            outputs = " and outputs" if any(row.name.endswith(", outputs") for row in self.inputs) else ""
            yield f"Inputs{outputs} picked one by one", ["layer", *counts, *by_layer], self._lines(self.inputs)
        units = [(a.name, a.dense, a.kept) for a in self.axes if a.state in ("gated", "closed")]
        if [(g.name, g.dense, g.kept) for g in self.gates] != units:
            header = ["placement", "gates", "expected open", "kept open", *by_layer]
            yield "Gates by placement", header, self._lines(self.gates)
        totals = [row for row in (self.params, self.macs, self.l0_norm) if row is not None]
        yield "Totals", ["", *counts], [_cells(row, fractions=True) for row in totals]

    def _lines(self, rows: Sequence[AbstractCount]) -> list[list[str]]:
        if not self.folds:
            return [_cells(row) for row in rows]
        found = families(rows, lambda row: row.name, lambda row: row.dense)
        return [[*_cells(_sum(some)), by_layer(some) if len(some) > 1 else ""] for some in found]

    def _names(self, names: Sequence[str]) -> str:
        return ", ".join(map(span, families(names, str)) if self.folds else names)

    def _notes(self) -> list[str]:
        notes = ["Expected: over the gates' noise. Kept: by this network's own gates, their test-time values now."]
        if self.folds:
            notes.append(f"Repeated layers share a line; all {len(self.axes)} axes: `full=True`, or `--full`.")
        families: dict[str, list[str]] = {}
        for gate in self.gates:
            families.setdefault(gate.family, []).append(gate.name)
        for family, names in families.items():
            notes.append(f"Gates: {family}" + (f" on {self._names(names)}" if len(families) > 1 else "") + ".")
        if self.unreached:
            notes.append(f"The example input does not reach {self._names(self.unreached)}; they stay as they are.")
        if self.turns:
            notes.append(f"Only the example's way was looked at; with {', '.join(self.turns)} the model takes another.")
        if self.refusal is not None:
            notes.append(f"`compact` would refuse this network: {self.refusal}.")
        if (s := self.speed) is not None:
            notes.append(
                f"Measured speed: the compact network runs {s.ratio:.2f} times as fast as the dense one, "
                f"{_seconds(s.compact_s)} against {_seconds(s.dense_s)} (medians of {s.runs} interleaved runs each, "
                f"batch {s.batch}, {s.device}, {s.threads} CPU thread{'s' if s.threads > 1 else ''})."
            )
            if s.predicted_s is not None:
                off = s.predicted_s / s.compact_s - 1
                notes.append(
                    f"Predicted were {_seconds(s.predicted_s)} for the compact network, {100 * abs(off):.1f} % "
                    f"{'more' if off > 0 else 'less'} than measured."
                )
        return notes


def report(gated: Gated, *, speed: bool | Latency = False, full: bool = False) -> Report:
    """Counts what is left of a network: by axis, by placement, and in total.

    Args:
        gated: the network; it is left as it is.
        speed: also measure how long the dense and the compact network take on the example input; with a `Latency`, on
            its device, batch and type, beside what it predicts.
        full: list every axis; without it, those of repeated layers share a line where there are more than twelve.

    Returns:
        A `Report`. Print it; `.markdown()` and `.json()` are there too.

    Raises:
        TypeError: `gated` is not what `attach` returned.
        ValueError: a gate's parameter is not finite.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> left = report(attach(net, torch.zeros(1, 4)))
        >>> left.axes[0].name, left.axes[0].dense, left.params.kept
        ('0', 3, 23)
    """
    refuse_unfit(gated)
    try:
        gated.plan()
        refusal = None
    except ClosedAxisError as error:
        refusal = str(error)
    with torch.no_grad():
        axes, inputs = _axes(gated, refusal)
        return Report(
            model=type(gated.model).__name__,
            axes=axes,
            inputs=inputs,
            gates=tuple(_gates(gated)),
            params=_total("parameters", params, gated),
            macs=_total("MACs per example", macs, gated) if gated.graph.products is not None else None,
            l0_norm=_total("l0_norm", l0_norm, gated),
            unreached=tuple(name for name in gated.graph.unreached if name in gated.graph.parameters),
            turns=gated.graph.turns,
            refusal=refusal,
            speed=_measured(gated, speed) if speed and refusal is None else None,
            full=full,
        )


def _axes(gated: Gated, refusal: str | None) -> tuple[tuple[AxisRow, ...], tuple[Count, ...]]:
    plan, census = gated.plan(refuse=False), gated.census["units"]
    assert census is not None
    with gated.assuming(gated.opens().float()):
        alive = within_blocks(gated) > 0.5
    try:
        expected_inputs, units = gated.alive()[1], within_blocks(gated)
    except NoExpectation:
        units = None
    decided = np.isin(np.arange(len(alive)), census.units)
    rows = []
    for number, (axis, start) in enumerate(zip(gated.axes, gated.graph.offsets, strict=False)):
        here = slice(start, start + axis.size)
        gates = bool(decided[here].any())
        gone = any(number in gated.graph.blocks[b].axes for b in plan.blocks)
        state, why = _state(axis, gates, bool(alive[here].any()), refusal, gone)
        mean = None if units is None else float(units[here].sum())
        mean = float(axis.size) if not gates and units is None else mean
        rows.append(AxisRow(axis.name, axis.size, mean, int(plan.units[here].sum()), state, why, axis.kind))
    inputs = []
    for number, (tensor, dim, size) in enumerate(census.inputs):
        kept = len(plan.rows[tensor][dim]) if dim in plan.rows.get(tensor, {}) else size
        kept = 0 if plan.without(gated.graph, [tensor]) else kept
        mean = None if units is None else float(expected_inputs[number].double().sum()) * _open(gated, tensor)
        side = "" if (dim,) == gated.graph.reading.get(tensor) else ", outputs"
        inputs.append(Count((tensor.rpartition(".")[0] or tensor) + side, size, mean, kept))
    return tuple(rows), tuple(inputs)


def _open(gated: Gated, tensor: str) -> float:
    """P(the blocks that a tensor lies in are open)."""
    opens = gated.liveness.open_blocks(gated.prob_open(), gated.tables).tolist()
    return float(prod(p for p, block in zip(opens, gated.graph.blocks, strict=True) if tensor in block.tensors))


def within_blocks(gated: Gated) -> Vector:
    """P(alive) of every unit, in a block that is open."""
    units = gated.alive()[0].double().cpu().numpy()
    for number, p in enumerate(gated.liveness.open_blocks(gated.prob_open(), gated.tables).tolist()):
        units = np.where(gated.graph.inside(number), units * p, units)
    return np.asarray(units)


def _state(axis: Axis, gates: bool, alive: bool, refusal: str | None, gone: bool) -> tuple[State, str | None]:
    if gone:
        return "closed", "its block is gone"
    if axis.frozen is not None:
        return "frozen", axis.frozen
    if not gates:
        return "not gated", "a residual stream (`streams=True` gates it)" if axis.stream else "no gate decides about it"
    if alive:
        return "gated", None
    if refusal is not None:
        return "closed", "every unit of it"
    rest = "its layers are taken out" if axis.can_vanish else "one stays for its layers"
    return "closed", f"every unit of it; {rest}"


def _expected(count: Callable[[], Tensor]) -> float | None:
    try:
        return float(count().double().sum())
    except NoExpectation:
        return None


def _gates(gated: Gated) -> Iterable[GateRow]:
    opens = gated.by_placement(gated.opens())
    for name, gate in gated.named_gates():
        constants = gate.extra_repr().removeprefix(str(tuple(gate.shape))).removeprefix(", ")
        family = f"{type(gate).__name__}({constants})"
        yield GateRow(name, gate.shape.numel(), _expected(gate.prob_open), int(opens[name].sum()), family)


def _total(name: str, cost: Cost, gated: Gated) -> Count:
    with gated.assuming(torch.ones(gated.liveness.size)):
        whole = cost(gated, kept=True)  # not `dense`: in float32 that is not exact for millions of weights
    return Count(name, round(float(whole)), _expected(partial(cost, gated)), round(float(cost(gated, kept=True))))


def _measured(gated: Gated, speed: bool | Latency) -> Speed:
    predicted = float(speed(gated, kept=True)) if isinstance(speed, Latency) else None
    gated = gated if gated.taken is None else gated.expanded()
    models, inputs = [gated.model, without_closed(gated, gated.plan())], gated.example_inputs
    if isinstance(speed, Latency):
        inputs, device, dtype = speed.setting(gated)
        models = [duplicate(models[0]).to(device, dtype), models[1].to(device, dtype)]
    reference = next(p for p in models[0].parameters() if p.is_floating_point())
    inputs = fitted(inputs, reference.device, reference.dtype)
    with mode(models[0], False), mode(models[1], False):
        taken = interleaved([partial(model, *inputs[0], **inputs[1]) for model in models], reference.device)
    dense_s, compact_s = map(statistics.median, taken)
    return Speed(
        dense_s, compact_s, ratio=dense_s / compact_s, runs=len(taken[0]), batch=batch_size(inputs),
        device=device_name(reference.device), threads=torch.get_num_threads(), predicted_s=predicted,
    )  # fmt: skip


# ---------------------------------------------------------------- repeated layers


def axis_lines(rows: Sequence[AxisRow], *, fold: bool) -> list[list[str]]:
    """Name, dense, expected and kept units, and state; of axes of repeated layers on one line, if that is wanted."""

    def alike(row: AxisRow) -> Hashable:
        gated = row.state in ("gated", "closed")
        return row.dense, row.kind, gated or (row.state, NUMBER.sub("*", row.why or ""))

    out = []
    for family in families(rows, lambda row: row.name, alike) if fold else [[row] for row in rows]:
        first, kind = family[0], family[0].kind
        state = first.state if not fold or kind == "units" or first.state == "frozen" else f"{first.state} {kind}"
        if len(family) == 1:
            state += "" if first.why is None else f": {first.why}"
        elif first.state in ("gated", "closed"):
            state = "gated" + f" {kind}" * (kind != "units") + f": {by_layer(family)}"
            for why, layers in _closed(family).items():
                state += f"; closed in {', '.join(layers)}: {why}"
        else:
            state += f": {NUMBER.sub('*', first.why or '')}"
        out.append([*_cells(_sum(family)), state])
    return out


def _closed(family: Sequence[AxisRow]) -> dict[str, list[str]]:
    """Why layers are closed, and for each reason their numbers."""
    found: dict[str, list[str]] = {}
    for row, layer in zip(family, layers_of([row.name for row in family]), strict=True):
        if row.state == "closed":
            found.setdefault(row.why or "", []).append(layer)
    return found


def by_layer(family: Sequence[AbstractCount]) -> str:
    """What each layer keeps: numbers one after the other, or of many layers the least and the most."""
    kept = [row.kept for row in family]
    told = f"{min(kept):,} to {max(kept):,}" if len(kept) > _LISTED else " ".join(f"{n:,}" for n in kept)
    return f"{kept[0] if len(set(kept)) == 1 else told} of {family[0].dense:,} in each"


def _sum(family: Sequence[AbstractCount]) -> AbstractCount:
    """The row itself, or what all of a family are together."""
    if len(family) == 1:
        return family[0]
    known = [row.expected for row in family if row.expected is not None]
    dense, kept = sum(row.dense for row in family), sum(row.kept for row in family)
    return Count(span([row.name for row in family]), dense, sum(known) if len(known) == len(family) else None, kept)


def _cells(row: AbstractCount, fractions: bool = False) -> list[str]:
    def share(count: float) -> str:
        return f" ({count / row.dense:.2%})" if fractions and row.dense else ""

    expected = "–" if row.expected is None else f"{row.expected:,.1f}{share(row.expected)}"
    return [row.name, f"{row.dense:,}", expected, f"{row.kept:,}{share(row.kept)}"]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


__all__ = ["AxisRow", "Count", "GateRow", "Report", "Speed", "report"]
