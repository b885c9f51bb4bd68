"""A network of repeated layers as a page shows it: a row for each layer, its heads as a grid, its widths as bars.

`repeated` finds such layers by the names of their axes, `charts` draws them. One without them is drawn as columns,
in `drawing`. How one is trained is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ellzero.gated.module import Gated
from ellzero.gates.abstract import NoExpectation
from ellzero.graph.axes import Kind
from ellzero.out.reporting import MANY, AxisRow, within_blocks
from ellzero.out.tables import families, layers_of
from ellzero.page.charts import Chart, escaped, heat, number

_ACROSS, _NARROW, _GAP = 2, 0.42, 0.05  # panels in a chart at most, how wide one of blocks is, what is between them
_LONG = 20  # letters in a line above a panel
_PLAIN: dict[str, Any] = {"showgrid": False, "showline": False, "zeroline": False, "fixedrange": True}


class Cells(NamedTuple):
    """The heads of a layer, or its branches that can go as a whole."""

    stays: npt.NDArray[np.bool_]  # at test time (kept)
    prob_open: npt.NDArray[np.float64] | None  # expected; None for gates that have no expectation

    @property
    def shown(self) -> npt.NDArray[np.float64]:
        """How likely each is open, as far as known."""
        return self.stays.astype(float) if self.prob_open is None else self.prob_open


class Part(NamedTuple):
    """What every layer of a stack has."""

    name: str  # behind the number of the layer
    kind: Kind | Literal["blocks"]
    rows: dict[str, AxisRow]  # by layer
    cells: dict[str, Cells]  # likewise, of heads and blocks
    columns: tuple[str, ...] = ()  # names of blocks

    @property
    def dense(self) -> int:
        """Units of the largest layer."""
        return max(row.dense for row in self.rows.values())

    def by_layer(self, layers: Sequence[str]) -> tuple[list[tuple[int, int]], list[list[float]]]:
        """Dense and kept units of every layer, nothing where it has none, and of heads and blocks which are kept."""
        rows = [(self.rows[k].dense, self.rows[k].kept) if k in self.rows else (0, 0) for k in layers]
        return rows, [
            self.cells[k].stays.astype(float).tolist() if k in self.cells else [] for k in layers
        ] if self.cells else []


class Stack(NamedTuple):
    """Layers that repeat."""

    name: str  # before the number of the layer
    layers: list[str]  # their numbers
    parts: list[Part]


class Layers(NamedTuple):
    """The stacks of a network, and what can shrink outside of them."""

    stacks: Sequence[Stack] = ()
    outside: Sequence[AxisRow] = ()


def repeated(gated: Gated, columns: Sequence[AxisRow]) -> Layers:
    """The repeated layers; none in a network of few axes and without heads, which columns show better."""
    free = {axis.name for axis in gated.axes if axis.frozen is None}  # what is frozen goes with its block at most
    shown = [c for c in columns if c.state == "gated" or (c.state == "closed" and c.name in free)]
    found = families(shown, lambda c: c.name, lambda c: c.kind)
    several = [family for family in found if len(family) > 1]
    if len(columns) <= MANY and all(family[0].kind != "heads" for family in several):
        return Layers()
    cells, stacks = _cells(gated), dict[str, list[Part]]()
    for before, part in _blocks(gated):
        stacks.setdefault(before, []).append(part)
    for family in several:
        before, after = _around([row.name for row in family])
        layers = dict(zip(layers_of([row.name for row in family]), family, strict=True))
        heads = {layer: cells[row.name] for layer, row in layers.items() if row.kind == "heads"}
        stacks.setdefault(before, []).append(Part(after, family[0].kind, layers, heads))
    streams = [c for c in columns if c.kind == "stream" and c.state == "not gated"]
    once = [family[0] for family in found if len(family) == 1]
    return Layers([Stack(name, _numbers(parts), parts) for name, parts in stacks.items()], streams + once)


def _cells(gated: Gated) -> dict[str, Cells]:
    """Of every axis of heads which of them stay, and P(open)."""
    stays, expected = gated.plan(refuse=False).units, None
    with suppress(NoExpectation), torch.no_grad():
        expected = within_blocks(gated)
    places = {axis.name: slice(k, k + axis.size) for axis, k in zip(gated.axes, gated.graph.offsets, strict=False)}
    return {name: Cells(stays[mine], None if expected is None else expected[mine]) for name, mine in places.items()}


def _blocks(gated: Gated) -> Iterator[tuple[str, Part]]:
    """Branches that can go as a whole, with what stands before their layers; those of the same layers are one part."""
    gates, gone = dict(gated.named_gates()), gated.plan(refuse=False).blocks
    stays = {p.name: p.block not in gone for p in gated.placements if p.block is not None}
    found: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for family in families(stays, str):
        if len(family) > 1:
            before, after = _around(family)
            found.setdefault((before, *layers_of(family)), {})[after.removesuffix(".block")] = family
    for (before, *layers), branches in found.items():
        rows, cells = {}, {}
        for layer, names in zip(layers, zip(*branches.values(), strict=True), strict=True):
            open_ones, prob = np.array([stays[name] for name in names]), None
            with suppress(NoExpectation), torch.no_grad():
                prob = np.array([float(gates[name].prob_open()) for name in names])
            cells[layer], kept = Cells(open_ones, prob), int(open_ones.sum())
            mean = None if prob is None else float(prob.sum())
            rows[layer] = AxisRow(f"{before}.{layer}", len(names), mean, kept, "gated" if kept else "closed", None)
        yield before, Part(", ".join(branches), "blocks", rows, cells, tuple(branches))


def _around(names: Sequence[str]) -> tuple[str, str]:
    """What stands before the first number in which the names differ, and what behind it they share."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    first = next(k for k, column in enumerate(columns) if len(set(column)) > 1)
    before, after = columns[:first], [column for column in columns[first:] if len(set(column)) == 1]
    return ".".join(c[0] for c in before), ".".join(c[0] for c in after)


