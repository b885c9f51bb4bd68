"""From a model and an example input to its `Graph`: walks the `torch.export` program and lets the rules speak.

The model is traced twice, in evaluation with the example and in training with the example's batch doubled, into the
same ties: what either run couples is coupled, what either run mixes is frozen. This file does not know
what an operation means (`rules/`), nor what ties mean (`ties.py`).
"""

from __future__ import annotations

import operator
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ellzero.graph.axes import Graph, Numbers, Step
from ellzero.graph.forwards.copying import whole_copy
from ellzero.graph.forwards.exporting import Untraced, program
from ellzero.graph.forwards.recording import copied, flat, mapped, walked
from ellzero.graph.rules.call import RULES, SIZED, Call, tensors, unknown
from ellzero.graph.rules.closing import zero
from ellzero.graph.rules.entrywise import BENDING
from ellzero.graph.rules.mixing import REDUCTIONS
from ellzero.graph.rules.norms import mean_square, written_out
from ellzero.graph.rules.shapes import PICKS
from ellzero.graph.standins.layers import CONTRACTING
from ellzero.graph.stored import groups_of_a_forward, stored, told_apart
from ellzero.graph.ties import Ties, of_one_example, unify
from ellzero.graph.values import Dims, Value, freeze, narrow

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_BEGAN: ContextVar[float | None] = ContextVar("began", default=None)
_OF_DATA = object()  # stands for a number that only the data tells, such as `n.item()`


class TraceError(ValueError):
    """The model cannot be traced with this example input."""


def as_inputs(example: Any) -> Inputs:
    """An example input as positional and keyword arguments: a tuple, a dict (by keyword), or one tensor."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, list | tuple):
        return tuple(example), {}
    raise TypeError(
        "`example_inputs` must be a tuple of what the model is called with (or one tensor, or a dict of keyword "
        f"arguments), got {type(example).__name__}"
    )


def batch_size(inputs: Inputs) -> int:
    """The leading dimension of the first tensor: what MACs are divided by."""
    return next((t.shape[0] for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim), 1)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer the first name of the same tensor (tied weights have several)."""
    first: dict[int, str] = {}
    members = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(t), name) for name, t in members}


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Runs in one mode and gives every submodule its own flag back."""
    before = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for m, was in before:
            m.training = was


def places(model: nn.Module) -> dict[str, list[str]]:
    """For each parameter, by its first name, every place that holds it: tied weights have several.

    A module that is registered twice is one place: `functional_call` would swap it twice, and restore the wrong weight.
    """
    first: dict[int, str] = {}
    out: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}" if path else key
                out.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return out


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Calls the model. It gets copies of the inputs: some models change theirs in place."""
    args, kwargs = mapped(copied, inputs)
    return model(*args, **kwargs)


def run_hollow(model: nn.Module, inputs: Inputs) -> None:
    """Calls the model for its way alone, in a small part of the time; raises something where numbers may turn it."""
    walked(model, *mapped(copied, inputs))


Watch = Callable[[nn.Module, Inputs], Callable[[], tuple[str, ...]]]


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Lets one thread trace at a time, in state that all share, and leaves random numbers as a seeded run expects."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=devices):
        yield


def trace(model: nn.Module, example_inputs: Any, *, limit: float = 600.0, watch: Watch | None = None) -> Graph:
    """Finds what shrinks together in `model`, from one example input.

    Args:
        model: any module that `torch.export` can trace. It is left as it is.
        example_inputs: a tuple of what it is called with; one tensor or a dict of keyword arguments will do.
        limit: seconds after which tracing gives up, naming the operation it was at.
        watch: runs a copy of the model on the example first; what it returns then says what `turns` it.

    Returns:
        The graph of axes; an operation without a rule has frozen the axes that reach it.

    Raises:
        TraceError: the model rejects the example input, or `torch.export` cannot trace it.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> [(a.name, a.size, a.frozen) for a in trace(net, torch.zeros(1, 4)).axes if not a.frozen]
        [('0', 3, None)]
    """
    with undisturbed(model):
        return _traced(model, as_inputs(example_inputs), limit, watch or _watched)


