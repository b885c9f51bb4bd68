"""A gated model against copies whose weights were multiplied by hand.

And as a citizen of torch: saved, copied, moved, compiled, exported, vectorised, checkpointed, distributed.
"""

import copy
import gc
import io
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ellzero as l0
from ellzero import gates as gt
from ellzero.gated import attaching
from ellzero.graph.axes import Site
from support import processes, replicated, traced
from support.oracles import open_exactly, scattered
from support.zoo import ConvNet, Flattened, Residual, Shared, Tied, mlp

GOLDEN = (5**0.5 - 1) / 2


@pytest.fixture
def _fresh_compiler() -> None:
    """Each case is compiled anew: torch gives up after eight recompilations of one function."""
    torch._dynamo.reset()


def drawn(gated: l0.Gated, noise: Tensor) -> dict[str, Tensor]:
    """z by name, each placement drawn by itself."""
    sizes = [gate.shape.numel() for _, gate in gated.named_gates()]
    return {
        name: gate.sample(u.reshape(gate.shape))
        for (name, gate), u in zip(gated.named_gates(), noise.split(sizes), strict=True)
    }


def at_test_time(gated: l0.Gated) -> dict[str, Tensor]:
    return {name: gate.value() for name, gate in gated.named_gates()}


def masked(model: nn.Module, factors: dict[str, Tensor]) -> nn.Module:
    """A plain copy with some weights multiplied: the hand-gated reference."""
    out = copy.deepcopy(model)
    with torch.no_grad():
        members = dict(out.named_parameters())
        for name, factor in factors.items():
            members[name].mul_(factor.to(members[name].dtype))
    return out


TRACED: list[l0.graph.Graph] = []


def attached(*, dtype: torch.dtype = torch.float32, **options: Any) -> l0.Gated:
    """A small network, which is traced once for all tests."""
    x, graph = torch.zeros(2, 3, dtype=dtype), TRACED[0] if TRACED else None
    gated = l0.attach(mlp(3, 4, 5, 2).to(dtype), x, graph=graph, **options)
    TRACED[:] = [gated.graph]
    return scattered(gated)


def grads(gated: nn.Module) -> dict[str, Tensor]:
    out = {name: p.grad.clone() for name, p in gated.named_parameters() if p.grad is not None}
    gated.zero_grad()
    return out


# ---- the function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_forward_is_the_model_with_its_readers_multiplied(training: bool) -> None:
    gated = attached().train(training)
    x, noise = torch.randn(6, 3), gated.gate_noise()
    z = drawn(gated, noise) if training else at_test_time(gated)
    by_hand = masked(gated.model, {"2.weight": z["0"], "4.weight": z["2"]})
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(x))


@pytest.mark.parametrize("training", [True, False])
def test_a_flattened_map_is_gated_as_a_block_and_by_single_inputs(training: bool) -> None:
    gated = scattered(traced.attached(Flattened(), torch.zeros(2, 1, 4), where=l0.per_layer)).train(training)
    x, noise = torch.randn(6, 1, 4), gated.gate_noise()
    z = drawn(gated, noise) if training else at_test_time(gated)
    by_hand = masked(
        gated.model, {"conv2.weight": z["conv1"][:, None], "fc.weight": z["conv2"].repeat_interleave(2) * z["fc"]}
    )
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(x))


def test_gradients_are_those_of_the_hand_gated_network() -> None:
    gated = attached()
    x, noise = torch.randn(6, 3), gated.gate_noise()
    gated(x, gate_noise=noise).square().sum().backward()
    ours = grads(gated)
    z = drawn(gated, noise)
    weights = {"2.weight": gated.model[2].weight * z["0"], "4.weight": gated.model[4].weight * z["2"]}
    functional_call(gated.model, weights, x).square().sum().backward()
    torch.testing.assert_close(ours, grads(gated))


def test_gradient_to_log_alpha_is_the_finite_difference() -> None:
    gated = attached(dtype=torch.float64, gate=partial(l0.HardConcreteGate, learn_beta=True))
    x = torch.randn(6, 3, dtype=torch.float64)
    noise = torch.rand(9, dtype=torch.float64) * 0.2 + 0.4  # away from the ends, where z has no derivative

    def loss() -> Tensor:
        return gated(x, gate_noise=noise).square().mean()

    open_exactly(gated, [True] * 9)
    for _, gate in gated.named_gates():
        nn.init.normal_(gate.log_alpha, std=0.3)
    loss().backward()
    for name, parameter in gated.gates.named_parameters():
        for k in range(len(parameter)):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    parameter[k] += step
                    values.append(loss().item())
                    parameter[k] -= step
            slope = (values[0] - values[1]) / 2e-6
            assert parameter.grad[k].item() == pytest.approx(slope, rel=1e-5, abs=1e-9), f"{name}[{k}]"
        assert parameter.grad.count_nonzero() > 1


@pytest.mark.slow
def test_a_gate_on_readers_keeps_the_gradient_that_batch_norm_would_undo() -> None:
    """conv – norm – conv: the scale of a writer is normalised away, that of a reader is not."""
    torch.manual_seed(0)
    model, x = ConvNet().double(), torch.randn(32, 1, 4, 4, dtype=torch.float64)
    z = torch.full((3,), 0.7, dtype=torch.float64, requires_grad=True)
    target = torch.randn(32, 2, dtype=torch.float64)
    slopes = {}
    for side, weights in {
        "reader": {"conv2.weight": model.conv2.weight * z.reshape(1, -1, 1, 1)},
        "writer": {"conv1.weight": model.conv1.weight * z.reshape(-1, 1, 1, 1)},
    }.items():
        (slopes[side],) = torch.autograd.grad(F.mse_loss(functional_call(model, weights, x), target), z)
    gated = l0.attach(model, x)
    assert [s.tensor for s in gated.placements[0].multiplies] == ["conv2.weight"]
    assert slopes["reader"].abs().min() > 100 * slopes["writer"].abs().max()


