"""Published tables run again: records against runs alone, files, resume, the printed table and the command.

What is the campaign's business, such as stacks, is tested there.
"""

from __future__ import annotations

import json
import math
import platform
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import ellzero.cli.campaigns as command
from ellzero.cli import main, opening
from ellzero.experiments import study as making
from ellzero.experiments.arena.contest import Contest
from ellzero.experiments.campaign import CampaignError, lengths
from ellzero.experiments.data import Dataset, load
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.study import (
    Reproduction,
    Row,
    Study,
    StudyError,
    by_epoch,
    held,
    point_at_end_of_training,
    stored,
    studies,
    table,
    took,
)
from ellzero.experiments.train import evaluation
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.loop import Stopped
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.objectives import costs
from support import ROOT
from support.campaigns import Untrained, Watching, crash


@cache
def data() -> Dataset:
    whole = load("mnist5k")
    train_x, train_y = whole.train_x[:200], whole.train_y[:200]
    return replace(whole, train_x=train_x, train_y=train_y, test_x=whole.test_x[:100], test_y=whole.test_y[:100])


def tiny(name: str, **changes: Any) -> Recipe:
    changes = {"epochs": 2, "batch": 100, "data": "mnist5k"} | changes
    return get("gallego-mlp").override(name=name, **changes)


def reproduce(study: Study, out: Path, **options: Any) -> list[dict[str, Any]]:
    done = {name: options.pop(name) for name in ("resume", "fresh", "watchers", "say") if name in options}
    return making.reproduce(Reproduction(study, **options), lambda _: data(), out, **done)


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> Untrained:
    stand_in = Untrained()
    monkeypatch.setattr(training, "train", stand_in)
    return stand_in


def light(name: str, **changes: Any) -> Recipe:
    """A recipe without constraints, which the stand-in can train."""
    return tiny(name, at_most=None, penalty=0.1, **changes)


def study(*rows: Row, **changes: Any) -> Study:
    return Study("a-study", "A study", rows, **changes)


# ---- studies --------------------------------------------------------------------------------------------------------


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names, got first more than once"):
        study(Row("a", tiny("first")), Row("b", tiny("first", at_most=0.2)))


def test_a_study_trains_or_computes() -> None:
    with pytest.raises(ValueError, match="`rows` or `contests` to train, or something to `compute`"):
        study()
    with pytest.raises(ValueError, match="`rows` or `contests` to train, or something to `compute`"):
        study(Row("a", tiny("first")), compute=list)


def test_rows_of_different_data_are_refused() -> None:
    with pytest.raises(ValueError, match="recipes of one data set, got mnist, mnist5k"):
        study(Row("a", tiny("first")), Row("b", tiny("second", data="mnist")))


def test_files_that_define_one_study_twice_are_refused(tmp_path: Path) -> None:
    text = 'from ellzero.experiments.study import Study\nSTUDY = Study("same", "Same", compute=list)\n'
    (tmp_path / "one.py").write_text(text)
    assert list(studies(tmp_path)) == ["same"]
    (tmp_path / "two.py").write_text(text)
    with pytest.raises(StudyError, match=r"two files define the study `same`; one is two\.py"):
        studies(tmp_path)


# ---- a reproduction -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Study, list[dict[str, Any]], list[str]]:
    """Two rows and two seeds: the folder, the study, the records, the lines of progress."""
    out = tmp_path_factory.mktemp("results") / "table"
    rows = (
        Row("first row", tiny("first"), "198-233-100", "1.4 | 1.69"),
        Row("second row", tiny("second", at_most={"fc1": 0.3}), "243-89-29", "1.63"),
    )
    said: list[str] = []
    made = study(*rows)
    return out, made, reproduce(made, out, seeds=2, epochs=1, say=said.append), said


