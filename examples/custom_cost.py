"""A budget of a cost of your own: the energy of one forward, beside one of parameters. Seconds on a CPU.

python examples/custom_cost.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ellzero as l0


# begin: cost
def energy(gated: l0.Gated, *, kept: bool = False, only: str | None = None) -> Tensor:
    """Picojoules of one forward at 45 nm: 4.6 per multiplication with its sum, 640 per parameter read from DRAM
    (Han et al., Learning both weights and connections, 2015, table 1).
    """
    return 4.6 * l0.macs(gated, kept=kept, only=only) + 640 * l0.params(gated, kept=kept, only=only)


# end: cost


def main(steps: int = 300) -> nn.Module:
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    gated = l0.attach(model, x[:1])
    # begin: budget
    budget = l0.Budget(gated, {energy: 0.3}, params=0.4, steps=steps)  # both hold at the end
    # end: budget
    optimizer = torch.optim.AdamW(gated.param_groups(lr=3e-3))
    budget.drive(optimizer)
    for _ in range(steps):
        loss = F.cross_entropy(gated(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(budget)
    assert float(energy(gated, kept=True)) <= 0.3 * l0.dense(energy, gated)
    return budget.finish()


if __name__ == "__main__":
    main()
