"""What the records of a study's rows say: the usual table, and curves over epochs. They are plain data
here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from rich.table import Table

from ellzero.experiments.campaign import Record
from ellzero.experiments.statistics import with_interval
from ellzero.out.tables import new_table


def table(records: Sequence[Record], title: str) -> Table:
    """Ours beside the paper's, a line per row.

    Errors are means over seeds with the 95 % interval; the architecture is that of the seed with the median number of
    parameters; density is eq. 16 over its dense value, expected and kept; parameters and MACs are those of the compact
    network; the seconds are those of the whole stack that the row was trained in.
    """
    left = ("row", "paper", "ours")
    right = ("paper, error %", "best %", "last %", "density expected", "kept", "parameters", "MACs", "seconds")
    out = new_table(title, left, right)
    for record in records:
        seeds = record["seeds"]
        kept, cells = "dense", ["100.0 %"] * 2 + ["100 %"] * 2  # a recipe without gates has no costs
        if all("costs" in s for s in seeds):
            middle = sorted(seeds, key=lambda s: s["costs"]["params"]["kept"])[len(seeds) // 2]
            kept = "-".join(str(n) for n in middle["architecture"].values())
            densities = [[s["costs"]["l0_norm"][kind] for s in seeds] for kind in ("expected", "kept")]
            cells = [f"{100 * statistics.fmean(values):.1f} %" for values in densities]
            for cost in ("params", "macs"):
                share = statistics.fmean(s["costs"][cost]["kept"] for s in seeds)
                cells.append(f"{share * seeds[0]['costs'][cost]['dense']:,.0f} ({100 * share:.1f} %)")
        out.add_row(
            record["row"],
            record["published"]["architecture"] or "–",
            kept,
            record["published"]["error"].replace(" | ", " / ") or "–",
            with_interval([s["error_best"] for s in seeds]),
            with_interval([s["error_last"] for s in seeds]),
            *cells,
            took(record),
        )
    return out


def took(record: Record) -> str:
    """Seconds of the stacks that a row was trained in, and how many runs they had.

    Example:
        >>> took({"seeds": [{"seconds_of_stack": 67.9, "runs_in_stack": 10}] * 5})
        '68 (10 runs)'
    """
    stacks = dict.fromkeys((s["seconds_of_stack"], s["runs_in_stack"]) for s in record["seeds"])
    seconds, runs = (sum(values) for values in zip(*stacks, strict=True))
    return f"{seconds:.0f} ({runs} run{'s' * (runs > 1)})"


def point_at_end_of_training(seed: Record) -> Record:
    """The last point of a seed's history at which gates were still learning: before `finalize` and fine-tuning."""
    return cast("Record", [h for h in seed["history"] if not h.get("tuning")][-1])


def by_epoch(seeds: Iterable[Record], value: Callable[[Record], float]) -> tuple[list[int], list[list[float]]]:
    """The epochs of a row's histories, and a number at each for every seed."""
    histories = [s["history"] for s in seeds]
    epochs = [[h["epoch"] for h in history] for history in histories]
    if any(e != epochs[0] for e in epochs):
        raise ValueError("`seeds` must have been evaluated at the same epochs")
    return epochs[0], [[value(h) for h in history] for history in histories]
