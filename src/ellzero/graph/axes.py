"""What shrinks together, as plain data: units that live at the same places form an `Axis`, each place is a `Site`.

This file does not know how axes are found (`ties.py`), nor what an operation, a layer or a gate is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]  # of units, of atoms, of gates
Role = Literal["reads", "writes", "rides"]
Kind = Literal["heads", "stream", "units"]
EPS = re.compile(r"(?<![a-z])eps")  # in the name of what a norm adds under its root, not in "steps"
Layout = tuple[tuple[int, ...], dict[tuple[int, ...], Numbers]]  # a tensor's shape, and the units along its dimensions


@dataclass(frozen=True, eq=False)
class Site:
    """Where an axis meets one parameter or buffer.

    Args:
        tensor: name of the parameter or buffer, as in the model's state dict.
        dims: the dimensions that `units` is indexed by: one, or two for the weight of a grouped convolution, where
            which unit a column reads depends on the row.
        units: `units[i]` is the unit at index `i` of `dims`, or -1 where the entry belongs to another axis.
        role: `"reads"` for a contracting dimension, where a gate multiplies; `"writes"` for one that produces the
            units; `"rides"` for what lies on the axis unit by unit (bias, norm, depthwise kernel), which is sliced
            and never multiplied.
    """

    tensor: str
    dims: tuple[int, ...]
    units: Numbers
    role: Role


@dataclass(frozen=True, eq=False)
class Axis:
    """A set of units that live at the same sites, any of which can be removed from all of them at once.

    Args:
        name: the module (or parameter) that writes it first.
        size: number of units.
        sites: every parameter and buffer dimension that the units lie on.
        frozen: a sentence that says why the axis cannot shrink, or `None`.
        stream: whether the axis is a residual stream: something computed from it is added back onto it.
        can_vanish: whether the layers on it can be taken out when all its units are closed.
        closing: where a norm looks at all units together, the sites of what writes them and of what is added to them.
            A unit is closed there, since a weight that reads it comes behind the norm.
        heads: whether each unit is a head of attention: it has products of activations of its own.
        experts: whether each unit is an expert of a mixture, closed by its share.
    """

    name: str
    size: int
    sites: tuple[Site, ...]
    frozen: str | None = None
    stream: bool = False
    can_vanish: bool = False
    closing: tuple[Site, ...] = ()
    heads: bool = False
    experts: bool = False

    @property
    def kind(self) -> Kind:
        """What its units are: heads of attention, entries of a residual stream, or else units of a layer."""
        return "heads" if self.heads else "stream" if self.stream else "units"

    @property
    def given(self) -> bool:
        """Whether its units are the network's own inputs, as they come: features, pixels."""
        return self.argument is not None and not (self.stream or self.writers)

    @property
    def argument(self) -> str | None:
        """The input of the network that its units come from, as the reason says for which it is frozen."""
        found = re.search("the model's input `(.*?)`", self.frozen or "")
        return None if found is None else found[1]

    @property
    def multiplied(self) -> tuple[Site, ...]:
        """The sites where gates multiply: the readers, but for experts and units that a norm looks at together."""
        return self.closing or self.readers

    @property
    def readers(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.role == "reads")

    @property
    def writers(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.role == "writes")


@dataclass(frozen=True, eq=False)
class Product:
    """One multiplication of the traced forward, for counting MACs per example.

    It costs `factor` MACs, times the entries of the weight `tensor` if it has one (activation times activation has
    none), times the sizes of all `along`, whose entries are unit numbers of the graph, or -1 for what cannot shrink.
    """

    name: str
    factor: float
    tensor: str | None = None
    along: tuple[Numbers, ...] = ()


@dataclass(frozen=True)
class Step:
    """One operation of the traced forward.

    Args:
        inputs: the steps that feed it.
        reads: the weights that it reads its input with.
        is_input: whether it is an input of the model.
        is_output: whether it is what the model returns.
        op: its name.
        numbers: what it is told beside tensors, but for sizes and places: these show in what it makes.
        made: where units lie in what it makes.
        module: whose forward runs it.
        tensor: the parameter or buffer that it is, if it is one.
        contracts: whether it multiplies and adds up, as a weight does.
    """

    inputs: tuple[int, ...]
    reads: tuple[str, ...] = ()
    is_input: bool = False
    is_output: bool = False
    op: str = ""
    numbers: tuple[Any, ...] = ()
    made: tuple[Layout, ...] = ()
    module: str = ""
    tensor: str = ""
    contracts: bool = False


