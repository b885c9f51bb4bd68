"""From ties between entries to axes: the one algorithm that finds what shrinks together.

Every entry of every parameter and buffer dimension starts as an *atom*. Operations tie atoms ("this weight's second
dimension reads what that one's first dimension writes"), and a class of tied atoms is a *unit*: something that can
only be removed as a whole. This file does not know what an operation, a layer or a gate is.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np
import numpy.typing as npt

from ellzero.graph.axes import Axis, Graph, Norm, Numbers, Product, Role, Served, Site, Step


@dataclass
class Ties:
    """Collects what operations say about atoms; `unify()` turns it into a `Graph`."""

    shapes: dict[str, tuple[int, ...]]
    parameters: tuple[str, ...] = ()
    first: dict[tuple[str, int], int] = field(default_factory=dict)
    count: int = 0
    pairs: list[tuple[Numbers, Numbers]] = field(default_factory=list)
    freezes: list[tuple[Numbers, str]] = field(default_factory=list)
    roles: dict[str, list[Numbers]] = field(default_factory=lambda: defaultdict(list))
    streams: list[Numbers] = field(default_factory=list)
    heads: list[Numbers] = field(default_factory=list)  # each has matrices of its own: what is added there is no stream
    attending: list[Numbers] = field(default_factory=list)  # those of them that multiply activations alone
    added: list[Numbers] = field(default_factory=list)  # of parameters that are added: they write units, as weights do
    exposed: list[tuple[Numbers, str]] = field(default_factory=list)  # read, and not zero where nothing writes them
    norms: list[Norm] = field(default_factory=list)  # over atoms
    shares: list[Numbers] = field(default_factory=list)  # of parameters that close experts
    least: list[tuple[Numbers, int]] = field(default_factory=list)  # of experts so many are picked
    balances: list[Numbers] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)  # over atoms
    cuts: list[tuple[Numbers, Sequence[int]]] = field(default_factory=list)  # at these places
    placed: list[Numbers] = field(default_factory=list)
    tables: dict[tuple[str, tuple[int, ...], Role], Numbers] = field(default_factory=dict)
    ignored: list[Numbers] = field(default_factory=list)
    in_own_module: dict[str, bool] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)  # along atoms
    doubled: list[Product] = field(default_factory=list)  # of the batch twice, in training
    steps: list[Step] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    spares: list[Numbers] = field(default_factory=list)
    leaves: int = 0  # bit set of the steps that are inputs and parameters
    like: tuple[Step, ...] = ()  # the forward of a larger network, whose lone units are laid out as there
    serves_one: bool = False  # whether a head of keys may be left with one query, and is still served, not tied
    contracting: int = 0  # bit set of the steps that multiply and add up, as a weight does
    bending: int = 0  # bit set of the steps that are not linear, as an activation is

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            for dim, size in enumerate(shape):
                self.first[name, dim] = self.count
                self.count += size

    def atoms(self, tensor: str, dim: int) -> Numbers:
        """The atoms of one dimension of a parameter or buffer."""
        start = self.first[tensor, dim]
        return np.arange(start, start + self.shapes[tensor][dim])

    def fresh(self, size: int) -> Numbers:
        """Atoms of a dimension that belongs to no parameter."""
        self.count += size
        return np.arange(self.count - size, self.count)

    def spare(self, size: int) -> Numbers:
        """Atoms of a dimension whose entries are all the same, so that it is as long as what it meets."""
        self.spares.append(self.fresh(size))
        return self.spares[-1]

    def is_spare(self, atoms: Numbers) -> bool:
        k = bisect(self.spares, int(atoms.min()), key=lambda spare: spare[0]) - 1 if atoms.size else -1
        return k >= 0 and int(atoms.max()) <= self.spares[k][-1]

    def tie(self, a: Numbers, b: Numbers) -> None:
        """Entry by entry, the atoms of `a` and of `b` are one."""
        self.pairs.append((a.ravel(), b.ravel()))

    def freeze(self, atoms: Numbers, reason: str) -> None:
        self.freezes.append((atoms.ravel(), reason))

    def expose(self, atoms: Numbers, reason: str) -> None:
        """Something depends on the atoms that is not zero where what writes them is."""
        self.exposed.append((atoms.ravel(), reason))

    def use(self, atoms: Numbers, role: Role) -> None:
        self.roles[role].append(atoms.ravel())

    def table(self, tensor: str, dims: tuple[int, ...], atoms: Numbers, role: Role) -> None:
        """A site that is an index map over several dimensions; used again (a second trace), it reads the same units."""
        if (tensor, dims, role) in self.tables:
            self.tie(self.tables[tensor, dims, role], atoms)
        self.tables.setdefault((tensor, dims, role), atoms)

    def mask(self, parts: Sequence[Numbers]) -> npt.NDArray[np.bool_]:
        out = np.zeros(self.count, dtype=bool)
        for part in parts:
            out[part] = True
        return out


def classes(count: int, pairs: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
    """For each atom the smallest of its class under the equivalence that `pairs` generate, by pointer jumping.

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


