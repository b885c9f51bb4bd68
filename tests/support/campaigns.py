"""What tests of many runs share: watchers, a stand-in for training that takes no time, the studies, and records with
numbers from a hat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.study import Study, studies
from ellzero.experiments.train.trainer import DivergedError
from ellzero.experiments.train.watching import AbstractWatcher
from support import ROOT
from support.scripts import loaded

DENSE = {
    "lenet300": {"l0_norm": 266_200.0, "params": 266_610.0, "macs": 266_200.0},
    "lenet5": {"l0_norm": 430_570.0, "params": 431_080.0, "macs": 2_293_000.0},
    "preresnet-110": {"l0_norm": 0.86e6, "params": 1_730_522.0, "macs": 253e6},
    "wrn-28-10": {"l0_norm": 17e6, "params": 36_479_194.0, "macs": 5.2e9},
    "gpt-6-6-384": {"l0_norm": 1e7, "params": 10_770_048.0, "macs": 3_026_288_640.0},
    "vit-lite-7-4": {"l0_norm": 3e6, "params": 3_716_874.0, "macs": 254.5e6},
    "vit-lite-6-4": {"l0_norm": 3e6, "params": 3_190_538.0, "macs": 218.2e6},
    "vit-lite-7-4-176": {"l0_norm": 1e6, "params": 1_766_874.0, "macs": 123.7e6},
    "vit-lite-7-4-136": {"l0_norm": 1e6, "params": 1_060_674.0, "macs": 75.8e6},
    "gpt-6-6-264": {"l0_norm": 5e6, "params": 5_106_288.0, "macs": 1_496_647_680.0},
}


class Watching(AbstractWatcher):
    """Notes where each stack begins and its steps, and does something at one step of one stack, counted from 0."""

    def __init__(self, stack: int = -1, step: int = 0, do: Callable[[], object] = lambda: None) -> None:
        self.stack, self.at, self.do = stack, step, do
        self.begun: list[int] = []
        self.steps: list[int] = []

    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None:
        self.begun.append(done)

    def step(self, done: int) -> None:
        self.steps.append(done)
        if (len(self.begun) - 1, done) == (self.stack, self.at):
            self.do()

    def note(self, records: list[dict[str, Any]]) -> None:
        pass

    def end(self) -> None:
        pass


def crash() -> None:
    raise RuntimeError("the power went")


class Untrained:
    """Takes the place of `loop.train`: writes what training would write, with numbers made of the recipe alone."""

    def __init__(self) -> None:
        self.stacks: list[list[Recipe]] = []

    @property
    def sizes(self) -> list[int]:
        return [len(stack) for stack in self.stacks]

    def __call__(
        self, recipes: Sequence[Recipe], dataset: Dataset, folder: Folder, *, every: int = 1, watchers: Any = ()
    ) -> Any:
        self.stacks.append(list(recipes))
        with folder.locked():
            for watcher in watchers:
                watcher.begin(recipes, 0, 1)
                watcher.step(1)
            for recipe in recipes:
                if recipe.penalty == 1e30:
                    raise DivergedError(f"the loss of `{recipe.name}`, seed {recipe.seed}, is nan")
            history = {"epoch": 1, "loss": None, "tuning": False, "seconds": 1.0}
            folder.log([{**history, "run": r.name, "seed": r.seed, "error": error(r)} for r in recipes])
            folder.finish([result(recipe) for recipe in recipes])
        return object()


def error(recipe: Recipe) -> float:
    penalty = recipe.penalty if isinstance(recipe.penalty, float) else 0.0
    return 1 + 10 * penalty + recipe.seed / 10


def result(recipe: Recipe) -> dict[str, Any]:
    """What comes out of a run; with a penalty of 1e6 nothing is left of a layer."""
    penalty = recipe.penalty if isinstance(recipe.penalty, float) else 0.0
    left = 1 / (1 + penalty)
    return {
        "recipe": recipe.to_dict(),
        "seed": recipe.seed,
        "seconds": 1.0,
        "error_best": error(recipe) - 0.5,
        "error_last": error(recipe),
        "architecture": {"fc1": int(784 * left), "fc2": int(300 * left), "fc3": int(100 * left)},
        "costs": {name: {"dense": n, "expected": left, "kept": left} for name, n in DENSE["lenet300"].items()},
    }


# ---- studies --------------------------------------------------------------------------------------------------------


@cache
def known() -> dict[str, Study]:
    return studies()


@cache
def module(name: str) -> ModuleType:
    return loaded(ROOT / "reproductions" / f"{name}.py")


def invented(study: Study, seeds: int = 3, epochs: int = 4) -> list[dict[str, Any]]:
    """Records as `reproduce` writes them, with numbers from a hat."""
    rng = random.Random(0)
    records = []
    for row, recipe in study.recipes(epochs=epochs):
        at_most = recipe.at_most if isinstance(recipe.at_most, dict) else {"*": recipe.at_most or 0.3}
        share = min(at_most.values())
        runs = []
        for seed in range(seeds):
            history: list[dict[str, Any]] = []
            for epoch in range(1, epochs + 1 + 2 * recipe.finalize):
                point = {
                    "epoch": epoch,
                    "error": 1 + 5 / epoch + rng.random(),
                    "loss": 0.1,
                    "multiplier": [0.1 * epoch],
                    "seconds": 3.0,
                }
                gates = recipe.placement is not None
                kept = dict.fromkeys(("l0_norm", "params", "macs") if gates else (), share + (1 - share) / epoch)
                history.append(point | {"expected": kept, "kept": kept})
                if epoch > epochs:
                    history[-1]["tuning"] = True
            fractions = {k: {"dense": v, "expected": share, "kept": share} for k, v in DENSE[recipe.network].items()}
            runs.append(
                {
                    "seed": seed,
                    "error_best": min(h["error"] for h in history),
                    "error_last": history[-1]["error"],
                    "architecture": {"fc1": 10, "fc2": 7},
                    **({"costs": fractions} if gates else {}),
                    "constraints": {p: {"at_most": e, "expected": e + 0.01, "kept": e} for p, e in at_most.items()},
                    "history": history,
                    "seconds_of_stack": 12.0,
                    "runs_in_stack": 6,
                }
            )
        about = {"commit": "0" * 40, "torch": "2.13.0", "python": "3.11", "device": "CPU", "date": "2026-01-01"}
        published = {"architecture": row.architecture, "error": row.error}
        records.append({"row": row.label, "published": published, "recipe": recipe.to_dict(), **about, "seeds": runs})
    return records
