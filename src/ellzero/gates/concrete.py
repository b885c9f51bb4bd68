"""Continuous distributions on a gate's way to [0, 1], and what all distributions here share.

The binary concrete of Maddison et al. and the logistic; `distributions.py` has what clamping makes of them. This file
knows nothing of modules, parameters or networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all
from torch.nn.functional import logsigmoid
from torch.types import _size

from ellzero.gates.formulas import NOISE_EPS, binary_concrete_sample, promote

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
        self.log_alpha, self.beta = parameters(log_alpha, beta)
        if validates(validate_args):
            check_log_alpha_and_beta(self.log_alpha, self.beta)
        super().__init__(self.log_alpha.shape, validate_args=validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> BinaryConcrete:
        log_alpha, beta = self.log_alpha.expand(batch_shape), self.beta.expand(batch_shape)
        return expanded(self, batch_shape, log_alpha=log_alpha, beta=beta)

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        u = torch.rand(self._extended_shape(sample_shape), dtype=self.log_alpha.dtype, device=self.log_alpha.device)
        return binary_concrete_sample(u, self.log_alpha, self.beta)

    def cdf(self, value: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * safe_logit(value) - self.log_alpha)

    def icdf(self, value: Tensor) -> Tensor:
        return self._quantile(safe_logit(value))

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return concrete_log_density(safe_logit(value), self.log_alpha, self.beta)

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
        left = f(self._quantile(safe_log(below * x) - safe_log(above + below * rest)))
        right = f(self._quantile(safe_log(below + above * x) - safe_log(above * rest)))
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
        self.loc, self.scale = parameters(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> Logistic:
        return expanded(self, batch_shape, loc=self.loc.expand(batch_shape), scale=self.scale.expand(batch_shape))

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


def parameters(*parameters: float | Tensor) -> tuple[Tensor, ...]:
    """The parameters as tensors of one shape; promoted first, so that a float beside a half-precision one is exact."""
    return broadcast_all(*(promote(x) if isinstance(x, Tensor) else x for x in parameters))


def expanded(old: _D, batch_shape: _size, **attributes: Any) -> _D:
    """A copy of `old` with another batch shape and these attributes, whose values have been checked before."""
    new = type(old).__new__(type(old))
    vars(new).update(attributes)
    Distribution.__init__(new, torch.Size(batch_shape), validate_args=False)
    new._validate_args = old._validate_args
    return new


def safe_log(x: Tensor) -> Tensor:
    """log x of a non-negative x, stopping at the log of the smallest normal float; there its gradient is zero."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def safe_logit(x: Tensor) -> Tensor:
    """logit x of x in [0, 1], finite at both ends."""
    x = promote(x)
    return safe_log(x) - torch.log1p(-x.clamp(max=1 - torch.finfo(x.dtype).eps / 2))


def concrete_log_density(logit_s: Tensor, log_alpha: Tensor, beta: Tensor) -> Tensor:
    """log q(s) = log β − log s(1 − s) + log Q(s)(1 − Q(s)) with logit Q(s) = β logit s − log α (eqs. 23 and 24)."""
    y = beta * logit_s - log_alpha
    return beta.log() - logsigmoid(logit_s) - logsigmoid(-logit_s) + logsigmoid(y) + logsigmoid(-y)


def _tanh_sinh(n: int, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes x, 1 − x and weights of the double-exponential rule on (0, 1), x = σ(π sinh(k · step)), |k| ≤ n."""
    k = torch.arange(-n, n + 1, dtype=torch.float64) * step
    x, rest = torch.sigmoid(math.pi * torch.sinh(k)), torch.sigmoid(-math.pi * torch.sinh(k))
    return x, rest, step * math.pi * torch.cosh(k) * x * rest


_NODES, _WEIGHTS = (torch.from_numpy(x) / 2 for x in np.polynomial.legendre.leggauss(32))
_DOUBLE_EXPONENTIAL = _tanh_sinh(28, 1 / 8)  # as far as 1 − x = 3e-23, which float32 still holds


def gauss_legendre(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the 32-point Gauss–Legendre rule on (0, 1), along a new dimension before those of `like`."""
    shape = (-1, *[1] * like.dim())
    return (_NODES + 0.5).to(like).view(shape), _WEIGHTS.to(like).view(shape)


def check_log_alpha_and_beta(log_alpha: Tensor, beta: Tensor) -> None:
    """Refuses what is not finite, and a temperature that is not positive."""
    if not bool(torch.isfinite(log_alpha).all()):
        raise ValueError(f"`log_alpha` must be finite, got {log_alpha}")
    if not bool(((beta > 0) & torch.isfinite(beta)).all()):
        raise ValueError(f"`beta` must be positive and finite, got {beta}")


def validates(validate_args: bool | None) -> bool:
    """Whether arguments are checked, by torch's own default if nothing is said."""
    return Distribution._validate_args if validate_args is None else validate_args
