"""What a recipe can ask of the training loop beyond its objective, each against a plain loop over one network.

Schedules, L2, augmentation, batch-norm statistics, precision, compilation, extra-gradient, initialisation, history and
watchers. The oracles take the images and the noise of the trainer, and nothing else of it.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.data import Dataset, epoch_generator, scaled, stand_in
from ellzero.experiments.recipe import Recipe, refuse_idle
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.experiments.train import evaluation, events
from ellzero.experiments.train.building import build
from ellzero.experiments.train.loop import Stopped, train, train_epoch
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.experiments.train.watching import AbstractWatcher
from support.narrow import SHALLOW
from support.noise import quartered
from support.runs import time_by_weights
from support.trained import CPU, by_name, data, recipe, same, set_open, trained


@cache
def few() -> Dataset:
    """Two batches of 50 images."""
    return replace(data(), train_x=data().train_x[:100], train_y=data().train_y[:100])


def epoch_of(trainer: Trainer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Images, classes and noise (draws, gates) of every step of the epoch that comes."""
    dataset, (order, noise) = trainer.data, trainer.supply.epoch(trainer.epoch)
    return [
        (scaled(dataset.train_x[index], dataset.mean, dataset.std), dataset.train_y[index], draws)
        for index, draws in zip(order[:, 0], noise[:, 0], strict=True)
    ]


def optimizer_of(r: Recipe, gated: l0.Gated) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": list(gated.model.parameters()), "lr": r.lr},
        {"params": list(gated.gates.parameters()), "lr": r.gate_lr},
    ]
    if r.optimizer == "adam":
        return torch.optim.Adam(groups)
    return torch.optim.SGD(groups, momentum=r.momentum, nesterov=r.nesterov)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "lr": 1e-3, "gate_lr": 1e-2},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "gate_lr": 3.0},
    "nesterov": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "lr": 0.1, "gate_lr": 3.0},
}


@cache
def untouched(base: str) -> Trainer:
    """A run of two epochs with these settings (JSON), trained once for all that must change nothing in it."""
    return train([recipe(**{"epochs": 2, **json.loads(base)})], few())


PENALISED: dict[str, Any] = {"at_most": None, "penalty": 0.1, "dual": "auto"}
DENSE: dict[str, Any] = {"at_most": None, "placement": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "idle", "message"),
    [
        (PENALISED, {"on": "kept"}, "`on` changes nothing without `at_most`"),
        (PENALISED, {"dual": "nupi"}, "`dual` changes nothing without `at_most`"),
        (PENALISED, {"dual": "ascent", "dual_lr": 0.3}, "`dual` changes nothing without `at_most`"),
        (DENSE, {"cost": "macs"}, "`cost` changes nothing without `at_most`"),
        (
            {"at_most": 0.5, "dual": "nupi", "dual_lr": 0.1},
            {"restarts": False},
            '`restarts` changes nothing but with `dual` "ascent"',
        ),
        (PENALISED, {"restarts": False}, '`restarts` changes nothing but with `dual` "ascent"'),
        (DENSE, {"rule": "median"}, "`rule` changes nothing without gates (`placement`)"),
        (DENSE, {"gate_lr": 0.3}, "`gate_lr` changes nothing without gates (`placement`)"),
        (DENSE, {"samples": 2}, "`samples` changes nothing without gates (`placement`)"),
        (DENSE, {"drop_rates": {"*": 0.1}}, "`drop_rates` changes nothing without gates (`placement`)"),
        ({}, {"momentum": 0.5}, '`momentum` changes nothing but with `optimizer` "sgd"'),
        ({}, {"decay": 0.1}, "`decay` changes nothing without `milestones`"),
        (
            {},
            {"decay_gates": False},
            "`decay_gates` changes nothing without gates, and `milestones`, `cosine`, `linear_after` or `lr_warmup`",
        ),
        ({}, {"l2_gated_factor": 2.0}, "`l2_gated_factor` changes nothing without gates and `l2`"),
        (DENSE | {"l2": 0.1}, {"l2_gated_factor": 2.0}, "`l2_gated_factor` changes nothing without gates and `l2`"),
        ({}, {"detach_l2": True}, "`detach_l2` changes nothing without gates and `l2`"),
        ({}, {"shrink_checks": 1}, "`shrink_checks` changes nothing without `shrink_at`"),
        ({}, {"shrink_gain": 0.9}, "`shrink_gain` changes nothing without `shrink_at`"),
        ({}, {"shrink_multiple": 1}, "`shrink_multiple` changes nothing without `shrink_at` or `settle_at`"),
        ({}, {"shrink_at": (9,)}, "`shrink_at` changes nothing after the last of 2 epochs"),
        ({}, {"settle_at": 9}, "`settle_at` changes nothing after the last of 2 epochs"),
        ({}, {"recalibrate": True}, "`recalibrate` changes nothing for 'narrow', which has no batch norm"),
    ],
)
def test_what_is_refused_as_idle_changes_nothing_indeed(
    base: dict[str, Any], idle: dict[str, Any], message: str
) -> None:
    plain = recipe(**{"epochs": 2, **base})
    asked = plain.override(**idle)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        refuse_idle(asked, idle)
    refuse_idle(plain, base or [f.name for f in fields(Recipe)])  # what acts, or is at its default
    before, after = untouched(json.dumps(base)), train([asked], few())
    same(after, by_name(before))
    assert [h["error"] for h in after.history] == [h["error"] for h in before.history]


