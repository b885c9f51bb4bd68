"""The studies in reproductions/: numbers against closed forms and both papers' text, tables by hand, figures from
invented records, and the page that is made of them.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import integrate, stats

from ellzero.experiments import figures as drawing
from ellzero.experiments.figures import PRINTED
from ellzero.experiments.papers import shaped
from ellzero.experiments.study import FIGURES, Study, find, studies
from support import ROOT
from support.campaigns import DENSE, invented, known, module

FOLDER = ROOT / "reproductions"
TRAINED = [
    "louizos2018-table1",
    "louizos2018-figure3",
    "louizos2018-rivals",
    "gallego2021-table1",
    "gallego2021-figure1",
    "gallego2021-figure2",
    "gallego2021-extragradient",
    "gallego2021-init",
    "control",
    "wrn-cifar10",
    "wrn-cifar100",
    "preresnet-cifar10",
    "frontier",
    "frontier-split",
    "gpt-shakespeare",
    "vit-cifar10",
    "vit-split",
]


# ---- all of them ----------------------------------------------------------------------------------------------------


def test_each_file_that_defines_a_study_is_found_under_its_own_name() -> None:
    tools = {"render", "search_mlp_sep"}
    files = {p.stem for p in FOLDER.glob("*.py")} - tools
    assert {name.replace("-", "_") for name in known()} == files | {
        "wrn_cifar100",
        "preresnet_cifar10",
        "arena_split",
        "frontier_split",
        "vit_cifar10",
        "vit_split",
    }  # two
    assert {n for n, s in known().items() if s.rows} == set(TRAINED)
    for name, study in known().items():
        assert find(name.replace("-", "_"), known()) is study


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_study_makes_its_table_and_figures_from_records_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = known()[name]
    records = json.loads(json.dumps(invented(study)))
    assert study.table is not None
    shown = study.table(records, "")
    assert len(list(shown.columns[0].cells)) > 0
    partial = records[:1]  # what `--only` or a reproduction on its way leaves
    missing = (
        len(study.rows) + 4 if name == "louizos2018-rivals" else 1
    )  # it says what is not there, and has rows of L0
    assert len(list(study.table(partial, "").columns[0].cells)) == missing
    if study.draw is not None:
        files = study.draw(records, tmp_path)
        assert all(f.stat().st_size > 0 for f in files)
        assert {f.suffix for f in files} == {".png", ".svg", ".txt"}
        monkeypatch.setattr(drawing, "render", lambda _, *files: [file.touch() for file in files])  # laid out above
        study.draw(partial, tmp_path)


def test_rows_of_the_other_methods_say_what_reproduces_and_what_was_not_run() -> None:
    """Weights by hand: 512·114 + 114·72 + 72·10 and 25·3 + 25·3·12 + 192·500 + 500·10, as in Table 1."""
    study, own = known()["louizos2018-rivals"], module("louizos2018_rivals")
    assert own.weights((512, 114, 72)) == 67_296
    assert own.weights((3, 12, 192, 500)) == 101_975
    records = {r["recipe"]["name"]: r for r in json.loads(json.dumps(invented(study)))}
    record = records["sparse-vd-mlp"]
    for other in records.values():
        other["recipe"]["epochs"] = 200
    for seed in record["seeds"]:
        seed |= {"architecture": {"fc1": 500, "fc2": 120, "fc3": 70}, "error_best": 1.7, "error_last": 1.9}
    assert own.verdict(record) == "yes"
    for seed in record["seeds"]:
        seed |= {"architecture": {"fc1": 250, "fc2": 110, "fc3": 70}, "error_best": 2.1, "error_last": 2.3}
    assert own.verdict(record) == "no: 0.53 × the weights, 0.3 points more error"
    assert own.verdict(records["gl-mlp"]) == "nothing is published"
    record["recipe"]["epochs"] = 3
    assert own.verdict(record) == "a rehearsal of 3 epochs"
    assert study.table is not None
    shown = study.table([record], "")
    cells = [list(column.cells) for column in shown.columns]
    assert cells[2].count("not run yet") == len(study.rows) - 1
    assert cells[0][-4:] == ["LeNet-5, L0 λ sep.", "LeNet-5, L0 λ=0.1/N", "MLP, L0 λ sep.", "MLP, L0 λ=0.1/N"]
    assert cells[3][-4:] == ["yes"] * 4


def mlp(pixels: int, first: int, second: int) -> int:
    """Parameters that are left, weights and biases."""
    return pixels * first + first + first * second + second + second * 10 + 10


def lenet(maps: int, others: int, inputs: int, hidden: int) -> tuple[int, int]:
    """Parameters and MACs that are left: 24 × 24 and 8 × 8 places of 5 × 5 weights each."""
    convolutions = (25 * maps + maps, 24**2 * 25 * maps), (25 * maps * others + others, 8**2 * 25 * maps * others)
    lines = (inputs * hidden + hidden, inputs * hidden), (hidden * 10 + 10, hidden * 10)
    params, macs = map(sum, zip(*convolutions, *lines, strict=True))
    return params, macs


def test_shapes_of_the_frontier_are_within_their_budgets_and_use_them() -> None:
    own = module("frontier")
    assert mlp(784, 300, 100) == 266_610
    assert lenet(20, 50, 800, 500) == (431_080, 2_293_000)
    second = {name: tuple(shape for shape in shapes if shape) for name, (shapes, _) in own.SECOND.items()}
    tried = {name: shapes + second.get(name, ()) for name, shapes in own.SHAPES.items()}
    used = [mlp(*shape) / 266_610 / 0.0363 for shape in tried["frontier-mlp"]]
    used += [lenet(*shape)[0] / 431_080 / 0.005 for shape in tried["frontier-lenet5-params"]]
    used += [lenet(*shape)[1] / 2_293_000 / 0.048 for shape in tried["frontier-lenet5-macs"]]
    assert own.SECOND["frontier-lenet5-params"][0] == own.THIRD
    for shape in own.THIRD:  # what each layer may keep sums up to what such a network has
        whole = {"conv1": 520, "conv2": 25_050, "fc1": 400_500, "fc2": 5_010}
        assert round(sum(own.counted(*shape)[name] * size for name, size in whole.items())) == lenet(*shape)[0]
    assert len(used) == 18
    assert all(0.95 < share <= 1 for share in used)
    for row in own.ROWS:
        targets = [shaped(row.recipe.network, *shape) for shape in tried[row.recipe.name]]
        assert row.recipe.at_most in [*targets, own.FREE[row.recipe.name]["at_most"]]
        assert row.recipe.data == "mnist"
    assert {row.recipe.data for row in own.SPLIT.rows} == {"mnist-split"}


def test_rows_of_both_tables_have_the_published_numbers() -> None:
    """Typed in twice, from the papers, for the rows and for the context of the Pareto plot."""
    printed = {
        (network, "-".join(map(str, architecture))): errors
        for network, points in PRINTED.items()
        for _, architecture, errors in points
    }
    for name in ("louizos2018-table1", "gallego2021-table1", "louizos2018-figure3"):
        rows = known()[name].rows
        assert len(rows) == 4
        for row in rows:
            errors = tuple(float(e.partition("±")[0]) for e in row.error.split(" | "))
            assert errors == printed[row.recipe.network, row.architecture]
            assert (row.recipe.epochs, row.recipe.data) == (200, "mnist")


# ---- figures without training ---------------------------------------------------------------------------------------


def test_penalties_are_powers_and_their_limit() -> None:
    (record,) = module("louizos2018_figure1").compute()
    by_power = {c["p"]: dict(zip(record["theta"], c["penalty"], strict=True)) for c in record["curves"]}
    assert {2.0, 1.0, 0.0} < set(by_power)
    assert by_power[2.0][-1.5] == 2.25
    assert by_power[1.0][-1.5] == 1.5
    assert by_power[0.25][2.0] == pytest.approx(2**0.25)
    assert {t: v for t, v in by_power[0.0].items() if v != 1} == {0.0: 0.0}
    for theta in (-2.0, 0.5):  # p = 0 is the limit of p → 0
        assert abs(theta) ** 1e-9 == pytest.approx(by_power[0.0][theta], abs=1e-8)


def test_densities_are_those_of_the_paper_s_equations() -> None:
    record = module("louizos2018_figure2").densities()
    beta, alpha = 0.5, 1.0

    def eq_23(s: float) -> float:
        top = beta * alpha * s ** (-beta - 1) * (1 - s) ** (-beta - 1)
        return top / (alpha * s**-beta + (1 - s) ** -beta) ** 2

    for x, concrete, hard in zip(record["x"], record["binary_concrete"], record["hard_concrete"], strict=True):
        assert concrete == pytest.approx(eq_23(x))
        assert hard == pytest.approx(eq_23((x + 0.1) / 1.2) / 1.2)  # eq. 25
    at_0 = 1 / (1 + (0.1 / 1.1) ** -beta)  # eq. 24 at s = 0.1/1.2
    assert (record["at_0"], record["at_1"]) == pytest.approx((at_0, at_0))
    between, _ = integrate.quad(lambda z: eq_23((z + 0.1) / 1.2) / 1.2, 0, 1)
    assert record["at_0"] + record["at_1"] + between == pytest.approx(1)
    assert record["at_0"] + record["at_1"] == pytest.approx(0.5, abs=0.05)  # "roughly, half of its mass"


def test_means_are_those_of_ten_thousand_samples_and_of_the_integral() -> None:
    record = module("louizos2018_figure2").means()
    assert record["samples"] == 10_000
    again = module("louizos2018_figure2").means()
    assert again == record  # its own seed
    for k in range(0, 101, 10):
        log_alpha = record["log_alpha"][k]

        def gate(u: float, log_alpha: float = log_alpha) -> float:
            return 1 / (1 + math.exp(-(math.log(u / (1 - u)) + log_alpha) / 0.5))

        def hard(u: float) -> float:
            return min(1.0, max(0.0, 1.2 * gate(u) - 0.1))

        for name, value in (("binary_concrete", gate), ("hard_concrete", hard)):
            mean, _ = integrate.quad(value, 0, 1, limit=500)
            square, _ = integrate.quad(lambda u, f=value: f(u) ** 2, 0, 1, limit=500)
            assert record["exact"][name][k] == pytest.approx(mean, abs=1e-6)
            spread = math.sqrt(max(square - mean**2, 0) / 10_000)
            assert record["sampled"][name][k] == pytest.approx(mean, abs=5 * spread + 1e-4)
        sigmoid = 1 / (1 + math.exp(-log_alpha))
        assert record["noiseless"]["binary_concrete"][k] == pytest.approx(sigmoid)
        assert record["noiseless"]["hard_concrete"][k] == pytest.approx(min(1, max(0, 1.2 * sigmoid - 0.1)))  # eq. 13


def test_computing_leaves_the_random_numbers_of_others_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    module("louizos2018_figure2").compute()
    assert torch.equal(torch.rand(2), expected)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dropout_s_flops_are_the_product_of_keep_rates() -> None:
    figure = module("louizos2018_figure3")
    mlp, _, lenet, _ = (row.recipe for row in figure.ROWS)
    inputs, first, second = 0.8 * 784, 0.5 * 300, 0.5 * 100
    expected = (inputs * first + first * second + second * 10) / 266_200
    assert figure.with_dropout(mlp) == pytest.approx(expected, rel=2e-5)  # sums of float32
    alive = 0.5 * (1 - 0.5**16)  # a map of conv2 is computed if it is open and one of its 16 inputs of fc1 is
    convolutions = 10 * 25 * 24**2 + 10 * 50 * alive * 25 * 8**2
    expected = (convolutions + 800 * 0.5 * 0.5 * 500 * 0.5 + 500 * 0.5 * 10) / 2_293_000
    assert figure.with_dropout(lenet) == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
def test_lines_of_figure_3_are_twice_the_expected_macs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = module("louizos2018_figure3")
    seen: list[Any] = []
    monkeypatch.setattr(figure, "save", lambda drawn, path, caption: seen.append(drawn) or [])
    records = invented(known()["louizos2018-figure3"], seeds=1)
    figure.draw(records, tmp_path)
    for axes, (network, sep) in zip(seen[0].axes, (("lenet300", 1), ("lenet5", 3)), strict=True):
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        dense = 2 * DENSE[network]["macs"]
        assert set(lines["dense"]) == {dense}
        history = records[sep]["seeds"][0]["history"]
        assert lines["λ sep."] == pytest.approx([dense * h["expected"]["macs"] for h in history])


# ---- Gallego-Posada et al., Figure 2 --------------------------------------------------------------------------------


def test_layerwise_rows_have_the_same_target_for_every_gate() -> None:
    rows = known()["gallego2021-figure2"].rows
    names = {"lenet300": {"fc1", "fc2", "fc3"}, "lenet5": {"conv1", "conv2", "fc1", "fc2"}}
    panels: dict[tuple[str, bool], list[float]] = {}
    for row in rows:
        at_most = row.recipe.at_most
        if isinstance(at_most, dict):
            assert set(at_most) == names[row.recipe.network]
            assert len(set(at_most.values())) == 1
        target = module("gallego2021_figure2").target({"recipe": row.recipe.to_dict()})
        panels.setdefault((row.recipe.network, isinstance(at_most, dict)), []).append(target)
        assert row.recipe.epochs == 100
    assert len(panels) == 4
    assert len({tuple(targets) for targets in panels.values()}) == 1


def test_the_worst_constraint_value_is_of_the_densest_layer_of_all_runs() -> None:
    runs = [
        {"constraints": {"fc1": {"expected": 0.31, "kept": 0.9}, "fc2": {"expected": 0.29, "kept": 0.9}}},
        {"constraints": {"fc1": {"expected": 0.28, "kept": 0.9}, "fc2": {"expected": 0.35, "kept": 0.9}}},
    ]
    assert module("gallego2021_figure2").worst({"seeds": runs}) == 0.35


# ---- extra-gradient -------------------------------------------------------------------------------------------------


def test_rows_of_a_pair_differ_in_extra_gradient_alone() -> None:
    rows = [row.recipe for row in known()["gallego2021-extragradient"].rows]
    for plain, extra in zip(rows[::2], rows[1::2], strict=True):
        assert not plain.extra_gradient
        assert extra == plain.override(name=extra.name, extra_gradient=True)


def test_differences_are_taken_seed_by_seed() -> None:
    study = known()["gallego2021-extragradient"]
    records = invented(study)
    for record, errors in zip(records, ([1.0, 2.0, 3.0], [1.2, 2.1, 3.6]) * 2, strict=True):
        for seed, error in zip(record["seeds"], errors, strict=True):
            seed["error_last"] = error
    records[1]["seeds"].reverse()  # the order does not matter
    assert study.table is not None
    shown = study.table(records, "")
    lines = list(zip(*(c.cells for c in shown.columns), strict=True))
    half = stats.sem([0.2, 0.1, 0.6]) * stats.t.ppf(0.975, 2)
    assert lines[2][0] == "MLP, ε=33 %, difference"
    assert lines[2][2] == f"0.30 ± {half:.2f}"


# ---- control --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "target", "within"),
    [
        (0.2, 0.2, True),
        (0.2001, 0.2, False),
        (0.19, 0.2, True),
        (0.1899, 0.2, False),
        (0.04, 0.05, True),
        (0.0399, 0.05, False),
        (0.76, 0.8, True),
        (0.7599, 0.8, False),
    ],
)
def test_within_is_at_most_the_target_and_not_far_below(kept: float, target: float, within: bool) -> None:
    assert module("control").is_within(kept, target) is within


def test_control_is_all_targets_of_three_costs_for_both_networks() -> None:
    rows = known()["control"].rows
    got = {(r.recipe.network, r.recipe.cost, r.recipe.at_most) for r in rows}
    targets = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    assert got == {(n, c, t) for n in ("lenet300", "lenet5") for c in ("l0_norm", "params", "macs") for t in targets}
    assert all(r.recipe.on == "kept" and r.recipe.finalize for r in rows)


def test_the_control_table_counts_runs_before_and_after_the_end() -> None:
    study = known()["control"]
    records = [r for r in invented(study, seeds=4) if r["recipe"]["name"] == "control-mlp-macs-20"]
    ends = [0.2, 0.195, 0.21, 0.18]  # the first two are within
    learned = [0.25, 0.2, 0.3, 0.35]  # the second is
    for seed, end, before in zip(records[0]["seeds"], ends, learned, strict=True):
        seed["costs"]["macs"]["kept"] = end
        seed["costs"]["params"]["kept"] = 0.2  # not what is bounded
        seed["error_last"] = 2.0
        for h in seed["history"]:
            h["kept"] = {"l0_norm": 0.2, "params": 0.2, "macs": end if h.get("tuning") else before}
    assert study.table is not None
    shown = study.table(records, "")
    cells = {str(c.header): next(iter(c.cells)) for c in shown.columns}
    assert (cells["network"], cells["cost"], cells["runs"]) == ("MLP", "MACs", "4")
    assert (cells["within, controller alone"], cells["its mean miss"]) == ("25.0 %", "7.50")
    assert (cells["within, at the end"], cells["mean miss"], cells["largest"]) == ("50.0 %", "0.88", "-2.00")
    assert (cells["error at 20 %"], cells["error at 5 %"]) == ("2.00", "–")


# ---- WRN-28-10 ------------------------------------------------------------------------------------------------------


def wide_records() -> list[dict[str, Any]]:
    """The dense row, one with a penalty and ε=20 %: nine epochs with a record after 2, 5, 7 and 9 each; the last row
    shrinks after the fifth, and its gates are fixed then.
    """
    records = {r["recipe"]["name"]: r for r in invented(known()["wrn-cifar10"], seeds=2, epochs=9)}
    names = ("wrn-cifar10", "louizos-wrn-0.001-cifar10", module("wrn_cifar10").CONSTRAINED.format(20))
    out = [records[name] for name in names]
    for record, speed in zip(out, (4.0, 4.4, 4.2), strict=True):
        for seed in record["seeds"]:
            points = [h for h in seed["history"] if h["epoch"] in (2, 5, 7, 9)]
            for point, epochs in zip(points, (2, 3, 2, 2), strict=True):
                point["seconds"] = epochs * speed
            points[0]["seconds"] += 20  # compilation
            seed["history"] = points
    for seed in out[2]["seeds"]:
        points = seed["history"]
        sizes = {"removed": {"blocks.0.conv1": 96}, "widths": {"blocks.0.conv1": 64}}
        points[0]["shrunk"] = {**sizes, "macs": {"before": 1.0, "after": 0.95}, "skipped": True}
        points[1]["shrunk"] = {**sizes, "macs": {"before": 1.0, "after": 0.3}, "skipped": False, "settled": True}
        points[1]["shrunk"]["expected"] = {"macs": 0.44}
        for point in points[2:]:
            point |= {
                "seconds": 4.0 + 30 * (point["epoch"] == 7),
                "tuning": True,
                "kept": {"macs": 0.19},
                "expected": {"macs": 0.5},
            }
        points[-1]["error_without"] = {"averaging": 5.0, "recalibration": 50.0}
        seed["costs"]["macs"] |= {"expected": 0.21, "kept": 0.19}
    for record in out:
        for seed in record["seeds"]:
            seed["seconds_of_stack"] = sum(h["seconds"] for h in seed["history"])
    return out


def test_the_table_of_wide_networks_has_measured_seconds() -> None:
    records = wide_records()
    study = known()["wrn-cifar10"]
    assert study.table is not None
    shown = study.table(records, "")
    columns = {str(c.header): list(c.cells) for c in shown.columns}
    assert columns["paper, error %"] == ["4.00", "3.83", "4.05 / 4.28±0.16"]
    assert columns["kept"] == ["100.0 %", "30.0 %", "19.0 %"]
    assert columns["without %"] == ["–", "–", "5.00 ± 0.00 / 50.00 ± 0.00"]
    whole = [9 * 4.0 + 20, 9 * 4.4 + 20, 5 * 4.2 + 20 + 2 * 4.0 + 30]
    assert columns["seconds"] == [f"{w:.0f}" for w in whole]
    assert columns["× dense"] == [f"{w / whole[0]:.3f}" for w in whole]
    assert columns["s/epoch"] == ["4.00", "4.40", "4.20"]  # the records that compile are left out
    assert columns["after"] == ["–", "–", "2.00"]
    # What was not measured in the same way is not compared.
    shorter = [records[0], {**records[2], "recipe": records[2]["recipe"] | {"epochs": 2}}]
    elsewhere = [records[0], {**records[2], "device": "another"}]
    for pair in (shorter, elsewhere, records[1:]):
        ratios = next(list(c.cells) for c in study.table(pair, "").columns if c.header == "× dense")
        assert ratios[-1] == "–"


def test_the_figure_of_wide_networks_has_expected_macs_and_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = module("wrn_cifar10")
    seen: list[Any] = []
    monkeypatch.setattr(figure, "save", lambda drawn, path, caption: seen.append(drawn) or [])
    records = wide_records()
    figure.draw(records, tmp_path)
    cost, clock, error = seen[0].axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in cost.lines}
    assert lines["dense"] == ([2, 5, 7, 9], [100.0] * 4)
    expected = [100 * h["expected"]["macs"] for h in records[2]["seeds"][0]["history"][:2]]
    assert lines["ε=20 %"][0] == [2, 5, 5, 7, 9]
    assert lines["ε=20 %"][1] == pytest.approx([expected[0], 44, expected[1], 19, 19])  # fixed from there on
    dense, penalised, shrunk = (
        line for line in clock.lines if line.get_linewidth() == 1.4 and len(line.get_xdata()) > 1
    )
    assert (list(dense.get_xdata()), list(dense.get_ydata())) == ([0, 2, 5, 7, 9], [14, 14, 4, 4, 4])
    assert list(penalised.get_ydata()) == pytest.approx([14.4, 14.4, 4.4, 4.4, 4.4])
    assert list(shrunk.get_ydata()) == pytest.approx([14.2, 14.2, 4.2, 17, 2])
    assert dense.get_drawstyle() == "steps-pre"  # a mean since the record before
    for panel, height in ((cost, expected[-1]), (clock, 4.2)):
        marks = [(list(m.get_xdata()), list(m.get_ydata())) for m in panel.lines if m.get_marker() == "v"]
        assert marks == [([5], [pytest.approx(height)])] * 2  # one for each seed; the skipped one is not drawn
    trained = [(list(m.get_xdata()), list(m.get_ydata())) for m in cost.lines if m.get_linestyle() == ":"]
    assert trained == [([0, 9], [100, 100])] * 4 + [([0, 5, 9], [100, 30, 30])] * 2
    points = records[2]["seeds"][0]["history"]
    errors = [line for line in error.lines if line.get_linewidth() == 1.4 and line.get_marker() == "."]
    assert list(errors[2].get_xdata()) == pytest.approx([28.4, 41, 75, 79])  # seconds so far
    assert list(errors[2].get_ydata()) == [h["error"] for h in points]
    marks = [(list(m.get_xdata()), list(m.get_ydata())) for m in error.lines if m.get_marker() == "v"]
    assert marks[0] == ([pytest.approx(41)], [points[1]["error"]])


def test_rows_of_wide_networks_can_be_compared() -> None:
    rows = [row.recipe for row in known()["wrn-cifar10"].rows]
    for recipe in rows:
        assert (recipe.network, recipe.data, recipe.epochs, recipe.batch) == ("wrn-28-10", "cifar10", 200, 128)
        drops = (60, 120, 160) if recipe.ema != 0.9999 else (60,)  # averaging is in place of the later ones
        assert (recipe.optimizer, recipe.lr, recipe.milestones, recipe.l2) == ("sgd", 0.1, drops, 5e-4)
        alike = ("precision", "channels_last", "compile", "augment")
        assert [getattr(recipe, name) for name in alike] == [getattr(rows[0], name) for name in alike]
    assert [(r.penalty, r.gate_lr, bool(r.shrink_at)) for r in rows if r.penalty] == [
        (0.001, 6, False), (0.002, 6, False), (0.001, None, False), (0.001, 2, True), (0.002, 2, True)
    ]  # fmt: skip
    for recipe, target in zip(rows[8:-1], (0.8, 0.5, 0.35, 0.2, 0.2), strict=True):
        assert recipe.at_most == {f"blocks.{k}.conv1": target for k in range(12)}
    assert (rows[-1].placement, rows[-1].cost, rows[-1].at_most) == ("streams", "macs", 0.16)


def test_what_averaging_buys_is_seen_by_rows_that_differ_in_nothing_else() -> None:
    rows = {row.label: row.recipe.to_dict() for row in known()["wrn-cifar10"].rows}
    for averaged, dropped in (("dense, averaged", "dense"), ("ε=20 %", "ε=20 %, dropped")):
        ours, theirs = rows[averaged], rows[dropped]
        changed = {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key] and key != "name"}
        assert changed == {"milestones": ([60], [60, 120, 160]), "ema": (0.9999, None), "recalibrate": (True, False)}


# ---- the page -------------------------------------------------------------------------------------------------------


def store(root: Path, folder: str, study: Study, figures: bool) -> None:
    home = root / "results" / folder
    home.mkdir(parents=True)
    records = invented(study)
    for record in records:
        (home / f"{record['recipe']['name']}.json").write_text(json.dumps(record))
    if figures and study.draw is not None:
        study.draw(records, home / FIGURES)


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.slow
def test_the_page_gets_tables_and_figures_of_what_is_stored(tmp_path: Path) -> None:
    render = module("render")
    store(tmp_path, "gallego2021-extragradient", known()["gallego2021-extragradient"], figures=False)
    store(tmp_path, "control-40", known()["control"], figures=True)
    page = render.page(render.PAGE.read_text(encoding="utf-8"), tmp_path)
    assert render.page(page, tmp_path) == page
    blocks = {n: page.partition(f"<!-- {n} -->\n")[2].partition(f"\n<!-- end of {n} -->")[0] for n in render.TABLES}
    assert blocks["control-200"] == blocks["louizos2018-table1"] == "No results are stored yet."
    assert "| MLP, ε=33 %, difference |" in blocks["gallego2021-extragradient"]
    assert "| LeNet-5 | MACs | 24 |" in blocks["control-40"]
    assert blocks["control-40"].endswith("Seeds: 3; 4 + 1 epochs, CPU, torch 2.13.0, commit `000000000000`.")
    assert "![control-40](figures/control-40.svg)" in page
    assert "![control-200]" not in page
    copies = render.copies(tmp_path)
    assert {p.name for p in copies} == {"control-40.png", "control-40.svg"}
    assert all(original.is_file() for original in copies.values())


def test_the_page_gets_the_stored_times_of_steps(tmp_path: Path) -> None:
    render, home = module("render"), tmp_path / "results" / "benchmarks"
    assert render.steps("wrn_speed", tmp_path) == "No results are stored yet."
    home.mkdir(parents=True)
    about = {"device": "GPU", "torch": "2.13.0", "commit": "0" * 40, "command": "wrn_speed.py --device cuda"}
    numbers = {"milliseconds": 2.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    gated = {"milliseconds": 2.5, "ratio": 1.25, "ratio_low": 1.2, "ratio_high": 1.3}
    options = {"network": "wrn-10-1", "rounds": 3, "steps": 7}
    (home / "wrn_speed.json").write_text(
        json.dumps({**about, "options": options, "steps": {"compiled": {"dense": numbers, "gated": gated}}})
    )
    of_networks = {"mlp": {"dense, as it is": numbers, "gated ×5, as it is": gated}}
    (home / "training_speed.json").write_text(
        json.dumps({**about, "options": options, "steps_of_networks": of_networks})
    )
    lines = render.steps("wrn_speed", tmp_path).splitlines()
    assert lines[0] == "| network |  | ms, compiled | × dense | range |"
    assert lines[2:4] == [
        "| wrn-10-1 | dense | 2.000 | 1.000 | – |",
        "| wrn-10-1 | gated | 2.500 | 1.250 | 1.200–1.300 |",
    ]
    assert lines[-1].startswith("Medians and ranges over 3 rounds of 7 steps; GPU, torch 2.13.0, commit `000000000000`")
    assert "| mlp | gated ×5 | 2.500 | 1.250 | 1.200–1.300 |" in render.steps("training_speed", tmp_path)


def test_a_page_without_a_marker_is_refused(tmp_path: Path) -> None:
    render = module("render")
    text = render.PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="`control-40` once"):
        render.page(text.replace("<!-- control-40 -->\n", ""), tmp_path)


def test_a_table_says_which_rows_are_missing(tmp_path: Path) -> None:
    store(tmp_path, "louizos2018-table1", known()["louizos2018-table1"], figures=False)
    (tmp_path / "results" / "louizos2018-table1" / "louizos-mlp.json").unlink()
    assert module("render").table("louizos2018-table1", tmp_path).endswith("Not stored: louizos-mlp.")


def test_studies_are_found_in_a_wheel_s_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ellzero"
    shutil.copytree(FOLDER, package / "reproductions", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("ellzero.experiments.study.__file__", str(package / "experiments" / "study.py"))
    assert set(studies()) == set(known())


def test_the_page_gets_the_stored_times_of_families(tmp_path: Path) -> None:
    render, home = module("render"), tmp_path / "results" / "benchmarks"
    assert render.families(tmp_path) == "No results are stored yet."
    home.mkdir(parents=True)
    row = {"network": "MLP", "family": "SBP", "dense_ms": 2.0, "ratio": 1.5, "quartiles": [1.25, 1.75]}
    about = {"device": "CPU", "torch": "2.13", "commit": "0123456789abcdef", "command": "step_overhead.py --families"}
    (home / "step_families.json").write_text(json.dumps({"families": [row], **about}))
    lines = render.families(tmp_path).splitlines()
    assert lines[2] == "| MLP | SBP | 2.00 | 1.50 | 1.25–1.75 |"
    assert lines[-1].endswith("commit `0123456789ab`: `python benchmarks/step_overhead.py --families`.")


def test_the_page_gets_the_stored_variants_of_a_budget(tmp_path: Path) -> None:
    """The interval of 1 and 3 by hand: t = 12.706 with one degree of freedom, times a standard error of 1."""
    render, home = module("render"), tmp_path / "results" / "benchmarks"
    assert render.ablation(tmp_path) == "No results are stored yet."
    home.mkdir(parents=True)
    cells = [{"at_most": 0.1, "errors": [1.0, 3.0]}, {"at_most": 0.35, "errors": [2.0, 2.0]}]
    about = {"device": "GPU", "torch": "2.13", "commit": "0123456789abcdef", "command": "x.py", "epochs": 20}
    variants = [{"name": name, "cells": cells} for name in ("not shown", *render.ABLATION)]
    (home / "budget_ablation_lenet300.json").write_text(json.dumps({**about, "variants": variants}))
    lines = render.ablation(tmp_path).splitlines()
    assert lines[0] == "| gates | 10 % | 35 % |"
    assert lines[2:-2] == [f"| {words} | 2.00 ± 12.71 | 2.00 ± 0.00 |" for words in render.ABLATION.values()]
    assert lines[-1] == "Seeds: 2; 20 epochs, GPU, torch 2.13, commit `0123456789ab`: `python benchmarks/x.py`."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heads", "hidden", "stream"), [("gpt-shakespeare", 6, 1536, 384), ("vit-cifar10", 4, 512, 256)]
)
def test_the_figure_of_transformers_has_what_each_layer_keeps(
    name: str, heads: int, hidden: int, stream: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure, seen = module("gpt_shakespeare"), list[Any]()
    monkeypatch.setattr(figure, "save", lambda drawn, path, caption: seen.append(drawn) or [])
    records = invented(known()[name])
    gated = [record for record in records if "costs" in record["seeds"][0]]
    kept = [[(3, 100 + k), (0, 7), (heads, 0)] for k in range(len(gated))]  # heads and feed-forward units by layer
    for k, record in enumerate(gated):
        layers = {
            f"blocks.{b}.{part}": pair[i] for b, pair in enumerate(kept[k]) for i, part in enumerate(("qkv", "up"))
        }
        record["seeds"][0]["architecture"] = {"embed": 50 + k, **layers}
    figure.draw(records, tmp_path)
    _, squares, widths = seen[0].axes
    full = [p for p in squares.patches if p.get_facecolor()[3] == 1]
    assert len(squares.patches) == 3 * heads * len(gated)
    for k, of_layers in enumerate(kept):
        mine = [p for p in full if (heads + 1) * k <= p.get_x() < (heads + 1) * (k + 1)]
        assert [sum(round(p.get_y() + 0.43) == layer for p in mine) for layer in range(3)] == [n for n, _ in of_layers]
        dense, left = ([p.get_width() for p in widths.patches[8 * k + i : 8 * k + i + 4]] for i in (0, 4))
        assert dense == [hidden, hidden, hidden, stream]
        assert left == [100 + k, 7, 0, 50 + k]
        assert [t.get_text().strip() for t in widths.texts[4 * k : 4 * k + 4]] == [
            f"{100 + k}",
            "7",
            "gone",
            f"{50 + k}",
        ]