def test_a_gate_is_drawn_once_however_often_its_weight_is_used() -> None:
    gated = scattered(l0.attach(Shared(), torch.zeros(2, 3)))
    x, noise = torch.randn(5, 3), gated.gate_noise()
    z = drawn(gated, noise)
    assert z.keys() == {"one", "both"}
    assert {a.size for a in gated.axes if not a.frozen} == {4, 5}  # the two inputs of the shared layer are one axis
    by_hand = masked(gated.model, {"both.weight": z["one"], "head.weight": z["both"]})
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(x))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_gates_see_tied_weights_under_every_name() -> None:
    gated = scattered(l0.attach(Tied(), torch.zeros(2, 3)))
    x, noise = torch.randn(5, 3), gated.gate_noise()
    z = drawn(gated, noise)["body"]
    model = gated.model
    h = torch.tanh(model.body(x))
    by_hand = h @ (model.a.weight * z).T + model.a.bias + 2 * ((h * h) @ (model.b.weight * z).T + model.b.bias)
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand)
    assert model.a.weight is model.b.weight
    compiled = torch.compile(gated, fullgraph=True, backend="eager")  # autograd is traced in the next test
    torch.testing.assert_close(compiled(x, gate_noise=noise), by_hand)


def test_a_weight_that_reads_and_writes_is_never_gated() -> None:
    """A head tied to the embedding writes with the dimension that the other reads: a gate on one would gate both."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up, self.down = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            return self.head(x + self.down(torch.relu(self.up(x))))

    gated = scattered(l0.attach(Language(), torch.zeros(2, 3, dtype=torch.long), where=l0.shrinkable(streams=True)))
    assert [(name, gate.shape.numel()) for name, gate in gated.named_gates()] == [("up", 6)]
    (stream,) = (a for a in gated.axes if a.size == 4)
    assert "embedding.weight" in str(stream.frozen)
    tokens, noise = torch.randint(7, (2, 3)), gated.gate_noise()
    by_hand = masked(gated.model, {"down.weight": drawn(gated, noise)["up"]})
    torch.testing.assert_close(gated(tokens, gate_noise=noise), by_hand(tokens))


class Seen(TorchDispatchMode):
    """Notes which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("where", [l0.shrinkable, l0.per_layer], ids=["shrinkable", "per_layer"])
