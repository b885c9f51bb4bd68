"""What a network costs: pure functions `Gated -> scalar`, in expectation over the gates or as kept now.

`l0_norm` and `l2_norm` are the papers' sums over gates, `complexity` is what the gates' family charges itself;
`params`, `macs` and `units` are of the network that `compact` would give. All of them take `kept=True` for the cost
with the test-time gates (P(z ≠ 0) and "test-time gate > 0" are different things), and `only="pattern"` for a part;
`kept(cost)` and `only(cost, pattern)` are those costs as functions. They ask a `Gated` what is open and never how a
gate works. A cost of your own is a function with the same signature, or a plain function of a `Gated` where nobody asks
for more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ellzero.gated.counting import Vector
from ellzero.gated.module import Gated
from ellzero.gated.placements import Placement
from ellzero.graph.plan import Plan
from ellzero.objectives.squares import squares

LARGE = 2**22  # entries of a table, of four bytes each, in which sums over many parts are taken at once


class Cost(Protocol):
    """A function from a `Gated` to a scalar tensor: absolute cost, differentiable unless `kept`."""

    def __call__(self, gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor: ...


def l0_norm(gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
    """The number of non-zero weights among those that gates count.

    E‖θ‖₀ = Σ_g |g| · P(z_g ≠ 0) (Louizos et al., eqs. 12 and 16). A weight that several gates count is there with the
    product of their probabilities; under `per_layer` each weight counts under its own layer's gate alone.

    Args:
        gated: the network.
        kept: count what is open at test time instead.
        only: pattern of gate names.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> from ellzero.gated.attaching import attach
        >>> dense(l0_norm, attach(net, torch.zeros(1, 2)))  # 3 gates on the second layer's inputs, 2 weights each
        6.0
    """
    p = _open(gated, kept)
    counts, shared = _counted(gated, only, p.dtype)
    total = (p * counts).sum()  # not p @ counts, which autocast would round to bfloat16
    extended = _extended(p) if shared else p
    for tensor, sites in shared.items():
        factor = _product(gated, gated.graph.shapes[tensor], sites, extended)
        total = total + factor.sum() * (prod(gated.graph.shapes[tensor]) / factor.numel())
    return total


def l2_norm(gated: Gated, *, kept: bool = False, only: str | None = None, detach_gates: bool = False) -> Tensor:
    """The squared norm of the weights that gates count, each as likely there as its gates are open.

    E‖θ̂‖₂² = Σ_g P(z_g ≠ 0) Σ_j θ̃_j² (Louizos et al., eqs. 14, 15 and 17). Where it acts, the optimizer's own weight
    decay must be 0 (`Gated.param_groups(counted_weight_decay=0)`). Weights that `Gated.shrink` took out have no norm.

    Args:
        gated: the network.
        kept: sum over what is open at test time instead.
        only: pattern of gate names.
        detach_gates: let it shrink the weights and leave the gates alone.
    """
    p = _open(gated, kept)
    extended = _extended(p.detach() if detach_gates else p)
    members = dict(gated.model.named_parameters())
    factors = {
        tensor: _product(gated, members[tensor].shape, sites, extended)
        for tensor, sites in _counting_sites(gated, only, gated.present).items()
    }
    if not factors:
        return p.new_zeros(())
    sums = squares([members[tensor].to(p.dtype) for tensor in factors], [f.shape for f in factors.values()])
    return (sums * torch.cat([f.flatten() for f in factors.values()])).sum()


def params(gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
    """The parameters of the network that `compact` would give.

    For a weight E[n_out]·E[n_in], units alive as in `ellzero.gated.alive`: a unit with several readers is alive if any
    is open, an input under a map's gate and its own if both are. `Select` costs nothing. In expectation, the channels
    that come back to make the groups of a grouped convolution equal, and queries that do beside their keys, are not
    counted, nor is the one unit that stays where a closed axis cannot be taken out; an unstructured gate counts as
    removing an input only if all gates of its column are closed, rows and columns taken as independent; so are two
    units of one weight that a placement of your own puts under one gate. `kept=True` is exact: it is the size of what
    `compact` returns.

    Args:
        gated: the network.
        kept: count what is open at test time instead.
        only: pattern of module names.
    """
    return _total("params", gated, kept, only)


def macs(gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
    """The multiply-accumulates for one example in the network that `compact` would give, with the conventions of
    `params`.

    One example is the example input divided by the size of its first tensor's leading dimension: with sequences
    first, or without a batch, absolute numbers are off by that factor, fractions are not. What comes of no input and is
    done once for a batch, as a table of positions, is done once for one example. Counted are linear layers,
    convolutions, recurrence and matrix products (attention included), at the example input's size; not `multi_dot`.
    The papers' FLOPs are two per MAC.

    Args:
        gated: the network.
        kept: count what is open at test time instead.
        only: pattern of module names.

    Raises:
        ValueError: if the axes were given by hand, so that no forward was traced.
    """
    return _total("macs", gated, kept, only)


def units(gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
    """The units that gates decide about and that are alive; inputs that a `Select` picks count as units.

    Args:
        gated: the network.
        kept: count what is open at test time instead.
        only: pattern of axis names.
    """
    return _total("units", gated, kept, only)


def complexity(gated: Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
    """What the gates' own family charges for them, summed: KL(q ‖ p) in nats, −log p, or a norm of their weights.

    It is the second part of a variational objective, loss + KL/N: `Penalty(complexity, weight=1 / N)` beside a loss
    that is a mean over examples. A family without such a penalty charges P(z ≠ 0), the expected number of open gates.

    Args:
        gated: the network.
        kept: sum over the gates that are open at test time instead.
        only: pattern of gate names.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> gated = attach(net, torch.zeros(1, 4))
        >>> bool(complexity(gated) == gated.prob_open().sum())
        True
    """
    _check(gated)
    charged = gated.complexity()
    if kept:
        charged = charged * gated.opens()
    if only is None:
        return charged.sum()
    chosen = matching([p.name for p in gated.placements], only, "a set of gates")
    parts = zip(gated.by_placement(charged).values(), chosen, strict=True)
    return torch.stack([part.sum() for part, take in parts if take]).sum()


def savings(cost: Cost, gated: Gated, opens: Tensor) -> Tensor:
    """What closing each gate alone saves where `opens` says which are open: a cost is linear in each gate, so that its
    gradient is the difference.
    """
    with torch.inference_mode(False), torch.enable_grad():
        p = opens.to(gated.tables["ends"], copy=True).requires_grad_()
        with gated.assuming(p):
            (gradient,) = torch.autograd.grad(called(cost, gated), p)
    return gradient


def kept(cost: Cost) -> Cost:
    """A cost as it is kept now, with the test-time gates: no gradient flows.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> bool(kept(macs)(gated) == macs(gated, kept=True))
        True
    """
    return partial(_taking(cost, "kept", True), kept=True)


def only(cost: Cost, pattern: str | None) -> Cost:
    """A cost of the part that a pattern names; the whole cost if it is None.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> gated = attach(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), torch.zeros(1, 4))
        >>> dense(only(params, "1"), gated)
        8.0
    """
    return cost if pattern is None else partial(_taking(cost, "only", pattern), only=pattern)


def of_parts(cost: Cost, patterns: Iterable[str | None], gated: Gated) -> list[Tensor]:
    """What a cost says about each part of a network that a pattern names."""
    patterns = tuple(patterns)
    with gated.asked_once():
        if len(patterns) > 1 and cost is l0_norm and (table := _table(gated, patterns)) is not None:
            return list((_open(gated, kept=False) * table).sum(1).unbind())
        return [called(only(cost, pattern), gated) for pattern in patterns]


def called(cost: Cost, gated: Gated) -> Tensor:
    """What a cost says about a network, or a refusal of what is no cost."""
    said = cost(gated)
    if said.ndim if isinstance(said, Tensor) else not isinstance(said, Real):
        what = f"a tensor of shape {tuple(said.shape)}" if isinstance(said, Tensor) else repr(said)
        raise TypeError(f"`cost` must return a scalar tensor, got {what} from `{name_of(cost)}`")
    return said


def _taking(cost: Cost, flag: str, value: object) -> Cost:
    """The cost, if it takes the flag."""
    if not torch.compiler.is_compiling():
        try:
            signature = inspect.signature(cost)
        except ValueError:  # some of what is not written in Python has none
            return cost
        if flag not in signature.parameters and all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
            what = "what is kept now" if flag == "kept" else "a part"
            raise TypeError(f"`cost` must take `{flag}={value!r}`, for {what}, got `{name_of(cost)}{signature}`")
    return cost


def name_of(cost: Cost) -> str:
    """What a cost is called in a message."""
    function, _ = unwrapped(cost)
    return str(getattr(function, "__name__", type(function).__name__))


def dense(cost: Cost, gated: Gated) -> float:
    """The cost of the dense network, that fractions refer to: every gate open."""
    _check(gated)
    with torch.no_grad(), gated.assuming(torch.ones(gated.liveness.size)):
        return float(called(cost, gated))


def floor(cost: Cost, gated: Gated) -> tuple[float, list[str]]:
    """The least that the gates can reach, every one of them closed, and the layers that make it, most expensive
    first.
    """
    _check(gated)
    with torch.no_grad(), gated.assuming(torch.zeros(gated.liveness.size)):
        least, layers = float(called(cost, gated)), breakdown(cost, gated)
    return least, [name for name, c in sorted(layers.items(), key=lambda item: -item[1]) if c > 0]


def breakdown(cost: Cost, gated: Gated) -> dict[str, float]:
    """What each layer (for `params`, `macs`) or axis (for `units`) costs; empty for a cost that has no such parts."""
    _check(gated)
    function, flags = unwrapped(cost)
    which = {params: "params", macs: "macs", units: "units"}.get(function)
    if which is None:
        return {}
    with torch.no_grad():
        census, terms, chosen = _terms(which, gated, flags.get("kept", False), flags.get("only"))
    out: dict[str, float] = {}
    for name, term, take in zip(census.names, terms.tolist(), chosen, strict=True):
        if take:
            out[name] = out.get(name, 0.0) + term
    return out


def unwrapped(cost: Cost) -> tuple[Any, dict[str, Any]]:
    """The function that a cost is made of, and the flags that it is called with."""
    function: Any = cost
    flags: dict[str, Any] = {}
    while isinstance(function, partial):
        function, flags = function.func, {**function.keywords, **flags}
    return function, flags


def _check(gated: Any) -> None:
    if not isinstance(gated, Gated):
        raise TypeError(f"`gated` must be what `attach` returned, got {type(gated).__name__}")


def _open(gated: Gated, kept: bool) -> Tensor:
    _check(gated)
    return gated.opens().double() if kept else gated.prob_open()


def matching(names: Sequence[str], only: str | None, what: str) -> list[bool]:
    """Which names a pattern names; refused if none."""
    chosen = [only is None or fnmatchcase(name, only) for name in names]
    if not any(chosen):
        raise ValueError(
            f"`only` must match the name of {what}, got {only!r}, and there are {', '.join(dict.fromkeys(names))}"
        )
    return chosen


def _total(which: str, gated: Gated, kept: bool, only: str | None) -> Tensor:
    _check(gated)
    _, terms, chosen = _terms(which, gated, kept, only)
    if all(chosen):
        return terms.sum()
    key = ("rows", which, only)
    if key not in gated.memo:  # once: a mask would ask the device how many there are, which no graph can
        with torch.inference_mode(False):  # of what a validation asks first, training could keep no gradient
            gated.memo[key] = torch.tensor([i for i, c in enumerate(chosen) if c], device=terms.device)
    return terms[gated.memo[key]].sum()


def _terms(which: str, gated: Gated, kept: bool, only: str | None) -> tuple[Any, Tensor, list[bool]]:
    census = gated.census[which]
    if census is None:
        raise ValueError(f"`{which}` needs a traced forward, and the axes of this network were given by hand")
    key = ("chosen", which, only)
    if key not in gated.memo:  # once: no graph can match patterns
        gated.memo[key] = [True] * len(census.names) if only is None else matching(census.names, only, "a layer")
    chosen: list[bool] = gated.memo[key]
    if kept:
        return census, kept_terms(which, gated, census.kept), chosen
    tables = gated.census_tables[which]
    terms = census.expected(gated.liveness.population(gated.prob_open(), gated.tables), tables)
    if len(census.sets) > 1:
        blocks = gated.liveness.open_blocks(gated.prob_open(), gated.tables)
        terms = terms * census.expected_blocks(blocks, tables)
    return census, terms, chosen


def kept_terms(key: Hashable, gated: Gated, count: Callable[[Plan], Vector]) -> Tensor:
    """What is kept by each layer. While gates learn, mostly the same ones are open as in the step before: then a plan
    of removal is not made again. It follows from what is open alone, but where evidence chooses the unit that stays.
    """
    opens, key = gated.opens().cpu().numpy().tobytes(), ("kept", key)
    lasting = gated.taken is None and not torch.compiler.is_compiling() and not _by_evidence(gated)
    if lasting and key in gated.memo and gated.memo[key][0] == opens:
        before: Tensor = gated.memo[key][1]
        return before
    plan = gated.plan(refuse=False)
    terms = torch.as_tensor(count(plan), device=gated.tables["ends"].device)
    spans = zip(gated.graph.axes, gated.graph.offsets, strict=False)
    if lasting and not any(a.size > 1 and plan.units[s : s + a.size].sum() == 1 for a, s in spans):
        gated.memo[key] = opens, terms
    return terms


def _by_evidence(gated: Gated) -> bool:
    """Whether evidence chooses units that come back, beside what is open, and how many are kept follows from which."""
    if "by evidence" not in gated.memo:
        graph, decided = gated.graph, np.zeros(gated.graph.offsets[-1], dtype=bool)
        decided[gated.liveness.decided] = True
        evened = any(decided[units].any() for balances in graph.balanced for units in balances)
        # As many queries of each head come back, whichever they are: that matters to single inputs alone.
        levelled = bool(gated.liveness.entries) and any(decided[s.queries].any() for s in graph.served)
        gated.memo["by evidence"] = evened or levelled
    found: bool = gated.memo["by evidence"]
    return found


def _counting_sites(
    gated: Gated, only: str | None, placements: Sequence[Placement]
) -> dict[str, list[tuple[int, Placement, Any]]]:
    """For each tensor the sites that count it: where their gates start, and the site."""
    chosen = matching([p.name for p in gated.placements], only, "a set of gates")
    out: dict[str, list[tuple[int, Placement, Any]]] = {}
    start = 0
    for placement, take in zip(placements, chosen, strict=True):
        for site in placement.counts if take else ():
            out.setdefault(site.tensor, []).append((start, placement, site))
        start += prod(placement.shape)
    return out


def _counted(gated: Gated, only: str | None, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """How many weights each gate counts alone, and the tensors that several sets of gates count."""
    key = ("counted", only, dtype)
    if key not in gated.memo and torch.compiler.is_compiling():  # which tensors are shared cannot be asked in a graph
        none = torch.zeros(gated.liveness.size, dtype=dtype, device=gated.tables["ends"].device)
        return none, _counting_sites(gated, only, gated.placements)
    if key not in gated.memo:
        counts = torch.zeros(gated.liveness.size, dtype=torch.float64)
        shared = {}
        for tensor, sites in _counting_sites(gated, only, gated.placements).items():
            start, _, site = sites[0]
            if len(sites) > 1 or (site.units < 0).any():
                shared[tensor] = sites
                continue
            each = prod(gated.graph.shapes[tensor]) / site.units.size
            counts += each * torch.bincount(torch.as_tensor(site.units).flatten() + start, minlength=len(counts))
        with torch.inference_mode(False):
            gated.memo[key] = counts.to(gated.tables["ends"].device, dtype, copy=True), shared
    found: tuple[Tensor, dict[str, Any]] = gated.memo[key]
    return found


def _table(gated: Gated, patterns: Sequence[str | None]) -> Tensor | None:
    """What `_counted` says for each pattern, a row each: one sum in place of many launches. There is
    none where several sets of gates count one tensor, and where it were large.
    """
    dtype = gated.prob_open().dtype
    key = ("counted parts", patterns, dtype)
    if key not in gated.memo:
        if torch.compiler.is_compiling() or len(patterns) * gated.liveness.size > LARGE:
            return None
        found = [_counted(gated, pattern, dtype) for pattern in patterns]
        with torch.inference_mode(False):
            table = None if any(shared for _, shared in found) else torch.stack([counts for counts, _ in found])
        gated.memo[key] = table
    lasting: Tensor | None = gated.memo[key]
    return lasting


def _extended(p: Tensor) -> Tensor:
    """With a gate behind the others that is always open, for what no gate counts."""
    return torch.cat([p, p.new_ones(1)])


def _product(gated: Gated, shape: Sequence[int], sites: Sequence[Any], extended: Tensor) -> Tensor:
    """The product of the probabilities of all gates that count a tensor of `shape`, in one that broadcasts to it."""
    out: Tensor | None = None
    for start, _, site in sites:
        key = ("index", start, site.tensor, site.dims, tuple(shape))
        index = gated.memo.get(key)
        if index is None:
            index = _places(site.units, start, extended)
            if not torch.compiler.is_compiling():  # once: a captured step cannot bring it to the device
                gated.memo[key] = index
        factor = extended[index].reshape([shape[d] if d in site.dims else 1 for d in range(len(shape))])
        out = factor if out is None else out * factor
    assert out is not None
    return out


def _places(units: np.ndarray[Any, Any], start: int, extended: Tensor) -> slice | Tensor:
    """Where the probabilities are of gates with these numbers, by the first one's place; a slice if in a row."""
    if not torch.compiler.is_compiling() and units.size and units.min() >= 0 and (np.diff(units.ravel()) == 1).all():
        return slice(start + int(units.flat[0]), start + int(units.flat[-1]) + 1)
    with torch.inference_mode(False):
        index = torch.as_tensor(units, device=extended.device)
        return torch.where(index < 0, len(extended) - 1, index + start)
