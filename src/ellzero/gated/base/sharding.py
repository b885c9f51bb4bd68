"""Gates beside weights that are sharded over processes (`fully_shard`): whole in each process, and alike.

They become replicated tensors of the mesh that the weights are sharded over, so that an optimizer, clipping and a
distributed checkpoint treat both in one; a gate itself sees a plain tensor (`AbstractGate`). Their gradients are
averaged when they are there, as those of weights are. This file knows meshes; it does not know what a gate is for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether a weight is spread over processes."""
    return any(type(p).__name__ == "DTensor" for p in parameters)  # without an import that takes a second


def _may_be(model: nn.Module) -> bool:
    """As `is_sharded`; one process alone, which asks in every step, does not walk through its weights for it."""
    return dist.is_available() and dist.is_initialized() and is_sharded(model.parameters())


def follow(model: nn.Module, gates: nn.Module) -> None:
    """Makes gates what the model's weights are: replicated tensors, if these are sharded and the gates are not yet.

    Raises:
        RuntimeError: the weights are sharded in another way than by `fully_shard` over one dimension of a mesh.
    """
    if not _may_be(model):
        return
    weights = [p for p in model.parameters() if is_sharded([p])]
    plain = [(m, key, p) for m in gates.modules() for key, p in m._parameters.items() if p is not None]
    plain = [(m, key, p) for m, key, p in plain if not is_sharded([p])]
    if not plain:
        return
    from torch.distributed.tensor import DTensor, Replicate

    mesh = cast(Any, weights[0]).device_mesh
    _refuse_unfit(model, weights)
    for module, key, p in plain:
        local = p.detach()
        for dim in range(mesh.ndim):  # a draw of each process began them
            group = mesh.get_group(dim)
            dist.broadcast(local, dist.get_global_rank(group, 0), group=group)
        whole = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        module._parameters[key] = replicated = nn.Parameter(whole, requires_grad=p.requires_grad)
        if p.requires_grad:
            replicated.register_post_accumulate_grad_hook(_average)


def refuse_late(model: nn.Module, gates: nn.Module) -> None:
    """Refuses weights that were sharded after an optimizer may have got the gates."""
    if _may_be(model) and not is_sharded(gates.parameters()):
        raise RuntimeError("the model was sharded after its gates were handed out: shard, then make the optimizer")


def _refuse_unfit(model: nn.Module, weights: Iterable[Any]) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Replicate

    fully = any(isinstance(module, FSDPModule) for module in model.modules())
    split = {sum(not isinstance(p, Replicate) for p in weight.placements) for weight in weights}
    if not fully or split != {1}:
        raise RuntimeError(
            "weights must be sharded by `fully_shard(gated.model)` alone, over one dimension of a mesh: gates know no "
            "tensor parallelism"
        )


def _average(p: Any) -> None:
    """Over all processes, what they have found for a gate."""
    local, mesh = p.grad.to_local(), p.device_mesh
    for dim in range(mesh.ndim):
        dist.all_reduce(local, group=mesh.get_group(dim))
    local.div_(mesh.size())
