"""What other thresholds would have given: the networks of finished runs, looked at again.

    ellzero reproduce louizos2018-rivals --only 'bc-ghs-*' --device cuda --out runs/rivals
    python benchmarks/thresholds.py runs/rivals --at 0 0.5 1 1.5 2 --device cuda --json FILE
    python benchmarks/thresholds.py results/louizos2018-rivals/bc-ghs-mlp.json --at 1      # units alone, from a record

Bayesian compression decides after training which units stay, by a threshold that its authors set by eye. Nothing in
training depends on it: so one training tells of them all. Every layer has the same one here.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

from provenance import write

from ellzero.experiments import data
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, saver
from ellzero.experiments.train.trainer import Trainer


def looked_at(folder: Folder, dataset: data.Dataset, threshold: float) -> list[dict[str, Any]]:
    """Of each seed of a finished stack, with a threshold in place of its own: what is left, and the error."""
    trainer = Trainer([r.override(threshold={"*": threshold}) for r in folder.recipes], dataset)
    saver.load(trainer, checkpoint.load(folder.checkpoints).state)
    trainer.history.clear()
    evaluation.note(trainer)
    return [
        {
            "seed": found["seed"],
            "error_last": found["error_last"],
            "architecture": list(found["architecture"].values()),
            "params": found["costs"]["params"]["kept"],
        }
        for found in evaluation.results(trainer)
    ]


def counted(record: Path, threshold: float) -> str:
    """How many units of each place a threshold would leave in the median, by what a record of half-Cauchy gates has."""
    found = [seed["evidence"].values() for seed in json.loads(record.read_text())["seeds"]]
    left = [[sum(number > math.exp(-threshold) for number in place) for place in seed] for seed in found]
    return "-".join(f"{median(place):g}" for place in zip(*left, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="where `ellzero reproduce` left them")
    parser.add_argument("--at", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    if o.runs.is_file():
        for threshold in o.at:
            print(f"{o.runs.stem}  {threshold:g}  {counted(o.runs, threshold)}")
        return
    rows = []
    for file in sorted(o.runs.glob("**/run.json")):
        folder = Folder.open(file.parent)
        recipe = folder.recipes[0]
        dataset = data.load(recipe.data, device=o.device)
        for threshold in o.at:
            seeds = looked_at(folder, dataset, threshold)
            about = {"row": recipe.name, "threshold": threshold, "trained_at": folder.about["commit"]}
            rows.append({**about, "seeds": seeds})
            middle = sorted(seeds, key=lambda s: s["params"])[len(seeds) // 2]
            left, error = "-".join(map(str, middle["architecture"])), fmean(s["error_last"] for s in seeds)
            print(f"{recipe.name}  {threshold:g}  {left}  {error:.2f} %")
    if o.json:
        write(o.json, "thresholds", {"rows": rows}, {**vars(o), "runs": str(o.runs)}, o.device)


if __name__ == "__main__":
    main()
