"""Trying removals out before any gate is trained: what does not survive one on a copy is frozen, with that reason.

Tracing cannot see a literal (`view(-1, 800)`, `x[:, :30]`) that is right for the dense network alone. So the model is
copied, its numbers are disturbed (a zero-initialised weight would hide a wrong answer), units are removed, and what
comes out is compared with the copy whose reading weights are set to zero at those units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ellzero.graph.axes import Block, Graph, Numbers, Stored
from ellzero.graph.forwards.copying import duplicate, lean
from ellzero.graph.plan import ClosedAxisError, Mask, Plan, make_plan
from ellzero.graph.rules.attention import attended
from ellzero.graph.standins.layers import CONTRACTING
from ellzero.graph.stored import (
    group_norms,
    groups_of_a_forward,
    numbers_in_settings,
    parts_of_reshapes,
    widths_of_inputs,
)
from ellzero.graph.tracing import Inputs, first_line, progress
from ellzero.graph.trials import responding, routing
from ellzero.graph.trials.blocks import found
from ellzero.graph.trials.drawing import HowMuch, Together, cells, drawn, picking, sift, sifted, together
from ellzero.graph.trials.retracing import strays
from ellzero.graph.trials.running import (
    Coarsest,
    agree,
    enough,
    first_examples,
    give_back,
    is_large,
    seeded,
    stirred,
)
from ellzero.graph.trials.scenes import Loans, Scene, loans, moving, staged

UNSEEN = "the example input does not show whether the output depends on it"
STUCK = "groups and cuts along it let no part of its units go"
ONE_GROUP = "the groups of its norms make one unit of it, which cannot go as a whole"
ELSE = "the model does something else with a unit of it removed"
DIFFERS = "the model gives another output with a unit of it removed than with the unit closed: it goes by their number"
NO_RUN = "the model does not run with a unit of it removed"
BY_WIDTH = "; a forward that keeps the size of a head in `self`, and lays heads out by it alone, can lose some"
Least = tuple[Numbers, int]  # of these units so many stay
_LEVELS: tuple[HowMuch, ...] = ("many", "some", "most")  # of removal, one after the other
# From the whole network; all but the last two only where a forward costs next to nothing.
_FURTHER: tuple[HowMuch, ...] = ("one", "half", "uneven", "uneven", "uneven", "uneven")
_FOLLOWED: tuple[HowMuch, ...] = ("half", "many", *_FURTHER)  # as many as it takes


def proven(model: nn.Module, graph: Graph, inputs: Inputs) -> Graph:
    """The graph with every axis frozen whose units cannot be removed, and `can_vanish` where whole layers can be.

    Queries that share a head of keys go one by one if that is all right; or so that two of each stay, since many
    forwards take another way where there is nothing to repeat; or all at once.
    """
    if is_large(model):
        give_back()  # what tracing took
    two = tuple(replace(s, least=2) for s in graph.served)
    ways = [graph, *([replace(graph, served=two)] if any(s.queries.shape[1] > 2 for s in two) else [])]
    first = {int(s.queries[0, 0]) for s in graph.served}  # of the queries of each layer that share heads of keys
    for way in ways if graph.served else ():
        bench = _Bench(model, way, inputs)
        shared = [k for k, a in enumerate(graph.axes) if a.frozen is None and a.size > 1 and bench.among(first, k)]
        failure, _ = bench.survives(bench.part(shared, "most"), bench.scenes)
        if failure and not failure.startswith(NO_RUN):  # it takes another way, of which nothing is to be had
            continue
        out = _proven(bench)
        if all(out.axes[k].frozen is None for k in shared):
            return out
    return _proven(_Bench(model, graph.grouped or graph, inputs))


def _proven(bench: _Bench) -> Graph:
    model, graph = bench.original, bench.graph
    free = [k for k, a in enumerate(graph.axes) if a.frozen is None]
    reasons = dict.fromkeys(bench.unseen(free), UNSEEN)
    # Whether such a number is a literal shows in no output where a condition hides it: nobody guesses.
    told = [(set(units.tolist()), why) for units, why in groups_of_a_forward(model, graph) if why]
    reasons |= {k: why for units, why in told for k in free if bench.among(units, k)}
    sets = together(graph, [k for k in free if k not in reasons])
    survivors = sifted(
        [s for s in sets if any(graph.axes[k].size > 1 for k in s)],
        [],
        bench.survives_a_part,
        bench.survives_parts,
        reasons,
    )
    for finds in (numbers_in_settings, parts_of_reshapes, widths_of_inputs, _in_twos):
        survivors = _tried_again([s for s in sets if s not in survivors], survivors, bench, reasons, finds)
    graph = bench.graph
    good = sift(survivors, [], bench.keeps_its_way, reasons)
    axes = [replace(a, frozen=reasons.get(k, a.frozen)) for k, a in enumerate(graph.axes)]
    lone = [s for s in sets if all(graph.axes[k].size == 1 for k in s)]
    bench.graph = graph.with_axes(axes)
    if len(good) < len(survivors):  # what is small by now must be small along these alone
        bench.survives_parts([k for s in good for k in s])
    heads = attended(graph)
    one_stays = {k for k, a in enumerate(axes) if a.closing or bench.among(heads, k)}
    vanishing, closing = [], {s: bench.closes(s) for s in good + lone if one_stays.isdisjoint(s)}
    for layers in (False, True):  # apart: where no layer goes, a trace tells more
        whole = [s for s, closes in closing.items() if closes is layers]
        vanishing += sift(whole, [], bench.survives_vanishing, {})
        # Two branches that cannot both go may each go alone.
        vanishing += [s for s in whole if s not in vanishing and bench.survives_vanishing(s) is None]
    for k in (k for s in sift(vanishing, [], bench.survives_some_vanishing, {}) for k in s):
        axes[k] = replace(axes[k], can_vanish=True)
    wide = {unit for step, units in group_norms(graph) if step.numbers[0] > 1 for unit in units.tolist()}
    for k in (k for s in lone for k in s if not axes[k].can_vanish and bench.among(wide, k)):
        axes[k] = replace(axes[k], frozen=ONE_GROUP)
    steps = tuple(replace(step, made=()) for step in graph.steps)  # nobody asks again where units lie
    done = replace(graph, axes=tuple(axes), steps=steps, grouped=None)
    matters = done.on(lambda axis: axis.frozen is None)
    done = replace(done, balances=tuple(b for b in graph.balances if matters[b].any()))
    return responding.hinted(routing.hinted(picking(done, bench.scenes[0], bench.tolerance)))


def _tried_again(
    failed: Sequence[Together],
    good: list[Together],
    bench: _Bench,
    reasons: dict[int, str],
    finds: Callable[[nn.Module, Graph, Sequence[int]], Iterator[tuple[int, Stored | Numbers | Least]]],
) -> list[Together]:
    """Tries heads again whose forward goes by a number that its module does not keep: in settings, or the width of its
    input, or one in the code, of parts that it lays them out in; or takes another way for a lone one.
    """
    found: dict[int, dict[str, Stored | Numbers | Least]] = {}
    asked = [k for s in failed for k in s if k in reasons and (finds is not _in_twos or reasons[k].startswith(ELSE))]
    for k, what in finds(bench.original, bench.graph, asked):
        units = what.units if isinstance(what, Stored) else what[0] if isinstance(what, tuple) else what
        name = f"{what.module}: {what.attribute}" if isinstance(what, Stored) else str(what)
        found.setdefault(k, {})[name] = what
        bench.graph.placed[units] = True  # whether anything else goes by it, a trace tells
        bench.cells.pop(k, None)
    again, before = [s for s in failed if found.keys() & set(s)], bench.graph
    if not again:
        return good

    def following(axes: Iterable[int]) -> Graph:
        more = [what for k in axes if k in found for what in found[k].values()]
        numbers = (what for what in more if isinstance(what, Stored))
        parts, least = (what for what in more if isinstance(what, np.ndarray)), (w for w in more if type(w) is tuple)
        stored, balances = (*before.stored, *numbers), (*before.balances, *parts)
        return replace(before, stored=stored, balances=balances, least=(*before.least, *least))

    bench.graph = following(found)
    out = sifted(again, good, bench.survives_a_part, bench.survives_parts, {})
    passed = [k for s in out for k in s]
    for k in found:
        if k in passed:
            del reasons[k]
        elif reasons[k].startswith(NO_RUN) and BY_WIDTH not in reasons[k]:
            reasons[k] += BY_WIDTH
    bench.graph = following(passed)
    bench.cells = {k: cell for k, cell in bench.cells.items() if k in passed or k not in found}
    return out


def _in_twos(model: nn.Module, graph: Graph, axes: Sequence[int]) -> Iterator[tuple[int, Least]]:
    """Heads of which two must stay: for a lone one many forwards have no keys to repeat, and leave that out."""
    for k in axes:
        if graph.axes[k].heads and graph.axes[k].size > 2:
            yield k, (np.arange(graph.offsets[k], graph.offsets[k + 1]), 2)


def blocks_of(model: nn.Module, graph: Graph, inputs: Inputs) -> tuple[Block, ...]:
    """The branches that can go as a whole, of a graph that was `proven`."""
    blocks = found(model, graph, inputs)
    if not blocks:
        return ()
    bench = _Bench(model, graph.with_blocks(blocks), inputs)
    survive = sift([(b,) for b in range(len(blocks))], [], bench.survives_blocks, {})
    return tuple(blocks[b] for (b,) in survive)


class _Bench:
    """Disturbed copies of the model in float64 with an input each, and the comparison of masked and removed.

    A network of which units are removed, and that was found to be what the masked one is, takes its place: there the
    next removal is tried, at a fraction of the cost.
    """

    def __init__(self, model: nn.Module, graph: Graph, inputs: Inputs) -> None:
        self.graph = graph
        self.original, self.inputs = model, inputs
        self.scenes: list[Scene] = []
        self.moved: set[int] = set()
        self.cells: dict[int, list[Numbers]] = {}  # of each axis that was asked about
        self.tolerance = 1e-9
        few = first_examples(inputs, enough(model, graph))
        # The model may cast to a dtype of its own, take no other batch, or no other numbers: the first that it takes.
        self.dtype: torch.dtype | None
        for self.dtype in (torch.float64, None):
            for self.base in (few, inputs):
                if self._sets(stirred(self.base)) or self._sets(self.base):
                    break
            if self.scenes:
                break
        else:
            self.scenes, self.tolerance = [Scene(duplicate(model).eval(), inputs)], 1e-3
        self.some = self.few = (self.without([]), self.scenes)  # any number of units, and one each

    def _sets(self, inputs: Inputs, seed: int = 0) -> bool:
        """Adds a scene, a disturbed copy of the model and an input, if it runs and gives finite numbers."""
        ways = [Loans()]
        if not seed and self.dtype is not None and is_large(self.original) and self.graph.products is not None:
            lent = loans(self.original, self.graph, self.dtype, seed)
            ways = [*([lent] if lent.ends else []), *([replace(lent, ends=())] if lent.weights else []), *ways]
        return any(self._adds(inputs, seed, lent) for lent in ways)

    def _adds(self, inputs: Inputs, seed: int, lent: Loans) -> bool:
        whole = staged(self.original, inputs, seed, lent)
        moved = set() if lent.weights else moving(self.graph, whole)
        if self.dtype is not None:
            whole.to(self.dtype)
        free = [k for k, a in enumerate(self.graph.axes) if a.frozen is None]
        many = self.part([k for k in free if self.graph.axes[k].size > 1], "many")
        try:
            with Coarsest() as coarsest:  # with the mask that is asked for first
                if lent.weights:
                    outputs, small = whole.both(self.graph, many)
                else:
                    outputs, _ = whole.masked(self.graph, many.units)
            if not all(bool(t.isfinite().all()) for t in outputs):
                return False
            for scene in self._lesser(small, many) if lent.weights else ():  # slopes of what is left will do
                moved |= moving(self.graph, scene)
                if all(self.among(moved, k) for k in free):
                    break
        except Exception:
            return False
        if lent.weights and not all(self.among(moved, k) for k in free):
            return False
        self.scenes.append(whole)
        self.moved = moved
        self.tolerance = max(self.tolerance, coarsest.tolerance(1e-9))
        return True

    def _lesser(self, small: Scene, plan: Plan) -> Iterator[Scene]:
        """The scene with one unit of each axis, and itself."""
        if not plan.columns:
            yield small.removed(self.part([k for k, a in enumerate(self.graph.axes) if a.frozen is None], "most", plan))
        yield small

    def unseen(self, axes: Sequence[int]) -> list[int]:
        """The axes that the output does not depend on, as far as any scene shows: their removal cannot be checked.

        A dead ReLU hides the units behind it, so further scenes are set, and kept if they show more.
        """
        left = [k for k in axes if not self._shows(k, self.scenes[0])]
        for seed in range(1, 9):
            if not left or not self._sets(stirred(self.base, seed), seed):
                continue
            still = [k for k in left if not self._shows(k, self.scenes[-1])]
            if len(still) == len(left):
                self.scenes.pop()
            left = still
        return left

    def among(self, units: set[int], axis: int) -> bool:
        span = self.span(axis)
        return any(span.start <= unit < span.stop for unit in units)

    def _shows(self, axis: int, scene: Scene) -> bool:
        if self.among(self.moved, axis):
            return True
        usual, _ = replace(scene, last=None).masked(self.graph, self.without([]))
        masked, _ = replace(scene, last=None).masked(self.graph, self.without([axis]))
        return not all(torch.equal(a, b) for a, b in zip(usual, masked, strict=True))

    def survives_parts(self, axes: Sequence[int]) -> str | None:
        """Removes units of each axis, as many as it comes, then of those that are left, then all but one: None, or how
        it went wrong.

        Several times: `chunk(3)` of 3·n entries still cuts at n when one or two are gone, and elsewhere when three are.
        """
        axes = [k for k in axes if self.graph.axes[k].size > 1]
        scenes, tried = self.scenes, []
        for much in _LEVELS:
            plan = self.part(axes, much, scenes[0].done)
            if much == "many" and any(plan.units[self.span(k)].all() for k in axes):  # all came back: nothing was tried
                return STUCK
            failure, small = self.survives(plan, scenes)
            if failure is not None:
                return failure
            scenes = scenes if plan.columns else small
            tried.append((plan.units, scenes))
        # Who asks whether a number is even, say, may get the same answer twice. A large one is asked when small.
        first, scenes = (4, tried[0][1]) if is_large(self.original) else (0, self.scenes)
        seen = {tried[0][0].tobytes()}
        for seed, much in list(enumerate(_FURTHER))[first:]:
            plan = self.part(axes, much, scenes[0].done, seed)
            if (units := plan.units.tobytes()) in seen:  # few units: the same ones again
                continue
            seen.add(units)
            failure, _ = self.survives(plan, scenes)
            if failure is not None:
                return failure
        _, self.some, self.few = tried
        return None

    def survives_a_part(self, axes: Sequence[int]) -> str | None:
        """The first of these trials alone."""
        plan = self.part([k for k in axes if self.graph.axes[k].size > 1], _LEVELS[0], self.scenes[0].done)
        return self.survives(plan, self.scenes)[0]

    def keeps_its_way(self, axes: Sequence[int]) -> str | None:
        """Follows removals until each axis has lost units in one: where parts are balanced, all may have come back."""
        left = [k for k in axes if self.graph.axes[k].size > 1 and self.graph.placed[self.span(k)].any()]
        several = len(left)
        for seed, much in enumerate(_FOLLOWED if left else ()):
            plan = self.part(axes, much, seed=seed)
            if failure := self.follows(plan, axes):
                return failure
            left = [k for k in left if plan.units[self.span(k)].all()]
            if not left:  # and some without others: who asks whether a width is even may have met even ones alone
                more = 0 if is_large(self.original) or several < 2 else 4
                plans = (self.part(axes, "uneven", seed=n) for n in range(more))
                return next(filter(None, (self.follows(plan, axes) for plan in plans)), None)
        return STUCK if left else None

    def follows(self, plan: Plan, axes: Sequence[int]) -> str | None:
        """Whether all units that are left are where they are looked for. A trace tells, and it is dear."""
        if plan.units.all() or not any(self.graph.placed[self.span(k)].any() for k in axes):
            return None
        small = lean(self.original)
        plan.apply(small)
        with seeded(small):
            return strays(self.graph, plan, small, self.inputs, plan.renamed(self.original, small))

    def closes(self, axes: Sequence[int]) -> bool | None:
        """Whether layers go with all units of these axes; None if nothing carries on, or one of them is a mixture."""
        try:
            closed = make_plan(self._vanishing(axes), self.without(axes)).closed
        except ClosedAxisError:
            return None
        inside = closed & {step.module for step in self.graph.steps if step.contracts}
        bare = all(isinstance(self.original.get_submodule(path), CONTRACTING) for path in inside)
        return bool(closed) if bare else None

    def survives_vanishing(self, axes: Sequence[int]) -> str | None:
        try:
            whole = make_plan(self._vanishing(axes), self.without(axes))
            units, scenes = self.few
            plan = _within(self._vanishing(axes), self.without(axes), units, refuse=True)
        except ClosedAxisError as error:
            return str(error)
        failure, _ = self.survives(plan, scenes)
        return failure if failure or whole.closed else self.follows(whole, axes)

    def survives_some_vanishing(self, axes: Sequence[int]) -> str | None:
        """Some of the axes go as a whole, the others do not; then those that stayed."""
        gone = np.random.default_rng(0).random(len(axes)) < 0.5
        trials = [(*self.some, gone), (*self.some, ~gone)]
        if not is_large(self.original):
            free = [k for k, a in enumerate(self.graph.axes) if a.frozen is None and a.size > 1]
            draws = ((self.part(free, "uneven", seed=k).units, np.random.default_rng(k)) for k in range(3))
            trials += [(units, self.scenes, random.random(len(axes)) < 0.5) for units, random in draws]
        for units, scenes, goes in trials:
            alive = self.without([k for k, away in zip(axes, goes, strict=True) if away])
            try:
                plan = _within(self._vanishing(axes), alive, units, refuse=True)
            except ClosedAxisError:  # refused, then as now
                continue
            failure, _ = self.survives(plan, scenes)
            if failure is not None:
                return failure
        return None

    def survives_blocks(self, blocks: Sequence[int]) -> str | None:
        """All of the blocks go; then every other one, beside units that do; then the rest."""
        many = self.part([k for k, a in enumerate(self.graph.axes) if a.frozen is None and a.size > 1], "many").units
        for units, these in ((self.without([]), blocks), (many, blocks[::2]), (many, blocks[1::2])):
            failure, _ = self.survives(_within(self.graph, units, units, blocks=these), self.scenes)
            if failure is not None:
                return failure
        return None

    def _vanishing(self, axes: Sequence[int]) -> Graph:
        return self.graph.with_axes(replace(a, can_vanish=k in axes) for k, a in enumerate(self.graph.axes))

    def survives(self, plan: Plan, scenes: Sequence[Scene]) -> tuple[str | None, list[Scene]]:
        """How it went wrong to remove units, if it did; and the scenes without them."""
        left = self.without([]) if scenes[0].done is None else scenes[0].done.units
        if not (plan.closed or plan.blocks) and np.array_equal(plan.units, left):  # any number of units, and none went
            return None, list(scenes)
        made = []
        progress(f"trying out a removal of {(~plan.units).sum()} units")
        for scene in scenes:
            try:
                small = scene.removed(plan)
                gone = plan.closed | plan.gone.keys()
                removed, calls = small.masked(self.graph, plan.units, gone, blocks=plan.blocks)
            except Exception as error:
                return f"{NO_RUN} ({first_line(error)})", []
            masked, usual = scene.masked(self.graph, plan.units, gone, blocks=plan.blocks)
            if not agree(masked, removed, self.tolerance):
                return DIFFERS, []
            if what := usual.departure(calls, plan.renamed(scene.model, small.model)):
                return f"{ELSE}: {what}", []
            small.last = None  # outputs may be large, and nobody asks for these again
            if scene.done is not None:
                scene.last = None
            made.append(small)
        return None, made

    def without(self, axes: Sequence[int]) -> Mask:
        """All units but those of these axes."""
        alive = np.ones(self.graph.offsets[-1], dtype=bool)
        for k in axes:
            alive[self.span(k)] = False
        return alive

    def span(self, axis: int) -> slice:
        return slice(self.graph.offsets[axis], self.graph.offsets[axis] + self.graph.axes[axis].size)

    def part(self, axes: Sequence[int], much: HowMuch, done: Plan | None = None, seed: int = 0) -> Plan:
        """Removes some of what is left of each axis."""
        left = self.without([]) if done is None else done.units
        for k in axes:
            if k not in self.cells:
                self.cells[k] = cells(self.graph, self.span(k))
        return _within(self.graph, drawn(self.graph, left, [self.cells[k] for k in axes], much, seed), left)


def _within(graph: Graph, alive: Mask, left: Mask, *, refuse: bool = False, blocks: Sequence[int] = ()) -> Plan:
    """The plan that leaves of these units those that are left, and brings no others back."""
    return make_plan(graph, alive & left, evidence=np.where(left, 0.0, -np.inf), refuse=refuse, blocks=blocks)
