"""Writes files whole or not at all. Everything in this library that writes a file does it here.

A write goes to a temporary file beside its target, reaches the disk, and only then gets the target's name: a crash
leaves the old file or the new one, and at worst a temporary file. Nothing here knows what is in a file.
"""

from __future__ import annotations

import errno
import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

_CHUNK = 1 << 24  # bytes written at a time
_ABANDONED = 3600.0  # seconds after which a temporary file that nobody touches belongs to a process that is gone


@final
class FileError(OSError):
    """A file cannot be written; the message says which one, and why."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says against writing to `path` into a `FileError`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's: a `FileError`, or one of a library that fetches what is written
            raise
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise FileError(f"{str(path)!r} cannot be written: {why}") from error


@contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Gives a temporary path to write to, which becomes `path` when the block ends, and goes when it fails.

    It lies in the same folder, which must exist, and has the same ending. Where a `FileError` says that the file cannot
    be written, what was there before is there still. A `new` file replaces none: of several writers one succeeds.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp{path.suffix}")
    with writing(path):
        remove_leftovers(path.parent, glob.escape(path.name), _ABANDONED)
        try:
            yield unfinished
            with open(unfinished, "r+b") as file:
                os.fsync(file.fileno())
            _place_new(unfinished, path) if new else os.replace(unfinished, path)
        except BaseException:  # an interrupt too
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        if os.name != "nt":  # has no way to make a new name survive a power cut, and needs none
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _place_new(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
        unfinished.unlink()
    except FileExistsError:
        raise
    except OSError:  # a file system without links: the name is taken first, and filled then
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.replace(unfinished, path)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    with replacing(path) as unfinished, open(unfinished, "xb") as file:
        view = memoryview(data)
        while view:
            view = view[os.write(file.fileno(), view[:_CHUNK]) :]


def write_text(path: Path, text: str) -> None:
    """Writes text as UTF-8, with the line ends it has, whole or not at all."""
    write_bytes(path, text.encode())


def remove_leftovers(folder: Path, names: str, seconds: float = 0.0) -> None:
    """Removes what killed writes of files with such names left, untouched for so long, where nobody else writes."""
    for leftover in folder.glob(".*.tmp*"):  # few if any; a pattern for each name would be compiled each time
        with suppress(OSError):  # another process removed it, or it is not ours to remove
            ours = leftover.match(f".{names}.{'[0-9a-f]' * 32}.tmp*")
            if ours and time.time() - leftover.stat().st_mtime >= seconds:
                leftover.unlink()
