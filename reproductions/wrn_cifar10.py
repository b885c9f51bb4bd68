"""Louizos, Welling, Kingma (2018), Figure 4 and Table 2: WRN-28-10 on CIFAR-10 and CIFAR-100, with measured seconds.

    ellzero reproduce wrn-cifar10 --only wrn-cifar10,shrink-wrn-20-cifar10 --every 20 --device cuda
    ellzero reproduce wrn-cifar10 --draw-only --out results/wrn-cifar10
    ellzero reproduce wrn-cifar100 --only shrink-wrn-35-cifar100 --every 20 --device cuda
    ellzero reproduce preresnet-cifar10 --every 20 --device cuda

The paper says that gates "can greatly speed up training" and draws *expected* FLOPs over iterations; here the measured
seconds of an epoch are beside them. A row takes a GPU for 8 to 15 minutes, and `--resume` takes it up where it was
stopped; the second command makes table and figure from the rows whose json lies in a folder. Rows and seeds are trained
one after the other: batch norm keeps a network out of a stack.

Published: Table 2 has last errors, the median of five runs, for the dense network (Zagoruyko & Komodakis, 2016), the
one with dropout, and both λs. Those of the rows with constraints (ε for each layer) are the best and the last error
that the 2022 code of Gallego-Posada et al. gives; it trains the whole network to the end.

"λ, shrinking" takes out what has been closed for long while the gates stay alive. "streams" bounds the MACs of the
whole network, and gates its residual streams too: with hidden layers alone no step is shorter than half a dense one.

Two rows say what averaging is worth: "ε=20 %, dropped" settles and shrinks as "ε=20 %" does, then has the paper's
drops of the learning rate and no average; "dense, averaged" is the dense network with the average in their place.
"without %" has, for rows that are averaged, the last error of the parameters as they were trained, and that of the
average without statistics of its own.

Seconds are those of training: compilation is in them, evaluation is not. "× dense" is to the dense row with as many
epochs on the same device. Seconds of an epoch are medians over the records before the first event, and over those
after the last, but for the first record of each, which has compiled, if there are others.
"""

import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.table import Table

from ellzero.experiments import networks
from ellzero.experiments.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, grid, legend, save
from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import pace
from ellzero.experiments.store.statistics import with_interval
from ellzero.experiments.study import Row, Study
from ellzero.out.tables import new_table

DENSE = "wrn-cifar10"
CONSTRAINED = "shrink-wrn-{}-cifar10"
OWN_RATE = "own-rate-wrn-0.001-cifar10"  # gates learn as fast as the weights, as in the paper
# The paper's drops of the learning rate, and the average in their place.
DROPPED, AVERAGED = (
    {field: getattr(get(name), field) for field in ("milestones", "ema", "recalibrate")}
    for name in (DENSE, CONSTRAINED.format(20))
)
ROWS = (
    Row("dense", get(DENSE), error="4.00"),
    Row("dense, averaged", get(DENSE).override(name="wrn-averaged-cifar10", **AVERAGED)),
    Row("dropout 0.3", get("wrn-dropout-cifar10"), error="3.89"),
    Row("λ=0.001/N", get("louizos-wrn-0.001-cifar10"), error="3.83"),
    Row("λ=0.002/N", get("louizos-wrn-0.002-cifar10"), error="3.93"),
    Row(
        "λ=0.001/N, paper's rate", get("louizos-wrn-0.001-cifar10").override(name=OWN_RATE, gate_lr=None), error="3.83"
    ),
    Row("λ=0.001/N, shrinking", get("alive-wrn-0.001-cifar10")),
    Row("λ=0.002/N, shrinking", get("alive-wrn-0.002-cifar10")),
    Row("ε=80 %", get(CONSTRAINED.format(80)), "82 % of parameters", "3.69 | 3.96±0.15"),
    Row("ε=50 %", get(CONSTRAINED.format(50))),
    Row("ε=35 %", get(CONSTRAINED.format(35)), "31 % of MACs", "3.80 | 4.13±0.13"),
    Row("ε=20 %", get(CONSTRAINED.format(20)), "16 % of MACs", "4.05 | 4.28±0.16"),
    Row("ε=20 %, dropped", get(CONSTRAINED.format(20)).override(name="dropped-wrn-20-cifar10", **DROPPED)),
    Row("streams, 16 % of MACs", get("streams-wrn-16-cifar10")),
)
ROWS_DEEP = (
    Row("dense", get("preresnet-cifar10"), error="6.37"),
    Row("50 % of MACs", get("preresnet-50-cifar10")),
)
ROWS_100 = (
    Row("dense", get("wrn-cifar100"), error="21.18"),
    Row("dropout 0.3", get("wrn-dropout-cifar100"), error="18.85"),
    Row("λ=0.001/N", get("louizos-wrn-0.001-cifar100"), error="18.75"),
    Row("λ=0.002/N", get("louizos-wrn-0.002-cifar100"), error="19.04"),
    *(Row(f"λ={c}/N, shrinking", get(f"alive-wrn-{c}-cifar100")) for c in (0.001, 0.002)),
    *(Row(f"ε={percent} %", get(f"shrink-wrn-{percent}-cifar100")) for percent in (50, 35, 20)),
)
COLOURS = {
    "dense": INK,
    "dropout 0.3": GREY,
    "λ=0.001/N": PURPLE,
    "λ=0.002/N": SKY,
    "ε=80 %": BLUE,
    "ε=50 %": GREEN,
    "ε=35 %": ORANGE,
    "ε=20 %": VERMILION,
    "streams": GREEN,
    "50 % of MACs": GREEN,
}

