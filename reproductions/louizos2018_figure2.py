"""Louizos, Welling, Kingma (2018), Figure 2: the hard concrete distribution, and its mean against log α.

    ellzero reproduce louizos2018-figure2

Nothing is trained. (a) Densities of the binary concrete with log α = 0 and β = 0.5, and of the hard concrete that comes
of it by stretching to (−0.1, 1.1) and clamping: it has atoms at 0 and 1, "roughly, half of its mass". (b) Means of both
against log α from 10,000 samples, as in the paper, and the gates without noise: σ(log α), and eq. 13. Beside the
samples the stored numbers have the means by quadrature, which are exact.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ellzero.experiments.figures import BLUE, GREY, VERMILION, grid, save
from ellzero.experiments.study import Study
from ellzero.gates.distributions import BinaryConcrete, HardConcrete

BETA, GAMMA, ZETA, SAMPLES = 0.5, -0.1, 1.1, 10_000


def compute() -> list[dict[str, Any]]:
    return [densities(), means()]


def densities() -> dict[str, Any]:
    zero = torch.tensor(0.0, dtype=torch.float64)
    concrete, hard = BinaryConcrete(zero, BETA), HardConcrete(zero, BETA, GAMMA, ZETA)
    x = torch.arange(1, 400, dtype=torch.float64) / 400
    return {
        "name": "densities",
        "x": x.tolist(),
        "binary_concrete": concrete.log_prob(x).exp().tolist(),
        "hard_concrete": hard.log_prob(x).exp().tolist(),
        "at_0": (1 - hard.prob_nonzero).item(),
        "at_1": hard.prob_one.item(),
    }


def means() -> dict[str, Any]:
    log_alpha = torch.arange(-50, 51, dtype=torch.float64) / 10
    concrete, hard = BinaryConcrete(log_alpha, BETA), HardConcrete(log_alpha, BETA, GAMMA, ZETA)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sampled = {
            "binary_concrete": concrete.rsample((SAMPLES,)).mean(0).tolist(),
            "hard_concrete": hard.rsample((SAMPLES,)).mean(0).tolist(),
        }
    return {
        "name": "means",
        "log_alpha": log_alpha.tolist(),
        "samples": SAMPLES,
        "sampled": sampled,
        "exact": {"binary_concrete": concrete.mean.tolist(), "hard_concrete": hard.mean.tolist()},
        "noiseless": {"binary_concrete": torch.sigmoid(log_alpha).tolist(), "hard_concrete": hard.noiseless.tolist()},
    }


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    by_name = {record["name"]: record for record in records}
    density, mean = by_name["densities"], by_name["means"]
    with grid(1, 2, size=(7.0, 2.7)) as (figure, (left, right)):
        left.plot(density["x"], density["binary_concrete"], color=GREY, label="binary concrete")
        left.plot(density["x"], density["hard_concrete"], color=BLUE, label="hard concrete, density")
        atoms = [density["at_0"], density["at_1"]]
        left.vlines([0, 1], 0, 4, color=BLUE)
        left.plot([0, 1], [4, 4], "^", color=BLUE, label="hard concrete, mass at 0 and 1")
        for x, mass, side in ((0.03, atoms[0], "left"), (0.97, atoms[1], "right")):
            left.text(x, 3.93, f"{mass:.3f}", color=BLUE, ha=side, va="center", fontsize=7)
        left.set(xlabel="gate", ylabel="density", ylim=(0, 4.3), title="(a) log α=0, β=0.5")
        left.legend(loc="upper center", bbox_to_anchor=(0.5, 0.9))
        x = mean["log_alpha"]
        right.plot(x, mean["sampled"]["binary_concrete"], color=GREY, label="binary concrete, mean")
        right.plot(x, mean["noiseless"]["binary_concrete"], "--", color=GREY, label="… without noise")
        right.plot(x, mean["sampled"]["hard_concrete"], color=BLUE, label="hard concrete, mean")
        right.plot(x, mean["noiseless"]["hard_concrete"], "--", color=VERMILION, label="… without noise (eq. 13)")
        right.set(xlabel="log α", ylabel="gate", title=f"(b) means of {mean['samples']:,} samples")
        right.legend(loc="upper left")
        caption = f"""(a) The binary concrete distribution with log α = 0 and β = 0.5, and the hard concrete one that
            comes of it by stretching to (−0.1, 1.1) and clamping to [0, 1]: a density between 0 and 1, and masses of
            {atoms[0]:.3f} at 0 and {atoms[1]:.3f} at 1 (arrows, not to scale). (b) Mean gate against log α from
            {mean["samples"]:,} samples, and the gate without noise. The noise smooths the hard sigmoid."""
        return save(figure, folder / "louizos2018-figure2", caption)


STUDY = Study("louizos2018-figure2", "Louizos et al. (2018), Figure 2", compute=compute, table=None, draw=draw)
