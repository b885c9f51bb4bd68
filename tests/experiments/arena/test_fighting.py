"""Contests in a folder: what is trained, in which order, by whom, what is taken up again; and what is said of them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ellzero.cli import main
from ellzero.experiments.arena import fighting, showing
from ellzero.experiments.arena.contest import Contest
from ellzero.experiments.arena.fighting import ArenaError, fight
from ellzero.experiments.data import Dataset, load
from ellzero.experiments.store import records
from ellzero.experiments.study import find, studies
from ellzero.out.tables import markdown

ROW = Contest("lenet300", "narrow", 0.1, "mnist5k", 2)
ROWS = [replace(ROW, method="shape"), ROW, replace(ROW, method="budget")]
Job = tuple[str, int]


def pretended(trained: list[Job], fails: Job | None = None) -> Callable[..., dict[str, Any]]:
    """A seed of a contest that trains nothing: its numbers say which it was."""

    def fought(contest: Contest, seed: int, dataset: Any, found: Path) -> dict[str, Any]:
        if (contest.name, seed) == fails:
            raise KeyboardInterrupt
        if contest.needs is not None:
            assert found.exists()
        if contest.method == "budget":
            found.touch()
        trained.append((contest.name, seed))
        error = len(contest.name) + seed / 10
        return {
            "seed": seed, "error_last": error, "macs": {"dense": 1000, "kept": 0.1}, "seconds_in_all": 1.0,
            "about": {"device": f"CPU {seed}", "torch": "2"},
        }  # fmt: skip

    return fought


def nothing(name: str) -> Any:
    return None


def test_an_interrupted_fight_goes_on_seed_by_seed_to_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Job] = []
    monkeypatch.setattr(Contest, "fought", pretended(whole))
    expected = fight(ROWS, 2, nothing, tmp_path / "whole")
    names = [row.name for row in ROWS]
    assert sorted(whole) == sorted((name, seed) for name in names for seed in (0, 1))
    assert [seed for _, seed in whole] == [0, 0, 0, 1, 1, 1]  # what is cut short has whole seeds
    assert whole[2::3] == [(names[0], 0), (names[0], 1)]  # the shape comes after what it starts from
    first: list[Job] = []
    monkeypatch.setattr(Contest, "fought", pretended(first, fails=(names[2], 1)))
    with pytest.raises(KeyboardInterrupt):
        fight(ROWS, 2, nothing, tmp_path / "cut")
    assert len(first) == 4
    complete = {name for name in names if {(name, 0), (name, 1)} <= set(first)}
    assert {file.stem for file in (tmp_path / "cut").glob("*.json")} == complete == {names[1]}
    then: list[Job] = []
    monkeypatch.setattr(Contest, "fought", pretended(then))
    told: list[str] = []
    assert fight(ROWS, 2, nothing, tmp_path / "cut", say=told.append) == expected
    assert not set(first) & set(then)
    assert sorted(first + then) == sorted(whole)
    assert told[0] == "3 rows × 2 seeds: 6 runs, 4 done before"
    for row, record in zip(ROWS, expected, strict=True):
        assert records.read(tmp_path / "cut" / f"{row.name}.json") == record
        assert [s["error_last"] for s in record["seeds"]] == [len(row.name), len(row.name) + 0.1]
        assert (record["device"], record["torch"]) == ("CPU 0, CPU 1", "2")
        assert record["recipe"] == row.settings()
    assert fight(ROWS, 2, nothing, tmp_path / "cut", say=told.append) == expected  # nothing is left to do
    assert len(told) == 3
    assert [r["seeds"][0]["at_once"] for r in expected] == [1, 1, 1]


def test_more_seeds_and_rows_may_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Job] = []
    monkeypatch.setattr(Contest, "fought", pretended(trained))
    fight(ROWS[1:2], 1, nothing, tmp_path)
    fight(ROWS[1:], 2, nothing, tmp_path)
    assert len(trained) == len(set(trained)) == 4
    with pytest.raises(ValueError, match="`--only` must match `lenet300-10-budget` too: `lenet300-10-shape` starts"):
        fight(ROWS[:1], 3, nothing, tmp_path)
    fight(ROWS[:1], 2, nothing, tmp_path)


def test_a_run_that_fails_stops_nobody_but_those_who_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Job] = []
    well = pretended(trained)

    def fought(contest: Contest, seed: int, dataset: Any, found: Path) -> dict[str, Any]:
        if (contest.method, seed) == ("budget", 0):
            raise RuntimeError("no memory")
        if not found.exists() and contest.needs is not None:
            raise ValueError("no start")
        return well(contest, seed, dataset, found)

    monkeypatch.setattr(Contest, "fought", fought)
    with pytest.raises(ArenaError, match=r"^lenet300-10-budget, seed 0: RuntimeError: no memory \(and 1 more\); all"):
        fight(ROWS, 2, nothing, tmp_path)
    assert len(trained) == 4
    monkeypatch.setattr(Contest, "fought", well)
    assert len(fight(ROWS, 2, nothing, tmp_path)) == 3
    assert len(trained) == 6


def test_a_package_that_is_not_there_is_told_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Job] = []
    monkeypatch.setattr(Contest, "fought", pretended(trained))
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ImportError, match=r"pip install 'ellzero\[arena\]'"):
        fight([ROW, replace(ROW, method="taylor")], 1, nothing, tmp_path)
    assert not trained
    assert len(fight([ROW], 1, nothing, tmp_path)) == 1


def test_settings_of_a_bout_are_stored_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contest, "fought", pretended([]))
    fight(ROWS[1:2], 1, nothing, tmp_path)
    stored = records.read(tmp_path / "bouts" / "lenet300-10-narrow-seed0.json")
    assert stored["settings"]["at_most"] == 0.1
    assert stored["settings"]["batch"] == 128


def small(name: str) -> Dataset:
    data = load(name)
    return replace(data, train_x=data.train_x[:256], train_y=data.train_y[:256])  # type: ignore[type-var]


def gone(folder: Path, name: str) -> Dataset:
    os._exit(3)


@pytest.mark.slow
def test_processes_share_the_work_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    found = fight(ROWS, 1, small, tmp_path / "a", at_once=2)
    assert [r["row"] for r in found] == [row.name for row in ROWS]
    assert found[0]["seeds"][0]["shapes"] == found[2]["seeds"][0]["shapes"]
    assert {r["seeds"][0]["steps"] for r in found} == {4}
    assert {r["seeds"][0]["at_once"] for r in found} == {2}
    with pytest.raises(ArenaError, match="a process that trained is gone"):
        fight(ROWS[1:2], 1, partial(gone, tmp_path), tmp_path / "b", at_once=2)


# ---------------------------------------------------------------- what is said


def record(method: str, errors: list[float], at_most: float = 0.2, kept: float = 0.2) -> dict[str, Any]:
    row = Contest("lenet5", method, at_most, "mnist", 2)
    seeds = [{"seed": k, "error_last": e, "macs": {"kept": kept}, "seconds_in_all": 10.0} for k, e in enumerate(errors)]
    return {"row": row.name, "recipe": row.settings(), "device": "a GPU", "seeds": seeds}


RECORDS = [
    record("dense", [0.5, 0.7], 1.0, 1.0),
    record("budget", [1.0, 1.2, 1.4]),
    record("narrow", [1.3, 1.5, 1.7]),
    record("budget", [2.0, 2.1, 2.2], 0.1, 0.09),
    record("magnitude", [1.0, 1.1, 1.2], 0.1, 0.1),
    record("budget", [1.0, 1.2, 1.4], 0.5, 0.5),
    record("stg", [0.9, 1.2, 1.2], 0.5, 0.5),
]


STUCK = """
import fcntl, os, sys, time
from pathlib import Path
from ellzero.experiments.arena.contest import Contest
from ellzero.experiments.arena.fighting import fight

