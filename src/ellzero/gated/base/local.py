"""Noise that is drawn for each example of a batch, in place of one draw that they share.

Gates on units multiply the inputs of the layer that reads them. Gaussian noise on weights is drawn where it arrives, in
the layer's output (the local reparametrisation of Kingma, Salimans & Welling, 2015): N(x·μ, x²·σ²) is what x times a
weight of its own for each example would be. A weight stands in for itself as a `Noisy`, which layers call as they call
any weight. This file knows linear layers and convolutions, and draws of gates as tensors; it draws no gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ellzero.gated.multiplying import Factor, Target, laid_out
from ellzero.gated.placements import Placement
from ellzero.gates.abstract import AbstractGate, draw, noise
from ellzero.graph.standins.layers import CONTRACTING

TINY = 1e-8  # added to a variance under the root, whose slope has no end at zero
_CALLS = (F.linear, F.conv1d, F.conv2d, F.conv3d)
Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # linear in the input, and in weight and bias together


class Draws(NamedTuple):
    """What a forward draws: of each placement multipliers, (examples, gates) on units; and σ of those that add."""

    z: list[Tensor]
    spread: list[Tensor | None]


def drawn(gates: Sequence[AbstractGate], examples: int) -> Draws:
    """Draws the gates on units for so many examples."""
    shared = [k for k, gate in enumerate(gates) if not gate.adds]
    units = [gates[k] for k in shared]
    z: dict[int, Tensor] = dict(zip(shared, draw(units, noise(units, examples)), strict=True)) if units else {}
    for k, gate in enumerate(gates):
        if gate.adds:  # what it multiplies by has no noise
            z[k] = gate.sample(torch.full(gate.shape, 0.5, device=gate.phi()[0].device))
    spread = [gate.spread_from(gate.phi()) if gate.adds else None for gate in gates]
    return Draws([z[k] for k in range(len(gates))], spread)


def examples_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many examples a forward is given: the leading dimension of its first tensor."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor) and given.ndim:
            return len(given)
    raise ValueError("noise for each example needs a tensor with a leading dimension among the inputs, got none")


@final
class Noisy:
    """A weight, or bias, with noise of its own for each example.

    Args:
        name: what the parameter is called.
        mean: the weight without noise.
        variance: of its noise; None where it has none.
        inputs: what each example's inputs are multiplied by, of gates on units, (examples, in, 1, …); None for nothing.
    """

    def __init__(self, name: str, mean: Tensor, variance: Tensor | None = None, inputs: Tensor | None = None) -> None:
        self.name, self.mean, self.variance, self.inputs = name, mean, variance, inputs

    @classmethod
    def __torch_function__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call not in _CALLS:
            one = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), None)
            what = f"`{one.name}`" if one is not None else "a weight"
            raise RuntimeError(
                f"noise for each example is known in linear layers and convolutions, got {what} in {call}"
            )
        x, weight, bias, *others = (*args, None) if len(args) == 2 else args
        named = dict(kwargs or {})
        bias = named.pop("bias", bias)
        own = weight if isinstance(weight, Noisy) else cls("", weight)
        return own.through(lambda x, w, b: call(x, w, b, *others, **named), x, bias)

    def through(self, layer: Layer, x: Tensor, bias: Tensor | Noisy | None) -> Tensor:
        """What a layer with this weight gives."""
        if self.inputs is not None:
            x = x * self._for(x)
        shift, its_variance = (bias.mean, bias.variance) if isinstance(bias, Noisy) else (bias, None)
        out = layer(x, self.mean, shift)
        if self.variance is None and its_variance is None:
            return out
        zero = None if shift is None else torch.zeros_like(shift)
        variance = torch.zeros_like(self.mean) if self.variance is None else self.variance
        spread = layer(x.square(), variance, zero if its_variance is None else its_variance)
        return out + (spread + TINY).sqrt() * torch.randn_like(out)

    def _for(self, x: Tensor) -> Tensor:
        """What the inputs are multiplied by, in the shape that they have."""
        assert self.inputs is not None
        z = self.inputs
        if len(z) != len(x):
            raise RuntimeError(
                f"noise for each example needs one row of inputs for each, and `{self.name}` reads {len(x)} rows of "
                f"{len(z)} examples"
            )
        if x.ndim > z.ndim:  # a linear layer along the last of several dimensions
            z = z.reshape(len(z), *[1] * (x.ndim - z.ndim), *z.shape[1:])
        return z.to(x.dtype)


def noisy(name: str, weight: Tensor, target: Target, draws: Draws, tables: Mapping[str, Tensor]) -> Noisy:
    """A weight with what was drawn of all gates on it."""
    inputs = variance = None
    for part in target.factors:
        z, spread = draws.z[part.number], draws.spread[part.number]
        if spread is not None:
            weight = weight * laid_out(z, part, tables, 1.0).to(weight.dtype)
            own = laid_out(spread, part, tables, 0.0).to(weight.dtype).square()
            variance = own if variance is None else variance + own
        else:
            factor = laid_out(z, part, tables, 1.0, lead=1)
            inputs = factor if inputs is None else inputs * factor
    return Noisy(name, weight, variance, inputs)


def refuse_unfit(
    model: nn.Module, targets: Mapping[str, Target], placements: Sequence[Placement], gates: Sequence[AbstractGate]
) -> None:
    """Refuses, when gates are attached, what cannot have noise for each example; says what and where."""
    for placement, gate in zip(placements, gates, strict=True):
        if gate.needs_loss:
            raise ValueError(
                f"`per_example` must be false for `{placement.name}`, as it learns from the loss of a draw"
            )
    for name, target in targets.items():
        for *path, _ in target.holders:
            layer = model.get_submodule(".".join(path))
            if type(layer) not in CONTRACTING:
                kinds = ", ".join(kind.__name__ for kind in CONTRACTING)
                kind = type(layer).__name__
                raise ValueError(f"`per_example` needs gates on layers of type {kinds}, and `{name}` is in a {kind}")
            on_units = any(not gates[part.number].adds and not _along_inputs(part, target) for part in target.factors)
            if on_units or (isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1):
                raise ValueError(
                    f"`per_example` needs gates on the inputs of layers without groups, and `{name}` has others"
                )


def _along_inputs(part: Factor, target: Target) -> bool:
    return part.shape == (*target.shape[1:2], *[1] * (len(target.shape) - 2))