# ---- learning rates -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "decay_gates"), [("adam", True), ("adam", False), ("sgd", False), ("nesterov", True)]
)
def test_learning_rates_fall_at_milestones_and_to_zero_in_tuning(optimizer: str, decay_gates: bool) -> None:
    r = recipe(
        placement="per_layer", penalty=5.0, epochs=3, milestones=(1, 2, 9), decay=0.2, decay_gates=decay_gates,
        finetune_epochs=2, **OPTIMIZERS[optimizer],
    )  # fmt: skip
    of_weights = [1, 0.2, 0.04, 0.04, 0.02]  # and then it would be zero
    of_gates = of_weights if decay_gates else [1, 1, 1]
    gated = build(r, few(), CPU)
    assert isinstance(gated, l0.Gated)
    hand, penalty = optimizer_of(r, gated), l0.Penalty(l0.l0_norm, 5.0 / 100)
    trainer = Trainer([r], few())
    for epoch in range(5):
        if trainer.policy.turns(trainer.epoch, trainer.step.fixed):
            events.turn(trainer)
            gated.eval()  # the gates as they are at test time
            for gate in gated.gates.parameters():
                gate.requires_grad_(False)
                gate.grad = None
        assert trainer.step.fixed == (epoch >= 3)
        hand.param_groups[0]["lr"] = r.lr * of_weights[epoch]
        if epoch < 3:
            hand.param_groups[1]["lr"] = (r.gate_lr or 0) * of_gates[epoch]
        before, coming = by_name(trainer), epoch_of(trainer)
        list(train_epoch(trainer))
        for x, y, draws in coming:
            loss = F.cross_entropy(gated(x, gate_noise=draws[0]) if epoch < 3 else gated(x), y)
            hand.zero_grad()
            (loss + penalty(gated) if epoch < 3 else loss).backward()
            hand.step()
        now = {n: p.detach() for n, p in gated.named_parameters()}
        same(trainer, now, atol=2e-5 if optimizer == "adam" else 1e-6)
        for name, value in now.items():
            assert torch.equal(value, before[name]) == ("gates" in name and epoch >= 3), name


# ---- L2 -------------------------------------------------------------------------------------------------------------


def l2_by_hand(r: Recipe, gated: l0.Gated) -> dict[str, Tensor]:
    """The gradient of the L2 terms alone, layer by layer, in closed form."""
    values = dict(gated.named_parameters())
    out = {name: r.l2 * v.detach() for name, v in values.items()}  # weight decay
    out |= {name: torch.zeros_like(v) for name, v in values.items() if name.startswith("gates.")}
    fixed = r.l2 * r.l2_gated_factor
    for name, _ in gated.named_gates():
        key = f"gates.{name.replace('.', '/')}.log_alpha"
        log_alpha = values[key].detach()
        p = torch.sigmoid(log_alpha - 2 / 3 * math.log(0.1 / 1.1))  # P(z ≠ 0), eq. 12
        # A convolution's gate counts all that makes its map; a fully connected layer's the weights that read its unit.
        read = {"fc1.inputs": "fc1", "fc1": "fc2", "fc2": "fc3"}
        layer = name if r.placement == "per_layer" else read[name]
        own = (
            [f"model.{layer}.weight", f"model.{layer}.bias"] if layer.startswith("conv") else [f"model.{layer}.weight"]
        )
        for tensor in own:
            w = values[tensor].detach()
            along = 0 if layer.startswith("conv") else 1
            shape = [-1 if d == along else 1 for d in range(w.ndim)]
            out[tensor] = fixed * p.view(shape) * w
            others = [d for d in range(w.ndim) if d != along]
            squares = w.square().sum(others) if others else w.square()
            if not r.detach_l2:
                out[key] += fixed / 2 * p * (1 - p) * squares
    return out


L2: dict[str, dict[str, Any]] = {
    "per layer": {"placement": "per_layer", "l2": 0.3, "l2_gated_factor": 1.5},
    "per layer, detached": {"placement": "per_layer", "l2": 0.3, "detach_l2": True},
    "shrinkable": {"placement": "shrinkable", "l2": 0.3, "l2_gated_factor": 0.5},
    "convolutions": {"network": "lenet5", "placement": "per_layer", "l2": 0.3, "l2_gated_factor": 1.5},
}


