"""Gallego-Posada, Ramirez, Erraqabi (2021), Figure 1: training with and without dual restarts (MLP, ε = 33 %).

    ellzero reproduce gallego2021-figure1 --seeds 5 --device cuda

"The model trained with dual restarts stays near the desired density level during the rest of training, whilst the other
becomes more sparse at the cost of prediction performance." The first row is that of Table 1; the second differs in
`restarts` alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ellzero.experiments.figures import BLUE, INK, VERMILION, curves, grid, legend, save
from ellzero.experiments.papers import get
from ellzero.experiments.study import Row, Study, by_epoch

TARGET = get("gallego-mlp")
ROWS = (
    Row("dual restarts", TARGET, "198-233-100", "1.4 | 1.69±0.11"),
    Row("no dual restarts", TARGET.override(name="gallego-mlp-no-restarts", restarts=False)),
)


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    panels = (
        ("expected density (%)", lambda h: 100 * h["expected"]["l0_norm"]),
        ("multiplier λ", lambda h: h["multiplier"][0]),
        ("test error (%)", lambda h: h["error"]),
    )
    with grid(1, 3, size=(7.0, 2.4)) as (figure, axes):
        for panel, (name, value) in zip(axes, panels, strict=True):
            for record in records:
                colour = BLUE if record["recipe"]["restarts"] else VERMILION
                epochs, runs = by_epoch(record["seeds"], value)
                curves(panel, epochs, runs, record["row"], colour)
            panel.set(xlabel="epoch", ylabel=name)
        target = 100 * records[0]["recipe"]["at_most"]
        axes[0].axhline(target, color=INK, linestyle=":", label=f"target ε={target:.0f} %")
        axes[0].set_ylim(0, 100)
        axes[1].set_ylim(bottom=0)
        # The first epochs' errors would flatten the rest.
        late = [h["error"] for r in records for s in r["seeds"] for h in s["history"][len(s["history"]) // 10 :]]
        axes[2].set_ylim(0, 1.25 * max(late))
        legend(figure, axes[0])
        caption = f"""Training of the MLP under a constraint on its density of {target:.0f} % (dotted), with and without
            dual restarts: expected density, multiplier, and test error with the test-time gates, after every epoch.
            Thin lines: seeds; thick: their mean."""
        return save(figure, folder / "gallego2021-figure1", caption)


STUDY = Study("gallego2021-figure1", "Gallego-Posada et al. (2021), Figure 1", ROWS, draw=draw)
