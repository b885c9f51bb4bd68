"""Ours: a `Budget` with its defaults in the arena's loop; the default gates, or those of another family; and the same
with one or two settings changed, to choose defaults by.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ellzero import gates
from ellzero.experiments.arena.bout import Bout, Method
from ellzero.experiments.arena.loop import DECAY, RATE
from ellzero.gated.attaching import attach
from ellzero.gated.placements import per_layer, shrinkable
from ellzero.out.bounding.pacing import LEARNING
from ellzero.out.budget import Budget


def budget(
    bout: Bout, *, first: float = 0.0, learning: float = LEARNING, wander: float | None = None, **options: Any
) -> nn.Module:
    """All epochs with a budget, as the README has it; `learning` is the budget's, `options` are of `attach`. The share
    `first` of them trains the dense network, with a schedule of its own. Noise alone carries log α by `wander`, which
    is the gates' rate times the root of their steps, if it is given.
    """
    loop, network = bout.loop, bout.dense()
    if alone := round(first * loop.epochs):
        loop.train(network, alone)
    gated, left = attach(network, (loop.example,), **options), loop.epochs - alone
    steps = left * loop.steps
    gate_lr = None if wander is None else wander / (learning * steps) ** 0.5
    held = Budget(gated, macs=bout.at_most, steps=steps, learning=learning, gate_lr=gate_lr)
    optimizer = loop.optimizer(gated.param_groups(lr=RATE, weight_decay=DECAY))
    held.drive(optimizer)
    # Settled, a budget without `ema` only counts its steps: nothing is lost when they are replayed.
    loop.train(gated, left, optimizer, still=lambda: held.phase != "learning")
    return held.finish()


def _starting(keep: float) -> partial[gates.HardConcreteGate]:
    return partial(gates.HardConcreteGate, drop_rate=1 - keep)


FAMILIES: dict[str, Method] = {
    "stg": partial(budget, gate=gates.STGGate),
    "bernoulli": partial(budget, gate=gates.BernoulliGate),
    "generalized-dropout": partial(budget, gate=gates.GeneralizedDropoutGate),
    "sbp": partial(budget, gate=gates.SBPGate),
    "vib": partial(budget, gate=gates.VIBGate),
    "gnj": partial(budget, gate=gates.GNJGate),
}
# What is changed: the rate that gates keep at the start (0.95 by default), the share of the steps in which they learn,
# the share of the epochs before, in which the network trains without them, how fast gates move.
CHANGED: dict[str, Method] = {
    "budget-keep-50": partial(budget, gate=_starting(0.5)),
    "budget-keep-90": partial(budget, gate=_starting(0.9)),
    "budget-keep-99": partial(budget, gate=_starting(0.99)),
    "budget-learning-10": partial(budget, learning=0.1),
    "budget-learning-20": partial(budget, learning=0.2),
    "budget-learning-40": partial(budget, learning=0.4),
    "budget-first-10": partial(budget, first=0.1),
    "budget-first-20-learning-20": partial(budget, first=0.2, learning=0.2),
    "budget-keep-90-learning-20": partial(budget, gate=_starting(0.9), learning=0.2),
    "budget-fast": partial(budget, wander=1.5),
}
# All inputs stay, as with every rival: by default the pixels that a wide linear layer reads have gates too.
HIDDEN: dict[str, Method] = {"budget-hidden": partial(budget, where=shrinkable(inputs=False))}
# Gates on the inputs of all linear layers, as in the papers: not for residual streams, which several layers write.
INPUTS: dict[str, Method] = {
    "budget-inputs": partial(budget, where=per_layer()),
    "budget-inputs-learning-20": partial(budget, where=per_layer(), learning=0.2),
    "budget-inputs-keep-90-learning-20": partial(budget, where=per_layer(), gate=_starting(0.9), learning=0.2),
}
