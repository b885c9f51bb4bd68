"""Sweeps: a grid of recipe fields × seeds, trained as a campaign, and the Pareto front of error against cost.

sweep.json says what was asked for and what has come out so far. This file does not know how runs are stacked and taken
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
from typing import Any, Self, final

import torch
from rich.table import Table

from ellzero.experiments import figures
from ellzero.experiments.campaign import Campaign, CampaignError, Loader, Record, Say, counted, diverged, identity
from ellzero.experiments.figures import Cost
from ellzero.experiments.recipe import Recipe, differences, from_strings, in_words, refuse_idle
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.store.statistics import interval, pareto
from ellzero.experiments.study import Row, cells
from ellzero.experiments.train.building import COSTS
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.out.tables import new_table

_HEAD, _FIGURE = "sweep.json", "pareto"
_BRACKETS = {"[": "]", "{": "}"}
_TOKENS = re.compile(r"""[^\[\]{},"']+|"(?:\\.|[^"\\])*"|'[^']*'|.""")  # what is quoted is one token


def campaign(out: Path) -> Campaign:
    """The folder of a sweep."""
    own = tuple(f"{_FIGURE}.{ending}" for ending in ("png", "svg", "txt"))
    return Campaign(out, _HEAD, "ellzero.sweep", "sweep", own)


def values_of(field: str, text: str) -> list[Any]:
    """The values in a list with commas; a comma inside brackets, braces or quotes belongs to its value."""
    return [value for part in parts_of(field, text) for value in from_strings({field: part}).values()]


def parts_of(field: str, text: str) -> list[str]:
    """The same as they were typed."""
    from_strings({field: "none"})  # says what is wrong with the field before anything about its values
    parts, open_ = [""], ""
    for token in _TOKENS.findall(text):
        if token == "," and not open_:
            parts.append("")
            continue
        parts[-1] += token
        if token in _BRACKETS:
            open_ += _BRACKETS[token]
        elif token in _BRACKETS.values():
            if not open_.endswith(token):
                raise ValueError(f"`{field}` has a {token!r} without its beginning: {text!r}")
            open_ = open_[:-1]
        elif token in ('"', "'"):
            open_ += token
            break
    if open_:
        raise ValueError(f"`{field}` has no {open_[-1]!r} where one must close: {text!r}")
    if not all(part.strip() for part in parts):
        raise ValueError(f"`{field}` must be values with commas between, such as 0.1,0.2, got {text!r}: one is empty")
    return parts


def _label(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={in_words(value)}" for field, value in values.items())


@final
@dataclass(frozen=True)
class Sweep:
    """What is swept: all combinations of the values of some fields, each with some seeds.

    A ValueError says what is no sweep: a combination that is no recipe, two that are the same, a single run.
    """

    recipe: Recipe
    grid: Mapping[str, Sequence[Any]]  # values by field, in place of the recipe's own; one is the same in all runs
    seeds: int = 1  # runs of each point; the first has the seed of the recipe, the others those after it
    every: int = 1  # evaluate after so many epochs

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

    def values(self, recipe: Recipe) -> dict[str, Any]:
        """The values of a recipe's fields that vary, as plain data."""
        plain = recipe.to_dict()
        return {field: plain[field] for field in self.varied}

    @cached_property
    def points(self) -> list[Row]:
        """All combinations, the last field varying fastest, each with the recipe of its first seed.

        They are labelled by their values, such as "at_most=0.1", and by the recipe's name where nothing varies.
        """
        out: dict[str, Row] = {}
        for number, combination in enumerate(itertools.product(*self.grid.values()), 1):
            asked = dict(zip(self.grid, combination, strict=True))
            try:
                recipe = self.recipe.override(**asked)
                refuse_idle(recipe, asked)
            except ValueError as error:
                varied = {field: asked[field] for field in self.varied}
                where = f" (at {_label(varied)})" if len(varied) > 1 else ""  # plain from the message otherwise
                raise ValueError(f"{error}{where}") from error
            values, name = self.values(recipe), recipe.name
            label = _label(values) or name
            if recipe.digest() in out:
                raise ValueError(f"the grid has {label} twice: leave one out")
            if values:  # stacks and histories go by the name: another for each point
                words = "-".join(f"{field}_{in_words(value)}" for field, value in values.items())
                word = re.sub(r"[^A-Za-z0-9._]+", "_", words).strip("_")
                name += f"-{number:03d}" + f"-{word}" * (len(word) <= 40)
            out[recipe.digest()] = Row(label, recipe.override(name=name))
        return list(out.values())

    @cached_property
    def runs(self) -> list[Recipe]:
        """A recipe for each point and seed."""
        return [run for point in self.points for run in self.of(point)]

    def of(self, point: Row) -> list[Recipe]:
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
        sides = []
        for side in (there, self.settings()):
            grid = {field: values[0] if len(values) == 1 else values for field, values in side.get("grid", {}).items()}
            sides.append({**side.get("recipe", {}), **grid, "seeds": side.get("seeds"), "every": side.get("every")})
        return differences(*sides)

    def axis(self) -> Cost:
        """The cost to look at unless another is asked for: what the recipes bound, if it is one, else `params`."""
        bounded = {"params" if r.at_most is None or r.cost == "latency" else r.cost for r in self.runs}
        return bounded.pop() if len(bounded) == 1 else "params"


def stored(out: Path) -> tuple[Sweep, Record]:
    """The sweep in a folder, and what has come out of it so far; a CampaignError where there is none to be read."""
    record = campaign(out).read()
    try:
        return Sweep.from_settings(record), record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        file = str(out / _HEAD)
        raise CampaignError(f"{file!r} is damaged ({type(error).__name__}: {error}); `--fresh` begins again") from error


def run(
    sweep: Sweep,
    load: Loader,  # gives the data set of a name, on the device to train on
    out: Path,
    *,
    resume: bool = True,  # whether to go on with the sweep that the folder holds
    fresh: bool = False,  # remove the sweep that the folder holds when the new one can begin
    at_once: int | None = None,  # runs in a stack at most; what `campaign.room` says if absent
    cost: Cost | None = None,  # that the front is about; `Sweep.axis` if absent
    about: Mapping[str, Any] | None = None,  # more to store about where the results come from
    watchers: Sequence[AbstractWatcher] = (),
    say: Say = lambda _: None,
) -> Record:
    """Trains what is left of a sweep, finds its front, and gives what is in sweep.json then. A run that diverges has no
    place on the front; a recipe that does not fit its network or its data is refused before anything is trained.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"`at_once` must be at least 1, got {at_once}")
    folder = campaign(out)
    there = folder.holds(sweep.differences, resume=resume, fresh=fresh)
    work = folder.work(sweep.runs, load, fresh=fresh, at_once=at_once, say=say)
    work.refuse_unfit()
    if fresh:
        folder.clear()
    where = next((data.device for data in work.data.values()), torch.device("cpu"))
    sources = folder.read()["about"] if there else {**provenance(where), **(about or {})}

    def note() -> Record:
        return folder.write({**sweep.settings(), **_outcome(sweep, folder, sources, cost or sweep.axis())})

    record = note()
    title = f"{counted(len(sweep.points), 'point')} × {counted(sweep.seeds, 'seed')}"
    for _ in folder.train(work, title=title, every=sweep.every, watchers=watchers, say=say):
        record = note()
    return record


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
        entry: Record = {"label": point.label, "values": sweep.values(point.recipe), "recipe": point.recipe.to_dict()}
        entry |= {"runs": runs, "finished": len(runs) + len(notes) == sweep.seeds, "diverged": notes, "front": None}
        if runs:
            entry["mean"] = _mean(runs)
            # Without a residual path around a layer that has nothing left, there is no compact network.
            empty = any(0 in run.get("architecture", {}).values() for run in runs)
            entry["emptied"] = empty and not point.recipe.facts.residual
        points.append(entry)
    finished, front = all(p["finished"] for p in points), None
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
    title = f"{record['recipe']['name']}, {counted(record['seeds'], 'seed')}"
    in_percent = Recipe.from_dict(record["recipe"]).in_percent
    unit, digits = (" %", ".2f") if in_percent else ("", ".4g")
    right = (f"best{unit}", f"last{unit}", "density expected", "kept", "parameters", "MACs", "front")
    out = new_table(title, varied or ["recipe"], right)
    for point in record["points"]:
        left = [in_words(point["values"][field]) for field in varied] or [record["recipe"]["name"]]
        if not point["runs"]:
            out.add_row(*left, *["diverged" if point["diverged"] else "–"] * 2, *["–"] * 4, "")
            continue
        note = "*" if point["front"] else ""
        if point["diverged"]:
            note = f"{len(point['diverged'])} diverged"
        elif point["emptied"]:
            note = "layer empty"
        out.add_row(*left, *cells(point["runs"], digits), note)
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
    theirs = figures.published(network, axis) if len(kinds) == 1 and data == "mnist" else []
    title = record["recipe"]["name"] + f", means over {record['seeds']} seeds" * (record["seeds"] > 1)
    recipe = Recipe.from_dict(good[0]["recipe"])
    error = figures.PERCENT if recipe.in_percent else f"test {recipe.error}"
    return figures.pareto(points, out / _FIGURE, cost=axis, title=title, published=theirs, error=error)
