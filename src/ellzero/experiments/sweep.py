"""Sweeps: a grid of recipe fields × seeds, trained as a campaign, and the Pareto front of error against cost.

A campaign's folder with sweep.json, which says what was asked for and what has come out so far, and the figure. How
many runs are trained together may change when a sweep goes on. This file does not know how runs are stacked and taken
up again, nor how a figure looks.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast, final

import torch
from rich.table import Table
from torch import nn

from ellzero.experiments import figures
from ellzero.experiments.campaign import Campaign, CampaignError, Loader, Record, Say, diverged, identity, shared
from ellzero.experiments.data import Dataset
from ellzero.experiments.figures import Cost
from ellzero.experiments.recipe import Recipe, differences, from_strings, in_words, refuse_idle
from ellzero.experiments.statistics import interval, pareto, with_interval
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.study.literature import published
from ellzero.experiments.train.building import COSTS, targets
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.out.finalization import refuse_unreachable
from ellzero.out.tables import new_table

_FIGURE = "pareto"


def campaign(out: Path) -> Campaign:
    """The folder of a sweep."""
    own = tuple(f"{_FIGURE}.{ending}" for ending in ("png", "svg", "txt"))
    return Campaign(out, "sweep.json", "ellzero.sweep", "sweep", own)


# ---------------------------------------------------------------- the grid


def values_of(field: str, text: str) -> list[Any]:
    """The values in a list with commas; a comma inside brackets, braces or quotes belongs to its value.

    Example:
        >>> values_of("at-most", '0.1, {"fc1" = 0.2, "fc2" = 0.3}, none')
        [0.1, {'fc1': 0.2, 'fc2': 0.3}, None]
    """
    from_strings({field: "none"})  # says what is wrong with the field before anything about its values
    parts = _split(field, text)
    if not all(part.strip() for part in parts):
        raise ValueError(f"`{field}` must be values with commas between, such as 0.1,0.2, got {text!r}: one is empty")
    return [value for part in parts for value in from_strings({field: part}).values()]


def _split(field: str, text: str) -> list[str]:
    parts, open_, quote, escaped = [""], "", "", False
    for letter in text:
        if letter == "," and not open_ and not quote:
            parts.append("")
            continue
        parts[-1] += letter
        if quote:
            quote = "" if letter == quote and not escaped else quote
            escaped = letter == "\\" and not escaped and quote == '"'
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            open_ += "]" if letter == "[" else "}"
        elif letter in "]}":
            if not open_.endswith(letter):
                raise ValueError(f"`{field}` has a {letter!r} without its beginning: {text!r}")
            open_ = open_[:-1]
    if open_ or quote:
        raise ValueError(f"`{field}` has no {(quote or open_[-1])!r} where one must close: {text!r}")
    return parts


@final
@dataclass(frozen=True)
class Combination:
    """One point of a grid."""

    values: dict[str, Any]  # of the fields that vary, as plain data
    recipe: Recipe  # of its first seed

    @property
    def label(self) -> str:
        """Its values in words, such as "at_most=0.1"; the recipe's name where nothing varies."""
        return _label(self.values) or self.recipe.name


