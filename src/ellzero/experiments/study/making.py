"""A study made again: its rows are trained as a campaign, and each leaves a json. A reproduction lies in a folder.

    study.json          what was asked for, so that something else is not mixed into it
    stacks/NAME/        a run folder for each stack
    RECIPE.json         one record per row: recipe, commit, versions, device, and what came out of every seed
    RECIPE-seedN.safetensors    the compact network of a run, where the study keeps them
    figures/            the figures, as PNG and SVG with their captions

How runs are stacked and taken up again is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast, final

import torch

from ellzero.experiments.campaign import (
    AT_ONCE,
    Campaign,
    CampaignError,
    Loader,
    Record,
    Say,
    Work,
    differences,
    diverged,
)
from ellzero.experiments.recipe import Recipe
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
    """What is asked for: a study, and what is changed in it.

    Args:
        study: to make.
        seeds: how many, from 0; the study's own number if absent.
        epochs: instead of the recipes' own.
        data: name of the data set, instead of the recipes' own.
        only: pattern of the names of the recipes to train, or several with commas between them.
        every: evaluate after every so many epochs.
        at_once: runs in a stack at most.

    Raises:
        ValueError: a number is less than 1.
        StudyError: `only` matches no row.
    """

    study: Study
    seeds: int | None = None
    epochs: int | None = None
    data: str | None = None
    only: str = "*"
    every: int = 1
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

    def refuse_another(self, campaign: Campaign) -> None:
        """Says no to the folder of another study.

        Raises:
            StudyError: it is that of one.
            CampaignError: it is that of none.
        """
        name = campaign.read().get("study")
        if name != self.study.name:
            raise StudyError(f"{str(campaign.home)!r} holds the study `{name}`; give another folder by `--out`")

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
    """Makes a study: trains every row with every seed, or computes it.

    Args:
        asked: what to make.
        load: gives the data set of a name, on the device to train on; not called where nothing is trained.
        out: the folder.
        resume: whether to go on with the reproduction that the folder holds; what is finished is not trained again.
        fresh: begin again, and remove the reproduction that the folder holds when the new one can begin.
        watchers: that show each stack's progress.
        say: told a line about each stack.

    Returns:
        One record per row, with the results of all seeds.

    Raises:
        StudyError: `out` holds another study.
        CampaignError: `out` holds something else.
        DivergedError: the loss of a run is not a number any more; the rows without it are stored.
        training.Stopped: Ctrl-C; what was done is saved.
    """
    study, campaign = asked.study, asked.campaign(out)
    with suppress(CampaignError):  # there is none, or it is damaged: see below
        asked.refuse_another(campaign)
    there = campaign.holds(lambda head: asked.differences(head.get("settings", {})), resume=resume, fresh=fresh)
    runs = [recipe.override(seed=seed) for _, recipe in asked.rows for seed in range(asked.settings["seeds"])]
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
    return _trained(asked, campaign, work, load, watchers, say)


def _trained(
    asked: Reproduction, campaign: Campaign, work: Work, load: Loader, watchers: Sequence[AbstractWatcher], say: Say
) -> list[Record]:
    """Trains what is left, and writes each row's record as soon as all its seeds are there."""
    seeds, out = range(asked.settings["seeds"]), campaign.home
    done: dict[tuple[str, int], Record] = {}
    records: dict[str, Record] = {}

    def note(folder: Folder, trainer: Trainer | None = None) -> None:
        _complete(folder, trainer, load, out if asked.study.keep_networks else None, say)
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
    """What a network's constraints bound: by pattern, the target, and the expected and kept share of the dense cost.

    Args:
        gated: the network.
        cost: "l0_norm", "params" or "macs".
        targets: ε by pattern.
    """
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
    keep = []
    for h in curve:
        point = {"epoch": h["epoch"], "error": round(h["error"], 3)}
        point["loss"] = None if h["loss"] is None else round(h["loss"], 5)
        for kind in ("expected", "kept"):
            point[kind] = {k: round(v, 5) for k, v in h.get(kind, {}).items()}
        point["multiplier"] = [round(m, 5) for m in h.get("multiplier", [])]
        point["seconds"] = round(h["seconds"], 3)  # of the whole stack, since the point before
        if h["tuning"]:
            point["tuning"] = True
        point |= {key: h[key] for key in ("shrunk", "error_without") if key in h}
        keep.append(point)
    return keep


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
            record = files.read(file)
        except FolderError as error:
            raise StudyError(str(error)) from error
        if not isinstance(record, dict):
            raise StudyError(f"{str(file)!r} is damaged: it is no record")
        records.append(record)
    if not records:
        raise StudyError(f"there are no results of `{study.name}` in {str(out)!r}")
    return records, missing


def draw(study: Study, records: Sequence[Record], out: Path) -> list[Path]:
    """Draws a study's figures into the folder `figures` of `out`; none where the study has no figure."""
    return [] if study.draw is None else study.draw(records, out / _FIGURES)
