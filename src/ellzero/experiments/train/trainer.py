"""A stack of runs as it stands: networks, objectives, optimizer, average, and how far they are.

`Trainer` is what a step moves, an event changes, an evaluation looks at, a checkpoint holds and the loop drives: each
in its own file. What is random in an epoch is a function of (seed, epoch): a run can be taken up again at any step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import building, fitting, policy
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.stepping.batches import Supply
from ellzero.experiments.train.stepping.faster import Captured
from ellzero.experiments.train.stepping.optimizing import make_optimizer
from ellzero.experiments.train.stepping.stack import Objective, Runs
from ellzero.experiments.train.stepping.step import Average, Step
from ellzero.gated.module import Gated
from ellzero.graph.plan import Plan
from ellzero.out import shrinking


@final
class DivergedError(Exception):
    """A loss is not a number."""


@final
class Trainer:
    """A stack of runs under training.

    Args:
        recipes: one per run; they may differ in what `policy.STACKABLE` names.
        dataset: on the device that the runs train on.
        times: of a run that is taken up, the table of times that it goes by; without one they are measured.

    Raises:
        ValueError: the recipes differ in more than that, or do not fit the data or the number of processes; or a target
            is below what the gates can reach.
    """

    def __init__(self, recipes: Sequence[Recipe], dataset: Dataset, times: str | None = None) -> None:
        self.recipes, self.data = list(recipes), dataset
        self.recipe = recipe = self.recipes[0]
        self.device = dataset.device
        self.rank, ranks, images = parallel.rank(), parallel.ranks(), dataset.sizes[0]
        policy.refuse(self.recipes, images, ranks)
        plain, on_gpu = fitting.goes_plainly(recipe, dataset), self.device.type == "cuda"
        self.policy = policy.Policy(recipe, images, len(self.recipes), ranks, on_gpu, plain)
        networks = [building.build(r, dataset, self.device) for r in self.recipes]
        torch.manual_seed(int(np.random.SeedSequence([recipe.seed, self.rank]).generate_state(1)[0]))  # of dropout
        self.gates, size = list[str](), 0  # names of those of one run, and how many they are
        self.costs = building.COSTS  # that recipes may bound
        if isinstance(networks[0], Gated):
            self.gates, size = [name for name, _ in networks[0].named_gates()], networks[0].liveness.size
            self.costs = building.known_costs(self.recipes, networks[0], times)
            for r in self.recipes:
                building.refuse_unreachable(r, networks[0], self.costs)
        self.supply = Supply(self.recipes, dataset, 1 if recipe.per_example else max(1, size))
        parts = building.parts(self.recipes, self.gates, self.costs)
        autocast, loss = recipe.precision == "bfloat16", fitting.loss_of(recipe)
        self.runs = Runs([Objective(network, parts, autocast, loss) for network in networks])
        self.runs.to(self.device)
        if recipe.channels_last:
            self.runs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        dense, steps = self.runs.template.dense, recipe.gate_epochs * self.policy.steps_per_epoch
        self.alone = building.steps_alone(recipe, steps)
        self.lagrangian = building.lagrangian(
            self.recipes, parts, dense, images=images, steps=steps, device=self.device, known=self.costs
        )
        self._gate_lr = building.gate_rate(recipe, steps - self.alone)
        self.optimizer = make_optimizer(recipe, self.runs, self.device, self._gate_lr)
        self.average = Average(self.runs.values(), recipe.ema, self.policy.average_begins)
        self.step = Step(recipe, self.runs, self.lagrangian, self.optimizer, self.average, self.device)
        self.epoch = self.position = 0  # epochs that are done, and steps in the present one
        self.summed, self.seconds = 0, 0.0  # steps since the last record, and how long they took
        self.history: list[dict[str, Any]] = []  # records of all evaluations
        self.closed_for = np.zeros(size, dtype=np.int64)  # checks in a row
        self.event: dict[str, Any] | None = None  # what shrinking or settling did, until it is in the history
        self.without: dict[str, list[float]] = {}  # last errors: no averaging nor recalibration, and no recalibration
        values = self.runs.values() if self.gates else {}
        self._learning = [n for n, v in values.items() if n.startswith("network.gates.") and v.requires_grad]
        if self.gates and recipe.dense_epochs:
            self.fix()
        else:
            self.prepare()

    @property
    def gated(self) -> Gated:
        """The network of a single run, of which it is known that it has gates."""
        return self.runs.template.gated

    @property
    def steps_done(self) -> int:
        """Steps of every run so far."""
        return self.epoch * self.policy.steps_per_epoch + self.position

    @property
    def travelled(self) -> float:
        """How far log α of a gate can have gone by Adam, which takes a step of the rate; by SGD nothing is known: 0."""
        by_adam = self.recipe.optimizer != "sgd" or self.recipe.moves_apart
        rate = self.recipe.lr if self._gate_lr is None else self._gate_lr
        return (self.steps_done - self.alone) * rate if by_adam else 0.0

    @property
    def done(self) -> bool:
        """Whether the runs are at their end."""
        return self.policy.done(self.epoch, self.step.fixed)

    def values(self) -> dict[str, Tensor]:
        """The parameters that count: averaged (and bias-corrected) if the recipe says so, else raw."""
        return self.average.counting(self.runs.values(), self.step.clock)

    def network(self, run: int) -> nn.Module:
        """One run's network with the parameters that count, in evaluation: a `Gated`, or the dense network.

        What shrinking took out is back in it, as zeros behind closed gates, so that it is the network of the recipe.
        """
        network = self.runs.network(run, self.values())
        return (network.expanded() if isinstance(network, Gated) and network.taken is not None else network).eval()

    def prepare(self) -> None:
        """Makes the step anew: as it is, then captured; compiled where that pays."""
        if "latency" in self.costs:  # it lays out its tables when it is first asked, which no graph can
            with torch.no_grad():
                self.runs.template.costs()
        self.hold()
        self.step.prepare(compile=self.policy.compiles(self.epoch), ranks=self.policy.ranks)
        self.take: Callable[[Tensor, Tensor], Tensor] = self._take
        if self.policy.captures:
            self.take = Captured(self._take)

    def hold(self) -> None:
        """Lets a run alone know what its gates still multiply while only the weights move, after these were moved."""
        if self.gates and self.runs.alone is not None:
            self.runs.alone.held = self.gated.acting() if self.step.fixed else None

    def _take(self, index: Tensor, noise: Tensor) -> Tensor:
        return self.step(*self.supply.batch(index), noise, first=self.steps_done == self.alone)

    def fix(self, fixed: bool = True) -> None:
        """From here on the gates are fixed, and only the weights move; or the gates learn again."""
        self.step.fixed = fixed
        values = self.runs.values()
        for value in (values[name] for name in self._learning):
            value.requires_grad_(not fixed)
            value.grad = None  # the optimizer passes over it
        for group in self.optimizer.param_groups:
            if group["by_eq_17"]:  # with gates that are open or closed, and no more than that
                group["weight_decay"] = self.recipe.l2 * self.recipe.l2_gated_factor if fixed else 0.0
        self.prepare()

    def take_out(self, plan: Plan) -> None:
        """Takes units out for good: of the network, of what the optimizer remembers and of the average."""
        correction = self.average.correction(self.step.clock)
        shrinking.carry_out(self.runs.template, self.gated, plan, self.optimizer, self.average.tensors, correction)
