"""Finds finished runs in folders: single runs, stacks, sweeps, reproductions, their records, and folders above them.

`collect` gives them as plain data. What is no finished run is noted with a reason. How a run was trained, and what is
made of many, is not known here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from ellzero.experiments import networks, sweep
from ellzero.experiments.campaign import CampaignError, diverged, in_words
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import records
from ellzero.experiments.store.folder import Folder, FolderError

Cost = Literal["params", "macs", "l0_norm"]
COSTS: dict[Cost, str] = {"params": "parameters", "macs": "MACs", "l0_norm": "density"}
ERRORS = {"error_last": "at the end of training", "error_best": "the best during training"}
DEEP = 6  # folders below one that was given, in which runs are looked for
_MARKS = ("run.json", "sweep.json", "study.json")
_DAMAGE = (FolderError, ValueError, KeyError, TypeError, AttributeError)  # what data raise that are not as they should


def page_file(folder: Folder, index: int = 0) -> Path:
    """Where the page of a run is: page.html in its folder, with the number of the run in a stack.

    Args:
        folder: of the run.
        index: which run of a stack, from 0.
    """
    return folder.path / ("page.html" if len(folder.recipes) == 1 else f"page-{index}.html")


@final
@dataclass(frozen=True)
class Finished:
    """A finished run.

    Args:
        recipe: its recipe, with its seed.
        name: of the recipe; of a sweep's run, that of the recipe that the sweep begins with.
        where: the folder or file that it was found in.
        errors: in percent, by their names in `ERRORS`.
        kept: fractions of the dense cost that the compact network has, by their names in `COSTS`.
        expected: the same as expectations over the gates.
        dense: what the dense network costs; empty for a run without gates, which does not store it.
        architecture: units kept by placement; empty for a run without gates.
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
        return 0 in self.architecture.values() and not networks.find(self.recipe.network).residual


@final
@dataclass(frozen=True)
class Note:
    """Something that is no finished run: where it is, and why."""

    where: Path
    why: str


def collect(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Finished], list[Note]]:
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
                self.take_records([path])
            elif (path / "run.json").exists():
                self.folder(path, {})
            elif (path / "sweep.json").exists():
                self.sweep(path)
            elif (path / "study.json").exists() or _records(path):
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

    def folder(self, path: Path, wanted: Mapping[str, _Name]) -> list[str]:
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
            page = page_file(folder, index)
            name = wanted.get(digest, (recipe.name, {}))
            self.take(recipe, name, path, result, page if page.is_file() else None)
        return digests

    def take(self, recipe: Recipe, name: _Name, where: Path, result: Any, page: Path | None) -> None:
        try:
            self.runs.append(_finished(recipe, name, where, result, page))
        except _DAMAGE as error:
            self.note(where, f"the results of {label(*name)}, seed {recipe.seed}, are damaged: {_said(error)}")

    def sweep(self, path: Path) -> None:
        wanted: dict[str, _Name] = {}
        try:
            grid, _ = sweep.stored(path)
            for point in grid.points:
                for seed in range(grid.seeds):
                    digest = point.recipe.override(seed=point.recipe.seed + seed).digest()
                    wanted[digest] = grid.recipe.name, point.values
        except CampaignError as error:
            self.note(path, error)
        self.stacks(path, wanted, [])

    def reproduction(self, path: Path) -> None:
        wanted: dict[str, _Name] = {}
        file = path / "study.json"
        if file.exists():
            try:
                settings = records.read(file)["settings"]
                for values in settings["recipes"]:
                    recipe = Recipe.from_dict(values)
                    wanted |= {recipe.override(seed=s).digest(): (recipe.name, {}) for s in range(settings["seeds"])}
                if not wanted:
                    self.note(path, "it is a study that trains nothing")
            except _DAMAGE as error:
                self.note(file, f"it is damaged: {_said(error)}")
        self.stacks(path, wanted, _records(path))

    def stacks(self, path: Path, wanted: Mapping[str, _Name], records: Sequence[Path]) -> None:
        """The stacks of a sweep or a reproduction, then what only its records have, then what is missing."""
        home = path / "stacks"
        there: set[str] = set()
        for stack in sorted(home.iterdir()) if home.is_dir() else []:
            if (stack / "run.json").exists():
                real = stack.resolve()
                there.update(self.seen[real] if real in self.seen else self.folder(stack, wanted))
        there.update(self.take_records(records, there))
        left = [label(*name) for digest, name in wanted.items() if digest not in there]
        if left:
            names = list(dict.fromkeys(left))
            words = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self.note(path, f"{len(left)} of {len(wanted)} runs were not begun, or their folder is damaged: {words}")

    def take_records(self, files: Sequence[Path], there: Iterable[str] = ()) -> list[str]:
        """The runs in records of a reproduction that are not there already; their digests."""
        known, taken = set(there), []
        for file in files:
            try:
                record = records.read(file)
                recipe, seeds = Recipe.from_dict(record["recipe"]), list(record["seeds"])
                runs = [(recipe.override(seed=seed["seed"]), seed) for seed in seeds]
            except _DAMAGE as error:
                self.note(file, f"it is no record of a reproduction: {_said(error)}")
                continue
            for own, seed in runs:
                if own.digest() not in known:
                    self.take(own, (own.name, {}), file, seed, None)
                    taken.append(own.digest())
        return taken


def _records(path: Path) -> list[Path]:
    """Files that look like records of a reproduction; what is wrong with them is found out later."""
    out = []
    for file in sorted(path.glob("*.json")):
        try:
            content = {} if file.name in _MARKS else records.read(file)
        except FolderError:
            continue
        if isinstance(content, dict) and {"recipe", "seeds", "row"} <= content.keys():
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


def _finished(recipe: Recipe, name: _Name, where: Path, result: Any, page: Path | None) -> Finished:
    """From an entry of results.json, or of a record's seeds.

    Raises:
        ValueError: a number is missing or makes no sense.
    """
    errors = {error: _number(result[error], error, 100.0) for error in ERRORS}
    dense: dict[Cost, float] = {}
    kept = expected = dict.fromkeys(COSTS, 1.0)  # a run without gates stores no costs
    if recipe.placement is not None:
        costs = result["costs"]
        kept, expected = ({c: _number(costs[c][k], f"{k} {c}", 1.0) for c in COSTS} for k in ("kept", "expected"))
        dense = {c: _number(costs[c]["dense"], f"dense {c}", math.inf) for c in COSTS}
    architecture = {str(key): int(units) for key, units in result.get("architecture", {}).items()}
    return Finished(recipe, name[0], where, errors, kept, expected, dense, architecture, page, name[1])


def _number(value: Any, name: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most * (1 + 1e-6):
        raise ValueError(f"`{name}` must be a number from 0 to {most:g}, got {value!r}")
    return min(float(value), most)


def _said(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)
