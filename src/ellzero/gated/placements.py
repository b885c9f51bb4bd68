"""Where gates go: functions from a traced graph to placements.

A `Placement` says for one set of gates which weight entries they multiply and which entries their norm counts; in the
papers the two differ for a convolution's maps. `shrinkable`, `per_layer` and `weights(pattern)` are the placements
that come with the library; any function `Graph -> list[Placement]` will do. This file does not know gates or their
distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from ellzero.graph.axes import Axis, Graph, Site


@dataclass(frozen=True, eq=False)
class Placement:
    """One set of gates: what it is called, how many there are, what they multiply, what their norm counts.

    Args:
        name: name of the set, usually that of a layer.
        shape: `(n,)` for structured gates, the weight's own shape for unstructured ones.
        multiplies: sites on contracting dimensions; their `units` are gate numbers (in the flattened `shape`).
        counts: the sites whose entries `l0_norm` and `l2_norm` count under these gates.
    """

    name: str
    shape: tuple[int, ...]
    multiplies: tuple[Site, ...]
    counts: tuple[Site, ...]


Where = Callable[[Graph], Sequence[Placement]]


def shrinkable(graph: Graph, *, streams: bool = False) -> list[Placement]:
    """One gate per unit of every axis that can shrink, multiplied into all weights that read it.

    Args:
        graph: what `trace` found.
        streams: whether residual streams are gated too.

    Returns:
        A placement per axis. `l0_norm` counts the weights that read the axis: those that a closed gate sets to zero.
    """
    chosen = [a for a in graph.axes if a.frozen is None and (streams or not a.stream)]
    return [Placement(a.name, (a.size,), a.readers, a.readers) for a in chosen]


def per_layer(graph: Graph, *, only: str = "*") -> list[Placement]:
    """The papers' own placement: a gate per input of each fully connected layer (the network's input included) and
    per output map of each convolution, each counting its own layer's weights (Louizos et al., section 2.4; |g| in eq.
    16).

    A map's gate multiplies whatever reads the map, which for ReLU and max-pooling is the same function as multiplying
    the map itself, and counts the map's incoming weights and its bias: |g| = C_in·k·k + 1. A convolution whose maps
    cannot shrink (they are the output, say) gets none.

    Args:
        graph: what `trace` found.
        only: pattern of the layers that get gates, e.g. `partial(l0.per_layer, only="blocks.*.conv1")`.

    Raises:
        ValueError: where several convolutions write one axis (a residual stream), which one gate per convolution
            cannot do by gating readers.
    """
    written = {
        s.tensor: a for a in graph.axes for s in a.writers if len(graph.shapes[s.tensor]) > 2 and s.role == "writes"
    }
    placements = []
    for tensor, shape in graph.shapes.items():
        layer = tensor.rpartition(".")[0] or tensor
        if not fnmatchcase(layer, only):
            continue
        if len(shape) == 2 and tensor in graph.reading and tensor not in graph.two_faced:
            (dim,) = graph.reading[tensor]
            site = Site(tensor, (dim,), np.arange(shape[dim]), "reads")
            placements.append(Placement(layer, (shape[dim],), (site,), (site,)))
        elif len(shape) > 2 and tensor in written and written[tensor].frozen is None:
            axis = written[tensor]
            _refuse_shared(axis, graph)
            own = [s for s in axis.sites if (s.tensor == tensor and s.role == "writes") or s.tensor == f"{layer}.bias"]
            placements.append(Placement(layer, (axis.size,), axis.readers, tuple(own)))
    return placements


def _refuse_shared(axis: Axis, graph: Graph) -> None:
    writers = [s.tensor.rpartition(".")[0] for s in axis.writers if len(graph.shapes[s.tensor]) > 1]
    if len(writers) > 1 or axis.stream:
        raise ValueError(
            f"`where=per_layer` puts one gate on each output map of a convolution, but "
            f"{', '.join(f'`{w}`' for w in writers)} write the shared axis `{axis.name}`, "
            "where gating readers cannot tell them apart; use `where=shrinkable`"
        )


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
