"""Figures: one style for all of them, the published points beside ours, and files that come out the same every time.

A figure is drawn with `grid`, and written with `save` as PNG and SVG, its caption beside it. matplotlib is an extra
(`ellzero[plots]`) and is imported when something is drawn. This file does not know what was trained, nor how.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from ellzero.experiments import statistics
from ellzero.out.files import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's: told apart by colour-blind readers too. Grey is for context.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY = "#222222", "#8C8C8C"
COLUMN, PAGE = 3.4, 7.0  # inches: the width of a column and of a page

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same letters everywhere
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.hashsalt": "ellzero",  # names inside an SVG are random without
    "svg.fonttype": "path",
}


@final
class PlotsMissingError(ImportError):
    """matplotlib is not installed; the message says how to get it."""

    def __init__(self) -> None:
        super().__init__("`matplotlib` must be installed to draw figures: pip install 'ellzero[plots]'")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def grid(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (COLUMN, 2.5)
) -> Iterator[tuple[Figure, list[Axes]]]:
    """An empty figure in the house's style, which holds inside the `with` block.

    Args:
        rows: of panels.
        columns: of panels.
        size: width and height in inches.

    Returns:
        The figure, and its panels row by row.

    Raises:
        PlotsMissingError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)  # can measure text, and needs no screen
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure: Figure, path: str | PathLike[str], caption: str) -> list[Path]:
    """Writes a figure as PNG and SVG, and its caption as text; the same figure gives the same bytes.

    Args:
        figure: made by `grid`.
        path: of the files, without an ending; folders are made.
        caption: what the figure shows, for a reader who sees nothing else.

    Returns:
        The three files.

    Raises:
        ValueError: `caption` is empty.
    """
    if not caption.strip():
        raise ValueError("`caption` must say what the figure shows, got nothing")
    matplotlib = _matplotlib()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [target.with_name(f"{target.name}.{ending}") for ending in ("png", "svg", "txt")]
    with matplotlib.rc_context(_STYLE), replacing(files[0]) as png, replacing(files[1]) as svg:
        figure.savefig(png, dpi=200, facecolor="white", metadata={"Software": None})
        figure.savefig(svg, facecolor="white", metadata={"Date": None, "Creator": None})
    write_text(files[2], " ".join(caption.split()) + "\n")
    return files


