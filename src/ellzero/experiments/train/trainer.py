"""A stack of runs under training, epoch by epoch: the parts of this room, put together.

All that is random in an epoch is a function of (seed, epoch), so a run can be taken up again at any step, and does not
depend on the others in its stack. The loop around it is in `loop`; what a step does is in `stepping.step`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import evaluation, events, saver
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.evaluation import DivergedError
from ellzero.experiments.train.live import Live
from ellzero.experiments.train.policy import STACKABLE
from ellzero.experiments.train.stepping.optimizer import set_rates

__all__ = ["STACKABLE", "DivergedError", "Trainer"]


@final
class Trainer:
    """A stack of runs under training.

    Args:
        recipes: one per run; they may differ in what `STACKABLE` names.
        dataset: on the device that the runs train on.

    Attributes:
        live: the runs as they stand.
        recipes: one per run.
        data: what they train on.
        runs: their networks.
        history: records of all evaluations so far.

    Raises:
        ValueError: the recipes differ in more than that, or do not fit the data or the number of processes; or a target
            is below what the gates can reach.
    """

    def __init__(self, recipes: Sequence[Recipe], dataset: Dataset) -> None:
        self.live = Live(recipes, dataset)
        self.recipes, self.recipe, self.data = self.live.recipes, self.live.recipe, dataset
        self.runs, self.history, self.device = self.live.runs, self.live.history, self.live.device

    # ---- where it stands ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self.live.epoch

    @property
    def position(self) -> int:
        """Steps that are done in the present epoch."""
        return self.live.position

    @property
    def steps_done(self) -> int:
        """Steps of every run so far."""
        return self.live.steps_done

    @property
    def steps_in_all(self) -> int:
        """Steps of every run to its end."""
        return self.live.policy.steps_in_all

    @property
    def gates_have_learned(self) -> bool:
        """Whether it is time to `turn`: the epochs with gates that learn are over, and something comes after them."""
        return self.live.policy.turns(self.live.epoch, self.live.step.fixed)

    @property
    def done(self) -> bool:
        """Whether the runs are at their end."""
        return self.live.policy.done(self.live.epoch, self.live.step.fixed)

    @property
    def event(self) -> dict[str, Any] | None:
        """What shrinking or settling did, until it is in the history."""
        return self.live.event

    # ---- one epoch ---------------------------------------------------------------------------------------------------

    def train_epoch(self) -> Iterator[Tensor]:
        """The rest of an epoch, step by step: yields the task losses (runs,) after each; nothing at the end."""
        if self.done:
            return
        live, started = self.live, time.perf_counter()
        live.runs.train()
        if live.gates:  # in tuning the gates stay at their test-time values and only the weights move
            live.runs.template.network.training = not live.step.fixed
        set_rates(live.optimizer, *live.policy.rates(live.epoch))
        order, noise = live.supply.epoch(live.epoch)
        while live.position < live.policy.steps_per_epoch:
            loss = live.take(order[live.position], noise[live.position])
            live.ascents += 1
            live.summed += 1
            live.position += 1
            live.seconds, started = live.seconds + time.perf_counter() - started, time.perf_counter()
            yield loss
            started = time.perf_counter()
        live.epoch, live.position = live.epoch + 1, 0
        parallel.from_first(list(live.runs.template.buffers()))  # batch norm saw another share in each process
        parallel.refuse_different({**live.runs.values(), "multiplier": live.lagrangian.multiplier})
        live.step.losses.tolist()  # waits for the device
        events.after_epoch(live)
        live.seconds += time.perf_counter() - started

    def turn(self) -> None:
        """Ends the epochs with gates that learn, as the recipe says."""
        events.turn(self.live)

    def part(self) -> None:
        """Lets go of the other processes, if there are any: it can be looked at, and can take no further step."""
        self.live.step.part()

    # ---- looking at it -----------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, Tensor]:
        """Test error in percent, expected and kept cost fractions, open gates, of every run."""
        return evaluation.evaluate(self.live)

    def recalibrate(self) -> None:
        """Gathers batch-norm statistics anew, if the recipe says so."""
        evaluation.recalibrate(self.live)

    def note(self) -> list[dict[str, Any]]:
        """Evaluates every run and adds a record of each to the history: these records.

        Raises:
            DivergedError: the loss of a run is not a number.
        """
        return evaluation.note(self.live)

    def finish(self) -> None:
        """The last thing before the last record: batch-norm statistics, and what they and averaging have bought."""
        evaluation.finish(self.live)

    def results(self) -> list[dict[str, Any]]:
        """What came out of every run: recipe, errors, and the network that `compact` gives."""
        return evaluation.results(self.live)

    def network(self, run: int) -> nn.Module:
        """One run's network with the parameters that count, in evaluation: a `Gated`, or the dense network."""
        return self.live.network(run)

    # ---- to disk and back --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the rest of the runs depends on, as tensors and plain data."""
        return saver.state(self.live)

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up a state; the history is the caller's to bring."""
        saver.load(self.live, state)

    def save(self, folder: Folder) -> None:
        """Writes a checkpoint; of several processes, the first does."""
        saver.save(self.live, folder)

    def resume(self, folder: Folder, *, cut: bool = True) -> bool:
        """Takes up the newest checkpoint of a folder, if there is one; says whether there was."""
        return saver.resume(self.live, folder, cut=cut)
