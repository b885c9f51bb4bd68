"""The page of several runs: error against what is kept with the papers' networks beside ours, and a table over seeds.

`collect` finds the runs in folders: single runs, stacks, sweeps, reproductions, stored records of a reproduction, or
folders above such ones. What is no finished run is noted with a reason. `runs_page` makes one self-contained file of
them. How a chart looks and how a page begins is in `charts`; how a run was trained, nothing here knows.
"""

from __future__ import annotations

import html
import json
import math
import os
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final
from urllib.parse import quote

from ellzero.experiments import figures, sweep
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.reproduce import interval
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.page.charts import SERIES, Chart, render, script_json

Cost = Literal["params", "macs", "l0_norm"]
PAGE, IN_A_STACK = "page.html", "page-{}.html"  # of a run, in its folder
DEEP = 6  # folders below one that was given, in which runs are looked for
COSTS: dict[Cost, str] = {"params": "parameters", "macs": "MACs", "l0_norm": "density"}
ERRORS = {"error_last": "at the end of training", "error_best": "the best during training"}
_MARKS = ("run.json", "sweep.json", "study.json")


# ---------------------------------------------------------------- what there is


@final
@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        recipe: its recipe, with its seed.
        name: of the recipe; of a sweep's run, that of the recipe that the sweep begins with.
        where: the folder or file that it was found in.
        errors: in percent, by their names in `ERRORS`.
        kept: fractions of the dense cost that the compact network has, by their names in `COSTS`.
        expected: the same as expectations over the gates.
        dense: what the dense network costs; empty for a run without gates, which does not store it.
        architecture: units kept by set of gates; empty for a run without gates.
        page: its own page, if there is one.
        varied: of a sweep's run, the fields that vary in the sweep with their values.
    """

    recipe: Recipe
    name: str
    where: Path
    errors: dict[str, float]
    kept: dict[Cost, float]
    expected: dict[Cost, float]
    dense: dict[Cost, float]
    architecture: dict[str, int]
    page: Path | None = None
    varied: Mapping[str, Any] = field(default_factory=dict)

    @property
    def emptied(self) -> bool:
        """Whether a layer has nothing left and no residual path carries on: there is no compact network then."""
        return self.recipe.network.startswith("lenet") and 0 in self.architecture.values()


@final
@dataclass(frozen=True)
class Note:
    """Something that is no finished run: where it is, and why."""

    where: Path
    why: str


def collect(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Run], list[Note]]:
    """The finished runs in some folders, and what else was found there.

    Args:
        paths: folders of runs, stacks, sweeps and reproductions, folders above such ones, and records of a reproduction
            (`RECIPE.json`). What is in two of them counts once.

    Returns:
        The runs, in the order in which they were found, and a note for each one that is not finished, for each folder
        that is damaged or holds no run, and for the runs of a sweep or a reproduction that were not begun.
    """
    search = _Search()
    for path in paths:
        search.look(Path(path), 0)
    return search.runs, search.notes


_Name = tuple[str, Mapping[str, Any]]  # of a run: `Run.name` and `Run.varied`


def _label(name: str, values: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{key}={sweep.in_words(value)}" for key, value in values.items())])


@final
class _Search:
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.notes: list[Note] = []
        self.seen: dict[Path, list[str]] = {}  # what was looked at, and the digests of the recipes there

    def note(self, where: Path, why: object) -> None:
        self.notes.append(Note(where, str(why)))

    def look(self, path: Path, depth: int) -> bool:
        """Takes what is at a path; whether there was anything to take or to note."""
        try:
            real = path.resolve()
            if real in self.seen:
                return True
            self.seen[real] = []
            if not path.exists():
                self.note(path, "there is nothing of this name")
            elif path.is_file():
                self.records([path], path)
            elif (path / "run.json").exists():
                self.folder(path)
            elif (path / "sweep.json").exists():
                self.sweep(path)
            elif (path / "study.json").exists() or any(_is_record(file) for file in sorted(path.glob("*.json"))):
                self.reproduction(path)
            else:
                return self.below(path, depth)
        except (OSError, RuntimeError) as error:  # of resolve(), for a loop of links, in older Pythons
            self.note(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")
        return True

    def below(self, path: Path, depth: int) -> bool:
        homes = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        found = [self.look(home, depth + 1) for home in homes] if depth < DEEP else []
        if depth == 0 and not any(found):
            self.note(path, "it holds no run: there is no `run.json`, `sweep.json` or `study.json` in it or below it")
        return any(found)

    # ---- one folder -------------------------------------------------------------------------------------------------

    def folder(self, path: Path, wanted: Mapping[str, _Name] | None = None) -> list[str]:
        """A run or a stack; the digests of its recipes."""
        try:
            folder = Folder.open(path)
            results = folder.results()
        except FolderError as error:
            self.note(path, error)
            return []
        digests = self.seen[path.resolve()] = [recipe.digest() for recipe in folder.recipes]
        if results is None:
            self.note(path, _unfinished(folder))
            return digests
        for index, (recipe, digest, result) in enumerate(zip(folder.recipes, digests, results, strict=True)):
            name = (wanted or {}).get(digest, (recipe.name, {}))
            page = path / (PAGE if len(digests) == 1 else IN_A_STACK.format(index))
            self.take(recipe, name, path, result, page if page.is_file() else None)
        return digests

    def take(self, recipe: Recipe, name: _Name, where: Path, result: Any, page: Path | None) -> None:
        try:
            self.runs.append(replace(_run(recipe, name[0], where, result, page), varied=name[1]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.note(where, f"the results of {_label(*name)}, seed {recipe.seed}, are damaged: {_said(error)}")

    # ---- many in one ------------------------------------------------------------------------------------------------

    def sweep(self, path: Path) -> None:
        wanted: dict[str, _Name] = {}
        try:
            grid, _ = sweep.stored(path)
            for point in grid.points:
                for seed in range(grid.seeds):
                    digest = point.recipe.override(seed=point.recipe.seed + seed).digest()
                    wanted[digest] = grid.recipe.name, point.values
        except sweep.SweepError as error:
            self.note(path, error)
        self.stacks(path, wanted)

    def reproduction(self, path: Path) -> None:
        wanted: dict[str, _Name] = {}
        file = path / "study.json"
        if file.exists():
            try:
                settings = json.loads(file.read_text(encoding="utf-8"))["settings"]
                for values in settings["recipes"]:
                    recipe = Recipe.from_dict(values)
                    wanted |= {recipe.override(seed=s).digest(): (recipe.name, {}) for s in range(settings["seeds"])}
                if not wanted:
                    self.note(path, "it is a study that trains nothing")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self.note(file, f"it is damaged: {_said(error)}")
        records = [p for p in sorted(path.glob("*.json")) if p.name not in _MARKS and _is_record(p)]
        self.stacks(path, wanted, records)

    def stacks(self, path: Path, wanted: Mapping[str, _Name], records: Sequence[Path] = ()) -> None:
        """The stacks of a sweep or a reproduction, then what only its records have, then what is missing."""
        home = path / "stacks"
        there: set[str] = set()
        for stack in sorted(home.iterdir()) if home.is_dir() else []:
            if (stack / "run.json").exists():
                real = stack.resolve()
                there.update(self.seen[real] if real in self.seen else self.folder(stack, wanted))
        there.update(self.records(records, path, there))
        left = [_label(*name) for digest, name in wanted.items() if digest not in there]
        if left:
            names = list(dict.fromkeys(left))
            words = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self.note(path, f"{len(left)} of {len(wanted)} runs were not begun, or their folder is damaged: {words}")

    def records(self, files: Sequence[Path], where: Path, there: Iterable[str] = ()) -> list[str]:
        """The runs in records of a reproduction that are not there already; their digests."""
        known, taken = set(there), []
        for file in files:
            try:
                record = json.loads(file.read_text(encoding="utf-8"))
                recipe, seeds = Recipe.from_dict(record["recipe"]), list(record["seeds"])
                runs = [(recipe.override(seed=seed["seed"]), seed) for seed in seeds]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self.note(file, f"it is no record of a reproduction: {_said(error)}")
                continue
            for own, seed in runs:
                if own.digest() not in known:
                    self.take(own, (own.name, {}), file, seed, None)
                    taken.append(own.digest())
        return taken


def _is_record(file: Path) -> bool:
    """Whether a file looks like a record of a reproduction; what is wrong with it is found out later."""
    if file.name in _MARKS:
        return False
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"recipe", "seeds", "row"} <= content.keys()


def _unfinished(folder: Folder) -> str:
    """Why there are no results, and how far it is."""
    file = folder.path / "diverged.json"
    names = ", ".join(dict.fromkeys(r.name for r in folder.recipes))
    if file.exists():
        try:
            return f"{names}: {json.loads(file.read_text(encoding='utf-8'))}"
        except (OSError, ValueError):
            return f"{names}: it diverged"
    try:
        history = folder.history()
    except FolderError as error:
        return f"{names} is not finished, and its history is damaged: {error}"
    if not history:
        return f"{names} is not finished: no epoch has been evaluated"
    recipe = folder.recipes[0]
    last, of = history[-1].get("epoch"), recipe.epochs + recipe.finetune_epochs
    return f"{names} is not finished: epoch {last} of {of}"


def _run(recipe: Recipe, name: str, where: Path, result: Any, page: Path | None) -> Run:
    """From an entry of results.json, or of a record's seeds.

    Raises:
        ValueError: a number is missing or makes no sense.
    """
    errors = {name: _number(result[name], name, 100.0) for name in ERRORS}
    dense: dict[Cost, float] = {}
    kept = expected = dict.fromkeys(COSTS, 1.0)  # a run without gates stores no costs
    if recipe.placement is not None:
        costs = result["costs"]
        kept, expected = ({c: _number(costs[c][k], f"{k} {c}", 1.0) for c in COSTS} for k in ("kept", "expected"))
        dense = {c: _number(costs[c]["dense"], f"dense {c}", math.inf) for c in COSTS}
    architecture = {str(name): int(units) for name, units in result.get("architecture", {}).items()}
    return Run(recipe, name, where, errors, kept, expected, dense, architecture, page)


def _number(value: Any, name: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most * (1 + 1e-6):
        raise ValueError(f"`{name}` must be a number from 0 to {most:g}, got {value!r}")
    return min(float(value), most)


def _said(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


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
    runs: list[Run]
    again: list[Run]

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


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by their recipes, the seed left out, in the order of their first ones.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> ones = dict.fromkeys(COSTS, 1.0)
        >>> def run(recipe, error):
        ...     return Run(recipe, "a", Path("a"), {"error_last": error, "error_best": error}, ones, ones, {}, {})
        >>> demo = get("demo").override(epochs=2)
        >>> found = groups([run(demo, 2.0), run(demo.override(epochs=1), 9.0), run(demo.override(seed=1), 4.0)])
        >>> [(group.label, group.error("error_last")[0]) for group in found]
        [('a, epochs=2', 3.0), ('a, epochs=1', 9.0)]
    """
    parts: dict[str, tuple[list[Run], list[Run]]] = {}
    for run in runs:
        own, again = parts.setdefault(run.recipe.override(seed=0).digest(), ([], []))
        (again if any(r.recipe.seed == run.recipe.seed for r in own) else own).append(run)
    names = _labels([own[0] for own, _ in parts.values()])
    return [Group(name, own, again) for name, (own, again) in zip(names, parts.values(), strict=True)]