def test_a_transformer_layer_is_gated_in_training_and_on_the_fast_path(where: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=6, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 8)
    gated = scattered(l0.attach(layer, x, where=where))
    noise = gated.gate_noise()

    def by_hand(z: dict[str, Tensor]) -> nn.Module:
        if where is l0.shrinkable:
            heads = z["self_attn"].repeat_interleave(4)
            return masked(layer, {"linear2.weight": z["linear1"], "self_attn.out_proj.weight": heads})
        return masked(
            layer, {("self_attn.in_proj_weight" if n == "self_attn" else f"{n}.weight"): v for n, v in z.items()}
        )

    names = (
        {"self_attn", "linear1"}
        if where is l0.shrinkable
        else {"self_attn", "self_attn.out_proj", "linear1", "linear2"}
    )
    assert {name for name, _ in gated.named_gates()} == names
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(drawn(gated, noise))(x))
    gated.eval()
    with torch.no_grad(), Seen() as seen:
        ours = gated(x)
    assert "aten::_transformer_encoder_layer_fwd" in seen.ops
    with torch.no_grad():
        torch.testing.assert_close(ours, by_hand(at_test_time(gated)).eval()(x))
        assert (ours - layer(x)).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_the_output_projection_of_multihead_attention_is_gated(training: bool) -> None:
    """`nn.MultiheadAttention` reads `out_proj.weight` without calling `out_proj`: hooks on the layer never run."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = torch.randn(3, 5, 8)
    gated = scattered(l0.attach(attention, (x, x, x), where=l0.weights("*weight")))
    assert {name for name, _ in gated.named_gates()} == {"in_proj_weight", "out_proj.weight"}
    noise = gated.gate_noise()
    z = drawn(gated, noise) if training else at_test_time(gated)
    with torch.no_grad():
        ours, _ = gated(x, x, x, gate_noise=noise)
        theirs, _ = masked(attention, z)(x, x, x)
    torch.testing.assert_close(ours, theirs)


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_gates() -> None:
    gated, x = attached(), torch.randn(6, 3)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(gated(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(gated(x), gated(x))


def test_gate_noise_is_what_a_forward_draws() -> None:
    gated, x = attached(), torch.randn(6, 3)
    torch.manual_seed(3)
    noise = gated.gate_noise()
    assert (noise.shape, noise.dtype) == ((9,), torch.float32)
    torch.manual_seed(3)
    assert torch.equal(gated(x), gated(x, gate_noise=noise))


def test_evaluation_draws_nothing() -> None:
    gated, x = attached().eval(), torch.randn(6, 3)
    before = torch.get_rng_state()
    first = gated(x)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, gated(x))


@pytest.mark.parametrize("noise", [torch.rand(8), torch.rand(9, 1), torch.rand(())])
def test_noise_of_another_shape_is_refused(noise: Tensor) -> None:
    with pytest.raises(ValueError, match=r"`gate_noise` must have shape \(9,\), one entry per gate, got"):
        attached()(torch.zeros(2, 3), gate_noise=noise)


# ---- what attach leaves alone ----------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, batch norm, a frozen layer, a layer in evaluation mode, noise in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.dropout = nn.Dropout()
        self.first.bias.requires_grad_(False)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.norm(self.first(x)))) + 0 * torch.rand(())


def test_attach_leaves_the_model_as_it_was() -> None:
    model, x = Everything(), torch.randn(6, 3)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    members = {name: id(t) for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}
    modes = [m.training for m in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    asks = [p.requires_grad for p in model.parameters()]
    model.eval()
    expected = model(x)
    for m, mode in zip(model.modules(), modes, strict=True):
        m.training = mode
    gated = l0.attach(model, x)
    gated(x)
    assert gated.model is model
    assert gated.training
    assert list(state) == list(model.state_dict())
    assert {name: id(t) for name, t in itertools.chain(model.named_parameters(), model.named_buffers())} == members
    assert [m.training for m in model.modules()] == modes
    assert [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()
    ] == hooks
    assert [p.requires_grad for p in model.parameters()] == asks
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in state.items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model.eval()(x), expected)  # called directly, it is the dense network, bit for bit


def test_attach_draws_nothing_but_the_gates_own_start() -> None:
    """Tracing and trying out removals run the model often, dropout and all; a seeded run must not feel it."""
    model, x = Everything(), torch.randn(6, 3)
    torch.manual_seed(5)
    gated = l0.attach(model, x)
    after = torch.rand(3)
    torch.manual_seed(5)
    gate = l0.HardConcreteGate(4, drop_rate=0.05)
    assert torch.equal(gated.gates["first"].log_alpha, gate.log_alpha)
    assert torch.equal(after, torch.rand(3))


def test_a_network_computes_what_it_did_before_gates_were_attached() -> None:
    model, x = Everything().eval(), torch.randn(6, 3)
    before = model(x)
    assert torch.equal(l0.attach(model, x)(x), before)


def test_training_the_gated_model_trains_the_users_parameters() -> None:
    gated = attached()
    before = [p.clone() for p in gated.model.parameters()]
    optimizer = torch.optim.SGD(gated.param_groups(), lr=0.1)
    gated(torch.randn(6, 3)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, gated.model.parameters(), strict=True))


@pytest.mark.slow
def test_train_and_eval_reach_the_model() -> None:
    gated = l0.attach(Everything(), torch.zeros(6, 3))
    assert not gated.eval().model.dropout.training
    assert gated.train().model.dropout.training
    assert not traced.attached(mlp(3, 4, 2).eval(), torch.zeros(2, 3)).training


def test_an_exception_in_the_model_gives_the_weights_back() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.armed = nn.Linear(3, 4), nn.Linear(4, 2), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(torch.relu(self.a(x)))
            if self.armed:
                raise ArithmeticError("mine")
            return x

    model, x = Fails(), torch.randn(2, 3)
    gated = scattered(l0.attach(model, x))
    own, expected = dict(model.named_parameters()), model(x)
    model.armed = True
    with pytest.raises(ArithmeticError, match="mine"):
        gated(x)
    model.armed = False
    assert all(p is own[name] for name, p in model.named_parameters())
    assert torch.equal(model(x), expected)
    checkpoint(model, x, use_reentrant=False)  # and checkpointing is allowed again


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_dict_has_the_users_keys_and_goes_around() -> None:
    one, two = attached(), attached()
    assert list(one.state_dict()) == [
        *(f"model.{k}" for k in one.model.state_dict()),
        "gates.0.log_alpha",
        "gates.2.log_alpha",
    ]
    x, noise = torch.randn(6, 3), one.gate_noise()
    assert not torch.equal(one(x, gate_noise=noise), two(x, gate_noise=noise))
    stream = io.BytesIO()
    torch.save(one.state_dict(), stream)
    stream.seek(0)
    assert str(two.load_state_dict(torch.load(stream, weights_only=True))) == "<All keys matched successfully>"
    assert torch.equal(one(x, gate_noise=noise), two(x, gate_noise=noise))
    for cost in (l0.l0_norm, l0.l2_norm, l0.params, l0.macs, l0.units):
        assert torch.equal(cost(one), cost(two))


@pytest.mark.slow
def test_dotted_names_have_one_module_each() -> None:
    model = nn.Sequential(
        nn.ModuleDict({"in": nn.Linear(3, 4)})["in"], nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2)
    )
    gated = l0.attach(model, torch.zeros(2, 3))
    assert [name for name, _ in gated.named_gates()] == ["0", "1.1"]
    assert "gates.1/1.log_alpha" in gated.state_dict()


@pytest.mark.slow
def test_the_state_of_another_network_is_refused_and_nothing_loaded() -> None:
    gated = attached()
    before = {name: t.clone() for name, t in gated.state_dict().items()}
    with torch.no_grad():
        wider = scattered(traced.attached(mlp(3, 4, 6, 2), torch.zeros(2, 3))).state_dict()
        deeper = scattered(traced.attached(mlp(3, 4, 5, 5, 2), torch.zeros(2, 3))).state_dict()
        plain = gated.model.state_dict()
    for state, message in (
        (wider, r"`model\.2\.weight` has shape \(6, 4\), here it is \(5, 4\)"),
        (deeper, "unexpected"),
        (plain, "missing"),
    ):
        with pytest.raises(ValueError, match=f"`state_dict` is of another network: .*{message}"):
            gated.load_state_dict(state)
        assert all(torch.equal(t, before[name]) for name, t in gated.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_log_alpha_that_is_not_finite_is_refused_and_nothing_loaded(bad: float) -> None:
    gated = attached()
    state = {name: t + 1 for name, t in gated.state_dict().items()}
    before = {name: t.clone() for name, t in gated.state_dict().items()}
    state["gates.2.log_alpha"][3] = bad
    with pytest.raises(ValueError, match=r"`state_dict` has numbers in `gates\.2\.log_alpha` that are not finite"):
        gated.load_state_dict(state)
    assert all(torch.equal(t, before[name]) for name, t in gated.state_dict().items())


def test_a_state_loads_inside_another_module_and_beside_extra_state() -> None:
    class Noted(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Noted(4, 2))
    outer = nn.ModuleDict({"net": l0.attach(model, torch.zeros(2, 3))})
    outer.load_state_dict({k: t + 1 if isinstance(t, Tensor) else t for k, t in outer.state_dict().items()})
    assert model[2].seen == 3


def test_a_part_of_a_state_loads_if_asked_to() -> None:
    gated = attached()
    state = {name: t + 1 for name, t in gated.state_dict().items() if name.startswith("gates.")}
    gated.load_state_dict(state, strict=False)
    assert torch.equal(gated.gates["0"].log_alpha, state["gates.0.log_alpha"])


def equal_but_apart(one: l0.Gated, two: l0.Gated) -> None:
    """Two gated networks compute and cost the same, and changing one does not change the other."""
    x, noise = torch.randn(6, 3), one.gate_noise()
    assert torch.equal(one(x, gate_noise=noise), two(x, gate_noise=noise))
    assert torch.equal(one.eval()(x), two.eval()(x))
    for cost in (l0.l0_norm, l0.params, l0.macs):
        assert torch.equal(cost(one), cost(two))
        assert l0.dense(cost, one) == l0.dense(cost, two)
    before = two(x)
    with torch.no_grad():
        for p in one.parameters():
            p.add_(1.0)
    assert torch.equal(two(x), before)
    assert not torch.equal(one(x), before)


def test_deepcopy_is_the_same_function_of_its_own_parameters() -> None:
    gated = attached()
    l0.l0_norm(gated)  # whatever is remembered is copied too
    equal_but_apart(gated, copy.deepcopy(gated))


def test_pickling_goes_around() -> None:
    gated = attached(where=l0.per_layer)
    l0.l0_norm(gated)
    equal_but_apart(gated, pickle.loads(pickle.dumps(gated)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moving_to_another_precision(dtype: torch.dtype) -> None:
    gated, x = scattered(traced.attached(Flattened(), torch.zeros(2, 1, 4), where=l0.per_layer)), torch.randn(6, 1, 4)
    noise = gated.gate_noise()
    before, costs = gated(x, gate_noise=noise), [l0.params(gated), l0.l0_norm(gated)]
    z = drawn(gated, noise)
    moved = gated.to(dtype)
    assert moved is gated
    assert {p.dtype for p in gated.parameters()} == {dtype}
    after = gated(x.to(dtype), gate_noise=noise)
    assert after.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float64 else 0.05
    torch.testing.assert_close(after.float(), before, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close([l0.params(gated).float(), l0.l0_norm(gated).float()], costs, rtol=tolerance, atol=0)
    if dtype is torch.bfloat16:  # z itself is worked out in float32 from the rounded log α
        for (name, gate), u in zip(gated.named_gates(), noise.split([2, 2, 4]), strict=True):
            assert gate.sample(u).dtype == torch.float32
            torch.testing.assert_close(gate.sample(u), z[name], rtol=0.05, atol=0.05)


def test_autocast_gates_as_it_does_by_hand() -> None:
    gated = attached()
    x, noise = torch.randn(6, 3), gated.gate_noise()
    z = drawn(gated, noise)
    by_hand = masked(gated.model, {"2.weight": z["0"], "4.weight": z["2"]})
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = gated(x, gate_noise=noise), by_hand(x)
        again = gated(x, gate_noise=1 - noise)  # no cast of a gated weight may be remembered
        assert l0.params(gated).dtype == torch.float32
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    assert not torch.equal(again, theirs)
    ours.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in gated.parameters())


# ---- compiled, exported, vectorised ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_in_one_graph_is_the_eager_function() -> None:
    gated = attached(where=l0.per_layer)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    x, noise = torch.randn(6, 3), gated.gate_noise()
    for mode in (True, False):
        gated.train(mode)
        gated(x, gate_noise=noise).square().sum().backward()
        ours = grads(gated)
        compiled(x, gate_noise=noise).square().sum().backward()
        torch.testing.assert_close(grads(gated), ours)
    assert not torch.equal(compiled.train()(x), compiled(x))  # it draws anew at each call


def residual() -> l0.Gated:
    return traced.attached(Residual(), torch.zeros(2, 2), where=l0.shrinkable(streams=True))


def flattened() -> l0.Gated:
    return traced.attached(Flattened(), torch.zeros(2, 1, 4), where=l0.per_layer)


def unstructured() -> l0.Gated:
    return traced.attached(mlp(3, 4, 2), torch.zeros(2, 3), where=l0.weights("*weight"))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("make", "backend", "asked"),
    [
        (attached, "aot_eager", (l0.l0_norm, l0.l2_norm, l0.params, l0.macs, l0.units)),
        (residual, "eager", (l0.params, l0.macs)),  # a unit that is read and written by one layer
        (flattened, "eager", (l0.params, l0.macs)),  # gates within gates
        (unstructured, "eager", (l0.l0_norm, l0.params)),
    ],
    ids=["attached", "residual", "flattened", "unstructured"],
)
def test_a_whole_loss_with_costs_compiles_in_one_graph(
    make: Callable[[], l0.Gated], backend: str, asked: tuple[l0.Cost, ...]
) -> None:
    """Each is captured as a whole; the autograd of the first is traced. Inductor is tried by the tests of training."""
    gated = scattered(make())
    x, noise = torch.randn(6, *gated.example_inputs[0][0].shape[1:]), gated.gate_noise()

    def loss() -> Tensor:
        costs = [cost(gated) for cost in asked]
        return gated(x, gate_noise=noise).square().mean() + 0.1 * sum(costs)

    first = torch.compile(loss, fullgraph=True, backend=backend)()  # before eager code has worked anything out
    first.backward()
    ours = grads(gated)
    eager = loss()
    eager.backward()
    torch.testing.assert_close(first, eager)
    torch.testing.assert_close(ours, grads(gated))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_what_eager_code_has_worked_out_is_used_by_compiled_code() -> None:
    gated = attached()
    eager = l0.l0_norm(gated)
    torch.testing.assert_close(torch.compile(l0.l0_norm, fullgraph=True, backend="aot_eager")(gated), eager)


@pytest.mark.slow
def test_the_same_network_with_other_numbers_need_not_be_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (l0.attach(ConvNet(), torch.zeros(2, 1, 4, 4)) for _ in range(2))
    another = attached().graph
    monkeypatch.setattr(attaching, "trace", None)
    again = l0.attach(copy.deepcopy(other.model), torch.zeros(2, 1, 4, 4), graph=first.graph)
    again.load_state_dict(scattered(other).state_dict())
    x, noise = torch.randn(5, 1, 4, 4), other.gate_noise()
    assert torch.equal(again(x, gate_noise=noise), other(x, gate_noise=noise))
    assert l0.macs(again) == l0.macs(other) != l0.macs(first)
    for wrong in ({"graph": another}, {"graph": first.graph, "axes": first.axes}):
        with pytest.raises(
            ValueError, match="`graph` must be of a network with the tensors of `model`, and `axes` abs"
        ):
            l0.attach(ConvNet(), torch.zeros(2, 1, 4, 4), **wrong)


@pytest.mark.slow
def test_export_gives_the_evaluation_network() -> None:
    gated = scattered(traced.attached(ConvNet(), torch.zeros(2, 1, 4, 4))).eval()
    x = torch.randn(2, 1, 4, 4)
    program = torch.export.export(gated, (x,))
    torch.testing.assert_close(program.module()(x), gated(x))
    gated.gates["conv1"].close_(torch.tensor([True, False, True]))
    with torch.no_grad():
        z = at_test_time(gated)
        by_hand = masked(gated.model, {"conv2.weight": z["conv1"][:, None, None], "head.weight": z["conv2"]}).eval()
        torch.testing.assert_close(torch.export.export(gated, (x,)).module()(x), by_hand(x))


def test_vmap_over_runs_gives_each_run_its_own() -> None:
    runs = [attached() for _ in range(3)]
    x, noise = torch.randn(6, 3), torch.rand(3, 9)
    parameters, buffers = stack_module_state(runs)

    def one(p: dict[str, Tensor], b: dict[str, Tensor], u: Tensor) -> Tensor:
        return functional_call(runs[0], (p, b), (x,), {"gate_noise": u})

    together = vmap(one)(parameters, buffers, noise)
    for run, out, u in zip(runs, together, noise, strict=True):
        torch.testing.assert_close(out, run(x, gate_noise=u))
    outputs = vmap(lambda p, b: functional_call(runs[0], (p, b), (x,)), randomness="different")(parameters, buffers)
    assert outputs.shape == (3, 6, 2)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), reentrant
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant) if self.on else self.body(x)


def test_checkpointing_inside_the_model_recomputes_with_the_same_gates() -> None:
    """In the backward, and with those of its own forward, whatever was drawn since."""
    model, x = Checkpointed(False), torch.randn(6, 3)
    gated = scattered(l0.attach(model, x))
    noise = [torch.rand(4), torch.rand(4)]
    found = []
    for model.on in (False, True):
        gated.zero_grad()
        first, second = (gated(x, gate_noise=u).square().sum() for u in noise)
        with torch.no_grad():
            gated(x)
        (first + 3 * second).backward()
        found.append(grads(gated))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert model.body[1].weight.is_leaf
    model(x).sum().backward()  # the model itself may do as before


def test_checkpointing_inside_the_model_that_is_reentrant_is_refused() -> None:
    """It would go back twice through what was drawn once."""
    model, x = Checkpointed(True), torch.randn(6, 3)
    gated = scattered(l0.attach(model, x))
    model.on = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gated(x)
    with torch.no_grad(), warnings.catch_warnings():  # nothing will be recomputed
        warnings.simplefilter("ignore")  # torch: "None of the inputs have requires_grad=True"
        gated.eval()
        inside = gated(x)
        model.on = False
        torch.testing.assert_close(inside, gated(x))
    model.on = True
    model(x).sum().backward()  # the model itself may do as before


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_the_gated_model_gives_the_same_gradients(reentrant: bool) -> None:
    gated = attached()
    x = torch.randn(6, 3, requires_grad=True)
    torch.manual_seed(4)
    gated(x).square().sum().backward()
    plain, (x_grad, x.grad) = grads(gated), (x.grad, None)
    torch.manual_seed(4)
    checkpoint(gated, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(grads(gated), plain)
    torch.testing.assert_close(x.grad, x_grad)


@pytest.mark.parametrize("around", [True, False])
def test_checkpointing_inside_one_around_gives_the_same_gradients(around: bool) -> None:
    model, x = Checkpointed(False), torch.randn(6, 3, requires_grad=True)
    gated = scattered(l0.attach(model, x))
    found = []
    for model.on in (False, True):
        gated.zero_grad()
        torch.manual_seed(4)
        (checkpoint(gated, x, use_reentrant=around) if model.on else gated(x)).square().sum().backward()
        found.append(grads(gated))
    torch.testing.assert_close(found[1], found[0])


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_param_groups_hold_every_parameter_once_with_its_own_rates() -> None:
    gated = attached(where=l0.per_layer)
    groups = {g["name"]: g for g in gated.param_groups(lr=0.1, gate_lr=6.0, weight_decay=1e-4, gate_weight_decay=1e-5)}
    assert {n: (g["lr"], g["weight_decay"]) for n, g in groups.items()} == {
        "weights": (0.1, 1e-4),
        "gates": (6.0, 1e-5),
    }
    assert {id(p) for p in groups["gates"]["params"]} == {id(p) for p in gated.gates.parameters()}
    for options in ({}, {"lr": 0.1}, {"counted_weight_decay": 0.0, "weight_decay": 0.1}):
        ids = [id(p) for group in gated.param_groups(**options) for p in group["params"]]
        assert sorted(ids) == sorted(id(p) for p in gated.parameters())
    assert all("lr" not in g for g in gated.param_groups())
    decayed = torch.optim.AdamW(gated.param_groups(), weight_decay=0.3)  # the optimizer's own, for the weights
    assert [g["weight_decay"] for g in decayed.param_groups] == [0.3, 0.0]
    assert [g["lr"] for g in gated.param_groups(lr=0.1)] == [0.1, 0.1]


def test_param_groups_take_decay_off_the_weights_that_l2_norm_counts() -> None:
    gated = attached()
    groups = {g["name"]: g for g in gated.param_groups(weight_decay=0.1, counted_weight_decay=0.0)}
    counted = {id(gated.model[2].weight), id(gated.model[4].weight)}
    assert {id(p) for p in groups["counted weights"]["params"]} == counted
    assert groups["counted weights"]["weight_decay"] == 0.0
    optimizer = torch.optim.SGD(gated.param_groups(weight_decay=0.1, counted_weight_decay=0.0), lr=1.0)
    before = {name: p.clone() for name, p in gated.named_parameters()}
    for p in gated.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in gated.named_parameters():
        factor = 1.0 if id(p) in counted or name.startswith("gates.") else 0.9
        torch.testing.assert_close(p, before[name] * factor)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"gate_lr": float("nan")},
        {"weight_decay": -0.1},
        {"gate_weight_decay": float("inf")},
        {"counted_weight_decay": -1.0},
    ],
)
def test_param_groups_refuse_bad_rates(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}` must be a number >= 0, got"):
        attached().param_groups(**options)


# ---- many processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_draw_their_own_gates_and_stay_together(server: processes.Server, tmp_path: Path) -> None:
    for job in [server.start("replicated", rank=rank, folder=str(tmp_path)) for rank in range(2)]:
        assert job.wait() == 0, job.said
    ranks = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]
    torch.manual_seed(7)
    for one, two in zip(ranks[0]["noises"], ranks[1]["noises"], strict=True):
        torch.testing.assert_close(two, torch.frac(one + GOLDEN), rtol=0, atol=1e-6)
        assert (one - two).abs().min() > 0.3
    assert torch.equal(ranks[0]["noises"][0], torch.rand(4))
    for name, t in ranks[0]["state"].items():
        if "running" not in name:  # each rank has seen its own batches
            assert torch.equal(t, ranks[1]["state"][name]), name
    # One process that adds up both ranks' gradients, with their noise, goes the same way.
    gated = replicated.network()
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.1, gate_lr=1.0))
    for step in range(10):
        optimizer.zero_grad()
        for rank in range(2):
            noise = ranks[rank]["noises"][step]
            (
                (gated(replicated.batch(rank, step), gate_noise=noise).square().mean() + 0.01 * l0.params(gated)) / 2
            ).backward()
        optimizer.step()
    for name, p in gated.named_parameters():
        torch.testing.assert_close(p.detach(), ranks[0]["state"][name])


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model, x = mlp(3, 4, 2), torch.randn(6, 3)
        gated = l0.attach(model, x)
        fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match=r"`model` has sharded parameters \(`0\.weight`\)"):
            l0.attach(model, x)
        for mode in (True, False):  # sharded after attach: silently ungated, if nobody looked
            gated.train(mode)
            with pytest.raises(RuntimeError, match=r"`2\.weight` is not the parameter .* sharded since"):
                gated(x)
    finally:
        dist.destroy_process_group()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["replaced", "gone", "layer gone", "no parameter"])
def test_a_parameter_that_changed_underneath_is_noticed(change: str) -> None:
    gated = attached()
    before = dict(gated.model.named_parameters())
    if change == "replaced":
        gated.model[4] = nn.Linear(7, 2)
    elif change == "gone":
        gated.model[4].register_parameter("weight", None)
    elif change == "layer gone":
        del gated.model[4]
    else:
        nn.utils.parametrizations.weight_norm(gated.model[4])
    with pytest.raises(RuntimeError, match=r"`4\.weight` is not the parameter of shape \(2, 5\).*attach again"):
        gated(torch.zeros(2, 3))
    assert gated.model[2].weight is before["2.weight"]  # what was already in place is given back


def test_a_parameter_replaced_by_one_like_it_is_gated() -> None:
    gated, x = attached(), torch.randn(6, 3)
    gated.model[4].weight = nn.Parameter(torch.randn(2, 5))
    noise = gated.gate_noise()
    z = drawn(gated, noise)
    by_hand = masked(gated.model, {"2.weight": z["0"], "4.weight": z["2"]})
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(x))


def test_gates_by_pattern_the_first_that_matches_counting() -> None:
    gate = {"2*": partial(l0.HardConcreteGate, drop_rate=0.2), "*": l0.gates.RectifiedGate}
    gated = traced.attached(mlp(3, 4, 5, 2), torch.zeros(2, 3), gate=gate)
    kinds = {name: type(g) for name, g in gated.named_gates()}
    assert kinds == {"0": l0.gates.RectifiedGate, "2": l0.HardConcreteGate}
    assert gated.gates["2"].log_alpha.mean().item() == pytest.approx(np.log(0.8 / 0.2), abs=0.03)
    x, noise = torch.randn(6, 3), gated.gate_noise()
    z = drawn(gated, noise)
    by_hand = masked(gated.model, {"2.weight": z["0"], "4.weight": z["2"]})
    torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(x))
    with pytest.raises(ValueError, match=r"`gate` has no pattern for `0`, got '2\*'"):
        traced.attached(mlp(3, 4, 5, 2), torch.zeros(2, 3), gate={"2*": l0.HardConcreteGate})


@pytest.mark.parametrize(
    "gate", [lambda shape: l0.HardConcreteGate(7), lambda shape: torch.ones(shape), lambda shape: nn.Linear(2, 2)]
)
def test_gates_of_another_shape_or_kind_are_refused(gate: Any) -> None:
    with pytest.raises(TypeError, match=r"`gate` must make a gate of shape \(4,\) for `0`, got"):
        traced.attached(mlp(3, 4, 2), torch.zeros(2, 3), gate=gate)


def test_a_gate_that_is_made_already_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`gate` must make a gate from its shape, .* got HardConcreteGate\("):
        traced.attached(mlp(3, 4, 2), torch.zeros(2, 3), gate=l0.HardConcreteGate(4))


def test_a_string_is_no_gate_and_no_placement() -> None:
    with pytest.raises(TypeError, match=r"`gate` must make a gate from its shape, .* got 'hard'"):
        traced.attached(mlp(3, 4, 2), torch.zeros(2, 3), gate="hard")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`where` must be a function from a graph to placements, .* got 'per_layer'"):
        traced.attached(mlp(3, 4, 2), torch.zeros(2, 3), where="per_layer")  # type: ignore[arg-type]


class Softmaxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.softmax(self.a(x), -1))


def test_nothing_to_gate_is_refused_with_the_reasons() -> None:
    with pytest.raises(ValueError, match=r"`model` has nothing to gate: .*`a`: `softmax` mixes its units"):
        l0.attach(Softmaxed(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"`model` has nothing to gate: .*the model's output; .*the model's input"):
        l0.attach(nn.Linear(2, 3), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"`model` has nothing to gate: no weight reads what another one writes$"):
        l0.attach(nn.ReLU(), torch.zeros(2, 3))


@pytest.mark.slow
def test_nothing_to_gate_names_the_options_that_have_gates() -> None:
    """Each option that it names has some, and no other has."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(x + self.block(x))

    names = ("streams", "inputs", "parts", "blocks")
    nets: list[nn.Module] = [Stream(), Softmaxed(), nn.Linear(3, 3), nn.ReLU()]
    for model in nets:
        words = told(model)
        for name in names:
            try:
                l0.attach(model, torch.zeros(2, 3), where=l0.shrinkable(**{name: True}))
                helps = True
            except ValueError:
                helps = False
            assert (f"`where=l0.shrinkable({name}=True)`" in words) == helps
    assert "streams=True" in told(nets[0])
    assert "streams=True" not in told(nets[2])
    with pytest.raises(ValueError, match=r"`0`: `where` leaves it out; .*; `where=l0.shrinkable\(\)` has gates here"):
        l0.attach(mlp(3, 4, 2), torch.zeros(2, 3), where=l0.per_layer(only="none"))


