"""A bound on a cost, as a term of the loss with multipliers that rise until it holds.

λ has units: it multiplies a fraction of the dense cost, where a penalty's multiplies an absolute one. This file knows
costs only as functions of a `Gated`; it knows no gate families, layers or loops.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from ellzero.gated.module import Gated
from ellzero.objectives.checking import (
    WeakMemory,
    check_cost,
    check_fractions,
    counts_by_module,
    dense_of,
    expects,
    refuse_unmoved,
    stranger,
)
from ellzero.objectives.costs import Cost, floor, kept, name_of, of_parts, only, savings
from ellzero.objectives.duals import AbstractDual, AbstractWarmup, GradientAscent
from ellzero.objectives.watching import Watch


@dataclass
class _Clock:
    """How often multipliers moved, and whether a violation was recorded since. To write it into a module takes long."""

    ascents: int = 0
    fresh: bool = False


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
    that of a resumed run, one that has shrunk: fractions go on meaning the original dense network), and refuses others.
    `torch.compile` needs this done before: call `bind(gated)`.

    The state dict is complete: loaded into a constraint built with the same arguments, the run continues bit for bit.
    The multipliers take the dtype and device of the cost at the first call, and move with `.to()` after it.

    Args:
        cost: what is bounded: `l0_norm`, `l2_norm`, `params`, `macs`, `units`, or a function like them.
        at_most: ε, a fraction of the dense cost in (0, 1]; or `{pattern: ε}`, one constraint per pattern, relative to
            the dense cost of its group. Patterns are those of the cost's `only`: gate names for `l0_norm`, `l2_norm`
            and `units`, module names for `params` and `macs`. Groups may overlap.
        per_axis: one constraint with this ε for each gate, for costs that count by gate.
        on: "expected" bounds the expected cost. "kept" is a proxy constraint: the multipliers follow the violation of
            the kept cost, which has no gradient; the term is, in value and gradient, that of the expected one. Gates
            without an expected cost are pressed by their family's own penalty instead (`complexity`), each in
            proportion to what closing it would save of the dense network.
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
        >>> budget = l0.Constraint(l0.params, at_most=0.5, dual=l0.duals.GradientAscent(lr=0.1))
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
        warmup: AbstractWarmup | None = None,
    ) -> None:
        super().__init__()
        check_cost(cost)
        dual = GradientAscent() if dual is None else dual
        if not isinstance(dual, AbstractDual):
            raise TypeError(f"`dual` must be a dual optimizer such as GradientAscent(), got {dual!r}")
        if warmup is not None and not isinstance(warmup, AbstractWarmup):
            raise TypeError(f"`warmup` must be None or a warm-up such as LinearWarmup(steps), got {warmup!r}")
        if on not in ("expected", "kept"):
            raise ValueError(f"`on` must be 'expected' or 'kept', got {on!r}")
        goal = check_fractions(at_most)
        if per_axis and None not in goal:
            raise ValueError(f"`per_axis` must come with one fraction for all gates in `at_most`, got {at_most!r}")
        if per_axis and counts_by_module(cost):
            raise ValueError(f"`per_axis` must come with a cost that counts by gate, got {name_of(cost)}: by module")
        self.cost, self.dual, self.warmup = cost, dual, warmup
        self._on, self._per_axis = on, per_axis
        self._goal = goal  # ε of each group; None is the whole model
        self._gates: dict[str, int] | None = None  # name and original size of each gate, once bound
        self._floors: dict[str | None, tuple[float, list[str]]] = {}  # least fraction, and the layers that make it
        self._shares: Tensor | None = None  # of the dense cost, by group and gate, where gates have no expectation
        self._clock = _Clock()
        self._checked = WeakMemory()
        self._watch = Watch()
        self._allocate(len(goal), torch.float64, torch.device("cpu"))  # until the cost's own are known
        self._aim()

    def forward(self, gated: Gated) -> Tensor:
        """The term to add to the loss, Σ_g λ_g·(cost_g/dense_g − ε_g): a differentiable scalar (eq. 6)."""
        if not torch.compiler.is_compiling():
            self.bind(gated)
            self._watch.look(gated, self._clock.ascents)
        elif self._gates is None:
            raise RuntimeError("call `bind(gated)` on the constraint once before compiling it")
        gap, multiplier = self._pressed(gated), self.multiplier
        if gap.dtype != multiplier.dtype:  # the network was moved to another precision
            multiplier = self.to(gap.dtype).multiplier
        if gated.training and torch.is_grad_enabled():
            self.violation.copy_(gap.detach() if self._on == "expected" else self._kept_gap(gated))
            self._clock.fresh = True
        return (multiplier * gap).sum()  # a product of vectors would be rounded by autocast

    def ascend(self) -> None:
        """One step of the multipliers along the violations last recorded (eq. 7), and of the warm-up.

        Raises:
            RuntimeError: if no violation was recorded since the last step, or one is not finite (checked on the CPU
                alone: elsewhere each step would have to wait for the device). Nothing has moved then.
        """
        self.climb()
        clock = self._clock
        clock.ascents += 1
        clock.fresh = False
        if self.warmup is not None and clock.ascents < self.warmup.steps + 1:
            self._aim()

    def climb(self) -> None:
        """What `ascend()` does to the multipliers, without counting as a step: for a look-ahead that is undone."""
        if not self._clock.fresh:
            raise RuntimeError(
                "`ascend()` must follow a violation recorded since the last one, got none: call the constraint on the "
                "`Gated`, in training mode and with gradients enabled, before each `ascend()`"
            )
        violation = self.violation
        if violation.is_cpu and not all(map(math.isfinite, violation.tolist())):
            raise RuntimeError(f"`violation` must be finite, got {violation.tolist()}: the multipliers stay")
        seen, first = self.dual.measured(violation, self.target), self._clock.ascents == 0
        self.dual.step(self.multiplier, seen, self._memory(), first)

    def duals(self) -> list[Tensor]:
        """All that `climb` moves."""
        return [self.multiplier, *self._memory().values()]

    def _memory(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"_dual_{name}") for name in self.dual.memory}

    def set_target(self, at_most: float | Mapping[str, float]) -> None:
        """Changes ε of a running constraint; multipliers stay, and a warm-up under way leads to the new target.

        Args:
            at_most: as in the constructor, for the same groups.

        Raises:
            ValueError: if it is not in (0, 1], has other groups, or is below the feasible floor. Nothing changes then.
        """
        goal = check_fractions(at_most)
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
        if self._gates is not None and (other := stranger(sizes, self._gates)):
            raise ValueError(f"`gated` must be the network this constraint is bound to, got another: {other}")
        # Buffers made in inference mode could never be updated outside it.
        with torch.inference_mode(False), torch.no_grad():
            if self._gates is None:
                for name, gate in gates.items():
                    gate.check(name)
                self._refer_to(gated, sizes)
            self._shares = self._saved(gated, dict(zip(self._goal, self._dense.tolist(), strict=True)))
            self.to(self._pressed(gated).device)
        self._checked.keep(gated)
        return self

    def extra_repr(self) -> str:
        at_most = next(iter(self._goal.values())) if self._per_axis else self._goal.get(None, self._goal)
        return f"{name_of(self.cost)}, at_most={at_most}, per_axis={self._per_axis}, on={self._on!r}, dual={self.dual}"

    def _costs(self, gated: Gated, cost: Cost, groups: Mapping[str | None, float]) -> Tensor:
        costs = of_parts(cost, groups, gated)
        return costs[0].unsqueeze(0) if len(costs) == 1 else torch.stack(costs)  # one is the common case: a view

    def _gap(self, gated: Gated, cost: Cost) -> Tensor:
        now, dense = self._costs(gated, cost, self._goal), self._dense
        if now.device != dense.device:  # the network was moved since, as trainers do
            with torch.inference_mode(False):
                dense = self.to(now.device)._dense
        return now / dense - self.target

    @torch.no_grad()
    def _kept_gap(self, gated: Gated) -> Tensor:
        return self._gap(gated, kept(self.cost))

    def _pressed(self, gated: Gated) -> Tensor:
        """What the multipliers weigh: the gaps of the expected cost, or of what stands for it."""
        if self._shares is None:
            return self._gap(gated, self.cost)
        return (self._shares * gated.complexity()).sum(1) - self.target

    def _saved(self, gated: Gated, whole: Mapping[str | None, float]) -> Tensor | None:
        """What closing each gate alone saves of each group, as a fraction; `None` where gates have an expectation."""
        if self._on == "expected" or all(expects(only(self.cost, group), gated) for group in whole):
            return None
        ones = torch.ones(gated.liveness.size)
        return torch.stack([savings(only(self.cost, group), gated, ones) / whole[group] for group in whole])

    def _refer_to(self, gated: Gated, sizes: dict[str, int]) -> None:
        """Computes what depends on the network, checks it, and only then changes anything."""
        goal = self._goal
        if self._per_axis:
            goal = dict.fromkeys([glob.escape(name) for name in sizes], goal[None])
        argument = "per_axis" if self._per_axis else "at_most"
        whole = {group: dense_of(argument, self.cost, gated, group) for group in goal}
        refuse_unmoved(self.cost, gated)
        bounded = kept(self.cost) if self._on == "kept" else self.cost
        floors = {}
        for group in goal:
            least, layers = floor(only(bounded, group), gated)
            floors[group] = (least / whole[group], list(layers))
        self._check_feasible(goal, floors)
        shares = self._saved(gated, whole)
        now = self._costs(gated, self.cost, goal) if shares is None else shares
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
                named = [f"`{layer}`" if layer else "what the model multiplies by itself" for layer in layers[:3]]
                more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
                because = f", because of {', '.join(named)}{more}" if layers else ""
                raise ValueError(
                    f"`at_most`{where} must be at least {least:.4g}, the least fraction of `{name_of(self.cost)}` "
                    f"({self._on}) that the gates can reach{because}; got {goal[group]:.4g}"
                )

    def _aim(self) -> None:
        """Puts the targets in force that belong to this moment."""
        goal = torch.tensor(list(self._goal.values()), dtype=torch.float64)
        if self.warmup is not None:
            goal = self.warmup.target(goal, torch.tensor(self._clock.ascents, dtype=torch.float64))
        for target, value in zip(self.target, goal.tolist(), strict=True):
            target.fill_(value)  # as numbers: a copy from the CPU would make every step wait for the device

    # ---- state ------------------------------------------------------------------------------------------------------

    def _allocate(self, n: int, dtype: torch.dtype, device: torch.device) -> None:
        for name in ("multiplier", "target", *(f"_dual_{name}" for name in self.dual.memory)):
            self.register_buffer(name, torch.zeros(n, dtype=dtype, device=device))
        for name in ("violation", "_dense"):
            self.register_buffer(name, torch.full((n,), math.nan, dtype=dtype, device=device))

    def _identity(self) -> dict[str, Any]:
        groups = "per_axis" if self._per_axis else list(self._goal)
        return {"cost": name_of(self.cost), "at_most": groups, "on": self._on, "dual": type(self.dual).__name__}

    def get_extra_state(self) -> dict[str, Any]:
        """What the state dict holds beside tensors: plain numbers and strings."""
        bound = {"gates": self._gates, "goal": dict(self._goal), "floors": dict(self._floors)}
        return {"identity": self._identity(), "ascents": self._clock.ascents, "fresh": self._clock.fresh, **bound}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes up what `get_extra_state` gave; `load_state_dict` has checked it by then."""
        self._gates, self._goal, self._floors = state["gates"], dict(state["goal"]), dict(state["floors"])
        self._clock = _Clock(state["ascents"], state["fresh"])
        self._checked = WeakMemory()
        self._watch = Watch()

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
            return stranger(self._gates, extra["gates"])
        return None
