"""The one training loop: from recipes and data to trained gated networks, with their history.

`Trainer` holds all that a run is made of (weights, gates, multipliers, optimizer, average, position), and `step` is
the whole method: draw, run, add the objective, backward, descend, ascend. It trains one run or a stack of runs that
differ in seed and objective; on a GPU the step is captured once and replayed. All that is random in an epoch is a
function of (seed, epoch), so a run can be taken up again anywhere, and does not depend on the others in its stack.
This file knows recipes and data; how files are written is in `checkpoint.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ellzero import costs, gates, objectives, placements, zoo
from ellzero.compact import finalize
from ellzero.data import Dataset, epoch_generator, scaled
from ellzero.gated import Gated, attach
from ellzero.recipes import Recipe
from ellzero.runs import Objective, Runs

COSTS = {"l0_norm": costs.l0_norm, "params": costs.params, "macs": costs.macs}
STACKABLE = {"name", "penalty", "at_most", "seed"}  # what runs of one stack may differ in


def build(recipe: Recipe, dataset: Dataset, device: torch.device) -> tuple[Gated | None, nn.Module]:
    """The network of a recipe, initialised by its seed, and its gates (none for a dense one)."""
    torch.manual_seed(recipe.seed)
    model = network(recipe, len(dataset.classes))
    if recipe.init == "2018":
        zoo.initialize_2018(model)
    else:
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        rates = {p: r for p, r in recipe.drop_rates.items() if any(fnmatchcase(n, p) for n in layers)}
        zoo.initialize_2021(model, rates if recipe.placement == "per_layer" else {})
    if recipe.placement is None:
        return None, model.to(device)
    rule = gates.Median() if recipe.rule == "median" else gates.Noiseless()
    makers = {p: partial(gates.HardConcreteGate, drop_rate=rate, rule=rule) for p, rate in recipe.drop_rates.items()}
    where = placements.per_layer if recipe.placement == "per_layer" else placements.shrinkable
    example = scaled(dataset.train_x[:2].cpu())
    gated = attach(model, (example,), gate=makers, where=where)
    return gated.to(device), model


def network(recipe: Recipe, classes: int) -> nn.Module:
    """The network that a recipe names, without gates."""
    if recipe.network == "lenet300":
        return zoo.LeNet300(classes)
    if recipe.network == "lenet5":
        return zoo.LeNet5(classes)
    _, depth, width = recipe.network.split("-")
    return zoo.WideResNet(int(depth), int(width), classes, dropout=recipe.dropout)


def _refuse_unknown(recipe: Recipe) -> None:
    """Refuses what a recipe may ask for and this loop does not do: a setting that is silently left out is a wrong
    result.
    """
    asked = {
        "milestones": bool(recipe.milestones) and recipe.decay != 1.0,
        "l2": recipe.l2 > 0,
        "augment": recipe.augment,
        "recalibrate": recipe.recalibrate,
        "precision": recipe.precision != "float32",
        "compile": recipe.compile is True,
    }
    unknown = [name for name, is_asked in asked.items() if is_asked]
    if unknown:
        raise ValueError(f"`{recipe.name}` asks for {', '.join(unknown)}, which the training loop does not do yet")


class Trainer:
    """A stack of runs under training.

    Args:
        recipes: one per run; they may differ in name, seed, penalty and target.
        dataset: on the device that the runs train on.

    Raises:
        ValueError: the recipes differ in more than that.
    """

    def __init__(self, recipes: Sequence[Recipe], dataset: Dataset) -> None:
        self.recipes, self.data = list(recipes), dataset
        self.recipe = recipe = recipes[0]
        for other in recipes[1:]:
            a, b = recipe.to_dict(), other.to_dict()
            differ = [k for k in a if a[k] != b[k] and k not in STACKABLE]
            if differ:
                raise ValueError(f"`recipes` of one stack must agree in {', '.join(differ)}")
        _refuse_unknown(recipe)
        self.device = dataset.train_x.device
        built = [build(r, dataset, self.device) for r in recipes]
        self.parts = self._parts(built[0][0])
        self.runs = Runs([Objective(g, m, self.parts) for g, m in built]).to(self.device)
        self.steps_per_epoch = len(dataset.train_x) // recipe.batch
        self._objective()
        self._optimizer()
        self.epoch = self.position = self.ascents = 0
        self.tuning = False
        self.history: list[dict[str, Any]] = []
        self._captured: Any = None

    # ---- the objective as a few small matrices -----------------------------------------------------------------------

    def _parts(self, gated: Gated | None) -> list[tuple[costs.Cost, str | None]]:
        if gated is None:
            return []
        cost = COSTS[self.recipe.cost]
        by_gates: list[tuple[costs.Cost, str | None]] = [(costs.l0_norm, name) for name, _ in gated.named_gates()]
        if cost is costs.l0_norm:
            return by_gates
        patterns = dict.fromkeys(p for r in self.recipes for p in self._groups(r))  # of modules, for these costs
        return [*by_gates, *((cost, None if p == "*" else p) for p in patterns)]

    def _objective(self) -> None:
        """Penalty, constraints and targets of every run as tensors over the cost vector."""
        size, n = self.runs.size, len(self.parts)
        names = [only for cost, only in self.parts if cost is costs.l0_norm]
        dense = torch.tensor(self.runs.template.dense, dtype=torch.float64)
        groups = [self._groups(r) for r in self.recipes]
        count = max([len(g) for g in groups] + [1])
        penalty, member = torch.zeros(size, n, dtype=torch.float64), torch.zeros(size, count, n, dtype=torch.float64)
        target = torch.ones(size, count, dtype=torch.float64)
        for run, recipe in enumerate(self.recipes):
            if recipe.penalty is not None:
                c = recipe.penalty if isinstance(recipe.penalty, dict) else {"*": recipe.penalty}
                self._refuse_unmatched("penalty", c, names)
                for k, name in enumerate(names):
                    each = next((v for p, v in c.items() if fnmatchcase(str(name), p)), 0.0)
                    penalty[run, k] = each / len(self.data.train_x) * dense[k]
            for g, (pattern, at_most) in enumerate(groups[run].items()):
                target[run, g] = at_most
                if recipe.cost == "l0_norm":
                    self._refuse_unmatched("at_most", (pattern,), names)
                    chosen = torch.tensor([fnmatchcase(str(name), pattern) for name in names])
                    member[run, g, : len(names)] = dense[: len(names)] * chosen / (dense[: len(names)] * chosen).sum()
                else:
                    member[run, g, self.parts.index((COSTS[recipe.cost], None if pattern == "*" else pattern))] = 1
        self.penalty, self.member, self.target = (t.to(self.device, torch.float32) for t in (penalty, member, target))
        self.multiplier = torch.zeros(size, count, device=self.device)
        self.dual = self._dual()
        self.memory = {name: torch.zeros_like(self.multiplier) for name in self.dual.memory}
        self.clock = torch.zeros(
            (), device=self.device
        )  # steps done, for the target's warm-up and the average's correction

    @staticmethod
    def _refuse_unmatched(argument: str, patterns: Iterable[str], names: Sequence[str | None]) -> None:
        for pattern in patterns:
            if not any(fnmatchcase(str(name), pattern) for name in names):
                known = ", ".join(map(str, names))
                raise ValueError(f"`{argument}` must have patterns that match gates ({known}), got {pattern!r}")

    def _groups(self, recipe: Recipe) -> dict[str, float]:
        if recipe.at_most is None:
            return {}
        return dict(recipe.at_most) if isinstance(recipe.at_most, dict) else {"*": recipe.at_most}

    def _dual(self) -> objectives.AbstractDual:
        r = self.recipe
        if r.dual == "nupi":
            return objectives.NuPI(kp=r.kp, ki=r.dual_lr, nu=r.nu)
        if r.dual == "extrapolation":
            return objectives.ExtrapolationFromPast(r.dual_lr)
        return objectives.GradientAscent(r.dual_lr, r.restarts)

    def _optimizer(self) -> None:
        r = self.recipe
        on_gpu = self.device.type == "cuda"
        gate, weight = self.runs.gates_and_weights()
        groups = [{"params": weight, "lr": self._rate(r.lr)}]
        if gate:
            groups.append({"params": gate, "lr": self._rate(r.lr if r.gate_lr is None else r.gate_lr)})
        if r.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(groups, capturable=on_gpu, fused=on_gpu)
        else:
            self.optimizer = torch.optim.SGD(groups, momentum=r.momentum, nesterov=r.nesterov, weight_decay=r.l2)
        self.average = {n: torch.zeros_like(v) for n, v in self.runs.values().items()} if r.ema is not None else {}

    def _rate(self, lr: float) -> Any:
        return torch.tensor(lr, device=self.device) if self.device.type == "cuda" else lr

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, noise: Tensor, first: bool) -> Tensor:
        """One step of every run: (runs, batch, …), (runs, batch), (runs, samples, gates); returns the task losses."""
        r = self.recipe
        samples = [self.runs(x, y, u) for u in noise.unbind(1)]  # L of eq. 9
        loss, cost = torch.stack([s[0] for s in samples]).mean(0), samples[0][1]
        total = loss
        seen = None
        if self.parts and not self.tuning:
            now = self.target
            if r.target_warmup:
                left = (1 - self.clock / (r.target_warmup * r.epochs * self.steps_per_epoch)).clamp(min=0)
                now = self.target + (1 - self.target) * left
            gap = torch.einsum("sgp,sp->sg", self.member, cost) - now
            total = loss + (self.penalty * cost).sum(1) + (self.multiplier * gap).sum(1)
            seen = gap.detach()
            if r.on == "kept":  # of the parameters that the step starts from, as the expected one
                seen = torch.einsum("sgp,sp->sg", self.member, self.runs.evaluate("kept")) - now
        self.optimizer.zero_grad(set_to_none=self.device.type != "cuda")
        total.sum().backward()
        self.optimizer.step()
        with torch.no_grad():
            if seen is not None:
                self.dual.step(self.multiplier, seen, self.memory, first=first)
            self.clock += 1
            if r.ema is not None:
                torch._foreach_lerp_(
                    list(self.average.values()), [v.detach() for v in self.runs.values().values()], 1 - r.ema
                )
        return loss.detach()

    def _epoch(self) -> tuple[Tensor, Tensor]:
        """The order of the images and the gates' noise of this epoch: functions of (seed, epoch), run by run."""
        gated: Any = self.runs.template.network
        count = gated.liveness.size if self.parts else 1
        order, noise = [], []
        for recipe in self.recipes:
            seed = int(torch.randint(2**62, (), generator=epoch_generator(recipe.seed, self.epoch)))
            generator = torch.Generator(self.device).manual_seed(seed)
            shuffled = torch.randperm(len(self.data.train_x), generator=generator, device=self.device)
            order.append(shuffled[: self.steps_per_epoch * recipe.batch].view(self.steps_per_epoch, recipe.batch))
            shape = (self.steps_per_epoch, recipe.samples, count)
            noise.append(torch.rand(shape, generator=generator, device=self.device))
        return torch.stack(order, 1), torch.stack(noise, 1)

    def train_epoch(self) -> Iterator[Tensor]:
        """The rest of an epoch, step by step: yields the task losses (runs,) after each."""
        self.runs.train()
        self._fix_gates(self.tuning)
        order, noise = self._epoch()
        while self.position < self.steps_per_epoch:
            t = self.position
            if self.device.type == "cuda":
                loss = self._replay(order[t], noise[t])
            else:
                x, y = self._batch(order[t])
                loss = self.step(x, y, noise[t], first=self.ascents == 0)
            self.ascents += 1
            self.position += 1
            yield loss
        self.epoch, self.position = self.epoch + 1, 0

    def _fix_gates(self, fixed: bool) -> None:
        """In tuning the gates stay at their test-time values and only the weights move."""
        if self.parts:
            self.runs.template.network.training = not fixed

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_images"):
            self._images = self.images(self.data.train_x)
        return self._images[index], self.data.train_y[index]

    def images(self, bytes_: Tensor) -> Tensor:
        """Pixels as the recipe scales them."""
        if self.recipe.scaling == "unit":
            return scaled(bytes_)
        return scaled(bytes_, self.data.mean, self.data.std)

    def _replay(self, index: Tensor, noise: Tensor) -> Tensor:
        """The step as a CUDA graph: three steps as they are, then captured once and replayed."""
        if self.ascents < 3 and self._captured is None:
            x, y = self._batch(index)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self.step(x, y, noise, first=self.ascents == 0)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if self._captured is None:
            static = index.clone(), noise.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x, y = self._batch(static[0])
                loss = self.step(x, y, static[1], first=False)
            self._captured = graph, static, loss
        graph, static, captured = self._captured
        static[0].copy_(index)
        static[1].copy_(noise)
        graph.replay()
        out: Tensor = captured
        return out

    # ---- looking at it -----------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Tensor]:
        """The parameters that count: averaged (and bias-corrected) if the recipe says so, else raw."""
        if self.recipe.ema is None or float(self.clock) == 0:
            return {n: v.detach() for n, v in self.runs.values().items()}
        correction = 1 - self.recipe.ema ** float(self.clock)
        return {n: v / correction for n, v in self.average.items()}

    @torch.no_grad()
    def evaluate(self, chunk: int = 1000) -> dict[str, Tensor]:
        """Test error in percent, expected and kept cost fractions, of every run, with the test-time gates."""
        self.runs.eval()
        values = self.values()
        wrong = torch.zeros(self.runs.size, device=self.device)
        for x, y in zip(self.data.test_x.split(chunk), self.data.test_y.split(chunk), strict=True):
            logits = self.runs.evaluate("logits", self.images(x), values=values)
            wrong += (logits.argmax(-1) != y).sum(1)
        out = {"error": 100 * wrong / len(self.data.test_y)}
        if self.parts:
            out["expected"], out["kept"] = self.runs.evaluate("watched", values=values).unbind(1)
        return out

    def network(self, run: int) -> nn.Module:
        """One run's network with the parameters that count, in evaluation: a `Gated`, or the dense network."""
        return self.runs.network(run, self.values()).eval()

    def finalize(self) -> None:
        """Closes units in every run until its kept cost is within its target, and moves on to `tune`."""
        self.tune()
        for run, recipe in enumerate(self.recipes):
            gated: Any = self.runs.network(run)
            for pattern, at_most in self._groups(recipe).items():
                finalize(gated, at_most if pattern == "*" else {pattern: at_most}, COSTS[recipe.cost])
            for name, gate in gated.gates.named_parameters():
                own = self.runs.values()[f"network.gates.{name}"]
                with torch.no_grad():
                    (own if self.runs.size == 1 else own[run]).copy_(gate)

    def tune(self) -> None:
        """From here on the gates are fixed, and only the weights move: both from the parameters that count."""
        values = self.values()
        with torch.no_grad():
            for name, value in self.runs.values().items():
                value.copy_(values[name])
        self.tuning = True
        self._captured = None
        self.recipe = replace(self.recipe, ema=None)
        gate, _ = self.runs.gates_and_weights()
        for group in self.optimizer.param_groups:
            if gate and group["params"][0] is gate[0]:
                group["lr"] = self._rate(0.0)

    # ---- a whole run -------------------------------------------------------------------------------------------------

    def train(self, log: Callable[[dict[str, Any]], None] | None = None, *, every: int = 1) -> None:
        """Trains to the end of the recipe: all epochs, then finalising and tuning if the recipe says so.

        Args:
            log: called with each record of the history, one per run and evaluated epoch.
            every: evaluate after every so many epochs, and after the last.
        """
        r = self.recipes[0]
        while self.epoch < r.epochs + r.finetune_epochs:
            if self.epoch == r.epochs and not self.tuning:
                self.finalize() if r.finalize else self.tune()
            started = time.perf_counter()
            total = torch.zeros(self.runs.size, device=self.device)
            for loss in self.train_epoch():
                total += loss
            means = (total / self.steps_per_epoch).tolist()  # waits for the device
            seconds = time.perf_counter() - started
            if self.epoch % every == 0 or self.epoch in (r.epochs, r.epochs + r.finetune_epochs):
                self.note(means, seconds, log)
        if r.finalize and not self.tuning:
            self.finalize()
            self.note([float("nan")] * self.runs.size, 0.0, log)

    def note(self, losses: Sequence[float], seconds: float, log: Callable[[dict[str, Any]], None] | None) -> None:
        """Evaluates every run and adds a record of each to the history."""
        seen = {k: v.tolist() for k, v in self.evaluate(10_000 if self.device.type == "cuda" else 1000).items()}
        for run, recipe in enumerate(self.recipes):
            record: dict[str, Any] = {"epoch": self.epoch, "run": recipe.name, "seed": recipe.seed, "seconds": seconds}
            record |= {"loss": losses[run], "error": seen["error"][run], "tuning": self.tuning}
            if self.parts:
                record |= {k: dict(zip(COSTS, seen[k][run], strict=True)) for k in ("expected", "kept")}
                record["multiplier"] = self.multiplier[run].tolist()
            self.history.append(record)
            if log is not None:
                log(record)

    def results(self) -> list[dict[str, Any]]:
        """What came out of every run: recipe, errors, and the network that `compact` gives."""
        out = []
        for run, recipe in enumerate(self.recipes):
            mine = self.history[run :: self.runs.size]  # `note` writes one record of each run at a time
            result: dict[str, Any] = {
                "recipe": recipe.to_dict(),
                "seed": recipe.seed,
                "error_best": min(h["error"] for h in mine),
                "error_last": mine[-1]["error"],
                "gates": "averaged" if self.recipe.ema is not None else "raw",
            }
            if self.parts:
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


def architecture(gated: Gated) -> dict[str, int]:
    """What is left in each place that has gates: the papers' "pruned architecture", e.g. 20-25-45-462.

    A fully connected layer's inputs are counted where the layer still reads them, so only in maps that are open.
    """
    plan, graph = gated.plan(refuse=False), gated.graph
    out = {}
    for placement in gated.placements:
        site = placement.multiplies[0]
        if (
            len(placement.multiplies) == 1
            and len(site.dims) == 1
            and graph.shapes[site.tensor][site.dims[0]] == placement.shape[0]
        ):
            rows = plan.rows.get(site.tensor, {}).get(site.dims[0])
            out[placement.name] = placement.shape[0] if rows is None else len(rows)
        else:
            units = graph.labels[site.tensor][site.dims][site.units >= 0]
            out[placement.name] = int(plan.units[np.unique(units)].sum())
    return out
