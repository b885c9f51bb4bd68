"""Half-Cauchy gates: charge and moments against quadrature, and the three kinds of gates of the group horseshoe."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor
from torch.distributions import Normal
from torch.func import functional_call

import ellzero as l0
from ellzero.gated.placements import shared
from ellzero.gates import GaussianWeightGate, HalfCauchyGate
from support.oracles import assert_counted, assert_same, settled
from support.traced import attached
from support.zoo import MLP

STATES = [(-0.7, 0.7, -9.0, -9.0), (0.5, -1.5, -1.0, 0.3), (-2.0, 1.0, 1.0, -2.0), (1.0, 1.0, 0.5, 0.5)]


def gate_at(state: tuple[float, ...], scale: float = 1.0, n: int = 1) -> HalfCauchyGate:
    gate = HalfCauchyGate(n, scale=scale).double()
    for parameter, value in zip(gate.own(), state, strict=True):
        parameter.data.fill_(value)
    return gate


def kl(m: float, log_v: float, prior: Any) -> float:
    """KL of a log-normal to a prior on x, over y = log x."""
    q = stats.norm(m, math.exp(log_v / 2))
    low, high = q.ppf(1e-14), q.ppf(1 - 1e-14)
    value, _ = integrate.quad(lambda y: q.pdf(y) * (q.logpdf(y) - prior.logpdf(math.exp(y)) - y), low, high, limit=300)
    return float(value)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("state", STATES)
def test_the_charge_is_the_kl_of_both_parts(state: tuple[float, ...], scale: float) -> None:
    m_a, m_b, log_v_a, log_v_b = state
    expected = kl(m_a, log_v_a, stats.gamma(0.5, scale=scale**2)) + kl(m_b, log_v_b, stats.invgamma(0.5))
    assert gate_at(state, scale).complexity().item() == pytest.approx(expected, rel=1e-6)


def test_the_prior_of_both_parts_is_half_cauchy() -> None:
    """P(√(ab) < t) by integrating over b, against scipy's."""
    a, b = stats.gamma(0.5, scale=0.01), stats.invgamma(0.5)

    def integrand(y: float, t: float) -> float:
        return float(b.pdf(math.exp(y)) * math.exp(y) * a.cdf(t * t / math.exp(y)))

    for t in (0.02, 0.1, 0.7):
        below, _ = integrate.quad(integrand, -12, 60, args=(t,), limit=400)
        assert below == pytest.approx(stats.halfcauchy(scale=0.1).cdf(t), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("state", STATES)
def test_draws_have_the_mean_that_is_used_at_test_time(state: tuple[float, ...]) -> None:
    gate, n = gate_at(state), 200_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    z = gate.noisy_from(tuple(p.detach().expand(n) for p in gate.own()), u)
    m, v = (state[0] + state[1]) / 2, (math.exp(state[2]) + math.exp(state[3])) / 4
    assert z.mean().item() == pytest.approx(math.exp(m + v / 2), rel=2e-3)
    assert z.median().item() == pytest.approx(math.exp(m), rel=1e-4)
    assert bool(gate.open()) == (v - m < 1)
    assert gate.value().item() == pytest.approx(math.exp(m + v / 2) if v - m < 1 else 0.0)


def test_it_starts_where_a_small_scale_costs_little() -> None:
    for scale in (1.0, 1e-5):
        gate = HalfCauchyGate(100, scale=scale, threshold=None)
        assert gate.complexity().detach().max() < 40  # 1/τ² elsewhere
        torch.testing.assert_close(gate.value().detach(), torch.ones(100), rtol=0, atol=0.05)
        assert gate.open().all()


def horseshoe(graph: l0.graph.Graph) -> list[l0.Placement]:
    return [*l0.shrinkable()(graph), *shared(l0.shrinkable())(graph), *l0.weights("*.weight")(graph)]


def test_units_layers_and_weights_compose_and_compact() -> None:
    torch.manual_seed(0)
    x: Tensor = torch.randn(4, 5, dtype=torch.float64)
    layer = partial(HalfCauchyGate, scale=1e-5, threshold=None)
    gates: dict[str, Any] = {"*.weight": GaussianWeightGate, "*.shared": layer, "*": HalfCauchyGate}
    gated = attached(settled(MLP(5, 8, 7, 3)), x, where=horseshoe, gate=gates)
    made: dict[str, Any] = dict(gated.named_gates())
    assert made["layers.0.shared"].shape == (1,)
    u = torch.rand(gated.liveness.size, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    noise = {name: Normal(0.0, 1.0).icdf(part) for name, part in gated.by_placement(u).items()}

    def log_z(name: str) -> Tensor:
        gate = made[name]
        sigma = ((gate.log_v_a.exp() + gate.log_v_b.exp()) / 4).sqrt()
        out: Tensor = (gate.m_a + gate.m_b) / 2 + sigma * noise[name]
        return out

    weights = {}
    for k in range(3):
        name = f"layers.{k}.weight"
        weights[name] = gated.model.get_parameter(name) + (made[name].log_var / 2).exp() * noise[name]
        if k:  # one draw of the layer's scale for all of its units
            weights[name] = weights[name] * (log_z(f"layers.{k - 1}") + log_z(f"layers.{k - 1}.shared")).exp()
    assert_same(gated.train()(x, gate_noise=u), functional_call(gated.model, weights, x), 1e-9)
    made["layers.0"].close_(torch.arange(8) < 3)
    made["layers.1"].close_(torch.arange(7) < 2)
    small = l0.compact(gated.eval())
    z = [made[f"layers.{k}"].value() * made[f"layers.{k}.shared"].value() for k in range(2)]
    by_hand = {f"layers.{k + 1}.weight": gated.model.get_parameter(f"layers.{k + 1}.weight") * z[k] for k in range(2)}
    assert_same(small(x), functional_call(gated.model, by_hand, x))
    assert_counted(gated, small, (x,))
    assert str(l0.report(gated))


def test_what_does_not_fit_is_refused() -> None:
    for options in ({"scale": 0.0}, {"threshold": math.nan}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
            HalfCauchyGate(3, **options)
