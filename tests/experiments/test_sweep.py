"""Sweeps: the grid, a run of a sweep against it alone, a stopped sweep against one that was not, and the command.

Tiny networks and data; nothing here asks whether training is any good. What is the campaign's business, such as stacks,
is tested there.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ellzero.cli import campaigns as command
from ellzero.cli import main
from ellzero.experiments import sweep as sweeping
from ellzero.experiments.campaign import CampaignError
from ellzero.experiments.data import DataError, Dataset, load
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.store.statistics import pareto
from ellzero.experiments.sweep import Sweep, run, values_of
from ellzero.experiments.train import evaluation
from ellzero.experiments.train import loop as training
from support.campaigns import Untrained, Watching, crash
from support.narrow import NARROW

# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize(
    ("field", "text", "values"),
    [
        ("at_most", "0.05,0.1 , 1", [0.05, 0.1, 1]),
        ("at-most", '{"fc1" = 0.1, "fc2" = 0.2},{"a,]" = 0.3}', [{"fc1": 0.1, "fc2": 0.2}, {"a,]": 0.3}]),
        ("at_most", r'{"a\",b" = 0.1},0.2', [{'a",b': 0.1}, 0.2]),
        ("at_most", "{'a\\' = 0.1},0.2", [{"a\\": 0.1}, 0.2]),  # no escapes in a literal string
        ("milestones", "[1, 2],[],[3]", [[1, 2], [], [3]]),
        ("gate_lr", "none,1e-2", [None, 0.01]),
        ("init", "2018,2021", ["2018", "2021"]),
        ("restarts", "true,False", [True, False]),
    ],
)
def test_values_are_split_at_the_commas_between_them(field: str, text: str, values: list[Any]) -> None:
    assert values_of(field, text) == values


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("at_most", "", "empty"),
        ("at_most", "0.1,", "empty"),
        ("at_most", "0.1,,0.2", "empty"),
        ("at_most", "{0.1,0.2", "close"),
        ("at_most", '{"fc1 = 0.1}', "close"),
        ("at_most", "[0.1}", "without its beginning"),
        ("at_mots", "0.1,0.2", "did you mean `at_most`"),
    ],
)
def test_what_is_no_list_of_values_is_refused(field: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        values_of(field, text)


def test_a_grid_is_the_product_of_its_values_with_seeds_from_the_recipes_own() -> None:
    base = get("demo").override(seed=5)
    swept = Sweep(base, {"at_most": [0.1, 0.2], "lr": [1e-3, 1e-2, 1e-1], "epochs": [7]}, seeds=2)
    expected = [
        (at_most, lr, 7, seed) for at_most, lr, seed in itertools.product([0.1, 0.2], [1e-3, 1e-2, 1e-1], [5, 6])
    ]
    assert [(r.at_most, r.lr, r.epochs, r.seed) for r in swept.runs] == expected
    assert swept.values(swept.points[1].recipe) == {"at_most": 0.1, "lr": 0.01}  # what varies, and no more
    assert len({p.recipe.name for p in swept.points}) == 6
    plain = base.to_dict()
    for recipe in swept.runs:
        mine = recipe.to_dict()
        assert {k for k in mine if mine[k] != plain[k]} <= {"name", "at_most", "lr", "epochs", "seed"}


def test_a_sweep_comes_back_from_its_settings_as_json() -> None:
    patterns = [{"fc*": 0.1, "fc1": 0.2}, {"fc1": 0.2, "fc*": 0.1}]  # their order counts
    grid = {"at_most": [*patterns, 1], "milestones": [(1, 2)], "decay": [0.5], "name": ["mine"]}
    swept = Sweep(get("budget-mlp"), grid, seeds=3)
    again = Sweep.from_settings(json.loads(json.dumps(swept.settings())))
    assert again.runs == swept.runs
    assert json.dumps(again.settings()) == json.dumps(swept.settings())
    assert all(r.name.startswith("mine-") for r in again.runs)


@pytest.mark.parametrize(
    ("grid", "seeds", "says"),
    [
        ({}, 1, "more than one run"),
        ({"at_most": [0.1]}, 1, "more than one run"),
        ({"at_most": []}, 1, "at least one value"),
        ({"at_most": [0.1, 0.2]}, 0, "`seeds` must be"),
        ({"at_most": [1, 0.5, 1.0]}, 1, "at_most=1.0 twice"),
        ({"penalty": [0.1, 1.0]}, 1, "exclude each other"),
        ({"at_most": [0.1, 0.2], "lr": [1e-3, 0.0]}, 1, r"`lr` must be.*\(at at_most=0.1, lr=0.0\)"),
        ({"seed": [1, 2]}, 1, "`seeds` says"),
        ({"name": ["a", "b"]}, 1, "changes nothing"),
        ({"at_mots": [0.1, 0.2]}, 1, "did you mean `at_most`"),
        ({"restarts": [True, False]}, 1, r"`restarts` changes nothing but with `dual` \"ascent\""),
    ],
)
def test_what_is_no_sweep_is_refused(grid: dict[str, list[Any]], seeds: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sweep(get("demo"), grid, seeds)


def test_the_cost_to_look_at_is_the_one_that_is_bounded() -> None:
    assert Sweep(get("demo"), {"at_most": [0.1, 0.2]}).axis() == "macs"
    assert Sweep(get("gallego-mlp"), {"at_most": [0.1, 0.2]}).axis() == "l0_norm"
    assert Sweep(get("louizos-mlp"), {"penalty": [0.1, 0.2]}).axis() == "params"
    assert Sweep(get("demo"), {"cost": ["macs", "l0_norm"]}).axis() == "params"


# ---------------------------------------------------------------- doing it


@cache
def tiny() -> Dataset:
    whole = load("mnist5k")
    return replace(
        whole,
        train_x=whole.train_x[::16],
        train_y=whole.train_y[::16],
        test_x=whole.test_x[::10],
        test_y=whole.test_y[::10],
    )


def base(**changes: Any) -> Recipe:
    basis: dict[str, Any] = {"name": "tiny", "network": NARROW.name, "data": "mnist5k", "placement": "per_layer"}
    basis |= {"penalty": 0.1, "batch": 50, "epochs": 2, "lr": 1e-3, "gate_lr": 0.3}
    return Recipe(**basis | changes)


def grid_of_four() -> Sweep:
    return Sweep(base(), {"penalty": [0.001, 0.01]}, seeds=2)


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on when it was trained, and in which stack."""
    points = []
    for point in record["points"]:
        runs = [{k: v for k, v in r.items() if k not in ("stack", "index", "runs_in_stack")} for r in point["runs"]]
        points.append({**point, "runs": runs})
    return {**{k: v for k, v in record.items() if k not in ("about", "stacks")}, "points": points}


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> Untrained:
    stand_in = Untrained()
    monkeypatch.setattr(training, "train", stand_in)
    return stand_in


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A sweep of four runs in stacks of two, from beginning to end."""
    out = tmp_path_factory.mktemp("whole") / "sweep"
    return out, run(grid_of_four(), lambda _: tiny(), out, at_once=2)


@pytest.mark.slow
def test_a_run_of_a_sweep_is_the_run_alone(whole: tuple[Path, dict[str, Any]]) -> None:
    out, record = whole
    seen = 0
    for point in record["points"]:
        for result in point["runs"]:
            recipe = Recipe.from_dict(point["recipe"]).override(seed=result["seed"])
            alone = training.train([recipe], tiny())
            expected = evaluation.results(alone)[0]
            assert abs(result["error_last"] - expected["error_last"]) <= 1.001  # one image of a hundred may flip
            assert result["architecture"] == expected["architecture"]
            for cost, numbers in expected["costs"].items():
                assert result["costs"][cost] == pytest.approx(numbers, rel=1e-4)
            folder = Folder.open(out / "stacks" / result["stack"])
            network = training.restore(folder, tiny()).network(result["index"])
            for (name, mine), (_, theirs) in zip(
                network.named_parameters(), alone.network(0).named_parameters(), strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=name)
            seen += 1
    assert seen == 4


def test_what_is_stored_is_what_came_out(whole: tuple[Path, dict[str, Any]]) -> None:
    out, record = whole
    assert json.loads((out / "sweep.json").read_text()) == record
    assert record["finished"]
    assert record["grid"] == {"penalty": [0.001, 0.01]}
    assert record["recipe"] == base().to_dict()
    assert {"commit", "torch", "device", "date"} <= record["about"].keys()
    assert sorted(stack["runs"] for stack in record["stacks"]) == [2, 2]
    few, many = record["points"]
    for point in (few, many):
        runs = point["runs"]
        assert point["mean"]["error_last"] == pytest.approx((runs[0]["error_last"] + runs[1]["error_last"]) / 2)
        half = abs(runs[0]["error_last"] - runs[1]["error_last"]) / 2
        assert point["mean"]["error_last_interval"] == pytest.approx(12.706 * half, rel=1e-3)  # t with one degree
        kept = [r["costs"]["macs"]["kept"] for r in runs]
        assert point["mean"]["kept"]["macs"] == pytest.approx(sum(kept) / 2)
    assert many["mean"]["kept"]["params"] < few["mean"]["kept"]["params"]
    spots = [(p["mean"]["kept"]["params"], p["mean"]["error_last"]) for p in (few, many)]
    assert record["front"] == pareto(spots)
    assert [p["front"] for p in (few, many)] == [k in record["front"] for k in range(2)]


def test_a_finished_sweep_is_not_trained_again(whole: tuple[Path, dict[str, Any]], untrained: Untrained) -> None:
    def no_data(_: str) -> Dataset:
        raise AssertionError("nothing is left that needs data")

    out, record = whole
    again = run(grid_of_four(), no_data, out, cost="macs")
    assert untrained.sizes == []
    assert again["cost"] == "macs"
    spots = [(p["mean"]["kept"]["macs"], p["mean"]["error_last"]) for p in again["points"]]
    assert again["front"] == pareto(spots)
    assert run(grid_of_four(), no_data, out) == record


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), [(interrupt, training.Stopped), (crash, RuntimeError)])
def test_a_stopped_sweep_goes_on_where_it_was(
    how: Callable[[], None], error: type[Exception], tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    out, watching = tmp_path / "sweep", Watching()
    with pytest.raises(error):
        run(grid_of_four(), lambda _: tiny(), out, at_once=2, watchers=[Watching(1, 7, how)])
    unfinished = json.loads((out / "sweep.json").read_text())
    assert not unfinished["finished"]
    assert unfinished["front"] is None
    times = {file: file.stat().st_mtime_ns for file in out.glob("stacks/*/results.json")}
    assert len(times) == 1
    record = run(grid_of_four(), lambda _: tiny(), out, at_once=2, watchers=[watching])
    # From the checkpoint, or from the beginning where there is none.
    assert watching.begun == [7 if how is interrupt else 0]
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert comparable(record) == comparable(whole[1])  # bit for bit


def test_fields_that_cannot_share_a_stack_are_trained_one_after_the_other(untrained: Untrained, tmp_path: Path) -> None:
    swept = Sweep(base(), {"channels_last": [False, True], "penalty": [0.1, 1.0]})
    record = run(swept, lambda _: tiny(), tmp_path / "sweep")
    assert untrained.sizes == [2, 1, 1]
    assert record["finished"]


def test_a_run_that_diverged_has_no_place_on_the_front(untrained: Untrained, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    swept = Sweep(base(), {"penalty": [0.1, 1e30]})
    record = run(swept, lambda _: tiny(), out)
    assert untrained.sizes == [2, 1, 1]
    good, bad = record["points"]
    assert good["front"]
    assert not good["diverged"]
    assert not bad["front"]
    assert "nan" in bad["diverged"][0]
    assert record["finished"]
    assert record["front"] == [0]
    assert list(sweeping.table(record).columns[1].cells)[1] == "diverged"
    assert run(swept, lambda _: tiny(), out)["points"] == record["points"]
    assert untrained.sizes == [2, 1, 1]


def test_a_network_with_an_empty_layer_is_not_on_the_front(untrained: Untrained, tmp_path: Path) -> None:
    record = run(Sweep(base(), {"penalty": [0.0, 1e6]}), lambda _: tiny(), tmp_path / "sweep")
    small = record["points"][1]
    assert 0 in small["runs"][0]["architecture"].values()
    assert small["emptied"]
    assert record["front"] == [0]
    assert [list(c.cells) for c in sweeping.table(record).columns][-1] == ["*", "layer empty"]
    assert untrained.sizes == [2]


@pytest.mark.parametrize(
    ("grid", "changes", "says"),
    [
        ({"penalty": [0.1, 1.0]}, {"batch": 1000}, "`batch` must be"),
        ({"penalty": [0.1, {"fc9": 0.1}]}, {}, "`penalty` must have patterns"),
        ({"at_most": [0.5, 1e-5]}, {"penalty": None, "at_most": 0.5, "finalize": True}, "`at_most` must be at least"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(
    grid: dict[str, list[Any]], changes: dict[str, Any], says: str, tmp_path: Path, untrained: Untrained
) -> None:
    with pytest.raises(ValueError, match=says):
        run(Sweep(base(**changes), grid), lambda _: tiny(), tmp_path / "sweep")
    assert untrained.stacks == []
    assert not (tmp_path / "sweep").exists()


def test_a_folder_with_another_sweep_is_refused(whole: tuple[Path, dict[str, Any]]) -> None:
    out, _ = whole
    for other, says in [
        (
            Sweep(base(), {"penalty": [0.001, 2.0]}, seeds=2),
            r"`penalty` is .0.001, 0.01. there and .0.001, 2.0. here",
        ),
        (Sweep(base(), {"penalty": [0.001, 0.01]}, seeds=3), "`seeds` is 2 there and 3 here"),
        (Sweep(base(), {"penalty": [0.001, 0.01]}, seeds=2, every=2), "`every` is 1 there and 2 here"),
        (Sweep(base(lr=0.1), {"penalty": [0.001, 0.01]}, seeds=2), "`lr` is 0.001 there and 0.1 here"),
        (Sweep(base(), {"penalty": [0.001, 0.01], "lr": [0.1]}, seeds=2), "`lr` is 0.001 there and 0.1 here"),
    ]:
        with pytest.raises(CampaignError, match=says):
            run(other, lambda _: tiny(), out)


def test_a_fresh_sweep_removes_the_old_one_only_when_it_can_begin(untrained: Untrained, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    run(Sweep(base(), {"penalty": [0.001, 0.01]}), lambda _: tiny(), out)
    kept = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}

    def nothing(_: str) -> Dataset:
        raise DataError("there are no such files")

    with pytest.raises(DataError):
        run(Sweep(base(), {"penalty": [0.1, 0.2]}), nothing, out, fresh=True)
    with pytest.raises(ValueError, match="patterns that match gates"):
        run(Sweep(base(), {"penalty": [{"fc9": 0.1}, 0.2]}), lambda _: tiny(), out, fresh=True)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == kept
    assert untrained.sizes == [2]

    record = run(Sweep(base(), {"penalty": [0.1, 0.2]}), lambda _: tiny(), out, fresh=True)
    assert [point["label"] for point in record["points"]] == ["penalty=0.1", "penalty=0.2"]
    assert len(list((out / "stacks").iterdir())) == 1  # nothing is left of the old one
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CampaignError, match="`--fresh` must be given a sweep's folder"):
        run(grid_of_four(), nothing, tmp_path, fresh=True)


# ---------------------------------------------------------------- the command

WORDS = "sweep louizos-mlp --data mnist5k --batch 400 --epochs 1 --gate-lr 0.3 --ema none --penalty 0.001,0.01"


@pytest.mark.slow
def test_the_command_is_stopped_by_ctrl_c_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Bar", lambda: Watching(1, 3, interrupt))
    assert main([*WORDS.split(), "--at-once", "1", "--out", "out here"]) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "2 points × 1 seed: 2 runs, 0 done before, the others in 2 stacks"
    hint = said[-1].partition("resume with: ")[2]
    assert hint == "ellzero sweep --resume --out 'out here'"
    assert main([*WORDS.split(), "--out", "out here"]) == 2
    assert "`--resume` goes on" in capsys.readouterr().err
    assert main([*shlex.split(hint)[1:], "--seeds", "2"]) == 2
    assert "`seeds` is 1 there and 2 here" in capsys.readouterr().err
    monkeypatch.setattr(command, "Bar", Watching)
    assert main([*shlex.split(hint)[1:], "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 done before" in err
    record = json.loads(out)
    assert record == json.loads(Path("out here", "sweep.json").read_text())
    assert record["finished"]
    assert [p["runs"][0]["seed"] for p in record["points"]] == [0, 0]
    assert {f.name for f in Path("out here").glob("pareto.*")} == {"pareto.png", "pareto.svg", "pareto.txt"}

    monkeypatch.setattr(command, "can_draw", lambda: False)
    assert main([*shlex.split(hint)[1:], "--cost-axis", "macs"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("no figure will be drawn: `matplotlib` must be installed")
    assert len(err.splitlines()) == 1
    lines = out.splitlines()
    header = next(line for line in lines if "penalty" in line)
    for word in ("best %", "last %", "density expected", "kept", "parameters", "MACs", "front"):
        assert word in header
    rows = [line.split() for line in lines if line.split()[:1] in (["0.001"], ["0.01"])]
    for row, point in zip(rows, record["points"], strict=True):
        assert row[2] == f"{point['runs'][0]['error_last']:.2f}"
        assert row[7] == f"{round(point['mean']['kept']['params'] * 266_610):,}"
    compact = next(line for line in lines if "ellzero compact" in line).partition(": ellzero ")[2]
    assert main([*shlex.split(compact), "--to", "small.safetensors"]) == 0
    record = json.loads(Path("out here", "sweep.json").read_text())
    first = record["points"][record["front"][0]]["runs"][0]
    count = first["costs"]["params"]["kept"] * 266_610
    assert f" {round(count):,} of 266,610 parameters" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sweep", "`RECIPE` must be given"),
        ("sweep --resume", "`RECIPE` must be given"),
        ("sweep --resume --out nowhere", "there is no sweep"),
        ("sweep demo", "more than one run"),
        ("sweep demmo --at-most 0.1,0.2", "did you mean `demo`"),
        ("sweep demo --at-most 0.1,", "one is empty"),
        ("sweep demo --at-most 0.1,0.10", "at_most=0.1 twice"),
        ("sweep demo --at-most 0.1,0.2 --penalty 1", "exclude each other"),
        ("sweep demo --at-most 0.1,0.2 --seeds 0", "`--seeds` must be at least 1"),
        ("sweep demo --at-most 0.1,0.2 --at-once 0", "`--at-once` must be at least 1"),
        ("sweep demo --at-most 0.1,0.2 --resume --fresh", "exclude each other"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []
