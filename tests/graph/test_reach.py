"""Networks of which nothing, or less, could be gated: what they compute is unchanged, and compacts exactly.

The oracle is the gated network on an input that `attach` has not seen; MACs are torch's own count.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import ellzero as l0
from support.oracles import assert_same, counted_macs, numel, set_gates, settled


def net(forward: Callable[..., Any], **members: Any) -> nn.Module:
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, member in members.items():
        setattr(made, name, member)
    return made


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def between(act: Callable[..., Tensor], **members: Any) -> nn.Module:
    """Something between two layers."""
    forward = lambda m, x, *rest: m.o(act(m, m.a(x), *rest))  # noqa: E731
    return net(forward, **({"a": nn.Linear(4, 6), "o": nn.Linear(6, 3)} | members))


def gelu_new(_: Any, h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h.pow(3))))


def drop_path(m: Any, h: Tensor) -> Tensor:
    """As timm has it: a draw for each example, in training."""
    return h * h.new_empty((len(h), 1)).bernoulli_(0.9).div_(0.9) if m.training else h


def quiet(_: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        rate = h.sigmoid() * 2
        with torch.enable_grad():
            twice = rate * h
    return twice + rate


def cast(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return F.relu(m.b(h))


LAYERS = {"a": nn.Linear(4, 6), "o": nn.Linear(6, 3)}
MATRIX = nn.Parameter(noise(5, 6, seed=4))
IMAGES = {"a": nn.Conv2d(4, 6, 1), "o": nn.Conv2d(6, 3, 1)}
WORDS = torch.tensor([3, 0])
REACHED: dict[str, tuple[nn.Module, tuple[Tensor, ...], set[str]]] = {
    "gelu_new": (between(gelu_new), (noise(2, 4),), {"a"}),
    "drop path": (between(drop_path), (noise(2, 4),), {"a"}),
    "a parameter without entries": (between(gelu_new, none=nn.Parameter(torch.zeros(0))), (noise(2, 4),), {"a"}),
    "x - sigmoid(x)": (between(lambda m, h: h - h.sigmoid()), (noise(2, 4),), {"a"}),
    "no_grad": (between(quiet), (noise(2, 4),), {"a"}),
    "autocast": (between(cast, b=nn.Linear(6, 5), o=nn.Linear(5, 3)), (noise(2, 4),), {"a", "b"}),
    "weight norm": (nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)), (noise(2, 4),), {"0"}),
    "einsum": (
        between(lambda m, h: torch.einsum("bi,oi->bo", h.relu(), m.w).relu(), w=MATRIX, o=nn.Linear(5, 3)),
        (noise(2, 4),),
        {"a", "w"},
    ),
    "one word of each sentence": (
        between(lambda m, h, k: h.relu()[torch.arange(len(h)), k]),
        (noise(2, 5, 4), WORDS),
        {"a"},
    ),
    "words picked": (between(lambda m, h, k: h.index_select(1, k)), (noise(2, 5, 4), WORDS), {"a"}),
    "grid_sample": (
        between(lambda m, h, g: F.grid_sample(h, g, align_corners=False), **IMAGES),
        (noise(2, 4, 5, 5), noise(2, 3, 3, 2)),
        {"a"},
    ),
    "unfold": (
        between(lambda m, h: F.unfold(h, 2).mT, a=nn.Conv2d(4, 6, 1), o=nn.Linear(24, 3)),
        (noise(2, 4, 5, 5),),
        {"a"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REACHED)
def test_what_was_left_out_is_gated_and_exact(kind: str) -> None:
    model, example, names = REACHED[kind]
    gated = l0.attach(settled(model), example).eval()
    assert {name for name, _ in gated.named_gates()} == names
    random = np.random.default_rng(0)
    for _ in range(3):
        set_gates(gated, {n: random.permutation(len(g.value()))[:2].tolist() for n, g in gated.named_gates()})
        small = l0.compact(gated)
        others = tuple(noise(*t.shape, seed=9) if t.is_floating_point() else t.flip(0) for t in example)
        assert_same(gated(*others), small(*others), 1e-11)
        assert float(l0.params(gated, kept=True)) == numel(small) < numel(model)
        assert float(l0.macs(gated, kept=True)) == pytest.approx(counted_macs(small, example) / 2, rel=1e-12)


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_what_a_normed_weight_reads_is_in_its_norm(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), norm(nn.Linear(6, 3))).double()
    said = (
        r"`0`: [^;]* the parametrization of `2.weight`;.*; `torch.nn.utils.parametrize.remove_parametrizations` makes"
    )
    with pytest.raises(ValueError, match=said):
        l0.attach(model, noise(2, 4))
    remove_parametrizations(model[2], "weight")  # as it says
    assert [name for name, _ in l0.attach(model, noise(2, 4)).named_gates()] == ["0"]


@pytest.mark.slow
def test_a_stream_has_a_weight_on_the_way() -> None:
    """What a layer computes from it is added back: a stream still, and left out; a rate of its own is no such layer."""
    added = net(lambda m, x: (h := m.a(x)) is not None and m.o(h + m.b(h.relu())), b=nn.Linear(6, 6), **LAYERS)
    with pytest.raises(ValueError, match="`b`: a residual stream"):
        l0.attach(added, noise(2, 4).float())
    snake = between(lambda m, h: h + (m.rate * h).sin().square() / m.rate, rate=nn.Parameter(noise(6, seed=2).float()))
    assert [name for name, _ in l0.attach(snake, noise(2, 4).float()).named_gates()] == ["a"]


FEED_FORWARD = {  # with an activation that adds functions of itself, or multiplies two layers
    "Albert": ({"embedding_size": 8, "intermediate_size": 12}, "encoder.albert_layer_groups.0.albert_layers.0.ffn"),
    "Phi": ({"intermediate_size": 12, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}, "layers.0.mlp.fc1"),
    "T5": (
        {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "feed_forward_proj": "gated-gelu"},
        "encoder.block.0.layer.1.DenseReluDense.wi_0",
    ),
}


@pytest.mark.slow  # importing transformers takes longer than all else here
@pytest.mark.filterwarnings("ignore:with a batch of 1")
@pytest.mark.parametrize("kind", FEED_FORWARD)
def test_feed_forward_layers_of_transformers_are_gated_and_exact(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes, name = FEED_FORWARD[kind]
    if kind != "T5":
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    config = getattr(transformers, f"{kind}Config")(vocab_size=20, **sizes)
    model = settled(getattr(transformers, "T5EncoderModel" if kind == "T5" else f"{kind}Model")(config))
    words = torch.arange(10).reshape(2, 5)
    gated = l0.attach(model, words).eval()
    sizes_of = {found: gate.shape.numel() for found, gate in gated.named_gates()}
    assert sorted(sizes_of.values()) == [2, 12]  # heads, and the feed-forward layer
    assert sizes_of[name] == 12
    set_gates(gated, {found: [1] if size == 2 else [0, 5, 9] for found, size in sizes_of.items()})
    small = l0.compact(gated)
    assert small.get_submodule(name).out_features == 9
    assert_same(gated(words.flip(1)).last_hidden_state, small(words.flip(1)).last_hidden_state)


def test_a_reason_names_what_the_user_wrote() -> None:
    """Not what tracing puts around it, as it does around a block without gradients."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        with torch.no_grad():
            scale = torch.fft.fft(h).abs()
        return m.o(h * scale)

    with pytest.raises(ValueError, match=r"`a`: there is no rule for `fft_fft`") as error:
        l0.attach(net(forward, a=nn.Linear(4, 6), o=nn.Linear(6, 3)), torch.ones(2, 4))
    assert "wrap_with" not in str(error.value)
