"""Gates: modules that hold the parameters φ of one random multiplier per unit (or per weight) and evaluate them.

A *family* is a handful of pure functions of φ, so that all gates of a model are evaluated together on concatenated φ
(`draw`, `values`, `flat`) in a few kernels, however many layers there are. This file knows nothing of networks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from ellzero.gates.formulas import normal

Phi: TypeAlias = tuple[Tensor, ...]
_GOLDEN = (math.sqrt(5) - 1) / 2
AJAR = 0.1  # the test-time value of a gate that `open_` opens: the network changes by little


class NoExpectation(TypeError):
    """A gate family without an atom at zero has P(z ≠ 0) = 1: it has a kept cost, and no useful expected one."""


class Members(Protocol):
    """The weights that the gates of a placement count, as their family sees them: by gate."""

    def names(self) -> tuple[str, ...]:
        """What they are called in the model."""

    def squares(self) -> Tensor:
        """‖w_g‖² of the weights that each gate counts, in the gates' shape."""

    def sizes(self) -> Tensor:
        """|g|, how many they are."""

    def scale_(self, factor: Tensor) -> None:
        """Multiplies the weights of each gate, in place."""


class AbstractGate(nn.Module, ABC):
    """A module holding `shape` independent random multipliers z ~ q(z | φ).

    A new family is a final subclass that provides the six abstract methods. Those named `*_from` are functions of
    φ (and noise) alone: they may use `self` only through what `constants()` returns, and must act element by element
    on tensors of any shape, because the φ of many gates are concatenated before they are called.

    A family may also have a penalty of its own (`complexity_from`), see the weights that its gates count (`members`,
    whose norms are then part of φ), act after every step of the optimizer, and suggest a learning rate.

    Args:
        shape: how many gates there are: an int for one per unit of an axis, a weight's shape for one per weight.

    Attributes:
        sees_weights: whether the family asks for `members`, which `attach` then gives it.
        per_weight: whether there must be a gate for each weight (`l0.weights`).
        adds: whether the gates add noise to their weights (`spread_from`); then no noise is in what they multiply by.
        acts_after_steps: whether `after_step` does anything.
        needs_loss: whether the gates learn from the value of the loss (`objectives.estimated_backward`).
        rate_ratio: the gates' learning rate as a multiple of the weights', where nobody names one.

    Raises:
        ValueError: if a dimension of `shape` is not a positive integer.
    """

    shape: torch.Size
    sees_weights: ClassVar[bool] = False
    per_weight: ClassVar[bool] = False
    adds: ClassVar[bool] = False
    acts_after_steps: bool = False
    needs_loss: bool = False
    rate_ratio: ClassVar[float] = 1.0

    def __init__(self, shape: int | Sequence[int]) -> None:
        super().__init__()
        dims = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in dims):
            raise ValueError(f"`shape` must be a positive integer or a sequence of them, got {shape!r}")
        self.shape = torch.Size(dims)
        self._members: Members | None = None

    def __getattr__(self, name: str) -> Any:
        """A parameter that processes share, each of which has all of it, is a plain tensor here."""
        found: Any = super().__getattr__(name)
        return found.to_local() if type(found).__name__ == "DTensor" else found

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

    def evidence_from(self, phi: Phi) -> Tensor:
        """How much speaks for keeping a unit: not negative; larger means keep. The default is P(z ≠ 0)."""
        return self.prob_from(phi)

    def complexity_from(self, phi: Phi) -> Tensor:
        """What the family itself charges for each gate, as a loss summed over examples: a KL in nats, a norm.

        The default is P(z ≠ 0), the L0 penalty of one group.
        """
        return self.prob_from(phi)

    def spread_from(self, phi: Phi) -> Tensor:
        """The standard deviation of the Gaussian noise on each weight, of gates that have noise for single weights."""
        raise NotImplementedError(f"{type(self).__name__} adds nothing to weights")

    def after_step(self, step: float | Tensor | None) -> None:
        """What the family does after each step of the optimizer: a proximal step on its weights, clamps on φ.

        Args:
            step: the length of the step that the weights took along their gradient; `None` where there is no such
                number, as with Adam.
        """

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
    def complexity(self) -> Tensor:
        """What the family itself charges for each gate."""
        return self.complexity_from(self.phi())

    @final
    @property
    def members(self) -> Members:
        """The weights that the gates count.

        Raises:
            RuntimeError: the gates are on no network.
        """
        if self._members is None:
            raise RuntimeError(f"{type(self).__name__} sees the weights that it counts: `attach` it to a network first")
        return self._members

    @final
    def bind(self, members: Members) -> None:
        """Shows the gates the weights that they count; `attach` does it."""
        self._members = members

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
                    f"the first {tensor[first].item()} at index {first}; one loss that is not finite does that"
                )


def check_mask(where: Tensor, shape: torch.Size) -> None:
    """Refuses what is no mask of the gates of this shape."""
    if where.dtype != torch.bool or where.shape != shape:
        raise ValueError(
            f"`where` must be a bool mask of shape {tuple(shape)}, got {where.dtype} of shape {tuple(where.shape)}"
        )


