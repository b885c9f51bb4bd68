"""The objective of a stack as tensors, against the formulas of both papers written out number by number.

Cost vectors are made up here: no network is needed to know what is added to a loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ellzero as l0
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe
from ellzero.experiments.train import building
from ellzero.experiments.train.building import dual_optimizer, parts, targets
from ellzero.experiments.train.stepping.stack import l2_of_weights
from ellzero.objectives.duals import SelfPacedAscent
from ellzero.objectives.lagrangian import Lagrangian

CPU = torch.device("cpu")
BEGIN = torch.zeros(())  # of the clock
GATES = ("fc1", "fc2", "fc3")
DENSE = {"fc1": 600.0, "fc2": 300.0, "fc3": 100.0}  # weights that each set of gates counts


def recipe(**changes: Any) -> Recipe:
    basis: dict[str, Any] = {"name": "tiny", "network": "lenet300", "data": "mnist5k"}
    if "at_most" not in changes:
        basis["penalty"] = 0.1
    return Recipe(**basis | changes)


def lagrangian(*recipes: Recipe, steps: int = 100) -> Lagrangian:
    these = parts(recipes, GATES)
    dense = [DENSE[str(only)] if cost is l0.l0_norm else 1.0 if cost is l0.l2_norm else 5000.0 for cost, only in these]
    return building.lagrangian(recipes, these, dense, images=50, steps=steps, device=CPU)


def terms(l: Lagrangian, cost: Tensor, clock: float = 0.0) -> Tensor:  # noqa: E741
    return l(cost, torch.tensor(clock))[0]


def now(l: Lagrangian, clock: float = 0.0) -> Tensor:  # noqa: E741
    return l.targets_at(torch.tensor(clock))


def test_parts_are_gates_then_modules_then_the_norm_and_each_once() -> None:
    def of(*recipes: Recipe) -> list[tuple[str, str | None]]:
        return [(cost.__name__, only) for cost, only in parts(recipes, GATES)]  # type: ignore[attr-defined]

    by_gates = [("l0_norm", name) for name in GATES]
    whole, layers = recipe(cost="macs", at_most=0.2), recipe(cost="params", at_most={"fc1": 0.2, "*": 0.3})
    assert of(recipe()) == of(recipe(at_most=0.2), recipe(at_most={"fc1": 0.5})) == by_gates
    assert of(whole, layers, whole.override(seed=1, at_most=0.3)) == [
        *by_gates, ("macs", None), ("params", "fc1"), ("params", None)
    ]  # fmt: skip
    assert of(whole.override(l2=0.1)) == [*by_gates, ("macs", None), ("l2_norm", None)]
    assert parts([recipe(l2=0.1, detach_l2=True)], GATES)[-1] == (l2_of_weights, None)
    assert parts([recipe(l2=0.1)], []) == []  # without gates it is the optimizer's


def test_targets_are_by_pattern() -> None:
    assert targets(recipe()) == {}
    assert targets(recipe(at_most=0.2)) == {"*": 0.2}
    at_most = {"fc1": 0.2, "*": 0.3}
    assert targets(recipe(at_most=at_most)) == at_most


def test_a_penalty_is_lambda_times_the_number_of_weights() -> None:
    cost = torch.tensor([[0.5, 0.25, 1.0]])  # fractions: 300, 75 and 100 weights
    assert terms(lagrangian(recipe(penalty=0.1)), cost).item() == pytest.approx(0.1 / 50 * 475)
    by_layer = recipe(penalty={"fc2": 2.0, "fc?": 3.0})  # the first match counts
    assert terms(lagrangian(by_layer), cost).item() == pytest.approx((3 * 300 + 2 * 75 + 3 * 100) / 50)
    assert terms(lagrangian(recipe(penalty={"fc3": 2.0})), cost).item() == pytest.approx(2 * 100 / 50)


def test_a_constraint_bounds_the_fraction_of_all_weights_under_its_pattern() -> None:
    l = lagrangian(recipe(at_most={"fc[12]": 0.3, "*": 0.6}))  # noqa: E741
    cost = torch.tensor([[0.5, 0.25, 1.0]])
    torch.testing.assert_close(l.gaps(cost, BEGIN), torch.tensor([[375 / 900 - 0.3, 475 / 1000 - 0.6]]))
    assert terms(l, cost).item() == 0
    l.multiplier.copy_(torch.tensor([[2.0, 3.0]]))
    assert terms(l, cost).item() == pytest.approx(2 * (375 / 900 - 0.3) + 3 * (475 / 1000 - 0.6))


def test_every_run_has_the_constraints_of_its_own_cost() -> None:
    several = [
        recipe(at_most=0.4),
        recipe(cost="params", at_most={"fc1": 0.1, "fc2": 0.2}),
        recipe(cost="macs", at_most=0.3),
        recipe(penalty=1.0),
    ]
    l = lagrangian(*several)  # noqa: E741
    cost = torch.tensor([[0.5, 0.25, 1.0, 0.11, 0.22, 0.33]]).repeat(4, 1)  # params of fc1 and fc2, then MACs
    gaps = l.gaps(cost, BEGIN)
    torch.testing.assert_close(gaps[0, 0], torch.tensor(0.475 - 0.4))
    torch.testing.assert_close(gaps[1], torch.tensor([0.01, 0.02]))
    torch.testing.assert_close(gaps[2, 0], torch.tensor(0.03))
    assert gaps[0, 1] < 0
    assert gaps[2, 1] < 0
    assert (gaps[3] < 0).all()
    for _ in range(3):  # what is no constraint never binds
        l.ascend(gaps, BEGIN, first=False)
    assert (l.multiplier > 0).tolist() == [[True, False], [True, True], [True, False], [False, False]]
    assert l.prices[:3].eq(0).all()
    torch.testing.assert_close(l.prices[3], torch.tensor([600.0, 300.0, 100.0, 0, 0, 0]) / 50)


def test_the_norm_of_eq_17_has_half_its_factor_and_no_constraint() -> None:
    r = recipe(at_most=0.4, l2=0.2, l2_gated_factor=1.5)
    l = lagrangian(r, r.override(at_most=None, penalty=1.0))  # noqa: E741
    cost = torch.tensor([[0.5, 0.25, 1.0, 7.0], [0.0, 0.0, 0.0, 9.0]])
    assert terms(l, cost).tolist() == pytest.approx([0.5 * 0.2 * 1.5 * 7.0, 0.5 * 0.2 * 1.5 * 9.0])
    assert not l.member[:, :, 3].any()


def test_the_target_comes_down_from_one_on_a_line_or_by_equal_factors() -> None:
    r = recipe(at_most={"fc1": 0.2, "fc2": 0.6}, target_warmup=0.5)
    line = {0: [1.0, 1.0], 25: [0.6, 0.8], 50: [0.2, 0.6], 90: [0.2, 0.6]}
    factors = {0: [1.0, 1.0], 25: [0.2**0.5, 0.6**0.5], 40: [0.2**0.8, 0.6**0.8], 50: [0.2, 0.6], 90: [0.2, 0.6]}
    for dual, way in {"ascent": line, "auto": factors}.items():
        l = lagrangian(r.override(dual=dual), steps=100)  # noqa: E741
        for clock, expected in way.items():
            torch.testing.assert_close(now(l, float(clock)), torch.tensor([expected]))
    later = lagrangian(r.override(dual="auto", epochs=5, weights_first=0.4), steps=100)  # begins after 40, ends at 70
    torch.testing.assert_close(now(later, 20.0), torch.ones(1, 2))
    torch.testing.assert_close(now(later, 55.0), torch.tensor([[0.2**0.5, 0.6**0.5]]))
    at_once = lagrangian(recipe(at_most=0.2))
    assert now(at_once).item() == pytest.approx(0.2)


def test_multipliers_are_moved_as_the_recipe_says() -> None:
    r = recipe(at_most=0.2)
    assert dual_optimizer(r.override(dual="ascent"), 10) == l0.duals.GradientAscent(1e-4, restarts=True)
    assert dual_optimizer(r.override(dual="ascent", dual_lr=0.3, restarts=False), 10) == l0.duals.GradientAscent(
        0.3, False
    )
    assert dual_optimizer(r.override(dual="extrapolation", dual_lr=0.3), 10) == l0.duals.ExtrapolationFromPast(0.3)
    nupi = r.override(dual="nupi", dual_lr=0.3, kp=2.0, nu=0.5)
    assert dual_optimizer(nupi, 10) == l0.duals.NuPI(kp=2.0, ki=0.3, nu=0.5)


def test_the_automatic_controller_fits_the_length_of_the_run() -> None:
    """A cost of 1.05 times the target all along leads to the same multiplier in a short run and in a long one."""
    assert get("demo").dual == "auto"
    ends = []
    for steps in (10, 1000):
        l = lagrangian(recipe(at_most=0.2, gate_lr=1000.0), steps=steps)  # noqa: E741
        assert l.dual == SelfPacedAscent(steps, gate_lr=1000.0)
        for step in range(steps):
            l.ascend(torch.tensor([[0.05 * 0.2]]), BEGIN, first=step == 0)
        ends.append(l.multiplier.item())
    assert ends == pytest.approx([0.1 * 1.05**100] * 2, rel=1e-3)


def test_the_automatic_controller_waits_for_slow_gates() -> None:
    r = recipe(at_most=0.2, lr=2e-3, gate_lr=1e-2)
    assert dual_optimizer(r, 1000) == SelfPacedAscent(1000, 1e-2)
    assert SelfPacedAscent(1000, 1e-2).rate == 0.5 * 1e-2
    assert dual_optimizer(r.override(gate_lr=None), 1000) == SelfPacedAscent(1000, 2e-3)
    assert SelfPacedAscent(10**6, 1e-2).rate == 100 / 10**6


def test_the_automatic_controller_goes_by_the_target_of_the_moment() -> None:
    r = recipe(at_most=0.2, target_warmup=0.5, gate_lr=1000.0)
    l = lagrangian(r, steps=100)  # noqa: E741
    l.ascend(torch.tensor([[0.1]]), torch.tensor(25.0), first=True)
    assert l.multiplier.item() == pytest.approx(0.1 * (1 + 0.1 / 0.2**0.5) ** (100 / 100), rel=1e-5)
    l.ascend(torch.tensor([[-0.1]]), torch.tensor(60.0), first=False)
    assert l.multiplier.item() == 0


def test_a_state_is_taken_up_in_place() -> None:
    a, b = lagrangian(recipe(at_most=0.2)), lagrangian(recipe(at_most=0.2))
    for step in range(3):
        a.ascend(torch.tensor([[0.3 - 0.1 * step]]), BEGIN, first=step == 0)
    place = b.multiplier.data_ptr()
    b.load(a.state())
    assert b.multiplier.data_ptr() == place
    for violation in (0.5, 0.4):
        a.ascend(torch.tensor([[violation]]), BEGIN, first=False)
        b.ascend(torch.tensor([[violation]]), BEGIN, first=False)
        assert torch.equal(a.multiplier, b.multiplier)
    assert 0 < a.multiplier.item() < 1000


def test_patterns_that_match_no_gates_are_refused() -> None:
    for field in ("penalty", "at_most"):
        with pytest.raises(ValueError, match=rf"`{field}` must have patterns that match gates .*, got 'conv\*'"):
            lagrangian(recipe(**{field: {"conv*": 0.5}}))
