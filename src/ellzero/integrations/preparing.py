"""What `centred`, `routed` and `numbered` did to a network, as plain data, and how to do it to a fresh one: without an
example, since the numbers are loaded afterwards. It does not know folders.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ellzero.graph.forwards.copying import put
from ellzero.graph.standins.norms import ResponseNorm, RootMeanSquare
from ellzero.graph.trials.centring import subtract_none
from ellzero.graph.trials.numbering import HeadNumbers, put_numbers
from ellzero.graph.trials.routing import Shares, put_shares

Said = dict[str, dict[str, dict[str, Any]]]  # by what was done, and by module


def said_of(model: nn.Module) -> Said:
    """What was done to the modules of a network; nothing of those that are as their class makes them."""
    out: Said = {"centred": {}, "responding": {}, "numbered": {}, "routed": {}}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if isinstance(module, RootMeanSquare):
            out["centred"][path] = {"eps": module.eps}
        elif isinstance(module, ResponseNorm):
            out["responding"][path] = {key: getattr(module, key) for key in ("weighs", "adds", "eps", "dim")}
        elif isinstance(module, HeadNumbers):
            out["numbered"][parent] = {"heads": module.heads, "given": list(module.given)}
        elif isinstance(module, Shares):
            out["routed"][parent] = {}
    return {what: done for what, done in out.items() if done}


def prepare(model: nn.Module, said: Said) -> None:
    """Does it to a fresh network, in place."""
    for path, kept in said.get("centred", {}).items():
        subtract_none(model, path, kept["eps"])
    for path, kept in said.get("responding", {}).items():
        members = dict(model.get_submodule(path).named_parameters())
        put(model, path, ResponseNorm(members, kept["weighs"], kept["adds"], kept["eps"], kept["dim"]))
    for path, kept in said.get("numbered", {}).items():
        put_numbers(model.get_submodule(path), kept["heads"], tuple(kept["given"]))
    for path in said.get("routed", {}):
        put_shares(model.get_submodule(path))