@dataclass(frozen=True, eq=False)
class Block:
    """A branch that is added to a stream, and that can go as a whole.

    Args:
        name: the module that it lies in, or that it ends with where several blocks lie in one.
        sites: the parameters that it ends with. With zeros there, the branch adds zeros: here a gate multiplies.
        layers: the modules that go with it, and of how many things each gives a tuple: 0 for a tensor, -1 for a linear
            layer or a convolution, whose outputs follow from its weight.
        tensors: the parameters and buffers of these modules.
        axes: numbers of the axes that lie in it alone.
    """

    name: str
    sites: tuple[Site, ...]
    layers: dict[str, int]
    tensors: frozenset[str]
    axes: tuple[int, ...]

    def holds(self, module: str) -> bool:
        """Whether a module goes with it."""
        return any(module == path or module.startswith(f"{path}.") for path in self.layers)


@dataclass(frozen=True, eq=False)
class Served:
    """Heads of keys and values, each of which serves several heads of queries: grouped-query attention.

    A head is there as long as one of its queries is. As many queries must stay of each head that is there.

    Args:
        module: whose forward it is in.
        heads: numbers of the units, one for each head of keys and of values.
        queries: those of their queries, of shape (heads, queries of each).
        least: how many of its queries a head that is there must keep.
    """

    module: str
    heads: Numbers
    queries: Numbers
    least: int = 1