Record = dict[str, Any]


def events(seed: Record) -> list[Record]:
    """The points of a history at which units were taken out."""
    return [h for h in seed["history"] if "shrunk" in h and not h["shrunk"]["skipped"]]


def paces(seed: Record) -> tuple[float, float | None]:
    """Seconds of an epoch before the first event and after the last; None where there was none, or nothing after it."""
    at = [h["epoch"] for h in events(seed)] or [float("inf")]
    took = pace(seed["history"])
    before = [seconds for _, end, seconds in took if end <= at[0]]
    after = [seconds for start, _, seconds in took if start >= at[-1]]
    # The first record of each has compiled. Where it is the only one, it must do.
    return statistics.median(before[1:] or before), statistics.median(after[1:] or after) if after else None


def macs(point: Record) -> float:
    """The share of the dense MACs: expected while the gates are noisy, kept when they are fixed; all without gates."""
    return float(point["kept" if point.get("tuning") else "expected"].get("macs", 1.0))


def left(seed: Record) -> tuple[list[int], list[float]]:
    """Epochs, and the MACs in percent of dense that the gates leave; where they settle, also what it was before."""
    points = []
    for h in seed["history"]:
        before = h.get("shrunk", {}).get("expected")
        points += [(h["epoch"], 100 * before["macs"])] if before else []
        points.append((h["epoch"], 100 * macs(h)))
    epochs, shares = zip(*points, strict=True)
    return list(epochs), list(shares)


def trained(seed: Record) -> tuple[list[int], list[float]]:
    """Epochs, and the MACs in percent of dense that the network under training has from there on."""
    steps = [(0, 100.0), *((h["epoch"], 100 * h["shrunk"]["macs"]["after"]) for h in events(seed))]
    steps.append((seed["history"][-1]["epoch"], steps[-1][1]))
    epochs, shares = zip(*steps, strict=True)
    return list(epochs), list(shares)


def alike(record: Record, other: Record) -> bool:
    """Whether their seconds can be compared."""
    return all(
        (record["recipe"][key], record["device"]) == (other["recipe"][key], other["device"])
        for key in ("epochs", "network", "batch", "precision")
    )


