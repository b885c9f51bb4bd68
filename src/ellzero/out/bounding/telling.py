"""A budget's state, for a log and for print.

This file knows one constraint and its bound at a time; it does not know budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ellzero.gated.module import Gated
from ellzero.objectives.checking import Bound
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.costs import name_of
from ellzero.out.bounding.targets import shares


def measures(constraint: Constraint, bound: Bound, gated: Gated) -> Iterator[tuple[str, float]]:
    """What is kept, the target and the multiplier of each bound, by name."""
    for k, (name, share, _) in enumerate(shares(gated, constraint.cost, bound)):
        yield f"{name}/kept", share
        yield f"{name}/target", float(constraint.target[k])
        yield f"{name}/multiplier", float(constraint.multiplier[k])


def told(constraint: Constraint, bound: Bound, gated: Gated) -> str:
    """The same in words."""
    kept = ", ".join(f"{100 * share:.4g} %" for _, share, _ in shares(gated, constraint.cost, bound))
    target = ", ".join(f"{100 * t:.4g} %" for t in constraint.target.tolist())
    multiplier = ", ".join(f"{m:.3g}" for m in constraint.multiplier.tolist())
    return f"{name_of(constraint.cost)} kept {kept}, target {target}, multiplier {multiplier}"


def percent(bound: Bound) -> str:
    """A bound, or each of its parts."""
    if isinstance(bound, Mapping):
        return ", ".join(f"{100 * fraction:.4g} % of {pattern}" for pattern, fraction in bound.items())
    return f"{100 * bound:.4g} %"