def stuck(name):
    held = open(Path(sys.argv[1]) / f"{os.getpid()}.lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    held.write("held")
    held.flush()
    time.sleep(3600)

if __name__ == "__main__":
    rows = [Contest("lenet300", "narrow", share, "mnist5k", 2) for share in (0.1, 0.2)]
    fight(rows, 1, stuck, Path(sys.argv[1]) / "out", at_once=2)
"""


def test_nobody_trains_on_for_one_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    fight_of_two = subprocess.Popen([sys.executable, str(script), str(tmp_path)])

    def locks() -> list[Path]:
        return [file for file in tmp_path.glob("*.lock") if file.read_text() == "held"]

    _wait_until(lambda: len(locks()) == 2)
    assert not any(map(_is_free, locks()))
    fight_of_two.kill()
    fight_of_two.wait()
    _wait_until(lambda: all(map(_is_free, locks())))


def _is_free(file: Path) -> bool:
    """Whether the process that locked it is gone; one that nobody has waited for yet is."""
    with file.open() as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _wait_until(true: Callable[[], bool]) -> None:
    for _ in range(1200):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen in two minutes")


def test_the_table_has_means_and_intervals_by_hand() -> None:
    lines = markdown(showing.table(RECORDS, "")).splitlines()
    assert lines[0] == ("| network | MACs at most | Budget | narrower | TP magnitude | Budget, stg | dense |")
    half = 4.302653 * 0.2 / math.sqrt(3)  # Student's t with two degrees of freedom, deviation 0.2
    wide = 12.7062 * 0.1 * math.sqrt(2) / math.sqrt(2)  # one degree, deviation 0.1·√2
    assert lines[2] == f"| LeNet-5 | 20 % | 1.20 ± {half:.2f} * | 1.50 ± {half:.2f} | – | – | 0.60 ± {wide:.2f} |"
    assert (
        lines[3] == f"| LeNet-5 | 10 % | 2.10 ± {half / 2:.2f} | – | 1.10 ± {half / 2:.2f} * | – | 0.60 ± {wide:.2f} |"
    )


def test_what_is_won_and_lost_by_hand() -> None:
    won, worse, close, *_ = showing.says(RECORDS)
    assert won == "Budget has the lowest mean error in 1 of 3 cells"
    half = 2.776445 * math.sqrt(2 * 0.1**2 / 3)  # equal variances: Welch has four degrees of freedom
    assert worse == f"lenet5 at 10 %: TP magnitude is better by 1.00 ± {half:.2f} points, more than the interval"
    assert close.startswith("lenet5 at 50 %: Budget, stg is better by 0.10 ± ")
    assert close.endswith(" points, within it")
    assert showing.says(RECORDS[:2]) == []
    over = showing.says([*RECORDS[:2], record("narrow", [1.0], kept=0.21)])
    assert over[1].endswith("better by 0.20 points, of one seed")
    assert over[2] == "over the MACs that are allowed: lenet5-20-narrow"


def test_a_shape_whose_search_is_not_counted_is_told_apart() -> None:
    free, counted = record("shape", [0.9, 1.0, 1.1]), record("shape-counted", [1.9, 2.0, 2.1], 0.1, 0.1)
    won, equal, *_ = showing.says([*RECORDS[:3], free, RECORDS[3], counted])
    assert won == "Budget has the lowest mean error in 0 of 2 cells"
    assert equal == "without its shape trained once more, which has had more epochs, in 1"
    assert not any("more epochs" in line for line in showing.says([*RECORDS[:4], counted]))


def test_equal_seeds_and_macs_are_paired_over_all_cells_by_hand() -> None:
    more = record("narrow", [2.1, 2.4], 0.1, 0.1)  # one seed fewer than ours
    narrow, _, stg = [line for line in showing.says([*RECORDS, more]) if "all cells" in line]
    gaps = [-0.3, -0.3, -0.3, -0.1, -0.3]
    half = 2.776445 * statistics.stdev(gaps) / math.sqrt(5)  # four degrees of freedom
    assert narrow == f"lenet5, all cells: Budget is 0.26 ± {half:.2f} points below narrower (5 pairs)"
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert stg == f"lenet5, all cells: Budget is 0.10 ± {half:.2f} points above Budget, stg (3 pairs)"


def test_a_changed_budget_is_named_by_its_change() -> None:
    titles = [showing.title(method) for method in ("budget", "budget-hidden", "stg", "budget-keep-90")]
    assert titles == ["Budget", "Budget, inputs kept", "Budget, stg", "Budget, keep-90"]


@pytest.mark.slow
def test_the_figure_shows_every_point(tmp_path: Path) -> None:
    files = showing.draw(RECORDS, tmp_path)
    assert [f.name for f in files] == ["arena.png", "arena.svg", "arena.txt"]
    assert "against the seconds of training" in files[2].read_text()


def test_seconds_of_another_device_are_not_beside_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(showing, "save", lambda figure, *_: drawn.extend(figure.axes))
    for moved, cross in (("magnitude", 1), ("dense", 0)):
        drawn.clear()
        showing.draw([{**r, "device": "a CPU"} if r["recipe"]["method"] == moved else r for r in RECORDS], Path())
        errors, seconds = ({c.get_label() for c in panel.containers} for panel in drawn)
        assert errors == {"Budget", "narrower", "TP magnitude", "Budget, stg"}
        assert seconds == errors - ({"TP magnitude"} if moved == "magnitude" else set())
        assert [line.get_marker() for line in drawn[1].lines].count("x") == cross


# ---------------------------------------------------------------- the studies and the command


def test_the_arena_has_twelve_cells_and_its_split_has_them_on_other_images() -> None:
    known = studies()
    arena, split = (find(name, known) for name in ("arena", "arena-split"))
    fought = [c for c in arena.contests if c.method != "dense"]
    cells = {(c.network, c.at_most) for c in fought}
    assert len(cells) == 12
    assert {c.network for c in fought} == {"lenet300", "lenet5", "resnet-56"}
    assert {a for _, a in cells} == {0.1, 0.2, 0.35, 0.5}
    for method in ("budget", "magnitude", "norm", "taylor", "narrow", "shape", "shape-counted"):
        assert {(c.network, c.at_most) for c in fought if c.method == method} == cells
    assert len({c.epochs for c in arena.contests if c.network == "resnet-56"}) == 1
    assert arena.seeds >= 3
    assert {c.data for c in arena.contests} == {"mnist", "cifar10"}
    assert {c.data for c in split.contests} == {"mnist-split", "cifar10-split"}
    held_out = {replace(c, data=f"{c.data}-split") for c in arena.contests}
    assert held_out < set(split.contests)  # which has all families
    changed = {(c.network, c.method) for c in split.contests if c.method.startswith("budget-")}
    assert {n for n, m in changed if m == "budget-keep-90"} == {"lenet300", "lenet5", "resnet-56"}
    assert {n for n, m in changed if m == "budget-inputs"} == {"lenet300", "lenet5"}  # streams have several writers
    # Without gates on inputs: where there are some by default.
    assert {(c.network, c.at_most) for c in fought if c.method == "budget-hidden"} == {
        (network, at_most) for network, at_most in cells if network == "lenet300"
    }
    assert {c.method for c in fought if c.method.startswith("budget-")} == {"budget-hidden"}


@pytest.mark.slow
def test_the_command_fights_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "fought", pretended([]))
    monkeypatch.setattr("ellzero.cli.campaigns.can_draw", lambda: False)
    out = str(tmp_path / "arena")
    words = [
        "reproduce",
        "arena",
        "--data",
        "mnist5k",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--out",
        out,
        "--seeds",
        "1",
    ]
    assert main([*words, "--only", "lenet300-*-narrow"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"MLP 784-300-100 +10 % +\d+\.\d\d", printed.out)
    assert "4 of 4: lenet300-50-narrow, seed 0" in printed.err
    assert main([*words, "--only", "lenet300-100-dense,lenet300-*-narrow", "--resume", "--json"]) == 0
    printed = capsys.readouterr()
    assert [r["row"] for r in json.loads(printed.out)] == [
        "lenet300-100-dense", *(f"lenet300-{p}-narrow" for p in (10, 20, 35, 50))
    ]  # fmt: skip
    assert "5 rows × 1 seeds: 5 runs, 4 done before" in printed.err
    assert main([*words, "--only", "lenet300-100-dense"]) == 2  # neither `--resume` nor `--fresh`
    assert main([*words[:5], "3", *words[6:], "--resume", "--only", "lenet300-100-dense"]) == 2
    assert "other settings (`epochs` is 2 there and 3 here)" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 2
    assert "`data` must have images of (3, 32, 32) for `resnet-56`, got 'mnist5k'" in capsys.readouterr().err
    assert main([*words, "--resume", "--only", "lenet300-10-shape"]) == 2
    assert "must match `lenet300-10-budget` too" in capsys.readouterr().err
    assert main([*words, "--every", "2"]) == 2
    assert "the arena looks at the last epoch alone" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["reproduce", "arena", "--draw-only", "--out", out, "--only", "lenet300-*"]) == 0
    assert "not there yet: lenet300-10-budget" in capsys.readouterr().err
    assert fighting.BOUTS in {p.name for p in (tmp_path / "arena").iterdir()}
