"""What is added to the loss: a penalty on a cost, or a constraint on it with multipliers that rise until it holds.

`Penalty` is the first paper's λ·cost (Louizos et al., eq. 9). `Constraint` is the second paper's Lagrangian term
(Gallego-Posada et al., eq. 6): it holds the multipliers, remembers the violation seen in the training forward, and
moves the multipliers in `ascend()` (eq. 7) by one of the dual optimizers. λ has units: a penalty's multiplies an
absolute cost (a count of weights, of MACs), a constraint's multiplies a fraction of the dense cost.

This file knows costs only as functions of a `Gated`; it knows nothing of gate families, layers or training loops.
"""

from __future__ import annotations

import copy
import functools
import glob
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor, nn

from ellzero.costs import Cost, dense, floor, l0_norm, macs, params
from ellzero.gated import Gated

# ---- penalty --------------------------------------------------------------------------------------------------------


@final
class Penalty:
    """A fixed price on a cost, added to the loss: λ·cost, or Σ_p λ_p·cost_p ("λ sep.") (Louizos et al., eqs. 3 and 9).

    λ has units 1/cost: the papers' λ = c/N, with N training samples, multiplies the expected *number* of weights, and
    the loss beside it is a mean over samples. `l0.Penalty(l0.l0_norm, weight=0.1 / N)` is the first paper's λ = 0.1/N.

    Args:
        cost: what is penalised: `l0_norm`, `l2_norm`, `params`, `macs`, `units`, or a function like them.
        weight: λ ≥ 0 for the whole model; or `{pattern: λ}` with a λ per group of gates, for costs that count by
            gate. Patterns are those of `fnmatch`, over gate names, and each gate must match exactly one.

    Raises:
        TypeError: if `cost` is not callable.
        ValueError: if a weight is negative or not finite, or there are several for a cost that counts by module; on
            the first call, if a gate matches no pattern or several.

    Example:
        >>> import torch, ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> gated = l0.attach(model, (torch.randn(1, 4),))
        >>> torch.equal(l0.Penalty(l0.l0_norm, weight=0.5)(gated), 0.5 * l0.l0_norm(gated))
        True
    """

    def __init__(self, cost: Cost, weight: float | Mapping[str, float]) -> None:
        _check_callable("cost", cost)
        self.cost = cost
        self._weights = _groups("weight", "`weight` must be a non-negative number", weight, lambda x: x >= 0)
        if None not in self._weights and _function(cost) in (params, macs):
            raise ValueError(f"`weight` must be one number for {_name(cost)}, which counts by module, got {weight!r}")
        self._checked = _WeakMemory()

    @property
    def weight(self) -> float | dict[str, float]:
        """λ, as given."""
        return self._weights.get(None, self._weights)  # type: ignore[arg-type]

    @classmethod
    def aic(cls, n_samples: int, cost: Cost = l0_norm) -> Self:
        """Akaike's criterion per sample, λ = 1/N: −log-likelihood + number of parameters, divided by N."""
        return cls(cost, 1 / _count("n_samples", n_samples))

    @classmethod
    def bic(cls, n_samples: int, cost: Cost = l0_norm) -> Self:
        """The Bayesian criterion per sample, λ = ln N / 2N: −log-likelihood + ½·ln N per parameter, divided by N."""
        return cls(cost, math.log(_count("n_samples", n_samples)) / (2 * n_samples))

    def __call__(self, gated: Gated) -> Tensor:
        """The term to add to the loss: a differentiable scalar."""
        if None in self._weights:
            return self._weights[None] * self.cost(gated)
        if not torch.compiler.is_compiling() and not self._checked.holds(gated):
            self._check_patterns(gated)
            self._checked.keep(gated)
        return torch.stack([weight * self.cost(gated, only=p) for p, weight in self._weights.items()]).sum()

    def __repr__(self) -> str:
        return f"Penalty({_name(self.cost)}, weight={self.weight})"

    def _check_patterns(self, gated: Gated) -> None:
        patterns = [p for p in self._weights if p is not None]
        matches = {name: [p for p in patterns if fnmatchcase(name, p)] for name, _ in gated.named_gates()}
        wrong = [f"{name} matches {found or 'none'}" for name, found in matches.items() if len(found) != 1]
        if wrong:
            raise ValueError(
                f"`weight` must have exactly one pattern for each gate, got {patterns}: {'; '.join(wrong)}"
            )
        for pattern in patterns:
            _dense("weight", self.cost, gated, pattern)


