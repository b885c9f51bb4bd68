"""Noise on single weights: Sparse VD, and Bayesian compression with its two kinds of gates on one weight.

Charges against quadrature and torch's own KL; forwards and compact networks against weights that are made by hand.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

import ellzero as l0
from ellzero.experiments.train.stepping.stack import Objective, Runs
from ellzero.gates import GaussianWeightGate, GNJGate, NoExpectation, SparseVDGate
from ellzero.gates.families.sparse_vd import log_uniform_kl
from support.oracles import assert_counted, assert_same, settled
from support.traced import attached
from support.zoo import MLP, LeNet, ResNet

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP(5, 8, 7, 3), (4, 5)),
    "lenet": (LeNet, (3, 1, 14, 14)),
    "resnet": (ResNet, (3, 2, 6, 6)),
}


def single(graph: l0.graph.Graph) -> list[l0.Placement]:
    """A gate per weight of every layer, and none for those of batch norm."""
    return [placement for placement in l0.weights("*.weight")(graph) if len(placement.shape) > 1]


def both(graph: l0.graph.Graph) -> list[l0.Placement]:
    """A gate per unit and a gate per weight: Bayesian compression."""
    return [*l0.shrinkable()(graph), *single(graph)]


BAYES: dict[str, Any] = {"where": both, "gate": {"*.weight": partial(GaussianWeightGate, most=0.2), "*": GNJGate}}
SPARSE: dict[str, Any] = {"where": single, "gate": SparseVDGate}


def network(how: dict[str, Any], net: str = "mlp", seed: int = 0) -> tuple[l0.Gated, Tensor]:
    make, shape = NETS[net]
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64)
    gated = attached(settled(make(), seed), x, **how)
    with torch.no_grad():
        for _, gate in gated.named_gates():
            for parameter in gate.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 3 + (3 if isinstance(gate, SparseVDGate) else 0))
    return gated, x


# ---- charges --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("log_alpha", [-8.0, -4.0, -1.0, 0.0, 1.0, 3.0, 6.0])
def test_the_kl_to_the_log_uniform_prior_is_that_of_quadrature(log_alpha: float) -> None:
    """½·E log ε² − ½·log α, ε ~ N(1, α), less its limit; the approximation is good to 0.01."""
    sigma = math.exp(log_alpha / 2)
    q = stats.norm(1.0, sigma)
    low, high = 1 - 10 * sigma, 1 + 10 * sigma
    points = sorted({p for p in (0.0, 1.0 - sigma, 1.0, 1.0 + sigma) if low < p < high})
    mean, _ = integrate.quad(lambda e: q.pdf(e) * math.log(e * e), low, high, points=points, limit=400)
    limit = (math.log(2) + float(torch.special.digamma(torch.tensor(0.5, dtype=torch.float64)))) / 2  # of ½·log χ²
    exact = mean / 2 - log_alpha / 2 - limit
    found = log_uniform_kl(torch.tensor(log_alpha, dtype=torch.float64)).item()
    assert found == pytest.approx(exact, abs=0.01)


def test_each_gate_is_charged_at_its_own_weight() -> None:
    gated, _ = network(SPARSE)
    for name, gate in gated.named_gates():
        theta = gated.model.get_parameter(name)
        assert isinstance(gate, SparseVDGate)
        log_alpha = gate.log_var - theta.square().log()
        assert_same(gate.complexity(), log_uniform_kl(log_alpha.clamp(-8, 8)))
        assert torch.equal(gate.open(), log_alpha < 3)
        assert_same(gate.value(), (log_alpha < 3).double())


def test_gaussian_weights_are_charged_their_kl_to_the_standard_normal() -> None:
    gated, _ = network(BAYES)
    for name, gate in gated.named_gates():
        if isinstance(gate, GaussianWeightGate):
            theta = gated.model.get_parameter(name)
            expected = kl_divergence(Normal(theta, (gate.log_var / 2).exp()), Normal(0.0, 1.0))
            assert_same(gate.complexity(), expected)
            assert gate.open().all()
        else:
            assert isinstance(gate, GNJGate)
            log_alpha = gate.log_var - gate.mu.square().log()
            torch.testing.assert_close(gate.complexity(), log_uniform_kl(log_alpha), rtol=1e-3, atol=1e-4)
            assert_same(gate.value(), gate.mu * (log_alpha < 0))


def test_both_charges_feel_the_weights() -> None:
    for how in (SPARSE, BAYES):
        gated, _ = network(how)
        (slope,) = torch.autograd.grad(l0.complexity(gated), [gated.model.get_parameter("layers.1.weight")])
        assert slope.isfinite().all()
        assert slope.any()


# ---- draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
def test_a_forward_has_the_weights_that_are_made_by_hand(clip: bool) -> None:
    gated, x = network({**SPARSE, "gate": partial(SparseVDGate, clip=clip)})
    u = torch.rand(gated.liveness.size, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    parts, weights = gated.by_placement(u), {}
    for name, gate in gated.named_gates():
        theta = gated.model.get_parameter(name)
        mean = theta * (gate.open() if clip else 1.0)
        weights[name] = mean + (gate.log_var / 2).exp() * Normal(0.0, 1.0).icdf(parts[name])  # type: ignore[operator]
    assert_same(gated.train()(x, gate_noise=u), functional_call(gated.model, weights, x), 1e-9)


def test_gates_of_units_multiply_mean_and_noise() -> None:
    gated, x = network(BAYES)
    u = torch.rand(gated.liveness.size, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    noise = {name: Normal(0.0, 1.0).icdf(part) for name, part in gated.by_placement(u).items()}
    gates: dict[str, Any] = dict(gated.named_gates())
    weights = {}
    for k in range(3):
        name = f"layers.{k}.weight"
        weights[name] = gated.model.get_parameter(name) + (gates[name].log_var / 2).exp() * noise[name]
        if k:
            unit = gates[f"layers.{k - 1}"]
            weights[name] = weights[name] * (unit.mu + (unit.log_var / 2).exp() * noise[f"layers.{k - 1}"])
    assert_same(gated.train()(x, gate_noise=u), functional_call(gated.model, weights, x), 1e-9)


def test_the_slope_in_the_weights_has_no_noise_in_it() -> None:
    gated, x = network({**SPARSE, "gate": partial(SparseVDGate, clip=False)})
    weight = gated.model.get_parameter("layers.0.weight")
    (own,) = torch.autograd.grad(functional_call(gated.model.layers[0], {"weight": weight}, x).sum(), weight)  # type: ignore[index]
    gate: Any = dict(gated.named_gates())["layers.0.weight"]
    u = torch.rand(gate.shape, dtype=torch.float64)
    noisy = weight * gate.sample(u) + gate.spread_from(gate.phi()) * Normal(0.0, 1.0).icdf(u)
    (slope,) = torch.autograd.grad(functional_call(gated.model.layers[0], {"weight": noisy}, x).sum(), weight)  # type: ignore[index]
    assert_same(slope, own)


# ---- the way out ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("how", [SPARSE, BAYES], ids=["sparse vd", "bayesian compression"])
def test_the_compact_network_has_the_weights_masked_by_hand(how: dict[str, Any], net: str) -> None:
    gated, x = network(how, net)
    units = l0.shrinkable()(gated.graph)
    with torch.no_grad():  # units whose incoming or outgoing weights are all closed, beside single ones
        for _, gate in gated.named_gates():
            mask = torch.zeros(gate.shape, dtype=torch.bool)
            if isinstance(gate, SparseVDGate):
                mask[:, :2] = mask.shape[1] > 4
                gate.open_(mask.logical_not())
            elif isinstance(gate, GNJGate):
                mask[:2] = True
                gate.open_(~mask)
            gate.close_(mask)
    values = {name: gate.value().detach() for name, gate in gated.named_gates()}
    by_hand = copy.deepcopy(gated.model)
    with torch.no_grad():
        for name, value in values.items():
            if name.endswith(".weight"):
                by_hand.get_parameter(name).mul_(value)
        for placement in units:
            for site in placement.multiplies if placement.name in values else ():
                tensor = by_hand.get_parameter(site.tensor)
                shape = [n if d in site.dims else 1 for d, n in enumerate(tensor.shape)]
                tensor.mul_(values[placement.name][torch.as_tensor(site.units)].reshape(shape))
    small = l0.compact(gated.eval())
    assert_same(small(x), by_hand(x))
    assert_same(gated(x), by_hand(x))
    assert_counted(gated, small, (x,))
    assert sum(p.numel() for p in small.parameters()) < l0.dense(l0.params, gated)
    assert str(l0.report(gated))


def test_weights_are_finalised_and_constrained_by_what_is_kept() -> None:
    gated, x = network(SPARSE)
    for _, gate in gated.named_gates():
        gate.open_(~gate.open())
    gated.train()(x)
    constraint = l0.Constraint(l0.l0_norm, at_most=0.5, on="kept")
    constraint(gated)
    assert constraint.violation.item() == pytest.approx(0.5)
    nn.init.constant_(constraint.multiplier, 2.0)
    size = gated.liveness.size
    gated.drawn = False
    term = l0.Constraint(l0.l0_norm, at_most=0.5, on="kept").bind(gated)
    nn.init.constant_(term.multiplier, 2.0)
    assert term(gated.eval()).item() == pytest.approx(2.0 * (l0.complexity(gated).item() / size - 0.5))
    l0.finalize(gated, at_most=0.3, cost=l0.l0_norm)
    assert float(l0.l0_norm(gated, kept=True)) <= 0.3 * size
    for refused in (l0.Constraint(l0.l0_norm, 0.5), l0.Penalty(l0.l0_norm, 1.0)):
        with pytest.raises(NoExpectation, match="SparseVDGate has no expected cost, only a kept one: a weight with"):
            refused(gated)
    with pytest.raises(ValueError, match="gates on single weights do not move"):
        l0.Constraint(l0.macs, 0.5, on="kept")(gated)


@pytest.mark.slow
@pytest.mark.parametrize("how", [SPARSE, BAYES], ids=["sparse vd", "bayesian compression"])
def test_states_and_stacks(how: dict[str, Any]) -> None:
    gated, x = network(how)
    other, _ = network(how, seed=1)
    other.load_state_dict(gated.state_dict())
    assert torch.equal(other.complexity(), gated.complexity())
    assert_same(other.eval()(x), gated.eval()(x))

    def made(seed: int) -> Objective:
        return Objective(network(how, seed=seed)[0], [(l0.complexity, None)])

    inputs, y = torch.randn(2, 6, 5, dtype=torch.float64), torch.randint(3, (2, 6))
    noise = torch.rand(2, gated.liveness.size, dtype=torch.float64)
    alone, stack = [made(seed).train() for seed in range(2)], Runs([made(seed) for seed in range(2)]).train()
    each = [o(inputs[i], y[i], noise[i]) for i, o in enumerate(alone)]
    loss, cost = stack(inputs, y, noise)
    assert_same(loss, torch.stack([one[0] for one in each]))
    assert_same(cost, torch.stack([one[1] for one in each]))
    (loss.sum() + cost.sum()).backward()
    sum(one[0] + one[1].sum() for one in each).backward()  # type: ignore[union-attr]
    for name, value in stack.values().items():
        own = [o.get_parameter(name).grad for o in alone]
        assert (value.grad is None) == (own[0] is None), name
        if value.grad is not None:
            assert_same(value.grad, torch.stack(own))  # type: ignore[arg-type]


def test_a_step_keeps_the_noise_within_its_bound() -> None:
    gated, x = network(BAYES)
    gate: Any = dict(gated.named_gates())["layers.0.weight"]
    nn.init.constant_(gate.log_var, 1.0)
    adam = torch.optim.Adam(gated.param_groups(lr=1e-3))
    l0.objectives.follow(gated, adam)
    gated.train()(x).sum().backward()
    adam.step()
    assert_same(gate.log_var, torch.full((8, 5), 2 * math.log(0.2), dtype=torch.float64))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(4, 5)
    for family in (SparseVDGate, GaussianWeightGate):
        with pytest.raises(ValueError, match=f"`where` must put {family.__name__} on single weights"):
            attached(MLP(5, 8, 7, 3), x, gate=family)
        with pytest.raises(RuntimeError, match="sees the weights that it counts"):
            family(3).complexity()
    for wrong in (
        partial(SparseVDGate, start=math.nan),
        partial(GaussianWeightGate, most=0.0),
        partial(GNJGate, threshold=math.inf),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong(3)
