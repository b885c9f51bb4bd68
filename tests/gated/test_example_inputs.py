"""Example inputs that show little, models that keep count, weights used in part: what a first user ran into."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ellzero as l0


class Scaled(nn.Module):
    """Divides by the square root of its width: no unit of `a` can go without changing the others."""

    def __init__(self, scale: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16, bias=bias), nn.Linear(16, 3, bias=bias)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        out: Tensor = self.b(h / math.sqrt(h.shape[-1])) * self.scale
        return out


@pytest.mark.parametrize(("example", "scale"), [(torch.zeros(2, 6), 1.0), (torch.randn(2, 6), 1e-3)])
def test_zeros_and_small_outputs_hide_nothing(example: Tensor, scale: float) -> None:
    with pytest.raises(ValueError, match="`a`: the model gives another output with a unit of it removed"):
        l0.attach(Scaled(scale), example)


def test_an_output_that_shows_nothing_freezes() -> None:
    class Answer(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) > math.inf

    with pytest.raises(ValueError, match="does not show whether the output depends on it"):
        l0.attach(Answer(), torch.randn(2, 6))


def test_the_proof_looks_beyond_an_example_of_zeros() -> None:
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
    gated = l0.attach(net, torch.zeros(1, 4))
    for _, gate in gated.named_gates():
        gate.close_(torch.tensor([True, False, False, False, False, False]))
    plan = gated.plan()
    plan.rows["2.weight"][1] = plan.rows["2.weight"][1][::-1].copy()  # the right number of columns, in a wrong order
    gated.plan = lambda: plan  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(l0.out.compaction.CompactionError, match="first at `2`"):
        l0.compact(gated)


def test_attach_leaves_a_model_that_counts_its_calls() -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.python = nn.Linear(6, 16), nn.Linear(16, 3), 0
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.python += 1
            out: Tensor = self.b(F.relu(self.a(x)))
            return out

    model = Counting()
    l0.attach(model, torch.randn(4, 6))
    assert (float(model.calls), model.python) == (0, 0)


def test_a_slice_of_a_parameter_costs_what_is_used_of_it() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(24, 8))
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(F.relu(self.a(F.linear(x, self.w[:8]))))
            return out

    assert l0.dense(l0.macs, l0.attach(Sliced(), torch.randn(2, 8))) == 8 * 8 + 8 * 16 + 16 * 2


@pytest.mark.slow
def test_cross_attention_costs_what_torch_counts() -> None:
    layer: Any = nn.TransformerDecoderLayer(8, 2, 32, batch_first=True)
    x, memory = torch.randn(1, 5, 8), torch.randn(1, 4, 8)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        layer(x, memory)
    assert l0.dense(l0.macs, l0.attach(layer, (x, memory))) == counter.get_total_flops() / 2


def test_a_constraint_follows_its_network_to_another_precision() -> None:
    gated = l0.attach(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(2, 6)).train()
    budget = l0.Constraint(l0.macs, at_most=0.5)
    gated(torch.randn(2, 6))
    budget(gated)
    budget.ascend()
    before = budget.multiplier.clone()
    gated.double()
    assert budget(gated).dtype == torch.float64
    torch.testing.assert_close(budget.multiplier, before.double())


def test_a_network_that_gives_no_number_says_so() -> None:
    gated = l0.attach(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(2, 6))
    first: Any = gated.model[0]  # type: ignore[index]
    first.weight.data[2] = math.nan
    with pytest.raises(l0.out.compaction.CompactionError, match="NaN"):
        l0.compact(gated)


def test_finalize_takes_a_cost_and_no_name() -> None:
    gated = l0.attach(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(2, 6))
    with pytest.raises(TypeError, match="`cost` must be a cost such as"):
        l0.finalize(gated, 0.5, cost="macs")  # type: ignore[arg-type]
