"""Campaigns: many runs, trained in stacks, in one folder that a killed process takes up again.

The folder has a head, which says what was asked for, and in `stacks/` a run folder for each stack. What is on the disk
decides what is left to do, run by run. This file does not know what the runs are for, nor how a stack is trained.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint, records
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.experiments.store.provenance import provenance
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.building import refuse_unreachable
from ellzero.experiments.train.fitting import sources
from ellzero.experiments.train.policy import ALONE, STACKABLE
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.experiments.train.watching import AbstractWatcher

VERSION = 1  # of the format of every head
AT_ONCE = 64  # runs in a stack at most: about where an H200 is full
ON_A_CPU = 8  # runs in a stack: LeNet-5 takes two thirds of the time of runs one by one, more gains nothing
_STACKS, _DIVERGED = "stacks", "diverged.json"

Record = dict[str, Any]
Loader = Callable[[str], Dataset]
Say = Callable[[str], None]
Identity = tuple[str, str]


@final
class CampaignError(Exception):
    """A folder is not that of this campaign, or is damaged; the message says which."""


def stacks(recipes: Sequence[Recipe], limit: int = AT_ONCE) -> list[list[Recipe]]:
    """Groups of recipes that can be trained together, in order; what `goes_alone` is a group of its own, and a group
    larger than `limit` is split into equal parts.
    """
    if limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}")
    groups: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        own = [recipe.name, recipe.seed] if goes_alone(recipe) else None
        groups.setdefault(json.dumps([shared(recipe), own], sort_keys=True), []).append(recipe)
    out = []
    for group in groups.values():
        parts = math.ceil(len(group) / limit)
        bounds = [len(group) * k // parts for k in range(parts + 1)]
        out += [group[a:b] for a, b in itertools.pairwise(bounds)]
    return out


def shared(recipe: Recipe) -> dict[str, Any]:
    """The fields that all runs of a stack have in common."""
    return {name: value for name, value in recipe.to_dict().items() if name not in STACKABLE}


def goes_alone(recipe: Recipe) -> bool:
    """Whether it shares no stack: its network has batch norm, or shrinks, or code of the user's takes part."""
    return recipe.facts.has_batch_norm or recipe.is_own or any(getattr(recipe, name) for name in ALONE)


def stack_name(stack: Sequence[Recipe]) -> str:
    """The name of a stack's folder: its network, and a digest of its recipes, all fields and their order."""
    content = json.dumps([[list(r.to_dict().items()), r.name] for r in stack])
    return f"{stack[0].network.replace(':', '-')}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def identity(recipe: Recipe) -> Identity:
    """What tells a run of a campaign from the others."""
    return recipe.name, recipe.digest()


def room(recipe: Recipe, dataset: Dataset) -> int:
    """How many runs of a recipe are trained together, unless asked for otherwise: on a GPU as many as fit by `memory`,
    up to 64; on a CPU 8, where more gain nothing; 1 of what goes alone.
    """
    if goes_alone(recipe):
        return 1
    device = dataset.device
    if device.type != "cuda":
        return ON_A_CPU
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, and not in use
    each, once = memory(recipe, dataset)
    return max(1, min(AT_ONCE, int((0.9 * free - once) / each)))


