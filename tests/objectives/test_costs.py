"""Costs against exhaustive enumeration: every state of a tiny network's gates, weighted by its probability.

Each case says by hand what its network costs in a state. In every state that `compact` accepts that is checked against
the compact network itself (its parameters counted, its MACs by torch's own counter); the sum over all states, weighted,
is what the expected cost must be.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.gated.placements import Placement
from ellzero.graph.axes import Graph, Site
from ellzero.objectives import costs
from support import traced
from support.oracles import COSTS, HIDDEN, by_name, every_state, measured, open_exactly, scattered
from support.zoo import Concat, ConvNet, Flattened, Grouped, Residual, SquareStream, Tied, TwoReaders, lenet, mlp

Opens = dict[str, list[bool]]
Sizes = tuple[float, float, float]  # parameters, MACs, units
TRACED: dict[str, Graph] = {}  # by the name of a case
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def own_inputs(*layers: str) -> Callable[[Graph], list[Placement]]:
    """A placement in which each of the layers gates its own inputs."""

    def where(graph: Graph) -> list[Placement]:
        sites = {
            layer: Site(f"{layer}.weight", (1,), np.arange(graph.shapes[f"{layer}.weight"][1]), "reads")
            for layer in layers
        }
        return [Placement(layer, site.units.shape, (site,), (site,)) for layer, site in sites.items()]

    return where


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    by_hand: Callable[[Opens], Sizes]
    attach: dict[str, Any] = field(default_factory=dict)
    padded: Callable[[Opens], bool] = lambda _: False  # states in which the docstring excludes what `compact` keeps

    def __str__(self) -> str:
        return self.name

    def gated(self) -> l0.Gated:
        """The network with its gates; it is traced once for all tests."""
        torch.manual_seed(1)
        model, x = self.model().double(), torch.randn(2, *self.shape, dtype=torch.float64)
        gated = l0.attach(model, x, graph=TRACED.get(self.name), **self.attach)
        TRACED[self.name] = gated.graph
        return scattered(gated)


def number(t: Tensor) -> float:
    return t.detach().item()


def any_of(*lists: list[bool]) -> int:
    return sum(any(column) for column in zip(*lists, strict=True))


def chain(o: Opens) -> Sizes:
    a, b = sum(o["0"]), sum(o["2"])
    macs = 2 * a + a * b + b * 2
    return macs + a + b + 2, macs, a + b


def conv_net(o: Opens) -> Sizes:
    a, b = sum(o["conv1"]), sum(o["conv2"])
    weights = 9 * a, 9 * a * b, 2 * b
    return sum(weights) + 2 * a + b + 2 * b + 2, 16 * (weights[0] + weights[1]) + weights[2], a + b


def residual(o: Opens) -> Sizes:
    s, h = sum(o["stem"]), sum(o["up"])
    macs = 2 * s + s * s + s * h + h * s + 2 * s
    return macs + s + s + h + s + 2, macs, s + h


def square_stream(o: Opens) -> Sizes:
    """The stream stays where either reader is open; the square block keeps its open inputs as columns."""
    x, q, h = sum(o["stem"]), sum(o["square"]), sum(o["head"])
    s = any_of(o["square"], o["head"])
    macs = x * s + s * q + 2 * h
    return macs + s + s + 2, macs, x + s + q + h


def two_readers(o: Opens) -> Sizes:
    left, right, s = sum(o["left"]), sum(o["right"]), any_of(o["left"], o["right"])
    macs = 2 * s + 2 * left + right
    return macs + s + 2 + 1, macs, s + left + right


def two_readers_one_gated(o: Opens) -> Sizes:
    """The other layer reads every unit, so all of them stay."""
    left = sum(o["left"])
    return 6 + 3 + 2 * left + 2 + 3 + 1, 6 + 2 * left + 3, left


def flattened(o: Opens) -> Sizes:
    """A map stays if its gate and one of its inputs' are open, an input if its own gate and its map's are."""
    a = sum(o["conv1"])
    inputs = [o["conv2"][k // 2] and o["fc"][k] for k in range(4)]
    b, i = (inputs[0] or inputs[1]) + (inputs[2] or inputs[3]), sum(inputs)
    weights = 2 * a, 2 * a * b, 2 * i
    return sum(weights) + a + b + 2, 3 * weights[0] + 2 * weights[1] + weights[2], a + b + i


def concat(o: Opens) -> Sizes:
    a, b = sum(o["left"]), sum(o["right"])
    macs = 2 * a + 2 * b + 2 * (a + b)
    return macs + a + b + 2, macs, a + b


def grouped(o: Opens) -> Sizes:
    """Group by group; the channels that come back to make groups equal are not counted in expectation."""
    a, b = o["first"], o["grouped"]
    inside = sum(a[:2]) * sum(b[:2]) + sum(a[2:]) * sum(b[2:])
    macs = sum(a) + inside + sum(b)
    return macs + sum(a) + sum(b) + 1, 3 * macs, sum(a) + sum(b)


def uneven(o: Opens) -> bool:
    return any(sum(side[:2]) != sum(side[2:]) for side in o.values())


def one_side_closed(o: Opens) -> bool:
    return not all(any(side) for side in o.values())


def unstructured(o: Opens) -> Sizes:
    """A hidden unit stays if any gate of its column (of 2 × 3) is open."""
    columns = any_of(o["2.weight"][:3], o["2.weight"][3:])
    return 2 * columns + columns + 2 * columns + 2, 4 * columns, columns


CASES = [
    Case("chain", lambda: mlp(2, 3, 2, 2), (2,), chain),
    Case("convolutions with batch norm", ConvNet, (1, 4, 4), conv_net),
    Case("residual stream", Residual, (2,), residual, {"where": l0.shrinkable(streams=True)}),
    Case("square block under per_layer", SquareStream, (2,), square_stream, {"where": l0.per_layer}),
    Case("two readers, gates of their own", TwoReaders, (2,), two_readers, {"where": own_inputs("left", "right")}),
    Case("two readers, one gated", TwoReaders, (2,), two_readers_one_gated, {"where": own_inputs("left")}),
    Case("maps and single inputs", Flattened, (1, 4), flattened, {"where": l0.per_layer}),
    Case("concat", Concat, (2,), concat, padded=one_side_closed),
    Case("grouped convolution", Grouped, (1, 3), grouped, padded=uneven),
    Case("unstructured", lambda: mlp(2, 3, 2), (2,), unstructured, {"where": l0.weights("2.weight")}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expected_cost_is_the_mean_over_all_states(case: Case) -> None:
    gated = case.gated()
    expected = [0.0, 0.0, 0.0]
    for state, weight in every_state(gated):
        for k, size in enumerate(case.by_hand(by_name(gated, state))):
            expected[k] += weight * size
    for cost, value in zip(COSTS, expected, strict=True):
        assert number(cost(gated)) == pytest.approx(value, rel=1e-12), cost.__name__


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_cost_is_that_of_the_compact_network_in_every_state(case: Case) -> None:
    gated = case.gated()
    x = gated.example_inputs[0][0][:1]
    compared, sizes = 0, {}
    for state, _ in every_state(gated):
        open_exactly(gated, state)
        opens = by_name(gated, state)
        try:
            small = l0.compact(gated, verify=False)
        except l0.graph.ClosedAxisError:
            continue
        if str(small) not in sizes:  # what it costs is told by its layers: each network is measured once
            sizes[str(small)] = measured(small, x)
        params, macs = sizes[str(small)]
        assert (number(l0.params(gated, kept=True)), number(l0.macs(gated, kept=True))) == (params, macs), opens
        if not case.padded(opens):
            assert (params, macs, number(l0.units(gated, kept=True))) == case.by_hand(opens), opens
            compared += 1
    assert compared >= 8  # the enumeration above stands on these states


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_cost_is_that_of_the_dense_network(case: Case) -> None:
    gated = case.gated()
    params, macs = measured(gated.model, gated.example_inputs[0][0][:1])
    assert (l0.dense(l0.params, gated), l0.dense(l0.macs, gated)) == (params, macs)
    assert l0.dense(l0.units, gated) == case.by_hand({n: [True] * g.shape.numel() for n, g in gated.named_gates()})[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_expected_costs_are_finite_differences(case: Case) -> None:
    gated = case.gated()
    log_alphas = [gate.log_alpha for _, gate in gated.named_gates()]
    for cost in (*COSTS, l0.l0_norm, l0.l2_norm):
        gradients = torch.autograd.grad(cost(gated), log_alphas)
        for log_alpha, gradient in zip(log_alphas, gradients, strict=True):
            with torch.no_grad():
                index = (0,) * log_alpha.dim()
                here, step = float(log_alpha[index]), 1e-6
                values = []
                for shift in (step, -step):
                    log_alpha[index] = here + shift
                    values.append(number(cost(gated)))
                log_alpha[index] = here
            assert float(gradient[index]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8), (
                cost
            )


@pytest.mark.slow
def test_a_residual_stream_counts_each_unit_once_with_itself() -> None:
    """E[n²] = (Σp)² − Σp² + Σp for the square block of a stream."""
    gated = Case("", Residual, (2,), residual, {"where": l0.shrinkable(streams=True)}).gated()
    p = dict(zip(by_name(gated, [False] * 5), gated.prob_open().split([3, 2]), strict=True))["stem"]
    square = p.sum() ** 2 - (p**2).sum() + p.sum()
    torch.testing.assert_close(l0.macs(gated, only="square"), square)
    torch.testing.assert_close(l0.params(gated, only="square"), square + p.sum())


# ---- vanished branches -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_vanished_branch_costs_the_bias_that_it_leaves() -> None:
    gated = l0.attach(Residual().double(), torch.zeros(2, 2, dtype=torch.float64))
    gated.gates["up"].close_(torch.tensor([True, True]))
    params, macs = measured(l0.compact(gated), torch.zeros(1, 2, dtype=torch.float64))
    assert (params, macs) == (6 + 3 + 9 + 3 + 3 + 6 + 2, 6 + 9 + 6)  # of `up` and `down` only `down`'s bias is left
    assert number(l0.params(gated, kept=True)) == params
    assert number(l0.macs(gated, kept=True)) == macs
    assert number(l0.params(gated)) == pytest.approx(params)


def test_kept_cost_of_what_cannot_be_closed_counts_the_unit_that_stays() -> None:
    """`compact` refuses an axis that is closed as a whole; a kept cost must not, since training may pass there."""
    gated = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    open_exactly(gated, [False] * 3)
    with pytest.raises(l0.graph.ClosedAxisError, match="`0`"):
        l0.compact(gated)
    assert number(l0.params(gated, kept=True)) == 2 + 1 + 2 + 2
    assert number(l0.params(gated)) == pytest.approx(2, abs=0.1)  # in expectation it is not counted


# ---- the papers' norms -----------------------------------------------------------------------------------------------


def test_l0_norm_is_equation_16() -> None:
    """Σ_g |g| · P(z_g ≠ 0), with |g| by hand."""
    gated = scattered(l0.attach(Flattened().double(), torch.zeros(2, 1, 4, dtype=torch.float64), where=l0.per_layer))
    sizes = {"conv1": 1 * 2 + 1, "conv2": 2 * 2 + 1, "fc": 2}
    by_hand = sum(sizes[name] * number(gate.prob_open().sum()) for name, gate in gated.named_gates())
    assert number(l0.l0_norm(gated)) == pytest.approx(by_hand, rel=1e-12)
    kept = sum(sizes[name] * int(gate.open().sum()) for name, gate in gated.named_gates())
    assert number(l0.l0_norm(gated, kept=True)) == kept


def test_l2_norm_is_equation_17() -> None:
    """Σ_g P(z_g ≠ 0) Σ_j θ̃_j², over the weights that each gate counts."""
    model = Flattened().double()
    gated = scattered(l0.attach(model, torch.zeros(2, 1, 4, dtype=torch.float64), where=l0.per_layer))
    p = {name: gate.prob_open() for name, gate in gated.named_gates()}
    square = {name: t.square() for name, t in model.named_parameters()}
    by_hand = (
        p["conv1"] @ (square["conv1.weight"].sum((1, 2)) + square["conv1.bias"])
        + p["conv2"] @ (square["conv2.weight"].sum((1, 2)) + square["conv2.bias"])
        + p["fc"] @ square["fc.weight"].sum(0)
    )
    torch.testing.assert_close(l0.l2_norm(gated), by_hand)


def test_l2_norm_can_leave_the_gates_alone() -> None:
    gated = scattered(traced.attached(mlp(2, 3, 2), torch.zeros(1, 2)))
    gate, weight = gated.gates["0"].log_alpha, gated.model[2].weight
    value = l0.l2_norm(gated, detach_gates=True)
    torch.testing.assert_close(value, l0.l2_norm(gated))
    to_gate, to_weight = torch.autograd.grad(value, [gate, weight], allow_unused=True)
    assert to_gate is None
    torch.testing.assert_close(to_weight, 2 * weight * gated.prob_open())  # d/dθ P θ²
    assert torch.autograd.grad(l0.l2_norm(gated), gate)[0].abs().min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.attach.get("where") is not l0.per_layer], ids=str)
def test_l0_norm_is_the_mean_number_of_weights_that_are_not_zero(case: Case) -> None:
    """Where the gates count what they multiply, the folded network shows it: by enumeration."""
    gated = case.gated()
    norm, squares, counted = (
        number(l0.l0_norm(gated)),
        number(l0.l2_norm(gated)),
        {s.tensor for p in gated.placements for s in p.counts},
    )
    mean, mean_square = 0.0, 0.0
    for state, weight in list(every_state(gated)):
        open_exactly(gated, state)
        folded = dict(l0.fold(gated).named_parameters())
        entries = sum(int(folded[t].count_nonzero()) for t in counted)
        assert number(l0.l0_norm(gated, kept=True)) == entries
        mean += weight * entries
        mean_square += weight * sum(number(folded[t].square().sum()) for t in counted)
    assert norm == pytest.approx(mean, rel=1e-12)
    assert squares == pytest.approx(mean_square, rel=1e-12)


def rows_and_inputs(graph: Graph) -> list[Placement]:
    """Two sets of gates on one weight: one per input, one per entry."""
    shape = graph.shapes["2.weight"]
    columns = Site("2.weight", (1,), np.arange(shape[1]), "reads")
    entries = Site("2.weight", (0, 1), np.arange(shape[0] * shape[1]).reshape(shape), "reads")
    return [
        Placement("inputs", (shape[1],), (columns,), (columns,)),
        Placement("entries", shape, (entries,), (entries,)),
    ]


def test_a_weight_under_two_gates_is_there_with_the_product() -> None:
    gated = scattered(l0.attach(mlp(2, 3, 2).double(), torch.zeros(1, 2, dtype=torch.float64), where=rows_and_inputs))
    (_, inputs), (_, entries) = gated.named_gates()
    p = inputs.prob_open() * entries.prob_open()
    torch.testing.assert_close(l0.l0_norm(gated), p.sum())
    torch.testing.assert_close(l0.l2_norm(gated), (p * gated.model[2].weight.square()).sum())
    # alone, each set counts as if the other were open
    torch.testing.assert_close(l0.l0_norm(gated, only="inputs"), 2 * inputs.prob_open().sum())
    torch.testing.assert_close(l0.l0_norm(gated, only="entries"), entries.prob_open().sum())
    # a hidden unit stays if its input is open and any entry of the column
    alive = (inputs.prob_open() * (1 - (1 - entries.prob_open()).prod(0))).sum()
    torch.testing.assert_close(l0.units(gated), alive)


def test_a_tied_weight_counts_once() -> None:
    model = Tied()
    gated = l0.attach(model, torch.zeros(2, 3))
    assert l0.dense(l0.l0_norm, gated) == model.a.weight.numel()
    assert l0.dense(l0.params, gated) == sum(p.numel() for p in model.parameters())
    assert l0.dense(l0.macs, gated) == 3 * 4 + 2 * 4 * 2  # used twice


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_parts_add_up() -> None:
    gated = scattered(traced.attached(lenet(), torch.zeros(1, 1, 28, 28), where=l0.per_layer))
    for kept in (False, True):
        for cost in COSTS:
            parts = costs.breakdown(costs.kept(cost) if kept else cost, gated)
            assert sum(parts.values()) == pytest.approx(number(cost(gated, kept=kept)), rel=1e-6)
            for name, value in parts.items():
                assert number(cost(gated, kept=kept, only=name)) == pytest.approx(value, rel=1e-6)
        names = [p.name for p in gated.placements]
        whole = number(l0.l0_norm(gated, kept=kept))
        assert sum(number(l0.l0_norm(gated, kept=kept, only=name)) for name in names) == pytest.approx(whole, rel=1e-6)
    assert costs.breakdown(costs.only(l0.params, "[37]"), gated).keys() == {"3", "7"}
    assert number(l0.params(gated, only="9")) == pytest.approx(
        10 * number(gated.gates["9"].prob_open().sum()) + 10, rel=1e-6
    )


@pytest.mark.parametrize("cost", [*COSTS, l0.l0_norm, l0.l2_norm])
def test_a_pattern_that_matches_nothing_is_refused(cost: Any) -> None:
    gated = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"`only` must match .* got 'fc\*', and there are 0"):
        cost(gated, only="fc*")


def test_breakdown_of_a_cost_without_parts_is_empty() -> None:
    gated = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    assert costs.breakdown(l0.l0_norm, gated) == {}


def test_floor_is_what_frozen_layers_cost() -> None:
    gated = traced.attached(mlp(4, 3, 2), torch.zeros(1, 4), where=HIDDEN)
    assert costs.floor(l0.params, gated) == (2.0, ["2"])  # the output's bias
    assert costs.floor(l0.macs, gated) == (0.0, [])
    assert costs.floor(costs.kept(l0.params), gated) == (4 + 1 + 2 + 2, ["0", "2"])  # one hidden unit stays
    least, layers = costs.floor(l0.params, traced.attached(Residual(), torch.zeros(2, 2), where=HIDDEN))
    assert (least, layers) == (6 + 3 + 12 + 3 + 8, ["square", "stem", "head", "down"])


def test_assuming_answers_for_other_gates_and_is_undone() -> None:
    gated = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    before = number(l0.units(gated))
    with gated.assuming(torch.tensor([0.5, 0.25, 0.0])):
        assert number(l0.units(gated)) == 0.75
        assert number(l0.units(gated, kept=True)) == 2
        with gated.assuming(torch.ones(3)):
            assert number(l0.units(gated)) == 3
        assert number(l0.units(gated)) == 0.75
    assert number(l0.units(gated)) == before
    with pytest.raises(RuntimeError, match="mine"), gated.assuming(torch.ones(3)):
        raise RuntimeError("mine")
    assert number(l0.units(gated)) == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_autocast_rounds_no_cost(case: Case, device: str) -> None:
    """As in a loop with the whole loss inside: bfloat16 has three digits."""
    gated = case.gated().float().to(device).eval()
    constraint = l0.Constraint(l0.l0_norm, at_most=0.3).bind(gated)
    constraint.multiplier.fill_(0.3)
    asked = [*COSTS, l0.l0_norm, l0.l2_norm, l0.complexity, l0.Penalty(l0.l0_norm, weight=0.1), constraint]
    outside = [cost(gated) for cost in asked]
    with torch.autocast(device, torch.bfloat16):
        assert [cost(gated) for cost in asked] == outside


def test_costs_that_a_validation_asks_first_can_be_learned_from() -> None:
    """In inference mode, of which autograd keeps nothing; and what was worked out in a transform can be copied."""
    asked = [*COSTS, l0.l0_norm, l0.l2_norm, costs.only(l0.macs, "3"), costs.only(l0.l0_norm, "3")]
    asked += [l0.Penalty(l0.l0_norm, {"[0-7]": 0.1, "9": 0.2})]
    gated = scattered(traced.attached(lenet(), torch.zeros(1, 1, 28, 28), where=l0.per_layer)).eval()
    assert not gated.memo
    with torch.inference_mode():
        assert all(cost(gated) > 0 for cost in asked)
    sum(cost(gated) for cost in asked).backward()
    assert all(p.grad is not None for p in gated.gates.parameters())

    twin = scattered(traced.attached(lenet(), torch.zeros(1, 1, 28, 28), where=l0.per_layer)).eval()
    gates = {f"gates.{name}": p.detach() for name, p in twin.gates.named_parameters()}

    def total(gates: dict[str, Tensor]) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(twin, gates):
            return sum(cost(twin) for cost in asked)

    torch.func.grad(total)(gates)
    before = [cost(twin).item() for cost in asked]
    assert [cost(copy.deepcopy(twin)).item() for cost in asked] == before
    assert [cost(pickle.loads(pickle.dumps(twin))).item() for cost in asked] == before


def test_a_sum_for_each_part_is_that_of_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once or one by one, as where a table of all were too large or several gates count one weight."""
    gated = scattered(traced.attached(lenet(), torch.zeros(1, 1, 28, 28), where=l0.per_layer))
    patterns = ["0", "3", None, "[79]"]
    at_once = costs.of_parts(l0.l0_norm, patterns, gated)
    assert ("counted parts", tuple(patterns), torch.float32) in gated.memo
    one_by_one = [l0.l0_norm(gated, only=pattern) for pattern in patterns]
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-6, atol=0)
    monkeypatch.setattr(costs, "LARGE", 1)
    gated.memo.clear()
    assert costs.of_parts(l0.l0_norm, patterns, gated) == one_by_one

    shared = scattered(l0.attach(mlp(2, 3, 2), torch.zeros(1, 2), where=rows_and_inputs))
    monkeypatch.undo()
    found = costs.of_parts(l0.l0_norm, ["inputs", "entries"], shared)
    assert found == [l0.l0_norm(shared, only=pattern) for pattern in ("inputs", "entries")]
    whole, *_ = costs.of_parts(l0.l0_norm, [None, "inputs"], shared)
    assert whole == l0.l0_norm(shared)


