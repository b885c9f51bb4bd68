"""Global response norms (ConvNeXt V2) that keep their eps as a number: then channels can go that they look at together.

A channel's norm over space is divided by the mean of those of all channels. With k of D channels left, and zeros in the
others, the same comes out if the weight is D/k times as large and the eps D/k times. Most keep the eps in their code,
where it cannot follow. Such a module is found by what it does: put beside a `ResponseNorm` on random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from ellzero.graph.axes import Graph
from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.standins.norms import ResponseNorm
from ellzero.graph.tracing import Inputs
from ellzero.graph.trials.running import run_noting

_SUMS_SQUARES = ("norm", "linalg_vector_norm")


def response_norms(model: nn.Module, graph: Graph, inputs: Inputs) -> dict[str, ResponseNorm]:
    """What can stand for the response norms of a model, with their parameters, by path."""
    normed = {step.module for step in graph.steps if step.op in _SUMS_SQUARES}
    likely = {path: m for path, m in model.named_modules() if path in normed and _looks_like_one(m)}
    if not likely:
        return {}
    found = {}
    for path, x in _given(model, likely, inputs).items():
        numbers = {n for step in graph.steps if step.module == path for n in step.numbers if type(n) is float}
        same = next((new for new in _candidates(likely[path], numbers) if _agree(likely[path], new, x.shape)), None)
        if same is not None:
            found[path] = same
    return found


def hinted(graph: Graph) -> Graph:
    """The graph in which channels that cannot go because of such a norm tell what may help."""
    stuck = {f"`mean` in `{step.module}` mixes its units" for step in graph.steps if step.op in _SUMS_SQUARES}
    hint = ", which `l0.centred` may do away with"
    axes = (replace(a, frozen=f"{a.frozen}{hint}") if a.frozen in stuck else a for a in graph.axes)
    return graph.with_axes(axes) if stuck else graph


def _looks_like_one(module: nn.Module) -> bool:
    shapes = [p.shape for p in module.parameters(recurse=False)]
    return len(shapes) == 2 and shapes[0] == shapes[1] and not [*module.children()] and not [*module.buffers()]


def _given(model: nn.Module, modules: dict[str, nn.Module], inputs: Inputs) -> dict[str, Tensor]:
    """What each of these modules is given, one tensor and nothing else."""
    seen: dict[str, Tensor] = {}

    def note(path: str, args: Any, kwargs: Any) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].ndim > 2:
            seen[path] = args[0]

    run_noting(model, inputs, modules, note)
    return seen


def _candidates(module: nn.Module, numbers: set[float]) -> Iterator[ResponseNorm]:
    """Response norms with the parameters of a module, in both roles, with one of these numbers as eps."""
    names = [name for name, _ in module.named_parameters()]
    for (weight, bias), dim, eps in product(permutations(names), (-1, 1), sorted(numbers)):
        yield ResponseNorm(dict(module.named_parameters()), weight, bias, eps, dim)


@torch.no_grad()
def _agree(module: nn.Module, new: ResponseNorm, shape: torch.Size) -> bool:
    """Whether both do the same with other parameters, on large numbers and on such as the eps is not small beside."""
    old, other = (duplicate(m).double().eval() for m in (module, new))
    draw = torch.Generator().manual_seed(0)
    for (_, p), (_, q) in zip(sorted(old.named_parameters()), sorted(other.named_parameters()), strict=True):
        p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64))
        q.copy_(p)
    for size in (1.0, 1e-3, 1e-6):
        x = size * torch.randn(shape, generator=draw, dtype=torch.float64)
        try:
            if not torch.allclose(old(x), other(x), rtol=1e-10, atol=1e-12 * size):
                return False
        except Exception:  # it takes no such numbers, or another shape
            return False
    return True
