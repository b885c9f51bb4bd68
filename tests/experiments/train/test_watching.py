"""Watchers: the line that is shown for records made by hand, and event files read back by TensorBoard's own reader."""

import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ellzero.experiments.papers import get
from ellzero.experiments.train.watching import Bar, TensorBoard

DEMO = get("demo").override(epochs=3, finetune_epochs=1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def record(epoch: int, error: float = 2.5, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "run": "demo", "seed": 0, "seconds": 1.5, "loss": 0.25, "error": error, **more}


def gated(epoch: int, error: float, density: float, macs: float, *multiplier: float) -> dict[str, Any]:
    kept = {"l0_norm": density, "params": 0.9, "macs": macs}
    expected = {"l0_norm": 0.8, "params": 0.8, "macs": 0.8}
    more = {"tuning": False, "expected": expected, "kept": kept, "multiplier": list(multiplier), "open": {"fc1": 7}}
    return record(epoch, error, **more)


def plain(seconds: float = 10.0) -> tuple[Bar, Clock, io.StringIO]:
    out, clock = io.StringIO(), Clock()
    return Bar(Console(file=out, width=40), seconds, clock), clock, out


# ---- Bar, where nobody looks


def test_a_plain_line_says_it_all() -> None:
    """40 steps an epoch, 4 epochs, 20 s for the first: 60 s left. One line though the console is narrow."""
    bar, clock, out = plain()
    bar.begin([DEMO], 0, 160)
    for done in range(1, 41):
        clock.now += 0.5
        bar.step(done)
    bar.note([gated(1, 2.345, 0.3125, 0.2, 1.25)])
    bar.end()
    assert out.getvalue() == (
        "demo, seed 0: epoch 1/4, 1:00 left, error 2.35 %, density 31.2 %, MACs 20.0 %, multiplier 1.25\n"
    )


def test_time_left_counts_only_the_steps_of_this_process() -> None:
    """Resumed at 120 of 160: 20 steps in 3,000 s, so 20 more take 50 min."""
    bar, clock, out = plain()
    bar.begin([DEMO], 120, 160)
    clock.now += 3000
    bar.step(140)
    bar.note([record(3)])
    clock.now += 4000
    bar.step(160)
    bar.note([record(4, 2.0)])
    assert out.getvalue().splitlines() == [
        "demo, seed 0: epoch 4/4, 50:00 left, error 2.50 %",
        "demo, seed 0: epoch 4/4, 1:56:40 taken, error 2.00 %",
    ]


def test_plain_lines_are_some_seconds_apart_and_the_last_is_always_there() -> None:
    bar, clock, out = plain(seconds=10)
    bar.begin([DEMO.override(epochs=99)], 0, 100)
    for epoch in range(1, 101):
        clock.now += 1
        bar.step(epoch)
        bar.note([record(epoch)])
    shown = [int(line.split("epoch ")[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert shown == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"skipped": False}, "after epoch 2, shrunk from 60.0 % to 25.0 % of the dense MACs"),
        ({"skipped": True}, "after epoch 2, not shrunk from 60.0 % to 25.0 % of the dense MACs: too little to gain"),
        (
            {"skipped": False, "settled": True},
            "after epoch 2, settled and shrunk from 60.0 % to 25.0 % of the dense MACs",
        ),
    ],
)
def test_an_event_is_a_line_of_its_own(more: dict[str, Any], said: str) -> None:
    bar, _, out = plain()
    bar.begin([DEMO], 0, 4)
    bar.note([record(1)])
    bar.note([record(2, shrunk={"macs": {"before": 0.6, "after": 0.25}, **more})])  # too early for another plain line
    assert out.getvalue().splitlines()[1:] == [f"demo, seed 0: {said}"]


def test_a_stack_shows_means_and_the_range_of_its_multipliers() -> None:
    bar, _, out = plain()
    bar.begin([DEMO, DEMO.override(seed=1), DEMO.override(name="other")], 0, 160)
    bar.step(40)
    bar.note([gated(1, 1, 0.1, 0.3, 0.5, 2), gated(1, 2, 0.2, 0.3, 0.25, 1), gated(1, 6, 0.6, 0.6, 1, 1)])
    assert out.getvalue() == (
        "demo and 1 more, 3 runs: epoch 1/4, 0:00 left, mean error 3.00 %, density 30.0 %, MACs 40.0 %, "
        "multipliers 0.25 to 2\n"
    )


