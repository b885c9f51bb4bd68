"""Tiny trainings in processes of their own, which tests can kill.

`python tests/support/processes.py` is a server: it imports torch once and forks a child for each job, because an import
takes seconds. It reads requests and answers them as lines of JSON; at the end of its input it kills all children and
ends.
`Server` is the tests' side of it. The jobs are at the end of this file.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 120.0  # seconds, after which a job counts as hung


# ---------------------------------------------------------------- the tests' side


class Job:
    """A child that runs."""

    def __init__(self, server: Server, pid: int, log: Path) -> None:
        self.server, self.pid, self.log = server, pid, log

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)  # it is not reaped before `wait`, so the number is still its own

    def wait(self) -> int:
        """Its exit code, or minus the number of the signal that killed it."""
        code = self.server.ask(wait=self.pid)
        if code is None:
            self.kill()
            raise TimeoutError(f"a job hangs; it said: {self.said}")
        return int(code)

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")


class Server:
    """Forks jobs; see the top of this file."""

    def __init__(self, home: Path) -> None:
        root = Path(__file__).parents[2]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")]),
            "PYTHONWARNINGS": "error::UserWarning",
        }  # fmt: skip
        self.home, self.jobs = home, 0
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,  # Ctrl-C at the tests is not one at the jobs
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the server ended with {self.process.poll()}"
        return json.loads(line)

    def start(self, job: str, **arguments: Any) -> Job:
        self.jobs += 1
        log = self.home / f"{job}-{self.jobs}.log"
        return Job(self, self.ask(job=job, log=str(log), arguments=arguments), log)

    def run(self, job: str, **arguments: Any) -> Job:
        """To its end, which must be a good one."""
        started = self.start(job, **arguments)
        code = started.wait()
        assert code == 0, f"{code}: {started.said}"
        return started

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=PATIENCE)
        self.process.stdout.close()


@contextmanager
def serving(home: Path) -> Iterator[Server]:
    server = Server(home)
    try:
        yield server
    finally:
        server.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits until something has come about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it does not come about")
        time.sleep(0.001)


# ---------------------------------------------------------------- the server's side


def serve() -> None:
    children: set[int] = set()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "wait" in request:
                answer = _status(request["wait"])
                children.discard(request["wait"])
            else:
                _prepare(request["job"], request["arguments"])
                answer = os.fork()
                if answer == 0:
                    _child(JOBS[request["job"]], request["log"], request["arguments"])
                children.add(answer)
            print(json.dumps(answer), flush=True)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _status(pid: int) -> int | None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _child(job: Callable[..., None], log: str, arguments: dict[str, Any]) -> None:
    code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        warnings.filterwarnings("ignore", "gates settle after")  # as in all tests: trainings are short
        job(**arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


# ---------------------------------------------------------------- jobs


@cache
def dataset(kind: str, *, whole: bool = False) -> Any:
    from ellzero.experiments.data import load
    from support.noise import quartered

    if kind == "cifar10":
        return quartered(32)
    everything = load("mnist5k")
    if whole:
        return everything
    train_x, train_y = everything.train_x[::40], everything.train_y[::40]  # they come class by class
    test_x, test_y = everything.test_x[::20], everything.test_y[::20]
    return replace(everything, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


@contextmanager
def together(rank: int, ranks: int, meet: str) -> Iterator[None]:
    """Joins other processes by a file, which unlike a port nobody else can have taken."""
    import torch.distributed as dist

    from ellzero.experiments.train import processes as parallel

    if ranks == 1:
        yield
        return
    with parallel.lost_in_words():
        limit = timedelta(seconds=PATIENCE / 2)
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks, timeout=limit)
        try:
            yield
        finally:
            parallel.leave()


def train(
    folder: str,
    save_seconds: float = 0.0,
    die: tuple[str, int, bool] | None = None,
    progress: str | None = None,
    pause: float = 0.0,
    rank: int = 0,
    ranks: int = 1,
    meet: str = "",
    spoil: int | None = None,
    dump: str | None = None,
    whole: bool = False,
) -> None:
    """Trains what a folder says, to its end or from where it stands.

    Args:
        folder: of the run.
        save_seconds: 0 for a checkpoint after every step.
        die: which call of the checkpoint's write kills the process ("write", "fsync", "replace", "unlink"; "step" for
            the end of a step), in which save, and whether the call is made first.
        progress: file that gets a byte after every step.
        pause: seconds that every step takes longer.
        rank: of this process.
        ranks: how many processes there are.
        meet: file by which they find each other.
        spoil: number of the step, from 0, after which a parameter of this process is changed.
        dump: file that gets the state of this process at the end.
        whole: whether all images are trained on.
    """
    import numpy as np
    import torch

    from ellzero.experiments.store import checkpoint
    from ellzero.experiments.store.folder import Folder
    from ellzero.experiments.train import loop as training
    from ellzero.experiments.train import saver
    from ellzero.experiments.train.trainer import Trainer

    step = Trainer._take

    def watched(trainer: Trainer, *args: Any) -> Tensor:
        out = step(trainer, *args)
        if progress is not None:
            with open(progress, "ab") as file:
                file.write(b".")
        time.sleep(pause)
        if trainer.steps_done == spoil:  # before this step
            with torch.no_grad():
                trainer.runs.values()["network.model.fc2.bias"][3] += 1e-6
        return out

    Trainer._take = watched  # type: ignore[method-assign]
    random.seed(0)  # torch's generator is the run's business; these two are saved as well
    np.random.seed(0)  # noqa: NPY002
    if die is not None:
        _die_in_a_save(checkpoint, *die)
    run = Folder.open(folder)
    with together(rank, ranks, meet):
        images = dataset(run.recipes[0].data, whole=whole)
        trainer = training.train(run.recipes, images, run, save_seconds=save_seconds)
    if dump is not None:
        torch.save({**saver.state(trainer), "history": trainer.history}, dump)


def _die_in_a_save(checkpoint: Any, call: str, count: int, after: bool) -> None:
    """SIGKILL in the `count`-th save, at its first call of this kind but for "write", at the second."""
    from ellzero.out import files

    files._CHUNK = 1 << 16  # a few writes for each save
    saves, save = [0], checkpoint.save
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        saves[0] += 1
        calls[0] = 0
        return save(*args, **kwargs)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        fatal = saves[0] == count and calls[0] == (2 if call == "write" else 1)
        if fatal and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        out = original(*args, **kwargs)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    checkpoint.save = counted
    original = getattr(os, call)
    setattr(os, call, deadly)


def sharded(rank: int, folder: str) -> None:
    from support import replicated as job

    job.train_sharded(rank, folder)


def replicated(rank: int, folder: str) -> None:
    from support import replicated as job

    job.train(rank, folder)


def budgeted(rank: int, folder: str, world: int) -> None:
    from support import replicated as job

    job.train_in_budget(rank, folder, world)


def launched(program: str, arguments: list[str], where: str) -> None:
    """`torchrun --standalone --nproc-per-node 2`, by the agent of torchrun, but that what it starts are forks.

    Args:
        program: the file of a script, or the name of a module, which is run as by `-m`.
        arguments: that it is given.
        where: the working directory.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.chdir(where)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="tests", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, monitor_interval=0.02, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _run_program)(program, arguments)


