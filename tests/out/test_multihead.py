"""Heads of `nn.MultiheadAttention`, alone and in torch's layers: what is left is what a copy masked by hand gives.

The layer reads `out_proj.weight` itself, so that the copy's weight is masked, not the layer's input.
"""

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.graph.plan import make_plan
from ellzero.graph.standins.heads import FewerHeads
from support.attention import Attention
from support.oracles import assert_counted, assert_same, numel, set_gates, settled


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Around(nn.Module):
    """Calls an attention in a given way: keys from elsewhere or not, masks, weights asked for or not."""

    def __init__(self, how: str = "self", mask: str = "none", weights: bool = False, **kwargs: Any):
        super().__init__()
        sizes = {"kdim": 5, "vdim": 6} if how == "sizes" else {}
        self.attention = nn.MultiheadAttention(8, 4, **sizes, **kwargs)
        self.how, self.mask, self.weights = how, mask, weights

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention.batch_first
        time, batch = (x.shape[1], x.shape[0]) if first else (x.shape[0], x.shape[1])
        causal = torch.ones(time, time, dtype=torch.bool).triu(1)
        padding = torch.arange(time).expand(batch, -1) >= time - 1
        told: dict[str, Any] = {"need_weights": self.weights}
        told |= {
            "causal": {"attn_mask": causal},
            "hint": {"attn_mask": causal, "is_causal": True},
            "float": {"attn_mask": -torch.arange(time).to(x).expand(time, -1)},
            "padding": {"key_padding_mask": padding},
            "both": {"key_padding_mask": padding, "attn_mask": causal},
        }.get(self.mask, {})
        match self.how:
            case "self":
                return x + self.attention(x, x, x, **told)[0]
            case "keys":
                other = x.sin()
                return x + self.attention(x, other, other, **told)[0]
        return x + self.attention(x, x[..., :5], x.cos()[..., :6], **told)[0]


def by_hand(model: nn.Module, z: dict[str, Tensor]) -> nn.Module:
    """A copy whose output projections read heads that are multiplied by their gates."""
    out = copy.deepcopy(model)
    for name, gates in z.items():
        layer: Any = out.get_submodule(name)
        with torch.no_grad():
            layer.out_proj.weight.mul_(gates.repeat_interleave(layer.head_dim))
    return out


KINDS = list(
    zip(
        itertools.cycle(["self", "keys", "sizes"]),
        ["none", "causal", "hint", "float", "padding", "both"] * 2,
        itertools.cycle([True, False, False, True, True]),
        itertools.cycle([True, True, False]),
        itertools.cycle([False, True, False, False, True, False, True]),
        strict=False,
    )
)[:12]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "mask", "first", "bias", "weights"), KINDS)
def test_heads_that_are_closed_go(how: str, mask: str, first: bool, bias: bool, weights: bool) -> None:
    model = settled(Around(how, mask, weights, batch_first=first, bias=bias))
    gated = l0.attach(model, draw(3, 5, 8) if first else draw(5, 3, 8)).eval()
    assert {name: gate.shape.numel() for name, gate in gated.named_gates()} == {"attention": 4}
    z = set_gates(gated, {"attention": [1, 2]})
    small: Any = l0.compact(gated)
    assert (small.attention.num_heads, small.attention.embed_dim) == (2, 8)
    assert numel(model) - numel(small) == 4 * ((8 * 4 if how != "sizes" else 8 + 5 + 6 + 8) + 3 * bias)
    x = draw(4, 7, 8)
    with torch.no_grad():
        theirs = by_hand(model, z)(x)
        assert_same(gated(x), theirs)
        assert_same(small(x), theirs)
    assert_same(small(x), theirs)  # with gradients torch goes another way
    if first:  # MACs are for one example, which is the first dimension's
        assert_counted(gated, small, (draw(3, 5, 8),))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Around, partial(Attention, projections="split")])
def test_what_is_left_is_saved_loaded_copied_and_exported(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    gated = l0.attach(settled(make()), draw(3, 5, 8)).eval()
    ((name, _),) = gated.named_gates()
    set_gates(gated, {name: [1]})
    small, x = l0.compact(gated), draw(4, 7, 8)
    l0.save(small, tmp_path / "small.safetensors")
    again = l0.load(settled(make(), 1), tmp_path / "small.safetensors").eval()
    for other in (again, copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert_same(other(x), small(x), 0)
    program = torch.export.export(small, (x,))
    assert_same(program.module()(x), small(x))


def test_in_training_it_is_what_torch_computes() -> None:
    """With all heads the stand-in is the layer, dropout and single inputs included."""
    model = settled(nn.MultiheadAttention(8, 4, dropout=0.3)).train()
    other = copy.deepcopy(model)
    other.__class__ = FewerHeads
    x, keys = draw(5, 8), draw(6, 8)
    for args, kwargs in [((x, x, x), {}), ((x, keys, keys), {"average_attn_weights": False})]:
        made = []
        for layer in (model, other):
            torch.manual_seed(0)
            made.append(layer(*args, **kwargs))
        for ours, theirs in zip(*made, strict=True):
            assert_same(ours, theirs)
    with pytest.raises(RuntimeError, match="`attn_mask` must be given"):
        other(x, x, x, is_causal=True)


def test_a_removal_that_is_undone_gives_the_layer_back() -> None:
    model = settled(Around())
    graph = l0.attach(model, draw(3, 5, 8)).graph
    alive = torch.ones(graph.offsets[-1], dtype=torch.bool).numpy()
    alive[next(start for a, start in zip(graph.axes, graph.offsets, strict=False) if a.frozen is None)] = False
    plan = make_plan(graph, alive)
    plan.apply(model)
    assert (type(model.attention), model.attention.num_heads) == (FewerHeads, 3)
    plan.undo(model, graph.shapes)
    assert (type(model.attention), model.attention.num_heads) == (nn.MultiheadAttention, 4)
    assert model.attention._qkv_same_embed_dim


def test_weights_that_are_given_out_keep_their_heads() -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)

    with pytest.raises(ValueError, match="`attention`: `mean` in `attention` mixes its units"):
        l0.attach(settled(Shown()), draw(3, 5, 8))


def test_keys_that_are_added_for_all_are_refused() -> None:
    for kwargs in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match="nothing to gate"):
            l0.attach(settled(Around(**kwargs)), draw(3, 5, 8))


