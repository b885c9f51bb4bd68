"""What the commands share: exit codes, errors of one line, and how things are printed.

A command prints what was asked for to standard output. For what the user has to put right it raises `CommandError`,
which `main` prints as one line. This file knows no command.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TextIO, final

import torch
from rich.console import Console

from ellzero.experiments.arena.fighting import ArenaError
from ellzero.experiments.arena.rivals import RivalMissingError
from ellzero.experiments.campaign import CampaignError
from ellzero.experiments.data import DataError, OwnError
from ellzero.experiments.figures import PlotsMissingError
from ellzero.experiments.store.checkpoint import CheckpointError
from ellzero.experiments.store.folder import FolderError
from ellzero.experiments.study import StudyError
from ellzero.experiments.train.trainer import DivergedError
from ellzero.graph.plan import ClosedAxisError
from ellzero.out.compaction import CompactionError
from ellzero.out.files import FileError
from ellzero.out.tables import WIDTH, render
from ellzero.page import PageMissingError

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
_MISTYPED: tuple[type[Exception], ...] = (StudyError, CampaignError, OwnError)
_FAILURES: tuple[type[Exception], ...] = (
    FileError, FolderError, CheckpointError, DataError, ClosedAxisError, CompactionError, DivergedError,
    PageMissingError, PlotsMissingError, RivalMissingError, ArenaError, torch.OutOfMemoryError,
)  # fmt: skip


@final
class CommandError(Exception):
    """What the user has to put right, in one line; `code` is what the program exits with."""

    def __init__(self, message: str, code: int = BAD_USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


def refuse(condition: object, message: str, code: int = BAD_USAGE) -> None:
    """Raises `CommandError` where the condition holds."""
    if condition:
        raise CommandError(message, code)


@contextmanager
def foreseen(*bad_usage: type[Exception]) -> Iterator[None]:
    """Turns what the library and the disk say no to into a `CommandError`; `bad_usage` says that it was mistyped."""
    try:
        yield
    except (*_MISTYPED, *bad_usage) as error:
        raise CommandError(str(error)) from error
    except _FAILURES as error:
        raise CommandError(str(error), FAILED) from error
    except BrokenPipeError:  # nobody reads what is printed: `main` knows
        raise
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        raise CommandError(f"{where}{error.strerror or said(error)}", FAILED) from error


def show(content: Any, width: int = WIDTH) -> None:
    """Prints anything that rich can print: in colour to a terminal, as plain text of a width elsewhere."""
    if sys.stdout.isatty():
        Console().print(content)
    else:
        say(render(content, width))


def show_json(content: Any) -> None:
    """Prints plain data for a script to read."""
    say(json.dumps(content, indent=2))


def say(*lines: str) -> None:
    """Prints lines as they are: neither wrapped nor coloured."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def tell(*lines: str) -> None:
    """Prints lines about the work to standard error, beside what was asked for."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def warn(message: object) -> None:
    """Prints what the user should know of, as one line, to standard error."""
    tell(f"ellzero: warning: {' '.join(str(message).split())}")


def drawn(files: Iterable[Path]) -> list[str]:
    """A line for each picture among the files."""
    return [f"figure: {file}" for file in files if file.suffix in (".png", ".svg")]


def few(names: Sequence[str], most: int = 6) -> list[str]:
    """The names, or the first of them and how many more there are."""
    return list(names) if len(names) <= most else [*names[: most - 1], f"and {len(names) - most + 1} more"]


def said(error: BaseException) -> str:
    """An error in words: its class and its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what torch prints and logs while it traces: whatever is of use in it is in the exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(_Progress(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@final
class _Progress(io.StringIO):
    """Lets nothing through but progress lines, which begin with a carriage return."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def isatty(self) -> bool:
        return self.stream.isatty()

    def write(self, text: str) -> int:
        if text.startswith("\r"):
            self.stream.write(text)
        return len(text)
