"""The page of one run: what it learned, what is left of the network, and how to do it again.

Here are its words, what its tables do not find in a `Run`, and the same pictures for papers, in matplotlib. Its charts
are in `drawing`; where the numbers come from is in `facts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ellzero.experiments import figures
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train.building import targets
from ellzero.out.reporting import MANY, axis_lines
from ellzero.page import drawing, layers
from ellzero.page.charts import Chart, number, percent, render, seconds, share, size
from ellzero.page.facts import COSTS, Look, Run, gather


def run_page(
    folder: Folder, index: int = 0, *, seen: Look | None = None, live: bool = False, part: bool = False
) -> str:
    """The page of a run, finished or not: HTML, complete in itself; or the `part` that changes while the run goes on.

    Its network is as `seen`, or as in the newest checkpoint. A `live` page asks the server that it comes from for news.
    An IndexError says that there is no such run in a stack, a FolderError that history or results are damaged, a
    PageMissingError that Plotly or jinja2 is not installed.
    """
    return render("run.html.j2", part=part, **_values(gather(folder, index, seen)), live=live, connect=live)


def _values(run: Run) -> dict[str, Any]:
    """What the template asks for."""
    return {
        "run": run,
        "look": run.look,
        "objective": _objective(run),
        "headlines": list(_headlines(run)),
        "training": drawing.training_charts(run),
        "flops": drawing.flops(run),
        "network": _network(run.look),
        "axes": axis_lines(run.look.table, fold=len(run.look.table) > MANY),
        "all_axes": axis_lines(run.look.table, fold=False),
        "gates": drawing.gate_charts(run),
        "images": drawing.pictures(run),
    }


def _network(look: Look) -> list[Chart]:
    """Layer by layer where layers repeat, else axis by axis."""
    if look.layers.stacks:
        return layers.charts(look.layers, look.epoch)
    return [drawing.axes_chart(look)] if look.columns else []


def _objective(run: Run) -> str:
    """In a sentence."""
    r = run.recipe
    if r.placement is None:
        return "The dense network, without gates."
    if r.penalty is not None:
        by = ", ".join(f"{k}: {v:g}" for k, v in r.penalty.items()) if isinstance(r.penalty, dict) else f"{r.penalty:g}"
        what = f"λ times what {r.gate} gates charge," if r.charges else "λ·l0_norm"
        return f"A penalty {what} with λ = c/N, c = {by} (N training images)."
    by = ", ".join(
        percent(v, 4).replace(".0000", "") if k == "*" else f"{k} {100 * v:g} %" for k, v in targets(r).items()
    )
    return f"A constraint: the {r.on} {COSTS.get(r.cost, 'time')} must be at most {by} of the dense network's."


def _headlines(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, number and small print of what matters most."""
    errors = [e for e in run.seen("error") if e is not None]
    if errors:
        told = run.recipe.told
        yield f"Test {run.recipe.error}", told(errors[-1]), f"lowest in training, at any size: {told(min(errors))}"
    left = run.look.report
    if left is not None:
        for title, row in (("Parameters kept", left.params), ("MACs kept", left.macs)):
            if row is not None:
                yield title, share(row.kept, row.dense), f"{number(row.kept)} of {number(row.dense)}"
    elif run.look.parameters is not None:
        yield "Parameters", number(run.look.parameters), "dense, no gates"
    elif run.gated and run.history:
        for title, key in (("Parameters kept", "params"), ("MACs kept", "macs")):
            yield title, percent(run.seen("kept", key)[-1]), "by the last record"
    if run.bytes_compact is not None and run.look.bytes_dense and run.gated:
        yield "Size on disk", size(run.bytes_compact), f"dense {size(run.look.bytes_dense)}"
    if run.latency:
        first, last = run.latency[0], run.latency[-1]
        small = f"{seconds(last['compact_s'])}, dense {seconds(last['dense_s'])}"
        if last is not first:
            small = f"batch {first['batch']:g}: {first['dense_s'] / first['compact_s']:.2f} ×"
        yield f"Speed, batch {last['batch']:g}", f"{last['dense_s'] / last['compact_s']:.2f} ×", small
    spent = [s for s in run.seen("seconds") if s is not None]
    if spent:
        yield "Time to train", seconds(sum(spent)), str(run.folder.about.get("device") or "")


