"""How gates get into weights: each gated weight is replaced, for one forward, by its product with the gates on it.

`aim` works out once which gates act on which weight, and in what layout; `hold`, what gates that stay as they are still
do. `in_place` puts the products where the model looks for its weights and takes them out again. This file knows drawn
gates as tensors; it draws none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import reduce
from math import prod
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call

from ellzero.gated.placements import Placement
from ellzero.graph.axes import Numbers
from ellzero.graph.tracing import places

Kind = TypeVar("Kind", "Target", "Held")
_MAKING = threading.Lock()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class Factor(NamedTuple):
    """One placement's part in one weight.

    Args:
        number: which placement.
        repeats: how often each gate stands in a row, where gates come in order.
        table: key of the index that lays the gates out, where they do not.
        shape: in which the gates broadcast against the weight.
    """

    number: int
    repeats: int
    table: str | None
    shape: tuple[int, ...]


class Target(NamedTuple):
    """A weight that gates multiply: its shape, the paths under which modules hold it, and the factors."""

    shape: tuple[int, ...]
    holders: list[tuple[str, ...]]
    factors: list[Factor]


class Held(NamedTuple):
    """A weight whose gates stay as they are: its shape, its holders, and all that it is multiplied by, laid out."""

    shape: tuple[int, ...]
    holders: list[tuple[str, ...]]
    factors: list[Tensor]


def aim(model: nn.Module, placements: Sequence[Placement]) -> tuple[dict[str, Target], dict[str, Numbers]]:
    """What the gates multiply in the model as it is now, and the index tables that this takes."""
    members, held = dict(model.named_parameters()), places(model)
    targets: dict[str, Target] = {}
    tables: dict[str, Numbers] = {}
    for number, placement in enumerate(placements):
        for site in placement.multiplies:
            sizes = tuple(members[site.tensor].shape)
            holders = [tuple(name.split(".")) for name in held[site.tensor]]
            target = targets.setdefault(site.tensor, Target(sizes, holders, []))
            shape = tuple(size if d in site.dims else 1 for d, size in enumerate(sizes))
            n, units = prod(placement.shape), site.units.ravel()
            repeats = units.size // n if units.size % n == 0 else 0
            table = None
            if not repeats or not np.array_equal(units, np.repeat(np.arange(n), repeats)):
                repeats, table = 1, f"factor {len(target.factors)} {site.tensor}"
                tables[table] = np.where(units < 0, n, units)
            first = next((d for d, size in enumerate(shape) if size > 1), len(shape) - 1)
            target.factors.append(Factor(number, repeats, table, shape[first:]))  # leading ones broadcast anyway
    return targets, tables


def multiplied(
    weight: Tensor,
    target: Target,
    z: Sequence[Tensor],
    tables: Mapping[str, Tensor],
    added: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """`weight` times all gates on it, which `z` holds by placement; `tables` are those of `aim`, as tensors.

    A placement with an entry in `added` has noise for each weight: w·z + noise, before all others are multiplied in.
    """
    product: Tensor | None = None
    for part in target.factors:
        factor, noise = laid_out(z[part.number], part, tables, 1.0), None if added is None else added[part.number]
        if noise is not None:
            weight = weight * factor.to(weight.dtype) + laid_out(noise, part, tables, 0.0).to(weight.dtype)
        else:
            product = factor if product is None else product * factor
    return weight if product is None else _times(weight, product)


def hold(targets: Mapping[str, Target], z: Sequence[Tensor], tables: Mapping[str, Tensor]) -> dict[str, Held]:
    """What these gates do to weights for as long as they stay as they are: nothing where all are 1."""
    laid = {name: [laid_out(z[f.number], f, tables, 1.0) for f in t.factors] for name, t in targets.items()}
    every = [factor for factors in laid.values() for factor in factors]
    does = iter(torch.stack([(factor != 1).any() for factor in every]).tolist() if every else ())  # asks a GPU once
    acting = {name: [factor for factor in factors if next(does)] for name, factors in laid.items()}
    return {name: Held(*targets[name][:2], factors) for name, factors in acting.items() if factors}


def times(weight: Tensor, held: Held) -> Tensor:
    """`weight` times the gates on it that do something: to the bit what `multiplied` makes of all."""
    return _times(weight, reduce(torch.mul, held.factors))


def _times(weight: Tensor, product: Tensor) -> Tensor:
    product = product if product.dtype == weight.dtype else product.to(weight.dtype)
    return weight * (_replicated(product, weight) if type(weight).__name__ == "DTensor" else product)


def _replicated(product: Tensor, weight: Any) -> Tensor:
    """As a tensor that all processes have whole, beside one that is sharded over them."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    out: Tensor = DTensor.from_local(product, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return out


def laid_out(gates: Tensor, part: Factor, tables: Mapping[str, Tensor], elsewhere: float, lead: int = 0) -> Tensor:
    """What belongs to gates, as it broadcasts against the weight; `lead` dimensions before the gates' own stay."""
    if not lead and part.table is None and gates.shape == part.shape:  # nearly all: one gate for each input in order
        return gates
    before = gates.shape[:lead]
    if part.table is not None:
        flat = gates.reshape(*before, -1)
        gates = torch.cat([flat, gates.new_full((*before, 1), elsewhere)], -1)[..., tables[part.table]]
    elif part.repeats > 1:
        gates = gates.reshape(*before, -1, 1).expand(*before, -1, part.repeats)
    shape = (*before, *part.shape)
    return gates if gates.shape == shape else gates.reshape(shape)


