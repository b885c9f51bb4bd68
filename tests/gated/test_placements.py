"""Where gates go, against the sizes the papers print and sites worked out by hand."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ellzero as l0
from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph, Site
from support import traced
from support.zoo import Concat, ConvNet, Flattened, Grouped, Residual, SquareStream, lenet, mlp


def sizes(gated: l0.Gated) -> list[int]:
    return [gate.shape.numel() for _, gate in gated.named_gates()]


# ---- the papers' own -------------------------------------------------------------------------------------------------


def test_per_layer_on_the_papers_mlp() -> None:
    gated = traced.attached(mlp(784, 300, 100, 10), torch.zeros(1, 784), where=l0.per_layer)
    assert sizes(gated) == [784, 300, 100]
    assert l0.dense(l0.l0_norm, gated) == 266_200  # Louizos et al., table 1: 784-300-100, biases not counted
    # |g| of an input is the number of outputs: one gate less, that many weights less
    for gate, size in zip((0, 784, 784 + 300), (300, 100, 10), strict=True):
        opens = torch.ones(1184)
        opens[gate] = 0
        with gated.assuming(opens):
            assert float(l0.l0_norm(gated)) == 266_200 - size


def test_per_layer_on_the_papers_lenet() -> None:
    gated = traced.attached(lenet(), torch.zeros(1, 1, 28, 28), where=l0.per_layer)
    assert sizes(gated) == [20, 50, 800, 500]
    assert l0.dense(l0.l0_norm, gated) == 430_570
    # |g| of a map is C_in · k · k + 1: its own incoming weights and its bias
    for gate, size in zip((0, 20, 70, 870), (1 * 25 + 1, 20 * 25 + 1, 500, 10), strict=True):
        opens = torch.ones(1370)
        opens[gate] = 0
        with gated.assuming(opens):
            assert float(l0.l0_norm(gated)) == 430_570 - size


def test_per_layer_multiplies_the_readers_of_a_map_and_counts_its_own_weights() -> None:
    gated = traced.attached(Flattened(), torch.zeros(1, 1, 4), where=l0.per_layer)
    placements = {p.name: p for p in gated.placements}
    assert [s.tensor for s in placements["conv1"].multiplies] == ["conv2.weight"]
    assert [s.tensor for s in placements["conv2"].multiplies] == ["fc.weight"]
    assert placements["conv2"].multiplies[0].units.tolist() == [
        0,
        0,
        1,
        1,
    ]  # a map is two inputs of the flattened layer
    assert sorted(s.tensor for s in placements["conv2"].counts) == ["conv2.bias", "conv2.weight"]
    assert placements["fc"].multiplies[0].units.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_per_layer_counts_a_convolution_without_bias() -> None:
    gated = traced.attached(ConvNet(), torch.zeros(2, 1, 4, 4), where=l0.per_layer)
    assert sizes(gated) == [3, 2, 2]
    assert l0.dense(l0.l0_norm, gated) == 3 * 9 + 2 * (27 + 1) + 2 * 2


class ResidualConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv1d(1, 3, 1), nn.Conv1d(3, 3, 1), nn.Conv1d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(x + self.block(torch.relu(x))))


def test_per_layer_refuses_a_residual_stream_of_convolutions_and_names_it() -> None:
    with pytest.raises(
        ValueError, match=r"`where=l0.per_layer\(\)`.*`stem`, `block`.*shared axis `stem`.*where=l0.shrinkable\(\)"
    ):
        l0.attach(ResidualConv(), torch.zeros(2, 1, 3), where=l0.per_layer)


def test_per_layer_of_fully_connected_layers_may_share_a_stream() -> None:
    """Each layer gates its own inputs, so nobody needs to tell the writers apart."""
    gated = l0.attach(SquareStream(), torch.zeros(2, 2), where=l0.per_layer)
    assert {name: gate.shape.numel() for name, gate in gated.named_gates()} == {"stem": 2, "square": 3, "head": 3}


# ---- what can shrink -------------------------------------------------------------------------------------------------


def test_shrinkable_leaves_input_and_output_alone() -> None:
    gated = traced.attached(mlp(4, 5, 3, 2), torch.zeros(1, 4))
    assert [(name, gate.shape.numel()) for name, gate in gated.named_gates()] == [("0", 5), ("2", 3)]
    frozen = {a.name: a.frozen for a in gated.axes if a.frozen}
    assert "input" in frozen["0.input"]
    assert "output" in frozen["4"]


@pytest.mark.parametrize("given", [0, "no", 24])
def test_what_is_no_answer_to_inputs_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=f"`inputs` must be True, False or None, got {given!r}"):
        l0.shrinkable(inputs=given)


class _Told(nn.Module):
    """Its first layer is asked how wide its input is, the second has a number for each of its inputs, the third is
    as usual.
    """

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input * torch.arange(1, 25, dtype=input.dtype), self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.scaled, self.usual = nn.Linear(24, 5), self.Scaled(24, 5), nn.Linear(24, 5)
        self.head = nn.Linear(15, 2)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.asked(x.view(-1, self.asked.in_features))
        return self.head(torch.cat([asked, self.scaled(x.flatten(1)), self.usual(x.flatten(1))], 1).relu())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("where", [l0.shrinkable, l0.per_layer])
def test_layers_that_go_wrong_with_a_part_of_the_input_keep_all_of_it(
    where: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ellzero.graph.trials.running.LARGE", 10 if large else 10**6)
    torch.manual_seed(0)
    net, x = _Told().double().eval(), torch.randn(3, 4, 6, dtype=torch.float64)
    gated = l0.attach(net, x[:1], where=where())
    why = {axis.name: axis.frozen or "" for axis in gated.graph.axes}
    assert all("does not run with a part of it" in why[f"{name}.input"] for name in ("asked", "scaled"))
    for _, gate in gated.named_gates():
        gate.close_(torch.arange(gate.shape.numel()) % 3 == 1)
    small = l0.compact(gated)
    assert [small.get_submodule(name).weight.shape[1] for name in ("asked", "scaled", "usual")] == [24, 24, 16]
    assert torch.allclose(small(x), gated.eval()(x), rtol=1e-12)


def test_shrinkable_counts_the_weights_that_read() -> None:
    gated = traced.attached(lenet(), torch.zeros(1, 1, 28, 28))
    assert sizes(gated) == [20, 50, 500]
    assert l0.dense(l0.l0_norm, gated) == 20 * 50 * 25 + 50 * 16 * 500 + 500 * 10


@pytest.mark.slow
def test_streams_are_gated_only_when_asked_for() -> None:
    without = traced.attached(Residual(), torch.zeros(2, 2))
    assert {name: gate.shape.numel() for name, gate in without.named_gates()} == {"up": 2}
    (stream,) = (a for a in without.axes if a.stream)
    assert (stream.name, stream.frozen) == ("stem", None)
    gated = traced.attached(Residual(), torch.zeros(2, 2), where=l0.shrinkable(streams=True))
    assert {name: gate.shape.numel() for name, gate in gated.named_gates()} == {"stem": 3, "up": 2}
    (stem,) = (p for p in gated.placements if p.name == "stem")
    assert {s.tensor for s in stem.multiplies} == {"square.weight", "up.weight", "head.weight"}


@pytest.mark.parametrize(
    ("short", "called"),
    [
        (l0.shrinkable, l0.shrinkable()),
        (l0.per_layer, l0.per_layer()),
        (partial(l0.per_layer, only="[02]"), l0.per_layer(only="[02]")),
        (partial(l0.shrinkable, streams=True), l0.shrinkable(streams=True)),
        (partial(l0.shrinkable, inputs=False), l0.shrinkable(inputs=False)),
    ],
)
def test_a_placement_without_its_call_counts_as_called(short: Any, called: Any) -> None:
    short, called = (traced.attached(mlp(5, 4, 3, 2), torch.zeros(1, 5), where=w).placements for w in (short, called))
    assert [p.name for p in short] == [p.name for p in called]


def test_a_concat_is_two_axes_side_by_side_in_one_reader() -> None:
    gated = l0.attach(Concat(), torch.zeros(2, 2))
    left, right = gated.placements
    assert (left.shape, right.shape) == ((2,), (3,))
    assert left.multiplies[0].units.tolist() == [0, 1, -1, -1, -1]
    assert right.multiplies[0].units.tolist() == [-1, -1, 0, 1, 2]


def test_a_grouped_convolution_is_an_index_map_over_row_and_column() -> None:
    gated = l0.attach(Grouped(), torch.zeros(2, 1, 3))
    first = gated.placements[0]
    (site,) = first.multiplies
    assert (site.tensor, site.dims) == ("grouped.weight", (0, 1))
    assert site.units.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]


# ---- single weights --------------------------------------------------------------------------------------------------


def test_weights_gives_every_entry_a_gate() -> None:
    model = mlp(4, 3, 2)
    gated = l0.attach(model, torch.zeros(1, 4), where=l0.weights("*.weight"))
    assert {n: tuple(g.shape) for n, g in gated.named_gates()} == {"0.weight": (3, 4), "2.weight": (2, 3)}
    assert l0.dense(l0.l0_norm, gated) == 18
    noise, x = gated.gate_noise(), torch.randn(5, 4)
    (_, one), (_, two) = gated.named_gates()
    with torch.no_grad():
        z1, z2 = one.sample(noise[:12].reshape(3, 4)), two.sample(noise[12:].reshape(2, 3))
        hidden = torch.relu(x @ (model[0].weight * z1).T + model[0].bias)
        by_hand = hidden @ (model[2].weight * z2).T + model[2].bias
        torch.testing.assert_close(gated(x, gate_noise=noise), by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["nothing*", "0.bia", ""])
def test_weights_that_match_nothing_are_refused_and_the_names_listed(pattern: str) -> None:
    with pytest.raises(
        ValueError, match=r"`pattern` must match the name of a parameter \(0\.weight, 0\.bias, .*\), got"
    ):
        traced.attached(mlp(4, 3, 2), torch.zeros(1, 4), where=l0.weights(pattern))


def test_weights_never_match_a_buffer() -> None:
    with pytest.raises(ValueError, match="`pattern`"):
        traced.attached(ConvNet(), torch.zeros(2, 1, 4, 4), where=l0.weights("*running_mean"))


# ---- of one's own ----------------------------------------------------------------------------------------------------


def test_a_placement_of_ones_own_must_multiply_contracting_dimensions() -> None:
    def writers(graph: Graph) -> list[Placement]:
        site = Site("0.weight", (0,), np.arange(3), "writes")
        return [Placement("mine", (3,), (site,), (site,))]

    with pytest.raises(
        ValueError, match=r"`where`.*`mine` multiply dimensions \(0,\) of `0.weight`, which do not contract"
    ):
        traced.attached(mlp(4, 3, 2), torch.zeros(1, 4), where=writers)


def test_a_placement_must_name_its_gates_apart() -> None:
    def twice(graph: Graph) -> list[Placement]:
        return [*l0.shrinkable()(graph), *l0.shrinkable()(graph)]

    with pytest.raises(ValueError, match="`where` must name each placement once, got 0, 0"):
        traced.attached(mlp(4, 3, 2), torch.zeros(1, 4), where=twice)
