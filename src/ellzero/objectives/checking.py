"""What arguments must be, and the sentences that say so.

This file knows costs as functions; it does not know penalties, constraints or multipliers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from numbers import Real

import torch

from ellzero.gated.module import Gated
from ellzero.gates.abstract import NoExpectation
from ellzero.objectives.costs import Cost, dense, macs, name_of, only, params, savings, units, unwrapped

Bound = float | Mapping[str, float]  # what may be kept of a cost, as a fraction of the dense one, or of parts of it
Bounds = Mapping[Cost, Bound]


class WeakMemory:
    """Remembers one object without keeping it alive; copies and unpickled ones start empty, and so check again."""

    def __init__(self) -> None:
        self._ref: Callable[[], object] = object  # a new one each time: nothing is held

    def __reduce__(self) -> tuple[type[WeakMemory], tuple[()]]:
        return WeakMemory, ()

    def holds(self, thing: object) -> bool:
        return self._ref() is thing

    def keep(self, thing: object) -> None:
        self._ref = weakref.ref(thing)


def stranger(sizes: Mapping[str, int], original: Mapping[str, int]) -> str | None:
    """Why these gates are not the original ones, or None. A network that has shrunk keeps all its gates."""
    if sizes.keys() != original.keys():
        return f"it has gates {list(sizes)}, where {list(original)} are known"
    other = [name for name, size in sizes.items() if size != original[name]]
    return "; ".join(f"{name} has {sizes[name]} gates instead of {original[name]}" for name in other) or None


def dense_of(argument: str, cost: Cost, gated: Gated, group: str | None) -> float:
    """The dense cost of a group; refuses one that is empty, in the words of who named it."""
    must = f"`{argument}` must name what `{name_of(cost)}` counts, got {group!r}"
    try:
        whole = dense(only(cost, group), gated)
    except ValueError as error:
        why = str(error).replace("`only`", "it")  # what the user wrote has another name
        raise (error if group is None else ValueError(f"{must}: {why}")) from error
    if not whole > 0:
        raise ValueError(f"{must}, where the dense cost is {whole:g}")
    return whole


def expects(cost: Cost, gated: Gated) -> bool:
    """Whether a cost has an expectation: gates of some families have no P(z ≠ 0)."""
    try:
        with torch.no_grad():
            cost(gated)
    except NoExpectation:
        return False
    return True


def refuse_unmoved(cost: Cost, gated: Gated) -> None:
    """Refuses a cost that gates on single weights do not move: an input goes with the last gate of its column, and
    P(all closed) is zero to the last bit in a column of some length.
    """
    if unwrapped(cost)[0] not in (params, macs, units) or all(len(p.shape) == 1 for p in gated.placements):
        return
    if not expects(cost, gated):
        moved = bool(savings(cost, gated, torch.ones(gated.liveness.size)).any())
    else:
        with torch.enable_grad(), torch.inference_mode(False):
            value, phi = cost(gated), [p for p in gated.gates.parameters() if p.requires_grad]
            slopes = torch.autograd.grad(value, phi, allow_unused=True) if value.requires_grad else []
        moved = any(slope is not None and bool(slope.any()) for slope in slopes)
    if not moved:
        raise ValueError(
            f"`cost` must fall when gates close, got `{name_of(cost)}`, which gates on single weights do not move: "
            "an input goes only with all gates of its column; use `l0.l0_norm`"
        )


def counts_by_module(cost: Cost) -> bool:
    """Whether the patterns of a cost are names of modules, and not of gates."""
    return unwrapped(cost)[0] in (params, macs)


def check_cost(cost: object) -> None:
    """Refuses what cannot be a cost."""
    if not callable(cost):
        raise TypeError(f"`cost` must be a function of a Gated such as l0_norm, got {cost!r}")


def check_number(what: str, value: object, accepts: Callable[[float], bool]) -> float:
    """A finite number that is accepted, or a refusal that begins with `what`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not accepts(float(value)):
        raise ValueError(f"{what}, got {value!r}")
    return float(value)


def check_count(argument: str, value: object) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{argument}` must be a positive integer, got {value!r}")
    return value


def check_groups(argument: str, what: str, value: object, accepts: Callable[[float], bool]) -> dict[str | None, float]:
    """One number, under None, or a number for each pattern."""
    if not isinstance(value, Mapping):
        return {None: check_number(what, value, accepts)}
    if not value:
        raise ValueError(f"{what}, or a dictionary of them, got {value!r}")
    for pattern in value:
        if not isinstance(pattern, str):
            other = "; a cost has an argument of its own" if callable(pattern) else ""
            raise ValueError(f"`{argument}` must have patterns as keys, got {pattern!r}{other}")
    return {pattern: check_number(f"{what}, for {pattern!r} too", number, accepts) for pattern, number in value.items()}


def check_fractions(at_most: object, argument: str = "at_most") -> dict[str | None, float]:
    """One fraction of the dense cost, under None, or one for each pattern."""
    what = f"`{argument}` is a fraction of the dense cost in (0, 1]"
    return check_groups(argument, what, at_most, lambda x: 0 < x <= 1)
