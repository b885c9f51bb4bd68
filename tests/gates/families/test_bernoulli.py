"""Bernoulli gates and their estimators, against the gradient of a sum over all states of a few gates."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.gates import AR, ARM, AbstractEstimator, BernoulliGate, ScoreFunction, StraightThrough
from support.traced import attached
from support.zoo import ResNet, mlp

LOGITS = [math.log(p / (1 - p)) for p in (0.6, 0.3, 0.7)]


def loss(z: Tensor) -> Tensor:
    """Not linear, and not symmetric: no gate can be looked at alone."""
    a, b, c = z.unbind(-1)
    return 1.5 + a * b - 2 * b * c + 0.7 * a + 0.4 * (a + c) ** 2


def exact_slope(logit: Tensor) -> Tensor:
    """The gradient of E f(z), by summing over the eight states."""
    logit = logit.clone().requires_grad_()
    pi, total = torch.sigmoid(logit), logit.new_zeros(())
    for state in itertools.product((0.0, 1.0), repeat=3):
        z = torch.tensor(state, dtype=torch.float64)
        total = total + (z * pi + (1 - z) * (1 - pi)).prod() * loss(z)
    (slope,) = torch.autograd.grad(total, logit)
    return slope


@pytest.mark.parametrize("estimator", [ScoreFunction(), AR(), ARM()], ids=lambda e: type(e).__name__)
def test_the_estimators_that_need_the_loss_are_unbiased(estimator: AbstractEstimator) -> None:
    """Means over a grid of 10³ noises: exact, since all jumps lie on its edges and all is linear between them."""
    logit = torch.tensor(LOGITS, dtype=torch.float64)
    grid = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    u = torch.cartesian_prod(grid, grid, grid)
    here, there = loss(estimator.draw(logit, u))[:, None], loss(estimator.draw(logit, 1 - u))[:, None]
    baseline = torch.tensor(0.9, dtype=torch.float64)
    mean = estimator.slope(logit, u, here, there if estimator.antithetic else None, baseline).mean(0)
    torch.testing.assert_close(mean, exact_slope(logit), rtol=0, atol=1e-12)


def test_arm_has_less_variance_than_the_others() -> None:
    logit = torch.tensor(LOGITS, dtype=torch.float64)
    u = torch.rand(20_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread = {}
    for estimator in (ScoreFunction(), AR(), ARM()):
        here, there = loss(estimator.draw(logit, u))[:, None], loss(estimator.draw(logit, 1 - u))[:, None]
        found = estimator.slope(logit, u, here, there, torch.zeros((), dtype=torch.float64))
        spread[type(estimator)] = float(found.var(0).sum())
    assert spread[ARM] < spread[ScoreFunction]
    assert spread[ARM] < spread[AR]


def test_straight_through_is_the_gradient_of_a_loss_that_is_linear_in_the_gates() -> None:
    gate = BernoulliGate(3).double()
    weights, u = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.9, 0.1, 0.4])
    z = gate.sample(u)
    assert set(z.tolist()) <= {0.0, 1.0}
    (slope,) = torch.autograd.grad((weights * z).sum(), gate.log_odds)
    pi = gate.prob_open()
    torch.testing.assert_close(slope, 7 * weights * pi * (1 - pi))
    assert not BernoulliGate(3, estimator=ARM()).sample().requires_grad


def test_draws_have_the_probability_that_is_said() -> None:
    gate = BernoulliGate(4, drop_rate=0.3)
    u = (torch.arange(10_000) + 0.5) / 10_000
    drawn = torch.stack([gate.sample_from((gate.log_odds[i].expand(10_000),), u).mean() for i in range(4)])
    torch.testing.assert_close(drawn, gate.prob_open(), rtol=0, atol=2e-4)
    assert float(gate.prob_open().detach().mean()) == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("threshold", [0.5, 0.2, 0.9])
def test_at_test_time_it_is_open_from_the_threshold_on(scaled: bool, threshold: float) -> None:
    gate = BernoulliGate(300, threshold=threshold, scaled=scaled)
    nn.init.normal_(gate.log_odds, std=0.5)
    pi = gate.prob_open()
    torch.testing.assert_close(gate.value(), (pi if scaled else 1.0) * (pi >= threshold), rtol=0, atol=0)
    gate.open_(gate.open() | ~gate.open())
    assert gate.open().all()
    gate.close_(gate.open())
    assert not gate.open().any()


# ---- in a loop ------------------------------------------------------------------------------------------------------


def prepared(estimator: AbstractEstimator) -> tuple[l0.Gated, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    return attached(mlp(3, 5, 2), x, gate=partial(BernoulliGate, estimator=estimator)), x


@pytest.mark.parametrize("estimator", [ScoreFunction(), AR(), ARM()], ids=lambda e: type(e).__name__)
def test_the_step_hands_the_loss_to_the_estimator(estimator: AbstractEstimator) -> None:
    gated, x = prepared(estimator)
    (gate,) = (gate for _, gate in gated.named_gates())
    assert isinstance(gate, BernoulliGate)
    before, calls = 2.5, []

    def task(u: Tensor) -> Tensor:
        calls.append(u)
        return gated(x, gate_noise=u).square().mean()

    if isinstance(estimator, ScoreFunction):
        l0.objectives.estimated_backward(gated, lambda u: gated(x, gate_noise=u).mean() * 0 + before)
        assert not gate.log_odds.grad.any()  # type: ignore[union-attr]
        gated.zero_grad()
    u = torch.rand(5)
    value = l0.objectives.estimated_backward(gated, task, u)
    with torch.no_grad():
        here, there = (gated(x, gate_noise=v).square().mean() for v in (u, 1 - u))
    assert value == here
    slope = estimator.slope(7 * gate.log_odds, u, here, there, torch.tensor(before))
    torch.testing.assert_close(gate.log_odds.grad, (7 * slope).detach())
    wanted = (u, 1 - u) if estimator == ARM() else (u,)
    assert all(torch.equal(one, other) for one, other in zip(calls, wanted, strict=True))
    assert gated.model[2].weight.grad is not None  # type: ignore[index, union-attr]


def test_straight_through_needs_no_such_step_but_can_be_mixed_in() -> None:
    gated, x = prepared(StraightThrough())
    u = torch.rand(5)
    l0.objectives.estimated_backward(gated, lambda v: gated(x, gate_noise=v).square().mean(), u)
    by_step = [p.grad.clone() for p in gated.parameters() if p.grad is not None]
    gated.zero_grad()
    gated(x, gate_noise=u).square().mean().backward()
    for one, other in zip(by_step, (p.grad for p in gated.parameters()), strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def test_the_second_forward_leaves_batch_norm_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 6)
    model = ResNet()
    gated = attached(model, x, gate=partial(BernoulliGate, estimator=ARM()))
    l0.objectives.estimated_backward(gated, lambda u: gated(x, gate_noise=u).square().mean())
    assert [int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == [1, 1, 1]
    assert gated.noisy
    with pytest.warns(UserWarning, match="batch-norm statistics were gathered while gates were noisy"):
        gated.eval()
    with pytest.raises(RuntimeError, match="`gated` must draw its gates"):
        l0.objectives.estimated_backward(gated, lambda u: gated(x, gate_noise=u).square().mean())


def test_a_loop_that_does_not_tell_the_loss_is_warned() -> None:
    gated, x = prepared(ARM())
    penalty = l0.Penalty(l0.l0_norm, 0.1)
    gated(x)
    penalty(gated)
    with pytest.warns(UserWarning, match="gates learn from the loss"):
        penalty(gated)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drop_rate": 1.0}, "`drop_rate` must"),
        ({"sharpness": 0.0}, "`sharpness` must"),
        ({"threshold": 1.0}, "`threshold` must"),
        ({"estimator": "arm"}, "`estimator` must"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        BernoulliGate(3, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`decay` must"):
        ScoreFunction(decay=1.0)
