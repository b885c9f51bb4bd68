"""Taking units out of a network: the removal plan as a value, and how it is carried out.

A `Plan` says for every parameter and buffer which entries of which dimensions stay. It is data: the same plan slices
a model's weights, an optimizer's moments, an averaged copy or gradients. Where slicing is not enough, `standins/`
has layers for it. This file does not know what a gate is: it is told which units are alive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ellzero.graph.axes import Graph, Numbers, Served
from ellzero.graph.resizing import in_place_of, resize
from ellzero.graph.standins.heads import pad
from ellzero.graph.standins.layers import put_closed, put_nothing, put_scatter, put_select
from ellzero.graph.standins.slim import WHOLE, WIDTH, put_slim

Mask = npt.NDArray[np.bool_]


class ClosedAxisError(ValueError):
    """Every unit of an axis is closed, and nothing carries on without it."""


@dataclass(frozen=True)
class Shrunk:
    """A norm over `was` units, of which `now` are left; the rest is as in `Norm`."""

    module: str
    attribute: str
    weight: str
    offset: float
    was: int
    now: int
    power: float = 0.5

    @property
    def scale(self) -> float:
        """How much larger its weight becomes."""
        return float((self.was / self.now) ** self.power)

    def scaled(self, weight: Tensor) -> Tensor:
        """The weight with which the norm over what is left gives what that over all gave, where all else is zero."""
        return (weight + self.offset) * self.scale - self.offset

    def back(self) -> Shrunk:
        """The way back."""
        return replace(self, was=self.now, now=self.was)


@dataclass(frozen=True, eq=False)
class Plan:
    """What stays, tensor by tensor.

    Args:
        units: for every unit of the graph, whether it stays.
        rows: for each tensor that changes, the indices that stay, by dimension.
        columns: for the weight of a grouped convolution, the column indices that stay in each *kept* row.
        selects: for each weight in front of which a `Select` goes, the inputs that it goes on reading, and of how many.
        scatters: for each weight behind which a `Scatter` goes, the outputs that it goes on writing, and of how many.
            Its entry in `rows` is the same.
        closed: layers (module names) that read or write nothing any more.
        sizes: by module and attribute, the size that is stored there, as it was and as it becomes.
        norms: over how many units, and what else is known of each norm whose weight and eps must follow.
        blocks: numbers of the blocks that are gone.
        gone: the modules that go with them, with the number that `put_nothing` takes. Of those that it cuts, `rows`
            says what is left of their outputs.
    """

    units: Mask
    rows: dict[str, dict[int, Numbers]] = field(default_factory=dict)
    columns: dict[str, Numbers] = field(default_factory=dict)
    selects: dict[str, tuple[Numbers, int]] = field(default_factory=dict)
    scatters: dict[str, tuple[Numbers, int]] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    sizes: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    norms: tuple[Shrunk, ...] = ()
    blocks: frozenset[int] = frozenset()
    gone: dict[str, int] = field(default_factory=dict)

    def without(self, graph: Graph, tensors: Iterable[str]) -> bool:
        """Whether all of these tensors lie in blocks that are gone."""
        gone = frozenset[str]().union(*(graph.blocks[b].tensors for b in self.blocks))
        return gone.issuperset(tensors)

    def slice(self, name: str, tensor: Tensor) -> Tensor:
        """What stays of `tensor`, which has the shape of the parameter or buffer `name`: itself, its gradient, its
        moments.
        """
        for dim, index in self.rows.get(name, {}).items():
            tensor = tensor.index_select(dim, torch.as_tensor(index, device=tensor.device))
        if name in self.columns:
            columns = torch.as_tensor(self.columns[name], device=tensor.device)
            shape = columns.shape + tensor.shape[2:]
            tensor = tensor.gather(1, columns.reshape(*columns.shape, *[1] * (tensor.ndim - 2)).expand(shape))
        return tensor

    def cut(self, units: Numbers, name: str, dims: tuple[int, ...]) -> Numbers:
        """What stays of the numbers that lie along these dimensions of the parameter or buffer `name`."""
        for axis, dim in enumerate(dims):
            index = self.rows.get(name, {}).get(dim)
            units = units if index is None else np.take(units, index, axis)
        if name in self.columns and len(dims) > 1:
            columns = self.columns[name]
            units = np.take_along_axis(units, columns.reshape(*columns.shape, *[1] * (units.ndim - 2)), 1)
        return units

    def left(self, name: str, tensor: Tensor) -> Tensor:
        """What becomes of the parameter or buffer `name`: sliced, and a norm's weight scaled."""
        norm = next((n for n in self.norms if n.weight == name), None)
        sliced = self.slice(name, tensor)
        return sliced if norm is None else norm.scaled(sliced)

    def spread(self, name: str, small: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The way back from `slice`: a tensor of `shape` with `small` where it was, and zeros where nothing stayed."""
        if name not in self.rows and name not in self.columns:
            return small
        full = small.new_zeros(shape)
        where = self.slice(name, torch.arange(full.numel(), device=small.device).reshape(shape))
        return full.reshape(-1).index_copy(0, where.reshape(-1), small.reshape(-1)).reshape(shape)

    def beyond(self, done: Plan | None) -> Plan:
        """What of this plan is left to do in a network where `done` has been carried out.

        Args:
            done: a plan of the same network that keeps all that this one does, without `columns`, `selects`,
                `scatters`, `closed` and `blocks`.
        """
        if done is None:
            return self
        more = done.columns or done.selects or done.scatters or done.closed or done.blocks
        if more or (self.units & ~done.units).any():
            raise ValueError("`done` must keep every unit that this plan keeps, and every layer as it is")
        rows: dict[str, dict[int, Numbers]] = {}
        for name, dims in self.rows.items():
            for dim, index in dims.items():
                there = done.rows.get(name, {}).get(dim)
                if there is None or len(there) > len(index):
                    rows.setdefault(name, {})[dim] = index if there is None else np.searchsorted(there, index)
        before = {(n.module, n.attribute, n.weight): n.now for n in done.norms}
        norms = (replace(n, was=before.get((n.module, n.attribute, n.weight), n.was)) for n in self.norms)
        return replace(self, rows=rows, norms=tuple(n for n in norms if n.was != n.now))

    def apply(self, model: nn.Module) -> None:
        """Carries the plan out on `model`, in place: slices every tensor, then brings the modules in line."""
        modules = dict(model.named_modules(remove_duplicate=False))
        self._change(modules, self.left)
        _set_sizes(modules, self.sizes)
        _set_eps(modules, self.norms)
        for name, (index, width) in self.selects.items():
            put_select(modules[name.rpartition(".")[0]], torch.as_tensor(index), width)
        for name, (index, outputs) in self.scatters.items():
            put_scatter(modules[name.rpartition(".")[0]], torch.as_tensor(index), outputs)
        for path in self.closed:
            put_closed(model, path)
        for path, number in self.gone.items():
            put_nothing(model, path, number)
        pad(modules.values())

    def renamed(self, whole: nn.Module, small: nn.Module) -> dict[Any, set[float]]:
        """Of each eps in `small`, on which the plan was carried out, what it is in `whole`; of two streams, both."""
        out: dict[Any, set[float]] = {}
        for module, name in ((n.module, n.attribute) for n in self.norms):
            now, was = (getattr(m.get_submodule(module), name) for m in (small, whole))
            out.setdefault(now, set()).add(was)
        return out

    def undo(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Puts zeros where the plan took entries out, in place: the way back from `apply` without `selects` and
        `closed`.

        Args:
            model: that it was carried out on.
            shapes: of all parameters and buffers as they were.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        norms = {n.weight: n.back() for n in self.norms}

        def back(name: str, tensor: Tensor) -> Tensor:
            tensor = norms[name].scaled(tensor) if name in norms else tensor
            return self.spread(name, tensor, shapes[name])

        self._change(modules, back)
        _set_sizes(modules, {place: (was, was) for place, (was, _) in self.sizes.items()})
        _set_eps(modules, [n.back() for n in self.norms])
        pad(modules.values())

    def _change(self, modules: Mapping[str, nn.Module], change: Callable[[str, Tensor], Tensor]) -> None:
        """Puts something new in the place of every tensor that the plan names."""
        owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
        for path, module in modules.items():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append((module, key, f"{path}.{key}".lstrip(".")))
        touched: dict[int, nn.Module] = {}
        with torch.no_grad():
            for places in owners.values():
                name = next((n for _, _, n in places if n in self.rows or n in self.columns), None)
                if name is None:
                    continue
                old = getattr(places[0][0], places[0][1])
                new: Tensor = change(name, old.detach()).contiguous(memory_format=_format(old))
                if isinstance(old, nn.Parameter):
                    new = in_place_of(old, new)
                for module, key, _ in places:  # tied weights stay tied
                    vars(module)["_parameters" if isinstance(new, nn.Parameter) else "_buffers"][key] = new
                    touched[id(module)] = module
        for module in touched.values():
            resize(module)


def _set_sizes(modules: Mapping[str, nn.Module], sizes: Mapping[tuple[str, str], tuple[int, int]]) -> None:
    slims: dict[str, dict[str, int]] = {}
    for (path, attribute), (was, size) in sizes.items():
        if attribute in (WHOLE, WIDTH):
            slims.setdefault(path, {WHOLE: was, WIDTH: was})[attribute] = size
        else:
            set_size(modules[path], attribute, size)
    for path, kept in slims.items():
        put_slim(modules[path], kept[WHOLE], kept[WIDTH])


def _set_eps(modules: Mapping[str, nn.Module], norms: Sequence[Shrunk]) -> None:
    """Has the eps of norms follow, once for each place that holds one: several norms may share it."""
    for norm in {(id(modules[n.module]), n.attribute): n for n in norms}.values():
        module = modules[norm.module]
        eps = getattr(module, norm.attribute)
        if eps is None:  # torch takes the least step of the type that it computes in
            eps = torch.finfo(next(module.parameters()).dtype).eps
        setattr(module, norm.attribute, eps * norm.was / norm.now)


def set_size(module: nn.Module, attribute: str, size: int) -> None:
    """Sets a number that a module keeps, or that is in its settings ("config.heads")."""
    holder, dot, name = attribute.partition(".")
    if dot:  # others go on with the settings as they are
        own = copy.copy(getattr(module, holder))
        vars(own)[name] = size
        setattr(module, holder, own)
    else:
        setattr(module, attribute, size)


def _format(tensor: Tensor) -> torch.memory_format:
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def make_plan(
    graph: Graph,
    alive: Mask,
    *,
    entries: Mapping[tuple[str, int], Mask] | None = None,
    evidence: npt.NDArray[np.float64] | None = None,
    refuse: bool = True,
    blocks: Collection[int] = (),
) -> Plan:
    """The plan that removes every unit that is not alive, as far as the network lets it.

    Units come back: until each group of a grouped convolution has as many channels as the fullest ("padding"), those
    that weigh least first and of them those with most evidence (none with −∞, but for want of others); and the one with
    most evidence for an axis that is closed as a whole where its layers cannot be taken out. Units of frozen axes
    always stay. `entries` says which of its inputs a weight that gets a `Select` goes on reading, and which of its
    outputs one that gets a `Scatter` goes on writing. A closed axis that nothing carries on without is a
    `ClosedAxisError`, or keeps one unit without `refuse`. Of `blocks`, that are gone, nothing stays; what is left of
    their forward in modules that stay goes on with one unit of each of their axes.
    """
    entries = entries or {}
    evidence = np.zeros(len(alive)) if evidence is None else evidence
    inside = np.any([graph.inside(b) for b in blocks], 0) if blocks else np.zeros(len(alive), dtype=bool)
    kept = alive & ~inside
    spans = list(zip(graph.axes, graph.offsets, strict=False))
    for axis, start in spans:
        if axis.frozen is not None:
            kept[start : start + axis.size] = True
    empty = [(a, s) for a, s in spans if not np.count_nonzero(kept[s : s + a.size])]
    dead = _dead_readers(graph, kept, entries)
    carries_on = not dead or graph.carries_on(dead)
    if refuse and not carries_on:
        what = [f"every unit of axis `{a.name}`" for a, _ in empty] or [f"every input of `{name}`" for name in dead]
        raise ClosedAxisError(
            " and ".join(what)
            + " is closed and no residual path carries on, so nothing of the input would reach the output; "
            "`finalize` never takes the last units of an axis"
        )
    for axis, start in empty:
        if inside[start] or not (axis.can_vanish and carries_on):
            kept[start + int(np.argmax(evidence[start : start + axis.size]))] = True
    for norm in graph.norms:
        if not (kept[norm.units] | (norm.units < 0)).any():  # a norm over nothing is none
            kept[norm.units[np.argmax(evidence[norm.units])]] = True
    for units, least in graph.least:  # experts that are closed and stay get no share
        of = graph.axes[int(np.searchsorted(graph.offsets, units[0], "right")) - 1]
        if refuse and of.experts and not alive[units].any():
            raise ClosedAxisError(f"every expert of `{of.name}` is closed, and what comes in goes to none of them")
        if not of.experts and not kept[units].any():  # all heads go
            continue
        kept[units[np.lexsort((-evidence[units], ~kept[units]))[:least]]] = True
    if graph.balanced or graph.served:
        order = np.argsort(np.lexsort((-evidence, graph.weight, np.isneginf(evidence)))).astype(np.float64)
    for balances in graph.balanced:
        even_out(kept, balances, order)
    for served in graph.served:
        level(kept, served, order)
        kept[served.heads] = kept[served.queries].any(1)
    plan = _carry_through(graph, kept, entries)
    return _without(plan, graph, frozenset(blocks), inside) if blocks else plan


def _without(plan: Plan, graph: Graph, blocks: frozenset[int], inside: Mask) -> Plan:
    """The plan that leaves nothing of these blocks: what it would do in their modules does not matter any more."""

    def goes(module: str) -> bool:
        return any(graph.blocks[b].holds(module) for b in blocks)

    rows, gone = dict(plan.rows), {}
    for tensor in (t for t in plan.scatters if goes(t.rpartition(".")[0])):
        rows[tensor] = {dim: index for dim, index in rows[tensor].items() if dim}
    for b in sorted(blocks):
        for path, parts in graph.blocks[b].layers.items():
            if not goes(path.rpartition(".")[0]):
                weight = f"{path}.weight"
                outputs = len(rows.get(weight, {}).get(0, range(graph.shapes.get(weight, (0,))[0])))
                gone[path] = outputs if parts < 0 else parts
    return replace(
        plan,
        units=plan.units & ~inside,
        rows=rows,
        selects={t: index for t, index in plan.selects.items() if not goes(t.rpartition(".")[0])},
        scatters={t: index for t, index in plan.scatters.items() if not goes(t.rpartition(".")[0])},
        closed=frozenset(path for path in plan.closed if not goes(path)),
        norms=tuple(n for n in plan.norms if not goes(n.module)),
        blocks=blocks,
        gone=gone,
    )


def _dead_readers(graph: Graph, kept: Mask, entries: Mapping[tuple[str, int], Mask]) -> list[str]:
    """The weights that read nothing any more, or write nothing."""
    dead = {name for (name, _), mask in entries.items() if not mask.any()}
    for tensor, dims in graph.reading.items():
        units = graph.units[tensor][dims]
        if not np.count_nonzero(kept[units] | (units < 0)):
            dead.add(tensor)
    return sorted(dead)


def even_out(mask: Mask, balances: Sequence[Numbers], order: npt.NDArray[np.float64]) -> None:
    """Adds units to a mask, in place, until as many are in each part of all these balances.

    Those with the lowest `order` come first. Where several balances share units, before them those that more of the
    balances miss, into the part first that has fewest of these: nearly always as few in all as can be.
    """
    while True:
        there = [mask[balance] | (balance < 0) for balance in balances]
        short = [(here.sum(1).max() - here.sum(1)) for here in there]
        if not any(few.any() for few in short):
            return
        if len(balances) == 1:
            rank = np.lexsort((order[balances[0]], there[0]), axis=1).argsort(1)
            mask[balances[0][rank < short[0][:, None]]] = True
            continue
        parts = [
            (row[~here], n)
            for balance, h, few in zip(balances, there, short, strict=True)
            for row, here, n in zip(balance, h, few.tolist(), strict=True)
            if n
        ]
        missed = np.bincount(np.concatenate([back for back, _ in parts]), minlength=len(mask))
        best = [back[missed[back] == missed[back].max()] for back, _ in parts]
        spare = [(-missed[units[0]], len(units) - n) for units, (_, n) in zip(best, parts, strict=True)]
        tight = best[min(range(len(best)), key=spare.__getitem__)]
        mask[tight[np.argmin(order[tight])]] = True


def level(mask: Mask, served: Served, order: npt.NDArray[np.float64]) -> None:
    """Adds queries to a mask, in place, until as many are there of each head of keys that has any."""
    rows = served.queries[mask[served.queries].any(1)]
    if len(rows):
        most = max(served.least, int(mask[rows].sum(1).max()))
        rank = np.lexsort((order[rows], ~mask[rows]), axis=1).argsort(1)
        mask[rows[rank < most]] = True


def _carry_through(graph: Graph, kept: Mask, entries: Mapping[tuple[str, int], Mask]) -> Plan:
    """From units to indices, tensor by tensor."""
    rows: dict[str, dict[int, Numbers]] = {}
    columns: dict[str, Numbers] = {}
    selects: dict[str, tuple[Numbers, int]] = {}
    scatters: dict[str, tuple[Numbers, int]] = {}
    closed: set[str] = set()
    known: dict[int, tuple[Mask, Numbers]] = {}  # while gates learn, there is a plan in every step

    def left(units: Numbers) -> tuple[Mask, Numbers]:
        """What stays of the places with these units, as a mask and as indices."""
        if id(units) not in known:
            stay = kept[units] | (units < 0)
            known[id(units)] = stay, np.flatnonzero(stay)
        return known[id(units)]

    for tensor, sites in graph.units.items():
        for dims, units in sites.items():
            stay, places = left(units)
            if len(dims) > 1:
                inside = stay[left(sites[(0,)])[0]] if (0,) in sites else stay
                if not np.count_nonzero(inside):  # the groups read nothing
                    closed.add(tensor.rpartition(".")[0])
                elif not inside.all():
                    columns[tensor] = np.stack([np.flatnonzero(line) for line in inside])
                continue
            if (tensor, dims[0]) in entries and dims == graph.reading[tensor]:
                arriving, places = places, np.flatnonzero(stay & entries[tensor, dims[0]])
                if 0 < len(places) < len(arriving):
                    selects[tensor] = np.searchsorted(arriving, places), len(arriving)
            elif (tensor, dims[0]) in entries and not entries[tensor, dims[0]].all():
                stay = entries[tensor, dims[0]].copy()
                stay[0] |= not stay.any()  # an output that is zero; a layer without any has no shape
                places = np.flatnonzero(stay)
                scatters[tensor] = places, len(stay)
            if len(places) < stay.size:
                rows.setdefault(tensor, {})[dims[0]] = places
            if not len(places):
                closed.add(tensor.rpartition(".")[0])
    for tensor in [t for t in scatters if t.rpartition(".")[0] in closed]:  # it reads nothing: its bias is all it gives
        del scatters[tensor]
        rows.get(tensor, {}).pop(0, None)  # all of them stay where there is but one
    sizes = {}
    for s in graph.stored:
        heads, here = np.ones(1) if s.per is None else kept[s.per], kept[s.units] | (s.units < 0)
        sizes[s.module, s.attribute] = len(here) // len(heads), int(here.sum()) // int(heads.sum() or 1)
    sizes = {place: (was, now) for place, (was, now) in sizes.items() if was != now}
    norms = (
        Shrunk(
            *(n.module, n.attribute, n.weight, n.offset, len(n.units)),
            now=int((kept[n.units] | (n.units < 0)).sum()),
            power=n.power,
        )
        for n in graph.norms
    )
    changed = tuple(n for n in norms if n.was != n.now)
    return Plan(kept, rows, columns, selects, scatters, frozenset(closed), sizes, changed)
