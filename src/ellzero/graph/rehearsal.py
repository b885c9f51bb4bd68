"""Trying removals out before any gate is trained: what does not survive one on a copy is frozen, with that reason.

Tracing cannot see a literal (`view(-1, 800)`, `x[:, :30]`) that is right for the dense network alone. So the model is
copied, its numbers are disturbed (a zero-initialised weight would hide a wrong answer), units are removed, and what
comes out is compared with the copy whose reading weights are set to zero at those units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ellzero.graph.axes import Graph, Numbers
from ellzero.graph.plan import ClosedAxisError, Mask, make_plan
from ellzero.graph.tracing import Inputs, batch_size, first_line, run


def proven(model: nn.Module, graph: Graph, inputs: Inputs) -> Graph:
    """The graph with every axis frozen whose units cannot be removed, and `can_vanish` where whole layers can be."""
    bench = _Bench(model, graph, inputs)
    free = [k for k, a in enumerate(graph.axes) if a.frozen is None]
    reasons = dict.fromkeys(bench.unseen(free), "the example input does not show whether the output depends on it")
    free = [k for k in free if k not in reasons]
    good = _sift([k for k in free if graph.axes[k].size > 1], [], bench.survives_parts, reasons)
    axes = list(graph.axes)
    for k, reason in reasons.items():
        axes[k] = replace(axes[k], frozen=reason)
    bench.graph = graph = replace(graph, axes=tuple(axes))
    lone = [k for k in free if graph.axes[k].size == 1]
    whole = [k for k in good + lone if bench.could_vanish(k)]
    vanishing = _sift(whole, [], bench.survives_vanishing, {})
    # Two branches that cannot both go may each go alone.
    vanishing += [k for k in whole if k not in vanishing and bench.survives_vanishing([k]) is None]
    for k in vanishing:
        axes[k] = replace(axes[k], can_vanish=True)
    return replace(graph, axes=tuple(axes))


def _sift(
    new: Sequence[int], good: list[int], test: Callable[[Sequence[int]], str | None], reasons: dict[int, str]
) -> list[int]:
    """As many of `new` as pass the test together with `good`, by halving: few trials where few fail."""
    if not new:
        return good
    failure = test([*good, *new])
    if failure is None:
        return [*good, *new]
    if len(new) == 1:
        reasons[new[0]] = failure
        return good
    middle = len(new) // 2
    return _sift(new[middle:], _sift(new[:middle], good, test, reasons), test, reasons)


Scene = tuple[nn.Module, Inputs]


class _Bench:
    """Disturbed copies of the model in float64 with an input each, and the comparison of masked and removed."""

    def __init__(self, model: nn.Module, graph: Graph, inputs: Inputs) -> None:
        self.graph = graph
        self.original = model
        self.scenes: list[Scene] = []
        few = _first_examples(inputs, 2)
        # The model may cast to a dtype of its own, take no other batch, or no other numbers: the first that it takes.
        self.dtype: torch.dtype | None
        for self.dtype, self.tolerance in ((torch.float64, 1e-9), (None, 1e-3)):
            for self.base in (few, inputs):
                if self._sets(stirred(self.base)) or self._sets(self.base):
                    return
        self.scenes = [(copy.deepcopy(model).eval(), inputs)]

    def _sets(self, inputs: Inputs, seed: int = 0) -> bool:
        """Adds a scene, a disturbed copy of the model and an input, if it runs and gives finite numbers."""
        model = copy.deepcopy(self.original).eval()
        dtype = self.dtype
        if dtype is not None:
            model.to(dtype)
            inputs = tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)
        _disturb(model, seed)
        scene: Scene = (model, inputs)
        try:
            fine = all(bool(t.isfinite().all()) for t in _outputs(*scene))
        except Exception:
            return False
        if fine:
            self.scenes.append(scene)
        return fine

    def unseen(self, axes: Sequence[int]) -> list[int]:
        """The axes that the output does not depend on, as far as any scene shows: their removal cannot be checked.

        A dead ReLU hides the units behind it, so further scenes are set, and kept if they show more.
        """
        moved = self._moved(*self.scenes[0])
        left = [k for k in axes if not self._shows(k, moved, *self.scenes[0])]
        for seed in range(1, 9):
            if not left or not self._sets(stirred(self.base, seed), seed):
                continue
            moved = self._moved(*self.scenes[-1])
            still = [k for k in left if not self._shows(k, moved, *self.scenes[-1])]
            if len(still) == len(left):
                self.scenes.pop()
            left = still
        return left

    def _moved(self, model: nn.Module, inputs: Inputs) -> set[int]:
        """Units whose closing moves the output, to first order: slope of a random projection times the weight."""
        members = model.named_parameters()
        weights = {n: p.detach().clone().requires_grad_() for n, p in members if n in self.graph.reading}
        generator = torch.Generator().manual_seed(1)
        try:
            with torch.enable_grad():
                outputs = [t for t in tree_leaves(run(model, inputs, weights)) if isinstance(t, Tensor)]
                noise = [torch.randn(t.shape, generator=generator).to(t.device) for t in outputs]
                total = sum((t * n).sum() for t, n in zip(outputs, noise, strict=True) if t.requires_grad)
                slopes = torch.autograd.grad(total, list(weights.values()), allow_unused=True)  # type: ignore[arg-type]
        except Exception:  # no floating-point output, or something that has no derivative
            return set()
        moved: set[int] = set()
        for (tensor, weight), slope in zip(weights.items(), slopes, strict=True):
            if slope is not None:
                dims = self.graph.reading[tensor]
                rest = [d for d in range(weight.ndim) if d not in dims]
                move = (slope * weight.detach()).abs()
                moves = (move.sum(rest) if rest else move).cpu().numpy() > 0
                moved.update(np.unique(self.graph.units[tensor][dims][moves]).tolist())
        return moved

    def _shows(self, axis: int, moved: set[int], model: nn.Module, inputs: Inputs) -> bool:
        span = self.span(axis)
        if any(span.start <= unit < span.stop for unit in moved):
            return True
        masked = _outputs(model, inputs, masked_weights(model, self.graph, self.without([axis])))
        return not all(torch.equal(a, b) for a, b in zip(_outputs(model, inputs), masked, strict=True))

    def survives_parts(self, axes: Sequence[int]) -> str | None:
        """Removes one unit of each axis, a random half, all but one: None, or a sentence that says how it went wrong.

        All three: `chunk(3)` of 3·n entries still cuts at n when one or two are gone, and elsewhere when three are.
        """
        failures = (self.survives(self.alive(axes, much), axes) for much in ("one", "half", "most"))
        return next((failure for failure in failures if failure is not None), None)

    def could_vanish(self, axis: int) -> bool:
        try:
            make_plan(self.graph, self.without([axis]))
        except ClosedAxisError:
            return False
        return True

    def survives_vanishing(self, axes: Sequence[int]) -> str | None:
        trial = list(self.graph.axes)
        for k in axes:
            trial[k] = replace(trial[k], can_vanish=True)
        return self.survives(self.without(axes), axes, replace(self.graph, axes=tuple(trial)))

    def survives(self, alive: Mask, axes: Sequence[int], graph: Graph | None = None) -> str | None:
        try:
            plan = make_plan(graph or self.graph, alive)
        except ClosedAxisError as error:
            return str(error)
        if any(plan.units[self.span(k)].all() for k in axes):  # all came back, and nothing was tried
            return "the groups of the convolutions on it let no part of its units go"
        for model, inputs in self.scenes:
            masked = _outputs(model, inputs, masked_weights(model, self.graph, plan.units))
            small = copy.deepcopy(model)
            try:
                plan.apply(small)
                removed = _outputs(small, inputs)
            except Exception as error:
                return f"the model does not run with a unit of it removed ({first_line(error)})"
            if not agree(masked, removed, self.tolerance):
                return "the model gives another output with a unit of it removed than with the unit closed"
        return None

    def without(self, axes: Sequence[int]) -> Mask:
        """All units but those of these axes."""
        alive = np.ones(self.graph.offsets[-1], dtype=bool)
        for k in axes:
            alive[self.span(k)] = False
        return alive

    def span(self, axis: int) -> slice:
        return slice(self.graph.offsets[axis], self.graph.offsets[axis] + self.graph.axes[axis].size)

    def alive(self, axes: Sequence[int], much: Literal["one", "half", "most"]) -> Mask:
        """Without one unit of each axis, half of them, or all but one; as many of each group of a convolution."""
        random = np.random.default_rng(0)
        alive = self.without([])
        for k in axes:
            cells = self._cells(k)
            parts = int(np.gcd.reduce([len(cell) for cell in cells]))
            taken = 0 if parts == 1 else {"one": 1, "half": parts // 2, "most": parts - 1}[much]
            for number, cell in enumerate(cells):
                # Another place in each cell: what asks for the same place in all of them must not pass.
                order = np.roll(cell, -number) if much == "one" else random.permutation(cell)
                alive[order[: len(cell) // parts * taken]] = False
        return alive

    def _cells(self, axis: int) -> list[Numbers]:
        """The units of an axis, in sets that lie in the same groups of all grouped convolutions."""
        span = self.span(axis)
        place: list[list[int]] = [[] for _ in range(self.graph.axes[axis].size)]
        for balance in self.graph.balances:
            for number, row in enumerate(balance):
                for unit in np.unique(row[(row >= span.start) & (row < span.stop)]).tolist():
                    place[unit - span.start].append(number)
        cells: dict[tuple[int, ...], list[int]] = {}
        for unit, numbers in enumerate(place, span.start):
            cells.setdefault(tuple(numbers), []).append(unit)
        return [np.array(cell) for cell in cells.values()]


def masked_weights(model: nn.Module, graph: Graph, alive: Mask) -> dict[str, Tensor]:
    """The weights that read, with zeros where the unit that they read is not alive."""
    members = dict(model.named_parameters())
    out = {}
    for tensor, dims in graph.reading.items():
        units = graph.units[tensor][dims]
        keep = torch.as_tensor(alive[units] | (units < 0))
        weight = members[tensor]
        shape = [weight.shape[d] if d in dims else 1 for d in range(weight.ndim)]
        out[tensor] = weight * keep.reshape(shape).to(weight)
    return out


def agree(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float) -> bool:
    """Whether two lists of tensors have the same shapes and, relative to their largest entry, the same numbers."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return False
    for x, y in zip(a, b, strict=True):
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return False
        elif x.numel():
            finite = x[x.isfinite()].abs()
            # Relative, but not to nothing: an output that cancels to zero leaves rounding of what cancelled.
            scale = max(1e-4, float(finite.max())) if finite.numel() else 1.0
            near = (x == y) | ((x - y).abs() <= tolerance * scale)  # the same infinity passes, NaN never does
            if not bool(near.all()):
                return False
    return True