def legend(figure: Figure, axes: Axes, columns: int = 4) -> None:
    """Puts the legend of one panel under the whole figure, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))


def curves(axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], label: str, colour: str) -> None:
    """Draws the mean of some runs as a line, and each of them as a thin one where there are several."""
    mean = [math.fsum(values) / len(values) for values in zip(*runs, strict=True)]
    if len(runs) > 1:
        for run in runs:
            axes.plot(x, run, color=colour, linewidth=0.5, alpha=0.35)
    axes.plot(x, mean, color=colour, label=label)


def _matplotlib() -> Any:
    if not can_draw():
        raise PlotsMissingError
    import matplotlib

    return matplotlib


# ---------------------------------------------------------------- error against cost


@final
@dataclass(frozen=True)
class Point:
    """A network: what it costs, and how wrong it is.

    Args:
        cost: kept, a fraction of the dense cost.
        error: in percent.
        label: its name.
    """

    cost: float
    error: float
    label: str = ""


_NAMES = {"l0_norm": "density", "params": "parameters", "macs": "MACs"}


def pareto(
    points: Sequence[Point],
    path: str | PathLike[str],
    *,
    cost: Literal["l0_norm", "params", "macs"] = "params",
    title: str = "",
    published: Sequence[Point] = (),
) -> list[Path]:
    """Draws error against kept cost: every point, the front among them, and published points as context.

    Args:
        points: ours.
        path: of the files, without an ending.
        cost: which one the points have.
        title: above it, such as the network's name.
        published: of others; they do not count for the front.

    Returns:
        The files: PNG, SVG, caption.

    Raises:
        ValueError: there are no points, or a cost is not a fraction, or an error no percentage.
        PlotsMissingError: matplotlib is not installed.
    """
    if not points:
        raise ValueError("`points` must be at least one point, got none")
    for point in (*points, *published):
        if not (0 < point.cost <= 1 and 0 <= point.error <= 100):
            raise ValueError(f"`points` must have a cost in (0, 1] and an error in [0, 100] %, got {point}")
    best = [points[k] for k in statistics.pareto([(p.cost, p.error) for p in points])]
    with grid(size=(5.0, 3.6)) as (figure, (axes,)):
        spots = [100 * p.cost for p in points], [p.error for p in points]
        axes.plot(*spots, "o", color=BLUE, alpha=0.45, markeredgewidth=0, label=f"ours ({len(points)})")
        axes.plot([100 * p.cost for p in best], [p.error for p in best], "-o", color=BLUE, label="our front", zorder=3)
        if published:
            spots = [100 * p.cost for p in published], [p.error for p in published]
            axes.plot(*spots, "D", color="white", markeredgecolor=GREY, label="published", zorder=2)
        _scale(axes, [p.cost for p in (*points, *published)], [p.error for p in (*points, *published)])
        axes.set_xlabel(f"{_NAMES[cost]} kept (% of dense)")
        axes.set_ylabel("test error (%)")
        axes.set_title(title, loc="left")
        legend(figure, axes)
        _annotate(axes, [(100 * p.cost, p.error, p.label) for p in published if p.label])
        caption = (
            f"Test error against the share of {_NAMES[cost]} that the compact network keeps. Filled dots: "
            f"{len(points)} networks of ours; line: those that no other of ours beats."
        )
        if published:
            caption += f" Diamonds: {len(published)} published networks, computed from the architectures as printed."
        return save(figure, path, caption)


def _scale(axes: Axes, costs: Sequence[float], errors: Sequence[float]) -> None:
    """Logarithms where the numbers span more than a linear axis shows, with plain numbers at the ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, name, values in ((axes.xaxis, "x", costs), (axes.yaxis, "y", errors)):
        if min(values) > 0 and max(values) / min(values) > 6:
            (axes.set_xscale if name == "x" else axes.set_yscale)("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axis.set_minor_formatter(NullFormatter())


def _annotate(axes: Axes, labels: Sequence[tuple[float, float, str]]) -> None:
    """Writes each label beside its point, on the first of eight sides where it covers no other label or point."""
    figure: Any = axes.figure
    figure.draw_without_rendering()  # sets the scale, which boxes are measured in
    renderer = figure.canvas.get_renderer()
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    lines: list[Any] = list(axes.lines)
    taken = []
    for line in lines:
        spots = axes.transData.transform(line.get_xydata())
        taken += [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in spots]
        if line.get_linestyle() != "None":
            ways = [a + (b - a) * t / 30 for a, b in itertools.pairwise(spots) for t in range(30)]
            taken += [Bbox.from_bounds(x - 1, y - 1, 2, 2) for x, y in ways]
    near = [(5, 0), (-5, 0), (0, 5), (0, -5), (4, 4), (-4, 4), (4, -4), (-4, -4)]
    sides = [(dx * far, dy * far) for far in (1, 2, 3, 4) for dx, dy in near]
    horizontal = {1: "left", 0: "center", -1: "right"}
    vertical = {1: "bottom", 0: "center", -1: "top"}
    frame = axes.get_window_extent(renderer)
    for x, y, label in labels:
        for dx, dy in sides:
            leader = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
            text = axes.annotate(
                label, (x, y), (dx, dy), textcoords="offset points", fontsize=5.5, color="#5A5A5A",
                ha=horizontal[(dx > 0) - (dx < 0)], va=vertical[(dy > 0) - (dy < 0)],
                arrowprops=leader if max(abs(dx), abs(dy)) > 5 else None,
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # of the words, without the leader
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            last = (dx, dy) == sides[-1]  # no room anywhere: better on top of something than not at all
            if last or (inside and not any(box.overlaps(other) for other in taken)):
                taken.append(box)
                break
            text.remove()


# ---------------------------------------------------------------- one run


@contextmanager
def _several(count: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of so many panels, in rows of a width and a height; what is left of the last row is blank."""
    rows = -(-count // columns)
    with grid(rows, columns, size=(size[0], size[1] * rows)) as (figure, axes):
        for panel in axes[count:]:
            panel.set_axis_off()
        yield figure, axes[:count]


def history(
    epochs: Sequence[float],
    panels: Sequence[tuple[str, Mapping[str, Sequence[float | None]]]],
    path: str | PathLike[str],
    caption: str,
    marks: Sequence[float] = (),
) -> list[Path]:
    """Draws numbers over epochs, a panel for each quantity.

    Args:
        epochs: of the records.
        panels: label of the axis with its unit, and the curves by name; "expected" is dashed.
        path: of the files, without an ending.
        caption: what one sees.
        marks: epochs with a thin line.

    Returns:
        The files: PNG, SVG, caption.
    """
    columns = min(3, len(panels))
    with _several(len(panels), columns, (PAGE * columns / 3 + 0.5, 2.1)) as (figure, axes):
        for panel, (label, lines) in zip(axes, panels, strict=True):
            for number, (name, values) in enumerate(lines.items()):
                style = "--" if name == "expected" else "-"
                shown = [math.nan if v is None else v for v in values]
                colour = COLOURS[number % len(COLOURS)]
                panel.plot(epochs, shown, style, color=colour, label=name, marker="o" if len(epochs) < 12 else None)
            for epoch in marks:
                panel.axvline(epoch, color=GREY, linestyle=":", linewidth=0.8)
            panel.set(xlabel="epoch", ylabel=label)
            if len(lines) > 1:
                panel.legend()
        return save(figure, path, caption)


def flops(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float | None]]],
    path: str | PathLike[str],
    caption: str,
    unit: str = "iteration",
) -> list[Path]:
    """Draws FLOPs over training, beside constant lines.

    Args:
        lines: name, x and FLOPs; "dense" and what begins with "dropout" are drawn as context.
        path: of the files, without an ending.
        caption: what one sees.
        unit: of x.
    """
    colours = {"kept": BLUE, "expected": VERMILION, "dense": INK}
    styles = {"expected": "--"}
    with grid(size=(4.6, 2.9)) as (figure, (axes,)):
        for name, x, y in lines:
            style = ":" if name.startswith("dropout") else styles.get(name, "-")
            shown = [math.nan if v is None else v for v in y]
            axes.plot(x, shown, style, color=colours.get(name, GREY), label=name)
        axes.set(xlabel=unit, ylabel="FLOPs for one image")
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        legend(figure, axes)
        return save(figure, path, caption)


def widths(columns: Sequence[tuple[str, int, int]], path: str | PathLike[str], caption: str) -> list[Path]:
    """Draws a network as columns, one per axis: its width before and after.

    Args:
        columns: name, dense and kept units.
        path: of the files, without an ending.
        caption: what one sees.
    """
    tallest = math.sqrt(max(dense for _, dense, _ in columns) or 1)
    with grid(size=(max(COLUMN, 0.9 * len(columns)), 2.6)) as (figure, (axes,)):
        heights = [(math.sqrt(dense) / tallest, math.sqrt(kept) / tallest) for _, dense, kept in columns]
        for at, ((_, dense, kept), (before, after)) in enumerate(zip(columns, heights, strict=True)):
            axes.bar(at, before, 0.34, -before / 2, color="#D5DAE0", label="dense" if at == 0 else None)
            axes.bar(at, after, 0.34, -after / 2, color=BLUE, label="kept" if at == 0 else None)
            axes.text(at, before / 2 + 0.02, f"{kept:,} of {dense:,}", ha="center", va="bottom", fontsize=6.5)
            if at + 1 < len(columns):
                right = heights[at + 1][1] / 2
                ends = [after / 2, right]
                axes.fill_between([at + 0.17, at + 0.83], [-e for e in ends], ends, color=BLUE, alpha=0.15, linewidth=0)
        axes.set_xticks(range(len(columns)), [name for name, _, _ in columns])
        axes.tick_params(axis="x", length=0, rotation=60 if len(columns) > 12 else 0)
        axes.set_yticks([])
        axes.grid(False)
        for side in axes.spines.values():
            side.set_visible(False)
        legend(figure, axes)
        return save(figure, path, caption)


def strips(panels: Sequence[tuple[str, Sequence[float], Any]], path: str | PathLike[str], caption: str) -> list[Path]:
    """Draws P(open) of gates over time, a panel for each placement.

    Args:
        panels: name, epochs, and percent by gate and epoch.
        path: of the files, without an ending.
        caption: what one sees.
    """
    columns = min(4, len(panels))
    with _several(len(panels), columns, (max(COLUMN, PAGE * columns / 4), 2.2)) as (figure, axes):
        for panel, (name, epochs, percent) in zip(axes, panels, strict=True):
            ends = (min(epochs) - 0.5, max(epochs) + 0.5)
            shown = panel.imshow(
                percent, aspect="auto", cmap="Blues", vmin=0, vmax=100, extent=(*ends, len(percent), 0), rasterized=True
            )
            panel.set(title=name, xlabel="epoch", yticks=[])
            panel.grid(False)
        figure.colorbar(shown, ax=axes, label="P(open) (%)", shrink=0.8)
        return save(figure, path, caption)


def histograms(
    panels: Sequence[tuple[str, Sequence[float], Sequence[float] | None]], path: str | PathLike[str], caption: str
) -> list[Path]:
    """Draws how gates are spread over [0, 1], a panel for each placement: the two ends, and bins between.

    Args:
        panels: name, shares of the values at test time, and shares by the gates' distribution if it is known.
        path: of the files, without an ending.
        caption: what one sees.
    """
    columns = min(4, len(panels))
    with _several(len(panels), columns, (max(COLUMN, PAGE * columns / 4), 2.2)) as (figure, axes):
        for panel, (name, kept, expected) in zip(axes, panels, strict=True):
            bins = len(kept) - 2
            width = 1 / bins
            x = [-1.5 * width, *((b + 0.5) * width for b in range(bins)), 1 + 1.5 * width]
            colours = [GREY, *[BLUE] * bins, GREEN]
            panel.bar(x, [100 * v for v in kept], 0.9 * width, color=colours, label="kept")
            if expected is not None:
                panel.plot(x[1:-1], [100 * v for v in expected[1:-1]], "--", color=VERMILION, label="expected")
                ends = [100 * expected[0], 100 * expected[-1]]
                panel.plot([x[0], x[-1]], ends, "D", color=VERMILION, label="its atoms")
            panel.set(title=name, xlabel="value of the gate", ylabel="gates (%)")
            panel.set_xticks([x[0], 0.5, x[-1]], ["0", "0.5", "1"])
        legend(figure, axes[0])
        return save(figure, path, caption)


def picture(
    pixels: Any, path: str | PathLike[str], caption: str, *, label: str, limits: tuple[float, float]
) -> list[Path]:
    """Draws numbers as a picture: a map of gates, or filters beside each other; NaN is left blank.

    Args:
        pixels: (height, width).
        path: of the files, without an ending.
        caption: what one sees.
        label: of the colours, with their unit.
        limits: of the colours; where they lie around zero, orange is negative and blue positive.
    """
    with grid(size=(COLUMN + 0.4, COLUMN)) as (figure, (axes,)):
        from matplotlib.colors import LinearSegmentedColormap

        signed = LinearSegmentedColormap.from_list("signed", ["#B34700", "#EBA77A", "#F7F7F7", "#79B5D8", "#005B8F"])
        colours: Any = signed if limits[0] < 0 else "Blues"
        shown = axes.imshow(pixels, cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest")
        axes.set_axis_off()
        figure.colorbar(shown, ax=axes, label=label, shrink=0.8)
        return save(figure, path, caption)