def test_a_dense_run_has_an_error_and_a_penalty_no_multiplier() -> None:
    bar, _, out = plain(seconds=0)
    dense = DEMO.override(placement=None, at_most=None, finalize=False, finetune_epochs=0, target_warmup=0)
    bar.begin([dense], 0, 120)
    bar.step(40)
    bar.note([record(1, 3.0)])
    penalty = DEMO.override(at_most=None, penalty=0.1, cost="l0_norm", finalize=False, target_warmup=0)
    bar.begin([penalty], 0, 160)
    bar.step(40)
    bar.note([gated(1, 3.0, 0.5, 0.5, 0.0)])
    assert out.getvalue().splitlines() == [
        "demo, seed 0: epoch 1/3, 0:00 left, error 3.00 %",
        "demo, seed 0: epoch 1/4, 0:00 left, error 3.00 %, density 50.0 %, MACs 50.0 %",
    ]


# ---- Bar, in a terminal


def test_in_a_terminal_it_is_one_line_that_moves() -> None:
    out, clock = io.StringIO(), Clock()
    bar = Bar(Console(file=out, width=140, force_terminal=True, color_system=None), clock=clock)
    bar.begin([DEMO], 0, 160)
    for done in range(1, 81):
        clock.now += 0.5
        bar.step(done)
        if done == 40:
            bar.note([gated(1, 2.345, 0.3125, 0.2, 1.25)])
    bar.end()
    bar.end()  # may come twice
    last = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", out.getvalue()).replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("demo, seed 0 ")
    assert last.endswith("epoch 2/4, 0:40 left, error 2.35 %, density 31.2 %, MACs 20.0 %, multiplier 1.25")
    drawn = last.count("━")
    assert drawn > 20  # a bar, of a line that fits
    assert len(last) <= 140


def test_steps_that_take_no_time_are_not_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), Clock()
    bar = Bar(Console(file=out, width=140, force_terminal=True), clock=clock)
    bar.begin([DEMO], 0, 10_000)
    updates: list[int] = []
    assert bar._progress is not None
    monkeypatch.setattr(bar._progress, "update", lambda task, completed, text: updates.append(completed))
    for done in range(1, 10_001):
        clock.now += 0.001
        bar.step(done)
    bar.end()
    assert 90 <= len(updates) <= 100


def test_an_end_without_a_beginning_is_fine() -> None:
    Bar().end()


def test_it_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar()
    bar.begin([DEMO], 0, 160)
    bar.step(40)
    bar.note([record(1)])
    bar.end()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"demo, seed 0: epoch 1/4, \d+:\d\d left, error 2.50 %\n", err)


# ---- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself would show."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.fixture
def board(tmp_path: Path) -> TensorBoard:
    pytest.importorskip("tensorboard")
    return TensorBoard(tmp_path / "board")


def test_every_number_of_a_record_is_a_scalar(board: TensorBoard, tmp_path: Path) -> None:
    board.begin([DEMO], 0, 160)
    board.step(1)
    board.note([gated(1, 2.5, 0.5, 0.25, 0.125, 3.0)])
    board.note([gated(2, 1.5, 0.5, 0.25, 0.25, 4.0) | {"loss": None}])
    board.end()
    seen = scalars(tmp_path / "board")
    assert set(seen) == {
        *("seconds", "loss", "error", "multiplier/0", "multiplier/1", "open/fc1"),
        *(f"{kind}/{cost}" for kind in ("expected", "kept") for cost in ("l0_norm", "params", "macs")),
    }
    assert seen["error"] == [(1, 2.5), (2, 1.5)]
    assert seen["loss"] == [(1, 0.25)]
    assert seen["kept/macs"] == [(1, 0.25), (2, 0.25)]
    assert seen["multiplier/1"] == [(1, 3.0), (2, 4.0)]


def test_after_a_resume_what_came_later_is_gone(board: TensorBoard, tmp_path: Path) -> None:
    """Three epochs, killed in the third; resumed from the middle of it, step 100 of 160."""
    board.begin([DEMO], 0, 160)
    for epoch in (1, 2, 3):
        board.note([record(epoch, 10.0 * epoch)])
    board.end()
    again = TensorBoard(tmp_path / "board")
    again.begin([DEMO], 100, 160)
    again.note([record(3, 35.0)])
    again.note([record(4, 40.0)])
    again.end()
    assert scalars(tmp_path / "board")["error"] == [(1, 10.0), (2, 20.0), (3, 35.0), (4, 40.0)]


def test_runs_of_a_stack_have_a_folder_each(board: TensorBoard, tmp_path: Path) -> None:
    board.begin([DEMO, DEMO.override(seed=3)], 0, 160)
    board.note([record(1, 1.0), record(1, math.nan)])
    board.end()
    assert sorted(p.name for p in (tmp_path / "board").iterdir()) == ["0-demo-seed0", "1-demo-seed3"]
    assert scalars(tmp_path / "board" / "0-demo-seed0")["error"] == [(1, 1.0)]
    assert math.isnan(scalars(tmp_path / "board" / "1-demo-seed3")["error"][0][1])


def test_without_tensorboard_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"`tensorboard` must be installed .* pip install 'ellzero\[tensorboard\]'"):
        TensorBoard(tmp_path)
