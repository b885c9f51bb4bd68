"""The optimizer of a stack of runs: which parameters it moves how fast, and by which rule.

It knows recipes and parameters; it does not know what a step is.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.stepping.stack import Runs


@final
class Both(torch.optim.Optimizer):
    """Two optimizers of different parameters as one, whose groups and memory are those of both.

    Gates whose rate is found for Adam, or whose multipliers are paced for it, are moved by Adam, as by a `Budget`, also
    where SGD moves the weights: there they have gradients so small that none would close in time.
    """

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = first, second
        super().__init__([*first.param_groups, *second.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = iter(self.param_groups)  # state and groups are new objects after one is loaded
        for part in self.parts:
            part.state, part.param_groups = self.state, [next(groups) for _ in part.param_groups]
            part.step()


def make_optimizer(recipe: Recipe, runs: Runs, device: torch.device, gate_lr: float | None) -> torch.optim.Optimizer:
    """Weights, and gates with a learning rate of their own. Where eq. 17 acts on weights, no other decay does."""
    r, on_gpu, template = recipe, device.type == "cuda", runs.template
    acts = r.by_eq_17  # on gates and on the weights that they count
    rules: list[dict[str, Any]] = [
        {"name": "weights", "params": list(template.parameters()), "lr": r.lr, "weight_decay": r.l2}
    ]
    if template.has_gates:
        counted = 0.0 if acts else None
        rules = template.gated.param_groups(
            lr=r.lr, gate_lr=gate_lr, weight_decay=r.l2, gate_weight_decay=0.0, counted_weight_decay=counted
        )
    rule_of = {id(p): rule for rule in rules for p in rule["params"]}
    values = runs.values()
    # Parameters that are treated alike form one group: each costs a step two launches, and small ones take no less.
    groups: dict[tuple[float, bool, bool, float, bool], dict[str, Any]] = {}
    for name, own in template.named_parameters():
        rule = rule_of[id(own)]
        rate, decay = rule["lr"], rule["weight_decay"]
        if r.optimizer == "adamw" and own.dim() < 2:  # biases and the weights of norms
            decay = 0.0
        decays = rule["name"] != "gates" or r.decay_gates or not r.falls
        by_eq_17 = acts and rule["name"] != "weights"
        apart = rule["name"] == "gates" and r.moves_apart
        new = {"rate": rate, "decays": decays, "by_eq_17": by_eq_17, "params": [], "weight_decay": decay}
        new["lr"] = torch.tensor(rate, device=device) if on_gpu else rate  # a captured step reads it each time
        groups.setdefault((rate, decays, by_eq_17, decay, apart), new)["params"].append(values[name])
    if r.optimizer != "sgd":
        kind = torch.optim.AdamW if r.optimizer == "adamw" else torch.optim.Adam
        return kind(list(groups.values()), capturable=on_gpu, fused=on_gpu)
    by_sgd = [group for (*_, apart), group in groups.items() if not apart]
    by_adam = [group for (*_, apart), group in groups.items() if apart]
    sgd = torch.optim.SGD(by_sgd, momentum=r.momentum, nesterov=r.nesterov, fused=on_gpu)
    return Both(sgd, torch.optim.Adam(by_adam, capturable=on_gpu, fused=on_gpu)) if by_adam else sgd


def set_rates(optimizer: torch.optim.Optimizer, decayed: float, left: float) -> None:
    """Sets the learning rates: `left` of those that were given, and of the groups that decay `decayed` of that."""
    for group in optimizer.param_groups:
        rate = group["rate"] * left * (decayed if group["decays"] else 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
