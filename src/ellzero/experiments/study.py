"""Published tables and figures, made again: ours beside the papers'. Each study is a file in `reproductions/`.

Its rows are trained as a campaign, of which every row leaves a record, RECIPE.json: recipe, commit, versions, device,
and what came out of every seed. How runs are stacked and taken up again is not known here, nor what a study is about.
"""

from __future__ import annotations

import itertools
import runpy
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast, final

from rich.table import Table

from ellzero.experiments.arena.contest import Contest
from ellzero.experiments.arena.fighting import BOUTS, fight
from ellzero.experiments.campaign import AT_ONCE, Campaign, CampaignError, Loader, Record, Say, counted, diverged
from ellzero.experiments.recipe import Recipe, differences
from ellzero.experiments.recipe.definition import nearest
from ellzero.experiments.store import records as files
from ellzero.experiments.store import rows
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.experiments.store.provenance import in_common, provenance
from ellzero.experiments.store.statistics import with_interval
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.building import targets
from ellzero.experiments.train.evaluation import fractions
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.gated.module import Gated
from ellzero.graph.plan import ClosedAxisError
from ellzero.objectives import costs
from ellzero.out import saving
from ellzero.out.compaction import CompactionError, compact
from ellzero.out.tables import new_table

FIGURES = "figures"  # the folder, beside the records
_STUDY, _CONSTRAINTS = "study.json", "constraints.json"


@final
class StudyError(Exception):
    """There is no such study, row or result; the message says why."""


# ---------------------------------------------------------------- what records say


