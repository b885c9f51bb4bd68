"""`FewerHeads` is an `nn.MultiheadAttention` with heads not as wide as it, `Padded` an encoder around such layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


@final
class Padded(nn.TransformerEncoder):
    """An `nn.TransformerEncoder` that packs no padded input, since its layers take no such shortcut any more.

    Where torch would pack it, what comes out at padded positions is what zeros give, as if it had.
    """

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        out = super().forward(src, mask, src_key_padding_mask, is_causal)
        if mask is not None or src_key_padding_mask is None or not self._packs(src, src_key_padding_mask):
            return out
        zeros = torch.zeros_like(src)
        return torch.where(
            src_key_padding_mask.bool().unsqueeze(-1), zeros if self.norm is None else self.norm(zeros), out
        )

    def _packs(self, src: Tensor, padding: Tensor) -> bool:
        """Whether torch's own would, as it asks in its forward."""
        tensors = (src, *self.layers[0].parameters())
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        may = torch.backends.mha.get_fastpath_enabled() and not torch.overrides.has_torch_function(tensors)
        if learns or not may or self.layers[0].training or src.dim() != 3 or torch.is_autocast_enabled():
            return False
        if not self.mask_check:
            return True
        left: Any = torch._nested_tensor_from_mask_left_aligned
        return not torch.compiler.is_compiling() and bool(left(src, padding.logical_not()))


# Layers of torch that ask their attention whether a shortcut will do: what they call depends on it, what they do not.
SHORTCUTS = (nn.MultiheadAttention, FewerHeads, nn.TransformerEncoderLayer, nn.TransformerEncoder, Padded)


def pad(modules: Iterable[nn.Module]) -> None:
    """Makes encoders `Padded`, in place, that would pack their input for layers which cannot take it; and the way
    back.
    """
    for m in modules:
        if type(m) is Padded or (type(m) is nn.TransformerEncoder and m.use_nested_tensor):
            packs = all(isinstance(layer, nn.TransformerEncoderLayer) and _is_whole(layer) for layer in m.layers)
            m.__class__, m.use_nested_tensor = (nn.TransformerEncoder if packs else Padded), packs


def _is_whole(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether torch's shortcut takes it: with plain layers, and an even number of heads."""
    kinds = {"self_attn": nn.MultiheadAttention, "linear1": nn.Linear, "linear2": nn.Linear}
    kinds |= {"norm1": nn.LayerNorm, "norm2": nn.LayerNorm}
    children = {name: layer.get_submodule(name) for name in kinds}
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in children.values())
    plain = all(type(children[name]) is kind for name, kind in kinds.items())
    return plain and not hooked and layer.self_attn.num_heads % 2 == 0


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
