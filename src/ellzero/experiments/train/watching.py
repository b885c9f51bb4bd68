"""Watchers: what shows a training while it runs. `Bar` draws a line in the terminal, `TensorBoard` writes event files.

The loop tells a watcher how far it is and what it noted; a watcher tells the loop nothing. This file knows recipes and
the records of a history, and neither networks nor devices.
"""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ellzero.experiments.recipe import Recipe


class AbstractWatcher(ABC):
    """What a training calls while it runs: `begin`, then `step` and `note`, then `end`."""

    @abstractmethod
    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None:
        """Before the first step, with a recipe for each run, the steps that a resumed run has done, and all steps."""

    @abstractmethod
    def step(self, done: int) -> None:
        """After each step, with how many are done. It must be cheap, and may not wait for a device."""

    @abstractmethod
    def note(self, records: list[dict[str, Any]]) -> None:
        """After each evaluation, with a record of each run."""

    @abstractmethod
    def end(self) -> None:
        """After the last step, and after an error too."""


@final
class Bar(AbstractWatcher):
    """A progress bar with epoch, error, kept density, kept MACs, multiplier and time left; of a stack, their means.

    Where nobody looks (a file, a pipe) it is a plain line now and then, and one at the end; at least `seconds` lie
    between two. It goes to standard error, if no `console` is given.

        demo, seed 0: epoch 1/35, 5:40 left, error 12.50 %, density 50.0 %, MACs 25.0 %, multiplier 0.125
    """

    def __init__(
        self, console: Console | None = None, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._seconds, self._clock = seconds, clock
        self._progress: Progress | None = None

    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None:
        self._recipes = list(recipes)
        self._epochs = recipes[0].epochs + recipes[0].finetune_epochs
        self._first, self._done, self._total = done, done, total
        self._started = self._shown = self._clock()
        self._written: float | None = None  # when the last plain line was
        self._numbers = ""
        if self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}")
            self._progress = Progress(*columns, console=self._console, refresh_per_second=4, expand=True)
            self._task = self._progress.add_task(self._title(), total=total, completed=done, text=self._text())
            self._progress.start()

    def step(self, done: int) -> None:
        self._done = done
        now = self._clock()
        if self._progress is not None and now - self._shown >= 0.1:  # a step may take less than it takes to say so
            self._shown = now
            self._progress.update(self._task, completed=done, text=self._text(now))

    def note(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            if "shrunk" in record:
                self._line(_shrunk(record))
        self._numbers = self._summary(records)
        now = self._clock()
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, text=self._text(now))
        elif self._written is None or now - self._written >= self._seconds or records[0]["epoch"] >= self._epochs:
            self._written = now
            self._line(self._text(now))

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, text: str) -> None:
        # Not wrapped: a line of a log is one line.
        self._console.print(f"{self._title()}: {text}", soft_wrap=True, markup=False, highlight=False)

    def _title(self) -> str:
        names = list(dict.fromkeys(r.name for r in self._recipes))
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        runs = len(self._recipes)
        return f"{name}, seed {self._recipes[0].seed}" if runs == 1 else f"{name}, {runs} runs"

    def _text(self, now: float | None = None) -> str:
        epoch = max(1, -(-self._done * self._epochs // self._total))  # the one that the last step was in
        since = 0.0 if now is None else now - self._started
        took = ""
        if self._done >= self._total:
            took = f"{_clock_time(since)} taken"
        elif self._done > self._first:
            took = f"{_clock_time(since / (self._done - self._first) * (self._total - self._done))} left"
        # The numbers come last, because a narrow terminal cuts there.
        return ", ".join(filter(None, (f"epoch {epoch}/{self._epochs}", took, self._numbers)))

    def _summary(self, records: Sequence[Mapping[str, Any]]) -> str:
        mean = "" if len(records) == 1 else "mean "
        own = self._recipes[0]
        parts = [f"{mean}{own.error} {own.told(statistics.fmean(r['error'] for r in records))}"]
        kept = [r["kept"] for r in records if "kept" in r]
        for name, cost in (("density", "l0_norm"), ("MACs", "macs")) if kept else ():
            parts.append(f"{name} {100 * statistics.fmean(k[cost] for k in kept):.1f} %")
        bounded = [r for r, recipe in zip(records, self._recipes, strict=False) if recipe.at_most is not None]
        multipliers = [m for r in bounded for m in r.get("multiplier", [])]
        if multipliers:
            low, high = min(multipliers), max(multipliers)
            parts.append(f"multiplier {low:.3g}" if low == high else f"multipliers {low:.3g} to {high:.3g}")
        return ", ".join(parts)


def _shrunk(record: Mapping[str, Any]) -> str:
    """What an event did to the network that is trained."""
    event = record["shrunk"]
    before, after = (f"{100 * event['macs'][when]:.1f} %" for when in ("before", "after"))
    first = "not " if event["skipped"] else "settled and " if event.get("settled") else ""
    why = ": too little to gain" if event["skipped"] else ""
    if event.get("masked"):
        first, why = "settled and masked, not ", f": {event['masked']}"
    return f"after epoch {record['epoch']}, {first}shrunk from {before} to {after} of the dense MACs{why}"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@final
class TensorBoard(AbstractWatcher):
    """Event files for TensorBoard: a scalar for each number of a record, the epoch being the step.

    A stack gets a folder for each run. After a resume, what was written beyond the checkpoint is no longer shown.
    An ImportError says that `tensorboard` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "`tensorboard` must be installed to write its files: pip install 'ellzero[tensorboard]'"
            ) from error
        self._folder, self._make = Path(folder), SummaryWriter
        self._writers: list[Any] = []

    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None:
        epochs = recipes[0].epochs + recipes[0].finetune_epochs
        next_epoch = done * epochs // total + 1 if done else None
        homes = [self._folder]
        if len(recipes) > 1:
            homes = [self._folder / f"{number}-{r.name}-seed{r.seed}" for number, r in enumerate(recipes)]
        self._writers = [self._make(str(home), purge_step=next_epoch) for home in homes]

    def step(self, done: int) -> None:
        pass

    def note(self, records: list[dict[str, Any]]) -> None:
        for writer, record in zip(self._writers, records, strict=True):
            for name, value in _numbers({k: v for k, v in record.items() if k not in ("epoch", "seed")}):
                writer.add_scalar(name, value, record["epoch"])
            writer.flush()

    def end(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in plain data by the way to them: `error`, `kept/macs`, `multiplier/0`."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _numbers(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