def _outputs(model: nn.Module, inputs: Inputs, weights: dict[str, Tensor] | None = None) -> list[Tensor]:
    """The tensors that come out, without a trace in torch's random state."""
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=[d.index for d in devices]):
        torch.manual_seed(0)
        out = run(model, inputs, weights)
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def _disturb(model: nn.Module, seed: int) -> None:
    """Moves every number a little, or not so little for seeds above 0, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    share, least = (0.1, 0.02) if seed == 0 else (1.0, 0.1)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.add_(noise * (share * p.abs().mean() + least))
        for b in model.buffers():
            if b.is_floating_point():  # a factor near one: a variance stays positive
                b.mul_(1 + 0.1 * torch.rand(b.shape, generator=generator).to(b))


def stirred(inputs: Inputs, seed: int = 0) -> Inputs:
    """The example with noise on its numbers, stronger for larger seeds: zeros would hide every difference."""
    generator = torch.Generator().manual_seed(seed)

    def stir(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf)
        return leaf + noise * (1 + seed / 2) * (0.1 + 0.5 * leaf.abs().mean() + 0.5 * (seed > 0))

    out: Inputs = tree_map(stir, inputs)
    return out


def _first_examples(inputs: Inputs, count: int) -> Inputs:
    size = batch_size(inputs)
    if size <= count:
        return inputs
    out: Inputs = tree_map(lambda t: t[:count] if isinstance(t, Tensor) and t.shape[:1] == (size,) else t, inputs)
    return out
