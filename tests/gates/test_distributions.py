"""The distributions against quadrature, closed forms, other libraries' distributions and the papers' numbers."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    LogNormal,
    MultivariateNormal,
    Normal,
    RelaxedBernoulli,
    TransformedDistribution,
    kl_divergence,
)

from ellzero.gates.distributions import AbstractRectified, BinaryConcrete, HardConcrete, Logistic, Rectified
from ellzero.gates.formulas import (
    hard_concrete_median,
    hard_concrete_noiseless,
    hard_concrete_prob_nonzero,
    hard_concrete_sample,
)

GAMMA, ZETA = -0.1, 1.1
SETTINGS = [(-6.0, 2 / 3), (-2.0, 0.5), (0.0, 2 / 3), (0.7, 1.0), (3.0, 0.3), (9.0, 2 / 3)]


def double(x: float | list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def survival(x: float, log_alpha: float, beta: float) -> float:
    """1 − Q(x) of the stretched concrete (eqs. 24 and 25), by scipy."""
    return float(special.expit(log_alpha - beta * np.log((x - GAMMA) / (ZETA - x))))


def quad(f: Callable[[float], float], low: float, high: float) -> float:
    return float(integrate.quad(f, low, high, epsabs=1e-13, epsrel=1e-12, limit=200)[0])


# ---- the hard concrete ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log_alpha", "beta"), SETTINGS)
def test_cdf_is_equation_25_between_the_atoms_and_a_step_outside(log_alpha: float, beta: float) -> None:
    z = HardConcrete(double(log_alpha), beta)
    for x in (0.0, 0.2, 0.5, 0.999):
        assert z.cdf(double(x)).item() == pytest.approx(1 - survival(x, log_alpha, beta), abs=1e-14)
    assert z.cdf(double([-0.05, 1.0, 1.05])).tolist() == [0, 1, 1]
    assert z.prob_nonzero.item() == pytest.approx(survival(0, log_alpha, beta), rel=1e-13)
    assert z.prob_one.item() == pytest.approx(survival(1, log_alpha, beta), rel=1e-13)


@pytest.mark.parametrize(("log_alpha", "beta"), SETTINGS)
def test_log_prob_has_the_atoms_and_integrates_to_one(log_alpha: float, beta: float) -> None:
    z = HardConcrete(double(log_alpha), beta)
    zero, one = z.log_prob(double([0.0, 1.0])).exp().tolist()
    assert zero == pytest.approx(1 - survival(0, log_alpha, beta), rel=1e-12)
    assert one == pytest.approx(survival(1, log_alpha, beta), rel=1e-12)
    between = quad(lambda x: z.log_prob(double(x)).exp().item(), 0, 1)
    assert zero + one + between == pytest.approx(1, abs=1e-12)
    # Not only the whole: the density is the derivative of the CDF over any part.
    part = quad(lambda x: z.log_prob(double(x)).exp().item(), 0.3, 0.6)
    assert part == pytest.approx(survival(0.3, log_alpha, beta) - survival(0.6, log_alpha, beta), abs=1e-12)


@pytest.mark.parametrize(("log_alpha", "beta"), SETTINGS)
def test_mean_and_variance_are_integrals_of_the_survival_function(log_alpha: float, beta: float) -> None:
    z = HardConcrete(double(log_alpha), beta)
    mean = quad(lambda x: survival(x, log_alpha, beta), 0, 1)  # E[z] = ∫ P(z > x) dx
    square = quad(lambda x: 2 * x * survival(x, log_alpha, beta), 0, 1)
    assert z.mean.item() == pytest.approx(mean, rel=1e-9)
    assert z.variance.item() == pytest.approx(square - mean**2, rel=1e-7)


def test_samples_have_the_moments_and_the_atoms() -> None:
    z, n = HardConcrete(torch.tensor([-2.0, 0.0, 2.0])), 200_000
    x = z.rsample((n,))
    error = 5 * (z.variance / n).sqrt()
    assert ((x.mean(0) - z.mean).abs() < error).all()
    for mass, share in ((1 - z.prob_nonzero, (x == 0)), (z.prob_one, (x == 1))):
        assert ((share.float().mean(0) - mass).abs() < 5 * (mass * (1 - mass) / n).sqrt()).all()
    assert not z.sample((3,)).requires_grad


@given(log_alpha=st.floats(-20, 20), beta=st.floats(0.2, 2), u=st.floats(0.001, 0.999))
def test_icdf_inverts_cdf_between_the_atoms(log_alpha: float, beta: float, u: float) -> None:
    z = HardConcrete(double(log_alpha), beta)
    x = z.icdf(double(u))
    if 0 < x < 1:
        assert z.cdf(x).item() == pytest.approx(u, abs=1e-9)
    elif x == 0:
        assert u <= 1 - z.prob_nonzero.item() + 1e-12
    else:
        assert u >= 1 - z.prob_one.item() - 1e-12
    # Inversion of uniform noise is how it is sampled.
    assert x.item() == pytest.approx(hard_concrete_sample(double(u), double(log_alpha), beta, GAMMA, ZETA).item())


@pytest.mark.parametrize(("drop_rate", "published"), [(0.5, 0.832), (0.2, 0.952), (0.3, 0.920)])
def test_published_probability_of_being_open_at_the_start(drop_rate: float, published: float) -> None:
    z = HardConcrete(double(math.log((1 - drop_rate) / drop_rate)))
    assert z.prob_nonzero.item() == pytest.approx(published, abs=5e-4)


def test_test_time_rules_close_at_their_published_probabilities() -> None:
    log_alpha = torch.linspace(-4, 0, 40_001, dtype=torch.float64)
    z = HardConcrete(log_alpha)
    assert z.prob_nonzero[z.noiseless == 0].max().item() == pytest.approx(0.310, abs=5e-4)
    assert torch.equal(z.median == 0, z.prob_nonzero <= 0.5)
    torch.testing.assert_close(z.median, hard_concrete_median(log_alpha, 2 / 3, GAMMA, ZETA))
    assert z.noiseless[-1].item() == pytest.approx(0.5)  # σ(0) · 1.2 − 0.1


def test_half_the_mass_is_binary_at_log_alpha_0_and_beta_half() -> None:
    z = HardConcrete(double(0.0), beta=0.5)  # Louizos et al., figure 2
    assert (1 - z.prob_nonzero + z.prob_one).item() == pytest.approx(0.5, abs=0.05)


def test_the_mass_between_the_atoms_keeps_its_digits_in_both_tails() -> None:
    # For log α → ∞ the CDF is α⁻¹((x − γ)/(ζ − x))^β, so that the mass between the atoms is e^(−50)(11^β − 11^(−β)).
    expected = math.exp(-50) * (11 ** (2 / 3) - 11 ** (-2 / 3))
    for sign in (-1, 1):
        z = HardConcrete(torch.tensor(50.0 * sign))
        assert z._masses()[2].item() == pytest.approx(expected, rel=1e-5, abs=0)
    assert z.variance.item() > 0


# ---- the continuous ones --------------------------------------------------------------------------------------------


def test_binary_concrete_is_torchs_relaxed_bernoulli() -> None:
    log_alpha, beta = double([-3.0, 0.0, 1.5]), 0.7
    ours, theirs = BinaryConcrete(log_alpha, beta), RelaxedBernoulli(double(beta), logits=log_alpha)
    s = double([[0.01], [0.4], [0.97]])
    torch.testing.assert_close(ours.log_prob(s), theirs.log_prob(s))
    torch.testing.assert_close(ours.cdf(ours.icdf(s)), s.expand(3, 3))
    torch.testing.assert_close(ours.cdf(ours.median), torch.full((3,), 0.5, dtype=torch.float64))
    x = ours.rsample((100_000,))
    assert stats.kstest(x[:, 2].numpy(), lambda v: ours.cdf(torch.from_numpy(v)[:, None])[:, 2].numpy()).pvalue > 1e-4


@pytest.mark.parametrize("log_alpha", [-10.0, -3.0, 0.0, 1.0, 10.0])
@pytest.mark.parametrize("beta", [0.1, 2 / 3, 1.0, 3.0])
def test_binary_concrete_moments(log_alpha: float, beta: float) -> None:
    def expect(f: Callable[[float], float]) -> float:  # over the logistic noise, cut where s turns
        g = lambda y: special.expit(y) * special.expit(-y) * f(special.expit((y + log_alpha) / beta))  # noqa: E731
        cuts = sorted({-60.0, -log_alpha - 3 * beta, -log_alpha, -log_alpha + 3 * beta, 0.0, 60.0})
        return sum(quad(g, a, b) for a, b in itertools.pairwise(cuts))

    s = BinaryConcrete(double(log_alpha), beta)
    mean = expect(lambda s: s)
    assert s.mean.item() == pytest.approx(mean, abs=1e-7)
    assert s.variance.item() == pytest.approx(expect(lambda s: (s - mean) ** 2), abs=1e-7)


def test_logistic_is_scipys() -> None:
    ours, theirs = Logistic(double(0.3), double(0.2)), stats.logistic(0.3, 0.2)
    x, u = np.linspace(-2, 2, 9), np.linspace(0.05, 0.95, 9)
    np.testing.assert_allclose(ours.cdf(torch.from_numpy(x)), theirs.cdf(x), rtol=1e-12)
    np.testing.assert_allclose(ours.log_prob(torch.from_numpy(x)), theirs.logpdf(x), rtol=1e-12)
    np.testing.assert_allclose(ours.icdf(torch.from_numpy(u)), theirs.ppf(u), rtol=1e-12)
    assert [ours.mean.item(), ours.variance.item()] == pytest.approx([theirs.mean(), theirs.var()])
    assert stats.kstest(ours.rsample((100_000,)).numpy(), theirs.cdf).pvalue > 1e-4


# ---- rectified anything ---------------------------------------------------------------------------------------------


def test_rectifying_a_stretched_concrete_gives_the_hard_concrete() -> None:
    log_alpha, beta = double([-3.0, 0.0, 2.0]), double([0.5, 2 / 3, 1.0])
    special_case = HardConcrete(log_alpha, beta)
    stretched = TransformedDistribution(BinaryConcrete(log_alpha, beta), AffineTransform(GAMMA, ZETA - GAMMA))
    general = Rectified(stretched)
    for name in ("prob_nonzero", "prob_one", "mean", "variance", "median"):
        torch.testing.assert_close(getattr(general, name), getattr(special_case, name))
    x = double([0.0, 0.1, 0.5, 0.9, 1.0])[:, None]
    for method in ("cdf", "icdf", "log_prob"):
        torch.testing.assert_close(getattr(general, method)(x), getattr(special_case, method)(x))
    torch.testing.assert_close(kl_divergence(general, special_case), torch.zeros(3, dtype=torch.float64))


@pytest.mark.slow
@given(loc=st.floats(-1.5, 2.5), scale=st.floats(0.05, 2))
def test_rectified_normal_has_its_closed_form_mean(loc: float, scale: float) -> None:
    z = Rectified(Normal(double(loc), double(scale)))
    a, b = -loc / scale, (1 - loc) / scale
    phi, cdf = stats.norm.pdf, stats.norm.cdf
    mean = loc * (cdf(b) - cdf(a)) - scale * (phi(b) - phi(a)) + 1 - cdf(b)
    assert z.mean.item() == pytest.approx(mean, abs=5e-5)  # the quantile function is singular at 0 and 1
    assert z.prob_nonzero.item() == pytest.approx(stats.norm.sf(a), abs=1e-12)
    assert z.noiseless.item() == min(max(loc, 0), 1)


def test_rectified_samples_have_its_moments() -> None:
    z, n = Rectified(Logistic(torch.tensor([-0.2, 0.5]), torch.tensor(0.3))), 200_000
    x = z.rsample((n,))
    assert ((x.mean(0) - z.mean).abs() < 5 * (z.variance / n).sqrt() + 1e-4).all()
    assert (x.var(0) / z.variance - 1).abs().max() < 0.02
    assert z.has_rsample
    assert x.shape == z.sample((n,)).shape == (n, 2)


def test_a_base_whose_support_leaves_out_the_atoms() -> None:
    loc = double(-1.0).requires_grad_()
    z = Rectified(LogNormal(loc, double(1.0), validate_args=False))
    assert z.prob_nonzero.item() == 1
    assert z.prob_one.item() == pytest.approx(stats.lognorm(1, scale=math.exp(-1)).sf(1), abs=1e-12)
    # Its density is singular at the atom, where it is not asked for: the gradient must not see it.
    z.log_prob(double([0.0, 0.3, 1.0])).sum().backward()
    assert loc.grad is not None
    assert loc.grad.isfinite()


def test_a_multivariate_base_is_refused() -> None:
    with pytest.raises(ValueError, match="`base` must be univariate"):
        Rectified(MultivariateNormal(torch.zeros(2), torch.eye(2)))


# ---- the KL divergence ----------------------------------------------------------------------------------------------

PAIRS: list[tuple[AbstractRectified, AbstractRectified]] = [
    (HardConcrete(double(1.0)), HardConcrete(double(-1.0), beta=0.5)),
    (HardConcrete(double(-4.0)), HardConcrete(double(3.0))),
    (HardConcrete(double(0.3)), Rectified(Normal(double(0.2), double(0.6)))),
    (Rectified(Normal(double(0.4), double(0.7))), HardConcrete(double(0.0))),
    (Rectified(Logistic(double(0.1), double(0.3))), Rectified(Normal(double(0.5), double(1.0)))),
]


@pytest.mark.parametrize(("q", "p"), PAIRS)
def test_kl_is_equation_28_by_quadrature(q: AbstractRectified, p: AbstractRectified) -> None:
    def integrand(x: float) -> float:
        log_q, log_p = q.log_prob(double(x)).item(), p.log_prob(double(x)).item()
        return math.exp(log_q) * (log_q - log_p)

    atoms = sum(integrand(x) for x in (0.0, 1.0))  # log_prob is the log mass there
    assert kl_divergence(q, p).item() == pytest.approx(atoms + quad(integrand, 1e-12, 1 - 1e-12), abs=1e-8)


@pytest.mark.parametrize(("q", "p"), PAIRS)
def test_kl_agrees_with_the_truncated_sampler_of_equation_29(q: AbstractRectified, p: AbstractRectified) -> None:
    n = 100_000
    z = q.rsample_truncated((n,))
    assert ((z > 0) & (z < 1)).all()
    ratio = q.log_prob(z) - p.log_prob(z)
    mass = q.prob_nonzero - q.prob_one
    atoms = sum(q.log_prob(x).exp() * (q.log_prob(x) - p.log_prob(x)) for x in double([0.0, 1.0]))
    estimate, error = atoms + mass * ratio.mean(), 5 * mass * ratio.std() / math.sqrt(n)
    assert abs(kl_divergence(q, p) - estimate) < error + 1e-9


def test_truncated_samples_follow_the_truncated_distribution() -> None:
    z = HardConcrete(double(-1.0))
    low, high = z.cdf(double(0.0)).item(), 1 - z.prob_one.item()
    samples = z.rsample_truncated((50_000,)).numpy()
    truncated = lambda x: (z.cdf(torch.from_numpy(x)).numpy() - low) / (high - low)  # noqa: E731
    assert stats.kstest(samples, truncated).pvalue > 1e-4


@given(a=st.floats(-8, 8), b=st.floats(-8, 8), beta=st.floats(0.2, 1.5))
def test_kl_is_positive_and_zero_for_equals(a: float, b: float, beta: float) -> None:
    q, p = HardConcrete(double(a), beta), HardConcrete(double(b))
    assert kl_divergence(q, p) > -1e-9
    assert kl_divergence(q, q).item() == pytest.approx(0, abs=1e-12)


def test_kl_broadcasts_over_batches_of_either() -> None:
    q, p = HardConcrete(double([0.0, 1.0])), HardConcrete(double([[0.5], [1.0], [2.0]]))
    kl = kl_divergence(q, p)
    assert kl.shape == (3, 2)
    assert kl[2, 1].item() == pytest.approx(kl_divergence(HardConcrete(double(1.0)), HardConcrete(double(2.0))).item())


# ---- gradients, precision, extremes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: hard_concrete_sample(double([0.2, 0.45, 0.6]), a, b, GAMMA, ZETA),
        lambda a, b: HardConcrete(a, b).prob_nonzero,
        lambda a, b: HardConcrete(a, b).mean,
        lambda a, b: HardConcrete(a, b).variance,
        lambda a, b: HardConcrete(a, b).noiseless,
        lambda a, b: HardConcrete(a, b).median,
        lambda a, b: HardConcrete(a, b).log_prob(double([[0.0], [0.3], [1.0]])),
        lambda a, b: HardConcrete(a, b).cdf(double([[0.0], [0.3]])),
        lambda a, b: BinaryConcrete(a, b).mean,
        lambda a, b: BinaryConcrete(a, b).variance,
        lambda a, b: BinaryConcrete(a, b).log_prob(double([[0.2], [0.9]])),
        lambda a, b: kl_divergence(HardConcrete(a, b), HardConcrete(double(0.5))),
        lambda a, b: kl_divergence(HardConcrete(double(0.5)), Rectified(Normal(a, b))),
        lambda a, b: kl_divergence(Rectified(Normal(a, b)), HardConcrete(double(0.5))),
        lambda a, b: Rectified(Logistic(a, b)).mean,
    ],
)
def test_gradients_by_finite_differences(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    log_alpha = double([-0.7, 0.2, 0.4]).requires_grad_()
    beta = double([0.5, 0.6, 0.9]).requires_grad_()
    assert torch.autograd.gradcheck(f, (log_alpha, beta))


def everything(z: Distribution) -> dict[str, Tensor]:
    x = torch.tensor([0.0, 0.1, 0.5, 1.0]).view(4, 1)
    names = ("mean", "variance", "median", "prob_nonzero", "prob_one", "noiseless")
    out = {name: getattr(z, name) for name in names if name in dir(z)}
    out |= {"rsample": z.rsample((50,)), "cdf": z.cdf(x), "icdf": z.icdf(x), "log_prob": z.log_prob(x)}
    if isinstance(z, AbstractRectified):
        prior = HardConcrete(torch.tensor(0.0))
        out |= {"truncated": z.rsample_truncated((50,)), "kl": kl_divergence(z, prior), "lk": kl_divergence(prior, z)}
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: HardConcrete(a, b),
        lambda a, b: BinaryConcrete(a, b),
        lambda a, b: Rectified(Normal(a, b)),
        lambda a, b: Rectified(Logistic(a, b)),
    ],
)
def test_nothing_overflows_up_to_50(make: Callable[[Tensor, Tensor], Distribution], dtype: torch.dtype) -> None:
    log_alpha = torch.tensor([-50.0, -20.0, -5.0, 0.0, 5.0, 20.0, 50.0], dtype=dtype, requires_grad=True)
    beta = torch.full((7,), 2 / 3, dtype=dtype, requires_grad=True)
    for name, out in everything(make(log_alpha, beta)).items():
        assert out.isfinite().all(), name
        assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
        gradients = torch.autograd.grad(out.sum(), (log_alpha, beta), allow_unused=True, materialize_grads=True)
        assert all(g.isfinite().all() for g in gradients), name


def test_half_precision_is_computed_in_float32() -> None:
    log_alpha = torch.tensor([-3.0, 0.0, 3.0], dtype=torch.bfloat16)
    expected = HardConcrete(log_alpha.double())
    z = HardConcrete(log_alpha)
    torch.testing.assert_close(z.mean.double(), expected.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z.prob_nonzero.double(), expected.prob_nonzero, rtol=1e-5, atol=1e-6)
    u = torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16)
    assert hard_concrete_sample(u, log_alpha, 2 / 3, GAMMA, ZETA).isfinite().all()


def test_any_density_can_be_reached() -> None:
    assert hard_concrete_prob_nonzero(torch.tensor(-20.0), 2 / 3, GAMMA, ZETA) < 1e-3
    assert hard_concrete_noiseless(torch.tensor(-20.0), GAMMA, ZETA) == 0


# ---- as a torch distribution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "z",
    [
        HardConcrete(torch.tensor([0.0, 1.0]), torch.tensor(0.5), -0.2, 1.3),
        BinaryConcrete(torch.tensor([0.0, 1.0]), 0.5),
        Logistic(torch.tensor([0.0, 1.0]), 0.5),
        Rectified(Normal(torch.tensor([0.0, 1.0]), 0.5)),
    ],
)
def test_expand(z: Distribution) -> None:
    wide = z.expand((3, 2))
    assert type(wide) is type(z)
    assert wide.batch_shape == (3, 2)
    assert wide.rsample((4,)).shape == (4, 3, 2)
    torch.testing.assert_close(wide.mean, z.mean.expand(3, 2))
    x = torch.tensor(0.25)
    torch.testing.assert_close(wide.log_prob(x), z.log_prob(x).expand(3, 2))
    assert wide._validate_args == z._validate_args


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_alpha": math.nan}, "`log_alpha` must be finite, got .*nan"),
        ({"beta": 0.0}, "`beta` must be positive and finite, got .*0"),
        ({"beta": -1.0}, "`beta` must be positive"),
        ({"gamma": 0.0}, r"`gamma` must be negative, got 0\.0"),
        ({"zeta": 1.0}, r"`zeta` must be greater than 1, got 1\.0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, float], message: str) -> None:
    log_alpha = torch.tensor([0.0, arguments.pop("log_alpha", 0.0)])
    with pytest.raises(ValueError, match=message):
        HardConcrete(log_alpha, **arguments, validate_args=True)
    if not {"gamma", "zeta"} & set(arguments):
        with pytest.raises(ValueError, match=message):
            BinaryConcrete(log_alpha, **arguments, validate_args=True)


def test_values_outside_the_support() -> None:
    with pytest.raises(ValueError, match="within the support"):
        HardConcrete(torch.tensor(0.0), validate_args=True).log_prob(torch.tensor(1.5))
    unchecked = HardConcrete(torch.tensor(0.0), validate_args=False)
    assert unchecked.log_prob(torch.tensor([-0.5, 1.5])).tolist() == [-math.inf, -math.inf]
