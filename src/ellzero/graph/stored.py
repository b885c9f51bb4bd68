"""Numbers that a module keeps. Sizes that its own forward lays units out by: `view(n, t, self.heads, self.size)`.

That a number means the dimension which is as large as it is a guess. Whether the network does the same with the number
changed is tried out with all else, on copies (`trials/`). Layers whose numbers follow from their tensors are not looked
at here (`resizing.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ellzero.graph.axes import EPS, Graph, Layout, Numbers, Step, Stored
from ellzero.graph.resizing import resizer
from ellzero.graph.rules.call import SIZED
from ellzero.graph.standins.slim import WHOLE, WIDTH

Place = tuple[str, str]  # a module and an attribute
_COUNTS = re.compile(r"heads?$|^n?h$|all_head|inner|split")
_SETTINGS = re.compile(r"(Config|Args|Settings|Namespace)$")
_SHARES = re.compile(r"group|rep")
_SHARES_OF_ONE = re.compile(r"(kv|key_value)_(heads_)?groups$|^n_?rep$")  # which a lone head of keys serves: all
_MADE_OF_SIZES = ("zeros", "ones")  # of sizes alone
_TAKES_SIZES = ("view", "reshape", "expand", "new_zeros", "new_ones", *_MADE_OF_SIZES)
_GROUPS = -1  # in the place of a dimension: a number of groups


class _Marked(int):
    """A number that tells where it is stored."""

    place: Place


class _Watch(TorchFunctionMode):
    """Notes which stored numbers are given as the sizes of which dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Place, set[tuple[tuple[int, ...], int]]] = defaultdict(set)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if name == "group_norm":
            self._note(args[1] if len(args) > 1 else kwargs.get("num_groups"), out, _GROUPS)
        elif name in ("split", "split_with_sizes"):
            sizes = args[1] if len(args) > 1 else next(v for key, v in kwargs.items() if key != "dim")
            dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            for part, size in zip(out, sizes if isinstance(sizes, list | tuple) else [sizes] * len(out), strict=False):
                self._note(size, part, dim % part.ndim)
        elif name == "unflatten" and isinstance(out, Tensor):
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            sizes = args[2] if len(args) > 2 else kwargs["sizes"]
            for k, size in enumerate(sizes, dim % (out.ndim - len(sizes) + 1)):
                self._note(size, out, k)
        elif name in _TAKES_SIZES and isinstance(out, Tensor):
            told = args[name not in _MADE_OF_SIZES :]
            given = [a for part in told for a in (part if isinstance(part, list | tuple) else [part])]
            for k, size in enumerate(given, out.ndim - len(given)):
                self._note(size, out, k)
        return out

    def _note(self, size: Any, made: Tensor, dim: int) -> None:
        if isinstance(size, _Marked):
            self.seen[size.place].add((tuple(made.shape), dim))


