"""Benchmarks run, on small networks: what they compare is what they say, whatever the clock shows."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ellzero.experiments.papers import get
from ellzero.out.latency import regions
from support import ROOT
from support.scripts import loaded

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))  # `provenance` and `comparing` lie beside them

    def load(name: str) -> ModuleType:
        return loaded(FOLDER / f"{name}.py")

    return load


def macs_of_wrn_10_1(*hidden: int) -> int:
    """Of a forward pass for one image of 32 by 32 pixels, with these hidden widths."""
    out, inputs = 3 * 16 * 9 * 32**2, 16
    for width, side, h in zip((16, 32, 64), (32, 16, 8), hidden, strict=True):
        out += (inputs * h + h * width) * 9 * side**2 + (inputs * width * side**2 if inputs != width else 0)
        inputs = width
    return out + 64 * 10


@pytest.mark.slow
def test_wide_networks_are_compared_with_the_dense_one_in_the_same_loop(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--network", "wrn-10-1", "--images", "16", "--batch", "8", "--multiple", "4", "--device", "cpu"]
    small += ["--precision", "float32"]  # some CPUs have no bfloat16, and take long
    benchmark("wrn_speed").main(
        [*small, "--steps", "1", "--rounds", "2", "--no-compiled", "--json", str(tmp_path / "a" / "speed.json")]
    )
    stored = json.loads((tmp_path / "a" / "speed.json").read_text())
    assert (stored["benchmark"], stored["images_are"]) == ("wrn_speed", "noise")
    assert {"commit", "torch", "device", "cores"} < stored.keys()
    assert stored["options"]["network"] == "wrn-10-1"
    (rows,) = stored["steps"].values()
    assert list(rows) == ["dense", "gated", "shrunk to 35 %", "shrunk to 20 %"]
    assert [rows["dense"][key] for key in ("ratio", "ratio_low", "ratio_high", "macs")] == [1, 1, 1, 1]
    assert rows["gated"]["macs"] == 1
    whole = macs_of_wrn_10_1(16, 32, 64)
    for share in (0.35, 0.2):
        row = rows[f"shrunk to {100 * share:.0f} %"]
        left = [4 * math.ceil(math.ceil(share * n) / 4) for n in (16, 32, 64)]
        assert list(row["widths"].values()) == left
        assert row["macs"] == pytest.approx(macs_of_wrn_10_1(*left) / whole)
    for row in rows.values():
        assert row["milliseconds"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["compilation_seconds"] >= 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert all("× dense" in line and "as it is" in line for line in printed)


def macs_of_vit(stream: int, heads: Sequence[int], hidden: Sequence[int]) -> int:
    """Of ViT-Lite with patches of 8 and heads of 8 entries: 16 places and the class's token."""
    layers = zip(heads, hidden, strict=True)
    inside = sum(17 * stream * (4 * 8 * h + 2 * n) + 2 * 17**2 * 8 * h for h, n in layers)
    return 16 * 3 * 64 * stream + inside + 10 * stream


