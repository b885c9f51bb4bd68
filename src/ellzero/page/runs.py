"""The page of several runs: error against what is kept with the papers' networks beside ours, and a table over seeds.

`runs_page` makes one self-contained file of the runs that `collecting` finds; `runs_figures` draws the same for papers.
How a chart looks and how a page begins is in `charts`; how a run was trained, nothing here knows.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ellzero.experiments import figures, networks
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.statistics import interval, pareto
from ellzero.page.charts import SERIES, Chart, axis, curve, dots, escaped, plus_minus, render, script_json
from ellzero.page.collecting import COSTS, ERRORS, Cost, Finished, collect, label

_DATA = {"mnist": "MNIST", "mnist5k": "5,000 MNIST images", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
_Spot = tuple[float, float]  # in a chart: kept and error, in percent


class Group(NamedTuple):
    """Runs of equal recipes with different seeds; their numbers are means with half the width of the 95 % interval."""

    label: str  # the recipe's name, and where others have it too, the fields that differ
    runs: list[Finished]  # with different seeds
    again: list[Finished]  # with a seed that one of `runs` has: the same experiment, which is not counted

    @property
    def emptied(self) -> bool:
        """Whether a run of it has no compact network."""
        return any(run.emptied for run in self.runs)

    def error(self, name: str) -> tuple[float, float]:
        return interval([run.errors[name] for run in self.runs])

    def kept(self, cost: Cost) -> tuple[float, float]:
        return interval([run.kept[cost] for run in self.runs])

    def expected(self, cost: Cost) -> float:
        return statistics.fmean(run.expected[cost] for run in self.runs)


def groups(runs: Sequence[Finished]) -> list[Group]:
    """Runs by their recipes, the seed left out, in the order of their first ones."""
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


class Kind(NamedTuple):
    """Recipes whose errors can be compared: one network on one data set."""

    network: str
    data: str
    groups: list[Group]

    @property
    def recipe(self) -> Recipe:
        return self.groups[0].runs[0].recipe

    @property
    def title(self) -> str:
        return f"{networks.find(self.network).title}, {_DATA.get(self.data, self.data)}"

    def front(self, cost: Cost, error: str) -> list[Group]:
        """The recipes that no other one beats, by their means over seeds; by rising cost."""
        whole = [group for group in self.groups if not group.emptied]
        return [whole[k] for k in pareto([(g.kept(cost)[0], g.error(error)[0]) for g in whole])]

    def published(self, cost: Cost, error: str = "error_last") -> list[figures.Point]:
        """The papers' networks that may stand beside these: they were trained on all of MNIST."""
        return figures.published(self.network, cost, error.removeprefix("error_")) if self.data == "mnist" else []


def kinds(runs: Sequence[Finished]) -> list[Kind]:
    """Runs by network and data, and each by recipe, from the smallest compact networks to the largest."""
    parts: dict[tuple[str, str, str], list[Finished]] = {}
    for run in runs:
        parts.setdefault((run.recipe.network, run.recipe.data, run.recipe.error), []).append(run)
    return [
        Kind(network, data, sorted(groups(own), key=lambda g: (g.kept("params")[0], g.error("error_last")[0])))
        for (network, data, _), own in parts.items()
    ]


def runs_page(paths: Iterable[str | os.PathLike[str]], home: str | os.PathLike[str] = ".") -> str:
    """A page that compares runs: error against kept cost, the table over seeds, every run, and what was left out.

    Paths are as `collect` takes them, or ValueError if there are none. Links to the runs' own pages are relative to
    `home`, the folder that the page will be in. A PageMissingError says that Plotly or jinja2 is not installed.
    """
    asked = list(paths)
    if not asked:
        raise ValueError("`paths` must be at least one folder, got none")
    runs, notes = collect(asked)
    base = Path(home).resolve()
    found = kinds([run._replace(link=_link(run.page, base)) for run in runs])
    every = [group for kind in found for group in kind.groups]
    twice = "{}, seed {}, is there twice: it is not counted again"
    again = [(run.where, twice.format(group.label, run.recipe.seed)) for group in every for run in group.again]
    return render(
        "runs.html.j2",
        sections=[_section(number, kind) for number, kind in enumerate(found)],
        notes=[*notes, *again],
        runs=len(runs),
        recipes=len(every),
        costs=COSTS,
        errors=ERRORS,
        text=_text,
    )