def table(records: Sequence[Record], title: str) -> Table:
    right = (
        "paper, error %",
        "best %",
        "last %",
        "without %",
        "MACs expected",
        "kept",
        "seconds",
        "× dense",
        "s/epoch",
        "after",
    )
    out = new_table(title, ("row", "paper, left"), right)
    dense = next((r for r in records if r["row"] == "dense"), None)
    for record in records:
        seeds = record["seeds"]
        shares = ["100.0 %"] * 2
        if all("costs" in s for s in seeds):
            means = [statistics.fmean(s["costs"]["macs"][kind] for s in seeds) for kind in ("expected", "kept")]
            shares = [f"{100 * mean:.1f} %" for mean in means]
        seconds = statistics.fmean(s["seconds_of_stack"] for s in seeds)
        ratio = "–"
        if dense is not None and alike(record, dense):
            ratio = f"{seconds / statistics.fmean(s['seconds_of_stack'] for s in dense['seeds']):.3f}"
        ends = [s["history"][-1] for s in seeds]
        bought = [
            step for step in ("averaging", "recalibration") if all(step in p.get("error_without", {}) for p in ends)
        ]
        before, after = zip(*(paces(s) for s in seeds), strict=True)
        out.add_row(
            record["row"],
            record["published"]["architecture"] or "–",
            record["published"]["error"].replace(" | ", " / ") or "–",
            with_interval([s["error_best"] for s in seeds]),
            with_interval([s["error_last"] for s in seeds]),
            " / ".join(with_interval([p["error_without"][step] for p in ends]) for step in bought) or "–",
            *shares,
            f"{seconds:.0f}",
            ratio,
            f"{statistics.fmean(before):.2f}",
            "–" if None in after else f"{statistics.fmean(after):.2f}",
        )
    return out


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    with grid(1, 3, size=(10.0, 3.0)) as (figure, (cost, clock, error)):
        usual = 0.0
        for record in records:
            for number, seed in enumerate(record["seeds"]):
                base, _, variant = record["row"].partition(", ")
                style = {"color": COLOURS[base], "linewidth": 1.4 if number == 0 else 0.6}
                variants = [r["row"] for r in records if r["row"].startswith(f"{base}, ")]
                style |= {"linestyle": ("--", "-.")[variants.index(record["row"])]} if variant else {}
                label = record["row"] if number == 0 else None
                points = seed["history"]
                cost.plot(*left(seed), label=label, **style)
                cost.plot(*trained(seed), drawstyle="steps-post", **{**style, "linestyle": ":", "linewidth": 1.0})
                took = pace(points)
                x, y = [took[0][0], *(end for _, end, _ in took)], [took[0][2], *(value for *_, value in took)]
                clock.plot(x, y, drawstyle="steps-pre", **style)
                usual = max(usual, statistics.median(y))
                seconds = list(accumulate(h["seconds"] for h in points))
                error.plot(seconds, [h["error"] for h in points], marker=".", markersize=3, **style)
                for event in events(seed):
                    mark = {"marker": "v", "color": style["color"], "markersize": 5, "linestyle": "none"}
                    at = event["epoch"]
                    cost.plot(at, 100 * macs(event), **mark)
                    clock.plot(at, dict(zip(x, y, strict=True))[at], **mark)
                    error.plot(seconds[points.index(event)], event["error"], **mark)
        cost.set(title="(a) expected", xlabel="epoch", ylabel="MACs (% of dense)", ylim=(0, 108))
        clock.set(title="(b) measured", xlabel="epoch", ylabel="seconds per epoch", ylim=(0, 1.6 * usual))
        error.set(title="(c) what it gives", xlabel="seconds of training", ylabel="test error (%)", yscale="log")
        error.set_xlim(left=0)
        error.yaxis.set_major_formatter("{x:g}")
        error.yaxis.set_minor_formatter("{x:g}")
        legend(figure, cost, columns=10)
        device = " or ".join(dict.fromkeys(str(r["device"]) for r in records))
        data = records[0]["recipe"]["data"]
        network = networks.find(records[0]["recipe"]["network"]).title
        caption = f"""{network} on {data.replace("cifar", "CIFAR-")}, {device}. (a) MACs of a forward pass that the
            gates leave, in percent of the dense network's: expected over their noise, and kept from where
            they are fixed; networks without gates compute everything, with dropout too. Dotted: MACs of the
            network that is trained. (b) Measured seconds of an epoch of training, the mean since the record
            before, compilation included: where that is, lines may go beyond the scale. (c) Test error over
            the seconds of training so far. Triangles: units are taken out of the network that is trained.
            Thin lines: further seeds. Dashed, or with dots between: variants of the row before the comma."""
        kind = records[0]["recipe"]["network"].partition("-")[0]  # as the study is called
        return save(figure, folder / f"{kind}-{data}", caption)


TITLE = "Louizos et al. (2018), Figure 4 and Table 2, with measured seconds"
STUDY = Study("wrn-cifar10", TITLE, ROWS, seeds=1, table=table, draw=draw, keep_networks=True)
TITLE_DEEP = "Louizos et al. (2018), Table 2: the pre-activation ResNet-110, with measured seconds"
STUDY_DEEP = Study("preresnet-cifar10", TITLE_DEEP, ROWS_DEEP, seeds=1, table=table, draw=draw, keep_networks=True)
STUDY_100 = Study("wrn-cifar100", TITLE, ROWS_100, seeds=1, table=table, draw=draw, keep_networks=True)
