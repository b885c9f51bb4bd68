"""`Budget`: what a network may cost, as one object in anyone's training loop.

It brings together what the rest of the library has: constraints with multipliers that set themselves, a target that
falls, gates that settle, units that leave the live network, a small network that trains on. The loop, its data, its
loss, its optimizer and its schedule are the user's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ellzero.gated.module import Gated
from ellzero.gated.taking import refuse_replaced
from ellzero.objectives import costs
from ellzero.objectives.checking import check_count, check_number
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.costs import Cost, name_of
from ellzero.objectives.duals import GeometricWarmup, SelfPacedAscent
from ellzero.objectives.watching import moves
from ellzero.out import shrinking
from ellzero.out.bounding.driving import Driver, rate_of, refuse_without, remind
from ellzero.out.bounding.pacing import FALLING, gate_rate, steps_of_learning
from ellzero.out.bounding.targets import shares
from ellzero.out.bounding.telling import measures, percent, told
from ellzero.out.compaction import compact
from ellzero.out.finalization import Uniform, refuse_unreachable
from ellzero.out.latency.bounds import in_words_of, measured, said, tables, take_tables
from ellzero.out.latency.cost import Latency
from ellzero.out.settling import fold_in, recalibrate, settle, warn_of_haste

_DRIVEN: weakref.WeakKeyDictionary[Gated, weakref.ref[Budget]] = weakref.WeakKeyDictionary()


@final
class Budget:
    """What a network may cost at the end, and all that it takes to get there in a loop of your own.

    A run has two phases. First the gates learn, while the target falls from the dense cost to the budget and a
    multiplier per constraint presses the kept cost down to it (`duals.SelfPacedAscent`). Then they settle: units are
    closed or opened until the kept cost is just within the budget, open gates are folded into the weights, and what is
    closed leaves the live network and the optimizer's state. The small network trains on, without noise, to the end.

    Args:
        gated: the network.
        at_most: budgets of costs of your own, `{cost: fraction of the dense cost}`.
        steps: optimizer steps of the whole run. Further steps train the small network on.
        macs: fraction of the dense MACs in (0, 1], or fractions by pattern, as in `Constraint`.
        params: the same of parameters.
        l0_norm: the same of the weights that gates count.
        units: the same of units.
        latency: fraction of the dense network's time, which is measured first (`Latency.measure`) on the device, batch
            and type of the example. For others, put `{Latency.measure(gated, …): 0.5}` into `at_most`.
        learning: the share of the steps in which gates learn; if `None` two fifths, and less in a long run (`pacing`).
        gate_lr: the learning rate of the gates, as for Adam; one that fits the steps if `None`.
        shrink: whether closed units leave the live network when the gates settle. Where something else holds on to the
            parameters (a process group, a hook on a gradient, a list of the optimizer's own), or cannot be sliced alive
            (a grouped convolution that is not depthwise, the memory of Adafactor), they stay as masks until `finish`,
            with the same result: `print(budget)` says why.
        ema: decay of an average of the small network's weights, which `finish` hands over in their place; none if
            `None`.
        uniform: "blocks" if layers whose names differ in numbers alone are to keep as many units, as stock classes of
            Hugging Face ask for (`finalize`); these pick no inputs (`l0.shrinkable(inputs=False)`).

    Attributes:
        done: optimizer steps so far.
        settles: the step after which gates settle.
        constraints: the Lagrangian terms, one per cost.

    Raises:
        ValueError: there is no budget, one is not a fraction or below what the gates can reach, `steps` is too small,
            or the network has another budget already, or weights that were quantised after `attach`.

    Example:
        >>> import torch, ellzero as l0
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> gated = l0.attach(model, (torch.randn(1, 4),))
        >>> budget = l0.Budget(gated, macs=0.5, steps=20)
        >>> optimizer = torch.optim.Adam(gated.param_groups(lr=1e-3))
        >>> budget.drive(optimizer)  # doctest: +ELLIPSIS
        Budget(macs at most 50 %: learning, step 0 of 20, ...)
        >>> for _ in range(20):
        ...     loss = gated(torch.randn(16, 4)).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> budget.finish()
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=2, bias=True)
        )
    """

    def __init__(
        self,
        gated: Gated,
        at_most: Mapping[Cost, float | Mapping[str, float]] | None = None,
        *,
        steps: int,
        macs: float | Mapping[str, float] | None = None,
        params: float | Mapping[str, float] | None = None,
        l0_norm: float | Mapping[str, float] | None = None,
        units: float | Mapping[str, float] | None = None,
        latency: float | Mapping[str, float] | None = None,
        learning: float | None = None,
        gate_lr: float | None = None,
        shrink: bool = True,
        ema: float | None = None,
        uniform: Uniform = None,
    ) -> None:
        if not isinstance(gated, Gated):
            raise TypeError(f"`gated` must be what `attach` returned, got {type(gated).__name__}")
        named = {costs.macs: macs, costs.params: params, costs.l0_norm: l0_norm, costs.units: units, Latency: latency}
        _check(gated, learning, gate_lr, ema)
        self.steps, self.bounds = check_count("steps", steps), measured(gated, said(at_most or {}, named))
        self.settles = steps_of_learning(steps) if learning is None else max(1, round(learning * steps))
        self.gate_lr = gate_rate(self.settles) if gate_lr is None else float(gate_lr)
        self.gated, self.shrink, self.ema, self.uniform, self.done = gated, shrink, ema, uniform, 0
        dual, fall = SelfPacedAscent(self.settles, self.gate_lr), GeometricWarmup(max(1.0, FALLING * self.settles))
        terms = partial(Constraint, on="kept", dual=dual, warmup=fall)
        self.constraints = []
        for cost, bound in self.bounds.items():
            with in_words_of(cost, named):
                self.constraints.append(terms(cost, bound).bind(gated))
                refuse_unreachable(gated, bound, cost, uniform=uniform)
        _claim(gated, self)
        gated.gate_lr, self._start = self.gate_lr, moves(gated)  # to see whether anything moves the gates
        self.masked: str | None = None  # why closed units stay in the live network until the end
        self._driver: Driver | None = None
        self._adam: dict[str, Any] | None = None  # of a run that is taken up, until an optimizer is driven
        self._resumed = False  # as a smaller network, with an optimizer that nobody has looked at yet
        self._average: AveragedModel | None = None
        self._finished, self._termed = False, False  # ended; the term has been asked for since the last step
        self._since = 0  # the step that this object began with: not the first in a copy, or where a run is taken up

    @property
    def phase(self) -> str:
        """What it does: "learning" while gates learn, "tuning" when they have settled, "finished" after `finish`."""
        return "finished" if self._finished else "tuning" if self.gated.fixed else "learning"

    def drive(self, optimizer: torch.optim.Optimizer) -> Self:
        """Lets every step of an optimizer move the budget too: the loop stays as it is.

        Before each step the gradient of the Lagrangian's term is added to that of the gates, as `term()` in the loss
        does. Adam moves the gates, whatever the optimizer is, at the budget's rate or the one that `param_groups` was
        told: a schedule, momentum and weight decay do not reach them. Then multipliers, target and phase move. So a
        step that a gradient scaler leaves out is left out here, and several backwards make one step.

        Args:
            optimizer: of `gated.param_groups()`; gates and weights must both be in it.

        Raises:
            ValueError: the optimizer does not have all gates and weights, or it has been driven already.
        """
        if self._driver is not None:
            raise ValueError("`optimizer` must be driven once, got another call of `drive`: it may get other groups")
        self._driver = Driver(self.gated, optimizer, self._term, self._move, self.gate_lr)
        if self._adam is not None and self.phase == "learning":
            self._driver.adam.load_state_dict(self._adam)
        self._resumed = False  # the driver has looked
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_driver": None, "_adam": _moments(self)}  # an optimizer's copy has no hooks

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._since = self.done
        if not self._finished:
            _claim(self.gated, self)

    def term(self) -> Tensor:
        """The Lagrangian's term, to add to the loss where no optimizer is driven; 0 when the gates have settled."""
        if self._driver is not None:
            raise RuntimeError("`term()` must not be added where `drive` does it already: it would count twice")
        term, self._termed = self._term(), True  # in the tuning too: who asks for it is about to call `step`
        return self.gated.tables["ends"].new_zeros(()) if term is None else term

    def _term(self) -> Tensor | None:
        if self.phase != "learning":
            return None
        if not self.gated.training:
            raise RuntimeError("gates learn in training mode alone: call `gated.train()` after each evaluation")
        self._termed = True
        terms = [constraint(self.gated) for constraint in self.constraints]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Moves multipliers, target and phase, after each `optimizer.step()`, where no optimizer is driven.

        Args:
            optimizer: what is to forget the closed units when the gates settle; without one they stay as masks.
        """
        if self._driver is not None:
            raise RuntimeError("`step()` must not be called where an optimizer is driven: its own steps do it")
        if self.phase == "learning" and not self._termed:
            raise RuntimeError("`step()` must follow a loss with `+ budget.term()`, got none since the last step")
        if self._resumed:
            if optimizer is None:
                raise RuntimeError("`step()` must get the optimizer, as before the run was stopped: the network shrank")
            refuse_without(self.gated, optimizer)
            self._resumed = False
        self._move(optimizer)

    def _move(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if self.phase == "learning":
            for constraint in self.constraints:
                constraint.ascend()
        self.done, self._termed = self.done + 1, False
        if self.done == self.settles and self.phase == "learning":
            self.settle(optimizer)
        elif self._average is not None:
            self._average.update_parameters(self.gated.model)

    def settle(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Ends the gates' learning now; a step does it when it is time."""
        if self.phase != "learning":
            raise RuntimeError(f"`settle()` must come while gates learn, and this budget is {self.phase}")
        optimizer = self._driver.optimizer if optimizer is None and self._driver is not None else optimizer
        _warn_of_haste(self, optimizer)
        settle(self.gated, self.bounds, uniform=self.uniform)
        _fix(self.gated)
        self.masked = _take_out(self.gated, optimizer) if self.shrink else "`shrink=False`"
        self._average = _averaged(self.gated.model, self.ema)

    def finish(self, batches: Iterable[Any] | None = None) -> nn.Module:
        """The small network: compact, proven to compute what the gated one does.

        Args:
            batches: if given, batch-norm statistics are gathered anew on them: needed with `ema`, and where the last
                steps were few.

        Raises:
            RuntimeError: the gates have not settled yet, or a state from before was loaded since. Nothing is lost.
        """
        _refuse_unsettled(self)
        _hand_over(self.gated, self._average, masked=self.masked is not None)
        self._average = None  # it is the network now, whatever follows
        if batches is not None:
            recalibrate(self.gated, batches)  # with its gates: they are masks where no unit has left
        nn.Module.train(self.gated, False)  # `compact` warns of noise in the statistics, once
        small = compact(self.gated)
        _let_go(self.gated, self._driver)
        self._finished = True
        return small

    def metrics(self) -> dict[str, float]:
        """What to log: kept cost and target, as fractions of the dense cost, and multiplier of every constraint."""
        pairs = zip(self.constraints, self.bounds.values(), strict=True)
        return {name: value for pair in pairs for name, value in measures(*pair, self.gated)}

    def __repr__(self) -> str:
        return _shown(self)

    def state_dict(self) -> dict[str, Any]:
        """All that a stopped loop needs beside the states of `gated` and the optimizer: tensors and plain data."""
        return {
            **_identity(self),
            "done": self.done,
            "fixed": self.gated.fixed,
            "masked": self.masked,
            "units": None if self.gated.taken is None else torch.as_tensor(self.gated.taken.units),
            "constraints": [constraint.state_dict() for constraint in self.constraints],
            "adam": _moments(self),
            "average": None if self._average is None else self._average.state_dict(),
            "tables": tables(self.bounds),
        }

    def load_state_dict(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Takes up a stopped run. Load it first, then the states of `gated` and of the optimizer: it makes both small.

        Args:
            state: of `state_dict()`.
            optimizer: one that is not driven and is there already; one that is made afterwards needs no mention.

        Raises:
            ValueError: the state is of another budget or version, or from before these gates settled; nothing is
                changed.
        """
        optimizer = optimizer if self._driver is None else self._driver.optimizer
        _refuse_other(self, state, optimizer)
        _take_up(self, state, optimizer)


def _warn_of_haste(budget: Budget, optimizer: torch.optim.Optimizer | None) -> None:
    why = "too few steps to choose by; train longer or with a larger `gate_lr`"
    mover = optimizer if budget._driver is None else budget._driver.adam
    travelled = budget.done * rate_of(budget.gated, mover, budget.gate_lr)
    if moves(budget.gated) == budget._start:
        why, travelled = "nothing has moved them; give the optimizer `gated.param_groups(…)`, not the model's own", 0.0
    warn_of_haste(budget.gated, budget.bounds, travelled, f"{budget.done} steps", why)


def _identity(budget: Budget) -> dict[str, Any]:
    bounds = {name_of(cost): bound for cost, bound in budget.bounds.items()}
    pace = repr(budget.constraints[0].dual)  # at another one a run would go on in silence
    same = {key: vars(budget)[key] for key in ("steps", "settles", "gate_lr", "ema", "uniform")}
    return {"bounds": bounds, **same, "pace": pace}


def _moments(budget: Budget) -> dict[str, Any] | None:
    return budget._adam if budget._driver is None else budget._driver.adam.state_dict()


def _refuse_other(budget: Budget, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    if missing := sorted(budget.state_dict().keys() - state.keys()):
        raise ValueError(f"`state` must be of a `Budget` of this version, got one without `{'`, `'.join(missing)}`")
    for key, mine in _identity(budget).items():
        if (other := state[key]) != mine:
            raise ValueError(f"`state` must be of an equal budget, got one whose `{key}` is {other}, not {mine}")
    if budget.gated.fixed and not state["fixed"]:
        raise ValueError(f"`state` is of step {state['done']}, before the gates settled: it fits a fresh network")
    if state["units"] is not None:
        plan = shrinking.planned(budget.gated, state["units"].cpu().numpy())
        shrinking.refuse_listeners(budget.gated, plan, optimizer)
        if optimizer is not None and budget.gated.taken is None:
            then = "; load this state first, then those of `gated` and of the optimizer"
            shrinking.refuse_uncut(budget.gated, budget.gated, optimizer, then)


def _take_up(budget: Budget, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    take_tables(budget.bounds, state["tables"])
    for constraint, saved in zip(budget.constraints, state["constraints"], strict=True):
        constraint.load_state_dict(saved)
    budget.done, budget.masked, budget._adam = state["done"], state["masked"], state["adam"]
    budget._since = budget.done
    if state["fixed"]:
        _fix(budget.gated)
    budget._resumed = optimizer is None and state["units"] is not None
    if state["units"] is not None:
        _take_out_again(budget.gated, optimizer, state["units"].cpu())
    if state["average"] is not None and (average := _averaged(budget.gated.model, budget.ema)) is not None:
        average.load_state_dict(state["average"])
        budget._average = average
    if budget._driver is not None and budget._adam is not None:
        budget._driver.adam.load_state_dict(budget._adam)


def _refuse_unsettled(budget: Budget) -> None:
    if budget.phase == "learning":
        do = "train on, by the optimizer that is driven if one is, or call `settle()` first"
        if budget.done == budget._since:
            do = "call `budget.drive(optimizer)` before the loop"
            do = do if budget._driver is None else "the optimizer that it drives has taken no step"
        raise RuntimeError(
            f"`finish()` must come after the gates settled, in step {budget.settles}, got {budget.done} steps; {do}"
        )
    for cost, bound in budget.bounds.items():
        for name, share, most in shares(budget.gated, cost, bound):
            if share > most * (1 + 1e-6):  # room for rounding
                raise RuntimeError(
                    f"the network keeps {100 * share:.4g} % of `{name}`, more than {100 * most:.4g} %: "
                    "a state from before the gates settled was loaded into it; load one from after"
                )


def _check(gated: Gated, learning: object, gate_lr: object, ema: object) -> None:
    refuse_replaced(gated.model, gated.graph, gated.placements)
    if gated.fixed or not any(p.requires_grad for p in gated.gates.parameters()):
        why = "they are fixed: attach to its model anew" if gated.fixed else "they have nothing to learn"
        raise ValueError(f"`gated` must have gates that learn, and {why}")
    check_number(
        "`learning` must be a share of the steps in (0, 1]", 1 if learning is None else learning, lambda x: 0 < x <= 1
    )
    check_number("`gate_lr` must be a positive number", 1.0 if gate_lr is None else gate_lr, lambda x: x > 0)
    check_number("`ema` must be a decay in (0, 1)", 0.5 if ema is None else ema, lambda x: 0 < x < 1)


def _claim(gated: Gated, budget: Budget) -> None:
    if (other := _DRIVEN.get(gated)) is not None and other() is not None:
        raise ValueError("`gated` must have one budget, got a second: name all costs in one")
    _DRIVEN[gated] = weakref.ref(budget)
    remind(gated, partial(_waits, weakref.ref(budget)))


def _waits(here: weakref.ref[Budget]) -> bool:
    """Whether no step has moved a budget that has something to move, gates or an average, nor is about to."""
    if (budget := here()) is None or budget._driver is not None or budget._termed:
        return False
    return budget.done == budget._since and (budget.phase == "learning" or budget._average is not None)


def _let_go(gated: Gated, driver: Driver | None) -> None:
    if driver is not None:
        driver.stop()
    _DRIVEN.pop(gated, None)
    gated.still = False


def _fix(gated: Gated) -> None:
    gated.fix()
    gated.still = True
    if not shrinking.in_a_group():  # there every rank waits for the gradient of each parameter that it began with
        for p in gated.gates.parameters():
            p.requires_grad_(False).grad = None  # no optimizer moves it, no decay reaches it


def _take_out(gated: Gated, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Takes closed units out of the live network and the optimizer's state, or says why they stay."""
    if optimizer is None:
        return "`step()` was given no optimizer"
    if shrinking.in_a_group():
        return "a process group holds on to the parameters"
    plan = shrinking.propose(gated, ~gated.opens().cpu().numpy())
    try:
        shrinking.carry_out(gated, gated, plan, optimizer, {})
    except ValueError as error:  # a grouped convolution, say; nothing has changed
        return str(error)
    return None


def _take_out_again(gated: Gated, optimizer: torch.optim.Optimizer | None, units: Tensor) -> None:
    if gated.taken is not None and bool((torch.as_tensor(gated.taken.units) == units).all()):
        return
    plan = shrinking.planned(gated, units.numpy())
    if optimizer is None:
        gated.shrink(plan)
    else:
        shrinking.carry_out(gated, gated, plan, optimizer, {})


def _averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    average.update_parameters(model)
    return average


def _hand_over(gated: Gated, average: AveragedModel | None, *, masked: bool) -> None:
    """Gives the model the weights that come out."""
    if average is not None:
        gated.model.load_state_dict(average.module.state_dict())
    if masked and not gated.on_activations:
        fold_in(gated)  # momentum has moved what is closed: the model by itself would not be the gated one


def _shown(budget: Budget) -> str:
    goal = ", ".join(f"{name_of(cost)} at most {percent(bound)}" for cost, bound in budget.bounds.items())
    pairs = zip(budget.constraints, budget.bounds.values(), strict=True)
    state = "; ".join(told(*pair, budget.gated) for pair in pairs)
    masked = f"; masks until the end: {budget.masked}" if budget.masked else ""
    return f"Budget({goal}: {budget.phase}, step {budget.done} of {budget.steps}, {state}{masked})"