# ---- dual optimizers ------------------------------------------------------------------------------------------------


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
            violation: g = cost/dense − ε, the gradient of the Lagrangian in λ.
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
        _number("`lr` must be a positive number", self.lr, lambda x: x > 0)

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
        _number("`kp` must be a non-negative number", self.kp, lambda x: x >= 0)
        _number("`ki` must be a positive number", self.ki, lambda x: x > 0)
        _number("`nu` must be a number in (-1, 1)", self.nu, lambda x: -1 < x < 1)

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

    Raises:
        ValueError: if an argument is not a positive number.
    """

    rate: float
    start: float = 0.5
    highest: float = 1e3

    memory: ClassVar[tuple[str, ...]] = ("level",)
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("rate", "start", "highest"):
            _number(f"`{name}` must be a positive number", getattr(self, name), lambda x: x > 0)

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        level = memory["level"]
        if first:
            level.fill_(self.start)
        level.mul_(violation.mul(self.rate).exp()).clamp_(min=self.start, max=self.highest)
        multiplier.copy_(level).masked_fill_(violation <= 0, 0.0)


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
        _number("`lr` must be a positive number", self.lr, lambda x: x > 0)

    def step(self, multiplier: Tensor, violation: Tensor, memory: Mapping[str, Tensor], first: bool) -> None:
        past = violation if first else memory["past"]
        multiplier.add_(violation, alpha=2 * self.lr).sub_(past, alpha=self.lr).clamp_(min=0)
        memory["past"].copy_(violation)


@final
@dataclass(frozen=True)
class LinearWarmup:
    """A target that comes down on a straight line, so that the network learns something before it must shrink.

    After t calls of `ascend()` the target in force is ε + (1 − t/steps)·(start − ε), and ε from t = steps on; where
    `start` is below ε, it is ε throughout.

    Args:
        steps: how many calls of `ascend()` it takes.
        start: the first target, a fraction of the dense cost in (0, 1].

    Raises:
        ValueError: if `steps` is not a positive integer or `start` not in (0, 1].
    """

    steps: int
    start: float = 1.0

    def __post_init__(self) -> None:
        _count("steps", self.steps)
        _number("`start` is a fraction of the dense cost in (0, 1]", self.start, lambda x: 0 < x <= 1)

    def target(self, goal: float, ascents: int) -> float:
        """The target in force after so many calls of `ascend()`, on the way to `goal`."""
        return goal + max(0.0, 1 - ascents / self.steps) * max(0.0, self.start - goal)


# ---- constraint -----------------------------------------------------------------------------------------------------


@final
class Constraint(nn.Module):
    """A bound on a cost, cost_g/dense_g ≤ ε_g, as a Lagrangian term with multipliers (Gallego-Posada et al., eq. 5).

    Calling it on a `Gated` gives Σ_g λ_g·(cost_g/dense_g − ε_g) (eq. 6), with λ constant; in training it also records
    the violations cost_g/dense_g − ε_g. `ascend()` moves λ along them (eq. 7), after `backward()` and once per
    optimizer step. Calls in evaluation mode or under `no_grad` record nothing. Under gradient accumulation the last
    call counts; the cost is a function of the gates' parameters, not of a draw or a minibatch, so that the calls of
    one accumulation agree, and so do the ranks of data-parallel training.

    The first call binds the constraint to its network: it computes the dense cost that fractions refer to and checks
    that the target can be reached. From then on it accepts networks with the same gates (the same object, a copy,
    that of a resumed run) or with fewer (after shrinking: fractions go on meaning the original dense network), and
    refuses others. `torch.compile` needs this done before: call `bind(gated)`.

    The state dict is complete: loaded into a constraint built with the same arguments, the run continues bit for bit.
    The multipliers take the dtype and device of the cost at the first call, and move with `.to()` after it.

    Args:
        cost: what is bounded: `l0_norm`, `l2_norm`, `params`, `macs`, `units`, or a function like them.
        at_most: ε, a fraction of the dense cost in (0, 1]; or `{pattern: ε}`, one constraint per pattern, relative to
            the dense cost of its group. Patterns are those of the cost's `only`: gate names for `l0_norm`, `l2_norm`
            and `units`, module names for `params` and `macs`. Groups may overlap.
        per_axis: one constraint with this ε for each gate, for costs that count by gate.
        on: "expected" bounds the expected cost. "kept" is a proxy constraint: the multipliers follow the violation of
            the kept cost, which has no gradient; the term is, in value and gradient, that of the expected one.
        dual: how the multipliers move; `GradientAscent()` if None.
        warmup: how the target comes down to `at_most`; at once if None.

    Attributes:
        multiplier: λ, one entry per constraint.
        violation: the last violations recorded, as fractions; NaN before the first.
        target: the ε in force now, warm-up included.

    Raises:
        TypeError: if `cost` is not callable, or `dual` or `warmup` not of their kind.
        ValueError: if `at_most` is not in (0, 1], or `per_axis` or `on` do not fit; on the first call, if a pattern
            matches nothing or the target is below the least the gates can reach; on any, if the network is foreign.

    Example:
        >>> import torch, ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> gated = l0.attach(model, (torch.randn(1, 4),))
        >>> budget = l0.Constraint(l0.params, at_most=0.5, dual=l0.GradientAscent(lr=0.1))
        >>> loss = gated(torch.randn(3, 4)).square().mean() + budget(gated)
        >>> loss.backward()
        >>> budget.ascend()
        >>> bool((budget.multiplier == 0.1 * budget.violation).all())
        True
    """

    multiplier: Tensor
    violation: Tensor
    target: Tensor
    _dense: Tensor

    def __init__(
        self,
        cost: Cost,
        at_most: float | Mapping[str, float],
        *,
        per_axis: bool = False,
        on: Literal["expected", "kept"] = "expected",
        dual: AbstractDual | None = None,
        warmup: LinearWarmup | None = None,
    ) -> None:
        super().__init__()
        _check_callable("cost", cost)
        dual = GradientAscent() if dual is None else dual
        if not isinstance(dual, AbstractDual):
            raise TypeError(f"`dual` must be a dual optimizer such as GradientAscent(), got {dual!r}")
        if warmup is not None and not isinstance(warmup, LinearWarmup):
            raise TypeError(f"`warmup` must be None or a LinearWarmup, got {warmup!r}")
        if on not in ("expected", "kept"):
            raise ValueError(f"`on` must be 'expected' or 'kept', got {on!r}")
        goal = _fractions(at_most)
        if per_axis and None not in goal:
            raise ValueError(f"`per_axis` must come with one fraction for all gates in `at_most`, got {at_most!r}")
        if per_axis and _function(cost) in (params, macs):
            raise ValueError(f"`per_axis` must come with a cost that counts by gate, got {_name(cost)}: by module")
        self.cost, self.dual, self.warmup = cost, dual, warmup
        self._on, self._per_axis = on, per_axis
        self._goal = goal  # ε of each group; None is the whole model
        self._gates: dict[str, int] | None = None  # name and original size of each gate, once bound
        self._floors: dict[str | None, tuple[float, list[str]]] = {}  # least fraction, and the layers that make it
        self._ascents = 0
        self._fresh = False
        self._checked = _WeakMemory()
        self._allocate(len(goal), torch.float64, torch.device("cpu"))  # until the cost's own are known
        self._aim()

    def forward(self, gated: Gated) -> Tensor:
        """The term to add to the loss, Σ_g λ_g·(cost_g/dense_g − ε_g): a differentiable scalar (eq. 6)."""
        if not torch.compiler.is_compiling():
            self.bind(gated)
        elif self._gates is None:
            raise RuntimeError("call `bind(gated)` on the constraint once before compiling it")
        gap = self._gap(gated)
        if gap.dtype != self.multiplier.dtype:  # the network was moved to another precision
            self.to(gap.dtype)
        if gated.training and torch.is_grad_enabled():
            self.violation.copy_(gap.detach() if self._on == "expected" else self._kept_gap(gated))
            self._fresh = True
        return torch.dot(self.multiplier, gap)

    def ascend(self) -> None:
        """One step of the multipliers along the violations last recorded (eq. 7), and of the warm-up.

        Raises:
            RuntimeError: if no violation was recorded since the last step, or one is not finite (checked on the CPU
                alone: elsewhere each step would have to wait for the device). Nothing has moved then.
        """
        if not self._fresh:
            raise RuntimeError(
                "`ascend()` must follow a violation recorded since the last one, got none: call the constraint on the "
                "`Gated`, in training mode and with gradients enabled, before each `ascend()`"
            )
        violation = self.violation
        if violation.is_cpu and not all(map(math.isfinite, violation.tolist())):
            raise RuntimeError(f"`violation` must be finite, got {violation.tolist()}: the multipliers stay")
        memory = {name: self.get_buffer(f"_dual_{name}") for name in self.dual.memory}
        seen = self.dual.measured(violation, self.target)
        self.dual.step(self.multiplier, seen, memory, first=self._ascents == 0)
        self._ascents += 1
        self._fresh = False
        if self.warmup is not None and self._ascents <= self.warmup.steps:
            self._aim()

    def set_target(self, at_most: float | Mapping[str, float]) -> None:
        """Changes ε of a running constraint; multipliers stay, and a warm-up under way leads to the new target.

        Args:
            at_most: as in the constructor, for the same groups.

        Raises:
            ValueError: if it is not in (0, 1], has other groups, or is below the feasible floor. Nothing changes then.
        """
        goal = _fractions(at_most)
        if self._per_axis and None in goal:
            goal = dict.fromkeys(self._goal, goal[None])
        if goal.keys() != self._goal.keys():
            raise ValueError(f"`at_most` must have the groups it was made with, {list(self._goal)}, got {at_most!r}")
        self._check_feasible(goal, self._floors)
        self._goal = {group: goal[group] for group in self._goal}
        self._aim()

    def bind(self, gated: Gated) -> Self:
        """Binds to a network, or checks that it is the one bound to; the first call does this, compiled code cannot.

        Args:
            gated: the network.

        Returns:
            The constraint itself.

        Raises:
            TypeError: if it is not a `Gated`.
            ValueError: if the network is foreign, a gate is not finite, a pattern matches nothing, or the target is
                below the feasible floor. Nothing changes then.
        """
        if self._checked.holds(gated):
            return self
        if not isinstance(gated, Gated):
            raise TypeError(f"`gated` must be what `attach` returned, got {type(gated).__name__}")
        gates = dict(gated.named_gates())
        sizes = {name: gate.shape.numel() for name, gate in gates.items()}
        if self._gates is not None and (stranger := _stranger(sizes, self._gates)):
            raise ValueError(f"`gated` must be the network this constraint is bound to, got another: {stranger}")
        # Buffers made in inference mode could never be updated outside it.
        with torch.inference_mode(False), torch.no_grad():
            if self._gates is None:
                for name, gate in gates.items():
                    gate.check(name)
                self._refer_to(gated, sizes)
            self.to(self._costs(gated, self._goal).device)
        self._checked.keep(gated)
        return self

    def extra_repr(self) -> str:
        at_most = next(iter(self._goal.values())) if self._per_axis else self._goal.get(None, self._goal)
        return f"{_name(self.cost)}, at_most={at_most}, per_axis={self._per_axis}, on={self._on!r}, dual={self.dual}"

    def _costs(self, gated: Gated, groups: Iterable[str | None], kept: bool = False) -> Tensor:
        # Only what is asked for is passed on, so that a plain function of a `Gated` is a cost too.
        extra: dict[str, Any] = {"kept": True} if kept else {}
        costs = [self.cost(gated, **extra) if g is None else self.cost(gated, only=g, **extra) for g in groups]
        return costs[0].unsqueeze(0) if len(costs) == 1 else torch.stack(costs)  # one is the common case: a view

    def _gap(self, gated: Gated, kept: bool = False) -> Tensor:
        return self._costs(gated, self._goal, kept) / self._dense - self.target

    @torch.no_grad()
    def _kept_gap(self, gated: Gated) -> Tensor:
        return self._gap(gated, kept=True)

    def _refer_to(self, gated: Gated, sizes: dict[str, int]) -> None:
        """Computes what depends on the network, checks it, and only then changes anything."""
        goal = self._goal
        if self._per_axis:
            goal = dict.fromkeys([glob.escape(name) for name in sizes], goal[None])
        argument = "per_axis" if self._per_axis else "at_most"
        whole = {group: _dense(argument, self.cost, gated, group) for group in goal}
        floors = {}
        for group in goal:
            least, layers = floor(self.cost, gated, only=group, kept=self._on == "kept")
            floors[group] = (least / whole[group], list(layers))
        self._check_feasible(goal, floors)
        now = self._costs(gated, goal)
        if self._per_axis:
            self._allocate(len(goal), now.dtype, now.device)
        self.to(device=now.device, dtype=now.dtype)
        self._dense.copy_(torch.tensor(list(whole.values()), dtype=torch.float64))
        self._goal, self._floors, self._gates = goal, floors, sizes
        self._aim()

    def _check_feasible(
        self, goal: Mapping[str | None, float], floors: Mapping[str | None, tuple[float, list[str]]]
    ) -> None:
        for group, (least, layers) in floors.items():
            if goal[group] < least * (1 - 1e-6):  # room for rounding, not for a target that is never met
                where = "" if group is None else f" for {group!r}"
                because = f", because of {', '.join(layers)}" if layers else ""
                raise ValueError(
                    f"`at_most`{where} must be at least {least:.4g}, the least fraction of `{_name(self.cost)}` "
                    f"({self._on}) that the gates can reach{because}; got {goal[group]:.4g}"
                )

    def _aim(self) -> None:
        """Puts the targets in force that belong to this moment."""
        goal = list(self._goal.values())
        if self.warmup is not None:
            goal = [self.warmup.target(g, self._ascents) for g in goal]
        self.target.copy_(torch.tensor(goal, dtype=torch.float64))

    # ---- state ------------------------------------------------------------------------------------------------------

    def _allocate(self, n: int, dtype: torch.dtype, device: torch.device) -> None:
        for name in ("multiplier", "target", *(f"_dual_{name}" for name in self.dual.memory)):
            self.register_buffer(name, torch.zeros(n, dtype=dtype, device=device))
        for name in ("violation", "_dense"):
            self.register_buffer(name, torch.full((n,), math.nan, dtype=dtype, device=device))

    def _identity(self) -> dict[str, Any]:
        groups = "per_axis" if self._per_axis else list(self._goal)
        return {"cost": _name(self.cost), "at_most": groups, "on": self._on, "dual": type(self.dual).__name__}

    def get_extra_state(self) -> dict[str, Any]:
        """What the state dict holds beside tensors: plain numbers and strings."""
        bound = {"gates": self._gates, "goal": dict(self._goal), "floors": dict(self._floors)}
        return {"identity": self._identity(), "ascents": self._ascents, "fresh": self._fresh, **bound}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes up what `get_extra_state` gave; `load_state_dict` has checked it by then."""
        self._gates, self._goal, self._floors = state["gates"], dict(state["goal"]), dict(state["floors"])
        self._ascents, self._fresh = state["ascents"], state["fresh"]
        self._checked = _WeakMemory()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch copies what fits and complains afterwards; here all is checked first: a refusal changes nothing.
        missing = [name for name in (*self._buffers, "_extra_state") if prefix + name not in state_dict]
        problem = None if "_extra_state" in missing else self._mismatch(state_dict[prefix + "_extra_state"])
        if problem:
            error_msgs.append(f"`state_dict` must be that of an equal Constraint, got another: {problem}")
            return
        if missing:
            missing_keys += [prefix + name for name in missing]
            return
        saved = state_dict[prefix + "multiplier"]
        if saved.shape != self.multiplier.shape or saved.dtype != self.multiplier.dtype:
            self._allocate(len(saved), saved.dtype, self.multiplier.device)  # a copy would round what the run had
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _mismatch(self, extra: Any) -> str | None:
        """Why a state is not one of this constraint, or None."""
        if not isinstance(extra, Mapping) or "identity" not in extra:
            return "it is of another kind"
        for key, mine in self._identity().items():
            if extra["identity"][key] != mine:
                return f"its `{key}` is {extra['identity'][key]!r}, here it is {mine!r}"
        if self._gates is not None and extra["gates"] is not None:
            return _stranger(self._gates, extra["gates"])
        return None