def table(records: Sequence[Record], title: str) -> Table:
    """Ours beside the paper's, a line per row. The architecture is that of the seed with the median number of
    parameters; the seconds are those of the whole stack that the row was trained in.
    """
    right = ("paper, error %", "best %", "last %", "density expected", "kept", "parameters", "MACs", "seconds")
    out = new_table(title, ("row", "paper", "ours"), right)
    for record in records:
        seeds, published, kept = record["seeds"], record["published"], "dense"
        if all("costs" in s for s in seeds):
            middle = sorted(seeds, key=lambda s: s["costs"]["params"]["kept"])[len(seeds) // 2]
            kept = "-".join(str(n) for n in middle["architecture"].values())
        error = published["error"].replace(" | ", " / ") or "–"
        out.add_row(record["row"], published["architecture"] or "–", kept, error, *cells(seeds), took(record))
    return out


def cells(runs: Sequence[Record], digits: str = ".2f") -> list[str]:
    """Of runs that differ in their seed alone: best and last error with the 95 % interval, density (eq. 16 over its
    dense value) expected and kept, and parameters and MACs of the compact network.
    """
    out = [with_interval([run[name] for run in runs], digits) for name in ("error_best", "error_last")]
    if not all("costs" in run for run in runs):  # without gates
        return [*out, "100.0 %", "100.0 %", "100 %", "100 %"]
    for kind in ("expected", "kept"):
        out.append(f"{100 * statistics.fmean(run['costs']['l0_norm'][kind] for run in runs):.1f} %")
    for cost in ("params", "macs"):
        share = statistics.fmean(run["costs"][cost]["kept"] for run in runs)
        out.append(f"{share * runs[0]['costs'][cost]['dense']:,.0f} ({100 * share:.1f} %)")
    return out


def took(record: Record) -> str:
    """Seconds of the stacks that a row was trained in, and how many runs they had."""
    stacks = dict.fromkeys((s["seconds_of_stack"], s["runs_in_stack"]) for s in record["seeds"])
    seconds, runs = (sum(values) for values in zip(*stacks, strict=True))
    return f"{seconds:.0f} ({counted(runs, 'run')})"


def point_at_end_of_training(seed: Record) -> Record:
    """The last point of a seed's history at which gates were still learning: before `finalize` and fine-tuning."""
    return cast("Record", [h for h in seed["history"] if not h.get("tuning")][-1])


def by_epoch(seeds: Iterable[Record], value: Callable[[Record], float]) -> tuple[list[int], list[list[float]]]:
    """The epochs of a row's histories, and a number at each for every seed."""
    histories = [s["history"] for s in seeds]
    epochs = [[h["epoch"] for h in history] for history in histories]
    if any(e != epochs[0] for e in epochs):
        raise ValueError("`seeds` must have been evaluated at the same epochs")
    return epochs[0], [[value(h) for h in history] for history in histories]


# ---------------------------------------------------------------- studies


@final
@dataclass(frozen=True)
class Row:
    """One row of a published table; what is not published is empty."""

    label: str  # as the paper has it
    recipe: Recipe  # how we run it
    architecture: str = ""  # after pruning
    error: str = ""  # in percent, as printed


@final
@dataclass(frozen=True)
class Study:
    """A published table or figure, and how it is made again: by training rows, or contests of the arena, or computing.

    `compute` makes the records of a study that trains nothing, each with a "name"; `table`, `says` and `draw` make the
    table, sentences below it, and the figures in a folder, from the records alone.
    """

    name: str  # on the command line and in file names
    title: str  # above its table
    rows: tuple[Row, ...] = ()
    seeds: int = 5  # that each row is trained with, unless asked for otherwise
    compute: Callable[[], list[Record]] | None = None
    contests: tuple[Contest, ...] = ()  # of the arena, which has a loop of its own
    says: Callable[[Sequence[Record]], list[str]] | None = None
    table: Callable[[Sequence[Record], str], Table] | None = table
    draw: Callable[[Sequence[Record], Path], list[Path]] | None = None
    keep_networks: bool = False  # the compact network of every run with gates, beside the records

    def __post_init__(self) -> None:
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"`rows` must have recipes of different names, got {', '.join(twice)} more than once")
        data = sorted({row.recipe.data for row in self.rows})
        if len(data) > 1:
            raise ValueError(f"`rows` must have recipes of one data set, got {', '.join(data)}")
        if bool(self.rows) + bool(self.contests) + (self.compute is not None) != 1:
            raise ValueError(f"`{self.name}` must have `rows` or `contests` to train, or something to `compute`")

    @property
    def names(self) -> list[str]:
        """Of all that it trains."""
        return [*(row.recipe.name for row in self.rows), *(contest.name for contest in self.contests)]

    def matching(self, only: str) -> set[str]:
        """The names that match one of the patterns with commas between."""
        wanted = set[str]()
        for pattern in map(str.strip, only.split(",")):
            found = [name for name in self.names if fnmatchcase(name, pattern)]
            if self.names and not found:
                raise StudyError(f"`--only` must match the name of a recipe ({', '.join(self.names)}), got {pattern!r}")
            wanted.update(found)
        return wanted

    def recipes(
        self, *, epochs: int | None = None, data: str | None = None, only: str = "*"
    ) -> list[tuple[Row, Recipe]]:
        """The rows whose name matches one of the patterns with commas between, each with the recipe that is run: with
        these epochs and data instead of its own; fewer epochs shorten the fine-tuning after them alike.
        """
        changes = {name: value for name, value in (("epochs", epochs), ("data", data)) if value is not None}
        wanted = self.matching(only)
        rows = [row for row in self.rows if row.recipe.name in wanted]
        return [(row, row.recipe.override(**changes, **_tuning(row.recipe, epochs))) for row in rows]


def _tuning(recipe: Recipe, epochs: int | None) -> dict[str, int]:
    """Fewer epochs with fixed gates where fewer are asked for with gates that learn, in proportion."""
    if epochs is None or epochs >= recipe.epochs or not recipe.finetune_epochs:
        return {}
    return {"finetune_epochs": max(1, round(recipe.finetune_epochs * epochs / recipe.epochs))}


