"""Finds finished runs in folders: single runs, stacks, sweeps, reproductions, their records, and folders above them.

What is no finished run is noted with a reason. How a run was trained, and what is made of many, is not known here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from ellzero.experiments import networks, sweep
from ellzero.experiments.campaign import CampaignError, diverged
from ellzero.experiments.recipe import Recipe, in_words
from ellzero.experiments.store import records
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.out.reporting import MANY
from ellzero.out.tables import families, span

Cost = Literal["params", "macs", "l0_norm"]
COSTS: dict[Cost, str] = {"params": "parameters", "macs": "MACs", "l0_norm": "density"}
ERRORS = {"error_last": "at the end of training", "error_best": "the best during training"}
DEEP = 6  # folders below one that was given, in which runs are looked for
_MARKS = ("run.json", "sweep.json", "study.json")
_DAMAGE = (FolderError, ValueError, KeyError, TypeError, AttributeError)  # what data raise that are not as they should


def page_file(folder: Folder, index: int = 0) -> Path:
    """Where the page of a run is: page.html in its folder, with the number of the run (from 0) in a stack."""
    return folder.path / ("page.html" if len(folder.recipes) == 1 else f"page-{index}.html")


class Finished(NamedTuple):
    """A finished run."""

    recipe: Recipe  # with its seed
    name: str  # of the recipe; of a sweep's run, that of the recipe that the sweep begins with
    where: Path  # the folder or file that it was found in
    errors: dict[str, float]  # in percent, by their names in `ERRORS`
    kept: dict[Cost, float]  # fractions of the dense cost that the compact network has
    expected: dict[Cost, float]  # the same as expectations over the gates
    dense: dict[Cost, float]  # what the dense network costs; empty for a run without gates, which does not store it
    architecture: dict[str, int]  # units kept by placement; empty for a run without gates
    page: Path | None = None  # its own, if there is one
    varied: Mapping[str, Any] = {}  # of a sweep's run, the fields that vary in it
    link: str = ""  # to its page, from the page that compares it

    @property
    def emptied(self) -> bool:
        """Whether a layer has nothing left and no residual path carries on: there is no compact network then."""
        return 0 in self.architecture.values() and not networks.find(self.recipe.network).residual

    @property
    def units(self) -> str:
        """What is left in each place, as the papers print it; of many, those of repeated layers together."""
        if len(self.architecture) <= MANY:
            return "-".join(map(str, self.architecture.values())) or "dense"
        found = families(self.architecture, str)
        return ", ".join(f"{span(some)} {'-'.join(str(self.architecture[name]) for name in some)}" for some in found)


class Note(NamedTuple):
    """Something that is no finished run: where it is, and why."""

    where: Path
    why: str


def collect(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Finished], list[Note]]:
    """The finished runs in some folders, in the order in which they were found, and notes of what else is there.

    Paths are those of runs, stacks, sweeps and reproductions, of folders above such ones, and of records of a
    reproduction (`RECIPE.json`); what is in two of them counts once. Noted are runs that are not finished, folders that
    are damaged or hold no run, and runs of a sweep or a reproduction that were not begun.
    """
    search = _Search()
    for path in paths:
        search.look(Path(path))
    return search.runs, search.notes


def label(name: str, values: Mapping[str, Any]) -> str:
    """A recipe's name, and the fields by which it is told from others."""
    return ", ".join([name, *(f"{key}={in_words(value)}" for key, value in values.items())])


_Name = tuple[str, Mapping[str, Any]]  # of a run: `Finished.name` and `Finished.varied`