# ---- extra-gradient -------------------------------------------------------------------------------------------------


def extra_gradient_step(
    constraint: Constraint, optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]
) -> Tensor:
    """One extra-gradient step of weights, gates and multipliers (Korpelevich, 1976; Gallego-Posada et al., sec. 3.3).

    With ω = (θ, φ, λ) and F the gradients of the Lagrangian (descent in θ and φ, ascent in λ): ω' = ω − η·F(ω), then
    ω ← ω − η·F(ω'). It replaces `backward()`, `optimizer.step()` and `ascend()`, at two gradients and a copy of the
    parameters per step. Any optimizer whose `step()` needs no closure will do: the look-ahead is a full step of it,
    undone before the second. What the optimizer remembers (momentum, Adam's moments and step count) is undone too, and
    so takes in the second gradient alone, once per step; ExtraAdam of Gidel et al. takes in both. The same holds for
    the dual optimizer; Korpelevich's own is `GradientAscent(restarts=False)`.

    Args:
        constraint: the constraint in the Lagrangian.
        optimizer: the optimizer of weights and gates.
        closure: evaluates the Lagrangian, loss + constraint(gated); clearing gradients and `backward()` are done here.
            It is called twice: gates draw new noise and batch-norm statistics move each time.

    Returns:
        The Lagrangian at the starting point, detached.

    Raises:
        RuntimeError: if the closure does not call the constraint in training mode. Parameters, the optimizer's state
            and the multipliers are as before then, and after any error of the closure.

    Example:
        >>> import torch, ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(3, 4)
        >>> gated = l0.attach(model, (x,))
        >>> budget = l0.Constraint(l0.params, at_most=0.5)
        >>> adam = torch.optim.Adam(gated.parameters())
        >>> value = l0.extra_gradient_step(budget, adam, lambda: gated(x).square().mean() + budget(gated))
        >>> int(adam.state[next(gated.parameters())]["step"])
        1
    """

    def gradient() -> Tensor:
        optimizer.zero_grad()
        lagrangian = closure()
        lagrangian.backward()
        return lagrangian.detach()

    value = gradient()
    point = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    memory = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
    dual = {name: buffer.clone() for name, buffer in constraint.named_buffers()}
    ascents, fresh = constraint._ascents, constraint._fresh
    try:
        optimizer.step()
        constraint.ascend()
        gradient()
        seen, fresh_seen = constraint.violation.clone(), constraint._fresh
    finally:
        with torch.no_grad():
            for p, before in point:
                p.copy_(before)
        optimizer.state.clear()
        optimizer.state.update(memory)
        for name, buffer in constraint.named_buffers():
            buffer.copy_(dual[name])
        constraint._ascents, constraint._fresh = ascents, fresh
    constraint.violation.copy_(seen)
    constraint._fresh = fresh_seen
    constraint.ascend()
    optimizer.step()
    return value


