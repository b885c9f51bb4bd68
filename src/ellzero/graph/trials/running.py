"""Forwards that are watched: what comes out, which torch functions are called on the way, and what numbers they get.

A trace follows the example's way alone. With a unit removed the way must be the same (`rehearsal.py`); where another
batch or another integer turns it, `turns` says so. This file knows no axes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ellzero.graph.axes import Graph
from ellzero.graph.forwards.recording import Watching, flat
from ellzero.graph.rules.call import SIZED
from ellzero.graph.tracing import Inputs, batch_size, mode, run, run_hollow

Renamed = Mapping[Any, Collection[float]]  # numbers of a small network: what they may be in the whole one
LARGE = 1_000_000  # parameters
HUGE = 1e8  # what fills in for minus infinity is larger, an output that means something is not


def is_large(model: nn.Module, parameters: Collection[Tensor] = ()) -> bool:
    """Whether a forward costs more than what is done around it, by a rule of thumb. Its `parameters` may be known."""
    return sum(p.numel() for p in parameters or model.parameters()) > LARGE


def give_back() -> None:
    """Gives free memory back to the system: glibc keeps it, in pieces that are too small for what comes next."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@torch.no_grad()
def run_noting(
    model: nn.Module, inputs: Inputs, modules: Mapping[str, nn.Module], note: Callable[[str, Any, Any], None]
) -> None:
    """Runs a model in evaluation, and notes what each of these modules is called with."""

    def hook(path: str) -> Any:
        return lambda _, args, kwargs: note(path, args, kwargs)

    with ExitStack() as stack:
        for path, module in modules.items():
            stack.callback(module.register_forward_pre_hook(hook(path), with_kwargs=True).remove)
        stack.enter_context(mode(model, False))
        run(model, inputs)


def turns(model: nn.Module, inputs: Inputs) -> Callable[[], tuple[str, ...]]:
    """Runs the model on the example. What comes back asks what makes it take another way, and says so in words:
    "a batch of 1", "4 instead of 3".
    """
    usual = leads(model, inputs, run)

    def ask() -> tuple[str, ...]:
        found = []
        for what, other in _others(inputs):
            try:
                if leads(model, other, run_hollow) == usual:
                    continue
                if all(leads(model, other, run) != usual for _ in range(2)):  # the first time it may fill a cache
                    found.append(what)
            except Exception:  # it takes no such input
                continue
        return tuple(found)

    return ask


