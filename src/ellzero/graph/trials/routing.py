"""`routed(model, example)`: routers of a mixture get a share for each expert, so that whole experts can close.

No weight of a router closes an expert: a row of zeros gives the logit zero, and the softmax goes over all. A share
does: its logarithm is added to the logit, so that 1 changes nothing, and 0 leaves the others as if they were alone. A
gate multiplies the share; closed, the expert goes, and its row of the router with it. This file knows no gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ellzero.graph.axes import Axis, Graph
from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.rules.shapes import BY_NUMBER
from ellzero.graph.tracing import trace

M = TypeVar("M", bound=nn.Module)
SHARES = "shares"  # where a router has its `Shares`
_ON_THE_WAY = ("to", "_to_copy", "clone", "contiguous", "view", "reshape", "softmax", "sigmoid", "add")
_BY_SIGMOID = (
    " after a sigmoid, where a closed expert's score is not the lowest; units of all its experts can go as it is, and "
    "the mixture as a whole by `where=l0.shrinkable(blocks=True)`"
)
_HINT = ", which `l0.routed` may do away with if they are experts"
_LIBRARY = torch.library.Library("ellzero", "FRAGMENT")
_LIBRARY.define("with_shares(Tensor logits, Tensor share) -> Tensor")


@torch.library.impl(_LIBRARY, "with_shares", "CompositeImplicitAutograd")
def _with_shares(logits: Tensor, share: Tensor) -> Tensor:
    """Logits plus the logarithm of shares; of a share that is zero, far below all others, and no infinity: where all
    are closed, a softmax of these has numbers still.
    """
    share, about = share.to(logits.dtype), torch.finfo(logits.dtype)
    return logits + torch.where(share > 0, share.clamp_min(about.tiny).log(), about.min / 2)


@final
class Shares(nn.Module):
    """The share that each expert of a router may have: a child of the router, which is trained by gates alone."""

    def __init__(self, experts: int, like: Tensor) -> None:
        super().__init__()
        self.open = nn.Parameter(torch.ones(experts, dtype=like.dtype, device=like.device), requires_grad=False)
        self.within: list[_Sharing] = []

    def forward(self, logits: Tensor) -> Tensor:
        out: Tensor = torch.ops.ellzero.with_shares(logits, self.open)
        return out

    def behind(self, layer: nn.Module, args: Any, out: Tensor) -> Any:
        """The forward hook of a linear layer."""
        return self(out)

    def begin(self, router: nn.Module, args: Any) -> None:
        """The forward pre-hook of a router with a forward of its own."""
        self.within.append(_Sharing(self, router))
        self.within[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(self, router: nn.Module, args: Any, out: Any) -> None:
        """Its forward hook."""
        self.within.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Sharing(TorchFunctionMode):
    """Gives shares to the logits that a router computes by its weight."""

    def __init__(self, shares: Shares, router: nn.Module) -> None:
        super().__init__()
        self.shares, self.router = shares, router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        weight: Any = self.router.weight  # or a copy of it in another type
        return self.shares(out) if func is F.linear and args[1].shape == weight.shape else out


def routed(model: M, example_inputs: Any) -> M:
    """A copy of the model, the same function, whose routers have a share for each expert: then experts can close.

    A router is a linear layer, or a module with a weight, whose logits go through a softmax and a `topk`, or through a
    `topk` alone, and then pick matrices of parameters.

    Args:
        model: it is left as it is.
        example_inputs: as for `attach`.

    Returns:
        A network to attach gates to: `l0.attach(l0.routed(model, x), x)`. Its routers have one more key each,
        `shares.open`, ones that gates multiply and that no optimizer moves.

    Raises:
        ValueError: there is no such router, or its experts cannot go.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    found = dict(_routers(trace(model, example_inputs)))
    why = "no logits of a linear map go through a softmax and a `topk`"
    if found:
        graph = trace(_with(model, found), example_inputs)
        free = {site.tensor for a in graph.axes if a.frozen is None for site in a.closing}
        stuck = {site.tensor: a.frozen for a in graph.axes for site in a.sites if a.frozen}
        names = {path: f"{path}.{SHARES}.open".lstrip(".") for path in found}
        why = next((str(stuck[name]) for name in names.values() if name in stuck), why)
        found = {path: weight for path, weight in found.items() if names[path] in free}
        if not found and _scored_by(graph, "sigmoid"):
            why += _BY_SIGMOID
    if not found:
        raise ValueError(f"`model` has no router whose experts could go: {why}")
    return _with(model, found)


def hinted(graph: Graph) -> Graph:
    """The graph in which experts that cannot go, and what scores them, tell what may help."""
    routers = {weight for path, weight in _routers(graph) if f"{path}.{SHARES}.open".lstrip(".") not in graph.shapes}
    sizes = {graph.shapes[weight][0] for weight in routers}

    def told(axis: Axis) -> Axis:
        scores = any(site.tensor in routers and site.dims == (0,) for site in axis.sites)
        picked = axis.size in sizes and (axis.frozen or "").endswith(BY_NUMBER)
        return replace(axis, frozen=f"{axis.frozen}{_HINT}") if axis.frozen and (scores or picked) else axis

    return graph.with_axes(map(told, graph.axes)) if routers else graph


def without_shares(model: M) -> M:
    """The model as it was before `routed`, if it has shares: a copy without them.

    Raises:
        ValueError: some are not 1.
    """
    held = {path: m for path, m in model.named_modules() if isinstance(m, Shares)}
    for path, shares in held.items():
        if bool((shares.open != 1).any()):
            raise ValueError(f"the shares of `{path}` must all be 1 to be left out, got {shares.open.tolist()}")
    out = duplicate(model) if held else model
    for path in held:
        router = out.get_submodule(path.rpartition(".")[0])
        own = router._modules.pop(SHARES)
        for hooks in (router._forward_pre_hooks, router._forward_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) is own]:
                del hooks[key]
                router._forward_hooks_always_called.pop(key, None)
    return out


def _routers(graph: Graph) -> Iterator[tuple[str, str]]:
    """The modules that compute logits of experts, and the weight by which each does."""
    users: dict[int, list[int]] = {}
    for k, step in enumerate(graph.steps):
        for i in step.inputs:
            users.setdefault(i, []).append(k)

    def picks(k: int) -> bool:
        steps = ((u, graph.steps[u].op) for u in users.get(k, ()))
        return any(op == "topk" or (op in _ON_THE_WAY and picks(u)) for u, op in steps)

    for k, step in enumerate(graph.steps):
        weight = graph.steps[step.inputs[1]] if step.op == "linear" else step
        while weight.op in ("to", "_to_copy"):
            weight = graph.steps[weight.inputs[0]]
        if weight.tensor and weight.tensor == f"{step.module}.weight".lstrip(".") and picks(k):
            yield step.module, weight.tensor


def _scored_by(graph: Graph, op: str) -> bool:
    """Whether logits with shares go through an operation."""
    return any(step.op == op and any(graph.steps[i].op == "with_shares" for i in step.inputs) for step in graph.steps)


def _with(model: M, routers: Iterable[str]) -> M:
    out = duplicate(model)
    for path in routers:
        put_shares(out.get_submodule(path))
    return out


def put_shares(router: nn.Module) -> None:
    """Gives a router a share for each expert, in place."""
    weight = router.get_parameter("weight")
    shares = Shares(len(weight), weight)
    router.add_module(SHARES, shares)
    if isinstance(router, nn.Linear):
        router.register_forward_hook(shares.behind)
    else:
        router.register_forward_pre_hook(shares.begin)
        router.register_forward_hook(shares.end, always_call=True)