# ---- small things ---------------------------------------------------------------------------------------------------


class _WeakMemory:
    """Remembers one object without keeping it alive; copies and unpickled ones start empty, and so check again."""

    def __init__(self) -> None:
        self._ref: Callable[[], object] = object  # a new one each time: nothing is held

    def __reduce__(self) -> tuple[type[_WeakMemory], tuple[()]]:
        return _WeakMemory, ()

    def holds(self, thing: object) -> bool:
        return self._ref() is thing

    def keep(self, thing: object) -> None:
        self._ref = weakref.ref(thing)


def _stranger(sizes: Mapping[str, int], original: Mapping[str, int]) -> str | None:
    """Why gates of these sizes cannot be what is left of the original ones, or None: shrinking only removes."""
    unknown = [name for name in sizes if name not in original]
    if unknown:
        return f"it has gates {unknown}, where {list(original)} are known"
    grown = [name for name, size in sizes.items() if size > original[name]]
    if grown:
        return "; ".join(f"{name} has {sizes[name]} gates instead of {original[name]}" for name in grown)
    return None if sizes else "it has no gates"


def _dense(argument: str, cost: Cost, gated: Gated, group: str | None) -> float:
    """The dense cost of a group; refuses one that is empty, in the words of who named it."""
    must = f"`{argument}` must name what `{_name(cost)}` counts, got {group!r}"
    try:
        whole = dense(cost, gated, only=group)
    except ValueError as error:
        why = str(error).replace("`only`", "it")  # what the user wrote has another name
        raise (error if group is None else ValueError(f"{must}: {why}")) from error
    if not whole > 0:
        raise ValueError(f"{must}, where the dense cost is {whole:g}")
    return whole


