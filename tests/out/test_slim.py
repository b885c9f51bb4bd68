"""Attention that goes by numbers which it does not keep itself: the width of its input, as in nanoGPT, minGPT and timm,
or one in settings that it shares. Heads and streams go all the same, and the network gives what a copy masked by hand
gives, on other batches and lengths than the example's.
"""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ellzero as l0
from ellzero.graph.plan import make_plan
from support import formers
from support.oracles import assert_counted, assert_same, each, masked_by_hand, same, set_gates, settled
from support.prenorm import masked

WIDTH, HEADS = 8, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class CausalSelfAttention(nn.Module):
    """nanoGPT's, line by line, but for its configuration."""

    def __init__(self, flash: bool = True, block_size: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = HEADS
        self.n_embd = WIDTH
        self.dropout = dropout
        self.flash = flash
        if not self.flash:
            mask = torch.tril(torch.ones(block_size, block_size, dtype=torch.bool))
            self.register_buffer("bias", mask.view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))  # type: ignore[no-any-return]


class Apart(CausalSelfAttention):
    """minGPT's first: three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        k, q, v = (
            layer(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for layer in (self.key, self.c_attn, self.value)
        )
        att = ((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))  # type: ignore[no-any-return]


class Timm(CausalSelfAttention):
    """As vision transformers had it."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.c_attn(x).reshape(B, N, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        att = ((q @ k.transpose(-2, -1)) * (C // self.n_head) ** -0.5).softmax(dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, N, C))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), attn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x))  # type: ignore[no-any-return]


KINDS: dict[str, Any] = {
    "flash": CausalSelfAttention,
    "written": lambda: CausalSelfAttention(flash=False),
    "apart": Apart,
    "timm": Timm,
}


