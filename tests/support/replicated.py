"""A gated network that two processes train by `DistributedDataParallel`, each on batches of its own."""

import torch
import torch.distributed as dist
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