def _function(cost: object) -> object:
    while isinstance(cost, functools.partial):
        cost = cost.func
    return cost


def _name(cost: object) -> str:
    function = _function(cost)
    return str(getattr(function, "__name__", type(function).__name__))


def _check_callable(argument: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"`{argument}` must be a function of a Gated such as l0_norm, got {value!r}")


def _number(what: str, value: object, accepts: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not accepts(float(value)):
        raise ValueError(f"{what}, got {value!r}")
    return float(value)


def _count(argument: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{argument}` must be a positive integer, got {value!r}")
    return value


def _groups(argument: str, what: str, value: object, accepts: Callable[[float], bool]) -> dict[str | None, float]:
    """One number, under None, or a number for each pattern."""
    if not isinstance(value, Mapping):
        return {None: _number(what, value, accepts)}
    if not value:
        raise ValueError(f"{what}, or a dictionary of them, got {value!r}")
    for pattern in value:
        if not isinstance(pattern, str):
            raise ValueError(f"`{argument}` must have patterns as keys, got {pattern!r}")
    return {pattern: _number(f"{what}, for {pattern!r} too", number, accepts) for pattern, number in value.items()}


def _fractions(at_most: object) -> dict[str | None, float]:
    return _groups("at_most", "`at_most` is a fraction of the dense cost in (0, 1]", at_most, lambda x: 0 < x <= 1)