def _label(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={in_words(value)}" for field, value in values.items())


@final
@dataclass(frozen=True)
class Sweep:
    """What is swept: all combinations of the values of some fields, each with some seeds.

    Args:
        recipe: to begin with.
        grid: values by field, in place of the recipe's own. A field with one value is the same in all runs.
        seeds: runs of each point; the first has the seed of the recipe, the others those after it.
        every: evaluate after every so many epochs.

    Raises:
        ValueError: there is no such field, or no value, or a combination is no recipe, or two are the same, or there
            is one run only, or a number is less than 1.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> sweep = Sweep(get("demo"), {"at_most": [0.1, 0.2], "epochs": [5]}, seeds=3)
        >>> [point.label for point in sweep.points], len(sweep.runs)
        (['at_most=0.1', 'at_most=0.2'], 6)
    """

    recipe: Recipe
    grid: Mapping[str, Sequence[Any]]
    seeds: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        for name, number in (("seeds", self.seeds), ("every", self.every)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}")
        for field, values in self.grid.items():
            if not values:
                raise ValueError(f"`{field}` must have at least one value, got none")
        for field, why in (("seed", "`seeds` says how many there are, from `seed` on"), ("name", "it changes nothing")):
            if len(self.grid.get(field, ())) > 1:
                raise ValueError(f"`{field}` cannot vary in a grid: {why}")
        if len(self.runs) < 2:
            raise ValueError(
                "a sweep must have more than one run: give a field of the recipe several values, such as 0.1,0.2 for "
                "`at_most`, or more than one of `seeds`"
            )

    @property
    def varied(self) -> list[str]:
        """The fields with more than one value."""
        return [field for field, values in self.grid.items() if len(values) > 1]

    @cached_property
    def points(self) -> list[Combination]:
        """All combinations, the last field varying fastest."""
        out: list[Combination] = []
        seen: set[str] = set()
        for number, combination in enumerate(itertools.product(*self.grid.values()), 1):
            values = dict(zip(self.grid, combination, strict=True))
            try:
                recipe = self.recipe.override(**values)
                refuse_idle(recipe, values)
            except ValueError as error:
                varied = {field: values[field] for field in self.varied}
                where = f" (at {_label(varied)})" if len(varied) > 1 else ""  # plain from the message otherwise
                raise ValueError(f"{error}{where}") from error
            plain = recipe.to_dict()
            point = Combination({field: plain[field] for field in self.varied}, recipe)
            if recipe.digest() in seen:
                raise ValueError(f"the grid has {point.label} twice: leave one out")
            seen.add(recipe.digest())
            out.append(Combination(point.values, recipe.override(name=self._name(recipe.name, point.values, number))))
        return out

    def _name(self, base: str, values: Mapping[str, Any], number: int) -> str:
        """A name that is different for each point: stacks and histories go by it."""
        if not values:
            return base
        words = "-".join(f"{field}_{in_words(value)}" for field, value in values.items())
        word = re.sub(r"[^A-Za-z0-9._]+", "_", words).strip("_")
        return f"{base}-{number:03d}" + (f"-{word}" if len(word) <= 40 else "")

    @cached_property
    def runs(self) -> list[Recipe]:
        """A recipe for each point and seed."""
        return [run for point in self.points for run in self.of(point)]

    def of(self, point: Combination) -> list[Recipe]:
        """A recipe for each seed of a point."""
        return [point.recipe.override(seed=point.recipe.seed + k) for k in range(self.seeds)]

    def settings(self) -> dict[str, Any]:
        """All that decides what comes out, as what JSON knows."""
        plain = [p.recipe.to_dict() for p in self.points]
        grid = {field: list({json.dumps(r[field]): r[field] for r in plain}.values()) for field in self.grid}
        if "name" in grid:
            grid["name"] = list(self.grid["name"])  # the points' own are made from it
        return {"recipe": self.recipe.to_dict(), "grid": grid, "seeds": self.seeds, "every": self.every}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The sweep that has these settings."""
        return cls(Recipe.from_dict(settings["recipe"]), settings["grid"], settings["seeds"], settings["every"])

    def differences(self, there: Mapping[str, Any]) -> list[str]:
        """Between the settings of another sweep and our own, in words."""
        ours = self.settings()
        grids = [{k: ",".join(map(in_words, v)) for k, v in (side.get("grid") or {}).items()} for side in (there, ours)]
        numbers = [{k: side.get(k) for k in ("seeds", "every")} for side in (there, ours)]
        return differences(there.get("recipe") or {}, ours["recipe"]) + differences(*grids) + differences(*numbers)

    def axis(self) -> Cost:
        """The cost to look at unless another is asked for: what the recipes bound, if it is one, else `params`."""
        bounded = {r.cost if r.at_most is not None else "params" for r in self.runs}
        return bounded.pop() if len(bounded) == 1 else "params"


# ---------------------------------------------------------------- doing it


def stored(out: Path) -> tuple[Sweep, Record]:
    """The sweep in a folder, and what has come out of it so far; a CampaignError where there is none to be read."""
    record = campaign(out).read()
    try:
        return Sweep.from_settings(record), record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        file = str(out / campaign(out).head)
        raise CampaignError(f"{file!r} is damaged ({type(error).__name__}: {error}); `--fresh` begins again") from error


def run(
    sweep: Sweep,
    load: Loader,
    out: Path,
    *,
    resume: bool = True,
    fresh: bool = False,
    at_once: int | None = None,
    cost: Cost | None = None,
    about: Mapping[str, Any] | None = None,
    watchers: Sequence[AbstractWatcher] = (),
    say: Say = lambda _: None,
) -> Record:
    """Trains what is left of a sweep, and finds its front. A run that diverges has no place on it.

    Args:
        sweep: what to train.
        load: gives the data set of a name, on the device to train on.
        out: the folder.
        resume: whether to go on with the sweep that the folder holds; what is finished is not trained again.
        fresh: begin again, and remove the sweep that the folder holds when the new one can begin.
        at_once: runs in a stack at most; what `campaign.room` says if absent.
        cost: that the front is about; `Sweep.axis` if absent.
        about: more to store about where the results come from.
        watchers: that show each stack's progress.
        say: told a line about each stack.

    Returns:
        What is in sweep.json then.

    Raises:
        ValueError: a recipe does not fit its network or its data; nothing is trained then.
        CampaignError: `out` holds something else.
        FolderError: another process trains there.
        training.Stopped: Ctrl-C; what was done is saved.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"`at_once` must be at least 1, got {at_once}")
    folder = campaign(out)
    there = folder.holds(sweep.differences, resume=resume, fresh=fresh)
    work = folder.work(sweep.runs, load, fresh=fresh, at_once=at_once, say=say)
    _refuse_unfit([recipe for stack in work.new for recipe in stack], work.data)
    if fresh:
        folder.clear()
    where = next((data.train_x.device for data in work.data.values()), torch.device("cpu"))
    sources = folder.read()["about"] if there else {**provenance(where), **(about or {})}

    def note() -> Record:
        return folder.write({**sweep.settings(), **_outcome(sweep, folder, sources, cost or sweep.axis())})

    record = note()
    points, seeds = len(sweep.points), sweep.seeds
    title = f"{points} point{'s' * (points > 1)} × {seeds} seed{'s' * (seeds > 1)}"
    for _ in folder.train(work, title=title, every=sweep.every, watchers=watchers, say=say):
        record = note()
    return record


