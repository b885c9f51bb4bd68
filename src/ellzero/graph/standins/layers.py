"""What stands in for a layer, or a part of one: `Select` picks inputs, `Scatter` places outputs, `Closed` is a layer of
which nothing is left, `Nothing` a module of a block that is gone.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from ellzero.graph.forwards.copying import put


@final
class Select(nn.Module):
    """Picks the inputs that the layer behind it still reads: `x[..., index]` along the layer's input dimension.

    It stands where what feeds a layer cannot shrink: the pixels of an image, single positions of a flattened map. It
    takes inputs of `width` alone, as the dense layer did: of others it would pick wrong ones in silence.
    """

    index: Tensor
    width: int | None = None  # of a file that does not say it

    def __init__(self, index: Tensor, dim: int, width: int | None) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.dim, self.width = dim, width

    def forward(self, x: Tensor) -> Tensor:
        there, width = x.shape[self.dim], self.width
        if width is not None and isinstance(there, int) and there != width:  # a tracer of numbers has none
            raise ValueError(f"the input must be {width} wide, of which {len(self.index)} are picked, got {there}")
        return x.index_select(self.dim, self.index)


def select_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The forward pre-hook of a layer with a `Select`, whether its input comes by place or by keyword."""
    select: Any = module.select
    if args:
        return (select(args[0]), *args[1:]), kwargs
    (name, x), *rest = kwargs.items()
    return (), {name: select(x), **dict(rest)}


def put_select(layer: nn.Module, index: Tensor, width: int | None) -> None:
    """Gives a layer a `Select` as its child `select`, run before it; the layer keeps its class and its keys. One that
    is there picks from what comes, the new one from what that picks: together they are one.
    """
    weight: Any = layer.weight
    if isinstance(there := layer._modules.get("select"), Select):
        layer.select = Select(there.index[index.to(there.index.device)], there.dim, there.width)
        return
    dim = -1 if isinstance(layer, nn.Linear) else 1 - weight.ndim
    layer.add_module("select", Select(index.to(weight.device), dim, width))
    layer.register_forward_pre_hook(select_first, with_kwargs=True)


