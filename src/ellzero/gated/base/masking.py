"""Gates on activations: what a layer reads or gives out is multiplied, and its weights are left alone.

The same function to rounding as gates in weights, and the way for a model whose weights cannot be replaced for a
forward: sharded ones (`fully_shard`), quantised ones, those behind an adapter. Hooks on layers do it, for one forward
at a time. This file knows linear layers, convolutions and embeddings, and draws of gates as tensors; it draws none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ellzero.gated.multiplying import Target, in_place, lock_of, multiplied, recomputing
from ellzero.gated.placements import Placement
from ellzero.gates.abstract import AbstractGate, draw
from ellzero.graph.axes import Graph, Numbers, Site
from ellzero.graph.forwards.copying import lean
from ellzero.graph.tracing import Inputs, places
from ellzero.graph.trials.running import agree, outputs, watched

# Of each kind of layer the weight's dimension of inputs and of outputs, and how many dimensions of a map follow them.
_KINDS: dict[str, tuple[int | None, int, int]] = {
    "Linear": (1, 0, 0), "Conv1d": (1, 0, 1), "Conv2d": (1, 0, 2), "Conv3d": (1, 0, 3), "Embedding": (None, 1, 0),
    "Conv1D": (0, 1, 0),
}  # fmt: skip

_Hook = Callable[[], RemovableHandle]  # puts a hook on its layer


class Part(NamedTuple):
    """One placement's part in a mask: its number, and the key of the index that lays its gates out, if any does."""

    number: int
    table: str | None


class Masked(NamedTuple):
    """A layer's masks: the parts that multiply its input and its output, and the dimensions that follow the units."""

    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    after: int


def aim(
    model: nn.Module, graph: Graph, placements: Sequence[Placement], gates: Sequence[AbstractGate]
) -> tuple[dict[str, Masked], dict[str, Numbers]]:
    """The masks of each layer, by path, and the index tables that they take.

    Raises:
        ValueError: some gates multiply what no mask on an activation does.
    """
    held = places(model)
    tables: dict[str, Numbers] = {}
    found: dict[str, Masked] = {}
    for number, (placement, gate) in enumerate(zip(placements, gates, strict=True)):
        if len(placement.shape) > 1 or gate.adds:
            raise _unfit(placement.name, "it is on single weights")
        sites = {site.tensor: site for site in placement.multiplies}
        for site in placement.multiplies:
            path, _, key = site.tensor.rpartition(".")
            layer = model.get_submodule(path)
            if key == "bias" and f"{path}.weight" in sites:
                continue  # it is looked at with the weight
            _refuse_unfit(site, layer, graph, held)
            inward, outward, after = _KINDS[type(layer).__name__]
            table = None
            if not np.array_equal(site.units, np.arange(placement.shape[0])):
                table = f"mask {number} {site.tensor}"
                tables[table] = np.where(site.units < 0, placement.shape[0], site.units)
            part, known = Part(number, table), found.get(path, Masked((), (), after))
            if site.dims == (inward,):
                found[path] = known._replace(inputs=(*known.inputs, part))
            elif site.dims == (outward,):
                bias = sites.get(f"{path}.bias")
                if getattr(layer, "bias", None) is not None and (
                    bias is None or not np.array_equal(bias.units, site.units)
                ):
                    raise _unfit(site.tensor, "its layer's bias is not multiplied with it")
                found[path] = known._replace(outputs=(*known.outputs, part))
            else:
                raise _unfit(site.tensor, "gates lie on other dimensions than that of its inputs or outputs")
    return found, tables


def _refuse_unfit(site: Site, layer: nn.Module, graph: Graph, held: Mapping[str, Sequence[str]]) -> None:
    kind = type(layer).__name__
    if kind not in _KINDS or site.tensor.rpartition(".")[2] != "weight":
        raise _unfit(site.tensor, f"it is in a {kind}, and not in one of {', '.join(_KINDS)}")
    if site.tensor not in graph.in_own_module or len(held[site.tensor]) > 1:
        raise _unfit(site.tensor, "not its own layer alone reads it")
    if getattr(layer, "groups", 1) > 1:
        raise _unfit(site.tensor, "its convolution has groups")


def _unfit(name: str, why: str) -> ValueError:
    return ValueError(f'`apply="activations"` cannot gate `{name}`: {why}; `apply="weights"` can')


@contextmanager
def masked(
    model: nn.Module, layers: Mapping[str, Masked], z: Sequence[Tensor], tables: Mapping[str, Tensor]
) -> Iterator[None]:
    """Multiplies what the layers read and give out in the block; what is recomputed of it later, by the same."""
    hooks: list[_Hook] = []
    for path, mask in layers.items():
        layer = model.get_submodule(path)
        if mask.inputs:
            before = partial(_before, _laid_out(mask.inputs, mask.after, z, tables), path)
            hooks.append(partial(layer.register_forward_pre_hook, before, with_kwargs=True))
        if mask.outputs:
            behind = partial(_behind, _laid_out(mask.outputs, mask.after, z, tables))
            hooks.append(partial(layer.register_forward_hook, behind))
    with _hooked(hooks, lock_of(model)):
        yield


@contextmanager
def _hooked(hooks: Sequence[_Hook], lock: threading.RLock) -> Iterator[None]:
    """Has the hooks on their layers in the block. Every checkpointed part of a model comes here once a step, for all
    layers: so nothing is made here.
    """
    handles: list[RemovableHandle] = []
    try:
        handles += [put() for put in hooks]
        with recomputing(lambda: _hooked(hooks, lock), lock):
            yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def refuse_other_function(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, Masked],
    targets: Mapping[str, Target],
    gates: Sequence[AbstractGate],
    tables: Mapping[str, Tensor],
) -> None:
    """Refuses a model that with gates on activations does not do, on the example, what it does with them in weights:
    where a layer's hooks are passed by, say.
    """
    model = lean(model).eval()
    noise = torch.rand(sum(g.shape.numel() for g in gates), generator=torch.Generator().manual_seed(0))
    z = draw(gates, noise.to(tables["ends"]))
    with masked(model, layers, z, tables):
        ours, tolerance = watched(model, inputs, fine=1e-9)
    with in_place(model, targets, lambda _, w, target: multiplied(w, target, z, tables)):
        theirs = outputs(model, inputs)
    if not agree(ours, theirs, tolerance):
        what = "its output is another than with gates in its weights"
        raise ValueError(f'`apply="activations"` does not fit this model: {what}; `apply="weights"` does')


def _laid_out(parts: Sequence[Part], after: int, z: Sequence[Tensor], tables: Mapping[str, Tensor]) -> Tensor:
    """The gates on the units of an activation, as they broadcast against it."""
    product: Tensor | None = None
    for part in parts:
        gates = z[part.number].reshape(-1)
        if part.table is not None:
            gates = nn.functional.pad(gates, (0, 1), value=1.0)[tables[part.table]]
        product = gates if product is None else product * gates
    assert product is not None
    return product.reshape(-1, *[1] * after)


def _before(factor: Tensor, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (_times(args[0], factor), *args[1:]), kwargs
    tensors = [key for key, value in kwargs.items() if isinstance(value, Tensor)]
    if len(tensors) != 1:
        raise RuntimeError(f"`{path}` is called with {len(tensors)} tensors by name, and gates multiply its input")
    return args, {**kwargs, tensors[0]: _times(kwargs[tensors[0]], factor)}


def _behind(factor: Tensor, _: nn.Module, __: Any, out: Tensor) -> Tensor:
    return _times(out, factor)


def _times(activation: Tensor, factor: Tensor) -> Tensor:
    return activation * factor.to(activation.dtype)
