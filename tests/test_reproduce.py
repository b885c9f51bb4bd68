"""Published tables run again: intervals against scipy's Student, stacks by hand, files and the printed table."""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from scipy import stats

from ellzero.data import Dataset, load
from ellzero.recipes import Recipe, get
from ellzero.reproduce import Row, interval, provenance, reproduce, show, stacks, table
from ellzero.training import Trainer


@cache
def data() -> Dataset:
    whole = load("mnist5k")
    train_x, train_y = whole.train_x[:200], whole.train_y[:200]
    return replace(whole, train_x=train_x, train_y=train_y, test_x=whole.test_x[:100], test_y=whole.test_y[:100])


def tiny(name: str, **changes: Any) -> Recipe:
    changes = {"epochs": 2, "batch": 100, "data": "mnist5k"} | changes
    return get("gallego-mlp").override(name=name, **changes)


# ---- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 10, 11, 12, 20, 40, 500])
def test_the_interval_is_students(n: int) -> None:
    values = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).tolist()
    mean, half = interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=statistics.fmean(values), scale=stats.sem(values))
    assert mean == pytest.approx((low + high) / 2)
    assert half == pytest.approx((high - low) / 2, rel=3e-4)


def test_one_value_has_no_interval() -> None:
    mean, half = interval([1.5])
    assert mean == 1.5
    assert math.isnan(half)


# ---- stacks ---------------------------------------------------------------------------------------------------------


def test_runs_are_stacked_where_only_seed_objective_and_name_differ() -> None:
    a, b, c = tiny("a"), tiny("b", at_most={"fc1": 0.3}), tiny("c", lr=0.1)
    d = tiny("d", at_most=None, penalty=0.1)
    runs = [r.override(seed=s) for r in (a, b, c, d) for s in range(2)]
    groups = [[(r.name, r.seed) for r in group] for group in stacks(runs)]
    assert groups == [[("a", 0), ("a", 1), ("b", 0), ("b", 1), ("d", 0), ("d", 1)], [("c", 0), ("c", 1)]]


def test_networks_with_batch_norm_go_alone() -> None:
    wide = get("louizos-wrn-0.001-cifar10")
    runs = [wide, wide.override(seed=1), wide.override(name="other")]
    assert stacks(runs) == [[r] for r in runs]


# ---- a table --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row], list[dict[str, Any]], list[str]]:
    """Two rows and two seeds: the folder, the rows, the records, the lines of progress."""
    out = tmp_path_factory.mktemp("results") / "table"
    rows = [
        Row("first row", tiny("first"), "198-233-100", "1.4 | 1.69"),
        Row("second row", tiny("second", at_most={"fc1": 0.3}), "243-89-29", "1.63"),
    ]
    said: list[str] = []
    return out, rows, reproduce(rows, data(), seeds=2, epochs=1, out=out, say=said.append), said


def test_each_row_leaves_a_file_with_all_that_is_needed_to_repeat_it(done: Any) -> None:
    out, rows, records, said = done
    assert sorted(f.name for f in out.iterdir()) == ["first.json", "second.json"]
    for row, record in zip(rows, records, strict=True):
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
            assert [h["epoch"] for h in seed["history"]] == [1]
    assert said[0] == "4 runs together: first, second"


def test_the_commit_is_that_of_the_checkout(done: Any) -> None:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    if not head:
        pytest.skip("not a checkout")
    commit = done[2][0]["commit"]
    assert commit.removesuffix("-dirty") == head or head[:7] in commit  # a tag may stand before it


def test_without_a_checkout_the_environment_tells_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 128, stdout="", stderr=""))
    monkeypatch.setenv("COMMIT", "abc123")
    assert provenance(torch.device("cpu"))["commit"] == "abc123"


def test_the_numbers_of_a_seed_are_those_of_its_run_alone(done: Any) -> None:
    _, rows, records, _ = done
    trainer = Trainer([rows[1].recipe.override(epochs=1, seed=1)], data())
    trainer.train()
    (alone,) = trainer.results()
    ours = records[1]["seeds"][1]
    assert ours["architecture"] == alone["architecture"]
    assert ours["error_last"] == pytest.approx(alone["error_last"], abs=1.01)  # one image of the hundred, to rounding
    for cost, numbers in alone["costs"].items():
        assert ours["costs"][cost] == pytest.approx(numbers, rel=1e-4)
    other = records[0]["seeds"][1]
    assert other["history"][0]["loss"] == pytest.approx(alone_loss(rows[0].recipe.override(epochs=1, seed=1)), rel=1e-4)


def alone_loss(recipe: Recipe) -> float:
    trainer = Trainer([recipe], data())
    return float(torch.cat(list(trainer.train_epoch())).mean())


def test_a_result_is_json_even_where_there_was_no_loss(tmp_path: Path) -> None:
    final = Row("final", tiny("final", finalize=True, epochs=1), "-", "-")
    reproduce([final], data(), seeds=1, out=tmp_path, say=lambda _: None)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    read = json.loads((tmp_path / "final.json").read_text(), parse_constant=refuse)
    assert [h["loss"] is None for h in read["seeds"][0]["history"]] == [False, True]


def record(errors: Sequence[float], kept: Sequence[float]) -> dict[str, Any]:
    seeds = [
        {
            "error_best": error - 0.5,
            "error_last": error,
            "architecture": {"fc1": int(1000 * k), "fc2": 7},
            "costs": {
                "l0_norm": {"expected": 0.25, "kept": 0.2},
                "params": {"expected": k, "kept": k},
                "macs": {"expected": k, "kept": k / 2},
            },
        }
        for error, k in zip(errors, kept, strict=True)
    ]
    return {"row": "MLP", "published": {"architecture": "1-2", "error": "1.4"}, "seeds": seeds}


def cells(records: list[dict[str, Any]]) -> list[list[str]]:
    """The columns of a table, as it is printed."""
    printed = StringIO()
    Console(width=200, file=printed).print(table(records, "A title"))
    lines = printed.getvalue().splitlines()
    assert lines[0].strip() == "A title"
    return [[c.strip() for c in line.strip("│┃ ").split("│")] for line in lines if line.startswith("│")]


def test_the_table_has_means_intervals_and_the_median_seed() -> None:
    rows = cells([record([1.0, 2.0, 3.0], [0.1, 0.3, 0.2])])
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    ours = ["MLP", "1-2", "200-7", "1.4", "1.50", f"2.00±{half:.2f}", "25.0", "20.0", "20.0", "10.0"]
    assert rows == [ours]


def test_the_table_has_no_interval_for_one_seed() -> None:
    assert cells([record([2.0], [0.1])])[0][5] == "2.00"


def test_a_dense_network_has_a_row_too() -> None:
    row = Row("dense", tiny("dense", placement=None, at_most=None, epochs=1), "784-300-100", "1.6")
    (got,) = cells(reproduce([row], data(), seeds=1, say=lambda _: None))
    assert got[:4] == ["dense", "784-300-100", "dense", "1.6"]
    assert got[6:] == ["100.0"] * 4


def test_the_table_is_printed(done: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show(done[2], "Table 1")
    printed = capsys.readouterr().out
    assert "Table 1" in printed
    for text in ("first row", "198-233-100", "1.4 | 1.69", "second row"):
        assert text in printed
