"""Studies: rows of recipes beside published numbers, or something to compute. A file in `reproductions/` defines one
`STUDY`; `studies` finds them. This file does not know what a row is about, nor how it is trained.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from rich.table import Table

from ellzero.experiments.campaign import Record
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.study.records import table


@final
class StudyError(Exception):
    """There is no such study, row or result; the message says why."""


@final
@dataclass(frozen=True)
class Row:
    """One row of a published table.

    Args:
        label: as the paper has it.
        recipe: how we run it.
        architecture: the published pruned architecture; empty where there is none.
        error: the published error in percent, as printed; empty where there is none.
    """

    label: str
    recipe: Recipe
    architecture: str = ""
    error: str = ""


@final
@dataclass(frozen=True)
class Study:
    """A published table or figure, and how it is made again: by training rows, or by computing.

    Args:
        name: what it is called on the command line and in file names.
        title: above its table.
        rows: what is trained; their recipes have different names.
        seeds: how many each row is trained with, unless asked for otherwise.
        compute: makes the records of a study that trains nothing; each has a "name".
        table: makes the table from the records.
        draw: writes the figures into a folder, from the records alone, and returns the files.
        keep_networks: whether the compact network of every run with gates is kept beside the records.

    Raises:
        ValueError: two recipes have the same name or different data, or it has rows and computes too, or neither.
    """

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    seeds: int = 5
    compute: Callable[[], list[Record]] | None = None
    table: Callable[[Sequence[Record], str], Table] | None = table
    draw: Callable[[Sequence[Record], Path], list[Path]] | None = None
    keep_networks: bool = False

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
        """The rows whose recipe's name matches, with the recipe that will be run.

        Args:
            epochs: instead of the recipes' own.
            data: instead of the recipes' own.
            only: pattern of recipe names, or several with commas between them.

        Raises:
            StudyError: a pattern matches no name.
        """
        changes = {name: value for name, value in (("epochs", epochs), ("data", data)) if value is not None}
        names, wanted = [r.recipe.name for r in self.rows], [pattern.strip() for pattern in only.split(",")]
        for pattern in wanted if self.rows else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise StudyError(f"`--only` must match the name of a recipe ({', '.join(names)}), got {pattern!r}")
        return [
            (row, row.recipe.override(**changes))
            for row in self.rows
            if any(fnmatchcase(row.recipe.name, pattern) for pattern in wanted)
        ]


def studies(folder: Path | None = None) -> dict[str, Study]:
    """All studies by their names: those that the files of `reproductions/` define, one as `STUDY`.

    Args:
        folder: of the files; the one that comes with the package, or the source tree's, if absent.

    Raises:
        StudyError: there is no such folder, or two studies have one name.
    """
    found: dict[str, Study] = {}
    for path in sorted((home() if folder is None else folder).glob("*.py")):
        for study in _load(path):
            if study.name in found:
                raise StudyError(f"two files define the study `{study.name}`; one is {path.name}")
            found[study.name] = study
    return found


def find(name: str, known: dict[str, Study]) -> Study:
    """The study of this name; "_" may stand for "-".

    Raises:
        StudyError: there is none.
    """
    wanted = name.removesuffix(".py").replace("_", "-")
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
    raise StudyError(f"`{name}` is not the name of a study; {hint}")


def home() -> Path:
    """The folder of the studies: inside an installed package, or at the top of the source tree.

    Raises:
        StudyError: it is in neither place.
    """
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
