"""What is left of a network, and why not less: `report(gated)` as a table, as markdown, as JSON.

Every count is given three ways: in the *dense* network, as *expected* over the gates, and as *kept* by their test-time
values, which is what `compact` returns. A `Report` is plain data, taken once; it holds on to no tensor. This file adds
up and lays out; what is alive and what it costs is asked of the `Gated` and of `costs.py`.
"""

from __future__ import annotations

import json
import statistics
from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import torch
from torch import nn

from ellzero.gated.module import Gated
from ellzero.gates.abstract import AbstractGate, NoExpectation
from ellzero.graph.axes import Axis
from ellzero.graph.plan import ClosedAxisError
from ellzero.graph.tracing import batch_size, mode
from ellzero.objectives.costs import Cost, l0_norm, macs, params
from ellzero.objectives.latency import device_name, interleaved
from ellzero.out.compaction import compact, fitted, refuse_unfit

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Literal["gated", "frozen", "not gated", "closed"]
WIDTH = 100


@dataclass(frozen=True)
class AbstractRow(ABC):
    """One count, three ways.

    Args:
        name: what is counted: an axis, a layer, a placement, a total.
        dense: how many there are in the dense network.
        expected: how many there are in expectation over the gates; `None` for gates that have none (`NoExpectation`).
        kept: how many there are by the gates' test-time values.
    """

    name: str
    dense: int
    expected: float | None
    kept: int


@final
@dataclass(frozen=True)
class Row(AbstractRow):
    """A total, or the inputs of one layer."""


@final
@dataclass(frozen=True)
class AxisRow(AbstractRow):
    """The units of one axis.

    Args:
        state: `"gated"`; `"closed"`, gated with every unit closed; `"frozen"`; `"not gated"`.
        why: a sentence, for every state but `"gated"`.
    """

    state: State
    why: str | None


@final
@dataclass(frozen=True)
class GateRow(AbstractRow):
    """The gates of one placement: how many there are, are expected to be open, are open at test time.

    Args:
        family: the gates' class and constants, the test-time rule among them.
    """

    family: str


@final
@dataclass(frozen=True)
class Speed:
    """Measured seconds of one evaluation forward, medians of interleaved runs of both networks on the example input.

    Args:
        dense_s: the dense network.
        compact_s: the compact one.
        ratio: `dense_s / compact_s`, how many times faster the compact one ran.
        runs: how many runs of each.
        batch: examples in the input.
        device: where.
        threads: CPU threads that torch used.
    """

    dense_s: float
    compact_s: float
    ratio: float
    runs: int
    batch: int
    device: str
    threads: int