@pytest.mark.parametrize("case", L2)
def test_l2_is_eq_17_for_weights_that_gates_count_and_weight_decay_for_others(case: str) -> None:
    """With plain SGD at rate 1 a step is the gradient."""
    r = recipe(optimizer="sgd", momentum=0.0, lr=1.0, gate_lr=1.0, **L2[case])
    trainer = Trainer([r], few())
    hand: Any = copy.deepcopy(trainer.runs.template.network)
    before, (x, y, draws) = by_name(trainer), epoch_of(trainer)[0]
    next(train_epoch(trainer))
    (F.cross_entropy(hand(x, gate_noise=draws[0]), y) + l0.Penalty(l0.l0_norm, 0.1 / 100)(hand)).backward()
    l2 = l2_by_hand(r, hand)
    after = by_name(trainer)
    for name, p in hand.named_parameters():
        torch.testing.assert_close(before[name] - after[name], p.grad + l2[name], rtol=1e-4, atol=2e-6, msg=name)
        if name.startswith("gates."):
            assert l2[name].any() != r.detach_l2


def test_l2_of_a_dense_network_is_weight_decay() -> None:
    r = recipe(placement=None, optimizer="sgd", momentum=0.9, lr=0.1, l2=0.3)
    trainer = Trainer([r], few())
    net = copy.deepcopy(trainer.runs.template.network)
    hand = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)
    coming = epoch_of(trainer)
    list(train_epoch(trainer))
    for x, y, _ in coming:
        hand.zero_grad()
        F.cross_entropy(net(x), y).backward()
        hand.step()
    same(trainer, {n: p.detach() for n, p in net.named_parameters()}, atol=1e-6)


def test_l2_goes_on_in_tuning_with_gates_that_are_open() -> None:
    r = recipe(
        placement="per_layer", optimizer="sgd", momentum=0.0, lr=1.0, gate_lr=1.0, finetune_epochs=1, l2=0.3,
        l2_gated_factor=1.5,
    )  # fmt: skip
    trainer = Trainer([r], few())
    set_open(trainer.runs.template.network, {})  # type: ignore[arg-type]
    trainer.epoch = 1
    events.turn(trainer)
    hand: Any = copy.deepcopy(trainer.runs.template.network).eval()
    before, (x, y, _) = by_name(trainer), epoch_of(trainer)[0]
    next(train_epoch(trainer))
    F.cross_entropy(hand(x), y).backward()
    for name, p in hand.model.named_parameters():
        factor = 0.3 * 1.5 if name.endswith("weight") else 0.3
        change = before[f"model.{name}"] - by_name(trainer)[f"model.{name}"]
        torch.testing.assert_close(change, p.grad + factor * p.detach(), rtol=1e-4, atol=2e-6, msg=name)


# ---- images ---------------------------------------------------------------------------------------------------------


def wide(**changes: Any) -> Recipe:
    basis: dict[str, Any] = {
        "name": "wide", "network": "wrn-10-1", "data": "cifar10", "placement": None, "batch": 4, "epochs": 1,
        "optimizer": "sgd", "lr": 0.05,
    }  # fmt: skip
    return Recipe(**basis | changes)


def augmented_by_hand(dataset: Dataset, seed: int, epoch: int) -> Tensor:
    """One image after the other: padded by 4, cut out, mirrored, scaled."""
    generator = epoch_generator(seed, epoch)
    torch.randint(2**62, (), generator=generator)  # the seed of order and noise comes first
    corners = torch.randint(9, (2, len(dataset.train_x)), generator=generator).tolist()
    mirrored = torch.randint(2, (len(dataset.train_x),), generator=generator).tolist()
    out = []
    for image, top, left, flip in zip(dataset.train_x.numpy(), *corners, mirrored, strict=True):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
        cut = padded[:, top : top + 32, left : left + 32]
        cut = cut[:, :, ::-1] if flip else cut
        shift, scale = (np.array(v)[:, None, None] for v in (dataset.mean, dataset.std))
        out.append(torch.from_numpy((cut / 255 - shift) / scale))
    assert len({*corners[0]}) > 3
    assert len({*corners[1]}) > 3
    assert {*mirrored} == {0, 1}
    return torch.stack(out).float()