@pytest.mark.slow
def test_a_transformer_whose_gates_settle_is_compared_with_the_dense_one_phase_by_phase(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {"patches": 24, "blocks.0.qkv": 3, "blocks.0.up": 40, "blocks.1.qkv": 1, "blocks.1.up": 10}
    share = macs_of_vit(24, (3, 1), (40, 10)) / macs_of_vit(32, (4, 4), (64, 64))
    row = get("vit-50-cifar10").override(network="vit-lite-2-8-32", at_most=share * 1.0001)
    file = tmp_path / "row.json"
    file.write_text(json.dumps({"recipe": row.to_dict(), "seeds": [{"architecture": left}]}))
    words = ["--row", str(file), "--device", "cpu", "--images", "16", "--batch", "8", "--precision", "float32"]
    benchmark("vit_speed").main([*words, "--steps", "1", "--rounds", "2", "--json", str(tmp_path / "speed.json")])
    stored = json.loads((tmp_path / "speed.json").read_text())
    rows, run = stored["steps"], stored["run"]
    assert [rows[phase]["macs"] for phase in ("dense", "gated")] == [1, 1]
    assert rows["settled"]["widths"] == left
    assert rows["settled"]["macs"] == pytest.approx(share)
    ms, extra = (
        [rows[p][key] for p in ("dense", "gated", "settled")] for key in ("milliseconds", "compilation_seconds")
    )
    assert run["dense_seconds"] == pytest.approx(200 * 6250 * ms[0] / 1e3 + extra[0])  # batches of 8
    assert run["seconds"] == pytest.approx(6250 * (6 * ms[1] + 194 * ms[2]) / 1e3 + extra[1] + extra[2])
    assert run["ratio"] == run["seconds"] / run["dense_seconds"]
    assert stored["options"]["row"] == "row.json"  # no folder of this machine
    assert capsys.readouterr().out.count("× dense") == 3


def test_steps_of_wide_networks_that_are_measured_in_no_way_are_refused(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speed.json"
    with pytest.raises(SystemExit):
        benchmark("wrn_speed").main(["--images", "8", "--no-as-it-is", "--no-compiled", "--json", str(file)])
    assert "--as-it-is or --compiled must be on" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.slow
def test_inference_is_measured_at_the_architecture_of_the_paper(benchmark: Any) -> None:
    """Louizos et al., Table 1: 9 and 18 maps, 65 and 25 inputs of the linear layers."""
    inference, networks = benchmark("inference"), benchmark("step_overhead")
    small, macs = inference.compacted(networks.LeNet5().eval())
    assert [m.weight.shape[:2] for m in small.modules() if isinstance(m, nn.Conv2d)] == [(9, 1), (18, 9)]
    assert [m.weight.shape[1] for m in small.modules() if isinstance(m, nn.Linear)] == [65, 25]
    dense, left = (
        25 * (20 * 24**2 + 20 * 50 * 8**2) + 800 * 500 + 5000,
        25 * (9 * 24**2 + 9 * 18 * 8**2) + 65 * 25 + 250,
    )
    assert macs == pytest.approx(left / dense)


def test_a_gated_step_is_one_of_training_under_a_constraint(benchmark: Any) -> None:
    networks = benchmark("step_overhead")
    x, y = torch.randn(4, 1, 28, 28), torch.randint(10, (4,))
    for step in (networks.dense_step, partial(networks.gated_step, where=networks.hidden())):
        model = networks.MLP()
        before = [p.clone() for p in model.parameters()]
        step(model, x, y, False)()
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("where", ["shrinkable", "per_layer"])
def test_a_gated_step_and_the_one_by_hand_do_the_same(
    benchmark: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From equal weights, gates and noise, five steps of both lead to equal weights, gates and multipliers, and a sixth
    with gates that are nearly closed, within the target, lets the multiplier begin again.
    """
    monkeypatch.setattr("ellzero.gates.hard_concrete.INIT_STD", 0.0)
    networks = benchmark("step_overhead")
    torch.manual_seed(0)
    x, y = torch.randn(4, 1, 28, 28), torch.randint(10, (4,))
    ours, theirs = networks.MLP(), networks.MLP()
    theirs.load_state_dict(ours.state_dict())
    inputs = where == "per_layer"
    ends = []
    for model, make in (
        (ours, partial(networks.gated_step, where=networks.WHERE[where]())),
        (theirs, partial(networks.step_by_hand, inputs=inputs)),
    ):
        step = make(model, x, y, False)
        known = inspect.getclosurevars(step).nonlocals
        multiplier = known["budget"].multiplier if "budget" in known else known["multiplier"]
        weights, gates = (group["params"] for group in known["optimizer"].param_groups)
        torch.manual_seed(1)
        for _ in range(5):
            step()
        # A multiplier is small after five steps: in units of its rate.
        ends.append([*(p.detach().clone() for p in weights), torch.cat([*gates]).detach(), multiplier.view(1) / 1e-4])
        assert multiplier > 0
        with torch.no_grad():
            for p in gates:
                p.fill_(-4.0)
        step()
        assert multiplier == 0
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("family", ["group lasso", "BC-GHS"])
def test_a_step_of_a_family_is_that_of_its_recipe(benchmark: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = benchmark("step_overhead")
    made: list[Any] = []
    trainer = networks.Trainer
    monkeypatch.setattr(networks, "Trainer", lambda *args: made.append(trainer(*args)) or made[-1])
    for dense in (True, False):
        step = networks.family_step("lenet300", family, dense)
        before = {name: value.clone() for name, value in made[-1].runs.values().items()}
        step()
        moved = {name for name, value in made[-1].runs.values().items() if not torch.equal(value, before[name])}
        assert {name for name in before if ".weight" in name and ".gates." not in name} <= moved
    assert [recipe.gate for recipe in made[-1].recipes] == [{"group lasso": "group_lasso", "BC-GHS": "bc_ghs"}[family]]
    assert [m.recipe.placement for m in made] == [None, "per_layer"]
    assert made[0].recipe.optimizer == made[1].recipe.optimizer == ("sgd" if family == "group lasso" else "adam")


def test_times_at_equal_error_are_read_off_the_line_of_the_others(benchmark: Any) -> None:
    runs = [("latency", 0.5, 3.0, 0.5), ("macs", 0.5, 2.0, 0.9), ("macs", 0.2, 4.0, 0.5), ("macs", 0.2, 6.0, 0.7)]
    rows = [dict(zip(("cost", "at_most", "error", "measured"), run, strict=True)) for run in runs]
    found = benchmark("latency_budget").equal_error(rows)
    assert found == [
        {"error": 3.0, "latency_budget": 0.5, "macs_budget": pytest.approx(0.8)}
    ]  # a third from 0.9 to 0.6
    (beyond,) = benchmark("latency_budget").equal_error([{**rows[0], "error": 1.0}, *rows[1:]])
    assert beyond["macs_budget"] is None


@pytest.mark.slow
def test_predicted_times_stand_beside_measured_ones(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "SECONDS", 0.0)  # as few rounds as there can be
    small = ["--small", "--checks", "2", "--rounds", "1", "--networks", "lenet5", "--only", "predict"]
    benchmark("latency_budget").main([*small, "--json", str(tmp_path / "times.json")])
    stored = json.loads((tmp_path / "times.json").read_text())
    (row,) = stored["predict"]
    assert (row["network"], row["batch"], len(row["rows"])) == ("lenet5", 2, 2)
    assert all(0 < r["macs"] < 1 and r["measured"] > 0 for r in row["rows"])
    assert all(math.isfinite(r["predicted"]) for r in row["rows"])  # of one round, which may be all noise


@pytest.mark.slow
def test_pacing_compares_one_loop_at_four_paces(benchmark: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "pacing.json"
    short = ["--networks", "lenet300", "--epochs", "2", "--at-most", "0.1", "--seeds", "1"]
    benchmark("pacing").main([*short, "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["pace"] for row in rows] == ["default", "from 0.05", "from 0.2", "unbounded"]
    assert all(0 < row["errors"][0] < 100 and 0 < row["least_kept"][0] <= 1 for row in rows)
    assert capsys.readouterr().out.count("2 epochs,  10 %") == 4