def told(model: nn.Module) -> str:
    with pytest.raises(ValueError, match="nothing to gate") as error:
        l0.attach(model, torch.zeros(2, 3))
    return str(error.value)


@pytest.mark.parametrize("model", [None, "model", lambda x: x, nn.Linear])
def test_a_model_that_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=f"`model` must be an nn.Module, got {type(model).__name__}"):
        l0.attach(model, torch.zeros(2, 3))


def test_gating_a_gated_model_is_refused() -> None:
    with pytest.raises(TypeError, match="`model` is gated already"):
        l0.attach(attached(), torch.zeros(2, 3))


def test_an_example_that_the_model_rejects_is_refused_and_the_model_left() -> None:
    model = mlp(3, 4, 2).eval()
    model[0].train()
    modes = [m.training for m in model.modules()]
    with pytest.raises(l0.graph.TraceError, match=r"the model rejects `example_inputs`: RuntimeError: .*mat1 and mat2"):
        l0.attach(model, torch.zeros(2, 5))
    with pytest.raises(TypeError, match=r"`example_inputs` must be a tuple .*got int"):
        l0.attach(model, 3)
    assert [m.training for m in model.modules()] == modes


class Calls(nn.Module):
    """Positional, keyword and optional inputs; a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Tensor]:
        h = torch.relu(self.a(x))
        return {"out": self.b(h) * scale + (0 if shift is None else shift), "hidden": h}


class OneOut(Calls):
    """The same with a tensor out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)["out"]


