"""Run folders: where a run on disk has its recipes, its history, its checkpoints and its results.

    run.json            the recipes, and what is needed to repeat the run
    history.jsonl       one line of JSON per run and evaluated epoch
    checkpoints/        those of `checkpoint`
    results.json        one entry per recipe, when the run is finished
    compact.safetensors the compact network, which `ellzero train` puts there

A folder holds one run, or a stack of runs that were trained together. Files appear when they are complete. What the
records and results mean is the business of `training`; here they are plain data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import records
from ellzero.experiments.store.records import FolderError
from ellzero.out.files import remove_leftovers, write_text, writing

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

FORMAT, FORMAT_VERSION = "ellzero.run", 1
_RUN, _HISTORY, _CHECKPOINTS, _RESULTS = "run.json", "history.jsonl", "checkpoints", "results.json"
_COMPACT = "compact.safetensors"


@final
class Folder:
    """A run on disk, or a stack of runs that are trained together. Made by `create` and by `open`.

    Args:
        path: the folder.
        recipes: one for each run.
        about: what is needed to repeat the run, as `provenance` gives it.

    Example:
        >>> import tempfile
        >>> from ellzero.experiments.papers import get
        >>> with tempfile.TemporaryDirectory() as home:
        ...     folder = Folder.create(Path(home, "demo"), [get("demo")])
        ...     folder.log([{"epoch": 1, "error": 5.0}, {"epoch": 2, "error": math.nan}])
        ...     Folder.open(folder.path).history()
        [{'epoch': 1, 'error': 5.0}, {'epoch': 2, 'error': None}]
    """

    def __init__(self, path: Path, recipes: list[Recipe], about: dict[str, Any]) -> None:
        self.path, self.recipes, self.about = path, recipes, about
        self._ends_in_a_record = False  # unknown: another process may have been killed while it wrote

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], recipes: Sequence[Recipe], about: Mapping[str, Any] | None = None
    ) -> Self:
        """Makes the folder of a new run; what else lies in it is left alone.

        Args:
            path: the folder; it and those above it are made where they do not exist.
            recipes: one for each run.
            about: what is needed to repeat the run, as plain data.

        Raises:
            ValueError: there are no recipes.
            FolderError: it holds a run already.
            FileError: it cannot be written to.
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
        records.write(home / _RUN, content, indent=2)
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The run in a folder.

        Raises:
            FolderError: there is none, or `run.json` is damaged or of another version.
        """
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

        What a killed training left half written is removed: nobody else writes these files now.

        Raises:
            FolderError: another process has it.
        """
        if fcntl is None:  # Windows has no such lock
            yield
            return
        with open(self.path / _RUN, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FolderError(f"{str(self.path)!r} is being trained by another process") from error
            except OSError:  # a file system without locks, where nobody knows who else writes
                pass
            else:
                for name in (_RUN, _HISTORY, _RESULTS, _COMPACT):
                    remove_leftovers(self.path, name)
                remove_leftovers(self.checkpoints, "step-*")
            yield

    # ---- history ----------------------------------------------------------------------------------------------------

    def history(self) -> list[dict[str, Any]]:
        """All records, in the order in which they were written, without one that was cut off in the end.

        Raises:
            FolderError: a line before the last is no record, or the file cannot be read.
        """
        return [record for record, _ in self._lines()]

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds records to the history; they are on the disk when this returns.

        Args:
            records: plain data; NaN and infinity, which JSON does not know, are written as null.

        Raises:
            FileError: the file cannot be written.
            FolderError: it is damaged.
        """
        file = self.path / _HISTORY
        data = "".join(_line(record) for record in records).encode()
        whole = None if self._ends_in_a_record else sum(size for _, size in self._lines())
        self._ends_in_a_record = False
        with writing(file), file.open("ab") as stream:
            if whole is not None:  # a line that was cut off would swallow the next one
                stream.truncate(whole)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        self._ends_in_a_record = True

    def cut(self, count: int) -> None:
        """Keeps the first `count` records only: what came after a checkpoint comes again when the run goes on from it.

        Raises:
            ValueError: `count` is negative.
            FolderError: there are fewer, or the file is damaged.
            FileError: it cannot be written.
        """
        if count < 0:
            raise ValueError(f"`count` must not be negative, got {count}")
        lines = self._lines()
        if len(lines) < count:
            raise FolderError(
                f"{str(self.path / _HISTORY)!r} has {len(lines)} records, and the run wrote {count}: some are lost"
            )
        if (self.path / _HISTORY).exists():
            write_text(self.path / _HISTORY, "".join(_line(record) for record, _ in lines[:count]))
        self._ends_in_a_record = True

    def _lines(self) -> list[tuple[dict[str, Any], int]]:
        """Every record, and how many bytes of the file it takes."""
        file = self.path / _HISTORY
        try:
            lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        except OSError as error:
            raise FolderError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
        records = []
        for number, line in enumerate(lines, 1):
            record = _parsed(line)
            if record is None and number < len(lines):
                raise FolderError(f"{str(file)!r} is damaged: line {number} of {len(lines)} is no record")
            if record is not None:
                records.append((record, len(line)))
        return records

    # ---- results ----------------------------------------------------------------------------------------------------

    def finish(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Writes what came out, and with that says that the run is finished.

        Args:
            results: one for each recipe, plain data.

        Raises:
            ValueError: there are more or fewer.
            FileError: the file cannot be written.
        """
        if len(results) != len(self.recipes):
            raise ValueError(f"`results` must be one for each of {len(self.recipes)} recipes, got {len(results)}")
        records.write(self.path / _RESULTS, results, indent=2)

    def results(self) -> list[dict[str, Any]] | None:
        """What came out, one for each recipe; None of a run that is not finished.

        Raises:
            FolderError: the file is damaged.
        """
        file = self.path / _RESULTS
        if not file.exists():
            return None
        content = records.read(file)
        if not isinstance(content, list) or len(content) != len(self.recipes):
            raise FolderError(f"{str(file)!r} is damaged: it must be a list of {len(self.recipes)} results")
        return content


def refuse_busy(home: Path) -> None:
    """Says no to what would remove the runs in a folder while another process trains one of them.

    Args:
        home: whose folders are those of runs, damaged or not; it need not be there.

    Raises:
        FolderError: another process does.
    """
    for file in sorted(home.glob(f"*/{_RUN}")):
        with Folder(file.parent, [], {}).locked():
            pass


def pace(history: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """How long an epoch of training took, from record to record: first and last epoch, and seconds for each between.

    Compilation is in them. Records of the same epoch, as there are where units are closed at the end, count as one.

    Args:
        history: records of one run, with "epoch" and "seconds" since the record before.

    Example:
        >>> pace([{"epoch": 2, "seconds": 9.0}, {"epoch": 7, "seconds": 10.0}, {"epoch": 7, "seconds": 0.1}])
        [(0.0, 2.0, 4.5), (2.0, 7.0, 2.0)]
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
    return json.dumps(records.plain(record), allow_nan=False) + "\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line, if it is whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


__all__ = ["Folder", "FolderError", "pace", "refuse_busy"]
