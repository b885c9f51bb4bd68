"""Live runs to disk and back: all that the rest of a run depends on, as one checkpoint.

How a checkpoint is written and found again is in `store.checkpoint`; this file knows what is in it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ellzero.experiments.recipe import Recipe
from ellzero.experiments.store import checkpoint, randomness
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.live import Live
from ellzero.out import shrinking


def state(live: Live) -> dict[str, Any]:
    """All that the rest of the runs depends on, as tensors and plain data."""
    shrunk: dict[str, Any] = {}
    if live.recipe.shrink_at or live.recipe.settle_at is not None:
        units = torch.as_tensor(shrinking.there(live.gated))
        shrunk = {"shrinking": {"units": units, "closed_for": torch.as_tensor(live.closed_for)}}
    return {
        **shrunk,
        "values": {n: v.detach() for n, v in live.runs.values().items()},
        "buffers": dict(live.runs.template.named_buffers()),
        "optimizer": live.optimizer.state_dict()["state"],
        "average": dict(live.average.tensors),
        "lagrangian": live.lagrangian.state(),
        "clock": live.step.clock,
        "own": [_own(live)],
        "epoch": live.epoch,
        "position": live.position,
        "ascents": live.ascents,
        "summed": live.summed,
        "seconds": live.seconds,
        "tuning": live.step.fixed,
        "averaging": live.average.active,
        "records": len(live.history),
        "ranks": live.policy.ranks,
        "images": live.images,
    }


def load(live: Live, state: Mapping[str, Any]) -> None:
    """Takes up a state; the history is the caller's to bring."""
    live.epoch, live.position, live.ascents = state["epoch"], state["position"], state["ascents"]
    live.summed, live.seconds, live.images = state["summed"], state["seconds"], state["images"]
    live.average.active = state["averaging"]
    live.average.begins = replace(live.policy, images=live.images).average_begins
    live.step.clock.copy_(state["clock"])
    if "shrinking" in state:
        _shrink_like(live, state["shrinking"])
    if state["tuning"]:
        live.fix()
    else:
        live.prepare()
    with torch.no_grad():
        for name, value in live.runs.values().items():
            value.copy_(state["values"][name])
        for name, buffer in live.runs.template.named_buffers():
            buffer.copy_(state["buffers"][name])
        for name, value in live.average.tensors.items():
            value.copy_(state["average"][name])
        live.step.losses.copy_(state["own"][live.rank]["losses"])
    groups = live.optimizer.state_dict()["param_groups"]
    live.optimizer.load_state_dict({"state": dict(state["optimizer"]), "param_groups": groups})
    for parameter, known in live.optimizer.state.items():  # a file has its tensors contiguous
        for key, value in known.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape != torch.Size():
                known[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    live.lagrangian.load(state["lagrangian"])
    randomness.set_random_state(state["own"][live.rank]["random"], live.device)


def _shrink_like(live: Live, state: Mapping[str, Any]) -> None:
    units = state["units"].cpu().numpy()
    present = shrinking.there(live.gated)
    if (units & ~present).any():
        raise ValueError("`state` must be of a network that is no larger than this one: load it into a new trainer")
    if (present & ~units).any():
        live.take_out(shrinking.planned(live.gated, units))
    live.closed_for = state["closed_for"].cpu().numpy().copy()


def _own(live: Live) -> dict[str, Any]:
    """What is another in each process."""
    return {"losses": live.step.losses.cpu(), "random": randomness.random_state(live.device)}


def save(live: Live, folder: Folder) -> None:
    """Writes a checkpoint; of several processes, the first does.

    Raises:
        checkpoint.CheckpointError: it cannot be written. The ones before are still there.
    """
    if live.position:  # in the middle of an epoch the device is behind: what it still has to do is training
        started = time.perf_counter()
        live.step.losses.tolist()
        live.seconds += time.perf_counter() - started
    now = state(live)
    now["own"] = parallel.gathered(now["own"][0])
    if live.rank == 0:
        digest, plain = identity(live.recipes)
        checkpoint.save(folder.checkpoints, now, step=live.steps_done, recipe_digest=digest, recipe=plain)


def resume(live: Live, folder: Folder, *, cut: bool = True) -> bool:
    """Takes up the newest checkpoint of a folder, if there is one.

    Args:
        live: runs of the folder's recipes.
        folder: of these recipes.
        cut: whether records that were written after the checkpoint are removed from the folder.

    Returns:
        Whether there was one.

    Raises:
        checkpoint.CheckpointError: there is one and it cannot be read, is of another recipe or other data, or was
            written by another number of processes or on another kind of device.
        parallel.ProcessError: not all processes find the same.
    """
    digest, plain = identity(live.recipes)
    there = checkpoint.steps(folder.checkpoints)
    found = checkpoint.load(folder.checkpoints, digest, plain) if there else None
    if len(set(parallel.gathered(found and found.step))) > 1:
        raise parallel.ProcessError(f"all processes must find the same checkpoint in {str(folder.path)!r}")
    if found is None:
        if cut and live.rank == 0:
            folder.cut(0)
        return False
    if live.rank == 0:
        for message in found.messages:  # that a damaged one is passed over
            warnings.warn(message, stacklevel=2)
    here = {"processes": ("ranks", live.policy.ranks), "images": ("images", len(live.data.train_x))}
    for what, (key, now) in here.items():
        if cut and found.state[key] != now:
            raise checkpoint.CheckpointError(
                f"{str(folder.path)!r} was trained with {found.state[key]} {what} and goes on with as many, got {now}"
            )
    if not cut:
        found.state["own"] = [_own(live)]  # nothing is drawn by looking
    try:
        load(live, found.state)
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{str(found.path)!r} cannot be taken up here: {error}") from error
    live.history[:] = folder.history()[: found.state["records"]]
    if cut and live.rank == 0:
        folder.cut(found.state["records"])
    return True


def identity(recipes: Sequence[Recipe]) -> tuple[str, list[dict[str, Any]]]:
    """What a checkpoint must agree in with who takes it up."""
    return "+".join(r.digest() for r in recipes), [r.to_dict() for r in recipes]
