"""What is left of a network, as plain data: units by axis, how the gates are spread, and the first layer as pictures.

`look` takes a network and gives a `Look`; every number of a page that is not in the run's files comes from here. How
the network was trained, and how any of it is drawn, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ellzero.experiments.recipe import Recipe
from ellzero.gated.module import Gated
from ellzero.gates.abstract import AbstractGate, NoExpectation
from ellzero.gates.distributions import HardConcrete
from ellzero.gates.hard_concrete import HardConcreteGate
from ellzero.objectives import costs
from ellzero.out.reporting import AxisRow, Report, report

BINS = 20  # of a histogram over (0, 1), the two ends apart
_MOST_TILES = 20  # what a screen can show


@final
@dataclass(frozen=True)
class Spread:
    """How the gates of a placement are spread over [0, 1]: shares in `BINS` bins between and one for either end.

    Args:
        name: of the placement.
        gates: how many there are.
        kept: shares by their values at test time.
        expected: shares by the hard concrete distribution, the mean over the gates; None for other families.
    """

    name: str
    gates: int
    kept: list[float]
    expected: list[float] | None


@final
@dataclass(frozen=True)
class Picture:
    """Tiles of equal size: filters, or one map.

    Args:
        tiles: (tiles, height, width).
        names: one for each.
        what: in words.
        kept: how many filters are left, or gates open at test time; there may be more than are shown.
        dense: of how many.
    """

    tiles: npt.NDArray[np.float64]
    names: list[str]
    what: str
    kept: int
    dense: int


@final
@dataclass(frozen=True)
class Look:
    """What is left of a network.

    Args:
        epoch: epochs that it was trained for.
        parameters: of the dense network.
        bytes_dense: weights and buffers of the dense network.
        report: dense, expected and kept by axis; None without gates.
        columns: axes in the order of the network, and inputs that a layer picks one by one.
        spreads: of each placement.
        gate_map: P(open) of input gates as a picture, where the gates are those of an image's pixels.
        filters: of the first layer, those that are left.
        dropout: share of the MACs with the keep rates that the gates start from.
        steps_per_epoch: as far as known.
    """

    epoch: int
    parameters: int
    bytes_dense: int
    report: Report | None = None
    columns: list[AxisRow] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    gate_map: Picture | None = None
    filters: Picture | None = None
    dropout: float | None = None
    steps_per_epoch: int | None = None


@torch.no_grad()
def look(
    network: nn.Module,
    recipe: Recipe | None = None,
    shape: Sequence[int] | None = None,
    epoch: int = 0,
    steps_per_epoch: int | None = None,
) -> Look:
    """Looks at a network.

    Args:
        network: a `Gated`, or a network without gates.
        recipe: with which it was trained, for the rates that its gates started from.
        shape: channels, height and width of the images that it is fed with; None where it is not fed with images.
        epoch: epochs that it was trained for.
        steps_per_epoch: of this training, if known.

    Example:
        >>> from ellzero.gated.attaching import attach
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> [(c.name, c.dense, c.kept) for c in look(attach(net, torch.zeros(1, 4))).columns]
        [('0.input', 4, 4), ('0', 3, 3), ('2', 2, 2)]
    """
    dense = network.model if isinstance(network, Gated) else network
    size = sum(t.numel() * t.element_size() for t in dense.state_dict().values())
    whole = sum(p.numel() for p in dense.parameters())
    if not isinstance(network, Gated):
        return Look(epoch, whole, size, filters=_filters(dense, None, shape), steps_per_epoch=steps_per_epoch)
    made = report(network)
    return Look(
        epoch,
        whole,
        size,
        report=made,
        columns=_columns(network, made),
        spreads=[spread(name, gate) for name, gate in network.named_gates()],
        gate_map=_gate_map(network, shape),
        filters=_filters(dense, network, shape),
        dropout=None if recipe is None else _with_dropout(network, recipe),
        steps_per_epoch=steps_per_epoch,
    )


def _columns(gated: Gated, made: Report) -> list[AxisRow]:
    """In the order of the parameters; what a layer reads comes before what it writes."""
    position = {name: number for number, (name, _) in enumerate(gated.model.named_parameters())}
    last = len(position)

    def place(axis: Any) -> float:
        return min((2 * position.get(s.tensor, last) + (s.role != "reads") for s in axis.sites), default=2 * last)

    places = {axis.name: place(axis) for axis in gated.axes}
    picked = {row.name: row for row in made.inputs}
    found: list[tuple[float, AxisRow]] = []
    for row in made.axes:
        single = picked.pop(row.name.removesuffix(".input"), None) if row.name.endswith(".input") else None
        if single is not None:  # the network's input stays as it is, and the layer picks from it
            row = replace(row, expected=single.expected, kept=single.kept, state="gated")
        found.append((places[row.name], row))
    for name, single in picked.items():
        inputs = AxisRow(f"{name} inputs", single.dense, single.expected, single.kept, "gated", None)
        found.append((places.get(name, 2.0 * last) - 0.5, inputs))
    return [column for _, column in sorted(found, key=lambda pair: pair[0])]


def spread(name: str, gate: AbstractGate) -> Spread:
    """How the gates of a placement are spread over [0, 1]."""
    value = gate.value().double().flatten()
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    inside = value[(value > 0) & (value < 1)]
    between = torch.histogram(inside.cpu(), edges).hist
    kept = torch.cat([(value <= 0).sum()[None].cpu(), between, (value >= 1).sum()[None].cpu()]) / value.numel()
    expected = None
    if isinstance(gate, HardConcreteGate):
        beta = gate.beta if isinstance(gate.beta, float) else gate.beta.double().expand(gate.shape).flatten()
        q = HardConcrete(gate.log_alpha.double().flatten(), beta, gate.gamma, gate.zeta)
        below = torch.stack([q.cdf(edge).mean() for edge in edges[:-1]])  # P(z ≤ edge), at 0 the atom alone
        one = q.prob_one.mean()
        expected = torch.cat([below[:1], below.diff(), (1 - one - below[-1])[None], one[None]]).cpu().tolist()
    return Spread(name, value.numel(), kept.tolist(), expected)


def _with_dropout(gated: Gated, recipe: Recipe) -> float | None:
    """The share of its MACs that the network needs whose units are there with the rates that its gates start from."""
    if gated.graph.products is None:
        return None
    keep = [torch.full((gate.shape.numel(),), 1 - recipe.drop_rate(name)) for name, gate in gated.named_gates()]
    with gated.assuming(torch.cat(keep).to(next(gated.parameters()).device)):
        return float(costs.macs(gated)) / float(costs.dense(costs.macs, gated))


# ---------------------------------------------------------------- the first layer


def _first_layer(model: nn.Module, shape: Sequence[int] | None) -> tuple[str, nn.Linear | nn.Conv2d] | None:
    """With its name; None where it does not read images."""
    if shape is None or len(shape) != 3:
        return None
    return next(((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)


def _on_inputs(gated: Gated, layer: str, size: int) -> list[AbstractGate]:
    """The gates that multiply the inputs of a layer one by one."""
    gates, weight = dict(gated.named_gates()), f"{layer}.weight".lstrip(".")
    return [
        gates[placement.name]
        for placement in gated.placements
        if any(site.tensor == weight and site.dims == (1,) for site in placement.multiplies)
        and placement.shape == (size,)
    ]


def _gate_map(gated: Gated, shape: Sequence[int] | None) -> Picture | None:
    """Gates that act on the first layer's inputs one by one, if these are the pixels of an image."""
    first = _first_layer(gated.model, shape)
    found = _on_inputs(gated, first[0], math.prod(shape)) if first is not None and shape is not None else []
    if not found or shape is None:
        return None
    try:
        shown, what = found[0].prob_open(), "P(open)"
    except NoExpectation:
        shown, what = found[0].value(), "value at test time"
    names = [""] if shape[0] == 1 else [f"channel {c}" for c in range(shape[0])]
    return Picture(_array(shown.reshape(*shape)), names, what, int(found[0].open().sum()), shown.numel())