def noise(gates: Sequence[AbstractGate], draws: int | None = None) -> Tensor:
    """Uniform noise for one draw of all gates, in float32, flat, in the order of the sequence; or for several, by row.

    It comes from torch's default generator of the gates' device. In a process group of several ranks, rank r uses
    (u + 0.618…·r) mod 1, a rotation by the golden ratio, which is uniform still: ranks that were seeded alike then draw
    different gates, as minibatches in parallel should (Louizos et al., section 4.2).
    """
    device = gates[0].phi()[0].device if gates else None
    size = sum(gate.shape.numel() for gate in gates)
    u = torch.rand(size if draws is None else (draws, size), device=device, dtype=torch.float32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        shift = torch.distributed.get_rank() * _GOLDEN % 1.0
        if shift:
            u = torch.frac(u + shift)
    return u


def draw(gates: Sequence[AbstractGate], u: Tensor | None = None) -> list[Tensor]:
    """Draws z of all gates together.

    Args:
        gates: the gates, of any families.
        u: flat uniform noise with one entry per gate, in the order of the sequence; None draws it with `noise`. More
            than one row, (draws, gates), is as many draws.

    Returns:
        One tensor per gate module, of its shape (behind the number of draws), in float32 (float64 where φ is).

    Raises:
        ValueError: if `u` has another shape.

    Example:
        >>> from ellzero.gates.hard_concrete import HardConcreteGate
        >>> gates = [HardConcreteGate(300), HardConcreteGate((20, 5))]
        >>> [tuple(z.shape) for z in draw(gates)]
        [(300,), (20, 5)]
    """
    if u is None:
        u = noise(gates)
    elif u.ndim not in (1, 2) or u.shape[-1] != (total := sum(gate.shape.numel() for gate in gates)):
        raise ValueError(f"`u` must have shape ({total},), one entry per gate, got {tuple(u.shape)}")
    return together(gates, lambda gate, phi, u: gate.sample_from(phi, u), u)


def additions(gates: Sequence[AbstractGate], u: Tensor) -> list[Tensor | None]:
    """What each gate adds to its weights, from the noise that `draw` was given; `None` of gates that only multiply."""
    parts = u.split_with_sizes([gate.shape.numel() for gate in gates])
    return [
        gate.spread_from(gate.phi()) * normal(part.view(gate.shape)) if gate.adds else None
        for gate, part in zip(gates, parts, strict=True)
    ]


def values(gates: Sequence[AbstractGate]) -> list[Tensor]:
    """`value()` of each gate, evaluated together."""
    return together(gates, lambda gate, phi: gate.value_from(phi))


def flat(gates: Sequence[AbstractGate], f: Callable[[AbstractGate, Phi], Tensor]) -> Tensor:
    """`f(gate, phi)` of all gates in one flat tensor, in the order of the sequence.

    Example:
        >>> from ellzero.gates.hard_concrete import HardConcreteGate
        >>> gates = [HardConcreteGate(300), HardConcreteGate((20, 5))]
        >>> flat(gates, lambda gate, phi: gate.prob_from(phi)).shape
        torch.Size([400])
    """
    phis = [gate.phi() for gate in gates]
    if len(set(map(_kind, gates, phis))) == 1:
        return _alike(gates, phis, f, None)
    return torch.cat([part.reshape(-1) for part in together(gates, f)])


def _kind(gate: AbstractGate, phi: Phi) -> tuple[Hashable, ...]:
    """Gates of one kind are evaluated together."""
    return type(gate), gate.constants(), phi[0].dtype, phi[0].device


def together(gates: Sequence[AbstractGate], f: Callable[..., Tensor], u: Tensor | None = None) -> list[Tensor]:
    """One tensor per gate, in order, from one call of `f(gate, phi)` or `f(gate, phi, u)` per kind of gate."""
    phis = [gate.phi() for gate in gates]
    kinds = list(map(_kind, gates, phis))
    sizes = [gate.shape.numel() for gate in gates]
    if len(set(kinds)) == 1:
        parts = _split(_alike(gates, phis, f, u), sizes)
    else:
        pieces = None if u is None else u.split_with_sizes(sizes, -1)
        found: dict[int, Tensor] = {}
        for kind in dict.fromkeys(kinds):
            members = [i for i, other in enumerate(kinds) if other == kind]
            home = phis[members[0]][0].device
            u_here = None if pieces is None else torch.cat([pieces[i] for i in members], -1).to(home)
            result = _alike([gates[i] for i in members], [phis[i] for i in members], f, u_here)
            found.update(zip(members, _split(result, [sizes[i] for i in members]), strict=True))
        parts = [found[i] for i in range(len(gates))]
    pairs = zip(gates, parts, strict=True)
    return [z if len(gate.shape) == 1 else z.reshape(*z.shape[:-1], *gate.shape) for gate, z in pairs]


def _split(together: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return together.split_with_sizes(sizes, -1) if len(sizes) > 1 else [together]


def _alike(gates: Sequence[AbstractGate], phis: Sequence[Phi], f: Callable[..., Tensor], u: Tensor | None) -> Tensor:
    """The flat result for gates of one kind."""
    # A tensor that is flat already is not viewed: each view is one more node for autograd to walk.
    rows = [[p if p.dim() == 1 else p.reshape(-1) for p in phi] for phi in phis]
    phi = tuple(map(torch.cat, zip(*rows, strict=True))) if len(rows) > 1 else tuple(rows[0])
    return f(gates[0], phi) if u is None else f(gates[0], phi, u)
