"""From a recipe to a network, and from a trained network to its architecture as the papers print it.

This file knows recipes, networks and gates; it trains nothing.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

from ellzero import gates
from ellzero.experiments import networks
from ellzero.experiments.data import Dataset, scaled
from ellzero.experiments.recipe import Recipe
from ellzero.gated import placements
from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated


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
