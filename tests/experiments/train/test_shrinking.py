"""Shrinking while training, against the run that does not shrink.

The oracle of a shrink is the same run without one, in float64: where all that is taken out was closed for good, the
rest must come out as there, to rounding, whatever the optimizer, the objective and the network. Plans are compared with
carrying them out at once, and files with the run that was not interrupted, bit for bit.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.networks import WideResNet
from ellzero.experiments.papers import get
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, saver
from ellzero.experiments.train.building import architecture
from ellzero.experiments.train.loop import restore, train, train_epoch
from ellzero.experiments.train.policy import Policy, refuse
from ellzero.experiments.train.stepping.optimizing import Both
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.graph.plan import make_plan
from ellzero.objectives import costs
from ellzero.out import shrinking
from ellzero.out.compaction import compact
from ellzero.out.finalization import finalize
from support import processes
from support.oracles import assert_same, numel, settled
from support.runs import (
    RUNS,
    WRN,
    begun,
    bits,
    close,
    doubled,
    gated_of,
    images,
    interrupted,
    leaves,
    losses,
    recipe,
    without_seconds,
)
from support.zoo import LeNet


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_a_shrink_of_closed_units_changes_nothing_but_rounding(case: str) -> None:
    r, closed, removed = RUNS[case]
    small, whole = doubled(r, closed), doubled(r.override(shrink_at=()), closed)
    assert losses(small, 3) == pytest.approx(losses(whole, 3), rel=1e-10)
    event, gated = small.event, gated_of(small)
    assert event is not None
    assert gated.taken is not None
    assert {name: n for name, n in event["removed"].items() if n} == removed
    assert numel(gated.model) < numel(gated_of(whole).model)
    left = gated.taken

    def same(name: str, mine: Tensor, theirs: Tensor) -> None:
        """Gates that are closed for good do not matter, all else does."""
        if name.startswith("network.gates."):
            there = ~torch.as_tensor(np.isin(np.arange(mine.numel()), closed.get(name.split(".")[2].replace("/", "."))))
            mine, theirs = mine[there], theirs[there]
        theirs = left.slice(name.removeprefix("network.model."), theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10, msg=name)

    values = whole.runs.values()
    assert small.runs.values().keys() == values.keys()
    for name, value in small.runs.values().items():
        same(name, value.detach(), values[name].detach())
        ours, theirs = (dict(t.optimizer.state[t.runs.values()[name]]) for t in (small, whole))  # type: ignore[index]
        assert ours.keys() == theirs.keys() != set()
        for key, remembered in ours.items():
            same(name if remembered.ndim else "", remembered, theirs[key])  # Adam counts its steps
        if r.ema is not None:
            same(name, small.average.tensors[name], whole.average.tensors[name])
    for name, buffer in gated.model.named_buffers():
        same(f"network.model.{name}", buffer.double(), gated_of(whole).model.get_buffer(name).double())
    torch.testing.assert_close(small.lagrangian.multiplier, whole.lagrangian.multiplier, rtol=1e-9, atol=1e-12)
    assert bool((small.lagrangian.multiplier > 0).all()) == (r.at_most is not None)
    for method in (Objective.costs, Objective.watched, Objective.counts):
        ours, theirs = (t.runs.evaluate(method, values=t.values()) for t in (small, whole))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=method.__name__)
    # What is closed stays closed, in the average as in the parameters.
    network, gone = cast(Gated, small.network(0)), torch.as_tensor(gated.gone())
    assert int(gone.sum()) >= sum(removed.values())
    raw, counting = (torch.cat([g.log_alpha.detach() for _, g in net.named_gates()])[gone] for net in (gated, network))  # type: ignore[misc]
    assert bool((raw < -50).all())
    torch.testing.assert_close(counting, raw, rtol=1e-9, atol=0.0)
    assert architecture(network) == architecture(cast(Gated, whole.network(0)))


def test_widths_are_rounded_where_that_pays() -> None:
    r = recipe("lenet5", shrink_multiple=None)
    assert Policy(r, images=16).multiple == 1
    assert Policy(r, images=16, on_gpu=True).multiple == 32
    assert Policy(r.override(shrink_multiple=8), images=16, on_gpu=True).multiple == 8


def test_an_event_must_save_more_steps_than_compiling_takes() -> None:
    """Epochs have two steps. On a GPU a step is compiled that is taken 2,500 / 0.13 times, or more."""

    def worth(gain: float, at: int, left: int, on_gpu: bool = False, **changes: Any) -> bool:
        r = recipe("wrn-10-1", epochs=at + left, shrink_at=(at,), **changes)
        return Policy(r, images=16, on_gpu=on_gpu).worth_it(gain, at)

    assert worth(0.26, 5, 5000, compile=True)  # of 10,000 steps
    assert not worth(0.24, 5, 5000, compile=True)
    assert worth(0.01, 5, 5000)  # a CPU compiles nothing
    assert not worth(0.0, 5, 5000)
    assert worth(0.11, 5, 12_000, on_gpu=True)  # compiled anew
    assert not worth(0.10, 5, 12_000, on_gpu=True)
    assert worth(0.14, 12_000, 5000, on_gpu=True)  # compiled before, and not again: as it is, it is slower by 0.13
    assert not worth(0.12, 12_000, 5000, on_gpu=True)
    assert worth(0.01, 5, 5000, on_gpu=True)  # never compiled


@pytest.mark.slow
def test_an_event_that_no_step_follows_is_skipped() -> None:
    for tuning, skipped in ((0, True), (1, False)):
        r = recipe("wrn-10-1", placement="blocks", epochs=1, finetune_epochs=tuning)
        trainer = Trainer([r], images("cifar10"))
        close(gated_of(trainer), WRN)
        list(train_epoch(trainer))
        assert trainer.event is not None
        assert trainer.event["skipped"] is skipped


# ---------------------------------------------------------------- plans


@pytest.mark.slow
def test_grouped_convolutions_are_refused() -> None:
    """One that is left with a channel in each group would be taken for a depthwise one the next time."""
    layers = nn.Conv2d(2, 12, 1), nn.ReLU(), nn.Conv2d(12, 6, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(6, 2, 1)
    gated = l0.attach(nn.Sequential(*layers), torch.randn(2, 2, 5, 5))
    plan = shrinking.propose(gated, np.arange(gated.liveness.size) % 4 > 0)
    with pytest.raises(ValueError, match="`2` is a grouped convolution"):
        gated.shrink(plan)
    assert gated.model[0].weight.shape[0] == 12  # type: ignore[index, union-attr]


def test_depthwise_convolutions_shrink_in_steps_and_others_stay_where_nothing_of_them_goes() -> None:
    """Oracle: the same network with its units masked; and the way back."""
    depthwise = nn.Conv2d(2, 12, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1, groups=12)
    grouped = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=2)
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    gated = l0.attach(nn.Sequential(*depthwise, nn.ReLU(), nn.Conv2d(12, 8, 1), *grouped).double().eval(), x)
    (name, gate), *_ = gated.named_gates()
    assert name == "0"
    for keep in (7, 3):
        gate.close_(torch.arange(12) >= keep)
        masked = gated(x).detach()
        gated.shrink(shrinking.propose(gated, ~gated.opens().cpu().numpy()))
        conv = gated.model[3]  # type: ignore[index]
        assert (conv.groups, conv.in_channels, conv.out_channels) == (keep,) * 3  # type: ignore[union-attr]
        torch.testing.assert_close(gated(x), masked)
    torch.testing.assert_close(gated.expanded()(x), masked)
    assert gated.expanded().model[3].groups == 12  # type: ignore[index, union-attr]
    torch.testing.assert_close(l0.compact(gated)(x), masked)
    gate.close_(torch.arange(12) >= 1)
    with pytest.raises(ValueError, match="`3` is depthwise, which cannot be seen any more where one channel is left"):
        gated.shrink(shrinking.propose(gated, ~gated.opens().cpu().numpy()))


@pytest.mark.slow
def test_a_unit_cannot_come_back() -> None:
    gated = l0.attach(LeNet(), torch.zeros(2, 1, 14, 14))
    alive = np.ones(gated.graph.offsets[-1], dtype=bool)
    alive[0] = False
    gated.shrink(make_plan(gated.graph, alive))
    shapes = [tuple(p.shape) for p in gated.model.parameters()]
    alive[:2] = True, False
    with pytest.raises(ValueError, match="must not bring back a unit"):
        gated.shrink(make_plan(gated.graph, alive))
    assert [tuple(p.shape) for p in gated.model.parameters()] == shapes
    close(gated, {name: [*range(gate.shape.numel())] for name, gate in gated.named_gates()})
    assert not gated.plan(refuse=False).units[0]  # others come back where a layer would be empty


# ---------------------------------------------------------------- a smaller network


def lenet(where: Any = l0.shrinkable) -> tuple[Gated, Gated]:
    """The same gated network twice, with closed gates, and the second smaller for it."""
    torch.manual_seed(0)
    whole = l0.attach(settled(LeNet()), torch.randn(3, 1, 14, 14, dtype=torch.float64), where=where)
    maps = {"conv1": [1], "conv2": [0, 3]}
    inputs = (
        {"fc1": [k for k in range(20) if k // 4 in (0, 3)], "fc2": [0, 2]} if where is l0.per_layer else {"fc1": [0, 2]}
    )
    close(whole, {**maps, **inputs})
    small = copy.deepcopy(whole)
    small.shrink(small.plan() if where is l0.shrinkable else make_plan(small.graph, small.plan().units))
    return whole, small


@pytest.mark.slow
@pytest.mark.parametrize("where", [l0.shrinkable, l0.per_layer])
def test_a_smaller_network_computes_and_costs_what_the_whole_one_does(where: Any) -> None:
    whole, small = lenet(where)
    assert numel(small.model) < numel(whole.model)
    x, noise = torch.randn(3, 1, 14, 14, dtype=torch.float64), whole.gate_noise()
    for mode in (True, False):
        whole.train(mode)
        small.train(mode)
        assert_same(small(x, gate_noise=noise), whole(x, gate_noise=noise))
    assert_same(small.expanded().eval()(x), whole(x))
    assert [p.shape for p in small.expanded().parameters()] == [p.shape for p in whole.parameters()]
    for cost in (l0.l0_norm, l0.params, l0.macs, l0.units):
        assert l0.dense(cost, small) == l0.dense(cost, whole)
        for kept in (True, False):
            assert_same(cost(small, kept=kept), cost(whole, kept=kept))
    ours, theirs = compact(small), compact(whole)
    assert str(ours) == str(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    assert l0.report(small).json() == l0.report(whole).json()
    assert numel(small.expanded().model) == numel(whole.model)


def test_the_norm_of_eq_17_is_of_the_weights_that_are_there() -> None:
    _, small = lenet(l0.per_layer)
    sizes = [gate.shape.numel() for _, gate in small.named_gates()]
    expected = torch.zeros(())
    for (name, gate), gone in zip(small.named_gates(), torch.as_tensor(small.gone()).split(sizes), strict=True):
        layer: Any = small.model.get_submodule(name)
        squares, p = layer.weight.square(), gate.prob_open()[~gone]
        assert len(p) == layer.weight.shape[0 if name.startswith("conv") else 1] < gate.shape.numel()
        of_map = squares.flatten(1).sum(1) + layer.bias.square()
        expected = expected + (p * (of_map if name.startswith("conv") else squares.sum(0))).sum()
    assert_same(l0.l2_norm(small), expected)


@pytest.mark.slow
def test_finalize_fills_a_budget_without_what_is_gone() -> None:
    _, small = lenet()
    finalize(small, 0.9, l0.params, fill=True)
    assert not (small.opens().numpy() & small.gone()).any()
    close(small, {"fc1": [1, 3]})
    finalize(small, 1.0, l0.params, fill=True)
    assert np.array_equal(small.opens().numpy(), ~small.gone())


# ---------------------------------------------------------------- what is proposed


def chain(width: int = 12) -> Gated:
    gated = l0.attach(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)), torch.zeros(1, 4))
    with torch.no_grad():
        gated.gates["0"].log_alpha.copy_(torch.tensor([(7 * k) % width - width + 0.5 for k in range(width)]))  # type: ignore
    return gated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "multiple", "left"),
    [
        (5, 1, 7),
        (5, 4, 8),
        (8, 4, 4),
        (9, 4, 4),
        (12, 4, 4),
        (12, 1, 1),
        (1, 4, 12),
        (3, 5, 10),
        (1, 5, 12),
        (11, 32, 12),
    ],
)
def test_widths_are_rounded_up_with_the_most_probable(closed: int, multiple: int, left: int) -> None:
    gated = chain()
    p = gated.prob_open().detach().numpy()
    order = np.argsort(p)
    mask = np.zeros(12, dtype=bool)
    # The ones that count as closed are the least probable, but for the first, which stays whatever it is.
    chosen = order[1 : closed + 1] if closed < 12 else order
    mask[chosen] = True
    plan = shrinking.propose(gated, mask, multiple)
    units = plan.units[gated.graph.offsets[[a.name for a in gated.axes].index("0")] :][:12]
    assert units.sum() == left == shrinking.widths(gated, plan)["0"]
    back = sorted(chosen, key=lambda k: -p[k])[: left - (12 - closed)]
    assert set(np.flatnonzero(units)) == set(np.flatnonzero(~mask)) | set(back)
    event = shrinking.event(gated, plan)
    assert event == {"removed": {"0": 12 - left}, "widths": {"0": left}, "macs": {"before": 1.0, "after": left / 12}}


def test_what_is_gone_is_not_proposed_again() -> None:
    gated = chain()
    gated.shrink(shrinking.propose(gated, np.arange(12) < 6))
    mask = np.isin(np.arange(12), [6, 7, 8])
    plan = shrinking.propose(gated, mask, multiple=4)
    event = shrinking.event(gated, plan)
    assert event["removed"] == {"0": 2}
    assert event["macs"] == {"before": 0.5, "after": 4 / 12}
    gated.shrink(plan)
    assert gated.model[0].weight.shape == (4, 4)  # type: ignore[index, union-attr]
    assert np.array_equal(np.flatnonzero(gated.gone())[:6], np.arange(6))


# ---------------------------------------------------------------- in the loop


def test_a_gate_must_be_closed_at_so_many_checks_in_a_row() -> None:
    r = recipe("lenet300", epochs=7, shrink_at=(4, 6), shrink_checks=3, gate_lr=1e-9)
    trainer = Trainer([r], images("mnist5k"))
    gated = gated_of(trainer)
    gate: Any = gated.gates["fc1"]
    start = gate.log_alpha.detach().clone()
    shut = {0: [1, 2, 3], 1: [1, 2], 2: [1, 2, 3], 3: [1, 3], 4: [1, 3], 5: [1, 3]}  # by epoch, what is closed in it
    events = []
    for epoch in range(6):
        with torch.no_grad():
            mask = torch.zeros(300, dtype=torch.bool)
            mask[shut[epoch]] = True
            gate.log_alpha.copy_(torch.where(mask | torch.as_tensor(gated.gone()[:300]), -8.0, start))
        list(train_epoch(trainer))
        events.append(trainer.event)
        (record,) = evaluation.note(trainer)
        assert ("shrunk" in record) == (epoch in (3, 5))
    assert [e and e["removed"] for e in events] == [None] * 3 + [{"fc1": 1, "fc2": 0}, None, {"fc1": 1, "fc2": 0}]
    assert np.array_equal(np.flatnonzero(gated.gone()), [1, 3])
    assert [h["open"]["fc1"] for h in trainer.history] == [297, 298, 297, 298, 298, 298]
    assert trainer.closed_for[[1, 2, 3]].tolist() == [6, 0, 4]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_gate_that_is_gone_does_not_open_again(optimizer: str) -> None:
    """Whatever the optimizer was about to do."""
    trainer = Trainer([recipe("lenet300", optimizer=optimizer, gate_lr=1.0, epochs=4, ema=0.5)], images("mnist5k"))
    gate: Any = gated_of(trainer).gates["fc1"]
    with torch.no_grad():
        gate.log_alpha[:10] = -20.0
    steps = train_epoch(trainer)
    next(steps)
    next(steps)  # the last before the event
    known = trainer.optimizer.state[gate.log_alpha]
    known["exp_avg" if optimizer == "adam" else "momentum_buffer"][:10] = -1.0  # by 10, ten times a step
    list(steps)
    assert trainer.event is not None
    assert trainer.event["removed"]["fc1"] == 10
    for _ in range(4):
        for gated in (gated_of(trainer), cast(Gated, trainer.network(0))):  # the second has the average
            assert bool((gated.prob_open()[:10] < 1e-20).all())
        losses(trainer, 1)


def test_an_event_that_saves_too_little_is_skipped_and_said_so(tmp_path: Path) -> None:
    """fc1 has 784·300 of the 266,200 MACs, fc2 30,000: ten units of the first save (784 + 100)·10 of them."""
    share = 10 * (784 + 100) / 266_200
    for gain, skipped in ((share * 1.001, True), (share * 0.999, False), (0.5, True)):
        r = recipe("lenet300", epochs=2, shrink_gain=gain, gate_lr=1e-9)
        trainer = Trainer([r], images("mnist5k"))
        close(gated_of(trainer), {"fc1": [*range(10)]})
        list(train_epoch(trainer))
        (record,) = evaluation.note(trainer)
        assert record["shrunk"]["skipped"] == skipped
        assert record["shrunk"]["removed"] == {"fc1": 10, "fc2": 0}
        assert record["shrunk"]["macs"] == {"before": 1.0, "after": pytest.approx(1 - share)}
        assert trainer.runs.values()["network.model.fc1.weight"].shape == (300 if skipped else 290, 784)
        assert json.loads(json.dumps(record)) == record
        list(train_epoch(trainer))
        assert "shrunk" not in evaluation.note(trainer)[0]
    r = recipe("lenet300", epochs=1, shrink_gain=0.0)
    trainer = Trainer([r], images("mnist5k"))  # nothing is closed
    list(train_epoch(trainer))
    assert trainer.event is not None
    assert trainer.event["skipped"]


SHRINKING = recipe(
    "wrn-10-1", placement="blocks", penalty=None, cost="macs", at_most=0.25, on="kept", dual="ascent", dual_lr=2.0,
    restarts=False, gate_lr=10.0, epochs=5, shrink_at=(2, 4), shrink_checks=2, shrink_multiple=4, ema=0.5, l2=5e-4,
    optimizer="sgd", lr=0.05, nesterov=True, augment=True, finalize=True, finetune_epochs=1, recalibrate=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = begun(SHRINKING, tmp_path_factory.mktemp("shrunk") / "run")
    return train([SHRINKING], images("cifar10"), folder)


@pytest.mark.slow
def test_a_run_that_shrinks_counts_against_the_network_of_its_recipe(shrunk: Trainer) -> None:
    events = {h["epoch"]: h["shrunk"] for h in shrunk.history if "shrunk" in h}
    assert list(events) == [2, 4]
    for event in events.values():
        assert not event["skipped"]
        assert sum(event["removed"].values()) >= 8
        assert all(width % 4 == 0 for width in event["widths"].values())
    assert events[4]["macs"]["before"] == events[2]["macs"]["after"] > events[4]["macs"]["after"]
    packed = [h["prob_open"]["blocks.0.conv1"] for h in shrunk.history]
    assert len(set(map(len, packed))) == 1
    (result,) = evaluation.results(shrunk)
    dense = WideResNet(10, 1)
    assert result["costs"]["params"]["dense"] == numel(dense)
    assert result["costs"]["macs"]["kept"] <= 0.25
    gated = cast(Gated, shrunk.network(0))
    assert numel(gated.model) == numel(dense)
    small = compact(gated)
    assert result["costs"]["params"]["kept"] * numel(dense) == pytest.approx(numel(small))
    assert shrunk.history[-1]["kept"]["params"] * numel(dense) == pytest.approx(numel(small))
    gone = torch.as_tensor(gated_of(shrunk).gone())
    assert int(gone.sum()) == sum(sum(event["removed"].values()) for event in events.values())
    assert bool((gated.prob_open()[gone] < 1e-20).all())  # these come from the average
    live = gated_of(shrunk).model
    for name, width in events[4]["widths"].items():
        layers: list[Any] = [net.get_submodule(name) for net in (live, small)]
        assert layers[0].weight.shape[0] == width
        assert layers[1].weight.shape[0] == result["architecture"][name] <= width
    x = shrunk.supply.scaled(images("cifar10").test_x)
    logits = gated(x)
    assert_same(shrunk.runs.evaluate(Objective.logits, x, values=shrunk.values())[0], logits, 1e-5)
    assert_same(small.eval()(x), logits, 1e-5)
    assert (logits.argmax(1) != images("cifar10").test_y).double().mean() * 100 == result["error_last"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 5, 11])
def test_a_checkpoint_after_a_shrink_goes_on_to_the_bit(steps: int, shrunk: Trainer, tmp_path: Path) -> None:
    """Of two steps an epoch: the step that the first event follows, one after it, and one in tuning."""
    folder = begun(SHRINKING, tmp_path / "run")
    again = interrupted(folder, steps, shrunk)
    if steps == 11:
        seen = restore(folder, images("cifar10"))
        assert without_seconds(evaluation.results(seen)) == without_seconds(evaluation.results(again))
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(compact(cast(Gated, seen.network(0)))(x), compact(cast(Gated, again.network(0)))(x))


@pytest.mark.slow
def test_a_checkpoint_remembers_adam_for_the_gates_beside_sgd(tmp_path: Path) -> None:
    """After an event, so that what both remember was cut."""
    r = SHRINKING.override(gate_lr="auto", dual="auto", dual_lr=None, restarts=True, shrink_gain=0.0)
    whole = train([r], images("cifar10"), begun(r, tmp_path / "whole"))
    assert isinstance(whole.optimizer, Both)
    values, state = whole.runs.values(), whole.optimizer.state
    remembered = {n: set(state[p]) for n, p in values.items() if p in state}
    assert set(map(frozenset, remembered.values())) == {
        frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }  # fmt: skip
    assert all(("exp_avg" in kinds) == n.startswith("network.gates.") for n, kinds in remembered.items())
    assert any("shrunk" in h and not h["shrunk"]["skipped"] for h in whole.history)
    interrupted(begun(r, tmp_path / "run"), 9, whole)


@pytest.mark.slow
def test_a_larger_state_is_refused(shrunk: Trainer) -> None:
    with pytest.raises(ValueError, match="load it into a new trainer"):
        saver.load(shrunk, saver.state(Trainer([SHRINKING], images("cifar10"))))


def test_without_shrinking_nothing_is_stored() -> None:
    state = saver.state(Trainer([recipe("lenet300", shrink_at=())], images("mnist5k")))
    assert "shrinking" not in state


def test_stacks_are_refused() -> None:
    for change in ({}, {"shrink_at": (), "channels_last": True}):
        r = recipe("lenet300", **change)
        with pytest.raises(ValueError, match="cannot be in a stack"):
            refuse([r, r.override(seed=1)], images=16, ranks=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placement": None, "penalty": None}, "`shrink_at` must be .* without gates"),
        ({"shrink_checks": 2}, "`shrink_at` must begin at epoch 2 or later, after `shrink_checks` checks, got .1."),
        ({"shrink_at": (2, 1)}, "`shrink_at` must be a list of rising epochs"),
        ({"shrink_multiple": 0}, "`shrink_multiple` must be an integer of at least 1"),
        ({"shrink_gain": 1.0}, "`shrink_gain` must be a number in"),
        ({"placement": "blocks"}, '`placement` must be "shrinkable" or "per_layer" for'),
    ],
)
def test_recipes_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("lenet300", **change)


@pytest.mark.slow
def test_two_processes_shrink_alike(server: processes.Server, tmp_path: Path) -> None:
    about_a_third_open = {"drop_rates": {"*": 0.917}, "gate_lr": 1e-6}  # log α where eq. 13 becomes zero
    r = SHRINKING.override(epochs=3, finalize=False, finetune_epochs=0, shrink_at=(2,), **about_a_third_open)
    folder = Folder.create(tmp_path / "run", [r])
    both = {"folder": str(folder.path), "ranks": 2, "meet": str(tmp_path / "meet"), "save_seconds": 1000.0}
    jobs = [server.start("train", **both, rank=k, dump=str(tmp_path / f"{k}.pt")) for k in range(2)]
    for job in jobs:
        assert job.wait() == 0, job.said
    first, second = (torch.load(tmp_path / f"{k}.pt", weights_only=True) for k in range(2))
    for part in ("values", "buffers", "average", "optimizer", "shrinking"):
        ours, theirs = dict(leaves(first[part])), dict(leaves(second[part]))
        assert {k: bits(v) for k, v in ours.items()} == {k: bits(v) for k, v in theirs.items()}
    (event,) = [h["shrunk"] for h in first["history"] if "shrunk" in h]
    assert not event["skipped"]
    assert all(n > 0 for n in event["removed"].values())
    assert not bool(first["shrinking"]["units"].all())
    assert without_seconds(first["history"]) == without_seconds(second["history"])


# ---------------------------------------------------------------- wide networks


@pytest.mark.slow
def test_gates_on_blocks_are_those_of_the_papers() -> None:
    gated = l0.attach(WideResNet(16, 1), torch.zeros(2, 3, 32, 32), where=l0.per_layer(only="blocks.*.conv1"))
    sizes = {name: gate.shape.numel() for name, gate in gated.named_gates()}
    hidden = [16] * 2 + [32] * 2 + [64] * 2
    assert sizes == {f"blocks.{k}.conv1": n for k, n in enumerate(hidden)}
    inputs = [16, *hidden[:-1]]  # what comes into a block is what the one before gave
    for number, (name, width) in enumerate(sizes.items()):
        weights = width * inputs[number] * 9
        assert l0.dense(costs.only(l0.l0_norm, name), gated) == weights
    for name in ("gallego-wrn-20-cifar10", "louizos-wrn-0.001-cifar100"):
        assert get(name).placement == "blocks"
    (placement,) = [p for p in gated.placements if p.name == "blocks.4.conv1"]
    assert [s.tensor for s in placement.multiplies] == ["blocks.4.conv2.weight"]


@pytest.mark.slow
def test_channels_last_gives_the_same_and_stays_when_it_shrinks(tmp_path: Path) -> None:
    r = SHRINKING.override(epochs=3, shrink_at=(2,), finalize=False, finetune_epochs=0)
    last = r.override(channels_last=True)
    trainers = [Trainer([x], images("cifar10")) for x in (r, last)]
    x = [t.supply.batch(t.supply.epoch(0)[0][0])[0] for t in trainers]
    assert torch.equal(*x)
    assert x[1][0].is_contiguous(memory_format=torch.channels_last)
    assert not x[0][0].is_contiguous(memory_format=torch.channels_last)
    a, b = (evaluation.evaluate(t) for t in trainers)
    assert a["error"].tolist() == b["error"].tolist()
    first = [next(iter(train_epoch(t))) for t in trainers]
    torch.testing.assert_close(*first, rtol=1e-5, atol=1e-6)
    whole = train([last], images("cifar10"), begun(last, tmp_path / "whole"))
    assert gated_of(whole).taken is not None

    def all_last(trainer: Trainer) -> None:
        for name, p in trainer.runs.values().items():
            if p.ndim == 4 and p.shape[1] > 1:
                known = [t for t in trainer.optimizer.state[p].values() if t.ndim]  # type: ignore[index]
                for tensor in (p, trainer.average.tensors[name], *known):
                    assert tensor.is_contiguous(memory_format=torch.channels_last), name

    all_last(whole)
    folder = Folder.create(tmp_path / "run", [last])
    saver.save(whole, folder)
    folder.log(whole.history)
    all_last(restore(folder, images("cifar10")))