def _section(number: int, kind: Kind) -> dict[str, Any]:
    variants = {f"{cost} {error}": _chart(number, kind, cost, error) for error in ERRORS for cost in COSTS}
    others = {
        key: {"title": v.title, "alternative": v.alternative, "data": v.traces, "layout": v.layout}
        for key, v in variants.items()
    }
    fronts = {words: kind.front(cost, "error_last") for cost, words in COSTS.items()}
    return {
        "kind": kind,
        "chart": next(iter(variants.values())),
        "variants": script_json(others),
        "fronts": [[words for words, front in fronts.items() if group in front] for group in kind.groups],
        "count": sum(len(group.runs) + len(group.again) for group in kind.groups),
    }


def _link(page: Path | None, home: Path) -> str:
    """A page as an address relative to a folder; empty where there is none."""
    if page is None:
        return ""
    try:
        way = os.path.relpath(page.resolve(), home)
    except ValueError:  # on another drive
        return page.resolve().as_uri()
    return quote(os.fsencode(way.replace(os.sep, "/")))


def _text(path: Path) -> str:
    """A path that can be printed, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")


def runs_figures(paths: Iterable[str | os.PathLike[str]], directory: Path) -> list[Path]:
    """Draws error against kept cost with matplotlib: for each network and data set, and each cost, one figure.

    `paths` are as `collect` takes them; the folder is made. A PlotsMissingError says that matplotlib is missing.
    """
    files: list[Path] = []
    for kind in kinds(collect(paths)[0]):
        runs = [(group.label, run) for group in kind.groups for run in group.runs if not run.emptied]
        for cost in COSTS:
            points = [figures.Point(r.kept[cost], r.errors["error_last"], name) for name, r in runs if r.kept[cost] > 0]
            if points:
                target = directory / re.sub(r"[/:\\]+", "-", f"pareto-{kind.network}-{kind.data}-{cost}")
                error = figures.PERCENT if kind.recipe.in_percent else f"test {kind.recipe.error}"
                files += figures.pareto(
                    points, target, cost=cost, title=kind.title, published=kind.published(cost), error=error
                )
    return files


# ---------------------------------------------------------------- the chart


def _chart(number: int, kind: Kind, cost: Cost, error: str) -> Chart:
    """Error against what is kept, of one cost and one of the two errors."""
    front, theirs = kind.front(cost, error), kind.published(cost, error)
    ours = [(100 * run.kept[cost], run.errors[error]) for group in kind.groups for run in group.runs]
    printed = [(100 * point.cost, point.error) for point in theirs]
    traces = [_published(theirs, cost, [*printed, *ours])] if theirs else []
    if 1 < len(kind.groups) <= len(SERIES):
        for group, colour in zip(kind.groups, SERIES, strict=False):
            name = group.label if len(group.label) <= 34 else group.label[:33] + "…"
            traces += _runs([group], escaped(name), colour, cost, error)
    else:
        traces += _runs(kind.groups, "runs", SERIES[0], cost, error)
    several = [group for group in kind.groups if len(group.runs) > 1]
    traces += [_means(several, cost, error)] if several else []
    x, y = [100 * g.kept(cost)[0] for g in front], [g.error(error)[0] for g in front]
    traces.append(curve(x, y, "front", "@ink", "", width=1.5, dash="dot"))
    xs, ys = zip(*ours, *printed, strict=True)
    return Chart(
        f"front-{number}",
        f"{kind.title}: test {kind.recipe.error} against {COSTS[cost]} kept",
        _caption(kind, bool(theirs), bool(several)),
        _alternative(kind, front, cost, error),
        traces,
        height=460,
        wide=True,
        xaxis=_axis(xs, f"{COSTS[cost]} kept (% of dense)"),
        yaxis=_axis(
            ys, f"test {kind.recipe.error}{' (%)' * kind.recipe.in_percent}, {ERRORS[error].removeprefix('the ')}"
        ),
        hovermode="closest",
        uirevision=f"{cost} {error}",  # another axis, so what was zoomed into means nothing
    )


def _dots(name: str, marker: dict[str, Any], spots: Iterable[tuple[*_Spot, list[str]]], **more: Any) -> dict[str, Any]:
    """Points, each with lines of text that are shown by pointing at it."""
    x, y, texts = zip(*spots, strict=True)
    return dots(x, y, name, marker, hoverinfo="text", hovertext=["<br>".join(lines) for lines in texts], **more)


def _published(points: Sequence[figures.Point], cost: Cost, spots: Sequence[_Spot]) -> dict[str, Any]:
    """The papers' networks, the first of all spots in the chart, with their names where there is room."""
    names = [escaped(point.label) for point in points]
    sides = _sides(spots, [point.label for point in points])
    told = [
        (x, y, [f"<b>{name}</b>, published", f"error {y:g} %", f"{COSTS[cost]} kept {x:.2f} %"])
        for (x, y), name in zip(spots, names, strict=False)
    ]
    marker = {"symbol": "diamond-open", "size": 9, "color": "@grey", "line": {"width": 1.5}}
    return _dots("published", marker, told) | {
        "mode": "markers+text",
        "text": [name if side else "" for name, side in zip(names, sides, strict=True)],
        "textposition": [side or "top center" for side in sides],
        "textfont": {"size": 10, "color": "@muted"},
    }


