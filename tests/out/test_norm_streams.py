"""Residual streams that an RMSNorm reads: closed units are gone, and a copy masked by hand gives the same.

What comes in has another batch size and another length than the example.
"""

import copy
import random
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.plan import Shrunk
from ellzero.out.shrinking import carry_out, propose
from support import traced
from support.loops import Loop, driven
from support.oracles import assert_counted, assert_same, each, masked_by_hand, set_gates, settled
from support.prenorm import NORMS, PreNorm, masked, words

STREAMS = l0.shrinkable(streams=True)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def attached(model: nn.Module, x: Any = None) -> l0.Gated:
    return l0.attach(settled(model), words(2, 5) if x is None else x, where=STREAMS).eval()


def by_hand(gated: l0.Gated, z: dict[str, Tensor]) -> nn.Module:
    """The dense network with the stream, the heads and the feed-forward layers masked."""
    model: Any = gated.model
    biased = isinstance(model.norm, nn.LayerNorm)
    paths = ["norm", *(f"blocks.{k}.norm{n}" for k in range(len(model.blocks)) for n in (1, 2))]
    norms: dict[str, str | None] = {path: f"{path}.bias" if biased else None for path in paths}
    out = masked(model, z["embed"], norms | ({"head": None} if model.tied else {}))
    readers: dict[str, Any] = {name: {f"{name[: name.rindex('.')]}.down": each(1)} for name in z if ".gate" in name}
    for name in (name for name in z if name.endswith((".q", ".qkv"))):
        block = model.get_submodule(name.rpartition(".")[0])
        readers[name] = {f"{name.rpartition('.')[0]}.out": each(block.out.in_features // len(z[name]))}
    return masked_by_hand(out, z, readers)


def judged(gated: l0.Gated, closed: dict[str, Any]) -> Any:
    """Closes gates, compacts, and holds the result against the copy masked by hand and against what is counted."""
    z = set_gates(gated, closed)
    small = l0.compact(gated)
    x = words(3, 7)
    theirs = by_hand(gated, z)(x)
    assert_same(gated(x), theirs)
    assert_same(small(x), theirs)
    assert_counted(gated, small, (words(2, 5),))
    return small


KINDS = [(kind, k % 2 == 1) for k, kind in enumerate(NORMS)]  # a norm does not know what is tied


@pytest.mark.parametrize(("kind", "tied"), [KINDS[0], *(pytest.param(*k, marks=pytest.mark.slow) for k in KINDS[1:])])
def test_units_of_a_stream_go(kind: str, tied: bool) -> None:
    gated = attached(PreNorm(kind=kind, tied=tied))
    model: Any = gated.model
    small = judged(gated, {"embed": [0, 3], "blocks.0.gate": [1], "blocks.0.q": [1]})
    assert (small.embed.weight.shape, small.blocks[0].out.weight.shape) == ((9, 4), (4, 3))
    shift = 1.0 if kind == "gemma" else 0.0  # Gemma's norm multiplies by 1 + weight
    left = model.norm.weight[[1, 2, 4, 5]]
    assert_same(small.norm.weight, (left + shift) * sqrt(6 / 4) - shift)
    eps = torch.finfo(torch.float64).eps if kind == "bare" else 0.03
    found = small.norm.eps if isinstance(small.norm, nn.RMSNorm) else small.norm.variance_epsilon
    assert found == pytest.approx(eps * 6 / 4, rel=1e-14)
    assert small.embed.weight is small.head.weight if tied else small.embed.weight is not small.head.weight


class Shifted(nn.Module):
    """Adds to each word the one before; before the first there is `value`."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value, self.embed, self.norm = value, nn.Embedding(9, 6), nn.RMSNorm(6, eps=0.03)
        self.up, self.head = nn.Linear(6, 5), nn.Linear(5, 9)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + F.pad(x, (0, 0, 1, 0), value=self.value)[:, :-1]
        return self.head(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


def test_zeros_beside_a_stream_are_zeros_where_it_is_closed() -> None:
    model = settled(Shifted(None))
    gated = l0.attach(model, words(2, 5), where=STREAMS).eval()
    z = set_gates(gated, {"embed": [0, 3], "up": [1]})
    small: Any = l0.compact(gated)
    assert small.embed.weight.shape == (9, 4)
    hand = masked_by_hand(masked(model, z["embed"], {"norm": None}), z, {"up": {"head": lambda units: units}})
    assert_same(small(words(3, 7)), hand(words(3, 7)))
    frozen = {axis.size: axis.frozen for axis in l0.attach(settled(Shifted(1.0)), words(2, 5), where=STREAMS).axes}
    assert "not zero where a unit is closed" in str(frozen[6])


def drawn(seed: int) -> PreNorm:
    """A random pre-norm network."""
    draw = random.Random(seed)
    fused, groups = draw.random() < 0.5, draw.choice([1, 2])
    return PreNorm(
        draw.choice([4, 5, 8]),
        draw.choice([*NORMS, "layer", "layer"]),
        blocks=draw.choice([1, 2]),
        heads=2 if fused else draw.choice([2, 4]),
        groups=2 if fused else groups,
        fused=fused,
        bias=draw.random() < 0.5,
        tied=draw.random() < 0.5,
        placed=draw.choice(["parameter", "embedding", "nowhere"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 8, 9])  # every norm, one block and two, fused and not, tied and not
def test_random_networks(seed: int) -> None:
    model = settled(drawn(seed))
    x, other = words(2, 5), words(1, 8)
    if isinstance(model.norm, nn.LayerNorm):
        model, dense = l0.centred(model, x), model
        model.tied = False  # type: ignore[assignment]
        assert_same(model(other), dense(other))
    gated = l0.attach(model, x, where=STREAMS).eval()
    draw = random.Random(seed)
    closed = {
        name: draw.sample(range(n), draw.randrange(n)) for name, gate in gated.named_gates() for n in (gate.shape[0],)
    }
    small = judged(gated, closed)
    assert small.embed.weight.shape[1] == gated.model.embed.weight.shape[1] - len(closed["embed"])


@pytest.mark.slow
def test_a_norm_that_does_not_follow_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = settled(PreNorm())
    monkeypatch.setattr(Shrunk, "scaled", lambda _, weight: weight)
    gated = l0.attach(model, words(2, 5), where=STREAMS)
    assert "gives another output" in {a.name: a.frozen or "" for a in gated.axes}["embed"]
    monkeypatch.undo()
    gated = attached(model)
    set_gates(gated, {"embed": [2]})
    monkeypatch.setattr("ellzero.graph.plan._set_eps", lambda *_: None)
    with pytest.raises(RuntimeError, match="differs from the gated one"):
        l0.compact(gated)


def test_expected_cost_is_that_of_independent_units() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.RMSNorm(4), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    gated = l0.attach(model, torch.tensor([[1, 2]]), where=STREAMS)
    p = {name: gate.prob_open().detach() for name, gate in gated.named_gates()}
    k, h = (float(p[name].sum()) for name in ("0", "2"))
    assert float(l0.params(gated).detach()) == pytest.approx(5 * k + k + (k * h + h) + (2 * h + 2), rel=1e-6)
    assert float(l0.macs(gated).detach()) == pytest.approx(2 * (k * h + 2 * h), rel=1e-6)
    assert float(l0.l0_norm(gated).detach()) == pytest.approx(
        5 * k + 2 * h, rel=1e-6
    )  # what a closed gate sets to zero


# ---------------------------------------------------------------- what is refused


class Written(nn.Module):
    """A stream behind a norm that is written out, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.weight = 1e-3, nn.Parameter(torch.ones(8))
        self.embed, self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(5, 8), nn.Linear(8, 3)

    def norm(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.norm(h + self.down(self.up(self.norm(h)).relu())))  # type: ignore[no-any-return]


class Two(nn.Module):
    """Two such streams, whose eps are one number, as of an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Written(), Written()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.flip(-1))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_streams_with_one_eps_lose_as_many_units_as_each_will() -> None:
    model: Any = settled(Two())
    gated = l0.attach(model, draw(2, 4), where=STREAMS).eval()
    assert {a.name for a in gated.axes if a.stream and a.frozen is None} == {"a.embed", "b.embed"}
    z = set_gates(gated, {"a.embed": [0, 3, 4], "b.embed": [1, 2, 5, 6, 7], "a.up": [1]})
    hand, small = copy.deepcopy(model), l0.compact(gated)
    with torch.no_grad():
        for name in "ab":
            part = hand.get_submodule(name)
            for layer in (part.embed, part.down):
                layer.weight.mul_(z[f"{name}.embed"][:, None])
                layer.bias.mul_(z[f"{name}.embed"])
            part.down.weight.mul_(z[f"{name}.up"])
    assert [small.get_submodule(name).embed.out_features for name in "ab"] == [5, 3]
    assert_same(gated(draw(3, 4)), hand(draw(3, 4)))
    assert_same(small(draw(3, 4)), hand(draw(3, 4)))


class Odd(nn.Module):
    """A feed-forward block on a stream, with something that does not follow."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.eps = what, 0.01
        self.embed, self.up, self.down, self.head = (
            nn.Embedding(9, 6),
            nn.Linear(6, 4),
            nn.Linear(4, 6),
            nn.Linear(6, 9),
        )
        self.weight, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.randn(6))

    def normed(self, x: Tensor) -> Tensor:
        match self.what:
            case "literal":
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight
            case "literal in one":
                return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-3)
            case "literal like it":
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01) * self.weight
            case "no weight":
                return F.rms_norm(x, (x.shape[-1],), None, self.eps)
            case "another mean":
                return x * torch.rsqrt(self.down(F.relu(self.up(x))).pow(2).mean(-1, keepdim=True) + self.eps)
            case "used twice":
                y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
                return y * self.weight + y
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if self.what == "buffer":
            x = x + self.table
        if self.what == "constant":
            x = x + 1.0
        h = F.relu(self.up(self.normed(x)))
        if self.what == "one eps for two":
            h = F.rms_norm(h, (h.shape[-1],), self.second, self.eps)
        x = x + self.down(h)
        y = self.normed(x)
        return self.head(torch.sigmoid(y) if self.what == "sigmoid" else y)


