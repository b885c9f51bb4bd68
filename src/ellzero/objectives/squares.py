"""Σ θ² of many tensors in few operations.

Torch's own gradient of a square makes three products as large as the weights; the one here, 2gθ, is one. A step that is
launched operation by operation feels it (`benchmarks/wrn_speed.py`). This file knows tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor


def squares(weights: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Tensor:
    """The squares of all weights, those of a tensor summed over the dimensions where its shape has 1: one tensor after
    the other, flat.

    Example:
        >>> squares([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], [(2, 1)])
        tensor([ 5., 25.])
    """
    if torch.compiler.is_compiling():  # it makes one operation of all that, and knows no function of our own
        return _summed([weight.square() for weight in weights], shapes)
    return _Squares.apply(_Shapes(map(tuple, shapes)), *weights)  # type: ignore[no-any-return,no-untyped-call]


class _Shapes:
    """Shapes as one thing: torch's transforms take lists apart, and count what is in them as arguments."""

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        self.each = tuple(shapes)


def _summed(terms: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Tensor:
    return torch.cat([term.sum_to_size(shape).reshape(-1) for term, shape in zip(terms, shapes, strict=True)])


class _Squares(torch.autograd.Function):
    generate_vmap_rule = True  # for stacks of runs

    @staticmethod
    def forward(shapes: _Shapes, *weights: Tensor) -> Tensor:
        norms = []
        for weight, shape in zip(weights, shapes.each, strict=True):
            gone = [d for d, n in enumerate(shape) if n != weight.shape[d]]
            # A norm reads the weights; a square that is summed writes one as large first.
            norms.append((torch.linalg.vector_norm(weight, dim=gone) if gone else weight).reshape(-1))
        return torch.cat(norms).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        shapes, *weights = inputs
        ctx.shapes = shapes.each
        ctx.save_for_backward(*weights)
        ctx.save_for_forward(*weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        twice = (2 * gradient).split([prod(shape) for shape in ctx.shapes])
        parts = zip(ctx.saved_tensors, twice, ctx.shapes, strict=True)
        return None, *(weight * part.view(shape) for weight, part, shape in parts)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        return _summed([2 * w * t for w, t in zip(ctx.saved_tensors, tangents, strict=True)], ctx.shapes)
