"""The one latency meter: runs functions in turns, and says how long each took. It does not know what they do."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence

import torch

_LEAST = 3  # rounds, however little time there is


def interleaved(
    functions: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 30,
    warm_up: int = 5,
    calls: int = 1,
    budget: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Times functions against each other, one after the other in every round, every other round backwards.

    So whatever else the machine does falls on all alike. A device that works on its own is waited for.

    Args:
        functions: what to time.
        device: where they compute.
        rounds: how often each is timed.
        warm_up: rounds before, which do not count.
        calls: how often a function is called in a round.
        budget: seconds after which no further round begins, once there are three.
        clock: gives the time in seconds.

    Returns:
        For each function the seconds of one call, round by round.

    Example:
        >>> ticks = iter(range(100))
        >>> interleaved([lambda: next(ticks), int], torch.device("cpu"), rounds=2, clock=lambda: float(next(ticks)))
        [[2.0, 2.0], [1.0, 1.0]]
    """
    taken: list[list[float]] = [[] for _ in functions]
    begun = clock()
    for turn in range(-warm_up, rounds):
        for which in range(len(functions))[:: 1 if turn % 2 else -1]:
            start = clock()
            for _ in range(calls):
                functions[which]()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            took = (clock() - start) / calls
            if turn >= 0:
                taken[which].append(took)
        if turn + 1 >= _LEAST and clock() - begun > budget:
            break
    return taken


def device_name(device: torch.device) -> str:
    """What a device is called beside its numbers: the GPU's name, or "CPU" and the kind of machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} {platform.machine()}"
