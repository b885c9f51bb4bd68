"""What happens to runs between epochs: units go for good, gates settle, and their learning ends.

When it happens is the recipe's and the policy's to say; how tensors become smaller is in `out.shrinking`.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from ellzero import gates
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.building import COSTS
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.out import shrinking
from ellzero.out.finalization import finalize, revive


def after_epoch(trainer: Trainer) -> None:
    """Settles or shrinks, if it is time."""
    if trainer.epoch == trainer.recipe.settle_at:
        settle(trainer)
    elif trainer.recipe.shrink_at and not trainer.step.fixed:
        opens = trainer.runs.evaluate(lambda run: run.gated.opens(), values=trainer.values())[0].cpu().numpy()
        trainer.closed_for = np.where(opens, 0, trainer.closed_for + 1)
        if trainer.epoch in trainer.recipe.shrink_at:
            shrink(trainer)


def shrink(trainer: Trainer) -> None:
    """Takes out for good the units that have been closed for long, if that is worth it; notes it as `event`."""
    gated, r = trainer.gated, trainer.recipe
    plan = shrinking.propose(gated, trainer.closed_for >= r.shrink_checks, trainer.policy.multiple)
    found = shrinking.event(gated, plan)
    gain = 1 - found["macs"]["after"] / found["macs"]["before"]
    skipped = gain < r.shrink_gain or not trainer.policy.worth_it(gain, trainer.epoch)
    trainer.event = {**found, "skipped": skipped}
    if not skipped:
        trainer.take_out(plan)
        trainer.prepare()


def settle(trainer: Trainer) -> None:
    """Ends the gates' learning on the way: keeps what fits the targets, and trains it on as a plain small network.

    Units are closed, or opened, until the kept cost is just within its target, and at least one of each placement is
    open; gates that are open are folded into the weights, what is closed is taken out. The rest of the budget would be
    error for nothing, and so would noise in a network that is small already. Notes it as `event`.
    """
    gated, r = trainer.gated, trainer.recipe
    learned = trainer.runs.evaluate(Objective.watched, values=trainer.values())[0].tolist()  # all that the gates have
    if r.at_most is None:
        revive(gated)
    else:
        finalize(gated, r.at_most, COSTS[r.cost], fill=True)
    with torch.no_grad():
        members = dict(gated.model.named_parameters())
        for name, weight in gated.gated_weights(gates.values([gate for _, gate in gated.named_gates()])).items():
            members[name].copy_(weight)
        for _, gate in gated.named_gates():
            gate.close_(~gate.open())  # for good: what is expected is then what is kept
            gate.open_(gate.open(), wide=True)
    plan = shrinking.propose(gated, ~gated.opens().cpu().numpy(), trainer.policy.multiple)
    before = {kind: dict(zip(COSTS, c, strict=True)) for kind, c in zip(("expected", "kept"), learned, strict=True)}
    trainer.event = {**shrinking.event(gated, plan), **before, "skipped": False, "settled": True}
    # There was another network before.
    trainer.average.active = bool(trainer.average.tensors) and trainer.epoch < r.epochs
    trainer.take_out(plan)
    trainer.fix()


def turn(trainer: Trainer) -> None:
    """Ends the epochs with gates that learn, as the recipe says: closes units until targets are met, then tunes."""
    tune(trainer)
    if not trainer.recipe.finalize:
        return
    for run, recipe in enumerate(trainer.recipes):
        gated = cast(Gated, trainer.runs.network(run))
        if recipe.at_most is not None:
            finalize(gated, recipe.at_most, COSTS[recipe.cost], fill=True)
        for name, gate in gated.gates.named_parameters():
            own = trainer.runs.values()[f"network.gates.{name}"]
            with torch.no_grad():
                (own if trainer.runs.size == 1 else own[run]).copy_(gate)
    evaluation.recalibrate(trainer)


def tune(trainer: Trainer) -> None:
    """Fixes the gates, so that only the weights move: both from the parameters that count."""
    values = trainer.values()
    with torch.no_grad():
        for name, value in trainer.runs.values().items():
            value.copy_(values[name])
    trainer.average.active = False
    trainer.fix()
