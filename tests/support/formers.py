"""Random transformers, as people write them: what a removal of heads, units, experts, streams or blocks may get wrong.

Their attention is drawn (heads, groups, projections, masks, angles, slopes, a width that the input tells), and so are
norms, their place, feed-forward layers with response norms or experts, positions, ties and what is read in the end. The
oracle is that of `support/wild.py`. `tools/fuzz.py --transformers` runs many of them.
"""

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from support.attention import MASKS, PROJECTIONS, Attention
from support.oracles import settled
from support.prenorm import NORMS, norm
from support.wild import Outcome, compared, joined


class Feed(nn.Module):
    """A feed-forward layer: plain, with a gate, or with gate and values in one weight."""

    def __init__(self, width: int, hidden: int, kind: str, act: Callable[[Tensor], Tensor], bias: bool):
        super().__init__()
        self.kind, self.act = kind, act
        self.up = nn.Linear(width, hidden * (1 + (kind == "chunk")), bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if kind == "gate" else None
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            y = self.act(self.gate(x)) * self.up(x)
        elif self.kind == "chunk":
            a, b = self.up(x).chunk(2, -1)
            y = self.act(a) * b
        else:
            y = self.act(self.up(x))
        return self.down(y)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Experts in one tensor, of which each token goes to some."""

    def __init__(self, width: int, hidden: int, experts: int, picked: int, kind: str):
        super().__init__()
        self.picked, self.kind = picked, kind
        self.router = nn.Linear(width, experts, bias=kind == "renormalised")
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = self.router(rows)
        if self.kind == "picked first":
            shares, picked = logits.topk(self.picked)
            shares = shares.softmax(-1)
        else:
            shares, picked = logits.softmax(-1).topk(self.picked)
            shares = shares / shares.sum(-1, keepdim=True) if self.kind == "renormalised" else shares
        numbers = picked.reshape(-1)
        h = torch.bmm(self.up[numbers], rows.repeat_interleave(self.picked, 0)[..., None]).relu()
        y = torch.bmm(self.down[numbers], h).squeeze(-1) * shares.reshape(-1, 1)
        return y.view(len(rows), self.picked, -1).sum(1).view(x.shape)


class Router(nn.Module):
    """As in Mixtral: computes logits and picks in one forward. It may add a bias, and scale what it gives."""

    def __init__(self, width: int, experts: int, picked: int, kind: str):
        super().__init__()
        self.picked, self.kind = picked, kind
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.empty(experts)) if kind == "picked first" else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight, self.bias)
        if self.kind == "picked first":
            shares, picked = torch.topk(logits, self.picked, dim=-1)
            return F.softmax(shares, dim=1), picked
        shares, picked = torch.topk(F.softmax(logits, dim=-1, dtype=logits.dtype), self.picked, dim=-1)
        return (shares / shares.sum(-1, keepdim=True) if self.kind == "renormalised" else 2.5 * shares), picked


class Experts(nn.Module):
    """Experts in tensors for all, with gate and values in one, a bias for each, and an expert for all tokens beside."""

    def __init__(self, width: int, hidden: int, experts: int, picked: int, kind: str, shared: nn.Module | None):
        super().__init__()
        self.router, self.picked, self.shared = Router(width, experts, picked, kind), picked, shared
        self.says = nn.Linear(width, 1, bias=False) if shared is not None else None
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down, self.bias = (
            nn.Parameter(torch.empty(experts, width, hidden)),
            nn.Parameter(torch.empty(experts, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        shares, picked = self.router(rows)
        numbers, given = picked.reshape(-1), rows.repeat_interleave(self.picked, 0)[..., None]
        gate, up = torch.bmm(self.gate_up[numbers], given).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[numbers], (F.silu(gate) * up)[..., None]).squeeze(-1) + self.bias[numbers]
        y = (y * shares.reshape(-1, 1)).view(len(rows), self.picked, -1).sum(1)
        if self.shared is not None and self.says is not None:
            y = y + self.says(rows).sigmoid() * self.shared(rows)
        return y.view(x.shape)


class Response(nn.Module):
    """The global response norm of ConvNeXt V2, over time. Its eps is in the code."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.empty(1, 1, width)), nn.Parameter(torch.empty(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=1, keepdim=True)
        return self.gamma * (x * (size / (size.mean(-1, keepdim=True) + 0.3))) + self.beta + x


class Responding(nn.Module):
    """A feed-forward layer with a response norm in the middle, called by a function that holds its parts."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.norm, self.down = up, norm, down = (
            nn.Linear(width, hidden),
            Response(hidden),
            nn.Linear(hidden, width),
        )
        self.runs = lambda x: down(norm(F.gelu(up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.runs(x)  # type: ignore[no-any-return]


class ByWidth(nn.Module):
    """Attention that cuts the width of its input into heads, as nanoGPT's."""

    def __init__(self, width: int, heads: int, written: bool):
        super().__init__()
        self.n_head, self.n_embd, self.written = heads, width, written
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            a.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for a in self.c_attn(x).split(self.n_embd, dim=2)
        )
        if self.written:
            y = (q @ k.transpose(-2, -1) * (1.0 / k.size(-1) ** 0.5)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))  # type: ignore[no-any-return]


