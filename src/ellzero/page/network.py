"""What a run's page shows of its network: its axes, the gates of each placement, the first layer as pictures.

Charts are made from a `Look` and from strips, plain data. What else changes over epochs is in `progress`; where the
numbers come from is in `looking` and `facts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ellzero.out.reporting import AxisRow
from ellzero.page.charts import EXPECTED, Chart, axis, curve, dots, escaped, packed, percent
from ellzero.page.facts import Run, Strip
from ellzero.page.looking import BINS, Picture, Spread
from ellzero.page.progress import marks

_BAR: dict[str, Any] = {"thickness": 10, "outlinewidth": 0, "tickfont": {"color": "@muted", "size": 11}}
_BELOW = {**_BAR, "orientation": "h", "y": 0, "yanchor": "top", "ypad": 8, "thickness": 8}  # a picture needs the width


def axes_chart(columns: Sequence[AxisRow], epoch: int) -> Chart:
    """One column per axis; heights are square roots, so that ten and a thousand can be seen beside each other."""
    tallest = math.sqrt(max(c.dense for c in columns) or 1)
    before = [math.sqrt(c.dense) / tallest for c in columns]
    after = [math.sqrt(c.kept) / tallest for c in columns]
    at, many = list(range(len(columns))), len(columns) > 12
    names = {"tickvals": at, "ticktext": [escaped(c.name) for c in columns], **({"tickangle": -60} if many else {})}
    bare = {"showgrid": False, "zeroline": False, "fixedrange": True}
    style = {"yshift": 4, "yanchor": "bottom", "showarrow": False, "font": {"size": 11}, "align": "center"}
    labels = [
        {**style, "x": k, "y": h / 2, "text": f"<b>{c.kept:,}</b><br>of {c.dense:,}"}
        for k, (c, h) in enumerate(zip(columns, before, strict=True))
    ]
    said = ", ".join(f"{c.name} {c.kept:,} of {c.dense:,}" for c in columns[:40])
    return Chart(
        "network",
        "The network, before and after",
        "One column per axis (units that leave or stay together), from input to output. Grey: the width of the dense "
        "network; blue: the units that are kept; bands: the weights between them. Heights go with the square root of "
        f"the number of units, so that small axes can be seen. After epoch {epoch:g}.",
        f"Units kept by axis, from input to output: {said}.",
        _bars(columns, before, after),
        {
            "xaxis": {**names, **bare, "range": [-0.6, len(columns) - 0.4]},
            "yaxis": {"visible": False, "range": [-0.53, 0.53 if many else 0.68], "fixedrange": True},
            "barmode": "overlay",
            "annotations": [] if many else labels,
        },
        height=380,
        wide=True,
    )


def _bars(columns: Sequence[AxisRow], before: Sequence[float], after: Sequence[float]) -> list[dict[str, Any]]:
    """Bars of the heights before and after, and bands from each to the next."""
    half, x, y = 0.17, [], []
    for k in range(len(columns) - 1):
        left, right = after[k] / 2, after[k + 1] / 2
        x += [k + half, k + 1 - half, k + 1 - half, k + half, k + half, None]
        y += [left, right, -right, -left, left, None]
    rows = [
        [escaped(c.name), c.dense, "–" if c.expected is None else f"{c.expected:,.1f}", c.kept, c.state]
        for c in columns
    ]
    hover = (
        "%{customdata[0]}<br>dense: %{customdata[1]:,}<br>expected: %{customdata[2]}<br>kept: %{customdata[3]:,}"
        "<br>%{customdata[4]}<extra></extra>"
    )
    at = list(range(len(columns)))
    bars = {"type": "bar", "x": at, "customdata": rows, "hovertemplate": hover, "width": 2 * half}
    band = {"type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": "@faint", "line": {"width": 0}}
    return [{**band, "hoverinfo": "skip", "showlegend": False, "x": x, "y": y}] + [
        {**bars, "y": heights, "base": [-h / 2 for h in heights], "name": name, "marker": {"color": colour}}
        for heights, name, colour in ((before, "dense", "@soft"), (after, "kept", "@blue"))
    ]


# ---------------------------------------------------------------- gates


def gate_charts(run: Run) -> list[tuple[str, list[Chart]]]:
    """For each placement its strip and its histogram, as far as there are."""
    strips = {strip.name: strip for strip in run.strips}
    spreads = {s.name: s for s in run.look.spreads} if run.look is not None else {}
    out, lines = [], marks(run, labels=False)
    for k, name in enumerate(dict.fromkeys([*spreads, *strips])):
        charts = [_strip(strips[name], k, lines)] if name in strips else []
        charts += [_histogram(spreads[name], k)] if name in spreads else []
        out.append((name, charts))
    return out


def _heat(z: Any, hover: str, bar: Mapping[str, Any], low: float = 0, high: float = 100, **more: Any) -> dict[str, Any]:
    words = {"hovertemplate": f"{hover}<extra></extra>", "colorbar": dict(bar)}
    return {"type": "heatmap", "z": z, "zmin": low, "zmax": high, "colorscale": "@heat", **words, **more}


def _strip(strip: Strip, k: int, lines: Mapping[str, Any]) -> Chart:
    rows, last = strip.percent.shape[0], strip.percent[:, -1]
    some = f" {rows} of them are shown, evenly spaced." if rows < strip.gates else ""
    sure = f"{np.mean(last >= 95):.0%} of them above 95 %, {np.mean(last <= 5):.0%} below 5 %"
    hover, bar = "epoch %{x}<br>P(open) = %{z} % (expected)", {**_BAR, "ticksuffix": " %"}
    bare = {"showticklabels": False, "ticks": "", "autorange": "reversed", "showgrid": False, "zeroline": False}
    return Chart(
        f"strip-{k}",  # names of gates may hold anything, those of charts may not
        f"{strip.name}: P(open) over training",
        f"A row for each of the {strip.gates:,} gates of {strip.name}, by falling P(open) at the end. Colour: the "
        f"probability that the gate is open (expected), in percent.{some}",
        f"P(open) of the gates of {strip.name}; at the end {sure}.",
        [_heat(packed(strip.percent), hover, bar, x=list(strip.epochs))],
        {
            "xaxis": axis("epoch", showgrid=False, **({"dtick": 1} if len(strip.epochs) <= 12 else {})),
            "yaxis": axis("gates", **bare),
            **lines,
        },
        height=280,
    )


def _histogram(spread: Spread, k: int) -> Chart:
    """The two ends stand apart from the bins, for there the distribution has atoms."""
    width = 1 / BINS
    x = [-1.5 * width, *((b + 0.5) * width for b in range(BINS)), 1 + 1.5 * width]
    between = [f"{b * width:.2f} < z < {(b + 1) * width:.2f}" for b in range(BINS)]
    where = [escaped(words) for words in ("z = 0", *between, "z = 1")]
    hover = "%{customdata}<br>%{y:.1f} % of the gates (kept)<extra></extra>"
    bars = {"type": "bar", "x": x, "y": [100 * v for v in spread.kept], "width": width * 0.9, "customdata": where}
    colours = ["@grey", *["@blue"] * BINS, "@green"]
    bars |= {"name": "kept", "showlegend": False, "hovertemplate": hover, "marker": {"color": colours}}
    traces, caption, said = [bars], "", ""
    if spread.expected is not None:
        shares = [100 * v for v in spread.expected]
        hover = "%{customdata}<br>%{y:.1f} % (expected)<extra></extra>"
        inner, outer = slice(1, -1), slice(None, None, BINS + 1)
        line = {"dash": EXPECTED, "customdata": where[inner]}
        marker = {"color": "@vermilion", "size": 10, "symbol": "diamond"}
        ends = {"customdata": where[outer], "hovertemplate": hover}
        traces.append(curve(x[inner], shares[inner], "density (expected)", "@vermilion", hover, **line))
        traces.append(dots(x[outer], shares[outer], "atoms (expected)", marker, **ends))
        caption = (
            " Orange: the hard concrete distribution that training draws from, the mean over the gates (expected): its "
            "density between 0 and 1, per bin (dashed), and its atoms at 0 and 1 (diamonds)."
        )
        said = f" In expectation {percent(spread.expected[0], 1)} are 0 and {percent(spread.expected[-1], 1)} are 1."
    ticks = {"tickvals": [x[0], 0.25, 0.5, 0.75, x[-1]], "ticktext": ["0", "0.25", "0.5", "0.75", "1"]}
    return Chart(
        f"histogram-{k}",
        f"{spread.name}: the gates at the end",
        f"Bars: share of the {spread.gates:,} gates of {spread.name} by their value at test time (kept), in percent; "
        f"grey are closed (0), green fully open (1).{caption}",
        f"{percent(spread.kept[0], 1)} of the {spread.gates:,} gates of {spread.name} are closed at test time.{said}",
        traces,
        {
            "xaxis": axis("value of the gate z", showgrid=False, zeroline=False, **ticks),
            "yaxis": axis("gates (% of the placement)", rangemode="tozero"),
        },
        height=280,
    )


# ---------------------------------------------------------------- pictures


def gate_map_chart(picture: Picture) -> Chart:
    """Input gates where their pixels are, a tile for each channel."""
    z, _ = montage(picture.tiles, columns=min(3, len(picture.tiles)))
    _, height, width = picture.tiles.shape
    rows = [[None if math.isnan(v) else round(100 * v) for v in row] for row in z.tolist()]
    hover = f"row %{{y}}, column %{{x}}<br>{picture.what} = %{{z}} %"
    return Chart(
        "input-gates",
        "Where the network looks: gates of the input",
        f"One gate for each of the {picture.dense:,} inputs, drawn where its pixel is. Colour: {picture.what}, in "
        f"percent (expected). {picture.kept:,} of {picture.dense:,} are open at test time (kept).",
        f"A picture of {height} by {width} pixels; the mean of {picture.what} is "
        f"{percent(float(picture.tiles.mean()), 1)}, and {picture.kept:,} of {picture.dense:,} gates are open at test "
        "time.",
        [_heat(rows, hover, {**_BELOW, "ticksuffix": " %"}, xgap=0.5, ygap=0.5, hoverongaps=False)],
        _square(),
        height=440,
    )


def filters_chart(picture: Picture, gated: bool) -> Chart:
    """Weights of the first layer, a tile for each unit."""
    tiles = picture.tiles
    z, corners = montage(tiles, min(len(tiles), 5))
    most = float(np.nanmax(np.abs(z))) or 1.0
    rows = [[None if math.isnan(v) else float(f"{v:.4g}") for v in row] for row in z.tolist()]
    heat = _heat(rows, "weight %{z}", _BELOW, -most, most, colorscale="@diverging", hoverongaps=False)
    style = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 10, "color": "@muted"}}
    labels = [
        {**style, "x": x - 0.5, "y": y - 0.5, "text": escaped(name)}
        for (y, x), name in zip(corners, picture.names, strict=True)
    ]
    some = f"Shown are the {len(tiles)} with the largest weights." if len(tiles) < picture.kept else "All are shown."
    which, gates = f"the {picture.dense:,} units of {picture.what}", ""
    if gated:
        which = f"the {picture.kept:,} of {picture.dense:,} units of {picture.what} that are kept"
        gates = "the input's gates, where there are any, multiplied in, and "
    return Chart(
        "filters",
        f"{'What is left of the' if gated else 'The'} first layer ({picture.what})",
        f"Weights of {which}, as pictures of what each reads, {gates}channels averaged. Blue: positive, orange: "
        f"negative. The number is that of the unit. {some}",
        f"Weights of {which}. {some}",
        [heat],
        {**_square(), "annotations": labels},
        height=440,
    )


def _square() -> dict[str, Any]:
    """Axes of a picture: no ticks, pixels as wide as high, the first row on top."""
    bare = {"visible": False, "constrain": "domain"}
    margin = {"l": 8, "r": 8, "t": 20, "b": 8}
    return {"xaxis": bare, "yaxis": {**bare, "autorange": "reversed", "scaleanchor": "x"}, "margin": margin}


def montage(tiles: np.ndarray[Any, Any], columns: int) -> tuple[np.ndarray[Any, Any], list[tuple[int, int]]]:
    """Tiles beside and below each other, with a gap of NaN between.

    Args:
        tiles: (tiles, height, width).
        columns: tiles in a row.

    Returns:
        One picture, and row and column of each tile's first pixel.

    Example:
        >>> picture, corners = montage(np.ones((3, 2, 2)), 2)
        >>> picture.shape, corners
        ((5, 5), [(0, 0), (0, 3), (3, 0)])
    """
    count, height, width = tiles.shape
    across, down = max(1, round(width / 10)), max(1, round(height / 5))  # room for a label above each
    rows = -(-count // columns)
    out = np.full((rows * (height + down) - down, columns * (width + across) - across), np.nan)
    corners = []
    for k, tile in enumerate(tiles):
        y, x = k // columns * (height + down), k % columns * (width + across)
        out[y : y + height, x : x + width] = tile
        corners.append((y, x))
    return out, corners
