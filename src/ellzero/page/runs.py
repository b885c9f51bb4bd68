"""The page of several runs: error against what is kept with the papers' networks beside ours, and a table over seeds.

`runs_page` makes one self-contained file of the runs that `collecting` finds; `runs_figures` draws the same for papers.
How a chart looks and how a page begins is in `charts`; how a run was trained, nothing here knows.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from ellzero.experiments import figures, networks
from ellzero.experiments.statistics import interval, pareto
from ellzero.experiments.study.literature import published
from ellzero.page.charts import SERIES, Chart, axis, curve, dots, escaped, render, script_json
from ellzero.page.collecting import COSTS, ERRORS, Cost, Finished, collect, label

_DATA = {"mnist": "MNIST", "mnist5k": "5,000 MNIST images", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}

# ---------------------------------------------------------------- over seeds


@final
@dataclass(frozen=True)
class Group:
    """Runs of equal recipes with different seeds.

    Args:
        label: what it is called: the recipe's name, and where others have it too, the fields that differ.
        runs: with different seeds.
        again: runs with a seed that one of `runs` has already. They are the same experiment, and not counted.
    """

    label: str
    runs: list[Finished]
    again: list[Finished]

    @property
    def emptied(self) -> bool:
        """Whether a run of it has no compact network."""
        return any(run.emptied for run in self.runs)

    def error(self, name: str) -> tuple[float, float]:
        """Mean and half the width of the 95 % interval."""
        return interval([run.errors[name] for run in self.runs])

    def kept(self, cost: Cost) -> tuple[float, float]:
        """The same of what is kept, as a fraction of dense."""
        return interval([run.kept[cost] for run in self.runs])

    def expected(self, cost: Cost) -> float:
        """Mean of what is expected, as a fraction of dense."""
        return statistics.fmean(run.expected[cost] for run in self.runs)


def groups(runs: Sequence[Finished]) -> list[Group]:
    """Runs by their recipes, the seed left out, in the order of their first ones.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> ones = dict.fromkeys(COSTS, 1.0)
        >>> def run(recipe, error):
        ...     return Finished(recipe, "a", Path("a"), {"error_last": error, "error_best": error}, ones, ones, {}, {})
        >>> demo = get("demo").override(epochs=2)
        >>> found = groups([run(demo, 2.0), run(demo.override(epochs=1), 9.0), run(demo.override(seed=1), 4.0)])
        >>> [(group.label, group.error("error_last")[0]) for group in found]
        [('a, epochs=2', 3.0), ('a, epochs=1', 9.0)]
    """
    parts: dict[str, tuple[list[Finished], list[Finished]]] = {}
    for run in runs:
        own, again = parts.setdefault(run.recipe.override(seed=0).digest(), ([], []))
        (again if any(r.recipe.seed == run.recipe.seed for r in own) else own).append(run)
    names = _labels([own[0] for own, _ in parts.values()])
    return [Group(name, own, again) for name, (own, again) in zip(names, parts.values(), strict=True)]


def _labels(firsts: Sequence[Finished]) -> list[str]:
    """A label for each recipe: its name, what varies in its sweep, and the fields in which those of one name differ."""
    plain = [run.recipe.to_dict() for run in firsts]
    seen: dict[tuple[str, str], set[str]] = {}
    for run, own in zip(firsts, plain, strict=True):
        for key, value in own.items():
            seen.setdefault((run.name, key), set()).add(json.dumps(value))
    out = []
    for run, own in zip(firsts, plain, strict=True):
        differ = {k: v for k, v in own.items() if len(seen[run.name, k]) > 1 and k not in ("name", "seed")}
        out.append(label(run.name, {**run.varied, **differ}))
    return out


@final
@dataclass(frozen=True)
class Kind:
    """Recipes whose errors can be compared: one network on one data set."""

    network: str
    data: str
    groups: list[Group]

    @property
    def title(self) -> str:
        """In words."""
        return f"{networks.find(self.network).title}, {_DATA[self.data]}"

    def front(self, cost: Cost, error: str) -> list[Group]:
        """The recipes that no other one beats, by their means over seeds; by rising cost."""
        whole = [group for group in self.groups if not group.emptied]
        return [whole[k] for k in pareto([(g.kept(cost)[0], g.error(error)[0]) for g in whole])]

    def published(self, cost: Cost, error: str = "error_last") -> list[figures.Point]:
        """The papers' networks that may stand beside these: they were trained on all of MNIST."""
        return published(self.network, cost, error.removeprefix("error_")) if self.data == "mnist" else []


