"""The page of one run: what it learned, what is left of the network, and how to do it again.

Every chart is made from a `Run`, plain data that `facts` has gathered, says in its caption what one sees, in which unit
and whether that is expected or kept, and has a text alternative. Those over epochs are in `progress`; how a chart is
drawn is in `charts` and the templates; the same pictures for papers are `figures`, in matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ellzero.experiments import figures
from ellzero.experiments.store.folder import Folder
from ellzero.page import progress
from ellzero.page.charts import (
    EXPECTED,
    Chart,
    axis,
    escaped,
    number,
    packed,
    percent,
    render,
    render_part,
    seconds,
    size,
)
from ellzero.page.facts import BINS, Column, Look, Picture, Run, Spread, Strip, gather

_MOST_SETS = 6  # of gates, whose charts are shown at once


def run_page(folder: Folder, index: int = 0, *, seen: Look | None = None, live: bool = False) -> str:
    """The page of a run.

    Args:
        folder: of the run, finished or not.
        index: which run of a stack, from 0.
        seen: what its network looks like, if that is known already.
        live: whether the page asks the server that it comes from for news.

    Returns:
        HTML, complete in itself.

    Raises:
        IndexError: there is no such run.
        FolderError: the history or the results are damaged.
        PageMissingError: Plotly or jinja2 is not installed.
    """
    return render("run.html.j2", **_values(gather(folder, index, seen)), live=live, connect=live)


def run_content(folder: Folder, index: int = 0, *, seen: Look | None = None) -> str:
    """What changes in the page while the run goes on.

    Args:
        folder: of the run.
        index: which run of a stack, from 0.
        seen: what its network looks like, if that is known already.
    """
    return render_part("run.html.j2", **_values(gather(folder, index, seen)), live=True)


def _values(run: Run) -> dict[str, Any]:
    """What the template asks for."""
    gates = _gate_charts(run)
    return {
        "run": run,
        "look": run.look,
        "state": _state(run),
        "headlines": _headlines(run),
        "training": progress.training_charts(run),
        "flops": progress.flops(run),
        "picture": _network(run.look.columns, run.look.epoch) if run.look is not None and run.look.columns else None,
        "gates": gates[:_MOST_SETS],
        "more_gates": gates[_MOST_SETS:],
        "images": _image_charts(run),
        "tuned": run.fixed_at is not None,
        "events": progress.event_rows(run),
        "axes": _axis_rows(run.look),
        "totals": _totals(run),
        "sizes": _sizes(run),
        "about": _about(run),
        "objective": _objective(run),
        "command": str(run.folder.about.get("command") or ""),
        "toml": run.recipe.to_toml().rstrip(),
    }


# ---------------------------------------------------------------- words and numbers


def _state(run: Run) -> str:
    done = run.history[-1]["epoch"] if run.history else 0
    if run.result is not None:
        return f"Finished: {run.epochs} epochs"
    return f"Not finished: {done:g} of {run.epochs} epochs so far"


def _objective(run: Run) -> str:
    """In a sentence."""
    r = run.recipe
    if r.placement is None:
        return "The dense network, without gates."
    if r.penalty is not None:
        by = ", ".join(f"{k}: {v:g}" for k, v in r.penalty.items()) if isinstance(r.penalty, dict) else f"{r.penalty:g}"
        return f"A penalty λ·l0_norm with λ = c/N, c = {by} (N training images)."
    by = ", ".join(
        percent(v, 4).replace(".0000", "") if k == "*" else f"{k} {100 * v:g} %" for k, v in run.targets.items()
    )
    return f"A constraint: the {r.on} {progress.COSTS[r.cost]} must be at most {by} of the dense network's."


def _headlines(run: Run) -> list[tuple[str, str, str]]:
    """Name, number and small print of what matters most."""
    out: list[tuple[str, str, str]] = []
    errors = [e for e in run.seen("error") if e is not None]
    if errors:
        out.append(("Test error", f"{errors[-1]:.2f} %", f"lowest in training, at any size: {min(errors):.2f} %"))
    left = run.look.report if run.look is not None else None
    if left is not None:
        rows = [("Parameters kept", left.params)] + ([("MACs kept", left.macs)] if left.macs is not None else [])
        for title, row in rows:
            small = f"{number(row.kept)} of {number(row.dense)}"
            out.append((title, percent(row.kept / row.dense if row.dense else None), small))
    elif run.look is not None:
        out.append(("Parameters", number(run.look.parameters[0]), "dense, no gates"))
    elif run.gated and run.history:
        for title, key in (("Parameters kept", "params"), ("MACs kept", "macs")):
            out.append((title, percent(run.seen("kept", key)[-1]), "by the last record"))
    if run.bytes_compact is not None and run.look is not None and run.gated:
        out.append(("Size on disk", size(run.bytes_compact), f"dense {size(run.look.bytes_dense)}"))
    if run.latency is not None and run.latency["rows"]:
        first, last = run.latency["rows"][0], run.latency["rows"][-1]
        small = f"{seconds(last['compact_s'])}, dense {seconds(last['dense_s'])}"
        if last is not first:
            small = f"batch {first['batch']:g}: {first['dense_s'] / first['compact_s']:.2f} ×"
        out.append((f"Speed, batch {last['batch']:g}", f"{last['dense_s'] / last['compact_s']:.2f} ×", small))
    spent = [s for s in run.seen("seconds") if s is not None]
    if spent:
        out.append(("Time to train", seconds(sum(spent)), str(run.folder.about.get("device") or "")))
    return out


def _totals(run: Run) -> list[dict[str, str]]:
    """Rows of the table of totals."""
    left = run.look.report if run.look is not None else None
    if left is None:
        return []
    rows = [
        ("Parameters", left.params),
        ("MACs for one image", left.macs),
        ("Weights not zero (l0_norm)", left.l0_norm),
    ]
    out = []
    for title, row in rows:
        if row is not None:
            share = [None if v is None or not row.dense else v / row.dense for v in (row.expected, row.kept)]
            out.append(
                {
                    "name": title,
                    "dense": number(row.dense),
                    "expected": number(row.expected),
                    "expected_share": percent(share[0]),
                    "kept": number(row.kept),
                    "kept_share": percent(share[1]),
                }
            )
    return out


def _sizes(run: Run) -> dict[str, Any]:
    """Sizes and latency for their table."""
    out: dict[str, Any] = {"dense": None, "compact": run.bytes_compact, "latency": []}
    if run.look is not None:
        out["dense"] = run.look.bytes_dense
    if run.latency is not None:
        for row in run.latency["rows"]:
            out["latency"].append(
                {
                    "batch": f"{row['batch']:g}",
                    "dense": seconds(row["dense_s"]),
                    "compact": seconds(row["compact_s"]),
                    "ratio": f"{row['dense_s'] / row['compact_s']:.2f} ×",
                    "runs": f"{row['runs']:g}",
                }
            )
        threads = run.latency["threads"]
        out["where"] = f"{run.latency['device']}, {threads} thread{'s' * (threads != 1)}, torch {run.latency['torch']}"
    return out


def _about(run: Run) -> list[tuple[str, str]]:
    names = {"ellzero": "ellzero", "torch": "torch", "python": "Python", "commit": "commit", "device": "device"}
    about = run.folder.about
    out = [(title, str(about[key])) for key, title in names.items() if about.get(key) is not None]
    if about.get("date") is not None:
        out.append(("date", str(about["date"])))
    return [*out, ("seed", str(run.recipe.seed)), ("folder", run.folder.path.name)]


# ---------------------------------------------------------------- the network


def _network(columns: Sequence[Column], epoch: int) -> Chart:
    """One column per axis; heights are square roots, so that ten and a thousand can be seen beside each other."""
    tallest = math.sqrt(max(c.dense for c in columns) or 1)
    before = [math.sqrt(c.dense) / tallest for c in columns]
    after = [math.sqrt(c.kept) / tallest for c in columns]
    at, half = list(range(len(columns))), 0.17
    bands: dict[str, Any] = {"x": [], "y": []}
    for k in range(len(columns) - 1):
        left, right = after[k] / 2, after[k + 1] / 2
        bands["x"] += [k + half, k + 1 - half, k + 1 - half, k + half, k + half, None]
        bands["y"] += [left, right, -right, -left, left, None]
    rows = [
        [escaped(c.name), c.dense, "–" if c.expected is None else f"{c.expected:,.1f}", c.kept, c.state]
        for c in columns
    ]
    hover = (
        "%{customdata[0]}<br>dense: %{customdata[1]:,}<br>expected: %{customdata[2]}<br>kept: %{customdata[3]:,}"
        "<br>%{customdata[4]}<extra></extra>"
    )
    bars = {"type": "bar", "x": at, "customdata": rows, "hovertemplate": hover, "width": 2 * half}
    band = {"type": "scatter", "mode": "lines", "fill": "toself", "fillcolor": "@faint", "line": {"width": 0}}
    traces: list[dict[str, Any]] = [
        {**band, "hoverinfo": "skip", "showlegend": False, **bands},
        {**bars, "y": before, "base": [-h / 2 for h in before], "name": "dense", "marker": {"color": "@soft"}},
        {**bars, "y": after, "base": [-h / 2 for h in after], "name": "kept", "marker": {"color": "@blue"}},
    ]
    many = len(columns) > 12
    style = {"yshift": 4, "yanchor": "bottom", "showarrow": False, "font": {"size": 11}, "align": "center"}
    labels = [
        {**style, "x": k, "y": h / 2, "text": f"<b>{c.kept:,}</b><br>of {c.dense:,}"}
        for k, (c, h) in enumerate(zip(columns, before, strict=True))
    ]
    names = {"tickvals": at, "ticktext": [escaped(c.name) for c in columns], **({"tickangle": -60} if many else {})}
    bare = {"showgrid": False, "zeroline": False, "fixedrange": True}
    said = ", ".join(f"{c.name} {c.kept:,} of {c.dense:,}" for c in columns[:40])
    return Chart(
        "network",
        "The network, before and after",
        "One column per axis (units that leave or stay together), from input to output. Grey: the width of the dense "
        "network; blue: the units that are kept; bands: the weights between them. Heights go with the square root of "
        f"the number of units, so that small axes can be seen. After epoch {epoch:g}.",
        f"Units kept by axis, from input to output: {said}.",
        traces,
        {
            "xaxis": {**names, **bare, "range": [-0.6, len(columns) - 0.4]},
            "yaxis": {"visible": False, "range": [-0.53, 0.53 if many else 0.68], "fixedrange": True},
            "barmode": "overlay",
            "annotations": [] if many else labels,
        },
        height=380,
        wide=True,
    )


def _axis_rows(look: Look | None) -> list[dict[str, Any]]:
    """The table of axes, in the order of the picture; inputs that a layer picks come after where they come from."""
    if look is None or look.report is None:
        return []
    order = {column.name: number for number, column in enumerate(look.columns)}
    rows: list[tuple[float, dict[str, Any]]] = []
    for row in look.report.axes:
        words = row.state if row.why is None else f"{row.state}: {row.why}"
        rows.append((order[row.name], {"row": row, "name": row.name, "words": words}))
    for picked in look.report.inputs:
        at = order.get(f"{picked.name} inputs", order.get(f"{picked.name}.input", len(order)))
        words = "gated: the layer picks its inputs one by one"
        rows.append((at + 0.5, {"row": picked, "name": f"{picked.name}: inputs read", "words": words}))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


# ---------------------------------------------------------------- gates


def _name(prefix: str, number: int) -> str:
    return f"{prefix}-{number}"  # names of gates may hold anything, those of charts may not


def _gate_charts(run: Run) -> list[tuple[str, list[Chart]]]:
    """For each set of gates its strip and its histogram, as far as there are."""
    strips = {strip.name: strip for strip in run.strips}
    spreads = {s.name: s for s in run.look.spreads} if run.look is not None else {}
    out, lines = [], progress.marks(run, labels=False)
    for k, name in enumerate(dict.fromkeys([*spreads, *strips])):
        charts = [_strip(strips[name], k, lines)] if name in strips else []
        charts += [_histogram(spreads[name], k)] if name in spreads else []
        out.append((name, charts))
    return out


# The scale of colours: beside a chart, or below a picture, which needs the width.
_BAR: dict[str, Any] = {"thickness": 10, "outlinewidth": 0, "tickfont": {"color": "@muted", "size": 11}}
_BELOW = {**_BAR, "orientation": "h", "y": 0, "yanchor": "top", "ypad": 8, "thickness": 8}


def _strip(strip: Strip, k: int, lines: Mapping[str, Any]) -> Chart:
    rows, last = strip.percent.shape[0], strip.percent[:, -1]
    some = f" {rows} of them are shown, evenly spaced." if rows < strip.gates else ""
    sure = f"{np.mean(last >= 95):.0%} of them above 95 %, {np.mean(last <= 5):.0%} below 5 %"
    heat = {
        "type": "heatmap",
        "x": list(strip.epochs),
        "z": packed(strip.percent),
        "zmin": 0,
        "zmax": 100,
        "colorscale": "@heat",
        "hovertemplate": "epoch %{x}<br>P(open) = %{z} % (expected)<extra></extra>",
        "colorbar": {**_BAR, "ticksuffix": " %"},
    }
    return Chart(
        _name("strip", k),
        f"{strip.name}: P(open) over training",
        f"A row for each of the {strip.gates:,} gates of {strip.name}, by falling P(open) at the end. Colour: the "
        f"probability that the gate is open (expected), in percent.{some}",
        f"P(open) of the gates of {strip.name}; at the end {sure}.",
        [heat],
        {
            "xaxis": axis("epoch", showgrid=False, **({"dtick": 1} if len(strip.epochs) <= 12 else {})),
            "yaxis": axis(
                "gates", showticklabels=False, ticks="", autorange="reversed", showgrid=False, zeroline=False
            ),
            **lines,
        },
        height=280,
    )


def _histogram(spread: Spread, k: int) -> Chart:
    """The two ends stand apart from the bins, for there the distribution has atoms."""
    width = 1 / BINS
    x = [-1.5 * width, *((b + 0.5) * width for b in range(BINS)), 1 + 1.5 * width]
    where = ["z = 0", *(f"{b * width:.2f} < z < {(b + 1) * width:.2f}" for b in range(BINS)), "z = 1"]
    where = [escaped(words) for words in where]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": x,
            "y": [100 * v for v in spread.kept],
            "width": width * 0.9,
            "marker": {"color": ["@grey", *["@blue"] * BINS, "@green"]},
            "customdata": where,
            "name": "kept",
            "showlegend": False,
            "hovertemplate": "%{customdata}<br>%{y:.1f} % of the gates (kept)<extra></extra>",
        }
    ]
    caption = said = ""
    if spread.expected is not None:
        shares = [100 * v for v in spread.expected]
        template = "%{customdata}<br>%{y:.1f} % (expected)<extra></extra>"
        line = {"color": "@vermilion", "width": 2, "dash": EXPECTED}
        diamond = {"color": "@vermilion", "size": 10, "symbol": "diamond"}
        inner, outer = slice(1, -1), slice(None, None, BINS + 1)
        for part, name, look in (
            (inner, "density (expected)", {"mode": "lines", "line": line}),
            (outer, "atoms (expected)", {"mode": "markers", "marker": diamond}),
        ):
            spots = {"x": x[part], "y": shares[part], "customdata": where[part]}
            traces.append({"type": "scatter", **spots, "name": name, "hovertemplate": template, **look})
        caption = (
            " Orange: the hard concrete distribution that training draws from, the mean over the gates (expected): its "
            "density between 0 and 1, per bin (dashed), and its atoms at 0 and 1 (diamonds)."
        )
        said = f" In expectation {percent(spread.expected[0], 1)} are 0 and {percent(spread.expected[-1], 1)} are 1."
    return Chart(
        _name("histogram", k),
        f"{spread.name}: the gates at the end",
        f"Bars: share of the {spread.gates:,} gates of {spread.name} by their value at test time (kept), in percent; "
        f"grey are closed (0), green fully open (1).{caption}",
        f"{percent(spread.kept[0], 1)} of the {spread.gates:,} gates of {spread.name} are closed at test time.{said}",
        traces,
        {
            "xaxis": axis(
                "value of the gate z",
                tickvals=[x[0], 0.25, 0.5, 0.75, x[-1]],
                ticktext=["0", "0.25", "0.5", "0.75", "1"],
                showgrid=False,
                zeroline=False,
            ),
            "yaxis": axis("gates (% of the set)", rangemode="tozero"),
        },
        height=280,
    )


# ---------------------------------------------------------------- images


def _image_charts(run: Run) -> list[Chart]:
    out = []
    if run.look is not None and run.look.gate_map is not None:
        out.append(_gate_map(run.look.gate_map, run.look.pixels_open))
    if run.look is not None and run.look.filters is not None:
        out.append(_filters(run.look.filters, run.look.filters_left, run.gated))
    return out


def _gate_map(picture: Picture, opened: int) -> Chart:
    count = picture.tiles.size
    z, _ = montage(picture.tiles, columns=min(3, len(picture.tiles)))
    _, height, width = picture.tiles.shape
    heat = {
        "type": "heatmap",
        "z": [[None if math.isnan(v) else round(100 * v) for v in row] for row in z.tolist()],
        "zmin": 0,
        "zmax": 100,
        "colorscale": "@heat",
        "xgap": 0.5,
        "ygap": 0.5,
        "hoverongaps": False,
        "hovertemplate": f"row %{{y}}, column %{{x}}<br>{picture.what} = %{{z}} %<extra></extra>",
        "colorbar": {**_BELOW, "ticksuffix": " %"},
    }
    return Chart(
        "input-gates",
        "Where the network looks: gates of the input",
        f"One gate for each of the {count:,} inputs, drawn where its pixel is. Colour: {picture.what}, in percent "
        f"(expected). {opened:,} of {count:,} are open at test time (kept).",
        f"A picture of {height} by {width} pixels; the mean of {picture.what} is "
        f"{percent(float(picture.tiles.mean()), 1)}, and {opened:,} of {count:,} gates are open at test time.",
        [heat],
        _square(),
        height=440,
    )


def _filters(picture: Picture, left: tuple[int, int], gated: bool) -> Chart:
    tiles = picture.tiles
    z, corners = montage(tiles, min(len(tiles), 5))
    most = float(np.nanmax(np.abs(z))) or 1.0
    some = f"Shown are the {len(tiles)} with the largest weights." if len(tiles) < left[0] else "All are shown."
    heat = {
        "type": "heatmap",
        "z": [[None if math.isnan(v) else float(f"{v:.4g}") for v in row] for row in z.tolist()],
        "zmin": -most,
        "zmax": most,
        "colorscale": "@diverging",
        "hoverongaps": False,
        "hovertemplate": "weight %{z}<extra></extra>",
        "colorbar": _BELOW,
    }
    style = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 10, "color": "@muted"}}
    labels = [
        {**style, "x": x - 0.5, "y": y - 0.5, "text": escaped(label)}
        for (y, x), label in zip(corners, picture.labels, strict=True)
    ]
    which, gates = f"the {left[1]:,} units of {picture.what}", ""
    if gated:
        which = f"the {left[0]:,} of {left[1]:,} units of {picture.what} that are kept"
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


# ---------------------------------------------------------------- static figures


def run_figures(folder: Folder, directory: Path, index: int = 0) -> list[Path]:
    """Draws the charts of a run with matplotlib, as PNG and SVG with their captions.

    Args:
        folder: of the run.
        directory: where the files go; it is made.
        index: which run of a stack, from 0.

    Returns:
        The files.

    Raises:
        PlotsMissingError: matplotlib is not installed.
        FolderError: the history or the results are damaged.
    """
    run = gather(folder, index)
    files: list[Path] = []
    _draw_training(run, directory, files)
    look = run.look
    if look is not None and look.columns:
        chart = _network(look.columns, look.epoch)
        widths = [(c.name, c.dense, c.kept) for c in look.columns]
        files += figures.widths(widths, directory / "network", chart.caption)
    if run.strips:
        panels = [(s.name, s.epochs, s.percent) for s in run.strips]
        caption = (
            "P(open) of every gate (expected), in percent, over epochs: a panel for each set of gates, a row for each "
            "gate, by falling P(open) at the end."
        )
        files += figures.strips(panels, directory / "gates-over-time", caption)
    if look is not None and look.spreads:
        shares = [(s.name, s.kept, s.expected) for s in look.spreads]
        caption = (
            "Bars: share of the gates of a set by their value at test time (kept), in percent. Orange: the hard "
            "concrete distribution that training draws from, the mean over the gates (expected): its density per bin, "
            "and its atoms at 0 and 1."
        )
        files += figures.histograms(shares, directory / "gates-at-the-end", caption)
    if look is not None and look.gate_map is not None:
        z, _ = montage(100 * look.gate_map.tiles, min(3, len(look.gate_map.tiles)))
        caption = _gate_map(look.gate_map, look.pixels_open).caption
        files += figures.picture(z, directory / "input-gates", caption, label="P(open) (%)", limits=(0, 100))
    if look is not None and look.filters is not None:
        z, _ = montage(look.filters.tiles, min(len(look.filters.tiles), 5))
        most = float(np.nanmax(np.abs(z))) or 1.0
        caption = _filters(look.filters, look.filters_left, run.gated).caption
        files += figures.picture(z, directory / "filters", caption, label="weight", limits=(-most, most))
    return files


def _draw_training(run: Run, directory: Path, files: list[Path]) -> None:
    if not run.history:
        return
    x = progress.epochs(run)
    panels: list[tuple[str, Mapping[str, Sequence[float | None]]]] = [
        ("test error (%)", {"kept" if run.gated else "dense": run.seen("error")}),
        ("training loss (nats)", {"with noise" if run.gated else "dense": run.seen("loss")}),
    ]
    caption = "Test error and training loss by epoch"
    if run.gated:
        for cost, words in progress.COSTS.items():
            kinds = ("kept", "expected")
            both = {k: [None if v is None else 100 * v for v in run.seen(k, cost)] for k in kinds}
            panels.append((f"{words} (% of dense)", both))
        for chart in progress.multipliers(run):
            panels.append(("multiplier λ (nats)", {str(t["name"]): t["y"] for t in chart.traces}))
        caption += (
            ", and what the gates leave in percent of the dense network: kept by the test-time gates (solid), expected "
            "over their noise (dashed)"
        )
    marks = progress.moments(run)
    if marks:
        caption += f". Dotted: {', '.join(f'{word} after epoch {epoch:g}' for epoch, word in marks)}"
    files += figures.history(x, panels, directory / "training", caption + ".", [epoch for epoch, _ in marks])
    flops = progress.flops(run)
    if flops is not None:
        lines = [(str(t["name"]), list(t["x"]), list(t["y"])) for t in flops.traces]
        unit = str(flops.layout["xaxis"]["title"]["text"])
        files += figures.flops(lines, directory / "flops", flops.caption, unit=unit)


__all__ = ["montage", "run_content", "run_figures", "run_page"]