REFUSED = {
    "literal": "keeps no `eps`",
    "literal in one": "keeps no `eps`",
    "literal like it": "keeps no `eps`",
    "no weight": "has no weight of its own",
    "another mean": "mixes its units",
    "used twice": "mixes its units",
    "buffer": "not zero where a unit is closed",
    "constant": "not zero where a unit is closed",
    "sigmoid": "not zero where a unit is closed",
    "one eps for two": "several norms go by `eps`",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_follow_freezes_the_stream(what: str) -> None:
    if what == "one eps for two":  # then the hidden layer cannot go either
        with pytest.raises(ValueError, match=REFUSED[what]):
            attached(Odd(what))
    else:
        assert REFUSED[what] in next(a.frozen or "" for a in attached(Odd(what)).axes if a.size == 6)


@pytest.mark.slow
def test_a_norm_of_each_head_leaves_heads_whole() -> None:
    model = PreNorm()
    model.blocks[0].of_head = nn.RMSNorm(3)
    gated = attached(model)
    found = {name: gate.shape[0] for name, gate in gated.named_gates()}
    assert found == {"embed": 6, "blocks.0.q": 2, "blocks.0.gate": 5}
    small = judged(gated, {"embed": [5], "blocks.0.q": [0]})
    assert (small.blocks[0].of_head.weight.shape, small.blocks[0].of_head.eps) == ((3,), None)


def test_gates_of_single_layers_leave_the_stream_whole() -> None:
    """A unit that no layer reads any more is still in the norm's mean."""
    model = settled(nn.Sequential(nn.Linear(3, 6), nn.RMSNorm(6), nn.Linear(6, 4)))
    gated = l0.attach(model, torch.zeros(2, 3).double(), where=l0.per_layer(only="2")).eval()
    z = set_gates(gated, {"2": [0, 1, 4]})
    small: Any = l0.compact(gated)
    assert (small[0].out_features, small[2].in_features) == (6, 3)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert_same(small(x), masked_by_hand(model, z, {"2": {"2": each(1)}})(x))


# ---------------------------------------------------------------- while training, and on disk


@pytest.mark.slow
def test_weight_and_eps_follow_what_is_taken_out_of_a_live_model() -> None:
    gated = attached(PreNorm(kind="gemma"))
    model: Any = gated.model
    before = copy.deepcopy(model)
    optimizer = torch.optim.Adam(gated.param_groups(lr=0.0), lr=0.0)
    gated(words(2, 5)).square().sum().backward()
    optimizer.step()
    moments = [optimizer.state[model.norm.weight][key].clone() for key in ("exp_avg", "exp_avg_sq")]
    average = {name: 0.5 * p.detach().clone() for name, p in gated.named_parameters()}
    for closed in ([1], [1, 4]):  # 5 of 6, then 4
        set_gates(gated, {"embed": closed})
        usual = gated(words(3, 7))
        plan = propose(gated, ~gated.opens().numpy())
        carry_out(gated, gated, plan, optimizer, average, correction=0.5)
        assert_same(gated(words(3, 7)), usual)
    left, scale = [0, 2, 3, 5], sqrt(6 / 4)
    assert_same(model.norm.weight, (1 + before.norm.weight[left]) * scale - 1)
    assert_same(average["model.norm.weight"], 0.5 * model.norm.weight)
    assert model.norm.variance_epsilon == pytest.approx(0.03 * 6 / 4, rel=1e-14)
    state = optimizer.state[model.norm.weight]
    assert_same(state["exp_avg"], moments[0][left] / scale)
    assert_same(state["exp_avg_sq"], moments[1][left] / scale**2)
    set_gates(gated, {"embed": [0, 1, 4], "blocks.0.gate": [2]})
    small: Any = l0.compact(gated)
    assert small.norm.weight.shape == (3,)
    assert_same(small(words(3, 7)), gated(words(3, 7)))
    whole = gated.expanded()
    found: Any = whole.model
    assert_same(found.norm.weight[left], before.norm.weight[left])
    assert found.norm.variance_epsilon == pytest.approx(0.03, rel=1e-14)
    assert_same(whole(words(3, 7)), gated(words(3, 7)))


def test_an_average_that_begins_when_units_go_begins_at_zero() -> None:
    """It has taken in nothing yet, so that there is nothing to divide by."""
    gated = attached(PreNorm(kind="gemma"))
    average = {name: torch.zeros_like(p) for name, p in gated.named_parameters()}
    set_gates(gated, {"embed": [1]})
    plan = propose(gated, ~gated.opens().numpy())
    carry_out(gated, gated, plan, torch.optim.Adam(gated.param_groups(lr=0.0)), average, correction=0.0)
    assert {name: tuple(value.shape) for name, value in average.items()} == {
        name: tuple(p.shape) for name, p in gated.named_parameters()
    }
    assert all(value.eq(0).all() for value in average.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "bare", "llama", "layer"])
