"""Attention heads: closed ones are gone from the projections and the network gives what a copy masked by hand gives.

What comes in has another batch size and another length than the example.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.plan import make_plan
from support import traced
from support.attention import MASKS, PROJECTIONS, Attention
from support.loops import Loop, driven
from support.oracles import (
    HIDDEN,
    assert_counted,
    assert_same,
    counted_macs,
    each,
    masked_by_hand,
    numel,
    set_gates,
    settled,
)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# Each way to project with attention that is written and with torch's own; masks and angles go round, out of step.
KINDS = [
    pytest.param(p, written, mask, angles, id=f"{p}-{'written' if written else 'one'}-{mask}-{angles}")
    for k, (p, written) in enumerate(itertools.product(PROJECTIONS, (False, True)))
    for mask, angles in [(MASKS[(k + k // 4) % 4], (k + k // 2) % 2 == 1)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("projections", "written", "mask", "angles"), KINDS)
def test_heads_that_are_closed_go(projections: str, written: bool, mask: str, angles: bool) -> None:
    model = settled(Attention(projections=projections, written=written, mask=mask, angles=angles, norms=angles))
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    name = "q" if projections == "apart" else "qkv"
    assert {found: gate.shape.numel() for found, gate in gated.named_gates()} == {name: 4}
    z = set_gates(gated, {name: [0, 2]})
    small: Any = l0.compact(gated)
    assert (small.num_heads, small.out.in_features) == (2, 6)
    assert numel(model) - numel(small) == 2 * 3 * (8 * 4 + (2 if projections == "apart" else 3))
    x = draw(3, 7, 8)
    theirs = masked_by_hand(model, z, {name: {"out": each(3)}})(x)
    assert_same(gated(x), theirs)
    assert_same(small(x), theirs)
    assert_counted(gated, small, (draw(2, 5, 8),))


def test_as_many_examples_and_places_as_heads_hide_nothing() -> None:
    model = settled(Attention(projections="unbind"))
    gated = l0.attach(model, draw(4, 4, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"qkv": [0, 2]})
    small: Any = l0.compact(gated)
    assert small.num_heads == 2
    assert_same(small(draw(3, 7, 8)), masked_by_hand(model, z, {"qkv": {"out": each(3)}})(draw(3, 7, 8)))


def test_written_keys_that_serve_all_heads_stay_and_heads_go() -> None:
    model = settled(Attention(heads=6, groups=1, written=True))
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"q": [0, 2, 3]})
    small: Any = l0.compact(gated)
    assert (small.num_heads, small.num_kv_heads) == (3, 1)
    assert_same(small(draw(3, 7, 8)), masked_by_hand(model, z, {"q": {"out": each(3)}})(draw(3, 7, 8)))


class Latent(nn.Module):
    """Keys are put together in place, of what each head has and of what all share, turned as complex numbers: MLA."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.shared, self.out = nn.Linear(8, 24), nn.Linear(8, 28), nn.Linear(8, 2), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        sizes = ((self.q, 6), (self.kv, 7), (self.shared, 2))
        q, kv, r = (layer(x).view(b, t, -1, n).transpose(1, 2) for layer, n in sizes)
        angles = torch.arange(t).to(x)
        turn = torch.complex(angles.cos(), angles.sin())[:, None]
        pairs = (torch.view_as_complex(a.unflatten(-1, (-1, 2))) for a in (q[..., 4:], r))
        turned, shared = (torch.view_as_real(a * turn).flatten(3) for a in pairs)
        k = kv.new_empty(*kv.shape[:-1], 6)
        k[..., :4].copy_(kv[..., :4])
        k[..., 4:].copy_(shared.expand(-1, q.shape[1], -1, -1))
        y = F.scaled_dot_product_attention(torch.cat([q[..., :4], turned], -1), k, kv[..., 4:])
        return x + self.out(y.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("closed", [[1], [0, 3], [0, 1, 2]], ids=len)
def test_heads_of_keys_that_are_put_together_in_place(closed: list[int]) -> None:
    model = settled(Latent())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"q": closed})
    small: Any = l0.compact(gated)
    assert (small.q.out_features, small.kv.out_features) == (6 * (4 - len(closed)), 7 * (4 - len(closed)))
    hand = masked_by_hand(model, z, {"q": {"out": each(3)}})
    for x in (draw(3, 7, 8), draw(1, 4, 8)):
        assert_same(gated(x), hand(x))
        assert_same(small(x), hand(x))
    assert_counted(gated, small, (draw(2, 5, 8),))