@final
@dataclass(frozen=True)
class Report:
    """What `report` returns: plain data, printed as a table.

    Args:
        model: class of the network.
        axes: units by axis.
        inputs: inputs by layer, where a `Select` picks them one by one.
        gates: gates by placement.
        params: parameters of the network.
        macs: multiply-accumulates for one example; `None` if the axes were given by hand.
        l0_norm: weights that are not zero, among those that gates count.
        unreached: parameters that the example input does not reach, and that stay as they are.
        refusal: why `compact` would refuse the network as it is, or `None`.
        speed: if it was asked for and `compact` did not refuse.
    """

    model: str
    axes: tuple[AxisRow, ...]
    inputs: tuple[Row, ...]
    gates: tuple[GateRow, ...]
    params: Row
    macs: Row | None
    l0_norm: Row
    unreached: tuple[str, ...]
    refusal: str | None
    speed: Speed | None

    def json(self) -> str:
        """All fields as a JSON object; keys are the names of the fields."""
        return json.dumps({"format": "ellzero.report", "format_version": 1, **asdict(self)}, indent=2)

    def markdown(self) -> str:
        """The same tables as markdown."""
        parts = []
        for title, header, rows in self._tables():
            lines = [header, ["---"] + ["---:"] * 3 + ["---"] * (len(header) - 4), *rows]
            body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
            parts.append(f"**{title}**\n\n{body}")
        return "\n\n".join(parts + self._notes()) + "\n"

    def __rich__(self) -> RenderableType:
        from rich import box  # here, since it takes as long to import as half of the library
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = []
        for title, header, rows in self._tables():
            table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
            for number, name in enumerate(header):
                count = 1 <= number <= 3
                table.add_column(name, justify="right" if count else "left", no_wrap=count, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))  # as text: a name such as "[0]" is no markup
            parts.append(table)
        return Group(*parts, *map(Text, self._notes()))

    def __str__(self) -> str:
        return render(self)

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def _tables(self) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        """Title, header and rows of every table."""
        counts = ["dense", "expected", "kept"]
        axes = [[*_cells(a), a.state if a.why is None else f"{a.state}: {a.why}"] for a in self.axes]
        yield f"{self.model}: units by axis", ["axis", *counts, "state"], axes
        if self.inputs:
            yield "Inputs picked one by one", ["layer", *counts], [_cells(row) for row in self.inputs]
        units = [(a.name, a.dense, a.kept) for a in self.axes if a.state in ("gated", "closed")]
        if [(g.name, g.dense, g.kept) for g in self.gates] != units:
            yield (
                "Gates by placement",
                ["placement", "gates", "expected open", "kept open"],
                [_cells(row) for row in self.gates],
            )
        totals = [row for row in (self.params, self.macs, self.l0_norm) if row is not None]
        yield "Totals", ["", *counts], [_cells(row, fractions=True) for row in totals]

    def _notes(self) -> list[str]:
        notes = ["Expected: over the gates' noise. Kept: by this network's own gates, their test-time values now."]
        families: dict[str, list[str]] = {}
        for gate in self.gates:
            families.setdefault(gate.family, []).append(gate.name)
        for family, names in families.items():
            notes.append(f"Gates: {family}" + (f" on {', '.join(names)}" if len(families) > 1 else "") + ".")
        if self.unreached:
            notes.append(f"The example input does not reach {', '.join(self.unreached)}; they stay as they are.")
        if self.refusal is not None:
            notes.append(f"`compact` would refuse this network: {self.refusal}.")
        if self.speed is not None:
            s = self.speed
            notes.append(
                f"Measured speed: the compact network runs {s.ratio:.2f} times as fast as the dense one, "
                f"{_seconds(s.compact_s)} against {_seconds(s.dense_s)} (medians of {s.runs} interleaved runs each, "
                f"batch {s.batch}, {s.device}, {s.threads} CPU thread{'s' if s.threads > 1 else ''})."
            )
        return notes


def report(gated: Gated, *, speed: bool = False) -> Report:
    """Counts what is left of a network: by axis, by placement, and in total.

    Args:
        gated: the network; it is left as it is.
        speed: also measure how long the dense and the compact network take on the example input.

    Returns:
        A `Report`. Print it; `.markdown()` and `.json()` are there too.

    Raises:
        TypeError: `gated` is not what `attach` returned.
        ValueError: a gate's parameter is not finite.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> left = report(attach(net, torch.zeros(1, 4)))
        >>> left.axes[0].name, left.axes[0].dense, left.params.kept
        ('0', 3, 23)
    """
    refuse_unfit(gated)
    refusal = None
    try:
        gated.plan()
    except ClosedAxisError as error:
        refusal = str(error)
    with torch.no_grad():
        axes, inputs = _axes(gated, refusal)
        return Report(
            model=type(gated.model).__name__,
            axes=axes,
            inputs=inputs,
            gates=_gates(gated),
            params=_total("parameters", params, gated),
            macs=_total("MACs per example", macs, gated) if gated.graph.products is not None else None,
            l0_norm=_total("l0_norm", l0_norm, gated),
            unreached=tuple(name for name in gated.graph.unreached if name in gated.graph.parameters),
            refusal=refusal,
            speed=_measured(gated) if speed and refusal is None else None,
        )


def render(report: RenderableType, width: int = WIDTH) -> str:
    """Anything that rich can print, as plain text."""
    from rich.console import Console

    out = StringIO()
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None)
    console.print(report)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# ---------------------------------------------------------------- counting


