"""The training loop, against the same training written out by hand.

The oracle is a plain loop over one network: `torch.optim.Adam`, `l0.Penalty`, `l0.Constraint`, with the images and the
noise of the trainer. Tiny data; nothing here asks whether training is any good.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.data import scaled
from ellzero.experiments.networks import LeNet5
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import building, evaluation, events, saver
from ellzero.experiments.train.building import architecture, build
from ellzero.experiments.train.loop import train, train_epoch
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated import attaching
from ellzero.objectives import duals
from support.trained import BATCH, CPU, TRAIN, data, recipe, same, set_open, trained


def to_the_end(trainer: Trainer) -> None:
    """What `train` does, without files."""
    while not trainer.done:
        if trainer.policy.turns(trainer.epoch, trainer.step.fixed):
            events.turn(trainer)
        list(train_epoch(trainer))
        evaluation.note(trainer)


def by_hand(
    r: Recipe, term: Callable[[l0.Gated], Tensor] | None = None, ascend: Callable[[], None] = lambda: None
) -> tuple[nn.Module, list[dict[str, Tensor]], list[float]]:
    """One epoch as one would write it; the network, its parameters after every step, and the losses."""
    order, noise = Trainer([r], data()).supply.epoch(0)
    net: Any = build(r, data(), CPU)
    named = dict(net.named_parameters())
    groups = [{"params": [p for n, p in named.items() if not n.startswith("gates.")], "lr": r.lr}]
    if isinstance(net, l0.Gated):
        groups.append({"params": list(net.gates.parameters()), "lr": r.lr if r.gate_lr is None else r.gate_lr})
    optimizer = torch.optim.Adam(groups)
    mean, std = (data().mean, data().std) if r.scaling == "standard" else ((0.0,), (1.0,))
    path, losses = [], []
    for index, draws in zip(order[:, 0], noise[:, 0], strict=True):
        x, y = scaled(data().train_x[index], mean, std), data().train_y[index]
        if r.placement is None:
            loss = F.cross_entropy(net(x), y)
        else:
            loss = sum(F.cross_entropy(net(x, gate_noise=u), y) for u in draws) / len(draws)  # type: ignore[assignment]
        total = loss if term is None else loss + term(net)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        ascend()
        path.append({n: p.detach().clone() for n, p in named.items()})
        losses.append(loss.item())
    return net, path, losses


# ---- the objective --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("penalty", "weight"),
    [(30.0, 30.0 / TRAIN), ({"fc1": 1.0, "fc*": 50.0}, {"fc1": 1.0 / TRAIN, "fc[23]": 50.0 / TRAIN})],
    ids=["one", "by layer"],
)
def test_a_penalty_is_that_of_the_plain_loop(penalty: Any, weight: Any) -> None:
    r = recipe(placement="per_layer", penalty=penalty)
    term = l0.Penalty(l0.l0_norm, weight)
    _, path, losses = by_hand(r, term)
    trainer = Trainer([r], data())
    ours = torch.cat(list(train_epoch(trainer)))
    torch.testing.assert_close(ours, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    same(trainer, path[-1])
    free = by_hand(r)[1][-1]  # it matters: without the penalty the gates end elsewhere
    assert (free["gates.fc2.log_alpha"] - path[-1]["gates.fc2.log_alpha"]).abs().max() > 1e-3


CONSTRAINED: dict[str, tuple[dict[str, Any], Callable[[], l0.Constraint]]] = {
    "ascent": (
        {"placement": "per_layer", "at_most": 0.3, "dual": "ascent", "dual_lr": 0.5},
        lambda: l0.Constraint(l0.l0_norm, 0.3, dual=l0.duals.GradientAscent(0.5)),
    ),
    "by layer, no restarts": (
        {"placement": "per_layer", "at_most": {"fc1": 0.2, "fc[23]": 0.9}, "dual": "ascent", "dual_lr": 0.5,
         "restarts": False},
        lambda: l0.Constraint(l0.l0_norm, {"fc1": 0.2, "fc[23]": 0.9}, dual=duals.GradientAscent(0.5, restarts=False)),
    ),
    "kept macs by a controller": (
        {"cost": "macs", "at_most": 0.2, "on": "kept", "dual": "nupi", "dual_lr": 0.1, "kp": 2.0, "nu": 0.5},
        lambda: l0.Constraint(l0.macs, 0.2, on="kept", dual=l0.duals.NuPI(kp=2.0, ki=0.1, nu=0.5)),
    ),
    "kept params, automatic": (
        {"cost": "params", "at_most": 0.2, "on": "kept", "dual": "auto"},
        lambda: l0.Constraint(l0.params, 0.2, on="kept", dual=duals.ExponentiatedAscent(0.5 * 0.1, 0.1, counts=0.5)),
    ),
    "params by module, extrapolated, warmed up": (
        {"cost": "params", "at_most": {"fc1": 0.3, "fc2": 0.1}, "dual": "extrapolation", "dual_lr": 0.5,
         "target_warmup": 0.8},
        lambda: l0.Constraint(
            l0.params, {"fc1": 0.3, "fc2": 0.1}, dual=duals.ExtrapolationFromPast(0.5), warmup=duals.LinearWarmup(4)
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CONSTRAINED)
def test_a_constraint_is_that_of_the_plain_loop(case: str) -> None:
    changes, make = CONSTRAINED[case]
    r = recipe(gate_lr=0.1, **changes)
    constraint = make()
    _, path, _ = by_hand(r, constraint, constraint.ascend)
    trainer = trained(r)
    assert constraint.multiplier.max() > 0.05, "a constraint that does nothing shows nothing"
    torch.testing.assert_close(trainer.lagrangian.multiplier[0], constraint.multiplier.float(), rtol=1e-4, atol=1e-5)
    for name in trainer.lagrangian.memory:
        ours, theirs = trainer.lagrangian.memory[name][0], constraint.get_buffer(f"_dual_{name}").float()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    same(trainer, path[-1], atol=1e-3)  # a hundredth of a step of the gates


def test_multipliers_follow_the_kept_cost_where_they_are_told_to() -> None:
    def first_multiplier(on: str) -> float:
        r = recipe(network="lenet300", cost="macs", at_most=0.1, on=on, dual="ascent", dual_lr=1.0)
        trainer = Trainer([r], data())
        gated: Any = trainer.runs.template.network
        set_open(gated, {name: list(range(0, gate.shape[0], 2)) for name, gate in gated.named_gates()})
        with torch.no_grad():
            for _, gate in gated.named_gates():
                gate.log_alpha.clamp_(-3, 3)  # closed and open at test time, and in expectation neither
        next(train_epoch(trainer))
        return trainer.lagrangian.multiplier.item()

    kept = (392 * 150 + 150 * 50 + 50 * 10) / (784 * 300 + 300 * 100 + 100 * 10)
    assert first_multiplier("kept") == pytest.approx(kept - 0.1, rel=1e-5)
    assert abs(first_multiplier("expected") - (kept - 0.1)) > 0.01


def test_the_target_comes_down_on_a_line() -> None:
    """With gates that stand still the multiplier is a sum of known gaps."""
    r = recipe(at_most=0.2, dual="ascent", dual_lr=1.0, restarts=False, gate_lr=1e-12, target_warmup=0.75, epochs=2)
    trainer = Trainer([r], data())
    cost = float(trainer.runs.evaluate(Objective.watched)[0, 0, 0])
    steps, multiplier = 0.75 * 10, 0.0
    seen: list[float] = []
    for _ in range(2):
        for _ in train_epoch(trainer):
            target = max(0.2, 1 - (1 - 0.2) * len(seen) / steps)
            multiplier = max(0.0, multiplier + cost - target)
            seen.append(multiplier)
            assert trainer.lagrangian.multiplier.item() == pytest.approx(multiplier, abs=1e-5)
    assert len(seen) == 10
    assert seen[0] == 0 < seen[-1]


def test_losses_and_gradients_are_means_over_the_draws() -> None:
    r = recipe(samples=3, placement="per_layer")
    _, path, losses = by_hand(r, l0.Penalty(l0.l0_norm, 0.1 / TRAIN))
    trainer = Trainer([r], data())
    ours = torch.cat(list(train_epoch(trainer)))
    torch.testing.assert_close(ours, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    same(trainer, path[-1])


def test_patterns_that_match_no_gates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`penalty` must have patterns that match gates .*fc1.*, got 'conv\*'"):
        Trainer([recipe(placement="per_layer", penalty={"fc1": 0.5, "conv*": 0.5})], data())


@pytest.mark.parametrize(("cost", "what"), [("l0_norm", "a set of gates"), ("params", "a layer"), ("macs", "a layer")])
def test_patterns_that_match_nothing_of_a_cost_are_refused_by_the_name_of_the_field(cost: str, what: str) -> None:
    with pytest.raises(ValueError, match=rf"^`at_most` must name what `{cost}` counts, got 'conv\*'") as refused:
        Trainer([recipe(placement="per_layer", cost=cost, at_most={"fc1": 0.5, "conv*": 0.5})], data())
    assert str(refused.value).endswith(f"it must match the name of {what}, got 'conv*', and there are fc1, fc2, fc3")
    assert "`only`" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["l0_norm", "params", "macs"])
def test_a_target_that_would_leave_a_layer_empty_is_refused_before_the_training(cost: str) -> None:
    """One unit in each of the three sets of the MLP is left at least, if units are closed in the end."""
    one, dense = {
        "l0_norm": (300 + 100 + 10, 266_200),
        "params": (2 + 2 + 20, 266_610),
        "macs": (1 + 1 + 10, 266_200),
    }[cost]
    r = recipe(network="lenet300", placement="per_layer", cost=cost, at_most=1.001 * one / dense, finalize=True)
    Trainer([r], data())
    fc1 = {"l0_norm": 1 / 784, "params": 2 / 235_500, "macs": 1 / 235_200}[cost]
    for at_most, least in ((0.999 * one / dense, one / dense), ({"fc1": 0.999 * fc1}, fc1)):
        with pytest.raises(ValueError, match=r"^`at_most`.* must be at least") as refused:
            Trainer([r.override(at_most=at_most)], data())
        assert f"must be at least {least:.4g}" in str(refused.value)


# ---- stacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_a_stack_is_the_run_alone() -> None:
    basis = recipe(placement="per_layer", at_most=0.3, dual="ascent", dual_lr=0.5, ema=0.9, epochs=2)
    several = [
        basis.override(seed=1),
        basis.override(at_most={"fc1": 0.2, "fc2": 0.5}, seed=2),
        basis.override(at_most=None, penalty=5.0, seed=1),
    ]
    stack = trained(*several)
    ours = evaluation.evaluate(stack)
    for run, r in enumerate(several):
        alone = trained(r)
        same(stack, {n.removeprefix("network."): v.detach() for n, v in alone.runs.values().items()}, run)
        constraints = len(alone.lagrangian.multiplier[0])
        torch.testing.assert_close(
            stack.lagrangian.multiplier[run, :constraints],
            alone.lagrangian.multiplier[0],
            rtol=1e-4,
            atol=1e-5,
        )
        assert not stack.lagrangian.multiplier[run, constraints:].any()
        for name, value in alone.values().items():
            torch.testing.assert_close(stack.values()[name][run], value, rtol=1e-5, atol=2e-5)
        for key, value in evaluation.evaluate(alone).items():
            torch.testing.assert_close(ours[key][run], value[0], rtol=1e-4, atol=1e-4)
        x = alone.supply.scaled(data().test_x)
        torch.testing.assert_close(stack.network(run)(x), alone.network(0)(x), rtol=1e-3, atol=1e-3)
    assert stack.lagrangian.multiplier[0, 0] > 0
    assert not stack.lagrangian.multiplier[2].any()
    fc1 = stack.runs.values()["network.model.fc1.weight"]
    assert not torch.allclose(fc1[0], fc1[1], atol=1e-2)  # another seed, another run


def test_recipes_that_cannot_share_a_stack_are_refused() -> None:
    one = recipe()
    with pytest.raises(ValueError, match=r"`recipes` of one stack must agree in lr, batch$"):
        Trainer([one, one.override(batch=25, lr=0.1, seed=3, name="other")], data())


@pytest.mark.slow
def test_runs_that_differ_in_their_numbers_alone_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each would have found by itself is what it gets."""
    traced: list[nn.Module] = []
    trace = attaching.trace
    monkeypatch.setattr(attaching, "trace", lambda model, *a, **k: traced.append(model) or trace(model, *a, **k))
    monkeypatch.setattr(building, "_TRACED", {})
    stack = Trainer([recipe(seed=s, at_most=0.5, dual="auto") for s in range(3)], data())
    first = cast(l0.Gated, build(recipe(placement="per_layer", seed=9), data(), CPU))
    assert len(traced) == 1
    for seed in range(3):
        built = cast(l0.Gated, build(recipe(seed=seed), data(), CPU))
        alone = l0.attach(built.model, torch.zeros(2, 1, 28, 28))
        for graph in (first.graph, cast(l0.Gated, stack.network(seed)).graph):
            assert plain(graph.axes) == plain(alone.graph.axes)
    build(recipe(network="lenet5"), data(), CPU)
    assert isinstance(traced[-1], LeNet5)


