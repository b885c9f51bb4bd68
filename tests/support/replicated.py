"""Gated networks that two processes train by `DistributedDataParallel`, each on batches of its own."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ellzero as l0
from support.oracles import scattered


def network() -> l0.Gated:
    torch.manual_seed(0)
    return scattered(
        l0.attach(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3))
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, folder: str) -> None:
    """What one of two processes does; what it has drawn and where it ends is left in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    gated = network()
    parallel = DistributedDataParallel(gated, broadcast_buffers=False)
    optimizer = torch.optim.SGD(gated.param_groups(lr=0.1, gate_lr=1.0))
    torch.manual_seed(7)  # alike on both ranks
    noises = []
    for step in range(10):
        with torch.random.fork_rng():
            noises.append(gated.gate_noise())
        optimizer.zero_grad()
        (parallel(batch(rank, step)).square().mean() + 0.01 * l0.params(gated)).backward()
        optimizer.step()
    torch.save({"noises": noises, "state": gated.state_dict()}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def in_budget() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2))


def train_in_budget(rank: int, folder: str, world: int) -> None:
    """The same under a budget; what it says and the network that it hands over are left in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))[rank::world]
    y = (x[:, 0] * x[:, 1] > 0).long()
    gated = l0.attach(in_budget(), x[:2], gate=partial(l0.HardConcreteGate, drop_rate=0.1))
    gated.train()
    budget = l0.Budget(gated, macs=0.4, learning=0.5, steps=40)
    optimizer = torch.optim.SGD(gated.param_groups(lr=1e-2), momentum=0.9, weight_decay=1e-3)
    budget.drive(optimizer)
    parallel = DistributedDataParallel(gated)
    for step in range(24):
        torch.manual_seed(step)
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    torch.save((str(budget), budget.finish().state_dict()), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
