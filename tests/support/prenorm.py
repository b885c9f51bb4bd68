"""Small pre-norm transformers as users write them, and the copy of one whose stream is masked by hand.

Nothing here asks the library where units lie: `masked` multiplies what each norm of the stream is given, and the bias
that it adds.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("torch", "bare", "llama", "gemma", "root", "functional")


class WrittenNorm(nn.Module):
    """An RMSNorm that is written out, in the ways that are about."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.weight, self.variance_epsilon, self.kind = nn.Parameter(torch.ones(width)), 0.03, kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "llama":
                return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
            case "gemma":
                y = x * torch.pow((x * x).mean(-1, keepdim=True) + self.variance_epsilon, -0.5)
                return y * (1.0 + self.weight)
            case "root":
                return x / (x.square().mean([-1], True) + self.variance_epsilon).sqrt() * self.weight
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def norm(width: int, kind: str) -> nn.Module:
    match kind:
        case "torch":
            return nn.RMSNorm(width, eps=0.03)
        case "bare":  # whose eps is that of the type
            return nn.RMSNorm(width)
        case "layer":
            return nn.LayerNorm(width, eps=0.03)
    return WrittenNorm(width, kind)


class Block(nn.Module):
    def __init__(self, width: int, kind: str, heads: int, groups: int, size: int, fused: bool, bias: bool):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.norm1, self.norm2 = norm(width, kind), norm(width, kind)
        self.of_head: nn.Module = nn.Identity()  # what queries and keys go through
        inner = (heads + 2 * groups) * size
        if fused:
            self.qkv = nn.Linear(width, inner, bias=bias)
        else:
            self.q = nn.Linear(width, heads * size, bias=bias)
            self.k, self.v = (nn.Linear(width, groups * size, bias=bias) for _ in range(2))
        self.fused, self.out = fused, nn.Linear(heads * size, width, bias=bias)
        self.gate, self.up = (nn.Linear(width, 5, bias=bias) for _ in range(2))
        self.down, self.drop = nn.Linear(5, width, bias=bias), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.fused:
            q, k, v = self.qkv(y).chunk(3, -1)
        else:
            q, k, v = self.q(y), self.k(y), self.v(y)
        q, k, v = (a.unflatten(-1, (-1, self.size)).transpose(1, 2) for a in (q, k, v))
        q, k = self.of_head(q), self.of_head(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < self.heads)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PreNorm(nn.Module):
    """A language model over 9 words; `placed` is how positions come in."""

    def __init__(
        self,
        width: int = 6,
        kind: str = "torch",
        *,
        blocks: int = 1,
        heads: int = 2,
        groups: int = 2,
        fused: bool = False,
        bias: bool = True,
        tied: bool = False,
        placed: str = "parameter",
    ):
        super().__init__()
        self.embed, self.placed, self.tied = nn.Embedding(9, width), placed, tied
        if placed == "parameter":
            self.places = nn.Parameter(torch.zeros(1, 12, width))
        elif placed == "embedding":
            self.places_of = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, kind, heads, groups, 3, fused, bias) for _ in range(blocks))
        self.norm, self.head = norm(width, kind), nn.Linear(width, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if self.placed == "parameter":
            x = x + self.places[:, : words.shape[1]]
        elif self.placed == "embedding":
            x = x + self.places_of(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def words(batch: int, length: int) -> Tensor:
    return torch.randint(9, (batch, length), generator=torch.Generator().manual_seed(10 * batch + length))


def masked(model: nn.Module, z: Tensor, norms: Mapping[str, str | None]) -> nn.Module:
    """A copy whose stream is multiplied by `z` where these norms read it, and with it each bias that they are told of.

    A head that shares its weight with the embedding has the name "head", and its input is multiplied too.
    """
    out: Any = copy.deepcopy(model)
    for path, bias in norms.items():
        layer = out.get_submodule(path)
        layer.register_forward_pre_hook(lambda _, args: (args[0] * z, *args[1:]))
        if bias is not None:
            with torch.no_grad():
                out.get_parameter(bias).mul_(z)
    return out
