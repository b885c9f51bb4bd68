"""What happens to runs between epochs: units go for good, gates settle, and their learning ends.

When it happens is the recipe's and the policy's to say; how tensors become smaller is in `out.shrinking`.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.building import COSTS
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import Trainer
from ellzero.gated.module import Gated
from ellzero.out import settling, shrinking
from ellzero.out.finalization import bring_within


def after_epoch(trainer: Trainer) -> None:
    """Lets gates learn, settles or shrinks, if it is time."""
    if trainer.gates and trainer.epoch == trainer.recipe.dense_epochs:
        trainer.fix(False)
    elif trainer.epoch == trainer.recipe.settle_at:
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
    """Ends the gates' learning on the way (`out.settling`), takes out what is closed, and trains the rest on as a plain
    small network; notes it as `event`. Where a network cannot be sliced alive, closed units stay as masks, to
    the same end.
    """
    gated, r = trainer.gated, trainer.recipe
    _warn_of_haste(trainer, gated, r)
    learned = trainer.runs.evaluate(Objective.watched, values=trainer.values())[0].tolist()  # all that the gates have
    settling.settle(gated, {} if r.at_most is None else {trainer.costs[r.cost]: r.at_most})
    plan = shrinking.propose(gated, ~gated.opens().cpu().numpy(), trainer.policy.multiple)
    before = {kind: dict(zip(COSTS, c, strict=True)) for kind, c in zip(("expected", "kept"), learned, strict=True)}
    trainer.event = {**shrinking.event(gated, plan), **before, "skipped": False, "settled": True}
    # There was another network before.
    trainer.average.active = bool(trainer.average.tensors) and trainer.epoch < r.epochs
    try:
        trainer.take_out(plan)
    except ValueError as error:  # a grouped convolution, say; nothing has changed
        trainer.event["masked"] = str(error)
    trainer.fix()


def _warn_of_haste(trainer: Trainer, gated: Gated, recipe: Recipe) -> None:
    """Warns where gates had no time to choose, so that what stays is nearly left to chance, as a `Budget` does."""
    bounds = {} if recipe.at_most is None else {trainer.costs[recipe.cost]: recipe.at_most}
    tuned = recipe.settles or recipe.finetune_epochs  # else what is closed at once is left as it is
    why = "too few steps to choose by; train longer, in smaller batches, or with a larger `gate_lr`"
    settling.warn_of_haste(gated, bounds, trainer.travelled if tuned else 0.0, f"epoch {trainer.epoch}", why)


def turn(trainer: Trainer) -> None:
    """Ends the epochs with gates that learn, as the recipe says: closes units until targets are met, then tunes."""
    tune(trainer)
    if not trainer.recipe.finalize:
        return
    for run, recipe in enumerate(trainer.recipes):
        gated = cast(Gated, trainer.runs.network(run))
        if recipe.at_most is not None:
            _warn_of_haste(trainer, gated, recipe)
            bring_within(gated, {trainer.costs[recipe.cost]: recipe.at_most}, fill=True)
        for name, gate in gated.gates.named_parameters():
            own = trainer.runs.values()[f"network.gates.{name}"]
            with torch.no_grad():
                (own if trainer.runs.size == 1 else own[run]).copy_(gate)
    trainer.hold()
    evaluation.recalibrate(trainer)


def tune(trainer: Trainer) -> None:
    """Fixes the gates, so that only the weights move: both from the parameters that count. But gates of which some are
    to be closed stay as they learned: the multiplier pressed those, and their average is still on its way.
    """
    values, learned = trainer.values(), trainer.recipe.finalize and trainer.recipe.at_most is not None
    with torch.no_grad():
        for name, value in trainer.runs.values().items():
            if not (learned and name.startswith("network.gates.")):
                value.copy_(values[name])
    trainer.average.active = False
    trainer.fix()
