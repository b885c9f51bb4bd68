"""Gates that settled cost nothing: a step is that of the small plain network, and no bit of it is another one."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ellzero as l0
from ellzero.out import shrinking
from support.loops import Loop, driven
from support.zoo import Grouped, ResNet, Tied, lenet, mlp

STEPS, SETTLES = 12, 8
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(6, 16, 12, 3), (5, 6)),
    "lenet": (lenet, (3, 1, 28, 28)),
    "resnet": (ResNet, (3, 2, 6, 6)),
    "tied": (Tied, (5, 3)),
}
# Ways to move a gate that has settled, each of which closes the first that is open.
MOVES: dict[str, Callable[[l0.Gated, Tensor], object]] = {
    "close_": lambda gated, where: _first(gated).close_(where),
    "written": lambda gated, where: _write(_first(gated).log_alpha, where),
    "loaded": lambda gated, where: gated.load_state_dict(_closed(gated, where)),
    "laid elsewhere": lambda gated, where: PAST["other data"](_first(gated).log_alpha, where),
    "replaced": lambda gated, where: setattr(_first(gated), "log_alpha", _closed_parameter(gated, where)),
}


# The same, past what torch counts.
PAST: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda p, where: p.data.__setitem__(where, -9.0),
    "numpy": lambda p, where: p.detach().numpy().__setitem__(where.numpy(), -9.0),
    "other data": lambda p, where: setattr(p, "data", p.detach().masked_fill(where, -9.0)),
}


def _first(gated: l0.Gated) -> Any:
    return next(gate for _, gate in gated.named_gates())


def _write(log_alpha: Tensor, where: Tensor) -> None:
    with torch.no_grad():
        log_alpha[where] = -9.0


def _closed(gated: l0.Gated, where: Tensor) -> dict[str, Tensor]:
    other = copy.deepcopy(gated)
    _first(other).close_(where)
    return other.state_dict()


def _closed_parameter(gated: l0.Gated, where: Tensor) -> nn.Parameter:
    own = _first(gated).log_alpha
    return nn.Parameter(torch.where(where, -9.0, own), requires_grad=False)


class Operations(TorchDispatchMode):
    """Counts what torch computes; not where it only looks at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += not (func.is_view or func is torch.ops.aten.detach.default)
        return func(*args, **kwargs or {})


def operations(network: nn.Module, x: Tensor) -> Counter[str]:
    """Of a forward and its backward."""
    for p in network.parameters():
        p.grad = None
    with Operations() as counted:
        network(x).square().sum().backward()
    return +counted.seen


def begun(name: str, seed: int = 0) -> tuple[Loop, Tensor]:
    """A loop before its first step, and its batch."""
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gated = l0.attach(make(), (x[:2],))
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    options = {"macs": 0.5, "steps": STEPS, "learning": SETTLES / STEPS, "gate_lr": 0.5}
    return driven(gated, optimizer, lambda _: gated(x).square().mean(), **options), x


