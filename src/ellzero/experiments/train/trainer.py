"""A stack of runs under training: all that they are made of, and one step of them.

`Trainer.step` is the method: draw, run, add the objective, backward, descend, ascend. A trainer holds one run, or a
stack of runs that differ in seed and objective. All that is random in an epoch is a function of (seed, epoch), so a run
can be taken up again at any step, and does not depend on the others in its stack. The loop around it is `training`.
"""

from __future__ import annotations

import math
import time
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ellzero import gates
from ellzero.experiments.data import Dataset
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.store.randomness import random_state, set_random_state
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.batches import Supply
from ellzero.experiments.train.building import architecture, build
from ellzero.experiments.train.lagrangian import COSTS, Lagrangian, parts
from ellzero.experiments.train.speed import Captured, compiled
from ellzero.experiments.train.stack import Objective, Runs
from ellzero.gated.module import Gated
from ellzero.graph.plan import Plan
from ellzero.objectives import costs
from ellzero.objectives.constraint import Constraint
from ellzero.out import shrinking
from ellzero.out.finalization import finalize, refuse_unreachable, revive

STACKABLE = {"name", "init", "penalty", "cost", "at_most", "seed"}  # what runs of one stack may differ in
# What compilation takes, in steps, and the share of a step that it saves, seen on an H200; those of a stack save more.
_COMPILING = {"lenet": (20_000, 0.4), "wrn": (2_500, 0.13)}
_FAST_WIDTHS = 32  # of which a GPU likes multiples


@final
class DivergedError(Exception):
    """A loss is not a number."""


