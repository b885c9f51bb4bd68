"""The optimizer of a stack of runs, by the rules of `Gated.param_groups`.

This file knows recipes and parameters; it does not know what a step does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.stepping.stack import Runs


def make_optimizer(recipe: Recipe, runs: Runs, device: torch.device) -> torch.optim.Optimizer:
    """Weights, and gates with a learning rate of their own. Where eq. 17 acts on weights, no other decay does."""
    r, on_gpu, template = recipe, device.type == "cuda", runs.template
    acts = r.l2 > 0  # eq. 17, on gates and on the weights that they count
    if template.has_gates:
        rules = template.gated.param_groups(
            lr=r.lr,
            gate_lr=r.gate_lr,
            weight_decay=r.l2,
            gate_weight_decay=0.0,
            counted_weight_decay=0.0 if acts else None,
        )
    else:
        rules = [{"name": "weights", "params": list(template.parameters()), "lr": r.lr, "weight_decay": r.l2}]
    rule_of = {id(p): rule for rule in rules for p in rule["params"]}
    values = runs.values()
    # Parameters that are treated alike form one group: each costs a step two launches, and small ones take no less.
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    for name, own in template.named_parameters():
        rule = rule_of[id(own)]
        rate = rule["lr"]
        decays = rule["name"] != "gates" or r.decay_gates or not r.milestones
        by_eq_17 = acts and rule["name"] != "weights"
        new = {
            "rate": rate,
            "decays": decays,
            "by_eq_17": by_eq_17,
            "params": [],
            "weight_decay": rule["weight_decay"],
            "lr": torch.tensor(rate, device=device) if on_gpu else rate,  # a captured step reads it each time
        }
        groups.setdefault((rate, decays, by_eq_17), new)["params"].append(values[name])
    if r.optimizer == "adam":
        return torch.optim.Adam(list(groups.values()), capturable=on_gpu, fused=on_gpu)
    return torch.optim.SGD(list(groups.values()), momentum=r.momentum, nesterov=r.nesterov, fused=on_gpu)


def set_rates(optimizer: torch.optim.Optimizer, decayed: float, left: float) -> None:
    """Sets the learning rates: `left` of those that were given, and of the groups that decay `decayed` of that."""
    for group in optimizer.param_groups:
        rate = group["rate"] * left * (decayed if group["decays"] else 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
