"""SBP and VIB: their charges and moments against quadrature, their draws against the moments."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from ellzero.gates import SBPGate, VIBGate

STATES = [(0.0, -5.0), (0.0, 0.0), (-3.0, 0.5), (-12.0, -1.0), (0.5, -2.0), (-20.0, 5.0), (2.0, 1.0), (-1.0, 2.5)]


def sbp(mu: float, log_sigma: float) -> SBPGate:
    gate = SBPGate(1).double()
    torch.nn.init.constant_(gate.mu, mu)
    torch.nn.init.constant_(gate.log_sigma, log_sigma)
    return gate


def integral(mu: float, log_sigma: float, f: object) -> float:
    """∫ q(y) f(y, q) dy over [−20, 0], q the truncated Gaussian, in pieces about its peak."""
    sigma = math.exp(log_sigma)
    q = stats.truncnorm((-20 - mu) / sigma, -mu / sigma, loc=mu, scale=sigma)
    peak = min(max(mu, -20), 0)
    points = sorted({p for k in (-8, -3, -1, 0, 1, 3, 8) if -20 < (p := peak + k * sigma) < 0})
    value, _ = integrate.quad(lambda y: f(y, q), -20, 0, points=points or None, limit=300, epsabs=1e-13)  # type: ignore[operator]
    return float(value)


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "log_sigma"), STATES)
@torch.no_grad()
def test_the_kl_and_the_moments_of_sbp_are_those_of_quadrature(mu: float, log_sigma: float) -> None:
    gate = sbp(mu, log_sigma)
    kl = integral(mu, log_sigma, lambda y, q: q.pdf(y) * (q.logpdf(y) + math.log(20)) if q.pdf(y) > 0 else 0.0)
    mean = integral(mu, log_sigma, lambda y, q: q.pdf(y) * math.exp(y))
    variance = integral(mu, log_sigma, lambda y, q: q.pdf(y) * (math.exp(y) - mean) ** 2)
    assert float(gate.complexity()) == pytest.approx(kl, rel=1e-6, abs=1e-7)
    assert float(gate.mean_from(gate.own())) == pytest.approx(mean, rel=1e-7)
    assert float(gate.evidence()) == pytest.approx(mean / math.sqrt(variance), rel=1e-5)
    assert bool(gate.open()) == (mean / math.sqrt(variance) > 1)
    assert float(gate.value()) == pytest.approx(mean if gate.open() else 0.0, rel=1e-7)


@torch.no_grad()
def test_a_gate_of_sbp_that_is_at_its_prior_costs_nothing_and_is_closed() -> None:
    gate = sbp(-10.0, 5.0)
    assert float(gate.complexity()) == pytest.approx(0, abs=1e-4)
    assert float(gate.evidence()) == pytest.approx(1 / 3, abs=1e-2)
    assert not gate.open()
    assert float(SBPGate(1).complexity()) == pytest.approx(7.27, abs=0.01)


@pytest.mark.parametrize(("mu", "log_sigma"), STATES)
@torch.no_grad()
def test_the_draws_of_sbp_have_its_moments(mu: float, log_sigma: float) -> None:
    gate, n = sbp(mu, log_sigma), 200_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    z = gate.noisy_from(tuple(p.detach().expand(n) for p in gate.own()), u)
    assert float(z.min()) >= math.exp(-20) * (1 - 1e-12)
    assert float(z.max()) <= 1
    assert float(z.mean()) == pytest.approx(float(gate.mean_from(gate.own())), rel=1e-3)


def test_sbp_in_float32_is_what_it_is_in_float64() -> None:
    gate = SBPGate(500)
    torch.nn.init.uniform_(gate.mu, -20, 2)
    torch.nn.init.uniform_(gate.log_sigma, -6, 5)
    exact = SBPGate(500).double()
    exact.load_state_dict(gate.state_dict())
    for one, other in ((gate.complexity(), exact.complexity()), (gate.evidence(), exact.evidence())):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    total = gate.complexity().sum() + gate.sample().sum()
    for slope in torch.autograd.grad(total, [gate.mu, gate.log_sigma]):
        assert slope.isfinite().all()


def test_the_slopes_of_sbp_are_those_of_finite_differences() -> None:
    own = tuple(torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in zip(*STATES[:5], strict=True))
    gate, u = SBPGate(5), torch.tensor([0.2, 0.7, 0.5, 0.9, 0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *o: gate.charge_from(o), own)
    assert torch.autograd.gradcheck(lambda *o: gate.noisy_from(o, u), own)


# ---- VIB ------------------------------------------------------------------------------------------------------------


def test_the_charge_of_vib_is_the_kl_to_the_gaussian_of_the_best_variance() -> None:
    """½·log(1 + μ²/σ²) is the least KL(N(μ, σ²) ‖ N(0, ξ)) over ξ: by a search over ξ."""
    mu, log_var = np.array([1.0, 0.3, -2.0, 0.05]), np.array([-9.0, -1.0, 0.5, 2.0])
    gate = VIBGate(4).double()
    gate.mu.data, gate.log_var.data = torch.as_tensor(mu), torch.as_tensor(log_var)
    xi = np.exp(np.linspace(-12, 6, 200_001))[:, None]
    kl = 0.5 * (np.log(xi) - log_var + (np.exp(log_var) + mu**2) / xi - 1)
    torch.testing.assert_close(gate.complexity().detach(), torch.as_tensor(kl.min(0)), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("threshold", [0.0, 2.0, -3.0])
def test_vib_is_its_mean_where_log_alpha_is_below_the_threshold(threshold: float) -> None:
    gate = VIBGate(200, threshold=threshold).double()
    torch.nn.init.normal_(gate.mu)
    torch.nn.init.normal_(gate.log_var, std=2)
    log_alpha = gate.log_var - gate.mu.square().log()
    torch.testing.assert_close(gate.value(), gate.mu * (log_alpha < threshold), rtol=0, atol=0)
    torch.testing.assert_close(gate.evidence(), gate.mu.abs() / (gate.log_var / 2).exp(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_draws_of_vib_are_gaussian() -> None:
    gate, n = VIBGate(1).double(), 100_000
    torch.nn.init.constant_(gate.log_var, -1.0)
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    z = gate.noisy_from(tuple(p.detach().expand(n) for p in gate.own()), u)
    assert float(z.mean()) == pytest.approx(float(gate.mu), abs=1e-6)
    assert float(z.var()) == pytest.approx(math.exp(-1), rel=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="`threshold` must be a signal-to-noise ratio"):
        SBPGate(3, threshold=-1.0)
    with pytest.raises(ValueError, match="`threshold` must be finite"):
        VIBGate(3, threshold=math.inf)
