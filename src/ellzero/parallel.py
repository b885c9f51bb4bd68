"""Several processes as one run: who am I, sums and decisions of all, over `torch.distributed`.

Without a process group there is one process, and every function here is the identity. This file knows nothing of
networks, data or training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


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
def group(device: torch.device, timeout: float = 600.0) -> Iterator[torch.device]:
    """Joins the processes that `torchrun` started, if it did: gloo on a CPU, nccl on GPUs, a GPU each.

    Args:
        device: the kind of device to train on.
        timeout: seconds after which a process that waits for the others gives up.

    Returns:
        The device of this process.
    """
    if not launched():
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield device
    finally:
        dist.destroy_process_group()


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
    """The values of all processes, in the order of their ranks, in each of them."""
    if ranks() == 1:
        return [value]
    values: list[T] = [value] * ranks()
    dist.all_gather_object(values, value)
    return values


def from_first(tensors: list[Tensor]) -> None:
    """Overwrites tensors by those of process 0."""
    if ranks() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
