"""Parameter groups for an optimizer: weights, and gates with rates of their own. This file knows no model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn


def grouped(
    weights: Iterable[tuple[str, nn.Parameter]],
    gates: Iterable[nn.Parameter],
    counted: Collection[str],
    rates: dict[str, float | None],
) -> list[dict[str, Any]]:
    """The groups of `Gated.param_groups`.

    Args:
        weights: the model's parameters, by name.
        gates: the gates' parameters.
        counted: names of the weights that gates count.
        rates: `lr`, `gate_lr`, `weight_decay`, `gate_weight_decay`, `counted_weight_decay`.

    Raises:
        ValueError: a rate is negative or not finite.
    """
    for key, value in rates.items():
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"`{key}` must be a number >= 0, got {value}")
    named, apart = list(weights), set(counted) if rates["counted_weight_decay"] is not None else set()
    members = {
        "weights": [p for n, p in named if n not in apart],
        "gates": list(gates),
        "counted weights": [p for n, p in named if n in apart],
    }
    decays = {"weights": "weight_decay", "gates": "gate_weight_decay", "counted weights": "counted_weight_decay"}
    groups: list[dict[str, Any]] = []
    for name, params in members.items():
        if name == "counted weights" and not apart:
            continue
        rate = rates["lr"] if name != "gates" or rates["gate_lr"] is None else rates["gate_lr"]
        group = {"name": name, "params": params, "weight_decay": rates[decays[name]]}
        groups.append(group if rate is None else group | {"lr": rate})
    return groups
