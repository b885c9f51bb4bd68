"""What every gate family must do, the papers' own among them: the same questions, the same oracles.

The mathematics of each family is in its own file. Networks are tiny and traced once; numbers are in float64 where "the
same" means twelve digits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.train.stepping.stack import Objective, Runs
from ellzero.gates import AbstractGate, NoExpectation
from support.oracles import assert_counted, assert_same, each, masked_by_hand, same, settled
from support.traced import attached
from support.zoo import MLP, LeNet, ResNet

g = l0.gates
Maker = Callable[..., AbstractGate]
FAMILIES: dict[str, Maker] = {
    "hard concrete": g.HardConcreteGate,
    "rectified": g.RectifiedGate,
    "stg": g.STGGate,
    "bernoulli": g.BernoulliGate,
    "bernoulli, plain": partial(g.BernoulliGate, scaled=False, estimator=g.ScoreFunction()),
    "bernoulli, arm": partial(g.BernoulliGate, estimator=g.ARM()),
    "generalized dropout": g.GeneralizedDropoutGate,
    "dropout": g.DropoutGate,
    "sbp": g.SBPGate,
    "vib": g.VIBGate,
    "gnj": g.GNJGate,
    "half-Cauchy": g.HalfCauchyGate,
    "group lasso": g.GroupLassoGate,
}
KEPT_ONLY = {"sbp", "vib", "gnj", "half-Cauchy", "group lasso"}  # without an expected cost
LEARNS = FAMILIES.keys() - {"dropout"}
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "mlp": (lambda: MLP(5, 8, 7, 3), (4, 5), {"layers.0": {"layers.1": same}, "layers.1": {"layers.2": same}}),
    "lenet": (
        LeNet,
        (3, 1, 14, 14),
        {"conv1": {"conv2": same}, "conv2": {"fc1": each(4)}, "fc1": {"fc2": same}},
    ),
    "resnet": (ResNet, (3, 2, 6, 6), {"conv1": {"conv2": same}}),
}
every = pytest.mark.parametrize("family", FAMILIES)


def network(family: str, net: str = "mlp", seed: int = 0) -> tuple[l0.Gated, Tensor]:
    """A network in float64 with gates of a family, in a state somewhere on the way."""
    make, shape, _ = NETS[net]
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64)
    gated = attached(settled(make(), seed), x, gate=FAMILIES[family])
    for _, gate in gated.named_gates():
        scatter(gate)
    return gated, x


@torch.no_grad()
def scatter(gate: AbstractGate) -> None:
    """Moves all that learns."""
    for name, parameter in gate.named_parameters():
        if parameter.requires_grad and name != "pull":
            parameter.add_(torch.randn_like(parameter) * (2.0 if parameter.abs().max() > 0.9 else 0.5))


def close_some(gated: l0.Gated, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, gate in gated.named_gates():
        mask = torch.rand(gate.shape, generator=generator) < 0.4
        mask.view(-1)[0] = False
        gate.close_(mask)
        first = torch.zeros_like(mask)
        first.view(-1)[0] = True
        gate.open_(first, wide=True)  # no axis is closed as a whole


# ---- one gate -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every
def test_a_gate_is_zero_at_test_time_exactly_where_it_is_closed(family: str) -> None:
    gated, _ = network(family)
    for _, gate in gated.named_gates():
        assert gate.evidence().isfinite().all()
        assert (gate.evidence() >= 0).all()
        assert gate.complexity().isfinite().all()
        assert torch.equal(gate.open(), gate.value() != 0)
        assert gate.sample().shape == gate.value().shape == gate.shape
        assert gate.sample().dtype == gate.value().dtype == gate.complexity().dtype == torch.float64


@every
def test_closing_and_opening_leave_the_other_gates_as_they_are(family: str) -> None:
    gated, _ = network(family)
    _, gate = next(gated.named_gates())
    mask = torch.arange(8) % 3 == 0
    before = {name: p.clone() for name, p in gate.named_parameters()}
    gate.close_(mask)
    assert not gate.open()[mask].any()
    assert gate.evidence()[mask].detach().max() < 1e-20
    for u in (0.0, 0.5, 1 - 1e-7):  # no noise opens it
        assert not gate.sample(torch.full((8,), u, dtype=torch.float64))[mask].any()
    gate.open_(mask)
    assert (gate.value()[mask].abs() >= 0.1 - 1e-12).all()
    gate.open_(mask, wide=True)
    torch.testing.assert_close(gate.value()[mask], torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-8)
    for name, parameter in gate.named_parameters():
        assert torch.equal(parameter[~mask], before[name][~mask]), name


@pytest.mark.slow
@every
def test_gates_are_evaluated_together_as_one_by_one(family: str) -> None:
    gated, _ = network(family)
    gates = [gate for _, gate in gated.named_gates()]
    u = torch.rand(15, dtype=torch.float64)
    for z, gate, mine in zip(g.draw(gates, u), gates, u.split([8, 7]), strict=True):
        assert_same(z, gate.sample(mine))
    assert_same(gated.complexity(), torch.cat([gate.complexity() for gate in gates]))
    assert_same(gated.evidence(), torch.cat([gate.evidence() for gate in gates]))


@pytest.mark.slow
@every
def test_gradients_are_finite_far_out(family: str) -> None:
    gated, _ = network(family)
    _, gate = next(gated.named_gates())
    learned = [p for name, p in gate.named_parameters() if p.requires_grad and name != "pull"]
    for far in (-60.0, -20.0, -1e-6, 0.0, 5.0, 60.0):
        for parameter in learned:
            nn.init.constant_(parameter, far)
        total = gate.complexity().sum() + gate.sample().sum() + gate.value().sum()
        assert total.isfinite()
        if learned:
            for slope in torch.autograd.grad(total, learned, allow_unused=True):
                assert slope is None or slope.isfinite().all()


# ---- on a network ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
@every
def test_the_compact_network_is_the_one_masked_by_hand(family: str, net: str) -> None:
    gated, x = network(family, net)
    close_some(gated)
    z = {name: gate.value().detach() for name, gate in gated.named_gates()}
    small = l0.compact(gated.eval())
    by_hand = masked_by_hand(gated.model, z, NETS[net][2])
    assert_same(small(x), by_hand(x))
    assert_same(gated(x), by_hand(x))
    assert_counted(gated, small, (x,))
    assert sum(p.numel() for p in small.parameters()) < l0.dense(l0.params, gated)


@pytest.mark.slow
@every
def test_the_report_counts_what_is_kept(family: str) -> None:
    gated, _ = network(family)
    close_some(gated)
    made = l0.report(gated)
    assert made.params.kept == int(l0.params(gated, kept=True))
    assert (made.params.expected is None) == (family in KEPT_ONLY)
    assert [row.kept for row in made.gates] == [int(gate.open().sum()) for _, gate in gated.named_gates()]
    assert type(next(gated.named_gates())[1]).__name__ in str(made)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no gate has moved")  # those of dropout are all the same
@every
def test_finalize_closes_those_with_the_least_evidence(family: str) -> None:
    gated, _ = network(family)
    for _, gate in gated.named_gates():
        gate.open_(~gate.open())
    evidence = gated.by_placement(gated.evidence())
    l0.finalize(gated, at_most=0.5)
    assert float(l0.params(gated, kept=True)) <= 0.5 * l0.dense(l0.params, gated)
    for name, gate in gated.named_gates():
        opens = gate.open()
        if not opens.all():
            assert evidence[name][opens].min() >= evidence[name][~opens].max()


@pytest.mark.parametrize("family", sorted(KEPT_ONLY))
def test_an_expected_cost_is_refused_in_the_words_of_the_family(family: str) -> None:
    gated, _ = network(family)
    told = rf"{type(next(gated.named_gates())[1]).__name__} has no expected cost, only a kept one: .* `l0.complexity`"
    for asked in (l0.params, l0.l0_norm, l0.macs, l0.Penalty(l0.l0_norm, 1.0), l0.Constraint(l0.macs, 0.5)):
        with pytest.raises(NoExpectation, match=told):
            asked(gated)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(LEARNS))
def test_a_constraint_on_what_is_kept_presses_on_every_gate(family: str) -> None:
    """Without an expected cost, each gate's complexity is weighed by the share that closing it saves: of 3 layers'
    weights and biases, 5 + 1 before a unit of the first and 7 behind it.
    """
    gated, x = network(family)
    gated.train()(x)
    gated.followed = gated.estimated = True  # as if
    constraint = l0.Constraint(l0.params, at_most=0.3, on="kept", dual=l0.duals.GradientAscent(lr=2.0))
    constraint(gated)
    kept = float(l0.params(gated, kept=True)) / l0.dense(l0.params, gated)
    assert float(constraint.violation) == pytest.approx(kept - 0.3)
    constraint.ascend()
    multiplier = float(constraint.multiplier)
    assert multiplier == pytest.approx(2 * max(0.0, kept - 0.3))
    nn.init.constant_(constraint.multiplier, 1.5)
    slopes = torch.autograd.grad(constraint(gated), learned(gated))
    if family in KEPT_ONLY:
        saves = torch.tensor([5 + 1 + 7] * 8 + [8 + 1 + 3] * 7, dtype=torch.float64) / (6 * 8 + 9 * 7 + 8 * 3)
        by_hand = 1.5 * (saves * gated.complexity()).sum()
        expected = torch.autograd.grad(by_hand, learned(gated))
        for slope, other in zip(slopes, expected, strict=True):
            assert_same(slope, other)
    assert any(slope.any() for slope in slopes)


def learned(gated: l0.Gated) -> list[nn.Parameter]:
    return [p for p in gated.gates.parameters() if p.requires_grad]


@pytest.mark.slow
@every
def test_a_state_is_taken_up_by_another_network(family: str) -> None:
    gated, x = network(family)
    close_some(gated)
    other, _ = network(family, seed=1)
    other.load_state_dict(gated.state_dict())
    copied = copy.deepcopy(gated)
    for again in (other, copied):
        assert torch.equal(again.complexity(), gated.complexity())
        assert torch.equal(again.opens(), gated.opens())
        assert_same(again.eval()(x), gated.eval()(x))


@pytest.mark.slow
@every
def test_a_stack_of_runs_is_each_run_alone(family: str) -> None:
    def made(seed: int) -> Objective:
        gated, _ = network(family, seed=seed)
        return Objective(gated, [(l0.complexity, name) for name, _ in gated.named_gates()])

    x, y = torch.randn(2, 6, 5, dtype=torch.float64), torch.randint(3, (2, 6))
    noise = torch.rand(2, 15, dtype=torch.float64)
    alone = [made(seed).train() for seed in range(2)]
    stack = Runs([made(seed) for seed in range(2)]).train()
    each_alone = [o(x[i], y[i], noise[i]) for i, o in enumerate(alone)]
    loss, cost = stack(x, y, noise)
    assert_same(loss, torch.stack([one[0] for one in each_alone]))
    assert_same(cost, torch.stack([one[1] for one in each_alone]))
    (loss.sum() + cost.sum()).backward()
    sum(one[0] + one[1].sum() for one in each_alone).backward()  # type: ignore[union-attr]
    for name, value in stack.values().items():
        own = [o.get_parameter(name).grad for o in alone]
        assert (value.grad is None) == (own[0] is None), name
        if value.grad is not None:
            assert_same(value.grad, torch.stack(own))  # type: ignore[arg-type]
    opens = stack.evaluate(lambda run: run.gated.opens())
    assert torch.equal(opens, torch.stack([o.gated.opens() for o in alone]))
    for run in range(2):
        assert torch.equal(stack.network(run).complexity(), alone[run].gated.complexity())  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(LEARNS - {"group lasso"}))
@pytest.mark.filterwarnings("ignore:gates settle after")
def test_a_budget_brings_a_network_of_every_family_within_it(family: str) -> None:
    gated, x = network(family)
    budget = l0.Budget(gated, params=0.5, steps=6, learning=0.5)
    optimizer = torch.optim.SGD(gated.param_groups(lr=1e-3))
    budget.drive(optimizer)
    gated.train()
    for _ in range(6):
        optimizer.zero_grad()
        if any(gate.needs_loss for _, gate in gated.named_gates()) and budget.phase == "learning":
            l0.objectives.estimated_backward(gated, lambda u: gated(x, gate_noise=u).square().mean())
        else:
            gated(x).square().mean().backward()
        optimizer.step()
    small = budget.finish()
    assert sum(p.numel() for p in small.parameters()) <= 0.5 * l0.dense(l0.params, gated)


def test_a_family_suggests_its_rate() -> None:
    rates = [dict(network(f)[0].param_groups(lr=1e-3)[1])["lr"] for f in ("hard concrete", "stg", "sbp", "vib")]
    assert rates == [1e-3, 1e-3, 1e-2, 1e-2]
    gated, _ = network("sbp")
    assert gated.param_groups(lr=1e-3, gate_lr=3e-3)[1]["lr"] == 3e-3
    assert "lr" not in gated.param_groups()[1]
