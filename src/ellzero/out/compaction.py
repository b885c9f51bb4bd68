"""The way out: a plain network that computes what the gated one does in evaluation, smaller.

`fold` multiplies the test-time gates into the weights and keeps shapes and zeros; `compact` then takes out every unit
that is closed, and proves on the example input that nothing changed. How units are taken out of tensors and modules is
in `graph.plan`; which are closed is the gates' business.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ellzero import gates as gt
from ellzero.gated.base.sharding import is_sharded
from ellzero.gated.module import Gated
from ellzero.gated.taking import refuse_replaced
from ellzero.gates.warning import warn
from ellzero.graph.forwards.copying import duplicate, lean
from ellzero.graph.plan import Plan, make_plan
from ellzero.graph.tracing import Inputs, first_line, progress, run, run_hollow, telling
from ellzero.graph.trials.fingerprint import note_example
from ellzero.graph.trials.running import (
    agree,
    enough,
    first_examples,
    in_type,
    is_large,
    leads,
    outputs,
    seeded,
    stirred,
    tensors_of,
    watched,
)

TOLERANCE = 1e-12  # of the largest output, in float64


class CompactionError(RuntimeError):
    """The compact network does not compute what the gated one does."""


def fold(gated: Gated) -> nn.Module:
    """Multiplies the test-time gates into a plain copy of the model: the function of `gated.eval()`, the same shapes.

    Args:
        gated: the network.

    Returns:
        A module of the model's own class, without gates.
    """
    _refuse_unfoldable(gated)
    folded = _folded(gated)
    note_example(folded, gated.example_inputs)
    return folded


def compact(gated: Gated, *, verify: bool = True) -> nn.Module:
    """A plain network of the model's own class with the closed units taken out; in evaluation the same function.

    The test-time gates are multiplied into the weights first, then every parameter and buffer loses the entries of
    closed units. A layer that reads single entries of something that cannot shrink gets a `Select`, one that writes
    single ones a `Scatter`; layers of a residual branch that is closed as a whole are taken out.

    Args:
        gated: the network; it is left as it is.
        verify: run the first two examples of the input (of a model with more than a million parameters, the first), and
            the same with noise on them, through both in float64 and compare: max |Δ| at most 1e-12 of the largest
            output (of 1e-4, if that is smaller). A model that takes no other batch gets all examples. One that casts is
            compared in its own type, to that type's rounding, which is measured where it matters: by weights that
            differ in their last digit. One that draws random numbers draws the same in both.

    Returns:
        The compact network, in the mode of `gated.model`.

    Raises:
        ClosedAxisError: an axis is closed as a whole and nothing carries on without it.
        CompactionError: the outputs differ, and the first layer that does is named; or one of the two does not run.
        ValueError: a gate's parameter is not finite; or weights have been sharded or quantised since.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
        >>> for _, gate in gated.named_gates():
        ...     gate.close_(torch.tensor([False, True, False]))
        >>> compact(gated)
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): ReLU()
          (2): Linear(in_features=2, out_features=2, bias=True)
        )
    """
    _refuse_unfoldable(gated)
    gated.warn_of_noise()
    plan = gated.plan().beyond(gated.taken)
    if verify:
        with telling():
            _prove(gated, plan)
    if not gated.has_learned():
        warn("no gate has moved since `attach`, so that nothing was learned about what can go: train first")
    elif gated.drawn and bool(gated.opens().all()):
        warn("every gate is open, so that nothing gets smaller: train longer, with a larger penalty, or under a budget")
    return without_closed(gated, plan)


def without_closed(gated: Gated, plan: Plan) -> nn.Module:
    """A copy without gates and closed units; nothing is proven or said."""
    small = fold(gated)
    plan.apply(small)
    return small


def refuse_unfit(gated: Any) -> None:
    """Refuses what is not a `Gated`, and one with a gate whose parameter is not finite."""
    if not isinstance(gated, Gated):
        raise TypeError(f"`gated` must be what `attach` returned, got {type(gated).__name__}")
    for name, gate in gated.named_gates():
        gate.check(name)


def _refuse_unfoldable(gated: Gated) -> None:
    """Refuses what is unfit, and weights of which each process has a part, or that are others since `attach`."""
    refuse_unfit(gated)
    if is_sharded(gated.model.parameters()):
        raise ValueError(
            "`gated` has weights that are sharded over processes: gather its state (`get_model_state_dict` with "
            "`full_state_dict=True`), load it into one of the whole network, and use that"
        )
    refuse_replaced(gated.model, gated.graph, gated.placements)


def _folded(gated: Gated, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the model with the test-time gates in its weights, in numbers of a type or of its own."""
    z = gt.values([g for _, g in gated.named_gates()])
    model = duplicate(gated.model)
    if dtype is not None:
        model, z = in_type(model, dtype), [v.to(dtype) for v in z]
    gated.multiply_into(model, z)
    return model