def stored(model: nn.Module, graph: Graph, *forwards: Callable[[], Any]) -> tuple[Stored, ...]:
    """The whole numbers in modules that are as large as a dimension that units are laid along in their own forward.

    Args:
        model: that was traced. Its numbers are marked while it runs.
        graph: what was found.
        forwards: run it; each if those before raise something.
    """
    laid: dict[tuple[str, int], list[Numbers]] = defaultdict(list)
    along: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    free = graph.on(lambda axis: axis.frozen is None)
    for served in graph.served:
        free[served.heads] = free[served.queries].all()
    for step, units in group_norms(graph):
        if free[units[units >= 0]].any():
            laid[step.module, len(units)].append(units)
            along[step.module, step.made[0][0]].add(_GROUPS)
    for step, layout in _laid(graph):
        for d, units in _along(layout):
            if free[units].all() and not _repeated(graph, step, units):
                laid[step.module, len(units)].append(units)
                along[step.module, layout[0]].add(d)
    found: dict[tuple[str, int], list[Stored]] = defaultdict(list)
    for path, module in model.named_modules():
        follows = resizer(module) is not None and not (_is_bare(module) or _has_own_forward(module))
        for name, size in () if follows else vars(module).items():
            ways = laid.get((path, size), []) if type(size) is int else []
            if ways and all(np.array_equal(np.sort(way), np.sort(ways[0])) for way in ways):
                found[path, size].append(Stored(path, name, ways[0]))
    seen = _watched(model, [s for several in found.values() for s in several], forwards) if found else {}
    out = []
    for several in found.values():
        told = {s.attribute: seen.get((s.module, s.attribute), set()) for s in several}
        right = [s for s in several if all(d in along[s.module, shape] for shape, d in told[s.attribute])]
        # A number that is never told as a size means nothing beside one that is; alone, it goes by its name.
        by_name = [s for s in right if _COUNTS.search(s.attribute)]
        of_one = [s for s in right if _SHARES_OF_ONE.search(s.attribute) and not told[s.attribute]]
        out += ([s for s in right if told[s.attribute]] or by_name) + of_one
    for s in [s for s in out if _is_bare(model.get_submodule(s.module))]:
        channels: Any = model.get_submodule(s.module).num_channels
        out.append(Stored(s.module, "num_channels", np.repeat(s.units, channels // len(s.units))))
    return (*out, *_shares(model, graph))


def _shares(model: nn.Module, graph: Graph) -> Iterator[Stored]:
    """How many queries each head of keys serves, where a module keeps that."""
    for s in graph.served:
        for name, size in vars(model.get_submodule(s.module)).items():
            if type(size) is int and size == s.queries.shape[1] and _SHARES.search(name):
                yield Stored(s.module, name, s.queries.ravel(), s.heads)


def _repeated(graph: Graph, step: Step, units: Numbers) -> bool:
    """Whether heads of keys lie there once for each of their queries: a number so large is that of the queries."""
    same = (s for s in graph.served if len(units) == s.queries.size and not step.op.startswith("split"))
    return any(np.array_equal(units, np.repeat(s.heads, s.queries.shape[1])) for s in same)


def settings_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The objects that a module keeps its settings in, such as `self.config`, by name; others may keep the same one."""
    for name, value in vars(model).items():
        if _SETTINGS.search(type(value).__name__) and "__dict__" in dir(value):
            yield name, value


def numbers_in_settings(model: nn.Module, graph: Graph, axes: Sequence[int]) -> Iterator[tuple[int, Stored]]:
    """Of these axes those of heads whose number is in the settings of a module that lays them out: it can have a copy
    of these, and a number of its own in there.
    """
    for k in (k for k in axes if graph.axes[k].heads):
        units = np.arange(graph.offsets[k], graph.offsets[k] + graph.axes[k].size)
        here = {step.module for step, layout in _laid(graph) for _, way in _along(layout) if way[0] in units}
        for path in sorted(here):
            for holder, kept in settings_of(model.get_submodule(path)):
                for name, size in vars(kept).items():
                    ways = _ways(graph, path, size) if type(size) is int and _COUNTS.search(name) else []
                    if ways and np.isin(ways[0], units).all():
                        yield k, Stored(path, f"{holder}.{name}", ways[0])


def _ways(graph: Graph, path: str, size: int) -> list[Numbers]:
    """The units along dimensions of this size in the forward of a module, if they are the same everywhere."""
    here = (layout for step, layout in _laid(graph) if step.module == path)
    ways = [way for layout in here for _, way in _along(layout) if len(way) == size]
    return ways if all(np.array_equal(np.sort(way), np.sort(ways[0])) for way in ways) else []


def parts_of_reshapes(model: nn.Module, graph: Graph, axes: Sequence[int]) -> Iterator[tuple[int, Numbers]]:
    """Of these axes those of heads that a forward lays out in a number of parts: as many stay in each."""
    for k in (k for k in axes if graph.axes[k].heads):
        for numbers in (n for _, (_, carried) in _laid(graph) for n in carried.values() if n.ndim > 1 and n.size):
            parts = [np.unique(row) for row in numbers.reshape(len(numbers), -1)]
            apart = np.unique(np.concatenate(parts))
            several = len(parts) > 1 and all(len(part) == len(parts[0]) > 1 for part in parts)
            whole = np.arange(graph.offsets[k], graph.offsets[k] + graph.axes[k].size)
            if several and np.array_equal(apart, whole) and len(apart) == sum(map(len, parts)):
                yield k, np.stack(parts)


def widths_of_inputs(model: nn.Module, graph: Graph, axes: Sequence[int]) -> Iterator[tuple[int, Stored]]:
    """Of these axes those of heads that a forward lays side by side, as wide as its input may be: `view(b, t, c)`; and
    those of streams that are such an input.

    The width of the input is no number that a module keeps. A `Slim` has it (`standins/`), and that of the heads.
    """
    for j, module, units in _side_by_side(model, graph):
        if j in axes:
            yield j, Stored(module, WIDTH, units)
        elif graph.axes[j].frozen is None and graph.axes[j].size > 1:  # they go as it is: it asks for no width
            continue
        for k in (k for k in axes if graph.axes[k].closing and graph.axes[k].size == len(units)):
            whole = np.arange(graph.offsets[k], graph.offsets[k] + graph.axes[k].size)
            if _comes_in(graph, module, whole):
                yield from ((k, Stored(module, WIDTH, units)), (k, Stored(module, WHOLE, whole)))


def _side_by_side(model: nn.Module, graph: Graph) -> Iterator[tuple[int, str, Numbers]]:
    """Axes of heads, modules of one's own that lay them along a last dimension as they are read, and the units."""
    for j, axis in enumerate(graph.axes):
        read = [s.units + graph.offsets[j] for s in axis.readers if len(s.dims) == 1 and (s.units >= 0).all()]
        for step, (shape, carried) in _laid(graph) if axis.heads else ():
            units = carried.get((len(shape) - 1,))
            laid = units is not None and any(np.array_equal(units, way) for way in read)
            if units is not None and laid and resizer(model.get_submodule(step.module)) is None:
                yield j, step.module, units


def _comes_in(graph: Graph, module: str, units: Numbers) -> bool:
    """Whether a module reads something that has these units along its last dimension."""
    inside = [step.module == module or step.module.startswith(f"{module}.") for step in graph.steps]
    given = {i for step, here in zip(graph.steps, inside, strict=True) if here for i in step.inputs if not inside[i]}
    laid = (made for i in given for made in graph.steps[i].made)
    return any(np.array_equal(carried.get((len(shape) - 1,), ()), units) for shape, carried in laid)


def told_apart(model: nn.Module) -> dict[float, float]:
    """Moves each eps that a module of one's own keeps by next to nothing, in place, so that none is the same as another
    or as a number in the code: who is told it was told that one. Returns what they were.
    """
    was = {}
    own = [m for m in model.modules() if resizer(m) is None]
    kept = [(m, key, v) for m in own for key, v in vars(m).items() if EPS.search(key) and type(v) is float]
    for number, (module, key, eps) in enumerate(kept, 1):
        moved = eps * (1 + number * 2.0**-40)
        was[moved] = eps
        setattr(module, key, moved)
    return was


def group_norms(graph: Graph) -> Iterator[tuple[Step, Numbers]]:
    """The group norms of a forward, each with the unit of each of its groups."""
    for step in graph.steps:
        if step.op == "group_norm" and step.made and (1,) in step.made[0][1]:
            yield step, step.made[0][1][(1,)][:: step.numbers[0]]


def _is_bare(module: nn.Module) -> bool:
    """Whether it is a group norm without a weight, whose numbers follow from no tensor."""
    return isinstance(module, nn.GroupNorm) and module.weight is None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether it is a group norm with a forward of the user's: which number that tells its groups is not known yet."""
    return isinstance(module, nn.GroupNorm) and type(module).forward is not nn.GroupNorm.forward


def groups_of_a_forward(model: nn.Module, graph: Graph) -> Iterator[tuple[Numbers, str]]:
    """The units in group norms that a forward of the user's own tells their number of groups, and what would help."""
    for step, units in group_norms(graph):
        module, where = model.get_submodule(step.module), f" in `{step.module}`" if step.module else ""
        known = any(s.module == step.module and np.array_equal(s.units, units) for s in graph.stored)
        own = isinstance(module, nn.GroupNorm) and not _has_own_forward(module)
        if not own or (_is_bare(module) and not known):
            hint = f"`group_norm`{where} is told its number of groups: use an `nn.GroupNorm` for these channels alone"
            yield units[units >= 0], "" if known else f"{hint}, or keep the number in `self`"


def _watched(model: nn.Module, candidates: list[Stored], forwards: Sequence[Callable[[], Any]]) -> dict[Place, Any]:
    watch = _Watch()
    marked = [(model.get_submodule(s.module), s) for s in candidates]
    for module, s in marked:
        number = _Marked(getattr(module, s.attribute))
        number.place = s.module, s.attribute
        setattr(module, s.attribute, number)
    try:
        for forward in forwards:
            with suppress(Exception), watch:  # it takes no numbers but plain ones: what was seen until then is true
                forward()
                break
    finally:
        for module, s in marked:
            setattr(module, s.attribute, len(s.units))
    return watch.seen


def _laid(graph: Graph) -> Iterator[tuple[Step, Layout]]:
    """What operations make that are told sizes."""
    return ((step, layout) for step in graph.steps if step.op in SIZED for layout in step.made)


def _along(layout: Layout) -> Iterator[tuple[int, Numbers]]:
    """Each dimension that gets shorter when units go, and the unit at each of its entries."""
    for dims, numbers in layout[1].items():
        for k, d in enumerate(dims if numbers.size else ()):
            lines = np.moveaxis(numbers, k, 0).reshape(numbers.shape[k], -1)
            if (lines == lines[:, :1]).all() and (lines != lines[0]).any() and (lines >= 0).all():
                yield d, lines[:, 0]