_IN_A_BUFFER = ": what a head has of its own, as a slope of ALiBi, could follow in a buffer of it"
OF_EACH_HEAD = _IN_A_BUFFER + ", or by `l0.numbered`"
_MEETS = "it meets the output of "
_COUNTS = ("`arange`", "`full`", "`linspace`", "`logspace`")  # what slopes are made of
_ROTATES = ("`view_as_real`", "`view_as_complex`", "`polar`", "`complex`")  # has nothing for each head
SERVING = "each unit goes when all queries have gone that it serves"


def of_one_example(products: list[Product], doubled: list[Product], batch: int) -> list[Product]:
    """The MACs of one example, from those of a batch by its size. What comes of no input, and costs as much for a batch
    twice as large, as something made of positions alone, is done once for all: it was divided by mistake.
    """
    places, twice = Counter((p.name, p.tensor) for p in products), defaultdict(list)
    for p in doubled:
        twice[p.name, p.tensor].append(p.factor)
    of_two = {place: iter(factors) for place, factors in twice.items() if len(factors) == places[place]}
    return [
        replace(p, factor=p.factor * batch) if 2 * next(of_two.get((p.name, p.tensor), iter([0])), 0) == p.factor else p
        for p in products
    ]


def unify(ties: Ties, single: bool = True) -> Graph:
    """Turns what was said about atoms into units and axes.

    Units with the same signature (the tensors' dimensions they lie on, and how often on each) form one axis, named
    after the module that owns the tensor. One frozen unit freezes its whole axis: whatever looks at a unit by position
    would look at another one after a removal. Queries that share a head of keys are units of their own if they can be,
    and if they shall (`single`); else they and their head are one.
    """
    pairs, served = _apart(ties) if single else (_tied(ties.served), [])
    root = classes(ties.count, [*ties.pairs, *pairs])
    finder = _Finder(ties, root, [s.heads for s in served])
    unit = np.full(ties.count, -1)  # unit number of each class root
    axes: list[Axis] = []
    total = 0
    for signature, roots in finder.signatures().items():
        unit[roots] = np.arange(total, total + len(roots))
        total += len(roots)
        axes.append(finder.axis(signature, roots))

    def laid(step: Step) -> Step:
        made = ((shape, {dims: unit[root[atoms]] for dims, atoms in carried.items()}) for shape, carried in step.made)
        return replace(step, made=tuple(made))

    norms = {(n.module, n.attribute, n.weight): replace(n, units=unit[root[n.units]]) for n in ties.norms}
    # Where queries and the keys that they share lie in one weight, a cut follows numbers that are kept, or is refused.
    fused = unit[root[np.concatenate([np.zeros(0, int), *(s.queries.ravel() for s in served)])]]
    cuts = ((u, places) for u, places in ((unit[root[a]], p) for a, p in ties.cuts) if not np.isin(u, fused).any())
    uneven = ((u, places) for u, places in cuts if not (_in_shares(u, places) or _side_by_side(u, places)))
    parts = (u.reshape(-1, gcd(len(u), *places)) for u, places in uneven)
    balances = {(b.shape, b.tobytes()): b for b in (*(unit[root[atoms]] for atoms in ties.balances), *parts)}
    return Graph(
        axes=tuple(_numbered_apart(axes)),
        shapes=dict(ties.shapes),
        products=tuple(replace(p, along=tuple(unit[root[atoms]] for atoms in p.along)) for p in ties.products),
        # Parts with the same units in each, such as the halves of a gated linear unit, are always balanced.
        balances=tuple(b for b in balances.values() if (np.sort(b, 1) != np.sort(b[:1], 1)).any()),
        steps=tuple(map(laid, ties.steps)),
        unreached=tuple(t for t in ties.shapes if t not in ties.reached),
        in_own_module=frozenset(t for t, own in ties.in_own_module.items() if own),
        parameters=ties.parameters,
        two_faced=frozenset(finder.two_faced),
        placed=np.isin(
            np.arange(total), unit[root[np.concatenate([a.ravel() for a in ties.placed] or [np.zeros(0, int)])]]
        ),
        norms=tuple(norms.values()),
        least=tuple((unit[root[atoms]], k) for atoms, k in ties.least),
        served=tuple(replace(s, heads=unit[root[s.heads]], queries=unit[root[s.queries]]) for s in served),
    )