@final
class _Search:
    def __init__(self) -> None:
        self.runs: list[Finished] = []
        self.notes: list[Note] = []
        self.seen: dict[Path, list[str]] = {}  # what was looked at, and the digests of the recipes there

    def note(self, where: Path, why: object) -> None:
        self.notes.append(Note(where, str(why)))

    def look(self, path: Path, depth: int = 0, names: Mapping[str, _Name] = {}) -> bool:
        """Takes what is at a path; whether there was anything to take or to note. Runs may have names, by digest."""
        try:
            real = path.resolve()
            if real in self.seen:
                return True
            self.seen[real] = []
            if not path.exists():
                self.note(path, "there is nothing of this name")
            elif path.is_file():
                self.records([path], set())
            elif (path / "run.json").exists():
                self.seen[real] = self.folder(path, names)
            elif (path / "sweep.json").exists():
                self.campaign(path, [])
            elif (stored := _records(path)) or (path / "study.json").exists():
                self.campaign(path, stored)
            else:
                homes = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
                found = [self.look(home, depth + 1) for home in homes] if depth < DEEP else []
                if depth == 0 and not any(found):
                    files = "`run.json`, `sweep.json` or `study.json`"
                    self.note(path, f"it holds no run: there is no {files} in it or below it")
                return any(found)
        except (OSError, RuntimeError) as error:  # of resolve(), for a loop of links, in older Pythons
            self.note(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")
        return True

    def folder(self, path: Path, names: Mapping[str, _Name]) -> list[str]:
        """A run or a stack; the digests of its recipes."""
        try:
            folder = Folder.open(path)
            results = folder.results()
        except FolderError as error:
            self.note(path, error)
            return []
        digests = [recipe.digest() for recipe in folder.recipes]
        if results is None:
            self.note(path, _unfinished(folder))
        for index, (recipe, digest, result) in enumerate(zip(folder.recipes, digests, results or (), strict=False)):
            page = page_file(folder, index)
            self.take(recipe, names.get(digest, (recipe.name, {})), path, result, page if page.is_file() else None)
        return digests

    def take(self, recipe: Recipe, name: _Name, where: Path, result: Any, page: Path | None = None) -> None:
        """A run, from an entry of results.json or of a record's seeds."""
        try:
            span = (100.0, 0.0) if recipe.in_percent else (math.inf, -math.inf)
            errors = {error: _number(result[error], error, *span) for error in ERRORS}
            kept = expected = dict.fromkeys(COSTS, 1.0)  # a run without gates stores no costs
            dense: dict[Cost, float] = {}
            if recipe.placement is not None:
                kinds = (("kept", 1.0), ("expected", 1.0), ("dense", math.inf))
                costs = result["costs"]
                kept, expected, dense = (
                    {c: _number(costs[c][k], f"{k} {c}", most) for c in COSTS} for k, most in kinds
                )
            units = {str(key): int(units) for key, units in result.get("architecture", {}).items()}
            self.runs.append(Finished(recipe, name[0], where, errors, kept, expected, dense, units, page, name[1]))
        except _DAMAGE as error:
            self.note(where, f"the results of {label(*name)}, seed {recipe.seed}, are damaged: {_said(error)}")

    def campaign(self, path: Path, files: Sequence[Path]) -> None:
        """The stacks of a sweep or a reproduction, then what only its records have, then what is missing."""
        names, home, there = self.asked(path), path / "stacks", set[str]()
        for stack in sorted(home.iterdir()) if home.is_dir() else []:
            if (stack / "run.json").exists():
                self.look(stack, names=names)
                there.update(self.seen[stack.resolve()])
        self.records(files, there)
        left = [label(*name) for digest, name in names.items() if digest not in there]
        if left:
            some = list(dict.fromkeys(left))
            words = ", ".join(some[:5]) + (f" and {len(some) - 5} more" if len(some) > 5 else "")
            self.note(path, f"{len(left)} of {len(names)} runs were not begun, or their folder is damaged: {words}")

    def asked(self, path: Path) -> dict[str, _Name]:
        """The runs that a sweep or a reproduction was asked for, by digest."""
        file = path / "study.json"
        try:
            if (path / "sweep.json").exists():
                grid, _ = sweep.stored(path)
                return {run.digest(): (grid.recipe.name, grid.values(run)) for run in grid.runs}
            if file.exists():
                settings = records.read(file)["settings"]
                recipes, seeds = [Recipe.from_dict(values) for values in settings["recipes"]], range(settings["seeds"])
                if not recipes:
                    self.note(path, "it is a study that trains nothing")
                return {r.override(seed=seed).digest(): (r.name, {}) for r in recipes for seed in seeds}
        except CampaignError as error:
            self.note(path, error)
        except _DAMAGE as error:
            self.note(file, f"it is damaged: {_said(error)}")
        return {}

    def records(self, files: Sequence[Path], there: set[str]) -> None:
        """The runs in records of a reproduction whose digests are not there already; adds theirs."""
        new = set[str]()
        for file in files:
            try:
                record = records.read(file)
                recipe = Recipe.from_dict(record["recipe"])
                runs = [(recipe.override(seed=seed["seed"]), seed) for seed in record["seeds"]]
            except _DAMAGE as error:
                self.note(file, f"it is no record of a reproduction: {_said(error)}")
                continue
            for own, seed in runs:
                if own.digest() not in there:
                    self.take(own, (own.name, {}), file, seed)
                    new.add(own.digest())
        there |= new


def _records(path: Path) -> list[Path]:
    """Files that look like records of a reproduction; what is wrong with them is found out later. Those of the arena,
    which compare with nothing published, have a table of their own.
    """
    out = []
    for file in sorted(path.glob("*.json")):
        try:
            content = {} if file.name in _MARKS else records.read(file)
        except FolderError:
            continue
        if isinstance(content, dict) and {"published", "recipe", "seeds", "row"} <= content.keys():
            out.append(file)
    return out


def _unfinished(folder: Folder) -> str:
    """Why there are no results, and how far it is."""
    names = ", ".join(dict.fromkeys(r.name for r in folder.recipes))
    try:
        if (why := diverged(folder)) is not None:
            return f"{names}: {why}"
    except FolderError:
        return f"{names}: it diverged"
    try:
        history = folder.history()
    except FolderError as error:
        return f"{names} is not finished, and its history is damaged: {error}"
    if not history:
        return f"{names} is not finished: no epoch has been evaluated"
    recipe = folder.recipes[0]
    return f"{names} is not finished: epoch {history[-1].get('epoch')} of {recipe.epochs + recipe.finetune_epochs}"


def _number(value: Any, name: str, most: float, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most * (1 + 1e-6):
        raise ValueError(f"`{name}` must be a number from 0 to {most:g}, got {value!r}")
    return min(float(value), most)


def _said(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)
