"""The way that a forward takes: which torch functions it calls, and what numbers it tells them.

A trace follows the example's way alone. With a unit removed the way must be the same (`rehearsal.py`); where another
batch or another integer turns it, `turns` says so. This file knows no axes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ellzero.graph.rules import SIZED
from ellzero.graph.tracing import Inputs, batch_size, run


def turns(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """What makes the model take another way than with the example, in words: "a batch of 1", "4 instead of 3"."""
    model = copy.deepcopy(model).eval()
    usual = _names(model, inputs)
    found = []
    for what, other in _others(inputs):
        try:
            if all(_names(model, other) != usual for _ in range(2)):  # the first time it may fill a cache
                found.append(what)
        except Exception:  # it takes no such input
            continue
    return tuple(found)


def _others(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    size = batch_size(inputs)
    for n in sorted({1, size + 1} - {size}) if size else ():
        rows = torch.arange(n) % size

        def resized(leaf: Any, rows: Tensor = rows) -> Any:
            return leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,) else leaf

        yield f"a batch of {n}", tree_map(resized, inputs)
    leaves, spec = tree_flatten(inputs)
    for k, leaf in enumerate(leaves):
        for number in (leaf - 1, leaf + 1) if isinstance(leaf, int) and not isinstance(leaf, bool) else ():
            yield f"{number} instead of {leaf}", tree_unflatten([*leaves[:k], number, *leaves[k + 1 :]], spec)


def _names(model: nn.Module, inputs: Inputs) -> list[str]:
    with Calls() as calls, torch.no_grad():
        run(model, inputs)
    return [name for name, _ in calls.made]


class Calls(TorchFunctionMode):
    """Lists the torch functions that are called, each with its numbers; sizes and places follow what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, told = str(getattr(func, "__name__", func)), tree_leaves((args, kwargs))
        sized = name in SIZED or name in ("__getitem__", "__setitem__")
        self.made.append((name, [] if sized else [t for t in told if isinstance(t, int | float | str)]))
        return func(*args, **(kwargs or {}))

    def departure(self, other: Calls) -> str | None:
        """Where another forward leaves this way, in words; None if it takes the same."""
        for (name, told), (now, gets) in zip_longest(self.made, other.made, fillvalue=("nothing", [])):
            if name != now:
                return f"it calls `{now}` instead of `{name}`"
            if told != gets:
                return f"`{name}` gets {gets} instead of {told}"
        return None
