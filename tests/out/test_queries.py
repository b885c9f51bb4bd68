"""Grouped-query attention: queries go one by one, as many of each head of keys that stays, and a head of keys goes when
all its queries have gone. Against a copy masked by hand, and against what the author counts.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.axes import Served
from ellzero.graph.plan import level
from support.attention import Attention
from support.oracles import HIDDEN, assert_counted, assert_same, each, masked_by_hand, scattered, set_gates, settled

# How attention is computed; how many queries a head of keys keeps at least: one that repeats takes another way for one.
LEAST = {"one": 1, "written": 2}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@functools.cache
def made(kind: str, heads: int = 8, groups: int = 2) -> tuple[Any, l0.Gated]:
    model = settled(Attention(heads=heads, groups=groups, written=kind == "written", angles=True, norms=True))
    return model, l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()


def left(closed: list[int], rows: int, least: int) -> tuple[int, int]:
    """How many heads of queries and of keys stay of 8, by hand."""
    there = [sum(q not in closed for q in range(k * 8 // rows, (k + 1) * 8 // rows)) for k in range(rows)]
    keys = sum(n > 0 for n in there)
    return keys * max(least, *there), keys


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    [[0], [3, 4], [0, 1, 2, 3], [0, 1, 2, 4, 5], [1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7]],
    ids=lambda c: "".join(map(str, c)),
)
@pytest.mark.parametrize("kind", LEAST)
def test_queries_go_one_by_one_and_keys_with_the_last_of_theirs(kind: str, closed: list[int]) -> None:
    model, gated = made(kind)
    z = set_gates(gated, {"q": closed})
    small: Any = l0.compact(gated)
    assert (small.num_heads, small.num_kv_heads) == left(closed, 2, LEAST[kind])
    assert (small.q.out_features, small.k.out_features) == (3 * small.num_heads, 3 * small.num_kv_heads)
    x = draw(3, 7, 8)
    theirs = masked_by_hand(model, z, {"q": {"out": each(3)}})(x)
    assert_same(gated(x), theirs)
    assert_same(small(x), theirs)
    assert_counted(gated, small, (draw(2, 5, 8),))


class Fused(nn.Module):
    """Queries, keys and values in one weight, cut by numbers that the module keeps, or by one in the code."""

    def __init__(self, literal: bool = False) -> None:
        super().__init__()
        self.n_head, self.n_query_groups, self.head_size, self.literal = 8, 2, 3, literal
        self.attn, self.proj = nn.Linear(8, 36), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.n_head * self.head_size, self.n_query_groups * self.head_size
        q, k, v = self.attn(x).split([24 if self.literal else inner, outer, outer], dim=-1)
        q = q.view(*x.shape[:2], self.n_head, self.head_size).transpose(1, 2)
        k, v = (a.view(*x.shape[:2], self.n_query_groups, self.head_size).transpose(1, 2) for a in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).reshape(*x.shape[:2], inner))  # type: ignore[no-any-return]


@pytest.mark.parametrize("closed", [[0, 5], [0, 1, 2, 3], [1, 2, 3, 5, 6, 7]], ids=["two", "a head", "all but two"])
def test_queries_that_lie_in_one_weight_with_their_keys(closed: list[int]) -> None:
    model = settled(Fused())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"attn": closed})
    small: Any = l0.compact(gated)
    assert (small.n_head, small.n_query_groups) == left(closed, 2, 1)
    x = draw(3, 7, 8)
    assert_same(small(x), masked_by_hand(model, z, {"attn": {"proj": each(3)}})(x))
    assert_counted(gated, small, (draw(2, 5, 8),))


class Uneven(nn.Module):
    """Two heads of keys and four of values serve eight of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.keys, self.values = 8, 2, 4
        self.q, self.k, self.v, self.out = (nn.Linear(*sizes) for sizes in ((8, 24), (8, 6), (8, 12), (24, 8)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], n, 3).transpose(1, 2).repeat_interleave(self.heads // n, 1)
            for layer, n in ((self.q, self.heads), (self.k, self.keys), (self.v, self.values))
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], 3 * self.heads))  # type: ignore[no-any-return]


def test_where_keys_and_values_serve_other_numbers_of_queries_all_go_at_once() -> None:
    model = settled(Uneven())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"q": [1]})
    small: Any = l0.compact(gated)
    assert (small.heads, small.keys, small.values) == (4, 1, 2)
    assert_same(small(draw(3, 7, 8)), masked_by_hand(model, z, {"q": {"out": each(12)}})(draw(3, 7, 8)))


