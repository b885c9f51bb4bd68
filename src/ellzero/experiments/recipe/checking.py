"""What a field of a recipe may be: types with ranges, rules between fields, and the check of a value.

The check is our own: msgspec and pydantic say in their words what a value must be, and know no relations of fields.
Which fields there are is in `fields`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from ellzero.experiments.data.importing import is_code


@final
@dataclass(frozen=True)
class Range:
    """Which values a field takes."""

    words: str  # follow "must be"
    accepts: Callable[[Any], bool]


@final
@dataclass(frozen=True)
class Rule:
    """What must hold between a field and others."""

    holds: Callable[[Any], bool]  # of a recipe
    words: str  # follow the field's name in the refusal; fields in braces are replaced by their values


@final
@dataclass(frozen=True)
class Needs:
    """Where a field acts; elsewhere it has its default."""

    acts: Callable[[Any], bool]
    words: str  # why it does not, as those of a `Rule`
    strict: bool = False  # refuses every recipe with another value, and not only one that was set on purpose


Positive = Annotated[float, Range("a positive number", lambda x: x > 0)]
NotNegative = Annotated[float, Range("a number of at least 0", lambda x: x >= 0)]
Rate = Annotated[float, Range("a number in [0, 1)", lambda x: 0 <= x < 1)]
Inside = Annotated[float, Range("a number in (0, 1)", lambda x: 0 < x < 1)]
Share = Annotated[float, Range("a fraction of the dense cost in (0, 1]", lambda x: 0 < x <= 1)]
Count = Annotated[int, Range("an integer of at least 1", lambda n: n >= 1)]
CountOrZero = Annotated[int, Range("an integer of at least 0", lambda n: n >= 0)]
Epochs = tuple[Count, ...]
Code = Annotated[str, Range("a function of your own, MODULE:FUNCTION", is_code)]
_LARGEST = 1e30


@final
class Described:
    """A field of type `Annotated[kind, ...]` with its sentence, and with `Range`, `Rule`s and `Needs` if any."""

    def __init__(self, field: Field[Any]) -> None:
        self.name, self.hint = field.name, field.type
        kind, *told = get_args(field.type)
        members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        self.sentence = next(t for t in told if isinstance(t, str))
        self.rules = [t for t in told if isinstance(t, Rule)]
        self.needs = [t for t in told if isinstance(t, Needs)]
        self.nullable = NoneType in members
        self.is_word = members[0] is str or get_origin(members[0]) is Literal
        self.required = field.default is MISSING and field.default_factory is MISSING
        self.default = field.default if field.default_factory is MISSING else field.default_factory()


def checked(hint: Any, name: str, value: Any) -> Any:
    """The value in the type that the hint says, if it is what it must be: 1 becomes 1.0, a list a tuple."""
    kind, parts, span = _taken_apart(hint)
    if kind in (Union, UnionType):  # one value, or one by pattern, or none
        many = next((part for part in parts if get_origin(part) is dict), parts[0])
        words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        as_it_is = (value is None and NoneType in parts) or value in words
        return value if as_it_is else checked(many if isinstance(value, Mapping) else parts[0], name, value)
    if kind is dict:
        return _by_pattern(parts[1], name, value)
    if kind is tuple:
        return _rising(parts[0], name, value)
    if kind is Literal:
        kind = str
    right = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if kind is float:
        right = right and abs(value) <= sys.float_info.max  # nan is not
        if right and abs(value) > _LARGEST:
            raise _refusal(name, f"at most {_LARGEST:g}, which single precision can multiply", value)
    if not right or not span.accepts(value):
        raise _refusal(name, span.words, value)
    return float(value) if kind is float else value


@cache  # there are few, and thousands of recipes
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...], Range]:
    """A hint's kind, its parts, and which values it takes."""
    kind, parts, span = get_origin(hint) or hint, get_args(hint), Range("true or false", lambda _: True)
    if kind is Annotated:
        span = next((part for part in parts if isinstance(part, Range)), span)
        kind, parts = get_origin(parts[0]) or parts[0], get_args(parts[0])
    if kind is Literal:
        span = Range(" or ".join(f'"{option}"' for option in parts), parts.__contains__)
    return kind, parts, span


def _by_pattern(hint: Any, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise _refusal(name, "a number for each pattern", value)
    for pattern in value:
        if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
            raise ValueError(f"`{name}` must have patterns as keys, got {pattern!r}")
    return {pattern: checked(hint, f'{name}["{pattern}"]', number) for pattern, number in value.items()}


def _rising(hint: Any, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _refusal(name, "a list of epochs such as [10]", value)
    epochs = tuple(checked(hint, name, epoch) for epoch in value)
    if list(epochs) != sorted(set(epochs)):
        raise _refusal(name, "a list of rising epochs", value)
    return epochs


def _refusal(name: str, must: str, value: object) -> ValueError:
    return ValueError(f"`{name}` must be {must}, got {value!r}")
