"""`attach(model, example_inputs)` puts gates on a model: traces it, asks `where` they go, and makes them.

This file does not know what gates do in a forward (`module.py`), nor what an open one costs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement, Where, per_layer, shrinkable
from ellzero.gates.abstract import AbstractGate, values
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.graph.axes import Axis, Block, Graph
from ellzero.graph.forwards.copying import duplicate, kept_elsewhere
from ellzero.graph.tracing import Inputs, as_inputs, shapes, telling, trace, undisturbed
from ellzero.graph.trials.rehearsal import blocks_of, proven
from ellzero.graph.trials.running import agree, outputs, turns

GateMaker = Callable[[tuple[int, ...]], AbstractGate]
# Nearly open: in evaluation every gate is exactly 1, so that a network computes what it did before gates were attached.
OPEN = partial(HardConcreteGate, drop_rate=0.05)
_TURNS = "the model takes another way than with the example, which is the only one that was looked at"
_REASONS = 6  # that are told why nothing can be gated


def attach(
    model: nn.Module,
    example_inputs: Any,
    *,
    gate: GateMaker | Mapping[str, GateMaker] = OPEN,
    where: Where | Callable[[], Where] = shrinkable,
    axes: Sequence[Axis] | None = None,
    graph: Graph | None = None,
    limit: float = 600.0,
    per_example: bool = False,
    apply: str = "weights",
) -> Gated:
    """Finds what can shrink in `model` and puts gates on it.

    Args:
        model: any module. It is shared with the result and left as it is: parameters, keys, hooks, mode.
        example_inputs: a tuple of what the model is called with (or one tensor, or a dict of keyword arguments).
        gate: what makes the gates of one placement from their shape, e.g. `partial(l0.HardConcreteGate,
            drop_rate=0.3)`; or several by the pattern (as in `fnmatch`) of the placement's name, the first that
            matches counting. The default ones are nearly open: in evaluation the network is what it was, to the bit.
        where: which gates there are: `l0.shrinkable()`, `l0.per_layer()`, `l0.weights("pattern")`, or any function of
            the graph. Without arguments, the parentheses may be left out. `l0.shrinkable(inputs=False)` keeps inputs.
        axes: axes by hand, for a model that `torch.export` cannot trace; `macs` has no meaning then.
        graph: `another.graph`, of the same network with other numbers in it, which need not be traced again.
        limit: seconds that tracing may take.
        per_example: whether noise is drawn for each example of a batch, that on weights by local reparametrisation, and
            not once for all; in linear layers and convolutions alone, and not in a graph that torch compiles.
        apply: what gates multiply: "weights" of the layers that read a unit, or the "activations" that these read. The
            same function to rounding. Weights cost less; activations let the weights be sharded afterwards
            (`fully_shard(gated.model)`), quantised, or adapted.

    Returns:
        A `Gated`: call it instead of the model.

    Raises:
        TraceError: the model rejects the example input or cannot be traced.
        ValueError: there is nothing to gate, or an argument does not fit; the model is untouched.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> gated = attach(net, torch.zeros(1, 4))
        >>> [(name, tuple(gate.shape)) for name, gate in gated.named_gates()]
        [('0', (3,)), ('0.inputs', (4,))]
    """
    _refuse_unfit(model, where)
    if apply not in ("weights", "activations") or (per_example and apply != "weights"):
        raise ValueError(f'`apply` must be "weights", or "activations" without `per_example`, got {apply!r}')
    inputs = as_inputs(example_inputs)
    graph = _graph(model, inputs, axes, limit) if graph is None else _fitting(graph, model, axes)
    graph = graph if graph.look else replace(graph, look=partial(_blocks, model, graph, inputs))
    placements = list(_called(where)(graph))
    _refuse_empty(placements, graph)
    graph = graph.with_blocks(graph.blocks) if "blocks" in vars(graph) else replace(graph, look=None)  # was it asked?
    if graph.turns:
        warnings.warn(f"with {' and with '.join(graph.turns)} {_TURNS}", stacklevel=2)
    gates = [_make(gate, p) for p in placements]
    _refuse_idle_patterns(gate, placements)
    with _new_garbage_alone():
        return _reaching(Gated(model, graph, placements, gates, inputs, per_example, apply))


@torch.no_grad()
def _reaching(gated: Gated) -> Gated:
    """Itself; refused if the forward reads a gated parameter where gates do not reach it, as in a partial function."""
    gate_on = {site.tensor for p in gated.placements for site in p.multiplies}
    name = kept_elsewhere(gated.model, gate_on & {n for n, _ in gated.model.named_parameters(remove_duplicate=False)})
    if name is None or gated.on_activations:
        return gated
    trial = duplicate(gated).eval()
    for _, gate in trial.named_gates():
        odd = torch.arange(gate.shape.numel(), device=gate.phi()[0].device) % 2 == 1
        gate.close_(odd.reshape(gate.shape))
    folded = duplicate(trial.model)
    trial.multiply_into(folded, values([gate for _, gate in trial.named_gates()]))
    if not agree(outputs(folded, gated.example_inputs), outputs(trial, gated.example_inputs), 1e-3):
        raise ValueError(
            f"`{name}` keeps a parameter that the forward reads there, where gates do not reach it: let the forward "
            "read it as its module's attribute"
        )
    return gated


def _refuse_empty(placements: Sequence[Placement], graph: Graph) -> None:
    """Says why, each reason once, with the axis that has most weights first; and what else there would be to gate."""
    if placements:
        return
    stream, left_out = "a residual stream", "`where` leaves it out"
    sizes = np.add.reduceat(graph.weight, graph.offsets[:-1]) if graph.axes else np.zeros(0)
    reasons: dict[str, str] = {}
    for _, axis in sorted(zip(sizes, graph.axes, strict=True), key=lambda pair: -pair[0]):
        reasons.setdefault(axis.frozen or (stream if axis.stream else left_out), axis.name)
    first = [f"`{name}`: {why}" for why, name in reasons.items()][:_REASONS]
    more = f"; and {len(reasons) - _REASONS} other reasons" if len(reasons) > _REASONS else ""
    raise ValueError(
        f"`model` has nothing to gate: {'; '.join(first) or 'no weight reads what another one writes'}{more}"
        + _would_gate(graph)
    )


def _would_gate(graph: Graph) -> str:
    """What `shrinkable` would have gates with, and what else would help, in words."""
    if shrinkable()(graph):
        return "; `where=l0.shrinkable()` has gates here"
    options: dict[str, Where] = {
        "streams": shrinkable(streams=True), "inputs": shrinkable(inputs=True), "parts": shrinkable(parts=True),
        "blocks": shrinkable(blocks=True),
    }  # fmt: skip
    named = [name for name, where in options.items() if where(graph)]
    helps = " or ".join(f"`where=l0.shrinkable({name}=True)`" for name in named)
    computed = any("the parametrization of" in (axis.frozen or "") for axis in graph.axes)
    plain = "; `torch.nn.utils.parametrize.remove_parametrizations` makes weights plain, which can read fewer units"
    return (plain if computed else "") + (f"; {helps} has gates here" if named else "")


def _graph(model: nn.Module, inputs: Inputs, axes: Sequence[Axis] | None, limit: float) -> Graph:
    with undisturbed(model), telling(), _new_garbage_alone():
        graph = (
            trace(model, inputs[1] or inputs[0], limit=limit, watch=turns) if axes is None else _by_hand(model, axes)
        )
        return proven(model, graph, inputs)


def _blocks(model: nn.Module, graph: Graph, inputs: Inputs) -> tuple[Block, ...]:
    with undisturbed(model), telling(), _new_garbage_alone():
        return blocks_of(model, graph, inputs)


@contextmanager
def _new_garbage_alone() -> Iterator[None]:
    """Spares garbage collection a look at all that was there before, which is much, and takes a while each time."""
    ours = gc.isenabled() and not gc.get_freeze_count()
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _fitting(graph: Graph, model: nn.Module, axes: Sequence[Axis] | None) -> Graph:
    if axes is not None or graph.shapes != shapes(model):
        raise ValueError("`graph` must be of a network with the tensors of `model`, and `axes` absent beside it")
    return graph


def _called(where: Any) -> Where:
    """`where` itself, or what it makes: `l0.per_layer`, and `partial(l0.per_layer, only="fc*")`, count as called."""
    factory = where.func if isinstance(where, partial) else where
    made: Where = where() if factory in (shrinkable, per_layer) else where
    return made


def _make(maker: GateMaker | Mapping[str, GateMaker], placement: Placement) -> AbstractGate:
    if isinstance(maker, Mapping):
        found = next((m for pattern, m in maker.items() if fnmatchcase(placement.name, pattern)), None)
        if found is None:
            raise ValueError(f"`gate` has no pattern for `{placement.name}`, got {', '.join(map(repr, maker))}")
        maker = found
    if not callable(maker) or isinstance(maker, AbstractGate):
        raise TypeError(f"`gate` must make a gate from its shape, such as `l0.HardConcreteGate`, got {maker!r}")
    gate = maker(placement.shape)
    if not isinstance(gate, AbstractGate) or tuple(gate.shape) != placement.shape:
        raise TypeError(f"`gate` must make a gate of shape {placement.shape} for `{placement.name}`, got {gate!r}")
    return gate


def _refuse_idle_patterns(maker: GateMaker | Mapping[str, GateMaker], placements: Sequence[Placement]) -> None:
    if not isinstance(maker, Mapping):
        return
    names = [p.name for p in placements]
    used = {next(pattern for pattern in maker if fnmatchcase(name, pattern)) for name in names}
    idle = [pattern for pattern in maker if pattern not in used and pattern != "*"]  # "all others" may be none
    if idle:
        raise ValueError(
            f"`gate` must use each of its patterns, and {', '.join(map(repr, idle))} is the first that matches for "
            f"none of {', '.join(names)}"
        )


def _by_hand(model: nn.Module, axes: Sequence[Axis]) -> Graph:
    members = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for axis in axes:
        for site in axis.sites:
            if site.tensor not in members:
                raise ValueError(f"`axes` names `{site.tensor}`, which is no parameter or buffer of the model")
            shape = tuple(members[site.tensor].shape[d] for d in site.dims)
            if site.units.shape != shape or site.units.max() >= axis.size:
                raise ValueError(
                    f"`axes` has units of shape {site.units.shape} for `{site.tensor}`, which is {shape} at {site.dims}"
                )
    return Graph(tuple(axes), shapes(model), parameters=tuple(n for n, _ in model.named_parameters()))


def _refuse_unfit(model: Any, where: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, Gated):
        raise TypeError("`model` is gated already; attach to `model.model`, or pass `where` once for all gates")
    if not callable(where):
        raise TypeError(
            f"`where` must be a function from a graph to placements, such as `l0.shrinkable()`, got {where!r}"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            what = f"`{path}`" if path else "`model`"
            kind = type(module).__name__
            raise ValueError(f"{what} is wrapped in `{kind}`: attach to what it wraps, `.module`, and wrap the result")
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(t):
            raise ValueError(f"`model` has no shape for `{name}` yet: call it once on the example, then attach")
        if t.device.type == "meta":
            raise ValueError(f"`model` has no numbers for `{name}`, on the meta device: give it some, then attach")
        if not t.is_leaf:
            raise ValueError(
                f"`model` has a buffer that autograd remembers the making of, `{name}`: register it after `.detach()`"
            )
    # Sharded parameters are swapped underneath the call and would be silently ungated.
    for name, p in model.named_parameters():
        if type(p).__name__ == "FlatParameter" or type(p.data).__name__ == "DTensor":
            raise ValueError(
                f'`model` has sharded parameters (`{name}`): attach with `apply="activations"` first, then shard '
                "`gated.model`"
            )