def kinds(runs: Sequence[Finished]) -> list[Kind]:
    """Runs by network and data, and each by recipe, from the smallest compact networks to the largest."""
    parts: dict[tuple[str, str], list[Finished]] = {}
    for run in runs:
        parts.setdefault((run.recipe.network, run.recipe.data), []).append(run)
    return [
        Kind(network, data, sorted(groups(own), key=lambda g: (g.kept("params")[0], g.error("error_last")[0])))
        for (network, data), own in parts.items()
    ]


# ---------------------------------------------------------------- the page


def runs_page(paths: Iterable[str | os.PathLike[str]], home: str | os.PathLike[str] = ".") -> str:
    """A page that compares runs: error against kept cost, the table over seeds, every run, and what was left out.

    Args:
        paths: as `collect` takes them.
        home: folder that the page will be in: links to the runs' own pages are relative to it.

    Returns:
        HTML, complete in itself.

    Raises:
        ValueError: there are no paths.
        charts.PageMissingError: Plotly or jinja2 is not installed.
    """
    asked = list(paths)
    if not asked:
        raise ValueError("`paths` must be at least one folder, got none")
    runs, notes = collect(asked)
    base, found = Path(home).resolve(), kinds(runs)
    noted = [(_text(note.where), note.why) for note in notes]
    noted += [
        (_text(run.where), f"{group.label}, seed {run.recipe.seed}, is there twice: it is not counted again")
        for kind in found
        for group in kind.groups
        for run in group.again
    ]
    return render(
        "runs.html.j2",
        sections=[_section(number, kind, base) for number, kind in enumerate(found)],
        notes=noted,
        runs=len(runs),
        recipes=sum(len(kind.groups) for kind in found),
        costs=COSTS,
        errors=ERRORS,
    )


def _section(number: int, kind: Kind, base: Path) -> dict[str, Any]:
    variants = {f"{cost} {error}": _chart(number, kind, cost, error, base) for error in ERRORS for cost in COSTS}
    others = {
        key: {"title": v.title, "alternative": v.alternative, "data": list(v.traces), "layout": dict(v.layout)}
        for key, v in variants.items()
    }
    fronts = {words: kind.front(cost, "error_last") for cost, words in COSTS.items()}
    return {
        "kind": kind,
        "chart": next(iter(variants.values())),
        "variants": script_json(others),
        "table": [_row(g, [w for w, front in fronts.items() if any(g is f for f in front)]) for g in kind.groups],
        "runs": [
            {"group": group.label, "run": run, "link": _link(run, base), "where": _text(run.where)}
            for group in kind.groups
            for run in (*group.runs, *group.again)
        ],
    }


def _row(group: Group, fronts: list[str]) -> dict[str, Any]:
    """The cells of a recipe's line."""
    cells = {name: _plus_minus(*group.error(name)) for name in ERRORS}
    for cost in COSTS:
        mean, half = group.kept(cost)
        cells[cost] = _plus_minus(100 * mean, 100 * half)
        if cost != "l0_norm" and group.runs[0].dense:
            cells[f"{cost} count"] = f"{mean * group.runs[0].dense[cost]:,.0f}"
    cells["expected"] = f"{100 * group.expected('l0_norm'):.2f} %"
    note = "a layer is empty" if group.emptied else ", ".join(fronts) or "–"
    return {"label": group.label, "count": len(group.runs), "cells": cells, "front": note}


def _plus_minus(mean: float, half: float) -> str:
    return f"{mean:.2f} %" if math.isnan(half) else f"{mean:.2f} ± {half:.2f} %"


def _link(run: Finished, base: Path) -> str:
    """The run's own page, as a relative address; empty where there is none."""
    if run.page is None:
        return ""
    page = run.page.resolve()
    try:
        way = os.path.relpath(page, base)
    except ValueError:  # on another drive
        return page.as_uri()
    return quote(os.fsencode(way.replace(os.sep, "/")))


