"""`Gated`: a model and its gates, as one module.

It draws every gate once per forward, has the draws multiplied into the weights that read (`multiplying.py`), and runs
the user's own model with these weights in place of its own. The model is shared, not copied: called directly it is the
dense network. This file does not know what an open gate costs, nor how a network is made smaller.

What is not a number stays visible: a gate that is NaN, or a closed one on a unit that is infinite (0 · ∞), makes the
output NaN. In the network that `compact` returns a closed unit is not there, nor is its infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ellzero.gated.alive import liveness
from ellzero.gated.base import local, masking, sharding
from ellzero.gated.base.asking import sums
from ellzero.gated.base.holding import Holding
from ellzero.gated.counting import count_macs, count_params, count_units
from ellzero.gated.grouping import grouped
from ellzero.gated.loading import key_of, own_state, refuse_other_keys, refuse_other_shapes
from ellzero.gated.members import show_members
from ellzero.gated.multiplying import Held, aim, lock_of, multiplied, run, times
from ellzero.gated.placements import Placement
from ellzero.gated.taking import idle, refuse_taking, remaining
from ellzero.gates.abstract import AbstractGate, additions, draw, values
from ellzero.graph.axes import Axis, Graph
from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.plan import Mask, Plan, make_plan


class Gated(Holding):
    """A model and its gates. In training every forward draws them all once; in evaluation it uses test-time values.

    Attributes:
        model: the user's model, shared.
        graph: what shrinks together in it.
        placements: which gates multiply and count what.
        taken: the plan of what was taken out of the model for good (`shrink`), or `None`. All that counts, and the
            gates, go on meaning the model as it was attached to.
        present: the placements as they lie on the tensors that the model has now.
        gates: the gate modules, by name ("." written as "/", and one behind a name that torch keeps, as "keys/").
        fixed, drawn, noisy, still: see `Fixing` and `Holding`.
        per_example, on_activations: whether a forward in training draws for each example of the batch, and not once for
            all; whether gates multiply what layers read, and not their weights.
        gate_lr: the rate of the gates in `param_groups` where none is named; a `Budget` sets it.
        memo: what costs worked out about this network once, emptied when it moves.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        placements: Sequence[Placement],
        gates: Sequence[AbstractGate],
        example_inputs: tuple[tuple[Any, ...], dict[str, Any]],
        per_example: bool = False,
        apply: str = "weights",
    ) -> None:
        super().__init__()
        if len(set(names := [p.name for p in placements])) < len(names):
            raise ValueError(f"`where` must name each placement once, got {', '.join(names)}")
        self.liveness = liveness(graph, placements)
        self.model = model
        self.graph, self.placements = graph, tuple(placements)
        self.gates = nn.ModuleDict({key_of(n): g for n, g in zip(names, gates, strict=True)})
        self.example_inputs = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, example_inputs)
        like = next(model.parameters())
        self.gates.to(like.device, torch.float64 if like.dtype == torch.float64 else None)
        self.taken: Plan | None = None
        counts = {"params": count_params, "macs": count_macs, "units": count_units}
        self.census = {key: count(graph, self.liveness) for key, count in counts.items()}
        self.gate_lr: float | None = None
        self._assumed: Tensor | None = None
        self.on_activations = apply == "activations"
        self._aim()
        self.per_example = per_example
        if per_example:
            local.refuse_unfit(model, self._targets, self.placements, self._gates())
        if self.on_activations:
            both = self._masks, self._targets
            masking.refuse_other_function(model, self.example_inputs, *both, self._gates(), self.tables)
        self.training, self._begun, self._first = model.training, sums(self.gates), self._batches_seen()
        self.show()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of the model: `name`, `size`, `sites`, and `frozen`, a sentence or `None`."""
        return self.graph.axes

    def param_groups(
        self,
        *,
        lr: float | None = None,
        gate_lr: float | None = None,
        weight_decay: float | None = None,
        gate_weight_decay: float = 0.0,
        counted_weight_decay: float | None = None,
    ) -> list[dict[str, Any]]:
        """The two groups for an optimizer: weights, and gates with a learning rate of their own.

        Args:
            lr: learning rate of the weights; the optimizer's default if `None`.
            gate_lr: learning rate of the gates; the attribute `gate_lr` if `None`, else the weights' times the
                least `rate_ratio` of the gates' families (1 for those of both papers).
            weight_decay: of the weights; the optimizer's default if `None`.
            gate_weight_decay: of the gates.
            counted_weight_decay: if given, the weights that gates count form a third group with this decay: 0 where
                `l2_norm` acts on them.
        """
        rates = {"lr": lr, "gate_lr": self.gate_lr if gate_lr is None else gate_lr, "weight_decay": weight_decay}
        rates |= {"gate_weight_decay": gate_weight_decay, "counted_weight_decay": counted_weight_decay}
        counted = {s.tensor for p in self.placements for s in p.counts}
        ratio = min(gate.rate_ratio for gate in self._gates())
        sharding.follow(self.model, self.gates)
        return grouped(self.model.named_parameters(), self.gates.parameters(), counted, rates, ratio)

    # ---- what the gates say ----------------------------------------------------------------------------------------

    def alive(self) -> tuple[Tensor, list[Tensor]]:
        """P(alive) of every unit of an open block, and P(open) of the inputs of every weight that gets a `Select`."""
        extended = self.liveness.extend(self.prob_open(), self.tables)
        return self.liveness.units(extended, self.tables), self.liveness.inputs(extended, self.tables)

    def plan(self, *, refuse: bool = True) -> Plan:
        """What removal would leave now, by the gates' test-time values.

        Args:
            refuse: whether a whole axis that is closed raises `ClosedAxisError`; else one unit of it stays.
        """
        with torch.no_grad():
            extended = self.liveness.extend(opens := self.opens().to(self.tables["ends"]), self.tables)
            units = self.liveness.units(extended, self.tables).cpu().numpy() > 0.5
            inputs = (x.cpu().numpy() > 0.5 for x in self.liveness.inputs(extended, self.tables))
            entries = dict(zip(self.liveness.entries, inputs, strict=True))
            gone, weakest = self.liveness.closed_blocks(opens, self.tables), self.liveness.weakest(self.evidence())
        if self.taken is not None:  # what was taken out cannot come back
            weakest = np.where(self.taken.units, weakest, -np.inf)
            units = units if self._assumed is not None else units & self.taken.units
        return make_plan(self.graph, units, entries=entries, evidence=weakest, refuse=refuse, blocks=gone)

    # ---- smaller for good ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def shrink(self, plan: Plan) -> Plan:
        """Takes units out of the model for good, in place; parameters that change are new, and an optimizer must know.

        Gates, their noise, costs and plans stay those of the whole network: a gate that nothing is left of is closed
        for good, and every other one keeps its number.

        Args:
            plan: of the network as it was attached to, with what was taken out before. Single inputs (`selects`) and
                whole layers (`closed`) stay.

        Returns:
            What was done to the model as it was: a plan that also slices moments and averages of its parameters.

        Raises:
            ValueError: the plan brings a unit back, or takes more than units out, or those of a grouped convolution
                that is not depthwise; nothing is changed.
        """
        refuse_taking(self.model, self.graph, self.placements, plan, self.taken)
        step = plan.beyond(self.taken)
        step.apply(self.model)
        self.taken = plan
        self._aim()
        gone = self.by_placement(torch.as_tensor(self.gone(), device=self.tables["ends"].device))
        for name, gate in self.named_gates():
            gate.close_(gone[name])
        return step

    def gone(self) -> Mask:
        """For every gate, flat, whether all that it multiplied has been taken out."""
        return idle(self.present) if self.taken is not None else np.zeros(self.liveness.size, dtype=bool)

    @torch.no_grad()
    def expanded(self) -> Gated:
        """A copy in which what `shrink` took out is back, as zeros behind closed gates: the same function."""
        out = duplicate(self)
        if out.taken is not None:
            out.taken.undo(out.model, self.graph.shapes)
            out.taken = None
            out._aim()
        return out

    # ---- the forward -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, gate_noise: Tensor | None = None, **kwargs: Any) -> Any:
        """Runs the model with gated weights.

        Args:
            *args: the model's own arguments.
            gate_noise: uniform noise for the draw, flat, one entry per gate; from torch's generator if `None`, and
                then for each example where gates are so attached (`per_example`).
            **kwargs: the model's own keyword arguments.
        """
        gates, draws = self._gates(), self.training and not self.fixed
        if draws and self.per_example and gate_noise is None:
            return self._for_each(args, kwargs)
        if gate_noise is not None and gate_noise.shape != (n := self.liveness.size,):
            raise ValueError(f"`gate_noise` must have shape ({n},), one entry per gate, got {tuple(gate_noise.shape)}")
        if not draws and (held := self.held()) is not None:
            return self.forward_held(held, *args, **kwargs)
        z, added = self._drawn(gate_noise) if draws else (values(gates), None)
        if self.on_activations and not torch.compiler.is_compiling():
            sharding.refuse_late(self.model, self.gates)
            with lock_of(self.model), masking.masked(self.model, self._masks, z, self.tables):
                return self.model(*args, **kwargs)
        tables = self.tables
        return run(self.model, self._targets, lambda _, w, to: multiplied(w, to, z, tables, added), args, kwargs)

    def forward_held(self, held: dict[str, Held], *args: Any, **kwargs: Any) -> Any:
        """Runs the model with what `acting()` said of gates that stay as they are: for who knows when they move."""
        return run(self.model, held, lambda _, w, by: times(w, by), args, kwargs)

    def _for_each(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward with noise of its own for each example."""
        if torch.compiler.is_compiling():
            raise RuntimeError("noise for each example (`per_example`) cannot be compiled: compile without it, or not")
        self.note_draw(noisy=True)
        draws = local.drawn(self._gates(), local.examples_in(args, kwargs))
        make = partial(local.noisy, draws=draws, tables=self.tables)
        return run(self.model, self._targets, make, args, kwargs)

    def _drawn(self, gate_noise: Tensor | None) -> tuple[list[Tensor], list[Tensor | None] | None]:
        self.note_draw(noisy=gate_noise is None)
        gates = self._gates()
        if not any(gate.adds for gate in gates):
            return draw(gates, gate_noise), None
        u = self.gate_noise() if gate_noise is None else gate_noise
        return draw(gates, u), additions(gates, u)

    @torch.no_grad()
    def multiply_into(self, model: nn.Module, z: Sequence[Tensor]) -> None:
        """Multiplies `z` into the weights of a copy of the model, in place: no second set of weights takes memory."""
        members = dict(model.named_parameters())
        for name, target in self._targets.items():
            members[name].copy_(multiplied(members[name], target, z, self.tables))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's; the gates are replicated tensors from the first time on that the model's weights are sharded."""
        sharding.follow(self.model, self.gates)
        return super().named_parameters(*args, **kwargs)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _aim(self) -> None:
        """Works out what the gates multiply in the model as it is now."""
        self.present = tuple(remaining(p, self.taken) for p in self.placements)
        self._targets, self._layout = aim(self.model, self.present)
        if self.on_activations:
            self._masks, tables = masking.aim(self.model, self.graph, self.present, self._gates())
            self._layout |= tables
        self._settle()

    def _settle(self) -> None:
        """Lays out index tables beside the gates. As buffers DDP would broadcast them, `.to(bfloat16)` round."""
        home = next(self.gates.parameters())
        dtype = torch.float64 if home.dtype == torch.float64 else torch.float32
        self.tables = self.liveness.tables(home.device, dtype)
        self.tables |= {key: torch.as_tensor(index, device=home.device) for key, index in self._layout.items()}
        self.memo: dict[Any, Any] = {}
        self._known = None
        show_members(self.model, self.present, self._gates(), home.device)
        self.census_tables = {k: c.tables(home.device, dtype) for k, c in self.census.items() if c is not None}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state, or refuses one of another network and loads nothing of it."""
        if strict:
            refuse_other_keys(own_state(self.model, self.gates), state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)  # loads nothing yet: hooks see the state first
        refuse_other_shapes(own_state(self.model, self.gates), state_dict, prefix)
        self._known = None