def run(
    model: nn.Module,
    targets: Mapping[str, Kind],
    make: Callable[[str, Tensor, Kind], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs the model with what `make` makes of gated weights."""
    if torch.compiler.is_compiling():  # a compiler follows no parameters that come and go
        own = dict(model.named_parameters()) if targets else {}
        made = {name: make(name, own[name], target) for name, target in targets.items()}
        weights = {".".join(path): made[name] for name in made for path in targets[name].holders}
        return functional_call(model, weights, args, kwargs, tie_weights=False)
    with lock_of(model), in_place(model, targets, make):
        return model(*args, **kwargs)


def lock_of(model: nn.Module) -> threading.RLock:
    """One thread after the other: what one puts in place, another would take for the model's own."""
    if (lock := _LOCKS.get(model)) is None:
        with _MAKING:
            lock = _LOCKS.setdefault(model, threading.RLock())
    return lock


@contextmanager
def in_place(model: nn.Module, targets: Mapping[str, Kind], make: Callable[[str, Tensor, Kind], Any]) -> Iterator[None]:
    """Puts what `make` makes of gated weights where the model looks for its own, and puts these back in the end.

    What `torch.func.functional_call` does, for the few weights that change: it walks all parameters at each call.
    """
    made: dict[str, Any] = {}
    put: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, target in targets.items():
            for *path, key in target.holders:
                module: Any = model
                for part in path:
                    module = module._modules.get(part)
                own = None if module is None else module._parameters.get(key)
                if own is None or own.shape != target.shape or type(own).__name__ == "DTensor":
                    raise RuntimeError(
                        f"`{name}` is not the parameter of shape {target.shape} that gates were attached to "
                        "(replaced, resized or sharded since?); attach again"
                    )
                if name not in made:
                    made[name] = make(name, own, target)
                put.append((module._parameters, key, own))
                module._parameters[key] = made[name]
        with recomputing(lambda: in_place(model, targets, lambda name, *_: made[name]), lock_of(model)):
            yield
    finally:
        for parameters, key, own in put:
            parameters[key] = own


@final
class _Pass:
    """A forward: how its gates come back, and whether it is under way."""

    def __init__(self, again: Callable[[], AbstractContextManager[None]], lock: threading.RLock) -> None:
        self.again, self.lock, self.running = again, lock, True

    @contextmanager
    def back(self) -> Iterator[None]:
        """In its turn, as a forward; but for what is recomputed within it, in a thread of torch's own."""
        with nullcontext() if self.running else self.lock, self.again():
            yield


_PASSES: ContextVar[tuple[_Pass, ...]] = ContextVar("_PASSES", default=())  # of this thread, one within another


class _Torchs:
    """Its own ways to checkpoint, for all threads, which come back when no pass is under way any more."""

    own: tuple[Any, Any]
    passes = 0


@contextmanager
def recomputing(again: Callable[[], AbstractContextManager[None]], lock: threading.RLock) -> Iterator[None]:
    """Has activation checkpointing inside the block recompute within `again()`: that is in the backward, when what was
    drawn for the block is gone, and the model by itself would silently be the dense one.

    Refused where torch recomputes "reentrant": it goes back through what was drawn once for every part of the model.
    """
    if not torch.is_grad_enabled():
        yield
        return
    checkpoint: Any = torch.utils.checkpoint
    with _MAKING:
        if not _Torchs.passes:
            _Torchs.own = checkpoint.CheckpointFunction, checkpoint._checkpoint_hook  # a torch without them fails here
        _Torchs.passes += 1
        checkpoint.CheckpointFunction, checkpoint._checkpoint_hook = _Reentrant, _remembering
    each = _Pass(again, lock)
    token = _PASSES.set((*_PASSES.get(), each))
    try:
        yield
    finally:
        each.running = False
        _PASSES.reset(token)
        with _MAKING:
            _Torchs.passes -= 1
            if not _Torchs.passes:
                checkpoint.CheckpointFunction, checkpoint._checkpoint_hook = _Torchs.own


def _remembering(frame: Any) -> Any:
    recompute, passes = frame.recompute_fn, _PASSES.get()

    def with_gates(*args: Any) -> None:
        with ExitStack() as stack:
            for each in passes:
                stack.enter_context(each.back())
            recompute(*args)

    frame.recompute_fn = with_gates
    return _Torchs.own[1](frame)


class _Reentrant:
    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> Any:
        if not _PASSES.get():  # of another thread, that runs a model of its own
            return _Torchs.own[0].apply(*args, **kwargs)
        raise RuntimeError(
            "activation checkpointing inside a gated model must have `use_reentrant=False`; "
            "or checkpoint around it: `torch.utils.checkpoint.checkpoint(gated, x)`"
        )