class Lone(nn.Module):
    """One head of keys for all, which is repeated where there is a mask alone."""

    def __init__(self) -> None:
        super().__init__()
        self.n_rep, self.size = 4, 3
        self.q, self.kv, self.out = nn.Linear(8, 12), nn.Linear(8, 6), nn.Linear(12, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, (k, v) = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2), self.kv(x).unsqueeze(1).chunk(2, -1)
        if mask is not None:
            k, v = (a.expand(-1, self.n_rep, -1, -1) for a in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_lone_head_of_keys_serves_what_is_left_also_where_the_example_does_not_show_it() -> None:
    model = settled(Lone())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"q": [0, 3]})
    small: Any = l0.compact(gated)
    assert small.n_rep == 2
    hand = masked_by_hand(model, z, {"q": {"out": each(3)}})
    for mask in (None, draw(3, 1, 7, 7)):
        assert_same(small(draw(3, 7, 8), mask), hand(draw(3, 7, 8), mask))


class Twice(nn.Module):
    """Two layers with a lone head of keys each, on one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Lone(), Lone()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (8,)))
        return x


def test_one_query_of_a_lone_head_of_keys_may_be_left_in_each_layer() -> None:
    model = settled(Twice())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    for closed in ([0, 1, 3], [1, 2, 3]), ([2], [0, 1, 2]), ([0, 2], [1, 3]):
        z = set_gates(gated, {f"layers.{k}.q": queries for k, queries in enumerate(closed)})
        small: Any = l0.compact(gated)
        assert [layer.q.out_features for layer in small.layers] == [3 * (4 - len(queries)) for queries in closed]
        hand = masked_by_hand(model, z, {f"layers.{k}.q": {f"layers.{k}.out": each(3)} for k in range(2)})
        assert_same(small(draw(3, 7, 8)), hand(draw(3, 7, 8)))


def _repeated(m: Any, k: Tensor, q: Tensor) -> Tensor:
    """As models of Hugging Face do it: nothing is done where there is nothing to repeat."""
    b, _, t, d = k.shape
    return k if m.heads == 1 else k[:, :, None].expand(b, 1, m.heads, t, d).reshape(b, m.heads, t, d)


# How a lone head of keys meets all queries, and how many of these stay at least.
WAYS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], int]] = {
    "broadcast": (lambda m, k, q: k, 1),
    "expand": (lambda m, k, q: k.expand(-1, m.heads, -1, -1), 1),
    "expand_as": (lambda m, k, q: k.expand_as(q), 1),
    "repeat": (lambda m, k, q: k.repeat(1, m.heads, 1, 1), 1),
    "repeat_interleave": (lambda m, k, q: k.repeat_interleave(m.heads, 1), 1),
    "repeat_kv": (_repeated, 2),
}


class Shared(nn.Module):
    """A lone head of keys and of values, which the forward repeats by itself."""

    def __init__(self, way: str, angles: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.way, self.angles, self.heads = way, angles, 5
        self.q, self.k, self.v, self.out = nn.Linear(8, 20), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(20, 8)
        self.norm = nn.RMSNorm(20) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.norm(self.q(x)).view(b, t, self.heads, 4).transpose(1, 2)
        k, v = (layer(x).view(b, t, 1, 4).transpose(1, 2) for layer in (self.k, self.v))
        if self.angles:
            angles = (torch.arange(t).to(x)[:, None] * torch.arange(1, 3).to(x)).repeat(1, 2)
            q, k = (a * angles.cos() + torch.cat([-a[..., 2:], a[..., :2]], -1) * angles.sin() for a in (q, k))
        k, v = (WAYS[self.way][0](self, a, q) for a in (k, v))
        y = (q @ k.transpose(2, 3)).softmax(-1) @ v if self.angles else F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(b, t, self.heads * 4))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("angles", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_queries_of_a_lone_head_of_keys_that_the_forward_repeats(way: str, angles: bool) -> None:
    model = settled(Shared(way, angles))
    gated = l0.attach(model, draw(2, 6, 8), where=HIDDEN).eval()
    for closed in ([0], [1, 3], [0, 1, 2, 4], [1, 2, 3, 4]):
        z = set_gates(gated, {"q": closed})
        small, hand = l0.compact(gated), masked_by_hand(model, z, {"q": {"out": each(4)}})
        assert small.heads == max(5 - len(closed), WAYS[way][1])
        for x in (draw(3, 7, 8), draw(1, 5, 8)):
            assert_same(gated(x), hand(x))
            assert_same(small(x), hand(x))
        assert_counted(gated, small, (draw(2, 6, 8),))
    set_gates(gated, {})
    target = (80 + 17 * 4 * WAYS[way][1]) / 420  # of 72 for keys and values and 8 for a bias, and 17 for a query of 4
    l0.finalize(gated, target + 1e-6)
    assert int(gated.gates.q.value().count_nonzero()) == WAYS[way][1]


@pytest.mark.parametrize("way", WAYS)
def test_queries_under_a_norm_stay_where_the_values_of_a_closed_one_are_not_zero(way: str) -> None:
    model = settled(Shared(way, norm=True))
    with pytest.raises(ValueError, match=r"`q`: `\w+` gives something that is not zero where a unit is closed"):
        l0.attach(model, draw(2, 6, 8), where=l0.shrinkable(streams=True, inputs=False))


class Parallel(nn.Module):
    """Attention and a gated feed-forward layer side by side, with one weight before both and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size, self.hidden = 4, 2, 6
        self.norm, self.into, self.out = nn.LayerNorm(8), nn.Linear(8, 36), nn.Linear(14, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.heads * self.size
        *qkv, a, b = self.into(self.norm(x)).split([inner] * 3 + [self.hidden] * 2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([y, F.silu(a) * b], -1))  # type: ignore[no-any-return]


def test_heads_and_units_side_by_side_in_one_weight_go_by_numbers_that_are_kept() -> None:
    model = settled(Parallel())
    gated = l0.attach(model, draw(2, 5, 8), where=HIDDEN).eval()
    z = set_gates(gated, {"into": [1, 2], "into#2": [0, 1, 4]})
    small: Any = l0.compact(gated)
    assert (small.heads, small.hidden) == (2, 3)
    hand: Any = masked_by_hand(model, {}, {})
    hand.out.register_forward_pre_hook(
        lambda _, args: (args[0] * torch.cat([z["into"].repeat_interleave(2), z["into#2"]]),)
    )
    assert_same(small(draw(3, 7, 8)), hand(draw(3, 7, 8)))
    assert_counted(gated, small, (draw(2, 5, 8),))


def test_queries_that_a_number_in_the_code_cuts_are_refused() -> None:
    with pytest.raises(ValueError, match="`attn`: the model does not run with a unit of it removed"):
        l0.attach(settled(Fused(literal=True)), draw(2, 5, 8), where=HIDDEN)


@pytest.mark.slow
@pytest.mark.parametrize("written", [False, True])
def test_two_queries_that_are_repeated_go_at_once(written: bool) -> None:
    _, gated = made("written" if written else "one", groups=4)
    (gate,) = (gate for _, gate in gated.named_gates())
    assert gate.shape.numel() == (4 if written else 8)
    set_gates(gated, {"q": [0] if written else [0, 1]})
    small: Any = l0.compact(gated)
    assert (small.num_heads, small.num_kv_heads) == (6, 3)


def test_keys_are_expected_if_any_of_their_queries_is() -> None:
    _, gated = made("one")
    scattered(gated)
    p = gated.prob_open().detach().reshape(2, 4)
    one = 3 * (8 + 1) + 3 * 8  # of a head: rows and biases of q, columns of out
    keys = 3 * 8 + 3 * (8 + 1)
    rest = 3 + 8  # the norm, the bias of out
    expected = one * p.sum() + keys * (1 - (1 - p).prod(1)).sum() + rest
    assert float(l0.params(gated).detach()) == pytest.approx(float(expected), rel=1e-6)


def test_as_few_queries_come_back_as_can_be() -> None:
    queries = np.arange(9).reshape(3, 3)
    for least, state in itertools.product((1, 2), itertools.product((False, True), repeat=9)):
        mask, before = np.array(state), np.array(state)
        order = np.random.default_rng(0).random(9)
        level(mask, Served("", np.zeros(3, int), queries, least), order)
        there = before[queries].sum(1)
        most = max(least, *there)
        assert mask[queries].sum(1).tolist() == [most if n else 0 for n in there]
        assert (mask | ~before).all()
        for row in queries:  # those with the lowest order first
            back, away = row[mask[row] & ~before[row]], row[~mask[row]]
            assert not len(back) or not len(away) or not before[row].any() or order[back].max() < order[away].min()


@pytest.mark.slow
@pytest.mark.parametrize("cost", [l0.params, l0.macs], ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", LEAST)
def test_finalize_leaves_no_room_and_no_gate_open_for_nothing(kind: str, cost: Any) -> None:
    _, gated = made(kind)
    for seed, (at_most, closed) in enumerate(itertools.product((0.9, 0.6, 0.4), ([], [1, 5, 6], [0, 1, 2, 3]))):
        set_gates(gated, {"q": closed}, seed)
        most = at_most * l0.dense(cost, gated)
        l0.finalize(gated, at_most, cost, fill=True)
        assert float(cost(gated, kept=True)) <= most
        opens = gated.opens()
        for k in torch.nonzero(~opens).flatten().tolist():
            more = opens.clone()
            more[k] = True
            with gated.assuming(more.double()):
                assert float(cost(gated, kept=True)) > most
        assert_counted(gated, l0.compact(gated, verify=False), (draw(2, 5, 8),))


@pytest.mark.slow
def test_uniform_layers_keep_as_many_queries_and_keys() -> None:
    layers = [Attention(heads=8, groups=2, angles=True) for _ in range(2)]
    gated = l0.attach(settled(nn.Sequential(*layers)), draw(2, 5, 8), where=HIDDEN).eval()
    for seed, (at_most, expected) in enumerate([(0.9, (6, 2)), (0.55, (4, 1)), (0.45, (3, 1)), (0.3, (1, 1))]):
        set_gates(gated, {"0.q": [0, 1, 2, 3, 4]}, seed)
        l0.finalize(gated, at_most, fill=True, uniform="blocks")
        small: Any = l0.compact(gated)
        assert [(layer.num_heads, layer.num_kv_heads) for layer in small] == [expected] * 2
        assert float(l0.params(gated, kept=True)) <= at_most * l0.dense(l0.params, gated)


@pytest.mark.slow  # importing transformers takes longer than all else here
@pytest.mark.parametrize(("how", "least"), [("sdpa", 1), ("eager", 2)])
def test_queries_of_a_llama(how: str, least: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 12}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=20, num_key_value_heads=2, use_cache=False, attn_implementation=how
    )
    model = settled(transformers.LlamaModel(config))
    gated = l0.attach(model, {"input_ids": torch.arange(10).reshape(2, 5)}, where=HIDDEN).eval()
    for closed in ([0, 6], [0, 1, 2, 5, 6, 7], [4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]):
        z = set_gates(gated, {"layers.0.self_attn.q_proj": closed})
        small: Any = l0.compact(gated)
        attention, (queries, keys) = small.layers[0].self_attn, left(closed, 2, least)
        assert (attention.q_proj.out_features, attention.v_proj.out_features) == (2 * queries, 2 * keys)
        assert attention.num_key_value_groups == queries // keys
        words = torch.arange(3, 18).reshape(3, 5)[:, :4]
        readers = {"layers.0.self_attn.q_proj": {"layers.0.self_attn.o_proj": each(2)}}
        readers |= {"layers.0.mlp.gate_proj": {"layers.0.mlp.down_proj": each(1)}}
        theirs = masked_by_hand(model, z, readers)(words).last_hidden_state
        assert_same(small(words).last_hidden_state, theirs, 1e-6)  # its norms cast to float32


def test_what_is_kept_follows_from_the_open_queries_whatever_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a plan is not made again in every step of a budget. Against what the author counts."""
    _, gated = made("one")
    gate, plans, plan = dict(gated.named_gates())["q"], [0], l0.Gated.plan

    def counted(self: l0.Gated, **options: Any) -> Any:
        plans[0] += 1
        return plan(self, **options)

    monkeypatch.setattr(l0.Gated, "plan", counted)
    random = torch.Generator().manual_seed(0)
    for state in list(itertools.product((True, False), repeat=8))[::7]:
        opens, kept, made_before = torch.tensor(state), set[float](), plans[0]
        for _ in range(3):
            strength = torch.rand(8, generator=random) + 3
            gate.log_alpha.data.copy_(torch.where(opens, strength, -strength))
            kept.add(float(l0.macs(gated, kept=True)))
        if opens.any():
            queries, keys = left([k for k in range(8) if not state[k]], 2, 1)
            assert plans[0] - made_before == (1 if keys > 1 else 3)  # of one that stays it is not told which
            assert kept == {float(5 * 3 * (2 * 8 * queries + 2 * 8 * keys) + 2 * 5 * 5 * 3 * queries)}
