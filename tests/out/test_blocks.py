"""Whole blocks: a branch that is closed adds nothing, and is gone from the module tree, with all that only it has.

The oracle is a copy in which what the branch gives is multiplied by hand, and torch's own counts. What comes in has
another batch size, and another length, than the example.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.networks.gpt import GPT
from ellzero.experiments.networks.resnet import ResNet
from ellzero.experiments.networks.wide_resnet import WideResNet
from ellzero.experiments.train.building import architecture
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.trainer import Trainer
from ellzero.graph.standins.layers import Closed, Nothing
from ellzero.objectives import costs
from ellzero.out import shrinking
from ellzero.out.finalization import refuse_unreachable, revive
from support import runs, traced
from support.branches import Around, Basic, Encoder, Mixture, Refused, times
from support.loops import driven
from support.oracles import (
    assert_counted,
    assert_same,
    every_state,
    measured,
    numel,
    open_exactly,
    scattered,
    set_gates,
    settled,
)
from support.zoo import Residual

WHOLE = l0.shrinkable(blocks=True)
Make = Callable[[], nn.Module]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def words(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(sum(shape)))


def ends(pattern: str, *blocks: str) -> dict[str, str]:
    return {f"{name}.block": f"{name}{pattern}" for name in blocks}


# The network, an example, other inputs, and for each block whose output is what it adds.
NETWORKS: dict[str, tuple[Make, Tensor, Tensor, dict[str, str]]] = {
    "padded": (
        lambda: ResNet(8, 3, share=0.125), draw(2, 3, 8, 8), draw(3, 3, 8, 8),
        ends(".bn2", "blocks.0", "blocks.1", "blocks.2"),
    ),
    "wide": (
        lambda: WideResNet(10, 1, 3), draw(2, 3, 8, 8), draw(3, 3, 8, 8),
        ends(".conv2", "blocks.0", "blocks.1", "blocks.2"),
    ),
    "basic": (Basic, draw(2, 2, 5, 5), draw(3, 2, 5, 5), ends(".bn2", "layer.0", "layer.1")),
    "torch": (
        Encoder, draw(2, 5, 8), draw(3, 7, 8),
        ends("", *(f"encoder.layers.{k}.{end}" for k in (0, 1) for end in ("self_attn", "linear2"))),
    ),
    "gpt": (
        lambda: GPT(2, 2, 8, 9), words(2, 6), words(3, 4),
        ends("", *(f"blocks.{k}.{end}" for k in (0, 1) for end in ("out", "down"))),
    ),
    "mixture": (Mixture, draw(2, 2), draw(3, 2), ends("", *(f"experts.{k}" for k in range(3)))),
    "nested": (Around, draw(2, 2), draw(3, 2), ends("", "last", "inner", "left", "right")),
}  # fmt: skip


def attached(kind: str, **options: Any) -> l0.Gated:
    make, x, *_ = NETWORKS[kind]
    return traced.attached(settled(make()), x, where=l0.shrinkable(blocks=True, **options)).eval()


def traced_blocks(model: nn.Module) -> Any:
    """The blocks of a network over two numbers, which may have nothing else to gate."""
    found: list[Any] = []

    def where(graph: l0.graph.Graph) -> list[Any]:
        found.extend(graph.blocks)
        return WHOLE(graph)

    with suppress(ValueError):
        l0.attach(settled(model), draw(2, 2), where=where)
    return found


def wholes(gated: l0.Gated) -> list[str]:
    return [p.name for p in gated.placements if p.block is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_block_that_is_closed_is_gone(kind: str) -> None:
    gated = attached(kind)
    _, x, others, last = NETWORKS[kind]
    assert set(wholes(gated)) == last.keys()
    for odd in (0, 1):  # blocks between those that go, and units of both
        numbers = np.random.default_rng(odd)
        closed = {name: [0] for name in wholes(gated)[odd::2]}
        closed |= {
            n: [int(numbers.integers(g.shape[0]))]
            for n, g in gated.named_gates()
            if n not in last and len(g.shape) and g.shape[0] > 1
        }
        z = set_gates(gated, closed, odd)
        # Of units the library's own copy is masked, as elsewhere; of blocks the one masked by hand.
        with torch.no_grad():
            for name, gate in gated.named_gates():
                if name in last:
                    gate.log_alpha.fill_(9.0)
        units = l0.fold(gated)
        set_gates(gated, closed, odd)
        hand = times(units, {last[name]: z[name] for name in last})
        small = l0.compact(gated)
        with torch.no_grad():
            assert_same(gated(others), hand(others))
            assert_same(small(others), hand(others))
        assert_counted(gated, small, (x,))
        for block in (gated.graph.blocks[b] for b in gated.plan().blocks):
            for path in block.layers:
                assert isinstance(small.get_submodule(path), Nothing | Closed)
                assert not list(small.get_submodule(path).parameters())
        for cost in (l0.params, l0.macs):  # nothing is left of a closed block, and of what only it has
            parts = costs.breakdown(costs.kept(cost), gated)
            held = [n for n in parts for b in gated.plan().blocks if gated.graph.blocks[b].holds(n)]
            assert held
            assert not any(parts[name] for name in held)


@pytest.mark.parametrize("make", [Residual, Around])
def test_the_expected_cost_is_that_of_all_states(make: Make) -> None:
    def where(graph: l0.graph.Graph) -> list[Any]:
        return [p for p in WHOLE(graph) if p.block is not None or p.name in ("up", "inner.up")]

    torch.manual_seed(0)
    x = draw(2, 2)
    gated = scattered(traced.attached(make().double(), x, where=where))
    assert len(wholes(gated)) == (2 if make is Residual else 4)
    with torch.no_grad():
        expected = [float(cost(gated)) for cost in (l0.params, l0.macs)]
    total, trial = np.zeros(2), copy.deepcopy(gated).eval()
    for state, weight in every_state(gated):
        open_exactly(trial, state)
        total += weight * np.array(measured(l0.compact(trial, verify=False), x))
    assert expected == pytest.approx(total.tolist(), rel=1e-6)


def test_units_of_a_closed_block_do_not_count() -> None:
    gated = attached("nested")
    everything = float(l0.dense(l0.units, gated))
    set_gates(gated, {"last.block": [0]})  # the block in it goes with it
    assert everything - float(l0.units(gated, kept=True)) == 2
    p = dict(zip(wholes(gated), gated.prob_open()[-4:].tolist(), strict=True))
    inner = dict(gated.named_gates())["inner.up"].prob_open().sum().detach()
    expected = float(l0.units(gated, only="inner.up").detach())
    assert expected == pytest.approx(float(inner) * p["last.block"] * p["inner.block"])


@pytest.mark.parametrize(
    "why",
    [
        "it serves twice",
        "something else reads it",
        "it adds a number",
        "a norm follows, whatever its size",
        "no way around",
        "a product is left",
    ],
)
def test_what_cannot_go_as_a_whole_has_no_gate(why: str) -> None:
    blocks = traced_blocks(Refused(why))
    assert not any("feed" in path for block in blocks for path in block.layers)


def test_finalize_closes_blocks_where_units_are_not_enough() -> None:
    plain, gated = (
        traced.attached(settled(Residual()), draw(2, 2)),
        traced.attached(settled(Residual()), draw(2, 2), where=WHOLE),
    )
    with pytest.raises(ValueError, match="must be at least"):
        refuse_unreachable(plain, 0.5, l0.macs)
    refuse_unreachable(gated, 0.5, l0.macs)
    set_gates(gated, {})
    l0.finalize(gated, 0.5, l0.macs)
    closed = [name for name, gate in gated.named_gates() if name in wholes(gated) and not gate.open().any()]
    assert closed
    assert float(l0.macs(gated, kept=True)) <= 0.5 * l0.dense(l0.macs, gated)
    revive(gated)
    assert closed == [name for name, gate in gated.named_gates() if name in wholes(gated) and not gate.open().any()]
    l0.finalize(gated, 1.0, l0.macs, fill=True)  # there is room for all of them
    assert bool(gated.opens().all())


def test_uniform_widths_leave_blocks_as_they_are() -> None:
    gated = attached("torch")
    set_gates(gated, {wholes(gated)[1]: [0]})
    l0.finalize(gated, 0.6, l0.macs, uniform="blocks")
    widths = {name: int(gate.open().sum()) for name, gate in gated.named_gates()}
    assert widths["encoder.layers.0.linear1"] == widths["encoder.layers.1.linear1"]
    assert widths[wholes(gated)[1]] == 0
    assert float(l0.macs(gated, kept=True)) <= 0.6 * l0.dense(l0.macs, gated)


def test_the_evidence_for_a_block_is_that_for_all_that_goes_with_it() -> None:
    """A unit of either block costs as much. The block with the weak units goes, though both gates say the same."""
    gated = traced.attached(settled(Around()), draw(2, 2), where=WHOLE)
    gates: dict[str, Any] = dict(gated.named_gates())
    with torch.no_grad():
        for gate in gates.values():
            gate.log_alpha.fill_(4.0)
        gates["right.up"].log_alpha.fill_(-1.0)
    l0.finalize(gated, 1 - 10 / float(l0.dense(l0.params, gated)), l0.params)
    assert [name for name in wholes(gated) if not gates[name].open().any()] == ["right.block"]


@pytest.mark.parametrize("strange", [[], ["encoder.layers.1.linear1"]])
def test_a_block_that_is_surely_open_is_not_closed_because_its_units_are_dear(strange: list[str]) -> None:
    """Units can meet this target, and no block is to go. By P alone that of two heads went; six cheap units stayed.
    That some other gates have no P makes no difference.
    """
    make, x, *_ = NETWORKS["torch"]
    kinds = {**dict.fromkeys(strange, l0.gates.VIBGate), "*": l0.HardConcreteGate}
    gated = traced.attached(settled(make()), x, where=l0.shrinkable(blocks=True), gate=kinds).eval()
    gates = dict(gated.named_gates())
    with torch.no_grad():
        for name, gate in gates.items():
            if isinstance(gate, l0.HardConcreteGate):
                gate.log_alpha.fill_(9.0 if name in wholes(gated) else 3.0)
    l0.finalize(gated, 0.6, l0.macs)
    assert all(gates[name].open().all() for name in wholes(gated))


def test_a_block_that_is_gone_is_saved_and_loaded(tmp_path: Path) -> None:
    gated = attached("torch")
    set_gates(gated, {name: [0] for name in wholes(gated)[:2]})
    small = l0.compact(gated)
    l0.save(small, tmp_path / "small.safetensors")
    loaded = l0.load(settled(Encoder(), 1), tmp_path / "small.safetensors")
    with torch.no_grad():
        assert_same(loaded(draw(3, 7, 8)), small(draw(3, 7, 8)))
    assert str(loaded) == str(small)
    with pytest.raises(ValueError, match="another network"):
        l0.load(nn.Sequential(nn.Linear(2, 2)), tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match="made smaller already"):
        l0.load(small, tmp_path / "small.safetensors")


def test_it_shrinks_while_it_trains() -> None:
    """Of a closed block one unit of each axis stays until the end, and then nothing."""
    gated = attached("basic")
    set_gates(gated, {"layer.0.block": [0]})
    whole = l0.compact(gated)
    plan = shrinking.propose(gated, ~gated.opens().numpy())
    assert not plan.blocks
    gated.shrink(plan)
    block: Any = gated.model.get_submodule("layer.0")
    assert (block.conv1.out_channels, block.conv2.in_channels) == (1, 1)
    small = l0.compact(gated)
    assert str(small) == str(whole)
    with torch.no_grad():
        assert_same(small(draw(3, 2, 5, 5)), whole(draw(3, 2, 5, 5)))
    assert float(l0.params(gated, kept=True)) == numel(whole)


@pytest.mark.slow
def test_a_budget_closes_blocks_and_a_run_is_taken_up() -> None:
    x, y = draw(8, 2), draw(8, 2).flip(1)

    def loop() -> Any:
        torch.manual_seed(0)
        gated = traced.attached(Residual().double(), draw(2, 2), where=WHOLE).train()
        sgd = torch.optim.SGD(gated.param_groups(lr=1e-2))
        return driven(gated, sgd, lambda _: (gated(x) - y).square().mean(), macs=0.5, steps=60, learning=0.5)

    one, first, second = loop(), loop(), loop()
    one.train(range(60))
    first.train(range(20))
    second.take_up(first.state())
    second.train(range(20, 60))
    small, same = (run.budget.finish() for run in (one, second))
    assert str(small) == str(same)
    assert all(torch.equal(a, b) for a, b in zip(small.state_dict().values(), same.state_dict().values(), strict=True))
    _, macs = measured(small, draw(1, 2))
    assert macs <= 0.5 * (6 + 9 + 6 + 6 + 6)


def test_a_report_tells_of_blocks() -> None:
    gated = attached("nested")
    set_gates(gated, {"last.block": [0]})
    told = l0.report(gated)
    rows = {row.name: row for row in told.axes}
    assert (rows["inner.up"].kept, rows["inner.up"].why) == (0, "its block is gone")
    assert {row.name: row.kept for row in told.gates if "block" in row.name}["last.block"] == 0
    assert told.params.kept == numel(l0.compact(gated))


def test_gates_on_activations_close_blocks_too() -> None:
    make, x, others, _ = NETWORKS["nested"]
    gated = l0.attach(settled(make()), x, where=WHOLE, apply="activations").eval()
    set_gates(gated, {"last.block": [0], "left.block": [0]})
    with torch.no_grad():
        assert_same(gated(others), l0.compact(gated)(others))


def test_a_block_has_one_gate() -> None:
    graph = attached("nested").graph
    twice = [p for p in WHOLE(graph) if p.block == 0]
    with pytest.raises(ValueError, match="one gate on a block"):
        l0.attach(
            settled(Around()), draw(2, 2), graph=graph, where=lambda g: [*WHOLE(g), *(_renamed(p) for p in twice)]
        )


def _renamed(placement: Any) -> Any:
    return type(placement)("again", *(getattr(placement, key) for key in ("shape", "multiplies", "counts", "block")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_attention_that_is_gone_counts_in_a_cache(kind: str) -> None:
    """Hugging Face asks the first layer of a cache how many words it has seen, and there is no attention there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=6)
        model = settled(transformers.LlamaForCausalLM(config))
    else:
        config = transformers.GPT2Config(**sizes, n_positions=16, bos_token_id=1, eos_token_id=2)
        model = settled(transformers.GPT2LMHeadModel(config))
    gated = l0.attach(model, {"input_ids": words(2, 6), "use_cache": False}, where=WHOLE).eval()
    assert len(gated.graph.blocks) == 4
    set_gates(gated, {gated.graph.blocks[0].name: [0]})
    assert "attn" in gated.graph.blocks[0].name
    small, x = l0.compact(gated), words(3, 5)
    assert float(l0.params(gated, kept=True)) == numel(small)
    with torch.no_grad():
        whole = gated(input_ids=x, use_cache=False).logits
        begun = small(input_ids=x[:, :3], use_cache=True)
        ended = small(input_ids=x[:, 3:], past_key_values=begun.past_key_values, use_cache=True)
    assert_same(torch.cat([begun.logits, ended.logits], 1), whole)