def test_gates_that_are_asked_once_say_the_same_and_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = l0.attach(mlp(6, 5, 4, 3), (torch.randn(2, 6),), where=l0.per_layer())
    calls, gates = [], [gate for _, gate in gated.named_gates()]
    asked = type(gates[0]).prob_from
    monkeypatch.setattr(type(gates[0]), "prob_from", lambda self, phi: calls.append(1) or asked(self, phi))

    def both(together: bool) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        names = [name for name, _ in gated.named_gates()]
        if together:
            found = costs.of_parts(l0.l0_norm, names, gated)
        else:
            found = [l0.l0_norm(gated, only=name) for name in names]
        weighed = torch.stack([k * cost for k, cost in enumerate(found, 1)]).sum()
        return found, torch.autograd.grad(weighed, list(gated.gates.parameters()))

    one_by_one, apart = both(False)
    assert len(calls) == len(gates) == 3
    at_once, together = both(True)
    assert len(calls) == 4
    assert at_once == one_by_one
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    with torch.no_grad():
        gates[0].log_alpha.sub_(3)
    assert both(True)[0][0] < at_once[0]  # nothing is remembered


def test_an_answer_without_a_gradient_does_not_serve_one_who_needs_it() -> None:
    gated = l0.attach(mlp(6, 5, 4), (torch.randn(2, 6),))
    with gated.asked_once():
        with torch.no_grad():
            before = gated.prob_open()
        assert not before.requires_grad
        asked = gated.prob_open()
        assert asked.requires_grad
        with gated.asked_once(), torch.no_grad():
            assert gated.prob_open() is asked
    assert gated.prob_open() is not asked


