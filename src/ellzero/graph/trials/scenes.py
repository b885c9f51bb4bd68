"""A disturbed copy of a network with an input: what comes out with units masked, and without them.

A large copy borrows the weights of its layers: each is made, in float64, when its layer runs, and is gone afterwards.
So no whole network in float64, twice as large as the user's, lies beside it. This file does not know what is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ellzero.graph.axes import Graph
from ellzero.graph.forwards.copying import lean, whole_copy
from ellzero.graph.plan import Mask, Plan
from ellzero.graph.standins.heads import SHORTCUTS
from ellzero.graph.standins.layers import CONTRACTING
from ellzero.graph.tracing import Inputs, places, run
from ellzero.graph.trials.running import Calls, cast, disturb, in_type, is_large, move, seeded, tensors_of

Lends = Callable[[str, Tensor], None]
_MANY = 10_000  # numbers, whose memory matters


@dataclass(frozen=True)
class Loans:
    """Weights that a copy of a model has only while their layers run.

    Args:
        weights: the model's own, each with its number among the parameters.
        seed: how they are disturbed.
        dtype: of what the copy gets.
        ends: layers that get none, because they are left out: what they would read of units that stay is looked at
            instead.
    """

    weights: dict[str, tuple[int, nn.Parameter]] = field(default_factory=dict)
    seed: int = 0
    dtype: torch.dtype = torch.float64
    ends: tuple[str, ...] = ()

    @property
    def paid_out(self) -> list[str]:
        """The names of the weights that layers do get."""
        return [name for name in self.weights if name.rpartition(".")[0] not in self.ends]

    def made(self, name: str, room: list[Tensor] | None = None) -> Tensor:
        """A weight as the copy has it; in a memory of which there is `room`, where it has enough."""
        number, weight = self.weights[name]
        memory = room.pop() if room else weight.new_empty(0, dtype=self.dtype)
        if memory.numel() < weight.numel() or memory.device != weight.device or not weight.is_contiguous():
            memory = torch.empty_like(weight, dtype=self.dtype, requires_grad=False).detach()
        out = memory.view(-1)[: weight.numel()].view(weight.shape) if weight.is_contiguous() else memory
        out.copy_(weight.detach())
        move(out, self.seed, number)
        return out

    @contextmanager
    def lent(self, model: nn.Module, change: Lends) -> Iterator[None]:
        """Lets each layer have its weight when it runs in the block, changed in place. They take turns in one memory:
        a fresh one would take longer than the numbers.
        """
        room: list[Tensor] = []
        with ExitStack() as hooks:
            for name in self.paid_out:
                layer = model.get_submodule(name.rpartition(".")[0])
                away = layer._parameters["weight"]

                def take(layer: nn.Module, _: Any, name: str = name) -> None:
                    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
                        weight = self.made(name, room)
                        change(name, weight)
                        layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

                def give(layer: nn.Module, *_: Any, away: nn.Parameter | None = away) -> None:
                    back, layer._parameters["weight"] = layer._parameters["weight"], away
                    with torch._C.DisableTorchFunction(), _disable_current_modes():
                        if back is not None and back is not away and back.is_contiguous():
                            room[:] = [_memory(back)]

                hooks.callback(layer.register_forward_pre_hook(take).remove)
                hooks.callback(layer.register_forward_hook(give, always_call=True).remove)
            yield


def _memory(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies at the beginning of."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def loans(model: nn.Module, graph: Graph, dtype: torch.dtype, seed: int) -> Loans:
    """What can be lent: the weights that no one but their own layer reads. Last layers can do without."""
    once = {name for name, where in places(model).items() if len(where) == 1}
    found = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        path, _, key = name.rpartition(".")
        own = key == "weight" and name in once & graph.in_own_module and type(model.get_submodule(path)) in CONTRACTING
        if own and p.is_floating_point():
            found[name] = number, p
    return Loans(found, seed, dtype, ends(model, graph, found))


def ends(model: nn.Module, graph: Graph, weights: Iterable[str]) -> tuple[str, ...]:
    """The linear layers that nobody but the output comes after, as the head of a language model, and whose input no
    unit leaves, or such alone as are zero there when they are closed: behind a norm over all of them. The same input,
    of those that stay, is the same output, and a look at the input is cheaper, and sees more.
    """
    free = graph.on(lambda axis: axis.frozen is None)
    unnormed = graph.on(lambda axis: axis.frozen is None and not axis.closing)
    fed = [(k, step) for step in graph.steps for k in step.inputs]

    def is_end(path: str) -> bool:
        layer = model.get_submodule(path)
        runs = [k for k, step in enumerate(graph.steps) if step.module == path or f"{path}.weight" in step.reads]
        read = graph.units.get(f"{path}.weight", {})
        stay = [*(u for dims, u in read.items() if dims != (1,)), *graph.units.get(f"{path}.bias", {}).values()]
        own = "forward" in vars(layer) or any(vars(layer)[key] for key in vars(layer) if key.endswith("_hooks"))
        last = len(runs) == 1 and all(step.is_output for k, step in fed if k in runs)
        leaves = any(free[u].any() for u in stay) or ((1,) in read and unnormed[read[1,]].any())
        return type(layer) is nn.Linear and last and not own and not leaves

    return tuple(path for path in (name.rpartition(".")[0] for name in weights) if is_end(path))


@contextmanager
def left_out(
    model: nn.Module, paths: Iterable[str], shut: Mapping[str, Mask] | None = None
) -> Iterator[Callable[[Any], list[Tensor]]]:
    """Leaves layers out in the block; what comes says which tensors a forward gave out, their inputs in their place,
    without the entries that are `shut` if these are zero.
    """
    read: list[tuple[Tensor, Mask | None]] = []
    made: list[Tensor] = []

    def stands_in(layer: nn.Linear, path: str, input: Tensor) -> Tensor:
        read.append((input, (shut or {}).get(path)))
        made.append(input.new_full((), torch.nan).expand(*input.shape[:-1], layer.out_features))
        return made[-1]

    def outputs(out: Any) -> list[Tensor]:
        given = tensors_of(out)
        if not all(any(t is there for there in given) for t in made):
            raise ValueError("what a last layer makes must be an output")
        seen = [t if gone is None else _open(t, gone) for t, gone in read]
        return [*seen, *(t for t in given if not any(t is there for there in made))]

    layers: dict[str, Any] = {path: model.get_submodule(path) for path in paths}
    try:
        for path, layer in layers.items():
            layer.forward = partial(stands_in, layer, path)
        yield outputs
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


def _open(input: Tensor, gone: Mask) -> Tensor:
    """The entries along the last dimension that are not gone; all of them if one that is gone is not zero."""
    away = torch.as_tensor(gone, device=input.device)
    return input if bool(input[..., away].any()) else input[..., ~away]


@dataclass
class Scene:
    """A disturbed copy of the model with an input.

    Args:
        model: in evaluation.
        inputs: that show something.
        done: what was removed from it already.
        loans: the weights that it borrows. Where they are not read, they are not a number, of the right type and size.
        last: the last mask that its units had, and what came of it, for whoever asks again.
        small: the last scene that units were removed from, where that was dear.
    """

    model: nn.Module
    inputs: Inputs
    done: Plan | None = None
    loans: Loans = field(default_factory=Loans)
    last: tuple[tuple[bytes, frozenset[str], frozenset[int]], list[Tensor], Calls] | None = None
    small: Scene | None = None

    def masked(
        self,
        graph: Graph,
        alive: Mask,
        gone: frozenset[str] = frozenset(),
        lends: Lends | None = None,
        blocks: frozenset[int] = frozenset(),
    ) -> tuple[list[Tensor], Calls]:
        """What comes out with zeros where gates close `blocks`, or a unit that is not alive, and the way that it takes
        outside of the layers that are gone. `lends` sees each weight that is lent, as it was.
        """
        key = alive.tobytes(), gone, blocks
        if self.last is None or self.last[0] != key:
            layers = [self.model.get_submodule(path) for path in sorted(gone)]
            layers += [m for m in self.model.modules() if type(m) in SHORTCUTS]
            shut = closed(self.model, graph, alive, self.done, self.loans, lends, blocks)
            cut = left_out(self.model, self.loans.ends, self._shut(graph, alive))
            with shut, cut as outputs, seeded(self.model), Calls() as calls, calls.mute(layers):
                out = run(self.model, self.inputs)
            self.last = key, outputs(out), calls
        return self.last[1:]

    def _shut(self, graph: Graph, alive: Mask) -> dict[str, Mask]:
        """Which inputs of the layers that are left out belong to units that are not alive."""
        out = {}
        for path in self.loans.ends:
            name = f"{path}.weight"
            units = graph.units.get(name, {}).get((1,))
            if units is not None:
                left = units if self.done is None else self.done.cut(units, name, (1,))
                out[path] = ~(alive[left] | (left < 0))
        return out

    def both(self, graph: Graph, plan: Plan) -> tuple[list[Tensor], Scene]:
        """What comes out with the units masked, and the scene without them. What is lent is made once for the two."""
        seen: dict[str, Tensor] = {}

        def lends(name: str, weight: Tensor) -> None:
            sliced = plan.slice(name, weight)
            seen[name] = sliced.clone() if sliced is weight else sliced  # which is changed next

        out, _ = self.masked(graph, plan.units, lends=lends)
        return out, self.removed(plan, seen)

    def removed(self, plan: Plan, seen: Mapping[str, Tensor] | None = None) -> Scene:
        """A scene with the units removed. It shares the tensors that stay as they are. What is left of borrowed ones
        may be known.
        """
        last = self.small and self.small.done
        same = self.small and last and (last.closed, last.blocks) == (plan.closed, plan.blocks)
        if self.small and last and same and (last.units == plan.units).all():
            return self.small
        small = lean(self.model)
        away = [*self.loans.paid_out, *(f"{path}.weight" for path in self.loans.ends)]
        for name in away:  # there are no numbers in it to slice
            own, weight = small.get_submodule(name.rpartition(".")[0])._parameters, small.get_parameter(name)
            own["weight"] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        plan.beyond(self.done).apply(small)
        layers = dict(small.named_modules())
        for name in away:
            path = name.rpartition(".")[0]
            empty = layers[path]._parameters.get("weight") if path in layers else None
            if empty is None:  # a layer that is gone, or something stands in for it
                continue
            numbers = (seen or {}).get(name)
            if path in self.loans.ends:
                numbers = self.model.get_parameter(name).new_full((), torch.nan).expand(empty.shape)
            elif numbers is None:
                numbers = plan.slice(name, self.loans.made(name))
            layers[path]._parameters["weight"] = nn.Parameter(numbers, requires_grad=empty.requires_grad)
        out = Scene(small, self.inputs, plan, Loans(ends=self.loans.ends))
        self.small = out if self.loans.weights else None
        return out

    def to(self, dtype: torch.dtype) -> None:
        """Has numbers of another type."""
        in_type(self.model, dtype)
        self.inputs = cast(self.inputs, dtype)


def staged(model: nn.Module, inputs: Inputs, seed: int, lent: Loans) -> Scene:
    """The model disturbed, in its own type of number, with these weights borrowed."""
    if not lent.weights:
        out = whole_copy(model).eval()
    else:
        nan = {
            name: p.new_full((), torch.nan, dtype=lent.dtype).expand(p.shape) for name, (_, p) in lent.weights.items()
        }
        own = {
            id(p): nn.Parameter(nan[name] if name in nan else p.detach().clone(), requires_grad=p.requires_grad)
            for name, p in model.named_parameters()
        }
        out = lean(model, own).eval()
    disturb(out, seed, but=lent.weights)
    return Scene(out, inputs, loans=lent)


def moving(graph: Graph, scene: Scene) -> set[int]:
    """Units whose closing moves the output, to first order: slope of a random projection times the weight."""
    moved: set[int] = set()
    model, done = scene.model, scene.done

    def note(weight: Tensor, tensor: str) -> None:
        assert weight.grad is not None
        slope = (weight.grad * weight.detach()).abs()
        for dims, units in graph.closing[tensor].items():
            rest = [d for d in range(weight.ndim) if d not in dims]
            moves = (slope.sum(rest) if rest else slope).cpu().numpy() > 0
            moved.update(np.unique((units if done is None else done.cut(units, tensor, dims))[moves]).tolist())
        weight.grad = None  # at once: all of them are as large as the model

    members = dict(model.named_parameters())
    needed = {name: p.requires_grad for name, p in members.items()}
    asked = {site.tensor for axis in graph.axes if axis.frozen is None for site in axis.multiplied}
    for name, p in members.items():
        p.requires_grad_(name in asked and p.is_floating_point())
    hooks = [
        p.register_post_accumulate_grad_hook(partial(note, tensor=name))
        for name, p in members.items()
        if p.requires_grad
    ]
    generator = torch.Generator().manual_seed(1)
    try:
        with torch.enable_grad(), left_out(model, scene.loans.ends) as outputs:
            out = outputs(run(model, scene.inputs))
            noise = [torch.randn(t.shape, generator=generator).to(t.device) for t in out]
            total = sum((t * n).sum() for t, n in zip(out, noise, strict=True) if t.requires_grad)
            total.backward()  # type: ignore[union-attr]
    except Exception:  # no floating-point output, or something that has no derivative
        return set()
    finally:
        for hook in hooks:
            hook.remove()
        for name, p in members.items():
            p.requires_grad_(needed[name]).grad = None
    return moved


@contextmanager
def closed(
    model: nn.Module,
    graph: Graph,
    alive: Mask,
    done: Plan | None = None,
    lent: Loans | None = None,
    lends: Lends | None = None,
    blocks: Iterable[int] = (),
) -> Iterator[None]:
    """Has zeros, in place, where gates close `blocks`, and units that are not alive. `done` was removed from the model
    already.
    """
    members, lent = dict(model.named_parameters()), lent or Loans()
    large = is_large(model, members.values())
    restores: list[Callable[[], Any]] = []
    closing: dict[str, list[tuple[int, Mask]]] = {}
    for tensor, sites in graph.closing.items():
        for dims, whole in sites.items():
            units = whole if done is None else done.cut(whole, tensor, dims)
            gone = ~(alive[units] | (units < 0))
            if np.count_nonzero(gone):
                closing.setdefault(tensor, []).append((dims[0], gone))
    for tensor in (site.tensor for b in blocks for site in graph.blocks[b].sites):
        if tensor in members:  # else it is gone
            closing.setdefault(tensor, []).append((0, np.ones(len(members[tensor]), dtype=bool)))
    with torch.no_grad():
        for tensor in (
            (closing.keys() & members.keys()) - lent.weights.keys() - {f"{path}.weight" for path in lent.ends}
        ):
            weight = members[tensor]
            if not large:
                restores.append(partial(weight.copy_, weight.clone()))
            for dim, gone in closing[tensor]:
                if large:
                    rows = _rows(gone, weight)
                    restores.append(partial(_put_back, weight, dim, rows, _exact(weight.index_select(dim, rows))))
                _close(weight, dim, gone)

    def change(name: str, weight: Tensor) -> None:
        if lends is not None:
            lends(name, weight)
        for dim, gone in closing.get(name, ()):
            _close(weight, dim, gone)

    try:
        with lent.lent(model, change):
            yield
    finally:
        with torch.no_grad():
            for restore in reversed(restores):
                restore()


def _put_back(weight: Tensor, dim: int, rows: Tensor, entries: Tensor) -> None:
    weight.index_copy_(dim, rows, entries.to(weight))


def _rows(gone: Mask, weight: Tensor) -> Tensor:
    return torch.as_tensor(np.flatnonzero(gone if gone.ndim == 1 else gone.any(1)), device=weight.device)


def _close(weight: Tensor, dim: int, gone: Mask) -> None:
    """Puts zeros into a weight along `dim`, or, of a grouped convolution, by row and column."""
    if gone.ndim == 1:
        weight.index_fill_(dim, _rows(gone, weight), 0)
    else:
        weight.mul_(torch.as_tensor(~gone).reshape(*gone.shape, *[1] * (weight.ndim - 2)).to(weight))


def _exact(entries: Tensor) -> Tensor:
    """The same numbers, in half the memory where float32 holds them, as it does those of a model in float32."""
    few = entries.flatten()[:64]  # they tell most that do not fit from those that do
    if entries.numel() < _MANY or entries.dtype != torch.float64 or not torch.equal(few.float().double(), few):
        return entries
    single = entries.float()
    return single if torch.equal(single.to(entries), entries) else entries
