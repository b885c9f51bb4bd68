"""How multipliers follow the violations of their constraints, and how targets come down.

Each class here is a configuration that acts on tensors of any shape: one entry per constraint, of one run or of many.
What a dual optimizer remembers lives with the multipliers. This file knows no costs and no networks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from ellzero.objectives.checking import check_count, check_number

_FOLDS = 100.0  # e-folds of λ in a run of `SelfPacedAscent` that is at e = 2.7 times its target throughout
_SPEED = 0.5  # e-folds of λ per step, unit of violation and unit of the gates' learning rate, at most
_COUNTS = 0.5  # the violation that counts at most (`benchmarks/pacing.py`)
_START = 0.1  # where ℓ begins, and how low it falls (the same)


class AbstractDual(ABC):
    """How multipliers follow the violations: a configuration; what it remembers lives in the constraint's buffers.

    `memory` names the tensors it needs beside the multiplier, of the same shape, zero at the beginning. `relative` says
    which violation it follows: cost/dense − ε, or log(cost/(dense·ε)).
    """

    memory: ClassVar[tuple[str, ...]] = ()
    relative: ClassVar[bool] = False

    def measured(self, violation: Tensor, target: Tensor) -> Tensor:
        """The violation that it follows, from cost/dense − ε and ε."""
        return (violation / target).clamp(min=-1 + 1e-6).log1p() if self.relative else violation

    @abstractmethod
    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        """Moves `multiplier` and `memory` in place, and leaves the multiplier ≥ 0.

        Args:
            multiplier: λ, one entry per constraint.
            violation: what `measured` gave; cost/dense − ε is the gradient of the Lagrangian in λ.
            memory: the tensors named by `memory`.
            first: whether no step was taken before.
        """


@final
@dataclass(frozen=True)
class GradientAscent(AbstractDual):
    """Projected gradient ascent, λ ← max(0, λ + η·g), with dual restarts (Gallego-Posada et al., eq. 7, section 3.3).

    With `restarts`, λ := 0 wherever the constraint holds, g ≤ 0: without them the multiplier gathered on the way
    keeps pushing the network below its target long after the target is met.

    Args:
        lr: η, in units of λ per unit of fraction and step; the default is the paper's.
        restarts: whether multipliers of constraints that hold are set to zero.

    Raises:
        ValueError: if `lr` is not a positive number.
    """

    lr: float = 1e-4
    restarts: bool = True

    def __post_init__(self) -> None:
        check_number("`lr` must be a positive number", self.lr, lambda x: x > 0)

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        multiplier.add_(violation, alpha=self.lr)
        if self.restarts:  # what is left is λ ≥ 0 plus η·g > 0: the projection has nothing to do
            multiplier.masked_fill_(violation <= 0, 0.0)
        else:
            multiplier.clamp_(min=0)


@final
@dataclass(frozen=True)
class NuPI(AbstractDual):
    """The νPI controller: integral and proportional action on a smoothed violation (Sohrabi et al., ICML 2024, alg. 1).

    ξ_t = ν·ξ_{t−1} + (1−ν)·g_t and λ ← max(0, λ + κ_i·g_t + κ_p·(ξ_t − ξ_{t−1})), starting at ξ_0 = 0 with a first
    step of plain ascent, κ_i·g_0. The proportional term makes the multiplier fall as soon as the violation does, which
    damps the overshoot of gradient ascent without restarts. κ_p = 0 is `GradientAscent(κ_i, restarts=False)`.

    Args:
        kp: κ_p, the proportional gain; orders of magnitude above `ki` is usual.
        ki: κ_i, the integral gain: the learning rate of gradient ascent.
        nu: ν in (−1, 1), the smoothing of the violation; 0 for none.

    Raises:
        ValueError: if `ki` is not positive, `kp` negative, or `nu` outside (−1, 1).
    """

    kp: float
    ki: float = 1e-4
    nu: float = 0.0

    memory: ClassVar[tuple[str, ...]] = ("xi",)

    def __post_init__(self) -> None:
        check_number("`kp` must be a non-negative number", self.kp, lambda x: x >= 0)
        check_number("`ki` must be a positive number", self.ki, lambda x: x > 0)
        check_number("`nu` must be a number in (-1, 1)", self.nu, lambda x: -1 < x < 1)

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        multiplier.add_(violation, alpha=self.ki)
        if not first:
            change = (violation - memory["xi"]).mul_(1 - self.nu)  # ξ_t − ξ_{t−1}
            multiplier.add_(change, alpha=self.kp)
            memory["xi"].add_(change)
        multiplier.clamp_(min=0)


@final
@dataclass(frozen=True)
class ExponentiatedAscent(AbstractDual):
    """Ascent in log λ, and no pressure where the constraint holds.

    The level ℓ ← ℓ·exp(η·g) grows by a factor where the constraint is violated and falls by one where it holds, and λ
    is ℓ where it is violated and 0 where it holds, as with dual restarts. The multiplier that a target takes may be
    0.1 or 100, with the network, the cost and the target; an additive step must be tuned to it, this one finds it.
    The violation is relative, g = log(cost/(dense·ε)). Goes well with `on="kept"`.

    Args:
        rate: η, e-folds per unit of violation and step. Half of the gates' learning rate, with Adam, lets it grow as
            fast as they can follow.
        start: ℓ at the beginning.
        highest: where ℓ ends; `start` is the lowest.
        counts: the largest g that counts, and −g the least; any if infinite.

    Raises:
        ValueError: if an argument is not a positive number.
    """

    rate: float
    start: float = 0.5
    highest: float = 1e3
    counts: float = math.inf

    memory: ClassVar[tuple[str, ...]] = ("level",)
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("rate", "start", "highest"):
            check_number(f"`{name}` must be a positive number", getattr(self, name), lambda x: x > 0)
        if not self.counts > 0:
            raise ValueError(f"`counts` must be a positive number, got {self.counts!r}")

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        level = memory["level"]
        if first:
            level.fill_(self.start)
        folds = violation.clamp(-self.counts, self.counts).mul_(self.rate)
        level.mul_(folds.exp_()).clamp_(min=self.start, max=self.highest)
        multiplier.copy_(level).masked_fill_(violation <= 0, 0.0)


@final
@dataclass(frozen=True)
class SelfPacedAscent(AbstractDual):
    """Ascent in log λ at a rate that needs no tuning: `ExponentiatedAscent` with η = min(100/steps, gate_lr/2).

    The level ℓ ← ℓ·exp(η·g) with g = log(cost/target) within [−½, ½], and λ is ℓ where the constraint is violated and 0
    where it holds. ℓ begins at 0.1, below what a cross-entropy yields to: gates follow the loss first, and are
    pressed by as much as it takes. The first bound on η is that of a run: λ grows by at most 50 e-folds in all. The
    second is that of the gates: Adam moves them by about `gate_lr` in a step, so that closing one takes some 4/gate_lr
    steps, in which λ may grow by one e-fold. What is kept does not answer before a gate is closed: a λ that grows
    faster closes all of them at once, and the network with them. Goes well with `on="kept"` and `GeometricWarmup`,
    under which the relative violation that a steady shrinking leaves is the same at every step.

    Args:
        steps: of the run, while gates learn.
        gate_lr: the learning rate of the gates, with Adam.

    Raises:
        ValueError: if `steps` is not a positive integer or `gate_lr` not a positive number.

    Example:
        >>> SelfPacedAscent(steps=1000, gate_lr=0.5).rate, SelfPacedAscent(steps=1000, gate_lr=0.1).rate
        (0.1, 0.05)
    """

    steps: int
    gate_lr: float
    start: float = field(default=_START, init=False)  # shown: a run that was stopped goes on with the same
    counts: float = field(default=_COUNTS, init=False)
    _ascent: ExponentiatedAscent = field(init=False, repr=False, compare=False)

    memory: ClassVar[tuple[str, ...]] = ExponentiatedAscent.memory
    relative: ClassVar[bool] = ExponentiatedAscent.relative

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_number("`gate_lr` must be a positive number", self.gate_lr, lambda x: x > 0)
        # Made once: a compiler cannot follow the checks of another one at each step.
        rate = min(_FOLDS / self.steps, _SPEED * self.gate_lr)
        object.__setattr__(self, "_ascent", ExponentiatedAscent(rate, start=self.start, counts=self.counts))

    @property
    def rate(self) -> float:
        """η, e-folds per unit of violation and step."""
        return self._ascent.rate

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        self._ascent.step(multiplier, violation, memory, first)


@final
@dataclass(frozen=True)
class ExtrapolationFromPast(AbstractDual):
    """Extrapolation from the past for the multipliers, λ ← max(0, λ + η·(2·g_t − g_{t−1})) (Gidel et al., 2019).

    The stored λ is the extrapolated one, which the primal step sees; without the projection the one-line form is
    theirs exactly. The first step is plain ascent (g_{−1} = g_0). Only the multipliers extrapolate: the weights follow
    their own optimizer. For a method that extrapolates both, see `extra_gradient_step`.

    Args:
        lr: η.

    Raises:
        ValueError: if `lr` is not a positive number.
    """

    lr: float = 1e-4

    memory: ClassVar[tuple[str, ...]] = ("past",)

    def __post_init__(self) -> None:
        check_number("`lr` must be a positive number", self.lr, lambda x: x > 0)

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        past = violation if first else memory["past"]
        multiplier.add_(violation, alpha=2 * self.lr).sub_(past, alpha=self.lr).clamp_(min=0)
        memory["past"].copy_(violation)


class AbstractWarmup(ABC):
    """How a target comes down to its goal, so that the network can learn before it must shrink."""

    steps: float

    @abstractmethod
    def target(self, goal: Tensor, clock: Tensor) -> Tensor:
        """The targets in force after `clock` calls of `ascend()`, a scalar, on the way to `goal`, of any shape."""


@final
@dataclass(frozen=True)
class LinearWarmup(AbstractWarmup):
    """A target that comes down on a straight line.

    After t calls of `ascend()` the target in force is ε + (1 − t/steps)·(start − ε), and ε from t = steps on; where
    `start` is below ε, it is ε throughout.

    Args:
        steps: how many calls of `ascend()` it takes.
        start: the first target, a fraction of the dense cost in (0, 1].

    Raises:
        ValueError: if `steps` is not a positive number or `start` not in (0, 1].
    """

    steps: float
    start: float = 1.0

    def __post_init__(self) -> None:
        check_number("`steps` must be a positive number", self.steps, lambda x: x > 0)
        check_number("`start` is a fraction of the dense cost in (0, 1]", self.start, lambda x: 0 < x <= 1)

    def target(self, goal: Tensor, clock: Tensor) -> Tensor:
        return goal + (self.start - goal).clamp(min=0) * _left(clock, self.steps)


@final
@dataclass(frozen=True)
class GeometricWarmup(AbstractWarmup):
    """A target that comes down from 1 by the same factor in every step.

    After t calls of `ascend()` the target in force is ε^(t/steps), and ε from t = steps on. A dual optimizer that
    follows log(cost/target), as `SelfPacedAscent` does, sees the same fall in every step.

    Args:
        steps: how many calls of `ascend()` it takes.

    Raises:
        ValueError: if `steps` is not a positive number.
    """

    steps: float

    def __post_init__(self) -> None:
        check_number("`steps` must be a positive number", self.steps, lambda x: x > 0)

    def target(self, goal: Tensor, clock: Tensor) -> Tensor:
        return goal ** (1 - _left(clock, self.steps))


def _left(clock: Tensor, steps: float) -> Tensor:
    """The share of a warm-up that is still to come."""
    return (1 - clock / steps).clamp(min=0)
