"""`Budget` in loops of a user's own: each claim against the same thing done by hand."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0
from ellzero.objectives import costs
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.duals import GeometricWarmup, SelfPacedAscent
from support import processes, traced

Maker = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
ADAM: Maker = partial(torch.optim.Adam, lr=1e-2)
SGD: Maker = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-3)
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))


class Normed(nn.Module):
    """Convolutions with batch norm and a residual block, whose hidden maps can shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 8, 1))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h + self.inner(h)).mean((2, 3)))


def gates_of(gated: l0.Gated) -> list[nn.Parameter]:
    return list(gated.gates.parameters())


def attached(**rates: Any) -> l0.Gated:
    gated = traced.attached(mlp(), X[:2], gate=partial(l0.HardConcreteGate, drop_rate=0.1))
    gated.train()
    return gated


def driven(make: Maker = ADAM, steps: int = 40, **options: Any) -> tuple[l0.Gated, l0.Budget, torch.optim.Optimizer]:
    gated = attached()
    budget = l0.Budget(gated, **{"macs": 0.4, "learning": 0.5, **options}, steps=steps)
    optimizer = make(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    return gated, budget, optimizer


def train(
    gated: l0.Gated,
    optimizer: torch.optim.Optimizer,
    steps: range,
    forward: Callable[[Tensor], Tensor] | None = None,
    batch: slice = slice(None),
) -> None:
    for step in steps:
        torch.manual_seed(step)  # the same noise, whoever draws it
        optimizer.zero_grad()
        F.cross_entropy((gated if forward is None else forward)(X[batch]), Y[batch]).backward()
        optimizer.step()


def same(ours: nn.Module, other: nn.Module) -> bool:
    mine, theirs = ours.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def macs_of(network: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(x)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("steps", "learning"),
    [(1, 1), (10, 4), (10_000, 4_000), (10_001, 4_000), (80_000, 4_000), (80_040, 4_002), (400_000, 20_000)],
)
def test_gates_learn_for_two_fifths_of_a_short_run_and_a_twentieth_of_a_long_one(steps: int, learning: int) -> None:
    budget = l0.Budget(attached(), macs=0.4, steps=steps)
    assert budget.settles == learning
    assert budget.gate_lr == min(0.3, 25 / learning)
    assert l0.Budget(attached(), macs=0.4, steps=steps, learning=0.5).settles == max(1, round(steps / 2))


@pytest.mark.slow
@pytest.mark.parametrize("make", [ADAM, SGD], ids=["adam", "sgd"])
def test_the_network_that_comes_out_is_within_its_budget(make: Maker) -> None:
    gated, budget, optimizer = driven(make)
    train(gated, optimizer, range(40))
    small = budget.finish()
    share = macs_of(small, X) / macs_of(mlp(), X)
    assert share <= 0.4
    assert share > 0.3  # and uses it
    with torch.no_grad():
        torch.testing.assert_close(small(X), gated.eval()(X))


@pytest.mark.slow
def test_a_driven_optimizer_does_what_the_term_in_the_loss_does() -> None:
    gated, _, optimizer = driven(ADAM)
    train(gated, optimizer, range(30))
    other = attached()
    budget = l0.Budget(other, macs=0.4, steps=40, learning=0.5)
    adam = ADAM(other.param_groups(lr=1e-2))
    for step in range(30):
        torch.manual_seed(step)
        adam.zero_grad()
        (F.cross_entropy(other(X), Y) + budget.term()).backward()
        adam.step()
        budget.step(adam)
    assert budget.phase == "tuning"
    assert same(gated.model, other.model)
    assert same(gated.gates, other.gates)


def test_gates_move_by_adam_beside_any_optimizer() -> None:
    """By hand: SGD for the weights, Adam for the gates, and a constraint with the documented controller."""
    gated, budget, optimizer = driven(SGD)
    train(gated, optimizer, range(19))
    other = attached()
    rate = budget.gate_lr
    dual, fall = SelfPacedAscent(20, rate), GeometricWarmup(10.0)
    constraint = Constraint(l0.macs, 0.4, on="kept", dual=dual, warmup=fall)
    sgd, adam = (
        SGD([{"params": other.model.parameters(), "lr": 1e-2}]),
        torch.optim.Adam(gates_of(other), lr=rate),
    )
    for step in range(19):
        torch.manual_seed(step)
        sgd.zero_grad(), adam.zero_grad()
        (F.cross_entropy(other(X), Y) + constraint(other)).backward()
        sgd.step(), adam.step()
        constraint.ascend()
    assert same(gated.gates, other.gates)
    assert same(gated.model, other.model)
    assert torch.equal(budget.constraints[0].multiplier, constraint.multiplier)


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
def test_a_schedule_of_the_weights_does_not_slow_the_gates(before: bool) -> None:
    """The first step is of Adam, whose length is the rate."""
    still = attached()
    budget = l0.Budget(still, macs=0.4, steps=40, learning=0.5)
    adam = ADAM(still.param_groups(lr=1e-2))
    start = torch.cat([g.detach().clone() for g in gates_of(still)])
    budget.drive(adam) if not before else None
    torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=1e-5, total_steps=9)  # sets "lr" and "initial_lr" of all groups
    budget.drive(adam) if before else None
    train(still, adam, range(1))
    moved = torch.cat(gates_of(still)) - start
    assert moved.abs().max().item() == pytest.approx(budget.gate_lr, rel=1e-3)
    for p, q in zip(still.model.parameters(), mlp().parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_a_rate_that_was_asked_for_is_kept() -> None:
    gated = attached()
    budget = l0.Budget(gated, macs=0.4, steps=40)
    adam = ADAM(gated.param_groups(lr=1e-2, gate_lr=0.03))
    start = torch.cat([g.detach().clone() for g in gates_of(gated)])
    budget.drive(adam)
    train(gated, adam, range(1))
    moved = torch.cat(gates_of(gated)) - start
    assert moved.abs().max().item() == pytest.approx(0.03, rel=1e-3)


def test_gates_among_the_weights_get_a_rate_of_their_own() -> None:
    """Trainers make optimizers of all parameters in one group."""
    gated, _, optimizer = driven()
    other = attached()
    l0.Budget(other, macs=0.4, steps=40, learning=0.5).drive(adam := torch.optim.Adam(other.parameters(), lr=1e-2))
    train(gated, optimizer, range(6))
    train(other, adam, range(6))
    assert same(gated, other)


def test_several_backwards_make_one_step() -> None:
    whole, one, adam = driven()
    parts, two, other = driven()
    u = torch.rand(whole.liveness.size, generator=torch.Generator().manual_seed(3))
    adam.zero_grad(), other.zero_grad()
    F.cross_entropy(whole(X, gate_noise=u), Y).backward()
    for half in (slice(0, 32), slice(32, 64)):
        (F.cross_entropy(parts(X[half], gate_noise=u), Y[half]) / 2).backward()
    adam.step(), other.step()
    assert one.done == two.done == 1
    for p, q in zip(gates_of(whole), gates_of(parts), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_closure_is_a_step_too() -> None:
    gated, _, optimizer = driven()
    train(gated, optimizer, range(5))
    other, _, adam = driven()

    def closure() -> Tensor:
        adam.zero_grad()
        loss = F.cross_entropy(other(X), Y)
        loss.backward()
        return loss

    for step in range(5):
        torch.manual_seed(step)
        adam.step(closure)
    assert same(gated, other)


def test_a_step_that_a_scaler_leaves_out_is_left_out() -> None:
    gated, budget, optimizer = driven()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(gated)
    scaler.scale(F.cross_entropy(gated(X), Y) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert budget.done == 0
    assert same(gated, before)
    optimizer.zero_grad()
    plain, _, adam = driven()
    for network, opt, by in ((gated, optimizer, scaler), (plain, adam, None)):
        torch.manual_seed(0)
        loss = F.cross_entropy(network(X), Y)
        (loss if by is None else by.scale(loss)).backward()
        opt.step() if by is None else by.step(opt)
    assert budget.done == 1
    for p, q in zip(gates_of(gated), gates_of(plain), strict=True):
        torch.testing.assert_close(p, q)  # unscaled before the term's gradient comes to it


def test_a_fused_optimizer_that_skips_in_its_kernel_moves_no_gates() -> None:
    """A scaler calls its step all the same, and tells it what it found."""
    gated, budget, optimizer = driven(partial(torch.optim.Adam, lr=1e-2, fused=True))
    before = copy.deepcopy(gated)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(F.cross_entropy(gated(X), Y) * torch.inf).backward()
    scaler.step(optimizer)
    assert same(gated, before)
    assert budget.done == 0
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(gated(X), Y)).backward()
    scaler.step(optimizer)
    assert budget.done == 1


def test_gradients_of_gates_are_used_once() -> None:
    """Some loops clear those of the model alone."""
    gated, _, optimizer = driven()
    other, _, adam = driven()
    train(gated, optimizer, range(4))
    for step in range(4):
        torch.manual_seed(step)
        other.model.zero_grad()
        F.cross_entropy(other(X), Y).backward()
        adam.step()
    assert same(gated, other)


@pytest.mark.slow
def test_units_leave_the_live_network_and_the_result_is_the_same() -> None:
    results = []
    for shrink in (True, False):
        gated, budget, optimizer = driven(SGD, shrink=shrink)
        train(gated, optimizer, range(40))
        sizes = sum(p.numel() for p in gated.model.parameters())
        results.append((sizes, budget.finish()))
        momentum = optimizer.state[gated.model[0].weight]["momentum_buffer"]
        assert momentum.shape == gated.model[0].weight.shape
    (small, one), (large, other) = results
    assert small < large
    assert small == sum(p.numel() for p in one.parameters())
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_a_compiled_network_shrinks_too() -> None:
    networks = []
    for compiled in (False, True):
        gated, budget, optimizer = driven(SGD)
        forward = torch.compile(gated, backend="eager", fullgraph=True) if compiled else gated
        train(gated, optimizer, range(24), forward)
        assert budget.masked is None
        networks.append(budget.finish())
    for p, q in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_processes_keep_masks_and_stay_together(world: int, server: processes.Server, tmp_path: Path) -> None:
    """One process too, as `torchrun` starts it where there is one GPU: DDP holds on to the parameters there as well."""
    for job in [server.start("budgeted", rank=rank, folder=str(tmp_path), world=world) for rank in range(world)]:
        assert job.wait() == 0, job.said
    (told, one, *seconds), (_, other, theirs) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, world - 1))
    assert seconds == [theirs] == [1.0]  # times are those of the first process
    assert "masks until the end: a process group holds on to the parameters" in told
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    sizes = [one[f"{layer}.weight"].shape for layer in (0, 2, 4)]
    assert sum(rows * columns for rows, columns in sizes) <= 0.4 * macs_of(mlp(), X[:1])