def _tied(served: Sequence[Served]) -> list[tuple[Numbers, Numbers]]:
    """Ties each head of keys and values to all queries that it serves."""
    return [(np.repeat(s.heads, s.queries.shape[1]), s.queries.ravel()) for s in served]


def _apart(ties: Ties) -> tuple[list[tuple[Numbers, Numbers]], list[Served]]:
    """The queries that can go one by one, and ties for all others; of heads that serve the same ones, too."""
    known, others = ties.served, list[Served]()
    taken = [*ties.balances, *(n.units for n in ties.norms), *ties.streams]
    while True:
        pairs = _tied(others)
        root = classes(ties.count, [*ties.pairs, *pairs])
        first: dict[tuple[int, bytes], Served] = {}
        for s in known:
            other = first.setdefault((len(s.heads), root[s.queries].tobytes()), s)
            pairs.append((other.heads, s.heads))
        root = classes(ties.count, [*ties.pairs, *pairs])
        reads, held = (ties.mask([root[a] for a in some]) for some in (ties.roles["reads"], taken))
        frozen = ties.mask([root[atoms] for atoms, _ in ties.freezes])
        counts = np.bincount(root[np.concatenate([s.queries.ravel() for s in first.values()] or [np.zeros(0, int)])])
        good = []
        for s in known:
            heads, queries = root[s.heads], root[s.queries]
            lone = len(np.unique(heads)) == len(heads) and (counts[queries] == 1).all()
            if lone and not (np.isin(heads, queries) | reads[heads] | frozen[heads] | held[heads]).any():
                good += [] if held[queries].any() else [s]
        if len(good) == len(known):
            return pairs, list(first.values())
        known, others = good, [*others, *(s for s in known if not any(s is g for g in good))]


def _in_shares(units: Numbers, places: Sequence[int]) -> bool:
    """Whether each part between cuts has its share of each unit, as queries, keys and values of heads in one weight:
    then whichever units go, the cuts stay at their shares.
    """
    whole = np.bincount(units, minlength=units.max() + 1) if (units >= 0).all() else np.zeros(0)
    parts = np.split(units, [p for p in places if 0 < p < len(units)])
    return bool(len(whole)) and all(
        (np.bincount(part, minlength=len(whole)) * len(units) == whole * len(part)).all() for part in parts
    )


def _side_by_side(units: Numbers, places: Sequence[int]) -> bool:
    """Whether cuts lie between axes, as heads and units in one weight, and no unit could go if as many stayed in each
    part: then cuts follow numbers that are kept too, or are refused.
    """
    rows = units.reshape(-1, gcd(len(units), *places))
    parts = [set(part.tolist()) for part in np.split(units, [p for p in places if 0 < p < len(units)])]
    apart = all(a == b or a.isdisjoint(b) for a in parts for b in parts)
    return apart and rows.shape[1] > 1 and bool((rows == rows[:, :1]).all(1).any())