def _traced(model: nn.Module, inputs: Inputs, limit: float, watch: Watch) -> Graph:
    try:
        model = whole_copy(model)  # a forward may count its calls, or keep what it saw
    except Exception as error:
        what = "`model` cannot be copied, and removals are tried out on a copy"
        made = [f"`{path}.{key}`" for path, m in model.named_modules() for key, t in vars(m).items() if _computed(t)]
        why = f"{made[0].replace('`.', '`')} is a tensor that autograd remembers the making of" if made else ""
        hint = "; detach it, or use `torch.nn.utils.parametrizations` where a hook makes it"
        raise TraceError(f"{what}: {why + hint if why else first_line(error)}") from error
    was = told_apart(model)
    ties, deadline = Ties(shapes(model), tuple(name for name, _ in model.named_parameters())), time.monotonic() + limit
    try:
        asked = watch(model, inputs)
    except Exception as error:
        raise TraceError(f"the model rejects `example_inputs`: {first_line(error)}") from error
    walk(model, ties, inputs, deadline)
    turns = asked()
    walk(model, ties, _doubled(inputs), deadline, training=True)
    ties.products = of_one_example(ties.products, ties.doubled, batch_size(inputs))
    ties.steps = [replace(s, numbers=tuple(was.get(n, n) for n in s.numbers)) for s in ties.steps]
    graph = _complete(unify(ties), model, inputs, turns)
    if graph.served:
        graph = replace(graph, grouped=_complete(unify(ties, single=False), model, inputs, turns))
    for p in model.parameters():  # what an export leaves behind holds on to them until garbage is collected
        p.data = p.data.new_empty(0)
    return graph


def _complete(graph: Graph, model: nn.Module, inputs: Inputs, turns: tuple[str, ...]) -> Graph:
    """The graph with the numbers that modules keep, and what makes the forward take another way."""
    with mode(model, False), torch.no_grad():
        kept = stored(model, graph, partial(run_hollow, model, inputs), partial(run, model, inputs))
    graph = replace(graph, stored=kept, turns=turns)
    for units, _ in groups_of_a_forward(model, graph):
        graph.placed[units] = True
    return graph


