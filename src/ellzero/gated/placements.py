"""Where gates go: functions from a traced graph to placements.

`shrinkable()`, `per_layer()` and `weights(pattern)` make those that come with the library; any function
`Graph -> list[Placement]` will do. This file does not know gates or their distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import numpy as np
import numpy.typing as npt

from ellzero.graph.axes import Axis, Graph, Site


@dataclass(frozen=True, eq=False)
class Placement:
    """Where some gates go: what they are called, how many there are, what they multiply, what their norm counts.

    Args:
        name: usually that of a layer.
        shape: `(n,)` for structured gates, the weight's own shape for unstructured ones.
        multiplies: sites on contracting dimensions; their `units` are gate numbers (in the flattened `shape`).
        counts: the sites whose entries `l0_norm` and `l2_norm` count under these gates.
        block: number of the block that the one gate opens or closes, if it is such a gate.
    """

    name: str
    shape: tuple[int, ...]
    multiplies: tuple[Site, ...]
    counts: tuple[Site, ...]
    block: int | None = None


Where = Callable[[Graph], Sequence[Placement]]


def shrinkable(
    *, streams: bool = False, parts: bool = False, blocks: bool = False, inputs: bool | None = None
) -> Where:
    """One gate per unit of every axis that can shrink, multiplied into all weights that read it; and one per feature or
    pixel that linear layers with more inputs than outputs read.

    There is a placement per axis. `l0_norm` counts the weights that read the axis: those that a closed gate sets to
    zero; of experts (`l0.routed`), all that they have. Where an RMSNorm looks at all units of an axis, gates multiply
    what writes it instead: then the norm sees zeros, and goes on dividing by the whole width.

    Args:
        streams: whether residual streams are gated too.
        parts: whether linear layers at an axis that cannot shrink, such as the stream of a network with norms behind
            its sums, read and write parts of it: a gate for each input, and each output that a norm reads. What is left
            of a layer picks its inputs (`Select`) and places its outputs (`Scatter`); the axis stays as wide as it is.
        blocks: whether branches are gated as a whole too, those that can go: attention, feed-forward, the block of a
            ResNet. One gate multiplies what a branch ends with, and counts all parameters that only the branch has.
            Closed, these are gone, and so is their place in the module tree.
        inputs: whether linear layers that read the network's own input, features or pixels, read a part of it: a gate
            for each. What is left of such a layer picks its inputs (`Select`). `None` means where all that read them
            are linear layers with more inputs than outputs, most of whose MACs go with their inputs, and with `parts`
            all; `False` keeps all that the network reads.

    Example:
        >>> where = shrinkable(streams=True)
    """
    if not (inputs is None or isinstance(inputs, bool)):  # 0 would be neither
        raise TypeError(f"`inputs` must be True, False or None, got {inputs!r}")

    def where(graph: Graph) -> list[Placement]:
        chosen = [a for a in graph.axes if a.frozen is None and (streams or not a.stream)]
        whole = [Placement(a.name, (a.size,), a.multiplied, _counted(graph, a)) for a in chosen]
        picked = [] if inputs is False else _given(graph, wide=inputs is None)
        picked = _parts(graph, inputs is not False) if parts else picked
        return whole + picked + (_blocks(graph) if blocks else [])

    return where


def _counted(graph: Graph, axis: Axis) -> tuple[Site, ...]:
    """What goes to zero with a unit; of an expert, all that it has and its row of the router."""
    own = tuple(s for s in axis.sites if s.tensor in graph.parameters and s not in axis.closing)
    return own if axis.experts else axis.multiplied


def _blocks(graph: Graph) -> list[Placement]:
    """One gate for each branch that can go as a whole."""
    found = []
    for number, block in enumerate(graph.blocks):
        held = [t for t in graph.parameters if t in block.tensors and graph.shapes[t]]
        counts = [Site(t, (0,), np.zeros(graph.shapes[t][0], dtype=np.int64), "writes") for t in held]
        found.append(Placement(block.name, (1,), block.sites, tuple(counts), number))
    return found


def _parts(graph: Graph, inputs: bool = True) -> list[Placement]:
    """The gates on inputs and outputs of linear layers one by one, where what they read or write cannot shrink; without
    `inputs`, not on the network's own.
    """
    frozen = graph.on(lambda axis: axis.frozen is not None and (inputs or not axis.given))
    found = []
    for tensor in _layers(graph):
        sides = {"inputs": graph.reading[tensor]} | ({"outputs": (0,)} if (tensor, (0,)) in graph.written else {})
        found += [_part(graph, tensor, side, at) for side, at in sides.items() if _lies(graph, tensor, at, frozen)]
    return found


def _given(graph: Graph, wide: bool) -> list[Placement]:
    """The gates on what linear layers read of the network's own input: of all such layers, or where all that read an
    argument are `wide`. So a router, or keys beside queries, do not pick from what a square layer reads as a whole.
    """
    # Each layer that reads an argument has an axis of its own.
    whole = {a.argument for a in graph.axes if wide and not all(_is_wide(graph.shapes[s.tensor]) for s in a.readers)}
    given = graph.on(lambda axis: axis.given and axis.argument not in whole)
    picking = [tensor for tensor in _layers(graph) if _lies(graph, tensor, graph.reading[tensor], given)]
    return [_part(graph, tensor, "inputs", graph.reading[tensor]) for tensor in picking]


def _is_wide(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and shape[1] > shape[0]


def _layers(graph: Graph) -> list[str]:
    """The weights of linear layers that can do without some of their inputs or outputs."""
    flat = [t for t, shape in graph.shapes.items() if len(shape) == 2 and t in graph.reading]
    return [t for t in flat if t in graph.in_own_module and t not in graph.two_faced]


def _lies(graph: Graph, tensor: str, dims: tuple[int, ...], among: npt.NDArray[np.bool_]) -> bool:
    """Whether all units along a dimension are such ones."""
    units = graph.units[tensor][dims]
    return bool((among[units] | (units < 0)).all())


def _part(graph: Graph, tensor: str, side: str, dims: tuple[int, ...]) -> Placement:
    size = len(graph.units[tensor][dims])
    site = Site(tensor, dims, np.arange(size), "reads" if side == "inputs" else "writes")
    return Placement(f"{_layer(tensor)}.{side}", (size,), (site,), (site,))


def per_layer(*, only: str = "*") -> Where:
    """The papers' own placement: a gate per input of each fully connected layer (the network's input included) and
    per output map of each convolution, each counting its own layer's weights (Louizos et al., section 2.4; |g| in eq.
    16).

    A map's gate multiplies whatever reads the map, which for ReLU and max-pooling is the same function as multiplying
    the map itself, and counts the map's incoming weights and its bias: |g| = C_in·k·k + 1. A convolution whose maps
    cannot shrink (they are the output, say) gets none. Where several convolutions write one axis (a residual stream),
    `attach` refuses: gating readers cannot tell them apart.

    Args:
        only: pattern (as in `fnmatch`) of the layers that get gates.

    Example:
        >>> where = per_layer(only="blocks.*.conv1")
    """

    def where(graph: Graph) -> list[Placement]:
        placed = (_of_layer(graph, t) for t in graph.shapes if fnmatchcase(_layer(t), only))
        return [p for p in placed if p is not None]

    return where


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0] or tensor


def _of_layer(graph: Graph, tensor: str) -> Placement | None:
    """The gates of the layer whose weight is `tensor`, if it is one that gets gates."""
    layer, shape = _layer(tensor), graph.shapes[tensor]
    if len(shape) == 2 and tensor in graph.reading and tensor not in graph.two_faced:
        return replace(_part(graph, tensor, "inputs", graph.reading[tensor]), name=layer)
    if len(shape) > 2:
        written = [a for a in graph.axes for s in a.writers if s.tensor == tensor]
        if written and written[-1].frozen is None and not written[-1].closing:
            axis = written[-1]
            _refuse_shared(axis, graph)
            own = [s for s in axis.sites if (s.tensor == tensor and s.role == "writes") or s.tensor == f"{layer}.bias"]
            return Placement(layer, (axis.size,), axis.readers, tuple(own))
    return None


def _refuse_shared(axis: Axis, graph: Graph) -> None:
    writers = [s.tensor.rpartition(".")[0] for s in axis.writers if len(graph.shapes[s.tensor]) > 1]
    if len(writers) > 1 or axis.stream:
        raise ValueError(
            f"`where=l0.per_layer()` puts one gate on each output map of a convolution, but "
            f"{', '.join(f'`{w}`' for w in writers)} write the shared axis `{axis.name}`, "
            "where gating readers cannot tell them apart; use `where=l0.shrinkable()`"
        )


def shared(where: Where) -> Where:
    """One gate for all units of each placement that `where` makes, under its name and ".shared": a scale of a layer.

    It counts no weights: those are counted by gates of their own.

    Example:
        >>> where = shared(shrinkable())
    """

    def all_in_one(site: Site) -> Site:
        return replace(site, units=np.where(site.units < 0, -1, 0))

    def made(graph: Graph) -> list[Placement]:
        return [Placement(f"{p.name}.shared", (1,), tuple(map(all_in_one, p.multiplies)), ()) for p in where(graph)]

    return made


def weights(pattern: str) -> Where:
    """Unstructured gates, one per entry of each parameter whose name matches `pattern` (as in `fnmatch`).

    Example:
        >>> where = weights("fc*.weight")
    """

    def where(graph: Graph) -> list[Placement]:
        chosen = [t for t, shape in graph.shapes.items() if fnmatchcase(t, pattern) and t in graph.parameters and shape]
        if not chosen:
            raise ValueError(
                f"`pattern` must match the name of a parameter ({', '.join(graph.parameters)}), got {pattern!r}"
            )
        placements = []
        for tensor in chosen:
            shape = graph.shapes[tensor]
            site = Site(tensor, tuple(range(len(shape))), np.arange(prod(shape)).reshape(shape), "reads")
            placements.append(Placement(tensor, shape, (site,), (site,)))
        return placements

    return where