SLOPES = ("heads", "batch and heads", "four", "own")


class Sloped(nn.Module):
    """Attention that is given a bias for each head (ALiBi), or keeps slopes of its own in a buffer."""

    def __init__(self, width: int, heads: int, size: int, shape: str):
        super().__init__()
        self.heads, self.size, self.shape = heads, size, shape
        self.qkv, self.out = nn.Linear(width, 3 * heads * size), nn.Linear(heads * size, width)
        if shape == "own":
            self.register_buffer("slopes", torch.rand(heads, 1, 1))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, self.heads, 3, self.size).permute(3, 0, 2, 1, 4)
        if self.shape == "batch and heads":
            q, k, v = (a.reshape(b * self.heads, t, self.size) for a in (q, k, v))
            y = (torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(-1) @ v).view(b, self.heads, t, self.size)
        else:
            y = (q @ k.transpose(2, 3) + (self.slopes * bias if self.shape == "own" else bias)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, self.heads * self.size))  # type: ignore[no-any-return]


def biases(x: Tensor, heads: int, shape: str) -> Tensor:
    """What positions and slopes add to scores: computed from the number of heads, for whoever has so many."""
    places = torch.arange(x.shape[1]).to(x)
    if shape == "own":
        return places
    bias = (2.0 ** -torch.arange(1, heads + 1)).to(x)[:, None, None] * places
    if shape == "four":
        return bias.expand(len(x), -1, x.shape[1], -1)
    return bias.repeat(len(x), 1, 1) if shape == "batch and heads" else bias