def _axes(gated: Gated, refusal: str | None) -> tuple[tuple[AxisRow, ...], tuple[Row, ...]]:
    plan, census = gated.plan(refuse=False), gated.census["units"]
    assert census is not None
    with gated.assuming(gated.opens().float()):
        alive = gated.alive()[0].cpu().numpy() > 0.5
    try:
        expected, expected_inputs = gated.alive()
        units = expected.double().cpu().numpy()
    except NoExpectation:
        units = None
    decided = np.isin(np.arange(len(alive)), census.units)
    rows = []
    for axis, start in zip(gated.axes, gated.graph.offsets, strict=False):
        here = slice(start, start + axis.size)
        gates = bool(decided[here].any())
        state, why = _state(axis, gates, bool(alive[here].any()), refusal)
        mean: float | None = float(axis.size)
        if gates:
            mean = None if units is None else float(units[here].sum())
        rows.append(AxisRow(axis.name, axis.size, mean, int(plan.units[here].sum()), state, why))
    inputs = []
    for number, (tensor, dim, size) in enumerate(census.inputs):
        kept = len(plan.rows[tensor][dim]) if dim in plan.rows.get(tensor, {}) else size
        mean = None if units is None else float(expected_inputs[number].double().sum())
        inputs.append(Row(tensor.rpartition(".")[0] or tensor, size, mean, kept))
    return tuple(rows), tuple(inputs)


def _state(axis: Axis, gates: bool, alive: bool, refusal: str | None) -> tuple[State, str | None]:
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


def _gates(gated: Gated) -> tuple[GateRow, ...]:
    opens, rows = gated.by_placement(gated.opens()), []
    for name, gate in gated.named_gates():
        try:
            expected: float | None = float(gate.prob_open().double().sum())
        except NoExpectation:
            expected = None
        rows.append(GateRow(name, gate.shape.numel(), expected, int(opens[name].sum()), _family(gate)))
    return tuple(rows)


def _family(gate: AbstractGate) -> str:
    constants = gate.extra_repr().removeprefix(str(tuple(gate.shape))).removeprefix(", ")
    return f"{type(gate).__name__}({constants})"


def _total(name: str, cost: Cost, gated: Gated) -> Row:
    with gated.assuming(torch.ones(gated.liveness.size)):
        whole = cost(gated, kept=True)  # not `dense`: in float32 that is not exact for millions of weights
    try:
        expected: float | None = float(cost(gated))
    except NoExpectation:
        expected = None
    return Row(name, round(float(whole)), expected, round(float(cost(gated, kept=True))))


# ---------------------------------------------------------------- measuring


def _measured(gated: Gated) -> Speed:
    gated = gated if gated.taken is None else gated.expanded()
    reference = next(p for p in gated.model.parameters() if p.is_floating_point())
    small = compact(gated, verify=False)

    inputs = fitted(gated.example_inputs, reference.device, reference.dtype)

    def forward(model: nn.Module) -> Callable[[], object]:
        return lambda: model(*inputs[0], **inputs[1])

    with mode(gated.model, False), mode(small, False):
        taken = interleaved([forward(gated.model), forward(small)], reference.device)
    dense_s, compact_s = map(statistics.median, taken)
    return Speed(
        dense_s=dense_s,
        compact_s=compact_s,
        ratio=dense_s / compact_s,
        runs=len(taken[0]),
        batch=batch_size(inputs),
        device=device_name(reference.device),
        threads=torch.get_num_threads(),
    )


# ---------------------------------------------------------------- laying out


def _cells(row: AbstractRow, fractions: bool = False) -> list[str]:
    def share(count: float) -> str:
        return f" ({count / row.dense:.2%})" if fractions and row.dense else ""

    expected = "–" if row.expected is None else f"{row.expected:,.1f}{share(row.expected)}"
    return [row.name, f"{row.dense:,}", expected, f"{row.kept:,}{share(row.kept)}"]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


__all__ = ["AxisRow", "GateRow", "Report", "Row", "Speed", "render", "report"]