@pytest.mark.slow
@pytest.mark.parametrize("stop", [12, 31], ids=["learning", "tuning"])
def test_a_stopped_loop_goes_on_bit_for_bit(stop: int, tmp_path: Path) -> None:
    gated, budget, optimizer = driven(SGD, ema=0.9)
    train(gated, optimizer, range(stop))
    torch.save([budget.state_dict(), gated.state_dict(), optimizer.state_dict()], tmp_path / "stopped.pt")
    train(gated, optimizer, range(stop, 40))
    other, resumed, sgd = driven(SGD, ema=0.9)
    for thing, state in zip((resumed, other, sgd), torch.load(tmp_path / "stopped.pt"), strict=True):
        thing.load_state_dict(state)
    train(other, sgd, range(stop, 40))
    assert resumed.done == 40
    assert same(budget.finish(), resumed.finish())


@pytest.mark.slow
@pytest.mark.parametrize("stop", [12, 31], ids=["learning", "tuning"])
def test_an_optimizer_that_is_driven_after_the_state_is_loaded_goes_on(stop: int) -> None:
    gated, budget, optimizer = driven(SGD)
    train(gated, optimizer, range(stop))
    states = copy.deepcopy([budget.state_dict(), gated.state_dict(), optimizer.state_dict()])
    train(gated, optimizer, range(stop, 40))
    other = attached()
    resumed = l0.Budget(other, macs=0.4, learning=0.5, steps=40)
    resumed.load_state_dict(states[0])
    sgd = SGD(other.param_groups(lr=1e-2))
    resumed.drive(sgd)
    other.load_state_dict(states[1])
    sgd.load_state_dict(states[2])
    train(other, sgd, range(stop, 40))
    assert same(budget.finish(), resumed.finish())