def test_inputs_of_a_closed_block_are_not_picked() -> None:
    gated = traced.attached(settled(Encoder()), draw(2, 5, 8), where=l0.shrinkable(parts=True, blocks=True)).eval()
    name = "encoder.layers.0.linear2.block"
    z = set_gates(gated, {name: [0], "encoder.layers.0.linear1.inputs": [1], "encoder.layers.1.linear1.inputs": [1]})
    told = {row.name: row for row in l0.report(gated).inputs}
    assert (told["encoder.layers.0.linear1"].kept, told["encoder.layers.1.linear1"].kept) == (0, 7)
    p = dict(gated.named_gates())[name].prob_open().item()
    each = dict(gated.named_gates())["encoder.layers.0.linear1.inputs"].prob_open().sum().item()
    assert told["encoder.layers.0.linear1"].expected == pytest.approx(p * each)
    assert z[name] == 0
    small = l0.compact(gated)
    with torch.no_grad():
        assert_same(small(draw(3, 7, 8)), gated(draw(3, 7, 8)))
    assert_counted(gated, small, (draw(2, 5, 8),))


@pytest.mark.slow
def test_a_recipe_closes_blocks() -> None:
    """Under a budget that units alone cannot meet, 9.3 % at least: they are gone while it trains on, and where they are
    counted.
    """
    budget = {"at_most": 0.08, "cost": "macs", "dual": "auto", "gate_lr": 0.3, "epochs": 4, "settle_at": 2}
    recipe = runs.recipe("wrn-10-1", placement="whole", **budget)
    trainer = Trainer([recipe], runs.images("cifar10"))
    for _ in range(recipe.epochs):
        list(train_epoch(trainer))
    gated = runs.gated_of(trainer)
    left = architecture(gated)
    gone = [k for k in range(3) if not left[f"blocks.{k}.block"]]
    assert gone
    assert all(left[f"blocks.{k}.conv1"] == 0 for k in gone)
    assert float(l0.macs(gated, kept=True)) <= 0.08 * l0.dense(l0.macs, gated)