@pytest.mark.parametrize("opens", [torch.ones(2), torch.ones(3, 1), torch.ones(())])
def test_assuming_refuses_other_shapes(opens: Tensor) -> None:
    gated = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="`opens` must have one entry per gate, 3"), gated.assuming(opens):
        pass


# ---- range and refusals ----------------------------------------------------------------------------------------------


def test_an_expected_density_of_a_thousandth_is_within_reach() -> None:
    """No clamp on log α stands in the way: ±log 100 would stop at 4.7 %."""
    gated = traced.attached(mlp(784, 300, 100, 10), torch.zeros(1, 784), where=l0.per_layer)
    optimizer = torch.optim.Adam(gated.gates.parameters(), lr=1.0)
    whole = l0.dense(l0.l0_norm, gated)
    for _ in range(15):  # Adam moves log α by about its learning rate
        optimizer.zero_grad()
        l0.l0_norm(gated).backward()
        optimizer.step()
    assert 0 < number(l0.l0_norm(gated)) / whole < 1e-3


@pytest.mark.parametrize("what", [None, "gated", nn.Linear(2, 2)])
@pytest.mark.parametrize("cost", [*COSTS, l0.l0_norm, l0.l2_norm])
def test_a_cost_of_something_else_is_refused(cost: Any, what: Any) -> None:
    for call in (
        lambda: cost(what),
        lambda: cost(what, kept=True),
        lambda: l0.dense(cost, what),
        lambda: costs.breakdown(cost, what),
        lambda: costs.floor(cost, what),
    ):
        with pytest.raises(TypeError, match=f"`gated` must be what `attach` returned, got {type(what).__name__}"):
            call()


