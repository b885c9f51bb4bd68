"""A forward as the list of its operations: the model runs on the example, and what torch is told to do is written down.

The list is a `torch.fx.Graph`, as `torch.export` makes it, in a small part of the time: it takes one forward. What it
cannot vouch for, such as a number that the data tell, raises `Unrecorded`; `torch.export` is asked then. No number
that flows decides anything here, so products of what the input brings, which are nearly all of the work, are zeros
(`hollow`). This file does not know what an operation means.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

Members = dict[str, str]  # of each placeholder that is one: the name of a parameter or buffer
_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Made of others inside torch, and so without the tag: as large as the data tell.
_AS_LARGE_AS_DATA = ("aten::where", "aten::argwhere", "aten::nonzero_numpy", "aten::one_hot", "aten::tensor_split")
_BY_KIND = ("aten::_has_compatible_shallow_copy_type",)  # a number that types and sizes tell, as `module.to` asks for
_LEAVING = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage", "_typed_storage")
_PRODUCTS = {
    *("aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    *("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"),
}
_PLAIN = (Tensor, int, float, complex, str, torch.dtype, torch.device, type(None))
_NESTS = (list, tuple, dict)  # `isinstance` takes twice as long to look at `list | tuple | dict`
_LEAVES = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))  # and these it need not look at
FEW = 2**14  # numbers, whose product takes no longer than to look up how it would be laid out


Runs = Callable[[Any, Any, Any], Any]  # an operation, on its arguments


class Origin(IntEnum):
    """What a tensor is made of: an input, or parameters and buffers alone, or neither."""

    ELSEWHERE = 0
    MODEL = 1
    INPUT = 2


class _Outline(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Unrecorded(Exception):
    """What was run is not the whole truth about the model.

    Args:
        what: the operation that says so.
        line: of the model's code that asked for it, in words, where it is known.
        module: that it runs in.
    """

    def __init__(self, what: str, line: str = "", module: str = "") -> None:
        super().__init__(what)
        self.line, self.module = line, module


def recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, Members]:
    """The operations of one forward, which is run, and which of its placeholders are parameters and buffers.

    Raises:
        Unrecorded: an operation depends on the data, or its tensors went where they cannot be followed.
    """
    try:
        own: tuple[tuple[Any, ...], dict[str, Any]] = mapped(copied, (args, kwargs))
        return _recorded(model, *own, carry_out=_sparing)
    except Unrecorded:
        raise
    except Exception:  # zeros will not do, as for the inverse of a matrix
        return _recorded(model, args, kwargs, carry_out=lambda func, args, kwargs: func(*args, **kwargs))


def _recorded(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], carry_out: Runs
) -> tuple[fx.Graph, Members]:
    recorder = _Recorder(model, args, kwargs, carry_out)
    # Gradients stay switched on, for those who ask; below autograd, an operation made of others is still one.
    below = torch._C._AutoDispatchBelowAutograd()
    follow = _Followed(recorder.nodes, recorder.doubts)
    with torch.enable_grad(), no_shortcuts(), recorder.modules(model), below, follow, recorder:
        out = model(*args, **kwargs)
    return recorder.ended(out), recorder.members


@contextmanager
def no_shortcuts() -> Iterator[None]:
    """Has torch's attention and encoders go the whole way in the block: which shortcut they take, the data may tell."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


class Watching(TorchDispatchMode):
    """A mode that torch keeps its compiler out of, where that is there: to import it for this takes a second."""

    _ways: tuple[Any, Any]

    def __init_subclass__(cls) -> None:
        cls._ways = cls.__torch_dispatch__, super().__init_subclass__() or cls.__torch_dispatch__  # type: ignore

    def __enter__(self) -> Any:
        type(self).__torch_dispatch__ = self._ways["torch._dynamo" in sys.modules]  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]