def studies(folder: Path | None = None) -> dict[str, Study]:
    """All studies of the files of a folder, by default `reproductions/`, by their names; each file has a `STUDY`."""
    found: dict[str, Study] = {}
    for path in sorted((folder or home()).glob("*.py")):
        for study in _within(path, path.stat().st_mtime_ns):
            if study.name in found:
                raise StudyError(f"two files define the study `{study.name}`; one is {path.name}")
            found[study.name] = study
    return found


@lru_cache(256)
def _within(path: Path, changed: int) -> tuple[Study, ...]:
    """The studies of a file, which is run once for each time that it was `changed`; none in a tool beside them."""
    if "STUDY" not in path.read_text(encoding="utf-8"):
        return ()
    made = runpy.run_path(str(path), run_name=f"ellzero_reproductions_{path.stem}").values()
    return tuple(study for study in made if isinstance(study, Study))


def find(name: str, known: dict[str, Study]) -> Study:
    """The study of this name; "_" may stand for "-"."""
    wanted = name.removesuffix(".py").replace("_", "-")
    if wanted in known:
        return known[wanted]
    raise StudyError(f"`{name}` is not the name of a study; {nearest(wanted, known)}")


def home() -> Path:
    """The folder of the studies: inside an installed package, or at the top of the source tree."""
    package = Path(__file__).parents[1]
    for folder in (package / "reproductions", package.parent.parent / "reproductions"):
        if folder.is_dir():
            return folder
    raise StudyError("the studies are missing: there is no folder `reproductions` in this installation")


# ---------------------------------------------------------------- making one again


@final
@dataclass(frozen=True)
class Reproduction:
    """What is asked for: a study, and what is changed in it."""

    study: Study
    seeds: int | None = None  # how many; the study's own number if absent
    epochs: int | None = None
    data: str | None = None
    only: str = "*"  # pattern of the names of the recipes to train, or several with commas between them
    every: int = 1  # evaluate after so many epochs
    at_once: int = AT_ONCE
    first_seed: int = 0  # the others follow: further seeds of a row that takes long, on another occasion

    def __post_init__(self) -> None:
        for name, least in {"seeds": 1, "epochs": 1, "every": 1, "at_once": 1, "first_seed": 0}.items():
            if (number := getattr(self, name)) is not None and number < least:
                raise ValueError(f"`{name}` must be at least {least}, got {number}")
        _ = self.rows, self.contests  # what does not fit is told now

    @property
    def all_seeds(self) -> range:
        """Those that every row is trained with."""
        return range(self.first_seed, self.first_seed + (self.study.seeds if self.seeds is None else self.seeds))

    @cached_property
    def rows(self) -> list[tuple[Row, Recipe]]:
        """The rows with the recipes that are run."""
        return self.study.recipes(epochs=self.epochs, data=self.data, only=self.only)

    @cached_property
    def contests(self) -> list[Contest]:
        """Those of the arena that are fought, with these epochs and data instead of their own."""
        changes: Any = {k: v for k, v in (("epochs", self.epochs), ("data", self.data)) if v is not None}
        names = self.study.matching(self.only)
        return [replace(contest, **changes) for contest in self.study.contests if contest.name in names]

    @cached_property
    def settings(self) -> Record:
        """All that decides what comes out, as what JSON knows; rows and seeds of the arena may come bit by bit."""
        if self.study.contests:
            return {"epochs": self.epochs, "data": self.data}
        recipes = [recipe.to_dict() for _, recipe in self.rows]
        first = {"first_seed": self.first_seed} if self.first_seed else {}
        return {
            "seeds": len(self.all_seeds), **first, "every": self.every, "at_once": self.at_once, "recipes": recipes,
        }  # fmt: skip

    def campaign(self, out: Path) -> Campaign:
        """Its folder."""
        rests = (".json", ".seed*.json", "-seed*.safetensors")
        own = (FIGURES, BOUTS, *(f"{name}{rest}" for name in self.study.names for rest in rests))
        return Campaign(out, _STUDY, "ellzero.reproduction", "reproduction", own)

    def differences(self, head: Record) -> list[str]:
        """Between what the head of a reproduction says and our own settings, in words."""
        sides = [{"recipes": [], **settings} for settings in (head.get("settings", {}), self.settings)]
        before, now = ({r["name"]: r for r in side.pop("recipes")} for side in sides)
        out = differences(*sides)
        if list(before) != list(now):
            changed = sorted(set(before) ^ set(now))
            out.append(f"other rows: {', '.join(changed)}" if changed else "another order of rows")
        fields = [words for name in before if name in now for words in differences(before[name], now[name])]
        return [*out, *dict.fromkeys(fields)]  # rows differ alike, mostly