def memory(recipe: Recipe, dataset: Dataset) -> tuple[int, int]:
    """An estimate of the bytes that training takes: for each run of a stack, and once for all of them."""
    with torch.random.fork_rng(devices=[]):
        model = recipe.facts.make(len(dataset.classes), recipe.dropout)
    parameters = list(model.parameters())
    copies = 4 + (1 if recipe.optimizer == "sgd" else 2)  # weights and gated ones, with gradients; the optimizer's
    copies += (2 if recipe.ema is not None else 0) + (4 if recipe.extra_gradient else 0)  # evaluation copies an average
    example = dataset.example(2)
    image, (count, tested) = activations(model, example), dataset.sizes
    noisy = recipe.gate in ("sparse_vd", "bc_gnj", "bc_ghs")  # a parameter of its own for each weight
    image *= 1 + recipe.per_example + noisy  # noise, and a second product in each layer
    draws = recipe.samples * (2 if recipe.extra_gradient else 1)
    units = sum(sum(p.shape[:2]) for p in parameters if p.dim() > 1)  # gates on all that a weight reads or writes
    each = 4 * copies * (1 + noisy) * sum(p.numel() for p in parameters)
    each += 2 * 2 * image * recipe.batch * recipe.samples  # and gradients; twice: a captured step has memory of its own
    each += image * min(tested, 10_000)  # that are looked at together
    if recipe.augment or recipe.distort:
        each += count * example[0].numel()  # bytes of its own, changed in each epoch
    if recipe.taught_by is not None:
        each += memory(recipe.taught_by, dataset)[0]
    each += 2 * (count // recipe.batch) * draws * units * 4 + 2 * 8 * count  # the noise and the order of an epoch
    return each, 4 * count * example[0].numel() + 2**30  # the images as numbers, and a gigabyte for libraries


def activations(model: nn.Module, images: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, for each image: all but the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}  # tensors and not sizes: a place that is free again would be given to the next one

    def keep(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    total = sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in own)
    return math.ceil(total / len(images))


@final
@dataclass(frozen=True)
class Work:
    """What is left of a campaign."""

    stacks: list[Folder]  # those that were begun, and those that are not there yet
    data: dict[str, Dataset]  # by name
    done: int  # runs that were finished before

    def refuse_unfit(self) -> None:
        """Finds out before anything is trained what training would find out at its beginning, or only at its end:
        patterns that match nothing, batches larger than the data, targets that closing units cannot reach.
        """
        networks: dict[str, Any] = {}  # one for all recipes that differ in numbers and seeds alone
        for recipe in (recipe for folder in self.stacks for recipe in folder.recipes):
            patterns = [list(v) if isinstance(v, dict) else v is None for v in (recipe.at_most, recipe.penalty)]
            shape = json.dumps([shared(recipe), patterns, recipe.cost, recipe.init])
            if shape not in networks:
                trainer = Trainer([recipe], self.data[recipe.data])
                networks[shape] = trainer.network(0), trainer.costs
            refuse_unreachable(recipe, *networks[shape])


@final
@dataclass(frozen=True)
class Campaign:
    """A folder for many runs."""

    home: Path
    head: str  # name of the file that says what was asked for
    format: str  # of this file
    word: str  # what it is called in messages, such as "sweep"
    own: tuple[str, ...] = ()  # patterns of further files that belong to it

    @property
    def exists(self) -> bool:
        """Whether the folder has a head."""
        return (self.home / self.head).exists()

    def read(self) -> Record:
        """What is in the head. A CampaignError says that there is none, or that it is damaged or of another format."""
        if not self.exists:
            raise CampaignError(f"there is no {self.word} in {str(self.home)!r}")
        try:
            return records.read_format(self.home / self.head, self.format, VERSION)
        except FolderError as error:
            raise CampaignError(f"{error}; `--fresh` begins again") from error

    def write(self, content: Mapping[str, Any]) -> Record:
        """Writes the head, and makes the folder where there is none."""
        record = {"format": self.format, "format_version": VERSION, **content}
        self.home.mkdir(parents=True, exist_ok=True)
        records.write(self.home / self.head, record, indent=1)
        return record

    def holds(self, differ: Callable[[Record], list[str]], *, resume: bool, fresh: bool) -> bool:
        """Whether the folder holds this campaign already, finished or not, and it goes on; else it is free for it.

        `differ` says what differs between the head and what is asked for now. A CampaignError is raised where the
        folder holds anything else, or this one and neither `resume` nor `fresh` was asked for.
        """
        if not self.exists or fresh:
            self._refuse_other(fresh)
            return False
        found = differ(self.read())
        if found:
            raise CampaignError(
                f"{str(self.home)!r} holds a {self.word} with other settings ({'; '.join(found)}): give another folder "
                f"by `--out`, or `--fresh` to begin again"
            )
        if not resume:
            raise CampaignError(
                f"{str(self.home)!r} holds this {self.word} already: `--resume` goes on with it (what is finished is "
                f"not trained again), `--fresh` removes it and begins again"
            )
        return True

    def _refuse_other(self, fresh: bool) -> None:
        if not self.exists and self.home.exists() and (not self.home.is_dir() or any(self.home.iterdir())):
            wish = f"`--fresh` must be given a {self.word}'s" if fresh else "`--out` must be a new or empty"
            raise CampaignError(f"{wish} folder, and {str(self.home)!r} holds something else")

    def clear(self) -> None:
        """Removes the campaign from its folder, and nothing else that lies there; not while a process trains there."""
        self._refuse_other(fresh=True)
        for run in sorted(self.home.glob(f"{_STACKS}/*/run.json")):  # of any stack, damaged or not
            with Folder(run.parent, [], {}).locked():
                pass
        # The head last: what is left after a crash is still known for what it is.
        for pattern in (_STACKS, *self.own, self.head) if self.exists else ():
            for path in list(self.home.glob(pattern)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def folders(self) -> list[Folder]:
        """The stacks that are there, finished or not."""
        return [Folder.open(run.parent) for run in sorted(self.home.glob(f"{_STACKS}/*/run.json"))]

    def _stack(self, recipes: list[Recipe]) -> Folder:
        return Folder(self.home / _STACKS / stack_name(recipes), recipes, {})

    def work(
        self, runs: Sequence[Recipe], load: Loader, *, fresh: bool = False, at_once: int | None = None, say: Say
    ) -> Work:
        """What is left of all runs, or all if `fresh`. Stacks without a checkpoint are removed; nothing is written.

        A stack has at most `at_once` runs, or what `room` says; one that was begun with more is begun again.
        """
        begun, known = ([], set[Identity]()) if fresh else self._found(runs, at_once, say)
        left = [recipe for recipe in runs if identity(recipe) not in known]
        going_on = [recipe for folder in begun for recipe in folder.recipes]
        data = {name: load(name) for name in dict.fromkeys(recipe.data for recipe in (*going_on, *left))}
        new = []
        # All runs are grouped, then the known ones left out: so a campaign that was killed has the stacks of one that
        # was not.
        for group in stacks(runs, len(runs) or 1):
            if known.issuperset(map(identity, group)):
                continue
            for part in stacks(group, at_once or room(group[0], data[group[0].data])):
                new.append([recipe for recipe in part if identity(recipe) not in known])
        return Work([*begun, *map(self._stack, filter(None, new))], data, len(runs) - len(left) - len(going_on))

    def _found(self, runs: Sequence[Recipe], at_once: int | None, say: Say) -> tuple[list[Folder], set[Identity]]:
        """The stacks that go on, and all runs that a stack has."""
        wanted = set(map(identity, runs))
        begun: list[Folder] = []
        known: set[Identity] = set()
        for folder in self.folders():
            own = set(map(identity, folder.recipes))
            if not own <= wanted:
                raise FolderError(f"{str(folder.path)!r} must hold runs of this {self.word}, and holds others")
            if folder.results() is None and diverged(folder) is None:
                too_many = at_once is not None and len(own) > at_once
                if too_many:
                    say(f"{folder.path.name} was begun with {len(own)} runs together, and is begun again with fewer")
                if too_many or not checkpoint.steps(folder.checkpoints):
                    with folder.locked():  # another process may be about to write its first checkpoint
                        shutil.rmtree(folder.path)
                    continue
                begun.append(folder)
            known |= own
        return begun, known

    def train(
        self, work: Work, *, title: str, every: int = 1, watchers: Sequence[AbstractWatcher] = (), say: Say
    ) -> Iterator[tuple[Folder, Trainer | None]]:
        """Trains what is left, and gives each stack's folder when it is finished, with its trainer.

        A run whose loss is not a number any more is noted, and has no trainer; those that were trained together with it
        are trained again without it. `title` says what it is in all, such as "2 points × 3 seeds".
        """
        left = list(work.stacks)
        if left:
            runs = work.done + sum(len(folder.recipes) for folder in left)
            own = ": code of your own trains one run at a time" * any(f.recipes[0].is_own for f in left)
            say(f"{title}: {runs} runs, {work.done} done before, the others in {counted(len(left), 'stack')}{own}")
        while left:
            folder = left.pop(0)
            stack, dataset = folder.recipes, work.data[folder.recipes[0].data]
            say(f"{len(stack)} run{'s together' * (len(stack) > 1)}: {', '.join(dict.fromkeys(r.name for r in stack))}")
            if not (folder.path / "run.json").exists():
                about = {**provenance(dataset.device), **sources(stack[0], dataset)}
                folder = Folder.create(folder.path, stack, about)
            trainer = None
            try:
                trainer = training.train(stack, dataset, folder, every=every, watchers=watchers)
            except DivergedError as error:
                if len(stack) > 1:
                    say(f"{error}; the {len(stack)} runs are trained one by one now")
                    shutil.rmtree(folder.path)
                    left = [*(self._stack([recipe]) for recipe in stack), *left]
                    continue
                say(str(error))
                records.write(folder.path / _DIVERGED, str(error))
            yield folder, trainer


def diverged(folder: Folder) -> str | None:
    """What was noted where the run of a stack has diverged."""
    file = folder.path / _DIVERGED
    return str(records.read(file)) if file.exists() else None


def lengths(recipes: Iterable[Mapping[str, Any]]) -> str:
    """How many epochs recipes train for, as plain data: "3 epochs", or "40 + 10 or 25 + 250 epochs" with tuning."""
    parts = ([r["epochs"], *filter(None, [r.get("finetune_epochs")])] for r in recipes)  # the arena's have none
    told = list(dict.fromkeys(" + ".join(map(str, part)) for part in parts))
    return f"{' or '.join(told)} epoch{'s' * (told != ['1'])}"


def counted(number: int, word: str) -> str:
    """A number of things in words, such as "1 seed" and "3 seeds"."""
    return f"{number} {word}{'s' * (number != 1)}"
