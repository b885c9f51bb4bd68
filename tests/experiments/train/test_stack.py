"""Stacked runs: a run in a stack is the run alone, forward, backward and in evaluation.

In double precision on a small network, so that "to rounding" means twelve digits. The oracle is the objective of each
run by itself, and costs asked of its `Gated` directly.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0
from ellzero.experiments.train.stepping.stack import WATCHED, Objective, Runs, l2_of_weights
from ellzero.objectives import costs

SIZE = 3
TRACED: dict[str, l0.graph.Graph] = {}


def gated(seed: int) -> l0.Gated:
    """Gates on the inputs of three layers; some of them closed at test time, others in every run."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    out = l0.attach(net, torch.zeros(1, 8), where=l0.per_layer, graph=TRACED.get("gated"))
    TRACED["gated"] = out.graph  # of all of them, since they differ in their numbers alone
    with torch.no_grad():
        for _, gate in out.named_gates():
            gate.log_alpha.normal_(0.5, 2)  # type: ignore[operator]
    return out.double()


def objective(seed: int) -> Objective:
    net = gated(seed)
    return Objective(net, [(l0.l0_norm, name) for name, _ in net.named_gates()] + [(l0.macs, None)])


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SIZE, 7, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (SIZE, 7), generator=generator)
    return x, y, torch.rand(SIZE, 18, generator=generator, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


PLAIN = {
    "plain": {},
    "without bias": {"bias": False},
    "oblong": {"kernel_size": (2, 4)},
    "of single pixels": {"kernel_size": 1},
}
OTHER = {"stride": {"stride": 2}, "padding": {"padding": 1}, "dilation": {"dilation": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLAIN, *OTHER])
def test_convolutions_of_a_stack_compute_what_each_run_does_alone(kind: str) -> None:
    """Those over one map are made products of matrices, and no others; what is handed over is a convolution again."""

    def made(seed: int) -> Objective:
        torch.manual_seed(seed)
        first = nn.Conv2d(1, 4, **{"kernel_size": 3, **PLAIN.get(kind, {}), **OTHER.get(kind, {})})
        net = nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.LazyLinear(3))
        net(torch.zeros(1, 1, 8, 9))
        gates = l0.attach(net, torch.zeros(1, 1, 8, 9), graph=TRACED.get(kind))
        TRACED[kind] = gates.graph
        return Objective(gates.double(), [(l0.l0_norm, None)])

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SIZE, 7, 1, 8, 9, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (SIZE, 7), generator=generator)
    alone = [made(seed) for seed in range(SIZE)]
    noise = torch.rand(SIZE, alone[0].gated.opens().numel(), generator=generator, dtype=torch.float64)
    each = [o(x[i], y[i], noise[i])[0] for i, o in enumerate(alone)]
    stack = Runs([made(seed) for seed in range(SIZE)])
    assert sum("_conv_forward" in m.__dict__ for m in stack.template.modules()) == (kind in PLAIN)
    loss, _ = stack(x, y, noise)
    close(loss, torch.stack(each))
    loss.sum().backward()
    torch.stack(each).sum().backward()
    for name, value in stack.values().items():
        assert value.grad is not None
        close(value.grad, torch.stack([o.get_parameter(name).grad for o in alone]))  # type: ignore[misc]
    for run, o in enumerate(alone):
        network = stack.network(run)
        assert not any("_conv_forward" in m.__dict__ for m in network.modules())
        close(network.eval()(x[0]), o.network.eval()(x[0]))


def test_one_objective_is_cross_entropy_and_fractions_of_the_dense_cost() -> None:
    x, y, noise = (t[0] for t in batch())
    one = objective(0)
    loss, fractions = one(x, y, noise)
    net = gated(0)
    close(loss, F.cross_entropy(net(x, gate_noise=noise), y))
    assert not torch.allclose(loss, F.cross_entropy(net(x, gate_noise=1 - noise), y))
    dense = {"0": 8 * 6, "2": 6 * 4, "4": 4 * 3}  # weights that each layer's gates count
    expected = [l0.l0_norm(net, only=name) / n for name, n in dense.items()] + [l0.macs(net) / sum(dense.values())]
    close(fractions, torch.stack(expected))


