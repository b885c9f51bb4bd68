"""Hard concrete gates, the papers' own family, and what such a gate is at test time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from ellzero.gates import formulas
from ellzero.gates.abstract import AJAR, AbstractGate, Phi, check_mask
from ellzero.gates.formulas import promote

INIT_STD = 0.01  # Louizos et al., section 4: enough to break ties between gates, too little to matter otherwise
CLOSED = -50.0  # logit of P(open) in a gate closed for good: no draw opens it, no gradient is large enough to move it


class AbstractRule(ABC):
    """How a hard concrete gate is set at test time: a function of (log α, β, γ, ζ), zero exactly where closed."""

    @abstractmethod
    def __call__(self, log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
        """The test-time value of the gate."""


@final
@dataclass(frozen=True)
class Noiseless(AbstractRule):
    """ẑ = clamp(σ(log α)(ζ − γ) + γ, 0, 1) (Louizos et al., eq. 13); with the defaults open iff P(open) > 0.310."""

    def __call__(self, log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
        return formulas.hard_concrete_noiseless(log_alpha, gamma, zeta)


@final
@dataclass(frozen=True)
class Median(AbstractRule):
    """ẑ = clamp(σ(log α / β)(ζ − γ) + γ, 0, 1), the median of z; open iff P(open) > 1/2, whatever β, γ and ζ."""

    def __call__(self, log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
        return formulas.hard_concrete_median(log_alpha, beta, gamma, zeta)


@final
class HardConcreteGate(AbstractGate):
    """Hard concrete gates, z = clamp(σ((log α + logit u)/β)(ζ − γ) + γ, 0, 1) (Louizos et al., eqs. 10–12).

    log α is never clamped: any expected density can be reached.

    Args:
        shape: how many gates: an int, or a weight's shape.
        drop_rate: p in (0, 1); log α starts at N(log((1 − p)/p), 0.01²) (section 4). It is the drop rate of the
            underlying concrete variable, not of the gate: P(open) starts at 0.832 for p = 0.5.
        beta: the temperature β > 0: a float, shared and constant, or a tensor that broadcasts to `shape`.
        learn_beta: learn β too, as exp(`log_beta`), so that φ = (log α, β). A float gives each gate a β of its own;
            a tensor is learned in its own shape, so that `torch.tensor(2 / 3)` is one β for all.
        gamma: γ < 0, the lower end of the stretched interval.
        zeta: ζ > 1, its upper end.
        rule: the test-time rule, `Noiseless()` or `Median()`.

    Raises:
        ValueError: if an argument lies outside its range.

    Example:
        >>> gate = HardConcreteGate(4, drop_rate=0.5)
        >>> gate.prob_open().mean().item()  # doctest: +ELLIPSIS
        0.83...
        >>> gate.close_(torch.tensor([True, False, False, False]))
        >>> gate.open().tolist()
        [False, True, True, True]
    """

    log_alpha: nn.Parameter
    log_beta: Tensor | None

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        drop_rate: float = 0.5,
        beta: float | Tensor = 2 / 3,
        learn_beta: bool = False,
        gamma: float = -0.1,
        zeta: float = 1.1,
        rule: AbstractRule = Noiseless(),
    ) -> None:
        super().__init__(shape)
        check_drop_rate(drop_rate)
        formulas.check_stretch(gamma, zeta)
        if not isinstance(rule, AbstractRule):
            raise TypeError(f"`rule` must be a test rule such as `Noiseless()` or `Median()`, got {rule!r}")
        self.gamma, self.zeta, self.rule = float(gamma), float(zeta), rule
        mean = math.log((1 - drop_rate) / drop_rate)
        self.log_alpha = nn.Parameter(torch.empty(self.shape).normal_(mean, INIT_STD))
        betas = torch.as_tensor(beta, dtype=torch.get_default_dtype() if isinstance(beta, float | int) else None)
        if not bool((betas > 0).all()) or not bool(betas.isfinite().all()):
            raise ValueError(f"`beta` must be positive and finite, got {beta}")
        try:
            betas.expand(self.shape)
        except RuntimeError:
            raise ValueError(f"`beta` must broadcast to {tuple(self.shape)}, got shape {tuple(betas.shape)}") from None
        self._beta = None if learn_beta or isinstance(beta, Tensor) else float(beta)
        if learn_beta:
            full = betas if isinstance(beta, Tensor) else betas.expand(self.shape)
            self.log_beta = nn.Parameter(full.detach().log())
        else:
            self.register_buffer("log_beta", betas.detach().log() if isinstance(beta, Tensor) else None)

    @property
    def beta(self) -> float | Tensor:
        """The temperature: the float that was given, or the tensor exp(`log_beta`)."""
        if self._beta is not None:
            return self._beta
        assert self.log_beta is not None
        return promote(self.log_beta).exp()

    def phi(self) -> Phi:
        if self._beta is not None:
            return (self.log_alpha,)
        return self.log_alpha, torch.as_tensor(self.beta).expand(self.shape)

    def constants(self) -> tuple[Hashable, ...]:
        return (self._beta, self.gamma, self.zeta, self.rule)

    def _split(self, phi: Phi) -> tuple[Tensor, float | Tensor]:
        return phi[0], phi[1] if len(phi) == 2 else self.beta

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return formulas.hard_concrete_sample(u, *self._split(phi), self.gamma, self.zeta)

    def value_from(self, phi: Phi) -> Tensor:
        return self.rule(*self._split(phi), self.gamma, self.zeta)

    def prob_from(self, phi: Phi) -> Tensor:
        return formulas.hard_concrete_prob_nonzero(*self._split(phi), self.gamma, self.zeta)

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        check_mask(where, self.shape)
        # Eq. 13 closes at log α <= log(-γ/ζ), the median at β times that: go below both, by the same margin.
        edge = math.log(-self.gamma / self.zeta)
        closed = torch.as_tensor(self.beta * edge, device=where.device).clamp(max=edge) + CLOSED
        self.log_alpha.copy_(torch.where(where, closed.to(self.log_alpha.dtype), self.log_alpha))

    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        check_mask(where, self.shape)
        # Eq. 13 is v at log α = logit((v − γ)/(ζ − γ)), the median at β times that: the higher of the two.
        share = ((1 if wide else AJAR) - self.gamma) / (self.zeta - self.gamma)
        edge = math.log(share / (1 - share))
        log_alpha = torch.maximum(torch.as_tensor(self.beta * edge), torch.tensor(edge)).to(self.log_alpha)
        log_alpha -= CLOSED if wide else 0
        self.log_alpha.copy_(torch.where(where, log_alpha, self.log_alpha))

    def extra_repr(self) -> str:
        beta = "tensor" if self.log_beta is not None else f"{self._beta:.4g}"
        return f"{tuple(self.shape)}, beta={beta}, gamma={self.gamma:g}, zeta={self.zeta:g}, rule={self.rule}"


def check_drop_rate(drop_rate: float) -> None:
    """Refuses a drop rate outside (0, 1)."""
    if not 0 < drop_rate < 1:
        raise ValueError(f"`drop_rate` must lie in (0, 1), got {drop_rate}")