@dataclass(frozen=True, eq=False)
class Stored:
    """A size that a module's own forward goes by, such as a number of heads: as large as those of `units` that stay;
    or as their share of those of `per`, such as the queries of each head of keys.
    """

    module: str
    attribute: str
    units: Numbers
    per: Numbers | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over all units of an axis, x/√(Σx²/D + eps) · weight.

    With k of its D units left, it divides by k. The same comes out if its weight is √(D/k) times as large, and its eps
    D/k times. Of a response norm, which takes no root, the weight is D/k times as large.

    Args:
        module: whose forward it is in.
        attribute: where the module keeps its eps.
        weight: the parameter that it multiplies by.
        units: numbers of the units.
        offset: what the forward adds to the weight, as 1 in Gemma.
        centres: whether it subtracts a mean first, as LayerNorm does; then no unit can go.
        eps: of a norm that does.
        power: of D/k, by which its weight becomes larger.
    """

    module: str
    attribute: str
    weight: str
    units: Numbers
    offset: float = 0.0
    centres: bool = False
    eps: float = 0.0
    power: float = 0.5


@dataclass(frozen=True, eq=False)
class Graph:
    """All that tracing found. Units are numbered through: axis `k` has the units `offsets[k] … offsets[k] + size - 1`.

    Args:
        axes: every axis, frozen ones included.
        shapes: shape of every parameter and buffer.
        products: the multiplications, for MACs; `None` if the axes were given by hand and nothing was traced.
        balances: unit numbers of shape (parts, units per part), for the groups of a convolution and for what a forward
            cuts into equal parts: as many units must be kept in each part.
        steps: the forward as a graph, to ask whether a path remains when an axis is fully closed.
        unreached: parameters and buffers that the example input does not reach. They are kept as they are.
        in_own_module: weights that are only ever used by the forward of the layer that owns them, so that the layer
            can be given fewer inputs, or be replaced.
        parameters: names of the tensors that are parameters, not buffers.
        two_faced: parameters that one operation reads with and another writes with, which no gate may multiply.
        placed: for each unit, whether the forward looks for it at its place, as a slice does.
        turns: what makes the forward take another way than the traced one, in words.
        stored: sizes that modules keep as numbers.
        norms: over all units of an axis.
        least: units, as the experts of a mixture or heads that share their keys, of which so many must stay.
        served: heads of keys and values that go when all their queries have gone. Their axis is frozen beside that.
        grouped: the same with these heads and their queries as one unit each, if there are any.
        look: finds the branches that can go as a whole, for who asks. It takes a while, and not everyone does.
    """

    axes: tuple[Axis, ...]
    shapes: dict[str, tuple[int, ...]]
    products: tuple[Product, ...] | None = None
    balances: tuple[Numbers, ...] = ()
    steps: tuple[Step, ...] = ()
    unreached: tuple[str, ...] = ()
    in_own_module: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    two_faced: frozenset[str] = frozenset()
    placed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    turns: tuple[str, ...] = ()
    stored: tuple[Stored, ...] = ()
    norms: tuple[Norm, ...] = ()
    least: tuple[tuple[Numbers, int], ...] = ()
    served: tuple[Served, ...] = ()
    grouped: Graph | None = None
    look: Callable[[], tuple[Block, ...]] | None = None

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The branches that can go as a whole."""
        return () if self.look is None else self.look()

    def with_blocks(self, blocks: tuple[Block, ...]) -> Graph:
        """The same graph, with these branches."""
        return replace(self, look=partial(tuple, blocks))

    @cached_property
    def offsets(self) -> list[int]:
        return [0, *np.cumsum([a.size for a in self.axes]).tolist()]

    @cached_property
    def reading(self) -> dict[str, tuple[int, ...]]:
        """For each weight that reads, its contracting dimension (dimensions, in a grouped convolution)."""
        return {s.tensor: s.dims for a in self.axes for s in a.readers}

    @cached_property
    def written(self) -> set[tuple[str, tuple[int, ...]]]:
        """The linear layers that write what a norm reads and cannot shrink, as weights with their dimension."""
        sites = [s for a in self.axes if a.frozen is not None for s in a.closing if s.role == "writes"]
        whole = [s for s in sites if s.dims == (0,) and len(self.shapes[s.tensor]) == 2 and (s.units >= 0).all()]
        return {(s.tensor, s.dims) for s in whole if s.tensor in self.in_own_module}

    @cached_property
    def units(self) -> dict[str, dict[tuple[int, ...], Numbers]]:
        """For each tensor, the unit numbers (-1 where none) at the dimensions that carry units."""
        return self._numbered([a.sites for a in self.axes])

    @cached_property
    def closing(self) -> dict[str, dict[tuple[int, ...], Numbers]]:
        """The same of the tensors and dimensions where gates multiply, with the units that they close there."""
        return self._numbered([a.multiplied for a in self.axes])

    def _numbered(self, of_axes: Iterable[Iterable[Site]]) -> dict[str, dict[tuple[int, ...], Numbers]]:
        out: dict[str, dict[tuple[int, ...], Numbers]] = defaultdict(dict)
        for sites, offset in zip(of_axes, self.offsets, strict=False):
            for site in sites:
                known = out[site.tensor].setdefault(site.dims, np.full(site.units.shape, -1))
                known[site.units >= 0] = site.units[site.units >= 0] + offset
        # One array for all that carry the same units, such as a norm's weight, bias and statistics: see `make_plan`.
        same = {(u.shape, u.tobytes()): u for sites in out.values() for u in sites.values()}
        return {t: {dims: same[u.shape, u.tobytes()] for dims, u in sites.items()} for t, sites in out.items()}

    @cached_property
    def balanced(self) -> list[list[Numbers]]:
        """The balances, in sets that share units: what comes back for one of a set may unbalance another."""
        sets: list[list[Numbers]] = []
        for balance in self.balances:
            touched = [s for s in sets if any(np.isin(balance, other).any() for other in s)]
            sets = [s for s in sets if not any(s is t for t in touched)] + [[b for t in touched for b in t] + [balance]]
        return sets

    @cached_property
    def picked(self) -> dict[str, int]:
        """By the names of axes, how many of their experts a router picks, or of their heads stay."""
        axes = (self.axes[int(np.searchsorted(self.offsets, units[0], "right")) - 1] for units, _ in self.least)
        return {axis.name: k for axis, (_, k) in zip(axes, self.least, strict=True)}

    @cached_property
    def weight(self) -> npt.NDArray[np.float64]:
        """How many entries of parameters each unit has, in the network as it is."""
        out = np.zeros(self.offsets[-1])
        for tensor in self.units.keys() & set(self.parameters):
            for units in self.units[tensor].values():
                np.add.at(out, units[units >= 0], prod(self.shapes[tensor]) / units.size)
        return out

    def on(self, fits: Callable[[Axis], bool]) -> npt.NDArray[np.bool_]:
        """For every unit, whether it is on an axis that fits; the last is for unit -1, which is on none."""
        return np.repeat([*map(fits, self.axes), False], [*(axis.size for axis in self.axes), 1])

    def inside(self, block: int) -> npt.NDArray[np.bool_]:
        """For every unit, whether it lies in a block alone."""
        sizes = [a.size for a in self.axes]
        return np.repeat(np.isin(np.arange(len(sizes)), self.blocks[block].axes), sizes)

    def with_axes(self, axes: Iterable[Axis]) -> Graph:
        """The same graph with other words about its axes, whose sites are the same: what was worked out stays."""
        out = replace(self, axes=tuple(axes))
        known = ("reading", "units", "closing", "balanced", "weight")  # not `written`: it goes by what is frozen
        out.__dict__.update({key: self.__dict__[key] for key in known if key in self.__dict__})
        return out

    def carries_on(self, closed: Iterable[str]) -> bool:
        """Whether the output still depends on the input when nothing passes through the weights named in `closed`."""
        closed = set(closed)
        alive: list[bool] = []
        for step in self.steps:
            fed = step.is_input or any(alive[i] for i in step.inputs)
            alive.append(fed and not closed.intersection(step.reads))
        return any(a for a, step in zip(alive, self.steps, strict=True) if step.is_output)
