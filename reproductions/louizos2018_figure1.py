"""Louizos, Welling, Kingma (2018), Figure 1: the penalty |θ|^p of a parameter, for several p.

    ellzero reproduce louizos2018-figure1

Nothing is trained. The caption names p = 2 (weight decay), p = 1 (lasso), some p < 1, and the limit p = 0, which is the
L0 norm: 0 at θ = 0 and 1 elsewhere. The values below 1 are not printed; ours are 1/2 and 1/4.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ellzero.experiments.figures import COLOURS, grid, legend, save
from ellzero.experiments.study import Study

POWERS = (2.0, 1.0, 0.5, 0.25, 0.0)
NAMES = {2.0: "p=2, weight decay", 1.0: "p=1, lasso", 0.0: "p=0, L0"}


def penalty(theta: float, p: float) -> float:
    """|θ|^p, and for p = 0 its limit from above: 1 unless θ = 0."""
    return float(theta != 0) if p == 0 else abs(theta) ** p


def compute() -> list[dict[str, Any]]:
    theta = [k / 100 for k in range(-200, 201)]
    curves = [{"p": p, "penalty": [penalty(t, p) for t in theta]} for p in POWERS]
    return [{"name": "penalties", "theta": theta, "curves": curves}]


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    (record,) = records
    with grid(size=(3.4, 2.9)) as (figure, (axes,)):
        for colour, curve in zip(COLOURS, record["curves"], strict=False):
            label = NAMES.get(curve["p"], f"p={curve['p']:g}")
            if curve["p"] == 0:  # it jumps at 0: two lines, and the point
                for side in ([t for t in record["theta"] if t < 0], [t for t in record["theta"] if t > 0]):
                    axes.plot(side, [1.0] * len(side), color=colour, label=label if side[0] > 0 else None)
                axes.plot([0], [0], "o", color=colour)
                axes.plot([0], [1], "o", color="white", markeredgecolor=colour)
            else:
                axes.plot(record["theta"], curve["penalty"], color=colour, label=label)
        axes.set(xlabel="θ", ylabel="|θ|$^p$", ylim=(-0.08, 2.2), xlim=(-2, 2))
        legend(figure, axes, columns=3)
        caption = """Penalties |θ|^p for a parameter θ. For p = 2 and p = 1 they grow with |θ| and shrink large values;
            the smaller p, the less; for p = 0 the penalty is 1 for every θ ≠ 0 and 0 at θ = 0 (dot)."""
        return save(figure, folder / "louizos2018-figure1", caption)


STUDY = Study("louizos2018-figure1", "Louizos et al. (2018), Figure 1", compute=compute, table=None, draw=draw)