def test_a_forward_that_belongs_to_another_object_is_refused() -> None:
    """A copy of such a model runs that object: what is removed from the copy would not be missed."""
    model, other = Calls(), OneOut()
    model.forward = lambda *a, **k: other(*a, **k)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="nothing to gate"):
        l0.attach(model, torch.ones(2, 3))


def test_a_function_in_the_place_of_forward_follows_the_copies_of_its_model() -> None:
    model, x = Calls().double(), 3 * torch.randn(50, 3).double()
    model.forward = lambda *a, **k: Calls.forward(model, *a, **k)["out"]  # type: ignore[method-assign]
    gated = l0.attach(model, x).eval()
    (gate,) = (g for _, g in gated.named_gates())
    with torch.no_grad():
        gate.log_alpha.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    small = l0.compact(gated)
    assert small.a.out_features == 2
    by_hand = torch.relu(x @ model.a.weight.T + model.a.bias) * torch.tensor([1.0, 0, 1, 0]).double()
    assert by_hand.any(0).tolist() == [True, False, True, False]
    torch.testing.assert_close(small(x), by_hand @ model.b.weight.T + model.b.bias)
    model.a.weight.data.zero_()  # the small network has its own
    assert not torch.equal(model(x), small(x))


def _of_default(a: nn.Module, b: nn.Module) -> Any:
    return lambda x, a=a, b=b: b(torch.relu(a(x)))


