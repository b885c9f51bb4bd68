"""Trying removals out before any gate is trained: what does not survive one on a copy is frozen, with that reason.

Tracing cannot see a literal (`view(-1, 800)`, `x[:, :30]`) that is right for the dense network alone. So the model is
copied, its numbers are disturbed (a zero-initialised weight would hide a wrong answer), units are removed, and what
comes out is compared with the copy whose reading weights are set to zero at those units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ellzero.graph.axes import Graph, Numbers
from ellzero.graph.calls import Calls
from ellzero.graph.plan import ClosedAxisError, Mask, Plan, make_plan
from ellzero.graph.retracing import strays
from ellzero.graph.tracing import Inputs, batch_size, first_line, run

UNSEEN = "the example input does not show whether the output depends on it"
Together = tuple[int, ...]  # axes of which as many units must stay, by number


def proven(model: nn.Module, graph: Graph, inputs: Inputs) -> Graph:
    """The graph with every axis frozen whose units cannot be removed, and `can_vanish` where whole layers can be."""
    bench = _Bench(model, graph, inputs)
    free = [k for k, a in enumerate(graph.axes) if a.frozen is None]
    reasons = dict.fromkeys(bench.unseen(free), UNSEEN)
    sets = _together(graph, [k for k in free if k not in reasons])
    good = _sift([s for s in sets if any(graph.axes[k].size > 1 for k in s)], [], bench.survives_parts, reasons)
    good = _sift(good, [], bench.keeps_its_way, reasons)
    axes = [replace(a, frozen=reasons.get(k, a.frozen)) for k, a in enumerate(graph.axes)]
    lone = [s for s in sets if all(graph.axes[k].size == 1 for k in s)]
    bench.graph = replace(graph, axes=tuple(axes))
    vanishing = []
    for layers in (False, True):  # apart: where no layer goes, the ways of the two networks can be compared
        whole = [s for s in good + lone if bench.closes(s) is layers]
        vanishing += _sift(whole, [], bench.survives_vanishing, {})
        # Two branches that cannot both go may each go alone.
        vanishing += [s for s in whole if s not in vanishing and bench.survives_vanishing(s) is None]
    for k in (k for s in _sift(vanishing, [], bench.survives_some_vanishing, {}) for k in s):
        axes[k] = replace(axes[k], can_vanish=True)
    matters = np.repeat([a.frozen is None for a in axes] + [False], [a.size for a in axes] + [1])  # the last: unit -1
    balances = tuple(b for b in graph.balances if matters[b].any())
    steps = tuple(replace(step, made=()) for step in graph.steps)  # nobody asks again where units lie
    return replace(graph, axes=tuple(axes), balances=balances, steps=steps)


def _together(graph: Graph, axes: Sequence[int]) -> list[Together]:
    """The axes in sets that balances hold together: none of a set can shrink where another one cannot."""
    of_unit = np.append(np.repeat(np.arange(len(graph.axes)), [a.size for a in graph.axes]), -1)
    sets = [{k} for k in axes]
    for balance in graph.balances:
        held = set(np.unique(of_unit[balance]).tolist())
        touched = [s for s in sets if s & held]
        sets = [s for s in sets if not s & held] + ([set.union(*touched)] if touched else [])
    return sorted(tuple(sorted(s)) for s in sets)


def _sift(
    new: Sequence[Together],
    good: list[Together],
    test: Callable[[Sequence[int]], str | None],
    reasons: dict[int, str],
) -> list[Together]:
    """As many of `new` as pass the test together with `good`, by halving: few trials where few fail."""
    if not new:
        return good
    failure = test([k for s in (*good, *new) for k in s])
    if failure is None:
        return [*good, *new]
    if len(new) == 1:
        reasons.update(dict.fromkeys(new[0], failure))
        return good
    middle = len(new) // 2
    return _sift(new[middle:], _sift(new[:middle], good, test, reasons), test, reasons)


Scene = tuple[nn.Module, Inputs]


class _Bench:
    """Disturbed copies of the model in float64 with an input each, and the comparison of masked and removed."""

    def __init__(self, model: nn.Module, graph: Graph, inputs: Inputs) -> None:
        self.graph = graph
        self.original, self.inputs = model, inputs
        self.scenes: list[Scene] = []
        self.tolerance = 1e-9
        few = _first_examples(inputs, 2)
        # The model may cast to a dtype of its own, take no other batch, or no other numbers: the first that it takes.
        self.dtype: torch.dtype | None
        for self.dtype in (torch.float64, None):
            for self.base in (few, inputs):
                if self._sets(stirred(self.base)) or self._sets(self.base):
                    return
        self.scenes, self.tolerance = [(copy.deepcopy(model).eval(), inputs)], 1e-3

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
            outputs, tolerance = watched(*scene, fine=1e-9)
        except Exception:
            return False
        fine = all(bool(t.isfinite().all()) for t in outputs)
        if fine:
            self.scenes.append(scene)
            self.tolerance = max(self.tolerance, tolerance)
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
        masked = outputs(model, inputs, masked_weights(model, self.graph, self.without([axis])))
        return not all(torch.equal(a, b) for a, b in zip(outputs(model, inputs), masked, strict=True))

    def survives_parts(self, axes: Sequence[int]) -> str | None:
        """Removes one unit of each axis, a random half, all but one, as many as it comes: None, or how it went wrong.

        All of them: `chunk(3)` of 3·n entries still cuts at n when one or two are gone, and elsewhere when three are.
        """
        axes = [k for k in axes if self.graph.axes[k].size > 1]
        for much in ("one", "half", "most"):
            plan = make_plan(self.graph, self.alive(axes, much), refuse=False)
            if any(plan.units[self.span(k)].all() for k in axes):  # all came back, and nothing was tried
                return "groups and cuts along it let no part of its units go"
            if (failure := self.survives(plan)) is not None:
                return failure
        uneven = (make_plan(self.graph, self.uneven(axes, seed), refuse=False) for seed in range(2))
        return next(filter(None, map(self.survives, uneven)), None)

    def keeps_its_way(self, axes: Sequence[int]) -> str | None:
        return self.follows(make_plan(self.graph, self.alive(axes, "half"), refuse=False), axes)

    def follows(self, plan: Plan, axes: Sequence[int]) -> str | None:
        """Whether all units that are left are where they are looked for. A trace tells, and it is dear."""
        if not any(self.graph.placed[self.span(k)].any() for k in axes):
            return None
        small = copy.deepcopy(self.original)
        plan.apply(small)
        with seeded(small):
            return strays(self.graph, plan, small, self.inputs)

    def closes(self, axes: Sequence[int]) -> bool | None:
        """Whether layers go with all units of these axes; None if nothing carries on without them."""
        try:
            return bool(make_plan(self._vanishing(axes), self.without(axes)).closed)
        except ClosedAxisError:
            return None

    def survives_vanishing(self, axes: Sequence[int]) -> str | None:
        try:
            plan = make_plan(self._vanishing(axes), self.without(axes))
        except ClosedAxisError as error:
            return str(error)
        failure = self.survives(plan)
        return failure if failure or plan.closed else self.follows(plan, axes)

    def survives_some_vanishing(self, axes: Sequence[int]) -> str | None:
        """Some of the axes go as a whole, and of all others as many units as it comes."""
        graph, free = self._vanishing(axes), [k for k, a in enumerate(self.graph.axes) if a.frozen is None]
        for seed in range(3):
            gone = np.random.default_rng(seed).random(len(axes)) < 0.5
            alive = self.uneven(free, seed) & self.without([k for k, away in zip(axes, gone, strict=True) if away])
            try:
                failure = self.survives(make_plan(graph, alive))
            except ClosedAxisError:  # refused, then as now
                continue
            if failure is not None:
                return failure
        return None

    def _vanishing(self, axes: Sequence[int]) -> Graph:
        changed = (replace(a, can_vanish=k in axes) for k, a in enumerate(self.graph.axes))
        return replace(self.graph, axes=tuple(changed))

    def survives(self, plan: Plan) -> str | None:
        for model, inputs in self.scenes:
            weights = masked_weights(model, self.graph, plan.units)
            with Calls() as usual:
                masked = outputs(model, inputs, weights)
            small = copy.deepcopy(model)
            try:
                plan.apply(small)
                with Calls() as calls:
                    removed = outputs(small, inputs)
            except Exception as error:
                return f"the model does not run with a unit of it removed ({first_line(error)})"
            if not agree(masked, removed, self.tolerance):
                return "the model gives another output with a unit of it removed than with the unit closed"
            if not plan.closed and (what := usual.departure(calls)):
                return f"the model does something else with a unit of it removed: {what}"
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

    def uneven(self, axes: Sequence[int], seed: int) -> Mask:
        """Without as many units of each axis as it comes, but for one."""
        random = np.random.default_rng(seed)
        alive = self.without([])
        for k in axes:
            span = self.span(k)
            alive[
                random.permutation(np.arange(span.start, span.stop))[1:][: random.integers(span.stop - span.start)]
            ] = False
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


@contextmanager
def seeded(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with the same random numbers at every call, of which torch's own state shows no trace."""
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=[d.index for d in devices]):
        torch.manual_seed(0)
        yield


def outputs(model: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """The tensors that come out."""
    with seeded(model):
        return [t for t in tree_leaves(run(model, inputs, weights)) if isinstance(t, Tensor)]


def watched(
    model: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None = None, *, fine: float
) -> tuple[list[Tensor], float]:
    """The tensors that come out, and how closely they can be compared: `fine`, or less where the model casts."""
    with _Coarsest() as coarsest:
        out = outputs(model, inputs, weights)
    return out, fine if coarsest.eps < 1e-15 else min(0.05, 2**13 * coarsest.eps)


class _Coarsest(TorchDispatchMode):
    """Notes the coarsest floating-point numbers that a forward goes through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kinds = (t.dtype for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point())
        self.eps = max(self.eps, *(torch.finfo(kind).eps for kind in kinds), 0.0)
        return out


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
