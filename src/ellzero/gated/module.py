"""`Gated`: a model and its gates, as one module."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from ellzero import gates as gt
from ellzero.gated.alive import liveness
from ellzero.gated.counting import count_macs, count_params, count_units
from ellzero.gated.placements import Placement
from ellzero.gates.abstract import AbstractGate
from ellzero.graph.axes import Axis, Graph, Site
from ellzero.graph.plan import Mask, Plan, make_plan
from ellzero.graph.tracing import places


class Gated(nn.Module):
    """A model and its gates. In training every forward draws all gates once; in evaluation it uses their test-time
    values.

    Attributes:
        model: the user's model, shared.
        graph: what shrinks together in it.
        placements: which gates multiply and count what.
        taken: the plan of what was taken out of the model for good (`shrink`), or `None`. All that counts, and the
            gates, go on meaning the model as it was attached to.
        present: the placements as they lie on the tensors that the model has now.
        gates: the gate modules, by name ("." written as "/").
        memo: what costs worked out about this network once, emptied when it moves.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        placements: Sequence[Placement],
        gates: Sequence[AbstractGate],
        example_inputs: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        super().__init__()
        names = [p.name for p in placements]
        if len(set(names)) < len(names):
            raise ValueError(f"`where` must name each placement once, got {', '.join(names)}")
        self.liveness = liveness(graph, placements)
        self.model = model
        self.graph = graph
        self.placements = tuple(placements)
        self.gates = nn.ModuleDict({n.replace(".", "/"): g for n, g in zip(names, gates, strict=True)})
        self.example_inputs = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, example_inputs)
        reference = next(p for p in model.parameters())
        self.gates.to(reference.device, torch.float64 if reference.dtype == torch.float64 else None)
        self.taken: Plan | None = None
        self._aim()
        self.census = {
            "params": count_params(graph, self.liveness),
            "macs": count_macs(graph, self.liveness),
            "units": count_units(graph, self.liveness),
        }
        self._assumed: Tensor | None = None
        self.memo: dict[Any, Any] = {}
        self._settle()
        self.training = model.training

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of the model: `name`, `size`, `sites`, and `frozen`, a sentence or `None`."""
        return self.graph.axes

    def named_gates(self) -> Iterator[tuple[str, AbstractGate]]:
        """Yields the name and the module of every set of gates."""
        for placement, gate in zip(self.placements, self._gates(), strict=True):
            yield placement.name, gate

    def _gates(self) -> list[AbstractGate]:
        return list(self.gates.values())  # type: ignore[arg-type]

    def gate_noise(self) -> Tensor:
        """Fresh uniform noise for one draw of all gates, to be passed to a forward as `gate_noise`."""
        return gt.noise(self._gates())

    def param_groups(
        self,
        *,
        lr: float | None = None,
        gate_lr: float | None = None,
        weight_decay: float = 0.0,
        gate_weight_decay: float = 0.0,
        counted_weight_decay: float | None = None,
    ) -> list[dict[str, Any]]:
        """The two groups for an optimizer: weights, and gates with a learning rate of their own.

        Args:
            lr: learning rate of the weights; the optimizer's default if `None`.
            gate_lr: learning rate of the gates; as the weights' if `None`.
            weight_decay: of the weights.
            gate_weight_decay: of the gates.
            counted_weight_decay: if given, the weights that gates count form a third group with this decay: 0 where
                `l2_norm` acts on them.
        """
        given = {"lr": lr, "gate_lr": gate_lr, "weight_decay": weight_decay, "gate_weight_decay": gate_weight_decay}
        for key, value in {**given, "counted_weight_decay": counted_weight_decay}.items():
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"`{key}` must be a number >= 0, got {value}")
        counted = {s.tensor for p in self.placements for s in p.counts} if counted_weight_decay is not None else set()
        groups: list[dict[str, Any]] = [
            {
                "name": "weights",
                "params": [p for n, p in self.model.named_parameters() if n not in counted],
                "weight_decay": weight_decay,
            },
            {"name": "gates", "params": list(self.gates.parameters()), "weight_decay": gate_weight_decay},
        ]
        if counted:
            params = [p for n, p in self.model.named_parameters() if n in counted]
            groups.append({"name": "counted weights", "params": params, "weight_decay": counted_weight_decay})
        for group in groups:
            rate = lr if group["name"] != "gates" or gate_lr is None else gate_lr
            if rate is not None:
                group["lr"] = rate
        return groups

    # ---- what the gates say ----------------------------------------------------------------------------------------

    def prob_open(self) -> Tensor:
        """P(z ≠ 0) of all gates, one set after the other, flat."""
        return self._assumed if self._assumed is not None else gt.flat(self._gates(), lambda g, phi: g.prob_from(phi))

    def opens(self) -> Tensor:
        """Which gates are open at test time, flat."""
        return (
            self._assumed != 0
            if self._assumed is not None
            else gt.flat(self._gates(), lambda g, phi: g.value_from(phi) != 0)
        )

    def evidence(self) -> Tensor:
        """What speaks for keeping each gate open, flat; larger is more."""
        return gt.flat(self._gates(), lambda g, phi: g.evidence_from(phi))

    @contextmanager
    def assuming(self, opens: Tensor) -> Iterator[None]:
        """Lets `prob_open()` and `opens()`, and so every cost, answer as if each gate were open with this
        probability.
        """
        if opens.shape != (self.liveness.size,):
            raise ValueError(
                f"`opens` must have one entry per gate, {self.liveness.size}, got shape {tuple(opens.shape)}"
            )
        before, self._assumed = self._assumed, opens.to(self.tables["ends"])
        try:
            yield
        finally:
            self._assumed = before

    def alive(self) -> tuple[Tensor, list[Tensor]]:
        """P(alive) of every unit of the graph, and P(open) of the inputs of every weight that gets a `Select`."""
        extended = self.liveness.extend(self.prob_open(), self.tables)
        return self.liveness.units(extended, self.tables), self.liveness.inputs(extended, self.tables)

    def plan(self, *, refuse: bool = True) -> Plan:
        """What removal would leave now, by the gates' test-time values.

        Args:
            refuse: whether an axis that is closed as a whole, with nothing to carry on, raises `ClosedAxisError`
                (else one unit of it stays).
        """
        with torch.no_grad():
            extended = self.liveness.extend(self.opens().to(self.tables["ends"]), self.tables)
            units = self.liveness.units(extended, self.tables).cpu().numpy() > 0.5
            inputs = [x.cpu().numpy() > 0.5 for x in self.liveness.inputs(extended, self.tables)]
            evidence = self._unit_evidence()
        entries = dict(zip(self.liveness.entries, inputs, strict=True))
        if self.taken is not None and self._assumed is None:
            units = units & self.taken.units
        return make_plan(self.graph, units, entries=entries, evidence=evidence, refuse=refuse)

    def _unit_evidence(self) -> npt.NDArray[np.float64]:
        """For each unit the weakest of the gates that all its readers share: only used to choose among closed units.
        What was taken out cannot come back.
        """
        evidence = self.evidence().double().cpu().numpy()
        padded = np.concatenate([evidence, np.full(self.liveness.one + 2 - len(evidence), np.inf)])
        weakest = np.asarray(padded[self.liveness.common].min(1))
        return weakest if self.taken is None else np.where(self.taken.units, weakest, -np.inf)

    # ---- smaller for good ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def shrink(self, plan: Plan) -> Plan:
        """Takes units out of the model for good, in place.

        The model's tensors become smaller. Gates, their noise, costs and plans stay those of the whole network: a gate
        that nothing is left of is closed for good, and every other one keeps its number. The parameters that change
        are new ones; an optimizer has to be told.

        Args:
            plan: of the network as it was attached to, with what was taken out before. Single inputs (`selects`) and
                whole layers (`closed`) stay.

        Returns:
            What was to be done to the model as it was: the plan that also slices moments and averages of its
            parameters.

        Raises:
            ValueError: the plan brings a unit back, or takes more than units out, or there is a grouped convolution;
                nothing is changed.
        """
        for name, module in self.model.named_modules():
            if isinstance(module, _ConvNd) and module.groups > 1:  # sizes would not say any more how many groups it had
                raise ValueError(f"`{name}` is a grouped convolution, and a network with one cannot shrink in steps")
        if plan.selects or plan.closed:
            raise ValueError("`plan` must take out units and leave layers and single inputs, got one that does not")
        if self.taken is not None and (plan.units & ~self.taken.units).any():
            raise ValueError("`plan` must not bring back a unit that was taken out before, got one that does")
        step = plan.beyond(self.taken)
        step.apply(self.model)
        self.taken = plan
        self._aim()
        self._settle()
        start, gone = 0, self.gone()
        for _, gate in self.named_gates():
            size = gate.shape.numel()
            mask = torch.as_tensor(gone[start : start + size], device=gate.phi()[0].device)
            gate.close_(mask.reshape(gate.shape))
            start += size
        return step

    def gone(self) -> Mask:
        """For every gate, flat, whether all that it multiplied has been taken out."""
        parts = []
        for placement in self.present:
            mask = np.full(prod(placement.shape), self.taken is not None)
            for site in placement.multiplies:
                mask[site.units[site.units >= 0]] = False
            parts.append(mask)
        return np.concatenate(parts)

    @torch.no_grad()
    def expanded(self) -> Gated:
        """A copy in which what `shrink` took out is back, as zeros behind closed gates: the same function."""
        out = copy.deepcopy(self)
        if out.taken is None:
            return out
        out.taken.undo(out.model, self.graph.shapes)
        out.taken = None
        out._aim()
        out._settle()
        return out

    def _aim(self) -> None:
        """Works out what the gates multiply in the model as it is now."""
        plan, graph = self.taken, self.graph
        self.present = self.placements if plan is None else tuple(_left(p, plan) for p in self.placements)
        where = {t: [tuple(name.split(".")) for name in names] for t, names in places(self.model).items()}
        members = dict(self.model.named_parameters())
        self._targets: dict[str, Any] = {}
        for t in _multiplied(self.placements):
            shape = graph.shapes[t] if plan is None else tuple(members[t].shape)
            self._targets[t] = shape, where[t], _factors(t, shape, self.present)

    # ---- the forward -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, gate_noise: Tensor | None = None, **kwargs: Any) -> Any:
        """Runs the model with gated weights.

        Args:
            *args: the model's own arguments.
            gate_noise: uniform noise for the draw, flat, one entry per gate; drawn from torch's default generator if
                `None`.
            **kwargs: the model's own keyword arguments.
        """
        gates = self._gates()
        if gate_noise is not None and gate_noise.shape != (self.liveness.size,):
            shape = tuple(gate_noise.shape)
            raise ValueError(f"`gate_noise` must have shape ({self.liveness.size},), one entry per gate, got {shape}")
        z = gt.draw(gates, gate_noise) if self.training else gt.values(gates)
        if torch.compiler.is_compiling():
            # By the places that are known: `places` asks for identities, which a compiler cannot follow.
            holders = {name: [".".join(path) for path in target[1]] for name, target in self._targets.items()}
            weights = {place: w for name, w in self.gated_weights(z).items() for place in holders[name]}
            return functional_call(self.model, weights, args, kwargs, tie_weights=False)
        put: list[tuple[dict[str, Any], str, Any]] = []
        checkpointing = _forbid_checkpointing() if torch.is_grad_enabled() else None
        try:
            self._put_in_place(z, put)
            return self.model(*args, **kwargs)
        finally:
            for parameters, key, own in put:
                parameters[key] = own
            if checkpointing is not None:
                _allow_checkpointing(checkpointing)

    def gated_weights(self, z: Sequence[Tensor], model: nn.Module | None = None) -> dict[str, Tensor]:
        """The weights that gates multiply, multiplied by `z` (one tensor per set of gates).

        Args:
            z: the gates.
            model: whose weights; those of `self.model` if `None`.
        """
        members = dict((self.model if model is None else model).named_parameters())
        return {name: self._multiplied(members[name], name, z) for name in self._targets}

    def _put_in_place(self, z: Sequence[Tensor], put: list[tuple[dict[str, Any], str, Any]]) -> None:
        """Puts the gated weights where the model looks for its own, and notes in `put` what was there.

        What `torch.func.functional_call` does, for the few weights that change: it walks all parameters at each call.
        """
        for name, (shape, holders, _) in self._targets.items():
            weight: Any = None
            for *path, key in holders:
                module: Any = self.model
                for part in path:
                    module = module._modules.get(part)
                own = None if module is None else module._parameters.get(key)
                if own is None or own.shape != shape or type(own).__name__ == "DTensor":
                    raise RuntimeError(
                        f"`{name}` is not the parameter of shape {tuple(shape)} that gates were attached to "
                        "(replaced, resized or sharded since?); attach again"
                    )
                if weight is None:
                    weight = self._multiplied(own, name, z)
                put.append((module._parameters, key, own))
                module._parameters[key] = weight

    def _multiplied(self, weight: Tensor, name: str, z: Sequence[Tensor]) -> Tensor:
        factor = self._factor(name, z)
        return weight * (factor if factor.dtype == weight.dtype else factor.to(weight.dtype))

    def _factor(self, name: str, z: Sequence[Tensor]) -> Tensor:
        """What the weight `name` is multiplied by: the product of all gates on it, in a shape that broadcasts."""
        product: Tensor | None = None
        for k, (number, repeats, index, shape) in enumerate(self._targets[name][2]):
            factor = z[number]
            if index is not None:
                flat = torch.cat([factor.reshape(-1), factor.new_ones(1)])
                factor = flat[self.tables[f"factor {k} {name}"]]
            elif repeats > 1:
                factor = factor.reshape(-1, 1).expand(-1, repeats)
            if factor.shape != shape:
                factor = factor.reshape(shape)
            product = factor if product is None else product * factor
        assert product is not None
        return product

    # ---- state -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Lays out the index tables where the gates are. They are no buffers: DDP would broadcast them at every step,
        `.to(bfloat16)` round them.
        """
        home = next(self.gates.parameters())
        dtype = torch.float64 if home.dtype == torch.float64 else torch.float32
        self.tables = self.liveness.tables(home.device, dtype)
        for name, (_, _, factors) in self._targets.items():
            for k, (_, _, index, _) in enumerate(factors):
                if index is not None:
                    self.tables[f"factor {k} {name}"] = torch.as_tensor(index, device=home.device)
        self.memo = {}
        self.census_tables = {k: c.tables(home.device, dtype) for k, c in self.census.items() if c is not None}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state, or refuses one of another network and loads nothing of it."""
        known = self.state_dict().keys()
        if strict and known != state_dict.keys():
            raise ValueError(
                f"`state_dict` is of another network: missing {sorted(known - state_dict.keys())[:5]}, "
                f"unexpected {sorted(state_dict.keys() - known)[:5]}"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Torch loads what fits and complains afterwards; here nothing is loaded unless all of it fits.
        for key, own in self.state_dict().items():
            new = state_dict.get(prefix + key)
            if not isinstance(own, Tensor) or new is None:
                continue
            if new.shape != own.shape:
                raise ValueError(
                    f"`state_dict` is of another network: `{key}` has shape {tuple(new.shape)}, "
                    f"here it is {tuple(own.shape)}"
                )
            if key.startswith("gates.") and not bool(torch.isfinite(new).all()):
                raise ValueError(f"`state_dict` has numbers in `{key}` that are not finite")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _multiplied(placements: Sequence[Placement]) -> list[str]:
    return list(dict.fromkeys(s.tensor for p in placements for s in p.multiplies))


def _left(placement: Placement, plan: Plan) -> Placement:
    """The placement on sliced tensors; gates keep their numbers."""

    def cut(site: Site) -> Site:
        units = site.units
        for axis, dim in enumerate(site.dims):
            index = plan.rows.get(site.tensor, {}).get(dim)
            units = units if index is None else np.take(units, index, axis)
        if site.tensor in plan.columns and len(site.dims) > 1:
            columns = plan.columns[site.tensor]
            units = np.take_along_axis(units, columns.reshape(*columns.shape, *[1] * (units.ndim - 2)), 1)
        return replace(site, units=units)

    return replace(
        placement, multiplies=tuple(map(cut, placement.multiplies)), counts=tuple(map(cut, placement.counts))
    )


def _factors(
    tensor: str, sizes: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, int, Any, tuple[int, ...]]]:
    """For each set of gates on a weight: its number, how z is laid out (repeats, or an index), and the shape that
    broadcasts.
    """
    out = []
    for number, placement in enumerate(placements):
        for site in placement.multiplies:
            if site.tensor != tensor:
                continue
            shape = tuple(size if d in site.dims else 1 for d, size in enumerate(sizes))
            n, units = prod(placement.shape), site.units.ravel()
            repeats = units.size // n if units.size % n == 0 else 0
            in_order = repeats and np.array_equal(units, np.repeat(np.arange(n), repeats))
            shape = (
                shape[next(d for d, size in enumerate(shape) if size > 1) :] if max(shape) > 1 else (1,)
            )  # leading ones broadcast anyway
            out.append((number, repeats if in_order else 1, None if in_order else np.where(units < 0, n, units), shape))
    return out


def _forbid_checkpointing() -> tuple[Any, Any]:
    """Refuses activation checkpointing inside the model: its recomputation runs in the backward, after the gated
    weights are gone, and would silently use the dense ones. Checkpointing around the `Gated` is fine: it recomputes
    the gates too, with the same noise.
    """
    module: Any = torch.utils.checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = _Refusal, _Refusal.apply
    return before


def _allow_checkpointing(before: tuple[Any, Any]) -> None:
    module: Any = torch.utils.checkpoint
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before


class _Refusal:
    @staticmethod
    def apply(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "activation checkpointing inside a gated model recomputes with ungated weights; "
            "checkpoint around it instead: `torch.utils.checkpoint.checkpoint(gated, x)`, or compile it"
        )
