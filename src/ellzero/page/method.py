"""The page of the method: penalties |θ|^p, and the hard concrete distribution with sliders for its four numbers.

Figures 1 and 2 of Louizos et al. (2018). What is drawn first is computed here, with `distributions`; when a slider
moves, the script in `templates/method.html.j2` computes it again with the same formulas. Runs are not known here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ellzero.gates.distributions import BinaryConcrete, HardConcrete
from ellzero.page.charts import SERIES, Chart, axis, curve, dots, render

LOG_ALPHA, BETA, GAMMA, ZETA = 0.0, 0.5, -0.1, 1.1  # of Figure 2a
POWERS = {2.0: "p = 2, weight decay", 1.0: "p = 1, lasso", 0.5: "p = 1/2", 0.25: "p = 1/4", 0.0: "p = 0, the L0 norm"}
TALLEST = 4.0  # of the density that is shown, unless that of the hard concrete is higher between 0 and 1
# Symbol, what it is, lowest, highest, step, value. γ < 0 and ζ > 1: [0, 1] lies inside of (γ, ζ).
SLIDERS = (
    ("log-alpha", "log α", "location: where the mass lies", -8.0, 8.0, 0.1, LOG_ALPHA),
    ("beta", "β", "temperature: the lower, the more it is like a coin", 0.05, 2.0, 0.01, BETA),
    ("gamma", "γ", "lower end of the stretched interval", -1.0, -0.01, 0.01, GAMMA),
    ("zeta", "ζ", "upper end of the stretched interval", 1.01, 2.0, 0.01, ZETA),
)


def method_page() -> str:
    """The page, complete in itself; a PageMissingError says that Plotly or jinja2 is not installed."""
    concrete, hard = _at(LOG_ALPHA)
    at_0, at_1 = (1 - hard.prob_nonzero).item(), hard.prob_one.item()
    facts = {
        "at-0": ("P(z = 0)", at_0),
        "between": ("P(0 < z < 1)", 1 - at_0 - at_1),
        "at-1": ("P(z = 1)", at_1),
        "open": ("P(z ≠ 0), eq. 12", 1 - at_0),
        "mean": ("E[z], the mean", hard.mean.item()),
        "noiseless": ("ẑ without noise, eq. 13", hard.noiseless.item()),
    }
    return render(
        "method.html.j2",
        penalties=_penalties(),
        density=_density(concrete, hard, [at_0, at_1]),
        means=_means(hard),
        sliders=SLIDERS,
        facts=facts,
        tallest=TALLEST,
    )


def _at(log_alpha: float | Tensor) -> tuple[BinaryConcrete, HardConcrete]:
    """Both distributions with the numbers of Figure 2."""
    location = torch.as_tensor(log_alpha, dtype=torch.float64)
    return BinaryConcrete(location, BETA), HardConcrete(location, BETA, GAMMA, ZETA)


def _penalties() -> Chart:
    theta = [k / 100 for k in range(-200, 201)]
    traces: list[dict[str, Any]] = []
    for (p, name), colour in zip(POWERS.items(), SERIES, strict=False):
        if p > 0:
            hover = f"|θ|<sup>{p:g}</sup> = %{{y:.3f}} at θ = %{{x:.2f}}"
            traces.append(curve(theta, [abs(t) ** p for t in theta], name, colour, hover, legendgroup=name))
            continue
        for side in ([t for t in theta if t < 0], [t for t in theta if t > 0]):  # it jumps at 0: two lines and a point
            shown = {"legendgroup": name, "showlegend": side[0] > 0}
            traces.append(curve(side, [1.0] * len(side), name, colour, "L0: 1 at θ = %{x:.2f}", **shown))
        for y, symbol, words in ((0.0, "circle", "L0: 0 at θ = 0"), (1.0, "circle-open", "not 1 at θ = 0")):
            look = {"legendgroup": name, "showlegend": False, "hoverinfo": "text", "hovertext": [words]}
            traces.append(dots([0.0], [y], name, {"color": colour, "size": 9, "symbol": symbol}, **look))
    return Chart(
        "penalties",
        "Figure 1: the penalty of a parameter θ, for several p",
        "For p = 2 and p = 1 the penalty grows with |θ|, and so shrinks large values too; the smaller p, the less. For "
        "p = 0 it is 1 for every θ ≠ 0 (lines, and the circle at 0 that does not belong to them) and 0 at θ = 0 (dot): "
        "it counts parameters, and leaves their values alone.",
        "Curves of |θ|^p for p = 2, 1, 1/2, 1/4 and 0. All pass through 0 at θ = 0 and 1 at θ = ±1; the last one is 1 "
        "everywhere but at 0.",
        traces,
        height=380,
        wide=True,
        xaxis=axis("θ", range=[-2, 2]),
        yaxis=axis("|θ|<sup>p</sup>", range=[-0.08, 2.2]),
    )


def _density(concrete: BinaryConcrete, hard: HardConcrete, atoms: list[float]) -> Chart:
    at = torch.arange(1, 400, dtype=torch.float64) / 400
    x, soft, filled = at.tolist(), *(q.log_prob(at).exp().tolist() for q in (concrete, hard))
    stems = [0.0, 0.0, None, 1.0, 1.0], [0.0, atoms[0], None, 0.0, atoms[1]]
    right: dict[str, Any] = {"yaxis": "y2", "cliponaxis": False}
    tips: dict[str, Any] = {
        "mode": "markers+text",
        "showlegend": False,
        "text": [f"{mass:.3f}" for mass in atoms],
        "textposition": ["middle right", "middle left"],
        "textfont": {"color": "@vermilion", "size": 13},
        "hovertemplate": "P(z = %{x:.0f}) = %{y:.4f}<extra></extra>",
    }
    hover = "hard concrete: density %{y:.3f} at z = %{x:.3f}"
    dotted = "binary concrete: density %{y:.3f} at %{x:.3f}"
    traces = [
        curve(x, soft, "binary concrete, density", "@grey", dotted, dash="dot"),
        curve(x, filled, "hard concrete, density", "@blue", hover, fill="tozeroy", fillcolor="@faint"),
        curve(*stems, "hard concrete, mass at 0 and 1 (right axis)", "@vermilion", "", width=4, **right),
        dots([0.0, 1.0], atoms, "mass", {"color": "@vermilion", "size": 11}, **right, **tips),
    ]
    return Chart(
        "density",
        "Figure 2a: the density of a gate, and its atoms",
        "Dotted: the binary concrete s on (0, 1). It is stretched to (γ, ζ) and clamped to [0, 1]; what came to lie "
        "below 0 or above 1 becomes the two atoms, drawn as bars whose heights are probabilities (right axis). What "
        "lies between keeps a density (filled, left axis). The area under it and the two atoms are 1 together.",
        "The density of the hard concrete between 0 and 1 with its masses at 0 and at 1, for the values of the "
        "sliders; the numbers are below.",
        traces,
        height=400,
        xaxis=axis("gate z", range=[-0.04, 1.04], zeroline=False),
        yaxis=axis("density", range=[0, TALLEST]),
        yaxis2=axis("probability mass", range=[0, 1], overlaying="y", side="right", showgrid=False),
    )


def _means(now: HardConcrete) -> Chart:
    log_alpha = torch.arange(-80, 81, dtype=torch.float64) / 10
    concrete, hard = _at(log_alpha)
    drawn = (
        ("binary concrete, mean", concrete.mean, "@grey", "solid", "mean of the binary concrete"),
        ("σ(log α)", torch.sigmoid(log_alpha), "@grey", "dot", "σ(log α) ="),
        ("P(z ≠ 0)", hard.prob_nonzero, "@green", "dashdot", "P(z ≠ 0) ="),
        ("hard concrete, mean", hard.mean, "@blue", "solid", "E[z] ="),
        ("hard concrete, without noise ẑ", hard.noiseless, "@vermilion", "dash", "ẑ ="),
    )
    traces = [
        curve(log_alpha.tolist(), y.tolist(), name, colour, f"{words} %{{y:.3f}} at log α = %{{x:.1f}}", dash=dash)
        for name, y, colour, dash, words in drawn
    ]
    marker = {"color": ["@blue", "@vermilion"], "size": 10, "line": {"color": "@paper", "width": 2}}
    look = {"hovertemplate": "%{y:.3f} at log α = %{x:.1f}<extra></extra>", "showlegend": False}
    values = [now.mean.item(), now.noiseless.item()]
    traces.append(dots([LOG_ALPHA, LOG_ALPHA], values, "log α of the slider", marker, **look))
    return Chart(
        "means",
        "Figure 2b: the mean of a gate against log α",
        "Solid: means over the noise, by quadrature (the paper draws 10,000 samples). Dashed: the gate without noise, "
        "which is used at test time (eq. 13); it is exactly 0 and exactly 1 at the ends. The noise smooths it, so that "
        "a gate still has a gradient where it is closed. Dots: at the slider's log α.",
        "Both means rise from 0 to 1 with log α. The gate without noise is 0 up to log α = log(−γ/ζ) and 1 from "
        "log((1 − γ)/(ζ − 1)) on.",
        traces,
        height=400,
        xaxis=axis("log α", range=[-8, 8], zeroline=False),
        yaxis=axis("gate", range=[-0.03, 1.03], zeroline=False),
    )