def program(calls: list[list[str]], where: str, threads: int = 1) -> None:
    """`python -m ellzero` with each of these arguments, in a folder, with so many threads; says the exit codes."""
    import torch

    torch.set_num_threads(threads)
    os.chdir(where)
    sys.path[0] = ""  # as `-m` has it
    for arguments in calls:
        sys.argv = ["ellzero", *arguments]
        try:
            runpy.run_module("ellzero", run_name="__main__")
        except SystemExit as left:
            print("code", left.code, flush=True)


def script(file: str, arguments: list[str]) -> None:
    """`python file …`, of which the log then has the output."""
    _run_program(file, arguments)


def _run_program(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        if left.code:
            raise


@cache
def _trace(network: str = "narrow", data: str = "mnist5k", dropout: float = 0.0) -> None:
    """A network is traced once, and not in each fork. No backward: its threads would not be forked."""
    import torch

    from ellzero.experiments.recipe import Recipe
    from ellzero.experiments.train.building import build

    recipe = Recipe(name="warm", penalty=0.1, network=network, data=data, dropout=dropout)
    build(recipe, dataset(data), torch.device("cpu"))


def _prepare(job: str, arguments: dict[str, Any]) -> None:
    """What all forks would do: tracing and sharding for the first time import much."""
    from ellzero.experiments.store.folder import Folder

    if job == "sharded":
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp  # noqa: F401
    if job != "train":
        _trace()
        return
    for recipe in Folder.open(arguments["folder"]).recipes:
        _trace(recipe.network, recipe.data, recipe.dropout)


JOBS: dict[str, Callable[..., None]] = {
    "train": train, "replicated": replicated, "sharded": sharded, "budgeted": budgeted, "launched": launched,
    "program": program, "script": script,
}  # fmt: skip

if __name__ == "__main__":
    gc.disable()  # forks are short, and to look through what they share with the server would copy it
    import torch._dynamo  # every optimizer does at its first step
    import torch.distributed  # noqa: F401 (in no fork)

    import ellzero.experiments.train.loop  # noqa: F401
    import support.narrow  # noqa: F401

    serve()
    os._exit(0)  # torch takes a second or two to leave
