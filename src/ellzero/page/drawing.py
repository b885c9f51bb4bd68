"""The charts of a run's page: what changes over its epochs, its network, the gates of each placement, the first layer.

They are made from a `Run`, plain data; where its numbers come from is in `facts`. Every chart over epochs has a thin
line where units were taken out or the gates were fixed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ellzero.experiments.store.folder import pace
from ellzero.experiments.train.building import targets
from ellzero.out.reporting import AxisRow
from ellzero.page.charts import EXPECTED, KEPT, SERIES, Chart, axis, curve, dots, escaped, heat, number, packed, percent
from ellzero.page.facts import BINS, COSTS, Look, Picture, Pixels, Run, Spread, Strip
from ellzero.page.layers import about

_KINDS = (("kept", "@blue", KEPT), ("expected", "@vermilion", EXPECTED))
_COUNTED = {
    "l0_norm": "Weights that are not zero, among those that gates count (l0_norm)",
    "params": "Parameters of the network that the gates leave",
    "macs": "Multiply-accumulates for one example of the network that the gates leave",
}
_BAR: dict[str, Any] = {"thickness": 10, "outlinewidth": 0, "tickfont": {"color": "@muted", "size": 11}}
_BELOW = {**_BAR, "orientation": "h", "y": 0, "yanchor": "top", "ypad": 8, "thickness": 8}  # a picture needs the width
_BARE = {"visible": False, "constrain": "domain"}
_SQUARE: dict[str, Any] = {  # a picture: no ticks, pixels as wide as high, the first row on top
    "xaxis": _BARE,
    "yaxis": {**_BARE, "autorange": "reversed", "scaleanchor": "x"},
    "margin": {"l": 8, "r": 8, "t": 20, "b": 8},
}


# ---------------------------------------------------------------- over epochs


def _line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, unit: str = "", **more: Any) -> dict[str, Any]:
    """A curve over epochs, with a dot for each record where there are few."""
    hover = f"epoch %{{x}}<br>%{{y:.4~g}}{unit}<extra>{name}</extra>"
    marker = {"color": colour, "size": 6 if len(x) <= 20 else 4}
    mode = "lines+markers" if len(x) <= 60 else "lines"
    return curve(x, y, name, colour, hover, **({"mode": mode, "marker": marker} | more))


def _level(end: float, y: float, name: str, colour: str, dash: str, hover: str) -> dict[str, Any]:
    """A level line for the eye to compare with."""
    return curve([0, end], [y, y], name, colour, hover, dash=dash, width=1.5)


def moments(run: Run) -> list[tuple[float, str]]:
    """Epochs after which the network became another one, each with a word."""
    at = [(event.epoch, event.word) for event in run.events]
    if run.fixed_at is not None and (run.fixed_at, "settled") not in at:
        at.append((run.fixed_at, "gates fixed"))
    return at


def marks(run: Run, scale: float = 1.0, labels: bool = True) -> dict[str, Any]:
    """Thin lines where units were taken out and where the gates were fixed; an epoch is `scale` wide on x."""
    at = [(scale * epoch, word) for epoch, word in moments(run)]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "@muted", "width": 1, "dash": "dot"}}
    label = {"y": 0, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "textangle": -90, "showarrow": False}
    shapes = [{**line, "x0": x, "x1": x} for x, _ in at]
    names = [{**label, "x": x, "text": word, "font": {"color": "@muted", "size": 11}} for x, word in at]
    return {"shapes": shapes, **({"annotations": names} if labels else {})} if at else {}


def _ends(values: Sequence[float | None], unit: str, digits: int = 2) -> str:
    """Where a curve begins and ends, in words."""
    known = [v for v in values if v is not None]
    said = [f"{v:.{digits}f}{unit}" for v in (known[0], known[-1], min(known))] if known else ["no numbers yet"]
    return "from {} to {}, lowest {}".format(*said) if len(known) > 1 else said[0]


def _chart(
    run: Run, name: str, words: tuple[str, str, str], label: str, traces: list[dict[str, Any]], **more: Any
) -> Chart:
    """A chart over epochs: its title, caption and alternative, what the y axis has, and its further settings."""
    few = {"dtick": 1} if run.epochs <= 12 else {}
    x, y = axis("epoch", range=[0, run.epochs * 1.02], **few), axis(label, **({"rangemode": "tozero"} | more))
    return Chart(name, *words, traces, xaxis=x, yaxis=y, **marks(run), showlegend=len(traces) > 1)


def training_charts(run: Run) -> list[Chart]:
    """Error, loss, seconds, and with gates costs and multipliers: a chart each, as far as there are numbers."""
    if not run.history:
        return []
    error, loss = run.seen("error"), run.seen("loss")
    how = "with the test-time gates (kept)" if run.gated else "of the dense network"
    noise = ", with the gates' noise; the penalty or the multipliers' terms are not in it" if run.gated else ""
    own, unit, span = f"test {run.recipe.error}", " %", "tozero"
    what, label = "Share of its answers to the test data that are wrong, in percent", f"{own} (%)"
    if not run.recipe.in_percent:
        named = run.recipe.metric or run.recipe.loss
        what, label, unit, span = f"{'Loss' if named == 'loss' else f'`{named}`'} of the test set", own, "", "normal"
    errors = (
        own.capitalize(),
        f"{what}, {how}.",
        f"{own.capitalize()}{' in percent' * bool(unit)}, {how}: {_ends(error, unit)}.",
    )
    task, nats = (
        ("Cross-entropy in nats for one example", "nats") if run.recipe.loss is None else (run.recipe.loss, "own")
    )
    losses = (
        "Training loss",
        f"{task}: the mean over the steps since the record before{noise}.",
        f"Training loss{' in nats' * (nats == 'nats')}: {_ends(loss, '', 4)}.",
    )
    return [
        _chart(run, "error", errors, label, [_line(run.x, error, own, "@blue", unit)], rangemode=span),
        _chart(run, "loss", losses, f"loss ({nats})", [_line(run.x, loss, "loss", "@vermilion")], rangemode="normal"),
        *([_cost_chart(run, cost) for cost in COSTS] if run.gated else []),
        *_seconds(run),
        *(_multipliers(run) if run.gated else []),
    ]


def _cost_chart(run: Run, cost: str) -> Chart:
    words, what = COSTS[cost], _COUNTED[cost]
    shares = {kind: run.seen(kind, cost, times=100) for kind, *_ in _KINDS}
    traces = [_line(run.x, shares[kind], kind, colour, " %", dash=dash) for kind, colour, dash in _KINDS]
    target = targets(run.recipe).get("*") if run.recipe.cost == cost else None
    extra = said = ""
    if target is not None:
        traces.append(_level(run.epochs, 100 * target, "target", "@muted", "dot", f"target {100 * target:g} %"))
        extra = f" Dotted: the target for the {run.recipe.on} number, {100 * target:g} %."
        said = f" Target: {100 * target:g} %."
    told = (
        f"{words[0].upper()}{words[1:]}",
        f"{what}, in percent of the dense network. Solid: kept by the test-time gates. Dashed: expected over their "
        f"noise.{extra}",
        f"{what}, in percent of dense. Kept: {_ends(shares['kept'], ' %')}. Expected: "
        f"{_ends(shares['expected'], ' %')}.{said}",
    )
    return _chart(run, cost.replace("_", "-"), told, f"{words} (% of dense)", traces)


def _seconds(run: Run) -> list[Chart]:
    """Steps, for a record knows only the mean since the one before. Without events there is nothing to see in it."""
    took = pace(run.history)
    if not took or not run.events:
        return []
    x, y = [took[0][0], *(end for _, end, _ in took)], [took[0][2], *(value for *_, value in took)]
    line = _line(x, y, "seconds", "@green", " s", mode="lines")
    line["line"]["shape"] = "vh"
    usual, most = statistics.median(y), max(y)
    cut = most > 6 * usual  # one that has compiled
    beyond = f" The scale ends where the rest can be seen: the largest is {most:.3g} s." if cut else ""
    said = f"Seconds for an epoch: {_ends(y[1:], ' s', 3)}."
    for event in run.events:
        before = [value for _, end, value in took if end <= event.epoch]
        after = [value for start, _, value in took if start >= event.epoch]
        if not event.skipped and before and after:  # medians: compilation leaves them as they are
            then, now = statistics.median(before), statistics.median(after)
            said += f" Until epoch {event.epoch:g} {then:.3g} s in the median, after it {now:.3g} s."
    words = (
        "Seconds per epoch",
        "Measured seconds of training for one epoch: the mean since the record before, compilation included, "
        f"evaluation not.{beyond}",
        said,
    )
    return [_chart(run, "seconds", words, "seconds per epoch", [line], **({"range": [0, 4 * usual]} if cut else {}))]


def _multipliers(run: Run) -> list[Chart]:
    """The multiplier of each constraint; nothing without one."""
    patterns = list(targets(run.recipe))
    rows = [r.get("multiplier") for r in run.history]
    if not patterns or not all(isinstance(row, list) and len(row) >= len(patterns) for row in rows):
        return []
    traces, said = [], []
    for k, pattern in enumerate(patterns):
        values = [row[k] if isinstance(row[k], int | float) else None for row in rows if row is not None]
        name = "whole network" if pattern == "*" else pattern
        dash = ("solid", "dash", "dot")[k // len(SERIES) % 3]
        traces.append(_line(run.x, values, escaped(name), SERIES[k % len(SERIES)], dash=dash))
        said.append(f"{name} {_ends(values, '', 3)}")
    words = (
        "Multipliers",
        "The multiplier λ of each constraint, in nats of loss for the whole dense cost that it bounds: it rises while "
        "the constraint is violated, and falls or starts again at zero while it holds.",
        f"Multipliers over training: {'; '.join(said[:8])}.",
    )
    return [_chart(run, "multipliers", words, "λ (nats)", traces)]


def flops(run: Run) -> Chart | None:
    """FLOPs beside those of the dense network and of dropout; None where they are not known."""
    dense = run.dense_macs
    if not run.gated or not run.history or dense is None:
        return None
    steps, dropout = run.look.steps_per_epoch, run.look.dropout
    unit = "iteration" if steps else "epoch"
    end, whole = run.epochs * (steps or 1), 2 * dense  # a multiplication, an addition
    traces, said = [], []
    for kind, colour, dash in _KINDS:
        values = run.seen(kind, "macs", times=whole)
        line = _line([e * (steps or 1) for e in run.x], values, kind, colour, dash=dash)
        traces.append({**line, "hovertemplate": f"{unit} %{{x:,}}<br>%{{y:.4~s}}FLOPs<extra>{kind}</extra>"})
        said.append(f"{kind} at the end {number(values[-1])}")
    traces.append(_level(end, whole, "dense", "@ink", KEPT, "%{y:.4~s}FLOPs<extra>dense</extra>"))
    said.append(f"dense {number(whole)}")
    also = ""
    if dropout is not None:
        hover = "%{y:.4~s}FLOPs<extra>dropout, expected</extra>"
        traces.append(_level(end, whole * dropout, "dropout (expected)", "@muted", "dot", hover))
        said.append(f"dropout, expected, {number(whole * dropout)}")
        also = " Dotted: dropout, expected, with the keep rates that the gates started from."
    return Chart(
        "flops",
        "FLOPs over training",
        "Floating-point operations of a forward pass for one example; a multiplication and an addition are two, so "
        f"FLOPs are twice the MACs. Solid: kept. Dashed: expected. Level line: the dense network.{also} "
        "(Louizos et al., Figures 3 and 4.)",
        f"FLOPs for one example: {', '.join(said)}.",
        traces,
        height=360,
        wide=True,
        xaxis=axis(unit, range=[0, end * 1.02], tickformat="~s" if steps else ""),
        yaxis=axis("FLOPs for one example", rangemode="tozero", tickformat="~s"),
        **marks(run, steps or 1),
    )


# ---------------------------------------------------------------- its network


def axes_chart(look: Look) -> Chart:
    """One column per axis; heights are square roots, so that ten and a thousand can be seen beside each other."""
    columns, many = look.columns, len(look.columns) > 12
    tallest = math.sqrt(max(c.dense for c in columns) or 1)
    before = [math.sqrt(c.dense) / tallest for c in columns]
    after = [math.sqrt(c.kept) / tallest for c in columns]
    names = {"tickvals": list(range(len(columns))), "ticktext": [escaped(c.name) for c in columns]}
    bare = {"showgrid": False, "zeroline": False, "fixedrange": True} | ({"tickangle": -60} if many else {})
    style = {"yshift": 4, "yanchor": "bottom", "showarrow": False, "font": {"size": 11}, "align": "center"}
    labels = [
        {**style, "x": k, "y": height / 2, "text": f"<b>{c.kept:,}</b><br>of {c.dense:,}"}
        for k, (c, height) in enumerate(zip(columns, before, strict=True))
    ]
    said = ", ".join(f"{c.name} {c.kept:,} of {c.dense:,}" for c in columns[:40])
    return Chart(
        "network",
        "The network, before and after",
        "One column per axis (units that leave or stay together), from input to output. Grey: the width of the dense "
        "network; blue: the units that are kept; bands: the weights between them. Heights go with the square root of "
        f"the number of units, so that small axes can be seen. After epoch {look.epoch:g}.",
        f"Units kept by axis, from input to output: {said}.",
        _bars(columns, before, after),
        height=380,
        wide=True,
        xaxis={**names, **bare, "range": [-0.6, len(columns) - 0.4]},
        yaxis={"visible": False, "range": [-0.53, 0.53 if many else 0.68], "fixedrange": True},
        barmode="overlay",
        annotations=[] if many else labels,
    )


def _bars(columns: Sequence[AxisRow], before: Sequence[float], after: Sequence[float]) -> list[dict[str, Any]]:
    """Bars of the heights before and after, and bands from each to the next."""
    half, x, y = 0.17, [], []
    for k, (left, right) in enumerate(itertools.pairwise(height / 2 for height in after)):
        x += [k + half, k + 1 - half, k + 1 - half, k + half, k + half, None]
        y += [left, right, -right, -left, left, None]
    bars = {"type": "bar", "x": list(range(len(columns))), **about(columns)}
    band = {"type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": "@faint", "line": {"width": 0}}
    return [{**band, "hoverinfo": "skip", "showlegend": False, "x": x, "y": y}] + [
        {**bars, "width": 2 * half, "y": y, "base": [-h / 2 for h in y], "name": name, "marker": {"color": colour}}
        for y, name, colour in ((before, "dense", "@soft"), (after, "kept", "@blue"))
    ]


def gate_charts(run: Run) -> list[list[Chart]]:
    """For each placement its strip and its histogram, as far as there are."""
    strips = {strip.name: strip for strip in run.strips}
    spreads = {spread.name: spread for spread in run.look.spreads}
    out = []
    for k, name in enumerate(dict.fromkeys([*spreads, *strips])):
        charts = [_strip(run, strips[name], k)] if name in strips else []
        out.append(charts + ([_histogram(spreads[name], k)] if name in spreads else []))
    return out


def _strip(run: Run, strip: Strip, k: int) -> Chart:
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
        [heat(packed(strip.percent), hover, colorbar=bar, x=list(strip.epochs))],
        height=280,
        xaxis=axis("epoch", showgrid=False, **({"dtick": 1} if len(strip.epochs) <= 12 else {})),
        yaxis=axis("gates", **bare),
        **marks(run, labels=False),
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
        height=280,
        xaxis=axis("value of the gate z", showgrid=False, zeroline=False, **ticks),
        yaxis=axis("gates (% of the placement)", rangemode="tozero"),
    )


def pictures(run: Run) -> list[tuple[Chart, Pixels]]:
    """The input's gates and the first layer's filters, as far as there are, each with its exact numbers."""
    maps = [_gate_map(run.look.gate_map)] if run.look.gate_map is not None else []
    return maps + ([_filters(run.look.filters, run.gated)] if run.look.filters is not None else [])


def _gate_map(picture: Picture) -> tuple[Chart, Pixels]:
    """Input gates where their pixels are, a tile for each channel."""
    z = 100 * _montage(picture.tiles, 3)[0]
    _, height, width = picture.tiles.shape
    rows = [[None if math.isnan(v) else round(v) for v in row] for row in z.tolist()]
    hover = f"row %{{y}}, column %{{x}}<br>{picture.what} = %{{z}} %"
    return Chart(
        "input-gates",
        "Where the network looks: gates of the input",
        f"One gate for each of the {picture.dense:,} inputs, drawn where its pixel is. Colour: {picture.what}, in "
        f"percent (expected). {picture.kept:,} of {picture.dense:,} are open at test time (kept).",
        f"A picture of {height} by {width} pixels; the mean of {picture.what} is "
        f"{percent(float(picture.tiles.mean()), 1)}, and {picture.kept:,} of {picture.dense:,} gates are open at test "
        "time.",
        [heat(rows, hover, colorbar={**_BELOW, "ticksuffix": " %"}, xgap=0.5, ygap=0.5, hoverongaps=False)],
        height=440,
        **_SQUARE,
    ), z


def _filters(picture: Picture, gated: bool) -> tuple[Chart, Pixels]:
    """Weights of the first layer, a tile for each unit."""
    tiles = picture.tiles
    z, corners = _montage(tiles, 5)
    most = float(np.nanmax(np.abs(z))) or 1.0
    rows = [[None if math.isnan(v) else float(f"{v:.4g}") for v in row] for row in z.tolist()]
    look = {"colorscale": "@diverging", "colorbar": _BELOW, "hoverongaps": False}
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
        [heat(rows, "weight %{z}", -most, most, **look)],
        height=440,
        annotations=labels,
        **_SQUARE,
    ), z


def _montage(tiles: Pixels, most: int) -> tuple[Pixels, list[tuple[int, int]]]:
    """Tiles, at most so many in a row, with gaps of NaN; and the row and column of each one's first pixel."""
    count, height, width = tiles.shape
    across, down = width + max(1, round(width / 10)), height + max(1, round(height / 5))  # room for a label above each
    columns = min(most, count)
    corners = [(k // columns * down, k % columns * across) for k in range(count)]
    out = np.full((corners[-1][0] + height, (columns - 1) * across + width), np.nan)
    for (y, x), tile in zip(corners, tiles, strict=True):
        out[y : y + height, x : x + width] = tile
    return out, corners
