"""What a budget is told, and the tables in it. Times are measured once everything else is known to be in order.

A run that is taken up goes on with the tables that it began with: times that were measured anew are never quite equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ellzero.gated.module import Gated
from ellzero.objectives.checking import Bound, Bounds, check_fractions
from ellzero.objectives.costs import Cost, name_of
from ellzero.out.latency.correcting import agreed
from ellzero.out.latency.cost import Latency
from ellzero.out.latency.table import Table


def said(at_most: Bounds, named: Mapping[Any, Bound | None]) -> dict[Any, Bound]:
    """What each cost may be; the class `Latency` stands for a time that is to be measured.

    Raises:
        ValueError: nothing is said, or no fraction.
    """
    bounds = {**at_most, **{cost: bound for cost, bound in named.items() if bound is not None}}
    if not bounds:
        every = "`macs`, `params`, `l0_norm`, `units`, `latency` or `at_most`"
        raise ValueError(f"{every} must say what the network may cost")
    out = dict[Any, Bound]()
    for cost, bound in bounds.items():
        argument = "latency" if cost is Latency else getattr(cost, "__name__", "")
        by_group = check_fractions(bound, argument if named.get(cost) is not None else "at_most")
        out[cost] = {group: most for group, most in by_group.items() if group is not None} or by_group[None]
    return out


@contextmanager
def in_words_of(cost: Cost, named: Mapping[Any, Bound | None]) -> Iterator[None]:
    """Lets a refusal name the argument that the bound of a cost was given by."""
    try:
        yield
    except ValueError as error:
        kind: Any = Latency if isinstance(cost, Latency) else cost
        argument = "at_most" if named.get(kind) is None else name_of(cost)
        where = f"; times are those of {cost}" if isinstance(cost, Latency) else ""
        raise ValueError(str(error).replace("`at_most`", f"`{argument}`") + where) from error


def measured(gated: Gated, bounds: Mapping[Any, Bound]) -> dict[Cost, Bound]:
    """The bounds, with a time that was measured now in the place of the class; all processes take the first one's."""
    found = {Latency.measure(gated) if cost is Latency else cost: bound for cost, bound in bounds.items()}
    if times := tables(found):
        take_tables(found, agreed(times))
    return found


def tables(bounds: Bounds) -> list[str]:
    """The tables of all times among the costs, as JSON."""
    return [cost.table.json() for cost in bounds if isinstance(cost, Latency)]


def take_tables(bounds: Bounds, tables: list[str]) -> None:
    """Lets the times among the costs go on with these tables."""
    times = [cost for cost in bounds if isinstance(cost, Latency)]
    for cost, text in zip(times, tables, strict=True):
        cost.take(Table.parsed(text))