def test_images_are_cropped_and_mirrored_anew_in_every_epoch() -> None:
    dataset = stand_in("cifar10", images=12)
    pixels, r = dataset.train_x.clone(), wide(augment=True, epochs=2, seed=3)
    trainer = Trainer([r], dataset)
    seen: list[tuple[Tensor, Tensor]] = []
    batch = trainer.supply.batch
    trainer.supply.batch = lambda index: seen.append(batch(index)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    for epoch in range(2):
        order = trainer.supply.epoch(trainer.epoch)[0]
        seen.clear()
        list(train_epoch(trainer))
        expected = augmented_by_hand(dataset, 3, epoch)
        assert len(seen) == 3
        for (x, y), index in zip(seen, order[:, 0], strict=True):
            torch.testing.assert_close(x[0], expected[index], rtol=1e-5, atol=1e-5)
            assert torch.equal(y[0], dataset.train_y[index])
    assert torch.equal(dataset.train_x, pixels)
    assert not torch.equal(augmented_by_hand(dataset, 3, 0), augmented_by_hand(dataset, 3, 1))
    assert not torch.equal(augmented_by_hand(dataset, 3, 0), augmented_by_hand(dataset, 4, 0))
    # The order of the images does not depend on it.
    orders = [Trainer([one], dataset).supply.epoch(0)[0] for one in (r, r.override(augment=False))]
    assert torch.equal(*orders)


# ---- batch norm -----------------------------------------------------------------------------------------------------


def statistics_by_hand(gated: Any, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Mean over the batches of what every batch norm sees: their means and unbiased variances."""
    norms = {name: m for name, m in gated.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen: dict[str, list[Tensor]] = {name: [] for name in norms}
    gated.eval()
    for name, norm in norms.items():
        norm.train()
        norm.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].detach()))
    with torch.no_grad():
        for x in batches:
            gated(x)
    out = {}
    for name, inputs in seen.items():
        assert len(inputs) == len(batches)
        out[f"model.{name}.running_mean"] = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
        out[f"model.{name}.running_var"] = torch.stack([x.var((0, 2, 3)) for x in inputs]).mean(0)
    return out


def buffers(trainer: Trainer) -> dict[str, Tensor]:
    found = trainer.runs.template.network.named_buffers()
    return {name: b.clone() for name, b in found if name.endswith(("running_mean", "running_var"))}


@pytest.mark.slow
def test_recalibrated_statistics_are_means_over_batches_with_the_gates_of_test_time() -> None:
    dataset = quartered(12)
    r = wide(placement="shrinkable", penalty=1e-4, gate_lr=0.1, ema=0.5, recalibrate=True)
    plain, trainer = (train([x], dataset) for x in (r.override(recalibrate=False), r))
    same(trainer, by_name(plain))
    batches = [trainer.supply.scaled(dataset.train_x[index]) for index in trainer.supply.epoch(trainer.epoch)[0][:, 0]]
    gated: Any = plain.network(0)  # the averaged parameters count
    assert all((gate.value() > 0.1).all() and (gate.value() < 0.9).all() for _, gate in gated.named_gates())
    expected = statistics_by_hand(copy.deepcopy(gated), batches)
    ours = buffers(trainer)
    assert expected.keys() == ours.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert not any(torch.allclose(buffers(plain)[name], value, rtol=1e-2) for name, value in expected.items())
    # They are in force in what is evaluated and handed over, and training would go on as before.
    gated.load_state_dict({**gated.state_dict(), **expected})
    wrong = (gated(trainer.supply.scaled(dataset.test_x)).argmax(1) != dataset.test_y).float().mean().item()
    assert trainer.history[-1]["error"] == pytest.approx(100 * wrong, abs=1e-3)
    torch.testing.assert_close(trainer.network(0)(batches[0]), gated(batches[0]), rtol=1e-3, atol=1e-3)
    # What each step has bought is told by the run without it.
    raw: Any = plain.runs.network(0).eval()
    wrong = (raw(trainer.supply.scaled(dataset.test_x)).argmax(1) != dataset.test_y).float().mean().item()
    without = trainer.history[-1]["error_without"]
    assert without == {"averaging": pytest.approx(100 * wrong), "recalibration": plain.history[-1]["error"]}
    assert plain.history[-1]["error_without"] == {"averaging": without["averaging"]}
    assert len({wrong, *without.values()}) > 1
    norms = [m for m in trainer.runs.template.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.momentum for m in norms} == {0.1}
    assert not any(m.training for m in norms)
    evaluation.recalibrate(trainer, batches=1)
    for name, value in statistics_by_hand(copy.deepcopy(gated), batches[:1]).items():
        torch.testing.assert_close(buffers(trainer)[name], value, rtol=1e-4, atol=1e-5, msg=name)


# ---- precision and compilation --------------------------------------------------------------------------------------


def first_batch(trainer: Trainer) -> tuple[Tensor, Tensor, Tensor]:
    order, noise = trainer.supply.epoch(trainer.epoch)
    return *trainer.supply.batch(order[0]), noise[0, :, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # not every CPU has bfloat16 of its own
@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_is_for_the_forward_and_nothing_else(size: int) -> None:
    r = recipe(cost="macs", at_most=0.3, epochs=2)
    full, half = (
        Trainer([r.override(seed=s, precision=p) for s in range(size)], few()) for p in ("float32", "bfloat16")
    )
    x, y, noise = first_batch(full)
    types: list[torch.dtype] = []
    half.runs.template.network.model.fc2.register_forward_hook(lambda *args: types.append(args[2].dtype))  # type: ignore[union-attr]
    loss, costs = half.runs(x, y, noise)
    # In a stack the matrix product is in bfloat16 too, but `vmap` adds the bias after it, and that promotes the sum.
    assert set(types) == {torch.bfloat16 if size == 1 else torch.float32}
    assert loss.dtype is torch.float32
    assert torch.equal(costs, full.runs(x, y, noise)[1])
    for run in range(size):
        gated: Any = full.runs.network(run)
        with torch.autocast("cpu", torch.bfloat16):
            logits = gated(x[run], gate_noise=noise[run])
        torch.testing.assert_close(loss[run], F.cross_entropy(logits.float(), y[run]), rtol=1e-3, atol=1e-3)
        assert abs(loss[run] - full.runs(x, y, noise)[0][run]) > 1e-5  # float32 agrees to the sixth digit
    types.clear()
    for name, value in evaluation.evaluate(half).items():
        assert torch.equal(value, evaluation.evaluate(full)[name]), name
    images = full.supply.scaled(few().test_x)
    assert torch.equal(
        half.runs.eval().evaluate(Objective.logits, images), full.runs.eval().evaluate(Objective.logits, images)
    )
    assert set(types) == {torch.float32}
    list(train_epoch(half))
    assert {v.dtype for v in half.runs.values().values()} == {torch.float32}
    assert math.isfinite(evaluation.note(half)[0]["loss"])


def compiled_and_not(*runs: Recipe) -> list[Trainer]:
    """The same runs by a step as it is, and by one that is compiled; none has begun."""
    torch._dynamo.reset()
    return [Trainer([r.override(compile=on) for r in runs], few()) for on in (False, True)]


def assert_the_same_epoch(trainers: list[Trainer]) -> None:
    ends = []
    for trainer in trainers:
        losses = torch.stack(list(train_epoch(trainer)))
        ends.append((losses, trainer.lagrangian.multiplier, by_name(trainer), evaluation.evaluate(trainer)["error"]))
    for plain, compiled in zip(*ends, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        pytest.param(1, "inductor", marks=[
            pytest.mark.slow(first=True),
            pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on the CPU"),
        ]),
        pytest.param(2, "eager", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_compiled_step_is_the_step_to_rounding(size: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole, without a break in a graph, each part once, and again when the gates are fixed.

    One run as a recipe compiles it, with C++, on a network for which there is little of it, and a stack that is traced
    and run as it is; both while the gates learn: with fixed gates there is less of the same.
    """
    from torch._dynamo.backends.registry import lookup_backend

    behind, plain, graphs = lookup_backend(backend), lookup_backend("eager"), []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return (behind if len(graphs) < 3 else plain)(module, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting, fullgraph=True))
    alone = recipe(network=SHALLOW.name, at_most=0.3, dual="ascent", dual_lr=0.5, finetune_epochs=1)
    paper = alone.override(placement="per_layer", at_most={"fc1": 0.3, "fc2": 0.5}, cost="params", l2=0.01)
    stack = [paper, paper.override(seed=1, cost="l0_norm", at_most=0.2)]
    trainers = compiled_and_not(*(stack if size == 2 else [alone]))
    # What the processor can do is not tried out, and vectors are not used: their headers take longest to read.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "cpp.simdlen": 1}):
        assert_the_same_epoch(trainers)
    assert all(trainer.lagrangian.multiplier.any() for trainer in trainers)
    assert len(graphs) == 2  # the Lagrangian and the ascent, in two steps
    for trainer in trainers:
        events.turn(trainer)
    assert_the_same_epoch(trainers)
    assert all(trainer.done for trainer in trainers)
    assert len(graphs) == 3


# ---- extra-gradient -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_extra_gradient_is_that_of_the_library(optimizer: str, samples: int) -> None:
    r = recipe(
        placement="per_layer", at_most={"fc1": 0.2, "fc[23]": 0.9}, dual="nupi", dual_lr=0.5, kp=1.0, samples=samples,
        extra_gradient=True, **OPTIMIZERS[optimizer],
    )  # fmt: skip
    gated = build(r, data(), CPU)
    assert isinstance(gated, l0.Gated)
    hand = optimizer_of(r, gated)
    constraint = l0.Constraint(l0.l0_norm, {"fc1": 0.2, "fc[23]": 0.9}, dual=l0.duals.NuPI(kp=1.0, ki=0.5))
    trainer = Trainer([r], data())
    coming, steps = epoch_of(trainer), train_epoch(trainer)
    for x, y, draws in coming:
        assert len(draws) == 2 * samples
        left = iter(draws)

        def lagrangian(x: Tensor = x, y: Tensor = y, left: Iterator[Tensor] = left) -> Tensor:
            losses = [F.cross_entropy(gated(x, gate_noise=next(left)), y) for _ in range(samples)]
            total: Tensor = torch.stack(losses).mean() + constraint(gated)
            return total

        next(steps)
        l0.objectives.extra_gradient_step(constraint, hand, lagrangian)
        assert not list(left)
        torch.testing.assert_close(
            trainer.lagrangian.multiplier[0], constraint.multiplier.float(), rtol=1e-4, atol=1e-5
        )
    same(trainer, {n: p.detach() for n, p in gated.named_parameters()}, atol=1e-4 if optimizer == "adam" else 1e-5)
    assert constraint.multiplier[0] > 0.1
    ours, theirs = trainer.optimizer.state, hand.state
    for name, p in gated.named_parameters():
        mine = ours[trainer.runs.values()[f"network.{name}"]]
        assert mine.keys() == theirs[p].keys()
        for key, value in theirs[p].items():
            torch.testing.assert_close(mine[key], value, rtol=1e-3, atol=1e-5, msg=f"{name} {key}")


@pytest.mark.slow
def test_a_run_with_extra_gradient_is_alone_in_its_stack() -> None:
    basis = recipe(at_most=0.3, dual="ascent", dual_lr=0.5, extra_gradient=True, ema=0.9)
    several = [basis, basis.override(seed=1, at_most=0.1)]
    stack = trained(*several)
    for run, r in enumerate(several):
        alone = trained(r)
        same(stack, by_name(alone), run)
        torch.testing.assert_close(stack.lagrangian.multiplier[run], alone.lagrangian.multiplier[0])
        for name, value in alone.average.tensors.items():
            torch.testing.assert_close(stack.average.tensors[name][run], value, rtol=1e-5, atol=2e-5)
    assert stack.lagrangian.multiplier.all()


# ---- objectives in one stack ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_with_other_costs_share_a_stack() -> None:
    basis = recipe(placement="per_layer", at_most=0.3, dual="ascent", dual_lr=0.5, gate_lr=0.1, l2=0.01, on="kept")
    several = [
        basis,
        basis.override(seed=1, cost="params", at_most={"fc1": 0.2, "fc2": 0.5}),
        basis.override(seed=2, cost="macs", at_most=0.1, init="2021"),
    ]
    stack = trained(*several)
    for run, r in enumerate(several):
        alone = trained(r)
        same(stack, by_name(alone), run, atol=1e-3)  # a hundredth of a step of the gates
        own = len(alone.lagrangian.multiplier[0])
        torch.testing.assert_close(
            stack.lagrangian.multiplier[run, :own], alone.lagrangian.multiplier[0], rtol=1e-4, atol=1e-4
        )
        assert alone.lagrangian.multiplier.all()
        assert not stack.lagrangian.multiplier[run, own:].any()


@pytest.mark.slow
def test_a_time_is_bounded_in_a_stack_too() -> None:
    basis = recipe(placement="per_layer", at_most=0.6, dual="ascent", dual_lr=0.5, gate_lr=0.1, cost="latency")
    several = [basis, basis.override(seed=1, cost="macs", at_most=0.5), basis.override(seed=2, at_most={"fc2": 0.5})]
    with time_by_weights():
        stack = trained(*several)
        for run in (0, 2):
            alone = trained(several[run])
            same(stack, by_name(alone), run, atol=1e-3)
            assert alone.lagrangian.multiplier.all()
        with pytest.raises(ValueError, match="`at_most` must be at least"):
            trained(basis.override(at_most=0.001))


def test_targets_that_the_gates_cannot_reach_are_refused_before_the_training() -> None:
    """Blocks of a WRN can vanish; the first convolution, two shortcuts and the head cannot."""
    shrunk = 27 * 16 * 32**2 + 16 * 32 * 16**2 + 32 * 64 * 8**2 + 640
    whole = shrunk + 9 * (2 * 16**2 * 32**2 + (16 + 32) * 32 * 16**2 + (32 + 64) * 64 * 8**2)
    dataset, r = stand_in("cifar10", images=4), wide(placement="shrinkable", cost="macs", at_most=0.5, penalty=None)
    Trainer([r.override(at_most=shrunk / whole + 1e-4)], dataset)
    message = rf"^`at_most` must be at least {shrunk / whole:.3g}\d*, the least fraction of `macs` \((expected|kept)\)"
    for finalize in (False, True):
        with pytest.raises(ValueError, match=message):
            Trainer([r.override(at_most=shrunk / whole - 1e-4, finalize=finalize)], dataset)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_automatic_controller_does_as_much_in_a_run_of_any_length(epochs: int) -> None:
    """With gates that stand still at 1.05 times the target; epochs of tuning are no part of the length."""
    r = recipe(at_most=0.2, gate_lr=1000.0, epochs=epochs, finetune_epochs=1)
    cost = float(Trainer([r], few()).runs.evaluate(Objective.watched)[0, 0, 0])
    trainer = Trainer([r.override(at_most=cost / 1.05)], few())
    for gate in trainer.runs.template.network.gates.parameters():  # type: ignore[union-attr]
        gate.requires_grad_(False)
    for _ in range(epochs):
        list(train_epoch(trainer))
    assert trainer.lagrangian.multiplier.item() == pytest.approx(0.1 * 1.05**100, rel=1e-2)


# ---- initialisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["lenet300", "lenet5"])
def test_weights_make_up_for_gates_of_their_own_layer_only(network: str) -> None:
    """The same draws under two drop rates: what is divided by 1 − p shows in the ratio."""

    def weights(placement: str, p: float) -> dict[str, Tensor]:
        r = recipe(network=network, placement=placement, init="2021", drop_rates={"*": p})
        gated = build(r, few(), CPU)
        assert isinstance(gated, l0.Gated)
        return {n: v.detach() for n, v in gated.model.named_parameters()}

    low, high = (weights("per_layer", p) for p in (0.2, 0.5))
    free_low, free_high = (weights("shrinkable", p) for p in (0.2, 0.5))
    assert low.keys() == free_low.keys()
    for name in low:
        gated = name.endswith("weight") or name.startswith("conv")  # biases of maps are under the map's gate
        torch.testing.assert_close(low[name] * (0.8 if gated else 1), high[name] * (0.5 if gated else 1))
        assert torch.equal(free_low[name], free_high[name])
    w = {"lenet300": (300, 784), "lenet5": (500, 800)}[network]
    assert low["fc1.weight"].var().item() == pytest.approx(2 / w[0] / 0.8**2, rel=0.02)
    assert free_low["fc1.weight"].var().item() == pytest.approx(2 / w[1], rel=0.02)


# ---- history and watchers -------------------------------------------------------------------------------------------


def test_a_record_says_how_a_run_stands() -> None:
    basis = recipe(placement="per_layer", at_most={"fc1": 0.3, "fc2": 0.3}, dual="ascent", dual_lr=0.1)
    basis = basis.override(gate_lr=1.0, epochs=2, finalize=True, ema=0.5)
    losses = []
    trainer = Trainer([basis, basis.override(seed=5, name="other")], few())
    losses += list(train_epoch(trainer))
    losses += list(train_epoch(trainer))
    records = evaluation.note(trainer)
    assert json.loads(json.dumps(records)) == records
    assert records == trainer.history
    for run, record in enumerate(records):
        gated: Any = trainer.network(run)
        assert record.keys() == {
            "epoch", "run", "seed", "seconds", "loss", "error", "tuning", "expected", "kept", "multiplier", "open"
        }  # fmt: skip
        assert [record[k] for k in ("epoch", "run", "seed", "tuning")] == [
            2,
            ("tiny", "other")[run],
            (0, 5)[run],
            False,
        ]
        assert record["loss"] == pytest.approx(sum(float(x[run]) for x in losses) / 4, rel=1e-5)
        assert record["open"] == {name: int(gate.open().sum()) for name, gate in gated.named_gates()}
        assert 0 < record["open"]["fc1"] < 784
        assert record["multiplier"] == pytest.approx(trainer.lagrangian.multiplier[run].tolist())
        for name, cost in {"l0_norm": l0.l0_norm, "params": l0.params, "macs": l0.macs}.items():
            whole = l0.dense(cost, gated)
            assert record["expected"][name] == pytest.approx(cost(gated).item() / whole, rel=1e-4)
            assert record["kept"][name] == pytest.approx(cost(gated, kept=True).item() / whole, rel=1e-4)
        assert record["seconds"] > 0
    events.turn(trainer)
    assert trainer.done
    for record in evaluation.note(trainer):  # no steps since, so no loss and no time
        assert (record["loss"], record["seconds"], record["tuning"]) == (None, 0.0, True)
        assert record["kept"]["l0_norm"] < 0.35
    for run, result in enumerate(evaluation.results(trainer)):
        assert result["seconds"] == records[run]["seconds"]
        assert (result["gates"], result["runs_in_stack"]) == ("averaged", 2)


def test_losses_and_seconds_are_of_the_steps_since_the_last_record() -> None:
    trainer = Trainer([recipe(epochs=3)], few())
    for epoch in range(3):
        losses = torch.cat(list(train_epoch(trainer)))
        assert evaluation.note(trainer)[0]["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert len(trainer.history) == epoch + 1
    (result,) = evaluation.results(trainer)
    assert result["seconds"] == sum(h["seconds"] for h in trainer.history) > 0
    assert result["gates"] == "raw"


class Notes(AbstractWatcher):
    """Writes down what it is told; makes trouble at a step, if asked to."""

    def __init__(self, said: list[Any], name: str, trouble: int = -1) -> None:
        self.said, self.name, self.trouble = said, name, trouble

    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None:
        self.said.append((self.name, "begin", [r.name for r in recipes], done, total))

    def step(self, done: int) -> None:
        self.said.append((self.name, "step", done))
        if done == self.trouble:
            raise RuntimeError("trouble")

    def note(self, records: list[dict[str, Any]]) -> None:
        self.said.append((self.name, "note", [(r["run"], r["epoch"], r["tuning"]) for r in records]))

    def end(self) -> None:
        self.said.append((self.name, "end"))


def test_watchers_are_told_everything_in_order() -> None:
    basis = recipe(at_most=0.5, finalize=True, finetune_epochs=2, epochs=3)
    said: list[Any] = []
    train([basis, basis.override(name="other")], few(), every=2, watchers=[Notes(said, "a"), Notes(said, "b")])

    def note(epoch: int, tuning: bool) -> tuple[Any, ...]:
        return ("a", "note", [("tiny", epoch, tuning), ("other", epoch, tuning)])

    assert [s for s in said if s[0] == "a"] == [
        ("a", "begin", ["tiny", "other"], 0, 10),
        *[("a", "step", k) for k in (1, 2, 3, 4)],
        note(2, False),
        *[("a", "step", k) for k in (5, 6)],
        note(3, False),  # the last with gates that learn
        *[("a", "step", k) for k in (7, 8)],
        note(4, True),
        *[("a", "step", k) for k in (9, 10)],
        note(5, True),  # the last
        ("a", "end"),
    ]
    assert [s[1:] for s in said if s[0] == "a"] == [s[1:] for s in said if s[0] == "b"]
    assert [s[0] for s in said[2:6]] == ["a", "b", "a", "b"]


def test_watchers_are_told_of_the_end_after_an_error_too() -> None:
    said: list[Any] = []
    with pytest.raises(RuntimeError, match=r"trouble"):
        train([recipe()], few(), watchers=[Notes(said, "a"), Notes(said, "b", trouble=2)])
    assert said[-1][1] == said[-2][1] == "end"
    assert {s[0] for s in said[-2:]} == {"a", "b"}


def test_a_loss_that_is_not_a_number_ends_the_run() -> None:
    said: list[Any] = []
    with pytest.raises(DivergedError, match=r"^the loss of `tiny`, seed 4, is nan after epoch 2: try a smaller `lr`"):
        train([recipe(lr=1e30, seed=4, epochs=4)], few(), every=2, watchers=[Notes(said, "a")])
    assert not any(s[1] == "note" for s in said)
    assert said[-1] == ("a", "end")


def test_a_run_that_diverges_is_named_in_its_stack() -> None:
    trainer = Trainer([recipe(), recipe(seed=1, name="bad")], few())
    with torch.no_grad():
        trainer.runs.values()["network.model.fc1.weight"][1].fill_(float("inf"))
    list(train_epoch(trainer))
    with pytest.raises(DivergedError, match=r"^the loss of `bad`, seed 1, is nan"):
        evaluation.note(trainer)


class Interrupting(AbstractWatcher):
    """Ctrl-C in the third step."""

    def begin(self, recipes: Sequence[Recipe], done: int, total: int) -> None: ...

    def step(self, done: int) -> None:
        self.done = done
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    def note(self, records: list[dict[str, Any]]) -> None: ...

    def end(self) -> None:
        self.ended = True


def test_ctrl_c_ends_a_run_after_the_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    watcher = Interrupting()
    with pytest.raises(Stopped, match=r"^stopped after epoch 1, step 1$"):
        train([recipe(epochs=2)], few(), watchers=[watcher])
    assert watcher.done == 3
    assert watcher.ended
    assert signal.getsignal(signal.SIGINT) is before


def test_the_best_error_is_of_a_network_within_the_target() -> None:
    """What was better before units were closed was another network."""
    trainer = Trainer([recipe(at_most=0.2, finalize=True, finetune_epochs=2)], few())
    errors = {False: [5.0], True: [9.0, 7.0]}
    base = {"run": "tiny", "seed": 0, "seconds": 1.0, "loss": 0.1}
    trainer.history[:] = [
        {**base, "epoch": 1, "error": e, "tuning": t} for t, several in errors.items() for e in several
    ]
    assert evaluation.results(trainer)[0]["error_best"] == 7.0


def test_a_folder_that_another_process_trains_in_is_left_alone(tmp_path: Path) -> None:
    folder = Folder.create(tmp_path / "run", [recipe(at_most=0.2)])
    folder.log([{"epoch": 1}])
    with folder.locked(), pytest.raises(FolderError, match="is being trained by another process"):
        train(folder.recipes, few(), Folder.open(folder.path))
    assert folder.history() == [{"epoch": 1}]
    train(folder.recipes, few(), folder)
    assert folder.results() is not None
