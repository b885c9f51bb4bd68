"""One step of every run: draw, run, add the objective, backward, descend, ascend.

This is the loop of the README, for a stack. It knows batches and noise as tensors; it does not know epochs, files or
what makes a step faster beyond compiling its parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.stepping.averaging import Average
from ellzero.experiments.train.stepping.speed import compiled
from ellzero.experiments.train.stepping.stack import Objective, Runs
from ellzero.objectives.extragradient import looking_ahead
from ellzero.objectives.lagrangian import Lagrangian


@final
class Step:
    """One step of a stack of runs.

    Args:
        recipe: what the runs have in common.
        runs: their networks.
        lagrangian: their objectives.
        optimizer: of the parameters of `runs`.
        average: of them; takes in every step.
        device: where the runs are.

    Attributes:
        clock: steps done, for the target and the average's correction.
        losses: task losses, summed since somebody set them to zero.
        fixed: whether the gates are fixed, and only weights move.
    """

    def __init__(
        self,
        recipe: Recipe,
        runs: Runs,
        lagrangian: Lagrangian,
        optimizer: torch.optim.Optimizer,
        average: Average,
        device: torch.device,
    ) -> None:
        self.recipe, self.runs, self.lagrangian = recipe, runs, lagrangian
        self.optimizer, self.average = optimizer, average
        self.clock = torch.zeros((), device=device)
        self.losses = torch.zeros(runs.size, device=device)
        self.fixed = False

    def prepare(self, *, compile: bool, ranks: int) -> None:
        """Makes the parts of the step anew, after the network or what it does has changed."""
        self._sum: Callable[..., Any] = self._lagrange
        self._ascend: Callable[..., Any] = self.lagrangian.ascend
        if compile:
            if self.runs.template.has_gates:
                with torch.no_grad():  # finds what patterns mean and remembers it: the compiler cannot trace that
                    self.runs.template.costs()
            self._sum, self._ascend = compiled(self._sum), compiled(self._ascend)
        self._forward: nn.Module = self.runs
        if ranks > 1:
            with warnings.catch_warnings():  # torch 2.13 has another name for it, which 2.11 does not know
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                # Buffers need not come from the first process before each forward: they do after each epoch.
                self._forward = DistributedDataParallel(self.runs, broadcast_buffers=False)

    def part(self) -> None:
        """Lets go of the other processes: there is no further step.

        Torch may hang where what ties it to them outlives the process group, as in the traceback of an error.
        """
        self._forward = self.runs

    def __call__(self, x: Tensor, y: Tensor, noise: Tensor, first: bool) -> Tensor:
        """Takes a step: (runs, batch, …), (runs, batch), (runs, draws, gates); returns the task losses."""
        if self.recipe.extra_gradient and not self.fixed:
            here, there = noise.chunk(2, 1)
            _, seen = self._gradient(x, y, here)
            with looking_ahead(self.optimizer, self.lagrangian.duals()):
                self._move(seen, first)
                loss, seen = self._gradient(x, y, there)
        else:
            # Gates that are fixed draw nothing, so there is nothing to draw `samples` times.
            loss, seen = self._gradient(x, y, noise[:, :1] if self.fixed else noise)
        self._move(seen, first)
        with torch.no_grad():
            self.clock += 1
            self.losses += loss
        self.average.update(self.runs.values())
        return loss

    def _gradient(self, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of the Lagrangian; the losses, and the violations where there are constraints."""
        self.optimizer.zero_grad()
        total, loss, seen = self._sum(x, y, noise, self.clock)
        total.backward()
        if seen is not None and self.recipe.on == "kept":  # of the parameters that the step began from
            seen = self.lagrangian.gaps(self.runs.evaluate(Objective.kept), self.clock)
        return loss, seen

    def _lagrange(self, x: Tensor, y: Tensor, noise: Tensor, clock: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The Lagrangian, summed over the runs; the losses, and the violations where there are constraints."""
        samples = [self._forward(x, y, u) for u in noise.unbind(1)]  # L of eq. 9
        loss, cost = sum(s[0] for s in samples) / len(samples), samples[0][1]
        if not self.runs.template.has_gates or self.fixed:
            return loss.sum(), loss.detach(), None
        terms, gaps = self.lagrangian(cost, clock)
        return (loss + terms).sum(), loss.detach(), gaps.detach()

    def _move(self, seen: Tensor | None, first: bool) -> None:
        """Descends in weights and gates, ascends in the multipliers."""
        self.optimizer.step()
        if seen is not None:
            with torch.no_grad():
                (self.lagrangian.ascend if first else self._ascend)(seen, self.clock, first)