def _prove(gated: Gated, plan: Plan) -> None:
    """Compares masked and removed on an example and on a stirred one, in float64 so that rounding hides nothing; in
    the model's own type where it casts.
    """
    few, problem = first_examples(gated.example_inputs, enough(gated.model, gated.graph)), None
    for dtype in (torch.float64, None):
        for inputs in (few, gated.example_inputs):
            try:
                proof = _Proof(gated, plan, dtype, inputs)
            except Exception as error:
                problem = error
                continue
            proof.compare()
            _refuse_other_way(gated, plan, inputs)
            return
    assert problem is not None
    what = "the gated network itself does not run on its example input, so that `compact` can prove nothing"
    raise CompactionError(f"{what} ({first_line(problem)}); `verify=False` leaves the proof out") from problem


def _refuse_other_way(gated: Gated, plan: Plan, inputs: Inputs) -> None:
    """Refuses a model whose forward calls other functions at the widths that are left, which the example may hide
    behind a `where`: by a branch on whether three divide a width, say. Trials of `attach` may have met other widths.
    """
    units = plan.units.copy()  # one stays of each axis, so that every layer is there
    for axis, start in zip(gated.graph.axes, gated.graph.offsets, strict=False):
        units[start] |= not units[start : start + axis.size].any()
    whole = gated.model if gated.taken is None else gated.expanded().model
    whole = lean(whole) if is_large(whole) else duplicate(whole)  # a forward may change a weight: an embedding's
    if any(getattr(module, "max_norm", None) is not None for module in whole.modules()):
        return
    small = lean(whole)
    make_plan(gated.graph, units, refuse=False).apply(small)
    if [type(m) for m in whole.modules()] != [type(m) for m in small.modules()]:
        return  # one of ours stands for a layer, and calls what it calls
    for runs in (run_hollow, run):
        try:
            with seeded(whole):
                ways = [leads(model, inputs, runs) for model in (whole, small)]
        except Exception:  # so few units it does not take, and need not
            return
        if None not in ways:
            break
    for before, after in zip_longest(*(way or [] for way in ways), fillvalue=("", 0)):
        if before[0] != after[0]:
            what = f"with these widths its forward calls `{after[0] or 'nothing'}`, with all units `{before[0]}`"
            raise CompactionError(f"the compact network may differ from the gated one on other inputs: {what}")


