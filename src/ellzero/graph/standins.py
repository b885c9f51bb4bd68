"""What stands in for a part that was taken out: `Select` picks inputs, `Scatter` places outputs, `Closed` is a layer of
which nothing is left, `Nothing` a module of a block that is gone, `FewerHeads` is an `nn.MultiheadAttention` whose
heads are not its width any more, `Slim` lets attention of one's own have fewer heads than its input is wide.
`RootMeanSquare` is an `nn.LayerNorm` that subtracts no mean, `ResponseNorm` a response norm that keeps its eps.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


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
    parent, key = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    new.train(model.get_submodule(path).training)
    setattr(parent, key, new)
    if isinstance(parent, nn.TransformerEncoderLayer):
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


@final
class Slim(nn.Module):
    """Shows a module an input that is as wide as what is left of its heads, and its layers the input itself.

    `b, t, c = x.shape` and `view(b, t, self.heads, c // self.heads)` take the width of the input for that of all heads.
    What the module is shown has this width and no numbers: its layers, which compute, read the input that it stands
    for.

    Args:
        whole: the width of the input.
        width: as which it is shown.
    """

    def __init__(self, whole: int, width: int) -> None:
        super().__init__()
        self.whole, self.width = whole, width
        self.shown: Tensor | None = None
        self.meant: Tensor | None = None

    def show(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The forward pre-hook of the module."""
        x = first_tensor(args, kwargs)
        if torch.compiler.is_compiling():  # which takes no attribute of a tensor, and nobody else runs the module
            self.meant, self.shown = x, self._outline(x)
            return _instead(args, kwargs, lambda given: self.shown if given is x else given)
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # it is no step of the forward
            shown = self._outline(x).requires_grad_(x.requires_grad)
        setattr(shown, _MEANT, x)  # there, and not here: other threads may run the module, and a backward run it again
        return _instead(args, kwargs, lambda given: shown if given is x else given)

    def read(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The forward pre-hook of the layers in the module."""
        if torch.compiler.is_compiling():
            return _instead(args, kwargs, lambda given: self.meant if given is self.shown else given)
        return _instead(args, kwargs, _meant)

    def forget(self, module: nn.Module, args: Any, out: Any) -> None:
        """The forward hook of the module."""
        self.shown = self.meant = None

    def _outline(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.whole,):
            raise ValueError(f"the input must have width {self.whole}, got {tuple(x.shape)}")
        return x.detach().new_full((), torch.nan).expand(*x.shape[:-1], self.width)

    def extra_repr(self) -> str:
        return f"whole={self.whole}, width={self.width}"


_MEANT = "_ellzero_meant"  # where a tensor that is shown has the one that it stands for


def _meant(given: Any) -> Any:
    """What a tensor that is shown stands for; another one itself."""
    meant = getattr(given, _MEANT, None)
    if meant is not None or not isinstance(given, Tensor):
        return given if meant is None else meant
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        if given.numel() and not any(given.stride()) and bool(given.flatten()[0].isnan()):  # shown, and copied since
            what = "activation checkpointing inside attention that has lost heads"
            raise RuntimeError(f"{what} must have `use_reentrant=False`")
    return given


def _instead(args: tuple[Any, ...], kwargs: dict[str, Any], of: Any) -> tuple[Any, dict[str, Any]]:
    return tuple(map(of, args)), {name: of(given) for name, given in kwargs.items()}


SLIM = "slim"  # where a module has its `Slim`


def put_slim(module: nn.Module, whole: int, width: int) -> None:
    """Gives a module a `Slim` as its child, or changes the one that it has; where it shows all, it has none."""
    old = module._modules.pop(SLIM, None)
    layers = [layer for layer in module.modules() if layer is not module]
    for layer in (module, *layers) if old is not None else ():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) is old]:
                del hooks[key]
                layer._forward_pre_hooks_with_kwargs.pop(key, None)
    if width < whole:
        slim = Slim(whole, width)
        module.add_module(SLIM, slim)
        module.register_forward_pre_hook(slim.show, with_kwargs=True)
        module.register_forward_hook(slim.forget)
        for layer in layers:
            layer.register_forward_pre_hook(slim.read, prepend=True, with_kwargs=True)


@final
class RootMeanSquare(nn.LayerNorm):
    """An `nn.LayerNorm` of what has mean zero, so that it subtracts none: an RMSNorm with the same keys, bias too."""

    def forward(self, input: Tensor) -> Tensor:
        out = F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return out if self.bias is None else out + self.bias


_LIBRARY = torch.library.Library("ellzero", "FRAGMENT")
_LIBRARY.define("response_norm(Tensor x, Tensor weight, Tensor bias, float eps, int dim) -> Tensor")


@torch.library.impl(_LIBRARY, "response_norm", "CompositeImplicitAutograd")
def _response_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dim: int) -> Tensor:
    space = [d for d in range(1, x.ndim) if d != dim % x.ndim]
    size = torch.linalg.vector_norm(x, 2, space, keepdim=True)
    out: Tensor = weight * (x * (size / (size.mean(dim, keepdim=True) + eps))) + bias + x
    return out


@final
class ResponseNorm(nn.Module):
    """The global response norm of ConvNeXt V2, under the keys of the module that it stands for.

    Args:
        members: its parameters by name.
        weight: the name of the one that it multiplies by.
        bias: that of the one that it adds.
        eps: what it adds to the mean.
        dim: where its channels lie, -1 or 1.
    """

    def __init__(self, members: dict[str, nn.Parameter], weight: str, bias: str, eps: float, dim: int) -> None:
        super().__init__()
        for name, parameter in members.items():
            self.register_parameter(name, parameter)
        self.weighs, self.adds, self.eps, self.dim = weight, bias, eps, dim

    def forward(self, x: Tensor) -> Tensor:
        shape = [-1 if d == self.dim % x.ndim else 1 for d in range(x.ndim)]
        weight, bias = (getattr(self, name).reshape(shape) for name in (self.weighs, self.adds))
        out: Tensor = torch.ops.ellzero.response_norm(x, weight, bias, self.eps, self.dim)
        return out


@final
class FewerHeads(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` with heads of which some are gone; it has the same keys, arguments and outputs."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("`attn_mask` must be given beside the hint `is_causal`, got None")
        masks = _float_mask(key_padding_mask, query), _float_mask(attn_mask, query)
        turns = self.batch_first and query.dim() == 3
        if turns:
            distinct = {id(x): x for x in (query, key, value)}
            moved = {number: x.transpose(1, 0) for number, x in distinct.items()}  # what was one tensor stays one
            query, key, value = (moved[id(x)] for x in (query, key, value))
        out, weights = _attend(query, key, value, self, masks, need_weights, average_attn_weights, is_causal)
        return (out.transpose(1, 0) if turns else out), weights


# Layers of torch that ask their attention whether a shortcut will do: what they call depends on it, what they do not.
SHORTCUTS = (nn.MultiheadAttention, FewerHeads, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    m: FewerHeads,
    masks: tuple[Tensor | None, Tensor | None],
    need_weights: bool,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """What `F.multi_head_attention_forward` does, operation by operation, for other numbers of heads."""
    padding, mask = masks
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        padding = None if padding is None else padding.unsqueeze(0)
    only_causal = is_causal and padding is None and not need_weights
    mask = None if only_causal else mask
    (steps, n, _), sources, heads, size = query.shape, key.shape[0], m.num_heads, m.head_dim
    projected = _projected(m, query, key, value)
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(0)
    q, k, v = (x.view(x.shape[0], n * heads, size).transpose(0, 1) for x in projected)
    if padding is not None:
        padding = padding.view(n, 1, 1, sources).expand(-1, heads, -1, -1).reshape(n * heads, 1, sources)
        mask = padding if mask is None else mask + padding
    dropout = m.dropout if m.training else 0.0
    weights = None
    if need_weights:
        q = q * (1.0 / float(size)) ** 0.5
        turned = k.transpose(-2, -1)
        weights = (q.bmm(turned) if mask is None else mask.baddbmm(q, turned)).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        out = weights.bmm(v).transpose(0, 1).reshape(steps * n, heads * size)
    else:
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(n, heads, -1, sources)
        q, k, v = (x.view(n, heads, -1, size) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, only_causal)
        out = out.permute(2, 0, 1, 3).reshape(n * steps, heads * size)
    out = F.linear(out, m.out_proj.weight, m.out_proj.bias).view(steps, n, -1)
    if weights is not None:
        weights = weights.view(n, heads, steps, sources)
        weights = weights.mean(1) if average else weights
        weights = weights if batched else weights.squeeze(0)
    return (out if batched else out.squeeze(1)), weights


def _float_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def _projected(m: FewerHeads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w, b = m.in_proj_weight, m.in_proj_bias
    inner = m.num_heads * m.head_dim

    def parts(x: Tensor, count: int) -> Tensor:
        cut: Tensor = x.unflatten(-1, (count, inner))
        return cut.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()

    if w is not None and k is v:
        if q is k:
            both = parts(F.linear(q, w, b), 3)
            return both[0], both[1], both[2]
        (w_q, w_kv), (b_q, b_kv) = (
            w.split([inner, 2 * inner]),
            ((None, None) if b is None else b.split([inner, 2 * inner])),
        )
        first = F.linear(q, w_q, b_q)
        both = parts(F.linear(k, w_kv, b_kv), 2)
        return first, both[0], both[1]
    w_q, w_k, w_v = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight) if w is None else w.chunk(3)
    b_q, b_k, b_v = (None, None, None) if b is None else b.chunk(3)
    return F.linear(q, w_q, b_q), F.linear(k, w_k, b_k), F.linear(v, w_v, b_v)
