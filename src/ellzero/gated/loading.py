"""Whether a state fits the network that is to load it: all of it, or none is loaded. This file knows tensors only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TAKEN = frozenset(dir(nn.ModuleDict()))  # a dictionary of modules takes no key that it has as an attribute


def key_of(name: str) -> str:
    """Under what key the gates of a placement are kept, and found in a state.

    Example:
        >>> key_of("layers.0"), key_of("keys")
        ('layers/0', 'keys/')
    """
    return f"{name}/" if name in _TAKEN else name.replace(".", "/")


def own_state(model: nn.Module, gates: nn.Module) -> dict[str, Any]:
    """The state of a gated network, without what hooks add to it."""
    return {**model.state_dict(prefix="model."), **gates.state_dict(prefix="gates.")}


def refuse_other_keys(own: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuses a state with other keys."""
    if own.keys() != new.keys():
        raise ValueError(
            f"`state_dict` is of another network: missing {sorted(own.keys() - new.keys())[:5]}, "
            f"unexpected {sorted(new.keys() - own.keys())[:5]}"
        )


def refuse_other_shapes(own: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> None:
    """Refuses tensors of other shapes, and gates that are not finite: torch loads what fits, then complains."""
    for key, here in own.items():
        tensor = new.get(prefix + key)
        if not isinstance(here, Tensor) or tensor is None:
            continue
        if tensor.shape != here.shape:
            hint = "; if it got smaller under a budget, load the budget's state first"
            raise ValueError(
                f"`state_dict` is of another network: `{key}` has shape {tuple(tensor.shape)}, "
                f"here it is {tuple(here.shape)}{hint if tensor.numel() < here.numel() else ''}"
            )
        if key.startswith("gates.") and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"`state_dict` has numbers in `{key}` that are not finite")