def _others(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    size = batch_size(inputs)
    for n in sorted({1, size + 1} - {size}) if size else ():
        yield f"a batch of {n}", resized(inputs, n)
    leaves, spec = tree_flatten(inputs)
    for k, leaf in enumerate(leaves):
        for number in (leaf - 1, leaf + 1) if isinstance(leaf, int) and not isinstance(leaf, bool) else ():
            yield f"{number} instead of {leaf}", tree_unflatten([*leaves[:k], number, *leaves[k + 1 :]], spec)


def resized(inputs: Inputs, batch: int) -> Inputs:
    """A copy of the example with another number of examples: cut, or repeated."""
    size = batch_size(inputs)

    def fit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size:
            return leaf[torch.arange(batch, device=leaf.device) % size]
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    out: Inputs = tree_map(fit, inputs)
    return out


def leads(model: nn.Module, inputs: Inputs, runs: Callable[[nn.Module, Inputs], Any]) -> list[tuple[str, int]] | None:
    """The way that a forward takes: which functions it calls, one after the other. None where one without numbers does
    not show it.
    """
    try:
        with mode(model, training=False), Calls() as calls, torch.no_grad():
            runs(model, inputs)
    except Exception:
        if runs is run:
            raise
        return None
    # An `expand` is no way of its own: many leave it out where there is nothing to repeat.
    return [(name, ndim) for name, _, ndim in calls.made if name not in ("expand", "expand_as")]


def _refuse_no_heads(query: Any) -> None:
    """CUDA divides by the number of heads, and the whole process ends: no network may come to that, nor a trial."""
    if isinstance(query, Tensor) and 0 in (*query.shape[-3:-2], *query.shape[-1:]):
        raise ValueError("attention without a head or a unit, which ends the process on a GPU")


# What follows from sizes: how large something becomes, and whether heads are in groups.
_OF_SIZES = (("repeat_interleave", "output_size"), ("scaled_dot_product_attention", "enable_gqa"))
# How many of its first numbers say how often something is repeated: a trace tells whether they follow what is there.
_OFTEN = {"repeat_interleave": 1, "repeat": 64, "tile": 64}


class Calls(TorchFunctionMode):
    """Lists the torch functions that are called, each with its numbers; sizes and places follow what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Any], int]] = []
        self.muted = 0  # how many layers it is in whose own calls are left out

    def mute(self, layers: Sequence[nn.Module]) -> ExitStack:
        """Leaves out what these layers call, until the end of a `with`: what stands in for one does something else."""

        def goes(into: int) -> None:
            self.muted += into

        hooks = ExitStack()
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(lambda *_: goes(+1), prepend=True).remove)
            hooks.callback(layer.register_forward_hook(lambda *_: goes(-1)).remove)
        return hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            _refuse_no_heads(args[0] if args else (kwargs or {}).get("query"))
        if self.muted:
            return func(*args, **(kwargs or {}))
        out = func(*args, **kwargs) if kwargs else func(*args)
        name = str(getattr(func, "__name__", func))
        made = isinstance(out, Tensor)
        if name == "__get__" and not made:  # who looks at a shape does nothing yet
            return out
        numbers: list[Any] = []
        if name not in SIZED and name not in ("__getitem__", "__setitem__"):
            told = {k: v for k, v in kwargs.items() if (name, k) not in _OF_SIZES} if kwargs else ()
            given = flat((args, told) if told else args)
            numbers = [t for t in given if isinstance(t, (int, float, str))][_OFTEN.get(name, 0) :]
        self.made.append((name, numbers, out.ndim if made else 0))
        return out

    def departure(self, other: Calls, renamed: Renamed) -> str | None:
        """Where another forward leaves this way, in words; None if it takes the same. `renamed` tells of numbers there
        what they are here.
        """
        for (name, told, _), (now, gets, _) in zip_longest(self.made, other.made, fillvalue=("nothing", [], 0)):
            if name != now:
                return f"it calls `{now}` instead of `{name}`"
            if not same_numbers(told, gets, renamed):
                return f"`{name}` gets {gets} instead of {told}"
        return None


def same_numbers(told: Sequence[Any], gets: Sequence[Any], renamed: Renamed) -> bool:
    """Whether two operations are told the same, or what has another name in the second."""
    pairs = zip(told, gets, strict=False)
    return len(told) == len(gets) and all(a is b or a == b or a in renamed.get(b, ()) for a, b in pairs)  # NaN is NaN


def agree(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float) -> bool:
    """Whether two lists of tensors have the same shapes and, relative to their largest entry, the same numbers. What
    masks, a huge number that is the same to the bit, says nothing of how large the others are.
    """
    if [t.shape for t in a] != [t.shape for t in b]:
        return False
    for x, y in zip(a, b, strict=True):
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return False
        elif x.numel():
            largest, apart = (float(torch.linalg.vector_norm(t, inf)) for t in (x, x - y))
            if not (isfinite(largest) and isfinite(apart)):
                finite = x[x.isfinite()].abs()
                largest = float(finite.max()) if finite.numel() else 1.0
                apart = float((x - y)[x != y].abs().nan_to_num(inf, inf).max()) if not torch.equal(x, y) else 0.0
            if largest > HUGE:
                others = x[x.isfinite() & ((x != y) | (x.abs() <= HUGE))].abs()
                largest = float(others.max()) if others.numel() else 1.0
            # Relative, but not to nothing: an output that cancels to zero leaves rounding of what cancelled.
            if not apart <= tolerance * max(1e-4, largest):  # the same infinity passes, NaN never does
                return False
    return True


@contextmanager
def seeded(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with the same random numbers at every call, of which torch's own state shows no trace."""
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"} if torch.cuda.is_initialized() else ()
    generators = [torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)]
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(0)
        with torch.no_grad():
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors that come out."""
    with seeded(model):
        return tensors_of(run(model, inputs))


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in whatever a model gives out."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def watched(model: nn.Module, inputs: Inputs, *, fine: float) -> tuple[list[Tensor], float]:
    """The tensors that come out, and how closely they can be compared: `fine`, or less where the model casts."""
    with Coarsest() as coarsest:
        out = outputs(model, inputs)
    return out, coarsest.tolerance(fine)


class Coarsest(Watching):
    """Notes the coarsest floating-point numbers that a forward goes through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kinds = (t.dtype for t in flat(out) if isinstance(t, Tensor) and t.is_floating_point())
        self.eps = max(self.eps, *(torch.finfo(kind).eps for kind in kinds), 0.0)
        return out

    def tolerance(self, fine: float) -> float:
        """How closely what comes of such numbers can be compared."""
        return fine if self.eps < 1e-15 else min(0.05, 2**13 * self.eps)


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


