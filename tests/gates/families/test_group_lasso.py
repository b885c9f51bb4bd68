"""Group lasso: where its proximal steps come to rest against the closed form, and what they do not follow."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ellzero as l0
from ellzero.gates import GroupLassoGate
from support.traced import attached
from support.zoo import LeNet, mlp


def prepared(**options: Any) -> tuple[l0.Gated, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    return attached(mlp(3, 6, 2).double(), x.double(), gate=lambda shape: GroupLassoGate(shape, **options)), x.double()


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}])
def test_weights_rest_where_loss_and_penalty_are_least(momentum: dict[str, Any]) -> None:
    """½‖W − A‖² + λ·Σ c‖w_g‖ is least at A's columns times max(0, 1 − λc/‖a_g‖); c = √2 of two weights."""
    gated, x = prepared()
    weight = gated.model[2].weight  # type: ignore[index]
    start = torch.randn(2, 6, dtype=torch.float64)
    weight.data.copy_(torch.randn_like(weight))
    sgd, penalty = torch.optim.SGD(gated.param_groups(lr=0.1), **momentum), l0.Penalty(l0.complexity, 0.7)
    l0.objectives.follow(gated, sgd)
    gated(x)
    for _ in range(300):
        sgd.zero_grad()
        ((weight - start).square().sum() / 2 + penalty(gated)).backward()
        sgd.step()
    best = start * (1 - 0.7 * 2**0.5 / start.norm(dim=0)).clamp(min=0)
    torch.testing.assert_close(weight.detach(), best, rtol=0, atol=1e-6)
    (gate,) = (gate for _, gate in gated.named_gates())
    assert torch.equal(gate.open(), (best != 0).any(0))
    assert 0 < int(gate.open().sum()) < 6
    assert torch.equal(weight.detach() != 0, best != 0)  # exactly


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("where", [l0.shrinkable, l0.per_layer])
def test_it_charges_the_norm_of_what_it_counts(by_size: bool, where: Any) -> None:
    torch.manual_seed(0)
    model = LeNet()
    gated = attached(
        model, torch.randn(2, 1, 14, 14), where=where, gate=lambda shape: GroupLassoGate(shape, by_size=by_size)
    )
    if where is l0.shrinkable:  # readers: a map of conv2 is read by four inputs of fc1
        groups = {"conv1": model.conv2.weight.transpose(0, 1), "conv2": model.fc1.weight.T.reshape(5, 24)}
        groups |= {"fc1": model.fc2.weight.T}
    else:  # a filter and its bias, or an input's weights
        groups = {
            name: torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)
            for name, layer in (("conv1", model.conv1), ("conv2", model.conv2))
        }
        groups |= {"fc1": model.fc1.weight.T, "fc2": model.fc2.weight.T}
    for name, gate in gated.named_gates():
        group = groups[name].flatten(1)
        scale = group.shape[1] ** 0.5 if by_size else 1.0
        torch.testing.assert_close(gate.complexity(), scale * group.norm(dim=1).detach())


def test_the_price_of_a_constraint_acts_too() -> None:
    gated, x = prepared()
    sgd = torch.optim.SGD(gated.param_groups(lr=0.1))
    constraint = l0.Constraint(l0.params, at_most=0.5, on="kept")
    l0.objectives.follow(gated, sgd)
    constraint.bind(gated)
    nn.init.constant_(constraint.multiplier, 3.0)
    weight = gated.model[2].weight  # type: ignore[index]
    before = weight.detach().clone()
    (0 * gated(x).sum() + constraint(gated)).backward()
    sgd.step()
    price = 3.0 * (3 + 1 + 2) / (4 * 6 + 7 * 2) * 2**0.5
    best = before * (1 - 0.1 * price / before.norm(dim=0)).clamp(min=0)
    torch.testing.assert_close(weight.detach(), best)


def test_a_budget_drives_it_and_zeros_come_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 3, dtype=torch.float64)
    gated = attached(mlp(3, 12, 2).double(), x[:4], gate=GroupLassoGate)
    budget = l0.Budget(gated, params=0.5, steps=60)
    sgd = torch.optim.SGD(gated.param_groups(lr=0.05), momentum=0.9)
    budget.drive(sgd)
    closed = 0
    for _ in range(60):
        sgd.zero_grad()
        (gated(x) - x[:, :2].relu()).square().mean().backward()
        sgd.step()
        if budget.phase == "learning":
            closed = max(closed, int((~gated.opens()).sum()))
    assert closed > 0
    assert sum(p.numel() for p in budget.finish().parameters()) <= 0.5 * l0.dense(l0.params, gated)


def test_other_optimizers_are_refused() -> None:
    gated, x = prepared()
    adam = torch.optim.Adam(gated.param_groups(lr=1e-3))
    l0.objectives.follow(gated, adam)
    (gated(x).sum() + l0.complexity(gated)).backward()
    with pytest.raises(ValueError, match="`optimizer` must be SGD for GroupLassoGate"):
        adam.step()
    uneven = torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(gated.parameters())])
    l0.objectives.after_step(gated, uneven)  # one weight, one rate
    pair = attached(LeNet(), torch.randn(2, 1, 14, 14), where=l0.per_layer, gate=GroupLassoGate)
    each = torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(pair.parameters())])
    with pytest.raises(ValueError, match="one rate for the weights that one set of gates counts"):
        l0.objectives.after_step(pair, each)


def test_a_loop_that_is_not_followed_is_warned() -> None:
    gated, x = prepared()
    penalty = l0.Penalty(l0.complexity, 0.1)
    gated(x)
    penalty(gated)
    with pytest.warns(UserWarning, match="gates act after each step"):
        penalty(gated)


def test_it_needs_weights_to_look_at() -> None:
    with pytest.raises(RuntimeError, match="GroupLassoGate sees the weights that it counts: `attach` it"):
        GroupLassoGate(3).value()


def test_gates_of_units_that_are_gone_stay_closed() -> None:
    gated, x = prepared()
    for _, gate in gated.named_gates():
        gate.close_(torch.tensor([True, False, True, False, False, False]))
    before = gated.eval()(x)
    gated.shrink(gated.plan())
    assert gated.model[2].weight.shape == (2, 4)  # type: ignore[index, union-attr]
    torch.testing.assert_close(gated(x), before)
    assert gated.opens().tolist() == [False, True, False, True, True, True]
    assert gated.complexity()[0] == 0
