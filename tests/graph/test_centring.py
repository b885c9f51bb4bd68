"""`centred`: LayerNorms subtract no mean any more and the network is the same, or it is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from support.oracles import assert_counted, assert_same, each, masked_by_hand, set_gates, settled
from support.prenorm import PreNorm, masked, words

STREAMS = l0.shrinkable(streams=True)


def test_the_same_function_and_what_writes_the_stream_has_no_mean() -> None:
    model = settled(PreNorm(kind="layer", tied=True))
    before = copy.deepcopy(model.state_dict())
    found: Any = l0.centred(model, words(2, 5))
    assert_same(found(words(3, 7)), model(words(3, 7)))
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    assert found.state_dict().keys() == before.keys()
    written = [found.embed.weight, found.places[0], found.blocks[0].out.weight.T, found.blocks[0].down.bias[None]]
    assert all(float(w.detach().mean(1).abs().max()) < 1e-15 for w in written)
    assert torch.equal(found.head.weight, model.head.weight)  # it has one of its own now
    assert found.head.weight is not found.embed.weight


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 5, norm_first=True, batch_first=True)
    return nn.Sequential(
        nn.Linear(3, 8), nn.TransformerEncoder(layer, 1, nn.LayerNorm(8), enable_nested_tensor=False), nn.Linear(8, 3)
    )


def test_a_norm_behind_another_of_torchs_layer_keeps_its_mean() -> None:
    """Without gradients the layer takes a path past its norms, where a second one without a mean is not seen."""
    layer = settled(nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 5, batch_first=True)))
    with pytest.raises(ValueError, match="written by more than a linear map"):
        l0.centred(layer, draw(2, 5, 3))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.slow
def test_the_layers_of_torch() -> None:
    model, x = settled(encoder()), draw(3, 7, 3)
    found = l0.centred(model, draw(2, 5, 3))
    assert_same(found(x), model(x))
    gated = l0.attach(found, draw(2, 5, 3), where=STREAMS).eval()
    z = set_gates(gated, {"0": [1, 2, 6], "1.layers.0.self_attn": [1], "1.layers.0.linear1": [0]})
    small: Any = l0.compact(gated)
    assert small[1].layers[0].linear2.out_features == 5
    norms = ("1.layers.0.norm1", "1.layers.0.norm2", "1.norm")
    theirs = masked(found, z["0"], {path: f"{path}.bias" for path in norms})
    hidden = {"1.layers.0.linear1": {"1.layers.0.linear2": each(1)}}
    theirs = masked_by_hand(theirs, {"1.layers.0.linear1": z["1.layers.0.linear1"]}, hidden)
    with torch.no_grad():
        heads = theirs.get_parameter("1.layers.0.self_attn.out_proj.weight")
        heads.mul_(z["1.layers.0.self_attn"].repeat_interleave(4))
        for network in (gated, small):  # without gradients, torch takes another path where it can
            assert_same(network(x), theirs(x))
    assert_same(small(x), theirs(x))
    assert_counted(gated, small, (draw(2, 5, 3),))


class Stream(nn.Module):
    """A block on a stream, with something that forbids to centre it."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.scale = what, nn.Parameter(torch.ones(6))
        self.into, self.norm, self.last = nn.Linear(3, 6), nn.LayerNorm(6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if self.what == "not linear":
            x = x.relu()
        if self.what == "post-norm":
            return self.head(self.norm(x + self.down(self.up(self.last(x)).relu())) + self.last(x))
        y = self.down(self.up(self.norm(x)).relu())
        x = x + (y * self.scale if self.what == "scaled" else y)
        return self.head(x if self.what == "read beside" else self.last(x))


class OwnNorm(nn.Module):
    """A LayerNorm as people write it, nanoGPT among them; or more than one."""

    def __init__(self, bias: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(6)), scale
        self.bias = nn.Parameter(torch.zeros(6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 0.02) * self.scale


class OwnStream(Stream):
    def __init__(self, bias: bool, scale: float = 1.0) -> None:
        super().__init__("nothing")
        self.norm, self.last = (OwnNorm(bias, scale) for _ in range(2))  # type: ignore[assignment]


@pytest.mark.parametrize("bias", [True, False])
def test_norms_of_ones_own(bias: bool) -> None:
    model, x = settled(OwnStream(bias)), draw(4, 3)
    found = l0.centred(model, draw(2, 3))
    assert_same(found(x), model(x))
    assert found.state_dict().keys() == model.state_dict().keys()
    gated = l0.attach(found, draw(2, 3), where=STREAMS).eval()
    z = set_gates(gated, {"into": [1, 4], "up": [2]})
    small: Any = l0.compact(gated)
    assert (tuple(small.norm.weight.shape), small.down.out_features, small.up.out_features) == ((4,), 4, 3)
    theirs = masked(found, z["into"], {name: f"{name}.bias" if bias else None for name in ("norm", "last")})
    theirs = masked_by_hand(theirs, {"up": z["up"]}, {"up": {"down": each(1)}})
    assert_same(gated(x), theirs(x))
    assert_same(small(x), theirs(x))


def test_hooks_on_norms_of_ones_own_stay() -> None:
    model, x, seen = settled(OwnStream(bias=True)), draw(4, 3), []
    model.norm.register_forward_hook(lambda m, args, out: seen.append(out))
    model.last.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    found = l0.centred(model, draw(2, 3))
    seen.clear()
    assert_same(found(x), model(x))
    assert len(seen) == 2
    assert_same(*seen)
    plain = settled(OwnStream(bias=True))
    assert not torch.allclose(plain(x), model(x))
    model.last.register_state_dict_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="`last` has hooks on its state"):
        l0.centred(model, draw(2, 3))


def test_more_than_a_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="`norm` is read beside it, or written by more than a linear map"):
        l0.centred(settled(OwnStream(bias=True, scale=1.5)), draw(2, 3))


@pytest.mark.parametrize("what", ["not linear", "scaled", "read beside"])
def test_what_does_not_hold_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="`norm` is read beside it, or written by more than a linear map"):
        l0.centred(settled(Stream(what)), draw(2, 3))
    assert l0.centred(settled(Stream("nothing")), draw(2, 3)) is not None


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm1, self.norm2 = nn.Linear(3, 6), nn.LayerNorm(6), nn.LayerNorm(6)
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.into(x))
        return self.head(self.norm2(x + self.block(x)))


def test_norms_behind_the_sum_are_refused() -> None:
    with pytest.raises(ValueError, match="no stream whose norms could do without a mean"):
        l0.centred(settled(PostNorm()), draw(2, 3))


def test_a_model_without_such_norms_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no LayerNorm along units"):
        l0.centred(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Module"):
        l0.centred("net", torch.zeros(1, 3))  # type: ignore[type-var]


def test_attach_says_what_to_do() -> None:
    gated = l0.attach(settled(Stream("nothing")), draw(2, 3))
    assert "`l0.centred` may do away with" in {a.name: a.frozen or "" for a in gated.axes}["into"]


def test_the_layer_that_shares_an_embedding_in_the_code_is_refused() -> None:
    class Tied(PreNorm):
        def forward(self, words: Tensor) -> Tensor:
            return nn.functional.linear(self.norm(self.embed(words)), self.embed.weight)

    with pytest.raises(ValueError, match="both reads and writes it"):
        l0.centred(settled(Tied(kind="layer")), words(2, 5))