def test_each_row_leaves_a_file_with_all_that_is_needed_to_repeat_it(done: Any) -> None:
    out, made, records, said = done
    assert sorted(f.name for f in out.iterdir()) == ["first.json", "second.json", "stacks", "study.json"]
    for row, record in zip(made.rows, records, strict=True):
        read = json.loads((out / f"{row.recipe.name}.json").read_text())
        assert read == record
        assert Recipe.from_dict(read["recipe"]) == row.recipe.override(epochs=1)  # the run that was, not the paper's
        assert read["row"] == row.label
        assert read["published"] == {"architecture": row.architecture, "error": row.error}
        assert [s["seed"] for s in read["seeds"]] == [0, 1]
        assert (read["torch"], read["python"]) == (torch.__version__, platform.python_version())
        assert read["device"].startswith("CPU ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", read["date"])
        for seed in read["seeds"]:
            assert seed["runs_in_stack"] == 4
            assert seed["seconds_of_stack"] > 0
            assert [h["epoch"] for h in seed["history"]] == [1]
            assert seed["history"][0]["seconds"] == pytest.approx(seed["seconds_of_stack"], abs=1e-3)
    assert said == ["2 rows × 2 seeds: 4 runs, 0 done before, the others in 1 stack", "4 runs together: first, second"]
    assert stored(made, out) == (records, [])


def test_the_numbers_of_a_seed_are_those_of_its_run_alone(done: Any) -> None:
    _, made, records, _ = done
    recipe = made.rows[1].recipe.override(epochs=1, seed=1)
    trainer = training.train([recipe], data())
    (alone,) = evaluation.results(trainer)
    ours = records[1]["seeds"][1]
    assert ours["architecture"] == alone["architecture"]
    assert ours["error_last"] == pytest.approx(alone["error_last"], abs=1.01)  # one image of the hundred, to rounding
    for cost, numbers in alone["costs"].items():
        assert ours["costs"][cost] == pytest.approx(numbers, rel=1e-4)
    assert ours["history"][0]["loss"] == pytest.approx(trainer.history[0]["loss"], rel=1e-4)


def test_a_record_has_what_each_constraint_bounds(done: Any) -> None:
    _, _, records, _ = done
    for record, targets in zip(records, ({"*": 0.33}, {"fc1": 0.3}), strict=True):
        for seed in record["seeds"]:
            assert {p: c["at_most"] for p, c in seed["constraints"].items()} == targets
    whole = records[0]["seeds"][0]
    for kind in ("expected", "kept"):
        assert whole["constraints"]["*"][kind] == pytest.approx(whole["costs"]["l0_norm"][kind])


def test_constraints_by_layer_are_means_of_their_gates() -> None:
    trainer = Trainer([tiny("first")], data())
    gated: Any = trainer.network(0)
    with torch.no_grad():
        for _, gate in gated.named_gates():
            gate.log_alpha.copy_(torch.randn(gate.log_alpha.shape, generator=torch.Generator().manual_seed(0)) * 3)
    got = held(gated, costs.l0_norm, {"fc1": 0.3, "fc3": 0.2})
    gates = dict(gated.named_gates())
    for name, target in (("fc1", 0.3), ("fc3", 0.2)):  # every gate of a layer has as many weights
        expected, kept = gates[name].prob_open().mean().item(), gates[name].open().float().mean().item()
        assert got[name] == pytest.approx({"at_most": target, "expected": expected, "kept": kept}, rel=1e-4)


def test_a_result_is_json_even_where_there_was_no_loss(tmp_path: Path) -> None:
    final = study(Row("final", tiny("final", finalize=True, epochs=1)))
    reproduce(final, tmp_path, seeds=1)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (seed,) = json.loads((tmp_path / "final.json").read_text(), parse_constant=refuse)["seeds"]
    assert [h["loss"] is None for h in seed["history"]] == [False, True]
    assert [h.get("tuning", False) for h in seed["history"]] == [False, True]
    assert point_at_end_of_training(seed) == seed["history"][0]