def _labels(firsts: Sequence[Run]) -> list[str]:
    """A label for each recipe: its name, what varies in its sweep, and the fields in which those of one name differ."""
    plain = [run.recipe.to_dict() for run in firsts]
    seen: dict[tuple[str, str], set[str]] = {}
    for run, own in zip(firsts, plain, strict=True):
        for key, value in own.items():
            seen.setdefault((run.name, key), set()).add(json.dumps(value))
    out = []
    for run, own in zip(firsts, plain, strict=True):
        differ = {k: v for k, v in own.items() if len(seen[run.name, k]) > 1 and k not in ("name", "seed")}
        out.append(_label(run.name, {**run.varied, **differ}))
    return out


# ---------------------------------------------------------------- the page


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
        names = {"lenet300": "MLP 784-300-100", "lenet5": "LeNet-5", "mnist": "MNIST", "mnist5k": "5,000 MNIST images"}
        names |= {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
        return f"{names.get(self.network, self.network.upper())}, {names[self.data]}"

    def front(self, cost: Cost, error: str) -> list[Group]:
        """The recipes that no other one beats, by their means over seeds; by rising cost."""
        whole = [group for group in self.groups if not group.emptied]
        return [whole[k] for k in sweep.pareto([(g.kept(cost)[0], g.error(error)[0]) for g in whole])]


def kinds(runs: Sequence[Run]) -> list[Kind]:
    """Runs by network and data, and each by recipe, from the smallest compact networks to the largest."""
    parts: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        parts.setdefault((run.recipe.network, run.recipe.data), []).append(run)
    return [
        Kind(network, data, sorted(groups(own), key=lambda g: (g.kept("params")[0], g.error("error_last")[0])))
        for (network, data), own in parts.items()
    ]


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
    base = Path(home).resolve()
    sections = [_section(number, kind, base) for number, kind in enumerate(kinds(runs))]
    noted = [(_text(note.where), note.why) for note in notes]
    noted += [
        (_text(run.where), f"{group['label']}, seed {run.recipe.seed}, is there twice: it is not counted again")
        for section in sections
        for group in section["table"]
        for run in group["again"]
    ]
    return render(
        "runs.html.j2",
        sections=sections,
        notes=noted,
        runs=len(runs),
        recipes=sum(len(section["table"]) for section in sections),
        linked=sum(run.page is not None for run in runs),
        costs=COSTS,
        errors=ERRORS,
    )


def _section(number: int, kind: Kind, base: Path) -> dict[str, Any]:
    variants = {f"{cost} {error}": _chart(number, kind, cost, error, base) for error in ERRORS for cost in COSTS}
    first = next(iter(variants.values()))
    others = {
        key: {"title": v.title, "alternative": v.alternative, "data": list(v.traces), "layout": dict(v.layout)}
        for key, v in variants.items()
    }
    fronts = {cost: {id(group) for group in kind.front(cost, "error_last")} for cost in COSTS}
    return {
        "kind": kind,
        "chart": first,
        "variants": script_json(others),
        "table": [_row(group, [COSTS[c] for c in COSTS if id(group) in fronts[c]]) for group in kind.groups],
        "runs": [
            {"group": group.label, "run": run, "link": _link(run, base), "where": _text(run.where)}
            for group in kind.groups
            for run in (*group.runs, *group.again)
        ],
    }


def _row(group: Group, fronts: list[str]) -> dict[str, Any]:
    """The cells of a recipe's line."""
    cells = {name: _plus_minus(*group.error(name)) + " %" for name in ERRORS}
    for cost in COSTS:
        mean, half = group.kept(cost)
        cells[cost] = _plus_minus(100 * mean, 100 * half) + " %"
        if cost != "l0_norm" and group.runs[0].dense:
            cells[f"{cost} count"] = f"{mean * group.runs[0].dense[cost]:,.0f}"
    cells["expected"] = f"{100 * group.expected('l0_norm'):.2f} %"
    note = "a layer is empty" if group.emptied else ", ".join(fronts) or "–"
    return {"label": group.label, "count": len(group.runs), "again": group.again, "cells": cells, "front": note}


def _plus_minus(mean: float, half: float) -> str:
    return f"{mean:.2f}" if math.isnan(half) else f"{mean:.2f} ± {half:.2f}"


# ---------------------------------------------------------------- the chart


def _chart(number: int, kind: Kind, cost: Cost, error: str, base: Path) -> Chart:
    """Error against what is kept, of one cost and one of the two errors."""
    front = kind.front(cost, error)
    which = error.removeprefix("error_")
    theirs = figures.published(kind.network, cost, which) if kind.data == "mnist" else []
    coloured = kind.groups if 1 < len(kind.groups) <= len(SERIES) else []
    shares = [([group], _short(group.label), colour) for group, colour in zip(coloured, SERIES, strict=False)]
    spots = [(100 * run.kept[cost], run.errors[error]) for group in kind.groups for run in group.runs]
    traces = [_published(theirs, cost, spots)] if theirs else []
    for own, name, colour in shares or [(kind.groups, "runs", SERIES[0])]:
        traces += _runs(own, name, colour, cost, error, base)
    several = [group for group in kind.groups if len(group.runs) > 1]
    traces += [_means(several, cost, error)] if several else []
    x, y = [100 * g.kept(cost)[0] for g in front], [g.error(error)[0] for g in front]
    line = {"x": x, "y": y, "mode": "lines", "name": "front", "hoverinfo": "skip"}
    traces.append({**line, "type": "scatter", "line": {"color": "@ink", "width": 1.5, "dash": "dot"}})
    xs = [at for at, _ in spots] + [100 * p.cost for p in theirs]
    ys = [at for _, at in spots] + [p.error for p in theirs]
    layout = {
        "xaxis": _axis(xs, f"{COSTS[cost]} kept (% of dense)"),
        "yaxis": _axis(ys, f"test error (%), {ERRORS[error].removeprefix('the ')}"),
        "hovermode": "closest",
        "uirevision": f"{cost} {error}",  # another axis, so what was zoomed into means nothing
    }
    return Chart(
        f"front-{number}",
        f"{kind.title}: test error against {COSTS[cost]} kept",
        _caption(kind, bool(theirs), bool(several)),
        _alternative(kind, front, cost, error),
        traces,
        layout,
        height=460,
        wide=True,
    )


def _dots(x: list[float], y: list[float], name: str) -> dict[str, Any]:
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "name": name, "hoverinfo": "text"}


