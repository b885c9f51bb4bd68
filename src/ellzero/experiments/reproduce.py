"""Published tables and figures, made again: a `Study` names rows of recipes beside published numbers, `reproduce`
trains them in stacks and stores one json per row, `table` prints ours beside the paper's.

A file in `reproductions/` defines one `STUDY`; `studies` finds them. A reproduction lies in a folder:

    study.json          what was asked for, so that something else is not mixed into it
    stacks/NAME/        a run folder for each stack, so that a killed reproduction goes on where it was
    RECIPE.json         one record per row: recipe, commit, versions, device, and what came out of every seed
    RECIPE-seedN.safetensors    the compact network of a run, where the study keeps them
    figures/            the figures, as PNG and SVG with their captions

This file does not know what a row is about.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from rich import box
from rich.table import Table

from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder, FolderError, refuse_busy
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.trainer import STACKABLE, Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.gated.module import Gated
from ellzero.graph.plan import ClosedAxisError
from ellzero.objectives import costs
from ellzero.out import saving
from ellzero.out.compaction import CompactionError, compact
from ellzero.out.files import write_text

FORMAT, FORMAT_VERSION = "ellzero.reproduction", 1
AT_ONCE = 64  # runs in a stack at most: about where an H200 is full
_STUDY, _STACKS, _FIGURES, _CONSTRAINTS = "study.json", "stacks", "figures", "constraints.json"

# What a recipe may have that keeps it from sharing a stack, whatever the others are.
_ALONE = ("augment", "shrink_at", "settle_at", "channels_last")

# Two-sided 95 % quantiles of Student's t, for the few degrees of freedom that seeds give.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Record = dict[str, Any]


@final
class StudyError(Exception):
    """A study cannot be done as it was asked for; the message says why."""


# ---------------------------------------------------------------- tables


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); NaN for a single value.

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> mean, round(half, 3)
        (2.0, 2.484)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, _t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _t95(freedom: int) -> float:
    """Student's quantile: from the table, then by its expansion in 1/ν about the normal one (Abramowitz & Stegun,
    26.7.5), which is right to 5e-4 there.
    """
    if freedom in _T95:
        return _T95[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def with_interval(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± half the 95 % interval, as a table has it.

    Example:
        >>> with_interval([1.0, 2.0, 3.0]), with_interval([1.5])
        ('2.00 ± 2.48', '1.50')
    """
    mean, half = interval(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"


def table(records: Sequence[Record], title: str) -> Table:
    """Ours beside the paper's, a line per row.

    Errors are means over seeds with the 95 % interval; the architecture is that of the seed with the median number of
    parameters; density is eq. 16 over its dense value, expected and kept; parameters and MACs are those of the compact
    network; the seconds are those of the whole stack that the row was trained in.
    """
    left = ("row", "paper", "ours")
    right = ("paper, error %", "best %", "last %", "density expected", "kept", "parameters", "MACs", "seconds")
    out = new_table(title, left, right)
    for record in records:
        seeds = record["seeds"]
        kept, cells = "dense", ["100.0 %"] * 2 + ["100 %"] * 2  # a recipe without gates has no costs
        if all("costs" in s for s in seeds):
            middle = sorted(seeds, key=lambda s: s["costs"]["params"]["kept"])[len(seeds) // 2]
            kept = "-".join(str(n) for n in middle["architecture"].values())
            cells = [
                f"{100 * statistics.fmean(s['costs']['l0_norm'][kind] for s in seeds):.1f} %"
                for kind in ("expected", "kept")
            ]
            for cost in ("params", "macs"):
                share = statistics.fmean(s["costs"][cost]["kept"] for s in seeds)
                cells.append(f"{share * seeds[0]['costs'][cost]['dense']:,.0f} ({100 * share:.1f} %)")
        out.add_row(
            record["row"],
            record["published"]["architecture"] or "–",
            kept,
            record["published"]["error"].replace(" | ", " / ") or "–",
            with_interval([s["error_best"] for s in seeds]),
            with_interval([s["error_last"] for s in seeds]),
            *cells,
            took(record),
        )
    return out


def took(record: Record) -> str:
    """Seconds of the stacks that a row was trained in, and how many runs they had.

    Example:
        >>> took({"seeds": [{"seconds_of_stack": 67.9, "runs_in_stack": 10}] * 5})
        '68 (10 runs)'
    """
    stacks = dict.fromkeys((s["seconds_of_stack"], s["runs_in_stack"]) for s in record["seeds"])
    seconds, runs = (sum(values) for values in zip(*stacks, strict=True))
    return f"{seconds:.0f} ({runs} run{'s' * (runs > 1)})"


def new_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table with columns of words, then columns of numbers."""
    out = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        out.add_column(name)
    for name in right:
        out.add_column(name, justify="right")
    return out


def markdown(shown: Table) -> str:
    """A table as Markdown, without its title.

    Example:
        >>> t = new_table("", ["row"], ["error"])
        >>> t.add_row("MLP", "1.4 | 1.69")
        >>> print(markdown(t))
        | row | error |
        |---|---:|
        | MLP | 1.4 / 1.69 |
    """
    lines = [[str(c.header) for c in shown.columns], *zip(*(c.cells for c in shown.columns), strict=True)]
    texts = ["| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines]
    rule = "|" + "".join("---:|" if c.justify == "right" else "---|" for c in shown.columns)
    return "\n".join([texts[0], rule, *texts[1:]])


# ---------------------------------------------------------------- studies


@final
@dataclass(frozen=True)
class Row:
    """One row of a published table.

    Args:
        label: as the paper has it.
        recipe: how we run it.
        architecture: the published pruned architecture; empty where there is none.
        error: the published error in percent, as printed; empty where there is none.
    """

    label: str
    recipe: Recipe
    architecture: str = ""
    error: str = ""


@final
@dataclass(frozen=True)
class Study:
    """A published table or figure, and how it is made again: by training rows, or by computing.

    Args:
        name: what it is called on the command line and in file names.
        title: above its table.
        rows: what is trained; their recipes have different names.
        seeds: how many each row is trained with, unless asked for otherwise.
        compute: makes the records of a study that trains nothing; each has a "name".
        table: makes the table from the records.
        draw: writes the figures into a folder, from the records alone, and returns the files.
        keep_networks: whether the compact network of every run with gates is kept beside the records.

    Raises:
        ValueError: two recipes have the same name or different data, or it has rows and computes too, or neither.
    """

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    seeds: int = 5
    compute: Callable[[], list[Record]] | None = None
    table: Callable[[Sequence[Record], str], Table] | None = table
    draw: Callable[[Sequence[Record], Path], list[Path]] | None = None
    keep_networks: bool = False

    def __post_init__(self) -> None:
        names = [row.recipe.name for row in self.rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"`rows` must have recipes of different names, got {', '.join(twice)} more than once")
        data = sorted({row.recipe.data for row in self.rows})
        if len(data) > 1:
            raise ValueError(f"`rows` must have recipes of one data set, got {', '.join(data)}")
        if bool(self.rows) == (self.compute is not None):
            raise ValueError(f"`{self.name}` must have `rows` to train or something to `compute`, and not both")

    def recipes(
        self, *, epochs: int | None = None, data: str | None = None, only: str = "*"
    ) -> list[tuple[Row, Recipe]]:
        """The rows whose recipe's name matches, with the recipe that will be run.

        Args:
            epochs: instead of the recipes' own.
            data: instead of the recipes' own.
            only: pattern of recipe names, or several with commas between them.

        Raises:
            StudyError: a pattern matches no name.
        """
        changes = {name: value for name, value in (("epochs", epochs), ("data", data)) if value is not None}
        names, wanted = [r.recipe.name for r in self.rows], [pattern.strip() for pattern in only.split(",")]
        for pattern in wanted if self.rows else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise StudyError(f"`--only` must match the name of a recipe ({', '.join(names)}), got {pattern!r}")
        return [
            (row, row.recipe.override(**changes))
            for row in self.rows
            if any(fnmatchcase(row.recipe.name, pattern) for pattern in wanted)
        ]


def studies(folder: Path | None = None) -> dict[str, Study]:
    """All studies by their names: every file of `reproductions/` that defines a `STUDY`.

    Args:
        folder: of the files; the one that comes with the package, or the source tree's, if absent.

    Raises:
        StudyError: there is no such folder, or two studies have one name.
    """
    found: dict[str, Study] = {}
    for path in sorted((home() if folder is None else folder).glob("*.py")):
        study = _load(path)
        if study is None:
            continue
        if study.name in found:
            raise StudyError(f"two files define the study `{study.name}`; one is {path.name}")
        found[study.name] = study
    return found


def find(name: str, known: dict[str, Study]) -> Study:
    """The study of this name; "_" may stand for "-".

    Raises:
        StudyError: there is none.
    """
    wanted = name.removesuffix(".py").replace("_", "-")
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
    raise StudyError(f"`{name}` is not the name of a study; {hint}")


def home() -> Path:
    """The folder of the studies: inside an installed package, or at the top of the source tree.

    Raises:
        StudyError: it is in neither place.
    """
    here = Path(__file__).parents[1]
    for folder in (here / "reproductions", here.parent.parent / "reproductions"):
        if folder.is_dir():
            return folder
    raise StudyError("the studies are missing: there is no folder `reproductions` in this installation")


def _load(path: Path) -> Study | None:
    if "STUDY" not in path.read_text(encoding="utf-8"):
        return None  # a tool that lies beside them
    spec = importlib.util.spec_from_file_location(f"ellzero_reproductions_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study = vars(module).get("STUDY")
    return study if isinstance(study, Study) else None


# ---------------------------------------------------------------- stacks


def stacks(recipes: Sequence[Recipe], limit: int = AT_ONCE) -> list[list[Recipe]]:
    """Groups of recipes that can be trained together, in order; networks with batch norm, augmented images and
    networks that shrink go alone.

    Args:
        recipes: one per run.
        limit: of runs in a group; a larger group is split into equal parts.

    Raises:
        ValueError: `limit` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}")
    groups: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        fields = {k: v for k, v in recipe.to_dict().items() if k not in STACKABLE}
        alone = recipe.network.startswith("wrn") or any(fields.get(name) for name in _ALONE)
        own = [recipe.name, recipe.seed] if alone else None
        groups.setdefault(json.dumps([fields, own], sort_keys=True), []).append(recipe)
    out = []
    for group in groups.values():
        parts = math.ceil(len(group) / limit)
        bounds = [len(group) * k // parts for k in range(parts + 1)]
        out += [group[a:b] for a, b in itertools.pairwise(bounds)]
    return out


def stack_name(stack: Sequence[Recipe]) -> str:
    """The name of a stack's folder: its network, and a digest of its recipes, all fields and their order."""
    content = json.dumps([[list(r.to_dict().items()), r.name] for r in stack])
    return f"{stack[0].network}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


# ---------------------------------------------------------------- doing it


def state(study: Study, out: Path, settings: dict[str, Any]) -> Literal["new", "there"]:
    """Whether a folder is free for a reproduction, or holds this one already, finished or not.

    Args:
        study: to be made.
        out: the folder.
        settings: what `asked` gives.

    Raises:
        StudyError: it holds another reproduction, or one with other settings, or something else.
    """
    file = out / _STUDY
    if not file.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise StudyError(f"`--out` must be a new or empty folder, and {str(out)!r} holds something else")
        return "new"
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
        version = there["format"], there["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{str(file)!r} is damaged: {error}; `--fresh` begins again") from error
    if version != (FORMAT, FORMAT_VERSION):
        raise StudyError(f"{str(file)!r} must be of format {FORMAT} {FORMAT_VERSION}, got {version}")
    if there.get("study") != study.name:
        raise StudyError(f"{str(out)!r} holds the study `{there.get('study')}`; give another folder by `--out`")
    differ = _differences(there.get("settings", {}), settings)
    if differ:
        raise StudyError(
            f"{str(out)!r} holds a reproduction with other settings ({'; '.join(differ)}); give another folder by "
            f"`--out`, or `--fresh` to begin again"
        )
    return "there"


def asked(
    study: Study,
    *,
    seeds: int,
    every: int = 1,
    at_once: int = AT_ONCE,
    epochs: int | None = None,
    data: str | None = None,
    only: str = "*",
) -> dict[str, Any]:
    """All that decides what a reproduction gives, as plain data: two with equal settings may be mixed."""
    recipes = [recipe.to_dict() for _, recipe in study.recipes(epochs=epochs, data=data, only=only)]
    return {"seeds": seeds, "every": every, "at_once": at_once, "recipes": recipes}


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    out = [
        f"{name} {theirs.get(name)} and not {ours[name]}"
        for name in ("seeds", "every", "at_once")
        if theirs.get(name) != ours[name]
    ]
    before, now = ({r["name"]: r for r in side.get("recipes", [])} for side in (theirs, ours))
    if list(before) != list(now):
        changed = sorted(set(before) ^ set(now))
        out.append(f"other rows: {', '.join(changed)}" if changed else "another order of rows")
    fields: dict[str, str] = {}
    for name in before.keys() & now.keys():
        for key in before[name].keys() | now[name].keys():
            a, b = before[name].get(key), now[name].get(key)
            if a != b:
                fields.setdefault(key, f"{key} {a} and not {b}")
    return [*out, *(fields[key] for key in sorted(fields))]


def begin(study: Study, out: Path, settings: dict[str, Any]) -> None:
    """Makes a folder that of a reproduction: removes an older one of the same study, and nothing else that lies there.

    Args:
        study: to be made.
        out: the folder; made if it does not exist.
        settings: what `asked` gives.

    Raises:
        StudyError: the folder holds another study's, or something else.
        FolderError: another process trains there.
    """
    file = out / _STUDY
    if not file.exists():
        state(study, out, settings)  # refuses what else is there
    else:
        there: Any = None
        with suppress(ValueError):  # damaged: it is being removed
            there = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(there, dict) and there.get("study") != study.name:
            raise StudyError(f"{str(out)!r} holds the study `{there.get('study')}`; give another folder by `--out`")
        refuse_busy(out / _STACKS)
        for folder in (_STACKS, _FIGURES):
            shutil.rmtree(out / folder, ignore_errors=True)
        for row in study.rows:
            (out / f"{row.recipe.name}.json").unlink(missing_ok=True)
            for network in out.glob(f"{row.recipe.name}-seed*.safetensors"):
                network.unlink()
    out.mkdir(parents=True, exist_ok=True)
    _write(file, {"format": FORMAT, "format_version": FORMAT_VERSION, "study": study.name, "settings": settings})


def reproduce(
    study: Study,
    dataset: Dataset | None = None,
    *,
    seeds: int | None = None,
    epochs: int | None = None,
    data: str | None = None,
    only: str = "*",
    every: int = 1,
    at_once: int = AT_ONCE,
    out: Path | None = None,
    watchers: Sequence[AbstractWatcher] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """Makes a study: trains every row with every seed, or computes it.

    With a folder, a reproduction that was stopped goes on: stacks that are finished are not trained again, and one that
    is not goes on from its newest checkpoint.

    Args:
        study: to make.
        dataset: on the device to train on; not needed by a study that trains nothing.
        seeds: how many, from 0; the study's own number if absent.
        epochs: instead of the recipes' own.
        data: name of the data set, instead of the recipes' own.
        only: pattern of the names of the recipes to train, or several with commas between them.
        every: evaluate after every so many epochs.
        at_once: runs in a stack at most.
        out: folder; nothing is stored if absent.
        watchers: that show each stack's progress.
        say: told a line about each stack.

    Returns:
        One record per row, with the results of all seeds.

    Raises:
        ValueError: a number is less than 1, or the data is missing.
        StudyError: `out` holds something else.
        training.Stopped: Ctrl-C; what was done is saved.
    """
    seeds = study.seeds if seeds is None else seeds
    for name, number in (("seeds", seeds), ("every", every), ("at_once", at_once)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}")
    if out is not None:
        settings = asked(study, seeds=seeds, every=every, at_once=at_once, epochs=epochs, data=data, only=only)
        if state(study, out, settings) == "new":
            begin(study, out, settings)
    if study.compute is not None:
        records = [{**record, **provenance("cpu")} for record in study.compute()]
        for record in records:
            if out is not None:
                _write(out / f"{record['name']}.json", record)
        return records
    if dataset is None:
        raise ValueError(f"`dataset` must be given for `{study.name}`, which trains networks")
    chosen = study.recipes(epochs=epochs, data=data, only=only)
    runs = [recipe.override(seed=seed) for _, recipe in chosen for seed in range(seeds)]
    done: dict[tuple[str, int], Record] = {}
    finished: dict[str, Record] = {}
    for stack in stacks(runs, at_once):
        where = None if out is None else out / _STACKS / stack_name(stack)
        done |= _train(stack, dataset, where, every, watchers, say, out if study.keep_networks else None)
        for row, recipe in chosen:
            own = [done.get((recipe.name, seed)) for seed in range(seeds)]
            if recipe.name in finished or None in own:
                continue
            finished[recipe.name] = record = _record(row, recipe, cast("list[Record]", own))
            if out is not None:
                _write(out / f"{recipe.name}.json", record)
    return [finished[recipe.name] for _, recipe in chosen]


def _train(
    stack: list[Recipe],
    dataset: Dataset,
    where: Path | None,
    every: int,
    watchers: Sequence[AbstractWatcher],
    say: Callable[[str], None],
    networks: Path | None,
) -> dict[tuple[str, int], Record]:
    """What came out of every run of a stack, by name and seed: trained now, or found in its folder."""
    names = ", ".join(dict.fromkeys(r.name for r in stack))
    title = f"{len(stack)} run{'s together' * (len(stack) > 1)}: {names}"
    about = provenance(dataset.train_x.device)
    folder = None if where is None else _folder(where, stack, about)
    results = None if folder is None else folder.results()
    trainer = None
    if results is None:
        say(title)
        trainer = training.train(stack, dataset, folder, every=every, watchers=watchers)
        results = trainer.results()
    else:
        say(f"{title}: done before")
    if networks is not None:
        _keep(stack, trainer, folder, dataset, networks, say)
    held = _constraints(trainer, folder, dataset)
    history = trainer.history if folder is None and trainer is not None else cast("Folder", folder).history()
    out: dict[tuple[str, int], Record] = {}
    for recipe, result, constraints in zip(stack, results, held, strict=True):
        curve = [h for h in history if (h["run"], h["seed"]) == (recipe.name, recipe.seed)]
        rest = {k: v for k, v in result.items() if k not in ("recipe", "seconds")}
        rest |= {"seconds_of_stack": result["seconds"], "runs_in_stack": len(stack)}
        out[recipe.name, recipe.seed] = {
            **rest,
            "constraints": constraints,
            "history": _thin(curve),
            "about": about if folder is None else folder.about,
        }
    return out


def _folder(where: Path, stack: list[Recipe], about: dict[str, Any]) -> Folder:
    if not (where / "run.json").exists():
        return Folder.create(where, stack, about)
    folder = Folder.open(where)
    if folder.recipes != stack:
        raise FolderError(f"{str(where)!r} must hold the stack that its name says, and its recipes are others")
    return folder


def _keep(
    stack: list[Recipe],
    trainer: Trainer | None,
    folder: Folder | None,
    dataset: Dataset,
    where: Path,
    say: Callable[[str], None],
) -> None:
    """Writes the compact network of every run with gates, where it is not there yet."""
    for run, recipe in enumerate(stack):
        file = where / f"{recipe.name}-seed{recipe.seed}.safetensors"
        if recipe.placement is None or file.exists():
            continue
        if trainer is None:  # killed before it was written, or it was removed
            trainer = training.restore(cast("Folder", folder), dataset)
        try:
            saving.save(compact(cast("Gated", trainer.network(run).cpu())), file)
        except (ClosedAxisError, CompactionError) as error:
            say(f"no compact network of {recipe.name}, seed {recipe.seed}: {error}")


def _constraints(trainer: Trainer | None, folder: Folder | None, dataset: Dataset) -> list[dict[str, Any]]:
    """For every run and each of its constraints the target, and the cost that it bounds at the end, as fractions of
    dense: expected and kept. They are not in a run's results, and so stored beside them.
    """
    file = None if folder is None else folder.path / _CONSTRAINTS
    if file is not None and file.exists():
        return cast("list[dict[str, Any]]", json.loads(file.read_text(encoding="utf-8")))
    if trainer is None:  # killed between the two files
        trainer = training.restore(cast("Folder", folder), dataset)
    out = []
    for run, recipe in enumerate(trainer.recipes):
        at_most = recipe.at_most if isinstance(recipe.at_most, dict) else {"*": recipe.at_most}
        targets = {p: e for p, e in at_most.items() if e is not None}
        out.append(held(cast("Gated", trainer.network(run)), recipe.cost, targets) if targets else {})
    if file is not None:
        _write(file, out)
    return out


@torch.no_grad()
def held(gated: Gated, cost: str, targets: dict[str, float]) -> dict[str, dict[str, float]]:
    """What a network's constraints bound: by pattern, the target, and the expected and kept share of the dense cost.

    Args:
        gated: the network.
        cost: "l0_norm", "params" or "macs".
        targets: ε by pattern.
    """
    measure = {"l0_norm": costs.l0_norm, "params": costs.params, "macs": costs.macs}[cost]
    out = {}
    for pattern, at_most in targets.items():
        only = None if pattern == "*" else pattern
        whole = costs.dense(measure, gated, only)
        expected, kept = (measure(gated, kept=k, only=only).item() / whole for k in (False, True))
        out[pattern] = {"at_most": at_most, "expected": expected, "kept": kept}
    return out


def _record(row: Row, recipe: Recipe, seeds: list[Record]) -> Record:
    """A row's record. Where its seeds come from more than one stack, and these from different commits or devices, it
    names them all.
    """
    keys = dict.fromkeys(key for s in seeds for key in s["about"])
    about = {key: dict.fromkeys(s["about"].get(key) for s in seeds) for key in keys}
    return {
        "row": row.label,
        "published": {"architecture": row.architecture, "error": row.error},
        "recipe": recipe.to_dict(),
        **{k: next(iter(v)) if len(v) == 1 else ", ".join(map(str, v)) for k, v in about.items()},
        "seeds": [{k: v for k, v in s.items() if k != "about"} for s in seeds],
    }


def _thin(curve: Sequence[Record]) -> list[Record]:
    """Error, loss, expected and kept fractions, multipliers, seconds and events over training, rounded, and what the
    last steps have bought: a history to draw, not to resume.
    """
    keep = []
    for h in curve:
        loss = h["loss"]
        point = {"epoch": h["epoch"], "error": round(h["error"], 3)}
        point["loss"] = None if loss is None or math.isnan(loss) else round(loss, 5)  # JSON knows no NaN
        for kind in ("expected", "kept"):
            point[kind] = {k: round(v, 5) for k, v in h.get(kind, {}).items()}
        point["multiplier"] = [round(m, 5) for m in h.get("multiplier", [])]
        point["seconds"] = round(h["seconds"], 3)  # of the whole stack, since the point before
        if h["tuning"]:
            point["tuning"] = True
        point |= {key: h[key] for key in ("shrunk", "error_without") if key in h}
        keep.append(point)
    return keep


# ---------------------------------------------------------------- stored records


def stored(study: Study, out: Path, only: str = "*") -> tuple[list[Record], list[str]]:
    """The records of a study that lie in a folder, and the names of those that do not.

    Raises:
        StudyError: there is none, or a file is damaged.
    """
    if study.compute is not None:
        names = sorted(p.stem for p in out.glob("*.json") if p.name != _STUDY)
    else:
        names = [recipe.name for _, recipe in study.recipes(only=only)]
    records, missing = [], []
    for name in names:
        file = out / f"{name}.json"
        if not file.exists():
            missing.append(name)
            continue
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(record, dict):
                raise ValueError("it is no record")
        except ValueError as error:
            raise StudyError(f"{str(file)!r} is damaged: {error}") from error
        records.append(record)
    if not records:
        raise StudyError(f"there are no results of `{study.name}` in {str(out)!r}")
    return records, missing


def draw(study: Study, records: Sequence[Record], out: Path) -> list[Path]:
    """Draws a study's figures into the folder `figures` of `out`; none where the study has no figure."""
    return [] if study.draw is None else study.draw(records, out / _FIGURES)


def point_at_end_of_training(seed: Record) -> Record:
    """The last point of a seed's history at which gates were still learning: before `finalize` and fine-tuning."""
    learning = [h for h in seed["history"] if not h.get("tuning")]
    return cast("Record", learning[-1])


def by_epoch(seeds: Iterable[Record], value: Callable[[Record], float]) -> tuple[list[int], list[list[float]]]:
    """The epochs of a row's histories, and a number at each for every seed.

    Raises:
        ValueError: the seeds were evaluated at different epochs.
    """
    curves = [[(h["epoch"], value(h)) for h in s["history"]] for s in seeds]
    epochs = [[e for e, _ in curve] for curve in curves]
    if any(e != epochs[0] for e in epochs):
        raise ValueError("`seeds` must have been evaluated at the same epochs")
    return epochs[0], [[v for _, v in curve] for curve in curves]


def _write(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, allow_nan=False) + "\n")