def _sides(spots: Sequence[_Spot], names: Sequence[str]) -> list[str]:
    """On which side of its spot a name covers no other name and no spot; empty where there is no such side.

    In a window of 1100 by 360 pixels, with letters of 6 by 12. In smaller ones the names are not shown.
    """
    xs, ys = zip(*spots, strict=True)
    places = list(zip(_scaled(xs, 1100), _scaled(ys, 360), strict=True))
    taken, out = [(x - 5, y - 5, x + 5, y + 5) for x, y in places], []
    for (x, y), name in zip(places, names, strict=False):
        width = 6 * len(name)
        corners = {"middle right": (x + 8, y - 6), "middle left": (x - 8 - width, y - 6)}
        corners |= {"top center": (x - width / 2, y + 7), "bottom center": (x - width / 2, y - 19)}
        for side, (left, low) in corners.items():
            right, top = left + width, low + 12
            if not any(left < c and a < right and low < d and b < top for a, b, c, d in taken):
                taken.append((left, low, right, top))
                out.append(side)
                break
        else:
            out.append("")
    return out


def _scaled(values: Sequence[float], size: float) -> list[float]:
    """Where numbers are on an axis of so many pixels."""
    on_axis = [math.log10(v) for v in values] if "type" in _axis(values, "") else list(values)
    low, high = min(on_axis), max(on_axis)
    return [size * (v - low) / (high - low) if high > low else size / 2 for v in on_axis]


def _means(several: Sequence[Group], cost: Cost, error: str) -> dict[str, Any]:
    """Means over seeds with their intervals."""
    errors, costs = [g.error(error) for g in several], [g.kept(cost) for g in several]
    spots = []
    for group, kept, missed in zip(several, costs, errors, strict=True):
        words = [f"<b>{_wrapped(group.label)}</b>", f"mean of {len(group.runs)} seeds, 95 % interval"]
        recipe = group.runs[0].recipe
        words += [
            f"{recipe.error} {plus_minus(missed, 1, recipe.in_percent)}",
            f"{COSTS[cost]} kept {plus_minus(kept, 100)}",
        ]
        spots.append((100 * kept[0], missed[0], words))
    bars = {"type": "data", "color": "@muted", "thickness": 1, "width": 3}
    halves = {
        "error_x": {**bars, "array": [100 * half for _, half in costs]},
        "error_y": {**bars, "array": [half for _, half in errors]},
    }
    marker = {"symbol": "square-open", "size": 9, "color": "@ink", "line": {"width": 1.5}}
    return _dots("mean over seeds, 95 % interval", marker, spots, **halves)


