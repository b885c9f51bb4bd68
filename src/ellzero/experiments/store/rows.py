"""A row's record, whatever the occasions on which its seeds were trained: one of all. What a row is of is not known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ellzero.experiments.recipe import differences
from ellzero.experiments.store import records
from ellzero.experiments.store.provenance import in_common
from ellzero.experiments.store.records import FolderError

Record = dict[str, Any]
_SAME = ("row", "published", "recipe", "seeds")  # parts that say what it is; the others say where it is from


def file_name(row: str, first_seed: int = 0) -> str:
    """Of a row's record; that of later seeds says with which they begin."""
    return f"{row}.seed{first_seed}.json" if first_seed else f"{row}.json"


def read(folder: Path, row: str) -> Record | None:
    """The record of a row in a folder, all its seeds joined, or None; a FolderError says what is wrong."""
    there = (folder / file_name(row), *sorted(folder.glob(f"{row}.seed*.json")))
    found = [file for file in there if file.exists()]
    parts = [records.read(file) for file in found]
    for file, part in zip(found, parts, strict=True):
        if not isinstance(part, dict) or (len(parts) > 1 and not part.keys() >= {*_SAME}):
            raise FolderError(f"{str(file)!r} is damaged: it is no record")
    return _joined(row, parts) if len(parts) > 1 else parts[0] if parts else None


def _joined(row: str, parts: Sequence[Record]) -> Record:
    seeds = sorted((seed for part in parts for seed in part["seeds"]), key=lambda seed: seed["seed"])
    for one, other in itertools.pairwise(seeds):
        if one["seed"] == other["seed"]:
            raise FolderError(f"`{row}` has seed {one['seed']} in two files: remove one")
    for part in parts[1:]:
        if words := differences(parts[0]["recipe"], part["recipe"]):
            raise FolderError(f"`{row}` has seeds of two recipes: {', '.join(words)}")
    about = in_common([{key: value for key, value in part.items() if key not in _SAME} for part in parts])
    return {**{key: parts[0][key] for key in _SAME}, **about, "seeds": seeds}