def _text(path: Path) -> str:
    """A path that can be printed, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")


def runs_figures(paths: Iterable[str | os.PathLike[str]], directory: Path) -> list[Path]:
    """Draws error against kept cost with matplotlib: for each network and data set, and each cost, one figure.

    Args:
        paths: as `collect` takes them.
        directory: where the files go; it is made.

    Returns:
        The files.

    Raises:
        PlotsMissingError: matplotlib is not installed.
    """
    files: list[Path] = []
    for kind in kinds(collect(paths)[0]):
        runs = [(group.label, run) for group in kind.groups for run in group.runs if not run.emptied]
        for cost in COSTS:
            points = [figures.Point(run.kept[cost], run.errors["error_last"], name) for name, run in runs]
            points = [point for point in points if 0 < point.cost <= 1]
            if points:
                target = directory / f"pareto-{kind.network}-{kind.data}-{cost}"
                files += figures.pareto(points, target, cost=cost, title=kind.title, published=kind.published(cost))
    return files


# ---------------------------------------------------------------- the chart


def _chart(number: int, kind: Kind, cost: Cost, error: str, base: Path) -> Chart:
    """Error against what is kept, of one cost and one of the two errors."""
    front, theirs = kind.front(cost, error), kind.published(cost, error)
    spots = [(100 * run.kept[cost], run.errors[error]) for group in kind.groups for run in group.runs]
    traces = [_published(theirs, cost, spots)] if theirs else []
    if 1 < len(kind.groups) <= len(SERIES):
        for group, colour in zip(kind.groups, SERIES, strict=False):
            name = group.label if len(group.label) <= 34 else group.label[:33] + "…"
            traces += _runs([group], escaped(name), colour, cost, error, base)
    else:
        traces += _runs(kind.groups, "runs", SERIES[0], cost, error, base)
    several = [group for group in kind.groups if len(group.runs) > 1]
    traces += [_means(several, cost, error)] if several else []
    x, y = [100 * g.kept(cost)[0] for g in front], [g.error(error)[0] for g in front]
    traces.append(curve(x, y, "front", "@ink", "", width=1.5, dash="dot"))
    xs = [at for at, _ in spots] + [100 * p.cost for p in theirs]
    ys = [at for _, at in spots] + [p.error for p in theirs]
    return Chart(
        f"front-{number}",
        f"{kind.title}: test error against {COSTS[cost]} kept",
        _caption(kind, bool(theirs), bool(several)),
        _alternative(kind, front, cost, error),
        traces,
        {
            "xaxis": _axis(xs, f"{COSTS[cost]} kept (% of dense)"),
            "yaxis": _axis(ys, f"test error (%), {ERRORS[error].removeprefix('the ')}"),
            "hovermode": "closest",
            "uirevision": f"{cost} {error}",  # another axis, so what was zoomed into means nothing
        },
        height=460,
        wide=True,
    )


def _dots(x: list[float], y: list[float], name: str, marker: dict[str, Any], texts: list[list[str]]) -> dict[str, Any]:
    """Points, each with lines of text that are shown by pointing at it."""
    return dots(x, y, name, marker, hoverinfo="text", hovertext=["<br>".join(lines) for lines in texts])


def _published(points: Sequence[figures.Point], cost: Cost, others: Sequence[tuple[float, float]]) -> dict[str, Any]:
    x, y = [100 * p.cost for p in points], [p.error for p in points]
    sides = _sides(list(zip(x, y, strict=True)), [p.label for p in points], others)
    texts = [
        [f"<b>{escaped(p.label)}</b>, published", f"error {p.error:g} %", f"{COSTS[cost]} kept {100 * p.cost:.2f} %"]
        for p in points
    ]
    marker = {"symbol": "diamond-open", "size": 9, "color": "@grey", "line": {"width": 1.5}}
    return _dots(x, y, "published", marker, texts) | {
        "mode": "markers+text",
        "text": [escaped(p.label) if side else "" for p, side in zip(points, sides, strict=True)],
        "textposition": [side or "top center" for side in sides],
        "textfont": {"size": 10, "color": "@muted"},
    }


def _sides(
    spots: Sequence[tuple[float, float]], names: Sequence[str], others: Sequence[tuple[float, float]]
) -> list[str]:
    """On which side of its point a name covers no other name and no point; empty where there is no such side.

    In a window of 1100 by 360 pixels, with letters of 6 by 12. In smaller ones the names are not shown.
    """
    ways = [_scaled([spot[axis] for spot in (*spots, *others)], size) for axis, size in ((0, 1100), (1, 360))]
    places = list(zip(*ways, strict=True))
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    out = []
    for (x, y), name in zip(places, names, strict=False):
        width = 6 * len(name)
        corners = {"middle right": (x + 8, y - 6), "middle left": (x - 8 - width, y - 6)}
        corners |= {"top center": (x - width / 2, y + 7), "bottom center": (x - width / 2, y - 19)}
        boxes = {side: (left, low, left + width, low + 12) for side, (left, low) in corners.items()}
        free = [side for side, box in boxes.items() if not any(_overlap(box, other) for other in taken)]
        taken += [boxes[side] for side in free[:1]]
        out.append(free[0] if free else "")
    return out


_Box = tuple[float, float, float, float]


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _scaled(values: Sequence[float], size: float) -> list[float]:
    """Where numbers are on an axis of so many pixels."""
    on_axis = [math.log10(v) for v in values] if "type" in _axis(values, "") else list(values)
    low, high = min(on_axis), max(on_axis)
    return [size * (v - low) / (high - low) if high > low else size / 2 for v in on_axis]


def _means(several: Sequence[Group], cost: Cost, error: str) -> dict[str, Any]:
    """Means over seeds with their intervals."""
    errors = [group.error(error) for group in several]
    costs = [(100 * mean, 100 * half) for mean, half in (group.kept(cost) for group in several)]
    texts = [
        [
            f"<b>{_wrapped(group.label)}</b>",
            f"mean of {len(group.runs)} seeds, 95 % interval",
            f"error {_plus_minus(*e)}",
            f"{COSTS[cost]} kept {_plus_minus(*c)}",
        ]
        for group, c, e in zip(several, costs, errors, strict=True)
    ]
    marker = {"symbol": "square-open", "size": 9, "color": "@ink", "line": {"width": 1.5}}
    name = "mean over seeds, 95 % interval"
    trace = _dots([mean for mean, _ in costs], [mean for mean, _ in errors], name, marker, texts)
    for way, pairs in (("error_x", costs), ("error_y", errors)):
        halves = [half for _, half in pairs]
        trace[way] = {"type": "data", "array": halves, "color": "@muted", "thickness": 1, "width": 3}
    return trace


def _runs(own: Sequence[Group], name: str, colour: str, cost: Cost, error: str, base: Path) -> list[dict[str, Any]]:
    """The dots of some recipes' runs, and crosses for those of which a layer is empty."""
    out = []
    for empty in (False, True):
        found = [(g, run) for g in own for run in g.runs if run.emptied == empty]
        if found:
            x, y = [100 * r.kept[cost] for _, r in found], [r.errors[error] for _, r in found]
            symbol = {"symbol": "x-thin", "line": {"width": 2, "color": colour}} if empty else {"symbol": "circle"}
            marker = {"color": colour, "size": 8, "opacity": 0.75, **symbol}
            texts = [_hover(g, run, base) for g, run in found]
            trace = _dots(x, y, name + ", a layer is empty" * empty, marker, texts)
            out.append(trace | {"customdata": [_link(run, base) for _, run in found]})
    return out


