"""The recipes' loop is the loop that anyone writes with the library, step by step, to the rounding of float64.

The oracle is the README's loop: `attach`, `Constraint` or `Penalty`, `param_groups`, backward, step, `ascend`. Both get
the same images and the same noise. Targets and prices are numbers that float32 has, in which the recipes keep them.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ellzero as l0
from ellzero.experiments import networks
from ellzero.experiments.papers import unnamed
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train.loop import train_epoch
from ellzero.experiments.train.trainer import Trainer
from ellzero.objectives.extragradient import extra_gradient_step
from support.narrow import NARROW
from support.runs import in_float64
from support.trained import BATCH, TRAIN, data, recipe

EPOCHS = 4
STEPS = EPOCHS * TRAIN // BATCH
RATE = min(0.3, 25 / STEPS)  # of gates, if nobody says
CONSTRAINED: dict[str, Any] = {"cost": "macs", "at_most": 0.25, "on": "kept", "gate_lr": 0.125, "epochs": EPOCHS}


def by_hand(
    r: Recipe, trainer: Trainer, constraint: l0.Constraint | None = None, penalty: l0.Penalty | None = None
) -> l0.Gated:
    """Trains the network of a trainer before its first step, as one would."""
    model = networks.find(r.network).make(10).double()
    gate = partial(l0.HardConcreteGate, drop_rate=r.drop_rate("fc1"))
    gated = l0.attach(model, torch.zeros(2, 1, 28, 28, dtype=torch.float64), gate=gate)
    gated.load_state_dict(trainer.runs.template.network.state_dict())
    rate = RATE if r.gate_lr == "auto" else r.gate_lr
    groups = gated.param_groups(lr=r.lr, gate_lr=rate)
    optimizer, *others = [torch.optim.Adam(groups)]
    if r.optimizer == "sgd":
        optimizer, *others = torch.optim.SGD(groups[:1], momentum=0.9), torch.optim.Adam(groups[1:])
    for epoch in range(r.epochs):
        alone = epoch < r.dense_epochs
        gated.fix(alone)
        gated.gates.requires_grad_(not alone)
        order, noise = trainer.supply.epoch(epoch)
        for index, draws in zip(order, noise[:, 0].double(), strict=True):
            x, y = (t[0] for t in trainer.supply.batch(index))
            rest = iter(draws)

            def lagrangian(x: Tensor = x, y: Tensor = y, rest: Any = rest, alone: bool = alone) -> Tensor:
                if alone:
                    return F.cross_entropy(gated(x), y)
                loss: Tensor = F.cross_entropy(gated(x, gate_noise=next(rest)), y)
                return loss + sum(term(gated) for term in (constraint, penalty) if term is not None)

            if r.extra_gradient and constraint is not None:
                extra_gradient_step(constraint, optimizer, lagrangian)
                continue
            gated.zero_grad()
            lagrangian().backward()
            for one in (optimizer, *others):
                one.step()
            if constraint is not None and not alone:
                constraint.ascend()
    return gated


def by_recipe(trainer: Trainer) -> None:
    """The recipe's own loop, in float64 and with the same noise."""
    epoch = trainer.supply.epoch
    trainer.supply.epoch = lambda number, begin=0: tuple(  # type: ignore[method-assign,assignment]
        t.double() if t.is_floating_point() else t for t in epoch(number)
    )
    for _ in range(trainer.recipe.epochs):
        list(train_epoch(trainer))