def in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself, its floating-point numbers in a type; complex ones, unlike by `Module.to`, stay complex."""

    def convert(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(torch.complex128) if dtype == torch.float64 else t
        return t.to(dtype) if t.is_floating_point() else t

    model._apply(convert)
    return model


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The example with floating-point numbers of another type."""
    out: Inputs = tree_map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)
    return out


def enough(model: nn.Module, graph: Graph) -> int:
    """How many examples show what a forward does: one of a large model, unless it treats that in another way."""
    return 2 if not is_large(model) or graph.products is None or "a batch of 1" in graph.turns else 1


def first_examples(inputs: Inputs, count: int) -> Inputs:
    """The first ones of a batch; all of them if there are no more."""
    size = batch_size(inputs)
    if size <= count:
        return inputs
    out: Inputs = tree_map(lambda t: t[:count] if isinstance(t, Tensor) and t.shape[:1] == (size,) else t, inputs)
    return out


def disturb(model: nn.Module, seed: int, *, but: Collection[str] = ()) -> None:
    """Moves every number a little, or not so little for seeds above 0, but for the parameters named in `but`."""
    for k, (name, p) in enumerate(model.named_parameters()):
        if p.is_floating_point() and name not in but:
            move(p.detach(), seed, k)
    generator = torch.Generator().manual_seed(seed)
    for b in model.buffers():
        if b.is_floating_point():  # a factor near one: a variance stays positive
            with torch.no_grad():
                b.mul_(1 + 0.1 * torch.rand(b.shape, generator=generator).to(b))


def move(numbers: Tensor, seed: int, which: int) -> None:
    """Moves numbers in place, from a generator of their own. Drawing is slow: the 65,537th is the first again."""
    share, least = (0.1, 0.02) if seed == 0 else (1.0, 0.1)
    generator = torch.Generator().manual_seed(1000 * which + seed)
    drawn = torch.rand(max(1, min(numbers.numel(), 65537)), generator=generator).sub_(0.5).mul_(3.5).to(numbers)
    drawn.mul_(share * torch.linalg.vector_norm(numbers, 1) / numbers.numel() + least)
    whole = numbers.numel() // len(drawn)
    if numbers.is_contiguous():
        flat = numbers.view(-1)
        flat[: whole * len(drawn)].view(whole, len(drawn)).add_(drawn)
        flat[whole * len(drawn) :].add_(drawn[: numbers.numel() - whole * len(drawn)])
    else:
        numbers.add_(drawn.repeat(whole + 1)[: numbers.numel()].view(numbers.shape))