def test_a_stack_computes_what_each_run_does_alone() -> None:
    x, y, noise = batch()
    alone = [objective(seed) for seed in range(SIZE)]
    each = [o(x[i], y[i], noise[i]) for i, o in enumerate(alone)]
    stack = Runs([objective(seed) for seed in range(SIZE)])
    loss, fractions = stack(x, y, noise)
    close(loss, torch.stack([e[0] for e in each]))
    close(fractions, torch.stack([e[1] for e in each]))
    assert len(set(loss.tolist())) == SIZE
    (loss.sum() + (fractions * torch.arange(1, 5)).sum()).backward()
    for e in each:
        (e[0] + (e[1] * torch.arange(1, 5)).sum()).backward()
    for name, value in stack.values().items():
        assert value.grad is not None
        close(value.grad, torch.stack([o.get_parameter(name).grad for o in alone]))  # type: ignore[misc]
    assert any(bool(v.grad.any()) for n, v in stack.values().items() if "gates" in n)  # type: ignore[union-attr]


def test_norms_are_as_they_are_and_one_of_them_leaves_the_gates_alone() -> None:
    """Σ_j p_j·Σ_i w_ij² over the layers (eq. 17), no fraction of anything, and its gradients in closed form."""
    nets = [gated(seed) for seed in range(SIZE)]
    for cost, felt in ((l0.l2_norm, True), (l2_of_weights, False)):
        stack = Runs([Objective(gated(seed), [(cost, None)]) for seed in range(SIZE)])
        _, norms = stack(*batch())
        norms.sum().backward()
        for run, net in enumerate(nets):
            total = torch.zeros((), dtype=torch.float64)
            for name, gate in net.named_gates():
                p, w = gate.prob_open().detach(), net.model.get_parameter(f"{name}.weight").detach()
                total += (p * w.square().sum(0)).sum()
                grads = {n: v.grad for n, v in stack.values().items()}
                weight, alpha = grads[f"network.model.{name}.weight"], grads[f"network.gates.{name}.log_alpha"]
                assert weight is not None
                close(weight[run], 2 * p * w)
                by_gate = p * (1 - p) * w.square().sum(0)
                assert alpha is None or felt or not alpha.any()
                assert not felt or (alpha is not None and torch.allclose(alpha[run], by_gate, rtol=1e-12))
            close(norms[run, 0], total)


@pytest.mark.parametrize("size", [1, SIZE])
def test_open_gates_are_counted_by_set(size: int) -> None:
    runs = Runs([objective(seed) for seed in range(size)])
    expected = [[int(gate.open().sum()) for _, gate in gated(seed).named_gates()] for seed in range(size)]
    assert runs.evaluate(Objective.counts).tolist() == expected
    assert expected[0] != [8, 6, 4]
    assert sum(expected[0]) > 0


def test_runs_do_not_mix() -> None:
    stack = Runs([objective(seed) for seed in range(SIZE)])
    loss, fractions = stack(*batch())
    (loss[1] + fractions[1].sum()).backward()
    for value in stack.values().values():
        assert value.grad is not None
        assert not value.grad[[0, 2]].any()
        assert value.grad[1].any()


def test_a_stack_evaluates_as_each_run_does_alone() -> None:
    x = batch()[0][0]
    stack = Runs([objective(seed) for seed in range(SIZE)]).eval()
    nets = [gated(seed).eval() for seed in range(SIZE)]
    close(stack.evaluate(Objective.logits, x), torch.stack([n(x) for n in nets]))
    names = [name for name, _ in nets[0].named_gates()]
    kept = [
        [float(l0.l0_norm(n, kept=True, only=g)) / l0.dense(costs.only(l0.l0_norm, g), n) for g in names]
        + [float(l0.macs(n, kept=True)) / l0.dense(l0.macs, n)]
        for n in nets
    ]
    close(stack.evaluate(Objective.kept), torch.tensor(kept, dtype=torch.float64))
    watched = [[[c(n, kept=k).item() / l0.dense(c, n) for c in WATCHED] for k in (False, True)] for n in nets]
    close(stack.evaluate(Objective.watched), torch.tensor(watched, dtype=torch.float64))
    assert kept[0] != kept[1] != kept[2]


