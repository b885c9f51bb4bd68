"""What a run's page shows over its epochs: error, loss, costs, multipliers, seconds, and the events of shrinking.

Charts are made from a `Run`, plain data. Every one over epochs has a thin line where units were taken out or the gates
were fixed. What is left of the network, and its gates one by one, are in `network`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ellzero.experiments.store.folder import pace
from ellzero.page.charts import EXPECTED, KEPT, SERIES, Chart, axis, curve, escaped, number, percent
from ellzero.page.facts import COSTS, FLOPS_PER_MAC, Run

_KINDS = (("kept", "@blue", KEPT), ("expected", "@vermilion", EXPECTED))
_COUNTED = {
    "l0_norm": "Weights that are not zero, among those that gates count (l0_norm)",
    "params": "Parameters of the network that the gates leave",
    "macs": "Multiply-accumulates for one image of the network that the gates leave",
}


def _line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, unit: str = "", **more: Any) -> dict[str, Any]:
    """A curve over epochs, with a dot for each record where there are few."""
    hover = f"epoch %{{x}}<br>%{{y:.4~g}}{unit}<extra>{name}</extra>"
    marker = {"color": colour, "size": 6 if len(x) <= 20 else 4}
    mode = "lines+markers" if len(x) <= 60 else "lines"
    return curve(x, y, name, colour, hover, **({"mode": mode, "marker": marker} | more))


def _level(end: float, y: float, name: str, colour: str, dash: str, hover: str) -> dict[str, Any]:
    """A level line for the eye to compare with."""
    return curve([0, end], [y, y], name, colour, hover, dash=dash, width=1.5)


def moments(run: Run) -> list[tuple[float, str]]:
    """Epochs after which the network became another one, each with a word."""
    at = [(event.epoch, event.word) for event in run.events]
    if run.fixed_at is not None and (run.fixed_at, "settled") not in at:
        at.append((run.fixed_at, "gates fixed"))
    return at


def marks(run: Run, scale: float = 1.0, labels: bool = True) -> dict[str, Any]:
    """Thin lines where units were taken out and where the gates were fixed; an epoch is `scale` wide on x."""
    at = moments(run)
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    font = {"color": "@muted", "size": 11}
    label = {"y": 0, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "textangle": -90, "showarrow": False}
    shapes = [
        {"type": "line", "x0": scale * x, "x1": scale * x, "yref": "paper", "y0": 0, "y1": 1, "line": line}
        for x, _ in at
    ]
    names = [{**label, "x": scale * x, "text": word, "font": font} for x, word in at]
    return {"shapes": shapes, **({"annotations": names} if labels else {})} if at else {}


def _ends(values: Sequence[float | None], unit: str, digits: int = 2) -> str:
    """Where a curve begins and ends, in words."""
    known = [v for v in values if v is not None]
    if not known:
        return "no numbers yet"
    if len(known) == 1:
        return f"{known[0]:.{digits}f}{unit}"
    return f"from {known[0]:.{digits}f}{unit} to {known[-1]:.{digits}f}{unit}, lowest {min(known):.{digits}f}{unit}"


def _over_time(run: Run, title: str, **more: Any) -> dict[str, Any]:
    few = {"dtick": 1} if run.epochs <= 12 else {}
    x = axis("epoch", range=[0, run.epochs * 1.02], **few)
    return {"xaxis": x, "yaxis": axis(title, **({"rangemode": "tozero"} | more)), **marks(run)}


def training_charts(run: Run) -> list[Chart]:
    """Error, loss, seconds, and with gates costs and multipliers: a chart each, as far as there are numbers."""
    if not run.history:
        return []
    x, error, loss = run.x, run.seen("error"), run.seen("loss")
    how = "with the test-time gates (kept)" if run.gated else "of the dense network"
    noise = ", with the gates' noise; the penalty or the multipliers' terms are not in it" if run.gated else ""
    charts = [
        Chart(
            "error",
            "Test error",
            f"Share of the test images that the network gets wrong, in percent, {how}.",
            f"Test error in percent, {how}: {_ends(error, ' %')}.",
            [_line(x, error, "test error", "@blue", " %")],
            {**_over_time(run, "test error (%)"), "showlegend": False},
        ),
        Chart(
            "loss",
            "Training loss",
            f"Cross-entropy in nats for one image: the mean over the steps since the record before{noise}.",
            f"Training loss in nats: {_ends(loss, '', 4)}.",
            [_line(x, loss, "loss", "@vermilion")],
            {**_over_time(run, "loss (nats)", rangemode="normal"), "showlegend": False},
        ),
    ]
    charts += [_cost_chart(run, cost) for cost in COSTS] if run.gated else []
    charts += _seconds(run)
    return charts + (multipliers(run) if run.gated else [])


def _cost_chart(run: Run, cost: str) -> Chart:
    words, what = COSTS[cost], _COUNTED[cost]
    shares = {kind: run.seen(kind, cost, times=100) for kind, *_ in _KINDS}
    traces = [_line(run.x, shares[kind], kind, colour, " %", dash=dash) for kind, colour, dash in _KINDS]
    target = run.targets.get("*") if run.recipe.cost == cost else None
    extra = said = ""
    if target is not None:
        traces.append(_level(run.epochs, 100 * target, "target", "@muted", "dot", f"target {100 * target:g} %"))
        extra = f" Dotted: the target for the {run.recipe.on} number, {100 * target:g} %."
        said = f" Target: {100 * target:g} %."
    return Chart(
        cost.replace("_", "-"),
        f"{words[0].upper()}{words[1:]}",
        f"{what}, in percent of the dense network. Solid: kept by the test-time gates. Dashed: expected over their "
        f"noise.{extra}",
        f"{what}, in percent of dense. Kept: {_ends(shares['kept'], ' %')}. Expected: "
        f"{_ends(shares['expected'], ' %')}.{said}",
        traces,
        _over_time(run, f"{words} (% of dense)"),
    )


def _seconds(run: Run) -> list[Chart]:
    """Steps, for a record knows only the mean since the one before. Without events there is nothing to see in it."""
    took = pace(run.history)
    if not took or not run.events:
        return []
    x, y = [took[0][0], *(end for _, end, _ in took)], [took[0][2], *(value for *_, value in took)]
    line = _line(x, y, "seconds", "@green", " s", mode="lines")
    line["line"]["shape"] = "vh"
    usual, most = statistics.median(y), max(y)
    cut = most > 6 * usual  # one that has compiled
    beyond = f" The scale ends where the rest can be seen: the largest is {most:.3g} s." if cut else ""
    said = f"Seconds for an epoch: {_ends(y[1:], ' s', 3)}."
    for event in run.events:
        before, after = _median(took, 0, event.epoch), _median(took, event.epoch, run.epochs)
        if not event.skipped and before is not None and after is not None:
            said += f" Until epoch {event.epoch:g} {before:.3g} s in the median, after it {after:.3g} s."
    return [
        Chart(
            "seconds",
            "Seconds per epoch",
            "Measured seconds of training for one epoch: the mean since the record before, compilation included, "
            f"evaluation not.{beyond}",
            said,
            [line],
            _over_time(run, "seconds per epoch", **({"range": [0, 4 * usual]} if cut else {})) | {"showlegend": False},
        )
    ]


def _median(took: Sequence[tuple[float, float, float]], first: float, last: float) -> float | None:
    """The median pace between two epochs, which compilation leaves as it is."""
    values = [value for start, end, value in took if first <= start and end <= last]
    return statistics.median(values) if values else None


def multipliers(run: Run) -> list[Chart]:
    """The multiplier of each constraint; nothing without one."""
    patterns = list(run.targets)
    rows = [r.get("multiplier") for r in run.history]
    if not patterns or not all(isinstance(row, list) and len(row) >= len(patterns) for row in rows):
        return []
    traces, said = [], []
    for k, pattern in enumerate(patterns):
        values = [row[k] if isinstance(row[k], int | float) else None for row in rows if row is not None]
        name = "whole network" if pattern == "*" else pattern
        dash = ("solid", "dash", "dot")[k // len(SERIES) % 3]
        traces.append(_line(run.x, values, escaped(name), SERIES[k % len(SERIES)], dash=dash))
        said.append(f"{name} {_ends(values, '', 3)}")
    return [
        Chart(
            "multipliers",
            "Multipliers",
            "The multiplier λ of each constraint, in nats of loss for the whole dense cost that it bounds: it rises "
            "while the constraint is violated, and falls or starts again at zero while it holds.",
            f"Multipliers over training: {'; '.join(said[:8])}.",
            traces,
            {**_over_time(run, "λ (nats)"), "showlegend": len(patterns) > 1},
        )
    ]


def flops(run: Run) -> Chart | None:
    """FLOPs beside those of the dense network and of dropout; None where they are not known."""
    dense = run.dense_macs
    if not run.gated or not run.history or dense is None:
        return None
    steps = run.look.steps_per_epoch if run.look is not None else None
    unit = "iteration" if steps else "epoch"
    end, whole = run.epochs * (steps or 1), FLOPS_PER_MAC * dense
    traces, said = [], []
    for kind, colour, dash in _KINDS:
        values = run.seen(kind, "macs", times=whole)
        line = _line([e * (steps or 1) for e in run.x], values, kind, colour, dash=dash)
        traces.append({**line, "hovertemplate": f"{unit} %{{x:,}}<br>%{{y:.4~s}}FLOPs<extra>{kind}</extra>"})
        said.append(f"{kind} at the end {number(values[-1])}")
    traces.append(_level(end, whole, "dense", "@ink", KEPT, "%{y:.4~s}FLOPs<extra>dense</extra>"))
    said.append(f"dense {number(whole)}")
    dropout, also = run.look.dropout if run.look is not None else None, ""
    if dropout is not None:
        hover = "%{y:.4~s}FLOPs<extra>dropout, expected</extra>"
        traces.append(_level(end, whole * dropout, "dropout (expected)", "@muted", "dot", hover))
        said.append(f"dropout, expected, {number(whole * dropout)}")
        also = " Dotted: dropout, expected, with the keep rates that the gates started from."
    return Chart(
        "flops",
        "FLOPs over training",
        "Floating-point operations of a forward pass for one image; a multiplication and an addition are one each, so "
        f"FLOPs are twice the MACs. Solid: kept. Dashed: expected. Level line: the dense network.{also} "
        "(Louizos et al., Figures 3 and 4.)",
        f"FLOPs for one image: {', '.join(said)}.",
        traces,
        {
            "xaxis": axis(unit, range=[0, end * 1.02], tickformat="~s" if steps else ""),
            "yaxis": axis("FLOPs for one image", rangemode="tozero", tickformat="~s"),
            **marks(run, steps or 1),
        },
        height=360,
        wide=True,
    )


def event_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the table of events."""
    words = {"shrunk": "shrunk", "skipped": "skipped: too little to gain", "settled": "settled: the gates are fixed"}
    out = []
    for event in run.events:
        widths = [
            (name, f"{before:,}" if before == after else f"{before:,} → {after:,}")
            for name, (before, after) in event.widths.items()
        ]
        before, after = (percent(share, 1).replace(" ", "\u00a0") for share in event.macs)
        macs = f"{before}, and {after} if done" if event.skipped else f"{before} → {after}"
        out.append({"epoch": f"{event.epoch:g}", "what": words[event.word], "widths": widths, "macs": macs})
    return out