def _of_list(a: nn.Module, b: nn.Module) -> Any:
    several = [lambda x: b(torch.relu(a(x)))]
    return lambda x: several[0](x)


def _of_another(a: nn.Module, b: nn.Module) -> Any:
    both = nn.ModuleList([a, b])  # not in the model
    return lambda x: both[1](torch.relu(both[0](x)))


def _of_object(a: nn.Module, b: nn.Module) -> Any:
    held = SimpleNamespace(a=a, b=b)
    return lambda x: held.b(torch.relu(held.a(x)))


def _of_pair(a: nn.Module, b: nn.Module) -> Any:
    pair = (a, b)
    return lambda x: pair[1](torch.relu(pair[0](x)))


def _of_partial(a: nn.Module, b: nn.Module) -> Any:
    return partial(lambda m, n, x: n(torch.relu(m(x))), a, b)


@pytest.mark.parametrize("holding", [_of_default, _of_list, _of_another, _of_object, _of_pair, _of_partial])
def test_functions_that_hold_layers_are_followed_exactly_or_refused(holding: Any) -> None:
    """Of a function that stays the original's, a copy would show nothing of what is removed from it."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.both = holding(self.a, self.b)

        def forward(self, x: Tensor) -> Any:
            return self.both(x)

    model, x = Holding().double(), 3 * torch.randn(50, 3).double()
    if holding in (_of_another, _of_object):
        with pytest.raises(ValueError, match="nothing to gate"):
            l0.attach(model, x)
        return
    gated = l0.attach(model, x).eval()
    (gate,) = (g for _, g in gated.named_gates())
    with torch.no_grad():
        gate.log_alpha.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    small = l0.compact(gated)
    by_hand = torch.relu(model.a(x)) * torch.tensor([1.0, 0, 1, 0]).double()
    assert by_hand.any(0).tolist() == [True, False, True, False]
    torch.testing.assert_close(small(x), model.b(by_hand))
    model.b.weight.data.zero_()
    assert not torch.equal(model(x), small(x))


class Keeping(nn.Module):
    """Keeps weights in attributes of its own, which the forward reads, or for a loss alone."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.a, self.b, self.c = reads, nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.call, self.kept = partial(F.linear, weight=self.b.weight), [(self.b.weight, 1)]

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.call(h) if self.reads else self.b(h)))


