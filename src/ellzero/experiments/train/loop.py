"""The one training loop: from recipes and data to trained gated networks, with their history.

`train` is the loop; what a step does is in `stepping.step`, how files are written in `store`. Here is what happens
around the steps: going on from a checkpoint, saving, evaluating, and stopping when told to.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor

from ellzero.experiments.data import Dataset, Tensors, stand_in
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, events, saver
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.stepping.optimizing import set_rates
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher

_ECHO_SECONDS = 5.0


@final
class Stopped(Exception):
    """The run was told to stop, and has been saved if it has a folder."""


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
        >>> from ellzero.experiments.train.evaluation import results
        >>> trainer = train([get("demo").override(epochs=1, finetune_epochs=0, batch=4)], stand_in("mnist5k", images=8))
        >>> results(trainer)[0]["costs"]["macs"]["kept"] <= 0.2
        True
    """
    trainer = Trainer(recipes, dataset, None if folder is None else saver.times(folder))
    writes, watchers = trainer.rank == 0, list(watchers) if trainer.rank == 0 else []
    with ExitStack() as after:
        after.callback(trainer.step.part)
        if folder is not None and writes:
            after.enter_context(folder.locked())
        trainer.supply.teacher = _teacher(trainer, folder)
        if folder is not None:
            saver.resume(trainer, folder)
        interrupt = after.enter_context(_Interrupt())
        for watcher in watchers:
            after.callback(watcher.end)
            watcher.begin(trainer.recipes, trainer.steps_done, trainer.policy.steps_in_all)
        saved = time.monotonic()
        while not trainer.done:
            if trainer.policy.turns(trainer.epoch, trainer.step.fixed):
                events.turn(trainer)
            for _ in train_epoch(trainer):
                for watcher in watchers:
                    watcher.step(trainer.steps_done)
                due = folder is not None and time.monotonic() - saved >= save_seconds
                wish = parallel.strongest(2 if interrupt.asked else int(due), trainer.device)
                if wish and folder is not None:
                    saver.save(trainer, folder)
                    saved = time.monotonic()
                if wish == 2:
                    raise Stopped(f"stopped after epoch {trainer.epoch}, step {trainer.position}")
            if trainer.done:
                evaluation.finish(trainer)
            last = trainer.epoch == trainer.recipe.epochs or trainer.done
            if trainer.epoch % every == 0 or last or trainer.event is not None:
                records = evaluation.note(trainer)
                if folder is not None and writes:
                    folder.log(records)
                for watcher in watchers:
                    watcher.note(records)
        if folder is not None:
            if not trainer.history:  # it is lost, and there was nothing left to train
                records = evaluation.note(trainer)
                if writes:
                    folder.log(records)
            saver.save(trainer, folder)
            if writes:
                folder.finish(evaluation.results(trainer))
    return trainer


def _teacher(trainer: Trainer, folder: Folder | None) -> Callable[[Tensor], Tensor] | None:
    """Trains the teachers of runs, if they have any, in a folder inside theirs; what they say of images of each run."""
    own = [recipe.taught_by for recipe in trainer.recipes if recipe.taught_by is not None]
    if not own:
        return None
    place = None
    if folder is not None:
        if not checkpoint.steps(folder.checkpoints):
            saver.save(trainer, folder)  # a run that was begun: who takes it up finds the teacher
        home = folder.path / "teacher"
        place = Folder.open(home) if (home / "run.json").exists() else Folder.create(home, own, folder.about)
    on_gpu = [trainer.device] if trainer.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu):  # runs draw as if there were none
        taught = train(own, trainer.data, place, every=own[0].epochs)
    values, runs, temperature = taught.values(), taught.runs.eval(), trainer.recipe.temperature

    @torch.no_grad()
    def teacher(x: Tensor) -> Tensor:
        return (runs.evaluate(Objective.logits, x, values=values, own=True).float() / temperature).softmax(-1)

    return teacher


def train_epoch(trainer: Trainer) -> Iterator[Tensor]:
    """The rest of an epoch, step by step: yields the task losses (runs,) after each; nothing at the end."""
    if trainer.done:
        return
    started = time.perf_counter()
    trainer.runs.train()
    if trainer.gates:  # in tuning the gates stay at their test-time values and only the weights move
        trainer.runs.template.network.training = not trainer.step.fixed
    set_rates(trainer.optimizer, *trainer.policy.rates(trainer.epoch))
    order, noise = trainer.supply.epoch(trainer.epoch, trainer.position)
    while trainer.position < trainer.policy.steps_per_epoch:
        loss = trainer.take(order[trainer.position], noise[trainer.position])
        trainer.summed += 1
        trainer.position += 1
        trainer.seconds += time.perf_counter() - started
        yield loss
        started = time.perf_counter()
    trainer.epoch, trainer.position = trainer.epoch + 1, 0
    parallel.from_first(list(trainer.runs.template.buffers()))  # batch norm saw another share in each process
    parallel.refuse_different({**trainer.runs.values(), "multiplier": trainer.lagrangian.multiplier})
    trainer.step.losses.tolist()  # waits for the device
    events.after_epoch(trainer)
    trainer.seconds += time.perf_counter() - started


def noise_like(folder: Folder, images: int) -> Tensors:
    """Noise that stands in for the data of a run."""
    return stand_in(folder.recipes[0].data, images, record=folder.about.get("own", {}).get("data"))


def restore(folder: Folder, dataset: Dataset | None = None) -> Trainer:
    """The newest state in a folder, to look at; without its data it cannot be tested. A CheckpointError says that there
    is none that can be read.
    """
    dataset = noise_like(folder, folder.recipes[0].batch) if dataset is None else dataset
    trainer = Trainer(folder.recipes, dataset, saver.times(folder))
    if not saver.resume(trainer, folder, cut=False):
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
        now = time.monotonic()
        if not self.asked:
            self.asked, self.since = True, now
        # A launcher passes on the Ctrl-C that the terminal has sent to its processes already: that is no second one.
        elif not parallel.launched() or now - self.since >= _ECHO_SECONDS:
            signal.default_int_handler(number, frame)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
