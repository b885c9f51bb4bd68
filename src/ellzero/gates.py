"""Gates: modules that hold the parameters φ of one random multiplier per unit (or per weight) and evaluate them.

A *family* of gates is a handful of pure functions of φ: draw z from uniform noise, the test-time value, P(z ≠ 0), the
evidence for keeping. Because they are pure, all gates of a model are evaluated together on concatenated φ (`draw`,
`values`, `probabilities`, ...) in a few kernels, however many layers there are. This file knows nothing of networks:
not which weights a gate multiplies, not what an open gate costs, not how gates are trained.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from .distributions import (
    Rectified,
    check_stretch,
    hard_concrete_median,
    hard_concrete_noiseless,
    hard_concrete_prob_nonzero,
    hard_concrete_sample,
    promote,
)

Phi: TypeAlias = tuple[Tensor, ...]

_INIT_STD = 0.01  # Louizos et al., section 4: enough to break ties between gates, too little to matter otherwise
_CLOSED = -50.0  # logit of P(open) in a gate closed for good: no draw opens it, no gradient is large enough to move it
_AJAR = 0.1  # the test-time value of a gate that `open_` opens: the network changes by little
_GOLDEN = (math.sqrt(5) - 1) / 2


class NoExpectation(TypeError):
    """A gate family without an atom at zero has P(z ≠ 0) = 1: it has a kept cost, and no useful expected one."""


class AbstractGate(nn.Module, ABC):
    """A module holding `shape` independent random multipliers z ~ q(z | φ).

    A new family is a final subclass that provides the seven abstract methods. Those named `*_from` are functions of
    φ (and noise) alone: they may use `self` only through what `constants()` returns, and must act element by element
    on tensors of any shape, because the φ of many gates are concatenated before they are called.

    Args:
        shape: how many gates there are: an int for one per unit of an axis, a weight's shape for one per weight.

    Raises:
        ValueError: if a dimension of `shape` is not a positive integer.
    """

    shape: torch.Size

    def __init__(self, shape: int | Sequence[int]) -> None:
        super().__init__()
        dims = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in dims):
            raise ValueError(f"`shape` must be a positive integer or a sequence of them, got {shape!r}")
        self.shape = torch.Size(dims)

    # ---- what a family provides -------------------------------------------------------------------------------------

    @abstractmethod
    def phi(self) -> Phi:
        """The parameters of q, each expanded to `shape`."""

    @abstractmethod
    def constants(self) -> tuple[Hashable, ...]:
        """What else the functions below depend on; gates of equal type and constants are evaluated together."""

    @abstractmethod
    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        """Draws z from uniform noise `u` by a differentiable transformation, z = g(f(φ, u)) (Louizos et al., eq. 8)."""

    @abstractmethod
    def value_from(self, phi: Phi) -> Tensor:
        """The test-time gate; exactly zero where the gate is closed."""

    @abstractmethod
    def prob_from(self, phi: Phi) -> Tensor:
        """P(z ≠ 0); a family without an atom at zero raises `NoExpectation`."""

    @abstractmethod
    def evidence_from(self, phi: Phi) -> Tensor:
        """How much speaks for keeping a unit; larger means keep."""

    @abstractmethod
    def close_(self, where: Tensor) -> None:
        """Closes the gates in the mask for good: `value()` is 0 there; all others stay as they are, bit for bit."""

    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        """Opens the gates in the mask; all others stay as they are.

        Args:
            where: which.
            wide: whether `value()` is 1 there; else it is 0.1 or somewhat more, by little.

        Raises:
            NotImplementedError: the family has no such thing, and there is something to open.
        """
        if bool(where.any()):
            raise NotImplementedError(f"{type(self).__name__} has no `open_`, and closed gates cannot be opened again")

    # ---- what every gate can do -------------------------------------------------------------------------------------

    @final
    def sample(self, u: Tensor | None = None) -> Tensor:
        """Draws z once, from torch's default generator or from the uniform noise `u` of this gate's shape.

        Raises:
            ValueError: if `u` has another shape.
        """
        if u is not None and u.shape != self.shape:
            raise ValueError(f"`u` must have shape {tuple(self.shape)}, got {tuple(u.shape)}")
        return self.sample_from(self.phi(), noise([self]).view(self.shape) if u is None else u)

    @final
    def value(self) -> Tensor:
        """The test-time gate, without noise."""
        return self.value_from(self.phi())

    @final
    def open(self) -> Tensor:
        """Which gates are open at test time: `value() != 0`."""
        return self.value() != 0

    @final
    def evidence(self) -> Tensor:
        """How much speaks for keeping each unit; larger means keep."""
        return self.evidence_from(self.phi())

    @final
    def prob_open(self) -> Tensor:
        """P(z ≠ 0) of each gate.

        Raises:
            NoExpectation: if the family has no atom at zero.
        """
        return self.prob_from(self.phi())

    @final
    def check(self, name: str) -> None:
        """Refuses a gate with a parameter that is not finite.

        Args:
            name: what the gate is called where it is used; the message has it.

        Raises:
            ValueError: naming the parameter, how many of its entries are not finite, and the first of them.
        """
        for key, tensor in self.state_dict().items():
            bad = ~torch.isfinite(tensor)
            if bad.any():
                first = tuple(bad.nonzero()[0].tolist())
                raise ValueError(
                    f"`{name}.{key}` must be finite, got {int(bad.sum())} of {bad.numel()} entries that are not, "
                    f"the first {tensor[first].item()} at index {first}"
                )


# ---- many gates at once ---------------------------------------------------------------------------------------------


def noise(gates: Sequence[AbstractGate]) -> Tensor:
    """Uniform noise for one draw of all gates, in float32, flat, in the order of the sequence.

    It comes from torch's default generator of the gates' device. In a process group of several ranks, rank r uses
    (u + 0.618…·r) mod 1, a rotation by the golden ratio, which is uniform still: ranks that were seeded alike then draw
    different gates, as minibatches in parallel should (Louizos et al., section 4.2).
    """
    device = gates[0].phi()[0].device if gates else None
    u = torch.rand(sum(gate.shape.numel() for gate in gates), device=device, dtype=torch.float32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        shift = torch.distributed.get_rank() * _GOLDEN % 1.0
        if shift:
            u = torch.frac(u + shift)
    return u


def draw(gates: Sequence[AbstractGate], u: Tensor | None = None) -> list[Tensor]:
    """Draws z of all gates together.

    Args:
        gates: the gates, of any families.
        u: flat uniform noise with one entry per gate, in the order of the sequence; None draws it with `noise`.

    Returns:
        One tensor per gate module, of its shape, in float32 (float64 where φ is).

    Raises:
        ValueError: if `u` has another shape.

    Example:
        >>> gates = [HardConcreteGate(300), HardConcreteGate((20, 5))]
        >>> [tuple(z.shape) for z in draw(gates)]
        [(300,), (20, 5)]
    """
    if u is None:
        u = noise(gates)
    elif u.shape != (total := sum(gate.shape.numel() for gate in gates),):
        raise ValueError(f"`u` must have shape ({total},), one entry per gate, got {tuple(u.shape)}")
    return _together(gates, lambda gate, phi, u: gate.sample_from(phi, u), u)


def values(gates: Sequence[AbstractGate]) -> list[Tensor]:
    """`value()` of each gate, evaluated together."""
    return _together(gates, lambda gate, phi: gate.value_from(phi))


def opens(gates: Sequence[AbstractGate]) -> list[Tensor]:
    """`open()` of each gate, evaluated together."""
    return _together(gates, lambda gate, phi: gate.value_from(phi) != 0)


def probabilities(gates: Sequence[AbstractGate]) -> list[Tensor]:
    """`prob_open()` of each gate, evaluated together."""
    return _together(gates, lambda gate, phi: gate.prob_from(phi))


def evidences(gates: Sequence[AbstractGate]) -> list[Tensor]:
    """`evidence()` of each gate, evaluated together."""
    return _together(gates, lambda gate, phi: gate.evidence_from(phi))


def flat(gates: Sequence[AbstractGate], f: Callable[[AbstractGate, Phi], Tensor]) -> Tensor:
    """`f(gate, phi)` of all gates in one flat tensor, in the order of the sequence.

    Example:
        >>> gates = [HardConcreteGate(300), HardConcreteGate((20, 5))]
        >>> flat(gates, lambda gate, phi: gate.prob_from(phi)).shape
        torch.Size([400])
    """
    phis = [gate.phi() for gate in gates]
    if len(set(map(_kind, gates, phis))) == 1:
        return _alike(gates, phis, f, None)
    return torch.cat([part.reshape(-1) for part in _together(gates, f)])


def _kind(gate: AbstractGate, phi: Phi) -> tuple[Hashable, ...]:
    """Gates of one kind are evaluated together."""
    return type(gate), gate.constants(), phi[0].dtype, phi[0].device


def _together(gates: Sequence[AbstractGate], f: Callable[..., Tensor], u: Tensor | None = None) -> list[Tensor]:
    """One tensor per gate, in order, from one call of `f(gate, phi)` or `f(gate, phi, u)` per kind of gate."""
    phis = [gate.phi() for gate in gates]
    kinds = list(map(_kind, gates, phis))
    sizes = [gate.shape.numel() for gate in gates]
    if len(set(kinds)) == 1:
        parts = _split(_alike(gates, phis, f, u), sizes)
    else:
        pieces = None if u is None else u.split_with_sizes(sizes)
        found: dict[int, Tensor] = {}
        for kind in dict.fromkeys(kinds):
            members = [i for i, other in enumerate(kinds) if other == kind]
            u_here = None if pieces is None else torch.cat([pieces[i] for i in members]).to(phis[members[0]][0].device)
            result = _alike([gates[i] for i in members], [phis[i] for i in members], f, u_here)
            found.update(zip(members, _split(result, [sizes[i] for i in members]), strict=True))
        parts = [found[i] for i in range(len(gates))]
    return [z if len(gate.shape) == 1 else z.view(gate.shape) for gate, z in zip(gates, parts, strict=True)]


def _split(together: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return together.split_with_sizes(sizes) if len(sizes) > 1 else [together]


def _alike(gates: Sequence[AbstractGate], phis: Sequence[Phi], f: Callable[..., Tensor], u: Tensor | None) -> Tensor:
    """The flat result for gates of one kind."""
    # A tensor that is flat already is not viewed: each view is one more node for autograd to walk.
    columns = [[p if p.dim() == 1 else p.reshape(-1) for p in column] for column in zip(*phis, strict=True)]
    phi = tuple(torch.cat(column) if len(column) > 1 else column[0] for column in columns)
    return f(gates[0], phi) if u is None else f(gates[0], phi, u)


# ---- hard concrete --------------------------------------------------------------------------------------------------


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
        return hard_concrete_noiseless(log_alpha, gamma, zeta)


@final
@dataclass(frozen=True)
class Median(AbstractRule):
    """ẑ = clamp(σ(log α / β)(ζ − γ) + γ, 0, 1), the median of z; open iff P(open) > 1/2, whatever β, γ and ζ."""

    def __call__(self, log_alpha: Tensor, beta: float | Tensor, gamma: float, zeta: float) -> Tensor:
        return hard_concrete_median(log_alpha, beta, gamma, zeta)


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
        rule: AbstractRule = Noiseless(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(shape)
        _check_drop_rate(drop_rate)
        check_stretch(gamma, zeta)
        if not isinstance(rule, AbstractRule):
            raise TypeError(f"`rule` must be a test rule such as `Noiseless()` or `Median()`, got {rule!r}")
        self.gamma, self.zeta, self.rule = float(gamma), float(zeta), rule
        mean = math.log((1 - drop_rate) / drop_rate)
        self.log_alpha = nn.Parameter(torch.empty(self.shape).normal_(mean, _INIT_STD))
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
        return promote(self.log_beta).exp() if self.log_beta is not None else self._constant_beta

    @property
    def _constant_beta(self) -> float:
        assert self._beta is not None
        return self._beta

    def phi(self) -> Phi:
        if self._beta is not None:
            return (self.log_alpha,)
        return self.log_alpha, torch.as_tensor(self.beta).expand(self.shape)

    def constants(self) -> tuple[Hashable, ...]:
        return (self._beta, self.gamma, self.zeta, self.rule)

    def _split(self, phi: Phi) -> tuple[Tensor, float | Tensor]:
        return phi[0], phi[1] if len(phi) == 2 else self._constant_beta

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return hard_concrete_sample(u, *self._split(phi), self.gamma, self.zeta)

    def value_from(self, phi: Phi) -> Tensor:
        return self.rule(*self._split(phi), self.gamma, self.zeta)

    def prob_from(self, phi: Phi) -> Tensor:
        return hard_concrete_prob_nonzero(*self._split(phi), self.gamma, self.zeta)

    def evidence_from(self, phi: Phi) -> Tensor:
        return self.prob_from(phi)

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        _check_mask(where, self.shape)
        # Eq. 13 closes at log α <= log(-γ/ζ), the median at β times that: go below both, by the same margin.
        edge = math.log(-self.gamma / self.zeta)
        closed = torch.as_tensor(self.beta * edge, device=where.device).clamp(max=edge) + _CLOSED
        self.log_alpha.copy_(torch.where(where, closed.to(self.log_alpha.dtype), self.log_alpha))

    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        _check_mask(where, self.shape)
        # Eq. 13 is v at log α = logit((v − γ)/(ζ − γ)), the median at β times that: the higher of the two.
        share = ((1 if wide else _AJAR) - self.gamma) / (self.zeta - self.gamma)
        edge = math.log(share / (1 - share))
        log_alpha = torch.maximum(torch.as_tensor(self.beta * edge), torch.tensor(edge)).to(self.log_alpha)
        log_alpha -= _CLOSED if wide else 0
        self.log_alpha.copy_(torch.where(where, log_alpha, self.log_alpha))

    def extra_repr(self) -> str:
        beta = "tensor" if self.log_beta is not None else f"{self._beta:.4g}"
        return f"{tuple(self.shape)}, beta={beta}, gamma={self.gamma:g}, zeta={self.zeta:g}, rule={self.rule}"


# ---- rectified location-scale families -------------------------------------------------------------------------------


@final
class RectifiedGate(AbstractGate):
    """Gates z = clamp(s, 0, 1) with s from a location-scale family (Louizos et al., section 2.1, eqs. 5–8).

    The test-time value is clamp(loc, 0, 1).

    Args:
        shape: how many gates: an int, or a weight's shape.
        base: a class `base(loc, scale)` with `cdf` and `icdf`, symmetric about `loc`: `torch.distributions.Normal`, or
            `Logistic` of this package.
        drop_rate: p in (0, 1); loc starts so that P(open) is the one a hard concrete gate starts with.
        scale: the scale at the start; None takes the one at which p = 1/2 starts from loc = 1/2, where as many
            gates are exactly one as exactly zero, again as in the hard concrete.
        learn_scale: learn the scale too, one per gate, as exp(`log_scale`).

    Raises:
        ValueError: if an argument lies outside its range.

    Example:
        >>> gate = RectifiedGate(3, base=Normal, drop_rate=0.5)
        >>> gate.value().round(decimals=1).tolist()
        [0.5, 0.5, 0.5]
    """

    loc: nn.Parameter
    log_scale: Tensor

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        base: Callable[..., Distribution] = Normal,
        drop_rate: float = 0.5,
        scale: float | None = None,
        learn_scale: bool = True,
    ) -> None:
        super().__init__(shape)
        _check_drop_rate(drop_rate)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"`scale` must be positive and finite, got {scale}")
        self.base = base
        standard = base(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))

        def loc_for(p: float) -> float:
            """The location, in units of the scale, at which P(s > 0) is that of a hard concrete of drop rate p."""
            log_alpha = torch.tensor(math.log((1 - p) / p), dtype=torch.float64)
            return float(standard.icdf(hard_concrete_prob_nonzero(log_alpha, 2 / 3, -0.1, 1.1)))

        scale = 0.5 / loc_for(0.5) if scale is None else scale
        self.loc = nn.Parameter(torch.empty(self.shape).normal_(loc_for(drop_rate) * scale, _INIT_STD * scale))
        log_scale = torch.full(self.shape, math.log(scale))
        if learn_scale:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    def phi(self) -> Phi:
        return self.loc, self.log_scale

    def constants(self) -> tuple[Hashable, ...]:
        return (self.base,)

    def _distribution(self, phi: Phi) -> Rectified:
        return Rectified(self.base(promote(phi[0]), promote(phi[1]).exp(), validate_args=False), validate_args=False)

    def sample_from(self, phi: Phi, u: Tensor) -> Tensor:
        return self._distribution(phi).icdf(u)

    def value_from(self, phi: Phi) -> Tensor:
        return self._distribution(phi).noiseless

    def prob_from(self, phi: Phi) -> Tensor:
        return self._distribution(phi).prob_nonzero

    def evidence_from(self, phi: Phi) -> Tensor:
        return self.prob_from(phi)

    @torch.no_grad()
    def close_(self, where: Tensor) -> None:
        _check_mask(where, self.shape)
        closed = _CLOSED * promote(self.log_scale).exp()
        self.loc.copy_(torch.where(where, closed.to(self.loc.dtype), self.loc))

    @torch.no_grad()
    def open_(self, where: Tensor, *, wide: bool = False) -> None:
        _check_mask(where, self.shape)
        self.loc.copy_(torch.where(where, torch.tensor(1.0 if wide else _AJAR).to(self.loc), self.loc))

    def extra_repr(self) -> str:
        name = getattr(self.base, "__name__", repr(self.base))
        return f"{tuple(self.shape)}, base={name}, learn_scale={isinstance(self.log_scale, nn.Parameter)}"


def _check_drop_rate(drop_rate: float) -> None:
    if not 0 < drop_rate < 1:
        raise ValueError(f"`drop_rate` must lie in (0, 1), got {drop_rate}")


def _check_mask(where: Tensor, shape: torch.Size) -> None:
    if where.dtype != torch.bool or where.shape != shape:
        raise ValueError(
            f"`where` must be a bool mask of shape {tuple(shape)}, got {where.dtype} of shape {tuple(where.shape)}"
        )