def _refuse_unfit(recipes: Sequence[Recipe], data: Mapping[str, Dataset]) -> None:
    """Finds out before anything is trained what training would find out at its beginning, or only at its end: patterns
    that match nothing, batches larger than the data, targets that closing units cannot reach.
    """
    networks: dict[str, nn.Module] = {}  # one for all recipes that differ in numbers and seeds alone
    bounds: set[str] = set()
    for recipe in recipes:
        patterns = [list(v) if isinstance(v, dict) else v is None for v in (recipe.at_most, recipe.penalty)]
        shape = json.dumps([shared(recipe), patterns, recipe.cost, recipe.init])
        if shape not in networks:
            networks[shape] = Trainer([recipe], data[recipe.data]).network(0)
        bound = json.dumps([shape, list(targets(recipe).items())])
        if recipe.projects and recipe.at_most is not None and bound not in bounds:
            bounds.add(bound)
            refuse_unreachable(cast("Any", networks[shape]), recipe.at_most, COSTS[recipe.cost])


# ---------------------------------------------------------------- what came out


def _outcome(sweep: Sweep, home: Campaign, about: Mapping[str, Any], axis: Cost) -> Record:
    results: dict[tuple[str, str], Record] = {}
    failures: dict[tuple[str, str], str] = {}
    trained = []
    for folder in home.folders():
        name, found, why = folder.path.name, folder.results() or [], diverged(folder)
        if why is not None:
            failures[identity(folder.recipes[0])] = why
        for index, result in enumerate(found):
            rest = {k: v for k, v in result.items() if k not in ("recipe", "seconds")}
            results[identity(folder.recipes[index])] = {**rest, "stack": name, "index": index}
        if found:
            trained.append({"stack": name, "runs": len(found), "seconds": found[0]["seconds"], "about": folder.about})
    points = []
    for point in sweep.points:
        own = [identity(run) for run in sweep.of(point)]
        runs = [results[run] for run in own if run in results]
        notes = [failures[run] for run in own if run in failures]
        entry: Record = {"label": point.label, "values": point.values, "recipe": point.recipe.to_dict(), "runs": runs}
        entry |= {"finished": len(runs) + len(notes) == sweep.seeds, "diverged": notes, "front": None}
        if runs:
            entry["mean"] = _mean(runs)
            # Without a residual path around a layer that has nothing left, there is no compact network.
            empty = any(0 in run.get("architecture", {}).values() for run in runs)
            entry["emptied"] = empty and not point.recipe.facts.residual
        points.append(entry)
    finished = all(p["finished"] for p in points)
    front: list[int] | None = None
    if finished:
        valid = [k for k, p in enumerate(points) if _is_network(p)]  # what is none beats nothing
        spots = [(points[k]["mean"]["kept"][axis], points[k]["mean"]["error_last"]) for k in valid]
        front = [valid[k] for k in pareto(spots)]  # positions in points, by rising cost
        for k, p in enumerate(points):
            p["front"] = k in front
    head = {"about": dict(about), "finished": finished, "cost": axis}
    return {**head, "points": points, "front": front, "stacks": trained}


