"""What every rule is given, and the register of rules.

`@couples("linear", …)` registers the rule of an ATen operation: a function of the traced arguments that ties atoms and
returns the output `Value`. An operation without a rule freezes whatever reaches it, with that reason; nothing is ever
taken for element-wise because it looks so. This file knows no operation by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ellzero.graph.axes import Numbers, Product, Role
from ellzero.graph.ties import Ties
from ellzero.graph.values import Value, extent, freeze


@dataclass
class Call:
    """One operation in the trace: where it says what it ties, its name, the module it runs in, its output shapes."""

    ties: Ties
    op: str
    module: str
    shapes: list[tuple[int, ...]]
    batch: int
    evaluates: bool = True  # not training: nothing may be drawn
    reads: tuple[str, ...] = ()
    numbers: tuple[Any, ...] = ()
    contracts: bool = False
    fed: bool = True  # by an input of the model
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the module keeps

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def where(self) -> str:
        owner, found, rest = self.module.partition("parametrizations.")
        if found:  # what runs there is not the user's own code, but what makes a weight of theirs
            return f"the parametrization of `{owner}{rest.partition('.')[0]}`"
        return f"`{self.op}`" + (f" in `{self.module}`" if self.module else "")

    def multiplies(self, factor: float, weight: Value | None, along: Sequence[Numbers] = ()) -> None:
        """Records MACs: `factor` for each entry of `weight` and of all `along`, which are units that it meets beside
        its own.
        """
        self.contracts = True
        source = weight.source if weight is not None else None
        name = (source.rpartition(".")[0] or source) if source else self.module
        whole = weight is not None and source is not None and prod(weight.shape) == prod(self.ties.shapes[source])
        if weight is not None and not whole:
            plain, own = extent(weight, range(weight.ndim))
            factor, along = factor * plain, [*own, *along]
        products = self.ties.products if self.evaluates else self.ties.doubled
        factor = factor / self.batch if self.evaluates or not self.fed else 0.0  # of what is fed, nobody asks
        products.append(Product(name, factor, source if whole else None, tuple(along)))

    def reader(self, weight: Value, atoms: Numbers, what: Numbers | None, x: Value) -> None:
        """A contracting dimension of `weight`, whose atoms are `atoms`, reads `what` (the atoms of `x` there)."""
        if what is None:
            self.ties.freeze(atoms, f"it reads {x.why}")
        else:
            self.ties.tie(atoms, what)
            self.looks_at(x, what)
        if weight.source is None:
            self.ties.freeze(atoms, f"{self.where} reads it by a weight that is computed, not a parameter")
        else:
            self.ties.use(atoms, "reads")
            self.reads += (weight.source,)

    def looks_at(self, x: Value, atoms: Numbers) -> None:
        """Reads the units `atoms` of `x`: a parameter must be closed with what writes them."""
        if x.zero == "own":
            self.ties.added.append(atoms)
        elif x.zero != "yes":
            self.ties.expose(atoms, f"{self.where} reads something that is not zero where a unit is closed for a norm")

    def writer(self, weight: Value, atoms: Numbers, role: Role = "writes") -> None:
        if weight.source is not None:
            self.ties.use(atoms, role)

    def mixes(self) -> str:
        return f"{self.where} mixes its units"


Rule = Callable[..., Value | list[Value]]
RULES: dict[str, Rule] = {}
SIZED: set[str] = set()  # operations that are told sizes and places, which follow the units that are there


def couples(*ops: str, sized: bool = False) -> Callable[[Rule], Rule]:
    """Registers the rule of the ATen operations with these names (without overload and trailing underscore)."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, rule))
        SIZED.update(ops if sized else ())
        return rule

    return register


def unknown(call: Call, reached: Sequence[Value], reason: str | None = None) -> list[Value]:
    """What happens to an operation without a rule: all that reaches it is frozen, and what comes out is plain."""
    reason = reason or f"there is no rule for {call.where}"
    call.contracts = True  # for all that is known
    for value in reached:
        freeze(call.ties, value, reason)
    return [Value(shape, why=f"the output of {call.where}") for shape in call.shapes]


def tensors(args: Sequence[Any]) -> list[Value]:
    """The traced tensors among arguments, in lists and tuples too."""
    found: list[Value] = []
    for a in args:
        found += [a] if isinstance(a, Value) else tensors(a) if isinstance(a, list | tuple) else []
    return found


def axis(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim + ndim if dim < 0 else dim
