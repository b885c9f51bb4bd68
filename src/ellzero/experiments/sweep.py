"""Sweeps: a grid of recipe fields × seeds, trained in stacks, and the Pareto front of error against cost.

A sweep lies in a folder:

    sweep.json          what was asked for, and what has come out so far
    stacks/NAME/        a run folder for each stack, so that a sweep that was killed goes on where it was
    pareto.png, .svg    error against what is kept

What is on the disk decides what is left to do, run by run: how many runs are trained together may change when a sweep
goes on. This file does not know how a stack is trained, nor how a figure looks.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, cast, final

import torch
from rich.table import Table
from torch import Tensor, nn

from ellzero.experiments import figures
from ellzero.experiments.data import Dataset, scaled
from ellzero.experiments.recipe import Recipe, from_strings, refuse_idle
from ellzero.experiments.reproduce import AT_ONCE, interval, new_table, stack_name, stacks
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder, FolderError, refuse_busy
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.train import building
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.lagrangian import COSTS, targets
from ellzero.experiments.train.trainer import STACKABLE, DivergedError, Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.out.files import write_text
from ellzero.out.finalization import refuse_unreachable

FORMAT, FORMAT_VERSION = "ellzero.sweep", 1
ON_A_CPU = 8  # runs in a stack: LeNet-5 takes two thirds of the time of runs one by one, more gains nothing
_SWEEP, _STACKS, _FIGURE, _DIVERGED = "sweep.json", "stacks", "pareto", "diverged.json"

Cost = Literal["l0_norm", "params", "macs"]
Record = dict[str, Any]
Loader = Callable[[str], Dataset]


@final
class SweepError(Exception):
    """A folder is not that of this sweep, or is damaged; the message says which."""


# ---------------------------------------------------------------- the front


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats: none is as good in both numbers and better in one. By rising first number.

    Sorted once and looked through once. Points that are equal in both numbers are on the front together.

    Args:
        points: two numbers each, both the better the less they are, such as cost and error.

    Returns:
        Their positions.

    Raises:
        ValueError: a number is not finite.

    Example:
        >>> pareto([(0.4, 1.8), (0.2, 2.0), (0.3, 1.5), (0.3, 1.6)])
        [1, 2]
    """
    for point in points:
        if not all(map(math.isfinite, point)):
            raise ValueError(f"`points` must be finite numbers, got {point}")
    out: list[int] = []
    for at in sorted(range(len(points)), key=lambda k: points[k]):
        if not out or points[at][1] < points[out[-1]][1] or points[at] == points[out[-1]]:
            out.append(at)
    return out


# ---------------------------------------------------------------- the grid


