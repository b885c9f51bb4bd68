"""A budget in a loop of your own, with what such loops have: accumulation, mixed precision, clipping, a schedule, and a
checkpoint from which it goes on. Seconds on a CPU.

python examples/own_loop.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ellzero as l0

ACCUMULATE = 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def points() -> TensorDataset:
    """Is the product of the first two coordinates positive?"""
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main(epochs: int = 20, checkpoint: Path | None = None, until: int | None = None) -> nn.Module | None:
    """Trains `epochs`; writes `checkpoint` after each, and goes on from it; stops after the epoch `until`."""
    torch.manual_seed(0)
    loader = DataLoader(points(), batch_size=32)
    gated = l0.attach(network(), torch.zeros(1, 20))
    # begin: plain
    budget = l0.Budget(gated, macs=0.3, steps=epochs * len(loader) // ACCUMULATE)
    optimizer = torch.optim.AdamW(gated.param_groups(lr=3e-3, weight_decay=1e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    budget.drive(optimizer)  # from here on every `optimizer.step()` moves the budget too
    # end: plain
    first = 0
    if checkpoint is not None and checkpoint.exists():
        # begin: resume
        state = torch.load(checkpoint)
        budget.load_state_dict(state["budget"])  # first: it makes network and optimizer as small as they were
        gated.load_state_dict(state["gated"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["noise"])  # the gates' noise comes from torch's generator
        first = state["epoch"]
        # end: resume
    for epoch in range(first, epochs):
        gated.train()
        # begin: loop
        for i, (x, y) in enumerate(loader):
            with torch.autocast(x.device.type, torch.bfloat16):
                loss = F.cross_entropy(gated(x), y) / ACCUMULATE
            loss.backward()  # with a scaler: scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()
            if (i + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(gated.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        # end: loop
        if checkpoint is not None:
            # begin: save
            state = {"budget": budget.state_dict(), "gated": gated.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "noise": torch.get_rng_state(), "epoch": epoch + 1}
            torch.save(state, checkpoint)
            # end: save
        if epoch + 1 == until:
            return None
    print(budget)
    small = budget.finish()
    x, y = points().tensors
    with torch.no_grad():
        error = 100 * (small.eval()(x).argmax(1) != y).float().mean().item()
    print(f"error {error:.1f} % with {sum(p.numel() for p in small.parameters())} parameters")
    return small


if __name__ == "__main__":
    main()