class Branch(Attention):
    """Attention without the sum."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.branch(x, other)


class Layer(nn.Module):
    """Attention and feed-forward, with norms before, behind, in the branch, or nowhere; one after the other or not."""

    def __init__(self, attention: nn.Module, feed: nn.Module, norms: list[nn.Module], order: str, scale: int):
        super().__init__()
        self.attention, self.feed, self.norms, self.order = attention, feed, nn.ModuleList(norms), order
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(scale)) for _ in range(2 * bool(scale)))
        self.drop = nn.Dropout(0.1)

    def mixed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.attention(x, x, x, need_weights=False)[0]
        if isinstance(self.attention, Sloped):
            return self.attention(x, bias=bias)  # type: ignore[no-any-return]
        return self.attention(x)  # type: ignore[no-any-return]

    def added(self, k: int, x: Tensor, bias: Tensor | None) -> Tensor:
        given = self.norms[k](x) if self.order in ("before", "beside") else x
        y = self.mixed(given, bias) if k == 0 else self.feed(given)
        y = self.norms[k](y) if self.order == "in the branch" else y
        return self.drop(y * self.scales[k] if len(self.scales) else y)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.order == "beside":
            return x + self.added(0, x, bias) + self.added(1, x, bias)
        for k in (0, 1):
            x = x + self.added(k, x, bias)
            x = self.norms[k](x) if self.order == "behind" else x
        return x


class Former(nn.Module):
    """Layers over words or numbers, with positions, and a head that may be the embedding."""

    def __init__(self, layers: list[nn.Module], width: int, words: bool, places: str, end: nn.Module, reads: str):
        super().__init__()
        self.layers, self.end, self.reads, self.places = nn.ModuleList(layers), end, reads, places
        self.embed: Any = nn.Embedding(7, width) if words else nn.Linear(3, width)
        self.where = nn.Parameter(torch.zeros(1, 12, width)) if places == "parameter" else None
        self.looked_up = nn.Embedding(12, width) if places == "embedding" else None
        self.first = nn.Parameter(torch.zeros(1, 1, width)) if reads == "token" else None
        self.head = None if reads == "tied" else nn.Linear(width, 4)
        given = [getattr(layer, "attention", None) for layer in layers]
        self.sloped = [(a.heads, a.shape) if isinstance(a, Sloped) else None for a in given]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.first is not None:
            h = torch.cat([self.first.expand(len(h), -1, -1), h], 1)
        t = h.shape[1]
        h = h + self.where[:, :t] if self.where is not None else h
        h = h + self.looked_up(torch.arange(t)) if self.looked_up is not None else h
        for layer, sloped in zip(self.layers, self.sloped, strict=True):
            h = layer(h) if sloped is None else layer(h, biases(h, *sloped))
        h = self.end(h)
        h = h[:, 0] if self.reads == "token" else h.mean(1) if self.reads == "mean" else h
        return F.linear(h, self.embed.weight) if self.head is None else self.head(h)


class Drawer:
    """Draws one transformer from a seed; without `more`, as it was drawn before there were slopes, widths of inputs,
    response norms and routers of their own.
    """

    def __init__(self, seed: int, more: bool = True):
        self.random = random.Random(f"transformer {seed}")
        self.width, self.words = self.random.choice([4, 6, 8, 12]), self.random.random() < 0.6
        self.kind = self.random.choice([*NORMS, "layer", "layer", "layer"])
        self.about: list[str] = []
        self.more = random.Random(f"more of transformer {seed}") if more else None

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def said(self, what: str) -> str:
        self.about.append(what)
        return what

    def attention(self) -> nn.Module:
        if self.more and (kind := self.more.random()) < 0.35:
            heads = self.more.choice([1, 2, 3, 4])
            if kind < 0.2:
                shape = self.more.choice(SLOPES)
                self.said(f"{heads} heads with slopes, {shape}")
                return Sloped(self.width, heads, self.more.choice([1, 2, 3]), shape)
            heads = self.more.choice([h for h in (1, 2, 3, 4) if self.width % h == 0])
            self.said(f"{heads} heads by width")
            return ByWidth(self.width, heads, self.more.random() < 0.5)
        heads = self.random.choice([1, 2, 3, 4, 6])
        if self.width % heads == 0 and self.chance(0.2):
            self.said(f"torch's {heads} heads")
            return nn.MultiheadAttention(self.width, heads, batch_first=True, bias=self.chance(0.7))
        projections = self.random.choice(["apart", *PROJECTIONS])
        groups = self.random.choice([g for g in (1, 2, 3, heads, heads) if heads % g == 0])
        groups = groups if projections == "apart" else heads
        self.said(f"{heads} heads on {groups} {projections}")
        return Branch(
            self.width,
            heads,
            groups,
            self.random.choice([1, 2, 4]),
            projections,
            written=self.chance(0.5),
            mask=self.random.choice(MASKS),
            angles=self.chance(0.3),
            norms=self.chance(0.2),
        )

    def feed(self) -> nn.Module:
        hidden = self.random.choice([2, 4, 5, 6])
        kind = self.more.random() if self.more else 1.0
        if kind < 0.12:
            self.said("response norm")
            return Responding(self.width, hidden)
        if self.more and kind < 0.3:
            scores = self.more.choice(["renormalised", "whole", "picked first"])
            shared = Feed(self.width, 3, "gate", F.silu, False) if self.more.random() < 0.4 else None
            self.said(f"experts, {scores}{', shared' if shared else ''}")
            return Experts(self.width, hidden, self.more.choice([2, 3, 5]), self.more.choice([1, 2]), scores, shared)
        if self.chance(0.2):
            experts = self.random.choice([2, 3, 5])
            scores = self.said(self.random.choice(["renormalised", "whole", "picked first"]))
            return Mixture(self.width, hidden, experts, self.random.choice([1, 2]), scores)
        plain = self.said(self.random.choice(["plain", "gate", "chunk"]))
        act = self.random.choice([F.relu, F.gelu, F.silu, torch.sigmoid])
        return Feed(self.width, hidden, plain, act, self.chance(0.7))

    def layer(self) -> nn.Module:
        if self.width % 2 == 0 and self.chance(0.1):
            first = self.chance(0.6)
            self.said(f"torch's layer, norm_first={first}")
            hidden = self.random.choice([3, 6])
            return nn.TransformerEncoderLayer(self.width, 2, hidden, 0.1, batch_first=True, norm_first=first)
        order = self.said(self.random.choice(["before", "before", "before", "behind", "in the branch", "beside", ""]))
        norms = [norm(self.width, self.kind) for _ in range(2)] if order else []
        return Layer(self.attention(), self.feed(), norms, order, self.width if self.chance(0.1) else 0)

    def network(self) -> Former:
        layers = [self.layer() for _ in range(self.random.choice([1, 1, 2, 2, 3]))]
        if self.chance(0.1):
            layers.append(layers[0])
            self.said("the first again")
        places = self.said(self.random.choice(["none", "parameter", "embedding"]))
        end = norm(self.width, self.kind) if self.chance(0.7) else nn.Identity()
        reads = self.random.choice(["all", "mean", "token", *(["tied"] if self.words else [])])
        return Former(layers, self.width, self.words, places, end, self.said(reads))


def judged(seed: int, more: bool = True) -> tuple[Outcome, str]:
    """Draws a transformer, gates it, closes gates, compacts it: how that went, and a word about it."""
    drawer = Drawer(seed, more)
    model: nn.Module = settled(drawer.network(), seed)
    draw = torch.Generator().manual_seed(seed)

    def inputs(n: int, t: int) -> tuple[Tensor]:
        if drawer.words:
            return (torch.randint(7, (n, t), generator=draw),)
        return (torch.randn(n, t, 3, generator=draw, dtype=torch.float64),)

    example = inputs(2, 5)
    flags = {name: drawer.chance(of) for name, of in (("streams", 0.6), ("parts", 0.2), ("blocks", 0.3))}
    about = f"transformer {seed}, {drawer.kind}, {[f for f, on in flags.items() if on]}: {' > '.join(drawer.about)}"
    dense = model
    try:
        with warnings.catch_warnings(action="ignore"):
            for prepared, draws in (
                (l0.centred, drawer.chance(0.7)),
                (l0.routed, drawer.chance(0.9)),
                (l0.numbered, True),
            ):
                if draws:
                    with suppress(ValueError):
                        model = prepared(model, example)
            where = l0.per_layer() if drawer.chance(0.1) else joined(l0.shrinkable(**flags))
            gated = l0.attach(model, example, where=where).eval()
    except ValueError as error:
        return "refused", f"{about}: {error}"
    others = inputs(3, 7)
    with torch.no_grad():
        expected, made = dense(*others), model(*others)
    if (made - expected).abs().max() > 1e-10 * max(1.0, float(expected.abs().max())):
        return "wrong", f"{about}: it is another function once it is centred, routed or numbered"
    return compared(gated, example, others, seed, about, fine=True)