def by_term(gated: l0.Gated, budget: l0.Budget, adam: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        adam.zero_grad()
        (F.cross_entropy(gated(X), Y) + budget.term()).backward()
        adam.step()
        budget.step(adam)


def test_a_loop_with_the_term_in_sight_goes_on_or_says_that_its_optimizer_is_of_the_larger_network() -> None:
    def begun() -> tuple[l0.Gated, l0.Budget, torch.optim.Optimizer]:
        gated = attached()
        budget = l0.Budget(gated, macs=0.4, learning=0.5, steps=40)
        return gated, budget, ADAM(gated.param_groups(lr=1e-2))

    gated, budget, adam = begun()
    by_term(gated, budget, adam, range(30))
    states = copy.deepcopy([budget.state_dict(), gated.state_dict(), adam.state_dict()])
    by_term(gated, budget, adam, range(30, 40))
    other, resumed, mine = begun()
    resumed.load_state_dict(states[0], mine)
    other.load_state_dict(states[1])
    mine.load_state_dict(states[2])
    by_term(other, resumed, mine, range(30, 40))
    assert same(budget.finish(), resumed.finish())
    other, resumed, mine = begun()
    resumed.load_state_dict(states[0])  # and the optimizer stays that of the network as it was
    with pytest.raises(ValueError, match="must have weights and gates"):
        by_term(other, resumed, mine, range(30, 31))
    with pytest.raises(RuntimeError, match=r"`step\(\)` must get the optimizer"):
        resumed.step()


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [True, False], ids=["shrunk", "masked"])
def test_statistics_are_those_of_the_network_that_is_handed_over(shrink: bool) -> None:
    torch.manual_seed(0)
    gated = l0.attach(Normed().train(), (torch.randn(4, 1, 8, 8),), where=l0.shrinkable(streams=True))
    budget = l0.Budget(gated, macs=0.5, steps=6, learning=0.5, shrink=shrink)
    optimizer = SGD(gated.param_groups(lr=1e-1))  # its momentum moves what is masked, too
    budget.drive(optimizer)
    x = torch.randn(32, 1, 8, 8)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(gated(x), Y[:32]).backward()
        optimizer.step()
    small = budget.finish([x[:16], (x[16:], Y[16:32])])
    for norm, reads in ((small.first[1], small.first[0]), (small.inner[1], nn.Sequential(small.first, small.inner[0]))):
        seen = []
        for half in x.split(16):
            small.eval()
            small.first[1].train(norm is not small.first[1])  # as they were gathered: by each batch's own statistics
            seen.append(copy.deepcopy(reads)(half))
        torch.testing.assert_close(norm.running_mean, sum(h.mean((0, 2, 3)) for h in seen) / 2)
        torch.testing.assert_close(norm.running_var, sum(h.transpose(0, 1).flatten(1).var(1) for h in seen) / 2)
        assert norm.momentum == 0.1


@pytest.mark.parametrize("options", [{}, {"ema": 0.75}], ids=["last", "averaged"])
def test_the_model_itself_is_what_comes_out_where_closed_units_stay_as_masks(options: dict[str, float]) -> None:
    """Momentum moves weights behind closed gates: whoever saves the model and not what `finish` returns gets them."""
    gated, budget, optimizer = driven(shrink=False, **options)
    train(gated, optimizer, range(40))
    x = torch.randn(8, *gated.example_inputs[0][0].shape[1:])
    gated.eval()
    assert options or not torch.allclose(gated.model(x), gated(x))
    small = budget.finish().eval()
    torch.testing.assert_close(gated.model(x), gated(x))
    torch.testing.assert_close(gated.model(x), small(x))


def test_the_average_is_handed_over() -> None:
    gated, budget, optimizer = driven(ema=0.75)
    train(gated, optimizer, range(20))
    mean = gated.model[4].weight.detach().clone()
    for step in range(20, 40):
        train(gated, optimizer, range(step, step + 1))
        mean = 0.75 * mean + 0.25 * gated.model[4].weight.detach()
    torch.testing.assert_close(budget.finish()[4].weight.detach(), mean)


@pytest.mark.slow
def test_several_costs_and_one_of_your_own() -> None:
    def width(gated: l0.Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
        return costs.units(gated, kept=kept, only=only) ** 1.0

    gated, budget, optimizer = driven(params=0.5, at_most={width: 0.6}, macs={"0": 0.9, "2": 0.3})
    train(gated, optimizer, range(40))
    assert float(l0.params(gated, kept=True)) <= 0.5 * l0.dense(l0.params, gated)
    assert float(width(gated, kept=True)) <= 0.6 * l0.dense(width, gated)
    assert float(l0.macs(gated, kept=True, only="2")) <= 0.3 * 16 * 12
    told = budget.metrics()
    assert [name for name in told if name.endswith("kept")] == [
        *("width/kept", "macs of 0/kept", "macs of 2/kept", "params/kept")
    ]
    assert told["macs of 2/kept"] == float(l0.macs(gated, kept=True, only="2")) / (16 * 12)
    assert told["macs of 2/target"] == pytest.approx(0.3)
    assert told["width/multiplier"] == float(budget.constraints[0].multiplier)
    budget.finish()


def test_steps_beyond_the_last_train_the_small_network_on() -> None:
    gated, budget, optimizer = driven(steps=10)
    train(gated, optimizer, range(14))
    assert (budget.done, budget.phase) == (14, "tuning")
    assert "step 14 of 10" in str(budget)
    budget.finish()
    assert budget.phase == "finished"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")  # torch's own
def test_a_network_that_is_moved_to_a_gpu_takes_its_budget_along() -> None:
    gated, budget, optimizer = driven()
    gated.to("cuda")
    train(gated, optimizer, range(40), lambda x: gated(x.cuda()).cpu())
    assert macs_of(budget.finish(), X.cuda()) <= 0.4 * macs_of(mlp(), X)


def test_masks_until_the_end_say_why() -> None:
    gated = attached()
    budget = l0.Budget(gated, macs=0.4, steps=4)
    adam = ADAM(gated.param_groups(lr=1e-2))
    for _ in range(4):
        adam.zero_grad()
        (F.cross_entropy(gated(X), Y) + budget.term()).backward()
        adam.step()
        budget.step()
    assert float(budget.term()) == 0
    assert "masks until the end: `step()` was given no optimizer" in str(budget)
    assert macs_of(budget.finish(), X) <= 0.4 * macs_of(mlp(), X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "`steps` must be a positive integer, got 0"),
        ({"macs": None}, "must say what the network may cost"),
        ({"macs": 30}, "`macs` is a fraction of the dense cost in (0, 1], got 30"),
        ({"params": {"a*": 0}}, "`params` is a fraction of the dense cost in (0, 1], for 'a*' too, got 0"),
        ({"macs": 1e-3}, "`macs` must be at least"),
        ({"params": {"nope": 0.5}}, "`params` must name what `params` counts, got 'nope'"),
        ({"at_most": {l0.macs: 1e-3}, "macs": None}, "`at_most` must be at least"),
        ({"learning": 0.0}, "`learning` must be a share"),
        ({"gate_lr": "x"}, "`gate_lr` must be a positive number"),
        ({"ema": 1.0}, "`ema` must be a decay"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        l0.Budget(attached(), **{"macs": 0.4, "steps": 10, **options})


def test_mistakes_in_the_loop_are_told_where_they_happen() -> None:
    gated = attached()
    with pytest.raises(TypeError, match="must be what `attach` returned"):
        l0.Budget(gated.model, macs=0.4, steps=10)  # type: ignore[arg-type]
    budget = l0.Budget(gated, macs=0.4, steps=10)
    with pytest.raises(ValueError, match="must have one budget, got a second"):
        l0.Budget(gated, params=0.4, steps=10)
    with pytest.raises(ValueError, match=r"must have weights and gates.*got one without gates"):
        budget.drive(ADAM([{"params": gated.model.parameters()}]))
    with pytest.raises(ValueError, match=r"got one without model\.0\.weight, model\.0\.bias, model\.2\.weight and 3"):
        budget.drive(ADAM([{"params": gated.gates.parameters()}]))
    with pytest.raises(RuntimeError, match=r"in step 4, got 0 steps; call `budget\.drive"):
        budget.finish()
    optimizer = ADAM(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    with pytest.raises(ValueError, match="must be driven once"):
        budget.drive(optimizer)
    with pytest.raises(RuntimeError, match=r"in step 4, got 0 steps; the optimizer that it drives has taken no step"):
        budget.finish()
    F.cross_entropy(gated.model(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"call `gated\(x\)` in the loop, not the model itself"):
        optimizer.step()
    state = budget.state_dict()
    with pytest.raises(ValueError, match="whose `steps` is 10, not 20"):
        l0.Budget(attached(), macs=0.4, steps=20).load_state_dict(state)
    with pytest.raises(ValueError, match=r"whose `bounds` is \{'macs': 0.4\}, not \{'macs': 0.5\}"):
        l0.Budget(attached(), macs=0.5, steps=10).load_state_dict(state)
    with pytest.raises(ValueError, match="whose `settles` is 4, not 5"):
        l0.Budget(attached(), macs=0.4, steps=10, learning=0.5).load_state_dict(state)


@pytest.mark.parametrize("seed", range(3))
def test_gates_of_a_short_run_come_near_the_bound_before_they_settle(seed: int) -> None:
    """In 40 steps of learning: at a rate of 0.1 they kept everything, and the settling closed 70 % of the MACs."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    gated = traced.attached(nn.Sequential(*layers), X[:2])
    gated.train()
    budget = l0.Budget(gated, macs=0.3, steps=100)
    optimizer = ADAM(gated.param_groups(lr=1e-2))
    budget.drive(optimizer)
    train(gated, optimizer, range(budget.settles - 1))
    assert budget.phase == "learning"
    assert 0.15 < budget.metrics()["macs/kept"] < 0.5


def test_gates_that_settle_before_they_could_choose_are_noticed() -> None:
    gated = attached()
    budget = l0.Budget(gated, macs=0.4, steps=40)
    with pytest.warns(UserWarning, match=r"gates settle after 0 steps with 100 % of `macs` kept, of 40 % that"):
        budget.settle()
    gated = attached()
    budget = l0.Budget(gated, macs=0.85, steps=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget.settle()  # little is closed at once
    for done, warned in ((26, 1), (27, 0)):  # 27 steps of 0.3 are twice as far as from open to closed
        budget = l0.Budget(attached(), macs=0.4, steps=100)
        for parameter in budget.gated.gates.parameters():
            with torch.no_grad():
                parameter.add_(1e-3)  # something has moved it
        budget.done = done
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            budget.settle()
        assert len(said) == warned


def test_gates_that_closed_far_too_much_are_noticed_where_no_bound_asks_for_it() -> None:
    """Most of each layer's units are closed: between a tenth and three tenths of MACs and of parameters are kept."""
    for bounds, said in (
        ({"macs": 0.9}, ["macs` kept, of 90 %"]),
        ({"macs": 0.9, "params": 0.8}, ["macs` kept, of 90 %", "params` kept, of 80 %"]),
        ({"macs": 0.9, "params": 0.3}, []),  # that one may have asked for it
        ({"macs": 0.3}, []),
    ):
        gated = attached()
        for _, gate in gated.named_gates():
            gate.close_(torch.arange(gate.shape.numel()) >= 0.4 * gate.shape.numel())
        budget = l0.Budget(gated, **bounds, steps=100)
        assert all(
            0.1 < float(l0.dense(cost, gated)) ** -1 * float(cost(gated, kept=True)) < 0.3 for cost in budget.bounds
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            budget.settle()
        assert len(told) == len(said)
        for warning, words in zip(told, said, strict=True):
            assert words in str(warning.message)
            assert "press too hard, as they do on a loss far below 1" in str(warning.message)


def test_gates_that_are_fixed_stay_so_in_training_mode() -> None:
    gated = attached().fix()
    gated.train()
    with torch.no_grad():
        assert torch.equal(gated(X), gated(X))
        assert torch.equal(gated(X), gated.eval()(X))
        gated.fix(False).train()
        assert not torch.equal(gated(X), gated(X))