@final
class Scatter(nn.Module):
    """Puts the outputs that a linear layer still writes at their places, with zeros elsewhere, and adds the bias.

    The mirror of `Select`: it stands where what a layer writes to cannot shrink, such as a stream with norms behind
    its sums.
    """

    index: Tensor

    def __init__(self, index: Tensor, outputs: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.outputs, self.bias = outputs, bias

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros((*x.shape[:-1], self.outputs)).index_copy(-1, self.index, x)
        return out if self.bias is None else out + self.bias


def scatter_last(module: nn.Module, args: Any, out: Tensor) -> Any:
    """The forward hook of a layer with a `Scatter`."""
    scatter: Any = module.scatter
    return scatter(out)


def put_scatter(layer: nn.Module, index: Tensor, outputs: int) -> None:
    """Gives a linear layer a `Scatter` as its child `scatter`, run behind it, which takes over its bias."""
    weight: Any = layer.weight
    bias = layer._parameters["bias"]
    layer._parameters["bias"] = None
    layer.add_module("scatter", Scatter(index.to(weight.device), outputs, bias))
    layer.register_forward_hook(scatter_last)


CONTRACTING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
class Closed(nn.Module):
    """A linear or convolutional layer that reads nothing any more: its output is its bias, whatever comes in.

    With no outputs left either it gives an empty tensor of the right shape, so that the user's forward goes on running.
    One that is `silent`, in a block that is gone, has no bias.
    """

    def __init__(self, layer: nn.Module, outputs: int, silent: bool = False) -> None:
        super().__init__()
        self.outputs, self.silent = outputs, silent
        bias = None if silent else getattr(layer, "bias", None)
        self.bias = bias if bias is not None and bias.numel() == outputs and outputs else None
        self.window: list[tuple[int, int, int]] | None = None
        if not isinstance(layer, nn.Linear):
            conv: Any = layer
            padding = conv._reversed_padding_repeated_twice[::-1]
            pads = [padding[2 * k] + padding[2 * k + 1] for k in range(len(conv.kernel_size))]
            reach = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            self.window = list(zip(pads, reach, conv.stride, strict=True))

    def forward(self, input: Tensor) -> Tensor:  # named as in the layers that it replaces
        if self.window is None:
            out = input.new_zeros((*input.shape[:-1], self.outputs))
            return out if self.bias is None else out + self.bias
        n = len(self.window)
        space = [(s + p - r) // t + 1 for s, (p, r, t) in zip(input.shape[-n:], self.window, strict=True)]
        out = input.new_zeros((*input.shape[: -n - 1], self.outputs, *space))
        return out if self.bias is None else out + self.bias.reshape(-1, *[1] * n)


def put_closed(model: nn.Module, path: str, outputs: int | None = None) -> None:
    """Replaces the layer at `path`: a `Closed` for one that contracts, an identity for one that works unit by unit.

    A `Closed` has `outputs` outputs, or as many as the layer.
    """
    layer = model.get_submodule(path)
    weight: Any = getattr(layer, "weight", None)
    new: nn.Module = nn.Identity()
    if isinstance(layer, CONTRACTING):
        new = Closed(layer, weight.shape[0] if outputs is None else outputs)
        for name, hook in following(layer).items():
            new.add_module(name, layer.get_submodule(name))
            new.register_forward_hook(hook)
    _replace(model, path, new)


def following(layer: nn.Module) -> dict[str, Any]:
    """Children of a layer that follow what it gives, whatever it reads, with their hooks: the shares of a router."""
    of = {id(getattr(hook, "__self__", None)): hook for hook in layer._forward_hooks.values()}
    return {name: of[id(child)] for name, child in layer.named_children() if id(child) in of}


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    put(model, path, new)
    if isinstance(parent := model.get_submodule(path.rpartition(".")[0]), nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # so says one with an activation of your own, and takes no shortcut


@final
class Nothing(nn.Module):
    """A module of a block that is gone: zeros in the shape of its first input, and `None` for all else that it gave.

    Args:
        outputs: of how many things it gave a tuple; 0 for a tensor.
        batch_first: as of the attention that it stands for: layers of torch ask it.
        layer_idx: the number under which the attention that it stands for keeps keys and values in a cache, if it does.
    """

    # Layers of torch ask these too. With such answers they take no shortcut around the modules that they call.
    eps = None
    in_proj_bias = None
    silent = True

    def __init__(self, outputs: int = 0, batch_first: bool = True, layer_idx: int | None = None) -> None:
        super().__init__()
        self.outputs, self.batch_first, self.layer_idx = outputs, batch_first, layer_idx

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(first_tensor(args, kwargs))
        if self.layer_idx is not None:
            self._count(zeros, (*args, *kwargs.values()), kwargs)
        return (zeros, *[None] * (self.outputs - 1)) if self.outputs else zeros

    def _count(self, zeros: Tensor, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Puts one number for each position into a cache of Hugging Face: of its first layer it asks how many it has
        seen.
        """
        cache = next((c for c in given if callable(getattr(c, "get_seq_length", None))), None)
        reads_another = any(kwargs.get(key) is not None for key in ("encoder_hidden_states", "key_value_states"))
        if cache is not None and not reads_another:
            seen = zeros.new_zeros(zeros.shape[0], 1, zeros.shape[1], 1)
            getattr(cache, "self_attention_cache", cache).update(seen, seen, self.layer_idx)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor that a module is called with; `StopIteration` where there is none."""
    return next(given for given in (*args, *kwargs.values()) if isinstance(given, Tensor))


def put_nothing(model: nn.Module, path: str, number: int) -> None:
    """Replaces a module of a block that is gone: by a `Closed` with so many outputs if it is a linear layer or a
    convolution, else by a `Nothing` with so many.
    """
    layer = model.get_submodule(path)
    if isinstance(layer, CONTRACTING):
        _replace(model, path, Closed(layer, number, silent=True))
    else:
        kept = getattr(layer, "batch_first", True), getattr(layer, "layer_idx", None)
        _replace(model, path, Nothing(number, *kept))
