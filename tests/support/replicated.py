"""Gated networks that two processes train by `DistributedDataParallel`, each on batches of its own."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ellzero as l0
from ellzero.out.latency.bounds import measured
from ellzero.out.latency.table import Table, Where
from support.oracles import scattered


def network() -> l0.Gated:
    torch.manual_seed(0)
    return scattered(
        l0.attach(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3))
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))


_KEPT: list[DistributedDataParallel] = []


def in_parallel(gated: l0.Gated, **options: bool) -> DistributedDataParallel:
    """The network in `DistributedDataParallel`, which is kept until the process ends. With its reducer goes the last
    reference to the process group: torch joins gloo's threads there and holds the GIL, for which one of them may wait.
    """
    _KEPT.append(DistributedDataParallel(gated, **options))
    return _KEPT[-1]


def train(rank: int, folder: str) -> None:
    """What one of two processes does; what it has drawn and where it ends is left in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    gated = network()
    parallel = in_parallel(gated, broadcast_buffers=False)
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
    parallel = in_parallel(gated)
    for step in range(24):
        torch.manual_seed(step)
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    table = Table("", "", Where.here(torch.device("cpu"), 2, torch.float32), rank + 1.0, 1.0, (), (), 0)
    (latency,) = measured(gated, {l0.Latency(table): 0.5})  # each process has measured something else
    torch.save((str(budget), budget.finish().state_dict(), latency.table.seconds), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


class Blocks(nn.Module):
    """Feed-forward blocks with gates of their own around a stream, as a Llama has them."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(2))
        self.up, self.side = (nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(2)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(2))
        self.head, self.checkpointed = nn.Linear(8, 3), checkpointed

    def block(self, k: int, x: Tensor) -> Tensor:
        h = self.norms[k](x)
        return x + self.down[k](F.silu(self.up[k](h)) * self.side[k](h))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for k in range(2):
            x = checkpoint(self.block, k, x, use_reentrant=False) if self.checkpointed else self.block(k, x)
        return self.head(x)  # type: ignore[no-any-return]


def in_blocks(apply: str, *, checkpointed: bool = False) -> tuple[l0.Gated, l0.Budget]:
    torch.manual_seed(0)
    gated = scattered(l0.attach(Blocks(checkpointed), torch.zeros(2, 8), apply=apply)).train()
    return gated, l0.Budget(gated, macs=0.6, steps=20, learning=0.6)


def step_in_blocks(gated: l0.Gated, budget: l0.Budget, batches: list[tuple[Tensor, Tensor | None]]) -> None:
    """The loss of a step: of each batch with its noise, and of the budget."""
    for x, noise in batches:
        out = gated(x) if noise is None else gated(x, gate_noise=noise)
        ((out.square().mean() + budget.term()) / len(batches)).backward()


def train_sharded(rank: int, folder: str) -> None:
    """Two processes that shard what they train, clip, and begin again from a file in the middle."""
    from torch.distributed.checkpoint import state_dict as files  # takes a second, and the others do without
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole = files.StateDictOptions(full_state_dict=True)

    def made() -> tuple[l0.Gated, l0.Budget, torch.optim.Optimizer]:
        gated, budget = in_blocks("activations", checkpointed=True)
        for layer in (*gated.model.up, *gated.model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(gated.model, mesh=mesh)
        return gated, budget, torch.optim.SGD(gated.param_groups(lr=0.1, gate_lr=1.0), momentum=0.9)

    gated, budget, optimizer = made()
    torch.manual_seed(7)
    noises = []
    for step in range(16):
        if step == 8:  # as a run that was stopped
            states = *files.get_state_dict(gated, optimizer, options=whole), budget.state_dict()
            gated, budget, optimizer = made()
            files.set_state_dict(
                gated, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=whole
            )
            budget.load_state_dict(states[2])
        noises.append(gated.gate_noise() if budget.phase == "learning" else None)
        optimizer.zero_grad()
        step_in_blocks(gated, budget, [(wide(rank, step), noises[-1])])
        norm = nn.utils.clip_grad_norm_(gated.parameters(), 0.5)
        optimizer.step()
        budget.step(optimizer)
    state = files.get_model_state_dict(gated, options=whole)
    told = {
        "noises": noises,
        "state": state,
        "phase": budget.phase,
        "masked": budget.masked,
        "norm": float(norm.full_tensor()),
    }  # type: ignore[attr-defined]
    torch.save(told, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def wide(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
