"""Gates on activations: the same function and gradients as gates in weights; under `fully_shard` the same training.

The oracle is the other way of applying gates: in weights, in one process.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ellzero as l0
from support import processes, replicated
from support.oracles import assert_same, scattered, set_gates, settled
from support.traced import attached
from support.zoo import LeNet, ResNet


class Named(nn.Module):
    """A layer that is called by keyword, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(input=x))
        return self.c(input=self.b(torch.tanh(self.b(h))))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A linear layer that is frozen, beside a path of low rank that learns: as adapters of PEFT are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(inputs, outputs), nn.Linear(inputs, 2, bias=False)
        self.up = nn.Linear(2, outputs, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))  # type: ignore[no-any-return]


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(3, 12), nn.ReLU(), Adapted(12, 10), nn.ReLU(), Adapted(10, 2)).double()


def pair(model: nn.Module, x: Tensor, **options: Any) -> tuple[l0.Gated, l0.Gated]:
    """The same gates, in weights and on activations."""
    ours = scattered(l0.attach(model, x, apply="activations", **options))
    theirs = l0.attach(model, x, graph=ours.graph, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "LeNet": lambda: (LeNet().double(), torch.randn(2, 1, 14, 14, dtype=torch.float64)),
    "ResNet": lambda: (ResNet().double(), torch.randn(2, 2, 6, 6, dtype=torch.float64)),
    "Blocks": lambda: (replicated.Blocks().double(), torch.randn(4, 8, dtype=torch.float64)),
    "Adapted": lambda: (adapted(), torch.randn(4, 3, dtype=torch.float64)),
    "Named": lambda: (Named().double(), torch.randn(4, 3, dtype=torch.float64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_activations_give_what_weights_do(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    ours, theirs = pair(settled(model), x)
    u, found = torch.rand(ours.liveness.size, dtype=torch.float64), []
    for gated in (ours, theirs):
        gated.train(name != "ResNet")  # statistics of a batch follow the same way in both, and move
        gated.zero_grad()
        out = gated(x, gate_noise=u) if gated.training else gated(x)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in gated.parameters() if p.grad is not None)])
    assert len(found[0]) > 3
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    first, gate = next(iter(ours.named_gates()))
    set_gates(ours, {first: [0, gate.shape[0] - 1]})
    small = l0.compact(ours.eval())
    torch.testing.assert_close(small(x), ours(x), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("apply", ["weights", "activations"])
def test_frozen_weights_stay_while_gates_and_adapters_learn(apply: str) -> None:
    """The units between layers with adapters are gated, and both paths of a layer lose them."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, dtype=torch.float64)
    gated = l0.attach(adapted(), x, apply=apply).train()
    # And those of low rank; the first layer reads three inputs beside its adapter, as a whole.
    assert {gate.shape.numel() for _, gate in gated.named_gates()} == {12, 10, 2}
    frozen = {name: p.clone() for name, p in gated.model.named_parameters() if not p.requires_grad}
    budget = l0.Budget(gated, macs=0.6, steps=30)
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    for step in range(30):
        if step == budget.settles - 1:  # before gates are folded into all weights
            now = dict(gated.model.named_parameters())
            assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
        optimizer.zero_grad()
        gated(x).square().mean().backward()
        optimizer.step()
    small = budget.finish()
    torch.testing.assert_close(small(x), gated.eval()(x), rtol=1e-10, atol=1e-12)
    assert small[0].base.weight.shape[0] == small[0].up.weight.shape[0] == small[2].down.weight.shape[1] < 12


class Int8(nn.Module):
    """A linear layer with its weight in 8 bits and a scale for each output, as weight-only quantisation has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.bias = layer.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("weight").to(x.dtype) * self.get_buffer("scale")
        return nn.functional.linear(x, weight, self.bias)


def dynamic(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, and there
        whole = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer.float()), {nn.Linear})
    out: nn.Module = whole[0]
    return out


@pytest.fixture
def engine() -> Iterator[None]:
    """One that quantises on this CPU: torch begins with x86's on every one, and calls it supported."""
    quantized = torch.backends.quantized
    before = quantized.engine
    try:
        for name in [before, *quantized.supported_engines]:
            quantized.engine = name
            with suppress(RuntimeError):
                dynamic(nn.Linear(1, 1))
                break
        else:
            pytest.skip("torch has no engine that quantises on this CPU")
        yield
    finally:
        quantized.engine = before


@pytest.mark.parametrize("quantised", [Int8, dynamic])
@pytest.mark.usefixtures("engine")
def test_weights_that_are_quantised_after_attach_are_gated(quantised: Callable[[nn.Linear], nn.Module]) -> None:
    """The first layer is frozen, the second one quantised; in 8 bits, where torch has gradients, the third learns."""
    torch.manual_seed(0)
    dtype = torch.float64 if quantised is Int8 else torch.float32
    x = torch.randn(16, 6, dtype=dtype)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).to(dtype)
    model[0].requires_grad_(False)
    whole = copy.deepcopy(model)
    gated = l0.attach(model, x, apply="activations")
    gated.model[2] = quantised(gated.model[2])
    before = {key: value.clone() for key, value in gated.model.state_dict().items() if isinstance(value, Tensor)}
    if quantised is Int8:
        constraint = l0.Constraint(l0.macs, 0.5, dual=l0.duals.GradientAscent(0.5))
        optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2, gate_lr=0.3))
        for _ in range(30):
            optimizer.zero_grad()
            (gated.train()(x).square().mean() + constraint(gated)).backward()
            optimizer.step()
            constraint.ascend()
        assert l0.macs(gated).item() < 0.6 * l0.dense(l0.macs, gated)
        after = gated.model.state_dict()
        moved = {key for key, value in before.items() if not torch.equal(after[key], value)}
        assert moved == {"4.weight", "4.bias"}
    z = set_gates(gated.eval(), {"0": [0, 3, 4], "2": [1, 2]})

    def by_hand(net: nn.Sequential) -> Tensor:
        out: Tensor = net[4](net[2](net[0](x).relu() * z["0"]).relu() * z["2"])
        return out

    assert_same(gated(x), by_hand(gated.model), 1e-12 if quantised is Int8 else 1e-6)
    for refused in (l0.compact, l0.fold, lambda g: l0.Budget(g, macs=0.5, steps=10)):
        with pytest.raises(ValueError, match=r"`2.weight`, which gates close units of, is no parameter any more, in a"):
            refused(gated)
    # What is left is known all the same: the gates, on the network with the weights that it had.
    whole[4].load_state_dict(gated.model[4].state_dict())
    other = l0.attach(whole, x).eval()
    other.gates.load_state_dict(gated.gates.state_dict())
    small = l0.compact(other)
    assert (small[2].in_features, small[2].out_features) == (9, 8)
    assert_same(small(x), by_hand(whole), 1e-12 if quantised is Int8 else 1e-5)
    assert float(l0.macs(gated, kept=True)) == 6 * 9 + 9 * 8 + 8 * 3


