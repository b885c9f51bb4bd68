"""What tells two networks apart whose tensors have the same shapes: their layers, and what they compute.

Plain data, for a file. The layers need no input. The outputs do: `compact` and `fold` know the shapes of an example,
and note them here. Nothing here knows of files, and nothing of a user's data is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.standins.heads import FewerHeads, Padded
from ellzero.graph.standins.layers import Closed, Nothing, Scatter, Select
from ellzero.graph.standins.slim import Slim
from ellzero.graph.tracing import Inputs
from ellzero.graph.trials.running import outputs

# What stands for nothing in evaluation, and what stands for a layer that is gone.
_NOTHING = (_DropoutNd, nn.Identity, Select, Scatter, Slim, Closed, Nothing)
# What shrinks with the tensors, and what does not matter in evaluation.
_FREE = {
    "training", "in_features", "out_features", "in_channels", "out_channels", "groups", "num_features", "num_groups",
    "num_channels", "normalized_shape", "num_embeddings", "embedding_dim", "num_parameters", "inplace", "momentum",
    "dropout", "num_heads", "embed_dim", "kdim", "vdim",
}  # fmt: skip
_WHOLE = {str(kind): kind for kind in (torch.int64, torch.int32, torch.uint8, torch.bool)}
_SHOWN, _CLOSE, _CLOSE_IN_HALF = 16, 1e-3, 0.05
_EXAMPLES: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

Layers = dict[str, dict[str, Any]]


def layers(model: nn.Module) -> Layers:
    """The kind of every module, and of torch's own ones the settings that count in evaluation."""
    out: Layers = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, _NOTHING):
            torchs = type(module).__module__.startswith("torch.nn.")
            free = _FREE | {"eps"} if isinstance(module, nn.RMSNorm) else _FREE  # it follows the width
            settings = {key: _plain(value) for key, value in vars(module).items() if torchs and key not in free}
            kept = {key: value for key, value in settings.items() if value is not NotImplemented and key[0] != "_"}
            if not kept.get("activation_relu_or_gelu", 1):  # no shortcut: that of a layer without a branch, for one
                del kept["activation_relu_or_gelu"]
            # In evaluation all batch norms are one, also those that processes share.
            kind = "BatchNorm" if torchs and isinstance(module, _BatchNorm) else type(module).__name__
            kind = {FewerHeads: "MultiheadAttention", Padded: "TransformerEncoder"}.get(type(module), kind)
            if isinstance(module, nn.GroupNorm):
                kept["channels of a group"] = module.num_channels // module.num_groups
            out[name] = {"kind": kind, **kept}
    return out


def difference(saved: Layers, here: Layers, gone: Sequence[str]) -> str | None:
    """The first layer that is another here, in words; those that are `gone` from the saved network need not be."""
    for name in {**saved, **here}:
        if name in gone and name not in saved:
            continue
        ours, theirs = saved.get(name), here.get(name)
        if ours is None or theirs is None or ours["kind"] != theirs["kind"]:
            kinds = [f"a {layer['kind']}" if layer else "nothing" for layer in (ours, theirs)]
            return f"`{name}` is {kinds[0]}, here {kinds[1]}"
        for key in ours.keys() & theirs.keys():  # another torch may have more settings
            if ours[key] != theirs[key]:
                return f"`{name}` has {key} {ours[key]}, here {theirs[key]}"
    return None


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        return NotImplemented if NotImplemented in items else items
    return value if isinstance(value, bool | int | float | str | None) else NotImplemented


def note_example(small: nn.Module, inputs: Inputs) -> None:
    """Remembers, as long as `small` lives, what its inputs look like: shapes, and the range of whole numbers."""
    args, kwargs = [_look(leaf) for leaf in inputs[0]], {name: _look(leaf) for name, leaf in inputs[1].items()}
    if NotImplemented not in [*args, *kwargs.values()]:
        _EXAMPLES[small] = {"args": args, "kwargs": kwargs}


def _look(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return _plain(leaf)
    if leaf.is_floating_point():
        return {"shape": list(leaf.shape)}
    if str(leaf.dtype) not in _WHOLE or not leaf.numel():
        return NotImplemented
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "from": int(leaf.min()), "to": int(leaf.max())}


def copied(model: nn.Module) -> nn.Module | None:
    """A copy to try things on, of a model that can be copied."""
    try:
        return duplicate(model)
    except Exception:
        return None


def answers(small: nn.Module) -> dict[str, Any] | None:
    """What a network gives on a fixed input, with the look of that input; None where no example is known."""
    look = _EXAMPLES.get(small)
    values = None if look is None or (trial := copied(small)) is None else _answered(trial, look)
    return None if values is None else {"inputs": look, "values": values}


def example(small: nn.Module) -> Inputs | None:
    """Inputs with the look that was noted for a network, the same at every call; None where none was noted."""
    return None if (look := _EXAMPLES.get(small)) is None else _made(small, look)


def _made(model: nn.Module, look: Mapping[str, Any]) -> Inputs:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
    generator = torch.Generator().manual_seed(0)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, dict):
            return leaf
        if "dtype" not in leaf:
            return torch.randn(leaf["shape"], generator=generator).to(like)
        drawn = torch.randint(leaf["from"], leaf["to"] + 1, leaf["shape"], generator=generator)
        return drawn.to(like.device, _WHOLE[leaf["dtype"]])

    return tuple(map(made, look["args"])), {name: made(leaf) for name, leaf in look["kwargs"].items()}


def _answered(model: nn.Module, look: Mapping[str, Any]) -> list[float] | None:
    """Some of the outputs, on the CPU; None where there are none to compare. The model is for this alone."""
    model = model.cpu().eval()
    inputs = _made(model, look)
    try:
        found = [t.detach().flatten().double() for t in outputs(model, inputs) if not t.is_complex()]
    except Exception:  # it does not take every number, or wants a GPU: then nothing is known
        return None
    values = torch.cat([t[:: max(1, len(t) // _SHOWN)][:_SHOWN] for t in found]) if found else torch.zeros(0)
    return values.tolist() if len(values) and bool(values.isfinite().all()) else None


def deviation(model: nn.Module, saved: Mapping[str, Any]) -> str | None:
    """How a network's answers differ from those that were saved, if they do. The model is for this alone."""
    found = _answered(model, saved["inputs"])
    if found is None:  # whoever calls it will hear why
        return None
    ours, here = torch.tensor(saved["values"]), torch.tensor(found)
    if ours.shape != here.shape:
        return f"on a fixed input it gave {len(ours)} numbers, here {len(here)}"
    half = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in model.parameters())
    worst = int((ours - here).abs().argmax())
    if float((ours - here)[worst].abs()) <= (_CLOSE_IN_HALF if half else _CLOSE) * max(float(ours.abs().max()), 1e-4):
        return None
    return f"on a fixed input it gave {ours[worst]:.4g}, here {here[worst]:.4g}"
