"""What the gates of a network say, one placement after the other: P(open), open at test time, evidence, complexity.

All that counts or decides asks here, and can be answered as if gates stood otherwise (`assuming`). This file does not
know what gates multiply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ellzero.gated.base.fixing import Fixing
from ellzero.gated.placements import Placement
from ellzero.gates.abstract import AbstractGate, flat, noise


class Asking(Fixing):
    """Around `gates` that lie in `placements`.

    Attributes:
        followed: whether gates are told of the optimizer's steps (`objectives.follow`).
        estimated: whether they are told the loss (`objectives.estimated_backward`).
    """

    followed = False
    estimated = False
    placements: tuple[Placement, ...]
    gates: nn.ModuleDict
    tables: dict[str, Tensor]
    _assumed: Tensor | None
    _said: list[Tensor] | None = None  # P(z ≠ 0), where many ask
    _begun: tuple[int, ...] = ()

    def _gates(self) -> list[AbstractGate]:
        # Each step asks several times: past the look-up of attributes, which is Python.
        return list(self._modules["gates"]._modules.values())  # type: ignore[union-attr,arg-type]

    def named_gates(self) -> Iterator[tuple[str, AbstractGate]]:
        """Yields the name and the gates of every placement."""
        yield from zip((p.name for p in self.placements), self._gates(), strict=True)

    def by_placement(self, flat: Tensor) -> dict[str, Tensor]:
        """Splits a tensor with one entry per gate, such as `opens()`, by placement: each part in its gates' shape."""
        parts: Sequence[Tensor] = flat.split([gate.shape.numel() for gate in self._gates()])
        return {name: part.reshape(gate.shape) for (name, gate), part in zip(self.named_gates(), parts, strict=True)}

    def has_learned(self) -> bool:
        """Whether gates are others than `attach` made, whoever moved them; or have no parameters that tell."""
        return not self._begun or self._begun != sums(self.gates)

    def slices(self) -> Iterator[slice]:
        """Where the gates of each placement are in a flat tensor."""
        start = 0
        for gate in self._gates():
            yield slice(start, start := start + gate.shape.numel())

    def gate_noise(self) -> Tensor:
        """Fresh uniform noise for one draw of all gates, to be passed to a forward as `gate_noise`."""
        return noise(self._gates())

    def prob_open(self) -> Tensor:
        """P(z ≠ 0) of all gates, one placement after the other, flat."""
        if self._assumed is not None:
            return self._assumed
        if self._said and (self._said[0].requires_grad or not torch.is_grad_enabled()):
            return self._said[0]
        p = flat(self._gates(), lambda g, phi: g.prob_from(phi))
        if self._said is not None:
            self._said[:] = [p]
        return p

    def opens(self) -> Tensor:
        """Which gates are open at test time, flat."""
        if self._assumed is not None:
            return self._assumed != 0
        return flat(self._gates(), lambda g, phi: g.value_from(phi) != 0)

    def evidence(self) -> Tensor:
        """What speaks for keeping each gate open, flat; larger is more."""
        return flat(self._gates(), lambda g, phi: g.evidence_from(phi))

    def complexity(self) -> Tensor:
        """What its family charges for each gate, flat; nothing for one that is assumed to be closed."""
        charged = flat(self._gates(), lambda g, phi: g.complexity_from(phi))
        return charged if self._assumed is None else charged * self._assumed

    @contextmanager
    def asked_once(self) -> Iterator[None]:
        """Lets `prob_open()` work out one answer for many costs, whose gradients then go one way; no gate may move
        meanwhile. A compiler sees by itself what is asked twice.
        """
        before = self._said
        if before is None and not torch.compiler.is_compiling():
            self._said = []
        try:
            yield
        finally:
            self._said = before

    @contextmanager
    def assuming(self, opens: Tensor) -> Iterator[None]:
        """Lets `prob_open()`, `opens()`, and so every cost, answer as if gates were open with these probabilities."""
        if opens.shape != (n := sum(gate.shape.numel() for gate in self._gates()),):
            raise ValueError(f"`opens` must have one entry per gate, {n}, got shape {tuple(opens.shape)}")
        before, self._assumed = self._assumed, opens.to(self.tables["ends"])
        try:
            yield
        finally:
            self._assumed = before


def sums(gates: nn.Module) -> tuple[int, ...]:
    """Of each parameter the sum of its numbers' bits, by which one sees that it has moved, however little: in another
    type and on a GPU too.
    """
    there = (p.detach() for p in gates.parameters() if not p.is_meta)
    return tuple(int(p.float().contiguous().view(torch.int32).sum()) for p in there)
