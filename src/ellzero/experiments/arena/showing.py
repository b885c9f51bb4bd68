"""What came out of the arena, from its records alone: a table, sentences, a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from ellzero.experiments import networks
from ellzero.experiments.arena.contest import DENSE, OURS, Record
from ellzero.experiments.figures import COLOURS, GREY, INK, MARKERS, PAGE, grid, legend, save
from ellzero.experiments.store.statistics import difference, interval, with_interval
from ellzero.out.tables import new_table

FREE = "shape"  # its search is not counted: it has had more epochs than the others
TITLES = {
    OURS: "Budget",
    "budget-hidden": "Budget, inputs kept",
    "magnitude": "TP magnitude",
    "norm": "TP group norm",
    "taylor": "TP Taylor",
    "narrow": "narrower",
    FREE: "Budget's shape, new weights",
    "shape-counted": "Budget's shape, search counted",
}
Cell = tuple[str, float]  # network, and share of the MACs


def errors(record: Record) -> list[float]:
    """Of every seed, in percent."""
    return [seed["error_last"] for seed in record["seeds"]]


def cells(records: Sequence[Record]) -> dict[Cell, dict[str, Record]]:
    """The records by network and share of the MACs, then by method; the dense ones are not among them."""
    out: dict[Cell, dict[str, Record]] = {}
    for record in records:
        asked = record["recipe"]
        if asked["method"] != DENSE:
            out.setdefault((asked["network"], asked["at_most"]), {})[asked["method"]] = record
    return out


def title(method: str) -> str:
    """Of a method, in a heading; those of other families are called as in a recipe."""
    return TITLES.get(method, f"Budget, {method.removeprefix('budget-')}")


def table(records: Sequence[Record], heading: str) -> Table:
    """Mean error in percent with its 95 % interval, a line for each network and share of its MACs; * is the lowest."""
    found = cells(records)
    methods = list(dict.fromkeys(method for cell in found.values() for method in cell))
    whole = {r["recipe"]["network"]: r for r in records if r["recipe"]["method"] == DENSE}
    out = new_table(heading, ("network", "MACs at most"), (*map(title, methods), "dense"))
    for (network, at_most), cell in found.items():
        best = _best(cell)
        shown = [
            with_interval(errors(cell[m])) + " *" * (m == best and len(cell) > 1) if m in cell else "–" for m in methods
        ]
        dense = with_interval(errors(whole[network])) if network in whole else "–"
        out.add_row(networks.find(network).title, f"{100 * at_most:.0f} %", *shown, dense)
    return out


def _best(cell: dict[str, Record]) -> str:
    return min(cell, key=lambda method: interval(errors(cell[method]))[0])


def says(records: Sequence[Record]) -> list[str]:
    """In how many cells ours has the lowest mean, and of each other one whether it is worse by more than the interval
    (Welch's, 95 %). Then how far it is from each of the others over all cells of a network.
    """
    fights = {cell: own for cell, own in cells(records).items() if OURS in own and len(own) > 1}
    if not fights:
        return []
    lost = {cell: best for cell, own in fights.items() if (best := _best(own)) != OURS}
    out = [f"Budget has the lowest mean error in {len(fights) - len(lost)} of {len(fights)} cells"]
    if any(FREE in own for own in fights.values()):
        equal = sum(_best({m: r for m, r in own.items() if m != FREE}) == OURS for own in fights.values())
        out.append(f"without its shape trained once more, which has had more epochs, in {equal}")
    for (network, at_most), best in lost.items():
        own = fights[network, at_most]
        more, half = difference(errors(own[OURS]), errors(own[best]))
        beyond = "of one seed" if math.isnan(half) else "more than the interval" if more > half else "within it"
        by = f"{more:.2f}" if math.isnan(half) else f"{more:.2f} ± {half:.2f}"
        out.append(f"{network} at {100 * at_most:.0f} %: {title(best)} is better by {by} points, {beyond}")
    over = [r["row"] for r in records for s in r["seeds"] if s["macs"]["kept"] > r["recipe"]["at_most"]]
    out += [f"over the MACs that are allowed: {', '.join(dict.fromkeys(over))}"] * bool(over)
    return out + list(_over_all(fights))


def _over_all(fights: dict[Cell, dict[str, Record]]) -> Iterator[str]:
    """Of each network: the difference to every other method, from pairs of equal seed and equal MACs."""
    for network in dict.fromkeys(name for name, _ in fights):
        pairs: dict[str, list[float]] = {}
        for own in (cell for (name, _), cell in fights.items() if name == network):
            ours = _by_seed(own[OURS])
            for method, record in own.items():
                theirs = _by_seed(record)
                pairs.setdefault(method, []).extend(ours[k] - theirs[k] for k in ours.keys() & theirs.keys())
        for method, found in pairs.items():
            if method != OURS and len(found) > 1:
                more, half = interval(found)
                by = f"{abs(more):.2f} ± {half:.2f} points {'above' if more > 0 else 'below'}"
                yield f"{network}, all cells: Budget is {by} {title(method)} ({len(found)} pairs)"


def _by_seed(record: Record) -> dict[int, float]:
    return {seed["seed"]: seed["error_last"] for seed in record["seeds"]}


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Mean error against the MACs that are kept, and against the seconds of training; a column for each network."""
    found = list(dict.fromkeys(record["recipe"]["network"] for record in records))
    methods = list(dict.fromkeys(r["recipe"]["method"] for r in records if r["recipe"]["method"] != DENSE))
    columns = len(found)
    with grid(2, columns, size=(max(3.4, PAGE * columns / 3), 5.0)) as (figure, axes):
        for at, network in enumerate(found):
            own = [r for r in records if r["recipe"]["network"] == network]
            device = next((r["device"] for r in own if r["recipe"]["method"] == OURS), own[0]["device"])
            for number, method in enumerate(methods):
                mine = [r for r in own if r["recipe"]["method"] == method]
                if points := sorted(map(_point, mine)):
                    macs, seconds, means, halves = zip(*points, strict=True)
                    again = number >= len(COLOURS)  # of the colours
                    style: Any = {
                        "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)],
                        "label": title(method), "linewidth": 2.0 if method == OURS else 1.0, "capsize": 2,
                        "linestyle": ":" if again else "-", "markerfacecolor": "white" if again else None,
                    }  # fmt: skip
                    axes[at].errorbar(macs, means, halves, **style)
                    if all(r["device"] == device for r in mine):  # others take other times
                        axes[columns + at].errorbar(seconds, means, halves, **style | {"linestyle": "none"})
            for dense in (r for r in own if r["recipe"]["method"] == DENSE):
                _, taken, error, _ = _point(dense)
                axes[at].axhline(error, color=GREY, linestyle="--", linewidth=0.8, label="dense")
                if dense["device"] == device:
                    axes[columns + at].plot(taken, error, "x", color=INK)
            axes[at].set(title=networks.find(network).title, xlabel="MACs kept (% of dense)", ylabel="test error (%)")
            axes[columns + at].set(xlabel="seconds of training", ylabel="test error (%)")
        most = max(axes[:columns], key=lambda panel: len(panel.get_legend_handles_labels()[1]))
        legend(figure, most, columns=3)  # a method may be on some networks alone
        caption = (
            "Mean test error with its 95 % interval, by method: above against the share of the dense MACs that the "
            "network keeps, below against the seconds of training, dense phases and pruning counted in. Batches and "
            "schedule are the same for all, and the epochs for all but Budget's shape with new weights, which had to "
            "be found first. The dashed line and the cross are the dense network. Below are the rows that ran where "
            "`Budget` did."
        )
        return save(figure, folder / "arena", caption)


def _point(record: Record) -> tuple[float, float, float, float]:
    """Kept MACs in percent, seconds, mean error, half its interval; 0 for one seed."""
    seeds = record["seeds"]
    macs, seconds = fmean(s["macs"]["kept"] for s in seeds), fmean(s["seconds_in_all"] for s in seeds)
    mean, half = interval(errors(record))
    return 100 * macs, seconds, mean, 0.0 if math.isnan(half) else half