def test_macs_of_axes_by_hand_are_refused() -> None:
    model = mlp(2, 3, 2)
    sites = (
        Site("0.weight", (0,), np.arange(3), "writes"),
        Site("0.bias", (0,), np.arange(3), "rides"),
        Site("2.weight", (1,), np.arange(3), "reads"),
    )
    gated = l0.attach(model, torch.zeros(2, 2), axes=[l0.graph.Axis("hidden", 3, sites)])
    assert l0.dense(l0.params, gated) == 17
    open_exactly(gated, [True, False, True])
    assert number(l0.params(gated, kept=True)) == measured(l0.compact(gated), torch.zeros(1, 2))[0] == 12
    with pytest.raises(ValueError, match="`macs` needs a traced forward"):
        l0.macs(gated)


def test_costs_are_scalars_in_the_gates_precision_and_device() -> None:
    single = traced.attached(mlp(2, 3, 2), torch.zeros(1, 2))
    double = l0.attach(mlp(2, 3, 2).double(), torch.zeros(1, 2, dtype=torch.float64))
    for cost in (*COSTS, l0.l0_norm, l0.l2_norm):
        for gated, dtype in ((single, torch.float32), (double, torch.float64)):
            value = cost(gated)
            assert (value.shape, value.dtype) == ((), dtype)
            assert value.requires_grad
            assert not cost(gated, kept=True).requires_grad or cost is l0.l2_norm  # the weights are still there
    half = single.to(torch.bfloat16)
    assert number(l0.params(half)) == pytest.approx(number(l0.params(double)), rel=0.02)


def test_what_is_kept_is_planned_anew_where_other_gates_are_open_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = [], l0.Gated.plan

    def counted(gated: l0.Gated, **options: Any) -> Any:
        made.append(options)
        return plan(gated, **options)

    monkeypatch.setattr(l0.Gated, "plan", counted)
    gated = l0.attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4), where=HIDDEN)
    ((_, gate),) = gated.named_gates()
    for closed, units, plans in (([], 3, 1), ([], 3, 1), ([0], 2, 2), ([0], 2, 2), ([], 3, 3)):
        with torch.no_grad():
            gate.log_alpha.fill_(3.0 + torch.rand(()))  # moves, and stays open
            gate.log_alpha[closed] = -9.0
        assert float(l0.macs(gated, kept=True)) == units * (4 + 2)
        assert len(made) == plans
    for plans in (4, 5):  # one unit stays, which one follows from the evidence: never remembered
        gate.close_(torch.ones(3, dtype=torch.bool))
        assert float(l0.macs(gated, kept=True)) == 4 + 2
        assert len(made) == plans
