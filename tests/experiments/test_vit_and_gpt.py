"""Transformers of the network room: sizes by arithmetic, forwards by hand, and what recipes need to train them."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ellzero as l0
from ellzero.cli import opening
from ellzero.experiments.data import load, stand_in
from ellzero.experiments.networks import GPT, ViTLite, find
from ellzero.experiments.networks.transformer import Block, Branch
from ellzero.experiments.papers import get
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.loop import train
from ellzero.experiments.train.policy import Policy
from ellzero.experiments.train.trainer import Trainer
from ellzero.out import shrinking
from support.oracles import counted_macs, numel


def macs(model: nn.Module, x: Tensor) -> int:
    with sdpa_kernel(SDPBackend.MATH):  # others are one operation, which is not counted
        return counted_macs(model, [x])


def block_macs(width: int, hidden: int, length: int) -> int:
    """Queries, keys, values and their output; products with keys and values; two layers."""
    return length * (4 * width**2 + 2 * width * hidden) + 2 * length**2 * width


# ---------------------------------------------------------------- sizes and forwards


@pytest.mark.parametrize(("layers", "heads", "width"), [(6, 6, 384), (6, 6, 264), (2, 2, 16)])
def test_sizes_of_a_gpt(layers: int, heads: int, width: int) -> None:
    with torch.device("meta"):
        net, x = GPT(layers, heads, width), torch.zeros(1, 256, dtype=torch.int64)
    assert numel(net) == (65 + 256) * width + layers * (12 * width**2 + 2 * width) + width
    assert macs(net, x) == layers * block_macs(width, 4 * width, 256) + 256 * 65 * width
    if width == 384:
        assert numel(net) - 256 * width == pytest.approx(10.65e6, abs=5e3)  # as nanoGPT prints it


@pytest.mark.parametrize(
    ("layers", "width", "millions", "published"), [(7, 256, 3.72, 239), (6, 256, 3.19, 205), (7, 176, 1.77, 0)]
)
def test_sizes_of_vit_lite(layers: int, width: int, millions: float, published: float) -> None:
    with torch.device("meta"):
        net, x = ViTLite(layers, 4, width), torch.zeros(1, 3, 32, 32)
    block = 4 * width**2 + width + 2 * (2 * width**2) + 3 * width + 4 * width
    assert numel(net) == 49 * width + 66 * width + layers * block + 2 * width + 11 * width - width + 10
    assert numel(net) == pytest.approx(1e6 * millions, abs=5e3)
    between = layers * 2 * 65**2 * width  # queries, keys and values, which the authors leave out
    assert macs(net, x) == 64 * 48 * width + layers * block_macs(width, 2 * width, 65) + 10 * width
    if published:
        assert macs(net, x) - between == pytest.approx(1e6 * published, abs=0.5e6)


def attended(block: Block, x: Tensor, heads: int) -> Tensor:
    """A block in evaluation, written out: every head by its own loop."""
    length, width = x.shape[1:]
    each = width // heads
    q, k, v = (block.norm1(x) @ block.qkv.weight.T).split(width, 2)
    seen = torch.zeros_like(x)
    for h in range(heads):
        own = slice(h * each, (h + 1) * each)
        for t in range(length):
            sees = t + 1 if block.attend.causal else length
            scores = torch.einsum("nd,nsd->ns", q[:, t, own], k[:, :sees, own]) / math.sqrt(each)
            seen[:, t, own] = torch.einsum("ns,nsd->nd", scores.softmax(-1), v[:, :sees, own])
    x = x + block.out(seen)
    h = block.up(block.norm2(x))
    return x + block.down(h * (1 + torch.erf(h / math.sqrt(2))) / 2)


@torch.no_grad()
def test_a_gpt_by_hand() -> None:
    torch.manual_seed(0)
    net, x = GPT(2, 2, 8, characters=5, dropout=0.5).double().eval(), torch.randint(5, (2, 7))
    h = net.embed.weight[x] + net.places.weight[:7]
    for block in net.blocks:
        h = attended(block, h, 2)
    torch.testing.assert_close(net(x), net.norm(h) @ net.embed.weight.T)
    # What comes later says nothing about what came before.
    later = x.clone()
    later[:, 4:] = (x[:, 4:] + 1) % 5
    changed = (net(later) - net(x)).abs().amax((0, 2)) > 0
    assert changed.tolist() == [False] * 4 + [True] * 3


@torch.no_grad()
def test_a_vit_by_hand() -> None:
    torch.manual_seed(0)
    net, x = ViTLite(2, 16, 8, classes=3, dropout=0.5).double().eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for value in (net.token, *(block.out.bias for block in net.blocks)):
        nn.init.normal_(value)
    rows = [net.token[0].expand(2, 1, 8)]
    for top, left in ((0, 0), (0, 16), (16, 0), (16, 16)):
        patch = x[:, :, top : top + 16, left : left + 16].flatten(1)
        rows.append((patch @ net.patches.weight.flatten(1).T + net.patches.bias)[:, None])
    h = torch.cat(rows, 1) + net.places
    for block in net.blocks:
        h = attended(block, h, 4)
    torch.testing.assert_close(net(x), net.fc(net.norm(h[:, 0])))
    assert [block.drop.p for block in net.blocks] == [0, 0.5]


def test_a_gpt_begins_as_nanogpt_does() -> None:
    torch.manual_seed(0)
    net = GPT(6, 2, 64)
    first = math.log(65)
    x = torch.randint(65, (4, 64))
    assert nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten().roll(1)).item() == pytest.approx(first, 0.03)
    for name, weight in net.named_parameters():
        if weight.dim() > 1:
            last = name.endswith(("out.weight", "down.weight"))
            assert weight.std().item() == pytest.approx(0.02 / math.sqrt(12) if last else 0.02, rel=0.05), name
    assert net.head.weight is net.embed.weight


def test_widths_that_heads_do_not_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`network` must be .*got 'gpt-2-3-16'"):
        find("gpt-2-3-16")
    with pytest.raises(ValueError, match="`width` must be a multiple of the 3 heads, got 16"):
        GPT(2, 3, 16)
    for name in ("vit-lite-7-5", "vit-lite-7-4-30"):
        with pytest.raises(ValueError, match=rf"`network` must be .*got '{name}'"):
            find(name)
    with pytest.raises(ValueError, match="`patch` must divide the 32 rows of an image, got 5"):
        ViTLite(7, 5)


def test_a_branch_is_left_out_for_whole_examples() -> None:
    torch.manual_seed(0)
    x, branch = torch.ones(2000, 3, 4), Branch(0.25)
    out = branch(x)
    assert torch.equal(out, out[:, :1, :1].expand_as(x))
    assert sorted(set(out.flatten().tolist())) == pytest.approx([0, 4 / 3])
    assert (out[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.04)  # 4 deviations
    assert branch.eval()(x) is x


# ---------------------------------------------------------------- gates


def small(**changes: object):  # type: ignore[no-untyped-def]
    """The row with gates, small enough for a test."""
    few = {"network": "gpt-2-2-16", "data": "sonnets", "batch": 16, "precision": "float32", "lr_warmup": 1}
    return get("gpt-50-shakespeare").override(**few | {"epochs": 2, "settle_at": 1} | changes)


@pytest.mark.slow
def test_a_gpt_is_trained_settled_and_compacted_exactly() -> None:
    data = load("sonnets")
    trainer = train([small()], data)
    (result,) = evaluation.results(trainer)
    assert result["architecture"].keys() == {"embed", "blocks.0.qkv", "blocks.0.up", "blocks.1.qkv", "blocks.1.up"}
    assert 0.4 < result["costs"]["macs"]["kept"] <= 0.5
    gated = trainer.network(0).double()
    compact = l0.compact(gated)
    # The whole rest of the text: what was noted is what the plain network gives.
    with torch.no_grad():
        torch.testing.assert_close(compact(data.test_x), gated(data.test_x))
        torch.testing.assert_close(compact(data.test_x[:1, :40]), gated(data.test_x[:1, :40]))
        logits = compact(data.test_x).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, data.test_y.flatten()).item()
    assert result["error_last"] == pytest.approx(loss, rel=1e-5)
    # Its MACs by arithmetic, from the widths.
    left = result["architecture"]
    total = 256 * 65 * left["embed"]
    for block in range(2):
        inner = 8 * left[f"blocks.{block}.qkv"]
        total += 256 * (4 * left["embed"] * inner + 2 * left["embed"] * left[f"blocks.{block}.up"])
        total += 2 * 256**2 * inner
    assert total == macs(compact.float(), data.test_x[:1])
    assert total == pytest.approx(result["costs"]["macs"]["kept"] * result["costs"]["macs"]["dense"])


@pytest.mark.slow
def test_a_vit_is_trained_settled_and_compacted_exactly() -> None:
    few = {"network": "vit-lite-2-8-16", "batch": 8, "epochs": 2, "settle_at": 1, "precision": "float32"}
    data = stand_in("cifar10", 32)
    trainer = train([get("vit-30-cifar10").override(**few, lr_warmup=1)], data)
    (result,) = evaluation.results(trainer)
    assert result["architecture"].keys() == {
        "patches",
        *(f"blocks.{k}.{part}" for k in (0, 1) for part in ("qkv", "up")),
    }
    assert 0.2 < result["costs"]["macs"]["kept"] <= 0.3
    gated = trainer.network(0).double()
    compact, x = l0.compact(gated), torch.randn(5, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(compact(x), gated(x))
    left = result["architecture"]
    stream = left["patches"]
    total = 16 * 3 * 64 * stream + 10 * stream
    for block in range(2):
        inner, hidden = 4 * left[f"blocks.{block}.qkv"], left[f"blocks.{block}.up"]
        total += 17 * (4 * stream * inner + 2 * stream * hidden) + 2 * 17**2 * inner
    assert total == macs(compact, x[:1])
    assert total == pytest.approx(result["costs"]["macs"]["kept"] * result["costs"]["macs"]["dense"])


def test_heads_are_not_rounded_to_what_other_widths_are() -> None:
    torch.manual_seed(0)
    net, x = GPT(1, 4, 32, 5), torch.randint(5, (2, 6))
    gated = l0.attach(net, (x,))
    parts = {name: np.zeros(gate.shape.numel(), bool) for name, gate in gated.named_gates()}
    assert {name: len(closed) for name, closed in parts.items()} == {"blocks.0.qkv": 4, "blocks.0.up": 128}
    parts["blocks.0.qkv"][:3] = parts["blocks.0.up"][:70] = True
    plan = shrinking.propose(gated, np.concatenate(list(parts.values())), 8)
    # A head has 8 entries; 58 units of the hidden layer are left, and rounded to 64.
    assert shrinking.widths(gated, plan) == {"blocks.0.qkv": 1, "blocks.0.up": 64}
    plan = shrinking.propose(gated, np.concatenate(list(parts.values())), 16)
    assert shrinking.widths(gated, plan) == {"blocks.0.qkv": 2, "blocks.0.up": 64}


# ---------------------------------------------------------------- steps


def test_learning_rates_rise_on_a_line_then_fall_on_a_cosine() -> None:
    policy = Policy(small(epochs=10, lr_warmup=4, settle_at=5), images=100)
    cosine = [(1 + math.cos(math.pi * epoch / 10)) / 2 for epoch in range(10)]
    expected = [min(1, (epoch + 1) / 4) * cosine[epoch] for epoch in range(10)]
    assert [policy.rates(epoch)[0] for epoch in range(10)] == pytest.approx(expected)


def test_adamw_takes_a_share_of_matrices_and_of_nothing_else() -> None:
    data = load("sonnets")
    trainer = Trainer([small(l2=0.5, lr=0.01)], data)
    before = {name: value.detach().clone() for name, value in trainer.runs.values().items()}
    for value in trainer.runs.values().values():
        value.grad = torch.zeros_like(value)
    trainer.optimizer.step()
    for name, value in trainer.runs.values().items():
        shrinks = value.dim() > 1 and not name.startswith("network.gates.")
        torch.testing.assert_close(value.detach(), before[name] * (1 - 0.01 * 0.5 if shrinks else 1), msg=name)
    assert not any(cost is l0.l2_norm for cost, _ in trainer.runs.template.parts)


def test_the_test_after_training_takes_as_many_excerpts_at_once_as_those_within() -> None:
    """Others would need memory that nobody reckoned with."""
    recipe = get("gpt-50-shakespeare").override(network="gpt-1-2-16")
    dataset, sizes = stand_in(recipe.data, 130), []

    class Counting(GPT):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    opening.error_of(Counting(1, 2, 16), recipe, dataset)
    assert max(sizes) == Policy(recipe, 130).test_batch == 64
