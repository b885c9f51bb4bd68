"""The objectives of all runs of a stack, as a few small tensors over their cost vectors.

A run's objective is its loss plus Σ_p penalty_p·cost_p, plus Σ_g λ_g·(Σ_p member_gp·cost_p − ε_g): Louizos et al., eq.
9, and Gallego-Posada et al., eq. 6, in one form, so that runs which differ in them share every operation. Costs are
fractions of the dense cost of their part; the norm of eq. 17 is no fraction. This file knows recipes and cost vectors;
it does not know networks or data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor

from ellzero import objectives
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.stack import NORMS, l2_of_weights
from ellzero.objectives import costs

COSTS = {"l0_norm": costs.l0_norm, "params": costs.params, "macs": costs.macs}
Part = tuple[costs.Cost, str | None]

# "auto" is `ExponentiatedAscent` on log(cost/target). At a cost of e = 2.7 times the target, λ grows by at most so many
# e-folds in a whole run; and not faster than gates can follow, which move by about their learning rate in a step: to
# close takes some 4/lr steps, in which λ may grow by two e-folds. The target comes down geometrically, if it does.
AUTO_FOLDS, AUTO_SPEED = 100.0, 0.5


def parts(recipes: Sequence[Recipe], gates: Iterable[str]) -> list[Part]:
    """The entries of the cost vector that these recipes need: `l0_norm` of each set of gates, then the costs of
    modules that a target names, then `l2_norm` where it acts.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> [(cost.__name__, only) for cost, only in parts([get("demo")], ["conv1", "conv2"])]
        [('l0_norm', 'conv1'), ('l0_norm', 'conv2'), ('macs', None)]
    """
    by_gates: list[Part] = [(costs.l0_norm, name) for name in gates]
    others = {(r.cost, pattern): None for r in recipes if r.cost != "l0_norm" for pattern in targets(r)}
    by_module: list[Part] = [(COSTS[name], None if pattern == "*" else pattern) for name, pattern in others]
    norms: list[Part] = []
    if by_gates and recipes[0].l2 > 0:  # runs of a stack agree in it
        norms.append((l2_of_weights if recipes[0].detach_l2 else costs.l2_norm, None))
    return by_gates + by_module + norms


def targets(recipe: Recipe) -> dict[str, float]:
    """The target of every constraint of a recipe by its pattern, "*" for the whole network."""
    if recipe.at_most is None:
        return {}
    return dict(recipe.at_most) if isinstance(recipe.at_most, dict) else {"*": recipe.at_most}


def dual_optimizer(recipe: Recipe, steps: int) -> objectives.AbstractDual:
    """What moves the multipliers of a recipe, in a run of so many steps.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> dual_optimizer(get("gallego-mlp"), 1000)
        GradientAscent(lr=0.0001, restarts=True)
    """
    lr = 1e-4 if recipe.dual_lr is None else recipe.dual_lr
    match recipe.dual:
        case "auto":
            gate_lr = recipe.lr if recipe.gate_lr is None else recipe.gate_lr
            return objectives.ExponentiatedAscent(min(AUTO_FOLDS / steps, AUTO_SPEED * gate_lr))
        case "nupi":
            return objectives.NuPI(kp=recipe.kp, ki=lr, nu=recipe.nu)
        case "extrapolation":
            return objectives.ExtrapolationFromPast(lr)
    return objectives.GradientAscent(lr, recipe.restarts)


@final
class Lagrangian:
    """Penalties, constraints and multipliers of a stack.

    Args:
        recipes: one per run.
        parts: what the entries of a cost vector are, from `parts`.
        dense: the dense cost of each entry.
        images: N of λ = c/N.
        steps: of a whole run with gates that learn.
        device: where the tensors are.

    Raises:
        ValueError: a pattern of a recipe matches no gates.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        parts: Sequence[Part],
        dense: Sequence[float],
        *,
        images: int,
        steps: int,
        device: torch.device,
    ) -> None:
        names = [str(only) for cost, only in parts if cost is costs.l0_norm]
        whole = torch.tensor(dense, dtype=torch.float64)
        groups = [targets(r) for r in recipes]
        count = max([len(g) for g in groups] + [1])
        penalty = torch.zeros(len(recipes), len(parts), dtype=torch.float64)
        member = torch.zeros(len(recipes), count, len(parts), dtype=torch.float64)
        target = torch.ones(len(recipes), count, dtype=torch.float64)  # a constraint that is none holds always
        for run, recipe in enumerate(recipes):
            for k, (cost, _) in enumerate(parts):
                if cost in NORMS:  # ½·l2·‖w‖², as "weight decay" has it
                    penalty[run, k] = recipe.l2 * recipe.l2_gated_factor / 2
            if recipe.penalty is not None:
                each = recipe.penalty if isinstance(recipe.penalty, dict) else {"*": recipe.penalty}
                _refuse_unmatched("penalty", each, names)
                for k, name in enumerate(names):
                    c = next((v for pattern, v in each.items() if fnmatchcase(name, pattern)), 0.0)
                    penalty[run, k] = c / images * whole[k]
            for g, (pattern, at_most) in enumerate(groups[run].items()):
                target[run, g] = at_most
                if recipe.cost == "l0_norm":
                    _refuse_unmatched("at_most", (pattern,), names)
                    chosen = torch.tensor([fnmatchcase(name, pattern) for name in names])
                    member[run, g, : len(names)] = whole[: len(names)] * chosen / (whole[: len(names)] * chosen).sum()
                else:
                    member[run, g, parts.index((COSTS[recipe.cost], None if pattern == "*" else pattern))] = 1
        self.penalty, self.member, self.target = (t.to(device, torch.float32) for t in (penalty, member, target))
        self.constrained = any(groups)
        self.warmup = recipes[0].target_warmup * steps
        self.dual = dual_optimizer(recipes[0], steps)
        self.multiplier = torch.zeros(len(recipes), count, device=device)
        self.memory = {name: torch.zeros_like(self.multiplier) for name in self.dual.memory}

    def now(self, clock: Tensor) -> Tensor:
        """The targets after so many steps: those of the recipes, or on the way down to them from 1, on a line or, with
        "auto", by the same factor in every step.
        """
        if not self.warmup:
            return self.target
        left = (1 - clock / self.warmup).clamp(min=0)
        return self.target ** (1 - left) if self.dual.relative else self.target + (1 - self.target) * left

    def gaps(self, cost: Tensor, clock: Tensor) -> Tensor:
        """By how much every constraint is violated by these cost vectors: (runs, parts) to (runs, constraints)."""
        return (self.member * cost[:, None]).sum(-1) - self.now(clock)

    def terms(self, cost: Tensor, gaps: Tensor) -> Tensor:
        """What is added to the loss of every run."""
        return (self.penalty * cost).sum(1) + (self.multiplier * gaps).sum(1)

    def __call__(self, cost: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
        """Terms and gaps."""
        gaps = self.gaps(cost, clock)
        return self.terms(cost, gaps), gaps

    def ascend(self, violation: Tensor, clock: Tensor, first: bool) -> None:
        """Moves the multipliers: by cost/dense − target, or, with "auto", by log(cost/(dense·target))."""
        seen = self.dual.measured(violation, self.now(clock))
        self.dual.step(self.multiplier, seen, self.memory, first=first)

    def state(self) -> dict[str, Any]:
        """What changes in training."""
        return {"multiplier": self.multiplier, "memory": dict(self.memory)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up a state, in place: a captured step goes on with the same tensors."""
        self.multiplier.copy_(state["multiplier"])
        for name, tensor in self.memory.items():
            tensor.copy_(state["memory"][name])


def _refuse_unmatched(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"`{argument}` must have patterns that match gates ({', '.join(names)}), got {pattern!r}")