class Drawn(nn.Module):
    """Something is drawn for each unit, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * h.new_empty(h.shape).bernoulli_(0.5))  # type: ignore[no-any-return]


def test_what_is_drawn_into_empty_room_freezes_it() -> None:
    with pytest.raises(ValueError, match="`a`: `bernoulli` draws a number for each of its units, in evaluation too"):
        l0.attach(Drawn(), torch.randn(2, 8), where=HIDDEN)


class Lone(Attention):
    """One head of keys and values serves all queries; pairs of neighbours are turned."""

    def turned(self, a: Tensor) -> Tensor:
        pairs = torch.stack([-a[..., 1::2], a[..., ::2]], -1).flatten(-2)
        angle = torch.arange(a.shape[-2]).to(a)[:, None]
        return a * angle.cos() + pairs * angle.sin()

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = self.made(x, x)
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def test_queries_that_share_a_head_of_keys_go_one_by_one() -> None:
    model = settled(Lone(groups=1, size=4))
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"q": [0, 3]})
    small: Any = l0.compact(gated)
    assert (small.num_heads, small.num_kv_heads, small.k.out_features) == (2, 1, 4)
    x = draw(3, 7, 8)
    assert_same(small(x), masked_by_hand(model, z, {"q": {"out": each(4)}})(x))
    assert_counted(gated, small, (draw(2, 5, 8),))


def test_keys_and_values_from_elsewhere() -> None:
    model = settled(Attention(crossed=True))
    gated = l0.attach(model, (draw(2, 5, 8), draw(2, 3, 8)), where=HIDDEN).eval()
    z = set_gates(gated, {"q": [3]})
    x, other = draw(3, 2, 8), draw(3, 6, 8)
    small = l0.compact(gated)
    assert_same(small(x, other), masked_by_hand(model, z, {"q": {"out": each(3)}})(x, other))
    assert_counted(gated, small, (draw(2, 5, 8), draw(2, 3, 8)))


def test_all_heads_may_close_where_a_residual_carries_on() -> None:
    model = settled(Attention())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    set_gates(gated, {"q": range(4)})
    x = draw(3, 7, 8)
    small = l0.compact(gated)
    assert_same(small(x), x + model.out.bias)
    assert_same(small(x), gated(x))


class Counting(nn.Module):
    """Attention that counts its heads by itself, and would run without any."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_torchs_own_attention_never_gets_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it divides by their number, and the process ends. So one stays."""
    heads, own = [], F.scaled_dot_product_attention

    def counted(q: Tensor, *others: Tensor) -> Tensor:
        heads.append(q.shape[1])
        return own(q, *others)

    gated = l0.attach(settled(Counting()), draw(2, 5, 8), where=HIDDEN).eval()
    set_gates(gated, {"q": range(4)})
    small, x = l0.compact(gated), draw(3, 7, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    assert_same(small(x), x)
    assert heads == [1]


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 3, 4])
def test_sizes_that_are_equal_by_chance_are_told_apart(heads: int) -> None:
    """As many heads as dimensions of one, as many heads of keys as queries for each."""
    model = settled(Attention(heads=heads * heads, groups=heads, size=heads, written=True))
    gated = l0.attach(model, draw(2, heads, 8), where=HIDDEN).eval()
    each_of = heads * heads // dict(gated.named_gates())["q"].shape.numel()  # two queries go with their keys alone
    assert each_of == (2 if heads == 2 else 1)
    z = set_gates(gated, {"q": range(heads // each_of)})
    small: Any = l0.compact(gated)
    assert (small.num_kv_heads, small.head_dim) == (heads - 1, heads)
    x = draw(3, 5, 8)
    assert_same(small(x), masked_by_hand(model, z, {"q": {"out": each(heads * each_of)}})(x))


class Odd(nn.Module):
    """Numbers whose names tell nothing: only how the forward uses them does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = 3
        self.q, self.out = nn.Linear(8, 9), nn.Linear(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.first, self.second).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def test_how_a_number_is_used_tells_what_it_means() -> None:
    gated = l0.attach(settled(Odd()), draw(2, 5, 8), where=HIDDEN).eval()
    set_gates(gated, {"q": [1]})
    small: Any = l0.compact(gated)
    assert (small.first, small.second) == (2, 3)
    assert_same(small(draw(3, 4, 8)), gated(draw(3, 4, 8)))


def test_a_stack_of_blocks_has_heads_of_its_own_in_each() -> None:
    model = settled(nn.Sequential(Attention(), nn.LayerNorm(8), Attention(projections="chunk", written=True)))
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"0.q": [1, 2, 3], "2.qkv": [0]})
    small: Any = l0.compact(gated)
    assert (small[0].num_heads, small[2].num_heads) == (1, 3)
    x = draw(1, 6, 8)
    readers = {"0.q": {"0.out": each(3)}, "2.qkv": {"2.out": each(3)}}
    assert_same(small(x), masked_by_hand(model, z, readers)(x))
    text = l0.report(gated)
    assert "2.qkv" in str(text)


def test_a_removal_that_is_undone_gives_the_number_of_heads_back() -> None:
    model = settled(Attention())
    graph = l0.attach(model, draw(2, 5, 8), where=HIDDEN).graph
    (axis,) = (k for k, a in enumerate(graph.axes) if a.frozen is None)
    alive = np.ones(graph.offsets[-1], dtype=bool)
    alive[graph.offsets[axis] + 1] = False
    plan = make_plan(graph, alive)
    plan.apply(model)
    assert (model.num_heads, model.inner, model.head_dim) == (3, 9, 3)
    plan.undo(model, graph.shapes)
    assert (model.num_heads, model.inner, model.q.out_features) == (4, 12, 12)


class Trained(nn.Module):
    """Attention as one writes it and torch's own, without dropout: noise must not depend on the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Attention(written=True)
        self.first.drop.p = 0.0
        self.second = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + self.second(h, h, h, need_weights=False)[0]


def budgeted(**options: Any) -> Loop:
    gated = traced.attached(Trained().double(), draw(2, 5, 8), where=HIDDEN).train()
    sgd = torch.optim.SGD(gated.param_groups(lr=1e-2), momentum=0.9)
    x, y = draw(4, 5, 8), draw(4, 5, 8).roll(1, 1)
    own = {"macs": 0.6, "steps": 40, "learning": 0.5, "ema": 0.9}
    return driven(gated, sgd, lambda _: (gated(x) - y).square().mean(), **own, **options)


@pytest.mark.slow
def test_heads_leave_the_live_network_and_the_result_is_that_of_masks() -> None:
    networks: list[Any] = []
    for shrink in (True, False):
        loop = budgeted(shrink=shrink)
        loop.train(range(40))
        assert (loop.budget.masked is None) == shrink
        networks.append(loop.budget.finish())
    small, masked = networks
    heads = [(n.first.num_heads, n.second.num_heads) for n in networks]
    assert heads[0] == heads[1] < (4, 4)
    assert_same(small(draw(3, 7, 8)), masked(draw(3, 7, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [12, 31], ids=["learning", "tuning"])
def test_a_loop_that_takes_heads_away_goes_on_bit_for_bit(stop: int) -> None:
    loop = budgeted()
    loop.train(range(stop))
    state = loop.state()
    loop.train(range(stop, 40))
    other = budgeted()
    other.take_up(state)
    other.train(range(stop, 40))
    ours, theirs = loop.budget.finish().state_dict(), other.budget.finish().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# ---------------------------------------------------------------- of Transformers

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 12}
ENDS = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
WORDS = ENDS | {"pad_token_id": 0}  # GPT-2 would look for it in the words, and be exported, which takes seconds
CODER = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))}
MODELS: dict[str, dict[str, Any]] = {
    "Bert": SIZES | WORDS,
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_inner": 12, "use_cache": False} | ENDS,
    "Llama": SIZES | WORDS | {"num_key_value_heads": 2, "use_cache": False},
    "ViT": SIZES | {"image_size": 8, "patch_size": 4},
    "Bart": {"d_model": 16, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "use_cache": False} | CODER | WORDS,
    "T5": {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 2,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "use_cache": False,
    }
    | WORDS,
}
# How it is computed, and the heads that can go; T5 has one set of biases for all layers of a stack.
HEADS = {
    "Bert": ("eager", [4]),
    "GPT2": ("sdpa", [4]),
    "Llama": ("sdpa", [4]),
    "ViT": ("eager", [4]),
    "Bart": ("sdpa", [4, 4, 4]),
    "T5": ("eager", [4, 4, 4]),
}


@pytest.mark.slow  # importing transformers takes longer than all else here
@pytest.mark.filterwarnings("ignore:with a batch of 1")
@pytest.mark.parametrize("kind", MODELS)
def test_heads_of_transformers_are_gated_and_exact(kind: str) -> None:
    """Also with other batch sizes and lengths; MACs are those that torch counts."""
    transformers = pytest.importorskip("transformers")
    how, expected = HEADS[kind]
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind], attn_implementation=how)
    model = settled(getattr(transformers, f"{kind}Model")(config))
    example, others = (torch.arange(10).reshape(2, 5), torch.arange(3, 18).reshape(3, 5)[:, :4])
    name = "pixel_values" if kind == "ViT" else "input_ids"
    example, others = (draw(2, 3, 8, 8), draw(3, 3, 8, 8)) if kind == "ViT" else (example, others)
    call, calls = {name: example}, {name: others}
    if kind in ("Bart", "T5"):
        call["decoder_input_ids"], calls["decoder_input_ids"] = example[:, :3], others
    gated = l0.attach(model, call, where=HIDDEN).eval()
    sizes = {found: gate.shape.numel() for found, gate in gated.named_gates()}
    heads = {found: size for found, size in sizes.items() if size != 12}
    assert all("att" in found.lower() for found in heads)
    assert list(heads.values()) == expected
    set_gates(gated, {found: [1] if found in heads else [0, 5, 9] for found in sizes})
    small = l0.compact(gated)
    assert_same(gated(**calls).last_hidden_state, small(**calls).last_hidden_state)
    assert float(l0.params(gated, kept=True)) == numel(small) < numel(model)
    kept = counted_macs(lambda: small(**call), []) / 2
    assert float(l0.macs(gated, kept=True)) == pytest.approx(kept, rel=1e-12)


