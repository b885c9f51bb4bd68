"""Which numbers of a Hugging Face configuration are which widths of its network, and what they are for a small one.

The sizes of the tensors are taken for sums of multiples of these numbers. Each number is changed once, on networks
without memory: what the sizes do then gives the multiples, and with them the small sizes give the numbers. Whether a
configuration then has the small network's shapes is looked up, not believed. Nothing here knows files or weights.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch
from transformers import PreTrainedModel

from ellzero.out.saving import eps_of, members_of

_NAMES = re.compile(r"intermediate|ffn|inner|d_ff|mlp|hidden_dim|heads?$|experts?$|^hidden_size$")  # of such numbers

Field = tuple[str, ...]  # the way to a number: its name, behind that of the configuration inside that has it
Place = tuple[str, int]  # a tensor and a dimension
Shapes = dict[str, tuple[int, ...]]


@final
class Widths:
    """What the configuration of a small network would have to say.

    Args:
        small: the network; its configuration is that of the dense one.
    """

    def __init__(self, small: PreTrainedModel) -> None:
        self._kind, self._said, self._small = type(small), small.config.to_dict(), _shapes(small)
        self._dense = self._built({}) or {}
        self._eps = list({eps for module in small.modules() for eps in eps_of(module).values() if eps is not None})
        sizes = dict(_head_sizes(self._said))
        self._head_sizes = sizes if sizes and self._built(sizes) == self._dense else {}
        self._values: dict[Field, int] = {}
        self._slopes: dict[Field, dict[Place, float]] = {}
        for way, part in _parts(self._said):
            for name, value in part.items():
                if _NAMES.search(name) and (value is None or (type(value) is int and value > 0)):
                    self._try((*way, name), value)

    def uniform(self) -> Any:
        """The configuration whose network has the small shapes; `None` if there is none."""
        found = self._solved([(name, d) for name, shape in self._dense.items() for d in range(len(shape))])
        if found is None:
            return None
        found |= self._head_sizes if any("head" in field[-1] or "hidden" in field[-1] for field in found) else {}
        if self._built(found) != self._small:
            return None
        names = [name for name, value in self._said.items() if "eps" in name and type(value) is float]
        one = len(names) == len(self._eps) == 1  # the eps of a norm follows its width
        return self._config({**found, (names[0],): self._eps[0]} if one else found)

    def per_layer(self) -> dict[str, dict[str, int]]:
        """What every layer has instead of the configuration's numbers; nothing where that cannot be said."""
        layers: dict[str, list[Place]] = defaultdict(list)
        for name, shape in self._dense.items():
            number = next((part for part in name.split(".") if part.isdigit()), "")
            layers[number] += [(name, d) for d in range(len(shape))]
        out: dict[str, dict[str, int]] = {}
        for number, places in layers.items():
            found = self._solved(places)
            if found is None or any(len(field) > 1 or not number for field in found):
                return {}
            if number:
                out[number] = {field[0]: value for field, value in found.items()}
        if any("head" in name for values in out.values() for name in values):
            sizes = {field[0]: size for field, size in self._head_sizes.items() if len(field) == 1}
            out = {number: {**values, **sizes} for number, values in out.items()}
        out = {number: values for number, values in out.items() if values}
        with suppress(Exception):  # a configuration may refuse it
            self._kind.config_class.from_dict({**self._said, "per_layer_config": out})
            return out
        return {}

    def _try(self, field: Field, value: int | None) -> None:
        """Notes what a number does to the sizes; one that is `None` has a value that follows from others."""
        pairs = ((value, 2 * value), (value, max(1, value // 2))) if value else ((8, 16),)
        for low, high in pairs:
            one = self._dense if value else self._built({field: low})
            other = self._built(self._head_sizes | {field: high})
            if one is None or other is None or not self._dense.keys() == one.keys() == other.keys():
                continue
            moved = {
                (name, d): (other[name][d] - size) / (high - low)
                for name, shape in one.items()
                for d, size in enumerate(shape)
                if other[name][d] != size
            }
            if moved:
                (name, d), slope = next(iter(moved.items()))
                self._values[field] = round(low + (self._dense[name][d] - one[name][d]) / slope)
                self._slopes[field] = moved
            return

    def _solved(self, places: list[Place]) -> dict[Field, int] | None:
        """The numbers that must be others for the small sizes at these places; `None` if no numbers do it."""
        fields, small = list(self._slopes), self._small
        if self._dense.keys() != small.keys() or any(len(self._dense[name]) != len(small[name]) for name, _ in places):
            return None
        slopes = np.zeros((len(places), len(fields)))
        for k, field in enumerate(fields):
            slopes[:, k] = [self._slopes[field].get(place, 0.0) for place in places]
        less = np.array([small[name][d] - self._dense[name][d] for name, d in places], float)
        change = np.rint(np.linalg.lstsq(slopes, less, rcond=None)[0]) if slopes.size else np.zeros(len(fields))
        if not np.array_equal(slopes @ change, less):
            return None
        return {f: self._values[f] + int(by) for f, by in zip(fields, change, strict=True) if by}

    def _config(self, values: Mapping[Field, float]) -> Any:
        said = copy.deepcopy(self._said)
        for (*way, name), value in values.items():
            part = said
            for key in way:
                part = part[key]
            part[name] = value
        return self._kind.config_class.from_dict(said)

    def _built(self, values: Mapping[Field, int]) -> Shapes | None:
        """The shapes of the network with such numbers; `None` if it cannot be built."""
        with suppress(Exception), torch.device("meta"):
            return _shapes(self._kind(self._config(values)))
        return None


def _shapes(network: PreTrainedModel) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in members_of(network).items()}


def _parts(said: dict[str, Any], way: Field = ()) -> Iterator[tuple[Field, dict[str, Any]]]:
    """A configuration and those inside it."""
    yield way, said
    for key, value in said.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from _parts(value, (*way, key))


def _head_sizes(said: dict[str, Any]) -> Iterator[tuple[Field, int]]:
    """The sizes of heads that follow from their number: said, they stay when that changes."""
    for way, part in _parts(said):
        heads, wide = part.get("num_attention_heads"), part.get("hidden_size")
        if part.get("head_dim") is None and type(heads) is type(wide) is int and heads and wide % heads == 0:
            yield (*way, "head_dim"), wide // heads
