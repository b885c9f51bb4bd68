"""Parameter groups for an optimizer: weights, and gates with rates of their own. This file knows no model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any

from torch import nn


def grouped(
    weights: Iterable[tuple[str, nn.Parameter]],
    gates: Iterable[nn.Parameter],
    counted: Collection[str],
    rates: dict[str, float | None],
    ratio: float = 1.0,
) -> list[dict[str, Any]]:
    """The groups of `Gated.param_groups`, whose arguments are the `rates`; `counted` names weights that gates count.

    Where gates have no rate, it is that of the weights times `ratio`.
    """
    for key, value in rates.items():
        if value is not None and (not isinstance(value, Real) or not 0 <= value < float("inf")):
            raise ValueError(f"`{key}` must be a number >= 0, got {value!r}")
    named, apart = list(weights), set(counted) if rates["counted_weight_decay"] is not None else set()
    lr, gate_lr = rates["lr"], rates["gate_lr"]
    if gate_lr is None and lr is not None:
        gate_lr = lr * ratio
    groups = [
        ("weights", [p for n, p in named if n not in apart], "weight_decay", lr),
        ("gates", list(gates), "gate_weight_decay", gate_lr),
    ]
    if apart:
        groups.append(("counted weights", [p for n, p in named if n in apart], "counted_weight_decay", lr))
    made: list[dict[str, Any]] = [
        {"name": name, "params": params}
        | {key: number for key, number in (("weight_decay", rates[decay]), ("lr", rate)) if number is not None}
        for name, params, decay, rate in groups
    ]
    if rates["gate_lr"] is not None:
        made[1]["gate_lr"] = rates["gate_lr"]  # as it was asked for: a schedule changes "lr", and "initial_lr" too
    return made
