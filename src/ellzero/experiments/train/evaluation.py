"""What is seen of live runs: test error, costs, records, results, and batch-norm statistics gathered for it.

Looking changes nothing: a run that is looked at after every epoch is the run that is not.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.building import COSTS, architecture
from ellzero.experiments.train.live import Live
from ellzero.experiments.train.stepping.stack import Objective
from ellzero.objectives import costs


@final
class DivergedError(Exception):
    """A loss is not a number."""


@torch.no_grad()
def evaluate(live: Live, chunk: int | None = None) -> dict[str, Tensor]:
    """Test error in percent, expected and kept cost fractions, open gates, of every run, with the test-time gates.

    In full precision. Of several processes, each looks at its share of the images.
    """
    values = live.values()
    with _looking(live):
        out = {"error": _error(live, values, chunk)}
    if live.gates:
        out["expected"], out["kept"] = live.runs.evaluate(Objective.watched, values=values).unbind(1)
        out["open"] = live.runs.evaluate(Objective.counts, values=values)
    return out


@torch.no_grad()
def _error(live: Live, values: dict[str, Tensor], chunk: int | None = None) -> Tensor:
    live.runs.eval()
    chunk = chunk or live.policy.test_batch
    wrong = torch.zeros(live.runs.size, device=live.device)
    pairs = list(zip(live.data.test_x.split(chunk), live.data.test_y.split(chunk), strict=True))
    for x, y in pairs[live.rank :: live.policy.ranks]:
        logits = live.runs.evaluate(Objective.logits, live.supply.scaled(x), values=values)
        wrong += (logits.argmax(-1) != y).sum(1)
    return 100 * parallel.total(wrong) / len(live.data.test_y)


# ---------------------------------------------------------------- batch norm


@contextmanager
def _looking(live: Live) -> Iterator[None]:
    """Batch-norm statistics for as long as one looks, if the recipe says so: training goes on as it would have."""
    own = [(buffer, buffer.clone()) for buffer in live.runs.template.buffers()]
    modes = [(m, m.training) for m in (*live.runs.modules(), *live.runs.template.modules())]
    try:
        recalibrate(live)
        yield
    finally:
        for buffer, before in own:
            buffer.copy_(before)
        for module, mode in modes:
            module.training = mode


def _norms(live: Live) -> list[_BatchNorm]:
    return [m for m in live.runs.template.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@torch.no_grad()
def recalibrate(live: Live, batches: int = 200) -> None:
    """Gathers batch-norm statistics anew, with the parameters that count and the gates as they are at test time."""
    norms = _norms(live)
    if not norms or not live.recipe.recalibrate:
        return
    live.runs.eval()
    values, order = live.values(), live.supply.epoch(live.epoch)[0]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
        norm.train()
    for index in order[:batches]:
        live.runs.evaluate(Objective.logits, live.supply.batch(index)[0][0], values=values)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    parallel.from_first(list(live.runs.template.buffers()))


# ---------------------------------------------------------------- records


def note(live: Live) -> list[dict[str, Any]]:
    """Evaluates every run and adds a record of each to the history: these records.

    Raises:
        DivergedError: the loss of a run is not a number.
    """
    losses: list[Any] = [None] * live.runs.size  # after finalising there were no steps
    if live.summed:
        losses = (parallel.total(live.step.losses.clone()) / live.summed / live.policy.ranks).tolist()
    for recipe, loss in zip(live.recipes, losses, strict=True):
        if loss is not None and not math.isfinite(loss):
            raise DivergedError(
                f"the loss of `{recipe.name}`, seed {recipe.seed}, is {loss} after epoch {live.epoch}: "
                f"try a smaller `lr` or `gate_lr`"
            )
    seen = {k: v.tolist() for k, v in evaluate(live).items()}
    records = [_record(live, run, losses[run], {k: v[run] for k, v in seen.items()}) for run in range(live.runs.size)]
    live.event = None
    live.history += records
    live.step.losses.zero_()
    live.seconds, live.summed = 0.0, 0
    return records


def _record(live: Live, run: int, loss: float | None, seen: dict[str, Any]) -> dict[str, Any]:
    recipe = live.recipes[run]
    record: dict[str, Any] = {
        "epoch": live.epoch,
        "run": recipe.name,
        "seed": recipe.seed,
        "seconds": live.seconds,
        "loss": loss,
        "error": seen["error"],
        "tuning": live.step.fixed,
    }
    if live.gates:
        record |= {kind: dict(zip(COSTS, seen[kind], strict=True)) for kind in ("expected", "kept")}
        record["multiplier"] = live.lagrangian.multiplier[run].tolist()
        record["open"] = dict(zip(live.gates, seen["open"], strict=True))
        if live.runs.size == 1:  # to draw it; of a stack it would be long
            record["prob_open"] = _packed_probabilities(live)
    if live.event is not None:
        record["shrunk"] = live.event
    if live.without:
        record["error_without"] = {step: errors[run] for step, errors in live.without.items()}
    return record


@torch.no_grad()
def _packed_probabilities(live: Live) -> dict[str, str]:
    """P(z ≠ 0) of every gate by the name of its placement, in 255ths, as bytes in base64."""
    flat = live.runs.evaluate(Objective.probabilities, values=live.values())[0].mul(255).round().to("cpu", torch.uint8)
    return {name: b64encode(p.numpy().tobytes()).decode() for name, p in live.gated.by_placement(flat).items()}


def finish(live: Live) -> None:
    """The last thing before the last record: batch-norm statistics, and what they and averaging have bought."""
    if live.average.active:
        live.without["averaging"] = _error(live, {n: v.detach() for n, v in live.runs.values().items()}).tolist()
    if live.recipe.recalibrate and _norms(live):
        live.without["recalibration"] = _error(live, live.values()).tolist()
    recalibrate(live)


def results(live: Live) -> list[dict[str, Any]]:
    """What came out of every run: recipe, errors, and the network that `compact` gives."""
    out = []
    for run, recipe in enumerate(live.recipes):
        mine = live.history[run :: live.runs.size]  # `note` writes one record of each run at a time
        # Where units are closed in the end, what was better before was another network, and too large.
        its_own = ([h for h in mine if h["tuning"]] if recipe.projects else mine) or mine
        result: dict[str, Any] = {
            "recipe": recipe.to_dict(),
            "seed": recipe.seed,
            "error_best": min(h["error"] for h in its_own),
            "error_last": mine[-1]["error"],
            "seconds": sum(h["seconds"] for h in mine),
            "runs_in_stack": live.runs.size,
        }
        if live.gates:
            # Those that settle do so as they are: what is averaged then are weights.
            result["gates"] = "averaged" if recipe.ema is not None and not recipe.settles else "raw"
            gated: Any = live.network(run).cpu()
            fractions = {}
            for name, cost in COSTS.items():
                whole = costs.dense(cost, gated)
                with torch.no_grad():
                    both = cost(gated).item() / whole, cost(gated, kept=True).item() / whole
                fractions[name] = {"dense": whole, "expected": both[0], "kept": both[1]}
            result |= {"architecture": architecture(gated), "costs": fractions}
        out.append(result)
    return out
