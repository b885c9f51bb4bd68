"""Control: does a network cost what was asked for? Targets of 5 to 80 % × three costs × two networks.

    ellzero reproduce control --epochs 40 --device cuda --out runs/reproduce/control-40
    ellzero reproduce control --epochs 200 --device cuda --out runs/reproduce/control-200

Not a paper's, but the claim that both are read for: with the recipes' default controller and nothing tuned, the kept
cost of the network that is handed over is at most the target, and not more than one percentage point or 5 % of the
target below it, whichever is more. It is counted twice: after the epochs in which the gates learn (the controller
alone), and at the end, after `finalize` and a fine-tune with fixed gates.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from ellzero.experiments.figures import COLOURS, INK, MARKERS, grid, legend, save
from ellzero.experiments.papers import get
from ellzero.experiments.store.statistics import interval
from ellzero.experiments.study import Row, Study, point_at_end_of_training
from ellzero.out.tables import new_table

TARGETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
COSTS = {"l0_norm": "density", "params": "parameters", "macs": "MACs"}
NETWORKS = {"mlp": "MLP", "lenet5": "LeNet-5"}


def row(network: str, cost: str, target: float) -> Row:
    name = f"control-{network}-{cost.replace('_', '-')}-{100 * target:02.0f}"
    recipe = get(f"budget-{network}").override(name=name, cost=cost, at_most=target)
    return Row(f"{NETWORKS[network]}, {COSTS[cost]} ≤ {100 * target:.0f} %", recipe)


ROWS = tuple(row(network, cost, target) for network in NETWORKS for cost in COSTS for target in TARGETS)


def is_within(kept: float, target: float) -> bool:
    """At most the target, and not far below."""
    rounding = 1e-9
    return target - max(0.01, 0.05 * target) - rounding <= kept <= target + rounding


def kept_costs(record: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Of every seed: the kept share of the cost that is bounded, when the gates have learned, and in the end."""
    cost = record["recipe"]["cost"]
    learned = [point_at_end_of_training(s)["kept"][cost] for s in record["seeds"]]
    return learned, [s["costs"][cost]["kept"] for s in record["seeds"]]


def groups(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The records by network and cost, by rising target."""
    out: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: r["recipe"]["at_most"]):
        out.setdefault((record["recipe"]["network"], record["recipe"]["cost"]), []).append(record)
    order = [(n, c) for n in ("lenet300", "lenet5") for c in COSTS]
    return {key: out[key] for key in order if key in out}


def table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """Shares of runs within the bounds, and misses |kept − target| in percentage points; the largest with its sign."""
    right = ("runs", "within, controller alone", "its mean miss", "within, at the end", "mean miss", "largest")
    out = new_table(title, ("network", "cost"), (*right, *(f"error at {100 * t:.0f} %" for t in TARGETS)))
    for (network, cost), own in groups(records).items():
        learned, final, errors = [], [], {}
        for record in own:
            target = record["recipe"]["at_most"]
            before, after = kept_costs(record)
            learned += [(kept, target) for kept in before]
            final += [(kept, target) for kept in after]
            errors[target] = interval([s["error_last"] for s in record["seeds"]])[0]
        misses = [kept - target for kept, target in final]
        out.add_row(
            "MLP" if network == "lenet300" else "LeNet-5",
            COSTS[cost],
            str(len(final)),
            f"{100 * _share(learned):.1f} %",
            f"{100 * fmean(abs(kept - target) for kept, target in learned):.2f}",
            f"{100 * _share(final):.1f} %",
            f"{100 * fmean(map(abs, misses)):.2f}",
            f"{100 * max(misses, key=abs):+.2f}",
            *(f"{errors[t]:.2f}" if t in errors else "–" for t in TARGETS),
        )
    return out


def _share(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(is_within(kept, target) for kept, target in pairs) / len(pairs)


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    with grid(2, 2, size=(7.0, 5.0)) as (figure, panels):
        for k, network in enumerate(("lenet300", "lenet5")):
            kept_axes, error_axes = panels[2 * k], panels[2 * k + 1]
            name = "MLP" if network == "lenet300" else "LeNet-5"
            kept_axes.set(title=f"{name}: kept − target", xlabel="target (%)", ylabel="percentage points")
            error_axes.set(title=f"{name}: error", xlabel="target (%)", ylabel="test error (%)")
            ends = (0.03, 0.2, 0.83)  # the lower bound is a percentage point up to 20 %, then 5 % of the target
            low = [-100 * max(0.01, 0.05 * t) for t in ends]
            kept_axes.fill_between([100 * t for t in ends], low, 0, color="#E6E6E6", label="asked for", zorder=0)
            kept_axes.axhline(0, color=INK, linewidth=0.8)
            for shift, (cost, colour, marker) in enumerate(zip(COSTS, COLOURS, MARKERS, strict=False)):
                own = groups(records).get((network, cost), [])
                for record in own:
                    target = record["recipe"]["at_most"]
                    before, after = ([100 * (kept - target) for kept in side] for side in kept_costs(record))
                    at = [100 * target + shift - 1] * len(after)
                    kept_axes.plot(at, before, marker, color="white", markeredgecolor=colour, markersize=3)
                    kept_axes.plot(at, after, marker, color=colour, markersize=3)
                x = [100 * r["recipe"]["at_most"] for r in own]
                y = [interval([s["error_last"] for s in r["seeds"]])[0] for r in own]
                error_axes.plot(x, y, marker=marker, color=colour, label=COSTS[cost])
                kept_axes.plot([], [], marker, color=colour, label=f"{COSTS[cost]}, at the end")
                kept_axes.plot(
                    [], [], marker, color="white", markeredgecolor=colour, label=f"{COSTS[cost]}, controller alone"
                )
            error_axes.set_ylim(bottom=0)
        legend(figure, panels[0])
        counts = " or ".join(str(n) for n in sorted({len(r["seeds"]) for r in records}))
        epochs = " or ".join(str(n) for n in sorted({r["recipe"]["epochs"] for r in records}))
        caption = f"""What is kept against what was asked for, and the error, for targets of 5 to 80 % of three costs;
            {epochs} epochs, seeds for each point: {counts}. Left: kept cost less target, when the gates have learned
            (hollow) and of the network that is handed over (filled); grey: at most the target, and no more than one
            point or 5 % of it below. Right: mean test error. The three costs of a target are drawn side by side."""
        return save(figure, folder / "control", caption)


STUDY = Study("control", "Control: kept cost against target", ROWS, table=table, draw=draw)
