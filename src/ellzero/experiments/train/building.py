"""From a recipe to a network and its objective, and from a trained network to its architecture as the papers print it.

This file knows recipes, networks, gates and costs; it trains nothing.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ellzero import gates
from ellzero.experiments import networks
from ellzero.experiments.data import Dataset, OwnError
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import fitting
from ellzero.experiments.train.stepping.stack import NORMS, Part, l2_of_weights
from ellzero.gated import placements
from ellzero.gated.attaching import GateMaker, attach
from ellzero.gated.module import Gated
from ellzero.gates.warning import warn
from ellzero.graph.axes import Graph
from ellzero.graph.trials.centring import centred
from ellzero.objectives import costs, duals
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.lagrangian import Lagrangian
from ellzero.out import finalization
from ellzero.out.bounding import pacing
from ellzero.out.latency.correcting import agreed
from ellzero.out.latency.cost import Latency
from ellzero.out.latency.table import Table

COSTS: dict[str, costs.Cost] = {"l0_norm": costs.l0_norm, "params": costs.params, "macs": costs.macs}


def known_costs(recipes: Sequence[Recipe], gated: Gated, times: str | None = None) -> dict[str, costs.Cost]:
    """The costs that recipes may bound, by name; times are measured now if one does, or are those of a table."""
    if all(r.cost != "latency" for r in recipes):
        return {**COSTS}
    if times is None:
        times = agreed(Latency.measure(gated, batch=recipes[0].batch).table.json())  # of several processes the first's
    return {**COSTS, "latency": Latency(Table.parsed(times), time.perf_counter)}


def where(recipe: Recipe) -> placements.Where:
    """Where the gates of a recipe go, if it has any: on units, or on single weights, or on both."""
    kind = recipe.placement
    units = placements.per_layer(only=(recipe.facts.blocks if kind == "blocks" else None) or "*")
    if kind not in ("per_layer", "blocks"):
        streams, whole = kind in ("streams", "everything"), kind in ("whole", "everything")
        units = placements.shrinkable(streams=streams, blocks=whole, inputs=kind == "inputs" or None)
    match recipe.gate:
        case "sparse_vd":
            return _weights
        case "bc_gnj":
            return lambda graph: [*units(graph), *_weights(graph), *_biases(graph)]
        case "bc_ghs":
            layers = placements.shared(units)
            return lambda graph: [*units(graph), *layers(graph), *_weights(graph), *_biases(graph)]
    return units


def _weights(graph: Graph) -> list[placements.Placement]:
    """One gate per weight of linear layers and convolutions."""
    return [p for p in placements.weights("*")(graph) if len(p.shape) > 1]


def _biases(graph: Graph) -> list[placements.Placement]:
    """One gate per bias of the same layers."""
    layers = [p.name.rpartition(".")[0] for p in _weights(graph)]
    return [p for p in placements.weights("*")(graph) if p.name in [f"{layer}.bias" for layer in layers]]


_TRACED: dict[tuple[type, str, torch.Size], Graph] = {}  # runs that differ in their numbers alone are traced once


def build(recipe: Recipe, dataset: Dataset, device: torch.device) -> nn.Module:
    """The network of a recipe, initialised by its seed: a `Gated`, or the plain one of a recipe without gates."""
    if not dataset.classes and not recipe.facts.own:
        raise OwnError(
            f"only labels tell the classes of `{recipe.data}`: `network` must be of your own, MODULE:FUNCTION"
        )
    torch.manual_seed(recipe.seed)
    model = recipe.facts.make(len(dataset.classes), recipe.dropout)
    fitting.refuse_unfit(recipe, model, dataset)
    gated = None
    if recipe.placement is not None:
        makers = _makers(recipe, biased=any(name.endswith(".bias") for name, _ in model.named_parameters()))
        x = dataset.example(2)
        model = as_gated(recipe, model, x)
        alike = type(model), str(model), x.shape
        known = None if recipe.facts.own else _TRACED.get(alike)  # code of the user's need not show what differs
        with _brief():
            gated = attach(model, (x,), gate=makers, where=where(recipe), graph=known, per_example=recipe.per_example)
        _TRACED[alike] = gated.graph
        _warn_of_streams(recipe, gated)
    if recipe.init in ("2017", "2018"):
        (networks.initialize_2017 if recipe.init == "2017" else networks.initialize_2018)(model)
    elif recipe.init == "2021":
        # Gates of `per_layer` have the name of the layer whose weights make up for them; others belong to no one layer.
        named = gated.named_gates() if gated and recipe.placement in ("per_layer", "blocks") else ()
        networks.initialize_2021(model, {name: recipe.drop_rate(name) for name, _ in named})
    return (gated or model).to(device)


def _warn_of_streams(recipe: Recipe, gated: Gated) -> None:
    """Warns where streams were asked for, and none of those that are there can shrink."""
    why = [axis.frozen for axis in gated.axes if axis.stream]
    if recipe.placement in ("streams", "everything") and why and None not in why:
        warn(f"`placement` {recipe.placement!r} has found no residual stream that can shrink: {why[0]}")


def as_gated(recipe: Recipe, model: nn.Module, x: Tensor) -> nn.Module:
    """The network that the gates of a recipe are attached to: its LayerNorms subtract no mean where streams shrink."""
    return centred(model, (x,)) if recipe.centres else model


def _makers(recipe: Recipe, biased: bool) -> dict[str, GateMaker]:
    """What makes the gates of a recipe, by the pattern of their names; `biased` says that the network has biases."""
    if recipe.gate in ("hard_concrete", "bernoulli", "generalized_dropout", "dropout"):
        return {pattern: _from_rate(recipe, rate) for pattern, rate in recipe.drop_rates.items()}
    noise: dict[str, GateMaker] = {}
    if recipe.gate in ("bc_gnj", "bc_ghs"):
        most_noise = recipe.most_noise or {}
        noise = {pattern: partial(gates.GaussianWeightGate, most=most) for pattern, most in most_noise.items()}
        noise |= dict.fromkeys(("*.weight", "*.bias")[: 1 + biased], gates.GaussianWeightGate)
    if recipe.gate == "bc_ghs":
        noise["*.shared"] = partial(gates.HalfCauchyGate, scale=1e-5, threshold=None)
    start: Any = {} if recipe.start is None else {"start": recipe.start}
    family: Any = {
        "stg": partial(gates.STGGate, **start),
        "group_lasso": gates.GroupLassoGate,
        "sbp": gates.SBPGate,
        "vib": gates.VIBGate,
        "gnj": gates.GNJGate,
        "bc_gnj": gates.GNJGate,
        "bc_ghs": gates.HalfCauchyGate,
        "sparse_vd": partial(gates.SparseVDGate, **start),
    }[recipe.gate]
    units: dict[str, GateMaker] = {p: partial(family, threshold=t) for p, t in _by_pattern(recipe.threshold).items()}
    return {**noise, **units, "*": units.get("*", family)}  # where no threshold is named, that of the family


def _from_rate(recipe: Recipe, drop_rate: float) -> GateMaker:
    """What makes gates that start from this rate, of the families that have one."""
    rule = gates.Median() if recipe.rule == "median" else gates.Noiseless()
    learns = {"score": gates.ScoreFunction(), "ar": gates.AR(), "arm": gates.ARM()}
    estimator = learns.get(recipe.estimator, gates.StraightThrough())
    binary: dict[str, Any] = {"drop_rate": drop_rate, "estimator": estimator}
    binary |= {} if recipe.threshold is None else {"threshold": recipe.threshold}
    families: dict[str, GateMaker] = {
        "hard_concrete": partial(gates.HardConcreteGate, drop_rate=drop_rate, rule=rule),
        "bernoulli": partial(gates.BernoulliGate, **binary),
        "generalized_dropout": partial(gates.GeneralizedDropoutGate, **binary),
        "dropout": partial(gates.DropoutGate, p=drop_rate),
    }
    return families[recipe.gate]


@contextmanager
def _brief() -> Iterator[None]:
    """Drops what torch logs, and where it fails prints, of a model that it cannot trace: the error is a line."""
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()) as printed:
            yield
    finally:
        logging.disable(logged)
    sys.stderr.write(printed.getvalue())


def architecture(gated: Gated) -> dict[str, int]:
    """What is left in each place that has gates: the papers' "pruned architecture", e.g. 20-25-45-462.

    A fully connected layer's inputs are counted where the layer still reads them, so only in maps that are open. With
    gates on single weights the places are those of `per_layer`: a unit is there as long as one of its weights is.
    """
    plan, graph = gated.plan(refuse=False), gated.graph
    out = {}
    on_weights = any(gate.per_weight for _, gate in gated.named_gates())
    for placement in placements.per_layer()(graph) if on_weights else gated.placements:
        if placement.block is not None or plan.without(graph, (site.tensor for site in placement.multiplies)):
            out[placement.name] = int(placement.block not in plan.blocks and placement.block is not None)
            continue
        site, size = placement.multiplies[0], placement.shape[0]
        alone = len(placement.multiplies) == len(site.dims) == 1
        if alone and graph.shapes[site.tensor][site.dims[0]] == size:
            rows = plan.rows.get(site.tensor, {}).get(site.dims[0])
            out[placement.name] = size if rows is None else len(rows)
        else:
            units = graph.units[site.tensor][site.dims][site.units >= 0]
            out[placement.name] = int(plan.units[np.unique(units)].sum())
    return out


@torch.no_grad()
def evidence(gated: Gated) -> dict[str, list[float]]:
    """What speaks for each unit, by placement, the strongest first, to three digits: for who would set another bar."""
    units = {name: gate for name, gate in gated.named_gates() if not gate.per_weight and gate.shape.numel() > 1}
    found = {name: gate.evidence().sort(descending=True).values.tolist() for name, gate in units.items()}
    return {name: [float(f"{number:.3g}") for number in numbers] for name, numbers in found.items()}


def parts(recipes: Sequence[Recipe], names: Iterable[str], known: Mapping[str, costs.Cost] = COSTS) -> list[Part]:
    """The entries of the cost vector: what a penalty weighs of each placement, costs that targets name, `l2_norm` if it
    acts. Runs of a stack agree in their gates.
    """
    by_gates: list[Part] = [(costs.complexity if recipes[0].charges else costs.l0_norm, name) for name in names]
    others = {(r.cost, pattern): None for r in recipes if r.cost != "l0_norm" for pattern in targets(r)}
    by_module: list[Part] = [(known[name], None if pattern == "*" else pattern) for name, pattern in others]
    norms: list[Part] = []
    if by_gates and recipes[0].by_eq_17:  # runs of a stack agree in it
        norms.append((l2_of_weights if recipes[0].detach_l2 else costs.l2_norm, None))
    return by_gates + by_module + norms


def targets(recipe: Recipe) -> dict[str, float]:
    """The target of every constraint of a recipe by its pattern, "*" for the whole network."""
    return _by_pattern(recipe.at_most)


def _by_pattern(value: float | Mapping[str, float] | None) -> dict[str, float]:
    return {} if value is None else dict(value) if isinstance(value, Mapping) else {"*": value}


def gate_rate(recipe: Recipe, steps: int) -> float | None:
    """The learning rate of the gates, None for that of the weights, in so many steps in which they learn."""
    return pacing.gate_rate(max(1, steps)) if recipe.gate_lr == "auto" else recipe.gate_lr


def dual_optimizer(recipe: Recipe, steps: int) -> duals.AbstractDual:
    """What moves the multipliers of a recipe, in a run of so many steps."""
    lr = 1e-4 if recipe.dual_lr is None else recipe.dual_lr
    match recipe.dual:
        case "auto":
            rate = gate_rate(recipe, steps)
            return duals.SelfPacedAscent(steps, recipe.lr if rate is None else rate)
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


def steps_alone(recipe: Recipe, steps: int) -> int:
    """Of so many steps until gates settle, or to the end, the first ones, in which weights train alone."""
    return round(steps * recipe.dense_epochs / recipe.gate_epochs)


def lagrangian(
    recipes: Sequence[Recipe],
    parts: Sequence[Part],
    dense: Sequence[float],  # cost of each part
    *,
    images: int,  # N of λ = c/N
    steps: int,  # of a run until its gates settle, or to its end
    device: torch.device,
    known: Mapping[str, costs.Cost] = COSTS,
) -> Lagrangian:
    """Penalties, constraints and multipliers of a stack. Refuses patterns that match no gates."""
    names = [str(only) for cost, only in parts if cost in (costs.l0_norm, costs.complexity)]
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
        penalties = _by_pattern(recipe.penalty)
        _refuse_unmatched("penalty", penalties, names)
        for k, name in enumerate(names):
            c = next((v for pattern, v in penalties.items() if fnmatchcase(name, pattern)), 0.0)
            prices[run, k] = c / images * whole[k]
        for g, (pattern, at_most) in enumerate(groups[run].items()):
            goal[run, g] = at_most
            if recipe.cost == "l0_norm":
                _refuse_unmatched("at_most", (pattern,), names)
                chosen = whole[: len(names)] * torch.tensor([fnmatchcase(name, pattern) for name in names])
                member[run, g, : len(names)] = chosen / chosen.sum()
            else:
                member[run, g, parts.index((known[recipe.cost], None if pattern == "*" else pattern))] = 1
    prices, member, goal = (t.to(device, torch.float32) for t in (prices, member, goal))
    alike, first = recipes[0], steps_alone(recipes[0], steps)  # runs of a stack agree in all that follows
    begins, rises = max(alike.penalty_after * steps, first), alike.penalty_warmup * steps
    rising = torch.tensor([cost not in NORMS for cost, _ in parts], device=device), begins, rises
    dual, fall = dual_optimizer(alike, steps - first), warmup(alike, steps - first)
    return Lagrangian(prices, member, goal, dual, fall, rising, begins=first)


def _refuse_unmatched(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"`{argument}` must have patterns that match gates ({', '.join(names)}), got {pattern!r}")


def refuse_unreachable(recipe: Recipe, gated: Gated, known: Mapping[str, costs.Cost] = COSTS) -> None:
    """Refuses, before any training, a target that gates or `finalize` cannot reach; says the least it can be."""
    if recipe.at_most is None:
        return
    cost = known[recipe.cost]
    Constraint(cost, recipe.at_most, on="kept" if recipe.projects else recipe.on).bind(gated)
    if recipe.projects:
        finalization.refuse_unreachable(gated, recipe.at_most, cost)
