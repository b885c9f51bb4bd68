"""What is seen of runs under training: test error, costs, records, results, and batch-norm statistics gathered for it.

Looking changes nothing: a run that is looked at after every epoch is the run that is not.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.building import COSTS, architecture, evidence
from ellzero.experiments.train.fitting import measured
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.gated.module import Gated
from ellzero.gates.abstract import NoExpectation
from ellzero.objectives import costs
from ellzero.out import settling


@torch.no_grad()
def evaluate(trainer: Trainer) -> dict[str, Tensor]:
    """Test error in percent, expected and kept cost fractions, open gates, of every run, with the test-time gates.

    In full precision. Of several processes, each looks at its share of the images.
    """
    values = trainer.values()
    with _looking(trainer):
        out = {"error": _error(trainer, values)}
    if trainer.gates:
        out["expected"], out["kept"] = trainer.runs.evaluate(Objective.watched, values=values).unbind(1)
        out["open"] = trainer.runs.evaluate(Objective.counts, values=values)
    return out


@torch.no_grad()
def _error(trainer: Trainer, values: dict[str, Tensor]) -> Tensor:
    trainer.runs.eval()

    def answer(x: Tensor) -> Tensor:
        return trainer.runs.evaluate(Objective.logits, trainer.supply.scaled(x), values=values)

    policy = trainer.policy
    return measured(trainer.recipe, trainer.data, answer, policy.test_batch, trainer.rank, policy.ranks).float()


@contextmanager
def _looking(trainer: Trainer) -> Iterator[None]:
    """Batch-norm statistics for as long as one looks, if the recipe says so: training goes on as it would have."""
    runs = trainer.runs
    own = [(buffer, buffer.clone()) for buffer in runs.template.buffers()]
    modes = [(m, m.training) for m in (*runs.modules(), *runs.template.modules())]
    try:
        recalibrate(trainer)
        yield
    finally:
        for buffer, before in own:
            buffer.copy_(before)
        for module, mode in modes:
            module.training = mode


def _norms(trainer: Trainer) -> list[_BatchNorm]:
    """The batch norms to recalibrate: none, if the recipe does not say so."""
    return settling.norms_of(trainer.runs.template) if trainer.recipe.recalibrate else []


@torch.no_grad()
def recalibrate(trainer: Trainer, batches: int = 200) -> None:
    """Gathers batch-norm statistics anew, with the parameters that count and the gates as they are at test time."""
    norms = _norms(trainer)
    if not norms:
        return
    trainer.runs.eval()
    values, order = trainer.values(), trainer.supply.epoch(trainer.epoch)[0]
    with settling.gathering(norms):
        for index in order[:batches]:
            trainer.runs.evaluate(Objective.logits, trainer.supply.batch(index)[0][0], values=values)
    parallel.from_first(list(trainer.runs.template.buffers()))


def note(trainer: Trainer) -> list[dict[str, Any]]:
    """Evaluates every run and adds a record of each to the history: these records. Raises a DivergedError where the
    loss of a run is not a number.
    """
    losses: list[Any] = [None] * trainer.runs.size  # after finalising there were no steps
    if trainer.summed:
        losses = (parallel.total(trainer.step.losses.clone()) / trainer.summed / trainer.policy.ranks).tolist()
    for recipe, loss in zip(trainer.recipes, losses, strict=True):
        if loss is not None and not math.isfinite(loss):
            raise DivergedError(
                f"the loss of `{recipe.name}`, seed {recipe.seed}, is {loss} after epoch {trainer.epoch}: "
                f"try a smaller `lr` or `gate_lr`"
            )
    seen = {"loss": losses, **{kind: values.tolist() for kind, values in evaluate(trainer).items()}}
    records = [_record(trainer, run, {k: v[run] for k, v in seen.items()}) for run in range(trainer.runs.size)]
    trainer.event = None
    trainer.history += records
    trainer.step.losses.zero_()
    trainer.seconds, trainer.summed = 0.0, 0
    return records


def _record(trainer: Trainer, run: int, seen: dict[str, Any]) -> dict[str, Any]:
    recipe = trainer.recipes[run]
    record: dict[str, Any] = {"epoch": trainer.epoch, "run": recipe.name, "seed": recipe.seed}
    record |= {"seconds": trainer.seconds, "loss": seen["loss"], "error": seen["error"], "tuning": trainer.step.fixed}
    if trainer.gates:
        record |= {kind: dict(zip(COSTS, seen[kind], strict=True)) for kind in ("expected", "kept")}
        record["multiplier"] = trainer.lagrangian.multiplier[run].tolist()
        record["open"] = dict(zip(trainer.gates, seen["open"], strict=True))
        if trainer.runs.size == 1 and recipe.expects:  # to draw it; of a stack it would be long
            record["prob_open"] = _packed_probabilities(trainer)
    if trainer.event is not None:
        record["shrunk"] = trainer.event
    if trainer.without:
        record["error_without"] = {step: errors[run] for step, errors in trainer.without.items()}
    return record


@torch.no_grad()
def _packed_probabilities(trainer: Trainer) -> dict[str, str]:
    """P(z ≠ 0) of every gate by the name of its placement, in 255ths, as bytes in base64."""
    flat = trainer.runs.evaluate(lambda run: run.gated.prob_open(), values=trainer.values())[0]
    packed = trainer.gated.by_placement(flat.mul(255).round().to("cpu", torch.uint8))
    return {name: b64encode(p.numpy().tobytes()).decode() for name, p in packed.items()}


def finish(trainer: Trainer) -> None:
    """The last thing before the last record: batch-norm statistics, and what they and averaging have bought."""
    if trainer.average.active:
        raw = {n: v.detach() for n, v in trainer.runs.values().items()}
        trainer.without["averaging"] = _error(trainer, raw).tolist()
    if _norms(trainer):
        trainer.without["recalibration"] = _error(trainer, trainer.values()).tolist()
    recalibrate(trainer)


def results(trainer: Trainer) -> list[dict[str, Any]]:
    """What came out of every run: recipe, errors, and the network that `compact` gives."""
    out = []
    for run, recipe in enumerate(trainer.recipes):
        mine = trainer.history[run :: trainer.runs.size]  # `note` writes one record of each run at a time
        # Where units are closed in the end, what was better before was another network, and too large.
        its_own = ([h for h in mine if h["tuning"]] if recipe.projects else mine) or mine
        its_own = [h for h in its_own if h["epoch"] > recipe.dense_epochs] or its_own  # nor before gates learn
        result: dict[str, Any] = {"recipe": recipe.to_dict(), "seed": recipe.seed}
        result |= {"error_best": min(h["error"] for h in its_own), "error_last": mine[-1]["error"]}
        result |= {"seconds": sum(h["seconds"] for h in mine), "runs_in_stack": trainer.runs.size}
        if trainer.gates:
            # Those that settle do so as they are: what is averaged then are weights.
            result["gates"] = "averaged" if recipe.ema is not None and not recipe.settles else "raw"
            gated: Any = trainer.network(run).cpu()
            result["architecture"] = architecture(gated)
            if recipe.has_threshold and not recipe.expects:
                result["evidence"] = evidence(gated)
            result["costs"] = {name: fractions(cost, gated) for name, cost in trainer.costs.items()}
        out.append(result)
    return out


@torch.no_grad()
def fractions(cost: costs.Cost, gated: Gated) -> dict[str, float]:
    """The dense cost, and as fractions of it what is expected and what is kept."""
    dense = costs.dense(cost, gated)
    try:
        expected = cost(gated).item() / dense
    except NoExpectation:  # see `Objective.watched`
        expected = 1.0
    return {"dense": dense, "expected": expected, "kept": cost(gated, kept=True).item() / dense}