class _Recorder(Watching):
    """Writes down each operation as a node of a graph, and knows the node of every tensor."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], carry_out: Runs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.carry_out = carry_out  # an operation on what the input brings
        self.graph, self.members = fx.Graph(), Members()
        self.nodes, self.told = WeakTensorKeyDictionary(), _Told()
        self.within = [""]  # the modules whose forward is running
        self.doubt: Unrecorded | None = None  # a model may catch what is raised in it
        for kind, named in (("p_", model.named_parameters()), ("b_", model.named_buffers())):
            for name, tensor in named:
                node = self._placeholder(kind + name.replace(".", "_"), tensor, Origin.MODEL)
                self.members[node.name] = name
        for name, value in _named(model, args, kwargs).items():
            leaves = list(tree_iter(value))
            for k, leaf in enumerate(leaves):
                if not isinstance(leaf, _PLAIN):
                    raise Unrecorded(type(leaf).__name__)
                if isinstance(leaf, Tensor):
                    self._placeholder(name if len(leaves) == 1 else f"{name}_{k}", leaf, Origin.INPUT)

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Knows in the block which module of the model an operation belongs to."""
        hooks = []
        for path, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self.within.append(path)))
            hooks.append(module.register_forward_hook(lambda *_: self.within.__delitem__(-1), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors(args, kwargs)
        if tensors is None:
            raise self.doubts(func)
        if func._schema.name in _BY_KIND:
            return func(*args, **kwargs)
        given = mapped(self.node, (args, kwargs))  # before it runs: it may change them in place
        told = self.told.among(tensors)
        made = self.carry_out(func, args, kwargs) if told is Origin.INPUT else func(*args, **kwargs)
        leaves = flat(made)
        numbers = not leaves or not all(isinstance(t, Tensor) for t in leaves)
        if told and (numbers or _by_data(func, args)):
            raise self.doubts(func)
        if told:
            self.told.add(func, leaves, told)
        if numbers:
            return made  # always the same
        node = self.graph.create_node("call_function", func, name=func._opname)
        node.args, node.kwargs = given  # here, nobody looks them through for numbers of unknown size
        node.meta.update(val=mapped(_shape, made), module=self.within[-1])
        for k, tensor in enumerate(leaves):
            if not func._schema.is_mutable and any(tensor is t for t in tensors):
                continue  # it was handed back
            if tensor is made:
                self.nodes[tensor] = node
            else:
                self.nodes[tensor] = part = self.graph.call_function(operator.getitem, (node, k))
                part.meta.update(val=_shape(tensor), module=self.within[-1])
        return made

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that made the tensor; one that was there before is a constant."""
        found: fx.Node | None = self.nodes.get(tensor)
        return self._placeholder("c_constant", tensor, Origin.ELSEWHERE) if found is None else found

    def _placeholder(self, name: str, tensor: Tensor, told: Origin) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta |= {"val": _shape(tensor), "module": self.within[-1]}
        self.nodes[tensor] = node
        if told:
            self.told.add(None, [tensor], told)
        return node

    def doubts(self, what: Any) -> Unrecorded:
        self.doubt = Unrecorded(str(what), _line_of_the_model(self.within[-1]), self.within[-1])
        return self.doubt

    def ended(self, out: Any) -> fx.Graph:
        """The graph with its outputs."""
        leaves = list(tree_iter(out))
        if self.doubt or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            raise self.doubt or Unrecorded("an output that hides what is in it")
        self.graph.output([self.node(leaf) for leaf in leaves if isinstance(leaf, Tensor)])
        return self.graph


def _line_of_the_model(module: str) -> str:
    """The line of code that is being run, of all that is neither here nor in torch."""
    frame, ours = sys._getframe(1), (__file__, str(Path(torch.__file__).parent))
    while frame.f_code is not _recorded.__code__ and frame.f_back is not None:
        file, number = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(ours):
            code = linecache.getline(file, number).strip()
            within = f", in `{module}`" if module else ""
            return (f"`{code[:120]}` (" if code else "(") + f"line {number} of {Path(file).name}{within})"
        frame = frame.f_back
    return ""


class _Told:
    """What tensors are made of, and where such were written in place."""

    def __init__(self) -> None:
        self.tensors = WeakTensorKeyDictionary()
        self.written: dict[int, tuple[torch.UntypedStorage, Origin]] = {}

    def add(self, func: Any, made: Iterable[Any], told: Origin) -> None:
        for tensor in made:
            if func is not None and func._schema.is_mutable and self.tensors.get(tensor, 0) < told:
                memory = tensor.untyped_storage()  # of others too, of which it is a view
                self.written[memory._cdata] = memory, told
            self.tensors[tensor] = told

    def among(self, tensors: Iterable[Tensor]) -> Origin:
        """The last origin among those of all tensors."""
        found = [self.tensors.get(t, Origin.ELSEWHERE) for t in tensors]
        if self.written:
            places = (t.untyped_storage()._cdata for t in tensors)
            found += [self.written[place][1] for place in places if place in self.written]
        return max(found, default=Origin.ELSEWHERE)


def _sparing(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation makes, without large products."""
    small = sum(t.numel() for t in flat(args) if isinstance(t, Tensor)) <= FEW
    return func(*args, **kwargs) if small else hollow(func, args, kwargs)


def hollow(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation makes, or zeros in the place of a product of floating-point numbers, laid out as it is."""
    tensors = list(filter(_is_tensor, flat(args))) if func._schema.name in _PRODUCTS else []
    usual = all(t.is_floating_point() for t in tensors) and not kwargs and not func._schema.is_mutable
    if "conv" in func._schema.name:  # how others are laid out, the device decides
        usual = usual and all(t.is_contiguous() for t in tensors)
    if not tensors or not usual:
        return func(*args, **kwargs)
    shape, stride, dtype = _product(func, _outline(args))
    return torch.empty_strided(shape, stride, dtype=dtype, device=tensors[0].device).zero_()


def _outline(told: Any) -> Any:
    """Arguments without their numbers, to be looked up."""
    if isinstance(told, list | tuple):
        return tuple(map(_outline, told))
    return _Outline(told.shape, told.stride(), told.dtype) if _is_tensor(told) else told


@lru_cache(1024)  # the same for each of many blocks
def _product(func: Any, outlines: Any) -> _Outline:
    """How torch lays out what the operation makes."""
    made: _Outline = _outline(func(*_unreal(outlines)))
    return made


def _unreal(outline: Any) -> Any:
    if isinstance(outline, _Outline):
        return torch.empty_strided(outline.shape, outline.stride, dtype=outline.dtype, device="meta")
    return tuple(map(_unreal, outline)) if isinstance(outline, tuple) else outline


def walked(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a forward for the way that it takes alone, without its products.

    Raises:
        Unrecorded: a number that flows may turn it.
    """
    hollow = _Hollow(model, (args, kwargs))
    with _Followed(hollow.told.tensors, hollow.doubts), hollow:
        model(*args, **kwargs)
    if hollow.doubt:
        raise hollow.doubt


class _Hollow(Watching):
    """Leaves products out of what the input brings. All else is whole: a model may keep it, as a table of angles."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.doubt: Unrecorded | None = None
        self.told = _Told()
        self.told.add(None, [*model.parameters(), *model.buffers()], Origin.MODEL)
        self.told.add(None, filter(_is_tensor, tree_iter(inputs)), Origin.INPUT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors(args, kwargs)
        if tensors is None:
            raise self.doubts(func)
        if func._schema.name in _BY_KIND:
            return func(*args, **kwargs)
        told = self.told.among(tensors)
        made = _sparing(func, args, kwargs) if told is Origin.INPUT else func(*args, **kwargs)
        if not told:
            return made
        leaves = flat(made)
        if not leaves or not all(map(_is_tensor, leaves)) or _by_data(func, args):
            raise self.doubts(func)
        self.told.add(func, leaves, told)
        return made

    def doubts(self, what: Any) -> Unrecorded:
        self.doubt = Unrecorded(str(what))
        return self.doubt


class _Followed(TorchFunctionMode):
    """Sees to it that no tensor leaves the recorder's sight: as numbers for Python, or by a way around torch."""

    def __init__(self, known: WeakTensorKeyDictionary, doubts: Callable[[Any], Unrecorded]) -> None:
        super().__init__()
        self.known, self.doubts = known, doubts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        strayed = isinstance(made, Tensor) and made not in self.known
        if name in _LEAVING or (strayed and any(isinstance(t, Tensor) and t in self.known for t in flat(args))):
            raise self.doubts(func)
        return made


def _tensors(args: Any, kwargs: Any) -> list[Tensor] | None:
    """The tensors that an operation gets; None where one comes as a storage: whose it is, nobody knows."""
    leaves = flat((args, kwargs) if kwargs else args)
    if any(isinstance(leaf, torch.UntypedStorage) for leaf in leaves):
        return None
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _by_data(func: Any, args: Any) -> bool:
    """Whether the data tell how many entries come out."""
    if func._schema.name == "aten::index":  # as large as its numbers are many, unless a mask picks
        return any(t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None)
    if func._schema.name == "aten::one_hot" and len(args) > 1 and args[1] > 0:  # it is told how many
        return False
    large = func._schema.name in _AS_LARGE_AS_DATA and len(args) < 3  # the other `where` is as large as its arguments
    return large or _tells(func)


@cache
def _tells(func: Any) -> bool:
    return not _BY_DATA.isdisjoint(func.tags)


def copied(tensor: Tensor) -> Tensor:
    """A tensor with the same numbers: some models change their inputs in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def mapped(function: Callable[[Tensor], Any], told: Any) -> Any:
    """Arguments with something else in the place of each tensor: `tree_map_only` does the same, slowly."""
    kind = type(told)
    if kind is tuple or kind is list:
        return kind([mapped(function, part) for part in told])
    if kind is dict:
        return {key: mapped(function, part) for key, part in told.items()}
    if isinstance(told, Tensor):
        return function(told)
    return told if kind in _PLAIN else tree_map_only(Tensor, function, told)


def flat(told: Any) -> list[Any]:
    """The leaves of an operation's arguments: `tree_leaves` does the same, and takes as long as a small operation."""
    if not isinstance(told, _NESTS):
        return [told]
    out: list[Any] = []
    for part in told.values() if isinstance(told, dict) else told:
        if type(part) not in _LEAVES and isinstance(part, _NESTS):
            out += flat(part)
        else:
            out.append(part)
    return out


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _shape(tensor: Tensor) -> Tensor:
    return _nothing(tensor.shape)


@lru_cache(1024)
def _nothing(shape: torch.Size) -> Tensor:
    return torch.empty(shape, device="meta")


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the model is called with, by the names of its arguments."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # it cannot be called so, or does not tell how
        return {f"args_{k}": value for k, value in enumerate((*args, *kwargs.values()))}