def values_of(field: str, text: str) -> list[Any]:
    """The values in a list with commas; a comma inside brackets, braces or quotes belongs to its value.

    Args:
        field: of a recipe; "-" may stand for "_".
        text: values as `recipe.from_strings` reads them, with commas between.

    Raises:
        ValueError: there is no such field, a value is empty, or a bracket or a quote is not closed.

    Example:
        >>> values_of("at-most", '0.1, {"fc1" = 0.2, "fc2" = 0.3}, none')
        [0.1, {'fc1': 0.2, 'fc2': 0.3}, None]
        >>> values_of("milestones", "[60, 120], [80]")
        [[60, 120], [80]]
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
class Point:
    """One point of a grid.

    Args:
        values: of the fields that vary, as plain data.
        recipe: of its first seed.
    """

    values: dict[str, Any]
    recipe: Recipe

    @property
    def label(self) -> str:
        """Its values in words, such as "at_most=0.1"; the recipe's name where nothing varies."""
        return ", ".join(f"{k}={in_words(v)}" for k, v in self.values.items()) or self.recipe.name


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
    def points(self) -> list[Point]:
        """All combinations, the last field varying fastest."""
        out: list[Point] = []
        seen: dict[str, Point] = {}
        for number, combination in enumerate(itertools.product(*self.grid.values()), 1):
            values = dict(zip(self.grid, combination, strict=True))
            try:
                recipe = self.recipe.override(**values)
                refuse_idle(recipe, values)
            except ValueError as error:
                raise ValueError(str(error) + self._where(values)) from error
            plain = recipe.to_dict()
            point = Point({field: plain[field] for field in self.varied}, recipe)
            same = seen.setdefault(recipe.digest(), point)
            if same is not point:
                raise ValueError(f"the grid has {point.label} twice: leave one out")
            out.append(Point(point.values, recipe.override(name=self._name(recipe.name, point.values, number))))
        return out

    def _where(self, values: Mapping[str, Any]) -> str:
        """Which combination, if that is not plain from the values that are wrong."""
        words = ", ".join(f"{k}={in_words(v)}" for k, v in values.items() if k in self.varied)
        return f" (at {words})" if len(self.varied) > 1 else ""

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
        return [p.recipe.override(seed=p.recipe.seed + k) for p in self.points for k in range(self.seeds)]

    def settings(self) -> dict[str, Any]:
        """All that decides what comes out, as what JSON knows."""
        plain = [p.recipe.to_dict() for p in self.points]
        grid = {field: list({json.dumps(r[field]): r[field] for r in plain}.values()) for field in self.grid}
        if "name" in grid:
            grid["name"] = list(self.grid["name"])  # the points' own are made from it
        return {"recipe": self.recipe.to_dict(), "grid": grid, "seeds": self.seeds, "every": self.every}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The sweep that has these settings.

        Raises:
            ValueError: they are those of no sweep.
        """
        return cls(Recipe.from_dict(settings["recipe"]), settings["grid"], settings["seeds"], settings["every"])

    def axis(self) -> Cost:
        """The cost to look at unless another is asked for: what the recipes bound, if it is one, else `params`."""
        bounded = {r.cost if r.at_most is not None else "params" for r in self.runs}
        return bounded.pop() if len(bounded) == 1 else "params"


def in_words(value: Any) -> str:
    """A field's value as short text.

    Example:
        >>> in_words({"fc1": 0.2}), in_words(None), in_words([60, 120])
        ('{fc1: 0.2}', 'none', '[60, 120]')
    """
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{key}: {in_words(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(in_words, value)) + "]"
    return str(value)


# ---------------------------------------------------------------- how many at once


def room(recipe: Recipe, dataset: Dataset) -> int:
    """How many runs of a recipe are trained together, unless asked for otherwise.

    On a GPU as many as fit by `memory`, up to 64; on a CPU 8, where more gain nothing; 1 for networks with batch norm
    and for augmentation, which cannot share a stack.

    Args:
        recipe: of one of the runs.
        dataset: on the device to train on.

    Example:
        >>> from ellzero.experiments.data import stand_in
        >>> from ellzero.experiments.papers import get
        >>> data = stand_in("mnist5k", images=8)
        >>> room(get("demo"), data), room(get("demo").override(augment=True), data)
        (8, 1)
    """
    if recipe.augment or recipe.network.startswith("wrn"):
        return 1
    device = dataset.train_x.device
    if device.type != "cuda":
        return ON_A_CPU
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, and not in use
    each, once = memory(recipe, dataset)
    return max(1, min(AT_ONCE, int((0.9 * free - once) / each)))


def memory(recipe: Recipe, dataset: Dataset) -> tuple[int, int]:
    """An estimate of the bytes that training takes: for each run of a stack, and once for all of them.

    A run has its weights, their gradients, what the optimizer remembers, the average with a copy of it that evaluation
    makes, and the gated weights with theirs; the activations of a step and their gradients, twice, since a captured
    step has memory of its own; those of the test images that are looked at together; and the noise of an epoch. The
    training images as numbers are there once, and a gigabyte for libraries.

    Args:
        recipe: of one of the runs.
        dataset: that it is trained on.
    """
    with torch.random.fork_rng(devices=[]):
        model = building.network(recipe, len(dataset.classes))
    parameters = list(model.parameters())
    copies = 4 + (2 if recipe.optimizer == "adam" else 1)
    copies += (2 if recipe.ema is not None else 0) + (4 if recipe.extra_gradient else 0)
    image = activations(model, scaled(dataset.train_x[:2].cpu()))
    count = len(dataset.train_x)
    draws = recipe.samples * (2 if recipe.extra_gradient else 1)
    units = sum(sum(p.shape[:2]) for p in parameters if p.dim() > 1)  # gates on all that a weight reads or writes
    each = 4 * copies * sum(p.numel() for p in parameters)
    each += 2 * 2 * image * recipe.batch * recipe.samples
    each += image * min(len(dataset.test_x), 10_000)
    each += 2 * (count // recipe.batch) * draws * units * 4 + 2 * 8 * count
    return each, 4 * dataset.train_x.numel() + 2**30


def activations(model: nn.Module, images: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, for each image: all but the parameters.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> activations(net, torch.zeros(5, 2, 3)) == 4 * (6 + 4)  # the input, and the output of the ReLU
        True
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}  # tensors and not sizes: a place that is free again would be given to the next one

    def keep(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    total = sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in own)
    return math.ceil(total / len(images))


# ---------------------------------------------------------------- the folder


def state(sweep: Sweep, out: Path) -> Literal["new", "there"]:
    """Whether a folder is free for a sweep, or holds this one already, finished or not.

    Raises:
        SweepError: it holds a sweep with other settings, or something else, or is damaged.
    """
    if not (out / _SWEEP).exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SweepError(f"`--out` must be a new or empty folder, and {str(out)!r} holds something else")
        return "new"
    differ = _differences(_read(out), sweep.settings())
    if differ:
        raise SweepError(
            f"{str(out)!r} holds a sweep with other settings ({'; '.join(differ)}): give another folder by `--out`, "
            f"or `--fresh` to begin again"
        )
    return "there"


def stored(out: Path) -> tuple[Sweep, Record]:
    """The sweep in a folder, and what has come out of it so far.

    Raises:
        SweepError: there is none, or it is damaged.
    """
    if not (out / _SWEEP).exists():
        raise SweepError(f"there is no sweep in {str(out)!r}")
    record = _read(out)
    try:
        return Sweep.from_settings(record), record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SweepError(_damaged(out, error)) from error


def clear(out: Path) -> None:
    """Removes a sweep from its folder, and nothing else that lies there.

    Raises:
        SweepError: the folder holds something else.
        FolderError: another process trains there.
    """
    _refuse_other(out)
    if not (out / _SWEEP).exists():
        return
    refuse_busy(out / _STACKS)
    shutil.rmtree(out / _STACKS, ignore_errors=True)
    for ending in ("png", "svg", "txt"):
        (out / f"{_FIGURE}.{ending}").unlink(missing_ok=True)
    (out / _SWEEP).unlink()  # last: what is left after a crash is still known for a sweep


def _refuse_other(out: Path) -> None:
    if not (out / _SWEEP).exists() and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SweepError(f"`--fresh` must be given a sweep's folder, and {str(out)!r} holds something else")


def _read(out: Path) -> Record:
    try:
        record = json.loads((out / _SWEEP).read_text(encoding="utf-8"))
        version = record["format"], record["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise SweepError(_damaged(out, error)) from error
    if version != (FORMAT, FORMAT_VERSION):
        raise SweepError(f"{str(out / _SWEEP)!r} must be of format {FORMAT} {FORMAT_VERSION}, got {version}")
    return cast("Record", record)


def _damaged(out: Path, error: Exception) -> str:
    return f"{str(out / _SWEEP)!r} is damaged ({type(error).__name__}: {error}); `--fresh` begins again"


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words; as JSON, so that the order of patterns counts."""
    out = []
    for part in ("recipe", "grid"):
        old, new = dict(there.get(part) or {}), here[part]
        for field in dict.fromkeys((*old, *new)):
            if json.dumps(old.get(field)) != json.dumps(new.get(field)) or (field in old) != (field in new):
                a, b = (_listed(side.get(field), part) if field in side else "its own" for side in (old, new))
                out.append(f"`{field}` {a} and not {b}")
    out += [f"`{k}` {there.get(k)} and not {here[k]}" for k in ("seeds", "every") if there.get(k) != here[k]]
    return out


