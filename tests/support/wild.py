"""Random networks that cut, hide, cast and draw: what a removal can get wrong without showing it on the example.

The oracle is what a user relies on: on inputs that `attach` has not seen, the compact network gives what the gated one
gives, and costs what was said, by torch's own counts. Or `attach` refused. `tools/fuzz.py` runs many of them.
"""

import random
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from support.attention import MASKS, PROJECTIONS, Attention
from support.oracles import counted_macs, numel, set_gates, settled
from support.prenorm import NORMS, norm

Outcome = Literal["exact", "refused", "nothing left", "wrong", "failed"]
Op = Callable[[Any, Tensor, Tensor], Tensor]  # of the network, a value, and the integers


class Wild(nn.Module):
    """Runs a list of operations one after the other; each has layers of its own in `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.ops: list[tuple[str, Op]] = []

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        for _, op in self.ops:
            x = op(self, x, k)
        return x


def broad(t: Tensor, like: Tensor) -> Tensor:
    """A vector over the batch, to be broadcast over all else."""
    return t.reshape(-1, *[1] * (like.ndim - 1))


def cut(h: Tensor, at: int) -> Tensor:
    return torch.cat([h[:, :at].sin(), h[:, at:]], 1)


def mixed_up(h: Tensor, parts: int) -> Tensor:
    """A channel shuffle, written as views."""
    return h.reshape(len(h), parts, -1, *h.shape[2:]).transpose(1, 2).reshape(h.shape)


class Parts(nn.Module):
    """A group norm that a forward tells its number of groups: a stored one, a share, a literal, one out of sight."""

    def __init__(self, groups: int, width: int, how: str, weights: bool) -> None:
        super().__init__()
        self.parts, self.literal, self.how = groups, str(groups), how
        self.size = width // groups if how == "share" else 0
        self.weight = nn.Parameter(torch.ones(width)) if weights else None

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        stored, literal = self.parts, int(self.literal)
        groups = stored if self.how == "stored" else x.shape[1] // self.size if self.how == "share" else literal
        if self.how == "hidden" and x.shape[1] % groups:
            return x
        y = F.group_norm(x, groups, self.weight)
        return torch.where(broad(k, x) > 0, x, y) if self.how == "hidden" else y


class Twofold(nn.Sequential):
    """Gives two things, as attention does that gives its weights too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Scaled(nn.Module):
    """A factor for each unit."""

    def __init__(self, width: int, space: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, *[1] * (2 if space else 0)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def pairwise_of(width: int, hidden: int) -> list[tuple[int, int]]:
    return [(width, hidden), (hidden, width)]


class Drawer:
    """Draws one network from a seed: `width` and `space` are those of the value so far."""

    def __init__(self, seed: int):
        self.random, self.seed = random.Random(seed), f"attention {seed}"
        self.net = Wild()
        self.space = self.random.choice([0, 0, 3])
        self.width = self.input = self.random.randint(2, 4)
        self.casts = self.draws = False
        self.blocks = random.Random(f"blocks {seed}").random() < 0.4  # other networks are drawn as before

    def layer(self, width: int, into: int | None = None, **kwargs: Any) -> str:
        """A new layer that writes `width` units; returns its name."""
        into = self.width if into is None else into
        name = f"l{len(self.net.layers)}"
        bias = self.random.random() < 0.7
        if self.space:
            kernel = self.random.choice([1, 3])
            self.net.layers[name] = nn.Conv2d(into, width, kernel, padding=kernel // 2, bias=bias, **kwargs)
        else:
            self.net.layers[name] = nn.Linear(into, width, bias=bias)
        return name

    def add(self, kind: str, op: Op, width: int | None = None) -> None:
        self.net.ops.append((kind, op))
        self.width = self.width if width is None else width

    def plain(self) -> None:
        width = self.random.choice([2, 4, 6, 6, 8, 12])
        name, keyword = self.layer(width), self.random.random() < 0.2
        self.add("layer", lambda m, x, k: m.layers[name](input=x) if keyword else m.layers[name](x), width)
        if self.random.random() < 0.3:
            norm = f"n{len(self.net.layers)}"
            self.net.layers[norm] = (nn.BatchNorm2d if self.space else nn.BatchNorm1d)(width)
            self.add("norm", lambda m, x, k: m.layers[norm](x))
        act = self.random.choice([F.relu, torch.sigmoid, torch.tanh, F.silu, lambda x: x])
        self.add("act", lambda m, x, k: act(x))

    def parts(self) -> None:
        """Parts by chunk, by slices at a share or a literal, or by a stride, each with a reader of its own."""
        n = self.random.choice([n for n in (2, 3) if self.width % n == 0] or [1])
        how = self.random.choice(["chunk", "share", "literal", "stride", "uneven"])
        size, width = self.width // n, self.random.choice([2, 3, 4])
        sizes = [size] * n
        if how == "uneven" and self.width > 2:
            sizes = [1, self.width - 1] if self.random.random() < 0.5 else [self.width // 2, (self.width + 1) // 2]
        readers = [self.layer(width, into=s) if self.random.random() < 0.7 else "" for s in sizes]
        joins = self.random.choice(["sum", "cat"]) if all(readers) else "cat"

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            one = x.shape[1] // n
            if how == "chunk":
                cuts = list(x.chunk(n, 1))
            elif how == "share":
                cuts = [x[:, i * one : (i + 1) * one] for i in range(n)]
            elif how == "literal":
                cuts = [x[:, i * size : (i + 1) * size] for i in range(n)]
            elif how == "uneven":
                cuts = [x[:, : sizes[0]], x[:, sizes[0] :]] if len(sizes) == 2 else [x]
            else:
                cuts = [x[:, i::n] for i in range(n)]
            made = [m.layers[r](part) if r else part.sin() for r, part in zip(readers, cuts, strict=True)]
            return torch.cat(made, 1) if joins == "cat" else sum(made[1:], made[0])

        widths = [width if r else s for r, s in zip(readers, sizes, strict=True)]
        self.add(f"parts by {how}", op, sum(widths) if joins == "cat" else width)

    def hidden(self) -> None:
        """What a `where` on the integers chooses, which are all ones in the example."""
        half, n, width = self.width // 2, self.random.choice([2, 3]), self.width
        other: Callable[[Tensor], Tensor] = self.random.choice(
            [
                torch.sin,
                lambda h: cut(h, half),
                lambda h: cut(h, h.shape[1] // 2),
                lambda h: h / h.shape[1],
                lambda h: mixed_up(h, n) if h.shape[1] % n == 0 else h.cos(),
                lambda h: h.tanh() if h.shape[1] > half else h,
                lambda h: h.clamp(max=100.0 + h.shape[1]),
                lambda h: h[:, :width].exp(),
                lambda h: h.flip(1),
            ]
        )
        bare = self.random.random() < 0.2
        self.add("hidden", lambda m, x, k: other(x) if bare else torch.where(broad(k, x) > 0, x, other(x)))

    def repeated(self) -> None:
        n = self.random.choice([2, 3])
        kind = self.random.choice(["repeat", "interleave", "cat", "stride"])
        if kind == "stride" and self.width < n:
            return

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            if kind == "repeat":
                return x.repeat(1, n, *[1] * (x.ndim - 2))
            if kind == "interleave":
                return x.repeat_interleave(n, 1)
            return torch.cat([x, x.cos()], 1) if kind == "cat" else x[:, ::n]

        width = {"cat": 2 * self.width, "stride": -(-self.width // n)}.get(kind, n * self.width)
        self.add(kind, op, width)

    def residual(self) -> None:
        inner = self.random.choice([2, 3, 4])
        first = self.layer(inner)
        second, projection = self.layer(self.width, into=inner), self.random.random() < 0.3
        skip = self.layer(self.width) if projection else ""

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            return (m.layers[skip](x) if skip else x) + m.layers[second](F.relu(m.layers[first](x)))

        self.add("residual", op)

    def projection(self) -> None:
        """A product with a part of a parameter, of its columns or of its rows, or with all of it several times."""
        if self.space or self.width % 2:
            return
        kind = self.random.choice(["half", "stride", "rows", "strided rows", "repeat"])
        into = {"half": 2 * self.width, "stride": 2 * self.width, "repeat": self.width // 2}.get(kind, self.width)
        name = self.layer(6, into=into)

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            weight = m.layers[name].weight
            parts = {"half": weight[:, : weight.shape[1] // 2], "stride": weight[:, ::2], "repeat": weight.repeat(1, 2)}
            parts |= {"rows": weight[: weight.shape[0] // 2], "strided rows": weight[::2]}
            return F.linear(x, parts[kind])

        self.add(f"projection by {kind}", op, 3 if "rows" in kind else 6)

    def excited(self) -> None:
        width = self.width
        first = self.layer(3)
        second = self.layer(width, into=3)
        self.add("excite", lambda m, x, k: x * torch.sigmoid(m.layers[second](F.relu(m.layers[first](x)))))

    def halved(self) -> None:
        if self.width % 2 == 0:
            self.add("glu", lambda m, x, k: (lambda p: p[0] * p[1].sigmoid())(x.chunk(2, 1)), self.width // 2)

    def grouped(self) -> None:
        groups = self.random.choice([g for g in (2, 3, self.width) if self.width % g == 0] or [1])
        if not self.space or groups == 1:
            return
        name, width = self.layer(2 * self.width, groups=groups), 2 * self.width
        self.add("groups", lambda m, x, k: m.layers[name](x), width)

    def cast(self) -> None:
        self.casts = True
        kind = self.random.choice([torch.float32, torch.float32, torch.bfloat16])
        back = self.random.random() < 0.7
        self.add("cast", lambda m, x, k: x.to(kind).to(torch.float32) if back else x.float())

    def drawn(self) -> None:
        self.draws = True
        width, like = self.width, self.random.random() < 0.3

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            if like:
                return x + torch.randn_like(x)
            return x * (1 + torch.rand(len(x), 1, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)))

        self.add(f"random {width}", op)

    def attended(self, choose: random.Random) -> None:
        """Attention over a few steps made of the value, in a way that is drawn from `choose`."""
        if self.space:
            return
        heads, name, picks = choose.choice([2, 3, 4, 6]), f"a{len(self.net.layers)}", choose.random() < 0.5
        whole = choose.random() < 0.2
        if whole and self.width % heads == 0:
            self.net.layers[name] = nn.MultiheadAttention(
                self.width, heads, batch_first=True, bias=choose.random() < 0.7
            )
        else:
            projections = choose.choice(PROJECTIONS)
            groups = choose.choice([g for g in (1, 2, 3, heads, heads) if heads % g == 0])
            self.net.layers[name] = Attention(
                self.width,
                heads,
                groups if projections == "apart" else heads,
                choose.choice([1, 2, 3, 4]),
                projections,
                written=choose.random() < 0.5,
                mask=choose.choice(MASKS),
                angles=choose.random() < 0.3,
                norms=choose.random() < 0.3,
            )

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            steps = torch.stack([x, x.sin(), x.cos(), x.tanh()], 1)
            layer = m.layers[name]
            y = layer(steps, steps, steps)[0] + steps if isinstance(layer, nn.MultiheadAttention) else layer(steps)
            return y[:, -1] if picks else y.mean(1)

        self.add("attention", op)

    def normed(self, choose: random.Random) -> None:
        """A block behind a root mean square, added to the value or not, and perhaps another norm."""
        if self.space:
            return
        name, adds, ends = f"n{len(self.net.layers)}", choose.random() < 0.7, choose.random() < 0.5
        act = choose.choice([nn.ReLU(), nn.SiLU(), nn.Sigmoid(), nn.Identity()])
        hidden, kinds = choose.choice([2, 4, 5]), [choose.choice([*NORMS, "layer"]) for _ in range(2)]
        between = choose.choice([nn.Identity(), nn.Identity(), nn.Tanh(), nn.Sigmoid(), nn.Dropout(0.2)])
        self.net.layers[name] = nn.Sequential(
            norm(self.width, kinds[0]),
            between,
            nn.Linear(self.width, hidden),
            act,
            nn.Linear(hidden, self.width, bias=choose.random() < 0.5),
        )
        self.net.layers[f"{name}e"] = norm(self.width, kinds[1]) if ends else nn.Identity()

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            y = m.layers[name](x)
            return m.layers[f"{name}e"](x + y if adds else y)

        self.add("norm", op)

    def branched(self, choose: random.Random) -> None:
        """One or two branches beside the value, each with a way of its own to end."""
        kinds = ["plain", "norm", "scale", "number", "act", "drop", "tuple", "times", "offset"]
        names: list[tuple[str, str, str]] = []
        for _ in range(choose.choice([1, 1, 2])):
            hidden, kind, name = choose.choice([2, 3, 5]), choose.choice(kinds), f"b{len(self.net.layers)}"
            made = [nn.Conv2d(a, b, 1) if self.space else nn.Linear(a, b) for a, b in pairwise_of(self.width, hidden)]
            body: list[nn.Module] = [made[0], choose.choice([nn.ReLU(), nn.SiLU(), nn.Sigmoid()]), made[1]]
            if kind == "norm":
                body.append((nn.BatchNorm2d if self.space else nn.BatchNorm1d)(self.width))
            body += {"act": [nn.ReLU()], "drop": [nn.Dropout(0.1)]}.get(kind, [])
            whole = choose.random() < 0.5
            self.net.layers[name] = Twofold(*body) if kind == "tuple" else nn.Sequential(*body)
            names.append((name, kind, "whole" if whole else "apart"))
            if kind in ("scale", "times"):
                self.net.layers[f"{name}s"] = Scaled(self.width, self.space)
        joins, outer, again = choose.random() < 0.5, choose.random() < 0.2, choose.random() < 0.1

        def branch(m: Any, name: str, kind: str, how: str, x: Tensor) -> Tensor:
            layer, y = m.layers[name], x
            if kind == "tuple":
                return layer(x)[0]  # type: ignore[no-any-return]
            for part in [layer] if how == "whole" else list(layer):
                y = part(y)
            if kind == "scale":
                y = m.layers[f"{name}s"](y)
            if kind == "times":
                y = y * m.layers[f"{name}s"](x).sigmoid()
            return 0.5 * y if kind == "number" else y + 0.1 if kind == "offset" else y

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            made = [branch(m, *about, x) for about in names]
            if again:  # once more: the same layers serve two sums
                made.append(branch(m, *names[0], x.sin()))
            out = x + sum(made[1:], made[0]) if joins else sum(made, x)
            return x + out if outer else out

        self.add(f"branch {' and '.join(kind for _, kind, _ in names)}", op)

    def by_groups(self, choose: random.Random) -> None:
        """Statistics of groups of units."""
        groups, name = choose.choice([g for g in range(1, 7) if self.width % g == 0]), f"g{len(self.net.layers)}"
        groups = (
            groups if self.space or groups < self.width else 1
        )  # one number, normed, is what rounding leaves of zero
        how, weights = choose.choice(["layer", "layer", "stored", "share", "literal", "hidden"]), choose.random() < 0.6
        if how == "layer":
            self.net.layers[name] = nn.GroupNorm(groups, self.width, affine=weights)
            self.add("group norm", lambda m, x, k: m.layers[name](x))
        else:
            self.net.layers[name] = Parts(groups, self.width, how, weights)
            self.add(f"group norm, {how}", lambda m, x, k: m.layers[name](x, k))

    def tokens(self, choose: random.Random) -> None:
        """Layers that mix a few steps made of the value, or a line of its maps: each is applied along all units."""
        steps, hidden, how = 3, choose.choice([2, 4, 5]), choose.choice(["layer", "left", "right"])
        last, act = choose.choice([1, 3]), choose.choice([F.relu, torch.sigmoid, torch.tanh])
        names = [f"t{len(self.net.layers)}", f"t{len(self.net.layers)}e"]
        for name, (a, b) in zip(names, ((steps, hidden), (hidden, 3 if self.space else last)), strict=True):
            self.net.layers[name] = nn.Linear(a, b, bias=choose.random() < 0.7)

        def mixed(layer: Any, h: Tensor) -> Tensor:  # along the last dimension but one
            if how == "layer":
                return layer(h.transpose(-1, -2)).transpose(-1, -2)  # type: ignore[no-any-return]
            return layer.weight @ h if how == "left" else (h.transpose(-1, -2) @ layer.weight.T).transpose(-1, -2)

        def op(m: Any, x: Tensor, k: Tensor) -> Tensor:
            first, second = (m.layers[name] for name in names)
            if x.ndim > 2:
                return second(act(first(x)))  # type: ignore[no-any-return]
            h = mixed(second, act(mixed(first, torch.stack([x, x.sin(), x.cos()], 1))))
            return h[:, 0] if last == 1 else h.mean(1)

        self.add(f"tokens by {how}", op)

    def flattened(self) -> None:
        if self.space:
            size, last = self.space**2, self.random.random() < 0.5
            self.space = 0
            self.add(
                "flatten",
                lambda m, x, k: (x.permute(0, 2, 3, 1) if last else x).flatten(1),
                self.width * size,
            )

    def network(self) -> Wild:
        self.plain()
        steps: list[Callable[[], None]] = [self.plain, self.plain, self.parts, self.parts, self.hidden, self.repeated]
        steps += [self.residual, self.projection, self.excited, self.halved, self.grouped, self.flattened]
        norms = random.Random(self.seed.replace("attention", "groups"))  # of its own, as that of attention below
        for _ in range(self.random.randint(1, 4)):
            if norms.random() < 0.2:
                self.by_groups(norms)
            rare = self.random.random()
            step = self.cast if rare < 0.05 else self.drawn if rare < 0.1 else self.random.choice(steps)
            step()
            if self.random.random() < 0.3:
                self.plain()
        if self.space and self.random.random() < 0.5:
            self.flattened()
        choose = random.Random(self.seed)  # of its own: other networks are drawn as before
        if choose.random() < 0.25:
            self.attended(choose)
        choose = random.Random(f"norms after {self.seed}")
        for _ in range(choose.choice([0, 0, 0, 1, 2])):
            self.normed(choose)
        choose = random.Random(f"branches after {self.seed}")
        for _ in range(choose.choice([0, 1, 1, 2]) if self.blocks else 0):
            self.branched(choose)
        choose = random.Random(f"tokens after {self.seed}")
        if choose.random() < 0.25:
            self.tokens(choose)
        name, picks = self.layer(3), self.random.random() < 0.1
        self.add("head", lambda m, x, k: m.layers[name](x).argmax(1) if picks else m.layers[name](x), 3)
        return self.net


def joined(*wheres: Callable[..., Any]) -> Any:
    """The placements of several, each once."""
    return lambda graph: list({p.name: p for where in wheres for p in where(graph)}.values())


def judged(seed: int) -> tuple[Outcome, str]:
    """Draws a network, gates it, closes gates, compacts it: how that went, and a word about it."""
    drawer = Drawer(seed)
    space = [drawer.space] * 2 if drawer.space else []
    model = settled(drawer.network(), seed)
    dtype = torch.float32 if drawer.casts or drawer.random.random() < 0.2 else torch.float64
    model.to(dtype)
    draw = torch.Generator().manual_seed(seed)

    def inputs(n: int, ones: bool) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, drawer.input, *space, generator=draw, dtype=torch.float64).to(dtype)
        return x, torch.ones(n, dtype=torch.long) if ones else torch.arange(n) % 2

    kind = drawer.random.choice(["shrinkable", "streams", "per_layer"])
    where = {"streams": l0.shrinkable(streams=True), "per_layer": l0.per_layer()}.get(kind, l0.shrinkable())
    if kind != "per_layer" and random.Random(f"parts {seed}").random() < 0.25:
        kind, where = f"{kind} in parts", l0.shrinkable(streams=kind == "streams", parts=True)
    if kind != "per_layer" and drawer.blocks:
        kind, where = f"{kind} and blocks", joined(where, l0.shrinkable(blocks=True))
    about = f"seed {seed}, {kind}, {dtype}: {' > '.join(name for name, _ in model.ops)}"
    example = inputs(2, ones=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            gated = l0.attach(model, example, where=where).eval()
    except ValueError as error:
        return "refused", f"{about}: {error}"
    return compared(gated, example, inputs(5, ones=False), seed, about, fine=dtype == torch.float64)


def compared(
    gated: l0.Gated, example: tuple[Tensor, ...], others: tuple[Tensor, ...], seed: int, about: str, fine: bool
) -> tuple[Outcome, str]:
    """Closes gates and compacts: what comes out on other inputs, and what it costs, must be the same."""
    try:
        return _compared(gated, example, others, seed, about, fine)
    except l0.graph.ClosedAxisError:
        return "nothing left", about
    except Exception as error:
        return "failed", f"{about}: {type(error).__name__}: {error}"


def _compared(
    gated: l0.Gated, example: tuple[Tensor, ...], others: tuple[Tensor, ...], seed: int, about: str, fine: bool
) -> tuple[Outcome, str]:
    numbers = np.random.default_rng(seed)
    closed = {}
    vanish = {axis.name for axis in gated.axes if axis.can_vanish}
    for name, gate in gated.named_gates():
        n, every = gate.shape.numel(), numbers.random() < (0.4 if name in vanish else 0.03)
        closed[name] = numbers.permutation(n)[: n if every else numbers.integers(0, n)].tolist()
    blocks = np.random.default_rng([seed, 1])
    closed |= {p.name: [0] for p in gated.placements if p.block is not None and blocks.random() < 0.5}
    set_gates(gated, closed, seed)
    small = l0.compact(gated)
    made = []
    with torch.no_grad():
        for model in (gated, small):
            torch.manual_seed(seed)
            made.append(model(*others))
    scale = max(1.0, float(made[0].double().abs().max()))
    worst = float((made[0].double() - made[1].double()).abs().max()) / scale
    if worst > (1e-10 if fine else 2e-3) or made[0].shape != made[1].shape:
        return "wrong", f"{about}: off by {worst:.2g}"
    counts = [(l0.params(gated, kept=True), numel(small))]
    counts.append((l0.macs(gated, kept=True), counted_macs(small, example) / len(example[0])))
    for ours, theirs in counts:
        if abs(float(ours) - theirs) > 1e-6 * theirs:
            return "wrong", f"{about}: counted {float(ours):g} for {theirs:g}"
    return "exact", about
