"""Sums of squares, against those that torch makes of the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.func import grad, jvp, vmap

from ellzero.objectives.squares import squares

SHAPES = ((1, 3, 1), (2, 1), (1,), (4,), (3, 2))  # what is left of each weight: some, one or all of its dimensions
SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own way to forward mode


def weights(lead: tuple[int, ...] = ()) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 3, 4), (2, 3), (5,), (4,), (3, 2))
    return [torch.randn(*lead, *size, dtype=torch.float64, requires_grad=not lead) for size in sizes]


def plain(*weights: Tensor) -> Tensor:
    a, b, c, d, e = (w.square() for w in weights)
    return torch.cat([a.sum((0, 2)), b.sum(1), c.sum().view(1), d, e.flatten()])


def ours(*weights: Tensor) -> Tensor:
    return squares(weights, SHAPES)


@SCRIPTED
def test_values_and_gradients_are_those_of_the_definition() -> None:
    torch.testing.assert_close(ours(*weights()), plain(*weights()))
    assert torch.autograd.gradcheck(ours, weights(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, weights())


def test_a_weight_of_zeros_has_a_gradient() -> None:
    """Where the norm that is taken on the way has none."""
    zeros = torch.zeros(2, 3, requires_grad=True)
    squares([zeros], [(2, 1)]).sum().backward()
    assert zeros.grad is not None
    assert not zeros.grad.any()


def test_a_stack_of_runs_has_the_gradients_of_each() -> None:
    factor, every = torch.rand(16, dtype=torch.float64), (0, 1, 2, 3, 4)
    stacked = weights((3,))
    found = vmap(grad(lambda *w: ours(*w) @ factor, every))(*stacked)
    for run in range(3):
        wanted = grad(lambda *w: plain(*w) @ factor, every)(*(w[run] for w in stacked))
        torch.testing.assert_close([f[run] for f in found], list(wanted))


@SCRIPTED
def test_along_a_direction() -> None:
    """Forward-mode derivatives, which products of Hessians with vectors take."""
    at, along = tuple(w.detach() for w in weights()), tuple(torch.ones_like(w) for w in weights())
    torch.testing.assert_close(jvp(ours, at, along), jvp(plain, at, along))
    stacked, twice = tuple(weights((3,))), tuple(torch.ones_like(w) for w in weights((3,)))
    torch.testing.assert_close(jvp(vmap(ours), stacked, twice), jvp(vmap(plain), stacked, twice))
    ways = {"vectorize": True, "strategy": "forward-mode"}
    torch.testing.assert_close(jacobian(ours, at, **ways), jacobian(plain, at, **ways))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_is_the_same(backend: str) -> None:
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*weights()), plain(*weights()))