def reproduce(
    asked: Reproduction,
    load: Loader,
    out: Path,
    *,
    resume: bool = True,
    fresh: bool = False,
    watchers: Sequence[AbstractWatcher] = (),
    say: Say = lambda _: None,
) -> list[Record]:
    """Makes a study, trains every row with every seed or computes it, and gives a record per row.

    With `resume` what is finished is not trained again; with `fresh` it is removed when the new one can begin. `load`
    gives the data set of a name, on the device to train on. Where a run diverges, the rows without it are stored before
    the DivergedError.
    """
    study, campaign = asked.study, asked.campaign(out)
    with suppress(CampaignError):  # there is none, or it is damaged: see below
        name = campaign.read().get("study")
        if name != study.name:
            raise StudyError(f"{str(out)!r} holds the study `{name}`; give another folder by `--out`")
    there = campaign.holds(asked.differences, resume=resume, fresh=fresh)
    seeds = asked.all_seeds
    runs = [recipe.override(seed=seed) for _, recipe in asked.rows for seed in seeds]
    work = campaign.work(runs, load, fresh=fresh, at_once=asked.at_once, say=say)
    if fresh:
        campaign.clear()
    if not there:
        campaign.write({"study": study.name, "settings": asked.settings})
    if study.compute is not None:
        computed = [{**record, **provenance("cpu")} for record in study.compute()]
        for record in computed:
            files.write(out / f"{record['name']}.json", record)
        return computed
    if study.contests:
        return fight(asked.contests, len(seeds), load, out, at_once=asked.at_once, say=say)

    done: dict[tuple[str, int], Record] = {}
    records: dict[str, Record] = {}
    title = f"{counted(len(asked.rows), 'row')} × {counted(len(seeds), 'seed')}"
    before = [(folder, None) for folder in campaign.folders()]
    now = campaign.train(work, title=title, every=asked.every, watchers=watchers, say=say)
    for folder, trainer in itertools.chain(before, now):
        if folder.results() is None:  # it is about to go on, or has diverged
            continue
        _complete(folder, trainer, load, out if study.keep_networks else None, say)
        done.update(_outcomes(folder))
        for row, recipe in asked.rows:
            own = [done[recipe.name, seed] for seed in seeds if (recipe.name, seed) in done]
            if recipe.name not in records and len(own) == len(seeds):
                records[recipe.name] = _record(row, recipe, own)
                files.write(out / rows.file_name(recipe.name, asked.first_seed), records[recipe.name])
    for why in filter(None, map(diverged, campaign.folders())):
        raise DivergedError(why)
    return [records[recipe.name] for _, recipe in asked.rows]


