"""The page of one run: what it learned, what is left of the network, and how to do it again.

Here are its words and tables. Charts over epochs are in `progress`, those of the network in `network`; all are made
from a `Run`, plain data that `facts` has gathered. The same pictures for papers are `figures`, in matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ellzero.experiments import figures
from ellzero.experiments.store.folder import Folder
from ellzero.page import network, progress
from ellzero.page.charts import Chart, number, percent, render, render_part, seconds, share, size
from ellzero.page.facts import COSTS, Run, gather
from ellzero.page.looking import Look

_MOST_PLACEMENTS = 6  # whose charts are shown at once


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
    """What changes in the page while the run goes on; takes what `run_page` takes."""
    return render_part("run.html.j2", **_values(gather(folder, index, seen)), live=True)


def _values(run: Run) -> dict[str, Any]:
    """What the template asks for."""
    look, gates = run.look, network.gate_charts(run)
    return {
        "run": run,
        "look": look,
        "state": _state(run),
        "headlines": _headlines(run),
        "training": progress.training_charts(run),
        "flops": progress.flops(run),
        "picture": network.axes_chart(look.columns, look.epoch) if look is not None and look.columns else None,
        "gates": gates[:_MOST_PLACEMENTS],
        "more_gates": gates[_MOST_PLACEMENTS:],
        "images": _pictures(run),
        "tuned": run.fixed_at is not None,
        "events": progress.event_rows(run),
        "axes": _axis_rows(look),
        "totals": _totals(look),
        "about": _about(run),
        "objective": _objective(run),
        "command": str(run.folder.about.get("command") or ""),
        "toml": run.recipe.to_toml().rstrip(),
    }


def _pictures(run: Run) -> list[Chart]:
    look = run.look
    maps = [network.gate_map_chart(look.gate_map)] if look is not None and look.gate_map is not None else []
    if look is None or look.filters is None:
        return maps
    return [*maps, network.filters_chart(look.filters, run.gated)]


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
    return f"A constraint: the {r.on} {COSTS[r.cost]} must be at most {by} of the dense network's."


def _headlines(run: Run) -> list[tuple[str, str, str]]:
    """Name, number and small print of what matters most."""
    out: list[tuple[str, str, str]] = []
    errors = [e for e in run.seen("error") if e is not None]
    if errors:
        out.append(("Test error", f"{errors[-1]:.2f} %", f"lowest in training, at any size: {min(errors):.2f} %"))
    left = run.look.report if run.look is not None else None
    if left is not None:
        for title, row in (("Parameters kept", left.params), ("MACs kept", left.macs)):
            if row is not None:
                out.append((title, share(row.kept, row.dense), f"{number(row.kept)} of {number(row.dense)}"))
    elif run.look is not None:
        out.append(("Parameters", number(run.look.parameters), "dense, no gates"))
    elif run.gated and run.history:
        for title, key in (("Parameters kept", "params"), ("MACs kept", "macs")):
            out.append((title, percent(run.seen("kept", key)[-1]), "by the last record"))
    if run.bytes_compact is not None and run.look is not None and run.gated:
        out.append(("Size on disk", size(run.bytes_compact), f"dense {size(run.look.bytes_dense)}"))
    if run.latency:
        first, last = run.latency[0], run.latency[-1]
        small = f"{seconds(last['compact_s'])}, dense {seconds(last['dense_s'])}"
        if last is not first:
            small = f"batch {first['batch']:g}: {first['dense_s'] / first['compact_s']:.2f} ×"
        out.append((f"Speed, batch {last['batch']:g}", f"{last['dense_s'] / last['compact_s']:.2f} ×", small))
    spent = [s for s in run.seen("seconds") if s is not None]
    if spent:
        out.append(("Time to train", seconds(sum(spent)), str(run.folder.about.get("device") or "")))
    return out


def _totals(look: Look | None) -> list[tuple[str, Any]]:
    """Rows of the table of totals, with their names."""
    left = look.report if look is not None else None
    if left is None:
        return []
    rows = [("Parameters", left.params), ("MACs for one image", left.macs)]
    rows.append(("Weights not zero (l0_norm)", left.l0_norm))
    return [(title, row) for title, row in rows if row is not None]


def _about(run: Run) -> list[tuple[str, str]]:
    about = run.folder.about
    names = {"ellzero": "ellzero", "torch": "torch", "python": "Python", "commit": "commit", "device": "device"}
    names["date"] = "date"
    out = [(title, str(about[key])) for key, title in names.items() if about.get(key) is not None]
    return [*out, ("seed", str(run.recipe.seed)), ("folder", run.folder.path.name)]


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
    look, files = run.look, _draw_training(run, directory)
    if look is not None and look.columns:
        caption = network.axes_chart(look.columns, look.epoch).caption
        files += figures.widths([(c.name, c.dense, c.kept) for c in look.columns], directory / "network", caption)
    if run.strips:
        panels = [(s.name, s.epochs, s.percent) for s in run.strips]
        caption = (
            "P(open) of every gate (expected), in percent, over epochs: a panel for each placement, a row for each "
            "gate, by falling P(open) at the end."
        )
        files += figures.strips(panels, directory / "gates-over-time", caption)
    if look is not None and look.spreads:
        caption = (
            "Bars: share of the gates of a placement by their value at test time (kept), in percent. Orange: the hard "
            "concrete distribution that training draws from, the mean over the gates (expected): its density per bin, "
            "and its atoms at 0 and 1."
        )
        shares = [(s.name, s.kept, s.expected) for s in look.spreads]
        files += figures.histograms(shares, directory / "gates-at-the-end", caption)
    if look is not None and look.gate_map is not None:
        z, _ = network.montage(100 * look.gate_map.tiles, min(3, len(look.gate_map.tiles)))
        caption = network.gate_map_chart(look.gate_map).caption
        files += figures.picture(z, directory / "input-gates", caption, label="P(open) (%)", limits=(0, 100))
    if look is not None and look.filters is not None:
        z, _ = network.montage(look.filters.tiles, min(len(look.filters.tiles), 5))
        most = float(np.nanmax(np.abs(z))) or 1.0
        caption = network.filters_chart(look.filters, run.gated).caption
        files += figures.picture(z, directory / "filters", caption, label="weight", limits=(-most, most))
    return files


def _draw_training(run: Run, directory: Path) -> list[Path]:
    if not run.history:
        return []
    panels: list[tuple[str, Mapping[str, Sequence[float | None]]]] = [
        ("test error (%)", {"kept" if run.gated else "dense": run.seen("error")}),
        ("training loss (nats)", {"with noise" if run.gated else "dense": run.seen("loss")}),
    ]
    caption = "Test error and training loss by epoch"
    if run.gated:
        for cost, words in COSTS.items():
            both = {kind: run.seen(kind, cost, times=100) for kind in ("kept", "expected")}
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
    files = figures.history(run.x, panels, directory / "training", caption + ".", [epoch for epoch, _ in marks])
    flops = progress.flops(run)
    if flops is not None:
        lines = [(str(t["name"]), list(t["x"]), list(t["y"])) for t in flops.traces]
        unit = str(flops.layout["xaxis"]["title"]["text"])
        files += figures.flops(lines, directory / "flops", flops.caption, unit=unit)
    return files
