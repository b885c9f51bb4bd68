"""Branches that can go as a whole: attention or feed-forward of a transformer, the convolutions of a ResNet's block.

A branch is added to a way around it, and ends with parameters that it is linear in: with zeros there it adds zeros.
What only it uses goes with it: the modules all of whose operations feed nothing else. This file finds them in the
operations of a forward and in the modules that run them. Whether one can go is tried out with all else
(`rehearsal.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ellzero.graph.axes import Block, Graph, Site, Step
from ellzero.graph.forwards.copying import lean
from ellzero.graph.rules.closing import KEEPS
from ellzero.graph.standins.layers import CONTRACTING
from ellzero.graph.tracing import Inputs, mode, places, run, run_hollow
from ellzero.graph.trials.running import seeded

_SUMS = ("add", "sub", "subtract")
# Linear in all the parameters behind their first argument.
_LINEAR = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "conv_transpose1d",
    "conv_transpose2d",
    "matmul",
    "mm",
)
_NORMS = ("batch_norm", "layer_norm", "rms_norm", "group_norm", "instance_norm")
# A norm that is written out: what comes in through it has the same size whatever the gate, until there is nothing.
_ROOTS = ("rsqrt", "reciprocal", "pow")
_KEEPS = KEEPS - {"rms_norm", "norm", "linalg_vector_norm", "var", "std"}
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_CUTS = ("chunk", "split", "split_with_sizes", "unbind")


def found(model: nn.Module, graph: Graph, inputs: Inputs) -> tuple[Block, ...]:
    """The branches that might go as a whole."""
    steps = _Steps(graph.steps, graph.parameters)
    branches = list(steps.branches())
    if not branches:
        return ()
    modules = _Modules(model, graph, inputs, steps)
    made = [block for own, ends in branches if (block := modules.block(own, ends)) is not None]
    short = Counter(_around(block) for block in made)
    names = [around if short[around := _around(block)] == 1 and around else block.name for block in made]
    again = [f"#{names[:k].count(name) + 1}" if name in names[:k] else "" for k, name in enumerate(names)]
    return tuple(replace(block, name=f"{name}.block{n}") for block, name, n in zip(made, names, again, strict=True))


def _around(block: Block) -> str:
    """The innermost module that holds all modules of a block."""
    paths = [path.split(".") for path in block.layers]
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


class _Steps:
    """The operations of a forward that an output depends on, and what uses what each of them makes."""

    def __init__(self, steps: tuple[Step, ...], parameters: tuple[str, ...]) -> None:
        self.steps, self.parameters = steps, frozenset(parameters)
        self.users: list[list[int]] = [[] for _ in steps]
        self.told = [False] * len(steps)  # whether it depends on the input
        seen = [step.is_output for step in steps]
        steps = self.steps = tuple(replace(s, inputs=tuple(self._past(i, s.module) for i in s.inputs)) for s in steps)
        for k, step in enumerate(steps):
            self.told[k] = step.is_input or any(self.told[i] for i in step.inputs)
        for k in reversed(range(len(steps))):
            for i in steps[k].inputs if seen[k] else ():
                self.users[i].append(k)
                seen[i] = True

    def _past(self, i: int, module: str) -> int:
        """Step `i`, or what it was given if it is a cast of another module: one that changes nothing gives it back."""
        step = self.steps[i]
        cast = step.op in ("to", "_to_copy") and step.module and not f"{module}.".startswith(f"{step.module}.")
        return self._past(step.inputs[0], module) if cast else i

    def branches(self) -> Iterator[tuple[set[int], list[str]]]:
        """The steps of each branch, with the parameters that it ends with."""
        for k, step in enumerate(self.steps):
            if step.op not in _SUMS or len(step.inputs) != 2 or not self.users[k]:
                continue
            for around, branch in (step.inputs, step.inputs[::-1]):
                if self.leads_around(around, branch, k):
                    for end, at in self.terms(branch, k):
                        own = self.own(end, at)
                        ends = self.ends(end, own) if any(self.steps[i].contracts for i in own) else None
                        if ends:
                            yield own, list(dict.fromkeys(ends))
                    break

    def own(self, end: int, at: int) -> set[int]:
        """The steps that feed nothing but step `at` through `end`, that with them."""
        if self.users[end] != [at] or not self.told[end]:
            return set()
        own, left = {end}, [end]
        while left:
            for i in self.steps[left.pop()].inputs:
                if i not in own and not self.steps[i].is_input and own.issuperset(self.users[i]):
                    own.add(i)
                    left.append(i)
        return own

    def leads_around(self, around: int, branch: int, at: int) -> bool:
        """Whether a sum goes on without its branch: what feeds the way around it feeds the branch as well, and the way
        around has at most one layer, and fewer than the branch.
        """
        own, short = self.own(branch, at), self.own(around, at)
        fed = {i for k in own for i in self.steps[k].inputs if i not in own and self.told[i]}
        beside = {i for k in short for i in self.steps[k].inputs if i not in short and self.told[i]} or {around}
        layers = sum(self.steps[k].contracts for k in short)
        return bool(own) and beside <= fed and layers <= 1 and layers < sum(self.steps[k].contracts for k in own)

    def terms(self, branch: int, at: int) -> list[tuple[int, int]]:
        """A branch and the step that it is added at; of one that is itself a sum of two, each."""
        step = self.steps[branch]
        alone = all(self.users[i] == [branch] and not self.steps[i].tensor for i in step.inputs)
        if step.op in _SUMS and len(step.inputs) == 2 and alone:
            return [term for i in step.inputs for term in self.terms(i, branch)]
        return [(branch, at)]

    def ends(self, k: int, own: set[int]) -> list[str] | None:
        """The parameters that make what a step gives zero, if they are zero; None if there are none."""
        step = self.steps[k]
        if k not in own:
            return None
        if step.tensor:
            return [step.tensor] if step.tensor in self.parameters else None
        if step.op in _LINEAR or step.op in _NORMS:
            given = [self.steps[i].tensor for i in step.inputs[1:]]
            mine = [tensor for tensor in given if tensor in self.parameters]
            at = {i for i in step.inputs if self.steps[i].tensor in mine}
            fits = bool(mine) and all(given) and given[0] == mine[0] and own.issuperset(at)
            return mine if fits else None
        if step.op in _GROUPED:
            weight = step.inputs[1]
            return self.ends(self.steps[weight].inputs[0] if self.steps[weight].op == "transpose" else weight, own)
        if step.op == "addmm":
            parts = [self.ends(i, own) for i in (step.inputs[0], step.inputs[-1]) if self.steps[i].tensor]
            return [name for part in parts for name in part or []] if len(parts) == 2 and all(parts) else None
        if step.op in ("mul", "multiply") and len(step.inputs) == 2:
            tensors = [i for i in step.inputs if self.steps[i].tensor]
            if not tensors and any(self.steps[i].op in _ROOTS for i in step.inputs):
                return None
            return next(filter(None, (self.ends(i, own) for i in (*tensors, *step.inputs))), None)
        if (step.op in _SUMS and len(step.inputs) == 2) or step.op in ("cat", "concat"):
            parts = [self.ends(i, own) for i in step.inputs]
            return [name for part in parts for name in part or []] if all(parts) else None
        if not step.inputs:
            return None
        cut = step.op.endswith("getitem>") and self.steps[step.inputs[0]].op in _CUTS
        begins = step.op in _SUMS and step.numbers[:1] == (0,)  # as `sum` does
        return self.ends(step.inputs[0], own) if step.op in _KEEPS or cut or begins else None


class _Modules:
    """The modules of a model, the steps that each runs, and what it is given and gives."""

    def __init__(self, model: nn.Module, graph: Graph, inputs: Inputs, steps: _Steps) -> None:
        self.model, self.graph = model, graph
        self.users = steps.users
        self.runs: dict[str, set[int]] = defaultdict(set)
        for k, step in enumerate(graph.steps):
            if self.users[k] and not step.is_input and not step.tensor:
                parts = step.module.split(".") if step.module else []
                for n in range(len(parts) + 1):
                    self.runs[".".join(parts[:n])].add(k)
        several = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self.shared = {path for path, m in model.named_modules(remove_duplicate=False) if several[id(m)] > 1}
        self.held = places(model)
        self.like = _alike(model, inputs)

    def block(self, own: set[int], ends: list[str]) -> Block | None:
        """What of a model is a branch with these steps; None where something would be left that multiplies."""
        layers = self._going("", own)
        if not layers:
            return None
        block = Block("", (), layers, frozenset(), ())
        if any(self.graph.steps[k].contracts and not block.holds(self.graph.steps[k].module) for k in own):
            return None
        if any(block.holds(path) for path in self.shared):
            return None
        tensors = {
            name
            for name in self.graph.shapes
            if all(block.holds(place.rpartition(".")[0]) for place in self.held.get(name, [name]))
        }
        used = {self.graph.steps[k].tensor for k in own} | tensors
        axes = [k for k, axis in enumerate(self.graph.axes) if all(site.tensor in used for site in axis.sites)]
        held = {site.tensor for k in axes for site in self.graph.axes[k].sites} & set(self.graph.parameters)
        sizes = [self.graph.shapes[name] for name in ends]
        if not held <= tensors or not all(sizes) or any(len(self.held[name]) > 1 for name in ends):
            return None
        sites = (
            Site(n, (0,), np.zeros(size[0], dtype=np.int64), "writes") for n, size in zip(ends, sizes, strict=True)
        )
        last = next((path for path in layers if ends[0].startswith(f"{path}.")), ends[0].rpartition(".")[0] or ends[0])
        return Block(last, tuple(sites), layers, frozenset(tensors), tuple(axes))

    def _going(self, path: str, own: set[int]) -> dict[str, int] | None:
        """The modules at and below `path` that go; None where one would have to that cannot."""
        runs, module = self.runs[path], self.model.get_submodule(path)
        if runs.isdisjoint(own):
            return {}
        if runs <= own:
            multiplies = any(self.graph.steps[k].contracts for k in runs)
            holds = any(True for _ in (*module.parameters(), *module.buffers()))
            if not multiplies and not holds:
                return {}
            if isinstance(module, CONTRACTING):
                return {path: -1} if f"{path}.weight" in self.graph.shapes else None
            if path in self.like:
                return {path: self.like[path][0]} if self.like[path][1] or not holds else self._below(path, own)
        return self._below(path, own)

    def _below(self, path: str, own: set[int]) -> dict[str, int] | None:
        parts = [
            self._going(f"{path}.{name}".lstrip("."), own)
            for name, _ in self.model.get_submodule(path).named_children()
        ]
        if any(part is None for part in parts):
            return None
        return {key: number for part in parts for key, number in (part or {}).items()}


@torch.no_grad()
def _alike(model: nn.Module, inputs: Inputs) -> dict[str, tuple[int, bool]]:
    """Of each module of how many things it gives a tuple, 0 for a tensor, and whether the first of them is as large as
    the first tensor that it is given; of those that give something else, nothing.
    """
    found: dict[str, set[tuple[int, bool] | None]] = defaultdict(set)

    def note(path: str, _: Any, args: Any, kwargs: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) and out else out
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        kind = None
        if isinstance(first, Tensor) and given is not None and given.is_floating_point():
            kind = len(out) if isinstance(out, tuple) else 0, first.shape == given.shape
        found[path].add(kind)

    model = lean(model)
    for way in (run_hollow, run):
        found.clear()
        try:
            with ExitStack() as hooks, mode(model, False), seeded(model):
                for path, module in model.named_modules():
                    hook = module.register_forward_hook(partial(note, path), with_kwargs=True)
                    hooks.callback(hook.remove)
                way(model, inputs)
            break
        except Exception:
            continue
    seen = {path: next(iter(kinds)) for path, kinds in found.items() if len(kinds) == 1}
    return {path: kind for path, kind in seen.items() if kind is not None}
