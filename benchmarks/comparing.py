"""Steps of the training loop, compared in one process: blocks are interleaved, ratios are medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, repeat

import torch

from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.trainer import Trainer
from ellzero.out.latency.meter import interleaved


def steps(trainer: Trainer) -> Iterator[torch.Tensor]:
    """One step after the other, over all epochs."""
    return chain.from_iterable(train_epoch(trainer) for _ in repeat(None))


def timed(run: Iterator[torch.Tensor], count: int, device: torch.device) -> float:
    """Seconds of one step, on average over the next so many."""
    return interleaved([partial(next, run)], device, rounds=1, warm_up=0, calls=count)[0][0]


def compared(
    running: Mapping[str, Iterator[torch.Tensor]], count: int, rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of each, and its ratio to "dense", from blocks of so many steps."""
    blocks = [partial(next, run) for run in running.values()]
    taken = dict(zip(running, interleaved(blocks, device, rounds=rounds, warm_up=0, calls=count), strict=True))
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