def _published(points: Sequence[figures.Point], cost: Cost, others: Sequence[tuple[float, float]]) -> dict[str, Any]:
    trace = _dots([100 * p.cost for p in points], [p.error for p in points], "published")
    sides = _sides(list(zip(trace["x"], trace["y"], strict=True)), [p.label for p in points], others)
    trace |= {"mode": "markers+text", "textposition": [side or "top center" for side in sides]}
    trace["text"] = [_safe(p.label) if side else "" for p, side in zip(points, sides, strict=True)]
    trace["textfont"] = {"size": 10, "color": "@muted"}
    trace["marker"] = {"symbol": "diamond-open", "size": 9, "color": "@grey", "line": {"width": 1.5}}
    trace["hovertext"] = [
        _lines(
            f"<b>{_safe(p.label)}</b>, published",
            f"error {p.error:g} %",
            f"{COSTS[cost]} kept {100 * p.cost:.2f} %",
        )
        for p in points
    ]
    return trace


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
        for side, left, low in (
            ("middle right", x + 8, y - 6),
            ("middle left", x - 8 - width, y - 6),
            ("top center", x - width / 2, y + 7),
            ("bottom center", x - width / 2, y - 19),
        ):
            box = (left, low, left + width, low + 12)
            if not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                taken.append(box)
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
    errors = [group.error(error) for group in several]
    costs = [(100 * mean, 100 * half) for mean, half in (group.kept(cost) for group in several)]
    trace = _dots([mean for mean, _ in costs], [mean for mean, _ in errors], "mean over seeds, 95 % interval")
    for axis, halves in (("error_x", [half for _, half in costs]), ("error_y", [half for _, half in errors])):
        trace[axis] = {"type": "data", "array": halves, "color": "@muted", "thickness": 1, "width": 3}
    trace["marker"] = {"symbol": "square-open", "size": 9, "color": "@ink", "line": {"width": 1.5}}
    trace["hovertext"] = [
        _lines(
            f"<b>{_wrapped(group.label)}</b>",
            f"mean of {len(group.runs)} seeds, 95 % interval",
            f"error {_plus_minus(*e)} %",
            f"{COSTS[cost]} kept {_plus_minus(*c)} %",
        )
        for group, c, e in zip(several, costs, errors, strict=True)
    ]
    return trace


