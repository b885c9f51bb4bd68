"""`centred(model, example)`: LayerNorms that come first in their blocks become root mean squares, exactly.

A LayerNorm subtracts a mean, which looks at units that are closed. Where all that is written to a stream has mean zero
there is nothing to subtract, and a weight W that writes it has if it is (I − 11ᵀ/D)·W instead. This is tried out on
disturbed copies, as removals are. It does not know what is done with the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from ellzero.graph.axes import Axis, Graph, Norm
from ellzero.graph.forwards.copying import duplicate, put
from ellzero.graph.standins.heads import pad
from ellzero.graph.standins.norms import RootMeanSquare
from ellzero.graph.tracing import Inputs, as_inputs, first_line, places, trace, undisturbed
from ellzero.graph.trials.responding import response_norms
from ellzero.graph.trials.running import agree, cast, disturb, outputs, stirred, watched

M = TypeVar("M", bound=nn.Module)


class _Stream(NamedTuple):
    """An axis, and the LayerNorms over all its units."""

    axis: Axis
    norms: list[Norm]


def centred(model: M, example_inputs: Any) -> M:
    """A copy of the model, the same function, whose pre-norm LayerNorms subtract no mean: their streams can shrink.
    Global response norms (ConvNeXt V2) keep their eps as a number: the channels behind them can go.

    Every weight, bias, embedding and parameter that writes such a stream loses its mean over the stream's units. A head
    that shares its weight with the embedding gets one of its own. The norms keep their keys.

    Args:
        model: it is left as it is.
        example_inputs: as for `attach`.

    Returns:
        A network to attach gates to: `l0.attach(l0.centred(model, x), x, where=l0.shrinkable(streams=True))`.

    Raises:
        ValueError: there is no such norm, or what comes out would change: something reads the stream beside its norms,
            or writes it by more than a linear map, as a norm behind the sum does (post-norm).

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        >>> type(centred(net, torch.zeros(1, 4))[1]).__name__
        'RootMeanSquare'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    inputs = as_inputs(example_inputs)
    with undisturbed(model):
        graph = trace(model, example_inputs)
        streams = _streams(model, graph)
        reasons = [_changes(model, graph, stream, inputs) for stream in streams]
        responses = response_norms(model, graph, inputs)
        good = [stream for stream, reason in zip(streams, reasons, strict=True) if reason is None]
        if good:
            still = _uncentred(trace(_centred(model, graph, good), example_inputs))
            paths = [(stream, [norm.module for norm in stream.norms]) for stream in good]
            reasons += [
                f"the units of `{norms[0]}` reach `{still[n]}`" for _, norms in paths for n in norms if n in still
            ]
            good = [stream for stream, norms in paths if still.keys().isdisjoint(norms)]
    if not good and not responses:
        first = next((r for r in reasons if r), "it has no LayerNorm along units that its parameters write")
        raise ValueError(f"`model` has no stream whose norms could do without a mean: {first}")
    out = _centred(model, graph, good)
    for path, norm in response_norms(out, graph, inputs).items() if responses else ():
        put(out, path, norm)
    return out


def _centred(model: M, graph: Graph, streams: Sequence[_Stream]) -> M:
    out = duplicate(model)
    for stream in streams:
        _centre(out, graph, stream)
    return out


def _uncentred(graph: Graph) -> dict[str, str]:
    """The norms whose units go through a norm that subtracts a mean still, and that norm."""
    left = [n for n in graph.norms if n.centres]
    found = ((n.module, m.module) for n in graph.norms for m in left if np.isin(n.units, m.units).any())
    return dict(found)


def _streams(model: nn.Module, graph: Graph) -> list[_Stream]:
    found = []
    for axis, start in zip(graph.axes, graph.offsets, strict=False):
        whole = np.arange(start, start + axis.size)
        norms = [n for n in graph.norms if n.centres and np.array_equal(np.sort(n.units), whole)]
        norms = [n for n in norms if _is_one(model.get_submodule(n.module))]
        if norms:
            found.append(_Stream(axis, norms))
    return found


