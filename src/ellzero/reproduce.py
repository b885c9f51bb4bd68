"""Published tables, run again: rows of recipes beside published numbers, trained in stacks, stored and printed side
by side.

A file in `reproductions/` names the rows; this one trains all seeds of all rows that can share a stack together,
writes one json per row with recipe, commit, versions, seeds and device, and prints ours beside the paper's. It does
not know what a row is about.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ellzero.data import Dataset
from ellzero.recipes import Recipe
from ellzero.training import STACKABLE, Trainer

# Two-sided 95 % quantiles of Student's t, for the few degrees of freedom that seeds give.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Row:
    """One row of a published table.

    Args:
        label: as the paper has it.
        recipe: how we run it.
        architecture: the published pruned architecture.
        error: the published error in percent, as printed.
    """

    label: str
    recipe: Recipe
    architecture: str
    error: str


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); NaN for a single value.

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> mean, round(half, 3)
        (2.0, 2.484)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, _t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _t95(freedom: int) -> float:
    """Student's quantile: from the table, then by its expansion in 1/ν about the normal one (Abramowitz & Stegun,
    26.7.5), which is right to 5e-4 there.
    """
    if freedom in _T95:
        return _T95[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def provenance(device: torch.device) -> dict[str, Any]:
    """What is needed to repeat a result: commit, versions, device, date."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    return {
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        or os.environ.get("COMMIT"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}",
        "date": datetime.date.today().isoformat(),
    }


def stacks(recipes: Sequence[Recipe]) -> list[list[Recipe]]:
    """Groups of recipes that can be trained together, in order; networks with batch norm go alone."""
    groups: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        fields = {k: v for k, v in recipe.to_dict().items() if k not in STACKABLE}
        alone = [recipe.name, recipe.seed] if recipe.network.startswith("wrn") else None
        groups.setdefault(json.dumps([fields, alone], sort_keys=True), []).append(recipe)
    return list(groups.values())


def reproduce(
    rows: Sequence[Row],
    dataset: Dataset,
    *,
    seeds: int,
    epochs: int | None = None,
    every: int = 1,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Trains every row with every seed.

    Args:
        rows: of the table.
        dataset: on the device to train on.
        seeds: how many, from 0.
        epochs: instead of the recipes' own.
        every: evaluate after every so many epochs.
        out: folder for the results, one json per row.
        say: prints a line of progress.

    Returns:
        One record per row, with the results of all seeds.
    """
    recipes = [r.recipe if epochs is None else r.recipe.override(epochs=epochs) for r in rows]
    runs = [r.override(seed=seed) for r in recipes for seed in range(seeds)]
    done: dict[tuple[str, int], dict[str, Any]] = {}
    for stack in stacks(runs):
        say(f"{len(stack)} runs together: {', '.join(dict.fromkeys(r.name for r in stack))}")
        started = time.perf_counter()
        trainer = Trainer(stack, dataset)
        ready = time.perf_counter()
        trainer.train(every=every)
        seconds = time.perf_counter() - ready
        say(f"  {trainer.epoch} epochs in {seconds:.1f} s, after {ready - started:.1f} s of preparation")
        for recipe, result in zip(stack, trainer.results(), strict=True):
            curve = [h for h in trainer.history if (h["run"], h["seed"]) == (recipe.name, recipe.seed)]
            result |= {"seconds_of_stack": seconds, "runs_in_stack": len(stack), "history": _thin(curve)}
            done[recipe.name, recipe.seed] = result
    records = []
    for row, recipe in zip(rows, recipes, strict=True):
        record = {
            "row": row.label,
            "published": {"architecture": row.architecture, "error": row.error},
            "recipe": recipe.to_dict(),
            **provenance(dataset.train_x.device),
            "seeds": [{k: v for k, v in done[recipe.name, s].items() if k != "recipe"} for s in range(seeds)],
        }
        records.append(record)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{recipe.name}.json").write_text(json.dumps(record) + "\n")
    return records


def _thin(curve: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Error, loss, expected and kept l0 fractions and multipliers over training, rounded: a history to draw, not to
    resume.
    """
    keep = []
    for h in curve:
        loss = None if math.isnan(h["loss"]) else round(h["loss"], 5)  # JSON knows no NaN
        point = {"epoch": h["epoch"], "error": round(h["error"], 3), "loss": loss}
        for kind in ("expected", "kept"):
            point[kind] = {k: round(v, 4) for k, v in h.get(kind, {}).items()}
        point["multiplier"] = [round(m, 5) for m in h.get("multiplier", [])]
        keep.append(point)
    return keep


def table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """Ours beside the paper's."""
    out = Table(title=title, title_justify="left")
    for name in (
        "row",
        "paper",
        "ours (median seed)",
        "paper %",
        "best %",
        "last %",
        "density exp.",
        "kept",
        "weights",
        "MACs",
    ):
        out.add_column(name, justify="left" if name in ("row", "paper", "ours (median seed)") else "right")
    for r in records:
        seeds = r["seeds"]
        last, half = interval([s["error_last"] for s in seeds])
        best, _ = interval([s["error_best"] for s in seeds])
        left, shares = "dense", ["100.0"] * 4  # a recipe without gates has no costs
        if all("costs" in s for s in seeds):
            middle = sorted(seeds, key=lambda s: s["costs"]["params"]["kept"])[len(seeds) // 2]
            left = "-".join(str(n) for n in middle["architecture"].values())
            shares = [
                f"{100 * statistics.fmean(s['costs'][c][k] for s in seeds):.1f}"
                for c, k in (("l0_norm", "expected"), ("l0_norm", "kept"), ("params", "kept"), ("macs", "kept"))
            ]
        out.add_row(
            r["row"],
            r["published"]["architecture"],
            left,
            r["published"]["error"],
            f"{best:.2f}",
            f"{last:.2f}" + ("" if math.isnan(half) else f"±{half:.2f}"),
            *shares,
        )
    return out


def show(records: Sequence[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    Console(width=140).print(table(records, title))