def test_a_weight_in_eight_bits_in_its_own_place_is_refused_too() -> None:
    gated = l0.attach(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3), apply="activations")
    gated.model[1].weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"`1.weight`, which gates close units of, is now in torch.int8: attach gates"):
        l0.compact(gated)


def test_a_model_that_is_quantised_already_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Int8(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="in `2` reads it by a weight that is computed, not a parameter"):
        l0.attach(model, torch.zeros(1, 3), apply="activations")


@pytest.mark.slow
def test_a_live_network_that_shrinks_goes_the_same_way() -> None:
    """Masks follow what is left of the layers when the gates settle."""
    found = []
    for apply in ("weights", "activations"):
        torch.manual_seed(0)
        x, target = torch.randn(8, 1, 14, 14, dtype=torch.float64), torch.arange(8) % 3
        gated = attached(LeNet().double(), x, apply=apply).train()
        budget = l0.Budget(gated, macs=0.5, steps=12, learning=0.5, gate_lr=0.5)
        optimizer = torch.optim.AdamW(gated.param_groups(lr=1e-2))
        budget.drive(optimizer)
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(gated(x), target).backward()
            optimizer.step()
        assert gated.taken is not None
        assert not gated.taken.units.all()
        found.append([gated.eval()(x), budget.finish()(x)])
    torch.testing.assert_close(found[1][0], found[1][1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


def test_the_model_itself_is_left_alone() -> None:
    model, x = Named(), torch.randn(4, 3)
    before = model(x)
    gated = scattered(l0.attach(model, x, apply="activations"))
    assert not torch.equal(gated.train()(x), before)
    assert torch.equal(model(x), before)
    assert not model.b._forward_pre_hooks


def test_what_no_mask_does_is_refused() -> None:
    x = torch.randn(2, 4)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r'cannot gate `2\.weight`: it is on single weights; `apply="weights"` can'):
        l0.attach(plain, x, where=l0.weights("2.weight"), apply="activations")
    with pytest.raises(ValueError, match='must be "weights", or "activations" without `per_example`'):
        l0.attach(plain, x, apply="activations", per_example=True)
    with pytest.raises(ValueError, match="got 'inputs'"):
        l0.attach(plain, x, apply="inputs")
    maps = torch.randn(2, 4, 5, 5)
    grouped = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 3, 1))
    with pytest.raises(ValueError, match=r"cannot gate `2\.weight`: its convolution has groups"):
        l0.attach(grouped, maps, apply="activations")


