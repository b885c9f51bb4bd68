"""A budget with Accelerate: drive the optimizer, then prepare it. Seconds on a CPU. Needs `pip install accelerate`.

python examples/with_accelerate.py  (or: accelerate launch examples/with_accelerate.py)
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ellzero as l0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def points() -> TensorDataset:
    """Is the product of the first two coordinates positive?"""
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main(epochs: int = 20, folder: Path | None = None, until: int | None = None) -> nn.Module | None:
    """Trains `epochs`; saves to `folder` after each, and goes on from it; stops after the epoch `until`."""
    torch.manual_seed(0)
    loader = DataLoader(points(), batch_size=32)
    # begin: accelerate
    accelerator = Accelerator(gradient_accumulation_steps=2)
    gated = l0.attach(network(), torch.zeros(1, 20))
    optimizer = torch.optim.AdamW(gated.param_groups(lr=3e-3))
    steps = epochs * len(loader) // 2 // accelerator.num_processes
    budget = l0.Budget(gated, macs=0.3, steps=steps).drive(optimizer)
    wrapped, optimizer, loader = accelerator.prepare(gated, optimizer, loader)
    # end: accelerate
    first = 0
    if folder is not None and (folder / "budget.pt").exists():
        # begin: resume
        state = torch.load(folder / "budget.pt")
        budget.load_state_dict(state["budget"])  # first: it makes network and optimizer as small as they were
        accelerator.load_state(folder)
        first = state["epoch"]
        # end: resume
    for epoch in range(first, epochs):
        # begin: loop
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(F.cross_entropy(wrapped(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        # end: loop
        if folder is not None:
            # begin: save
            accelerator.save_state(folder)
            torch.save({"budget": budget.state_dict(), "epoch": epoch + 1}, folder / "budget.pt")
            # end: save
        if epoch + 1 == until:
            return None
    accelerator.print(budget)
    return budget.finish()


if __name__ == "__main__":
    main()
