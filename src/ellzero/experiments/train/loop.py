"""The one training loop: from recipes and data to trained gated networks, with their history.

`train` is the loop; what one step does is in `trainer`, how files are written in `checkpoint` and `folders`. Here is
what happens around the steps: going on from a checkpoint, saving, evaluating, and stopping when told to.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, final

from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher

_ECHO_SECONDS = 5.0


@final
class Stopped(Exception):
    """The run was told to stop, and has been saved if it has a folder."""


# ---------------------------------------------------------------- the loop


def train(
    recipes: Sequence[Recipe],
    dataset: Dataset,
    folder: Folder | None = None,
    *,
    every: int = 1,
    watchers: Sequence[AbstractWatcher] = (),
    save_seconds: float = 60.0,
) -> Trainer:
    """Trains to the end of the recipes: all epochs, then finalising and tuning where they say so.

    Args:
        recipes: one per run; more than one is a stack.
        dataset: on the device to train on.
        folder: where history, checkpoints and results go. If it has a checkpoint, the run goes on from there.
        every: evaluate after every so many epochs, and after the last.
        watchers: told about every step and every record.
        save_seconds: a checkpoint is written when so many seconds have gone by since the last, and at the end.

    Returns:
        The trainer, at the end of its runs.

    Raises:
        Stopped: Ctrl-C or SIGTERM came; the step was finished and the run saved.
        DivergedError: the loss of a run is not a number any more.
        FolderError: another process trains in the folder.

    Example:
        >>> from ellzero.experiments.data import stand_in
        >>> from ellzero.experiments.papers import get
        >>> trainer = train([get("demo").override(epochs=1, finetune_epochs=0, batch=4)], stand_in("mnist5k", images=8))
        >>> trainer.results()[0]["costs"]["macs"]["kept"] <= 0.2
        True
    """
    trainer = Trainer(recipes, dataset)
    writes, watchers = parallel.rank() == 0, list(watchers) if parallel.rank() == 0 else []
    with ExitStack() as after:
        after.callback(trainer.part)
        if folder is not None:
            if writes:
                after.enter_context(folder.locked())
            trainer.resume(folder)
        interrupt = after.enter_context(_Interrupt())
        for watcher in watchers:
            after.callback(watcher.end)
            watcher.begin(trainer.recipes, trainer.steps_done, trainer.steps_in_all)
        saved = time.monotonic()
        while not trainer.done:
            if trainer.gates_have_learned:
                trainer.turn()
            for _ in trainer.train_epoch():
                for watcher in watchers:
                    watcher.step(trainer.steps_done)
                due = folder is not None and time.monotonic() - saved >= save_seconds
                wish = parallel.strongest(2 if interrupt.asked else int(due), trainer.device)
                if wish and folder is not None:
                    trainer.save(folder)
                    saved = time.monotonic()
                if wish == 2:
                    raise Stopped(f"stopped after epoch {trainer.epoch}, step {trainer.position}")
            if trainer.done:
                trainer.finish()
            last = trainer.epoch == trainer.recipe.epochs or trainer.done
            if trainer.epoch % every == 0 or last or trainer.event is not None:
                records = trainer.note()
                if folder is not None and writes:
                    folder.log(records)
                for watcher in watchers:
                    watcher.note(records)
        if folder is not None:
            trainer.save(folder)
            if writes:
                folder.finish(trainer.results())
    return trainer


def restore(folder: Folder, dataset: Dataset) -> Trainer:
    """The newest state in a folder, to look at or to go on from.

    Raises:
        checkpoint.CheckpointError: there is no checkpoint that can be read.
    """
    trainer = Trainer(folder.recipes, dataset)
    if not trainer.resume(folder, cut=False):
        raise checkpoint.CheckpointError(f"there is no checkpoint in {str(folder.path)!r} yet")
    return trainer


@final
class _Interrupt:
    """Turns the first Ctrl-C, or SIGTERM, into a wish, so that the step can be finished; the second is the usual one.

    Of several processes SIGTERM is the launcher's word that another one is gone (`parallel`): there is no next step.
    """

    def __init__(self) -> None:
        self.asked, self.since = False, 0.0

    def __enter__(self) -> _Interrupt:
        self.before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT,) if parallel.launched() else (signal.SIGINT, signal.SIGTERM)
            self.before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # A launcher passes on the Ctrl-C that the terminal has sent to its processes already: that is no second one.
        echo = parallel.launched() and time.monotonic() - self.since < _ECHO_SECONDS
        if self.asked and not echo:
            signal.default_int_handler(number, frame)
        if not self.asked:
            self.asked, self.since = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