@pytest.mark.parametrize("size", [1, SIZE])
def test_other_values_can_be_evaluated_and_leave_the_runs_alone(size: int) -> None:
    x = batch()[0][0]
    runs = Runs([objective(seed) for seed in range(size)]).eval()
    before = {n: v.clone() for n, v in runs.values().items()}
    others = Runs([objective(seed + 10) for seed in range(size)]).values()
    got = runs.evaluate(Objective.logits, x, values={n: v.detach() for n, v in others.items()})
    close(got, torch.stack([gated(seed + 10).eval()(x) for seed in range(size)]))
    assert all(torch.equal(v, before[n]) for n, v in runs.values().items())


@pytest.mark.parametrize("size", [1, SIZE])
def test_a_run_can_be_taken_out_as_a_network_of_its_own(size: int) -> None:
    x = batch()[0][0]
    runs = Runs([objective(seed) for seed in range(size)]).eval()
    run = size - 1
    net = runs.network(run)
    assert isinstance(net, l0.Gated)
    close(net(x), gated(run).eval()(x))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    close(runs.network(run)(x), gated(run).eval()(x))


@pytest.mark.parametrize("size", [1, SIZE])
def test_all_parameters_are_gates_or_weights_and_all_are_trained(size: int) -> None:
    runs = Runs([objective(seed) for seed in range(size)])
    members = runs.values()
    gates = {name for name in members if name.startswith("network.gates.")}
    assert sum(members[name].numel() for name in gates) == size * (8 + 6 + 4)
    weights = members.keys() - gates
    assert sum(members[name].numel() for name in weights) == size * (8 * 6 + 6 + 6 * 4 + 4 + 4 * 3 + 3)
    assert {id(p) for p in runs.parameters()} == {id(p) for p in members.values()}


@pytest.mark.slow
def test_networks_with_buffers_train_alone_only() -> None:
    def normed() -> Objective:
        net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        made = l0.attach(net, torch.zeros(2, 8), where=l0.shrinkable(inputs=False))
        return Objective(made, [(l0.l0_norm, None)])

    with pytest.raises(ValueError, match=r"buffers \(batch norm\) cannot be stacked"):
        Runs([normed(), normed()])
    one = Runs([normed()])
    x = torch.randn(1, 7, 8)
    one(x, torch.zeros(1, 7, dtype=torch.long), torch.rand(1, 6))
    mean = dict(one.named_buffers())["alone.network.model.1.running_mean"]
    weight, bias = one.values()["network.model.0.weight"], one.values()["network.model.0.bias"]
    torch.testing.assert_close(mean, 0.1 * (x[0] @ weight.T + bias).mean(0).detach())  # the run's own statistics


def test_a_dense_network_has_no_costs() -> None:
    def dense(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(8, 3).double()

    x, y, noise = batch()
    stack = Runs([Objective(dense(seed), []) for seed in range(SIZE)])
    loss, fractions = stack(x, y, noise)
    assert fractions.shape == (SIZE, 0)
    close(loss, torch.stack([F.cross_entropy(dense(i)(x[i]), y[i]) for i in range(SIZE)]))
    assert list(stack.values()) == ["network.weight", "network.bias"]


def test_mode_and_type_reach_the_network_that_runs() -> None:
    stack = Runs([objective(seed) for seed in range(SIZE)])
    assert not stack.eval().template.network.training
    assert stack.train().template.network.training
    x, y, noise = batch()
    single = stack.float()(x.float(), y, noise.float())[0]
    assert single.dtype is torch.float32
    torch.testing.assert_close(single.double(), Runs([objective(s) for s in range(SIZE)])(x, y, noise)[0])
