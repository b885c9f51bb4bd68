"""Louizos, Welling, Kingma (2018), Figure 3: expected FLOPs over training, for the MLP and LeNet-5.

    ellzero reproduce louizos2018-figure3 --seeds 5 --device cuda
    ellzero reproduce louizos2018-figure3 --draw-only --out runs/reproduce/louizos2018-table1

The rows are those of Table 1, so that the second line draws the figure from its results without training again. As in
the paper a multiplication and an addition are one FLOP each: a layer's bias makes up for the one addition less, and so
FLOPs are twice the MACs. Expected are the MACs of the network that the gates leave, as `ellzero.macs` counts them: an
input that is closed costs nothing in the layer that reads it, nor in the one that computes it. The authors' code counts
a layer's own gates only (there a fully connected layer always computes all its outputs); so counted, dropout needs 77 %
(MLP) and 50 % (LeNet-5) of the dense FLOPs, and not the 38 % and 26 % that are drawn, and lies higher beside the rest.

The dense network and the one with dropout need no training for this: their FLOPs are constant. Dropout is counted as
gates that are open with the keep rates that the papers' gates start from: 0.8, 0.5, 0.5 (MLP), 0.5 (LeNet-5).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ellzero as l0
from ellzero.experiments import networks as zoo
from ellzero.experiments.figures import BLUE, GREY, INK, VERMILION, curves, grid, legend, save
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.study import Row, Study, by_epoch

ROWS = (
    Row("MLP, λ=0.1/N", get("louizos-mlp"), "219-214-100", "1.4"),
    Row("MLP, λ sep.", get("louizos-mlp-sep"), "266-88-33", "1.8"),
    Row("LeNet-5, λ=0.1/N", get("louizos-lenet5"), "20-25-45-462", "0.9"),
    Row("LeNet-5, λ sep.", get("louizos-lenet5-sep"), "9-18-65-25", "1.0"),
)
FLOPS_PER_MAC = 2  # one multiplication, one addition


def with_dropout(recipe: Recipe) -> float:
    """The share of its FLOPs that a network needs whose units are there with probability 1 − p."""
    model = zoo.LeNet300(10) if recipe.network == "lenet300" else zoo.LeNet5(10)
    gated = l0.attach(model, (torch.zeros(2, 1, 28, 28),), where=l0.per_layer)
    keep = [torch.full((gate.prob_open().numel(),), 1 - recipe.drop_rate(name)) for name, gate in gated.named_gates()]
    with torch.no_grad(), gated.assuming(torch.cat(keep)):
        return l0.macs(gated).item() / l0.dense(l0.macs, gated)


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    with grid(1, 2, size=(7.0, 2.7)) as (figure, panels):
        for axes, network, title in zip(panels, ("lenet300", "lenet5"), ("(a) MLP", "(b) LeNet-5"), strict=True):
            own = [r for r in records if r["recipe"]["network"] == network]
            axes.set(title=title, xlabel="epoch", ylabel="expected FLOPs")
            if not own:
                continue
            dense = FLOPS_PER_MAC * own[0]["seeds"][0]["costs"]["macs"]["dense"]
            axes.axhline(dense, color=INK, linestyle="-", label="dense")
            recipe = next(row.recipe for row in ROWS if row.recipe.network == network)
            axes.axhline(dense * with_dropout(recipe), color=GREY, linestyle="--", label="dropout")
            for record in own:
                sep = isinstance(record["recipe"]["penalty"], dict)
                epochs, runs = by_epoch(record["seeds"], lambda h, whole=dense: whole * h["expected"]["macs"])
                curves(axes, epochs, runs, "λ sep." if sep else "λ=0.1/N", VERMILION if sep else BLUE)
            axes.set_ylim(0, 1.08 * dense)
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
        legend(figure, max(panels, key=lambda p: len(p.lines)))
        caption = """Expected FLOPs of a forward pass for one image (a multiplication and an addition are one each)
            during training, of the network that the gates leave. Thin lines: seeds; thick: their mean. Dense and
            dropout networks are constant; dropout is counted with the keep rates that the gates start from."""
        return save(figure, folder / "louizos2018-figure3", caption)


STUDY = Study("louizos2018-figure3", "Louizos et al. (2018), Figure 3", ROWS, draw=draw)
