"""Two processes that train one run, over gloo on the CPU: against one process, and against the step written by hand.

The processes are forked by `processes.Server` and meet by a file; at the end of this file the agent of `torchrun`
starts the command line. A run of two processes that loses one and goes on must end where an uninterrupted one ends, bit
for bit.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ellzero as l0
from ellzero.experiments.data import Dataset, scaled
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.checkpoint import CheckpointError
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import building, saver
from ellzero.experiments.train import loop as training
from ellzero.experiments.train import processes as parallel
from support import processes
from support.runs import GATED, STEPS, WIDE, assert_same_end, bits, leaves, without_seconds

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SHORT = GATED.override(epochs=2, finetune_epochs=1)


def start(server: processes.Server, folder: Folder, *own: dict[str, Any], **common: Any) -> list[processes.Job]:
    """Two processes; `own` is what only one of them is told."""
    server.jobs += 1
    meet = str(server.home / f"meet-{server.jobs}")
    of_one = [*own, {}, {}][:2]
    both = {"folder": str(folder.path), "ranks": 2, "meet": meet, **common}
    return [
        server.start("train", **{**both, "rank": rank, "dump": f"{folder.path}-{rank}.pt", **of_one[rank]})
        for rank in range(2)
    ]


def run(server: processes.Server, folder: Folder, **common: Any) -> list[dict[str, Any]]:
    """To a good end; the state of each process then."""
    for job in start(server, folder, **common):
        assert job.wait() == 0, job.said
    return [torch.load(f"{folder.path}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def whole(server: processes.Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, list[dict[str, Any]]]:
    """A run of two processes that nothing happens to."""
    folder = Folder.create(tmp_path_factory.mktemp("whole") / "run", [SHORT])
    return folder, run(server, folder)


def values(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix("network."): value for name, value in state["values"].items()}


# ---------------------------------------------------------------- what two processes compute


def test_two_processes_train_a_dense_network_as_one_does(server: processes.Server, tmp_path: Path) -> None:
    dense = Recipe(
        name="dense", network="lenet300", data="mnist5k", placement=None, optimizer="sgd", lr=0.1, batch=20, epochs=2
    )
    folder = Folder.create(tmp_path / "run", [dense])
    both = run(server, folder, save_seconds=1000.0)
    one = training.train([dense], processes.dataset("mnist5k"))
    for state in both:
        for name, value in values(saver.state(one)).items():
            torch.testing.assert_close(values(state)[name], value.detach(), rtol=1e-4, atol=1e-6, msg=name)
        ours, theirs = state["history"], one.history
        assert [h["error"] for h in ours] == [h["error"] for h in theirs]
        assert [h["loss"] for h in ours] == pytest.approx([h["loss"] for h in theirs], rel=1e-5)
    start_of_it = dict(building.build(dense, processes.dataset("mnist5k"), CPU).named_parameters())
    moved = (values(both[0])["fc3.weight"] - start_of_it["fc3.weight"]).abs().max()
    assert moved > 1e-2


def order_and_noise(recipe: Recipe, epoch: int, gates: int, data: Dataset) -> tuple[Tensor, list[Tensor]]:
    """(steps, ranks, images of a share), and for each process (steps, draws, gates): from seed, epoch and rank."""
    n, steps = len(data.train_x), len(data.train_x) // recipe.batch
    first = torch.Generator().manual_seed(int(np.random.SeedSequence([recipe.seed, epoch]).generate_state(1)[0]))
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=first)))
    order = torch.randperm(n, generator=generator).view(steps, 2, recipe.batch // 2)
    own = np.random.SeedSequence([recipe.seed, epoch, 1]).generate_state(1, np.uint64)[0]
    other = torch.Generator().manual_seed(int(own) >> 1)
    return order, [torch.rand(steps, recipe.samples, gates, generator=g) for g in (generator, other)]


def by_hand(recipe: Recipe, dual: l0.duals.NuPI) -> tuple[dict[str, Tensor], Tensor, list[float]]:
    """The run as one would write it, the gates drawn anew for each half of a batch; parameters, multiplier, losses."""
    data = processes.dataset("mnist5k")
    gated = building.build(recipe, data, CPU)
    assert isinstance(gated, l0.Gated)
    weights = [p for n, p in gated.named_parameters() if not n.startswith("gates.")]
    groups = [{"params": weights, "lr": recipe.lr}, {"params": list(gated.gates.parameters()), "lr": recipe.gate_lr}]
    optimizer = torch.optim.SGD(groups, momentum=recipe.momentum)
    assert isinstance(recipe.at_most, float)
    budget = l0.Constraint(l0.params, recipe.at_most, dual=dual)
    images = scaled(data.train_x, data.mean, data.std)
    means = []
    for epoch in range(recipe.epochs):
        order, noise = order_and_noise(recipe, epoch, gated.liveness.size, data)
        assert not torch.isclose(noise[0], noise[1]).any(1).all()
        losses = []
        for step, shares in enumerate(order):
            halves = [
                F.cross_entropy(gated(images[share], gate_noise=draw), data.train_y[share])
                for share, draws in zip(shares, (n[step] for n in noise), strict=True)
                for draw in draws
            ]
            loss = torch.stack(halves).mean()
            optimizer.zero_grad()
            (loss + budget(gated)).backward()
            optimizer.step()
            budget.ascend()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return {n: p.detach() for n, p in gated.named_parameters()}, budget.multiplier, means


@pytest.mark.parametrize("samples", [1, 2])
def test_each_process_draws_gates_of_its_own_and_the_step_is_the_mean(
    samples: int, server: processes.Server, tmp_path: Path
) -> None:
    """SGD, because Adam makes a step of a gradient that is nothing but rounding."""
    recipe = GATED.override(
        optimizer="sgd", lr=0.05, gate_lr=5.0, momentum=0.5, on="expected", ema=None, epochs=2, finalize=False,
        finetune_epochs=0, target_warmup=0.0, samples=samples,
    )  # fmt: skip
    both = run(server, Folder.create(tmp_path / "run", [recipe]), save_seconds=1000.0)
    expected, multiplier, losses = by_hand(recipe, l0.duals.NuPI(kp=2.0, ki=0.1, nu=0.5))
    for state in both:
        for name, value in values(state).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-5, msg=name)
        torch.testing.assert_close(state["lagrangian"]["multiplier"].flatten(), multiplier.flatten())
        assert [h["loss"] for h in state["history"]] == pytest.approx(losses, rel=1e-4)
    alone = training.train([recipe], processes.dataset("mnist5k"))  # it matters: one process, one draw for all
    gates = "network.gates.fc2.log_alpha"
    assert (saver.state(alone)["values"][gates] - both[0]["values"][gates]).abs().max() > 1e-2


def test_both_have_the_same_to_the_bit_and_one_writes(whole: tuple[Folder, list[dict[str, Any]]]) -> None:
    folder, (first, second) = whole
    ours, theirs = dict(leaves(first)), dict(leaves(second))
    differ = {name for name in ours if bits(ours[name]) != bits(theirs[name])}
    assert {name for name in differ if not name.endswith(".seconds")} <= {".own.0.random.torch"}  # of dropout
    assert ours[".lagrangian.multiplier"].item() > 0
    assert [record["epoch"] for record in folder.history()] == [1, 2, 3]
    assert without_seconds(folder.history()) == without_seconds(first["history"])
    assert without_seconds(folder.history()) == without_seconds(second["history"])
    assert checkpoint.steps(folder.checkpoints) == [14, 15]
    names = sorted(path.name for path in folder.path.iterdir())
    assert names == ["checkpoints", "history.jsonl", "results.json", "run.json"]
    kept = checkpoint.load(folder.checkpoints).state
    assert kept["ranks"] == 2
    assert len(kept["own"]) == 2


@pytest.mark.slow
def test_batch_norm_and_dropout_in_two_processes(server: processes.Server, tmp_path: Path) -> None:
    """Statistics are gathered on another share in each: all of them evaluate with those of the first."""
    wide = WIDE.override(epochs=1, recalibrate=False)
    folder = Folder.create(tmp_path / "run", [wide])
    first, second = run(server, folder, save_seconds=1000.0)
    assert {k: bits(v) for k, v in first["buffers"].items()} == {k: bits(v) for k, v in second["buffers"].items()}
    assert {k: bits(v) for k, v in first["values"].items()} == {k: bits(v) for k, v in second["values"].items()}
    assert without_seconds(first["history"]) == without_seconds(second["history"])
    torch_states = [state["own"][0]["random"]["torch"] for state in (first, second)]
    assert not torch.equal(*torch_states)  # each drops units of its own
    again = Folder.create(tmp_path / "again", [wide])
    jobs = start(server, again, {"die": ("fsync", 3, True)})
    assert jobs[0].wait() == -signal.SIGKILL, jobs[0].said
    assert jobs[1].wait() == 1
    run(server, again)
    assert_same_end(again, folder)


# ---------------------------------------------------------------- processes that are gone, and others


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_run_in_words_and_it_goes_on(
    victim: int, server: processes.Server, whole: tuple[Folder, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, progress = Folder.create(tmp_path / "run", [SHORT]), tmp_path / "progress"
    progress.touch()
    # It stands in the middle of an epoch.
    jobs = start(server, folder, *[{}] * victim, {"progress": str(progress), "pause": 0.02})
    processes.until(lambda: progress.stat().st_size >= STEPS + 3)
    jobs[victim].kill()
    assert jobs[victim].wait() == -signal.SIGKILL
    assert jobs[1 - victim].wait() == 1
    assert "ProcessError: another process of this run is gone, or cannot be reached (" in jobs[1 - victim].said
    reached = checkpoint.steps(folder.checkpoints)[-1]
    assert STEPS <= reached < 15
    assert folder.results() is None
    run(server, folder)
    assert_same_end(folder, whole[0])


def test_a_process_that_dies_in_the_write_of_a_checkpoint(
    server: processes.Server, whole: tuple[Folder, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    jobs = start(server, folder, {"die": ("write", 8, True)})
    assert [job.wait() for job in jobs] == [-signal.SIGKILL, 1]
    assert checkpoint.steps(folder.checkpoints)[-1] == 7
    run(server, folder)
    assert_same_end(folder, whole[0])


def test_ctrl_c_at_one_process_stops_and_saves_all(
    server: processes.Server, whole: tuple[Folder, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, progress = Folder.create(tmp_path / "run", [SHORT]), tmp_path / "progress"
    progress.touch()
    jobs = start(server, folder, {}, {"progress": str(progress), "pause": 0.02}, save_seconds=1000.0)
    processes.until(lambda: progress.stat().st_size >= 3)
    jobs[1].kill(signal.SIGINT)
    assert [job.wait() for job in jobs] == [1, 1]
    for job in jobs:
        assert "Stopped: stopped after epoch" in job.said
    assert checkpoint.steps(folder.checkpoints) == [progress.stat().st_size]
    run(server, folder)
    assert_same_end(folder, whole[0])


def test_processes_that_no_longer_agree_are_refused(server: processes.Server, tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "run", [SHORT])
    jobs = start(server, folder, {}, {"spoil": 2}, save_seconds=1000.0)
    assert [job.wait() for job in jobs] == [1, 1]
    for job in jobs:
        assert (
            "ProcessError: the 2 processes of this run must have the same values, and differ in `network.m" in job.said
        )
    assert folder.history() == []


def test_processes_that_find_different_checkpoints_are_refused(
    server: processes.Server, whole: tuple[Folder, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """As on two machines that do not share the folder."""
    empty = Folder.create(tmp_path / "run", [SHORT])
    jobs = start(server, whole[0], {}, {"folder": str(empty.path)})
    assert [job.wait() for job in jobs] == [1, 1]
    assert all("ProcessError: all processes must find the same checkpoint in" in job.said for job in jobs)


def test_another_number_of_processes_is_refused(
    server: processes.Server, whole: tuple[Folder, list[dict[str, Any]]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"was trained with 2 processes and goes on with as many, got 1$"):
        training.train([SHORT], processes.dataset("mnist5k"), whole[0])
    assert checkpoint.steps(whole[0].checkpoints) == [14, 15]
    assert training.restore(whole[0], processes.dataset("mnist5k")).epoch == 3  # looking is another matter
    alone = Folder.create(tmp_path / "run", [SHORT.override(epochs=1)])
    training.train(alone.recipes, processes.dataset("mnist5k"), alone)
    jobs = start(server, alone)
    assert [job.wait() for job in jobs] == [1, 1]
    assert "was trained with 1 processes and goes on with as many, got 2" in jobs[0].said


def test_a_stack_and_a_batch_that_cannot_be_shared_are_refused(server: processes.Server, tmp_path: Path) -> None:
    odd = Folder.create(tmp_path / "odd", [SHORT.override(batch=25)])
    stack = Folder.create(tmp_path / "stack", [SHORT, SHORT.override(seed=1)])
    for folder, message in (
        (odd, "ValueError: `batch` must be a multiple of the 2 processes, got 25"),
        (stack, "ValueError: `recipes` must be one for 2 processes, got 2"),
    ):
        jobs = start(server, folder)
        assert [job.wait() for job in jobs] == [1, 1]
        assert all(message in job.said for job in jobs)


def test_without_a_group_there_is_one_process() -> None:
    value = torch.ones(2)
    parallel.from_first([value])
    parallel.refuse_different({"a": value})
    assert (parallel.rank(), parallel.ranks(), parallel.launched()) == (0, 1, False)
    assert parallel.total(value) is value
    assert parallel.gathered("x") == ["x"]
    assert parallel.strongest(2, CPU) == 2
    with parallel.group(CPU) as device:
        assert (device, parallel.rank(), parallel.ranks()) == (CPU, 0, 1)


def test_only_errors_about_other_processes_are_put_in_words() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$"), parallel.lost_in_words():
        raise RuntimeError("shapes")
    for said in ("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5", "x: Broken pipe"):
        with pytest.raises(parallel.ProcessError, match=r"^another process of this run"), parallel.lost_in_words():
            raise RuntimeError(said)


# ---------------------------------------------------------------- torchrun


def workers(job: processes.Job) -> list[int]:
    """The numbers of the processes that torchrun's agent started, in the order of their ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(fields[1]) == job.pid:
                found.append((int(fields[19]), int(entry.name)))  # began at, number
    return [number for _, number in sorted(found)]


