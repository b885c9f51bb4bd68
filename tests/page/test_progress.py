"""What a run's page shows over epochs where the network shrank: lines, the table and the seconds, against the run's
files and counts by hand.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ellzero.experiments.store.folder import Folder, pace
from ellzero.page import run_figures, run_page
from support.finished import copied
from support.pages import embedded, lines, shrunk_run, text_of
from support.runs import without_checksum


@pytest.fixture(scope="module")
def shrunk() -> Path:
    return shrunk_run()


@pytest.fixture
def rewritten(shrunk: Path, tmp_path: Path) -> Callable[[Callable[[list[Any]], Any]], Folder]:
    """A copy whose records have been changed."""

    def change(how: Callable[[list[Any]], Any]) -> Folder:
        home = copied(shrunk, tmp_path / "copy")
        records = [without_checksum(line) for line in (home / "history.jsonl").read_text().splitlines()]
        how(records)
        (home / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return Folder.open(home)

    return change


OVER_EPOCHS = ("error", "loss", "l0-norm", "params", "macs", "seconds", "multipliers")


@pytest.mark.slow
def test_events_are_lines_in_every_chart_over_epochs(shrunk: Path) -> None:
    found = embedded(run_page(Folder.open(shrunk)))
    for name in OVER_EPOCHS:
        assert lines(found[name]) == [(2, "shrunk"), (3, "skipped"), (4, "gates fixed")], name
    steps = 100 // 50
    assert lines(found["flops"]) == [(2 * steps, "shrunk"), (3 * steps, "skipped"), (4 * steps, "gates fixed")]
    assert [s["x0"] for s in found["strip-0"]["layout"]["shapes"]] == [2, 3, 4]
    assert "annotations" not in found["strip-0"]["layout"]


@pytest.mark.slow
def test_the_table_of_events_has_widths_and_macs_counted_by_hand(shrunk: Path) -> None:
    dense, left = 784 * 300 + 300 * 100 + 100 * 10, 784 * 204 + 204 * 60 + 60 * 10
    share = f"{100 * left / dense:.1f}\u00a0%".replace("\u00a0", " ")
    for page in (run_page(Folder.open(shrunk)), run_page(Folder.open(shrunk), part=True)):
        said = text_of(page)
        assert f"2 shrunk 100.0 % → {share} fc1 300 → 204 fc2 100 → 60" in said
        assert f"3 skipped: too little to gain {share}, and {share} if done fc1 204 fc2 60" in said


def test_an_event_that_was_skipped_says_what_it_would_have_done(rewritten: Any) -> None:
    def offer(records: list[Any]) -> None:
        event = {"removed": {"fc1": 4, "fc2": 0}, "widths": {"fc1": 200, "fc2": 60}, "skipped": True}
        records[2]["shrunk"] = event | {"macs": {"before": 0.65, "after": 0.64}}

    said = text_of(run_page(rewritten(offer)))
    assert "3 skipped: too little to gain 65.0 %, and 64.0 % if done fc1 204 fc2 60" in said


def test_settled_gates_are_one_line(rewritten: Any) -> None:
    def settle(records: list[Any]) -> None:
        records[2]["shrunk"] |= {"settled": True}
        for record in records[2:]:
            record["tuning"] = True

    page = run_page(rewritten(settle))
    assert lines(embedded(page)["error"]) == [(2, "shrunk"), (3, "settled")]
    assert "3 settled: the gates are fixed" in text_of(page)


@pytest.mark.slow
def test_seconds_are_means_since_the_record_before(rewritten: Any) -> None:
    def spend(records: list[Any]) -> None:
        records[:] = [*records[1:4], records[3].copy(), records[4]]  # one missing; one of closing units at the end
        for record, seconds in zip(records, (9.0, 2.0, 1.5, 0.25, 1.0), strict=True):
            record["seconds"] = seconds
        assert [r["epoch"] for r in records] == [2, 3, 4, 4, 5]

    folder = rewritten(spend)
    chart = embedded(run_page(folder))["seconds"]
    (steps,) = chart["data"]
    assert (steps["x"], steps["y"]) == ([0, 2, 3, 4, 5], [4.5, 4.5, 2.0, 1.5, 1.25])
    assert steps["line"]["shape"] == "vh"
    assert "range" not in chart["layout"]["yaxis"]
    assert "Until epoch 2 4.5 s in the median, after it 1.5 s." in run_page(folder)


def test_an_epoch_that_compiles_does_not_flatten_the_others(rewritten: Any) -> None:
    def spend(records: list[Any]) -> None:
        for record, seconds in zip(records, (30.0, 2.0, 2.0, 2.0, 2.0), strict=True):
            record["seconds"] = seconds

    page = run_page(rewritten(spend))
    assert embedded(page)["seconds"]["layout"]["yaxis"]["range"] == [0, 8]
    assert "the largest is 30 s" in text_of(page)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["x", {"skipped": False}, {"skipped": False, "widths": 3}, None, []])
def test_damaged_events_are_passed_over(rewritten: Any, damage: Any) -> None:
    page = run_page(rewritten(lambda records: records[1].update(shrunk=damage)))
    assert lines(embedded(page)["error"]) == [(3, "skipped"), (4, "gates fixed")]


def test_names_of_placements_are_escaped(rewritten: Any) -> None:
    def rename(records: list[Any]) -> None:
        event = records[1]["shrunk"]
        for key in ("widths", "removed"):
            event[key] = {"<img src=x>": 3}

    page = run_page(rewritten(rename))
    assert "<img" not in page.partition('<table class="events">')[2].partition("</table>")[0]
    assert "&lt;img src=x&gt; <b>6 → 3</b>" in page


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.slow
def test_figures_for_papers_have_the_lines_too(rewritten: Any, tmp_path: Path) -> None:
    folder = rewritten(lambda records: None)
    shutil.rmtree(folder.checkpoints)  # those of the network are another test's
    run_figures(folder, tmp_path / "figures")
    caption = (tmp_path / "figures" / "training.txt").read_text()
    assert caption.endswith("Dotted: shrunk after epoch 2, skipped after epoch 3, gates fixed after epoch 4.\n")


def test_a_record_without_seconds_leaves_a_gap() -> None:
    history = [{"epoch": 1, "seconds": 2.0}, {"epoch": 2, "seconds": None}, {"epoch": 4, "seconds": 3.0}]
    assert pace(history) == [(0, 1, 2.0), (2, 4, 1.5)]
    assert pace([{"epoch": 1}, {"epoch": 1, "seconds": math.nan}]) == []
