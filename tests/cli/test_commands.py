"""The commands about runs: what they leave on the disk and print, against the library called by hand; and mistakes."""

import errno
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ellzero
from ellzero.cli import COMMANDS, main, opening
from ellzero.cli.console import CommandError
from ellzero.cli.training import _worthless
from ellzero.experiments import data
from ellzero.experiments import networks as zoo
from ellzero.experiments.data import KNOWN, scaled, stand_in
from ellzero.experiments.papers import RECIPES, get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, saver
from ellzero.experiments.train import loop as training
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.stepping.step import Step
from ellzero.experiments.train.trainer import Trainer
from ellzero.experiments.train.watching import Bar
from ellzero.gated.module import Gated
from ellzero.out import reporting
from ellzero.out.files import FileError

# A constraint that is met within four epochs of eight steps.
SMALL = get("demo").override(
    name="small", network="lenet300", cost="params", at_most=0.3, batch=500, epochs=3, finetune_epochs=1, lr=3e-3
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    return


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        try:
            code = main(args)
        except SystemExit as left:  # how the parser leaves
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, by the command line; nobody writes to it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    toml = folder.parent / "small.toml"
    toml.write_text(SMALL.to_toml())
    assert main(["train", str(toml), "--out", str(folder), "--quiet", "--json"]) == 0
    return folder


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that trains and does not look at the page, which takes as long as the training."""
    monkeypatch.setattr("ellzero.page.can_make", lambda: False)


@pytest.fixture(scope="module")
def by_hand() -> Trainer:
    """The same without the command line."""
    return training.train([SMALL], data.load("mnist5k"))


@pytest.fixture(scope="module")
def network(by_hand: Trainer) -> Gated:
    gated = by_hand.network(0)
    assert isinstance(gated, Gated)
    return gated


@pytest.fixture(scope="module")
def small(network: Gated) -> torch.nn.Module:
    return ellzero.compact(network).eval()


def test_images() -> Tensor:
    """Of the test set, as `SMALL` scales them."""
    mnist = data.load("mnist5k")
    return scaled(mnist.test_x, mnist.mean, mnist.std)


test_images.__test__ = False  # type: ignore[attr-defined]


def percent_wrong(logits: Tensor) -> float:
    return 100 * int((logits.argmax(1) != data.load("mnist5k").test_y).sum()) / 1000


def wrong(network: torch.nn.Module) -> float:
    with torch.no_grad():
        return percent_wrong(network(test_images()))


def stored(path: Path) -> dict[str, bytes]:
    """The tensors of a file, to the byte; the order of words in its header is not the same twice."""
    return {name: value.numpy().tobytes() for name, value in load_file(path).items()}


def failed(answer: tuple[int, str, str], code: int, message: str) -> None:
    """One line on standard error, nothing on standard output."""
    assert answer[:2] == (code, "")
    assert answer[2].count("\n") == 1, answer[2]
    assert re.match(f"ellzero: error: .*{message}", answer[2]), answer[2]


# ---------------------------------------------------------------- train


@pytest.mark.slow
def test_a_run_by_the_command_line_is_the_run_by_hand(
    home: Path, by_hand: Trainer, small: torch.nn.Module, tmp_path: Path
) -> None:
    files = ["compact.safetensors", "history.jsonl", "latency.json", "page.html", "results.json", "run.json"]
    assert sorted(p.name for p in home.iterdir()) == ["checkpoints", *files]
    folder = Folder.open(home)
    assert folder.recipes == [SMALL]
    assert folder.about["device"].startswith("CPU")
    assert folder.about["torch"] == torch.__version__

    def timeless(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in values.items() if k != "seconds"}

    assert [timeless(r) for r in folder.history()] == [timeless(r) for r in by_hand.history]
    results = folder.results()
    assert results is not None
    assert timeless(results[0]) == timeless(evaluation.results(by_hand)[0])
    ellzero.save(small, tmp_path / "mine.safetensors")
    assert stored(home / "compact.safetensors") == stored(tmp_path / "mine.safetensors")


@pytest.mark.slow
def test_what_is_printed_in_the_end(home: Path, run: Run, small: torch.nn.Module, network: Gated) -> None:
    """Of a run that is finished, nothing is trained again; the printed Python runs, and gets the printed error."""
    code, out, _ = run("train", "--resume", str(home))
    assert code == 0
    assert out.startswith(str(ellzero.report(network)))
    parameters = sum(p.numel() for p in small.parameters())
    assert parameters <= 0.3 * 266_610
    assert f"Test error of the compact network: {wrong(small):.2f} % ({parameters:,} parameters)." in out
    lines = out.rpartition("In Python:\n")[2].splitlines()
    known = {"images": data.load("mnist5k").test_x}
    exec("\n".join(line.strip() for line in lines), known)
    assert percent_wrong(known["logits"]) == wrong(small)


@pytest.mark.slow
def test_json_of_a_run(home: Path, run: Run, small: torch.nn.Module) -> None:
    code, out, err = run("train", "--resume", str(home), "--json", "--quiet")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert content["run"] == str(home)
    assert content["result"] == (Folder.open(home).results() or [None])[0]
    assert content["compact"] == {
        "file": str(home / "compact.safetensors"),
        "error": wrong(small),
        "parameters": sum(p.numel() for p in small.parameters()),
    }
    assert content["warning"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_fields_go_into_the_recipe_and_the_folder_has_its_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SMALL.to_toml())
    options = ["--seed", "3", "--at-most", '{"fc1" = 0.5, "fc2" = 0.5}', "--gate_lr", "2e-2", "--dual", "nupi"]
    code, _, err = run("train", "mine.toml", *options, "--nu", "-0.5", "--name", "mine", "--epochs", "1")
    assert code == 0
    first, *_, last = err.splitlines()
    told = "ellzero: after `--epochs`, with gates that learn, comes fine-tuning, {} (`--finetune-epochs`)"
    assert first == told.format("1 epoch")
    assert re.fullmatch(r"mine, seed 3: epoch 2/2, \d+:\d\d taken, error .* %, multipliers? .*", last), last
    assert Folder.open(tmp_path / "runs" / "mine-seed3").recipes == [
        SMALL.override(
            epochs=1,
            seed=3,
            at_most={"fc1": 0.5, "fc2": 0.5},
            gate_lr=2e-2,
            dual="nupi",
            nu=-0.5,
            name="mine",
        )
    ]


def test_every_field_of_a_recipe_is_an_option_with_its_help(run: Run) -> None:
    assert [f.name for f in fields(opening.Fields)] == [f.name for f in fields(Recipe)]
    _, out, _ = run("train", "--help")
    flat = re.sub(r"[│\s]+", " ", out)
    for f in fields(Recipe):
        assert f" --{f.name.replace('_', '-')} VALUE " in flat
    assert "--dropout VALUE rate on the hidden layer of every block of a WRN; of a GPT on" in flat
    assert 'which is eq. 17 of Louizos et al. for gated weights; "weight decay" of SGD.' in flat  # over two lines


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("when", [1, 11, 31])
def test_ctrl_c_saves_and_the_resumed_run_is_the_uninterrupted_one(
    when: int, run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps an epoch: in the first, in the second, in tuning."""
    (tmp_path / "small.toml").write_text(SMALL.to_toml())
    step = Bar.step

    def interrupting(self: Bar, done: int) -> None:
        step(self, done)
        if done == when:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "step", interrupting)
        code, out, err = run("train", "small.toml", "--out", "my run")
    assert (code, out) == (130, "")
    epoch, position = divmod(when, 8)
    assert err.splitlines()[-1] == (
        f"ellzero: stopped after epoch {epoch}, step {position}: saved; resume with: ellzero train --resume 'my run'"
    )
    assert not (tmp_path / "my run" / "compact.safetensors").exists()
    code, _, err = run("train", "--resume", "my run")
    assert code == 0
    again = Folder.open(tmp_path / "my run")
    assert [r["epoch"] for r in again.history()] == [r["epoch"] for r in Folder.open(home).history()]
    assert stored(again.path / "compact.safetensors") == stored(home / "compact.safetensors")


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_and_says_what_there_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.to_toml())

    def impatient(self: Bar, done: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "step", impatient)
    answer = run("train", "small.toml", "--out", "a", "--save-seconds", "0")
    assert answer == (
        130,
        "",
        "ellzero: interrupted; the newest checkpoint is of step 4; resume with: ellzero train --resume a\n",
    )
    assert run("train", "small.toml", "--out", "b") == (130, "", "ellzero: interrupted\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "small.toml"]  # there was nothing to go on with


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_resumed_run_keeps_what_it_was_begun_with(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--every`, `--data-dir` and `--tensorboard` need not be said again."""
    pytest.importorskip("tensorboard")
    (tmp_path / "data").mkdir()
    (tmp_path / "small.toml").write_text(SMALL.override(finetune_epochs=0).to_toml())
    asked = []
    load = data.load
    monkeypatch.setattr(
        data, "load", lambda name, where, device, workers: asked.append(where) or load(name, None, device)
    )
    step = Bar.step

    def interrupting(self: Bar, done: int) -> None:
        step(self, done)
        if done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "step", interrupting)
        options = ["--every", "2", "--data-dir", "data", "--tensorboard"]
        assert run("train", "small.toml", "--out", "here", *options)[0] == 130
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert run("train", "--resume", "../here")[0] == 0
    assert asked == ["data", str((tmp_path / "data").resolve())]
    assert [r["epoch"] for r in Folder.open(tmp_path / "here").history()][:2] == [2, 3]
    assert len(list((tmp_path / "here" / "tensorboard").iterdir())) == 2  # one of each process


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_dense_recipe_ends_with_the_plain_network(run: Run, tmp_path: Path) -> None:
    options = ["--placement", "none", "--at-most", "none", "--finalize", "false", "--finetune-epochs", "0"]
    (tmp_path / "small.toml").write_text(SMALL.override(epochs=1, target_warmup=0).to_toml())
    code, out, _ = run("train", "small.toml", *options, "--out", "dense")
    assert code == 0
    assert out.splitlines()[1].startswith("Test error of the dense network: ")
    assert "(266,610 parameters)" in out
    loaded = ellzero.load(zoo.LeNet300(10), tmp_path / "dense" / "compact.safetensors")
    newest = checkpoint.load(tmp_path / "dense" / "checkpoints").state["values"]
    assert {n.removeprefix("network."): v.shape for n, v in newest.items()} == {
        n: p.shape for n, p in loaded.named_parameters()
    }
    for name, value in loaded.named_parameters():
        assert torch.equal(value, newest[f"network.{name}"]), name
    failed(run("report", "dense", "--json"), 2, "'dense' trained the dense network, without gates")
    code, out, _ = run("evaluate", "dense", "--json")
    assert code == 0
    found = json.loads(out)["networks"][0]
    assert found["error"] == found["error_compact"] == wrong(loaded.eval())
    assert "kept" not in found


# ---- mistakes


def test_a_folder_that_holds_a_run_says_how_to_go_on(run: Run, home: Path) -> None:
    message = "holds a run already: ellzero train --resume .* continues it, another `--out` begins a new one"
    failed(run("train", "demo", "--out", str(home)), 2, message)


MISTAKES = {
    "`RECIPE` must be given, such as `ellzero train demo`": ("train",),
    "`dmo` is not the name of a recipe; did you mean `demo`": ("train", "dmo"),
    "there is no recipe 'no.toml': no such file": ("train", "no.toml"),
    "broken.toml: ": ("train", "broken.toml"),
    "wrong.toml: `epoch` is not a field of a recipe; did you mean `epochs`": ("train", "wrong.toml"),
    "`at_most` must be a fraction of the dense cost in": ("train", "demo", "--at-most", "3"),
    "`epochs` must be an integer of at least 1, got 'many'": ("train", "demo", "--epochs", "many"),
    "`at_most` and `penalty` exclude each other": ("train", "demo", "--penalty", "0.1"),
    "`at_most` or `penalty` must be given, got neither": ("train", "louizos-mlp", "--penalty", "None"),
    "`restarts` changes nothing but with `dual` .ascent.": ("train", "demo", "--restarts", "false"),
    "has no pattern for `conv1`, got 'nope'": ("train", "demo", "--drop-rates", '{"nope" = 0.5}'),
    "`batch` must be at most the 4000 training images, got 5000": ("train", "demo", "--batch", "5000"),
    "`--every` must be at least 1, got 0": ("train", "demo", "--every", "0"),
    "`--save-seconds` must be at least 0, got nan": ("train", "demo", "--save-seconds", "nan"),
    "`--data-dir` must be a folder that exists, got 'nowhere'": ("train", "demo", "--data-dir", "nowhere"),
    "`--out` must be a folder, got the file 'broken.toml'": ("train", "demo", "--out", "broken.toml"),
    "`--out` is for a new run": ("train", "--resume", "nowhere", "--out", "there"),
    "'nowhere' is no folder; `ellzero train` makes one": ("train", "--resume", "nowhere"),
    "'empty' is no folder of a run: there is no `run.json` in it": ("evaluate", "empty"),
    "'broken.toml' is no folder; ": ("compact", "broken.toml"),
    "`--json` and `--markdown` exclude each other": ("report", "empty", "--json", "--markdown"),
    "`--json` and `--toml` exclude each other": ("recipes", "--json", "--toml"),
    "`gallego` is not the name of a recipe": ("recipes", "gallego"),
    "`--print-completion` must be followed by bash, zsh, fish, got ..tcsh": ("--print-completion", "tcsh"),
}


@pytest.mark.slow
@pytest.mark.parametrize("message", MISTAKES)
def test_bad_usage_is_one_line_and_code_2_and_leaves_nothing(message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text('name = "x')
    (tmp_path / "wrong.toml").write_text('base = "demo"\nepoch = 3\n')
    (tmp_path / "empty").mkdir()
    failed(run(*MISTAKES[message]), 2, message)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "runs") == ["broken.toml", "empty", "wrong.toml"]
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("words", [("sweep", "demo", "--at-most", "0.1,0.2"), ("reproduce", "louizos2018-table1")])
def test_commands_that_train_in_one_process_refuse_several(
    words: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as `torchrun --nproc-per-node 2` does
    failed(run(*words), 2, f"`{words[0]}` trains in one process, .*: start it without torchrun")
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_is_refused_with_the_nearest(run: Run) -> None:
    code, out, err = run("train", "demo", "--epoch", "3")
    assert (code, out) == (2, "")
    flat = re.sub(r"[│\s]+", " ", err)
    assert "Unrecognized options: --epoch" in flat
    assert "Perhaps you meant: --epochs VALUE" in flat


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_another_recipe_beside_resume_is_refused(run: Run, home: Path) -> None:
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    message = "is a run of another recipe: `lr` is 0.003 there and 0.5 here. `--resume` alone goes on"
    failed(run("train", "--resume", str(home), "--lr", "0.5"), 2, message)
    message = "`network` is lenet300 there and lenet5 here; "
    failed(run("train", "demo", "--resume", str(home)), 2, message)
    assert {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} == before
    code, _, _ = run("train", str(home.parent / "small.toml"), "--resume", str(home), "--lr", "3e-3")  # as it is
    assert code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(run: Run, home: Path, tmp_path: Path) -> None:
    failed(run("train", "demo", "--device", "cuda"), 1, "`--device cuda` needs a GPU")
    text = (home / "run.json").read_text()
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "run.json").write_text(re.sub(r'"device": "[^"]*"', '"device": "NVIDIA H200"', text))
    failed(run("train", "--resume", "gpu"), 1, "begun on NVIDIA H200, and there is no GPU here; `--device cpu` uses")


def test_missing_data_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise data.DataError("file.gz is not in data, and no mirror gave it:\n  a: b\nPut it there by hand")

    monkeypatch.setattr(data, "load", missing)
    message = "file.gz is not in data, and no mirror gave it: a: b Put it there by hand"
    failed(run("train", "gallego-mlp"), 1, message)
    assert list(tmp_path.iterdir()) == []


def test_a_diverged_run_is_one_line_and_code_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.to_toml())
    failed(run("train", "small.toml", "--lr", "1e30", "--quiet"), 1, "the loss of `small`, seed 0, is nan after epoch")


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.to_toml())
    step = Step.__call__
    calls: list[int] = []

    def broken(self: Step, *args: Any, **rest: Any) -> Tensor:
        calls.append(1)
        loss = step(self, *args, **rest)
        if len(calls) > 10:
            next(iter(self.runs.values().values())).data.fill_(math.nan)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", broken)
        answer = run("train", "small.toml", "--out", "here", "--quiet", "--save-seconds", "0")
    failed(answer, 1, "a loss or weight of `small`, seed 0, is not finite at epoch 1, step 3: try a smaller `lr`")
    assert checkpoint.steps(tmp_path / "here" / "checkpoints") == [9, 10]
    assert run("evaluate", "here", "--json")[0] == 0
    # A checkpoint of before, which holds what is not finite.
    with monkeypatch.context() as patch:
        patch.setattr(saver, "refuse_diverged", lambda *_: None)
        trainer = opening.restored(Folder.open("here"), data.load("mnist5k"))
        next(iter(trainer.runs.values().values())).data.fill_(math.nan)
        trainer.position += 1
        saver.save(trainer, Folder.open("here"))
    for command in ("evaluate", "compact", "report"):
        code, _, err = run(command, "here")
        assert "is not finite" in err
        assert (code, err.count("\n")) in ((1, 1), (0, 1))


def test_a_disk_that_is_full_at_the_first_checkpoint_leaves_nothing_in_the_way(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.to_toml())
    command = ("train", "small.toml", "--out", "here", "--quiet", "--save-seconds", "0")
    write = checkpoint.write_bytes

    def full(*_: Any) -> None:
        raise FileError("the disk is full")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_bytes", full)
            failed(run(*command), 1, "the disk is full; a checkpoint needs .* there is no older one")
        assert checkpoint.write_bytes is write
        assert not (tmp_path / "here").exists()


def test_a_folder_that_is_removed_or_moved_while_it_trains_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.override(epochs=1, finetune_epochs=0).to_toml())
    step = Step.__call__

    def moved(self: Step, *args: Any, **rest: Any) -> Tensor:
        with suppress(FileNotFoundError):  # once it is gone it is gone
            (tmp_path / "here").rename(tmp_path / "there")
        return step(self, *args, **rest)

    monkeypatch.setattr(Step, "__call__", moved)
    answer = run("train", "small.toml", "--out", "here", "--quiet", "--save-seconds", "0")
    failed(answer, 1, "'here.*' cannot be written: No such file")
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("left", [None, b"\0garbage\n", 2])
def test_a_good_checkpoint_goes_on_without_its_history(
    left: bytes | int | None, run: Run, home: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(home, tmp_path / "copy")
    history = copy / "history.jsonl"
    lines = history.read_bytes().splitlines(keepends=True)
    (copy / "results.json").unlink()
    if left is None:
        history.unlink()
    else:
        history.write_bytes(left * 3 if isinstance(left, bytes) else b"".join([*lines[:left], b"?\n", *lines[left:]]))
    kept = left if isinstance(left, int) else 0
    code, _, err = run("train", "--resume", "copy", "--quiet", "--json")
    assert code == 0, err
    assert f"is damaged: {len(lines) - kept} of {len(lines)} records are lost" in err
    assert stored(copy / "compact.safetensors") == stored(home / "compact.safetensors")
    assert len(Folder.open(copy).history()) == max(kept, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.filterwarnings("default")
def test_another_number_of_threads_is_told(run: Run, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "copy")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        _, _, err = run("train", "--resume", "copy", "--quiet", "--json")
    finally:
        torch.set_num_threads(before)
    assert f"was trained with {before} threads and goes on with {before + 1}: " in err
    assert f"OMP_NUM_THREADS={before} gives" in err


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_training_that_stays_finite_and_has_not_worked_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.override(epochs=1).to_toml())
    code, out, err = run("train", "small.toml", "--lr", "1e6", "--quiet", "--json")
    content = json.loads(out)
    assert code == 0
    assert err == f"ellzero: warning: {content['warning']}\n"
    loss = Folder.open("runs/small-seed0").history()[-1]["loss"]
    assert loss > 1000
    error = content["compact"]["error"]
    why = rf"the test error, {error:.2f} %, is not below 8|the last training loss, {loss:.3g}, is above 2\.3, "
    assert re.search(why.replace("+", r"\+"), err)


def test_an_error_of_guessing_is_said_to_be_one(home: Path) -> None:
    most = max(np.bincount(data.load("mnist5k").test_y.numpy()))
    guessing = 100 - most / 10  # of a thousand images
    for above in (0.0, 1.0):
        message = _worthless(Folder.open(home), guessing + above, data.load("mnist5k"))
        assert message is not None
        assert f"{guessing + above:.2f} %, is not below {guessing:.2f} %, that of always answering one class" in message
    assert _worthless(Folder.open(home), guessing - 0.1, data.load("mnist5k")) is None
    message = _worthless(Folder.open(home), 100.0, data.load("sonnets"))  # which has an answer for each place
    assert message is not None
    assert "is not below" in message


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.filterwarnings("default")
def test_a_damaged_checkpoint_that_is_passed_over_is_a_plain_line(run: Run, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "copy")
    whole = sorted((tmp_path / "copy" / "checkpoints").iterdir())[-1]
    later = whole.with_name(whole.name.replace("step-00", "step-99"))
    later.write_bytes(whole.read_bytes()[:-100])
    for words in (("evaluate", "copy", "--json"), ("train", "--resume", "copy", "--quiet", "--json")):
        code, out, err = run(*words)
        assert code == 0
        json.loads(out)
        assert re.fullmatch(rf"ellzero: warning: {later.name} is damaged .*passed over for {whole.name}.*\n", err), err


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_full_disk_leaves_a_run_that_resumes(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.to_toml())
    log, calls = Folder.log, []

    def full(self: Folder, records: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
                log(self, records)
        log(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "log", full)
        answer = run("train", "small.toml", "--out", "here", "--quiet", "--save-seconds", "0")
    failed(answer, 1, r"'here/history.jsonl' cannot be written: the disk is full")
    code, _, _ = run("train", "--resume", "here", "--quiet")
    assert code == 0
    assert stored(tmp_path / "here" / "compact.safetensors") == stored(home / "compact.safetensors")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_one_line(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        failed(run("train", "demo"), 1, "cannot be written: Permission denied")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_tensorboard_that_is_missing_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    failed(run("train", "demo", "--tensorboard"), 1, r"`tensorboard` must be installed .*ellzero\[tensorboard\]")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_elsewhere_is_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "load", interrupted)
    assert run("train", "demo") == (130, "", "ellzero: interrupted\n")


@pytest.mark.parametrize("started", ["module", "script", "library"])
def test_an_interrupt_while_torch_is_imported(started: str, tmp_path: Path) -> None:
    """A torch that interrupts whoever imports it stands for the key that is pressed meanwhile."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "ellzero").write_text("from ellzero.cli import main\nraise SystemExit(main())\n")
    ways = {
        "module": ["-m", "ellzero", "recipes"],
        "script": [str(tmp_path / "ellzero")],
        "library": ["-c", "import ellzero"],
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(ellzero.__file__).parents[1])])}
    done = subprocess.run([sys.executable, *ways[started]], env=environment, capture_output=True, text=True)
    if started == "library":  # whoever imports it decides
        assert done.returncode == -signal.SIGINT
        assert done.stderr.endswith("KeyboardInterrupt\n")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "ellzero: interrupted\n")


def test_a_run_without_a_checkpoint_and_a_damaged_one_are_one_line(run: Run, home: Path, tmp_path: Path) -> None:
    Folder.create(tmp_path / "new", [SMALL], {})
    for command in ("evaluate", "compact", "report"):
        failed(run(command, "new"), 1, "'new' has no checkpoint yet; `ellzero train --resume new` goes on")
    (tmp_path / "new" / "results.json").write_text("[{}]")
    failed(run("evaluate", "new"), 1, "the run in 'new' has ended, and its checkpoints are gone: train it again")
    (tmp_path / "new" / "results.json").unlink()
    (tmp_path / "new" / "checkpoints").mkdir()
    newest = sorted((home / "checkpoints").iterdir())[-1]
    (tmp_path / "new" / "checkpoints" / newest.name).write_bytes(newest.read_bytes()[:-100])
    failed(run("report", "new"), 1, "no checkpoint in 'new/checkpoints' can be read: .* is damaged")
    (tmp_path / "new" / "run.json").write_text("{")
    failed(run("report", "new"), 1, "'new/run.json' is damaged")


# ---------------------------------------------------------------- evaluate


def test_evaluate_is_what_the_networks_do(run: Run, home: Path, network: Gated, small: torch.nn.Module) -> None:
    code, out, err = run("evaluate", str(home), "--json")
    assert (code, err) == (0, "")
    content = json.loads(out)
    found = content["networks"][0]
    assert content["finished"] is True
    assert found["error"] == wrong(network)
    assert found["error_compact"] == wrong(small)
    assert found["parameters"] == sum(p.numel() for p in small.parameters())
    assert found["kept"]["params"] == pytest.approx(found["parameters"] / 266_610)
    assert found["expected"]["macs"] == pytest.approx(float(ellzero.macs(network).detach()) / 266_200)
    code, out, _ = run("evaluate", str(home))
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("small"))
    kept = [f"{100 * found['kept'][c]:.2f}" for c in ("l0_norm", "params", "macs")]
    assert [cell for cell in row if cell != "%"] == ["small", "0", *[f"{found['error']:.2f}"] * 2, *kept]
    assert "After 4 epochs (finished), on 1,000 test examples of mnist5k." in out


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_an_unfinished_run_can_be_looked_at(run: Run, tmp_path: Path) -> None:
    """A trainer that stands after one of three epochs."""
    folder = Folder.create(tmp_path / "half", [SMALL], {})
    trainer = Trainer([SMALL], data.load("mnist5k"))
    for _ in train_epoch(trainer):
        pass
    saver.save(trainer, folder)
    code, out, _ = run("evaluate", "half", "--json")
    assert code == 0
    content = json.loads(out)
    assert (content["finished"], content["networks"][0]["epoch"]) == (False, 1)
    assert content["networks"][0]["error"] == pytest.approx(float(evaluation.evaluate(trainer)["error"]))
    assert run("report", "half")[0] == run("compact", "half")[0] == 0
    assert (folder.history(), folder.results()) == ([], None)


@pytest.mark.filterwarnings("ignore:no gate has moved")  # nobody has trained it
def test_gates_without_an_expected_cost_can_be_evaluated(run: Run, tmp_path: Path) -> None:
    """They are never closed while they are drawn: what is expected is the dense network."""
    recipe = get("sbp-mlp").override(data="mnist5k")
    folder = Folder.create(tmp_path / "noisy", [recipe], {})
    trainer = Trainer([recipe], data.load("mnist5k"))
    saver.save(trainer, folder)
    code, out, _ = run("evaluate", "noisy", "--json")
    assert code == 0
    (found,) = json.loads(out)["networks"]
    assert found["expected"] == {"l0_norm": 1.0, "params": 1.0, "macs": 1.0}
    assert found["kept"]["params"] == pytest.approx(found["parameters"] / 266_610)


# ---------------------------------------------------------------- compact


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the data are not needed")

    monkeypatch.setattr(data, "load", refuse)


@pytest.mark.usefixtures("no_data")
def test_compact_writes_the_network_that_training_wrote(run: Run, home: Path, tmp_path: Path) -> None:
    code, out, err = run("compact", str(home), "--to", "small.safetensors")
    assert (code, err) == (0, "")
    assert stored(Path("small.safetensors")) == stored(home / "compact.safetensors")
    assert "small.safetensors (0." in out
    assert 'ellzero.load(networks.find("lenet300").make(10), "small.safetensors")' in out
    tensors = load_file("small.safetensors")
    count = sum(t.numel() for name, t in tensors.items() if "select" not in name)
    assert f"small, seed 0: {count:,} of 266,610 parameters ({count / 266_610:.2%})." in out


@pytest.mark.slow
def test_compact_to_pt2_and_onnx(run: Run, home: Path, small: torch.nn.Module, tmp_path: Path) -> None:
    """Each file by its own runtime, on real images, in batches of other sizes."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    code, out, err = run("compact", str(home), "--to", "a.pt2", "b.onnx")
    assert (code, err) == (0, "")
    assert "a.pt2 (0." in out
    assert "loaded by torch.export, same outputs" in out
    assert "run by onnxruntime, same outputs" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt2", "b.onnx"]
    program = torch.export.load("a.pt2").module()
    session = onnxruntime.InferenceSession("b.onnx", providers=["CPUExecutionProvider"])
    for images in test_images().split([1, 7, 992]):
        with torch.no_grad():
            expected = small(images)
            torch.testing.assert_close(program(images), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(session.run(None, {"input": images.numpy()})[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_written(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pt2").write_text("before")
    other = torch.export.export(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)),
        (torch.zeros(3, 1, 28, 28),),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    monkeypatch.setattr(torch.export, "load", lambda path: other)
    code, _, err = run("compact", str(home), "--to", "a.pt2")
    assert code == 1
    assert re.match(r"ellzero: error: a.pt2 was not written: with a batch of 1 its outputs differ from .* by ", err)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.pt2", "before")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.txt"], "`--to` must be a file that ends in .safetensors, .pt2, .onnx, got 'a.txt'"),
        (["a.pt2", "b"], "`--to` must be a file that ends in .* got 'b'"),
        (["nowhere/a.pt2"], "`--to` must lie in a folder that exists, got 'nowhere/a.pt2'"),
        (["folder.pt2"], "`--to` must be a file, got the folder 'folder.pt2'"),
        ([], "`--to` must be followed by at least one file, such as `--to small.onnx`, got none"),
    ],
)
def test_files_that_cannot_be_are_refused_before_any_work(
    files: list[str], message: str, run: Run, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder.pt2").mkdir()
    before = (home / "compact.safetensors").stat().st_mtime_ns
    failed(run("compact", str(home), "--to", *files), 2, message)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.pt2"]
    assert (home / "compact.safetensors").stat().st_mtime_ns == before


def test_onnx_that_is_not_installed_is_one_line(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = run("compact", str(home), "--to", "a.onnx")
    assert code == 1
    assert re.search(r"writing ONNX needs packages that are not installed .*pip install 'ellzero\[onnx\]'\n$", err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_without_onnxruntime_is_written_and_said_to_be_unchecked(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    # Exporting takes seconds, and another test does it.
    program = SimpleNamespace(save=lambda path, external_data: Path(path).write_text("a network"))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: program)
    code, out, _ = run("compact", str(home), "--to", "a.onnx")
    assert code == 0
    assert "not checked: onnxruntime is not installed" in out
    assert Path("a.onnx").read_text() == "a network"


# ---------------------------------------------------------------- report


@pytest.mark.slow
@pytest.mark.usefixtures("no_data")
def test_report_is_that_of_the_library(run: Run, home: Path, network: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ellzero.report(network)
    assert run("report", str(home)) == (0, f"{expected}\nPage: {home / 'page.html'}\n", "")
    assert run("report", str(home), "--markdown") == (0, expected.markdown(), "")
    code, out, _ = run("report", str(home), "--json")
    assert (code, json.loads(out)) == (0, json.loads(expected.json()))
    monkeypatch.setattr(reporting, "MANY", 1)
    assert f"all {len(expected.axes)} axes: `full=True`, or `--full`" in run("report", str(home), "--markdown")[1]
    assert run("report", str(home), "--markdown", "--full")[1] == ellzero.report(network, full=True).markdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no gate has moved")  # nobody has trained it
def test_a_stack_asks_which_run_is_meant(run: Run, tmp_path: Path) -> None:
    recipes = [SMALL, SMALL.override(name="other", seed=1, at_most=0.5)]
    folder = Folder.create(tmp_path / "stack", recipes, {"command": "ellzero reproduce table"})
    trainer = Trainer(recipes, data.load("mnist5k"))
    saver.save(trainer, folder)
    message = "'stack' holds 2 runs, choose one by `--index`: 0: small, seed 0; 1: other, seed 1"
    failed(run("report", "stack"), 2, message)
    failed(run("compact", "stack", "--to", "a.pt2"), 2, message)
    failed(run("report", "stack", "--index", "2"), 2, "`--index` must be from 0 to 1, got 2")
    for number in (0, 1):
        gated = trainer.network(number)
        assert isinstance(gated, Gated)
        assert run("report", "stack", "--index", str(number), "--json")[1] == ellzero.report(gated).json() + "\n"
    code, out, _ = run("evaluate", "stack", "--json")
    assert code == 0
    found = [(n["recipe"], n["seed"], n["error"]) for n in json.loads(out)["networks"]]
    errors = evaluation.evaluate(trainer)["error"].tolist()
    assert found == [("small", 0, pytest.approx(errors[0])), ("other", 1, pytest.approx(errors[1]))]
    message = "'stack' holds a stack of 2 runs; it goes on with the command that began it: ellzero reproduce table"
    failed(run("train", "--resume", "stack"), 2, message)


# ---------------------------------------------------------------- recipes


def test_recipes_are_listed_and_printed_in_full(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("recipes")
    assert code == 0
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line.strip()) for line in out.splitlines())}
    for recipe in RECIPES.values():
        assert rows[recipe.name][:2] == [recipe.network, recipe.data]
    assert rows["gallego-mlp"][2:] == ["expected l0_norm ≤ 0.33", "200"]
    assert rows["louizos-mlp"][2:] == ["penalty, c = 0.1", "200"]
    assert rows["wrn-dropout-cifar10"][2:] == ["dense, dropout 0.3", "200"]
    assert max(map(len, out.splitlines())) <= 100

    for flags in ((), ("--toml",)):
        code, out, _ = run("recipes", "demo", *flags)
        (tmp_path / "copy.toml").write_text(out)
        assert (code, out) == (0, get("demo").to_toml())
    assert json.loads(run("recipes", "copy.toml", "--json")[1]) == get("demo").to_dict()
    everything = json.loads(run("recipes", "--json")[1])
    assert [Recipe.from_dict(values) for values in everything] == list(RECIPES.values())
    sections = tomllib.loads(run("recipes", "--toml")[1])
    assert {name: values["name"] for name, values in sections.items()} == {name: name for name in RECIPES}


def test_a_file_does_not_hide_a_named_recipe(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("not TOML at all")
    assert opening.find_recipe("demo") == get("demo")
    (tmp_path / "mine").write_text('base = "demo"')
    assert opening.find_recipe("mine") == get("demo").override(name="mine")
    with pytest.raises(CommandError, match="is not the name of a recipe"):
        opening.find_recipe("nothing")


# ---------------------------------------------------------------- help and completion


def test_every_command_has_help_with_an_example_that_begins_with_its_name(run: Run) -> None:
    commands = [command.__name__ for command in COMMANDS]
    assert {"train", "evaluate", "compact", "report", "recipes", "inspect"} <= set(commands)
    for command in commands:
        code, out, _ = run(command, "--help")
        assert code == 0
        assert re.search(rf"For example:\s+(\$ )?ellzero {command}\b", out), command


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script(shell: str, run: Run) -> None:
    code, out, err = run("--print-completion", shell)
    assert (code, err) == (0, "")
    assert "ellzero" in out
    for word in ("train", "evaluate", "--at-most", "--resume"):
        assert word in out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ev"], ["evaluate"]),
        (["train", "--at"], ["--at-most"]),
        (["train", "--device", "c"], ["cpu", "cuda"]),
    ],
)
def test_bash_completes(words: list[str], expected: list[str], run: Run, tmp_path: Path) -> None:
    (tmp_path / "complete.sh").write_text(run("--print-completion", "bash")[1])
    typed = " ".join(["ellzero", *words])
    script = f"source complete.sh; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _tyro_ellzero; echo ${{COMPREPLY[*]}}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (expected, "")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs pipes")
def test_a_reader_that_leaves_is_no_error() -> None:
    """`ellzero recipes --json | head -n 1`: the pipe is closed before anything is written."""
    environment = {**os.environ, "PYTHONPATH": str(Path(ellzero.__file__).parent.parent)}
    command = [sys.executable, "-m", "ellzero", "recipes", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


# ---------------------------------------------------------------- data that stand in


@pytest.mark.parametrize("name", [name for name, facts in KNOWN.items() if not facts.is_text])
def test_what_stands_in_has_the_shape_of_what_it_stands_in_for(name: str) -> None:
    found = stand_in(name, 5)
    facts = KNOWN[name]
    assert (found.name, found.classes, found.mean, found.std) == (name, facts.classes, facts.mean, facts.std)
    assert found.shape == ((1, 28, 28) if "mnist" in name else (3, 32, 32))
    assert len(found.mean) == found.shape[0]
    for x, y in ((found.train_x, found.train_y), (found.test_x, found.test_y)):
        assert (len(x), x.dtype, len(y), y.dtype) == (5, torch.uint8, 5, torch.int64)
        assert 0 <= int(y.min()) <= int(y.max()) < len(facts.classes)
    assert not torch.equal(found.train_x, found.test_x)
    assert torch.equal(found.train_x, stand_in(name, 5).train_x)
    assert abs(float(found.train_x.float().mean()) - 127.5) < 10


def test_what_cannot_stand_in_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`name` must be one of .* did you mean 'mnist'"):
        stand_in("mnst")
    with pytest.raises(ValueError, match="`images` must be at least 1, got 0"):
        stand_in("mnist", 0)