def settled(name: str) -> tuple[Loop, Tensor]:
    """A loop in the middle of its tuning, and its batch."""
    out, x = begun(name)
    out.train(range(SETTLES + 2))
    assert out.budget.phase == "tuning"
    out.gated.noisy = False  # nobody minds the statistics of so few steps
    return out, x


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_settled_gates_has_the_operations_of_the_compact_network(name: str) -> None:
    loop, x = settled(name)
    small = l0.compact(loop.gated).train()
    assert operations(loop.gated, x) == operations(small, x)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_bit_of_training_is_another_one(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if padded:  # closed units stay, as on a GPU
        propose = shrinking.propose
        monkeypatch.setattr(shrinking, "propose", lambda gated, closed: propose(gated, closed, 4))
    (one, _), (other, _) = settled(name), settled(name)
    other.gated.still = False
    one.train(range(SETTLES + 2, STEPS))
    other.train(range(SETTLES + 2, STEPS))
    assert bool(one.gated.held()) is padded
    assert other.gated.held() is None
    for (key, a), b in zip(one.gated.state_dict().items(), other.gated.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_units_that_stay_as_masks_are_closed_all_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 3)
    gated = l0.attach(Grouped(), (x,))
    optimizer = torch.optim.Adam(gated.param_groups(lr=1e-2))
    loop = driven(gated, optimizer, lambda _: gated(x).square().mean(), macs=0.6, steps=STEPS, gate_lr=0.5)
    loop.train(range(STEPS - 1))
    assert loop.budget.masked is not None
    assert gated.held()
    torch.testing.assert_close(gated(x), l0.compact(gated)(x))


def stale(gated: l0.Gated, x: Tensor) -> bool:
    """Whether a step of training goes by gates that are not there any more."""
    seen = gated(x)
    gated.still = False
    fresh = gated(x)
    gated.still = True
    return not torch.equal(seen, fresh)


def one_open(gated: l0.Gated) -> Tensor:
    where: Tensor = _first(gated).open()
    return where & (where.cumsum(0) == 1)


@pytest.mark.parametrize("move", MOVES)
def test_a_gate_that_moves_after_all_is_seen(move: str) -> None:
    loop, x = settled("mlp")
    gated = loop.gated
    before = gated(x)
    MOVES[move](gated, one_open(gated))
    assert gated.still
    assert not torch.equal(gated(x), before)
    assert not stale(gated, x)


@pytest.mark.parametrize("past", PAST)
def test_what_torch_does_not_count_is_seen_where_nothing_is_remembered(past: str) -> None:
    """In evaluation, in a compiled network, in an exported one, and in a copy."""
    loop, x = settled("mlp")
    gated = loop.gated
    twin, compiled = copy.deepcopy(gated), torch.compile(gated, backend="eager")
    gated(x), twin(x), compiled(x)
    for network in (gated, twin):
        PAST[past](_first(network).log_alpha, one_open(network))
    assert not twin.still
    expected = l0.compact(gated)
    torch.testing.assert_close(twin(x), expected(x))
    torch.testing.assert_close(compiled(x), expected(x))
    gated.eval()
    torch.testing.assert_close(gated(x), expected(x))
    torch.testing.assert_close(compiled(x), expected(x))
    torch.testing.assert_close(torch.export.export(gated, (x,)).module()(x), expected(x))


def test_gates_that_learn_are_never_held() -> None:
    loop, x = settled("mlp")
    for p in loop.gated.gates.parameters():
        p.requires_grad_(True)
    for run in (loop.gated, torch.compile(loop.gated, backend="eager")):
        loop.gated.zero_grad()
        run(x).square().sum().backward()
        assert all(p.grad is not None for p in loop.gated.gates.parameters())


def test_gates_of_one_call_are_not_remembered() -> None:
    loop, x = settled("mlp")
    gated, before = loop.gated, loop.gated(x)
    other = {"gates." + key: value for key, value in gated.gates.state_dict().items()}
    key = next(iter(other))
    other[key] = other[key].masked_fill(one_open(gated), -9.0)
    assert not torch.equal(torch.func.functional_call(gated, other, (x,)), before)
    assert torch.equal(gated(x), before)


def test_a_stack_of_settled_networks_answers_as_they_do() -> None:
    loop, x = settled("mlp")
    networks = [loop.gated, copy.deepcopy(loop.gated)]
    _first(networks[1]).close_(one_open(networks[1]))
    values = torch.func.stack_module_state(networks)
    for network in networks:
        network.still = True
    together = torch.func.vmap(lambda *v: torch.func.functional_call(loop.gated, v, (x,)))(*values)
    torch.testing.assert_close(together, torch.stack([network(x) for network in networks]))


def test_a_look_in_inference_mode_leaves_the_training_alone() -> None:
    loop, x = settled("mlp")
    loop.gated.still, loop.gated._known = True, None
    with torch.inference_mode():
        loop.gated(x)
    loop.train(range(1))
    with torch.inference_mode():
        MOVES["written"](loop.gated, one_open(loop.gated))
    assert not stale(loop.gated, x)


class Nested(l0.HardConcreteGate):
    """log α comes from a module of its own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.shift = nn.Linear(1, *shape, bias=False)
        nn.init.zeros_(self.shift.weight)

    def phi(self) -> Any:
        return (super().phi()[0] + self.shift.weight[:, 0],)


@pytest.mark.filterwarnings("ignore:subclassing")
def test_families_with_parts_and_constants_of_their_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    gated = l0.attach(mlp(6, 16, 12, 3), (x,), gate=Nested).train().fix()
    gated.gates.requires_grad_(False)
    gated.still = True
    gated(x)
    with torch.no_grad():
        _first(gated).shift.weight[0] = -20.0
    assert not stale(gated, x)
    gated = l0.attach(mlp(6, 16, 12, 3), (x,), gate=l0.gates.BernoulliGate).train().fix()
    gated.gates.requires_grad_(False)
    gated.still = True
    gated(x)
    assert gated.held() is not None
    for gate in gated.gates.values():
        gate.threshold = 1.1
    assert not stale(gated, x)
    assert (gated(x) == gated(x)[:1]).all()  # no gate is open any more


def test_a_run_that_is_taken_up_holds_too() -> None:
    (one, x), (fresh, _) = settled("mlp"), begun("mlp", seed=1)
    fresh.take_up(one.state())
    one.train(range(SETTLES + 2, STEPS))
    fresh.train(range(SETTLES + 2, STEPS))
    assert fresh.gated.held() == one.gated.held() == {}
    assert torch.equal(fresh.gated(x), one.gated(x))


def test_a_stack_of_buffers_alone_is_not_remembered() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    gated = l0.attach(mlp(6, 16, 12, 3), (x,)).train().fix()
    gated.gates.requires_grad_(False)
    for gate in gated.gates.values():
        gate.register_buffer("unused", torch.zeros(()))
    gated.still = True
    stacked = {name: torch.stack([b, b]) for name, b in gated.named_buffers()}
    together = torch.func.vmap(lambda b: torch.func.functional_call(gated, b, (x,)))(stacked)
    torch.testing.assert_close(together, torch.stack([gated(x)] * 2))
    assert gated.held() is not None