@pytest.mark.parametrize("where", [l0.per_layer(), l0.weights("*.weight")])
def test_a_parameter_that_is_read_where_gates_do_not_reach_it_is_refused(where: Any) -> None:
    x = torch.randn(5, 3).double()
    with pytest.raises(ValueError, match="`call` keeps a parameter that the forward reads there, where gates do not"):
        l0.attach(Keeping(reads=True).double(), x, where=where)
    gated = l0.attach(Keeping(reads=False).double(), x, where=where).eval()
    for _, gate in gated.named_gates():
        gate.close_((torch.arange(gate.shape.numel()) % 3 == 1).reshape(gate.shape))
    torch.testing.assert_close(l0.compact(gated)(x), gated(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3),),
        [torch.ones(2, 3), torch.ones(2, 2)],
        {"x": torch.ones(2, 3), "scale": 2.0},
    ],
)
def test_example_inputs_in_every_form(example: Any) -> None:
    with pytest.raises(ValueError, match="`a`: it is the model's output"):
        l0.attach(Calls(), example)
    model = OneOut()
    gated = scattered(l0.attach(model, example))
    x, shift, noise = torch.randn(5, 3), torch.randn(5, 2), gated.gate_noise()
    by_hand = masked(model, {"b.weight": drawn(gated, noise)["a"]})
    torch.testing.assert_close(
        gated(x, shift=shift, scale=3.0, gate_noise=noise), Calls.forward(by_hand, x, shift, scale=3.0)["out"]
    )


def test_a_model_of_integers() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens).mean(1))

    gated = scattered(l0.attach(Bag(), torch.zeros(2, 3, dtype=torch.long)))
    tokens, noise = torch.randint(7, (5, 3)), gated.gate_noise()
    (z,) = drawn(gated, noise).values()
    by_hand = masked(gated.model, {"head.weight": z})
    torch.testing.assert_close(gated(tokens, gate_noise=noise), by_hand(tokens))


def test_axes_by_hand_must_fit() -> None:
    def axis(tensor: str, size: int, dim: int = 1) -> l0.graph.Axis:
        return l0.graph.Axis("mine", size, (Site(tensor, (dim,), np.arange(size), "reads"),))

    with pytest.raises(ValueError, match=r"`axes` names `9\.weight`, which is no parameter"):
        l0.attach(mlp(3, 4, 2), torch.zeros(2, 3), axes=[axis("9.weight", 4)])
    with pytest.raises(ValueError, match=r"`axes` has units of shape \(5,\) for `2.weight`, which is \(4,\) at \(1,\)"):
        l0.attach(mlp(3, 4, 2), torch.zeros(2, 3), axes=[axis("2.weight", 5)])