def plain(axes: Sequence[l0.graph.Axis]) -> list[Any]:
    """All that an axis says, as values that can be compared."""
    return [
        (
            a.name,
            a.size,
            a.frozen,
            a.stream,
            a.can_vanish,
            [(s.tensor, s.dims, s.units.tolist(), s.role) for s in a.sites],
        )
        for a in axes
    ]


# ---- epochs ---------------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    a, b = recipe(seed=1, samples=2), recipe(seed=2, samples=2)
    stack, alone = Trainer([a, b], data()), Trainer([b], data())
    order, noise = stack.supply.epoch(stack.epoch)
    assert order.shape == (5, 2, BATCH)
    assert noise.shape == (5, 2, 2, 784 + 32 + 12)  # steps, runs, draws, gates
    for run in range(2):
        assert sorted(order[:, run].flatten().tolist()) == list(range(TRAIN))
    torch.rand(3)  # torch's own generator has no part in it
    for ours, theirs in zip((order, noise), alone.supply.epoch(alone.epoch), strict=True):
        assert torch.equal(ours[:, 1:], theirs)
        assert not torch.equal(ours[:, 0], ours[:, 1])
    alone.epoch = 1
    assert not torch.equal(alone.supply.epoch(alone.epoch)[0], order[:, 1:])
    assert not torch.equal(alone.supply.epoch(alone.epoch)[1], noise[:, 1:])


