"""The command line that all files here share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ellzero.data import load
from ellzero.reproduce import Row, reproduce, show


def run(title: str, name: str, rows: Sequence[Row]) -> None:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of the paper's 200")
    parser.add_argument("--only", default="*", help="pattern of recipe names")
    parser.add_argument("--every", type=int, default=1, help="evaluate after every so many epochs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="mnist", help="mnist, or mnist5k: what comes with the library")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results") / name)
    o = parser.parse_args()
    dataset = load(o.data, o.data_dir, o.device)
    rows = [replace(r, recipe=r.recipe.override(data=o.data)) for r in rows if fnmatchcase(r.recipe.name, o.only)]
    records = reproduce(rows, dataset, seeds=o.seeds, epochs=o.epochs, every=o.every, out=o.out)
    show(records, f"{title}; {records[0]['device']}, {o.seeds} seeds")


if __name__ == "__main__":
    raise SystemExit("run one of the other files here")