class _Proof:
    """The gated network and the compact one in turn, in one type of number."""

    def __init__(self, gated: Gated, plan: Plan, dtype: torch.dtype | None, inputs: Inputs) -> None:
        self.plan = plan
        self.gated, self.dtype = gated, dtype
        self.model = _folded(gated, dtype).eval()
        self.inputs = fitted(inputs, gated.tables["ends"].device, dtype)
        self.expected, self.tolerance = watched(self.model, self.inputs, fine=TOLERANCE)

    def compare(self) -> None:
        if any(_is_nan(t) for t in self.expected):
            raise CompactionError("the gated network's own output on the example input is not a number (NaN)")
        pairs, other = [(self.inputs, self.expected)], stirred(self.inputs)
        if not all(map(torch.equal, tensors_of(other), tensors_of(self.inputs))):
            with suppress(Exception):  # it does not take every number
                pairs.append((other, outputs(self.model, other)))
        self.plan.apply(self.model)  # in place: two networks in float64 are four times the user's
        for inputs, expected in pairs:
            if any(_is_nan(t) for t in expected):
                continue
            progress("proving that the compact network is the same function")
            try:
                found = outputs(self.model, inputs)
                same = agree(expected, found, self.tolerance) or self._rounding_explains(inputs, expected, found)
            except Exception as error:
                what = "the compact network does not run on the example input, so that its forward must ask for a size"
                raise CompactionError(f"{what} that is gone ({first_line(error)})") from error
            if not same:
                what = f"first at {self._first_difference(inputs)}"
                raise CompactionError(f"the compact network differs from the gated one on the example, {what}")

    def _rounding_explains(self, inputs: Inputs, expected: list[Tensor], found: list[Tensor]) -> bool:
        """Whether coarse numbers differ no more than the gated network's own do when its weights change in their last
        digit, and that is little: a norm over one number, say, gives out what rounding has left of zero, amplified.
        """
        if self.tolerance <= TOLERANCE:
            return False
        model = _folded(self.gated, self.dtype).eval()
        spread = [torch.zeros(()) for _ in expected]
        for seed in range(4):
            nudged = outputs(_nudged(duplicate(model), seed), inputs)
            spread = [torch.maximum(s, _apart(x, y)) for s, x, y in zip(spread, expected, nudged, strict=True)]
        for x, y, s in zip(expected, found, spread, strict=True):
            if x.shape != y.shape or not x.is_floating_point() or not x.numel():
                if x.shape != y.shape or not torch.equal(x, y):
                    return False
            elif not _apart(x, y) <= 8 * s <= 0.05 * x.abs().max().cpu().clamp(min=1e-2):
                return False
        return True

    def _first_difference(self, inputs: Inputs) -> str:
        """The first layer, in the order they run, whose surviving outputs differ."""
        dense = _by_layer(_folded(self.gated, self.dtype).eval(), inputs)
        for path, ours in _by_layer(self.model, inputs).items():
            reference = dense.get(path)
            rows = self.plan.rows.get(f"{path}.weight", {}).get(0)
            if reference is not None and reference.shape != ours.shape and rows is not None:
                dim = next((d for d in range(ours.ndim) if ours.shape[d] != reference.shape[d]), 0)
                reference = reference.index_select(dim, torch.as_tensor(rows, device=reference.device))
            # What has another shape here, and no rows of its own to say which, cannot be compared.
            comparable = reference is not None and reference.shape == ours.shape
            if reference is not None and comparable and not agree([reference], [ours], self.tolerance):
                return f"`{path}`"
        return "the output"


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """The model itself, each weight moved by one rounding, up or down."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                signs = torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1
                p.mul_(1 + torch.finfo(p.dtype).eps * signs)
    return model


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max().cpu().float() if a.is_floating_point() and a.numel() else torch.zeros(())


def _is_nan(t: Tensor) -> bool:
    return t.is_floating_point() and bool(t.isnan().any())


def fitted(inputs: Inputs, device: torch.device, dtype: torch.dtype | None) -> Inputs:
    """The same inputs on a device, with numbers of a type, or of their own."""

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    out: Inputs = tree_map(fit, inputs)
    return out


def _by_layer(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """What each innermost layer gives out the first time it runs, in the order they run."""
    seen: dict[str, Tensor] = {}

    def note(path: str, _: Any, __: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            seen.setdefault(path, out)

    layers = [(path, module) for path, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(partial(note, path)) for path, module in layers]
    outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    return seen
