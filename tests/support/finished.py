"""Tiny runs that many tests look at, each trained once in a test session, however many processes the session has.

`finished` and `begun` give the folder of a run. Nobody writes into it: `copied` gives a test a folder of its own. The
folders lie in a cache that `tests/conftest.py` opens for the session and removes after it. What a run's files mean is
not known here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ellzero.experiments.data import stand_in
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import saver
from ellzero.experiments.train.loop import train
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from support import CACHE


def once(key: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` has filled, in this session, under this key.

    Args:
        key: tells contents apart; the folder's name begins with its first line.
        make: called by the first process that asks, with the path of a folder that is not there yet.
    """
    cache = Path(os.environ[CACHE])
    name = f"{key.splitlines()[0]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    home, unfinished = cache / name / "run", cache / name / "making"
    home.parent.mkdir(exist_ok=True)
    with (home.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            shutil.rmtree(unfinished, ignore_errors=True)  # of one who failed
            state = torch.get_rng_state()
            torch.manual_seed(0)
            make(unfinished)
            torch.set_rng_state(state)  # who asks first draws the same numbers as who asks second
            unfinished.rename(home)
    return home


def begun(*recipes: str | Recipe, images: int = 200, closed: Mapping[str, int] | None = None, **changes: Any) -> Path:
    """The folder of a run before its first step, with a checkpoint; not to be written to.

    Args:
        recipes: one, by itself or by its name, or those of a stack.
        images: how many the data set has; it is made of noise.
        closed: how many gates are closed from the start, by placement.
        changes: to all recipes.
    """
    told = [_recipe(r, changes) for r in recipes]

    def make(home: Path) -> None:
        trainer = Trainer(told, stand_in(told[0].data, images=images))
        for name, count in (closed or {}).items():
            gated = trainer.runs.template.network
            assert isinstance(gated, Gated)
            gate = dict(gated.named_gates())[name]
            gate.close_(torch.arange(gate.shape.numel()) < count)
        saver.save(trainer, Folder.create(home, told, ABOUT))

    return once(_key("begun", told, images=images, closed=dict(closed or {})), make)


def finished(
    *recipes: str | Recipe, images: int = 200, closed: Mapping[str, int] | None = None, every: int = 1, **changes: Any
) -> Path:
    """The folder of a run that was trained to its end; not to be written to.

    Args:
        recipes: one, by itself or by its name, or those of a stack.
        images: how many the data set has; it is made of noise.
        closed: how many gates are closed from the start, by placement.
        every: evaluated after so many epochs.
        changes: to all recipes.
    """
    told = [_recipe(r, changes) for r in recipes]

    def make(home: Path) -> None:
        if closed:
            copied(begun(*told, images=images, closed=closed), home)
        folder = Folder.open(home) if closed else Folder.create(home, told, ABOUT)
        train(told, stand_in(told[0].data, images=images), folder, every=every)

    return once(_key("finished", told, images=images, closed=dict(closed or {}), every=every), make)


ABOUT = {"command": "ellzero train small.toml", "torch": torch.__version__}


def copied(run: Path, to: Path) -> Path:
    """A copy of a run for one test, which may write to it.

    Args:
        run: a folder.
        to: where the copy will be; nothing is there yet.
    """
    return Path(shutil.copytree(run, to))


def _recipe(recipe: str | Recipe, changes: Mapping[str, Any]) -> Recipe:
    told = get(recipe) if isinstance(recipe, str) else recipe
    return told.override(**changes) if changes else told


def _key(kind: str, recipes: list[Recipe], **settings: Any) -> str:
    content = {"recipes": [r.to_dict() for r in recipes], **settings}
    return f"{kind}-{recipes[0].name}\n{json.dumps(content, sort_keys=True, default=str)}"
