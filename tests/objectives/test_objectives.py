"""Penalties, constraints and dual optimizers, on problems whose saddle points and trajectories are known.

The networks here are toys: vectors that stand for gates, with costs in closed form, so that what is tested is the
mathematics of the multipliers and the state they keep. Their dense cost and floor are put in place of those of
`ellzero.objectives.costs`, which have tests of their own. Real networks come last.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import cooper
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.gated.attaching import attach
from ellzero.gated.module import Gated
from ellzero.graph.axes import Graph
from ellzero.objectives import checking, costs
from ellzero.objectives import constraint as module
from ellzero.objectives.constraint import Constraint
from ellzero.objectives.duals import AbstractDual, ExtrapolationFromPast, GradientAscent, LinearWarmup, NuPI
from ellzero.objectives.extragradient import extra_gradient_step
from ellzero.objectives.penalty import Penalty
from support import traced

DUALS = [GradientAscent(0.5, restarts=False), GradientAscent(0.5), NuPI(kp=0.3, ki=0.5), ExtrapolationFromPast(0.5)]


class ToyGate(nn.Module):
    def __init__(self, x: list[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(x, dtype=torch.float64))
        self.shape = self.x.shape

    def check(self, name: str) -> None:
        if not self.x.isfinite().all():
            raise ValueError(f"`{name}.x` must be finite")


class Toy(nn.Module):
    """Named vectors x; `total` is their sum, and the dense one the number of entries there were at first."""

    fixed, drawn, followed, estimated = False, True, True, True
    graph = Graph(axes=(), shapes={})

    def __init__(self, least: float = 0.0, **gates: list[float]) -> None:
        super().__init__()
        self.gates = nn.ModuleDict({name: ToyGate(x) for name, x in gates.items()})
        self.least = least

    def named_gates(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self.gates.items())

    def xs(self, only: str | None = None) -> list[Tensor]:
        return [gate.x for name, gate in self.gates.items() if only is None or fnmatchcase(name, only)]

    def flat(self) -> Tensor:
        return torch.cat([x.detach() for x in self.xs()])

    def asked_once(self) -> AbstractContextManager[None]:
        return nullcontext()


def total(toy: Toy, *, kept: bool = False, only: str | None = None) -> Tensor:
    xs = toy.xs(only) or [torch.zeros(1, dtype=torch.float64)]
    if kept:
        return torch.stack([(x > 0.5).double().sum() for x in xs]).sum()
    return torch.stack([x.sum() for x in xs]).sum()


def named(toy: Toy, *, kept: bool = False, only: str | None = None) -> Tensor:
    """`total` for plain names: `fnmatch` cannot be compiled."""
    xs = [gate.x for name, gate in toy.gates.items() if name == only]
    return (xs[0] > 0.5).double().sum() if kept else xs[0].sum()


def smooth(toy: Toy, *, kept: bool = False, only: str | None = None) -> Tensor:
    return torch.stack([x.sigmoid().sum() for x in toy.xs(only)]).sum()


@pytest.fixture(autouse=True)
def closed_form_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(cost: Callable[..., Tensor], gated: Toy | Gated) -> float:
        if isinstance(gated, Gated):
            return costs.dense(cost, gated)
        return float(sum(x.numel() for x in gated.xs(costs.unwrapped(cost)[1].get("only"))))

    def floor(cost: Callable[..., Tensor], gated: Toy | Gated) -> tuple[float, list[str]]:
        if isinstance(gated, Gated):
            return costs.floor(cost, gated)
        return gated.least * dense(cost, gated), ["stem", "head"]

    monkeypatch.setattr(module, "Gated", (Toy, Gated))
    monkeypatch.setattr(module, "floor", floor)
    monkeypatch.setattr(checking, "dense", dense)


def distance(toy: Toy, *a: list[float]) -> Tensor:
    """½‖x − a‖²."""
    return 0.5 * torch.stack([(x - torch.tensor(b)).square().sum() for x, b in zip(toy.xs(), a, strict=True)]).sum()


def train(toy: Toy, constraint: Constraint, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Tensor:
    """One step in the order of the manual; returns the multipliers after it."""
    optimizer.zero_grad()
    (loss() + constraint(toy)).backward()
    optimizer.step()
    constraint.ascend()
    return constraint.multiplier.clone()


def frozen(state: dict[str, object]) -> dict[str, str]:
    """A state dict as text with all digits, in which NaN equals NaN."""
    return {key: repr(value.tolist() if isinstance(value, Tensor) else value) for key, value in state.items()}


# ---- penalty --------------------------------------------------------------------------------------------------------


def test_penalty_is_weight_times_absolute_cost() -> None:
    toy = Toy(a=[1.0, 2.0], b=[4.0])
    term = Penalty(total, weight=0.25)(toy)
    assert term.item() == 0.25 * 7
    term.backward()
    assert toy.xs()[0].grad.tolist() == [0.25, 0.25]


def test_penalty_per_group_weighs_each_gate_by_its_own_pattern() -> None:
    toy = Toy(conv1=[1.0, 2.0], conv2=[3.0], fc=[5.0])
    term = Penalty(total, weight={"conv?": 10.0, "fc": 0.1})(toy)
    assert term.item() == pytest.approx(10 * 6 + 0.1 * 5, abs=1e-12)
    term.backward()
    assert [x.grad[0].item() for x in toy.xs()] == [10.0, 10.0, 0.1]


def test_aic_and_bic_are_the_criteria_per_sample() -> None:
    n, k, nll = 1000, 7.0, 123.0  # nll is the sum over samples, k the number of parameters
    toy = Toy(a=[k])
    aic, bic = 2 * k + 2 * nll, k * math.log(n) + 2 * nll
    assert nll / n + Penalty.aic(n, total)(toy).item() == pytest.approx(aic / (2 * n), rel=1e-14)
    assert nll / n + Penalty.bic(n, total)(toy).item() == pytest.approx(bic / (2 * n), rel=1e-14)


def test_penalty_presets_count_nonzero_weights() -> None:
    assert Penalty.aic(10).cost is costs.l0_norm
    assert Penalty.bic(10).cost is costs.l0_norm


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, "1", None, True, {}, {"*": -1.0}, {"*": math.nan}])
def test_penalty_refuses_a_weight_that_is_no_price(weight: object) -> None:
    with pytest.raises(ValueError, match="`weight` must be a non-negative number"):
        Penalty(total, weight)


def test_penalty_refuses_what_is_not_a_cost() -> None:
    with pytest.raises(TypeError, match="`cost` must be a function of a Gated such as l0_norm, got 'macs'"):
        Penalty("macs", 1.0)


@pytest.mark.parametrize("n", [0, -1, 2.5, True])
def test_presets_refuse_a_number_of_samples_that_is_none(n: object) -> None:
    with pytest.raises(ValueError, match="`n_samples` must be a positive integer"):
        Penalty.aic(n, total)
    with pytest.raises(ValueError, match="`n_samples` must be a positive integer"):
        Penalty.bic(n, total)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({"conv*": 1.0}, "fc matches none"),
        ({"*": 1.0, "conv*": 2.0}, r"conv matches \['\*', 'conv\*'\]"),
        ({"conv": 1.0, "fc": 1.0, "cnov": 1.0}, "`weight` must name what `total` counts, got 'cnov'"),
    ],
)
def test_penalty_refuses_patterns_that_do_not_share_out_the_gates(weight: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Penalty(total, weight)(Toy(conv=[1.0], fc=[1.0]))


def test_penalty_checks_each_network_anew() -> None:
    penalty = Penalty(total, {"a": 1.0})
    penalty(Toy(a=[1.0]))
    with pytest.raises(ValueError, match="b matches none"):
        penalty(Toy(a=[1.0], b=[1.0]))


# ---- the Lagrangian term --------------------------------------------------------------------------------------------


def test_term_is_equation_6_with_constant_multipliers() -> None:
    toy = Toy(conv=[0.5, 0.75], fc=[1.0, 1.0, 1.0, 0.0])
    constraint = Constraint(total, {"conv": 0.5, "fc": 0.3})
    constraint.multiplier.copy_(torch.tensor([2.0, 3.0]))
    term = constraint(toy)
    assert term.item() == pytest.approx(2 * (1.25 / 2 - 0.5) + 3 * (3 / 4 - 0.3), abs=1e-15)
    assert constraint.violation.tolist() == pytest.approx([1.25 / 2 - 0.5, 3 / 4 - 0.3], abs=1e-15)
    term.backward()
    assert [x.grad[0].item() for x in toy.xs()] == [2 / 2, 3 / 4]
    assert not constraint.multiplier.requires_grad
    assert not list(constraint.parameters())


def test_one_constraint_for_the_model() -> None:
    toy = Toy(a=[1.0, 1.0], b=[0.0, 1.0])
    constraint = Constraint(total, 0.25)
    constraint(toy)
    assert constraint.multiplier.shape == (1,)
    assert constraint.violation.tolist() == [0.5]


def test_per_axis_makes_one_constraint_per_gate_even_with_glob_characters_in_its_name() -> None:
    toy = Toy(**{"w[0]": [1.0, 0.0], "w0": [1.0, 1.0], "b": [0.0]})
    constraint = Constraint(total, 0.25, per_axis=True)
    constraint(toy)
    assert constraint.multiplier.tolist() == [0, 0, 0]
    assert constraint.violation.tolist() == [0.25, 0.75, -0.25]


def test_kept_drives_the_multiplier_and_expected_the_gates() -> None:
    toy = Toy(a=[0.75, 0.625, 0.25, 0.125])  # expected 1.75, kept 2
    constraint = Constraint(total, 0.25, on="kept", dual=GradientAscent(lr=1.0))
    constraint.multiplier.fill_(3.0)
    term = constraint(toy)
    assert term.item() == 3 * (1.75 / 4 - 0.25)
    term.backward()
    assert toy.xs()[0].grad.tolist() == [0.75] * 4
    assert constraint.violation.item() == 2 / 4 - 0.25
    constraint.ascend()
    assert constraint.multiplier.item() == 3.25


def test_calls_outside_training_record_nothing() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5)
    constraint(toy)
    with torch.no_grad():
        toy.xs()[0].fill_(0.25)
        constraint(toy)
    constraint(toy.eval())
    assert constraint.violation.item() == 0.5
    constraint(toy.train())
    assert constraint.violation.item() == -0.25


def test_accumulation_uses_the_last_call_and_ascends_once() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5, dual=GradientAscent(1.0))
    for x in (0.875, 0.75, 0.625):
        toy.xs()[0].data.fill_(x)
        constraint(toy)
    constraint.ascend()
    assert constraint.multiplier.item() == 0.125
    with pytest.raises(RuntimeError, match="must follow a violation recorded since the last one"):
        constraint.ascend()
    assert constraint.multiplier.item() == 0.125


def test_ascend_needs_a_call_in_training() -> None:
    constraint = Constraint(total, 0.5)
    constraint(Toy(a=[1.0]).eval())
    with pytest.raises(RuntimeError, match="in training mode and with gradients enabled"):
        constraint.ascend()


def test_a_violation_that_is_not_finite_leaves_the_multipliers() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5, dual=GradientAscent(1.0))
    constraint(toy)
    constraint.ascend()
    toy.xs()[0].data.fill_(math.nan)
    constraint(toy)
    with pytest.raises(RuntimeError, match=r"`violation` must be finite, got .*nan"):
        constraint.ascend()
    assert constraint.multiplier.item() == 0.5


def test_first_call_may_be_in_inference_mode() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5, per_axis=True, dual=GradientAscent(1.0))
    with torch.inference_mode():
        assert constraint(toy).item() == 0
    constraint(toy).backward()
    constraint.ascend()
    assert constraint.multiplier.item() == 0.5


def test_multipliers_take_the_dtype_of_the_cost() -> None:
    toy = Toy(a=[1.0]).float()
    constraint = Constraint(total, 0.3)
    assert constraint(toy).dtype == constraint.multiplier.dtype == torch.float32
    assert constraint.target.item() == torch.tensor(0.3).item()


def test_multipliers_follow_a_network_that_is_moved_to_another_device() -> None:
    gated = attach(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
    constraint = Constraint(costs.macs, 0.5).bind(gated)
    gated.to("meta")  # as trainers move it to a GPU
    assert constraint(gated).device.type == "meta"
    constraint.ascend()
    assert {buffer.device.type for buffer in constraint.buffers()} == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize("on", ["expected", "kept"])
def test_term_compiles_in_one_graph(on: str) -> None:
    toy, twin = Toy(a=[1.0, 0.5], b=[0.25]), Toy(a=[1.0, 0.5], b=[0.25])
    make = functools.partial(Constraint, named, {"a": 0.5, "b": 0.125}, on=on, dual=GradientAscent(1.0))
    eager, compiled = make(), make().bind(twin)
    term = torch.compile(lambda: compiled(twin), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        a, b = eager(toy), term()
        a.backward()
        b.backward()
        assert a.item() == b.item()
        assert torch.equal(eager.violation, compiled.violation)
        eager.ascend()
        compiled.ascend()
    assert torch.equal(eager.multiplier, compiled.multiplier)
    assert torch.equal(toy.xs()[0].grad, twin.xs()[0].grad)


# ---- dual optimizers: rules by hand ---------------------------------------------------------------------------------


def multipliers(dual: AbstractDual, violations: list[float]) -> list[float]:
    """λ after each step under given violations, from zero."""
    toy = Toy(a=[0.0])
    constraint = Constraint(total, 0.5, dual=dual)
    trace = []
    for violation in violations:
        toy.xs()[0].data.fill_(0.5 + violation)
        constraint(toy)
        constraint.ascend()
        trace.append(constraint.multiplier.item())
    return trace


def test_gradient_ascent_projects() -> None:
    assert multipliers(GradientAscent(0.5, restarts=False), [0.5, 0.25, -0.5, -0.5, 0.25]) == [
        0.25,
        0.375,
        0.125,
        0.0,
        0.125,
    ]


def test_restarts_zero_the_multiplier_where_the_constraint_holds() -> None:
    assert multipliers(GradientAscent(0.5), [0.5, 0.5, -0.125, 0.25, 0.0, 0.5]) == [0.25, 0.5, 0.0, 0.125, 0.0, 0.25]


def test_restarts_leave_other_constraints_alone() -> None:
    toy = Toy(a=[1.0], b=[1.0])
    constraint = Constraint(total, 0.5, per_axis=True, dual=GradientAscent(1.0))
    constraint(toy)
    constraint.ascend()
    toy.xs()[0].data.fill_(0.25)
    constraint(toy)
    constraint.ascend()
    assert constraint.multiplier.tolist() == [0.0, 1.0]


def test_nupi_by_hand() -> None:
    # ξ: 0, 0.125, 0.125 + 0.5·(−0.25 − 0.125) = −0.0625; κ_i·g + κ_p·Δξ, projected
    assert multipliers(NuPI(ki=0.5, kp=2.0, nu=0.5), [0.5, 0.25, -0.25]) == [0.25, 0.25 + 0.125 + 0.25, 0.125]


def test_extrapolation_from_past_by_hand() -> None:
    assert multipliers(ExtrapolationFromPast(0.5), [0.5, 0.25, 0.0, -0.25]) == [0.25, 0.25, 0.125, 0.0]


def test_nupi_without_proportional_term_is_gradient_ascent() -> None:
    violations = [0.5, 0.125, -0.25, 0.375, -0.5]
    assert multipliers(NuPI(ki=0.5, kp=0.0), violations) == multipliers(GradientAscent(0.5, False), violations)


# ---- dual optimizers: saddle points and trajectories ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dual", [d for d in DUALS if d != GradientAscent(0.5)], ids=str)
def test_converges_to_the_saddle_point(dual: AbstractDual) -> None:
    # min ½‖x−a‖² subject to mean(x_g) ≤ ε_g: where mean(a_g) > ε_g, KKT give λ_g = n_g·(mean(a_g) − ε_g) and
    # x_g = a_g − λ_g/n_g; elsewhere x_g = a_g and λ_g = 0.
    a, b = [1.0, 0.5, 0.9], [0.2, 0.1]
    toy = Toy(a=[0.0] * 3, b=[1.0, 1.0])
    constraint = Constraint(total, {"a": 0.4, "b": 0.3}, dual=dual)
    optimizer = torch.optim.SGD(toy.parameters(), lr=0.1)
    for _ in range(400):
        train(toy, constraint, optimizer, lambda: distance(toy, a, b))
    gap = 0.8 - 0.4
    assert constraint.multiplier.tolist() == pytest.approx([3 * gap, 0.0], abs=1e-6)
    assert toy.flat().tolist() == pytest.approx([x - gap for x in a] + b, abs=1e-6)


@pytest.mark.slow
def test_restarts_stay_at_the_target_and_do_not_dwell_below() -> None:
    # Section 3.3: without restarts the multiplier keeps pushing below the target; with them it lets go at once.
    def lowest(restarts: bool) -> float:
        toy = Toy(a=[1.0])
        constraint = Constraint(total, 0.5, dual=GradientAscent(0.2, restarts))
        optimizer = torch.optim.SGD(toy.parameters(), lr=0.05)
        path = []
        for _ in range(400):
            train(toy, constraint, optimizer, lambda: distance(toy, [1.0]))
            path.append(toy.flat().item())
        return min(path)

    assert lowest(restarts=True) > 0.44 > 0.35 > lowest(restarts=False)


class Problem(cooper.ConstrainedMinimizationProblem):
    """The same toy as cooper sees it."""

    def __init__(self, toy: Toy, loss: Callable[[], Tensor], groups: dict[str, float]) -> None:
        super().__init__()
        self.toy, self.loss, self.groups = toy, loss, groups
        multiplier = cooper.multipliers.DenseMultiplier(num_constraints=len(groups), dtype=torch.float64)
        self.constraint = cooper.Constraint(
            constraint_type=cooper.ConstraintType.INEQUALITY,
            formulation_type=cooper.formulations.Lagrangian,
            multiplier=multiplier,
        )

    def compute_cmp_state(self) -> cooper.CMPState:
        gap = [smooth(self.toy, only=g) / self.toy.gates[g].x.numel() - e for g, e in self.groups.items()]
        state = cooper.ConstraintState(violation=torch.stack(gap))
        return cooper.CMPState(loss=self.loss(), observed_constraints={self.constraint: state})


GROUPS = {"a": 0.35, "b": 0.6}
POINTS = ([2.0, -1.0, 1.5], [0.5, 3.0])


def problem() -> tuple[Toy, Callable[[], Tensor]]:
    toy = Toy(a=[0.3, -0.2, 0.1], b=[1.0, 2.0])
    return toy, lambda: distance(toy, *POINTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dual", "theirs"),
    [
        (GradientAscent(0.7, restarts=False), lambda p: torch.optim.SGD(p, lr=0.7, maximize=True)),
        (NuPI(kp=3.0, ki=0.75), lambda p: cooper.optim.nuPI(p, lr=1.0, Kp=3.0, Ki=0.75, maximize=True)),
        (
            NuPI(kp=2.0, ki=0.5, nu=0.9),
            lambda p: cooper.optim.nuPI(p, lr=0.5, Kp=4.0, Ki=1.0, ema_nu=0.9, maximize=True),
        ),
    ],
    ids=["ascent", "PI", "nuPI"],
)
def test_trajectory_is_that_of_cooper(dual: AbstractDual, theirs: Callable[..., torch.optim.Optimizer]) -> None:
    toy, loss = problem()
    constraint, adam = Constraint(smooth, GROUPS, dual=dual), torch.optim.Adam(toy.parameters(), lr=0.05)
    other, other_loss = problem()
    cmp = Problem(other, other_loss, GROUPS)
    reference = cooper.optim.SimultaneousOptimizer(
        cmp=cmp,
        primal_optimizers=torch.optim.Adam(other.parameters(), lr=0.05),
        dual_optimizers=theirs(cmp.dual_parameters()),
    )
    moved = False
    for _ in range(100):
        mine = train(toy, constraint, adam, loss)
        reference.roll()
        torch.testing.assert_close(mine, cmp.constraint.multiplier.weight.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(toy.flat(), other.flat(), rtol=0, atol=1e-10)
        moved = moved or bool((mine > 0.1).all())
    assert moved


@pytest.mark.slow
def test_extra_gradient_trajectory_is_that_of_cooper() -> None:
    toy, loss = problem()
    constraint = Constraint(smooth, GROUPS, dual=GradientAscent(0.7, restarts=False))
    sgd = torch.optim.SGD(toy.parameters(), lr=0.1)
    other, other_loss = problem()
    cmp = Problem(other, other_loss, GROUPS)
    reference = cooper.optim.ExtrapolationConstrainedOptimizer(
        cmp=cmp,
        primal_optimizers=cooper.optim.ExtraSGD(other.parameters(), lr=0.1),
        dual_optimizers=cooper.optim.ExtraSGD(cmp.dual_parameters(), lr=0.7, maximize=True),
    )
    for _ in range(100):
        extra_gradient_step(constraint, sgd, lambda: loss() + constraint(toy))
        reference.roll()
        theirs = cmp.constraint.multiplier.weight.detach()
        torch.testing.assert_close(constraint.multiplier, theirs, rtol=0, atol=1e-10)
        torch.testing.assert_close(toy.flat(), other.flat(), rtol=0, atol=1e-10)
    assert constraint.multiplier.max() > 0.1


# ---- extra-gradient -------------------------------------------------------------------------------------------------


def test_extra_gradient_converges_in_the_bilinear_game_where_ascent_diverges() -> None:
    # L(x, λ) = −x + λ·(x − ½) has its saddle point at x = ½, λ = 1. With both rates η, each step multiplies the
    # distance to it by √(1 + η²) for gradient descent-ascent and by √(1 − η² + η⁴) for extra-gradient.
    eta = 0.5

    def radius(steps: int, extra: bool) -> float:
        toy = Toy(a=[0.75])
        constraint = Constraint(total, 0.5, dual=GradientAscent(eta, restarts=False))
        constraint.multiplier.fill_(1.0)
        sgd = torch.optim.SGD(toy.parameters(), lr=eta)
        for _ in range(steps):
            if extra:
                extra_gradient_step(constraint, sgd, lambda: -toy.xs()[0].sum() + constraint(toy))
            else:
                train(toy, constraint, sgd, lambda: -toy.xs()[0].sum())
        return math.hypot(toy.flat().item() - 0.5, constraint.multiplier.item() - 1)

    assert radius(10, extra=False) == pytest.approx(0.25 * (1 + eta**2) ** 5, rel=1e-9)  # 0.76: then λ reaches 0
    assert radius(100, extra=True) == pytest.approx(0.25 * (1 - eta**2 + eta**4) ** 50, rel=1e-9)  # 8e-6


@pytest.mark.slow
def test_extra_gradient_finds_the_saddle_point_with_adam() -> None:
    a = [1.0, 0.5, 0.9]
    toy = Toy(a=[0.0] * 3)
    constraint = Constraint(total, 0.4, dual=GradientAscent(0.3, restarts=False))
    adam = torch.optim.Adam(toy.parameters(), lr=0.05)
    for _ in range(400):
        extra_gradient_step(constraint, adam, lambda: distance(toy, a) + constraint(toy))
    assert constraint.multiplier.item() == pytest.approx(3 * 0.4, abs=1e-4)
    assert toy.flat().tolist() == pytest.approx([x - 0.4 for x in a], abs=1e-4)


def test_extra_gradient_with_adam_step_by_step() -> None:
    # min ½(x − a)² subject to x ≤ ½, with Adam's formulas written out: moments take in the second gradient alone.
    a, lr, eta, b1, b2, eps = 1.5, 0.1, 0.3, 0.9, 0.999, 1e-8
    toy = Toy(a=[0.75])
    constraint = Constraint(total, 0.5, dual=GradientAscent(eta, restarts=False))
    adam = torch.optim.Adam(toy.parameters(), lr=lr, betas=(b1, b2), eps=eps)
    x, lam, m, v = 0.75, 0.0, 0.0, 0.0

    def moved(x: float, g: float, m: float, v: float, t: int) -> tuple[float, float, float]:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        return x - lr * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps), m, v

    for t in range(1, 21):
        value = extra_gradient_step(constraint, adam, lambda: distance(toy, [a]) + constraint(toy))
        assert value.item() == pytest.approx(0.5 * (x - a) ** 2 + lam * (x - 0.5), rel=1e-9)
        ahead, _, _ = moved(x, x - a + lam, m, v, t)
        lam_ahead = max(0.0, lam + eta * (x - 0.5))
        x, m, v = moved(x, ahead - a + lam_ahead, m, v, t)
        lam = max(0.0, lam + eta * (ahead - 0.5))
        assert toy.flat().item() == pytest.approx(x, rel=1e-9)
        assert constraint.multiplier.item() == pytest.approx(lam, rel=1e-9)
    assert adam.state[toy.xs()[0]]["step"] == 20


def test_extra_gradient_moves_memory_and_warmup_once_per_step() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5, dual=ExtrapolationFromPast(1.0), warmup=LinearWarmup(4))
    sgd = torch.optim.SGD(toy.parameters(), lr=0.125)
    closure = lambda: toy.xs()[0].sum() + constraint(toy)  # noqa: E731
    extra_gradient_step(constraint, sgd, closure)  # looks ahead to x = 0.875, under the target of the step
    assert constraint.target.item() == 0.875
    assert constraint._buffers["_dual_past"].item() == constraint.violation.item() == 0.875 - 1


@pytest.mark.parametrize("failing_call", [1, 2])
def test_extra_gradient_that_fails_leaves_everything_as_it_was(failing_call: int) -> None:
    toy = Toy(a=[1.0, 0.5])
    constraint = Constraint(total, 0.5, dual=NuPI(kp=1.0, ki=0.5))
    adam = torch.optim.Adam(toy.parameters(), lr=0.1)
    for _ in range(3):
        extra_gradient_step(constraint, adam, lambda: distance(toy, [1.0, 1.0]) + constraint(toy))
    calls = itertools.count(1)

    def closure() -> Tensor:
        if next(calls) == failing_call:
            raise FloatingPointError("no")
        return distance(toy, [1.0, 1.0]) + constraint(toy)

    before = toy.flat(), copy.deepcopy(adam.state_dict()["state"]), constraint.multiplier.clone()
    memory = constraint._buffers["_dual_xi"].clone()
    with pytest.raises(FloatingPointError):
        extra_gradient_step(constraint, adam, closure)
    after = toy.flat(), adam.state_dict()["state"], constraint.multiplier
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(constraint._buffers["_dual_xi"], memory)


def test_extra_gradient_refuses_a_closure_without_the_constraint() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5).bind(toy)
    sgd = torch.optim.SGD(toy.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="call the constraint on the `Gated`"):
        extra_gradient_step(constraint, sgd, lambda: toy.xs()[0].sum())
    assert toy.flat().item() == 1.0
    assert constraint.multiplier.item() == 0.0


# ---- targets --------------------------------------------------------------------------------------------------------


def test_warmup_comes_down_on_a_line() -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, {"a": 0.5, "*": 0.25}, warmup=LinearWarmup(4))
    targets = [constraint.target.tolist()]
    for _ in range(5):
        constraint(toy)
        constraint.ascend()
        targets.append(constraint.target.tolist())
    fall = [1, 0.75, 0.5, 0.25, 0, 0]
    assert targets == [[0.5 + 0.5 * f, 0.25 + 0.75 * f] for f in fall]


def test_warmup_starts_where_told_and_never_below_the_target() -> None:
    assert Constraint(total, 0.5, warmup=LinearWarmup(4, start=0.75)).target.item() == 0.75
    assert Constraint(total, 0.5, warmup=LinearWarmup(4, start=0.25)).target.item() == 0.5


def test_set_target_on_a_running_constraint() -> None:
    toy = Toy(a=[1.0], b=[1.0])
    constraint = Constraint(total, {"a": 0.5, "b": 0.75}, dual=GradientAscent(1.0))
    constraint(toy)
    constraint.ascend()
    constraint.set_target({"b": 0.125, "a": 0.25})
    assert constraint.target.tolist() == [0.25, 0.125]
    assert constraint.multiplier.tolist() == [0.5, 0.25]
    constraint(toy)
    assert constraint.violation.tolist() == [0.75, 0.875]


def test_set_target_leads_a_warmup_elsewhere_and_serves_all_axes() -> None:
    toy = Toy(a=[1.0], b=[1.0])
    constraint = Constraint(total, 0.5, per_axis=True, warmup=LinearWarmup(2))
    constraint(toy)
    constraint.ascend()
    constraint.set_target(0.25)
    assert constraint.target.tolist() == [0.625, 0.625]
    constraint(toy)
    constraint.ascend()
    assert constraint.target.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("at_most", [40, 0, 0.0, -0.5, 1.01, math.nan, math.inf, True, "0.5", None, {}, {"a": 40}])
def test_a_target_outside_its_range_is_refused(at_most: object) -> None:
    with pytest.raises(ValueError, match=r"`at_most` is a fraction of the dense cost in \(0, 1\]"):
        Constraint(total, at_most)
    constraint = Constraint(total, 0.5)
    with pytest.raises(ValueError, match=r"`at_most` is a fraction of the dense cost in \(0, 1\]"):
        constraint.set_target(at_most)
    assert constraint.target.item() == 0.5


def test_the_message_of_the_design_page() -> None:
    message = "`at_most` is a fraction of the dense cost in (0, 1], got 40"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Constraint(total, at_most=40)


@pytest.mark.parametrize("wrong", [0.5, {"a": 0.5}, {"a": 0.5, "c": 0.5}])
def test_set_target_refuses_other_groups(wrong: object) -> None:
    constraint = Constraint(total, {"a": 0.5, "b": 0.5})
    with pytest.raises(ValueError, match=r"`at_most` must have the groups it was made with, \['a', 'b'\]"):
        constraint.set_target(wrong)
    assert constraint.target.tolist() == [0.5, 0.5]


def test_a_target_below_the_floor_is_refused_with_the_floor_and_its_layers() -> None:
    toy = Toy(least=0.3, a=[1.0, 1.0])
    constraint = Constraint(total, 0.25)
    message = (
        r"must be at least 0.3, .*`total` \(expected\) that the gates can reach, because of `stem`, `head`; got 0.25"
    )
    with pytest.raises(ValueError, match=message):
        constraint(toy)
    constraint.set_target(0.3)  # nothing is bound yet: the next call judges
    constraint(toy)
    constraint.ascend()
    before = copy.deepcopy(constraint.state_dict())
    with pytest.raises(ValueError, match=r"got 0\.2$"):
        constraint.set_target(0.2)
    assert frozen(constraint.state_dict()) == frozen(before)


# ---- the network it belongs to --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Toy(a=[1.0, 1.0], c=[1.0]), r"it has gates \['a', 'c'\]"),
        (Toy(a=[1.0, 1.0]), r"it has gates \['a'\]"),
        (Toy(a=[1.0, 1.0, 1.0], b=[1.0]), "a has 3 gates instead of 2"),
        (Toy(a=[1.0], b=[1.0]), "a has 1 gates instead of 2"),
        (Toy(), r"it has gates \[\]"),
    ],
)
def test_a_foreign_network_is_refused(other: Toy, message: str) -> None:
    toy = Toy(a=[1.0, 1.0], b=[1.0])
    constraint = Constraint(total, 0.5, dual=GradientAscent(1.0))
    constraint(toy)
    before = copy.deepcopy(constraint.state_dict())
    with pytest.raises(ValueError, match=f"`gated` must be the network this constraint is bound to.*{message}"):
        constraint(other)
    assert frozen(constraint.state_dict()) == frozen(before)


def test_a_copy_is_accepted_and_a_shrunk_network_still_refers_to_the_original() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    gated = attach(net, torch.zeros(1, 6))
    gated(torch.zeros(1, 6))
    constraint = Constraint(costs.params, 0.5, on="kept")
    constraint(gated)
    constraint(copy.deepcopy(gated))
    next(iter(gated.gates.values())).close_(torch.tensor([True, True, True, False]))  # type: ignore[operator]
    gated.shrink(gated.plan())
    constraint(gated)
    assert net[0].weight.shape == (1, 6)
    assert constraint.violation.item() == pytest.approx((6 + 1 + 3 + 3) / (28 + 15) - 0.5)


def test_a_network_is_checked_once_and_not_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(a=[1.0])
    constraint, penalty = Constraint(total, 0.5), Penalty(total, {"a": 1.0})
    constraint(toy)
    penalty(toy)
    monkeypatch.setattr(Toy, "named_gates", None)
    constraint(toy)
    penalty(toy)


def test_binding_does_not_keep_the_network_alive() -> None:
    toy = Toy(a=[1.0])
    constraint, alive = Constraint(total, 0.5), weakref.ref(toy)
    constraint(toy).backward()
    del toy
    gc.collect()
    assert alive() is None


def test_a_pattern_that_counts_nothing_is_refused() -> None:
    constraint = Constraint(total, {"a": 0.5, "cnov*": 0.5})
    with pytest.raises(
        ValueError, match=r"`at_most` must name what `total` counts, got 'cnov\*', where the dense cost is 0"
    ):
        constraint(Toy(a=[1.0]))
    assert constraint._gates is None


def test_what_is_no_gated_network_is_refused() -> None:
    with pytest.raises(TypeError, match="`gated` must be what `attach` returned, got Linear"):
        Constraint(total, 0.5)(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="got NoneType"):
        Constraint(total, 0.5)(None)


def test_gates_that_are_not_finite_are_refused_at_the_first_call() -> None:
    constraint = Constraint(total, 0.5)
    with pytest.raises(ValueError, match=r"`a\.x` must be finite"):
        constraint(Toy(a=[math.nan]))
    assert constraint._gates is None


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bound_before", [False, True])
@pytest.mark.parametrize("per_axis", [False, True])
@pytest.mark.parametrize("dual", DUALS, ids=str)
def test_a_resumed_run_continues_bit_for_bit(dual: AbstractDual, per_axis: bool, bound_before: bool) -> None:
    def fresh() -> tuple[Toy, Constraint, torch.optim.Adam]:
        toy = Toy(a=[0.3, -0.2, 0.1], b=[1.0, 2.0])
        toy = toy.float()  # the multipliers' dtype must come with the state
        constraint = Constraint(smooth, 0.35, per_axis=per_axis, dual=dual, warmup=LinearWarmup(20))
        return toy, constraint, torch.optim.Adam(toy.parameters(), lr=0.05)

    def run(toy: Toy, constraint: Constraint, adam: torch.optim.Adam, steps: int) -> list[list[float]]:
        loss = lambda: distance(toy, *POINTS)  # noqa: E731
        return [train(toy, constraint, adam, loss).tolist() for _ in range(steps)]

    straight = fresh()
    expected = run(*straight, 30)
    first = fresh()
    first[1].set_target(0.35)
    start = run(*first, 12)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = fresh()
    if bound_before:
        second[1](second[0])
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert start + run(*second, 18) == expected
    assert frozen(second[1].state_dict()) == frozen(straight[1].state_dict())


def test_a_run_saved_between_call_and_ascend_continues_too() -> None:
    toy = Toy(a=[1.0])
    constraint, resumed = (Constraint(total, 0.5, dual=GradientAscent(1.0)) for _ in range(2))
    constraint(toy)
    resumed.load_state_dict(constraint.state_dict())
    resumed.ascend()
    assert resumed.multiplier.item() == 0.5


def test_state_carries_a_target_that_was_set_and_the_dense_reference() -> None:
    toy = Toy(a=[1.0, 1.0])
    constraint, resumed = Constraint(total, 0.5), Constraint(total, 0.5)
    constraint(toy)
    constraint.set_target(0.25)
    resumed.load_state_dict(constraint.state_dict())
    resumed(Toy(a=[1.0, 0.0]))
    assert resumed.violation.item() == 1 / 2 - 0.25
    with pytest.raises(ValueError, match="it has gates"):
        resumed(Toy(b=[1.0]))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_go_their_own_way(clone: Callable[[Constraint], Constraint]) -> None:
    toy = Toy(a=[1.0])
    constraint = Constraint(total, 0.5, dual=GradientAscent(1.0))
    constraint(toy)
    twin = clone(constraint)
    twin.ascend()
    assert (constraint.multiplier.item(), twin.multiplier.item()) == (0.0, 0.5)
    with pytest.raises(ValueError, match="must be the network"):
        twin(Toy(b=[1.0]))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Constraint(smooth, {"a": 0.5}, dual=NuPI(1.0)), "its `cost` is 'smooth', here it is 'total'"),
        (lambda: Constraint(total, {"b": 0.5}, dual=NuPI(1.0)), r"its `at_most` is \['b'\], here it is \['a'\]"),
        (lambda: Constraint(total, 0.5, per_axis=True, dual=NuPI(1.0)), "its `at_most` is 'per_axis'"),
        (lambda: Constraint(total, {"a": 0.5}, on="kept", dual=NuPI(1.0)), "its `on` is 'kept'"),
        (lambda: Constraint(total, {"a": 0.5}), "its `dual` is 'GradientAscent', here it is 'NuPI'"),
        (lambda: Constraint(total, {"a": 0.5}, dual=NuPI(1.0)).bind(Toy(a=[1.0])), "a has 2 gates instead of 1"),
        (lambda: nn.Linear(1, 1), 'Missing key.*"multiplier"'),
    ],
)
def test_the_state_of_another_constraint_is_refused(other: Callable[[], nn.Module], message: str) -> None:
    constraint = Constraint(total, {"a": 0.5}, dual=NuPI(1.0))
    constraint(Toy(a=[1.0, 1.0]))
    constraint.ascend()
    before = copy.deepcopy(constraint.state_dict())
    with pytest.raises(RuntimeError, match=message):
        constraint.load_state_dict(other().state_dict())
    assert frozen(constraint.state_dict()) == frozen(before)


def test_a_state_of_another_kind_is_refused() -> None:
    constraint = Constraint(total, 0.5)
    with pytest.raises(RuntimeError, match="`state_dict` must be that of an equal Constraint, got another: it is of"):
        constraint.load_state_dict({**constraint.state_dict(), "multiplier": torch.ones(1), "_extra_state": 7})
    assert constraint.multiplier.item() == 0.0


def test_half_a_state_is_refused_whole() -> None:
    toy = Toy(a=[1.0])
    constraint, other = (Constraint(total, 0.5, dual=GradientAscent(1.0)) for _ in range(2))
    constraint(toy)
    constraint.ascend()
    state = constraint.state_dict()
    del state["violation"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"violation"'):
        other.load_state_dict(state)
    assert other.multiplier.item() == 0.0


def test_the_state_of_a_constraint_not_called_yet_makes_it_new() -> None:
    toy = Toy(a=[1.0]).float()
    constraint = Constraint(total, 0.25, dual=GradientAscent(1.0))
    fresh = copy.deepcopy(constraint.state_dict())
    constraint(toy)
    constraint.ascend()
    constraint.load_state_dict(fresh)
    constraint(toy)
    assert constraint.multiplier.item() == 0.0
    assert constraint.violation.item() == 0.75


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Constraint("macs", 0.5), TypeError, "`cost` must be a function"),
        (lambda: Constraint(total, 0.5, dual=GradientAscent), TypeError, "`dual` must be a dual optimizer"),
        (
            lambda: Constraint(total, 0.5, warmup=100),
            TypeError,
            "`warmup` must be None or a warm-up such as LinearWarmup\\(steps\\), got 100",
        ),
        (lambda: Constraint(total, 0.5, on="median"), ValueError, "`on` must be 'expected' or 'kept', got 'median'"),
        (lambda: Constraint(total, {"a": 0.5}, per_axis=True), ValueError, "`per_axis` must come with one fraction"),
        (lambda: Constraint(costs.macs, 0.5, per_axis=True), ValueError, "`per_axis` .* that counts by gate, got macs"),
        (lambda: Penalty(costs.params, {"*": 0.5}), ValueError, "`weight` must be one number for params"),
        (lambda: Constraint(total, {3: 0.5}), ValueError, "`at_most` must have patterns as keys, got 3"),
        (lambda: Penalty(total, {3: 0.5}), ValueError, "`weight` must have patterns as keys, got 3"),
        (lambda: GradientAscent(0.0), ValueError, "`lr` must be a positive number, got 0.0"),
        (lambda: GradientAscent(math.nan), ValueError, "`lr` must be a positive number, got nan"),
        (lambda: ExtrapolationFromPast(-1.0), ValueError, "`lr` must be a positive number, got -1.0"),
        (lambda: NuPI(kp=-1.0), ValueError, "`kp` must be a non-negative number"),
        (lambda: NuPI(kp=1.0, ki=0.0), ValueError, "`ki` must be a positive number"),
        (lambda: NuPI(kp=1.0, nu=1.0), ValueError, r"`nu` must be a number in \(-1, 1\)"),
        (lambda: LinearWarmup(0), ValueError, "`steps` must be a positive number, got 0"),
        (lambda: LinearWarmup(10, start=1.5), ValueError, "`start` is a fraction"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_representation_says_what_it_is() -> None:
    constraint = Constraint(functools.partial(total), {"a": 0.5})
    assert repr(constraint).startswith("Constraint(total, at_most={'a': 0.5}, per_axis=False, on='expected'")
    assert repr(Penalty(total, 0.5)) == "Penalty(total, weight=0.5)"


# ---- real networks --------------------------------------------------------------------------------------------------


def mlp() -> tuple[nn.Module, Gated]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, traced.attached(model, torch.zeros(1, 6))


def test_violation_of_a_network_is_the_fraction_of_its_weights_above_the_target() -> None:
    _, gated = mlp()
    first, second = (gate.prob_open().sum().item() for _, gate in gated.named_gates())
    constraint = Constraint(costs.l0_norm, 0.25)
    constraint(gated)  # a gate per hidden unit, which counts the weights that read the unit: 8 and 3
    assert constraint.violation.item() == pytest.approx((8 * first + 3 * second) / (80 + 24) - 0.25, rel=1e-5)
    each = Constraint(costs.l0_norm, 0.25, per_axis=True)
    each(gated)
    assert each.violation.tolist() == pytest.approx([first / 10 - 0.25, second / 8 - 0.25], rel=1e-5)


def test_floor_of_a_network_is_what_no_gate_counts() -> None:
    _, gated = mlp()
    all_params = 6 * 10 + 10 + 10 * 8 + 8 + 8 * 3 + 3
    message = f"must be at least {3 / all_params:.4g}, .*because of `4`; got"  # the biases of the output layer
    with pytest.raises(ValueError, match=message):
        Constraint(costs.params, 2.5 / all_params)(gated)
    Constraint(costs.params, 3.5 / all_params)(gated)


def test_a_pattern_without_a_module_is_refused_in_the_users_words() -> None:
    _, gated = mlp()
    with pytest.raises(ValueError, match="`at_most` must name what `macs` counts, got 'conv'"):
        Constraint(costs.macs, {"0": 0.5, "conv": 0.5})(gated)


def test_gates_of_a_network_that_are_not_finite_are_refused() -> None:
    _, gated = mlp()
    next(gated.named_gates())[1].log_alpha.data[3] = math.nan
    constraint = Constraint(costs.params, 0.5)
    with pytest.raises(ValueError, match="log_alpha` must be finite"):
        constraint(gated)
    assert constraint.multiplier.tolist() == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["expected", "kept"])
def test_training_brings_a_network_to_its_target_and_resumes(on: str) -> None:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)

    def fresh() -> tuple[Gated, Constraint, torch.optim.Adam]:
        _, gated = mlp()
        dual = GradientAscent(0.2, restarts=False)
        return gated, Constraint(costs.params, 0.5, on=on, dual=dual), torch.optim.Adam(gated.parameters(), lr=0.05)

    def run(gated: Gated, constraint: Constraint, adam: torch.optim.Adam, steps: range) -> list[float]:
        trace = []
        for step in steps:
            torch.manual_seed(step)
            adam.zero_grad()
            (nn.functional.cross_entropy(gated(x), y) + constraint(gated)).backward()
            adam.step()
            constraint.ascend()
            trace.append(constraint.multiplier.item())
        return trace

    straight = fresh()
    expected = run(*straight, range(120))
    reached = costs.params(straight[0], kept=on == "kept").item() / costs.dense(costs.params, straight[0])
    assert reached <= 0.5
    first, second = fresh(), fresh()
    half = run(*first, range(30))
    for part, other in zip(second, first, strict=True):
        part.load_state_dict(copy.deepcopy(other.state_dict()))
    assert half + run(*second, range(30, 45)) == expected[:45]


@pytest.mark.slow
def test_a_copy_of_a_network_is_known_and_another_network_is_not() -> None:
    _, gated = mlp()
    gated(torch.zeros(1, 6))
    constraint = Constraint(costs.params, 0.5)
    constraint(gated)
    constraint(copy.deepcopy(gated))
    wider = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="has 11 gates instead of 10"):
        constraint(attach(wider, (torch.zeros(1, 6),)))
    narrower = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="has 9 gates instead of 10"):
        constraint(attach(narrower, (torch.zeros(1, 6),)))


def test_exponentiated_ascent_follows_the_logarithm_of_the_cost_over_the_target() -> None:
    """With gates that stand still, λ after n steps is start·(cost/target)^(n·rate), and zero where it is met."""
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    gated = l0.attach(net, torch.zeros(1, 6))
    gated(torch.zeros(1, 6))
    share = l0.params(gated).item() / l0.dense(l0.params, gated)
    for at_most in (share / 1.7, (share + 1) / 2):
        constraint = l0.Constraint(
            l0.params, at_most, dual=l0.duals.ExponentiatedAscent(rate=0.3, start=0.5, highest=4.0)
        )
        for n in range(1, 20):
            constraint(gated)
            constraint.ascend()
            expected = min(0.5 * 1.7 ** (0.3 * n), 4.0) if at_most < share else 0.0
            assert constraint.multiplier.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("share", "folds"), [(0.2 * 1.3, math.log(1.3)), (0.2 * 4, 0.5), (1.0, 0.5)])
def test_self_paced_ascent_grows_by_one_fold_at_most_while_a_gate_closes(share: float, folds: float) -> None:
    """Closing one takes 4/gate_lr steps; a violation that is far off counts as half a fold."""
    dual = l0.duals.SelfPacedAscent(steps=160, gate_lr=0.1)
    multiplier, memory = torch.zeros(1), {"level": torch.zeros(1)}
    for k in range(40):
        seen = dual.measured(torch.tensor([share - 0.2]), torch.tensor([0.2]))
        dual.step(multiplier, seen, memory, first=k == 0)
    assert multiplier.item() == pytest.approx(0.1 * math.exp(2 * folds), rel=1e-4)
    dual.step(multiplier, torch.tensor([-3.0]), memory, first=False)
    assert multiplier.item() == 0
    assert memory["level"].item() == pytest.approx(0.1 * math.exp(2 * folds - 0.025), rel=1e-4)


@pytest.mark.parametrize("name", ["rate", "start", "highest", "counts"])
def test_exponentiated_ascent_takes_positive_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a positive number"):
        l0.duals.ExponentiatedAscent(**{"rate": 0.1, name: 0.0})


def test_a_target_that_cannot_be_reached_names_few_layers_and_none_without_a_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.scale = nn.Parameter(torch.ones(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return nn.functional.linear(x, nn.functional.normalize(self.scale, dim=0))

    gated = l0.attach(Own(), torch.zeros(2, 4))
    message = r"that the gates can reach, because of what the model multiplies by itself, `layers.0`, `layers.\d` and 2"
    with pytest.raises(ValueError, match=message + r" more; got 0.001$"):
        l0.Constraint(l0.macs, at_most=0.001, on="kept", dual=l0.duals.GradientAscent(lr=0.1)).bind(gated)