class _Finder:
    """Where classes of atoms lie: each place is a dimension of a tensor, or a table over several."""

    def __init__(self, ties: Ties, root: Numbers, serving: Sequence[Numbers]) -> None:
        self.ties, self.root = ties, root
        self.reads, self.writes, self.rides = (ties.mask(ties.roles[role]) for role in ("reads", "writes", "rides"))
        self.ignored, self.added = ties.mask(ties.ignored), ties.mask(ties.added)
        self.shares = ties.mask(ties.shares)
        self.normed = ties.mask([root[norm.units] for norm in ties.norms])
        self.routed = ties.mask([root[atoms] for atoms, _ in ties.least])
        shut = self.normed | self.routed
        exposed = ((atoms[shut[root[atoms]]], why) for atoms, why in (ties.exposed if shut.any() else ()))
        self.reasons = [*ties.freezes, *exposed, *self._torn(), *((heads, SERVING) for heads in serving)]
        self.frozen = np.full(ties.count, -1)  # for each root, which of `reasons` was the first
        for number, (atoms, _) in enumerate(self.reasons):
            roots = root[atoms]
            self.frozen[roots[self.frozen[roots] < 0]] = number
        streams, heads = (ties.mask([root[atoms] for atoms in found]) for found in (ties.streams, ties.heads))
        self.streams, self.attending = streams & ~heads, ties.mask([root[atoms] for atoms in ties.attending])
        self.keys = [k for k in ties.first if k[0] in ties.reached]
        self.tables = list(ties.tables.items())
        self.two_faced: set[str] = set()

    def _torn(self) -> Iterator[tuple[Numbers, str]]:
        """Norms that share one eps and lie on different units: it cannot follow both."""
        kept: dict[tuple[str, str], Norm] = {}
        for norm in self.ties.norms:
            other = kept.setdefault((norm.module, norm.attribute), norm)
            if not np.array_equal(self.root[norm.units], self.root[other.units]):
                reason = f"several norms go by `{norm.attribute}` of `{norm.module}`, and not along the same units"
                yield np.concatenate([norm.units, other.units]), reason

    def signatures(self) -> dict[tuple[int, ...], list[int]]:
        """The classes by the numbers of the places they lie on, with multiplicity."""
        lying = []
        for key in self.keys:
            atoms = self.ties.atoms(*key)
            lying.append(self.root[atoms[~self.ignored[atoms]]])
        lying += [np.unique(self.root[atoms]) for _, atoms in self.tables]
        roots = np.concatenate([*lying, np.zeros(0, int)])
        order = np.argsort(roots, kind="stable")  # of each root, its places one after the other
        places = np.repeat(np.arange(len(lying)), [len(r) for r in lying])[order]
        _, first, count = np.unique(roots, return_index=True, return_counts=True)
        end = np.cumsum(count)
        members: dict[bytes, list[int]] = defaultdict(list)
        for k in np.argsort(first).tolist():
            members[places[end[k] - count[k] : end[k]].tobytes()].append(int(roots[first[k]]))
        return {tuple(np.frombuffer(key, places.dtype).tolist()): found for key, found in members.items()}

    def axis(self, signature: tuple[int, ...], roots: list[int]) -> Axis:
        """The axis of the classes with one signature."""
        local = np.full(self.ties.count, -1)
        local[roots] = np.arange(len(roots))
        sites: list[Site] = []
        frozen = self.frozen[roots]
        why = self.reasons[frozen[frozen >= 0][0]][1] if (frozen >= 0).any() else None
        normed, routed = bool(self.normed[roots].any()), bool(self.routed[roots].any())
        closing = []
        for number in dict.fromkeys(signature):
            if number >= len(self.keys):
                (tensor, dims, role), atoms = self.tables[number - len(self.keys)]
                sites.append(Site(tensor, dims, local[self.root[atoms]], role))
                continue
            tensor, dim = self.keys[number]
            atoms = self.ties.atoms(tensor, dim)
            here = atoms[local[self.root[atoms]] >= 0]
            reads, writes = bool(self.reads[here].any()), bool(self.writes[here].any())
            if reads and (writes or self.rides[here].any()):
                self.two_faced.add(tensor)
                why = why or (None if normed else f"`{tensor}` both reads and writes it")
            units = np.where(self.ignored[atoms], -1, local[self.root[atoms]])
            sites.append(Site(tensor, (dim,), units, "reads" if reads else "writes" if writes else "rides"))
            if (normed and (writes or self.added[here].any())) or (routed and self.shares[here].any()):
                closing.append(sites[-1])
        read = any(s.role == "reads" for s in sites)
        if why is None and (not (read or routed) or ((normed or routed) and not closing)):
            why = "no weight reads it, so no gate could close it"
        shared = next((s for s in closing if s.tensor in self.two_faced), None)  # an embedding that is the head too
        first = shared or next((s for s in sites if s.role == "writes"), sites[0])
        name = first.tensor.rpartition(".")[0] or first.tensor
        if all(s.role == "reads" for s in sites):
            name += ".input"
        stream, heads = bool(self.streams[roots].any()), bool(self.attending[roots].all())
        if heads and why and why.startswith(_MEETS):
            why += _hint(why, name.rpartition(".")[0])
        return Axis(name, len(roots), tuple(sites), why, stream, closing=tuple(closing), heads=heads, experts=routed)


def _hint(why: str, attention: str) -> str:
    """What lets heads go that meet something with an entry for each: its attention computes it, or is given it."""
    op, _, module = why.removeprefix(_MEETS).partition(" in ")
    if not attention or f"{module.strip('`')}.".startswith(f"{attention}."):
        return _IN_A_BUFFER if op in _COUNTS else ""
    return "" if op in _ROTATES else OF_EACH_HEAD


def _numbered_apart(axes: list[Axis]) -> list[Axis]:
    """Numbers several axes of one layer, those that can shrink first: an embedding's width before its vocabulary."""
    axes, used = list(axes), defaultdict[str, int](int)
    for k in sorted(range(len(axes)), key=lambda k: axes[k].frozen is not None):
        name = axes[k].name
        used[name] += 1
        if used[name] > 1:
            axes[k] = replace(axes[k], name=f"{name}#{used[name]}")
    return axes
