"""The way out: a plain network that computes what the gated one does in evaluation, smaller.

`fold` multiplies the test-time gates into the weights and keeps shapes and zeros; `compact` then takes out every unit
that is closed, and proves on the example input that nothing changed; `finalize` closes units until the kept cost is
within a target. How units are taken out of tensors and modules is in `removal.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ellzero import gates as gt
from ellzero.gated.module import Gated
from ellzero.graph.plan import Plan
from ellzero.graph.rehearsal import agree, stirred
from ellzero.graph.tracing import Inputs, run

TOLERANCE = 1e-12  # of the largest output, in float64


class CompactionError(RuntimeError):
    """The compact network does not compute what the gated one does."""


def fold(gated: Gated) -> nn.Module:
    """A plain copy of the model with the test-time gates multiplied into its weights: the same function as
    `gated.eval()`, the same shapes.

    Args:
        gated: the network.

    Returns:
        A module of the model's own class, without gates.
    """
    _check(gated)
    with torch.no_grad():
        return _folded(gated, gated.model)


def compact(gated: Gated, *, verify: bool = True) -> nn.Module:
    """A plain network of the model's own class with the closed units taken out; in evaluation the same function.

    The test-time gates are multiplied into the weights first, then every parameter and buffer loses the entries of
    closed units. A layer that reads single entries of something that cannot shrink gets a `Select`; layers of a
    residual branch that is closed as a whole are taken out.

    Args:
        gated: the network; it is left as it is.
        verify: run the example input, and the example with noise on it, through both in float64 and compare: max |Δ| at
            most 1e-12 of the largest output (of 1e-4, if that is smaller).

    Returns:
        The compact network, in the mode of `gated.model`.

    Raises:
        ClosedAxisError: an axis is closed as a whole and nothing carries on without it.
        CompactionError: the outputs differ; the first layer that does is named.
        ValueError: a gate's parameter is not finite.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> for _, gate in gated.named_gates():
        ...     gate.close_(torch.tensor([False, True, False]))
        >>> compact(gated)
        Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
          (1): ReLU()
          (2): Linear(in_features=2, out_features=2, bias=True)
        )
    """
    _check(gated)
    plan = gated.plan().beyond(gated.taken)
    with torch.no_grad():
        small = _folded(gated, gated.model)
        plan.apply(small)
        if verify:
            _prove(gated, plan)
    return small


def _check(gated: Any) -> None:
    if not isinstance(gated, Gated):
        raise TypeError(f"`gated` must be what `attach` returned, got {type(gated).__name__}")
    for name, gate in gated.named_gates():
        gate.check(name)


def _test_gates(gated: Gated) -> list[Tensor]:
    return gt.values([g for _, g in gated.named_gates()])


def _folded(gated: Gated, model: nn.Module) -> nn.Module:
    out = copy.deepcopy(model)
    members = dict(out.named_parameters())
    for name, weight in gated.gated_weights(_test_gates(gated), out).items():
        members[name].copy_(weight)
    return out


def _prove(gated: Gated, plan: Plan) -> None:
    """Compares masked and removed on the example input and on a stirred one, in float64 so that rounding hides
    nothing.
    """
    model = copy.deepcopy(gated.model).double().eval()
    home = gated.tables["ends"].device
    inputs: Inputs = tree_map(lambda leaf: _double(leaf, home), gated.example_inputs)
    z = [v.double() for v in _test_gates(gated)]
    weights = gated.gated_weights(z, model)
    small = _folded(gated, model)
    members = dict(small.named_parameters())
    for name, weight in weights.items():
        members[name].copy_(weight)
    plan.apply(small)
    for example in (inputs, stirred(inputs)):
        expected = _tensors(run(model, example, weights))
        if any(t.is_floating_point() and bool(t.isnan().any()) for t in expected):
            if example is inputs:
                raise CompactionError("the gated network's own output on the example input is not a number (NaN)")
            continue
        if not agree(expected, _tensors(run(small, example)), TOLERANCE):
            layer = _first_difference(model, weights, small, plan, example)
            raise CompactionError(f"the compact network differs from the gated one on the example, first at {layer}")


def _double(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, torch.float64 if leaf.is_floating_point() else None)


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def _first_difference(
    model: nn.Module, weights: dict[str, Tensor], small: nn.Module, plan: Plan, inputs: Inputs
) -> str:
    """The first layer, in the order they run, whose surviving outputs differ."""
    seen: list[dict[str, Tensor]] = [{}, {}]
    hooks = []
    for which, net in enumerate((model, small)):
        for path, module in net.named_modules():
            if not list(module.children()):

                def note(_: Any, __: Any, out: Any, path: str = path, which: int = which) -> None:
                    if isinstance(out, Tensor):
                        seen[which].setdefault(path, out)

                hooks.append(module.register_forward_hook(note))
    run(model, inputs, weights)
    run(small, inputs)
    for hook in hooks:
        hook.remove()
    for path, ours in seen[1].items():
        reference = seen[0].get(path)
        rows = plan.rows.get(f"{path}.weight", {}).get(0)
        if reference is not None and reference.shape != ours.shape and rows is not None:
            dim = next((d for d in range(ours.ndim) if ours.shape[d] != reference.shape[d]), 0)
            reference = reference.index_select(dim, torch.as_tensor(rows, device=reference.device))
        # What has another shape here, and no rows of its own to say which, cannot be compared.
        comparable = reference is not None and reference.shape == ours.shape
        if reference is not None and comparable and not agree([reference], [ours], TOLERANCE):
            return f"`{path}`"
    return "the output"
