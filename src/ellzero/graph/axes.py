"""What shrinks together: sites, axes, and the one algorithm that finds them.

Every entry of every parameter and buffer dimension starts as an *atom*. Operations tie atoms ("this weight's second
dimension reads what that one's first dimension writes"), and a class of tied atoms is a *unit*: something that can
only be removed as a whole. Units that live at the same places form an `Axis`, and each place is a `Site`. This file
holds the plain data and the algorithm; it does not know what an operation, a layer or a gate is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Role = Literal["reads", "writes", "rides"]


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
    units: Labels
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
    """

    name: str
    size: int
    sites: tuple[Site, ...]
    frozen: str | None = None
    stream: bool = False
    can_vanish: bool = False

    @property
    def readers(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.role == "reads")

    @property
    def writers(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.role == "writes")


@dataclass(frozen=True, eq=False)
class Product:
    """One multiplication of the traced forward, for counting MACs per example.

    With a `tensor`, it costs `factor` MACs for each entry of that weight; without one (activation times activation)
    `factor` times the sizes of `left` and `right`, whose entries are unit numbers of the graph, or -1 for what cannot
    shrink.
    """

    name: str
    factor: float
    tensor: str | None = None
    left: Labels | None = None
    right: Labels | None = None


@dataclass(frozen=True)
class Step:
    """One operation of the traced forward: which steps feed it, and which weights it reads its input with."""

    inputs: tuple[int, ...]
    reads: tuple[str, ...] = ()
    is_input: bool = False
    is_output: bool = False


@dataclass(frozen=True, eq=False)
class Graph:
    """All that tracing found. Units are numbered through: axis `k` has the units `offsets[k] … offsets[k] + size - 1`.

    Args:
        axes: every axis, frozen ones included.
        shapes: shape of every parameter and buffer.
        products: the multiplications, for MACs; `None` if the axes were given by hand and nothing was traced.
        balances: for each grouped convolution and side, unit numbers of shape (groups, channels per group): as many
            channels must be kept in each group.
        steps: the forward as a graph, to ask whether a path remains when an axis is fully closed.
        unreached: parameters and buffers that the example input does not reach. They are kept as they are.
        in_own_module: weights that are only ever used by the forward of the layer that owns them, so that the layer
            can be given fewer inputs, or be replaced.
        parameters: names of the tensors that are parameters, not buffers.
        two_faced: parameters that one operation reads with and another writes with, which no gate may multiply.
    """

    axes: tuple[Axis, ...]
    shapes: dict[str, tuple[int, ...]]
    products: tuple[Product, ...] | None = None
    balances: tuple[Labels, ...] = ()
    steps: tuple[Step, ...] = ()
    unreached: tuple[str, ...] = ()
    in_own_module: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    two_faced: frozenset[str] = frozenset()

    @property
    def offsets(self) -> list[int]:
        return [0, *np.cumsum([a.size for a in self.axes]).tolist()]

    @cached_property
    def reading(self) -> dict[str, tuple[int, ...]]:
        """For each weight that reads, its contracting dimension (dimensions, in a grouped convolution)."""
        return {s.tensor: s.dims for a in self.axes for s in a.readers}

    @cached_property
    def labels(self) -> dict[str, dict[tuple[int, ...], Labels]]:
        """For each tensor, the unit numbers (-1 where none) at its labelled dimensions."""
        out: dict[str, dict[tuple[int, ...], Labels]] = defaultdict(dict)
        for axis, offset in zip(self.axes, self.offsets, strict=False):
            for site in axis.sites:
                known = out[site.tensor].setdefault(site.dims, np.full(site.units.shape, -1))
                known[site.units >= 0] = site.units[site.units >= 0] + offset
        return dict(out)

    def carries_on(self, closed: Iterable[str]) -> bool:
        """Whether the output still depends on the input when nothing passes through the weights named in `closed`."""
        closed = set(closed)
        alive: list[bool] = []
        for step in self.steps:
            fed = step.is_input or any(alive[i] for i in step.inputs)
            alive.append(fed and not closed.intersection(step.reads))
        return any(a for a, step in zip(alive, self.steps, strict=True) if step.is_output)


