"""How long each region of a network takes, in place: from where a layer begins to where the next one does.

A layer is a module that has parameters of its own. One forward times all regions, and together they are the whole
forward: nothing in it, between layers too, is left out or counted twice. This file does not know gates or widths.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ellzero.graph.tracing import Inputs
from ellzero.out.latency.meter import interleaved

Clock = Callable[[], float]
WARM_UP, LEAST, MOST, SECONDS = 3, 9, 60, 0.4  # rounds before, at least, at most, and seconds that a network gets
TOGETHER = 4  # networks that are timed in turns, beside the dense one


class Meter:
    """Times networks in turns with the dense one, in shares of the time that it takes beside them.

    The dense one is in evaluation, and nobody else's, as it gets hooks for a while. `clock` gives the time in seconds.
    """

    def __init__(self, dense: nn.Module, inputs: Inputs, device: torch.device, clock: Clock) -> None:
        self.dense, self.inputs, self.device, self.clock = dense, inputs, device, clock
        (first,) = self._timed([self._plain(dense)], LEAST)
        self.rounds = min(MOST, max(LEAST, round(SECONDS / max(1e-9, statistics.median(first)))))
        (taken,) = self._timed([self._plain(dense)], self.rounds)
        self.seconds = statistics.median(taken)  # of the dense network

    def _plain(self, model: nn.Module) -> Callable[[], object]:
        return partial(model, *self.inputs[0], **self.inputs[1])

    @torch.no_grad()
    def _timed(self, functions: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
        return interleaved(functions, self.device, rounds=rounds, warm_up=WARM_UP, clock=self.clock)

    def whole(self, models: Sequence[nn.Module]) -> list[float]:
        """What share of the dense network's time each network takes, as a whole and without any hooks."""
        dense, *others = self._timed([self._plain(m) for m in (self.dense, *models)], self.rounds)
        return [statistics.median(a / b for a, b in zip(other, dense, strict=True)) for other in others]

    def regions(self, models: Sequence[nn.Module]) -> list[dict[str, float]]:
        """What share of the dense network's time each region of each network takes; of the dense one first."""
        watched = [_Watched(m, self._plain(m), self.device, self.clock) for m in (self.dense, *models)]
        try:
            self._timed(watched, self.rounds)
        finally:
            for w in watched:
                w.end()
        taken = [w.medians() for w in watched]
        whole = sum(taken[0].values())
        return [{name: seconds / whole for name, seconds in region.items()} for region in taken]


class _Watched:
    """A forward that notes when each layer begins."""

    def __init__(self, model: nn.Module, call: Callable[[], object], device: torch.device, clock: Clock) -> None:
        self.call, self.device, self.clock = call, device, clock
        self.marks: list[list[tuple[str, Any]]] = []
        layers = [(name, m) for name, m in model.named_modules() if any(p is not None for p in m._parameters.values())]
        self.hooks = [m.register_forward_pre_hook(partial(self._note, name)) for name, m in layers]

    def __call__(self) -> None:
        self.marks.append([("", self._now())])
        self.call()
        self.marks[-1].append(("", self._now()))

    def _note(self, name: str, *_: Any) -> None:
        self.marks[-1].append((name, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def medians(self) -> dict[str, float]:
        """The seconds of each region, medians over all calls but those that warm up."""
        taken: dict[str, list[float]] = defaultdict(list)
        for marks in self.marks[WARM_UP:]:
            call: dict[str, float] = defaultdict(float)
            for (name, start), (_, end) in pairwise(marks):
                call[name] += start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start
            for name, seconds in call.items():
                taken[name].append(seconds)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}
