"""STG against `torch.distributions.Normal`, quadrature, and the rectified gate that it is a case of."""

import pytest
import torch
from torch.distributions import Normal

from ellzero.gates import STGGate
from ellzero.gates.distributions import Rectified


def test_it_is_a_rectified_gaussian() -> None:
    gate = STGGate(200, sigma=0.3).double()
    torch.nn.init.normal_(gate.mu, std=0.6)
    q = Rectified(Normal(gate.mu + 0.5, 0.3))
    u = torch.rand(200, dtype=torch.float64).clamp(1e-5, 1 - 1e-5)
    torch.testing.assert_close(gate.prob_open(), q.prob_nonzero)
    torch.testing.assert_close(gate.sample(u), q.icdf(u), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gate.value(), (gate.mu + 0.5).clamp(0, 1))
    torch.testing.assert_close(gate.complexity(), gate.prob_open())


def test_it_is_open_at_test_time_where_it_is_open_more_often_than_not() -> None:
    gate = STGGate(500)
    torch.nn.init.normal_(gate.mu)
    assert torch.equal(gate.open(), gate.prob_open() > 0.5)


def test_the_draws_have_the_probability_and_the_slope_of_their_mean() -> None:
    """E z and its slope in μ by the midpoint rule over 100,000 quantiles, against ∫ P(z > t) dt and P(0 < z < 1)."""
    gate = STGGate(1, start=0.2).double()
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    mu = gate.mu.detach().expand(100_000).clone().requires_grad_()
    z = gate.sample_from((mu,), u)
    (slope,) = torch.autograd.grad(z.sum(), mu)
    standard, middle = Normal(0.0, 1.0), gate.mu.item() + 0.5
    t = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    assert float((z.detach() > 0).double().mean()) == pytest.approx(gate.prob_open().item(), abs=2e-5)
    assert z.mean().item() == pytest.approx(float(standard.cdf((middle - t) / 0.5).mean()), abs=1e-6)
    inside = standard.cdf(torch.tensor(middle / 0.5)) - standard.cdf(torch.tensor((middle - 1) / 0.5))
    assert float(slope.mean()) == pytest.approx(float(inside), abs=3e-5)


@pytest.mark.parametrize(
    ("options", "told"), [({"sigma": 0.0}, "`sigma` must"), ({"start": torch.nan}, "`start` must")]
)
def test_what_does_not_fit_is_refused(options: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        STGGate(3, **options)


def test_it_starts_half_open_as_its_authors_have_it() -> None:
    gate = STGGate(1000)
    assert float(gate.mu.detach().std()) == pytest.approx(0.01, rel=0.1)
    assert float(gate.value().detach().mean()) == pytest.approx(0.5, abs=2e-3)
