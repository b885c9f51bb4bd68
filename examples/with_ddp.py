"""A budget in several processes: gate the model, then wrap it. Seconds on a CPU.

torchrun --standalone --nproc-per-node 2 examples/with_ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ellzero as l0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def points() -> TensorDataset:
    """Is the product of the first two coordinates positive?"""
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main(epochs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(points())
    loader = DataLoader(points(), batch_size=32, sampler=sampler)
    # begin: ddp
    gated = l0.attach(network(), torch.zeros(1, 20))
    wrapped = DistributedDataParallel(gated)
    budget = l0.Budget(gated, macs=0.3, steps=epochs * len(loader))
    optimizer = torch.optim.AdamW(gated.param_groups(lr=3e-3))
    budget.drive(optimizer)
    torch.manual_seed(dist.get_rank())  # noise of its own in each process
    # end: ddp
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(budget)
    small = budget.finish()
    if dist.get_rank() == 0:
        print(small)
    for p in small.parameters():  # the same network in each process, to the bit
        copies = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, p.detach())
        assert all(torch.equal(p, other) for other in copies)
    return small


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs: "nccl", and the network on the device of its rank
    main()
    dist.destroy_process_group()