def _is_one(module: nn.Module) -> bool:
    """Whether a module is torch's LayerNorm, or somebody's own with the same parameters, as in nanoGPT."""
    own = {name for name, _ in module.named_parameters()}
    return type(module) is nn.LayerNorm or ("weight" in own and own <= {"weight", "bias"} and not [*module.children()])


def _changes(model: nn.Module, graph: Graph, stream: _Stream, inputs: Inputs) -> str | None:
    """What goes wrong if a stream is centred in disturbed copies of the model; None if nothing does."""
    for seed in (0, 1):
        trial = duplicate(model).double().eval()
        disturb(trial, seed)
        given = stirred(cast(inputs, torch.float64), seed)
        try:
            before, tolerance = watched(trial, given, fine=1e-9)
        except Exception:  # it takes no other numbers
            trial, given = duplicate(model).eval(), inputs
            before, tolerance = watched(trial, given, fine=1e-9)
        try:
            _centre(trial, graph, stream)
            after = outputs(trial, given)
        except Exception as error:
            return first_line(error)
        if not agree(before, after, tolerance):
            return f"the input of `{stream.norms[0].module}` is read beside it, or written by more than a linear map"
    return None


@torch.no_grad()
def _centre(model: nn.Module, graph: Graph, stream: _Stream) -> None:
    """Takes the mean out of all that writes a stream, in place, and lets its norms subtract none."""
    for site in stream.axis.closing:
        if site.tensor in graph.two_faced:
            _untie(model, site.tensor)
        weight, (dim,) = model.get_parameter(site.tensor), site.dims
        mine = np.flatnonzero(site.units >= 0)
        if not np.array_equal(np.sort(site.units[mine]), np.arange(stream.axis.size)):
            raise ValueError(f"`{site.tensor}` does not write each unit once")
        index = torch.as_tensor(mine, device=weight.device)
        rows = weight.index_select(dim, index)
        mean = rows.double().mean(dim, keepdim=True)
        weight.index_copy_(dim, index, (rows.double() - mean).to(rows.dtype))
    for norm in stream.norms:
        subtract_none(model, norm.module, norm.eps)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and RootMeanSquare in (type(layer.norm1), type(layer.norm2)):
            layer.activation_relu_or_gelu = 0  # then it takes no path past its norms
    pad(model.modules())


def subtract_none(model: nn.Module, path: str, eps: float) -> None:
    """Lets a LayerNorm subtract no mean, in place; one of another class than torch's has this eps."""
    module: Any = model.get_submodule(path)
    if type(module) is nn.LayerNorm:
        module.__class__ = RootMeanSquare
        return
    new = RootMeanSquare(len(module.weight), eps, device="meta")
    new.weight, new.bias = (dict(module.named_parameters()).get(key) for key in ("weight", "bias"))  # type: ignore[assignment]
    for key, hooks in vars(module).items():
        if "_hook" in key and "state_dict" in key and hooks:
            raise ValueError(f"`{path}` has hooks on its state, which another module would not have")
        if "_hook" in key:
            setattr(new, key, hooks)
    put(model, path, new)


def _untie(model: nn.Module, tensor: str) -> None:
    """Gives all but the embedding a copy of their own of a weight that they share."""
    held = [name.rpartition(".") for name in places(model)[tensor]]
    writers = [path for path, _, _ in held if isinstance(model.get_submodule(path), nn.Embedding)]
    if not writers or len(writers) == len(held):
        raise ValueError(f"`{tensor}` both reads and writes it, and is not shared by an embedding and a layer")
    old = model.get_parameter(tensor)
    new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    for path, _, key in held:
        if path not in writers:
            model.get_submodule(path)._parameters[key] = new
    for config in (vars(m).get("config") for m in model.modules()):
        if config is not None and getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # or Transformers would tie them again when it loads
