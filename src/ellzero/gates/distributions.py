"""One random multiplier as a `torch.distributions.Distribution`: binary concrete, hard concrete, rectified anything.

The hard concrete of Louizos et al. (2018), whose equation numbers these are, and the general recipe behind it: clamp
any continuous s̄ that has a CDF to [0, 1]. Half-precision parameters are promoted to float32, float64 stays float64.
Everything is finite, and has finite gradients, for |log α| up to 50. This file knows nothing of modules or networks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.nn.functional import logsigmoid
from torch.types import _size

from ellzero.gates import concrete, formulas
from ellzero.gates.concrete import BinaryConcrete, Logistic, expanded, safe_log
from ellzero.gates.formulas import promote

__all__ = ["AbstractRectified", "BinaryConcrete", "HardConcrete", "Logistic", "Rectified"]


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
        return self.icdf(torch.full_like(self._masses()[0], 0.5))

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
        x, w = concrete.gauss_legendre(mass)
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
        self.log_alpha, self.beta = concrete.parameters(log_alpha, beta)
        self.gamma, self.zeta = float(gamma), float(zeta)
        if concrete.validates(validate_args):
            concrete.check_log_alpha_and_beta(self.log_alpha, self.beta)
            formulas.check_stretch(self.gamma, self.zeta)
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> HardConcrete:
        log_alpha, beta = self.log_alpha.expand(batch_shape), self.beta.expand(batch_shape)
        return expanded(self, batch_shape, log_alpha=log_alpha, beta=beta, gamma=self.gamma, zeta=self.zeta)

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.log_alpha.dtype, device=self.log_alpha.device)
        return formulas.hard_concrete_sample(u, self.log_alpha, self.beta, self.gamma, self.zeta)

    @property
    def prob_nonzero(self) -> Tensor:
        """P(z ≠ 0) = σ(log α − β log(−γ/ζ)) (eq. 12)."""
        return formulas.hard_concrete_prob_nonzero(self.log_alpha, self.beta, self.gamma, self.zeta)

    @property
    def noiseless(self) -> Tensor:
        """The test-time value ẑ = clamp(σ(log α)(ζ − γ) + γ, 0, 1) (eq. 13)."""
        return formulas.hard_concrete_noiseless(self.log_alpha, self.gamma, self.zeta)

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
        density = concrete.concrete_log_density(self._logit_unstretched(x), self.log_alpha, self.beta)
        return density - math.log(self.zeta - self.gamma)

    def _base_icdf(self, t: Tensor, complement: Tensor) -> Tensor:
        s = torch.sigmoid((safe_log(t) - safe_log(complement) + self.log_alpha) / self.beta)
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
        return expanded(self, batch_shape, base=self.base.expand(batch_shape))

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
        return safe_log(zero), safe_log(one)

    def _base_cdf(self, x: Tensor) -> Tensor:
        return promote(self.base.cdf(x))

    def _base_log_prob(self, x: Tensor) -> Tensor:
        return promote(self.base.log_prob(x))

    def _base_icdf(self, t: Tensor, complement: Tensor) -> Tensor:
        # Short of 0 and 1, where a base with unbounded support has ±∞, and 0 · ∞ for a gradient.
        eps = torch.finfo(t.dtype).eps
        return promote(self.base.icdf(t.clamp(eps, 1 - eps)))


def _kl_rectified(q: AbstractRectified, p: AbstractRectified) -> Tensor:
    """KL(q ‖ p) (eqs. 27 and 28): atoms in closed form, densities by quadrature in the quantile variable of q."""
    shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    q, p = q.expand(shape), p.expand(shape)
    (zero, one, _), (log_q0, log_q1), (log_p0, log_p1) = q._masses(), q._log_masses(), p._log_masses()
    between = q._expect_between(lambda z: q._base_log_prob(z) - p._base_log_prob(z))
    return zero * (log_q0 - log_p0) + one * (log_q1 - log_p1) + between


register_kl(AbstractRectified, AbstractRectified)(_kl_rectified)
