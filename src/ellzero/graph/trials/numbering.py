"""`numbered(model, example)`: attention that is given something for each of its heads keeps their numbers.

The slopes of ALiBi are computed from the number of heads, for all layers at once: with fewer heads in a layer they
would be others. Where a layer keeps the numbers of its heads, in a buffer, and picks by them of what it is given, a
head that goes takes its number along. This file knows no gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from ellzero.graph.axes import Axis, Graph
from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.ties import OF_EACH_HEAD
from ellzero.graph.tracing import Inputs, as_inputs, trace, undisturbed
from ellzero.graph.trials.running import first_examples, run_noting

M = TypeVar("M", bound=nn.Module)
HEADS = "heads_left"  # where attention has its `HeadNumbers`


@final
class HeadNumbers(nn.Module):
    """The numbers of the heads that attention has: a child of it, which picks of what it is given for each head.

    Args:
        heads: how many there are, in the beginning.
        given: the arguments with something for each, by place or by name.
    """

    numbers: Tensor

    def __init__(self, heads: int, given: tuple[int | str, ...], device: torch.device) -> None:
        super().__init__()
        self.heads, self.given = heads, given
        self.register_buffer("numbers", torch.arange(heads, device=device))

    def pick(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The forward pre-hook of the attention."""
        places = {k: self.picked(args[k]) if k in self.given else args[k] for k in range(len(args))}
        return tuple(places.values()), {k: self.picked(v) if k in self.given else v for k, v in kwargs.items()}

    def picked(self, x: Any) -> Any:
        """Of a tensor with heads in its second dimension of four, or in its first, beside a batch or not."""
        if not isinstance(x, Tensor) or not lies_along(x, self.heads):
            return x
        if x.ndim == 4:
            return x.index_select(1, self.numbers)
        return x.unflatten(0, (-1, self.heads)).index_select(1, self.numbers).flatten(0, 1)


def lies_along(x: Tensor, heads: int) -> bool:
    """Whether a tensor has something for each head, by its shape."""
    return (x.ndim == 4 and x.shape[1] == heads) or (x.ndim == 3 and x.shape[0] % heads == 0)


def numbered(model: M, example_inputs: Any) -> M:
    """A copy of the model, the same function, whose attention keeps the numbers of its heads where it is given
    something for each of them, as ALiBi does: then heads can go.

    Args:
        model: it is left as it is.
        example_inputs: as for `attach`.

    Returns:
        A network to attach gates to: `l0.attach(l0.numbered(model, x), x)`. Its attention has a buffer more,
        `heads_left.numbers`.

    Raises:
        ValueError: there is no such attention, or its heads cannot go so.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    inputs = as_inputs(example_inputs)
    with undisturbed(model):
        axes = trace(model, example_inputs).axes
        stuck = {axis.name: axis for axis in axes if (axis.frozen or "").endswith(OF_EACH_HEAD)}
        found = {path: (stuck[name], given) for name, path, given in _given(model, stuck, inputs)}
        why = "no attention is given something for each of its heads"
        if found:
            graph = trace(_with(model, found), example_inputs)
            reasons = {path: _reason(graph, axis) for path, (axis, _) in found.items()}
            why = next((reason for reason in reasons.values() if reason), why)
            found = {path: known for path, known in found.items() if reasons[path] is None}
    if not found:
        raise ValueError(f"`model` has no heads that could go by their numbers: {why}")
    return _with(model, found)


def _reason(graph: Graph, axis: Axis) -> str | None:
    """Why heads still cannot go."""
    return next((a.frozen for a in graph.axes if a.name == axis.name), "they are others")


def _given(model: nn.Module, axes: dict[str, Axis], inputs: Inputs) -> Iterator[tuple[str, str, tuple[int | str, ...]]]:
    """Of each axis of heads the module that holds its layers, and the arguments that may have something for each."""
    modules = {path: name for name in axes if (path := name.rpartition(".")[0])}
    seen: dict[str, set[int | str]] = {path: set() for path in modules}

    def note(path: str, args: Any, kwargs: Any) -> None:
        for key, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor) and lies_along(value, axes[modules[path]].size):
                seen[path].add(key)

    asked = {path: model.get_submodule(path) for path in modules}
    try:
        run_noting(model, first_examples(inputs, 1), asked, note)  # several may be as many as there are heads
    except Exception:  # it takes no other batch
        seen = {path: set() for path in modules}
        run_noting(model, inputs, asked, note)
    for path, name in modules.items():
        if seen[path]:
            yield name, path, tuple(sorted(seen[path], key=str))


def _with(model: M, found: dict[str, tuple[Axis, tuple[int | str, ...]]]) -> M:
    out = duplicate(model)
    for path, (axis, given) in found.items():
        put_numbers(out.get_submodule(path), axis.size, given)
    return out


def put_numbers(module: nn.Module, heads: int, given: tuple[int | str, ...]) -> None:
    """Gives attention the numbers of its heads, in place."""
    numbers = HeadNumbers(heads, given, next(module.parameters()).device)
    module.add_module(HEADS, numbers)
    module.register_forward_pre_hook(numbers.pick, with_kwargs=True)
