"""Dropout against `nn.Dropout`'s definition, generalized dropout against scipy's Beta density."""

import pytest
import torch
from scipy import stats

import ellzero as l0
from ellzero.gates import DropoutGate, GeneralizedDropoutGate
from support.traced import attached
from support.zoo import mlp


def test_dropout_keeps_the_mean_and_drops_at_its_rate() -> None:
    gate = DropoutGate(1, p=0.2)
    u = (torch.arange(10_000) + 0.5) / 10_000
    z = gate.sample_from((gate.rate.expand(10_000),), u)
    assert set(z.tolist()) == {0.0, 1.25}
    assert float(z.mean()) == pytest.approx(1.0)
    assert float(gate.value()) == 1.0
    assert float(gate.prob_open()) == pytest.approx(0.8)


def test_the_expected_cost_of_dropout_is_that_of_the_units_that_are_there() -> None:
    gated = attached(mlp(3, 10, 2), torch.randn(4, 3), gate=lambda shape: DropoutGate(shape, p=0.3))
    assert float(l0.macs(gated)) == pytest.approx(0.7 * l0.dense(l0.macs, gated))
    assert float(l0.macs(gated, kept=True)) == l0.dense(l0.macs, gated)
    assert not [p for p in gated.gates.parameters() if p.requires_grad]


@pytest.mark.parametrize(("a", "b"), [(0.7, 0.4), (1.0, 1.0), (2.0, 3.5), (1e-4, 0.5)])
def test_the_penalty_of_generalized_dropout_is_the_log_density_of_beta(a: float, b: float) -> None:
    gate = GeneralizedDropoutGate(9, a=a, b=b).double()
    torch.nn.init.normal_(gate.log_odds, std=3)
    expected = -stats.beta(a, b).logpdf(gate.prob_open().detach().numpy())
    torch.testing.assert_close(gate.complexity().detach(), torch.as_tensor(expected), rtol=1e-8, atol=1e-8)


def test_the_penalty_of_generalized_dropout_stops_far_out() -> None:
    gate = GeneralizedDropoutGate(3)
    gate.log_odds.data = torch.tensor([-11.0, -9.0, 11.0])
    (slope,) = torch.autograd.grad(gate.complexity().sum(), gate.log_odds)
    assert (slope != 0).tolist() == [False, True, False]
    assert slope[1] > 0  # towards zero: descent lowers θ


def test_generalized_dropout_is_its_rate_from_the_threshold_on() -> None:
    gate = GeneralizedDropoutGate(100, threshold=1e-3)
    torch.nn.init.normal_(gate.log_odds, mean=-5, std=3)
    theta = gate.prob_open()
    torch.testing.assert_close(gate.value(), theta * (theta >= 1e-3), rtol=0, atol=0)
    assert float(GeneralizedDropoutGate(1000).prob_open().detach().mean()) == pytest.approx(0.632, abs=0.002)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="`p` must lie in"):
        DropoutGate(3, p=1.0)
    for options in ({"a": 0.0}, {"b": -1.0}):
        with pytest.raises(ValueError, match="must be positive and finite"):
            GeneralizedDropoutGate(3, **options)
