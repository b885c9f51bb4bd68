"""A study made again: its rows are trained as a campaign. How runs are stacked and taken up again is not known here.

Beside study.json and the stacks, its folder has

RECIPE.json                 a record per row: recipe, commit, versions, device, and what came out of every seed
RECIPE-seedN.safetensors    the compact network of a run, where the study keeps them
figures/                    the figures, as PNG and SVG with their captions
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast, final

import torch

from ellzero.experiments.campaign import AT_ONCE, Campaign, CampaignError, Loader, Record, Say, diverged
from ellzero.experiments.recipe import Recipe, differences
from ellzero.experiments.store import records as files
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.store.records import FolderError
from ellzero.experiments.study.rows import Row, Study, StudyError
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.building import COSTS, targets
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.gated.module import Gated
from ellzero.graph.plan import ClosedAxisError
from ellzero.objectives import costs
from ellzero.out import saving
from ellzero.out.compaction import CompactionError, compact

_STUDY, _FORMAT = "study.json", "ellzero.reproduction"
_FIGURES, _CONSTRAINTS = "figures", "constraints.json"


@final
@dataclass(frozen=True)
class Reproduction:
    """What is asked for: a study, and what is changed in it."""

    study: Study
    seeds: int | None = None  # how many, from 0; the study's own number if absent
    epochs: int | None = None
    data: str | None = None
    only: str = "*"  # pattern of the names of the recipes to train, or several with commas between them
    every: int = 1  # evaluate after so many epochs
    at_once: int = AT_ONCE

    def __post_init__(self) -> None:
        for name, number in self.settings.items():
            if isinstance(number, int) and number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}")

    @cached_property
    def rows(self) -> list[tuple[Row, Recipe]]:
        """The rows with the recipes that are run."""
        return self.study.recipes(epochs=self.epochs, data=self.data, only=self.only)

    @cached_property
    def settings(self) -> Record:
        """All that decides what comes out, as what JSON knows."""
        seeds = self.study.seeds if self.seeds is None else self.seeds
        recipes = [recipe.to_dict() for _, recipe in self.rows]
        return {"seeds": seeds, "every": self.every, "at_once": self.at_once, "recipes": recipes}

    def campaign(self, out: Path) -> Campaign:
        """Its folder."""
        names = [row.recipe.name for row in self.study.rows]
        own = (_FIGURES, *(f"{name}{rest}" for name in names for rest in (".json", "-seed*.safetensors")))
        return Campaign(out, _STUDY, _FORMAT, "reproduction", own)

    def differences(self, theirs: Record) -> list[str]:
        """Between the settings of a reproduction and our own, in words."""
        before, now = ({r["name"]: r for r in side.get("recipes", [])} for side in (theirs, self.settings))
        out = differences(*({k: v for k, v in side.items() if k != "recipes"} for side in (theirs, self.settings)))
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
    gives the data set of a name, on the device to train on, and is not called where nothing is trained. Where a run
    diverges, the rows without it are stored before the DivergedError.
    """
    study, campaign = asked.study, asked.campaign(out)
    with suppress(CampaignError):  # there is none, or it is damaged: see below
        name = campaign.read().get("study")
        if name != study.name:
            raise StudyError(f"{str(out)!r} holds the study `{name}`; give another folder by `--out`")
    there = campaign.holds(lambda head: asked.differences(head.get("settings", {})), resume=resume, fresh=fresh)
    seeds = range(asked.settings["seeds"])
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

    done: dict[tuple[str, int], Record] = {}
    records: dict[str, Record] = {}

    def note(folder: Folder, trainer: Trainer | None = None) -> None:  # writes a row when all its seeds are there
        _complete(folder, trainer, load, out if study.keep_networks else None, say)
        done.update(_outcomes(folder))
        for row, recipe in asked.rows:
            own = [done[recipe.name, seed] for seed in seeds if (recipe.name, seed) in done]
            if recipe.name not in records and len(own) == len(seeds):
                records[recipe.name] = _record(row, recipe, own)
                files.write(out / f"{recipe.name}.json", records[recipe.name])

    for folder in campaign.folders():
        if folder.results() is not None:
            note(folder)
    title = f"{len(asked.rows)} row{'s' * (len(asked.rows) > 1)} × {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    for folder, trainer in campaign.train(work, title=title, every=asked.every, watchers=watchers, say=say):
        if trainer is not None:
            note(folder, trainer)
    for why in filter(None, map(diverged, campaign.folders())):
        raise DivergedError(why)
    return [records[recipe.name] for _, recipe in asked.rows]


