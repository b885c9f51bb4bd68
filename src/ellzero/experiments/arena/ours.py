"""Ours: a `Budget` with its defaults in the arena's loop; the default gates, or those of another family."""

from __future__ import annotations

from typing import Any

from torch import nn

from ellzero import gates
from ellzero.experiments.arena.bout import Bout, Method
from ellzero.experiments.arena.loop import DECAY, RATE
from ellzero.gated.attaching import attach
from ellzero.out.budget import Budget


def budget(bout: Bout, **options: Any) -> nn.Module:
    """All epochs with a budget, as the README has it; `options` are of `attach`."""
    loop = bout.loop
    gated = attach(bout.dense(), (loop.example,), **options)
    held = Budget(gated, macs=bout.at_most, steps=loop.epochs * loop.steps)
    optimizer = loop.optimizer(gated.param_groups(lr=RATE, weight_decay=DECAY))
    held.drive(optimizer)
    loop.train(gated, loop.epochs, optimizer)
    return held.finish()


def _with(gate: type[gates.AbstractGate]) -> Method:
    return lambda bout: budget(bout, gate=gate)


FAMILIES: dict[str, Method] = {
    "stg": _with(gates.STGGate),
    "bernoulli": _with(gates.BernoulliGate),
    "generalized-dropout": _with(gates.GeneralizedDropoutGate),
    "sbp": _with(gates.SBPGate),
    "vib": _with(gates.VIBGate),
    "gnj": _with(gates.GNJGate),
}
