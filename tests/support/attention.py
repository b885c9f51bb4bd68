"""Attention as users write it: projections apart or in one, products written out or not, masks, groups, angles."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROJECTIONS = ("apart", "chunk", "split", "three first", "three last", "unbind")
MASKS = ("none", "causal", "float", "bool")


class Attention(nn.Module):
    """A residual attention block over (batch, time, width); `out` reads the heads.

    Args:
        width: of what comes in and goes out.
        heads: of the queries.
        groups: heads of keys and values.
        size: of one head.
        projections: how queries, keys and values are made.
        written: whether products and softmax are written out.
        mask: what a position may look at.
        angles: whether positions turn queries and keys, as rotary embeddings do.
        norms: whether queries and keys are normed, head by head.
        crossed: whether keys and values come from a second input.
    """

    def __init__(
        self,
        width: int = 8,
        heads: int = 4,
        groups: int = 4,
        size: int = 3,
        projections: str = "apart",
        *,
        written: bool = False,
        mask: str = "none",
        angles: bool = False,
        norms: bool = False,
        crossed: bool = False,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.inner = heads, groups, size, heads * size
        self.projections, self.written, self.mask, self.angles, self.crossed = (
            projections,
            written,
            mask,
            angles,
            crossed,
        )
        if projections == "apart":
            self.q, self.k = nn.Linear(width, heads * size), nn.Linear(width, groups * size, bias=False)
            self.v = nn.Linear(width, groups * size)
        else:
            self.qkv = nn.Linear(width, 3 * heads * size)
        self.norm = nn.RMSNorm(size) if norms else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(heads * size, width)

    def made(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, head, time, size)."""
        b, t, _ = x.shape

        def split(a: Tensor) -> Tensor:
            return a.view(*a.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

        match self.projections:
            case "apart":
                k, v = (
                    layer(other).view(b, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)
                    for layer in (self.k, self.v)
                )
                return split(self.q(x)), k, v
            case "chunk":
                q, k, v = self.qkv(x).chunk(3, -1)
                return split(q), split(k), split(v)
            case "split":
                q, k, v = self.qkv(x).split(self.inner, dim=2)
                return split(q), split(k), split(v)
            case "three first":
                q, k, v = self.qkv(x).reshape(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
                return q, k, v
            case "unbind":
                q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
                return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k, v = self.qkv(x).view(b, t, -1, 3 * self.head_dim).transpose(1, 2).chunk(3, -1)
        return q, k, v

    def masked(self, q: Tensor, k: Tensor) -> Tensor | None:
        shape = (q.shape[-2], k.shape[-2])
        if self.mask == "float":
            places = torch.arange(shape[0]).to(q)[:, None] - torch.arange(shape[1]).to(q)
            return -places.abs().expand(len(q), 1, *shape)
        return torch.ones(shape, dtype=torch.bool).tril() if self.mask != "none" else None

    def turned(self, a: Tensor) -> Tensor:
        half = a.shape[-1] // 2
        angle = torch.arange(a.shape[-2]).to(a)[:, None] * torch.arange(1, half + 1).to(a)
        angle = torch.cat([angle, angle], -1)[None, None]
        a, rest = a[..., : 2 * half], a[..., 2 * half :]
        a = a * angle.cos() + torch.cat([-a[..., half:], a[..., :half]], -1) * angle.sin()
        return torch.cat([a, rest], -1) if rest.shape[-1] else a

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return x + self.branch(x, other)

    def branch(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """What is added to the input."""
        b, t, _ = x.shape
        q, k, v = self.made(x, x if other is None else other)
        q, k = self.norm(q), self.norm(k)
        if self.angles:
            q, k = self.turned(q), self.turned(k)
        if self.num_kv_heads < self.num_heads and self.written:
            k, v = (a.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for a in (k, v))
        mask = self.masked(q, k)
        if self.written:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e9) if mask.dtype is torch.bool else scores + mask
            y = self.drop(scores.softmax(-1)) @ v
        else:
            some: dict[str, Any] = {"enable_gqa": True} if self.num_kv_heads < self.num_heads else {}
            some |= {"is_causal": True} if self.mask == "causal" else {"attn_mask": mask}
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training, **some)
        return self.out(y.transpose(1, 2).reshape(b, t, self.inner))  # type: ignore[no-any-return]