def test_a_layer_whose_forward_is_passed_by_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a hook were not called: the two ways differ on the example."""
    monkeypatch.setattr("ellzero.gated.base.masking._before", lambda _, __, ___, args, kwargs: (args, kwargs))
    with pytest.raises(ValueError, match="its output is another than with gates in its weights"):
        l0.attach(Named(), torch.randn(4, 3), apply="activations")


# ---- sharded ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_that_shard_train_as_one_does(server: processes.Server, tmp_path: Path) -> None:
    """With checkpointed blocks, clipping, and a new start in the middle; and what comes out compacts."""
    for job in [server.start("sharded", rank=rank, folder=str(tmp_path)) for rank in range(2)]:
        assert job.wait() == 0, job.said
    ranks = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]
    assert ranks[0]["phase"] == "tuning"
    assert "process group" in ranks[0]["masked"]
    gated, budget = replicated.in_blocks("weights")
    budget.shrink = False
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.1, gate_lr=1.0), momentum=0.9)
    for step in range(16):
        optimizer.zero_grad()
        batches = [(replicated.wide(rank, step), ranks[rank]["noises"][step]) for rank in range(2)]
        replicated.step_in_blocks(gated, budget, batches)
        norm = nn.utils.clip_grad_norm_(gated.parameters(), 0.5)
        optimizer.step()
        budget.step(optimizer)
    assert ranks[0]["norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, p in gated.model.named_parameters():
        torch.testing.assert_close(ranks[0]["state"][f"model.{name}"], p.detach(), rtol=1e-4, atol=1e-5)
    whole = l0.attach(replicated.Blocks(), torch.zeros(2, 8))
    whole.load_state_dict(ranks[0]["state"])
    assert torch.equal(whole.opens(), gated.opens())  # settled ones go on rolling in a group, to no effect
    assert 0 < whole.opens().sum() < whole.liveness.size
    small = l0.compact(whole.eval())
    x = replicated.wide(0, 99)
    torch.testing.assert_close(small(x), gated.eval()(x), rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in small.parameters() if p.ndim == 2) <= 0.6 * (2 * 3 * 8 * 12 + 8 * 3)


def test_other_ways_to_shard_are_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        x = torch.randn(4, 8)
        late = l0.attach(replicated.Blocks(), x, apply="activations")
        torch.optim.SGD(late.param_groups(), lr=0.1)
        fully_shard(late.model, mesh=mesh)
        with pytest.raises(RuntimeError, match="shard, then make the optimizer"):
            late(x)
        with pytest.raises(ValueError, match="sharded over processes: gather its state"):
            l0.compact(late)
        tensors = l0.attach(replicated.Blocks(), x, graph=late.graph, apply="activations")
        parallelize_module(tensors.model.head, mesh, ColwiseParallel())
        with pytest.raises(RuntimeError, match="gates know no tensor parallelism"):
            tensors.param_groups()
    finally:
        dist.destroy_process_group()