# ---------------------------------------------------------------- static figures


def run_figures(folder: Folder, directory: Path, index: int = 0) -> list[Path]:
    """Draws the charts of a run with matplotlib, as PNG and SVG with their captions, into a folder that is made.

    A PlotsMissingError says that matplotlib is not installed, a FolderError that history or results are damaged.
    """
    run = gather(folder, index)
    look, files = run.look, _draw_training(run, directory)
    if look.layers.stacks:
        files += _draw_layers(look, directory)
    elif look.columns:
        columns, caption = [(c.name, c.dense, c.kept) for c in look.columns], drawing.axes_chart(look).caption
        files += figures.widths(columns, directory / "network", caption)
    if run.strips:
        caption = (
            "P(open) of every gate (expected), in percent, over epochs: a panel for each placement, a row for each "
            "gate, by falling P(open) at the end."
        )
        panels = [(s.name, s.epochs, s.percent) for s in run.strips]
        files += figures.strips(panels, directory / "gates-over-time", caption)
    if look.spreads:
        caption = (
            "Bars: share of the gates of a placement by their value at test time (kept), in percent. Orange: the hard "
            "concrete distribution that training draws from, the mean over the gates (expected): its density per bin, "
            "and its atoms at 0 and 1."
        )
        shares = [(s.name, s.kept, s.expected) for s in look.spreads]
        files += figures.histograms(shares, directory / "gates-at-the-end", caption)
    for chart, pixels in drawing.pictures(run):
        label = "P(open) (%)" if chart.name == "input-gates" else "weight"
        limits = chart.traces[0]["zmin"], chart.traces[0]["zmax"]
        files += figures.picture(pixels, directory / chart.name, chart.caption, label=label, limits=limits)
    return files


def _draw_layers(look: Look, directory: Path) -> list[Path]:
    files, titled = [], layers.charts(look.layers, look.epoch)
    for chart, (stack, parts) in zip(titled, layers.cut(look.layers), strict=False):
        panels = [(f"{part.kind}: {part.name}", *part.by_layer(stack.layers)) for part in parts]
        names = [f"{stack.name}.{layer}".lstrip(".") for layer in stack.layers]
        caption = (
            "A row for each layer, from input to output. Squares: heads of attention, full if kept. Bars: units of a "
            f"layer, grey dense and blue kept; the number is what is kept. After epoch {look.epoch:g}."
        )
        files += figures.layers(panels, names, directory / chart.name, caption)
    if outside := look.layers.outside:
        rows, names = [(row.dense, row.kept) for row in outside], [row.name for row in outside]
        files += figures.layers([(titled[-1].title, rows, [])], names, directory / "outside", titled[-1].caption)
    return files


def _draw_training(run: Run, directory: Path) -> list[Path]:
    if not run.history:
        return []
    panels, labels = [], {"loss": "training loss (nats)", "multipliers": "multiplier λ (nats)"}
    for chart in drawing.training_charts(run):
        if chart.name != "seconds":
            label = labels.get(chart.name, chart.layout["yaxis"]["title"]["text"])
            panels.append((label, {t["name"]: t["y"] for t in chart.traces if t["name"] != "target"}))
    caption = f"Test {run.recipe.error} and training loss by epoch"
    if run.gated:
        caption += (
            ", and what the gates leave in percent of the dense network: kept by the test-time gates (solid), expected "
            "over their noise (dashed)"
        )
    marks = drawing.moments(run)
    if marks:
        caption += f". Dotted: {', '.join(f'{word} after epoch {epoch:g}' for epoch, word in marks)}"
    files = figures.history(run.x, panels, directory / "training", caption + ".", [epoch for epoch, _ in marks])
    flops = drawing.flops(run)
    if flops is not None:
        lines = [(t["name"], t["x"], t["y"]) for t in flops.traces]
        unit = flops.layout["xaxis"]["title"]["text"]
        files += figures.flops(lines, directory / "flops", flops.caption, unit=unit)
    return files