def _complete(folder: Folder, trainer: Trainer | None, load: Loader, networks: Path | None, say: Say) -> None:
    """Writes what a finished stack has beside its results, where it is not there yet: for every run what its
    constraints bound, and the compact network of every run with gates.
    """
    constraints, missing = folder.path / _CONSTRAINTS, {}
    if networks is not None:
        there = {run: networks / f"{r.name}-seed{r.seed}.safetensors" for run, r in enumerate(folder.recipes)}
        missing = {k: file for k, file in there.items() if folder.recipes[k].placement and not file.exists()}
    if constraints.exists() and not missing:
        return
    if trainer is None:  # killed before they were written, or they were removed
        trainer = training.restore(folder, load(folder.recipes[0].data))
    if not constraints.exists():
        bound = [
            held(cast("Gated", trainer.network(run)), trainer.costs[recipe.cost], targets(recipe))
            if targets(recipe)
            else {}
            for run, recipe in enumerate(folder.recipes)
        ]
        files.write(constraints, bound)
    for run, file in missing.items():
        try:
            saving.save(compact(cast("Gated", trainer.network(run).cpu())), file)
        except (ClosedAxisError, CompactionError) as error:
            recipe = folder.recipes[run]
            say(f"no compact network of {recipe.name}, seed {recipe.seed}: {error}")


def held(gated: Gated, measure: costs.Cost, targets: dict[str, float]) -> dict[str, dict[str, float]]:
    """What a network's constraints bound: by pattern, the target, and the expected and kept share of the dense cost."""
    out = {}
    for pattern, at_most in targets.items():
        share = fractions(costs.only(measure, None if pattern == "*" else pattern), gated)
        out[pattern] = {"at_most": at_most, "expected": share["expected"], "kept": share["kept"]}
    return out


def _outcomes(folder: Folder) -> dict[tuple[str, int], Record]:
    """What came out of every run of a finished stack, by name and seed."""
    history = folder.history()
    constraints = files.read(folder.path / _CONSTRAINTS)
    out = {}
    for recipe, result, bound in zip(folder.recipes, folder.results() or [], constraints, strict=True):
        curve = [h for h in history if (h["run"], h["seed"]) == (recipe.name, recipe.seed)]
        record = {k: v for k, v in result.items() if k not in ("recipe", "seconds")}
        record |= {"seconds_of_stack": result["seconds"], "runs_in_stack": len(folder.recipes)}
        record |= {"constraints": bound, "history": list(map(_thin, curve)), "about": folder.about}
        out[recipe.name, recipe.seed] = record
    return out


def _record(row: Row, recipe: Recipe, seeds: list[Record]) -> Record:
    """A row's record. Where its seeds come from more than one stack, and these from different commits or devices, it
    names them all.
    """
    return {
        "row": row.label,
        "published": {"architecture": row.architecture, "error": row.error},
        "recipe": recipe.to_dict(),
        **in_common([s["about"] for s in seeds]),
        "seeds": [{k: v for k, v in s.items() if k != "about"} for s in seeds],
    }


def _thin(point: Record) -> Record:
    """A point of a history, rounded: to draw, not to resume. Its seconds are the stack's, since the point before."""
    shares = {kind: {k: round(v, 5) for k, v in point.get(kind, {}).items()} for kind in ("expected", "kept")}
    return {
        "epoch": point["epoch"],
        "error": round(point["error"], 3),
        "loss": None if point["loss"] is None else round(point["loss"], 5),
        **shares,
        "multiplier": [round(m, 5) for m in point.get("multiplier", [])],
        "seconds": round(point["seconds"], 3),
        **({"tuning": True} if point["tuning"] else {}),
        **{key: point[key] for key in ("shrunk", "error_without") if key in point},
    }


def stored(study: Study, out: Path, only: str = "*") -> tuple[list[Record], list[str]]:
    """The records of a study that lie in a folder, and the names of those that do not."""
    if study.compute is not None:
        names = sorted(file.stem for file in out.glob("*.json") if file.name != _STUDY)
    else:
        wanted = study.matching(only)
        names = [name for name in study.names if name in wanted]
    try:
        found = {name: rows.read(out, name) for name in names}
    except FolderError as error:
        raise StudyError(str(error)) from error
    there = [record for record in found.values() if record is not None]
    if not there:
        raise StudyError(f"there are no results of `{study.name}` in {str(out)!r}")
    return there, [name for name, record in found.items() if record is None]
