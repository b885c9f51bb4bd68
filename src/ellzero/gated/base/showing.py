"""What a `Gated` shows of its model to tools that ask: the signature of `forward`, and plain data such as `config`.

Trainers read a signature to find which columns of a batch are inputs and which are labels; some read it off the class.
So the gated networks of every class of models have a class of their own. This file does not know what a forward does.
"""

from __future__ import annotations

import inspect
import weakref
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_MADE: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


class Showing(nn.Module):
    """Around a `model`: `forward` has the signature of the model's own, and the model's plain data can be read here."""

    model: nn.Module

    def show(self) -> None:
        """Takes the class that belongs to the model's, once there is a model."""
        self.__class__ = _shown(_written(type(self)), type(self.model))

    def _get_name(self) -> str:
        return _written(type(self)).__name__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__.get("_modules", {}):
                raise
        value = getattr(self.model, name)
        if callable(value) or isinstance(value, Tensor):  # its methods and parts would run without gates
            raise AttributeError(f"`Gated` has no `{name}`: `gated.model.{name}` is the model's own, without gates")
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (_written(type(self)),), self.__getstate__()  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.show()


def _empty(written: Any) -> Any:
    """What a pickle begins with: it finds classes by their names, and one made at run time has no place to be found."""
    return written.__new__(written)


def _written(cls: type) -> type:
    """The class that somebody wrote, of one that was made here."""
    written: type = vars(cls).get("written", cls)
    return written


def _shown(base: type, model: type) -> type:
    """The class of what `base` makes of models of a class: `base` but for its name and what `forward` seems to take."""
    if model not in _MADE:
        whole: Any = base
        run: FunctionType = whole.forward
        # A copy, not a wrapper: one more call per forward is one more to trace.
        forward = FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
        forward.__kwdefaults__, forward.__doc__ = run.__kwdefaults__, run.__doc__
        forward.__signature__ = _signature(run, model)  # type: ignore[attr-defined]
        body = {"forward": forward, "written": base, "__doc__": base.__doc__}
        _MADE[model] = type(f"{base.__name__}{model.__name__}", (base,), body)
    return _MADE[model]


def _signature(run: FunctionType, model: Any) -> inspect.Signature:
    """That of the model's forward, and the keywords that are ours."""
    ours = inspect.signature(run)
    try:
        theirs = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # written in C++, or made of a script
        return ours
    rest = [p for p in theirs if p.kind == p.VAR_KEYWORD]
    keywords = [p for p in ours.parameters.values() if p.kind == p.KEYWORD_ONLY]
    return inspect.Signature([*(p for p in theirs if p.kind != p.VAR_KEYWORD), *keywords, *rest])