def test_only_the_rows_that_match_are_trained(untrained: Untrained, tmp_path: Path) -> None:
    made = study(Row("a", light("first")), Row("b", light("second")))
    (record,) = reproduce(made, tmp_path, seeds=1, epochs=1, only="sec*")
    assert [[r.name for r in stack] for stack in untrained.stacks] == [["second"]]
    assert record["recipe"]["name"] == "second"
    assert stored(made, tmp_path) == ([record], ["first"])
    with pytest.raises(StudyError, match=r"`--only` must match the name of a recipe \(first, second\), got 'x'"):
        Reproduction(made, only="x")
    assert [r.name for _, r in made.recipes(only="sec*,first")] == ["first", "second"]  # in the order of the study
    assert [r.name for _, r in made.recipes(only="second, s*")] == ["second"]
    with pytest.raises(StudyError, match="got 'x'"):
        made.recipes(only="first,x")


@pytest.mark.parametrize(
    ("asked", "tuned"), [(None, [10, 0, 300]), (1, [1, 0, 8]), (3, [1, 0, 22]), (20, [5, 0, 150]), (200, [10, 0, 300])]
)
def test_fewer_epochs_are_fewer_of_every_phase(asked: int | None, tuned: list[int]) -> None:
    """Each phase has one at least; what is stored with more epochs than a recipe's was tuned as long as it says."""
    recipes = [get(name).override(data="mnist5k") for name in ("budget-mlp", "gallego-mlp", "frontier-mlp")]
    made = study(*(Row(r.name, r) for r in recipes))
    found = [recipe for _, recipe in made.recipes(epochs=asked)]
    assert [r.epochs for r in found] == [asked or r.epochs for r in recipes]
    assert [r.finetune_epochs for r in found] == tuned


def test_how_long_recipes_train_is_said_with_their_tuning() -> None:
    assert lengths([tiny("a", epochs=1).to_dict()]) == "1 epoch"
    assert lengths([tiny("a").to_dict(), {"epochs": 20}, tiny("b").to_dict()]) == "2 or 20 epochs"
    assert lengths([get("budget-mlp").to_dict(), get("frontier-mlp").to_dict()]) == "40 + 10 or 40 + 300 epochs"
    assert lengths([get("demo").override(epochs=1, finetune_epochs=1).to_dict()]) == "1 + 1 epochs"