@final
class Trainer:
    """A stack of runs under training: all that they are made of, and one step of them.

    Args:
        recipes: one per run; they may differ in what `STACKABLE` names.
        dataset: on the device that the runs train on.

    Raises:
        ValueError: the recipes differ in more than that, or do not fit the data or the number of processes; or a target
            is below what the gates can reach.
    """

    def __init__(self, recipes: Sequence[Recipe], dataset: Dataset) -> None:
        self.recipes, self.data = list(recipes), dataset
        self.recipe = recipe = self.recipes[0]
        self.rank, self.ranks = parallel.rank(), parallel.ranks()
        self.device = dataset.train_x.device
        self.steps_per_epoch = len(dataset.train_x) // recipe.batch
        self._refuse()
        built = [build(r, dataset, self.device) for r in recipes]
        torch.manual_seed(int(np.random.SeedSequence([recipe.seed, self.rank]).generate_state(1)[0]))  # of dropout
        first = built[0][0]
        for r in self.recipes:
            if r.at_most is not None:  # a target that the gates cannot reach is refused here, not after the training
                on = "kept" if r.projects else r.on
                Constraint(COSTS[r.cost], r.at_most, on=on).bind(cast(Gated, first))
                if r.projects:
                    refuse_unreachable(cast(Gated, first), r.at_most, COSTS[r.cost])
        self.gates = [] if first is None else [name for name, _ in first.named_gates()]
        self.supply = Supply(recipes, dataset, 1 if first is None else first.liveness.size)
        self.parts = parts(recipes, self.gates) if self.gates else []
        self.runs = Runs([Objective(g, m, self.parts, recipe.precision == "bfloat16") for g, m in built])
        self.runs.to(self.device)
        self._lay_out()
        self.lagrangian = Lagrangian(
            recipes,
            self.parts,
            self.runs.template.dense,
            images=len(dataset.train_x),
            steps=recipe.gate_epochs * self.steps_per_epoch,
            device=self.device,
        )
        self._optimizer()
        self.average = {n: torch.zeros_like(v) for n, v in self.runs.values().items()} if recipe.ema else {}
        self.clock = torch.zeros((), device=self.device)  # steps done, for the target and the average's correction
        self.losses = torch.zeros(self.runs.size, device=self.device)  # summed since the last record
        self.epoch = self.position = self.ascents = self.summed = 0
        self.seconds = 0.0  # of training since the last record
        self.tuning = False  # whether the gates are fixed
        self.averaging = bool(self.average) and not recipe.settles  # where gates settle: from then on
        self.images = len(dataset.train_x)  # in an epoch; those of the run, where noise stands in for them
        self.history: list[dict[str, Any]] = []
        self.closed_for = np.zeros(first.liveness.size if first is not None else 0, dtype=np.int64)  # checks in a row
        self.event: dict[str, Any] | None = None  # what shrinking did, until it is in the history
        self.without: dict[str, list[float]] = {}  # last errors: no averaging nor recalibration, and no recalibration
        self._restart()

    def _refuse(self) -> None:
        r = self.recipe
        for other in self.recipes[1:]:
            a, b = r.to_dict(), other.to_dict()
            differ = [k for k in a if a[k] != b[k] and k not in STACKABLE]
            if differ:
                raise ValueError(f"`recipes` of one stack must agree in {', '.join(differ)}")
        if r.augment and len(self.recipes) > 1:
            raise ValueError("`augment` cannot be in a stack: train its seeds one after the other")
        for name in ("shrink_at", "settle_at", "channels_last"):
            if getattr(r, name) and len(self.recipes) > 1:
                raise ValueError(f"`{name}` cannot be in a stack: train its seeds one after the other")
        if self.steps_per_epoch < 1:
            raise ValueError(f"`batch` must be at most the {len(self.data.train_x)} training images, got {r.batch}")
        if self.ranks > 1 and len(self.recipes) > 1:
            raise ValueError(f"`recipes` must be one for {self.ranks} processes, got {len(self.recipes)}")
        if self.ranks > 1 and r.compile:
            raise ValueError(f"`compile` must be absent or false for {self.ranks} processes, got true")
        if r.batch % self.ranks:
            raise ValueError(f"`batch` must be a multiple of the {self.ranks} processes, got {r.batch}")

    def _optimizer(self) -> None:
        """Weights, and gates with a learning rate of their own. Where eq. 17 acts on weights, no other decay does."""
        r, on_gpu = self.recipe, self.device.type == "cuda"
        template: Any = self.runs.template.network
        counted = {f"network.model.{s.tensor}" for p in template.placements for s in p.counts} if self.gates else set()
        members: dict[str, Any] = self.runs.values()
        gate_rate = r.lr if r.gate_lr is None else r.gate_lr
        # Parameters that are treated alike form one group: each costs a step two launches, and small ones take no less.
        groups: dict[tuple[float, bool, bool], list[str]] = {}
        for name in members:
            is_gate = bool(self.gates) and name.startswith("network.gates.")
            by_eq_17 = r.l2 > 0 and (is_gate or name in counted)
            alike = gate_rate if is_gate else r.lr, not is_gate or r.decay_gates or not r.milestones, by_eq_17
            groups.setdefault(alike, []).append(name)
        settings: list[dict[str, Any]] = [
            {
                "rate": rate,
                "decays": decays,
                "by_eq_17": by_eq_17,
                "params": [members[n] for n in names],
                "weight_decay": 0.0 if by_eq_17 else r.l2,
                "lr": torch.tensor(rate, device=self.device) if on_gpu else rate,  # a captured step reads it each time
            }
            for (rate, decays, by_eq_17), names in groups.items()
        ]
        if r.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(settings, capturable=on_gpu, fused=on_gpu)
        else:
            self.optimizer = torch.optim.SGD(settings, momentum=r.momentum, nesterov=r.nesterov, fused=on_gpu)

    def _lay_out(self) -> None:
        """Puts the channels of convolutions last in memory, if the recipe says so."""
        if self.recipe.channels_last:
            self.runs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _restart(self) -> None:
        """Makes the step anew: as it is, then captured; compiled where that pays."""
        self._sum: Callable[..., Any] = self._lagrange
        self._ascend: Callable[..., Any] = self.lagrangian.ascend
        if self._compiles(self.epoch):
            if self.gates:
                with torch.no_grad():  # finds what patterns mean and remembers it: the compiler cannot trace that
                    self.runs.template.costs()
            self._sum, self._ascend = map(compiled, (self._sum, self._ascend))
        self._forward: nn.Module = self.runs
        if self.ranks > 1:
            with warnings.catch_warnings():  # torch 2.13 has another name for it, which 2.11 does not know
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                # Buffers need not come from the first process before each forward: they do after each epoch.
                self._forward = DistributedDataParallel(self.runs, broadcast_buffers=False)
        self._step: Callable[[Tensor, Tensor], Tensor] = self._as_it_is
        if self.device.type == "cuda" and self.ranks == 1:
            self._step = Captured(self._as_it_is)

    def _compiles(self, epoch: int) -> bool:
        """Whether a step that is made then is compiled: as the recipe says, or if that pays until it is made anew."""
        r = self.recipe
        if r.compile is not None:
            return r.compile
        changes = [e for e in (*r.shrink_at, r.settle_at or 0, r.epochs) if e > epoch]
        steps = (min(changes, default=r.epochs + r.finetune_epochs) - epoch) * self.steps_per_epoch
        takes, saves = self._compiling()
        return self.device.type == "cuda" and self.ranks == 1 and saves * steps * math.sqrt(self.runs.size) >= takes

    def _compiling(self) -> tuple[int, float]:
        return _COMPILING["wrn" if self.recipe.network.startswith("wrn") else "lenet"]

    def _worth_it(self, gain: float) -> bool:
        """Whether steps that are shorter by this share, at best, save more than making the step anew costs.

        A function of the recipe and the epoch: a run that was stopped and is not compiled again must decide alike.
        """
        takes, saves = self._compiling()
        left = self.steps_in_all - self.steps_done
        before = max((e for e in self.recipe.shrink_at if e < self.epoch), default=0)
        was_compiled, compiles = self._compiles(before), self._compiles(self.epoch)
        lost = saves * left if was_compiled and not compiles else 0.0  # too few are left to compile it again
        return gain * left > lost + (takes if compiles else 0)

    def part(self) -> None:
        """Lets go of the other processes, if there are any: it can be looked at, and can take no further step.

        Torch may hang where what ties it to them outlives the process group, as in the traceback of an error.
        """
        if self.ranks > 1:
            del self._forward

    # ---- where it stands ---------------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Steps of every run so far."""
        return self.epoch * self.steps_per_epoch + self.position

    @property
    def steps_in_all(self) -> int:
        """Steps of every run to its end."""
        return (self.recipe.epochs + self.recipe.finetune_epochs) * self.steps_per_epoch

    @property
    def gates_have_learned(self) -> bool:
        """Whether it is time to `turn`: the epochs with gates that learn are over, and something comes after them."""
        r = self.recipe
        return self.epoch >= r.epochs and not self.tuning and (r.finalize or r.finetune_epochs > 0)

    @property
    def done(self) -> bool:
        """Whether the runs are at their end."""
        return self.epoch >= self.recipe.epochs + self.recipe.finetune_epochs and not self.gates_have_learned

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, noise: Tensor, first: bool) -> Tensor:
        """One step of every run: (runs, batch, …), (runs, batch), (runs, draws, gates); returns the task losses."""
        if self.recipe.extra_gradient and not self.tuning:
            here, there = noise.chunk(2, 1)
            with self._look_ahead():
                _, seen = self._gradient(x, y, here)
                self._move(seen, first)
                loss, seen = self._gradient(x, y, there)
        else:
            # Gates that are fixed draw nothing, so there is nothing to draw `samples` times.
            loss, seen = self._gradient(x, y, noise[:, :1] if self.tuning else noise)
        self._move(seen, first)
        with torch.no_grad():
            self.clock += 1
            self.losses += loss
            if self.averaging:
                now = [v.detach() for v in self.runs.values().values()]
                torch._foreach_lerp_(list(self.average.values()), now, 1 - (self.recipe.ema or 0))
        return loss

    def _gradient(self, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of the Lagrangian; the losses, and the violations where there are constraints."""
        self.optimizer.zero_grad()
        total, loss, seen = self._sum(x, y, noise, self.clock)
        total.backward()
        if seen is not None and self.recipe.on == "kept":  # of the parameters that the step began from
            seen = self.lagrangian.gaps(self.runs.evaluate("kept"), self.clock)
        return loss, seen

    def _lagrange(self, x: Tensor, y: Tensor, noise: Tensor, clock: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The Lagrangian, summed over the runs; the losses, and the violations where there are constraints."""
        samples = [self._forward(x, y, u) for u in noise.unbind(1)]  # L of eq. 9
        loss, cost = sum(s[0] for s in samples) / len(samples), samples[0][1]
        if not self.gates or self.tuning:
            return loss.sum(), loss.detach(), None
        terms, gaps = self.lagrangian(cost, clock)
        return (loss + terms).sum(), loss.detach(), gaps.detach()

    def _move(self, seen: Tensor | None, first: bool) -> None:
        """Descends in weights and gates, ascends in the multipliers."""
        self.optimizer.step()
        if seen is not None:
            with torch.no_grad():
                (self.lagrangian.ascend if first else self._ascend)(seen, self.clock, first)

    @contextmanager
    def _look_ahead(self) -> Iterator[None]:
        """Undoes what is done to parameters, multipliers and what the optimizers remember; not to gradients."""
        values = [v.detach() for v in self.runs.values().values()]
        duals = [self.lagrangian.multiplier, *self.lagrangian.memory.values()]
        known = {id(t): t.clone() for t in (*values, *duals, *self._remembered())}
        yield
        with torch.no_grad():
            for tensor in (*values, *duals, *self._remembered()):
                # What was not there before begins at zero: Adam's moments and count, the momentum of SGD.
                tensor.copy_(known[id(tensor)]) if id(tensor) in known else tensor.zero_()

    def _remembered(self) -> list[Tensor]:
        return [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]

    # ---- one epoch ---------------------------------------------------------------------------------------------------

    def train_epoch(self) -> Iterator[Tensor]:
        """The rest of an epoch, step by step: yields the task losses (runs,) after each; nothing at the end."""
        if self.done:
            return
        started = time.perf_counter()
        self.runs.train()
        if self.gates:  # in tuning the gates stay at their test-time values and only the weights move
            self.runs.template.network.training = not self.tuning
        self._set_rates()
        order, noise = self.supply.epoch(self.epoch)
        while self.position < self.steps_per_epoch:
            loss = self._step(order[self.position], noise[self.position])
            self.ascents += 1
            self.summed += 1
            self.position += 1
            self.seconds, started = self.seconds + time.perf_counter() - started, time.perf_counter()
            yield loss
            started = time.perf_counter()
        self.epoch, self.position = self.epoch + 1, 0
        parallel.from_first(list(self.runs.template.buffers()))  # batch norm saw another share in each process
        parallel.refuse_different({**self.runs.values(), "multiplier": self.lagrangian.multiplier})
        self.losses.tolist()  # waits for the device
        if self.epoch == self.recipe.settle_at:
            self.settle()
        elif self.recipe.shrink_at and not self.tuning:
            self._check()
            if self.epoch in self.recipe.shrink_at:
                self.shrink()
        self.seconds += time.perf_counter() - started

    def _check(self) -> None:
        """Counts for every gate at how many checks in a row it was closed at test time."""
        opens = self.runs.evaluate("opens", values=self.values())[0].cpu().numpy()
        self.closed_for = np.where(opens, 0, self.closed_for + 1)

    def shrink(self) -> None:
        """Takes out for good the units that have been closed for long, if that is worth it; notes it as `event`."""
        r, gated = self.recipe, cast(Gated, self.runs.template.network)
        plan = shrinking.propose(gated, self.closed_for >= r.shrink_checks, self._multiple)
        found = shrinking.event(gated, plan)
        gain = 1 - found["macs"]["after"] / found["macs"]["before"]
        self.event = {**found, "skipped": gain < r.shrink_gain or not self._worth_it(gain)}
        if not self.event["skipped"]:
            self._take_out(plan)
            self._restart()

    def settle(self) -> None:
        """Ends the gates' learning on the way: keeps what fits the targets, and trains it on as a plain small network.

        Units are closed, or opened, until the kept cost is just within its target, and at least one of each set is
        open; gates that are open are folded into the weights, what is closed is taken out. The rest of the budget would
        be error for nothing, and so would noise in a network that is small already. Notes it as `event`.
        """
        r, gated = self.recipe, cast(Gated, self.runs.template.network)
        watched = self.runs.evaluate("watched", values=self.values())[0].tolist()  # all that the gates have learned
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
        plan = shrinking.propose(gated, ~gated.opens().cpu().numpy(), self._multiple)
        before = {kind: dict(zip(COSTS, w, strict=True)) for kind, w in zip(("expected", "kept"), watched, strict=True)}
        self.event = {**shrinking.event(gated, plan), **before, "skipped": False, "settled": True}
        self.averaging = bool(self.average) and self.epoch < r.epochs  # there was another network before
        self._take_out(plan)
        self._fix()

    @property
    def _multiple(self) -> int:
        """Of which widths are multiples after an event."""
        return self.recipe.shrink_multiple or (_FAST_WIDTHS if self.device.type == "cuda" else 1)

    def _take_out(self, plan: Plan) -> None:
        gated = cast(Gated, self.runs.template.network)
        shrinking.carry_out(self.runs.template, gated, plan, self.optimizer, self.average, self._correction())

    def _set_rates(self) -> None:
        r = self.recipe
        decayed = r.decay ** sum(m <= self.epoch for m in r.milestones)
        left = 1 - (self.epoch - r.epochs) / r.finetune_epochs if self.epoch > r.epochs else 1.0
        for group in self.optimizer.param_groups:
            rate = group["rate"] * left * (decayed if group["decays"] else 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _as_it_is(self, index: Tensor, noise: Tensor) -> Tensor:
        return self.step(*self.supply.batch(index), noise, first=self.ascents == 0)

    # ---- looking at it -----------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Tensor]:
        """The parameters that count: averaged (and bias-corrected) if the recipe says so, else raw."""
        correction = self._correction()
        if not self.averaging or correction == 0:
            return {n: v.detach() for n, v in self.runs.values().items()}
        return {n: v / correction for n, v in self.average.items()}

    def _correction(self) -> float:
        """What the average is to be divided by: it begins at zero, with the run or where the gates settle."""
        r = self.recipe
        begins = (r.settle_at or 0) * (self.images // r.batch) if r.settles else 0
        return float(1 - (r.ema or 0) ** max(0.0, float(self.clock) - begins))

    @torch.no_grad()
    def evaluate(self, chunk: int | None = None) -> dict[str, Tensor]:
        """Test error in percent, expected and kept cost fractions, open gates, of every run, with the test-time gates.

        In full precision. Of several processes, each looks at its share of the images.
        """
        values = self.values()
        with self._looking():
            out = {"error": self._error(values, chunk)}
        if self.gates:
            out["expected"], out["kept"] = self.runs.evaluate("watched", values=values).unbind(1)
            out["open"] = self.runs.evaluate("counts", values=values)
        return out

    @torch.no_grad()
    def _error(self, values: dict[str, Tensor], chunk: int | None = None) -> Tensor:
        self.runs.eval()
        chunk = chunk or (1000 if self.device.type != "cuda" or self.recipe.network.startswith("wrn") else 10_000)
        wrong = torch.zeros(self.runs.size, device=self.device)
        pairs = list(zip(self.data.test_x.split(chunk), self.data.test_y.split(chunk), strict=True))
        for x, y in pairs[self.rank :: self.ranks]:
            logits = self.runs.evaluate("logits", self.supply.scaled(x), values=values)
            wrong += (logits.argmax(-1) != y).sum(1)
        return 100 * parallel.total(wrong) / len(self.data.test_y)

    def network(self, run: int) -> nn.Module:
        """One run's network with the parameters that count, in evaluation: a `Gated`, or the dense network.

        What shrinking took out is back in it, as zeros behind closed gates, so that it is the network of the recipe.
        """
        network = self.runs.network(run, self.values())
        return (network.expanded() if isinstance(network, Gated) and network.taken is not None else network).eval()

    def note(self) -> list[dict[str, Any]]:
        """Evaluates every run and adds a record of each to the history: these records.

        Raises:
            DivergedError: the loss of a run is not a number.
        """
        losses: list[Any] = [None] * self.runs.size  # after finalising there were no steps
        if self.summed:
            losses = (parallel.total(self.losses.clone()) / self.summed / self.ranks).tolist()
        for recipe, loss in zip(self.recipes, losses, strict=True):
            if loss is not None and not math.isfinite(loss):
                raise DivergedError(
                    f"the loss of `{recipe.name}`, seed {recipe.seed}, is {loss} after epoch {self.epoch}: "
                    f"try a smaller `lr` or `gate_lr`"
                )
        seen = {k: v.tolist() for k, v in self.evaluate().items()}
        records = []
        for run, recipe in enumerate(self.recipes):
            record: dict[str, Any] = {
                "epoch": self.epoch,
                "run": recipe.name,
                "seed": recipe.seed,
                "seconds": self.seconds,
                "loss": losses[run],
                "error": seen["error"][run],
                "tuning": self.tuning,
            }
            if self.gates:
                record |= {k: dict(zip(COSTS, seen[k][run], strict=True)) for k in ("expected", "kept")}
                record["multiplier"] = self.lagrangian.multiplier[run].tolist()
                record["open"] = dict(zip(self.gates, seen["open"][run], strict=True))
                if self.runs.size == 1:  # to draw it; of a stack it would be long
                    record["prob_open"] = self._packed_probabilities()
            if self.event is not None:
                record["shrunk"] = self.event
            if self.without:
                record["error_without"] = {step: errors[run] for step, errors in self.without.items()}
            records.append(record)
        self.event = None
        self.history += records
        self.losses.zero_()
        self.seconds, self.summed = 0.0, 0
        return records

    @torch.no_grad()
    def _packed_probabilities(self) -> dict[str, str]:
        """P(z ≠ 0) of every gate by the name of its set, in 255ths, as bytes in base64."""
        gated: Any = self.runs.template.network
        sizes = [gate.shape.numel() for _, gate in gated.named_gates()]
        flat = self.runs.evaluate("probabilities", values=self.values())[0].mul(255).round().to("cpu", torch.uint8)
        return {name: b64encode(p.numpy()).decode() for name, p in zip(self.gates, flat.split(sizes), strict=True)}

    # ---- the end -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Ends the epochs with gates that learn, as the recipe says."""
        self.finalize() if self.recipe.finalize else self.tune()

    def finalize(self) -> None:
        """Closes units in every run until its kept cost is within its target, and moves on to `tune`."""
        self.tune()
        for run, recipe in enumerate(self.recipes):
            gated: Any = self.runs.network(run)
            if recipe.at_most is not None:
                finalize(gated, recipe.at_most, COSTS[recipe.cost], fill=True)
            for name, gate in gated.gates.named_parameters():
                own = self.runs.values()[f"network.gates.{name}"]
                with torch.no_grad():
                    (own if self.runs.size == 1 else own[run]).copy_(gate)
        self.recalibrate()

    def tune(self) -> None:
        """From here on the gates are fixed, and only the weights move: both from the parameters that count."""
        values = self.values()
        with torch.no_grad():
            for name, value in self.runs.values().items():
                value.copy_(values[name])
        self.averaging = False
        self._fix()

    def _fix(self) -> None:
        self.tuning = True
        for name, value in self.runs.values().items():
            if self.gates and name.startswith("network.gates."):
                value.requires_grad_(False)
                value.grad = None  # the optimizer passes over it
        for group in self.optimizer.param_groups:
            if group["by_eq_17"]:  # with gates that are open or closed, and no more than that
                group["weight_decay"] = self.recipe.l2 * self.recipe.l2_gated_factor
        self._restart()

    def finish(self) -> None:
        """The last thing before the last record: batch-norm statistics, and what they and averaging have bought."""
        if self.averaging:
            raw = {n: v.detach() for n, v in self.runs.values().items()}
            self.without["averaging"] = self._error(raw).tolist()
        if self.recipe.recalibrate and self._norms():
            self.without["recalibration"] = self._error(self.values()).tolist()
        self.recalibrate()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Batch-norm statistics for as long as one looks, if the recipe says so: training goes on as it would have."""
        own = [(buffer, buffer.clone()) for buffer in self.runs.template.buffers()]
        modes = [(m, m.training) for m in (*self.runs.modules(), *self.runs.template.modules())]
        try:
            self.recalibrate()
            yield
        finally:
            for buffer, before in own:
                buffer.copy_(before)
            for module, mode in modes:
                module.training = mode

    def _norms(self) -> list[_BatchNorm]:
        return [m for m in self.runs.template.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    @torch.no_grad()
    def recalibrate(self, batches: int = 200) -> None:
        """Gathers batch-norm statistics anew, with the parameters that count and the gates as they are at test time."""
        norms = self._norms()
        if not norms or not self.recipe.recalibrate:
            return
        self.runs.eval()
        values, order = self.values(), self.supply.epoch(self.epoch)[0]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches
            norm.train()
        for index in order[:batches]:
            self.runs.evaluate("logits", self.supply.batch(index)[0][0], values=values)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()
        parallel.from_first(list(self.runs.template.buffers()))

    def results(self) -> list[dict[str, Any]]:
        """What came out of every run: recipe, errors, and the network that `compact` gives."""
        out = []
        for run, recipe in enumerate(self.recipes):
            mine = self.history[run :: self.runs.size]  # `note` writes one record of each run at a time
            # Where units are closed in the end, what was better before was another network, and too large.
            its_own = ([h for h in mine if h["tuning"]] if recipe.projects else mine) or mine
            result: dict[str, Any] = {
                "recipe": recipe.to_dict(),
                "seed": recipe.seed,
                "error_best": min(h["error"] for h in its_own),
                "error_last": mine[-1]["error"],
                "seconds": sum(h["seconds"] for h in mine),
                "runs_in_stack": self.runs.size,
            }
            if self.gates:
                # Those that settle do so as they are: what is averaged then are weights.
                result["gates"] = "averaged" if recipe.ema is not None and not recipe.settles else "raw"
                gated: Any = self.network(run).cpu()
                fractions = {}
                for name, cost in COSTS.items():
                    whole = costs.dense(cost, gated)
                    with torch.no_grad():
                        both = cost(gated).item() / whole, cost(gated, kept=True).item() / whole
                    fractions[name] = {"dense": whole, "expected": both[0], "kept": both[1]}
                result |= {"architecture": architecture(gated), "costs": fractions}
            out.append(result)
        return out

    # ---- to disk and back --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on, as tensors and plain data."""
        shrunk: dict[str, Any] = {}
        if self.recipe.shrink_at or self.recipe.settle_at is not None:
            units = shrinking.there(cast(Gated, self.runs.template.network))
            shrunk = {"units": torch.as_tensor(units), "closed_for": torch.as_tensor(self.closed_for)}
        return {
            **({"shrinking": shrunk} if shrunk else {}),
            "values": {n: v.detach() for n, v in self.runs.values().items()},
            "buffers": dict(self.runs.template.named_buffers()),
            "optimizer": self.optimizer.state_dict()["state"],
            "average": dict(self.average),
            "lagrangian": self.lagrangian.state(),
            "clock": self.clock,
            "own": [self._own()],
            **{name: getattr(self, name) for name in _COUNTERS},
            "records": len(self.history),
            "ranks": self.ranks,
            "images": self.images,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up a state; the history is the caller's to bring."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.clock.copy_(state["clock"])
        self.images = state["images"]
        if "shrinking" in state:
            self._shrink_like(state["shrinking"])
        if state["tuning"]:
            self._fix()
        else:
            self._restart()
        with torch.no_grad():
            for name, value in self.runs.values().items():
                value.copy_(state["values"][name])
            for name, buffer in self.runs.template.named_buffers():
                buffer.copy_(state["buffers"][name])
            for name, value in self.average.items():
                value.copy_(state["average"][name])
            self.losses.copy_(state["own"][self.rank]["losses"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": dict(state["optimizer"]), "param_groups": groups})
        for parameter, known in self.optimizer.state.items():  # a file has its tensors contiguous
            for key, value in known.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape != torch.Size():
                    known[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        self.lagrangian.load(state["lagrangian"])
        set_random_state(state["own"][self.rank]["random"], self.device)

    def _shrink_like(self, state: Mapping[str, Any]) -> None:
        gated, units = cast(Gated, self.runs.template.network), state["units"].cpu().numpy()
        present = shrinking.there(gated)
        if (units & ~present).any():
            raise ValueError("`state` must be of a network that is no larger than this one: load it into a new trainer")
        if (present & ~units).any():
            self._take_out(shrinking.planned(gated, units))
        self.closed_for = state["closed_for"].cpu().numpy().copy()

    def _own(self) -> dict[str, Any]:
        """What is another in each process."""
        return {"losses": self.losses.cpu(), "random": random_state(self.device)}

    def save(self, folder: Folder) -> None:
        """Writes a checkpoint; of several processes, the first does.

        Raises:
            checkpoint.CheckpointError: it cannot be written. The ones before are still there.
        """
        if self.position:  # in the middle of an epoch the device is behind: what it still has to do is training
            started = time.perf_counter()
            self.losses.tolist()
            self.seconds += time.perf_counter() - started
        state = self.state()
        state["own"] = parallel.gathered(state["own"][0])
        if self.rank == 0:
            digest, plain = _identity(self.recipes)
            checkpoint.save(folder.checkpoints, state, step=self.steps_done, recipe_digest=digest, recipe=plain)

    def resume(self, folder: Folder, *, cut: bool = True) -> bool:
        """Takes up the newest checkpoint of a folder, if there is one.

        Args:
            folder: of these recipes.
            cut: whether records that were written after the checkpoint are removed from the folder.

        Returns:
            Whether there was one.

        Raises:
            checkpoint.CheckpointError: there is one and it cannot be read, is of another recipe or other data, or was
                written by another number of processes or on another kind of device.
            parallel.ProcessError: not all processes find the same.
        """
        digest, plain = _identity(self.recipes)
        there = checkpoint.steps(folder.checkpoints)
        found = checkpoint.load(folder.checkpoints, digest, plain) if there else None
        if len(set(parallel.gathered(found and found.step))) > 1:
            raise parallel.ProcessError(f"all processes must find the same checkpoint in {str(folder.path)!r}")
        if found is None:
            if cut and self.rank == 0:
                folder.cut(0)
            return False
        if self.rank == 0:
            for message in found.messages:  # that a damaged one is passed over
                warnings.warn(message, stacklevel=2)
        images = len(self.data.train_x)
        for what, was, now in (
            ("processes", found.state["ranks"], self.ranks),
            ("images", found.state["images"], images),
        ):
            if cut and was != now:
                raise checkpoint.CheckpointError(
                    f"{str(folder.path)!r} was trained with {was} {what} and goes on with as many, got {now}"
                )
        if not cut:
            found.state["own"] = [self._own()]  # nothing is drawn by looking
        try:
            self.load(found.state)
        except ValueError as error:
            raise checkpoint.CheckpointError(f"{str(found.path)!r} cannot be taken up here: {error}") from error
        self.history = folder.history()[: found.state["records"]]
        if cut and self.rank == 0:
            folder.cut(found.state["records"])
        return True


_COUNTERS = ("epoch", "position", "ascents", "summed", "seconds", "tuning", "averaging")


def _identity(recipes: Sequence[Recipe]) -> tuple[str, list[dict[str, Any]]]:
    return "+".join(r.digest() for r in recipes), [r.to_dict() for r in recipes]
