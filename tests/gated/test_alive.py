"""Which units are alive, in every state of the gates, against the definition: an entry that reads it is not zero."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ellzero as l0
from ellzero.gated.alive import liveness
from ellzero.gated.multiplying import multiplied
from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph, Site
from support.oracles import every_state, open_exactly, scattered
from support.zoo import Concat, ConvNet, Flattened, Grouped, Residual, Shared, SquareStream, Tied, TwoReaders, mlp


def by_definition(gated: l0.Gated) -> tuple[Tensor, list[Tensor]]:
    """Alive units, and the inputs that each weight with a `Select` still reads, from the zeros of the gated weights."""
    z = [gate.value() for _, gate in gated.named_gates()]
    weights: dict[str, Tensor] = dict(gated.model.named_parameters())
    for name, target in gated._targets.items():
        weights[name] = multiplied(weights[name], target, z, gated.tables)

    def is_read(site: Site, unit: int) -> bool:
        entries = weights[site.tensor].movedim(site.dims, tuple(range(len(site.dims))))
        return bool((entries[torch.as_tensor(site.units == unit)] != 0).any())

    # Where a norm looks at all units, one is alive if it is written.
    sites = [a.closing or a.readers for a in gated.axes]
    units = [
        a.frozen is not None or any(is_read(s, u) for s in at)
        for a, at in zip(gated.axes, sites, strict=True)
        for u in range(a.size)
    ]
    inputs = [(weights[t].movedim(d, 0).flatten(1) != 0).any(1) for t, d in gated.liveness.entries]
    return torch.tensor(units), inputs


def mean_over_states(gated: l0.Gated) -> list[Tensor]:
    """By enumeration: P(alive) of every unit, then P(open) of the inputs of each weight with a `Select`."""
    means: list[Tensor] = []
    for state, weight in list(every_state(gated)):
        open_exactly(gated, state)
        alive, inputs = by_definition(gated)
        with gated.assuming(torch.tensor(state)):  # the same formula at p = 0 and 1 says what is kept
            certain, certain_inputs = gated.alive()
        assert torch.equal(certain != 0, alive)
        assert all(torch.equal(a != 0, b) for a, b in zip(certain_inputs, inputs, strict=True))
        means = means or [torch.zeros(len(x), dtype=torch.float64) for x in (alive, *inputs)]
        for mean, x in zip(means, (alive, *inputs), strict=True):
            mean += weight * x
    return means


CASES: list[tuple[str, nn.Module, tuple[int, ...], dict[str, Any]]] = [
    ("chain", mlp(2, 3, 2, 2), (2,), {}),
    ("inputs too", mlp(2, 3, 2), (2,), {"where": l0.per_layer}),
    ("norms", ConvNet(), (1, 4, 4), {}),
    ("stream", Residual(), (2,), {"where": l0.shrinkable(streams=True)}),
    ("stream with readers of their own", SquareStream(), (2,), {"where": l0.per_layer}),
    ("maps and single inputs", Flattened(), (1, 4), {"where": l0.per_layer}),
    ("concat", Concat(), (2,), {}),
    ("groups", Grouped(), (1, 3), {}),
    ("shared", Shared(), (3,), {}),
    ("tied", Tied(), (3,), {}),
    ("unstructured", mlp(2, 3, 2), (2,), {"where": l0.weights("2.weight")}),
    ("norm", nn.Sequential(nn.Linear(2, 3), nn.RMSNorm(3), nn.Linear(3, 2)), (2,), {}),
    (
        "parts",
        nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
        (2,),
        {"where": lambda graph: [p for p in l0.shrinkable(parts=True)(graph) if p.name != "0.inputs"]},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape", "options"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_alive_is_the_probability_that_something_reads_the_unit(
    model: nn.Module, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    gated = scattered(l0.attach(model.double(), torch.randn(2, *shape, dtype=torch.float64), **options))
    with torch.no_grad():
        units, inputs = gated.alive()
        torch.testing.assert_close([units, *inputs], mean_over_states(gated))


def test_the_closed_forms_of_the_docstring() -> None:
    """Map alive p_m (1 − Π(1 − p_j)), input alive p_m p_j; a unit with two readers 1 − (1 − p)(1 − q)."""
    gated = scattered(l0.attach(Flattened(), torch.zeros(2, 1, 4), where=l0.per_layer))
    p = {name: gate.prob_open().detach() for name, gate in gated.named_gates()}
    with torch.no_grad():
        units, inputs = gated.alive()
    (axis,) = (k for k, a in enumerate(gated.axes) if a.name == "conv2")
    start = gated.graph.offsets[axis]
    torch.testing.assert_close(units[start : start + 2], p["conv2"] * (1 - (1 - p["fc"].reshape(2, 2)).prod(1)))
    torch.testing.assert_close(
        inputs[list(gated.liveness.entries).index(("fc.weight", 1))], p["conv2"].repeat_interleave(2) * p["fc"]
    )


@st.composite
def placements(draw: st.DrawFn) -> list[Placement]:
    """Any gates on two readers of three units: shared by readers or units, several on one input, none on another."""
    out = []
    for number in range(draw(st.integers(1, 3))):
        gates = draw(st.integers(1, 2))
        sites = []
        for tensor in draw(st.sampled_from([("left",), ("right",), ("left", "right")])):
            units = draw(st.lists(st.integers(-1, gates - 1), min_size=3, max_size=3))
            sites.append(Site(f"{tensor}.weight", (1,), np.array(units), "reads"))
        out.append(Placement(f"set {number}", (gates,), tuple(sites), tuple(sites)))
    return out


TWO = TwoReaders().double()
TWO_GRAPH = l0.attach(TWO, torch.zeros(2, 2, dtype=torch.float64)).graph


@pytest.mark.slow
@given(placements(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_any_placement_is_exact_or_refused(chosen: list[Placement], seed: int) -> None:
    gates = [l0.HardConcreteGate(p.shape) for p in chosen]
    try:
        gated = l0.Gated(TWO, TWO_GRAPH, chosen, gates, ((torch.zeros(2, 2, dtype=torch.float64),), {}))
    except ValueError as error:
        assert "one gate decide about some of the entries" in str(error)  # noqa: PT017
        return
    torch.manual_seed(seed)
    scattered(gated)
    with torch.no_grad():
        units, inputs = gated.alive()
        torch.testing.assert_close([units, *inputs], mean_over_states(gated))


def test_a_gate_beside_others_on_some_readers_is_refused() -> None:
    """Pairs of three readers share a gate each: the product formula does not hold, and must not be used."""

    def site(tensor: str) -> Site:
        return Site(f"{tensor}.weight", (1,), np.arange(3), "reads")

    pair = (site("left"), site("right"))
    sets = [Placement("both", (3,), pair, pair), Placement("own", (3,), (site("left"),), (site("left"),))]
    live = liveness(TWO_GRAPH, sets)  # one common gate and one on the left only: the right reader alone decides
    assert len(live.several) == 0

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right, self.third = (
                nn.Linear(2, 3),
                nn.Linear(3, 1),
                nn.Linear(3, 1),
                nn.Linear(3, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.body(x))
            return self.left(x) + self.right(x) * self.third(x)

    def cyclic(graph: Graph) -> list[Placement]:
        pairs = {"a": ("left", "right"), "b": ("right", "third"), "c": ("third", "left")}
        sites = {name: tuple(site(t) for t in tensors) for name, tensors in pairs.items()}
        return [Placement(name, (3,), s, s) for name, s in sites.items()]

    with pytest.raises(ValueError, match="`where` lets one gate decide about some of the entries that read a unit"):
        l0.attach(Three(), torch.zeros(2, 2), where=cyclic)