def _runs(own: Sequence[Group], name: str, colour: str, cost: Cost, error: str, base: Path) -> list[dict[str, Any]]:
    """The dots of some recipes' runs, and crosses for those of which a layer is empty."""
    out = []
    for empty in (False, True):
        found = [(g, run) for g in own for run in g.runs if run.emptied == empty]
        if not found:
            continue
        trace = _dots([100 * r.kept[cost] for _, r in found], [r.errors[error] for _, r in found], name)
        symbol = {"symbol": "x-thin", "line": {"width": 2, "color": colour}} if empty else {"symbol": "circle"}
        trace["name"] += ", a layer is empty" if empty else ""
        trace["marker"] = {"color": colour, "size": 8, "opacity": 0.75, **symbol}
        trace["hovertext"] = [_hover(g, run, base) for g, run in found]
        trace["customdata"] = [_link(run, base) for _, run in found]
        out.append(trace)
    return out


def _hover(group: Group, run: Run, base: Path) -> str:
    units = "-".join(map(str, run.architecture.values())) if len(run.architecture) <= 6 else ""
    return _lines(
        f"<b>{_wrapped(group.label)}</b>, seed {run.recipe.seed}",
        f"error {run.errors['error_last']:.2f} %, best {run.errors['error_best']:.2f} %",
        *(f"{name} kept {100 * run.kept[cost]:.2f} %" for cost, name in COSTS.items()),
        *([f"units kept {units}"] if units else []),
        *(["click: its page"] if _link(run, base) else []),
    )


