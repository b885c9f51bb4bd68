"""Steps of the training loop, compared in one process: blocks are interleaved, ratios are medians over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import chain, repeat

import torch

from ellzero.experiments.train.trainer import Trainer


def steps(trainer: Trainer) -> Iterator[torch.Tensor]:
    """One step after the other, over all epochs."""
    return chain.from_iterable(trainer.train_epoch() for _ in repeat(None))


def timed(run: Iterator[torch.Tensor], count: int, device: torch.device) -> float:
    """Seconds of one step."""
    started = time.perf_counter()
    for _ in range(count):
        next(run)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def compared(
    running: Mapping[str, Iterator[torch.Tensor]], count: int, rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of each, and its ratio to "dense", from blocks of so many steps."""
    taken: dict[str, list[float]] = {kind: [] for kind in running}
    for _ in range(rounds):
        for kind, run in running.items():
            taken[kind].append(timed(run, count, device))
    out = {}
    for kind, seconds in taken.items():
        ratios = [s / d for s, d in zip(seconds, taken["dense"], strict=True)]
        out[kind] = {
            "milliseconds": 1e3 * statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
    return out
