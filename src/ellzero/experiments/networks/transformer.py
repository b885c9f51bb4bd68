"""The block that transformers here are made of; it knows neither text nor images, and nothing of gates."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class Branch(nn.Module):
    """Leaves out a whole branch of an example with probability p in training (Huang et al., 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """What the branch adds to the stream of each example, (N, …): nothing, or 1 / (1 − p) times as much."""
        if not self.training or self.p == 0:
            return x
        kept = F.dropout(torch.ones(len(x), 1, 1, dtype=x.dtype, device=x.device), self.p)
        return x * kept


@final
class Attend(nn.Module):
    """What heads of so many entries see of each other, by their queries, keys and values (N, positions, 3 · width)."""

    def __init__(self, entries: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.entries, self.dropout, self.causal = entries, dropout, causal

    def forward(self, qkv: Tensor) -> Tensor:
        """What is seen at each position, (N, positions, width)."""
        q, k, v = (a.unflatten(-1, (-1, self.entries)).transpose(1, 2) for a in qkv.chunk(3, -1))
        rate = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=self.causal)
        return seen.transpose(1, 2).flatten(2)


@final
class Block(nn.Module):
    """Attention, then two layers with GELU between them, each behind a LayerNorm and added to the stream (pre-norm).

    Args:
        width: of the stream.
        heads: of `width / heads` entries each.
        hidden: units between the two layers.
        drop: what both branches go through in the end.
        attention_dropout: rate on the attention's weights.
        bias: whether norms and layers have one; queries, keys and values have none.
        causal: whether a position sees only those before it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        drop: nn.Module,
        attention_dropout: float,
        bias: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"`width` must be a multiple of the {heads} heads, got {width}")
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=bias)
        self.attend = Attend(width // heads, attention_dropout, causal)
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """The stream (N, positions, width) after this block."""
        x = x + self.drop(self.out(self.attend(self.qkv(self.norm1(x)))))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out
