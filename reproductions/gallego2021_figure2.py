"""Gallego-Posada, Ramirez, Erraqabi (2021), Figure 2: error after 100 epochs against the target density.

    ellzero reproduce gallego2021-figure2 --device cuda

Four panels: LeNet-5 above, MLP below; constraints by layer on the left, one on the whole network on the right; three
runs each. A constraint by layer has the same ε for every layer. As in the paper every point is annotated with the worst
constraint value of its runs: the highest expected density, of the densest layer where there is one for each.

The paper does not print its targets. Ours are those of the authors' later sweep on MNIST (20, 35, 50, 65 and 80 %), and
5 and 10 % below them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ellzero.experiments.figures import BLUE, INK, VERMILION, grid, save
from ellzero.experiments.papers import get
from ellzero.experiments.store.statistics import interval, with_interval
from ellzero.experiments.study import Row, Study, took
from ellzero.out.tables import new_table

EPOCHS = 100
TARGETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)
LAYERS = {"lenet5": ("conv1", "conv2", "fc1", "fc2"), "mlp": ("fc1", "fc2", "fc3")}


def row(network: str, level: str, target: float) -> Row:
    at_most = dict.fromkeys(LAYERS[network], target) if level == "layer" else target
    name = f"gallego-{network}-{level}-{100 * target:02.0f}"
    recipe = get(f"gallego-{network}").override(name=name, at_most=at_most, epochs=EPOCHS)
    label = f"{'LeNet-5' if network == 'lenet5' else 'MLP'}, ε={100 * target:.0f} % by {level}"
    return Row(label, recipe)


ROWS = tuple(row(n, level, target) for n in LAYERS for level in ("layer", "model") for target in TARGETS)


def target(record: dict[str, Any]) -> float:
    at_most = record["recipe"]["at_most"]
    return float(next(iter(at_most.values())) if isinstance(at_most, dict) else at_most)


def worst(record: dict[str, Any]) -> float:
    """The highest value of a constraint at the end, over runs and layers."""
    return max(held["expected"] for seed in record["seeds"] for held in seed["constraints"].values())


def table(records: Sequence[dict[str, Any]], title: str) -> Table:
    right = ("best %", "last %", "worst constraint value", "density kept", "parameters kept", "MACs kept", "seconds")
    out = new_table(title, ("row",), right)
    for record in records:
        seeds = record["seeds"]
        kept = [
            f"{100 * interval([s['costs'][c]['kept'] for s in seeds])[0]:.1f} %" for c in ("l0_norm", "params", "macs")
        ]
        errors = [with_interval([s[key] for s in seeds]) for key in ("error_best", "error_last")]
        out.add_row(record["row"], *errors, f"{100 * worst(record):.1f} %", *kept, took(record))
    return out


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    with grid(2, 2, size=(7.0, 4.8)) as (figure, panels):
        places = [(n, by_layer) for n in ("lenet5", "lenet300") for by_layer in (True, False)]
        for axes, (network, by_layer) in zip(panels, places, strict=True):
            own = [r for r in records if r["recipe"]["network"] == network]
            own = sorted((r for r in own if isinstance(r["recipe"]["at_most"], dict) == by_layer), key=target)
            name = "LeNet-5" if network == "lenet5" else "MLP"
            axes.set_title(f"{name}, {'one constraint per layer' if by_layer else 'one constraint on the model'}")
            axes.set(xlabel="target density ε (%)", ylabel="test error (%)")
            colour = VERMILION if by_layer else BLUE
            x = [100 * target(r) for r in own]
            y = [interval([s["error_last"] for s in r["seeds"]])[0] for r in own]
            axes.plot(x, y, color=colour)
            for record, at in zip(own, x, strict=True):
                errors = [s["error_last"] for s in record["seeds"]]
                axes.plot([at] * len(errors), errors, ".", color=colour, alpha=0.5)
            for record, at, error in zip(own, x, y, strict=True):
                top = max(s["error_last"] for s in record["seeds"])
                axes.plot(at, error, "o", color=colour)
                label = f"{100 * worst(record):.1f}"
                box = {"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.8}  # a line may go behind it
                axes.annotate(label, (at, top), (0, 5), textcoords="offset points", size=6.5, ha="center", bbox=box)
            axes.set_xlim(0, 90)
            axes.margins(y=0.18)
            if not own:
                axes.set(ylim=(0, 1), yticks=())
                axes.text(45, 0.5, "not run yet", ha="center", va="center", color=INK)
        runs = sorted({len(r["seeds"]) for r in records})
        epochs = sorted({r["recipe"]["epochs"] for r in records})
        caption = f"""Test error after {_list(epochs)} epochs against the target density, mean of {_list(runs)} runs
            (large dots and line) and every run (small dots). Above: LeNet-5; below: MLP. Left: a constraint per layer,
            with the same target for each; right: one on the whole network. The numbers are the worst constraint value
            of the runs in percent: the highest expected density, on the left that of the densest layer."""
        return save(figure, folder / "gallego2021-figure2", caption)


def _list(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


STUDY = Study("gallego2021-figure2", "Gallego-Posada et al. (2021), Figure 2", ROWS, seeds=3, table=table, draw=draw)
