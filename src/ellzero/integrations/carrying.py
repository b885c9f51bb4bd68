"""A budget's state, carried in the state dict of its network: one file has both, and a fresh network comes to fit it.

Trainers load a network before they make its optimizer, and callbacks after both. But a state of a network that became
smaller fits only where the same units are taken out first. So the state itself says which. This file knows state dicts;
it does not know trainers and their files.
"""

from __future__ import annotations

import io
import weakref
from typing import Any, final

import torch
from torch import Tensor, nn

from ellzero.gated.loading import own_state, refuse_other_keys
from ellzero.gated.module import Gated
from ellzero.graph.plan import Plan
from ellzero.out import shrinking
from ellzero.out.budget import Budget

KEY = "budget"
_CARRIERS: weakref.WeakKeyDictionary[nn.Module, Carrier] = weakref.WeakKeyDictionary()


@final
class Carrier:
    """Puts a budget's state into every state dict of its network, and keeps what it finds in one that is loaded.

    Attributes:
        found: the budget's state in what was loaded last, or `None`.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] | None = None
        self._budget: weakref.ref[Budget] | None = None

    @classmethod
    def of(cls, gated: Gated) -> Carrier:
        """The carrier of a network."""
        if gated not in _CARRIERS:
            _CARRIERS[gated] = cls()
            gated.register_state_dict_post_hook(_write)  # type: ignore[no-untyped-call]
            gated.register_load_state_dict_pre_hook(_read)  # type: ignore[no-untyped-call]
        return _CARRIERS[gated]

    @property
    def budget(self) -> Budget | None:
        """Whose state is carried; none once it has finished."""
        budget = None if self._budget is None else self._budget()
        return None if budget is None or budget.phase == "finished" else budget

    def begin(self, budget: Budget) -> None:
        """Carries the state of `budget` from here on."""
        self._budget = weakref.ref(budget)

    def resume(self, budget: Budget, resumed: bool) -> None:
        """Lets a budget go on where the loaded one stopped.

        Raises:
            ValueError: the run goes on and no state was loaded, or one was loaded and the run begins anew.
        """
        if resumed != (self.found is not None):
            got = "one without" if resumed else f"one of step {self.found['done']} in a run that begins anew"  # type: ignore[index]
            raise ValueError(f"the checkpoint of a run with a budget must have the budget's state, got {got}")
        if self.found is not None:
            budget.load_state_dict(self.found)
            self.found = None


def _write(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of `state_dict()`: adds the budget as a tensor of bytes, and has every shared tensor once, as files do."""
    carrier = _CARRIERS.get(module)  # none in a copy of the network
    budget = None if carrier is None else carrier.budget
    if budget is None:
        return
    for twin in _twins(module):
        state.pop(prefix + twin, None)
    buffer = io.BytesIO()
    torch.save(budget.state_dict(), buffer)
    state[prefix + KEY] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _read(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before `load_state_dict()`: takes the budget out, and what its network had taken out out of this one."""
    carrier, written = _CARRIERS.get(module), state.pop(prefix + KEY, None)
    if carrier is None or written is None:
        return
    assert isinstance(module, Gated)
    found = torch.load(io.BytesIO(written.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    for twin, first in _twins(module).items():
        if prefix + first in state:
            state.setdefault(prefix + twin, state[prefix + first])
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    refuse_other_keys(own_state(module.model, module.gates), given)
    _fit(module, found, given)
    carrier.found = found


def _fit(gated: Gated, found: dict[str, Any], given: dict[str, Tensor]) -> None:
    """Makes a network as small as the one whose state is given."""
    units = found["units"]
    if gated.fixed and not found["fixed"]:
        raise ValueError(f"`state_dict` is of step {found['done']}, before the gates settled: it fits a fresh network")
    if units is None or (gated.taken is not None and bool((torch.as_tensor(gated.taken.units) == units).all())):
        return
    if len(units) != gated.graph.offsets[-1]:
        raise ValueError(
            f"`state_dict` is of another network: it had {len(units)} units, here they are {gated.graph.offsets[-1]}"
        )
    plan = shrinking.planned(gated, units.numpy())
    step: Plan = plan.beyond(gated.taken)
    for name, tensor in (*gated.model.named_parameters(), *gated.model.named_buffers()):
        if f"model.{name}" not in given:  # a buffer that is not saved
            continue
        if (shape := step.slice(name, tensor).shape) != given[f"model.{name}"].shape:
            there = tuple(given[f"model.{name}"].shape)
            raise ValueError(f"`state_dict` is of another network: `{name}` has shape {there}, here {tuple(shape)}")
    gated.shrink(plan)


def _twins(module: nn.Module) -> dict[str, str]:
    """The further names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in names if first.setdefault(id(p), name) != name}