def _lines(*lines: str) -> str:
    return "<br>".join(lines)


def _safe(text: str) -> str:
    """Plotly reads some HTML in texts."""
    return html.escape(text, quote=False)


def _short(text: str) -> str:
    return _safe(text if len(text) <= 34 else text[:33] + "…")


def _wrapped(text: str) -> str:
    return _lines(*map(_safe, textwrap.wrap(text, 38)[:6]))


def _axis(values: Sequence[float], title: str) -> dict[str, Any]:
    """Logarithms where the numbers span more than a linear axis shows, with plain numbers at 1, 2, 5, 10, …."""
    axis: dict[str, Any] = {"title": {"text": title}}
    positive = [v for v in values if v > 0]
    if len(positive) < len(values) or not positive or max(positive) <= 6 * min(positive):
        return axis
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    ticks = [m * 10.0**e for e in range(low, high + 1) for m in (1, 2, 5)]
    return axis | {"type": "log", "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}


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
    elif kind.network.startswith("lenet"):
        parts.append("The papers' networks are left out: they were trained on all of MNIST.")
    else:
        parts.append("The papers print no pruned sizes for this network.")
    return " ".join(parts)


def _alternative(kind: Kind, front: Sequence[Group], cost: Cost, error: str) -> str:
    runs = sum(len(g.runs) for g in kind.groups)
    text = f"{runs} run{'s' * (runs > 1)} of {len(kind.groups)} recipe{'s' * (len(kind.groups) > 1)}."
    if not front:
        return f"{text} None of them has a compact network."
    ends = dict.fromkeys((front[0].label, front[-1].label))
    by_label = {g.label: g for g in front}
    words = [
        f"{label} keeps {100 * by_label[label].kept(cost)[0]:.1f} % of the {COSTS[cost]} at an error of "
        f"{by_label[label].error(error)[0]:.2f} %"
        for label in ends
    ]
    count = f"{len(front)} recipe{'s are' if len(front) > 1 else ' is'}"
    return f"{text} {count} on the front: {'; '.join(words)}. The table below has all numbers."


def _link(run: Run, base: Path) -> str:
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


__all__ = ["Group", "Kind", "Note", "Run", "collect", "groups", "kinds", "runs_page"]