@pytest.mark.parametrize("which", [0, 1])
def test_torchs_layers_take_no_shortcut_around_a_branch_that_is_gone(which: int, tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        return settled(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 6, batch_first=True), nn.Linear(8, 3)), seed)

    model = made(0)
    gated = traced.attached(model, draw(2, 5, 8), where=WHOLE).eval()
    with torch.no_grad():
        for name, gate in gated.named_gates():
            gate.log_alpha.fill_(-9.0 if name == wholes(gated)[which] else 9.0)
    small = l0.compact(gated)
    hand = times(model, {("0.self_attn", "0.linear2")[which]: torch.zeros(())})
    l0.save(small, tmp_path / "small.safetensors")
    with torch.no_grad():  # where torch would take one
        hand_made = hand(draw(3, 7, 8))
        assert_same(small(draw(3, 7, 8)), hand_made)
        assert_same(l0.load(made(1), tmp_path / "small.safetensors")(draw(3, 7, 8)), hand_made)


def test_a_block_has_the_name_of_the_module_that_holds_it() -> None:
    """Else of its last layer; never of one that does not exist, where layers in two modules are called alike."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
            self.down, self.up = (nn.ModuleDict({"fc": nn.Linear(*size)}) for size in ((6, 4), (4, 6)))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x + self.up["fc"](self.down["fc"](x).relu()))

    gated = l0.attach(Apart(), torch.zeros(1, 3), where=WHOLE)
    assert wholes(gated) == ["up.fc.block"]
