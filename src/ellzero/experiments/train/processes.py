"""Several processes as one run: who am I, sums and decisions of all, over `torch.distributed`.

Without a process group there is one process, and every function here is the identity. This file knows nothing of
networks, data or training.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ellzero.out.saving import checksum

T = TypeVar("T")
# gloo raises plain errors. These are in all of them: the file that they come from, or what the system said.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@final
class ProcessError(Exception):
    """Another process of the run is gone, or does not have what this one has."""


def ranks() -> int:
    """How many processes train this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them, from 0. Number 0 writes and prints."""
    return dist.get_rank() if ranks() > 1 else 0


def launched() -> bool:
    """Whether `torchrun` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def group(device: torch.device) -> Iterator[torch.device]:
    """Joins the processes that `torchrun` started, if it did: gloo on a CPU, nccl on GPUs, a GPU each.

    Gives the device of this process. One that waits for the others gives up after ten minutes; a ProcessError says that
    another is gone, or that `torchrun` ends this one because of it.
    """
    if not launched():
        yield device
        return
    with _terminated_in_words(), lost_in_words():
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
        try:
            yield device
        finally:
            leave()


def leave() -> None:
    """Ends the process group."""
    # Its threads may be about to free tensors, for which they need the interpreter's lock: this hands it over. Who ends
    # the group while they wait for it waits for them for ever.
    time.sleep(0.05)
    with suppress(RuntimeError):  # of a process that is gone: what is said about it comes from elsewhere
        dist.destroy_process_group()


@contextmanager
def lost_in_words() -> Iterator[None]:
    """What `torch.distributed` raises where another process is gone, as a `ProcessError`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in _LOST):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise ProcessError(f"another process of this run is gone, or cannot be reached ({first_line})") from error


@contextmanager
def _terminated_in_words() -> Iterator[None]:
    """`torchrun` ends all processes when one has failed, and may be faster than the connection that breaks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise ProcessError("this process was told to end, as `torchrun` does when another process of the run is gone")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def total(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes, in place."""
    if ranks() > 1:
        dist.all_reduce(value)
    return value


def strongest(wish: int, device: torch.device) -> int:
    """The largest wish of all processes: they do alike, whoever it came from."""
    if ranks() == 1:
        return wish
    value = torch.tensor(wish, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


def gathered(value: T) -> list[T]:
    """The values of all processes, in the order of their ranks, in each of them; tensors must be on the CPU."""
    if ranks() == 1:
        return [value]
    values: list[T] = [value] * ranks()
    dist.all_gather_object(values, value)
    return values


def from_first(tensors: Sequence[Tensor]) -> None:
    """Overwrites tensors by those of process 0."""
    if ranks() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def refuse_different(tensors: Mapping[str, Tensor]) -> None:
    """Makes sure that tensors are the same in all processes, bit for bit; a ProcessError in each names those that
    differ.
    """
    if ranks() == 1:
        return
    all_of_them = gathered({name: checksum("", {name: tensor.detach().cpu()}) for name, tensor in tensors.items()})
    names = {name: None for sums in all_of_them for name in sums}
    differ = [name for name in names if len({sums.get(name) for sums in all_of_them}) > 1]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ProcessError(
            f"the {ranks()} processes of this run must have the same values, and differ in "
            f"{', '.join(f'`{name}`' for name in differ[:3])}{more}"
        )
