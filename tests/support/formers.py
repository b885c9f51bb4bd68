"""Random transformers, as people write them: what a removal of heads, units, experts, streams or blocks may get wrong.

Their attention is drawn (heads, groups, projections, masks, angles), and so are norms, their place, feed-forward
layers, positions, ties and what is read in the end. The oracle is that of `support/wild.py`. `tools/fuzz.py
--transformers` runs many of them.
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


class Layer(nn.Module):
    """Attention and feed-forward, with norms before, behind, in the branch, or nowhere; one after the other or not."""

    def __init__(self, attention: nn.Module, feed: nn.Module, norms: list[nn.Module], order: str, scale: int):
        super().__init__()
        self.attention, self.feed, self.norms, self.order = attention, feed, nn.ModuleList(norms), order
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(scale)) for _ in range(2 * bool(scale)))
        self.drop = nn.Dropout(0.1)

    def mixed(self, x: Tensor) -> Tensor:
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.attention(x, x, x, need_weights=False)[0]
        branch: Any = self.attention
        return branch.branch(x)  # type: ignore[no-any-return]

    def added(self, k: int, x: Tensor) -> Tensor:
        given = self.norms[k](x) if self.order in ("before", "beside") else x
        y = self.mixed(given) if k == 0 else self.feed(given)
        y = self.norms[k](y) if self.order == "in the branch" else y
        return self.drop(y * self.scales[k] if len(self.scales) else y)

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "beside":
            return x + self.added(0, x) + self.added(1, x)
        for k in (0, 1):
            x = x + self.added(k, x)
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

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.first is not None:
            h = torch.cat([self.first.expand(len(h), -1, -1), h], 1)
        t = h.shape[1]
        h = h + self.where[:, :t] if self.where is not None else h
        h = h + self.looked_up(torch.arange(t)) if self.looked_up is not None else h
        for layer in self.layers:
            h = layer(h)
        h = self.end(h)
        h = h[:, 0] if self.reads == "token" else h.mean(1) if self.reads == "mean" else h
        return F.linear(h, self.embed.weight) if self.head is None else self.head(h)


class Drawer:
    """Draws one transformer from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(f"transformer {seed}")
        self.width, self.words = self.random.choice([4, 6, 8, 12]), self.random.random() < 0.6
        self.kind = self.random.choice([*NORMS, "layer", "layer", "layer"])
        self.about: list[str] = []

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def said(self, what: str) -> str:
        self.about.append(what)
        return what

    def attention(self) -> nn.Module:
        heads = self.random.choice([1, 2, 3, 4, 6])
        if self.width % heads == 0 and self.chance(0.2):
            self.said(f"torch's {heads} heads")
            return nn.MultiheadAttention(self.width, heads, batch_first=True, bias=self.chance(0.7))
        projections = self.random.choice(["apart", *PROJECTIONS])
        groups = self.random.choice([g for g in (1, 2, 3, heads, heads) if heads % g == 0])
        groups = groups if projections == "apart" else heads
        self.said(f"{heads} heads on {groups} {projections}")
        return Attention(
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
        if self.chance(0.2):
            experts = self.random.choice([2, 3, 5])
            kind = self.said(self.random.choice(["renormalised", "whole", "picked first"]))
            return Mixture(self.width, hidden, experts, self.random.choice([1, 2]), kind)
        kind = self.said(self.random.choice(["plain", "gate", "chunk"]))
        act = self.random.choice([F.relu, F.gelu, F.silu, torch.sigmoid])
        return Feed(self.width, hidden, kind, act, self.chance(0.7))

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


def judged(seed: int) -> tuple[Outcome, str]:
    """Draws a transformer, gates it, closes gates, compacts it: how that went, and a word about it."""
    drawer = Drawer(seed)
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
            for prepared, of in ((l0.centred, 0.7), (l0.routed, 0.9)):
                if drawer.chance(of):
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
        return "wrong", f"{about}: it is another function once it is centred or routed"
    return compared(gated, example, others, seed, about, fine=True)
