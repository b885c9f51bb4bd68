"""Run folders: where a run on disk has its recipes, its history, its checkpoints and its results.

    run.json            the recipes, and what is needed to repeat the run
    history.jsonl       one line of JSON per run and evaluated epoch, with its checksum
    checkpoints/        see `checkpoint`
    results.json        one entry per recipe, when the run is finished
    compact.safetensors the compact network, which `ellzero train` puts there

Files appear when they are complete. What records and results mean is not known here: they are plain data.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import records
from ellzero.experiments.store.records import FolderError
from ellzero.out.files import FileError, remove_leftovers, replacing, write_bytes, write_text, writing

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

FORMAT, FORMAT_VERSION = "ellzero.run", 1
_RUN, _HISTORY, _CHECKPOINTS, _RESULTS = "run.json", "history.jsonl", "checkpoints", "results.json"
COMPACT, _SUM = "compact.safetensors", "crc32"


@final
class Folder:
    """A run on disk, or a stack of runs that are trained together, each with its recipe; `about` is what is needed to
    repeat them, as `provenance` gives it. Made by `create` and by `open`.
    """

    def __init__(self, path: Path, recipes: list[Recipe], about: dict[str, Any]) -> None:
        self.path, self.recipes, self.about = path, recipes, about
        self._ends_in_a_record = False  # unknown: another process may have been killed while it wrote
        self._lock: int | None = None  # the handle of a file
        self._in_block = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        recipes: Sequence[Recipe],
        about: Mapping[str, Any] | None = None,
        *,
        lock: bool = False,
    ) -> Self:
        """Makes the folder of a new run, and those above it; what else lies in it is left alone.

        With `lock` it is this process's from its first moment, until the block of `locked` ends. A FolderError says
        that it holds a run already, a FileError that it cannot be written to.
        """
        home = Path(path)
        if not recipes:
            raise ValueError("`recipes` must be at least one recipe, got none")
        if home.exists() and not home.is_dir():
            raise FolderError(f"`path` must be a folder, got the file {str(home)!r}")
        with writing(home):
            for name in (_RUN, _HISTORY, _CHECKPOINTS, _RESULTS):
                if (home / name).exists():
                    raise FolderError(f"{str(home)!r} holds a run already: `{name}` is there")
            home.mkdir(parents=True, exist_ok=True)
        folder = cls(home, list(recipes), records.plain(dict(about or {})))
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        content = {**head, "recipes": [r.to_dict() for r in folder.recipes], "about": folder.about}
        try:
            with replacing(home / _RUN, new=True) as unfinished:
                unfinished.write_text(records.text(content, indent=2), encoding="utf-8")
                if lock:
                    folder._take(unfinished)
        except FileError as error:
            folder._release()
            if isinstance(error.__cause__, FileExistsError):  # made by another process since we looked
                raise FolderError(f"{str(home)!r} holds a run already: `{_RUN}` is there") from error
            raise
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The run in a folder; a FolderError says that there is none, or that it is damaged or of another version."""
        home = Path(path)
        if not home.is_dir():
            there = f"got the file {str(home)!r}" if home.exists() else f"and there is none at {str(home)!r}"
            raise FolderError(f"`path` must be the folder of a run, {there}")
        if not (home / _RUN).is_file():
            raise FolderError(f"`path` must be the folder of a run, and there is no `{_RUN}` in {str(home)!r}")
        content = records.read_format(home / _RUN, FORMAT, FORMAT_VERSION)
        try:
            recipes, about = [Recipe.from_dict(values) for values in content["recipes"]], dict(content["about"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FolderError(f"{str(home / _RUN)!r} is damaged: {error}") from error
        if not recipes:
            raise FolderError(f"{str(home / _RUN)!r} is damaged: it has no recipe")
        return cls(home, recipes, about)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, whether it exists or not."""
        return self.path / _CHECKPOINTS

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this folder; the lock goes with the process, however it ends.

        What a killed training left half written is removed: nobody else writes these files now. Blocks may be nested.
        A FolderError says that another process has it.
        """
        if self._in_block:  # the one around this one has it
            yield
            return
        self._in_block = True
        try:
            if self._lock is None:
                self._take(self.path / _RUN)
            if self._lock is not None:
                for name in (_RUN, _HISTORY, _RESULTS, COMPACT):
                    remove_leftovers(self.path, name)
                remove_leftovers(self.checkpoints, "step-*")
            yield
        finally:
            self._in_block = False
            self._release()

    def _take(self, file: Path) -> None:
        """Locks the file that is `run.json`, or is to be it."""
        if fcntl is None:  # Windows has no such lock
            return
        self._lock = os.open(file, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(f"{str(self.path)!r} is being trained by another process") from error
        except OSError:  # a file system without locks, where nobody knows who else writes
            self._release()
            return
        if not os.fstat(self._lock).st_nlink:
            raise FolderError(f"{str(self.path)!r} is gone: another process has removed its `{_RUN}`")

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def history(self, *, damaged: bool = False) -> list[dict[str, Any]]:
        """All records, in the order in which they were written, without one that was cut off in the end. Of a `damaged`
        history, those before the damage; else a FolderError says what it is.
        """
        return [record for record, _ in self._lines(damaged)[0]]

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds records to the history; they are on the disk when this returns."""
        file = self.path / _HISTORY
        data = "".join(_line(record) for record in records).encode()
        whole = None if self._ends_in_a_record else sum(size for _, size in self._lines()[0])
        self._ends_in_a_record = False
        with writing(file), file.open("ab") as stream:
            if whole is not None:  # a line that was cut off would swallow the next one
                stream.truncate(whole)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        self._ends_in_a_record = True

    def cut(self, count: int) -> None:
        """Keeps the first `count` records: those after a checkpoint come again when the run goes on from it.

        Of a damaged history those before the damage are kept, and what it was is put beside it.
        """
        if count < 0:
            raise ValueError(f"`count` must not be negative, got {count}")
        file = self.path / _HISTORY
        lines, damage = self._lines(damaged=True)
        if damage:
            write_bytes(file.with_name(f"{_HISTORY}.damaged"), file.read_bytes())
        if file.exists():
            write_text(file, "".join(_line(record) for record, _ in lines[:count]))
        self._ends_in_a_record = True

    def _lines(self, damaged: bool = False) -> tuple[list[tuple[dict[str, Any], int]], bool]:
        """Every record, and how many bytes of the file it takes; and whether damage has ended them."""
        file = self.path / _HISTORY
        try:
            lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        except OSError as error:
            raise FolderError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
        found: list[tuple[dict[str, Any], int]] = []
        summed = False  # lines of before have no checksum; once there is one, all have
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                record = None
            has_sum = isinstance(record, dict) and record.pop(_SUM, None) is not None
            if isinstance(record, dict) and (_line(record).encode() == line if has_sum else not summed):
                found.append((record, len(line)))
                summed = has_sum
            elif number < len(lines) or (line.endswith(b"\n") and _SUM.encode() in line):
                if damaged:
                    return found, True
                raise FolderError(f"{str(file)!r} is damaged: line {number} of {len(lines)} is no record")
        return found, False

    def finish(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Writes what came out, one for each recipe, and with that says that the run is finished."""
        if len(results) != len(self.recipes):
            raise ValueError(f"`results` must be one for each of {len(self.recipes)} recipes, got {len(results)}")
        records.write(self.path / _RESULTS, results, indent=2)

    def results(self) -> list[dict[str, Any]] | None:
        """What came out, one for each recipe; None of a run that is not finished."""
        file = self.path / _RESULTS
        if not file.exists():
            return None
        content = records.read(file)
        if not isinstance(content, list) or len(content) != len(self.recipes):
            raise FolderError(f"{str(file)!r} is damaged: it must be a list of {len(self.recipes)} results")
        return content


def pace(history: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """How long an epoch of training took, from record to record: first and last epoch, and seconds for each between.

    Compilation is in them. Records of the same epoch, as there are where units are closed at the end, count as one.
    """
    out = []
    before = spent = 0.0
    for record in history:
        epoch, seconds = record["epoch"], record.get("seconds")
        spent += seconds if isinstance(seconds, int | float) else math.nan
        if epoch > before:
            if math.isfinite(spent):
                out.append((float(before), float(epoch), spent / (epoch - before)))
            before, spent = epoch, 0.0
    return out


def _line(record: Mapping[str, Any]) -> str:
    plain = records.plain(record)
    text = json.dumps(plain, allow_nan=False)
    return json.dumps(plain | {_SUM: f"{zlib.crc32(text.encode()):08x}"}) + "\n"


__all__ = ["COMPACT", "Folder", "FolderError", "pace"]