def layer(kind: str, **kwargs: Any) -> nn.Module:
    return getattr(nn, f"Transformer{kind}Layer")(8, 4, 7, batch_first=True, **kwargs)


def ends(x: Tensor) -> Tensor:
    """The last place of each is padded, of the first the last two."""
    length = x.shape[1] - 1 - (torch.arange(len(x)) == 0).long()
    return torch.arange(x.shape[1]) >= length[:, None]


class Stack(nn.Module):
    """An encoder over padded input, and a decoder that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer("Encoder"), 2, norm=nn.LayerNorm(8))
        self.decoder = nn.TransformerDecoder(layer("Decoder", norm_first=True), 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        padding = ends(x)
        causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=x.dtype)
        memory = self.encoder(x, src_key_padding_mask=padding)
        return self.decoder(y, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)


class Positions(nn.Module):
    """As in a vision transformer: a learned token in front, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(draw(1, 1, 8).float()), nn.Parameter(draw(1, 6, 8).float())
        self.layer = layer("Encoder", norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.layer(x)[:, 0]


@pytest.mark.slow
def test_heads_go_where_positions_are_learned() -> None:
    model = settled(Positions())
    gated = l0.attach(model, draw(2, 5, 8)).eval()
    sizes = {name: gate.shape.numel() for name, gate in gated.named_gates()}
    assert sizes == {"layer.self_attn": 4, "layer.linear1": 7}
    z = set_gates(gated, {"layer.self_attn": [0, 2]})
    small: Any = l0.compact(gated)
    assert small.layer.self_attn.num_heads == 2
    hand: Any = by_hand(model, {"layer.self_attn": z["layer.self_attn"]})
    with torch.no_grad():
        hand.layer.linear2.weight.mul_(z["layer.linear1"])
        theirs = hand(draw(3, 5, 8))
        assert_same(gated(draw(3, 5, 8)), theirs)
        assert_same(small(draw(3, 5, 8)), theirs)
    assert_counted(gated, small, (draw(2, 5, 8),))


@pytest.mark.slow
def test_a_layer_of_torch_without_feed_forward_takes_no_shortcut_past_it() -> None:
    gated = l0.attach(settled(Positions()), draw(2, 5, 8)).eval()
    z = set_gates(gated, {"layer.linear1": list(range(7))})
    small: Any = l0.compact(gated)
    hand: Any = by_hand(gated.model, {"layer.self_attn": z["layer.self_attn"]})
    with torch.no_grad():
        hand.layer.linear2.weight.zero_()
        assert_same(small(draw(3, 5, 8)), hand(draw(3, 5, 8)))
    assert type(small.layer.linear1).__name__ == "Closed"


@pytest.mark.slow
def test_layers_of_torch(tmp_path: Path) -> None:
    model = settled(Stack())
    gated = l0.attach(model, (draw(2, 5, 8), draw(2, 3, 8))).eval()
    heads = {name for name, gate in gated.named_gates() if gate.shape.numel() == 4}
    inside = [f"encoder.layers.{k}.self_attn" for k in (0, 1)]
    assert heads == {*inside, "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"}
    closed = {name: [k % 4] for k, name in enumerate(sorted(heads))} | {"encoder.layers.0.linear1": [0, 3]}
    z = set_gates(gated, closed)
    small: Any = l0.compact(gated)
    x, y = draw(3, 6, 8), draw(3, 4, 8)
    hand = copy.deepcopy(model)
    with torch.no_grad():
        for name, gates in z.items():
            if name in heads:
                hand.get_submodule(name).out_proj.weight.mul_(gates.repeat_interleave(2))  # type: ignore[operator, union-attr]
            else:
                hand.get_submodule(name.replace("linear1", "linear2")).weight.mul_(gates)  # type: ignore[operator]
    l0.save(small, tmp_path / "small.safetensors")
    again: Any = l0.load(settled(Stack(), 1), tmp_path / "small.safetensors").eval()
    for learns in (False, True):  # torch packs what is padded where nothing learns: there zeros come out
        with torch.set_grad_enabled(learns):
            assert_same(gated(x, y), hand(x, y))
            assert_same(small(x, y), hand(x, y))
            wide = {"src_key_padding_mask": ends(x)}
            assert_same(small.encoder(x, **wide), hand.encoder(x, **wide))
            assert_same(again.encoder(x, **wide), hand.encoder(x, **wide))
    assert_counted(gated, small, (draw(2, 5, 8), draw(2, 3, 8)))