def made(kind: str = "flash") -> tuple[Any, l0.Gated]:
    model = settled(nn.Sequential(Block(KINDS[kind]())))
    return model, l0.attach(model, draw(2, 5, WIDTH)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_heads_go_where_the_input_tells_their_width(kind: str) -> None:
    model, gated = made(kind)
    z = set_gates(gated, {"0.attn.c_attn": [0, 2, 3]})
    small: Any = l0.compact(gated)
    attn = small[0].attn
    assert (attn.n_head, attn.c_proj.in_features, attn.c_proj.out_features) == (1, 2, WIDTH)
    assert attn.c_attn.out_features == (2 if kind == "apart" else 6)
    x = draw(3, 7, WIDTH)
    theirs = masked_by_hand(model, z, {"0.attn.c_attn": {"0.attn.c_proj": each(2)}})(x)
    assert_same(gated(x), theirs)
    assert_same(small(x), theirs)
    assert_same(small(draw(1, 1, WIDTH)), gated(draw(1, 1, WIDTH)))
    assert_counted(gated, small, (draw(2, 5, WIDTH),))


def test_copies_files_programs_and_gradients_are_of_the_same_network(tmp_path: Path) -> None:
    _, gated = made()
    set_gates(gated, {"0.attn.c_attn": [1]})
    small, x = l0.compact(gated), draw(3, 7, WIDTH).requires_grad_()
    there = small(x)
    assert_same(copy.deepcopy(small)(x), there)
    assert_same(pickle.loads(pickle.dumps(small))(x), there)
    l0.save(small, tmp_path / "small.safetensors")
    loaded = l0.load(nn.Sequential(Block(CausalSelfAttention())).eval(), tmp_path / "small.safetensors")
    assert_same(loaded(x), there)
    assert_same(torch.export.export(small, (x,)).module()(x), there)
    assert_same(torch.compile(small, backend="eager", fullgraph=True)(x), there)
    slopes = [torch.autograd.grad(network(x).square().sum(), x)[0] for network in (small, gated)]
    assert_same(*slopes)
    with pytest.raises(ValueError, match="the input must have width 8"):
        small[0].attn(draw(2, 5, 6))


@pytest.mark.slow
def test_threads_that_run_one_network_do_not_mix_up_their_inputs() -> None:
    """As `DataParallel` does, whose replicas share their hooks: all are shown an input before one reads its own."""
    _, gated = made()
    set_gates(gated, {"0.attn.c_attn": [1]})
    small: Any = l0.compact(gated)
    inputs = [draw(3, 7, WIDTH), draw(2, 7, WIDTH), draw(3, 5, WIDTH)]
    alone, meet = [small(x) for x in inputs], Barrier(len(inputs))
    small[0].attn.register_forward_pre_hook(lambda *_: (meet.wait(60), None)[1])
    with ThreadPoolExecutor(len(inputs)) as threads:
        together = list(threads.map(lambda x: small(x), inputs))
    for a, b in zip(alone, together, strict=True):
        assert_same(a, b)


class Recomputed(CausalSelfAttention):
    """A forward that computes a part of itself again on its way back."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        made: Any = checkpoint(self.c_attn, x, use_reentrant=self.reentrant)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in made.split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_part_that_is_computed_again_reads_the_same_input() -> None:
    """Slopes against those of a copy masked by hand, of which nothing is computed again."""
    model = settled(nn.Sequential(Block(Recomputed())))
    gated = l0.attach(model, draw(2, 5, WIDTH)).eval()
    z = set_gates(gated, {"0.attn.c_attn": [0, 2]})
    small: Any = l0.compact(gated)
    by_hand = masked_by_hand(model, z, {"0.attn.c_attn": {"0.attn.c_proj": each(2)}})
    slopes = [
        torch.autograd.grad(net(x).square().sum(), x)[0]
        for net in (small, by_hand)
        for x in [draw(3, 7, WIDTH).requires_grad_()]
    ]
    assert_same(*slopes)
    small[0].attn.reentrant = True
    out = small(draw(3, 7, WIDTH).requires_grad_())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        out.sum().backward()


class LayerNorm(nn.Module):
    """nanoGPT's: its eps is in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class GPTBlock(nn.Module):
    """minGPT's: the feed-forward layers are called by a function that holds them."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = LayerNorm(), attn, LayerNorm()
        layers = {"c_fc": nn.Linear(WIDTH, 6), "c_proj": nn.Linear(6, WIDTH), "act": nn.GELU()}
        self.mlp = m = nn.ModuleDict(layers)
        self.mlpf = lambda x: m["c_proj"](m["act"](m["c_fc"](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, kind: str = "flash") -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(9, WIDTH), nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(GPTBlock(KINDS[kind]()) for _ in range(2))
        self.ln_f, self.lm_head = LayerNorm(), nn.Linear(WIDTH, 9, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


def words(*shape: int) -> Tensor:
    return torch.randint(9, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flash", "timm"])
def test_a_gpt_loses_heads_layers_and_stream(kind: str, tmp_path: Path) -> None:
    """Fewer units in the stream than in the heads of a layer, as many, more; one layer keeps all its heads."""
    dense: Any = settled(GPT(kind))
    model: Any = l0.centred(dense, words(2, 5))
    x = words(3, 7)
    assert_same(model(x), dense(x), 1e-9)
    gated = l0.attach(model, words(2, 5), where=l0.shrinkable(streams=True)).eval()
    axes = {"wte": WIDTH} | {f"h.{k}.{name}": n for k in (0, 1) for name, n in (("attn.c_attn", 4), ("mlp.c_fc", 6))}
    assert {name: gate.shape.numel() for name, gate in gated.named_gates()} == axes
    for stream, heads in (([], [3]), ([0, 2, 5, 7], [1, 2]), ([0, 2, 7], [1])):
        z = set_gates(gated, {"wte": stream, "h.0.attn.c_attn": heads, "h.1.mlp.c_fc": [0, 4]})
        small: Any = l0.compact(gated)
        width, whole = WIDTH - 2 * len(heads), WIDTH - len(stream)
        slims = [getattr(block.attn, "slim", None) for block in small.h]
        assert [slim and (slim.whole, slim.width) for slim in slims] == [
            (whole, w) if w != whole else None for w in (width, WIDTH)
        ]
        norms = {path: f"{path}.bias" for path in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f")}
        readers = {f"h.{k}.attn.c_attn": {f"h.{k}.attn.c_proj": each(2)} for k in (0, 1)}
        readers |= {f"h.{k}.mlp.c_fc": {f"h.{k}.mlp.c_proj": same} for k in (0, 1)}
        theirs = _on_itself(masked_by_hand(_on_itself(masked(model, z["wte"], norms)), z, readers))(x)
        assert_same(gated(x), theirs)
        assert_same(small(x), theirs)
        assert_counted(gated, small, (words(2, 5),))
    l0.save(small, tmp_path / "small.safetensors")
    fresh = l0.centred(GPT(kind).double().eval(), words(2, 5))
    assert_same(l0.load(fresh, tmp_path / "small.safetensors")(x), small(x))


def test_torch_s_own_attention_in_the_same_stream_needs_no_help() -> None:
    layers: list[nn.Module] = [
        formers.Layer(attention, formers.Feed(8, 4, "plain", F.gelu, True), [nn.RMSNorm(8), nn.RMSNorm(8)], "before", 0)
        for attention in (formers.ByWidth(8, 4, False), nn.MultiheadAttention(8, 2, batch_first=True))
    ]
    model = settled(formers.Former(layers, 8, True, "none", nn.RMSNorm(8), "all"))
    gated = l0.attach(model, words(2, 5) % 7, where=l0.shrinkable(streams=True)).eval()
    assert sorted(gate.shape.numel() for _, gate in gated.named_gates()) == [2, 4, 4, 4, 8]
    set_gates(gated, {name: [1] for name, _ in gated.named_gates()})
    small = l0.compact(gated)
    assert_same(small(words(3, 7) % 7), gated(words(3, 7) % 7))
    assert_counted(gated, small, (words(2, 5) % 7,))


def _on_itself(model: Any) -> Any:
    """A copy whose functions call its own layers: those of `copy.deepcopy` call the original's."""
    for block in model.h:
        block.mlpf = lambda x, m=block.mlp: m["c_proj"](m["act"](m["c_fc"](x)))
    return model


@pytest.mark.slow
def test_a_gpt_shrinks_while_it_trains() -> None:
    """The stream, heads and layers leave the live network; what comes out is what the gated network was."""
    torch.manual_seed(0)
    model = l0.centred(GPT(), words(2, 5))
    gated = l0.attach(model, words(2, 5), where=l0.shrinkable(streams=True))
    budget = l0.Budget(gated, macs=0.4, steps=60, gate_lr=0.3)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for _ in range(60):
        loss = F.cross_entropy(gated(words(4, 8)).flatten(0, 1), words(4, 8).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert gated.model.wte.weight.shape[1] < WIDTH
    there = gated.eval()(words(3, 7))
    small: Any = budget.finish()
    assert_same(small(words(3, 7)), there, 1e-5)


def test_a_removal_can_go_on_and_be_undone() -> None:
    model, gated = made()
    graph, x = gated.graph, draw(3, 7, WIDTH)
    (axis,) = (k for k, a in enumerate(graph.axes) if a.frozen is None)
    before, plans = model(x), []
    for closed in ([0], [0, 2]):
        alive = torch.ones(graph.offsets[-1], dtype=torch.bool).numpy()
        alive[[graph.offsets[axis] + k for k in closed]] = False
        plans.append(make_plan(graph, alive))
    dense = copy.deepcopy(model)
    plans[0].apply(model)
    assert model[0].attn.slim.width == 6
    plans[1].beyond(plans[0]).apply(model)
    assert (model[0].attn.slim.width, model[0].attn.n_head) == (4, 2)
    with torch.no_grad():
        dense[0].attn.c_proj.weight[:, [0, 1, 4, 5]] = 0
    assert_same(model(x), dense(x))
    plans[1].undo(model, graph.shapes)
    assert [name for name, _ in model[0].attn.named_children()] == ["c_attn", "c_proj", "attn_dropout", "resid_dropout"]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert_same(model(x), dense(x))
    assert model(x).shape == before.shape


@dataclass
class GPTConfig:
    n_head: int = HEADS
    n_embd: int = WIDTH


class Configured(nn.Module):
    """Goes by its settings, which other layers have too."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.head_dim = config, config.n_embd // config.n_head
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv, inner = self.c_attn(x), self.config.n_head * self.head_dim
        q, k, v = (qkv[..., n * inner : (n + 1) * inner] for n in range(3))
        q, k, v = (a.view(*x.shape[:2], self.config.n_head, self.head_dim).transpose(1, 2) for a in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_number_in_settings_that_others_share_follows_in_a_copy(tmp_path: Path) -> None:
    def blocks() -> nn.Module:
        config = GPTConfig()
        return nn.Sequential(*(Block(Configured(config)) for _ in range(2)))

    model = settled(blocks())
    gated = l0.attach(model, draw(2, 5, WIDTH)).eval()
    z = set_gates(gated, {"0.attn.c_attn": [1, 2, 3]})
    small: Any = l0.compact(gated)
    heads = [[block.attn.config.n_head for block in network] for network in (model, small)]
    assert heads == [[HEADS, HEADS], [1, HEADS]]
    x = draw(3, 7, WIDTH)
    readers = {f"{k}.attn.c_attn": {f"{k}.attn.c_proj": each(2)} for k in (0, 1)}
    assert_same(small(x), masked_by_hand(model, z, readers)(x))
    l0.save(small, tmp_path / "small.safetensors")
    assert_same(l0.load(blocks(), tmp_path / "small.safetensors")(x), small(x))


class InParts(nn.Module):
    """CodeGen's: heads in parts, one for each of two processes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 6, 2
        self.qkv, self.out = nn.Linear(WIDTH, 36), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(*x.shape[:2], 2, -1)
        q, v, k = qkv.split(self.head_dim * self.num_heads // 2, dim=-1)
        q, k, v = (a.reshape(*x.shape[:2], 2, self.num_heads // 2, self.head_dim).flatten(2, 3) for a in (q, k, v))
        y = F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v)))
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("closed", "left"), [([0, 4], 4), ([0, 1], 6), ([0, 1, 3, 4, 5], 2)])
def test_as_many_heads_stay_in_each_part_that_the_code_lays_out(closed: list[int], left: int) -> None:
    model = settled(InParts())
    gated = l0.attach(model, draw(2, 5, WIDTH)).eval()
    z = set_gates(gated, {"qkv": closed})
    small: Any = l0.compact(gated)
    assert (small.num_heads, small.out.in_features) == (left, 2 * left)
    x = draw(3, 7, WIDTH)
    assert_same(small(x), masked_by_hand(model, z, {"qkv": {"out": each(2)}})(x))
    assert_counted(gated, small, (draw(2, 5, WIDTH),))


class Adding(CausalSelfAttention):
    """Adds its input inside: something else than a layer reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(CausalSelfAttention):
    """Divides by a number that the width of the input tells."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / x.shape[-1]


@pytest.mark.parametrize("kind", [Adding, Scaled])
def test_what_else_goes_by_the_input_is_refused_with_what_to_do(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"`0.attn.c_attn`: the model .*keeps the size of a head in `self`"):
        l0.attach(settled(nn.Sequential(Block(kind()))), draw(2, 5, WIDTH))