@dataclass
class Ties:
    """Collects what operations say about atoms; `unify()` turns it into a `Graph`."""

    shapes: dict[str, tuple[int, ...]]
    parameters: tuple[str, ...] = ()
    first: dict[tuple[str, int], int] = field(default_factory=dict)
    count: int = 0
    pairs: list[tuple[Labels, Labels]] = field(default_factory=list)
    freezes: list[tuple[Labels, str]] = field(default_factory=list)
    roles: dict[str, list[Labels]] = field(default_factory=lambda: defaultdict(list))
    streams: list[Labels] = field(default_factory=list)
    balances: list[Labels] = field(default_factory=list)
    tables: dict[tuple[str, tuple[int, ...], Role], Labels] = field(default_factory=dict)
    ignored: list[Labels] = field(default_factory=list)
    in_own_module: dict[str, bool] = field(default_factory=dict)
    products: list[tuple[str, float, str | None, Labels | None, Labels | None]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    leaves: int = 0  # bit set of the steps that are inputs and parameters

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            for dim, size in enumerate(shape):
                self.first[name, dim] = self.count
                self.count += size

    def atoms(self, tensor: str, dim: int) -> Labels:
        """The atoms of one dimension of a parameter or buffer."""
        start = self.first[tensor, dim]
        return np.arange(start, start + self.shapes[tensor][dim])

    def fresh(self, size: int) -> Labels:
        """Atoms of a dimension that belongs to no parameter."""
        self.count += size
        return np.arange(self.count - size, self.count)

    def tie(self, a: Labels, b: Labels) -> None:
        self.pairs.append((a.ravel(), b.ravel()))

    def freeze(self, atoms: Labels, reason: str) -> None:
        self.freezes.append((atoms.ravel(), reason))

    def use(self, atoms: Labels, role: Role) -> None:
        self.roles[role].append(atoms.ravel())

    def table(self, tensor: str, dims: tuple[int, ...], atoms: Labels, role: Role) -> None:
        """A site that is an index map over several dimensions. Used again (a shared module, a second trace), it reads
        the same units.
        """
        if (tensor, dims, role) in self.tables:
            self.tie(self.tables[tensor, dims, role], atoms)
        self.tables.setdefault((tensor, dims, role), atoms)

    def mask(self, parts: Sequence[Labels]) -> npt.NDArray[np.bool_]:
        out = np.zeros(self.count, dtype=bool)
        for part in parts:
            out[part] = True
        return out


def classes(count: int, pairs: Sequence[tuple[Labels, Labels]]) -> Labels:
    """The class of each atom under the equivalence that `pairs` generate: connected components, by pointer jumping.

    Returns:
        For each atom the smallest atom of its class.

    Example:
        >>> classes(4, [(np.array([3]), np.array([1]))])
        array([0, 1, 2, 1])
    """
    root = np.arange(count)
    if not pairs:
        return root
    a, b = np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])
    while True:
        low = np.minimum(root[a], root[b])
        before = root.copy()
        # Both ends *and their roots* take the smaller root, so that whole trees hook on to each other at once.
        for end in (a, b):
            np.minimum.at(root, root[end], low)
            np.minimum.at(root, end, low)
        while not np.array_equal(root, root[root]):
            root = root[root]
        if np.array_equal(root, before):
            return root


def unify(ties: Ties, names: dict[str, str]) -> Graph:
    """Turns what was said about atoms into units and axes.

    Units with the same signature (the tensors' dimensions they lie on, and how often on each) form one axis. One
    frozen unit freezes its whole axis: whatever looks at a unit by position would look at another one after a
    removal.

    Args:
        ties: what the operations said.
        names: for each tensor the module that owns it, for naming axes.
    """
    root = classes(ties.count, ties.pairs)
    reads, writes = ties.mask(ties.roles["reads"]), ties.mask(ties.roles["writes"])
    rides = ties.mask(ties.roles["rides"])
    frozen: dict[int, str] = {}
    for atoms, reason in ties.freezes:
        for r in np.unique(root[atoms]).tolist():
            frozen.setdefault(r, reason)
    streams = {r for atoms in ties.streams for r in root[atoms].tolist()}

    # places: for each class, the (tensor, dim) keys it lies on, with multiplicity
    keys = [k for k in ties.first if k[0] in ties.reached]
    ignored = ties.mask(ties.ignored)
    places: dict[int, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        atoms = ties.atoms(*key)
        for r in root[atoms[~ignored[atoms]]].tolist():
            places[r].append(number)
    tables = list(ties.tables.items())
    for number, (_, atoms) in enumerate(tables):
        for r in np.unique(root[atoms]).tolist():
            places[r].append(len(keys) + number)

    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for r, where in places.items():
        members[tuple(where)].append(r)

    unit = np.full(ties.count, -1)  # unit number of each class root
    axes: list[Axis] = []
    used: dict[str, int] = defaultdict(int)
    two_faced: set[str] = set()
    total = 0
    for signature, roots in members.items():
        local = np.full(ties.count, -1)
        local[roots] = np.arange(len(roots))
        unit[roots] = np.arange(total, total + len(roots))
        total += len(roots)
        sites: list[Site] = []
        why: str | None = next((frozen[r] for r in roots if r in frozen), None)
        for number in dict.fromkeys(signature):
            if number >= len(keys):
                (tensor, dims, role), atoms = tables[number - len(keys)]
                sites.append(Site(tensor, dims, local[root[atoms]], role))
                continue
            key = keys[number]
            atoms = ties.atoms(*key)
            here = atoms[local[root[atoms]] >= 0]
            if reads[here].any() and (writes[here] | rides[here]).any():
                two_faced.add(key[0])
                why = why or f"`{key[0]}` both reads and writes it"
            role = "reads" if reads[here].any() else "writes" if writes[here].any() else "rides"
            sites.append(Site(key[0], (key[1],), np.where(ignored[atoms], -1, local[root[atoms]]), role))
        if why is None and not any(s.role == "reads" for s in sites):
            why = "no weight reads it, so no gate could close it"
        first = next((s for s in sites if s.role == "writes"), sites[0])
        name = names.get(first.tensor) or first.tensor
        if all(s.role == "reads" for s in sites):
            name += ".input"
        axes.append(Axis(name, len(roots), tuple(sites), why, any(r in streams for r in roots)))
    # Several axes of one layer are numbered, those that can shrink first: an embedding's width before its vocabulary.
    for k in sorted(range(len(axes)), key=lambda k: axes[k].frozen is not None):
        name = axes[k].name
        used[name] += 1
        if used[name] > 1:
            axes[k] = replace(axes[k], name=f"{name}#{used[name]}")

    def numbered(atoms: Labels | None) -> Labels | None:
        return None if atoms is None else unit[root[atoms]]

    return Graph(
        axes=tuple(axes),
        shapes=dict(ties.shapes),
        products=tuple(Product(n, f, t, numbered(a), numbered(b)) for n, f, t, a, b in ties.products),
        balances=tuple({(b.shape, b.tobytes()): b for b in (unit[root[atoms]] for atoms in ties.balances)}.values()),
        steps=tuple(ties.steps),
        unreached=tuple(t for t in ties.shapes if t not in ties.reached),
        in_own_module=frozenset(t for t, own in ties.in_own_module.items() if own),
        parameters=ties.parameters,
        two_faced=frozenset(two_faced),
    )