def _numbers(parts: Sequence[Part]) -> list[str]:
    return sorted({layer for part in parts for layer in part.rows}, key=lambda text: [int(n) for n in text.split(".")])


# ---------------------------------------------------------------- charts


def cut(layers: Layers) -> list[tuple[Stack, list[Part]]]:
    """The stacks with as many of their parts as go beside each other; blocks need little room."""
    found = []
    for stack in layers.stacks:
        blocks = [part for part in stack.parts if part.kind == "blocks"]
        others = [part for part in stack.parts if part.kind != "blocks"]
        for k in range(0, max(1, len(others)), _ACROSS):
            found.append((stack, blocks * (k == 0) + others[k : k + _ACROSS]))
    return found


def charts(layers: Layers, epoch: float) -> list[Chart]:
    """A chart for each stack, or more where its layers have many parts, and one for what is outside of them."""
    made = [_stack(s, parts, f"network-{k}" if k else "network", epoch) for k, (s, parts) in enumerate(cut(layers))]
    return made + ([_outside(layers.outside)] if layers.outside else [])


def _stack(stack: Stack, parts: Sequence[Part], name: str, epoch: float) -> Chart:
    places = {layer: k for k, layer in enumerate(stack.layers)}
    shares = [_NARROW if part.kind == "blocks" else 1.0 for part in parts]
    ends = [(1 + _GAP) * sum(shares[:k]) / sum(shares) for k in range(len(parts) + 1)]
    traces: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    titles = []
    for k, part in enumerate(parts):
        x, start, end = f"x{k + 1}" if k else "x", ends[k], ends[k + 1] - _GAP
        traces += [{**trace, "xaxis": x} for trace in (_grid if part.cells else _bars)(part, places)]
        room = 1.28 if part.kind == "heads" else 1.24 if part.kind != "blocks" else 1.0  # for the numbers at the right
        axes[x.replace("x", "xaxis")] = {
            **_PLAIN,
            "domain": [start, end],
            "range": [-0.5, part.dense * room - 0.5] if part.cells else [0, part.dense * room],
            "tickvals": [] if part.cells else [0, part.dense],
            "ticktext": [] if part.cells else ["0", f"{part.dense:,}"],
        }
        title = {"x": start, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        text = "<br>".join((f"<b>{part.kind}</b>", *([] if part.columns else _lines(part.name))))
        titles.append({**title, "text": text, "align": "left", "showarrow": False, "font": {"size": 12}})
    told = [f"{part.kind} of {part.name}, {_said(part)}" for part in parts]
    above = 1 + max(len(_lines(part.name)) for part in parts)
    where = f" of {stack.name}" if stack.name else ""
    return Chart(
        name,
        "Layer by layer" + f": {stack.name}" * bool(stack.name),
        f"A row for each layer, from input to output; the numbers are what is kept. {_key(parts)} After epoch "
        f"{epoch:g}.",
        f"Kept in each of {len(stack.layers)} layers{where}: {'; '.join(told)}.",
        traces,
        height=70 + 15 * above + max(16, min(28, 360 // len(places))) * len(places),
        wide=True,
        **axes,
        yaxis={
            **_PLAIN,
            "tickvals": list(places.values()),
            "ticktext": list(places),
            "range": [len(places) - 0.5, -0.5],
        },
        annotations=titles,
        barmode="overlay",
        showlegend=False,
        margin={"t": 26 + 15 * above},
    )


def _lines(name: str) -> list[str]:
    """A name in lines that a narrow page has room for, cut behind dots."""
    lines = [""]
    for part in re.findall(r"[^.]+\.?", name):
        lines = [*lines[:-1], lines[-1] + part] if len(lines[-1] + part) <= _LONG else [*lines, part]
    return [escaped(line) for line in lines if line]


def _key(parts: Sequence[Part]) -> str:
    """How to read the panels."""
    words = [f"Blocks: branches as a whole, {part.name}." for part in parts if part.columns]
    if any(part.cells for part in parts):
        words.append("Squares are the bluer the more likely open (expected); × are not kept.")
    if any(not part.cells for part in parts):
        words.append("Bars: units of a layer, grey dense and blue kept.")
    return " ".join(words)


def _said(part: Part) -> str:
    some = list(part.rows.items())[:40]
    return ", ".join(f"layer {layer}: {row.kept:,} of {row.dense:,}" for layer, row in some)


def _grid(part: Part, places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """A square for each head, or each block."""
    z = np.full((len(places), part.dense), np.nan)
    words = np.full(z.shape, "", dtype=object)
    crosses = []
    for layer, cells in part.cells.items():
        y = places[layer]
        z[y, : len(cells.shown)] = np.round(100 * cells.shown)
        for head, stays in enumerate(cells.stays.tolist()):
            expected = "" if cells.prob_open is None else f"<br>P(open) = {z[y, head]:.0f} % (expected)"
            what = escaped(part.columns[head]) if part.columns else f"head {head}"
            words[y, head] = f"layer {layer}, {what}: {'kept' if stays else 'gone'}{expected}"
            crosses += [] if stays else [(head, y)]
    rows = [[None if np.isnan(v) else int(v) for v in row] for row in z.tolist()]
    look: dict[str, Any] = {"colorscale": [[0, "@grid"], [1, "@blue"]], "showscale": False, "xgap": 3, "ygap": 3}
    yield heat(rows, "%{customdata}", **look, customdata=words.tolist(), hoverongaps=False)
    marker = {"symbol": "x-thin", "size": 7, "line": {"color": "@muted", "width": 1.5}}
    spots = {"x": [x for x, _ in crosses], "y": [y for _, y in crosses]}
    yield {"type": "scatter", "mode": "markers", **spots, "marker": marker, "hoverinfo": "skip"}
    if not part.columns:
        yield _counts(part, places, -0.4)


def _bars(part: Part, places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    yield from _pair(list(part.rows.values()), [places[layer] for layer in part.rows], 0.66)
    yield _counts(part, places)


def about(rows: Sequence[AxisRow]) -> dict[str, Any]:
    """What the bars of axes say when they are pointed at."""
    hover = (
        "%{customdata[0]}<br>dense: %{customdata[1]:,}<br>expected: %{customdata[2]}<br>kept: %{customdata[3]:,}"
        "<br>%{customdata[4]}<extra></extra>"
    )
    told = [[escaped(r.name), r.dense, number(r.expected, 1), r.kept, r.state] for r in rows]
    return {"customdata": told, "hovertemplate": hover}


def _pair(rows: Sequence[AxisRow], y: Sequence[float], width: float) -> Iterator[dict[str, Any]]:
    """Bars of dense and of kept units, on top of each other."""
    bar = {"type": "bar", "orientation": "h", "y": list(y), "width": width, **about(rows)}
    yield {**bar, "x": [r.dense for r in rows], "name": "dense", "marker": {"color": "@soft"}}
    yield {**bar, "x": [r.kept for r in rows], "name": "kept", "marker": {"color": "@blue"}}


def _counts(part: Part, places: Mapping[str, int], beyond: float = 0.0) -> dict[str, Any]:
    """What each layer keeps, in words beside it."""
    text = [f"{row.kept:,}" if row.kept else "gone" for row in part.rows.values()]
    spots = {"x": [row.dense + beyond for row in part.rows.values()], "y": [places[layer] for layer in part.rows]}
    words = {"type": "scatter", "mode": "text", "text": text, "textfont": {"size": 11, "color": "@ink"}}
    return {**words, **spots, "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False}


def _outside(rows: Sequence[AxisRow]) -> Chart:
    """A bar for each, its name above it."""
    label = {"x": 0, "xanchor": "left", "yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    names = [f"{escaped(r.name)}{f', {r.kind}' * (r.kind != 'units')}: <b>{r.kept:,}</b> of {r.dense:,}" for r in rows]
    stream = all(r.kind == "stream" for r in rows)
    once = "What every layer reads and adds to. " if stream else "What can shrink and is there once. "
    return Chart(
        "outside",
        "The stream" if stream else "Outside of the layers",
        f"{once}Bars: units, grey dense and blue kept.",
        f"Kept: {', '.join(f'{r.name} {r.kept:,} of {r.dense:,}' for r in rows[:40])}.",
        list(_pair(rows, range(len(rows)), 0.4)),
        height=30 + 48 * len(rows),
        wide=True,
        xaxis={**_PLAIN, "range": [0, 1.02 * max(r.dense for r in rows)], "visible": False},
        yaxis={**_PLAIN, "range": [len(rows) - 0.7, -0.6], "visible": False},
        annotations=[{**label, "y": k - 0.22, "text": text} for k, text in enumerate(names)],
        barmode="overlay",
        showlegend=False,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )
