"""Mistakes around a `Budget`: each is told in one line where it happens, and nothing is lost."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ellzero as l0
from support import traced

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


def begun(
    make: Any = torch.optim.Adam, steps: int = 8, **options: Any
) -> tuple[l0.Gated, l0.Budget, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    gated = traced.attached(model, X[:2], gate=partial(l0.HardConcreteGate, drop_rate=0.1))
    gated.train()
    budget = l0.Budget(gated, **{"macs": 0.4, "learning": 0.5, **options}, steps=steps)
    return gated, budget, make(gated.parameters(), lr=1e-2)


def train(gated: l0.Gated, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(gated(X), Y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(loss)  # type: ignore[arg-type]


def test_a_term_that_would_count_twice_is_refused() -> None:
    _, budget, adam = begun()
    budget.drive(adam)
    with pytest.raises(RuntimeError, match=r"`term\(\)` must not be added where `drive` does it already"):
        budget.term()
    with pytest.raises(RuntimeError, match=r"`step\(\)` must not be called where an optimizer is driven"):
        budget.step()
    assert budget.done == 0


def test_a_step_without_the_term_is_refused() -> None:
    gated, budget, adam = begun()
    (F.cross_entropy(gated(X), Y) + budget.term()).backward()
    adam.step()
    budget.step(adam)
    with pytest.raises(RuntimeError, match=r"must follow a loss with `\+ budget.term\(\)`, got none since"):
        budget.step(adam)
    assert budget.done == 1


@pytest.mark.parametrize(("whole", "reason"), [(False, "nothing has moved them"), (True, "too few steps")])
def test_gates_that_no_optimizer_has_are_noticed_when_they_settle(whole: bool, reason: str) -> None:
    gated, budget, _ = begun(steps=4)
    adam = torch.optim.Adam((gated if whole else gated.model).parameters(), lr=1e-2)
    for _ in range(2):
        (F.cross_entropy(gated(X), Y) + budget.term()).backward()
        adam.step()
        if budget.done == 0:
            budget.step(adam)
    with pytest.warns(UserWarning, match=f"gates settle after 2 steps with 100 % .*: {reason}"):
        budget.step(adam)


@pytest.mark.parametrize("driven", [True, False])
def test_gates_that_were_told_a_slow_rate_are_noticed_when_they_settle(driven: bool) -> None:
    """By the budget's own rate they would have had the time; groups that were made before it have that of weights."""
    gated = l0.attach(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)), X[:2])
    adam = torch.optim.AdamW(gated.param_groups(lr=1e-3, gate_lr=1e-3))
    slow = l0.Budget(gated, macs=0.3, steps=400)
    assert slow.settles * slow.gate_lr > 8
    if driven:
        slow.drive(adam)

    def learn() -> None:
        for _ in range(slow.settles):
            loss = F.cross_entropy(gated(X), Y)
            adam.zero_grad()
            (loss if driven else loss + slow.term()).backward()
            adam.step()
            if not driven:
                slow.step(adam)

    with pytest.warns(UserWarning, match="gates settle after 160 steps with .*: too few steps to choose by"):
        learn()


def test_gates_that_are_left_in_evaluation_are_noticed() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    gated.eval()
    with pytest.raises(RuntimeError, match=r"call `gated.train\(\)` after each evaluation"):
        train(gated, adam, 1)
    gated.train()
    train(gated, adam, 8)
    assert budget.phase == "tuning"


@pytest.mark.parametrize("gone", ["ema", "masked", "pace"])
def test_the_state_of_another_version_is_refused(gone: str) -> None:
    _, budget, _ = begun()
    state = budget.state_dict()
    del state[gone]
    with pytest.raises(ValueError, match=f"must be of a `Budget` of this version, got one without `{gone}`"):
        budget.load_state_dict(state)


def test_what_was_before_the_settling_is_not_handed_over() -> None:
    gated, budget, adam = begun(shrink=False)  # with masks, any state fits
    budget.drive(adam)
    train(gated, adam, 2)
    early, network = copy.deepcopy(budget.state_dict()), copy.deepcopy(gated.state_dict())
    train(gated, adam, 6)
    late = copy.deepcopy(gated.state_dict())
    with pytest.raises(ValueError, match="is of step 2, before the gates settled: it fits a fresh network"):
        budget.load_state_dict(early)
    gated.load_state_dict(network)
    with pytest.raises(RuntimeError, match=r"keeps 100 % of `macs`, more than 40 %: a state from before"):
        budget.finish()
    gated.load_state_dict(late)
    small = budget.finish()
    assert sum(p.numel() for p in small.parameters() if p.ndim > 1) <= 0.4 * (48 + 48 + 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "key"), [(torch.optim.Adafactor, "row_var"), (torch.optim.LBFGS, "d")], ids=["adafactor", "lbfgs"]
)
def test_an_optimizer_that_cannot_forget_units_keeps_them_as_masks(make: Any, key: str) -> None:
    gated, budget, optimizer = begun(make)
    budget.drive(optimizer)
    train(gated, optimizer, 8)
    assert f"{make.__name__} remembers `{key}` of " in str(budget.masked)
    small = budget.finish()
    assert sum(p.numel() for p in small.parameters() if p.ndim > 1) <= 0.4 * (48 + 48 + 12)
    with torch.no_grad():
        torch.testing.assert_close(small(X), gated(X))


@pytest.mark.filterwarnings("always:gates settle after")
def test_warnings_point_to_the_loop_and_come_once() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(gated, adam, 8)
    assert [(w.filename, str(w.message)[:12]) for w in said] == [(__file__, "gates settle")]
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    gated = l0.attach(model, X)
    adam = torch.optim.Adam(gated.param_groups(lr=1e-2))
    budget = l0.Budget(gated, macs=0.9, steps=2).drive(adam)
    train(gated, adam, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        budget.finish()
    assert [(w.filename, str(w.message)[:21]) for w in said] == [(__file__, "batch-norm statistics")]


def test_a_loop_without_drive_hears_of_it_in_the_second_step() -> None:
    gated, _, adam = begun()
    dense = torch.optim.SGD(gated.model.parameters(), lr=0.1)
    F.cross_entropy(gated.model(X), Y).backward()
    dense.step()  # of weights alone, before gates are used: nothing is amiss
    train(gated, adam, 1)  # nor in one, as torch takes by itself where it loads a state
    with pytest.warns(
        UserWarning, match=r"^nothing moves the budget: call `budget.drive\(optimizer\)` before the loop$"
    ):
        train(gated, adam, 1)
    train(gated, adam, 1)  # once


def test_neither_a_driven_loop_nor_one_with_the_term_is_reminded() -> None:
    for driven in (True, False):
        gated, budget, adam = begun()
        if driven:
            budget.drive(adam)
            train(gated, adam, 2)
        else:
            (F.cross_entropy(gated(X), Y) + budget.term()).backward()
            adam.step()
            budget.step(adam)
            (F.cross_entropy(gated(X), Y) + budget.term()).backward()
            adam.step()
            budget.step(adam)
        assert budget.done == 2


def test_states_in_another_order_are_refused_with_the_right_one() -> None:
    gated, budget, adam = begun(steps=8)
    budget.drive(adam)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of haste
        train(gated, adam, 6)
    saved, states = gated.state_dict(), budget.state_dict()
    fresh, other, early = begun(steps=8)
    with pytest.raises(ValueError, match=r"has shape .*, here it is .*; .*load the budget's state first$"):
        fresh.load_state_dict(saved)
    other.load_state_dict(states)
    with pytest.raises(ValueError, match=r"got one without model.*; the network got smaller since: make it now, or"):
        other.drive(early)
    fresh.load_state_dict(saved)
    other.drive(torch.optim.Adam(fresh.parameters(), lr=1e-2))


def test_gates_that_do_not_learn_have_no_budget() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    train(gated, adam, 8)
    budget.finish()
    with pytest.raises(ValueError, match="must have gates that learn, and they are fixed: attach to its model anew"):
        l0.Budget(gated, macs=0.3, steps=8)
    with pytest.raises(ValueError, match="must have gates that learn, and they have nothing to learn"):
        l0.Budget(l0.attach(gated.model, X[:2], gate=l0.gates.DropoutGate), macs=0.3, steps=8)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_go_on_hearing_them(register: str) -> None:
    gated, budget, adam = begun()
    heard: list[str] = []
    for name, p in gated.model.named_parameters():
        getattr(p, register)(lambda _, name=name: heard.append(name))
    budget.drive(adam)
    train(gated, adam, 7)
    assert budget.phase == "tuning"
    assert str(budget.masked).startswith("a hook waits for the gradient of `0.weight`")
    heard.clear()
    train(gated, adam, 1)
    assert sorted(heard) == sorted(name for name, _ in gated.model.named_parameters())
    small = budget.finish()
    with torch.no_grad():
        torch.testing.assert_close(small(X), gated(X))


def test_what_is_noted_on_a_parameter_stays_with_it() -> None:
    gated, budget, adam = begun()
    for name, p in gated.model.named_parameters():
        p.called = name  # type: ignore[attr-defined]
    budget.drive(adam)
    train(gated, adam, 8)
    assert budget.masked is None
    for name, p in gated.model.named_parameters():
        assert p.called == name  # type: ignore[attr-defined]


class Listing(torch.optim.SGD):
    """Moves the parameters that it was given in the beginning."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.all = {"mine": [p for group in self.param_groups for p in group["params"]]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for p in self.all["mine"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.defaults["lr"])


def test_an_optimizer_with_a_list_of_its_own_moves_all_to_the_end() -> None:
    gated, budget, optimizer = begun(Listing)
    budget.drive(optimizer)
    train(gated, optimizer, 7)
    assert budget.phase == "tuning"
    assert budget.masked == "Listing keeps parameters in `all`, beside its `param_groups`"
    before = [p.detach().clone() for p in gated.model.parameters()]
    train(gated, optimizer, 1)
    assert not any(torch.equal(p, b) for p, b in zip(gated.model.parameters(), before, strict=True) if p.grad.any())


def test_a_step_without_gradients_around_it_is_one_as_any_other() -> None:
    """Sharpness-aware minimisation takes its second step under `no_grad`."""
    networks = []
    for grad in (True, False):
        gated, budget, adam = begun()
        budget.drive(adam)
        for step in range(8):
            torch.manual_seed(step)
            adam.zero_grad()
            F.cross_entropy(gated(X), Y).backward()
            with torch.set_grad_enabled(grad):
                adam.step()
        networks.append(budget.finish().state_dict())
    for key, value in networks[0].items():
        assert torch.equal(value, networks[1][key]), key


def test_training_beyond_the_average_is_not_undone() -> None:
    gated, budget, adam = begun(ema=0.9)
    budget.drive(adam)
    train(gated, adam, 8)
    first = copy.deepcopy(budget.finish())
    gated.train()
    train(gated, adam, 5)
    trained = [p.detach().clone() for p in gated.model.parameters()]
    second = budget.finish()
    for p, mine, before in zip(second.parameters(), trained, first.parameters(), strict=True):
        assert torch.equal(p, mine)
        assert not torch.equal(p, before)


def test_who_holds_a_parameter_that_stays_as_it_is_does_not_matter() -> None:
    gated, budget, adam = begun()
    last = list(gated.model.parameters())[-1]
    last.register_hook(lambda gradient: gradient)
    adam.mine = {last: 1}  # type: ignore[attr-defined]
    budget.drive(adam)
    train(gated, adam, 8)
    assert budget.masked is None


def test_an_optimizer_within_another_has_moments_that_would_not_follow() -> None:
    gated, budget, adam = begun()
    adam.base = torch.optim.SGD(adam.param_groups, lr=0.1, momentum=0.9)  # type: ignore[attr-defined]
    budget.drive(adam)
    train(gated, adam, 1)
    adam.base.step()  # type: ignore[attr-defined]
    train(gated, adam, 6)
    assert budget.masked == "Adam has another optimizer in `base`, which would not follow"


def test_a_state_that_cannot_be_taken_up_changes_nothing() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    train(gated, adam, 7)
    state = budget.state_dict()
    other, fresh, optimizer = begun()
    other.model[0].weight.register_hook(lambda gradient: gradient)
    for drive in (False, True):
        if drive:
            fresh.drive(optimizer)
        before = {key: value for key, value in vars(fresh).items() if key != "_driver"}
        with pytest.raises(ValueError, match=r"a hook waits for the gradient of `0\.weight`"):
            fresh.load_state_dict(state)
        assert {key: value for key, value in vars(fresh).items() if key != "_driver"} == before
        assert not other.fixed
        assert all(p.requires_grad for p in other.gates.parameters())


def test_what_is_shown_of_bounds_on_parts_is_what_these_keep() -> None:
    gated, budget, adam = begun(macs=None, params={"2": 0.5, "4": 0.3})
    budget.drive(adam)
    train(gated, adam, 8)
    kept = [budget.metrics()[f"params of {name}/kept"] for name in ("2", "4")]
    assert f"params kept {100 * kept[0]:.4g} %, {100 * kept[1]:.4g} %, target 50 %, 30 %" in repr(budget)
    assert kept[0] <= 0.5
    assert kept[1] <= 0.3


def test_a_copy_is_driven_anew_and_goes_on_as_the_original() -> None:
    """The hooks of an optimizer are not copied with it: a loop that forgets to drive the copy hears of it."""
    gated, budget, adam = begun()
    train(gated, budget.drive(adam)._driver.optimizer, 2)
    forgotten, waiting, alone = copy.deepcopy((gated, budget, adam))
    with pytest.warns(UserWarning, match=r"nothing moves the budget: call `budget.drive\(optimizer\)`"):
        train(forgotten, alone, 2)
    with pytest.raises(RuntimeError, match=r"got 2 steps; call `budget.drive\(optimizer\)` before the loop"):
        waiting.finish()
    network, other, twin = pickle.loads(pickle.dumps((gated, budget, adam)))
    other.drive(twin)
    for run in ((gated, adam), (network, twin)):
        torch.manual_seed(3)
        train(*run, 6)
    assert str(other) == str(budget)
    for a, b in zip(budget.finish().parameters(), other.finish().parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="must have one budget, got a second"):
        copy.copy(waiting)


@pytest.mark.parametrize("way", ["copied", "taken up"])
def test_an_average_that_nothing_moves_is_noticed(way: str) -> None:
    """When the gates have settled too: the loop would hand over the weights of before."""
    gated, budget, adam = begun(ema=0.9)
    train(gated, budget.drive(adam)._driver.optimizer, 6)
    if way == "copied":
        network, other, twin = copy.deepcopy((gated, budget, adam))
    else:
        network, other, twin = begun(ema=0.9)
        other.load_state_dict(budget.state_dict(), twin)
        network.load_state_dict(gated.state_dict())
    train(network, twin, 1)
    with pytest.warns(UserWarning, match=r"nothing moves the budget: call `budget.drive\(optimizer\)`"):
        train(network, twin, 1)
    train(network, twin, 1)  # once
    assert other.done == 6


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_budget_that_has_nothing_more_to_move_or_is_moved_is_left_alone(ema: float | None) -> None:
    gated, budget, adam = begun(ema=ema)
    train(gated, budget.drive(adam)._driver.optimizer, 6)
    network, other, twin = copy.deepcopy((gated, budget, adam))
    for _ in range(3):
        train(network, twin, 1)
        if ema is not None:
            other.step(twin)
    other.finish()
    train(network, twin, 3)


def test_an_average_that_step_moves_is_left_alone_where_two_optimizers_step_before_it() -> None:
    gated, budget, _ = begun(ema=0.9)
    budget.settle()
    halves = [torch.optim.SGD([p], lr=1e-2) for p in gated.parameters()]
    for _ in range(3):
        (F.cross_entropy(gated(X), Y) + budget.term()).backward()
        for optimizer in halves:
            optimizer.step()
        budget.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("always:gates settle after")
@pytest.mark.parametrize("whole", [True, False])
def test_gates_whose_gradients_are_clipped_away_are_noticed(whole: bool) -> None:
    """A clip takes what the loss says to the gates, and leaves the budget's term, which comes after it."""
    gated, budget, adam = begun(steps=600, macs=0.7)
    budget.drive(adam)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(300):
            adam.zero_grad()
            F.cross_entropy(gated(X), Y).backward()
            nn.utils.clip_grad_norm_((gated if whole else gated.model).parameters(), 1e-3)
            adam.step()
    told = [str(w.message) for w in said]
    assert budget.phase == "tuning"
    assert [t.rpartition("clip ")[2] for t in told] == (
        ["the gradients of `gated.model.parameters()` alone"] if whole else []
    )


def test_a_state_that_comes_after_that_of_the_optimizer_is_refused_and_changes_nothing() -> None:
    gated, budget, adam = begun()
    budget.drive(adam)
    train(gated, adam, 6)
    saved = copy.deepcopy((budget.state_dict(), gated.state_dict(), adam.state_dict()))
    gated, budget, adam = begun()
    budget.drive(adam)
    adam.load_state_dict(saved[2])
    before = str(budget)
    with pytest.raises(ValueError, match=r"cannot be cut; load this state first, then those of `gated` and of the op"):
        budget.load_state_dict(saved[0])
    assert (str(budget), gated.fixed) == (before, False)
    adam.state.clear()
    for thing, state in zip((budget, gated, adam), saved, strict=True):
        thing.load_state_dict(state)
    train(gated, adam, 2)
    budget.finish()


class Behind(nn.Module):
    """A head behind a backbone that nothing is to train."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False)
        self.middle, self.head, self.grad = nn.Linear(8, 8), nn.Linear(8, 2), grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            seen = self.back(x).relu()
        return self.head(self.middle(seen).relu())


@pytest.mark.parametrize(("grad", "start"), [(True, 3.0), (False, 3.0), (True, 10.0)])
def test_gates_that_no_loss_reaches_are_named(grad: bool, start: float) -> None:
    """Frozen weights are fine: the gates on them learn. Without a graph only the price would move them. Where hardly a
    draw is not 1 there is no gradient to see.
    """
    torch.manual_seed(0)
    gated = l0.attach(Behind(grad), X[:2])
    for parameter in gated.gates.parameters():
        nn.init.constant_(parameter, start)
    adam = torch.optim.Adam(gated.parameters(), lr=1e-2)
    budget = l0.Budget(gated, macs=0.5, steps=200, gate_lr=1e-3).drive(adam)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(gated, adam, 30)
    told = [str(w.message) for w in caught]
    assert budget.phase == "learning"
    assert [t.partition(" in 20 steps")[0] for t in told] == (
        [] if grad else ["no gradient of the loss has reached the gates of `back.0`"]
    )


class Aside(nn.Module):
    """A second head, which a loop may ask for, a temperature, and what follows the network."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(6, 32), nn.Linear(32, 2), nn.Linear(32, 3)
        self.scale, self.after = nn.Parameter(torch.ones(())), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        seen = self.body(x).relu()
        return torch.cat([self.head(seen), self.aside(seen)], 1) if both else self.head(seen)


@pytest.mark.parametrize("way", ["drive", "term", "penalty"])
@pytest.mark.parametrize(("example", "asked"), [(False, False), (False, True), (True, True), (True, False)])
def test_a_loop_that_goes_where_the_example_did_not_is_told(way: str, example: bool, asked: bool) -> None:
    """Gates do not act on what a layer there reads, and it breaks when that gets smaller."""
    torch.manual_seed(0)
    gated = l0.attach(Aside(), {"x": X[:2], "both": example}).train()
    budget = l0.Budget(gated, macs=0.5, steps=200) if way != "penalty" else None
    adam = torch.optim.Adam(gated.param_groups(lr=1e-2))
    if budget is not None and way == "drive":
        budget.drive(adam)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(30):
            adam.zero_grad()
            out = gated(X, both=asked and step % 3 == 2)
            loss = (gated.model.after(out[:, :2]) * gated.model.scale).square().mean() + out.square().mean()
            loss = loss + 0 * sum(p.sum() for p in gated.model.parameters())  # as some do for DDP
            if budget is None:
                loss = loss + l0.Penalty(l0.macs, weight=1e-3)(gated)
            elif way == "term":
                loss = loss + budget.term()
            loss.backward()
            adam.step()
            if budget is not None and way == "term":
                budget.step(adam)
    told = [str(w.message).partition(":")[0] for w in caught]
    strange = "the loss reaches `aside.weight`, and the example of `attach` did not"
    assert told == ([strange] if asked and not example else [])
