"""`Budget.drive` with Accelerate, against a plain loop; stopping and resuming is in the example."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ellzero as l0

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


@functools.cache  # tracing takes half a second
def traced() -> l0.Gated:
    return l0.attach(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2)), X[:2])


def start() -> tuple[l0.Gated, l0.Budget, torch.optim.Optimizer]:
    gated = copy.deepcopy(traced())
    gated.train()
    budget = l0.Budget(gated, macs=0.4, steps=30, learning=0.5)
    return gated, budget, torch.optim.SGD(gated.param_groups(lr=0.05), momentum=0.9)


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Imported when it is used; it remembers precision, device and accumulation for the whole process."""
    accelerate = pytest.importorskip("accelerate")

    def forget() -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()

    forget()
    yield accelerate
    forget()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "precision"), [("drive", "no"), ("prepare", "bf16")])
def test_it_is_the_plain_loop_in_either_order(first: str, precision: str, accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    gated, budget, optimizer = start()
    if first == "drive":
        budget.drive(optimizer)
    wrapped, prepared = accelerator.prepare(gated, optimizer)
    if first == "prepare":
        budget.drive(prepared)
    for batch in range(60):
        torch.manual_seed(batch)
        with accelerator.accumulate(wrapped):
            accelerator.backward(F.cross_entropy(wrapped(X), Y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()
    assert (budget.done, budget.masked) == (30, None)

    other, plain, sgd = start()
    plain.drive(sgd)
    for batch in range(60):
        torch.manual_seed(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            out = other(X)
        (F.cross_entropy(out.float(), Y) / 2).backward()
        if batch % 2:
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            sgd.step()
            sgd.zero_grad()
    small, by_hand = budget.finish(), plain.finish()
    assert all(torch.equal(p, q) for p, q in zip(small.parameters(), by_hand.parameters(), strict=True))
    assert sum(p.numel() for p in small.parameters() if p.ndim > 1) <= 0.4 * (6 * 16 + 16 * 12 + 12 * 2)
