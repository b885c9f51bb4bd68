"""What stands in for a part that was taken out: `Select` picks inputs, `Closed` is a layer of which nothing is left."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn


@final
class Select(nn.Module):
    """Picks the inputs that the layer behind it still reads: `x[..., index]` along the layer's input dimension.

    It stands where what feeds a layer cannot shrink: the pixels of an image, single positions of a flattened map.
    """

    index: Tensor

    def __init__(self, index: Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(self.dim, self.index)


def select_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The forward pre-hook of a layer with a `Select`, whether its input comes by place or by keyword."""
    select: Any = module.select
    if args:
        return (select(args[0]), *args[1:]), kwargs
    (name, x), *rest = kwargs.items()
    return (), {name: select(x), **dict(rest)}


def put_select(layer: nn.Module, index: Tensor) -> None:
    """Gives a layer a `Select` as its child `select`, run before it; the layer keeps its class and its keys."""
    weight: Any = layer.weight
    dim = -1 if isinstance(layer, nn.Linear) else 1 - weight.ndim
    layer.add_module("select", Select(index.to(weight.device), dim))
    layer.register_forward_pre_hook(select_first, with_kwargs=True)


@final
class Closed(nn.Module):
    """A linear or convolutional layer that reads nothing any more: its output is its bias, whatever comes in.

    With no outputs left either it gives an empty tensor of the right shape, so that the user's forward goes on running.
    """

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        bias = getattr(layer, "bias", None)
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
    contracts = isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    new: nn.Module = Closed(layer, weight.shape[0] if outputs is None else outputs) if contracts else nn.Identity()
    new.train(layer.training)
    parent, _, key = path.rpartition(".")
    setattr(model.get_submodule(parent), key, new)
