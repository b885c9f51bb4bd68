"""How units move through shapes: the algebra that every rule in `rules/` is written in.

Units usually lie along one dimension of a `Value`; after a reshape they may lie on several at once ("joint": the two
halves of a channel shuffle). A dimension that carries none is *plain*: batch, time, space. What makes the result sound:
an operation either carries every unit of its inputs to all entries of the output that depend on it, or consumes it by
a weight's contracting dimension, or freezes it. Nothing here knows an operation's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np

from ellzero.graph.axes import Numbers
from ellzero.graph.ties import Ties

Dims = tuple[int, ...]
Zero = Literal["yes", "own", "no", "low", "share"]
_LARGEST_JOINT = 50_000_000  # entries; beyond that joint dimensions cost more than they are worth


@dataclass
class Value:
    """A traced tensor: its shape, the atoms that its dimensions carry, and why its plain dimensions are plain.

    Args:
        shape: the shape in the trace.
        carried: the atoms, by the sorted dimensions that they lie on.
        why: for error messages, what a plain dimension of this tensor is.
        source: the parameter or buffer that this is a view of, entry for entry.
        step: number of the operation that made it.
        ancestors: bit set of the operations that it depends on.
        zero: whether it is zero at units that nothing writes; "own" for a parameter, which is if it is set to zero. Of
            closed experts, "low" for logits below all others, and "share" for what a softmax makes of them.
        numbers: the atoms that its entries are numbers of, as those of the experts that a router picks.
    """

    shape: tuple[int, ...]
    carried: dict[Dims, Numbers] = field(default_factory=dict)
    why: str = "a dimension that no parameter carries"
    source: str | None = None
    step: int = -1
    ancestors: int = 0
    zero: Zero = "no"
    numbers: Numbers | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def lineage(self) -> int:
        """Bit set of the operations that it depends on, its own included."""
        return self.ancestors | (1 << self.step) if self.step >= 0 else self.ancestors

    def group(self, dim: int) -> Dims | None:
        """The dimensions that carry units together with `dim`, if any."""
        return next((g for g in self.carried if dim in g), None)


def extent(value: Value, dims: Iterable[int]) -> tuple[int, list[Numbers]]:
    """How many entries `dims` have: the product of the sizes of those that are plain, and the atoms on the others."""
    dims = set(dims)
    groups = [g for g in value.carried if dims.issuperset(g)]
    return prod(value.shape[d] for d in dims.difference(*groups)), [value.carried[g] for g in groups]


def carries(value: Value, group: Dims, out: Value) -> bool:
    """Whether an operand has units where `out`, against which it broadcasts, has the `group`."""
    return any(value.group(d - out.ndim + value.ndim) is not None for d in group if d >= out.ndim - value.ndim)


def freeze(ties: Ties, value: Value, reason: str, dims: Sequence[int] | None = None) -> None:
    """Freezes what `dims` carry (default: all)."""
    for group, atoms in value.carried.items():
        if dims is None or set(dims) & set(group):
            ties.freeze(atoms, reason)


def narrow(ties: Ties, value: Value, dims: Sequence[int]) -> None:
    """Takes units off `dims` where they lie on others too: all that differ only there become one unit."""
    for group in [g for g in value.carried if set(dims) & set(g) and not set(g) <= set(dims)]:
        rest = tuple(d for d in group if d not in dims)
        atoms = value.carried.pop(group)
        if not atoms.size:  # a part without entries
            continue
        first = atoms[tuple(slice(None) if d in rest else slice(1) for d in group)]
        ties.tie(np.broadcast_to(first, atoms.shape), atoms)
        value.carried[rest] = first.reshape([value.shape[d] for d in rest])


def single(ties: Ties, value: Value, dim: int) -> Numbers | None:
    """The atoms along one dimension, to which joint ones are narrowed."""
    group = value.group(dim)
    if group is None:
        return None
    narrow(ties, value, [d for d in group if d != dim])
    return value.carried[(dim,)]


def solid(ties: Ties, value: Value, dim: int) -> Numbers:
    """The atoms along one dimension, made up and frozen where the dimension is plain."""
    atoms = single(ties, value, dim)
    if atoms is None:
        atoms = ties.fresh(value.shape[dim])
        ties.freeze(atoms, f"it meets {value.why}")
    return atoms


def without(ties: Ties, value: Value, dims: Sequence[int], reason: str) -> dict[Dims, Numbers]:
    """What is carried on when `dims` are mixed: what lies there alone is frozen."""
    narrow(ties, value, dims)
    freeze(ties, value, reason, dims)
    return {g: a for g, a in value.carried.items() if not set(g) & set(dims)}


def elementwise(ties: Ties, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """Entry by entry with broadcasting: units that meet at a dimension of the output are tied."""
    for value in values:
        if value.source is not None:
            for atoms in value.carried.values():
                ties.use(atoms, "rides")
    placed = [_broadcast(ties, v, shape) for v in values]
    _narrow_beside_plain(ties, placed, shape)
    carried: dict[Dims, Numbers] = {}
    for block in _blocks([g for theirs, _, _ in placed for g in theirs]):
        if any(_within(theirs, block) not in ([], [block]) for theirs, _, _ in placed):
            block_dims = {g[0] for theirs, _, _ in placed for g in _within(theirs, block) if len(g) == 1}
            if len(block_dims) == 1:
                whole, block = block, (block_dims.pop(),)
                for theirs, _, _ in placed:
                    for g in [g for g in _within(theirs, whole) if g != block]:
                        if block[0] in g:
                            theirs[block] = solid(ties, Value(shape, {g: theirs.pop(g)}), block[0])
                        else:
                            ties.freeze(theirs.pop(g), "two axes that are laid out differently meet in it")
            else:
                for theirs, _, _ in placed:
                    for g in _within(theirs, block):
                        ties.freeze(theirs[g], "two axes that are laid out differently meet in it")
                continue
        met = [theirs[block] for theirs, _, _ in placed if block in theirs]
        for other in met[1:]:
            ties.tie(met[0], other)
        meets = [why for theirs, full, why in placed if block not in theirs and full.intersection(block)]
        if meets:
            ties.freeze(met[0], f"it meets {meets[0]}")
        spare = bool(meets) and ties.is_spare(met[0])
        if not meets or (any(shape[d] > 1 for d in block) and not spare):  # a single frozen entry is as good as plain
            carried[block] = met[0]
    return Value(shape, carried, next((v.why for v in values), Value.why))


def _narrow_beside_plain(ties: Ties, placed: Sequence[tuple[dict[Dims, Numbers], set[int], str]], shape: Dims) -> None:
    """Takes joint units off the dimensions where another operand is plain, or has units inside theirs.

    Angles or a norm's weight along each head leave whole heads, and are then frozen.
    """
    inside = {d for theirs, _, _ in placed for g in theirs for d in g[1:]}
    for theirs, _, _ in placed:
        for g in [g for g in theirs if len(g) == 1 and g[0] in inside]:
            ties.freeze(theirs.pop(g), "it lies along each unit of another axis")
    plain = {d for theirs, full, _ in placed for d in full - {d for g in theirs for d in g}}
    for theirs, _, _ in placed:
        value = Value(shape, {g: theirs.pop(g) for g in list(theirs)})
        narrow(ties, value, [d for d in sorted(plain) if any(d in g and not set(g) <= plain for g in value.carried)])
        theirs.update(value.carried)


def _broadcast(ties: Ties, value: Value, shape: tuple[int, ...]) -> tuple[dict[Dims, Numbers], set[int], str]:
    """What one operand carries at the dimensions of the output, and the dimensions that it fills."""
    shift = len(shape) - value.ndim
    full = {d + shift for d in range(value.ndim) if value.shape[d] == shape[d + shift]}
    out = {}
    for group, atoms in value.carried.items():
        moved = tuple(d + shift for d in group)
        if full.issuperset(moved):
            out[moved] = atoms
        else:
            ties.freeze(atoms, "one unit of it is broadcast over many entries")
            if value.source is not None:
                ties.ignored.append(atoms)  # the ones in a parameter's shape (C, 1, 1) are no units
    return out, full, value.why


def _blocks(groups: Sequence[Dims]) -> list[Dims]:
    """Sets of dimensions that joint units hold together."""
    blocks: list[set[int]] = []
    for group in groups:
        touching = [b for b in blocks if b & set(group)]
        blocks = [b for b in blocks if not b & set(group)] + [set(group).union(*touching)]
    return [tuple(sorted(b)) for b in blocks]


def _within(theirs: dict[Dims, Numbers], block: Dims) -> list[Dims]:
    return [g for g in theirs if set(g) <= set(block)]


def permute(value: Value, order: Sequence[int]) -> Value:
    """With the dimensions in another order."""
    carried = {}
    for group, atoms in value.carried.items():
        at = [d for d, old in enumerate(order) if old in group]
        carried[tuple(at)] = atoms.transpose([group.index(order[d]) for d in at])
    return replace(value, shape=tuple(value.shape[d] for d in order), carried=carried)


def take(value: Value, dim: int, index: Numbers) -> Value:
    """The entries `index` of one dimension, in that order."""
    carried = {g: np.take(a, index, g.index(dim)) if dim in g else a for g, a in value.carried.items()}
    shape = (*value.shape[:dim], len(index), *value.shape[dim + 1 :])
    return replace(value, shape=shape, carried=carried)


def drop(ties: Ties, value: Value, dim: int, reason: str) -> Value:
    """Without one dimension: what lay on it is frozen."""
    kept = without(ties, value, [dim], reason)
    carried = {tuple(d - (d > dim) for d in g): a for g, a in kept.items()}
    return replace(value, shape=value.shape[:dim] + value.shape[dim + 1 :], carried=carried)


def insert(value: Value, dim: int) -> Value:
    """With a new plain dimension of size one."""
    carried = {tuple(d + (d >= dim) for d in g): a for g, a in value.carried.items()}
    return replace(value, shape=(*value.shape[:dim], 1, *value.shape[dim:]), carried=carried)


def concat(ties: Ties, values: Sequence[Value], dim: int, shape: tuple[int, ...]) -> Value:
    """One after the other along `dim`; at the other dimensions units are tied."""
    values = [v for v in values if v.shape[dim]] or values  # one without entries, as beside all of a head, says nothing
    rest = []
    groups = [v.group(dim) for v in values]
    if groups[0] and all(g == groups[0] for g in groups):  # laid out alike: what lies on other dimensions too stays so
        joint = np.concatenate([v.carried[groups[0]] for v in values], groups[0].index(dim))
    else:
        joint = None
    for value in values:
        if joint is None:
            if any(g and dim in g[1:] for g in groups):  # parts of units that lie on an outer dimension: whole ones go
                narrow(ties, value, [dim])
            single(ties, value, dim)
        carried = {g: a for g, a in value.carried.items() if dim not in g}
        rest.append(Value((*value.shape[:dim], 1, *value.shape[dim + 1 :]), carried, value.why))
    out = elementwise(ties, rest, (*shape[:dim], 1, *shape[dim + 1 :]))
    out.shape = shape
    if joint is not None and groups[0]:
        out.carried[groups[0]] = joint
    elif any(v.group(dim) for v in values):
        out.carried[(dim,)] = np.concatenate([solid(ties, v, dim) for v in values])
    return out


def reshape(ties: Ties, value: Value, shape: tuple[int, ...]) -> Value:
    """The same entries in row-major order under another shape."""
    if shape == value.shape:
        return value
    carried: dict[Dims, Numbers] = {}
    for old, new in _chunks(value, shape):
        groups = sorted(g for g in value.carried if set(g) & set(old))
        if not groups:
            continue
        if len(old) == len(new) == 1:
            carried[tuple(new)] = value.carried[groups[0]]
            continue
        size = prod(value.shape[d] for d in old)
        if len(groups) > 1:  # what is as long as others want may be a batch beside heads
            groups.sort(key=lambda g: (ties.is_spare(value.carried[g]) * (1 + (0 in g)), g))
        for g in groups[size <= _LARGEST_JOINT :]:  # the outermost can go as it is, such as heads
            ties.freeze(value.carried[g], "a reshape lays it out together with another axis")
        if size > _LARGEST_JOINT:
            continue
        group, atoms = groups[0], value.carried[groups[0]]
        spread = atoms.reshape([value.shape[d] if d in group else 1 for d in old])
        laid = np.broadcast_to(spread, [value.shape[d] for d in old]).reshape([shape[d] for d in new])
        varying = [k for k in range(laid.ndim) if laid.shape[k] > 1 and (laid != laid.take([0], k)).any()]
        if not varying:  # a single unit: it needs a dimension of its own to be removable
            ones = [k for k in range(laid.ndim) if laid.shape[k] == value.shape[group[0]] or laid.ndim == 1]
            if not ones:
                ties.freeze(atoms, "a reshape lays its only unit over other dimensions")
                continue
            varying = ones[:1]
        if len(varying) > 1:
            ties.placed.append(atoms)
        pick = tuple(slice(None) if k in varying else 0 for k in range(laid.ndim))
        carried[tuple(new[k] for k in varying)] = np.ascontiguousarray(laid[pick])
    return replace(value, shape=shape, carried=carried)


def _chunks(value: Value, shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of old and new dimensions with equal products; those that joint units lie on are joined."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < value.ndim and j < len(shape):
        old, new = [i], [j]
        a, b = value.shape[i], shape[j]
        while a != b:
            if a < b:
                i += 1
                old.append(i)
                a *= value.shape[i]
            else:
                j += 1
                new.append(j)
                b *= shape[j]
        runs.append((old, new))
        i, j = i + 1, j + 1
    runs.extend(([k], []) for k in range(i, value.ndim))
    runs.extend(([], [k]) for k in range(j, len(shape)))
    for group in value.carried:
        hit = [k for k, (old, _) in enumerate(runs) if set(old) & set(group)]
        if len(hit) > 1:
            joined = sorted(d for k in hit for d in runs[k][0]), sorted(d for k in hit for d in runs[k][1])
            runs = [joined if k == hit[0] else run for k, run in enumerate(runs) if k not in hit[1:]]
    return runs