def test_axes_by_hand_gate_what_cannot_be_traced() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(torch.relu(h) if x.sum() > 0 else torch.tanh(h))  # depends on the data

    model = Branches()
    with pytest.raises(l0.graph.TraceError):
        l0.attach(model, torch.ones(2, 3))
    sites = (
        Site("a.weight", (0,), np.arange(4), "writes"),
        Site("a.bias", (0,), np.arange(4), "rides"),
        Site("b.weight", (1,), np.arange(4), "reads"),
    )
    gated = scattered(l0.attach(model, torch.ones(2, 3), axes=[l0.graph.Axis("hidden", 4, sites)]))
    noise = gated.gate_noise()
    by_hand = masked(model, {"b.weight": drawn(gated, noise)["hidden"]})
    for x in (torch.rand(5, 3), -torch.rand(5, 3)):
        torch.testing.assert_close(gated(x, gate_noise=noise), by_hand(x))


@pytest.mark.slow
def test_all_gates_are_drawn_together() -> None:
    """However many layers there are: the kernels of a draw do not grow with them."""

    def kernels(depth: int) -> int:
        gated = traced.attached(mlp(3, *[4] * depth, 2), torch.zeros(2, 3))
        with Seen() as seen:
            gt.draw([gate for _, gate in gated.named_gates()])
        return len(seen.ops)

    assert kernels(2) == kernels(6)


def test_what_is_flat_is_split_by_placement() -> None:
    gated = scattered(traced.attached(mlp(4, 3, 2), torch.zeros(1, 4), where=l0.weights("*.weight")))
    parts = gated.by_placement(gated.prob_open())
    assert list(parts) == [name for name, _ in gated.named_gates()]
    for name, gate in gated.named_gates():
        torch.testing.assert_close(parts[name], gate.prob_open(), rtol=0, atol=0)


@pytest.mark.slow
def test_threads_attach_one_after_the_other() -> None:
    """Torch's tracer has one state for all threads, and would say that the model cannot be traced."""
    nets = [nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)) for width in (3, 4, 5, 6)]
    with ThreadPoolExecutor(4) as threads:
        gated = list(threads.map(lambda net: l0.attach(net, torch.zeros(1, 2)), nets))
    assert [gate.shape for g in gated for _, gate in g.named_gates()] == [(3,), (4,), (5,), (6,)]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_collection_is_left_as_it_is(frozen: bool) -> None:
    gc.unfreeze()  # what other tests froze
    if frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count() > 0
        l0.attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
        assert (gc.get_freeze_count() > 0) is before is frozen
        with pytest.raises(ValueError, match="nothing to gate"):
            l0.attach(nn.Linear(4, 4), torch.zeros(1, 4))
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("options", [{}, {"apply": "activations"}, {"per_example": True}], ids=str)
def test_threads_take_turns(options: dict[str, Any]) -> None:
    """One calls in the middle of the other's forward."""

    class Calling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is threading.main_thread() and self.calls:
                other.start()
                other.join(timeout=0.2)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Calling(*mlp(4, 8, 6, 2)), torch.randn(3, 4)
    model.calls = False
    gated = l0.attach(model, x, gate=partial(l0.HardConcreteGate, drop_rate=0.5), **options).fix()
    with torch.no_grad():
        expected = gated(x)
        seen = []
        other = threading.Thread(target=torch.no_grad()(lambda: seen.append(gated(x))))
        model.calls = True
        assert torch.equal(gated(x), expected)
        other.join()
        model.calls = False
        assert torch.equal(seen[0], expected)
        assert torch.equal(gated(x), expected)
    assert all(type(p) is nn.Parameter for layer in model for p in layer._parameters.values())


class Recomputed(nn.Module):
    """Checkpointed as a whole; a thread may wait before it, or in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.before: Callable[[], object] = lambda: None
        self.inside: dict[str, Callable[[], object]] = {}

    def part(self, x: Tensor) -> Tensor:
        self.inside.get(threading.current_thread().name, lambda: None)()
        return self.b(self.a(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return checkpoint(self.part, x, use_reentrant=False)


def recomputed(**options: Any) -> l0.Gated:
    torch.manual_seed(0)
    gated = l0.attach(Recomputed(), torch.zeros(2, 4), **options).fix()
    with torch.no_grad():
        for _, gate in gated.named_gates():
            gate.log_alpha.copy_(torch.linspace(-2, 2, gate.log_alpha.numel()))
    return gated


def run_all(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=f, name=f.__name__) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gradients(gated: l0.Gated, x: Tensor) -> list[Tensor]:
    gated.zero_grad()
    gated(x).square().sum().backward()
    return [p.grad.clone() for p in gated.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("apply", ["weights", "activations"])
def test_threads_with_networks_of_their_own_recompute_with_their_own_gates(apply: str) -> None:
    """One leaves its forward while the other is before what it checkpoints."""
    own = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_hook
    x, (one, other, alone) = torch.ones(3, 4), (recomputed(apply=apply) for _ in range(3))
    one_in, other_in, one_out = (threading.Event() for _ in range(3))
    one.model.before = lambda: (one_in.set(), other_in.wait(9))
    other.model.before = lambda: (other_in.set(), one_out.wait(9))
    found: list[Tensor] = []
    plain = nn.Linear(4, 4)

    def first() -> None:
        one(x)
        checkpoint(plain, x.clone().requires_grad_(), use_reentrant=True)  # nobody else's business
        one_out.set()

    def second() -> None:
        one_in.wait(9)
        found.extend(gradients(other, x))

    run_all(first, second)
    for gradient, expected in zip(found, gradients(alone, x), strict=True):
        assert torch.equal(gradient, expected)
    assert (torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_hook) == own


@pytest.mark.parametrize("apply", ["weights", "activations"])
def test_a_forward_waits_for_what_another_thread_recomputes(apply: str) -> None:
    x, gated = torch.ones(3, 4), recomputed(apply=apply)
    expected, seen = gated(x).detach(), []
    loss, inside = gated(x).square().sum(), threading.Event()
    gated.model.inside = {"backward": lambda: (inside.set(), other.join(0.2))}

    def backward() -> None:
        loss.backward()

    def forward() -> None:
        inside.wait(9)
        with torch.no_grad():
            seen.append(gated(x))

    other = threading.Thread(target=forward)
    other.start()
    run_all(backward)
    other.join()
    assert torch.equal(seen[0], expected)
    assert torch.equal(gated(x), expected)
    assert all(type(layer.weight) is nn.Parameter for layer in (gated.model.a, gated.model.b))
