"""Runs that are killed, stopped or cut off, and go on: they must end where an uninterrupted run ends, bit for bit.

The oracle is an uninterrupted run in a folder of its own: all that is in the newest checkpoint of both is compared bit
by bit, and history and results without the seconds.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.checkpoint import CheckpointError
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.saver import identity
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from ellzero.out.compaction import compact
from ellzero.out.files import FileError
from ellzero.out.latency.cost import Latency
from support import processes
from support.runs import GATED, STEPS, WIDE, assert_same_end, images, time_by_weights, without_checksum

STACK = [
    GATED.override(name="one", epochs=2, finetune_epochs=1),
    GATED.override(name="two", epochs=2, finetune_epochs=1, seed=1, at_most=0.5),
]


@pytest.fixture(scope="module")
def uninterrupted(server: processes.Server, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = Folder.create(tmp_path_factory.mktemp("whole") / "run", [GATED])
    server.run("train", folder=str(folder.path))
    return folder


def copy_of(folder: Folder, where: Path, *, beginning: int) -> Folder:
    """A run that was left when it had just this checkpoint."""
    copy = Folder.create(where, folder.recipes)
    server_side = folder.path / "history.jsonl"
    (where / "history.jsonl").write_bytes(server_side.read_bytes())
    copy.checkpoints.mkdir()
    name = f"step-{beginning:09d}.safetensors"
    (copy.checkpoints / name).write_bytes((folder.checkpoints / name).read_bytes())
    return copy


# ---------------------------------------------------------------- SIGKILL


@pytest.mark.slow
def test_killed_ten_times_it_ends_where_an_uninterrupted_run_ends(
    server: processes.Server, uninterrupted: Folder, tmp_path: Path
) -> None:
    """At ten moments, six of them inside the write of a checkpoint."""
    draw = random.Random(7)
    inside: list[tuple[str, bool]] = [
        ("write", False), ("write", True), ("fsync", False), ("replace", False), ("replace", True), ("unlink", False),
    ]  # fmt: skip
    plan: list[tuple[str, bool] | None] = [*inside, *[None] * 4]
    draw.shuffle(plan)
    folder = Folder.create(tmp_path / "run", [GATED])
    reached, torn = [], 0
    for number, point in enumerate(plan):
        after = draw.randint(2, 4)  # 4 each time are more than the 35 steps but for those that are lost
        if point is not None:
            call, done = point
            job = server.start("train", folder=str(folder.path), die=(call, after, done))
        else:
            progress = tmp_path / f"progress-{number}"
            progress.touch()
            job = server.start("train", folder=str(folder.path), progress=str(progress))
            processes.until(lambda file=progress, size=after: file.stat().st_size >= size)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.04))
            job.kill()
        assert job.wait() == -signal.SIGKILL, job.said
        torn += any(path.name.startswith(".") for path in folder.checkpoints.iterdir())
        reached.append(checkpoint.steps(folder.checkpoints)[-1] if checkpoint.steps(folder.checkpoints) else 0)
        assert folder.results() is None
    assert torn >= 4  # a temporary file was left behind by those that died in the write
    assert reached == sorted(reached)
    assert reached[0] < STEPS < reached[-1] < 35
    assert len({step % STEPS for step in reached}) > 2  # at many places in an epoch
    server.run("train", folder=str(folder.path))
    assert_same_end(folder, uninterrupted)
    assert not [path for path in folder.checkpoints.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_run_is_what_it_is_however_often_it_is_saved(
    server: processes.Server, uninterrupted: Folder, tmp_path: Path
) -> None:
    folder = Folder.create(tmp_path / "run", [GATED])
    server.run("train", folder=str(folder.path), save_seconds=1000.0)
    assert len(checkpoint.steps(folder.checkpoints)) == 1
    assert_same_end(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [[WIDE], STACK], ids=["wide", "stack"])
def test_killed_in_the_middle_of_an_epoch_and_again_in_tuning(
    recipes: list[Recipe], server: processes.Server, tmp_path: Path
) -> None:
    """Dropout, batch norm, crops, momentum and milestones; and a stack of two."""
    whole, folder = (Folder.create(tmp_path / name, recipes) for name in ("whole", "run"))
    server.run("train", folder=str(whole.path))
    for save, reached in ((7, 6), (5, 10)):
        job = server.start("train", folder=str(folder.path), die=("fsync", save, True))
        assert job.wait() == -signal.SIGKILL, job.said
        assert checkpoint.steps(folder.checkpoints)[-1] == reached
    server.run("train", folder=str(folder.path))
    assert_same_end(folder, whole)


@pytest.mark.slow
def test_killed_when_all_is_done_but_the_results(
    server: processes.Server, uninterrupted: Folder, tmp_path: Path
) -> None:
    folder = copy_of(uninterrupted, tmp_path / "run", beginning=35)
    assert folder.results() is None
    server.run("train", folder=str(folder.path))
    assert_same_end(folder, uninterrupted)
    server.run("train", folder=str(folder.path))  # and nothing more happens to a run that is at its end
    assert_same_end(folder, uninterrupted)


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_it_after_the_step_and_saves(
    number: signal.Signals, server: processes.Server, uninterrupted: Folder, tmp_path: Path
) -> None:
    folder, progress = Folder.create(tmp_path / "run", [GATED]), tmp_path / "progress"
    progress.touch()
    job = server.start("train", folder=str(folder.path), save_seconds=1000.0, progress=str(progress), pause=0.05)
    processes.until(lambda: progress.stat().st_size >= 7)
    job.kill(number)
    assert job.wait() == 1
    done = progress.stat().st_size
    assert done < 35
    epoch, position = divmod(done, STEPS)
    where = (epoch - 1, STEPS) if position == 0 else (epoch, position)
    assert f"Stopped: stopped after epoch {where[0]}, step {where[1]}\n" in job.said
    assert "KeyboardInterrupt" not in job.said
    assert checkpoint.steps(folder.checkpoints) == [done]
    server.run("train", folder=str(folder.path), save_seconds=1000.0)
    assert_same_end(folder, uninterrupted)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(server: processes.Server, tmp_path: Path) -> None:
    folder, progress = Folder.create(tmp_path / "run", [GATED]), tmp_path / "progress"
    progress.touch()
    job = server.start("train", folder=str(folder.path), save_seconds=1000.0, progress=str(progress), pause=60.0)
    processes.until(lambda: progress.stat().st_size >= 1)  # it is in the pause
    job.kill(signal.SIGINT)
    time.sleep(0.3)  # two that are pending at once are one
    job.kill(signal.SIGINT)
    assert job.wait() == 1
    assert "KeyboardInterrupt" in job.said
    assert progress.stat().st_size == 1
    assert not checkpoint.steps(folder.checkpoints)


# ---------------------------------------------------------------- disks and damage, in this process


class Watch(AbstractWatcher):
    """Calls something at a step."""

    def __init__(self, at: int, call: Any) -> None:
        self.at, self.call, self.ended = at, call, False

    def begin(self, recipes: Any, done: int, total: int) -> None: ...

    def step(self, done: int) -> None:
        if done == self.at:
            self.call()

    def note(self, records: Any) -> None: ...

    def end(self) -> None:
        self.ended = True


SHORT = GATED.override(epochs=1, finetune_epochs=0)


def short(folder: Folder, watcher: Watch | None = None, data: Any = None) -> Trainer:
    watchers = [] if watcher is None else [watcher]
    images = processes.dataset("mnist5k") if data is None else data
    return training.train(folder.recipes, images, folder, watchers=watchers, save_seconds=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"cannot be written: the disk is full; a checkpoint needs 0\.4 MB; .* step 2 is still there$"),
        (errno.EROFS, r"cannot be written: Read-only file system; .* step 2 is still there$"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_fails_ends_the_run_in_words(
    code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = (Folder.create(tmp_path / name, [SHORT]) for name in ("whole", "run"))
    short(whole)

    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        watcher = Watch(3, lambda: patch.setattr(os, "write", fail))
        with pytest.raises(CheckpointError, match=message):
            short(folder, watcher)
    assert watcher.ended
    assert checkpoint.steps(folder.checkpoints) == [1, 2]
    assert len(list(folder.checkpoints.iterdir())) == 2
    short(folder)
    assert_same_end(folder, whole, unseeded=True)


def test_a_write_that_is_cut_off_by_the_system(tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    watcher = Watch(3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1])))
    try:
        with pytest.raises(CheckpointError, match=r"File too large; .*the checkpoint of step 2 is still there"):
            short(folder, watcher)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in sorted(folder.checkpoints.iterdir())] == [
        "step-000000001.safetensors",
        "step-000000002.safetensors",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    try:
        with pytest.raises(CheckpointError, match="Permission denied; the checkpoint of step 2 is still there"):
            short(folder, Watch(3, lambda: folder.checkpoints.chmod(0o500)))
    finally:
        folder.checkpoints.chmod(0o700)
    assert checkpoint.steps(folder.checkpoints) == [1, 2]


def test_a_history_that_cannot_be_written_ends_the_run_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    blocked = folder.path / "history.jsonl"

    with pytest.raises(FileError, match=r"history\.jsonl' cannot be written: Is a directory"):
        short(folder, Watch(2, blocked.mkdir))
    assert checkpoint.steps(folder.checkpoints)[-1] == STEPS


def truncate(path: Path, left: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(left * len(data))])


@pytest.mark.slow
def test_a_truncated_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    whole, folder = (Folder.create(tmp_path / name, [SHORT]) for name in ("whole", "run"))
    short(whole)

    def cut_off() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        short(folder, Watch(4, cut_off))
    assert checkpoint.steps(folder.checkpoints) == [2, 3]
    truncate(folder.checkpoints / "step-000000003.safetensors", 0.7)
    with pytest.warns(UserWarning, match=r"^step-000000003\.safetensors is damaged .* passed over for step-000000002"):
        short(folder)
    assert_same_end(folder, whole, unseeded=True)


@pytest.mark.slow
def test_where_no_checkpoint_can_be_read_nothing_is_begun_anew(tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    short(folder)
    history = folder.history()
    for path in folder.checkpoints.iterdir():
        truncate(path, 0.5)
    before = {path: path.read_bytes() for path in folder.checkpoints.iterdir()}
    with pytest.raises(CheckpointError, match=r"^no checkpoint in '.*' can be read: step-000000005\.safetensors is"):
        short(folder)
    assert {path: path.read_bytes() for path in folder.checkpoints.iterdir()} == before
    assert folder.history() == history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.002}, r"another recipe: `lr` is 0\.001 there and 0\.002 here"),
        ({"seed": 1}, r"another recipe: `seed` is 0 there"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    short(folder)
    before = {path.name: path.read_bytes() for path in folder.checkpoints.iterdir()}
    other = Folder(folder.path, [SHORT.override(**change)], {})
    with pytest.raises(CheckpointError, match=message):
        short(other)
    assert {path.name: path.read_bytes() for path in folder.checkpoints.iterdir()} == before
    assert len(folder.history()) == 2


@pytest.mark.slow
def test_other_data_another_number_of_processes_and_multipliers_that_move_otherwise_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    folder = Folder.create(tmp_path / "run", [SHORT])
    short(folder)
    few = processes.dataset("mnist5k")
    few = replace(few, train_x=few.train_x[:60], train_y=few.train_y[:60])
    with pytest.raises(CheckpointError, match=r"was trained with 100 images and goes on with as many, got 60$"):
        short(folder, data=few)
    found = checkpoint.load(folder.checkpoints)
    digest, plain = identity([SHORT])
    checkpoint.save(folder.checkpoints, {**found.state, "ranks": 2}, step=9, recipe_digest=digest, recipes=plain)
    with pytest.raises(CheckpointError, match=r"was trained with 2 processes and goes on with as many, got 1$"):
        short(folder)
    other = {"dual": "SelfPacedAscent(steps=4, gate_lr=0.1, start=0.5, counts=0.5)"}
    before = {key: value for key, value in found.state.items() if key != "dual"}
    for changed, why in (
        ({**found.state, **other}, r"SelfPacedAscent\(.*start=0.5.*"),
        (before, "the rules of an earlier"),
    ):
        checkpoint.save(folder.checkpoints, changed, step=9, recipe_digest=digest, recipes=plain)
        with pytest.raises(CheckpointError, match=rf"multipliers that move by {why}.*and here they go by NuPI"):
            short(folder)
    name, value = next(iter(found.state["values"].items()))
    own = name.removeprefix("network.")
    for values, why in (
        ({name: value.reshape(-1)[:1]}, rf"`{own}` has shape \(1,\) there, and shape "),  # it would fit everywhere
        ({}, f"`{own}` has no place there, and shape "),
    ):
        changed = {**found.state, "values": values}
        checkpoint.save(folder.checkpoints, changed, step=8, recipe_digest=digest, recipes=plain, keep=9)
        (folder.checkpoints / "step-000000009.safetensors").rename(tmp_path / "aside")
        with pytest.raises(CheckpointError, match=f"cannot be taken up here: .*{why}"):
            short(folder)
        (tmp_path / "aside").rename(folder.checkpoints / "step-000000009.safetensors")
    assert checkpoint.steps(folder.checkpoints)[-1] == 9
    assert training.restore(folder, few).epoch == 1  # looking is another matter


@pytest.mark.slow
def test_a_record_that_was_written_after_the_checkpoint_is_not_there_twice(
    server: processes.Server, uninterrupted: Folder, tmp_path: Path
) -> None:
    folder = Folder.create(tmp_path / "run", [GATED])
    job = server.start("train", folder=str(folder.path), die=("fsync", STEPS + 1, True))
    assert job.wait() == -signal.SIGKILL
    history = folder.path / "history.jsonl"
    records = [without_checksum(line) for line in history.read_text().splitlines()] + [{"epoch": 2, "error": 0.0}]
    history.write_text("".join(json.dumps(r) + "\n" for r in records) + '{"epoch": 3, "err')  # and one that was cut off
    assert [record["epoch"] for record in folder.history()] == [1, 2]
    server.run("train", folder=str(folder.path))
    assert [record["epoch"] for record in folder.history()] == [1, 2, 3, 4, 5, 6, 7]
    assert_same_end(folder, uninterrupted)


@pytest.mark.slow
def test_a_run_goes_on_with_the_times_that_it_began_with(tmp_path: Path) -> None:
    recipe = GATED.override(name="timed", cost="latency", at_most=0.6, batch=4, epochs=2, finetune_epochs=1)
    whole, folder = (Folder.create(tmp_path / name, [recipe]) for name in ("whole", "run"))
    data = images("mnist5k")
    with time_by_weights() as seconds:
        trainer = training.train([recipe], data, whole)
        with pytest.raises(training.Stopped):
            training.train([recipe], data, folder, watchers=[Watch(5, lambda: os.kill(os.getpid(), signal.SIGINT))])
        with pytest.MonkeyPatch.context() as patch:  # ends before the clock does, which would come back otherwise
            patch.setattr(Latency, "measure", None)  # nobody measures again
            training.train([recipe], data, folder)
        assert_same_end(folder, whole, unseeded=True)
        (result,) = whole.results() or ()
        dense = trainer.network(0).model
        taken = seconds(compact(trainer.network(0)), torch.zeros(1, 1, 28, 28)) / seconds(
            dense, torch.zeros(1, 1, 28, 28)
        )
    assert result["costs"]["latency"]["kept"] <= 0.6
    assert taken == pytest.approx(result["costs"]["latency"]["kept"], rel=0.02)
    assert training.restore(whole).costs["latency"].table == trainer.costs["latency"].table