def _computed(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter and buffer."""
    return {name: tuple(t.shape) for name, t in [*model.named_parameters(), *model.named_buffers()]}


def walk(model: nn.Module, ties: Ties, inputs: Inputs, deadline: float, *, training: bool = False) -> None:
    """Lets the rules speak about one forward. Training is left out where the model has none, or takes no such batch."""
    _Walk(model, ties, deadline, training).go(inputs)


def _watched(model: nn.Module, inputs: Inputs) -> Callable[[], tuple[str, ...]]:
    with mode(model, training=False), torch.no_grad():
        run(model, inputs)
    return tuple


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}"


@contextmanager
def telling() -> Iterator[None]:
    """Lets `progress` tell what is being done in the block, and leaves the terminal's line empty."""
    token = _BEGAN.set(_BEGAN.get() or time.monotonic())
    try:
        yield
    finally:
        progress("")
        _BEGAN.reset(token)


def progress(text: str) -> None:
    """Keeps one line on a terminal up to date once something takes five seconds; writes nothing anywhere else."""
    began = _BEGAN.get()
    if began is not None and time.monotonic() - began > 5 and sys.stderr.isatty():
        sys.stderr.write(f"\r{'ellzero: ' if text else ''}{text}\033[K")
        sys.stderr.flush()


def _doubled(inputs: Inputs) -> Inputs:
    """The example with its batch twice: a batch dimension that is part of the arithmetic then shows itself."""
    size = batch_size(inputs)

    def twice(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size
        return torch.cat([leaf, leaf]) if whole else leaf

    doubled: Inputs = tree_map(twice, inputs)
    return doubled


class _Walk:
    """One walk over the operations of a forward."""

    def __init__(self, model: nn.Module, ties: Ties, deadline: float, training: bool) -> None:
        self.model, self.ties, self.deadline, self.training = model, ties, deadline, training
        self.names, self.modules = canonical_names(model), dict(model.named_modules())

    def go(self, inputs: Inputs) -> None:
        found = self._program(inputs)
        if found is None:
            return
        graph, members = found
        self.batch = batch_size(inputs)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default):
            # The same numbers; whether there is anything to do for it depends on sizes.
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        values: dict[torch.fx.Node, Any] = {}
        nodes = list(graph.nodes)
        self.index = {node: number for number, node in enumerate(nodes)}
        self.seen, self.norms = _seen(graph), written_out(graph, {k: self.names[name] for k, name in members.items()})
        self.ties.contracting = self.ties.bending = 0
        self.ties.leaves = sum(1 << number for number, node in enumerate(nodes) if node.op == "placeholder")
        own = sum(1 << self.index[node] for node in nodes if node.name in members)
        self.given = self.ties.leaves & ~own
        for number, node in enumerate(nodes):
            if time.monotonic() > self.deadline:
                raise TraceError(f"tracing ran past its `limit` at operation {number} of {len(nodes)}, `{node.target}`")
            progress(f"tracing, operation {number} of {len(nodes)} ({node.name})")
            values[node] = self._value(node, number, values, members)
            self._link(node, number, values)

    def _program(self, inputs: Inputs) -> tuple[torch.fx.Graph, dict[str, str]] | None:
        """The operations of a forward; None where the model has no such one: what the first walk saw stands then."""
        with mode(self.model, self.training), warnings.catch_warnings(action="ignore"):
            try:
                return program(self.model, inputs, self.training)
            except Untraced as error:
                if self.training:  # what depends on data, or rejects the batch
                    return None
                raise TraceError(str(error)) from error

    def _value(self, node: Any, number: int, values: dict[Any, Any], members: dict[str, str]) -> Any:
        if node.op == "placeholder":
            return self._given(node, members)
        if node.op == "output":
            for value in tensors(torch.fx.node.map_arg(node.args, lambda n: values[n])):
                freeze(self.ties, value, "it is the model's output")
                if value.numbers is not None:
                    self.ties.freeze(value.numbers, "their numbers are the model's output")
            return None
        if node.op == "get_attr":
            return None
        if node.target is operator.getitem:
            return values[node.args[0]][node.args[1]]
        args = _bound(node, values)
        call = self._call(node)
        call.fed = any(value.lineage & self.given for value in tensors(args))
        if call.op.startswith(("_assert", "sym_")) or not call.shapes:
            return _OF_DATA
        rule, leaves = RULES.get(call.op), flat(args)
        if call.op not in SIZED:
            call.numbers = tuple(leaf for leaf in leaves if isinstance(leaf, int | float | str))
        told = any(leaf is _OF_DATA for leaf in leaves)
        why = f"{call.where} gets a number that only the data tell, as an `item()` does" if told else None
        sizes = [n for shape in (*call.shapes, *(v.shape for v in tensors(args))) for n in shape]
        if not told and not all(isinstance(n, int) for n in sizes):
            why = f"{call.where} has as many entries as the data tell, as a mask or `nonzero` does"
        rule = None if why else rule
        if node not in self.seen and call.op in REDUCTIONS.split():
            # Nobody looks at it, as at the mean of all heads' weights.
            result: Any = [Value(shape) for shape in call.shapes]
        elif node in self.norms and rule:
            result = mean_square(call, self.norms[node], *args)
        else:
            result = rule(call, *args) if rule else unknown(call, tensors(args), why)
        for name in call.reads:
            owner = name.rpartition(".")[0]
            own = call.module == owner and isinstance(self.modules.get(owner), CONTRACTING)
            self.ties.in_own_module[name] = own and self.ties.in_own_module.get(name, True)
        for value in tensors(args):
            if value.source is not None and rule is None:
                self.ties.in_own_module[value.source] = False
        node.meta["ellzero"] = call
        kept = [v.numbers for v in tensors([result])]
        for value in tensors(args[:1] if call.op in PICKS else args):  # the rule looks at what it picks by
            if value.numbers is not None and not any(n is value.numbers for n in kept):
                self.ties.freeze(value.numbers, f"{call.where} goes by the numbers of its units")
        several = isinstance(node.meta.get("val"), list | tuple)
        # Fresh objects: a rule may hand an argument back, and its place in the forward must not change.
        made = [replace(v, zero=zero(call, args, v)) for v in (result if isinstance(result, list) else [result])]
        if number < len(self.ties.like):
            for value, (_, there) in zip(made, self.ties.like[number].made, strict=False):
                _lay_out(self.ties, value, there)
        return made if several else made[0]

    def _given(self, node: Any, members: dict[str, str]) -> Any:
        """An input, a parameter or a buffer."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        if node.name in members:
            node.meta["ellzero tensor"] = name = self.names[members[node.name]]
            if node.users:
                self.ties.reached.add(name)
            # A buffer cannot be gated, so as a weight it counts as computed; it can be sliced all the same. The ones in
            # its shape, as in that of a mask, are no units.
            own = name in self.ties.parameters
            dims = [d for d, size in enumerate(value.shape) if own or size > 1 or value.ndim == 1]
            carried: dict[Dims, Numbers] = {(d,): self.ties.atoms(name, d) for d in dims}
            found = Value(tuple(value.shape), carried, f"`{name}`", name if own else None)
            return replace(found, zero="own" if own else "no")
        name = str(node.target)
        kind = "a constant of the model" if name.startswith(("c_", "lifted")) else "the model's input"
        return Value(tuple(value.shape), why=f"{kind} `{name}`")

    def _call(self, node: Any) -> Call:
        stack = list(node.meta.get("nn_module_stack", {}).values())  # of an export
        module = stack[-1][0].removeprefix("L['self']").removeprefix(".") if stack else node.meta.get("module", "")
        target = node.target
        overload = isinstance(target, torch._ops.OpOverload)
        name = target._schema.name.split("::")[-1] if overload else str(getattr(target, "__name__", target))
        name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        shapes = [tuple(t.shape) for t in flat(node.meta.get("val")) if isinstance(t, Tensor)]
        kept = vars(self.modules[module]) if module in self.modules else {}
        return Call(self.ties, name, module, shapes, self.batch, evaluates=not self.training, settings=kept)

    def _link(self, node: Any, number: int, values: dict[Any, Any]) -> None:
        """Gives the value its place in the forward: its step, and the bit set of the steps it depends on."""
        ancestors = 0
        call = node.meta.get("ellzero") or Call(self.ties, str(node.target), "", [], 1)
        # What is picked is made of what it is picked from: a bias for each expert is no way around their layers.
        given = node.all_input_nodes[: 1 if call.op in PICKS else None]
        for value in tensors([values.get(n) for n in given]):
            ancestors |= value.lineage
        made = tensors([values[node]])
        if node.target is not operator.getitem:
            for value in made:
                value.step, value.ancestors = number, ancestors
        self.ties.contracting |= call.contracts << number
        self.ties.bending |= (call.op in BENDING) << number
        if not self.training:
            is_input = node.op == "placeholder" and bool(made) and "the model's input" in made[0].why
            fed = tuple(self.index[n] for n in node.all_input_nodes)
            laid = tuple((v.shape, dict(v.carried)) for v in made if node.op != "placeholder")
            own = node.meta.get("ellzero tensor", "")
            told = (call.op, call.numbers, laid, call.module, own, call.contracts)
            self.ties.steps.append(Step(fed, call.reads, is_input, node.op == "output", *told))


def _seen(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The operations that an output depends on, or that change something in place."""
    seen: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        changes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.op == "output" or changes or any(user in seen for user in node.users):
            seen.add(node)
    return seen


def _lay_out(ties: Ties, value: Value, there: Mapping[Dims, Any]) -> None:
    """Lays units on the dimensions that they lie on in a larger network: of one head, a reshape sees none, or takes a
    batch for it.
    """
    free = [dims for dims in there if dims not in value.carried and max(dims) < value.ndim]
    lone = [g for g, a in value.carried.items() if g not in there and a.size and (a == a.flat[0]).all()]
    if len(free) == len(lone) == 1 and not set(lone[0]) & set(free[0]):
        atoms = value.carried.pop(lone[0])
        value.carried[free[0]] = np.full([value.shape[d] for d in free[0]], atoms.flat[0])
    for dims in there:
        # Angles along a head meet a lone one entry by entry, where they met whole heads.
        rest = {d for other in there if other != dims for d in other}
        for group in [g for g in value.carried if set(dims) < set(g) and rest.isdisjoint(g)]:
            if all(value.shape[d] == 1 for d in dims):
                narrow(ties, value, [d for d in group if d not in dims])
        for group in [g for g in value.carried if set(g) < set(dims) and max(dims) < value.ndim]:
            spread = value.carried.pop(group).reshape([value.shape[d] if d in group else 1 for d in dims])
            value.carried[dims] = np.array(np.broadcast_to(spread, [value.shape[d] for d in dims]))


def _bound(node: Any, values: dict[Any, Any]) -> list[Any]:
    """All arguments of the operation in the order of its schema, defaults filled in."""
    args = list(torch.fx.node.map_arg(node.args, lambda n: values[n]))
    kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
    if not isinstance(node.target, torch._ops.OpOverload):
        return [*args, *kwargs.values()]
    for argument in node.target._schema.arguments[len(args) :]:
        args.append(kwargs.get(argument.name, argument.default_value))
    return args