# ---------------------------------------------------------------- refused


class Literal(Attention):
    """The width of the stream cut by the number of heads, as many write it: right for the dense network alone."""

    def made(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, c = x.shape
        q, k, v = (
            f(x).view(b, t, self.num_heads, c // self.num_heads).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return q, k, v


class Sloped(Attention):
    """A slope for each head that no parameter holds, as in ALiBi."""

    def masked(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[-2]).to(q)
        return -places * 2.0 ** -torch.arange(1, q.shape[1] + 1).to(q)[:, None, None]


class Shown(Attention):
    """Gives the weights of each head out."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        q, k, v = self.made(x, x)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(*x.shape[:2], -1)), weights


class Drawing(Attention):
    """Drops weights in evaluation too."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = F.scaled_dot_product_attention(*self.made(x, x), dropout_p=0.1)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Talking(Attention):
    """Heads that are mixed with each other."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = self.made(x, x)
        scores = q @ k.transpose(-2, -1)
        y = (scores - scores.mean(1, keepdim=True)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "why"),
    [
        (Literal, 2, "`q`: the model does not run with a unit of it removed"),
        (Sloped, 3, "`q`: it meets the output of `.*could follow in a buffer of it"),
        (Shown, 3, "`q`: it is the model's output"),
        (Drawing, 3, "`q`: .*draws a number for each of its units"),
        (Talking, 3, "`q`: `mean` mixes its units"),
    ],
)
def test_what_cannot_go_is_refused(kind: type[Attention], size: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        l0.attach(settled(kind(size=size)), draw(2, 5, 8), where=HIDDEN)