def test_seeds_of_two_occasions_are_one_row(done: Any, tmp_path: Path) -> None:
    _, made, (both, _), _ = done
    late, early = tmp_path / "late", tmp_path / "early"
    reproduce(made, late, seeds=1, epochs=1, first_seed=1, only="first")
    assert [file.name for file in late.glob("first*")] == ["first.seed1.json"]
    reproduce(made, early, seeds=1, epochs=1, only="first")
    for file in (late / "first.seed1.json", early / "first.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())

    (joined,), missing = stored(made, tmp_path)
    assert missing == ["second"]
    assert {k: joined[k] for k in ("row", "published", "recipe")} == {
        k: both[k] for k in ("row", "published", "recipe")
    }
    assert [s["seed"] for s in joined["seeds"]] == [0, 1]
    for ours, theirs in zip(joined["seeds"], both["seeds"], strict=True):
        assert ours["architecture"] == theirs["architecture"]
        assert ours["error_last"] == pytest.approx(theirs["error_last"], abs=1.01)  # one image, to rounding

    first = json.loads((tmp_path / "first.json").read_text())
    (tmp_path / "first.seed1.json").write_text(json.dumps(first))
    with pytest.raises(StudyError, match="`first` has seed 0 in two files: remove one"):
        stored(made, tmp_path)
    first["seeds"][0]["seed"], first["recipe"]["lr"], first["commit"] = 1, 0.5, "other"
    (tmp_path / "first.seed1.json").write_text(json.dumps(first))
    with pytest.raises(StudyError, match=r"`first` has seeds of two recipes: `lr` is .* there and 0\.5 here"):
        stored(made, tmp_path)
    first["recipe"]["lr"] = joined["recipe"]["lr"]
    (tmp_path / "first.seed1.json").write_text(json.dumps(first))
    assert stored(made, tmp_path)[0][0]["commit"].endswith(", other")
    (tmp_path / "first.json").unlink()
    assert [s["seed"] for s in stored(made, tmp_path)[0][0]["seeds"]] == [1]
    (tmp_path / "first.seed1.json").write_text("[]")
    with pytest.raises(StudyError, match=r"first\.seed1\.json' is damaged"):
        stored(made, tmp_path)


def test_what_is_computed_is_stored_with_its_source(tmp_path: Path) -> None:
    made = study(compute=lambda: [{"name": "numbers", "x": [1, 2]}])
    (record,) = reproduce(made, tmp_path)
    assert json.loads((tmp_path / "numbers.json").read_text()) == record
    assert (record["x"], record["torch"]) == ([1, 2], torch.__version__)
    assert stored(made, tmp_path) == ([record], [])


@pytest.mark.parametrize("kind", ["rows", "arena", "computed"])
@pytest.mark.parametrize(
    ("name", "least"), [("seeds", 1), ("epochs", 1), ("every", 1), ("at_once", 1), ("first_seed", 0)]
)
def test_numbers_that_are_too_low_are_refused(name: str, least: int, kind: str) -> None:
    made = {
        "rows": study(Row("a", tiny("a"))),
        "arena": study(contests=(Contest("lenet300", "dense", 1, "mnist5k", 2),)),
        "computed": study(compute=list),
    }
    with pytest.raises(ValueError, match=f"`{name}` must be at least {least}, got {least - 1}$"):
        Reproduction(made[kind], **{name: least - 1})


def test_a_run_that_diverges_leaves_the_other_rows(untrained: Untrained, tmp_path: Path) -> None:
    made = study(Row("a", light("bad").override(penalty=1e30)), Row("b", light("good")))
    for _ in range(2):  # what is noted is not tried again
        with pytest.raises(DivergedError, match="the loss of `bad`, seed 0, is nan"):
            reproduce(made, tmp_path, seeds=1)
    assert untrained.sizes == [2, 1, 1]
    assert stored(made, tmp_path)[1] == ["bad"]


# ---- stopped, and taken up again ------------------------------------------------------------------------------------


def two_stacks() -> Study:
    return study(Row("a", tiny("first")), Row("b", tiny("second", lr=1e-3)))


def without_times(records: Sequence[dict[str, Any]]) -> str:
    text = json.loads(json.dumps(records))
    for record in text:
        for seed in record["seeds"]:
            del seed["seconds_of_stack"]
            for point in seed["history"]:
                del point["seconds"]
    return json.dumps(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return without_times(reproduce(two_stacks(), tmp_path_factory.mktemp("whole"), seeds=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "error"), [(lambda: signal.raise_signal(signal.SIGINT), Stopped), (crash, RuntimeError)]
)
def test_a_reproduction_goes_on_where_it_was(whole: str, action: Any, error: type[Exception], tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(error):
        reproduce(two_stacks(), tmp_path, seeds=2, watchers=[Watching(1, 3, action)])
    assert (tmp_path / "first.json").exists()  # the first stack was finished
    assert not (tmp_path / "second.json").exists()
    records = reproduce(two_stacks(), tmp_path, seeds=2, say=said.append)
    assert said == ["2 rows × 2 seeds: 4 runs, 2 done before, the others in 1 stack", "2 runs together: second"]
    assert without_times(records) == whole


def test_an_interrupted_stack_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    made = study(Row("a", tiny("first")))
    interrupt = Watching(0, 3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Stopped):
        reproduce(made, tmp_path, seeds=1, watchers=[interrupt])
    (folder,) = (tmp_path / "stacks").iterdir()
    assert checkpoint.steps(Folder.open(folder).checkpoints) == [3]
    watcher = Watching()
    reproduce(made, tmp_path, seeds=1, watchers=[watcher])
    assert watcher.steps == [4]


def test_what_is_finished_is_not_trained_again(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, made, records, _ = done

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(training, "train", refuse)
    monkeypatch.setattr(training, "restore", refuse)
    assert reproduce(made, out, seeds=2, epochs=1) == records


@pytest.mark.slow
def test_constraints_lost_in_a_crash_are_made_again(done: Any) -> None:
    out, made, records, _ = done
    (folder,) = (out / "stacks").iterdir()
    (folder / "constraints.json").unlink()
    assert reproduce(made, out, seeds=2, epochs=1) == records
    assert (folder / "constraints.json").exists()


def test_a_folder_with_other_settings_is_refused(done: Any) -> None:
    out, made, _, _ = done
    with pytest.raises(
        CampaignError, match=r"other settings \(`seeds` is 2 there and 3 here; `every` is 1 there and 5 here\)"
    ):
        reproduce(made, out, seeds=3, epochs=1, every=5)
    with pytest.raises(CampaignError, match=r"other settings \(`epochs` is 1 there and 2 here\)"):
        reproduce(made, out, seeds=2)
    with pytest.raises(CampaignError, match=r"other settings \(other rows: second\)"):
        reproduce(made, out, seeds=2, epochs=1, only="first")
    with pytest.raises(StudyError, match="holds the study `a-study`"):
        reproduce(replace(made, name="another"), out, seeds=2, epochs=1)


def test_a_fresh_start_removes_its_own_only_when_it_can_begin(untrained: Untrained, tmp_path: Path) -> None:
    made = study(Row("a", light("first")), Row("b", light("second")))
    reproduce(made, tmp_path, seeds=1)
    for name in ("note.txt", "first-seed0.safetensors", "figures"):
        (tmp_path / name).touch()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def nothing(_: str) -> Dataset:
        raise OSError("there are no such files")

    with pytest.raises(OSError, match="no such files"):
        making.reproduce(Reproduction(made, seeds=2), nothing, tmp_path, fresh=True)
    with pytest.raises(StudyError, match="holds the study `a-study`"):
        reproduce(replace(made, name="another"), tmp_path, fresh=True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    reproduce(made, tmp_path, seeds=1, only="second", fresh=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["note.txt", "second.json", "stacks", "study.json"]
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(CampaignError, match="is damaged"):
        reproduce(made, tmp_path, seeds=1)
    reproduce(made, tmp_path, seeds=1, fresh=True)


def test_a_row_from_two_commits_names_both(
    untrained: Untrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(Row("a", light("first")))
    commits = iter(["abc", "def"])
    monkeypatch.setattr("ellzero.experiments.campaign.provenance", lambda _: {"commit": next(commits), "torch": "2"})
    (record,) = reproduce(made, tmp_path, seeds=2, epochs=1, at_once=1)
    assert (record["commit"], record["torch"]) == ("abc, def", "2")
    assert [s["runs_in_stack"] for s in record["seeds"]] == [1, 1]


# ---- the table ------------------------------------------------------------------------------------------------------


def record(errors: Sequence[float], kept: Sequence[float]) -> dict[str, Any]:
    seeds = [
        {
            "error_best": error - 0.5,
            "error_last": error,
            "architecture": {"fc1": int(1000 * k), "fc2": 7},
            "costs": {
                "l0_norm": {"dense": 900.0, "expected": 0.25, "kept": 0.2},
                "params": {"dense": 10_000.0, "expected": k, "kept": k},
                "macs": {"dense": 20_000.0, "expected": k, "kept": k / 2},
            },
            "seconds_of_stack": 67.9,
            "runs_in_stack": 10,
        }
        for error, k in zip(errors, kept, strict=True)
    ]
    return {"row": "MLP", "published": {"architecture": "1-2", "error": "1.4 | 1.6"}, "seeds": seeds}


def cells(records: list[dict[str, Any]]) -> list[list[str]]:
    shown = table(records, "A title")
    return [list(map(str, line)) for line in zip(*(c.cells for c in shown.columns), strict=True)]


def test_the_table_has_means_intervals_and_the_median_seed() -> None:
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    errors = [f"1.50 ± {half:.2f}", f"2.00 ± {half:.2f}"]
    shares = ["25.0 %", "20.0 %", "2,000 (20.0 %)", "2,000 (10.0 %)"]
    ours = ["MLP", "1-2", "200-7", "1.4 / 1.6", *errors, *shares, "68 (10 runs)"]
    assert cells([record([1.0, 2.0, 3.0], [0.1, 0.3, 0.2])]) == [ours]


def test_the_table_has_no_interval_for_one_seed_and_dashes_for_what_is_not_published() -> None:
    one = record([2.0], [0.1]) | {"published": {"architecture": "", "error": ""}}
    assert cells([one])[0][:6] == ["MLP", "–", "100-7", "–", "1.50", "2.00"]


def test_seconds_of_several_stacks_are_summed() -> None:
    seeds = [{"seconds_of_stack": 2.0, "runs_in_stack": 1}, {"seconds_of_stack": 3.0, "runs_in_stack": 1}]
    assert took({"seeds": seeds}) == "5 (2 runs)"
    assert took({"seeds": seeds[:1]}) == "2 (1 run)"


def test_a_dense_network_has_a_row_too(tmp_path: Path) -> None:
    row = Row("dense", tiny("dense", placement=None, at_most=None, epochs=1), "784-300-100", "1.6")
    (got,) = cells(reproduce(study(row), tmp_path, seeds=1))
    assert got[:4] == ["dense", "784-300-100", "dense", "1.6"]
    assert got[6:10] == ["100.0 %", "100.0 %", "100 %", "100 %"]


def test_curves_of_seeds_that_do_not_match_are_refused() -> None:
    seeds = [{"history": [{"epoch": 1, "error": 3.0}, {"epoch": 2, "error": 2.0}]}, {"history": [{"epoch": 1}]}]
    assert by_epoch(seeds[:1], lambda h: h["error"]) == ([1, 2], [[3.0, 2.0]])
    with pytest.raises(ValueError, match="same epochs"):
        by_epoch(seeds, lambda h: 0.0)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(opening, "load_data", lambda *_: data())
    monkeypatch.chdir(tmp_path)


TABLE = ["reproduce", "gallego2021-table1", "--seeds", "1", "--epochs", "1", "--data", "mnist5k", "--quiet"]

LIGHT = ["reproduce", "louizos2018-table1", *TABLE[2:]]  # without constraints, which the stand-in cannot train


@pytest.mark.slow
def test_the_command_lists_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    printed = capsys.readouterr().out
    for name in studies():
        assert name in printed
    assert main(["reproduce", "--json"]) == 0
    assert [s["name"] for s in json.loads(capsys.readouterr().out)] == list(studies())


@pytest.mark.slow
@pytest.mark.usefixtures("few_images", "untrained")
def test_the_command_trains_prints_stores_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "louizos-mlp*"]
    assert main([*LIGHT, *only]) == 0
    printed = capsys.readouterr().out
    assert "Louizos et al. (2018), Table 1; mnist5k, 1 epoch, CPU" in printed
    assert "219-214-100" in printed
    out = Path("runs/reproduce/louizos2018-table1")
    assert f"results: {out}" in printed
    assert sorted(p.stem for p in out.glob("*.json")) == ["louizos-mlp", "louizos-mlp-sep", "study"]
    # There already.
    assert main([*LIGHT, *only]) == 2
    assert "`--resume` goes on with it" in capsys.readouterr().err
    assert main([*LIGHT, *only, "--resume", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records == [json.loads((out / f"{n}.json").read_text()) for n in ("louizos-mlp", "louizos-mlp-sep")]
    # Other settings.
    assert main([*LIGHT, *only, "--every", "2", "--resume"]) == 2
    assert "other settings (`every` is 1 there and 2 here)" in capsys.readouterr().err
    # From the beginning.
    (out / "note.txt").touch()
    assert main([*LIGHT, "--only", "louizos-mlp", "--fresh"]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["louizos-mlp.json", "note.txt", "stacks", "study.json"]
    assert len(list((out / "stacks").iterdir())) == 1
    # Not while another process trains there.
    with Folder.open(next((out / "stacks").iterdir())).locked():
        assert main([*LIGHT, "--only", "louizos-mlp", "--fresh"]) == 1
    assert "is being trained by another process" in capsys.readouterr().err
    assert (out / "louizos-mlp.json").exists()
    # Not another study's.
    assert main(["reproduce", "gallego2021-figure1", *TABLE[2:], "--out", str(out), "--fresh"]) == 2
    assert "holds the study `louizos2018-table1`" in capsys.readouterr().err
    assert (out / "louizos-mlp.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("few_images")
def test_ctrl_c_says_how_to_go_on_and_that_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TABLE, "--only", "gallego-mlp", "--out", "my runs"]
    train = training.train

    def interrupted(recipes: Any, dataset: Any, folder: Any, **options: Any) -> Any:
        options["watchers"] = [Watching(0, 1, lambda: signal.raise_signal(signal.SIGINT))]
        return train(recipes, dataset, folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted)
        assert main(words) == 130
    said = capsys.readouterr().err
    assert "stopped after epoch 0, step 1: saved; resume with: ellzero reproduce " in said
    program, *again = shlex.split(said.partition("resume with: ")[2])
    assert program == "ellzero"
    assert main([*again, "--quiet"]) == 0
    assert "198-233-100" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("few_images")
def test_figures_are_drawn_from_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "louizos2018-figure1", "--out", "one"]) == 0
    assert "figure: one/figures/louizos2018-figure1.svg" in capsys.readouterr().out
    before = Path("one/figures/louizos2018-figure1.svg").read_bytes()
    Path("one/figures/louizos2018-figure1.svg").unlink()
    assert main(["reproduce", "louizos2018-figure1", "--out", "one", "--draw-only"]) == 0
    assert Path("one/figures/louizos2018-figure1.svg").read_bytes() == before
    assert main(["reproduce", "louizos2018-figure3", "--out", "two", "--draw-only"]) == 2
    assert "there are no results of `louizos2018-figure3` in 'two'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("few_images")
def test_without_matplotlib_tables_are_made_and_figures_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "can_draw", lambda: False)
    assert main(["reproduce", "louizos2018-figure1"]) == 1
    assert "pip install 'ellzero[plots]'" in capsys.readouterr().err
    assert not Path("runs").exists()
    figure = ["reproduce", "gallego2021-figure1", "--only", "gallego-mlp", *TABLE[2:]]
    assert main(figure) == 0
    shown = capsys.readouterr()
    assert "dual restarts" in shown.out
    assert "no figures will be drawn" in shown.err


@pytest.mark.slow
@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["louizos2018-tabel1"], "did you mean `louizos2018-table1`?"),
        (["louizos2018-table1", "--seeds", "0"], "`--seeds` must be at least 1, got 0"),
        (["louizos2018-table1", "--resume", "--fresh"], "exclude each other"),
        (["louizos2018-figure1", "--epochs", "3"], "`--epochs` must be absent: `louizos2018-figure1` trains nothing"),
        (["gpt-shakespeare", "--data", "mnist"], '`data` must be "shakespeare" or "tinyshakespeare" or "sonnets" for'),
        (["louizos2018-table1", "--only", "x*"], "`--only` must match the name of a recipe"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_file_of_a_study_is_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file, results = ROOT / "reproductions" / "louizos2018_table1.py", ROOT / "results" / "louizos2018-table1"
    monkeypatch.setattr(sys, "argv", [str(file), "--draw-only", "--out", str(results)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(file), run_name="__main__")
    assert not left.value.code
    assert "20-25-45-462" in capsys.readouterr().out