def _is_network(point: Record) -> bool:
    """Whether all runs of a point gave a network that could be handed over."""
    return bool(point["runs"]) and not point["diverged"] and not point["emptied"]


def _mean(runs: Sequence[Record]) -> Record:
    """Means over seeds, errors with half their 95 % interval; the costs are fractions of dense."""
    out: Record = {}
    for name in ("error_best", "error_last"):
        mean, half = interval([r[name] for r in runs])
        out |= {name: mean, f"{name}_interval": None if math.isnan(half) else half}
    for kind in ("expected", "kept"):
        out[kind] = {c: statistics.fmean(r["costs"][c][kind] if "costs" in r else 1.0 for r in runs) for c in COSTS}
    return out


def table(record: Record) -> Table:
    """A line for each point: errors with the 95 % interval over seeds, costs, and whether it is on the front."""
    varied = [field for field, values in record["grid"].items() if len(values) > 1]
    title = f"{record['recipe']['name']}, {record['seeds']} seed{'s' * (record['seeds'] > 1)}"
    right = ("best %", "last %", "density expected", "kept", "parameters", "MACs", "front")
    out = new_table(title, varied or ["recipe"], right)
    for point in record["points"]:
        left = [in_words(point["values"][field]) for field in varied] or [record["recipe"]["name"]]
        if not point["runs"]:
            out.add_row(*left, *["diverged" if point["diverged"] else "–"] * 2, *["–"] * 4, "")
            continue
        mean = point["mean"]
        cells = [with_interval([run[name] for run in point["runs"]]) for name in ("error_best", "error_last")]
        cells += [f"{100 * mean[kind]['l0_norm']:.1f} %" for kind in ("expected", "kept")]
        for cost in ("params", "macs"):
            share, run = mean["kept"][cost], point["runs"][0]
            count = f"{share * run['costs'][cost]['dense']:,.0f} " if "costs" in run else "dense "
            cells.append(f"{count}({100 * share:.1f} %)")
        note = "*" if point["front"] else ""
        if point["diverged"]:
            note = f"{len(point['diverged'])} diverged"
        elif point["emptied"]:
            note = "layer empty"
        out.add_row(*left, *cells, note)
    return out


def draw(record: Record, out: Path) -> list[Path]:
    """Draws error against kept cost into the sweep's folder, on MNIST with the papers' networks beside ours; nothing
    where no point has a network.
    """
    axis: Cost = record["cost"]
    # What keeps nothing has no place on an axis of logarithms.
    good = [p for p in record["points"] if _is_network(p) and p["mean"]["kept"][axis] > 0]
    if not good:
        return []
    points = [figures.Point(min(p["mean"]["kept"][axis], 1.0), p["mean"]["error_last"], p["label"]) for p in good]
    kinds = {(p["recipe"]["network"], p["recipe"]["data"]) for p in good}
    network, data = next(iter(kinds))
    theirs = published(network, axis) if len(kinds) == 1 and data == "mnist" else []
    means = f", means over {record['seeds']} seeds" if record["seeds"] > 1 else ""
    title = record["recipe"]["name"] + means
    return figures.pareto(points, out / _FIGURE, cost=axis, title=title, published=theirs)