def assert_same(trainer: Trainer, gated: l0.Gated, constraint: l0.Constraint | None) -> None:
    theirs = dict(gated.named_parameters())
    for name, value in trainer.runs.values().items():
        expected = theirs[name.removeprefix("network.")]
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)
    if constraint is not None:
        ours = trainer.lagrangian
        torch.testing.assert_close(ours.multiplier[0], constraint.multiplier, rtol=1e-10, atol=1e-10)
        for name, memory in ours.memory.items():
            theirs_too = constraint.get_buffer(f"_dual_{name}")
            torch.testing.assert_close(memory[0], theirs_too, rtol=1e-10, atol=1e-10)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto": (
        {"dual": "auto", "target_warmup": 0.5},
        {"dual": l0.duals.SelfPacedAscent(STEPS, 0.125), "warmup": l0.duals.GeometricWarmup(0.5 * STEPS)},
    ),
    "auto, after an epoch in which weights train alone": (
        {"dual": "auto", "target_warmup": 0.5, "weights_first": 0.25},
        {"dual": l0.duals.SelfPacedAscent(3 * STEPS // 4, 0.125), "warmup": l0.duals.GeometricWarmup(0.375 * STEPS)},
    ),
    "nupi, after an epoch in which weights train alone": (  # at once, so that its first step counts
        {"dual": "nupi", "dual_lr": 0.5, "kp": 1.0, "nu": 0.5, "weights_first": 0.25},
        {"dual": l0.duals.NuPI(kp=1.0, ki=0.5, nu=0.5)},
    ),
    "auto, gates by Adam where SGD moves the weights": (
        {"dual": "auto", "target_warmup": 0.5, "optimizer": "sgd", "lr": 0.125, "gate_lr": "auto"},
        {
            "dual": l0.duals.SelfPacedAscent(STEPS, RATE),
            "warmup": l0.duals.GeometricWarmup(0.5 * STEPS),
        },
    ),
    "ascent, on a line": (
        {"dual": "ascent", "dual_lr": 0.5, "target_warmup": 0.25},
        {"dual": l0.duals.GradientAscent(0.5), "warmup": l0.duals.LinearWarmup(0.25 * STEPS)},
    ),
    "extra-gradient, on a line": (
        {"dual": "nupi", "dual_lr": 0.5, "kp": 1.0, "target_warmup": 0.5, "extra_gradient": True},
        {"dual": l0.duals.NuPI(kp=1.0, ki=0.5), "warmup": l0.duals.LinearWarmup(0.5 * STEPS)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_recipe_with_a_target_is_the_loop_of_the_readme(case: str) -> None:
    changes, arguments = CASES[case]
    r = recipe(**CONSTRAINED | changes)
    trainer = in_float64(Trainer([r], data()))
    constraint = l0.Constraint(l0.macs, at_most=0.25, on="kept", **arguments)
    gated = by_hand(r, copy.deepcopy(trainer), constraint)
    by_recipe(trainer)
    assert constraint.multiplier.item() > 0.05, "a constraint that does nothing shows nothing"
    assert_same(trainer, gated, constraint)


@pytest.mark.slow
def test_a_recipe_with_a_penalty_is_the_loop_of_the_readme() -> None:
    weight = 2.0**-10
    r = recipe(penalty=weight * TRAIN, epochs=EPOCHS)
    trainer = in_float64(Trainer([r], data()))
    before = trainer.runs.values()["network.gates.fc1.log_alpha"].detach().clone()
    gated = by_hand(r, copy.deepcopy(trainer), penalty=l0.Penalty(l0.l0_norm, weight))
    by_recipe(trainer)
    assert_same(trainer, gated, None)
    assert (trainer.runs.values()["network.gates.fc1.log_alpha"] - before).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "l2"), [("adam", 0.0), ("adam", 2.0**-10), ("sgd", 2.0**-10)])
def test_a_network_of_your_own_trains_by_the_command_as_with_a_budget(optimizer: str, l2: float) -> None:
    """All of it: the gates learn, settle, leave the network, and the small one trains on as the schedule falls."""
    asked = {"network": NARROW.name, "data": "mnist5k", "batch": BATCH, "epochs": 5, "cost": "macs", "at_most": 0.25}
    r = unnamed({**asked, "optimizer": optimizer, "lr": 0.125 if optimizer == "sgd" else 2.0**-8, "l2": l2})
    trainer = in_float64(Trainer([r], data()))

    gated = l0.attach(networks.find(r.network).make(10).double(), torch.zeros(2, 1, 28, 28, dtype=torch.float64))
    gated.load_state_dict(copy.deepcopy(trainer.runs.template.network.state_dict()))
    budget = l0.Budget(gated, macs=0.25, steps=r.epochs * TRAIN // BATCH)
    kind: Any = partial(torch.optim.SGD, momentum=0.9) if optimizer == "sgd" else torch.optim.Adam
    groups = kind(gated.param_groups(lr=r.lr, weight_decay=l2))
    budget.drive(groups)
    falling = torch.optim.lr_scheduler.LambdaLR(groups, lambda epoch: (1 + math.cos(math.pi * epoch / r.epochs)) / 2)
    for epoch in range(r.epochs):
        order, noise = trainer.supply.epoch(epoch)
        for index, draws in zip(order, noise[:, 0].double(), strict=True):
            x, y = (t[0] for t in trainer.supply.batch(index))
            loss = F.cross_entropy(gated(x, gate_noise=draws[0]) if budget.phase == "learning" else gated(x), y)
            groups.zero_grad()
            loss.backward()
            groups.step()
        falling.step()
    small = budget.finish()

    by_recipe(trainer)
    theirs = l0.compact(trainer.network(0))
    sizes = {name: p.shape for name, p in small.named_parameters()}
    assert sizes == {name: p.shape for name, p in theirs.named_parameters()}
    assert sum(p.numel() for p in small.parameters()) < 0.5 * sum(p.numel() for p in NARROW.make(10).parameters())
    for name, p in small.named_parameters():
        torch.testing.assert_close(dict(theirs.named_parameters())[name], p, rtol=1e-9, atol=1e-9, msg=name)
