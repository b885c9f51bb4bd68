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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from ellzero.experiments.store import statistics
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

_STYLE: Any = {  # matplotlib types its keys one by one
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same letters everywhere
    "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.linewidth": 1.4, "lines.markersize": 4,
    "svg.hashsalt": "ellzero", "svg.fonttype": "path",  # names inside an SVG are random without a salt
}  # fmt: skip


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
    """An empty figure in the house's style, which holds inside the `with` block, and its panels row by row."""
    if not can_draw():
        raise PlotsMissingError
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)  # can measure text, and needs no screen
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure: Figure, path: Path, caption: str) -> list[Path]:
    """Writes a figure as PNG and SVG, and its caption as text, to a path without its ending; always the same bytes.

    The caption says what it shows to a reader who sees nothing else.
    """
    if not caption.strip():
        raise ValueError("`caption` must say what the figure shows, got nothing")
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{ending}") for ending in ("png", "svg", "txt")]
    with matplotlib.rc_context(_STYLE), replacing(files[0]) as png, replacing(files[1]) as svg:
        render(figure, png, svg)
    write_text(files[2], " ".join(caption.split()) + "\n")
    return files


def render(figure: Figure, png: Path, svg: Path) -> None:
    """Draws a figure into both files. `savefig` would lay it out for each of them, and draw it twice."""
    from matplotlib.backends import backend_agg, backend_svg

    figure.set_dpi(200)
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]
    figure.set_layout_engine("none")
    backend_agg.FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})  # type: ignore[no-untyped-call]
    backend_svg.FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]


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


# ---------------------------------------------------------------- error against cost


@final
@dataclass(frozen=True)
class Point:
    """A network: the fraction of the dense cost that it keeps, and its error in percent."""

    cost: float
    error: float
    label: str = ""


Cost = Literal["l0_norm", "params", "macs"]
NAMES: dict[Cost, str] = {"l0_norm": "density", "params": "parameters", "macs": "MACs"}

# Method, pruned architecture, and the errors in percent: best during training and at the end, or the one printed.
# Louizos et al. (2018), Table 1, says "after 200 epochs"; Gallego-Posada et al. (2021), Table 1, gives both for theirs.
PRINTED: dict[str, list[tuple[str, tuple[int, ...], tuple[float, ...]]]] = {
    "lenet300": [
        ("Sparse VD", (512, 114, 72), (1.8,)), ("BC-GNJ", (278, 98, 13), (1.8,)), ("BC-GHS", (311, 86, 14), (1.8,)),
        ("L0 λ=0.1/N", (219, 214, 100), (1.4,)), ("L0 λ sep.", (266, 88, 33), (1.8,)),
        ("constr. 33 %", (198, 233, 100), (1.4, 1.69)), ("constr. 30 % ×3", (243, 89, 29), (1.63, 2.18)),
    ],
    "lenet5": [
        ("Sparse VD", (14, 19, 242, 131), (1.0,)), ("GL", (3, 12, 192, 500), (1.0,)), ("GD", (7, 13, 208, 16), (1.1,)),
        ("SBP", (3, 18, 284, 283), (0.9,)), ("BC-GNJ", (8, 13, 88, 13), (1.0,)), ("BC-GHS", (5, 10, 76, 16), (1.0,)),
        ("L0 λ=0.1/N", (20, 25, 45, 462), (0.9,)), ("L0 λ sep.", (9, 18, 65, 25), (1.0,)),
        ("constr. 10 %", (20, 21, 34, 407), (0.53, 1.04)), ("constr. by layer", (10, 14, 224, 29), (0.7, 0.97)),
    ],
}  # fmt: skip


def published(network: str, cost: Cost, which: str = "last") -> list[Point]:
    """The networks in both papers' Tables 1, their cost computed from the pruned architecture as printed.

    "params" counts weights and biases, "l0_norm" the weights whose own gate is open. The error is that at the "last" or
    "best" epoch; where a paper gives one of them only, that.
    """
    if which not in ("best", "last"):
        raise ValueError(f'`which` must be "best" or "last", got {which!r}')
    dense = {"lenet300": (784, 300, 100), "lenet5": (20, 50, 800, 500)}
    return [
        Point(_count(cost, units) / _count(cost, dense[network]), errors[0 if which == "best" else -1], method)
        for method, units, errors in PRINTED.get(network, ())
    ]


def _count(cost: str, units: tuple[int, ...]) -> int:
    """What the MLP (three layers that gates can close units of) or LeNet-5 (four) costs with so many units left."""
    if len(units) == 3:
        a, b, c = units
        if cost == "l0_norm":
            return a * 300 + b * 100 + c * 10
        return a * b + b * c + c * 10 + (b + c + 10 if cost == "params" else 0)
    a, b, c, d = units
    if cost == "l0_norm":  # a map of a convolution counts its bias too
        return a * (25 + 1) + b * (20 * 25 + 1) + c * 500 + d * 10
    if cost == "params":
        return a * 25 + a + a * b * 25 + b + c * d + d + d * 10 + 10
    return a * 25 * 24**2 + a * b * 25 * 8**2 + c * d + d * 10