def _filters(model: nn.Module, gated: Gated | None, shape: Sequence[int] | None) -> Picture | None:
    """Weights of the first layer as pictures, those of units that are left, by falling norm."""
    first = _first_layer(model, shape)
    if first is None or shape is None:
        return None
    name, layer = first
    weight = layer.weight.double().clone()
    if isinstance(layer, nn.Linear) and weight.shape[1] != math.prod(shape):
        return None
    units = np.arange(weight.shape[0])
    if gated is not None:
        for gate in _on_inputs(gated, name, weight.shape[1]):
            weight = weight * gate.value().double().reshape(1, -1, *[1] * (weight.ndim - 2))
        kept = gated.plan(refuse=False).rows.get(f"{name}.weight".lstrip("."), {}).get(0)
        units = units if kept is None else np.asarray(kept)
    if not len(units):
        return None
    pictures = weight.reshape(-1, *shape) if isinstance(layer, nn.Linear) else weight
    norms = weight.flatten(1).norm(dim=1)[units.tolist()].cpu().numpy()
    chosen = units[np.argsort(-norms, kind="stable")[:_MOST_TILES]]
    tiles = _array(pictures.mean(1)[chosen.tolist()])  # over the channels
    return Picture(tiles, [str(u) for u in chosen], name, len(units), weight.shape[0])


def _array(values: Tensor) -> npt.NDArray[np.float64]:
    return np.asarray(values.double().cpu().numpy())
