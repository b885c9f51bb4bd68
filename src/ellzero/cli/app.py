"""What the commands share: the application, exit codes, errors of one line, and how things are printed.

A command is a function with type hints and a docstring, under `@app.command`; its arguments and its help come from
these. It prints what was asked for to standard output. For what the user has to put right it raises `CommandError`,
which `main` prints as one line. This file knows no command.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, final

import torch
from rich.console import Console
from tyro.extras import SubcommandApp

from ellzero.experiments.data import DataError
from ellzero.experiments.store.checkpoint import CheckpointError
from ellzero.experiments.store.folder import FolderError
from ellzero.experiments.train.loop import Stopped
from ellzero.experiments.train.trainer import DivergedError
from ellzero.graph.plan import ClosedAxisError
from ellzero.out.compaction import CompactionError
from ellzero.out.files import FileError
from ellzero.out.reporting import render

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130

_REFUSALS: tuple[type[Exception], ...] = (
    FileError, FolderError, CheckpointError, DataError, ClosedAxisError, CompactionError,
)  # fmt: skip

app = SubcommandApp()


@final
class CommandError(Exception):
    """What the user has to put right, in one line; `code` is what the program exits with."""

    def __init__(self, message: str, code: int = BAD_USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code


@contextmanager
def foreseen(bad_usage: tuple[type[Exception], ...] = (), failed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns what the library and the disk say no to into a `CommandError`.

    Args:
        bad_usage: errors that say that what was typed makes no sense.
        failed: errors that say that the work failed, beside those that any command may meet.
    """
    try:
        yield
    except bad_usage as error:
        raise CommandError(str(error)) from error
    except (*_REFUSALS, *failed) as error:
        raise CommandError(str(error), FAILED) from error
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        raise CommandError(f"{where}{error.strerror or said(error)}", FAILED) from error


@contextmanager
def resumable(again: str, fewer: str) -> Iterator[None]:
    """Turns the early end of a training of many runs into a `CommandError`.

    Args:
        again: the command that goes on with it.
        fewer: what to do where the memory is not enough.
    """
    try:
        yield
    except Stopped as stopped:
        raise CommandError(f"{stopped}: saved; resume with: {again}", INTERRUPTED) from stopped
    except KeyboardInterrupt:  # the second one, which does not wait for the step
        raise CommandError(f"interrupted; what was saved goes on with: {again}", INTERRUPTED) from None
    except torch.OutOfMemoryError as error:
        raise CommandError(f"{error}; {fewer}", FAILED) from error
    except DivergedError as error:
        raise CommandError(str(error), FAILED) from error


# ---------------------------------------------------------------- printing


def show(content: Any, width: int | None = None) -> None:
    """Prints anything that rich can print: in colour to a terminal, as plain text of a width elsewhere."""
    if sys.stdout.isatty():
        Console().print(content)
    else:
        say(render(content) if width is None else render(content, width))


def show_json(content: Any) -> None:
    """Prints plain data for a script to read."""
    say(json.dumps(content, indent=2))


def say(*lines: str) -> None:
    """Prints lines as they are: neither wrapped nor coloured."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def tell(line: str) -> None:
    """Prints a line about the work to standard error, beside what was asked for."""
    sys.stderr.write(f"{line}\n")


def silent(line: str) -> None:
    """Prints nothing, in place of `tell`."""


def warn(message: object) -> None:
    """Prints what the user should know of, as one line, to standard error."""
    tell(f"ellzero: warning: {' '.join(str(message).split())}")


def few(names: Sequence[str], most: int = 6) -> list[str]:
    """The names, or the first of them and how many more there are."""
    return list(names) if len(names) <= most else [*names[: most - 1], f"and {len(names) - most + 1} more"]


def said(error: BaseException) -> str:
    """An error in words: its class and its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# ---------------------------------------------------------------- what others print


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Sends Python's warnings through `warn`, without the line of code that they come from."""

    def shown(message: Warning | str, *_: object, **__: object) -> None:
        warn(message)

    with warnings.catch_warnings():
        warnings.showwarning = shown
        yield


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