PERCENT = "test error (%)"


def pareto(
    points: Sequence[Point],
    path: Path,
    *,
    cost: Cost = "params",
    title: str = "",
    published: Sequence[Point] = (),
    error: str = PERCENT,  # what it is, if it is another
) -> list[Path]:
    """Draws error against kept cost: every point of ours, the front among them, and published points as context."""
    if not points:
        raise ValueError("`points` must be at least one point, got none")
    everyone = (*points, *published)
    for point in everyone:
        if not (0 < point.cost <= 1 and (0 <= point.error <= 100 or error != PERCENT)):
            raise ValueError(f"`points` must have a cost in (0, 1] and an error in [0, 100] %, got {point}")
    best = [points[k] for k in statistics.pareto([(p.cost, p.error) for p in points])]
    with grid(size=(5.0, 3.6)) as (figure, (axes,)):
        axes.plot(*_spots(points), "o", color=BLUE, alpha=0.45, markeredgewidth=0, label=f"ours ({len(points)})")
        axes.plot(*_spots(best), "-o", color=BLUE, label="our front", zorder=3)
        if published:
            axes.plot(*_spots(published), "D", color="white", markeredgecolor=GREY, label="published", zorder=2)
        _scale(axes, *_spots(everyone))
        axes.set(xlabel=f"{NAMES[cost]} kept (% of dense)", ylabel=error)
        axes.set_title(title, loc="left")
        legend(figure, axes)
        _annotate(axes, [(100 * p.cost, p.error, p.label) for p in published if p.label])
        what = error.removesuffix(" (%)").capitalize()
        caption = (
            f"{what} against the share of {NAMES[cost]} that the compact network keeps. Filled dots: "
            f"{len(points)} networks of ours; line: those that no other of ours beats."
        )
        if published:
            caption += f" Diamonds: {len(published)} published networks, computed from the architectures as printed."
        return save(figure, path, caption)