def _listed(value: Any, part: str) -> str:
    return ",".join(map(in_words, value)) if part == "grid" else in_words(value)


# ---------------------------------------------------------------- doing it


def run(
    sweep: Sweep,
    load: Loader,
    out: Path,
    *,
    fresh: bool = False,
    at_once: int | None = None,
    cost: Cost | None = None,
    about: Mapping[str, Any] | None = None,
    watchers: Sequence[AbstractWatcher] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Record:
    """Trains what is left of a sweep, and finds its front.

    Runs that are finished are not trained again, and a stack that is not goes on from its newest checkpoint. A run
    whose loss is not a number any more is noted and has no place on the front; those that were trained together with it
    are trained again without it.

    Args:
        sweep: what to train.
        load: gives the data set of a name, on the device to train on.
        out: the folder.
        fresh: begin again, and remove the sweep that the folder holds when nothing stands in the way of the new one.
        at_once: runs in a stack at most; what `room` says if absent. A stack that was begun with more is begun again.
        cost: that the front is about; `Sweep.axis` if absent.
        about: more to store about where the results come from.
        watchers: that show each stack's progress.
        say: told a line about each stack.

    Returns:
        What is in sweep.json then.

    Raises:
        ValueError: a recipe does not fit its network or its data; nothing is trained then.
        SweepError: `out` holds something else.
        FolderError: another process trains there.
        training.Stopped: Ctrl-C; what was done is saved.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"`at_once` must be at least 1, got {at_once}")
    axis = sweep.axis() if cost is None else cost
    if fresh:
        _refuse_other(out)
    new = fresh or state(sweep, out) == "new"
    wanted = {recipe.digest(): recipe for recipe in sweep.runs}
    begun, left = _found(out, wanted, at_once, say) if not fresh else ([], list(wanted.values()))
    groups = stacks(left, len(left) or 1)
    names = dict.fromkeys(recipe.data for stack in (*(f.recipes for f in begun), *groups) for recipe in stack)
    data: dict[str, Dataset] = {name: load(name) for name in names}
    _refuse_unfit(left, data)
    if fresh:
        clear(out)
    if new:
        out.mkdir(parents=True, exist_ok=True)
    where = next(iter(data.values())).train_x.device if data else torch.device("cpu")
    sources = {**provenance(where), **(about or {})} if new else _read(out)["about"]

    def note() -> Record:
        record = _record(sweep, out, sources, axis)
        _write(out / _SWEEP, record)
        return record

    if not new and not data:
        return note()  # all done before
    note()
    jobs: list[Folder | list[Recipe]] = [*begun]
    for group in groups:
        jobs += stacks(group, at_once or room(group[0], data[group[0].data]))
    before = len(wanted) - len(left) - sum(len(f.recipes) for f in begun)
    say(
        f"{len(sweep.points)} point{'s' * (len(sweep.points) > 1)} × {sweep.seeds} seed{'s' * (sweep.seeds > 1)}: "
        f"{len(wanted)} runs, {before} done before, the others in {len(jobs)} stack{'s' * (len(jobs) > 1)}"
    )
    while jobs:
        job = jobs.pop(0)
        stack = job.recipes if isinstance(job, Folder) else job
        say(f"{len(stack)} run{'s together' * (len(stack) > 1)}: {', '.join(dict.fromkeys(r.name for r in stack))}")
        dataset = data[stack[0].data]
        folder = job if isinstance(job, Folder) else _folder(out, stack, dataset)
        try:
            training.train(stack, dataset, folder, every=sweep.every, watchers=watchers)
        except DivergedError as error:
            if len(stack) > 1:
                say(f"{error}; the {len(stack)} runs are trained one by one now")
                shutil.rmtree(folder.path)
                jobs = [*([recipe] for recipe in stack), *jobs]
            else:
                say(str(error))
                _write(folder.path / _DIVERGED, str(error))
        note()
    return note()


def _found(
    out: Path, wanted: Mapping[str, Recipe], at_once: int | None, say: Callable[[str], None]
) -> tuple[list[Folder], list[Recipe]]:
    """The stacks that were begun and go on, and the runs that no stack has. Stacks without a checkpoint are removed."""
    begun: list[Folder] = []
    known: set[str] = set()
    for folder in _folders(out):
        digests = [recipe.digest() for recipe in folder.recipes]
        if not set(digests) <= wanted.keys():
            raise FolderError(f"{str(folder.path)!r} must hold runs of this sweep, and holds others")
        if folder.results() is None and not (folder.path / _DIVERGED).exists():
            too_many = at_once is not None and len(digests) > at_once
            if too_many:
                say(f"{folder.path.name} was begun with {len(digests)} runs together, and is begun again with fewer")
            if too_many or not checkpoint.steps(folder.checkpoints):
                with folder.locked():  # another process may be about to write its first checkpoint
                    shutil.rmtree(folder.path)
                continue
            begun.append(folder)
        known |= set(digests)
    return begun, [recipe for digest, recipe in wanted.items() if digest not in known]


def _folders(out: Path) -> list[Folder]:
    homes = sorted((out / _STACKS).iterdir()) if (out / _STACKS).is_dir() else []
    return [Folder.open(home) for home in homes if (home / "run.json").exists()]


def _folder(out: Path, stack: Sequence[Recipe], dataset: Dataset) -> Folder:
    return Folder.create(out / _STACKS / stack_name(stack), stack, provenance(dataset.train_x.device))


def _refuse_unfit(recipes: Sequence[Recipe], data: Mapping[str, Dataset]) -> None:
    """Finds out before anything is trained what training would find out at its beginning, or only at its end: patterns
    that match nothing, batches larger than the data, targets that closing units cannot reach.
    """
    networks: dict[str, nn.Module] = {}  # one for all recipes that differ in numbers and seeds alone
    bounds: set[str] = set()
    for recipe in recipes:
        fields = {k: v for k, v in recipe.to_dict().items() if k not in STACKABLE}
        patterns = [list(v) if isinstance(v, dict) else v is None for v in (recipe.at_most, recipe.penalty)]
        shape = json.dumps([fields, patterns, recipe.cost, recipe.init])
        if shape not in networks:
            networks[shape] = Trainer([recipe], data[recipe.data]).network(0)
        bound = json.dumps([shape, list(targets(recipe).items())])
        if recipe.projects and recipe.at_most is not None and bound not in bounds:
            bounds.add(bound)
            refuse_unreachable(cast("Any", networks[shape]), recipe.at_most, COSTS[recipe.cost])


# ---------------------------------------------------------------- what came out


def _record(sweep: Sweep, out: Path, about: Mapping[str, Any], axis: Cost) -> Record:
    results: dict[str, Record] = {}
    diverged: dict[str, str] = {}
    trained = []
    for folder in _folders(out):
        name, found = folder.path.name, folder.results()
        if (folder.path / _DIVERGED).exists():
            diverged[folder.recipes[0].digest()] = json.loads((folder.path / _DIVERGED).read_text(encoding="utf-8"))
        for index, (recipe, result) in enumerate(zip(folder.recipes, found or [], strict=False)):
            rest = {k: v for k, v in result.items() if k not in ("recipe", "seconds")}
            results[recipe.digest()] = {**rest, "stack": name, "index": index}
        if found:
            trained.append({"stack": name, "runs": len(found), "seconds": found[0]["seconds"], "about": folder.about})
    points = []
    for point in sweep.points:
        own = [point.recipe.override(seed=point.recipe.seed + k).digest() for k in range(sweep.seeds)]
        runs = [results[digest] for digest in own if digest in results]
        notes = [diverged[digest] for digest in own if digest in diverged]
        entry: Record = {"label": point.label, "values": point.values, "recipe": point.recipe.to_dict(), "runs": runs}
        entry |= {"finished": len(runs) + len(notes) == sweep.seeds, "diverged": notes, "front": None}
        if runs:
            entry["mean"] = _mean(runs)
            entry["emptied"] = point.recipe.network.startswith("lenet") and any(map(_is_empty, runs))
        points.append(entry)
    finished = all(p["finished"] for p in points)
    front: list[int] | None = None
    if finished:
        # What has no result, or is no network that could be handed over, beats nothing.
        valid = [k for k, p in enumerate(points) if p["runs"] and not p["diverged"] and not p["emptied"]]
        spots = [(points[k]["mean"]["kept"][axis], points[k]["mean"]["error_last"]) for k in valid]
        front = [valid[k] for k in pareto(spots)]
        for k, p in enumerate(points):
            p["front"] = k in front
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **sweep.settings(),
        "about": dict(about),
        "finished": finished,
        "cost": axis,
        "points": points,
        "front": front,  # positions in points, by rising cost
        "stacks": trained,
    }


def _mean(runs: Sequence[Record]) -> Record:
    """Means over seeds, errors with half their 95 % interval; the costs are fractions of dense."""
    out: Record = {}
    for name in ("error_best", "error_last"):
        mean, half = interval([r[name] for r in runs])
        out |= {name: mean, f"{name}_interval": None if math.isnan(half) else half}
    for kind in ("expected", "kept"):
        out[kind] = {c: statistics.fmean(r["costs"][c][kind] if "costs" in r else 1.0 for r in runs) for c in COSTS}
    return out


def _is_empty(run: Record) -> bool:
    """Whether a layer of a LeNet has nothing left: no residual path carries on, and there is no compact network."""
    return "architecture" in run and 0 in run["architecture"].values()


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
        cells = [_error(mean, name) for name in ("error_best", "error_last")]
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


def _error(mean: Record, name: str) -> str:
    half = mean[f"{name}_interval"]
    return f"{mean[name]:.2f}" if half is None else f"{mean[name]:.2f} ± {half:.2f}"


def draw(record: Record, out: Path) -> list[Path]:
    """Draws error against kept cost into the sweep's folder, on MNIST with the papers' networks beside ours.

    Returns:
        The files; none where no point has a network.

    Raises:
        figures.PlotsMissingError: matplotlib is not installed.
    """
    axis: Cost = record["cost"]
    good = [p for p in record["points"] if p["runs"] and not p["diverged"] and not p["emptied"]]
    good = [p for p in good if p["mean"]["kept"][axis] > 0]  # no place on an axis of logarithms
    if not good:
        return []
    points = [figures.Point(min(p["mean"]["kept"][axis], 1.0), p["mean"]["error_last"], p["label"]) for p in good]
    kinds = {(p["recipe"]["network"], p["recipe"]["data"]) for p in good}
    network, data = next(iter(kinds))
    published = figures.published(network, axis) if len(kinds) == 1 and data == "mnist" else []
    means = f", means over {record['seeds']} seeds" if record["seeds"] > 1 else ""
    title = record["recipe"]["name"] + means
    return figures.pareto(points, out / _FIGURE, cost=axis, title=title, published=published)


def _write(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


__all__ = ["Point", "Sweep", "SweepError", "draw", "memory", "pareto", "room", "run", "table", "values_of"]
