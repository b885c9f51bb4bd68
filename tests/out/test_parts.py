"""Layers that read and write parts of a stream that cannot shrink, as one with norms behind its sums.

The oracle multiplies what a layer reads, and what it writes before its bias, by hand.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.page.facts import _columns
from support import traced
from support.oracles import assert_counted, assert_same, each, masked_by_hand, set_gates, settled

PARTS = l0.shrinkable(parts=True)


class Block(nn.Module):
    def __init__(self, bias: bool = True):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 4), nn.Linear(4, 6, bias=bias), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.blocks, self.head = nn.Sequential(Block(), Block(bias=False)), nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(self.embed(words))).mean(1))


def words(batch: int, length: int) -> Tensor:
    return torch.randint(9, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def by_hand(model: nn.Module, z: dict[str, Tensor]) -> nn.Module:
    out: Any = masked_by_hand(
        model, z, {name: {name.removesuffix(".inputs"): each(1)} for name in z if name.endswith(".inputs")}
    )
    out = masked_by_hand(out, z, {f"blocks.{k}.up": {f"blocks.{k}.down": each(1)} for k in (0, 1)})
    for name in (name for name in z if name.endswith(".outputs")):
        layer = out.get_submodule(name.removesuffix(".outputs"))

        def hook(m: nn.Linear, _: Any, y: Tensor, factor: Tensor = z[name]) -> Tensor:
            bias = 0 if m.bias is None else m.bias
            return (y - bias) * factor + bias

        layer.register_forward_hook(hook)
    return out


CLOSED = {
    "blocks.0.up": [1],
    "blocks.0.up.inputs": [0, 1, 5],
    "blocks.0.down.outputs": [2, 3],
    "blocks.1.down.outputs": [0, 4, 5],
    "head.inputs": [3],
}


WHOLE = [pytest.param({f"blocks.{k}.down.outputs": range(6)}, marks=pytest.mark.slow) for k in (0, 1)]


@pytest.mark.parametrize("closed", [CLOSED, *WHOLE])
def test_layers_read_and_write_parts(closed: dict[str, Any]) -> None:
    model = settled(PostNorm())
    gated = traced.attached(model, words(2, 5), where=PARTS).eval()
    names = {f"blocks.{k}.{n}" for k in (0, 1) for n in ("up", "up.inputs", "down.outputs")} | {"head.inputs"}
    assert {name for name, _ in gated.named_gates()} == names
    z = set_gates(gated, closed)
    small: Any = l0.compact(gated)
    theirs = by_hand(model, z)(words(3, 7))
    assert_same(gated(words(3, 7)), theirs)
    assert_same(small(words(3, 7)), theirs)
    left = 6 - len(closed.get("blocks.0.down.outputs", ()))
    assert small.blocks[0].down.weight.shape[0] == max(left, 1)  # a layer without outputs has no shape
    if left:
        assert_counted(gated, small, (words(2, 5),))


@pytest.mark.slow
def test_files_hold_them(tmp_path: Path) -> None:
    gated = traced.attached(settled(PostNorm()), words(2, 5), where=PARTS).eval()
    set_gates(gated, CLOSED)
    small = l0.compact(gated)
    l0.save(small, tmp_path / "small.safetensors")
    again = l0.load(PostNorm(), tmp_path / "small.safetensors").eval()
    assert torch.equal(again(words(3, 7)), small(words(3, 7)))
    assert again.state_dict().keys() == small.state_dict().keys()
    with pytest.raises(ValueError, match="made smaller already"):
        l0.load(again, tmp_path / "small.safetensors")

    narrow = PostNorm()
    narrow.blocks[0].down = nn.Linear(4, 2)  # than what is placed in it
    with pytest.raises(ValueError, match="file of another network"):
        l0.load(narrow, tmp_path / "small.safetensors")


@pytest.mark.slow
def test_parts_of_a_network_with_gates_elsewhere_cost_what_is_said() -> None:
    """E[params] of two linear layers under independent gates, by hand."""
    gated = traced.attached(PostNorm(), words(2, 5), where=PARTS)
    p = {name: float(gate.prob_open().detach().sum()) for name, gate in gated.named_gates()}
    blocks = 0.0
    for k, bias in ((0, 6), (1, 0)):
        hidden = p[f"blocks.{k}.up"]
        blocks += hidden * p[f"blocks.{k}.up.inputs"] + hidden + hidden * p[f"blocks.{k}.down.outputs"] + bias
    rest = 9 * 6 + 3 * 12 + 3 * p["head.inputs"] + 3
    assert float(l0.params(gated).detach()) == pytest.approx(blocks + rest, rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gates settle after")
def test_a_budget_over_parts() -> None:
    torch.manual_seed(0)
    gated = traced.attached(PostNorm(), words(2, 5), where=PARTS)
    budget = l0.Budget(gated, macs=0.5, steps=10)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for k in range(10):
        optimizer.zero_grad()
        F.cross_entropy(gated(words(4, 5)), words(4, 5)[:, k % 5] % 3).backward()
        optimizer.step()
    small = budget.finish()
    whole = copy.deepcopy(small)
    assert float(l0.macs(gated, kept=True)) <= 0.5 * l0.dense(l0.macs, gated)
    assert torch.equal(whole.eval()(words(3, 7)), small.eval()(words(3, 7)))


@pytest.mark.slow
def test_what_a_live_network_cannot_follow_is_refused() -> None:
    gated = traced.attached(settled(PostNorm()), words(2, 5), where=PARTS)
    set_gates(gated, {"blocks.0.down.outputs": [1]})
    with pytest.raises(ValueError, match="leave layers and single inputs"):
        gated.shrink(gated.plan())


@pytest.mark.slow
def test_parts_of_bert() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 12}
    model = settled(transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes), add_pooling_layer=False))
    gated = l0.attach(model, {"input_ids": words(2, 5)}, where=PARTS).eval()
    found = {name: gate.shape[0] for name, gate in gated.named_gates()}
    layers = [name.removesuffix(".outputs") for name in found if name.endswith(".outputs")]
    assert layers == [f"encoder.layer.0.{part}output.dense" for part in ("attention.", "")]
    set_gates(gated, {name: range(0, n, 3) for name, n in found.items()})
    small: Any = l0.compact(gated)
    assert_same(small(input_ids=words(3, 7))[0], gated(input_ids=words(3, 7))[0])
    assert float(l0.params(gated, kept=True)) == sum(p.numel() for p in small.parameters())


@pytest.mark.slow
def test_the_report_and_the_page_tell_inputs_from_outputs() -> None:
    gated = traced.attached(settled(PostNorm()), words(2, 5), where=PARTS).eval()
    set_gates(gated, CLOSED)
    made = l0.report(gated)
    assert "Inputs and outputs picked one by one" in str(made)
    kept = {row.name: row.kept for row in made.inputs}
    assert (kept["blocks.0.down, outputs"], kept["blocks.0.up"]) == (4, 3)
    _, table = _columns(gated, made)
    assert {"blocks.0.down: outputs written", "head: inputs read"} <= {row.name for row in table}


@pytest.mark.slow
def test_a_layer_that_reads_nothing_places_nothing() -> None:
    model = settled(PostNorm())
    gated = traced.attached(model, words(2, 5), where=PARTS).eval()
    z = set_gates(gated, {"blocks.0.up": range(4), "blocks.0.down.outputs": [1, 2]})
    small = l0.compact(gated)
    assert_same(small(words(3, 7)), by_hand(model, z)(words(3, 7)))
    assert_counted(gated, small, (words(2, 5),))


class Table(nn.Module):
    """Features, of which `scaled` ones are standardised inside, a stream with a norm before each block."""

    def __init__(self, scaled: bool = False):
        super().__init__()
        self.stem, self.norm = nn.Linear(7, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 2)
        self.scaled = scaled
        self.register_buffer("mean", torch.linspace(-1, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem((x - self.mean) / 2 if self.scaled else x)
        return self.head(h + self.down(F.relu(self.up(self.norm(h)))))


@pytest.mark.parametrize("scaled", [False, True])
def test_inputs_are_what_the_network_reads_and_no_stream(scaled: bool) -> None:
    model, x = settled(Table(scaled)), torch.randn(5, 7, dtype=torch.float64)
    gated = traced.attached(model, x[:2], where=l0.shrinkable(inputs=True)).eval()
    assert {name: gate.shape.numel() for name, gate in gated.named_gates()} == {"up": 4, "stem.inputs": 7}
    z = set_gates(gated, {"stem.inputs": [0, 2, 6], "up": [1]})
    small: Any = l0.compact(gated)
    theirs = masked_by_hand(model, z, {"stem.inputs": {"stem": each(1)}, "up": {"down": each(1)}})(x)
    assert_same(gated(x), theirs)
    assert_same(small(x), theirs)
    assert (small.stem.weight.shape, small.down.weight.shape) == ((6, 4), (6, 3))
    unread = x.clone()
    unread[:, [0, 2, 6]] = 1e6
    assert_same(small(unread), theirs)
    assert_counted(gated, small, (x[:2],))


def test_inputs_are_gated_where_linear_layers_read_them_alone() -> None:
    def names(model: nn.Module, x: Tensor) -> list[str]:
        gated = traced.attached(model, x, where=l0.shrinkable(inputs=True))
        return [name for name, _ in gated.named_gates()]

    flat = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    assert names(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.zeros(2, 3, 2, 2)) == ["0"]
    assert names(flat, torch.zeros(2, 3, 4)) == ["1.inputs"]
    assert names(PostNorm(), words(2, 5)) == ["blocks.0.up", "blocks.1.up"]
    with pytest.raises(ValueError, match=r"; `where=l0.shrinkable\(inputs=True\)` or .* has gates here"):
        l0.attach(nn.Sequential(nn.Flatten(), nn.Linear(12, 12)), torch.zeros(2, 3, 4))


class Residual(nn.Module):
    """What `a` writes, `b` reads and a norm as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.out = nn.Linear(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.out(self.norm(h + self.b(torch.relu(h))))  # type: ignore[no-any-return]


def test_what_was_picked_is_picked_from_again(tmp_path: Path) -> None:
    """Attach and compact, and both once more: a layer that has a `Select` gets one of both, which a file keeps."""
    torch.manual_seed(0)
    net: Any = Residual().double()
    x, other = (torch.randn(n, 9).double() for n in (2, 5))
    for left in ([0, 2, 3, 5, 6], [0, 3, 5]):
        gated = l0.attach(net, x, where=PARTS).eval()
        sizes = {name: gate.shape.numel() for name, gate in gated.named_gates() if name in ("a.outputs", "b.inputs")}
        set_gates(gated, {name: [k for k in (1, 4, 7) if k < size] for name, size in sizes.items()})
        net = l0.compact(gated)
        assert_same(net(other), gated(other))
        assert net.b.select.width == 8
        assert net.b.select.index.tolist() == left
    l0.save(net, tmp_path / "small.safetensors")
    assert_same(l0.load(Residual().double(), tmp_path / "small.safetensors").eval()(other), net(other))