def _complete(folder: Folder, trainer: Trainer | None, load: Loader, networks: Path | None, say: Say) -> None:
    """Writes what a finished stack has beside its results, where it is not there yet: for every run what its
    constraints bound, and the compact network of every run with gates.
    """
    constraints, missing = folder.path / _CONSTRAINTS, {}
    if networks is not None:
        names = [f"{recipe.name}-seed{recipe.seed}.safetensors" for recipe in folder.recipes]
        gated = [run for run, recipe in enumerate(folder.recipes) if recipe.placement is not None]
        missing = {run: networks / names[run] for run in gated if not (networks / names[run]).exists()}
    if constraints.exists() and not missing:
        return
    if trainer is None:  # killed before they were written, or they were removed
        trainer = training.restore(folder, load(folder.recipes[0].data))
    if not constraints.exists():
        bound = []
        for run, recipe in enumerate(folder.recipes):
            wanted = targets(recipe)
            bound.append(held(cast("Gated", trainer.network(run)), recipe.cost, wanted) if wanted else {})
        files.write(constraints, bound)
    for run, file in missing.items():
        try:
            saving.save(compact(cast("Gated", trainer.network(run).cpu())), file)
        except (ClosedAxisError, CompactionError) as error:
            recipe = folder.recipes[run]
            say(f"no compact network of {recipe.name}, seed {recipe.seed}: {error}")


@torch.no_grad()
def held(gated: Gated, cost: str, targets: dict[str, float]) -> dict[str, dict[str, float]]:
    """What a network's constraints bound: by pattern, the target, and the expected and kept share of the dense cost."""
    measure = COSTS[cost]
    out = {}
    for pattern, at_most in targets.items():
        only = None if pattern == "*" else pattern
        whole = costs.dense(costs.only(measure, only), gated)
        expected, kept = (measure(gated, kept=k, only=only).item() / whole for k in (False, True))
        out[pattern] = {"at_most": at_most, "expected": expected, "kept": kept}
    return out


def _outcomes(folder: Folder) -> dict[tuple[str, int], Record]:
    """What came out of every run of a finished stack, by name and seed."""
    history = folder.history()
    constraints = files.read(folder.path / _CONSTRAINTS)
    out = {}
    for recipe, result, bound in zip(folder.recipes, folder.results() or [], constraints, strict=True):
        curve = [h for h in history if (h["run"], h["seed"]) == (recipe.name, recipe.seed)]
        out[recipe.name, recipe.seed] = {
            **{k: v for k, v in result.items() if k not in ("recipe", "seconds")},
            "seconds_of_stack": result["seconds"],
            "runs_in_stack": len(folder.recipes),
            "constraints": bound,
            "history": _thin(curve),
            "about": folder.about,
        }
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
    return [
        {
            "epoch": h["epoch"],
            "error": round(h["error"], 3),
            "loss": None if h["loss"] is None else round(h["loss"], 5),
            **{kind: {k: round(v, 5) for k, v in h.get(kind, {}).items()} for kind in ("expected", "kept")},
            "multiplier": [round(m, 5) for m in h.get("multiplier", [])],
            "seconds": round(h["seconds"], 3),  # of the whole stack, since the point before
            **({"tuning": True} if h["tuning"] else {}),
            **{key: h[key] for key in ("shrunk", "error_without") if key in h},
        }
        for h in curve
    ]


def stored(study: Study, out: Path, only: str = "*") -> tuple[list[Record], list[str]]:
    """The records of a study that lie in a folder, and the names of those that do not; a StudyError if there is none,
    or a damaged one.
    """
    if study.compute is not None:
        names = sorted(p.stem for p in out.glob("*.json") if p.name != _STUDY)
    else:
        names = [recipe.name for _, recipe in study.recipes(only=only)]
    there = {name: out / f"{name}.json" for name in names if (out / f"{name}.json").exists()}
    if not there:
        raise StudyError(f"there are no results of `{study.name}` in {str(out)!r}")
    try:
        records = {file: files.read(file) for file in there.values()}
    except FolderError as error:
        raise StudyError(str(error)) from error
    for file, record in records.items():
        if not isinstance(record, dict):
            raise StudyError(f"{str(file)!r} is damaged: it is no record")
    return list(records.values()), [name for name in names if name not in there]


def draw(study: Study, records: Sequence[Record], out: Path) -> list[Path]:
    """Draws a study's figures into the folder `figures` of `out`; none where the study has no figure."""
    return [] if study.draw is None else study.draw(records, out / _FIGURES)