def _spots(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [100 * p.cost for p in points], [p.error for p in points]


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

    taken = []
    for line in axes.lines:
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
def _several(
    count: int, most: int = 4, height: float = 2.2, margin: float = 0.0
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of so many panels, at most so many in a row; what is left of the last row is blank."""
    columns = min(most, count)
    rows = -(-count // columns)
    with grid(rows, columns, size=(max(COLUMN, PAGE * columns / most + margin), height * rows)) as (figure, axes):
        for panel in axes[count:]:
            panel.set_axis_off()
        yield figure, axes[:count]


def history(
    epochs: Sequence[float],
    panels: Sequence[tuple[str, Mapping[str, Sequence[float | None]]]],
    path: Path,
    caption: str,
    marks: Sequence[float] = (),
) -> list[Path]:
    """Draws numbers over epochs, a panel for each quantity: its label with the unit, and the curves by name, of which
    "expected" is dashed. Epochs in `marks` have a thin line.
    """
    with _several(len(panels), 3, height=2.1, margin=0.5) as (figure, axes):
        for panel, (label, lines) in zip(axes, panels, strict=True):
            for number, (name, values) in enumerate(lines.items()):
                style = "--" if name == "expected" else "-"
                marker, colour = "o" if len(epochs) < 12 else None, COLOURS[number % len(COLOURS)]
                panel.plot(epochs, np.array(values, float), style, color=colour, label=name, marker=marker)
            for epoch in marks:
                panel.axvline(epoch, color=GREY, linestyle=":", linewidth=0.8)
            panel.set(xlabel="epoch", ylabel=label)
            if len(lines) > 1:
                panel.legend()
        return save(figure, path, caption)


def flops(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float | None]]], path: Path, caption: str, unit: str
) -> list[Path]:
    """Draws lines of name, x and FLOPs over training; "dense" and what begins with "dropout" are drawn as context."""
    colours = {"kept": BLUE, "expected": VERMILION, "dense": INK}
    with grid(size=(4.6, 2.9)) as (figure, (axes,)):
        for name, x, y in lines:
            style = ":" if name.startswith("dropout") else "--" if name == "expected" else "-"
            axes.plot(x, np.array(y, float), style, color=colours.get(name, GREY), label=name)
        axes.set(xlabel=unit, ylabel="FLOPs for one example")
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        legend(figure, axes)
        return save(figure, path, caption)


def widths(columns: Sequence[tuple[str, int, int]], path: Path, caption: str) -> list[Path]:
    """Draws a network as columns, one per axis, of its name, dense and kept units: the width before and after."""
    tallest = math.sqrt(max(dense for _, dense, _ in columns) or 1)
    with grid(size=(max(COLUMN, 0.9 * len(columns)), 2.6)) as (figure, (axes,)):
        heights = [(math.sqrt(dense) / tallest, math.sqrt(kept) / tallest) for _, dense, kept in columns]
        for at, ((_, dense, kept), (before, after)) in enumerate(zip(columns, heights, strict=True)):
            axes.bar(at, before, 0.34, -before / 2, color="#D5DAE0", label="dense" if at == 0 else None)
            axes.bar(at, after, 0.34, -after / 2, color=BLUE, label="kept" if at == 0 else None)
            axes.text(at, before / 2 + 0.02, f"{kept:,} of {dense:,}", ha="center", va="bottom", fontsize=6.5)
            if at + 1 < len(columns):
                ends = [after / 2, heights[at + 1][1] / 2]
                axes.fill_between([at + 0.17, at + 0.83], [-e for e in ends], ends, color=BLUE, alpha=0.15, linewidth=0)
        axes.set_xticks(range(len(columns)), [name for name, _, _ in columns])
        axes.tick_params(axis="x", length=0, rotation=60 if len(columns) > 12 else 0)
        axes.set_yticks([])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        legend(figure, axes)
        return save(figure, path, caption)


def squares(axes: Axes, rows: Sequence[Sequence[float]], colour: str, start: float = 0.0) -> None:
    """Draws a square for each entry of each row, from `start` on: empty for 0, full for 1."""
    spots = [(y, start + x, (colour, entry)) for y, row in enumerate(rows) for x, entry in enumerate(row)]
    y, left, filled = zip(*spots, strict=True) if spots else ((), (), ())
    axes.barh(y, 0.86, 0.86, left, color=filled, edgecolor="#C3C9D0", linewidth=0.6)


def bars(axes: Axes, rows: Sequence[tuple[int, int]], colour: str, at: float = 0.0, height: float = 0.66) -> None:
    """Draws dense and kept units, a row each, as bars on top of each other with the second number beside them."""
    y = [k + at for k in range(len(rows))]
    axes.barh(y, [dense for dense, _ in rows], height, color="#D5DAE0")
    axes.barh(y, [kept for _, kept in rows], height, color=colour)
    for place, (dense, kept) in zip(y, rows, strict=True):
        axes.text(dense, place, f" {kept:,}" if kept else " gone" if dense else "", va="center", fontsize=6)


def in_rows(axes: Axes, names: Sequence[str]) -> None:
    """Makes a panel one of rows, the first on top, each with its name; nothing else is around it."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def layers(
    panels: Sequence[tuple[str, Sequence[tuple[int, int]], Sequence[Sequence[float]]]],
    names: Sequence[str],
    path: Path,
    caption: str,
) -> list[Path]:
    """Draws layers in rows, by panels of a title, their dense and kept units, and the entries of `squares` if any."""
    with grid(1, len(panels), size=(max(COLUMN, 2.6 * len(panels)), 0.8 + 0.2 * len(names))) as (figure, axes):
        for panel, (title, rows, entries) in zip(axes, panels, strict=True):
            squares(panel, entries, BLUE) if entries else bars(panel, rows, BLUE)
            in_rows(panel, names)
            panel.set_xticks([])
            panel.set_title(title, loc="left")
        return save(figure, path, caption)


def strips(panels: Sequence[tuple[str, Sequence[float], Any]], path: Path, caption: str) -> list[Path]:
    """Draws P(open) of gates over time, a panel for each placement: name, epochs, and percent by gate and epoch."""
    with _several(len(panels)) as (figure, axes):
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
    panels: Sequence[tuple[str, Sequence[float], Sequence[float] | None]], path: Path, caption: str
) -> list[Path]:
    """Draws how gates are spread over [0, 1], the two ends and bins between, a panel for each placement: name, shares
    of the values at test time, and shares by the gates' distribution if it is known.
    """
    with _several(len(panels)) as (figure, axes):
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


def picture(pixels: Any, path: Path, caption: str, *, label: str, limits: tuple[float, float]) -> list[Path]:
    """Draws numbers (height, width) as a picture: a map of gates, or filters beside each other; NaN is left blank.

    `label` and `limits` are of the colours; where the limits lie around zero, orange is negative and blue positive.
    """
    with grid(size=(COLUMN + 0.4, COLUMN)) as (figure, (axes,)):
        from matplotlib.colors import LinearSegmentedColormap

        signed = LinearSegmentedColormap.from_list("signed", ["#B34700", "#EBA77A", "#F7F7F7", "#79B5D8", "#005B8F"])
        colours: Any = signed if limits[0] < 0 else "Blues"
        shown = axes.imshow(pixels, cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest")
        axes.set_axis_off()
        figure.colorbar(shown, ax=axes, label=label, shrink=0.8)
        return save(figure, path, caption)
