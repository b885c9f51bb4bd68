"""From a recipe to a network and its objective, and from a trained network to its architecture as the papers print it.

This file knows recipes, networks, gates and costs; it trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import torch
from torch import nn

from ellzero import gates
from ellzero.experiments import networks
from ellzero.experiments.data import Dataset, scaled
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.stepping.stack import NORMS, l2_of_weights
from ellzero.gated import placements
from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.objectives import costs, duals
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.lagrangian import Lagrangian
from ellzero.out import finalization


def network(recipe: Recipe, classes: int) -> nn.Module:
    """The network that a recipe names, without gates."""
    return recipe.facts.make(classes, recipe.dropout)


def where(recipe: Recipe) -> placements.Where:
    """Where the gates of a recipe go, if it has any."""
    if recipe.placement == "shrinkable":
        return placements.shrinkable()
    only = recipe.facts.blocks if recipe.placement == "blocks" else None
    return placements.per_layer(only=only or "*")


def build(recipe: Recipe, dataset: Dataset, device: torch.device) -> tuple[Gated | None, nn.Module]:
    """The network of a recipe, initialised by its seed, and its gates (none for a dense one)."""
    torch.manual_seed(recipe.seed)
    model = network(recipe, len(dataset.classes))
    gated = None
    if recipe.placement is not None:
        rule = gates.Median() if recipe.rule == "median" else gates.Noiseless()
        makers = {p: partial(gates.HardConcreteGate, drop_rate=r, rule=rule) for p, r in recipe.drop_rates.items()}
        gated = attach(model, (scaled(dataset.train_x[:2].cpu()),), gate=makers, where=where(recipe))
    if recipe.init == "2018":
        networks.initialize_2018(model)
    else:
        # Gates of `per_layer` have the name of the layer whose weights make up for them; others belong to no one layer.
        names = [name for name, _ in gated.named_gates()] if gated and recipe.placement != "shrinkable" else []
        networks.initialize_2021(model, {name: recipe.drop_rate(name) for name in names})
    return (None, model.to(device)) if gated is None else (gated.to(device), model)


def architecture(gated: Gated) -> dict[str, int]:
    """What is left in each place that has gates: the papers' "pruned architecture", e.g. 20-25-45-462.

    A fully connected layer's inputs are counted where the layer still reads them, so only in maps that are open.
    """
    plan, graph = gated.plan(refuse=False), gated.graph
    out = {}
    for placement in gated.placements:
        site = placement.multiplies[0]
        if (
            len(placement.multiplies) == 1
            and len(site.dims) == 1
            and graph.shapes[site.tensor][site.dims[0]] == placement.shape[0]
        ):
            rows = plan.rows.get(site.tensor, {}).get(site.dims[0])
            out[placement.name] = placement.shape[0] if rows is None else len(rows)
        else:
            units = graph.units[site.tensor][site.dims][site.units >= 0]
            out[placement.name] = int(plan.units[np.unique(units)].sum())
    return out


# ---------------------------------------------------------------- the objective

COSTS = {"l0_norm": costs.l0_norm, "params": costs.params, "macs": costs.macs}
Part = tuple[costs.Cost, str | None]


def parts(recipes: Sequence[Recipe], names: Iterable[str]) -> list[Part]:
    """The entries of the cost vector that these recipes need: `l0_norm` of each placement, then the costs of
    modules that a target names, then `l2_norm` where it acts.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> [(cost.__name__, only) for cost, only in parts([get("demo")], ["conv1", "conv2"])]
        [('l0_norm', 'conv1'), ('l0_norm', 'conv2'), ('macs', None)]
    """
    by_gates: list[Part] = [(costs.l0_norm, name) for name in names]
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


def dual_optimizer(recipe: Recipe, steps: int) -> duals.AbstractDual:
    """What moves the multipliers of a recipe, in a run of so many steps.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> dual_optimizer(get("gallego-mlp"), 1000)
        GradientAscent(lr=0.0001, restarts=True)
    """
    lr = 1e-4 if recipe.dual_lr is None else recipe.dual_lr
    match recipe.dual:
        case "auto":
            return duals.SelfPacedAscent(steps, recipe.lr if recipe.gate_lr is None else recipe.gate_lr)
        case "nupi":
            return duals.NuPI(kp=recipe.kp, ki=lr, nu=recipe.nu)
        case "extrapolation":
            return duals.ExtrapolationFromPast(lr)
    return duals.GradientAscent(lr, recipe.restarts)


def warmup(recipe: Recipe, steps: int) -> duals.AbstractWarmup | None:
    """How the targets of a recipe come down in a run of so many steps: by a factor with "auto", else on a line."""
    if not recipe.target_warmup * steps:
        return None
    return (duals.GeometricWarmup if recipe.dual == "auto" else duals.LinearWarmup)(recipe.target_warmup * steps)


def lagrangian(
    recipes: Sequence[Recipe],
    parts: Sequence[Part],
    dense: Sequence[float],
    *,
    images: int,
    steps: int,
    device: torch.device,
) -> Lagrangian:
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
    names = [str(only) for cost, only in parts if cost is costs.l0_norm]
    whole = torch.tensor(dense, dtype=torch.float64)
    groups = [targets(r) for r in recipes]
    count = max([len(g) for g in groups] + [1])
    prices = torch.zeros(len(recipes), len(parts), dtype=torch.float64)
    member = torch.zeros(len(recipes), count, len(parts), dtype=torch.float64)
    goal = torch.ones(len(recipes), count, dtype=torch.float64)  # a constraint that is none holds always
    for run, recipe in enumerate(recipes):
        for k, (cost, _) in enumerate(parts):
            if cost in NORMS:  # ½·l2·‖w‖², as "weight decay" has it
                prices[run, k] = recipe.l2 * recipe.l2_gated_factor / 2
        if recipe.penalty is not None:
            each = recipe.penalty if isinstance(recipe.penalty, dict) else {"*": recipe.penalty}
            _refuse_unmatched("penalty", each, names)
            for k, name in enumerate(names):
                c = next((v for pattern, v in each.items() if fnmatchcase(name, pattern)), 0.0)
                prices[run, k] = c / images * whole[k]
        for g, (pattern, at_most) in enumerate(groups[run].items()):
            goal[run, g] = at_most
            if recipe.cost == "l0_norm":
                _refuse_unmatched("at_most", (pattern,), names)
                chosen = whole[: len(names)] * torch.tensor([fnmatchcase(name, pattern) for name in names])
                member[run, g, : len(names)] = chosen / chosen.sum()
            else:
                member[run, g, parts.index((COSTS[recipe.cost], None if pattern == "*" else pattern))] = 1
    prices, member, goal = (t.to(device, torch.float32) for t in (prices, member, goal))
    return Lagrangian(prices, member, goal, dual_optimizer(recipes[0], steps), warmup(recipes[0], steps))


def _refuse_unmatched(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"`{argument}` must have patterns that match gates ({', '.join(names)}), got {pattern!r}")


def refuse_unreachable(recipe: Recipe, gated: Gated | None) -> None:
    """Says no, before any training, to a target that the gates cannot reach, nor `finalize` after it.

    Raises:
        ValueError: naming the least that the target can be.
    """
    if recipe.at_most is None or gated is None:
        return
    cost = COSTS[recipe.cost]
    Constraint(cost, recipe.at_most, on="kept" if recipe.projects else recipe.on).bind(gated)
    if recipe.projects:
        finalization.refuse_unreachable(gated, recipe.at_most, cost)