def test_a_run_goes_on_where_it_was_left_in_the_middle_of_an_epoch() -> None:
    r = recipe(at_most=0.3, dual="nupi", dual_lr=0.1, kp=1.0, target_warmup=0.5, epochs=2, ema=0.9)
    first, second = Trainer([r], data()), Trainer([r], data())
    list(train_epoch(first))
    steps = train_epoch(first)
    next(steps), next(steps)
    assert (first.epoch, first.position) == (1, 2)
    saver.load(second, copy.deepcopy(saver.state(first)))
    rest = torch.cat(list(steps))
    assert len(rest) == 3
    assert torch.equal(torch.cat(list(train_epoch(second))), rest)
    assert torch.equal(second.lagrangian.multiplier, first.lagrangian.multiplier)
    for name, value in first.values().items():
        assert torch.equal(second.values()[name], value), name
        assert torch.equal(second.runs.values()[name], first.runs.values()[name]), name
    assert (second.epoch, second.position) == (first.epoch, first.position) == (2, 0)


def test_the_average_is_corrected_for_its_beginning() -> None:
    r = recipe(ema=0.8, lr=1e-2)
    trainer = Trainer([r], data())
    start = {n: v.detach().clone() for n, v in trainer.runs.values().items()}
    assert all(torch.equal(v, start[n]) for n, v in trainer.values().items())  # nothing to average yet
    path = []
    for _ in train_epoch(trainer):
        path.append({n: v.detach().double() for n, v in trainer.runs.values().items()})
        weights = [0.8 ** (len(path) - 1 - t) for t in range(len(path))]  # geometric, newest 1, and they sum to one
        for name, value in trainer.values().items():
            mean = sum(w * p[name] for w, p in zip(weights, path, strict=True)) / sum(weights)
            torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
    x, y = trainer.supply.scaled(data().test_x), data().test_y
    net = copy.deepcopy(trainer.runs.template.network)
    net.load_state_dict({n.removeprefix("network."): v for n, v in trainer.values().items()}, strict=False)
    wrong = (net.eval()(x).argmax(1) != y).float().mean()
    assert evaluation.evaluate(trainer)["error"].item() == pytest.approx(100 * wrong.item(), abs=1e-4)


