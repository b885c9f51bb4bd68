"""A budget on weights that are sharded over processes by FSDP2: gates on activations. Seconds on a CPU.

torchrun --standalone --nproc-per-node 2 examples/with_fsdp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ellzero as l0


class Blocks(nn.Module):
    """Feed-forward blocks around a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def network() -> nn.Module:
    return Blocks()


def points() -> TensorDataset:
    """Is the product of the first two coordinates positive?"""
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main(epochs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(points())
    loader = DataLoader(points(), batch_size=32, sampler=sampler)
    gated = l0.attach(network(), torch.zeros(1, 20), apply="activations")  # the whole network, on the CPU if need be
    for layer in gated.model.blocks:
        fully_shard(layer)
    fully_shard(gated.model)  # not `gated`: gates are whole in each process
    budget = l0.Budget(gated, macs=0.3, steps=epochs * len(loader))
    optimizer = torch.optim.AdamW(gated.param_groups(lr=3e-3))  # after sharding
    budget.drive(optimizer)
    torch.manual_seed(dist.get_rank())  # noise of its own in each process
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(gated(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(gated.parameters(), 1.0)
            optimizer.step()
    state = get_model_state_dict(gated, options=StateDictOptions(full_state_dict=True))
    whole = l0.attach(network(), torch.zeros(1, 20))
    whole.load_state_dict(state)
    small = l0.compact(whole.eval())
    if dist.get_rank() == 0:
        print(budget)
        print(small)
    return small


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs: "nccl", and the network on the device of its rank
    main()
    dist.destroy_process_group()
