"""Copies of a model, and of modules in it that are put in the place of others. What Python leaves to the original
follows: functions that a module keeps, as its hooks or as `self.f = lambda x: layer(x)`, and that hold such a module.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T", bound=nn.Module)
Memo = dict[int, Any]  # of what was copied, by its `id`


def duplicate(model: T, memo: Memo | None = None) -> T:
    """A copy of a model that has nothing of it, but what `memo` says that it has instead."""
    memo = {} if memo is None else memo
    for module in reversed(list(model.modules())):  # what is inside before what holds it
        if id(module) not in memo:
            memo[id(module)] = _slight(module, memo) if _is_plain(module) else copy.deepcopy(module, memo)
    out: T = memo[id(model)]
    _rebind(out, memo)
    return out


def whole_copy(model: nn.Module) -> nn.Module:
    """A copy to try things out on; refused where that would be done to the model itself."""
    out, own = duplicate(model), {id(p) for p in model.parameters()}
    if any(id(p) in own for p in out.parameters()):
        raise ValueError("a copy of `model` must have parameters of its own, got the same")
    return out


def lean(model: nn.Module, instead: Mapping[int, nn.Parameter] | None = None) -> nn.Module:
    """A copy that shares its parameters, of which nobody may change the numbers, or has others `instead`, by `id`."""
    memo: Memo = {id(p): (instead or {}).get(id(p), p) for p in model.parameters()}
    memo |= {id(b): b.clone() for b in model.buffers() if type(b) is Tensor and b.is_leaf}
    return duplicate(model, memo)


_HOLDING = nn.Module().__dict__.keys()  # what torch keeps in every module, the flag of training included
_HOOKS = tuple(key for key in _HOLDING if key.endswith("_hooks"))
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)
_NESTS = (dict, list, set)
_HELD = ("_parameters", "_buffers", "_modules")  # where torch keeps no functions


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has nothing of its own but numbers and words, so that a quick copy is a whole one."""
    kind, held = type(module), vars(module)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or getattr(kind, "__deepcopy__", None) is not None:
        return False
    usual = kind.__getstate__ is object.__getstate__ and kind.__setstate__ is nn.Module.__setstate__
    if not usual and not kind.__module__.startswith("torch.nn."):
        return False
    own = (value for key, value in held.items() if key not in _HOLDING and not isinstance(value, _PLAIN))
    lists = all(isinstance(value, (tuple, list)) and all(isinstance(part, _PLAIN) for part in value) for value in own)
    return lists and not any(held[key] for key in _HOOKS)


def _slight(module: nn.Module, memo: Memo) -> nn.Module:
    """What `copy.deepcopy` makes of a plain module, in a tenth of the time."""
    out = object.__new__(type(module))
    for key, value in vars(module).items():
        if key in _HELD:
            value = {name: copy.deepcopy(member, memo) for name, member in value.items()}
        elif isinstance(value, _NESTS):  # those of hooks are many, empty, and slow to copy
            value = type(value)() if not value else copy.deepcopy(value, memo)
        out.__dict__[key] = value
    return out


def put(model: nn.Module, path: str, new: nn.Module) -> None:
    """Has another module in the place of one, in its mode; in functions that held that one, too."""
    old = model.get_submodule(path)
    model.set_submodule(path, new.train(old.training))
    _rebind(model, {id(old): new})


def _rebind(model: nn.Module, memo: Memo) -> None:
    """Lets functions that a model keeps hold what became of the modules that they held."""
    for module in model.modules():
        own = vars(module)
        for held in (own, *(v for k, v in own.items() if isinstance(v, dict) and v and k not in _HELD)):  # as of hooks
            for key in [k for k, f in held.items() if _may_hold(f)]:
                held[key] = _own(held[key], memo)


def kept_elsewhere(model: nn.Module, parameters: Collection[str]) -> str | None:
    """The first attribute of a module, a function or a list, that keeps one of these parameters too; if any does."""
    own = dict(model.named_parameters(remove_duplicate=False))
    memo: Memo = {id(own[name]): object() for name in parameters}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _HOLDING and not isinstance(value, _PLAIN) and _own(value, dict(memo)) is not value:
                return f"{path}.{key}" if path else key
    return None


def _may_hold(value: Any) -> bool:
    """Whether it is a function, or has some: a copy of a module has others of its own for all that is no function."""
    if isinstance(value, list | tuple):
        return not all(isinstance(part, _PLAIN) for part in value)
    return isinstance(value, FunctionType | partial)


def _own(value: Any, memo: Memo) -> Any:
    """What a function, or what it holds, is in the copy: the same, where nothing of it was copied."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, list | tuple | dict):
        new = tree_map(lambda leaf: _own(leaf, memo), value)
        same = all(a is b for a, b in zip(tree_leaves(new), tree_leaves(value), strict=True))
        return value if same else new
    if isinstance(value, partial):
        held = (value.func, value.args, value.keywords)
        func, args, keywords = (_own(part, memo) for part in held)
        changed = any(a is not b for a, b in zip((func, args, keywords), held, strict=True))
        return partial(func, *args, **keywords) if changed else value
    if not isinstance(value, FunctionType):
        return value
    cells = tuple(CellType() for _ in value.__closure__ or ())
    out = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    memo[id(value)] = out  # at once: it may hold itself
    filled = [_fill(cell, old, memo) for cell, old in zip(cells, value.__closure__ or (), strict=True)]
    out.__defaults__, out.__kwdefaults__ = _own(value.__defaults__, memo), _own(value.__kwdefaults__, memo)
    if all(filled) and out.__defaults__ is value.__defaults__ and out.__kwdefaults__ is value.__kwdefaults__:
        memo[id(value)] = value
    out.__qualname__, out.__doc__ = value.__qualname__, value.__doc__
    vars(out).update(vars(value))
    return memo[id(value)]


def _fill(cell: CellType, old: CellType, memo: Memo) -> bool:
    """Puts what a function's cell holds into that of the copy; whether it is the same."""
    with suppress(ValueError):  # nothing was put there yet
        held = old.cell_contents
        cell.cell_contents = _own(held, memo)
        return cell.cell_contents is held
    return True
