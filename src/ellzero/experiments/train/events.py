"""What happens to live runs between epochs: units go for good, gates settle, and their learning ends.

When it happens is the recipe's and the policy's to say; how tensors become smaller is in `out.shrinking`.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from ellzero import gates
from ellzero.experiments.train import evaluation
from ellzero.experiments.train.building import COSTS
from ellzero.experiments.train.live import Live
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.gated.module import Gated
from ellzero.out import shrinking
from ellzero.out.finalization import finalize, revive


def after_epoch(live: Live) -> None:
    """Settles or shrinks, if it is time."""
    if live.epoch == live.recipe.settle_at:
        settle(live)
    elif live.recipe.shrink_at and not live.step.fixed:
        opens = live.runs.evaluate(Objective.opens, values=live.values())[0].cpu().numpy()
        live.closed_for = np.where(opens, 0, live.closed_for + 1)
        if live.epoch in live.recipe.shrink_at:
            shrink(live)


def shrink(live: Live) -> None:
    """Takes out for good the units that have been closed for long, if that is worth it; notes it as `event`."""
    gated, r = live.gated, live.recipe
    plan = shrinking.propose(gated, live.closed_for >= r.shrink_checks, live.policy.multiple)
    found = shrinking.event(gated, plan)
    gain = 1 - found["macs"]["after"] / found["macs"]["before"]
    skipped = gain < r.shrink_gain or not live.policy.worth_it(gain, live.epoch)
    live.event = {**found, "skipped": skipped}
    if not skipped:
        live.take_out(plan)
        live.prepare()


def settle(live: Live) -> None:
    """Ends the gates' learning on the way: keeps what fits the targets, and trains it on as a plain small network.

    Units are closed, or opened, until the kept cost is just within its target, and at least one of each placement is
    open; gates that are open are folded into the weights, what is closed is taken out. The rest of the budget would be
    error for nothing, and so would noise in a network that is small already. Notes it as `event`.
    """
    gated, r = live.gated, live.recipe
    watched = live.runs.evaluate(Objective.watched, values=live.values())[0].tolist()  # all that the gates have learned
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
    plan = shrinking.propose(gated, ~gated.opens().cpu().numpy(), live.policy.multiple)
    before = {kind: dict(zip(COSTS, w, strict=True)) for kind, w in zip(("expected", "kept"), watched, strict=True)}
    live.event = {**shrinking.event(gated, plan), **before, "skipped": False, "settled": True}
    live.average.active = bool(live.average.tensors) and live.epoch < r.epochs  # there was another network before
    live.take_out(plan)
    live.fix()


def turn(live: Live) -> None:
    """Ends the epochs with gates that learn, as the recipe says: closes units until targets are met, then tunes."""
    tune(live)
    if not live.recipe.finalize:
        return
    for run, recipe in enumerate(live.recipes):
        gated = cast(Gated, live.runs.network(run))
        if recipe.at_most is not None:
            finalize(gated, recipe.at_most, COSTS[recipe.cost], fill=True)
        for name, gate in gated.gates.named_parameters():
            own = live.runs.values()[f"network.gates.{name}"]
            with torch.no_grad():
                (own if live.runs.size == 1 else own[run]).copy_(gate)
    evaluation.recalibrate(live)


def tune(live: Live) -> None:
    """Fixes the gates, so that only the weights move: both from the parameters that count."""
    values = live.values()
    with torch.no_grad():
        for name, value in live.runs.values().items():
            value.copy_(values[name])
    live.average.active = False
    live.fix()