def test_files_hold_the_eps(kind: str, tmp_path: Path) -> None:
    def fresh() -> nn.Module:
        model = PreNorm(kind=kind)
        return l0.centred(model, words(2, 5)) if kind == "layer" else model

    gated = l0.attach(settled(fresh()), words(2, 5), where=STREAMS).eval()
    set_gates(gated, {"embed": [0, 1, 3]})
    small: Any = l0.compact(gated)
    l0.save(small, tmp_path / "small.safetensors")
    again: Any = l0.load(fresh().double(), tmp_path / "small.safetensors").eval()
    assert torch.equal(again(words(3, 7)), small(words(3, 7)))
    dense = l0.load(fresh().double(), _saved(l0.fold(gated), tmp_path)).eval()  # nothing to follow
    assert_same(dense(words(3, 7)), gated(words(3, 7)))
    if kind == "bare":  # as in torch's norm with an eps of its own
        return
    once_more = l0.attach(again, words(2, 5), where=STREAMS).eval()  # and it can shrink further
    set_gates(once_more, {"embed": [1]})
    assert_same(l0.compact(once_more)(words(3, 7)), once_more(words(3, 7)))


def _saved(model: nn.Module, folder: Path) -> Path:
    l0.save(model, folder / "dense.safetensors")
    return folder / "dense.safetensors"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gates settle after")
def test_a_budget_takes_units_out_of_a_stream_and_is_taken_up_again() -> None:
    def begun() -> Loop:
        torch.manual_seed(0)
        gated = traced.attached(PreNorm(kind="llama", fused=True), words(2, 5), where=STREAMS)
        adam = torch.optim.AdamW(gated.param_groups(lr=1e-2))

        def loss(step: int) -> Tensor:
            text = words(4, step % 5 + 3)
            return F.cross_entropy(gated(text).flatten(0, 1), text.flatten())

        return driven(gated, adam, loss, macs=0.4, steps=12, learning=0.5, ema=0.5)

    loop = begun()
    loop.train(range(9))
    state = loop.state()
    loop.train(range(9, 12))
    small: Any = loop.budget.finish()
    left = small.norm.weight.shape[0]
    assert left < 6
    assert small.norm.variance_epsilon == pytest.approx(0.03 * 6 / left, rel=1e-14)
    other = begun()
    other.take_up(state)
    other.train(range(9, 12))
    again: Any = other.budget.finish()
    assert torch.equal(again.eval()(words(3, 7)), small.eval()(words(3, 7)))
