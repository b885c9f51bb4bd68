"""One step of every run: draw, run, add the objective, backward, descend, ascend, average.

This is the loop of the README, for a stack. It knows batches and noise as tensors; it does not know epochs or files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.stepping.faster import compiled
from ellzero.experiments.train.stepping.stack import Objective, Runs
from ellzero.objectives.estimating import still_statistics
from ellzero.objectives.extragradient import looking_ahead
from ellzero.objectives.following import length
from ellzero.objectives.lagrangian import Lagrangian


@final
class Average:
    """a ← d·a + (1 − d)·v from a = 0, to be divided by 1 − d^t after t updates (Louizos et al., their code).

    There is none without a decay. One that begins at a later step is made active by who knows that it is time.
    """

    def __init__(self, values: Mapping[str, Tensor], decay: float | None, begins: int = 0) -> None:
        self.decay, self.begins = decay or 0.0, begins
        self.tensors = {n: torch.zeros_like(v) for n, v in values.items()} if decay else {}
        self.active = bool(self.tensors) and begins == 0

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Takes in the values after a step, if it is active."""
        if self.active:
            torch._foreach_lerp_(list(self.tensors.values()), [v.detach() for v in values.values()], 1 - self.decay)

    def correction(self, clock: Tensor) -> float:
        """What it is to be divided by after so many steps."""
        return float(1 - self.decay ** max(0.0, float(clock) - self.begins))

    def counting(self, values: Mapping[str, Tensor], clock: Tensor) -> dict[str, Tensor]:
        """The values that count: the average, corrected, where there is one by now; else the values themselves."""
        correction = self.correction(clock)
        if not self.active or correction == 0:
            return {n: v.detach() for n, v in values.items()}
        return {n: v / correction for n, v in self.tensors.items()}


@final
class Step:
    """One step of a stack of runs."""

    def __init__(
        self,
        recipe: Recipe,  # what the runs have in common
        runs: Runs,
        lagrangian: Lagrangian,
        optimizer: torch.optim.Optimizer,
        average: Average,
        device: torch.device,
    ) -> None:
        self.recipe, self.runs, self.lagrangian = recipe, runs, lagrangian
        self.optimizer, self.average = optimizer, average
        self.clock = torch.zeros((), device=device)  # steps done, for the target and the average's correction
        self.losses = torch.zeros(runs.size, device=device)  # of the task, summed since somebody set them to zero
        self.fixed = False  # whether the gates are, and only weights move
        gates = [gate for _, gate in runs.template.gated.named_gates()] if runs.template.has_gates else []
        self.acts = any(gate.acts_after_steps for gate in gates)

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
        """Lets go of the other processes: the runs can be looked at, and take no further step.

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
        if self.recipe.estimator != "straight_through" and not self.fixed:
            self._learn(x, y, noise[:, 0], loss)
        if seen is not None and self.recipe.on == "kept":  # of the parameters that the step began from
            seen = self.lagrangian.gaps(self.runs.evaluate(Objective.kept), self.clock)
        return loss, seen

    def _learn(self, x: Tensor, y: Tensor, noise: Tensor, loss: Tensor) -> None:
        """The gradients of gates that learn from the value of the loss, of one draw or of two."""
        mirrored = []
        if self.recipe.estimator == "arm":
            with torch.no_grad(), still_statistics(self.runs.template):
                mirrored.append(self._forward(x, y, 1 - noise)[0])
        self.runs.each(Objective.learn, noise, loss, *mirrored)

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
        if self.acts and not self.fixed:
            self.runs.each(partial(Objective.follow, step=length(self.optimizer, [self._of_weights()])))
        if seen is not None:
            with torch.no_grad():
                (self.lagrangian.ascend if first else self._ascend)(seen, self.clock, first)

    def _of_weights(self) -> dict[str, Any]:
        """The optimizer's group of the weights: they have one rate."""
        own = next(value for name, value in self.runs.values().items() if name.startswith("network.model."))
        return next(g for g in self.optimizer.param_groups if any(p is own for p in g["params"]))