UNDER_TORCHRUN = get("demo").override(network="lenet300", epochs=1, finetune_epochs=1, batch=500)
WORDS = "demo --network lenet300 --epochs 1 --finetune-epochs 1 --batch 500 --device cpu --save-seconds 0 --quiet"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes of torchrun in /proc")
def test_the_command_line_under_torchrun(server: processes.Server, tmp_path: Path) -> None:
    """Stopped by the loss of a process, and taken up: it ends where two forked processes end that nothing stops."""
    words = ["train", *WORDS.split(), "--out", "run"]
    job = server.start("launched", program="ellzero", arguments=words, where=str(tmp_path))
    home = tmp_path / "run" / "checkpoints"
    processes.until(lambda: checkpoint.steps(home)[-1:] > [2])
    _, second = workers(job)
    os.kill(second, signal.SIGKILL)
    assert job.wait() == 1
    assert re.search(
        r"^ellzero: error: (another process of this run is gone|this process was told to end)", job.said, re.MULTILINE
    )
    assert (
        "goes on from its newest checkpoint with: torchrun --nproc-per-node 2 -m ellzero train --resume run" in job.said
    )
    assert "[rank0]" not in job.said  # as tracebacks begin
    assert Folder.open(tmp_path / "run").results() is None

    words = ["train", "--resume", "run", "--save-seconds", "0", "--json"]
    job = server.run("launched", program="ellzero", arguments=words, where=str(tmp_path))
    assert job.said.count('"compact"') == 1  # one of them prints
    assert (tmp_path / "run" / "compact.safetensors").exists()
    whole = Folder.create(tmp_path / "whole", [UNDER_TORCHRUN])
    run(server, whole, whole=True)
    assert [record["epoch"] for record in whole.history()] == [1, 2]
    assert_same_end(Folder.open(tmp_path / "run"), whole, unseeded=True)