def test_pixels_are_scaled_as_the_recipe_says() -> None:
    pixels = data().train_x.double() / 255
    unit, standard = (Trainer([recipe(scaling=s)], data()).supply.scaled(data().train_x) for s in ("unit", "standard"))
    torch.testing.assert_close(unit.double(), pixels, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(standard.double(), (pixels - data().mean[0]) / data().std[0], rtol=1e-5, atol=1e-5)


def test_a_dense_network_is_trained_by_the_same_loop() -> None:
    r = recipe(placement=None)
    _, path, losses = by_hand(r)
    trainer = train([r], data())
    same(trainer, path[-1])
    assert trainer.history[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert "kept" not in trainer.history[0]
    (result,) = evaluation.results(trainer)
    net = trainer.network(0)
    wrong = (net(trainer.supply.scaled(data().test_x)).argmax(1) != data().test_y).float().mean().item()
    assert result["error_last"] == pytest.approx(100 * wrong, abs=1e-4)
    assert "architecture" not in result


# ---- the end --------------------------------------------------------------------------------------------------------


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in trainer.runs.values().items()}


@pytest.mark.slow
def test_finalising_brings_every_run_within_its_target_and_tuning_leaves_it_there() -> None:
    basis = recipe(network="lenet300", cost="macs", at_most=0.3, finalize=True, finetune_epochs=1, ema=0.5)
    trainer = Trainer([basis, basis.override(at_most=0.1, seed=1)], data())
    list(train_epoch(trainer))
    averaged = {n: v.clone() for n, v in trainer.values().items()}
    events.turn(trainer)
    before = snapshot(trainer)
    for name, value in before.items():  # it goes on from the average, and closing changes no weight
        assert ("gates" in name) != torch.equal(value, averaged[name]), name
    to_the_end(trainer)
    assert trainer.epoch == 2
    for name, value in snapshot(trainer).items():
        assert torch.equal(value, before[name]) == ("gates" in name), name
    for run, r in enumerate(trainer.recipes):
        gated: Any = trainer.network(run)
        net: Any = l0.compact(gated)
        widths = [net.fc1.in_features, net.fc1.out_features, net.fc2.out_features, 10]
        share = sum(a * b for a, b in pairwise(widths)) / (784 * 300 + 300 * 100 + 100 * 10)
        target: Any = r.at_most
        assert 0.9 * target < share <= target  # and not by closing more than need be
        assert trainer.history[-2 + run]["kept"]["macs"] == pytest.approx(share, rel=1e-5)
        assert trainer.history[-2 + run]["tuning"]


@pytest.mark.parametrize("finalize", [True, False])
def test_gates_to_be_closed_are_those_that_learned_and_not_their_average(finalize: bool) -> None:
    r = recipe(cost="macs", at_most=0.3, on="kept", finalize=finalize, finetune_epochs=1, ema=0.99)
    trainer = Trainer([r], data())
    list(train_epoch(trainer))
    raw, averaged = snapshot(trainer), {n: v.clone() for n, v in trainer.values().items()}
    events.tune(trainer)
    for name, value in snapshot(trainer).items():
        assert not torch.equal(raw[name], averaged[name])
        assert torch.equal(value, raw[name] if finalize and "gates" in name else averaged[name]), name


def test_finalising_needs_no_tuning() -> None:
    trainer = Trainer([recipe(placement="per_layer", at_most={"fc1": 0.1, "fc2": 0.4}, finalize=True)], data())
    to_the_end(trainer)
    gates = dict(trainer.network(0).named_gates())  # type: ignore[operator]
    assert 0 < gates["fc1"].open().sum() <= 0.1 * 784
    assert 0 < gates["fc2"].open().sum() <= 0.4 * 300
    assert [h["tuning"] for h in trainer.history] == [False, True]


def test_tuning_without_finalising_fixes_the_gates_too() -> None:
    trainer = Trainer([recipe(finetune_epochs=1)], data())
    list(train_epoch(trainer))
    before = snapshot(trainer)
    to_the_end(trainer)
    assert trainer.epoch == 2
    for name, value in snapshot(trainer).items():
        assert torch.equal(value, before[name]) == ("gates" in name), name


def test_tuning_is_plain_training_of_the_test_time_network() -> None:
    r = recipe(finetune_epochs=1)
    trainer = trained(r)
    events.tune(trainer)
    gated: Any = copy.deepcopy(trainer.runs.template.network).eval()
    index = trainer.supply.epoch(trainer.epoch)[0][0, 0]
    x, y = trainer.supply.scaled(data().train_x[index]), data().train_y[index]
    expected = F.cross_entropy(gated(x), y)  # no noise, and no penalty
    assert next(train_epoch(trainer)).item() == pytest.approx(expected.item(), rel=1e-5)


# ---- what came out --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_architecture_of_lenet5_is_that_of_the_compact_network() -> None:
    r = recipe(network="lenet5", placement="per_layer")
    gated = build(r, data(), CPU)
    assert isinstance(gated, l0.Gated)
    set_open(gated.eval(), {})
    assert architecture(gated) == {"conv1": 20, "conv2": 50, "fc1": 800, "fc2": 500}
    closed = {
        "conv1": [0, 7, 9],
        "conv2": [0, 1],  # its 4 x 4 inputs of fc1 go with each map, whatever their own gates say
        "fc1": [3, 4, *range(32, 40), *range(48, 64)],  # two of map 0, eight of map 2, all of map 3: the map goes too
        "fc2": list(range(100)),
    }
    set_open(gated, closed)
    ours = architecture(gated)
    assert ours == {"conv1": 17, "conv2": 50 - 2 - 1, "fc1": 800 - 2 * 16 - 8 - 16, "fc2": 400}
    net: Any = l0.compact(gated)
    assert list(ours.values()) == [
        net.conv1.out_channels, net.conv2.out_channels, net.fc1.in_features, net.fc2.in_features
    ]  # fmt: skip


def test_results_are_counts_of_the_compact_network() -> None:
    basis = recipe(network="lenet300", placement="per_layer", drop_rates={"fc1": 0.2, "*": 0.5})
    trainer = Trainer([basis, basis.override(penalty=0.2)], data())  # one name, one seed, and still two runs
    shut = {"fc1": list(range(0, 784, 3)), "fc2": list(range(120)), "fc3": list(range(5))}
    for run in range(2):
        gated: Any = trainer.runs.network(run)
        set_open(gated, shut if run else {})
        with torch.no_grad():
            for name, gate in gated.gates.named_parameters():
                trainer.runs.values()[f"network.gates.{name}"][run].copy_(gate)
    evaluation.note(trainer)
    trainer.history[0]["error"], trainer.history[1]["error"] = 11.0, 7.0
    dense, sparse = evaluation.results(trainer)
    assert (dense["error_best"], sparse["error_best"]) == (11.0, 7.0)
    assert dense["architecture"] == {"fc1": 784, "fc2": 300, "fc3": 100}
    pixels, first, second = 784 - 262, 300 - 120, 100 - 5
    assert sparse["architecture"] == {"fc1": pixels, "fc2": first, "fc3": second}
    net = l0.compact(trainer.network(1))  # type: ignore[arg-type]
    assert sum(p.numel() for p in net.parameters()) == round(sparse["costs"]["params"]["kept"] * 266_610)
    macs = pixels * first + first * second + second * 10
    assert sparse["costs"]["macs"]["kept"] * (784 * 300 + 300 * 100 + 100 * 10) == pytest.approx(macs)
    weights = pixels * 300 + first * 100 + second * 10  # each layer's gates count its own weights
    assert sparse["costs"]["l0_norm"]["kept"] * (784 * 300 + 300 * 100 + 100 * 10) == pytest.approx(weights)
    for cost, whole in {"l0_norm": 266_200, "params": 266_610, "macs": 266_200}.items():
        assert dense["costs"][cost]["dense"] == whole
        assert dense["costs"][cost]["kept"] == pytest.approx(1)


def test_the_history_has_one_record_for_each_run_and_evaluated_epoch() -> None:
    basis = recipe(epochs=3)
    trainer = train([basis, basis.override(seed=1, name="other")], data(), every=2)
    seen = trainer.history
    assert [(h["epoch"], h["run"], h["seed"]) for h in seen] == [
        (2, "tiny", 0), (2, "other", 1), (3, "tiny", 0), (3, "other", 1)
    ]  # fmt: skip
    now = evaluation.evaluate(trainer)
    assert [h["error"] for h in seen[2:]] == now["error"].tolist()
    assert [list(h["kept"].values()) for h in seen[2:]] == now["kept"].tolist()
    assert all(
        r["error_best"] == min(h["error"] for h in seen[i::2]) for i, r in enumerate(evaluation.results(trainer))
    )


@pytest.mark.parametrize(("ends", "after"), [({"settle_at": 1}, 1), ({"finalize": True}, 2)])
def test_a_recipe_says_that_its_gates_settle_before_they_could_choose(ends: dict[str, Any], after: int) -> None:
    r = recipe(cost="macs", at_most=0.2, on="kept", gate_lr=1e-6, epochs=2, **ends)
    with pytest.warns(UserWarning, match=rf"after epoch {after} with 100 % of `macs` kept, of 20 % that may be"):
        to_the_end(Trainer([r], data()))


@pytest.mark.parametrize(("ends", "after"), [({"settle_at": 1}, 1), ({"finalize": True}, 2)])
def test_a_recipe_says_that_its_gates_closed_far_too_much(ends: dict[str, Any], after: int) -> None:
    r = recipe(cost="macs", at_most=0.6, on="kept", gate_lr=1e-6, drop_rates={"*": 0.95}, epochs=2, **ends)
    with pytest.warns(
        UserWarning, match=rf"after epoch {after} with [\d.]+ % of `macs` kept, of 60 % .* press too hard"
    ):
        to_the_end(Trainer([r], data()))


def test_a_recipe_whose_gates_had_the_time_to_choose_settles_in_silence_where_the_rest_is_tuned() -> None:
    r = recipe(cost="macs", at_most=0.2, on="kept", gate_lr=1e-6, epochs=2, settle_at=1)
    trainer = Trainer([r], data())
    steps = trainer.policy.steps_per_epoch
    assert trainer.travelled == 0
    trainer._gate_lr = 8.0 / steps  # as if they had moved by so much in each step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_the_end(trainer)
    assert trainer.travelled == pytest.approx(16.0)
