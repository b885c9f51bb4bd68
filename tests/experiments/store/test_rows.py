"""A row whose seeds lie in several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ellzero.experiments.store import rows
from ellzero.experiments.store.records import FolderError

RECORD = {"row": "mlp", "published": None, "recipe": {"epochs": 2}, "seeds": [{"seed": 0}]}


def written(folder: Path, *records: object) -> Path:
    for first, record in enumerate(records):
        (folder / rows.file_name("mlp", first)).write_text(json.dumps(record))
    return folder


def test_seeds_are_joined(tmp_path: Path) -> None:
    assert rows.read(tmp_path, "mlp") is None
    joined = rows.read(written(tmp_path, RECORD, RECORD | {"seeds": [{"seed": 1}]}), "mlp")
    assert joined == RECORD | {"seeds": [{"seed": 0}, {"seed": 1}]}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([RECORD, {}], r"mlp\.seed1\.json' is damaged: it is no record"),
        ([[]], r"mlp\.json' is damaged: it is no record"),
        ([RECORD, RECORD], "`mlp` has seed 0 in two files: remove one"),
        ([RECORD, RECORD | {"seeds": [], "recipe": {"epochs": 3}}], "`mlp` has seeds of two recipes: "),
    ],
)
def test_what_does_not_fit_is_refused(records: list[object], why: str, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=why):
        rows.read(written(tmp_path, *records), "mlp")
