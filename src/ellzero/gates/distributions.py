"""One random multiplier as a `torch.distributions.Distribution`: binary concrete, hard concrete, rectified anything.

The hard concrete of Louizos et al. (2018) is a mixture of an atom at 0, an atom at 1 and a density between them. The
recipe behind it is general: clamp any continuous s̄ that has a CDF to [0, 1]. Both are here, with the KL divergence
between any two of them; so are the few formulas of the hard concrete, as pure functions, so that each exists once.
This file knows nothing of modules, parameters or networks. Equation numbers are those of the paper.

Half-precision parameters are promoted to float32, float64 stays float64. Everything is finite, and has finite
gradients, for |log α| up to 50.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.distributions.utils import broadcast_all
from torch.nn.functional import logsigmoid
from torch.types import _size

from ellzero.gates.formulas import (
    NOISE_EPS,
    binary_concrete_sample,
    check_stretch,
    hard_concrete_noiseless,
    hard_concrete_prob_nonzero,
    hard_concrete_sample,
    promote,
)

_D = TypeVar("_D", bound=Distribution)


@final
class BinaryConcrete(Distribution):
    """The binary concrete distribution on (0, 1), s = σ((log α + logit u) / β) with u uniform (eqs. 10, 23, 24).

    CDF: Q(s) = σ(β logit s − log α). Mean and variance have no closed form; they are integrated numerically.

    Args:
        log_alpha: the location log α.
        beta: the temperature β > 0; broadcasts with `log_alpha`.

    Raises:
        ValueError: if `log_alpha` is not finite or `beta` is not positive (unless `validate_args=False`).

    Example:
        >>> s = BinaryConcrete(torch.tensor([-1.0, 0.0]), beta=2 / 3)
        >>> s.cdf(torch.tensor(0.5))
        tensor([0.7311, 0.5000])
    """

    arg_constraints = {"log_alpha": constraints.real, "beta": constraints.positive}
    support = constraints.unit_interval
    has_rsample = True

    def __init__(
        self, log_alpha: float | Tensor, beta: float | Tensor = 2 / 3, validate_args: bool | None = None
    ) -> None:
        self.log_alpha, self.beta = _parameters(log_alpha, beta)
        if _validates(validate_args):
            _check_log_alpha_and_beta(self.log_alpha, self.beta)
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> BinaryConcrete:
        log_alpha, beta = self.log_alpha.expand(batch_shape), self.beta.expand(batch_shape)
        return _expanded(self, batch_shape, log_alpha=log_alpha, beta=beta)

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.log_alpha.dtype, device=self.log_alpha.device)
        return binary_concrete_sample(u, self.log_alpha, self.beta)

    def cdf(self, value: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * _logit(value) - self.log_alpha)

    def icdf(self, value: Tensor) -> Tensor:
        return self._quantile(_logit(value))

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return _concrete_log_density(_logit(value), self.log_alpha, self.beta)

    @property
    def median(self) -> Tensor:
        """σ(log α / β)."""
        return torch.sigmoid(self.log_alpha / self.beta)

    @property
    def mean(self) -> Tensor:
        return self._expect(lambda s: s)

    @property
    def variance(self) -> Tensor:
        mean = self.mean
        return self._expect(lambda s: (s - mean) ** 2)

    def _quantile(self, logit_t: Tensor) -> Tensor:
        return torch.sigmoid((logit_t + self.log_alpha) / self.beta)

    def _expect(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        # In the quantile variable t the integrand turns at s = 1/2, where t = σ(−log α), and is singular at 0 and 1.
        # Cut at the turn, all three lie at ends of the pieces, where the double-exponential rule puts its points.
        below, above = torch.sigmoid(-self.log_alpha), torch.sigmoid(self.log_alpha)
        x, rest, w = (r.to(below).view(-1, *[1] * below.dim()) for r in _DOUBLE_EXPONENTIAL)  # rest = 1 - x
        left = f(self._quantile(_log(below * x) - _log(above + below * rest)))
        right = f(self._quantile(_log(below + above * x) - _log(above * rest)))
        return below * (w * left).sum(0) + above * (w * right).sum(0)


@final
class Logistic(Distribution):
    """The logistic distribution, with CDF σ((x − loc) / scale); a base for `Rectified`.

    Args:
        loc: its mean and median.
        scale: its scale, positive.

    Example:
        >>> Logistic(torch.tensor(0.5), torch.tensor(0.3)).cdf(torch.tensor(0.5))
        tensor(0.5000)
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: float | Tensor, scale: float | Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.scale = _parameters(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> Logistic:
        return _expanded(self, batch_shape, loc=self.loc.expand(batch_shape), scale=self.scale.expand(batch_shape))

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        return self.icdf(u.clamp(NOISE_EPS, 1 - NOISE_EPS))

    def cdf(self, value: Tensor) -> Tensor:
        return torch.sigmoid((value - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        return self.loc + self.scale * torch.logit(value)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        y = (value - self.loc) / self.scale
        return logsigmoid(y) + logsigmoid(-y) - self.scale.log()

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale**2 * (math.pi**2 / 3)


class AbstractRectified(Distribution, ABC):
    """z = clamp(s̄, 0, 1) for a continuous s̄ with CDF Q: atoms at 0 and 1 and a density between them (eqs. 5, 26).

    A subclass describes s̄, by the abstract methods; what follows for z is here. Integrals over the density are taken
    in the quantile variable t = Q(z) by a 32-point Gauss–Legendre rule: deterministic, and differentiable.
    """

    support = constraints.unit_interval

    @abstractmethod
    def _masses(self) -> tuple[Tensor, Tensor, Tensor]:
        """P(z = 0) = Q(0), P(z = 1) = 1 − Q(1), and the mass between them."""

    @abstractmethod
    def _log_masses(self) -> tuple[Tensor, Tensor]:
        """log P(z = 0) and log P(z = 1), finite."""

    @abstractmethod
    def _base_cdf(self, x: Tensor) -> Tensor:
        """Q(x), for x in [0, 1]."""

    @abstractmethod
    def _base_log_prob(self, x: Tensor) -> Tensor:
        """log q(x), for x in (0, 1)."""

    @abstractmethod
    def _base_icdf(self, t: Tensor, complement: Tensor) -> Tensor:
        """Q⁻¹(t); `complement` is 1 − t, passed too because subtraction would lose it in the upper tail."""

    @property
    @abstractmethod
    def prob_nonzero(self) -> Tensor:
        """P(z ≠ 0) = 1 − Q(0) (eqs. 6 and 12)."""

    @property
    @abstractmethod
    def noiseless(self) -> Tensor:
        """The test-time value of z (eq. 13)."""

    @property
    @final
    def prob_one(self) -> Tensor:
        """P(z = 1) = 1 − Q(1)."""
        return self._masses()[1]

    @property
    @final
    def median(self) -> Tensor:
        """The median of z: zero exactly where P(z ≠ 0) ≤ 1/2."""
        half = torch.full_like(self._masses()[0], 0.5)
        return self.icdf(half)

    @property
    @final
    def mean(self) -> Tensor:
        return self._masses()[1] + self._expect_between(lambda z: z)

    @property
    @final
    def variance(self) -> Tensor:
        mean, (zero, one, _) = self.mean, self._masses()
        # About the mean, not E[z²] − E[z]²: a sum of squares stays positive when nearly all the mass is one atom.
        return zero * mean**2 + one * (1 - mean) ** 2 + self._expect_between(lambda z: (z - mean) ** 2)

    @final
    def cdf(self, value: Tensor) -> Tensor:
        inside = self._base_cdf(promote(value).clamp(0.0, 1.0))
        return torch.where(value < 0, torch.zeros_like(inside), torch.where(value < 1, inside, torch.ones_like(inside)))

    @final
    def icdf(self, value: Tensor) -> Tensor:
        value = promote(value)
        return self._base_icdf(value, 1 - value).clamp(0.0, 1.0)

    @final
    def log_prob(self, value: Tensor) -> Tensor:
        """The log mass at exactly 0 and 1, the log density between them, −∞ elsewhere (eq. 26)."""
        if self._validate_args:
            self._validate_sample(value)
        value = promote(value)
        log_zero, log_one = self._log_masses()
        between = (value > 0) & (value < 1)
        # The density is evaluated at a harmless point where it is not asked for, so that no gradient is 0 · ∞.
        density = self._base_log_prob(torch.where(between, value, 0.5))
        atom = torch.where(value == 0, log_zero, torch.where(value == 1, log_one, -math.inf))
        return torch.where(between, density, atom)

    @final
    def rsample_truncated(self, sample_shape: _size = ()) -> Tensor:
        """Samples of z given 0 < z < 1, by inversion: z = Q⁻¹(Q(0) + u(Q(1) − Q(0))) (eq. 29 on the interval (0, 1)).

        Their average of log q(z) − log p(z) is the Monte Carlo estimate of the expectation in eq. 28, which
        `kl_divergence` integrates instead.
        """
        zero = self._masses()[0]
        return self._between(torch.rand(self._extended_shape(sample_shape), dtype=zero.dtype, device=zero.device))

    @final
    def _between(self, x: Tensor) -> Tensor:
        zero, one, mass = self._masses()
        return self._base_icdf(zero + mass * x, one + mass * (1 - x)).clamp(0.0, 1.0)

    @final
    def _expect_between(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """∫ f(z) q(z) dz over 0 < z < 1."""
        mass = self._masses()[2]
        x, w = _gauss_legendre(mass)
        return mass * (w * f(self._between(x))).sum(0)


@final
class HardConcrete(AbstractRectified):
    """The hard concrete distribution: a binary concrete stretched to (γ, ζ) and clamped to [0, 1] (section 2.2).

    z = clamp(σ((log α + logit u) / β)(ζ − γ) + γ, 0, 1), u uniform (eqs. 10, 11);
    P(z ≠ 0) = σ(log α − β log(−γ/ζ)) (eq. 12).

    Args:
        log_alpha: the location log α.
        beta: the temperature β > 0; broadcasts with `log_alpha`.
        gamma: γ < 0, the lower end of the stretched interval.
        zeta: ζ > 1, its upper end.

    Raises:
        ValueError: if an argument lies outside its range (unless `validate_args=False`).

    Example:
        >>> z = HardConcrete(torch.tensor([-3.0, 0.0, 3.0]))
        >>> z.prob_nonzero
        tensor([0.1976, 0.8318, 0.9900])
        >>> z.log_prob(torch.tensor(0.0)).exp()
        tensor([0.8024, 0.1682, 0.0100])
    """

    arg_constraints = {"log_alpha": constraints.real, "beta": constraints.positive}
    has_rsample = True

    def __init__(
        self,
        log_alpha: float | Tensor,
        beta: float | Tensor = 2 / 3,
        gamma: float = -0.1,
        zeta: float = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        self.log_alpha, self.beta = _parameters(log_alpha, beta)
        self.gamma, self.zeta = float(gamma), float(zeta)
        if _validates(validate_args):
            _check_log_alpha_and_beta(self.log_alpha, self.beta)
            check_stretch(self.gamma, self.zeta)
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> HardConcrete:
        log_alpha, beta = self.log_alpha.expand(batch_shape), self.beta.expand(batch_shape)
        return _expanded(self, batch_shape, log_alpha=log_alpha, beta=beta, gamma=self.gamma, zeta=self.zeta)

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.log_alpha.dtype, device=self.log_alpha.device)
        return hard_concrete_sample(u, self.log_alpha, self.beta, self.gamma, self.zeta)

    @property
    def prob_nonzero(self) -> Tensor:
        """P(z ≠ 0) = σ(log α − β log(−γ/ζ)) (eq. 12)."""
        return hard_concrete_prob_nonzero(self.log_alpha, self.beta, self.gamma, self.zeta)

    @property
    def noiseless(self) -> Tensor:
        """The test-time value ẑ = clamp(σ(log α)(ζ − γ) + γ, 0, 1) (eq. 13)."""
        return hard_concrete_noiseless(self.log_alpha, self.gamma, self.zeta)

    def _edges(self) -> tuple[Tensor, Tensor]:
        """logit Q(0) and logit Q(1)."""
        low, high = math.log(-self.gamma / self.zeta), math.log((1 - self.gamma) / (self.zeta - 1))
        return self.beta * low - self.log_alpha, self.beta * high - self.log_alpha

    def _masses(self) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self._edges()
        # σ(b) − σ(a), without the cancellation: it keeps its digits when both are next to 0, or both next to 1.
        between = torch.sigmoid(b) * torch.sigmoid(-a) * -torch.expm1(a - b)
        return torch.sigmoid(a), torch.sigmoid(-b), between

    def _log_masses(self) -> tuple[Tensor, Tensor]:
        a, b = self._edges()
        return logsigmoid(a), logsigmoid(-b)

    def _base_cdf(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * self._logit_unstretched(x) - self.log_alpha)

    def _base_log_prob(self, x: Tensor) -> Tensor:
        density = _concrete_log_density(self._logit_unstretched(x), self.log_alpha, self.beta)
        return density - math.log(self.zeta - self.gamma)

    def _base_icdf(self, t: Tensor, complement: Tensor) -> Tensor:
        s = torch.sigmoid((_log(t) - _log(complement) + self.log_alpha) / self.beta)
        return s * (self.zeta - self.gamma) + self.gamma

    def _logit_unstretched(self, x: Tensor) -> Tensor:
        return torch.log((x - self.gamma) / (self.zeta - x))


@final
class Rectified(AbstractRectified):
    """The hard-sigmoid z = clamp(s̄, 0, 1) of any continuous distribution (section 2.1, eqs. 5 and 6).

    What it asks of its base:

    - `cdf` for `cdf`, `prob_nonzero` and `prob_one`, at 0 and 1 too: a base whose support leaves these out must be
      built with `validate_args=False`;
    - `rsample` for `rsample`, `sample` for `sample`;
    - `cdf` and `log_prob` for `log_prob`;
    - `icdf` for `icdf` and `median`, `mean` for `noiseless`;
    - `cdf` and `icdf` for `mean`, `variance` and `rsample_truncated`;
    - for `kl_divergence(q, p)`, `cdf`, `icdf` and `log_prob` of q, `cdf` and `log_prob` of p.

    Its precision is that of its base; log masses stop at the log of the smallest float.

    Args:
        base: a univariate continuous distribution.

    Raises:
        ValueError: if `base` is multivariate.

    Example:
        >>> z = Rectified(torch.distributions.Normal(torch.tensor([-1.0, 0.5]), 0.5))
        >>> z.prob_nonzero
        tensor([0.0228, 0.8413])
        >>> z.noiseless
        tensor([0.0000, 0.5000])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, base: Distribution, validate_args: bool | None = None) -> None:
        if base.event_shape:
            raise ValueError(f"`base` must be univariate, got one with event shape {tuple(base.event_shape)}")
        self.base = base
        super().__init__(base.batch_shape, validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return bool(self.base.has_rsample)

    def expand(self, batch_shape: _size, _instance: Any = None) -> Rectified:
        return _expanded(self, batch_shape, base=self.base.expand(batch_shape))

    def sample(self, sample_shape: _size = ()) -> Tensor:
        return promote(self.base.sample(sample_shape)).clamp(0.0, 1.0)

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        return promote(self.base.rsample(sample_shape)).clamp(0.0, 1.0)

    @property
    def prob_nonzero(self) -> Tensor:
        """P(z ≠ 0) = 1 − Q(0) (eq. 6)."""
        return 1 - self._cdf_at(0.0)

    @property
    def noiseless(self) -> Tensor:
        """The mean of the base, clamped."""
        return promote(self.base.mean).clamp(0.0, 1.0)

    def _masses(self) -> tuple[Tensor, Tensor, Tensor]:
        at_zero, at_one = self._cdf_at(0.0), self._cdf_at(1.0)
        return at_zero, 1 - at_one, at_one - at_zero

    def _cdf_at(self, x: float) -> Tensor:
        # A base does not tell its precision, and what it makes of a float32 constant is no better than float32.
        q = self._base_cdf(torch.full((), x, dtype=torch.float32))
        return q if q.dtype != torch.float64 else self._base_cdf(torch.full((), x, dtype=torch.float64))

    def _log_masses(self) -> tuple[Tensor, Tensor]:
        zero, one, _ = self._masses()
        return _log(zero), _log(one)

    def _base_cdf(self, x: Tensor) -> Tensor:
        return promote(self.base.cdf(x))

    def _base_log_prob(self, x: Tensor) -> Tensor:
        return promote(self.base.log_prob(x))

    def _base_icdf(self, t: Tensor, complement: Tensor) -> Tensor:
        # Short of 0 and 1, where a base with unbounded support has ±∞, and 0 · ∞ for a gradient.
        eps = torch.finfo(t.dtype).eps
        return promote(self.base.icdf(t.clamp(eps, 1 - eps)))


def _kl_rectified(q: AbstractRectified, p: AbstractRectified) -> Tensor:
    """KL(q ‖ p) of two rectified distributions (eqs. 27 and 28).

    The atoms contribute in closed form, the densities by a 32-point Gauss–Legendre rule in the quantile variable of q.
    """
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    q, p = q.expand(shape), p.expand(shape)
    (zero, one, _), (log_q0, log_q1), (log_p0, log_p1) = q._masses(), q._log_masses(), p._log_masses()
    between = q._expect_between(lambda z: q._base_log_prob(z) - p._base_log_prob(z))
    return zero * (log_q0 - log_p0) + one * (log_q1 - log_p1) + between


register_kl(AbstractRectified, AbstractRectified)(_kl_rectified)


def _parameters(*parameters: float | Tensor) -> tuple[Tensor, ...]:
    """The parameters as tensors of one shape; promoted first, so that a float beside a half-precision one is exact."""
    return broadcast_all(*(promote(x) if isinstance(x, Tensor) else x for x in parameters))


def _expanded(old: _D, batch_shape: _size, **attributes: Any) -> _D:
    """A copy of `old` with another batch shape and these attributes, whose values have been checked before."""
    new = type(old).__new__(type(old))
    vars(new).update(attributes)
    Distribution.__init__(new, torch.Size(batch_shape), validate_args=False)
    new._validate_args = old._validate_args
    return new


def _log(x: Tensor) -> Tensor:
    """log x of a non-negative x, stopping at the log of the smallest normal float; there its gradient is zero."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def _logit(x: Tensor) -> Tensor:
    """logit x of x in [0, 1], finite at both ends."""
    x = promote(x)
    return _log(x) - torch.log1p(-x.clamp(max=1 - torch.finfo(x.dtype).eps / 2))


def _concrete_log_density(logit_s: Tensor, log_alpha: Tensor, beta: Tensor) -> Tensor:
    """log q(s) = log β − log s(1 − s) + log Q(s)(1 − Q(s)) with logit Q(s) = β logit s − log α (eqs. 23 and 24)."""
    y = beta * logit_s - log_alpha
    return beta.log() - logsigmoid(logit_s) - logsigmoid(-logit_s) + logsigmoid(y) + logsigmoid(-y)


def _golub_welsch(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the n-point Gauss–Legendre rule on (0, 1), from the Jacobi matrix's eigensystem."""
    k = torch.arange(1, n, dtype=torch.float64)
    off = k / torch.sqrt(4 * k**2 - 1)
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return (nodes + 1) / 2, vectors[0] ** 2


def _tanh_sinh(n: int, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes x, 1 − x and weights of the double-exponential rule on (0, 1), x = σ(π sinh(k · step)), |k| ≤ n."""
    k = torch.arange(-n, n + 1, dtype=torch.float64) * step
    x, rest = torch.sigmoid(math.pi * torch.sinh(k)), torch.sigmoid(-math.pi * torch.sinh(k))
    return x, rest, step * math.pi * torch.cosh(k) * x * rest


_NODES, _WEIGHTS = _golub_welsch(32)
_DOUBLE_EXPONENTIAL = _tanh_sinh(28, 1 / 8)  # as far as 1 − x = 3e-23, which float32 still holds


def _gauss_legendre(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights along a new first dimension, before the dimensions of `like`."""
    shape = (-1, *[1] * like.dim())
    return _NODES.to(like).view(shape), _WEIGHTS.to(like).view(shape)


def _check_log_alpha_and_beta(log_alpha: Tensor, beta: Tensor) -> None:
    if not bool(torch.isfinite(log_alpha).all()):
        raise ValueError(f"`log_alpha` must be finite, got {log_alpha}")
    if not bool(((beta > 0) & torch.isfinite(beta)).all()):
        raise ValueError(f"`beta` must be positive and finite, got {beta}")


def _validates(validate_args: bool | None) -> bool:
    return Distribution._validate_args if validate_args is None else validate_args