def _hover(group: Group, run: Finished, base: Path) -> list[str]:
    units = "-".join(map(str, run.architecture.values())) if len(run.architecture) <= 6 else ""
    return [
        f"<b>{_wrapped(group.label)}</b>, seed {run.recipe.seed}",
        f"error {run.errors['error_last']:.2f} %, best {run.errors['error_best']:.2f} %",
        *(f"{name} kept {100 * run.kept[cost]:.2f} %" for cost, name in COSTS.items()),
        *([f"units kept {units}"] if units else []),
        *(["click: its page"] if _link(run, base) else []),
    ]


def _wrapped(text: str) -> str:
    return "<br>".join(map(escaped, textwrap.wrap(text, 38)[:6]))


def _axis(values: Sequence[float], title: str) -> dict[str, Any]:
    """Logarithms where the numbers span more than a linear axis shows, with plain numbers at 1, 2, 5, 10, …."""
    positive = [v for v in values if v > 0]
    if len(positive) < len(values) or not positive or max(positive) <= 6 * min(positive):
        return axis(title)
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    ticks = [m * 10.0**e for e in range(low, high + 1) for m in (1, 2, 5)]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks])


def _caption(kind: Kind, theirs: bool, several: bool) -> str:
    parts = ["Each dot is a run: its test error against what its compact network keeps of the dense network."]
    if several:
        parts.append("Squares are means over the seeds of one recipe, with 95 % confidence intervals (Student's t).")
    parts.append("The dotted line joins the recipes that no other one here beats, by their means.")
    if any(g.emptied for g in kind.groups):
        parts.append("Crosses have a layer with no unit left, so no compact network: they beat nothing.")
    if theirs:
        parts.append(
            "Diamonds are the networks in Table 1 of Louizos et al. (2018) and of Gallego-Posada et al. (2021), "
            "computed from the architectures as printed; where only one of best and last error is printed, it is that."
        )
    elif published(kind.network, "params"):
        parts.append("The papers' networks are left out: they were trained on all of MNIST.")
    else:
        parts.append("The papers print no pruned sizes for this network.")
    return " ".join(parts)


def _alternative(kind: Kind, front: Sequence[Group], cost: Cost, error: str) -> str:
    runs = sum(len(g.runs) for g in kind.groups)
    text = f"{runs} run{'s' * (runs > 1)} of {len(kind.groups)} recipe{'s' * (len(kind.groups) > 1)}."
    if not front:
        return f"{text} None of them has a compact network."
    ends = dict.fromkeys(
        f"{g.label} keeps {100 * g.kept(cost)[0]:.1f} % of the {COSTS[cost]} at an error of {g.error(error)[0]:.2f} %"
        for g in (front[0], front[-1])
    )
    count = f"{len(front)} recipe{'s are' if len(front) > 1 else ' is'}"
    return f"{text} {count} on the front: {'; '.join(ends)}. The table below has all numbers."