def _runs(own: Sequence[Group], name: str, colour: str, cost: Cost, error: str) -> list[dict[str, Any]]:
    """The dots of some recipes' runs, and crosses for those of which a layer is empty."""
    out = []
    for empty in (False, True):
        found = [(group, run) for group in own for run in group.runs if run.emptied == empty]
        if found:
            symbol = {"symbol": "x-thin", "line": {"width": 2, "color": colour}} if empty else {"symbol": "circle"}
            marker = {"color": colour, "size": 8, "opacity": 0.75, **symbol}
            spots = [(100 * run.kept[cost], run.errors[error], _hover(group, run)) for group, run in found]
            links = [run.link for _, run in found]
            out.append(_dots(name + ", a layer is empty" * empty, marker, spots, customdata=links))
    return out


def _hover(group: Group, run: Finished) -> list[str]:
    units = "-".join(map(str, run.architecture.values())) if len(run.architecture) <= 6 else ""
    return [
        f"<b>{_wrapped(group.label)}</b>, seed {run.recipe.seed}",
        f"{run.recipe.error} {run.recipe.told(run.errors['error_last'])}, "
        f"best {run.recipe.told(run.errors['error_best'])}",
        *(f"{name} kept {100 * run.kept[cost]:.2f} %" for cost, name in COSTS.items()),
        *([f"units kept {units}"] if units else []),
        *(["click: its page"] if run.link else []),
    ]


def _wrapped(text: str) -> str:
    return "<br>".join(map(escaped, textwrap.wrap(text, 38)[:6]))


def _axis(values: Sequence[float], title: str) -> dict[str, Any]:
    """Logarithms where the numbers span more than a linear axis shows, with plain numbers at 1, 2, 5, 10, …."""
    low, high = min(values), max(values)
    if low <= 0 or high <= 6 * low:
        return axis(title)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks])


def _caption(kind: Kind, theirs: bool, several: bool) -> str:
    context = "The papers print no pruned sizes for this network."
    if theirs:
        context = (
            "Diamonds are the networks in Table 1 of Louizos et al. (2018) and of Gallego-Posada et al. (2021), "
            "computed from the architectures as printed; where only one of best and last error is printed, it is that."
        )
    elif figures.published(kind.network, "params"):
        context = "The papers' networks are left out: they were trained on all of MNIST."
    parts = (
        "Each dot is a run: its test error against what its compact network keeps of the dense network.",
        "Squares are means over the seeds of one recipe, with 95 % confidence intervals (Student's t)." * several,
        "The dotted line joins the recipes that no other one here beats, by their means.",
        "Crosses have a layer with no unit left, so no compact network: they beat nothing."
        * any(group.emptied for group in kind.groups),
        context,
    )
    return " ".join(filter(None, parts))


def _alternative(kind: Kind, front: Sequence[Group], cost: Cost, error: str) -> str:
    runs, recipes = sum(len(group.runs) for group in kind.groups), len(kind.groups)
    text = f"{runs} run{'s' * (runs > 1)} of {recipes} recipe{'s' * (recipes > 1)}."
    if not front:
        return f"{text} None of them has a compact network."
    ends = dict.fromkeys(
        f"{g.label} keeps {100 * g.kept(cost)[0]:.1f} % of the {COSTS[cost]} at an error of "
        f"{kind.recipe.told(g.error(error)[0])}"
        for g in (front[0], front[-1])
    )
    count = f"{len(front)} recipe{'s are' if len(front) > 1 else ' is'}"
    return f"{text} {count} on the front: {'; '.join(ends)}. The table below has all numbers."
