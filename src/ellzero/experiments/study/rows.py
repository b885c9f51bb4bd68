"""Studies: rows of recipes beside published numbers, or something to compute. A file in `reproductions/` defines one
`STUDY`; `studies` finds them. This file does not know what a row is about, nor how it is trained.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from rich.table import Table

from ellzero.experiments.campaign import Record
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.recipe.definition import nearest
from ellzero.experiments.study.records import table


@final
class StudyError(Exception):
    """There is no such study, row or result; the message says why."""


@final
@dataclass(frozen=True)
class Row:
    """One row of a published table; what is not published is empty."""

    label: str  # as the paper has it
    recipe: Recipe  # how we run it
    architecture: str = ""  # after pruning
    error: str = ""  # in percent, as printed


@final
@dataclass(frozen=True)
class Study:
    """A published table or figure, and how it is made again: by training rows, or by computing.

    `compute` makes the records of a study that trains nothing, each with a "name"; `table` and `draw` make the table,
    and the figures in a folder, from the records alone.
    """

    name: str  # on the command line and in file names
    title: str  # above its table
    rows: tuple[Row, ...] = ()
    seeds: int = 5  # that each row is trained with, unless asked for otherwise
    compute: Callable[[], list[Record]] | None = None
    table: Callable[[Sequence[Record], str], Table] | None = table
    draw: Callable[[Sequence[Record], Path], list[Path]] | None = None
    keep_networks: bool = False  # the compact network of every run with gates, beside the records

    def __post_init__(self) -> None:
        names = [row.recipe.name for row in self.rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"`rows` must have recipes of different names, got {', '.join(twice)} more than once")
        data = sorted({row.recipe.data for row in self.rows})
        if len(data) > 1:
            raise ValueError(f"`rows` must have recipes of one data set, got {', '.join(data)}")
        if bool(self.rows) == (self.compute is not None):
            raise ValueError(f"`{self.name}` must have `rows` to train or something to `compute`, and not both")

    def recipes(
        self, *, epochs: int | None = None, data: str | None = None, only: str = "*"
    ) -> list[tuple[Row, Recipe]]:
        """The rows whose recipe's name matches a pattern, or one of several with commas between them, with the recipe
        that will be run: with these epochs and data instead of its own.
        """
        changes = {name: value for name, value in (("epochs", epochs), ("data", data)) if value is not None}
        names, wanted = [row.recipe.name for row in self.rows], set[str]()
        for pattern in map(str.strip, only.split(",")):
            found = [name for name in names if fnmatchcase(name, pattern)]
            if names and not found:
                raise StudyError(f"`--only` must match the name of a recipe ({', '.join(names)}), got {pattern!r}")
            wanted.update(found)
        return [(row, row.recipe.override(**changes)) for row in self.rows if row.recipe.name in wanted]


def studies(folder: Path | None = None) -> dict[str, Study]:
    """All studies of the files of a folder, by default `reproductions/`, by their names; each file has a `STUDY`."""
    found: dict[str, Study] = {}
    for path in sorted((folder or home()).glob("*.py")):
        for study in _load(path):
            if study.name in found:
                raise StudyError(f"two files define the study `{study.name}`; one is {path.name}")
            found[study.name] = study
    return found


def find(name: str, known: dict[str, Study]) -> Study:
    """The study of this name; "_" may stand for "-"."""
    wanted = name.removesuffix(".py").replace("_", "-")
    if wanted in known:
        return known[wanted]
    raise StudyError(f"`{name}` is not the name of a study; {nearest(wanted, known)}")


def home() -> Path:
    """The folder of the studies: inside an installed package, or at the top of the source tree."""
    package = Path(__file__).parents[2]
    for folder in (package / "reproductions", package.parent.parent / "reproductions"):
        if folder.is_dir():
            return folder
    raise StudyError("the studies are missing: there is no folder `reproductions` in this installation")


def _load(path: Path) -> list[Study]:
    if "STUDY" not in path.read_text(encoding="utf-8"):
        return []  # a tool that lies beside them
    spec = importlib.util.spec_from_file_location(f"ellzero_reproductions_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [value for value in vars(module).values() if isinstance(value, Study)]
