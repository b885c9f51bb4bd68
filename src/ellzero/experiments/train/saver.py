"""Runs to disk and back: all that the rest of a run depends on, as one checkpoint.

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
from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.train import fitting
from ellzero.experiments.train import processes as parallel
from ellzero.experiments.train.trainer import DivergedError, Trainer
from ellzero.out import shrinking
from ellzero.out.latency.bounds import tables

_COUNTED = ("epoch", "position", "summed", "seconds")


def state(trainer: Trainer) -> dict[str, Any]:
    """All that the rest of the runs depends on, as tensors and plain data."""
    shrunk: dict[str, Any] = {}
    if trainer.recipe.shrink_at or trainer.recipe.settle_at is not None:
        units = torch.as_tensor(shrinking.there(trainer.gated))
        shrunk = {"shrinking": {"units": units, "closed_for": torch.as_tensor(trainer.closed_for)}}
    return {
        **shrunk,
        "values": {n: v.detach() for n, v in trainer.runs.values().items()},
        "buffers": dict(trainer.runs.template.named_buffers()),
        "optimizer": trainer.optimizer.state_dict()["state"],
        "average": dict(trainer.average.tensors),
        "lagrangian": trainer.lagrangian.state(),
        "dual": repr(trainer.lagrangian.dual),
        "clock": trainer.step.clock,
        "own": [_own(trainer)],
        **{name: getattr(trainer, name) for name in _COUNTED},
        "tuning": trainer.step.fixed,
        "averaging": trainer.average.active,
        "records": len(trainer.history),
        "ranks": trainer.policy.ranks,
        "images": trainer.policy.images,
        "threads": torch.get_num_threads(),
        "times": next(iter(tables(dict.fromkeys(trainer.costs.values(), 1.0))), None),
    }


def times(folder: Folder) -> str | None:
    """The table of times that the runs of a folder go by, if there is one."""
    there = any(r.cost == "latency" for r in folder.recipes) and checkpoint.steps(folder.checkpoints)
    return checkpoint.load(folder.checkpoints).state["times"] if there else None


def load(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Takes up a state; the history is the caller's to bring."""
    for name in _COUNTED:
        setattr(trainer, name, state[name])
    trainer.average.active = state["averaging"]
    # Of the run's own images, also where noise stands in for them.
    trainer.average.begins = replace(trainer.policy, images=state["images"]).average_begins
    trainer.step.clock.copy_(state["clock"])
    if "shrinking" in state:
        _refuse_other(state["values"], trainer.runs.values(), "network.gates.")  # they stay whole
        _shrink_like(trainer, state["shrinking"])
    trainer.fix(state["tuning"])
    with torch.no_grad():
        buffers = dict(trainer.runs.template.named_buffers())
        held = {"values": trainer.runs.values(), "buffers": buffers, "average": trainer.average.tensors}
        for kind, own in held.items():
            stored = state[kind]
            if kind == "buffers":  # a network may make some while it trains, which one that is new has not yet
                stored = {name: tensor for name, tensor in stored.items() if name in own}
            _refuse_other(stored, own)
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])
        trainer.step.losses.copy_(state["own"][trainer.rank]["losses"])
    trainer.hold()
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": dict(state["optimizer"]), "param_groups": groups})
    for parameter, known in trainer.optimizer.state.items():  # a file has its tensors contiguous
        for key, value in known.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape != torch.Size():
                known[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    trainer.lagrangian.load(state["lagrangian"])
    checkpoint.set_random_state(state["own"][trainer.rank]["random"], trainer.device)


def _refuse_other(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], prefix: str = "") -> None:
    """Refuses tensors of another network: one number would be copied to all places."""
    for name in [name for name in {**own, **stored} if name.startswith(prefix)]:
        there, here = (f"shape {tuple(side[name].shape)}" if name in side else "no place" for side in (stored, own))
        if there != here:
            raise ValueError(f"`{name.removeprefix('network.')}` has {there} there, and {here} in the network here")


def _shrink_like(trainer: Trainer, state: Mapping[str, Any]) -> None:
    units, present = state["units"].cpu().numpy(), shrinking.there(trainer.gated)
    if len(units) != len(present):
        raise ValueError(f"it is of a network with {len(units)} units in all, and the one here has {len(present)}")
    if (units & ~present).any():
        raise ValueError("`state` must be of a network that is no larger than this one: load it into a new trainer")
    if (present & ~units).any():
        trainer.take_out(shrinking.planned(trainer.gated, units))
    trainer.closed_for = state["closed_for"].cpu().numpy().copy()


def _own(trainer: Trainer) -> dict[str, Any]:
    """What is another in each process."""
    return {"losses": trainer.step.losses.cpu(), "random": checkpoint.random_state(trainer.device)}


def save(trainer: Trainer, folder: Folder) -> None:
    """Writes a checkpoint; of several processes, the first does. A DivergedError says that it would not be finite: the
    one before is still there then.
    """
    if trainer.position:  # in the middle of an epoch the device is behind: what it still has to do is training
        started = time.perf_counter()
        trainer.step.losses.tolist()
        trainer.seconds += time.perf_counter() - started
    now = state(trainer)
    now["own"] = parallel.gathered(now["own"][0])
    refuse_diverged(trainer, [own["losses"] for own in now["own"]])
    if trainer.rank == 0:
        digest, plain = identity(trainer.recipes)
        checkpoint.save(folder.checkpoints, now, step=trainer.steps_done, recipe_digest=digest, recipes=plain)


def refuse_diverged(trainer: Trainer, losses: Sequence[Tensor] = ()) -> None:
    """Raises a DivergedError where a number that the rest of the runs depends on is none."""
    held = [*losses, *trainer.runs.values().values(), *trainer.average.tensors.values()]
    finite = all(bool(tensor.isfinite().all()) for tensor in held)
    if not finite or any(bool(buffer.isnan().any()) for buffer in trainer.runs.template.buffers()):
        names = ", ".join(f"`{recipe.name}`, seed {recipe.seed}" for recipe in trainer.recipes)
        where = f"epoch {trainer.epoch}, step {trainer.position}"
        raise DivergedError(f"a loss or weight of {names}, is not finite at {where}: try a smaller `lr` or `gate_lr`")


def resume(trainer: Trainer, folder: Folder, *, cut: bool = True) -> bool:
    """Takes up the newest checkpoint of a folder; says whether there is one.

    With `cut`, the run goes on: with as many images and processes, and what the folder noted after the checkpoint is
    removed. Without, it is only looked at. A CheckpointError says that the checkpoint cannot be taken up here.
    """
    digest, plain = identity(trainer.recipes)
    there = checkpoint.steps(folder.checkpoints)
    found = checkpoint.load(folder.checkpoints, digest, plain) if there else None
    if len(set(parallel.gathered(found and found.step))) > 1:
        raise parallel.ProcessError(f"all processes must find the same checkpoint in {str(folder.path)!r}")
    if found is not None:
        _take_up(trainer, folder, found, cut)
    if cut and trainer.rank == 0:
        folder.cut(len(trainer.history))
    return found is not None


def _take_up(trainer: Trainer, folder: Folder, found: checkpoint.Checkpoint, cut: bool) -> None:
    if trainer.rank == 0:
        for message in found.messages:  # that a damaged one is passed over
            warnings.warn(message, stacklevel=3)
    for what, key, now in (("processes", "ranks", trainer.policy.ranks), ("images", "images", trainer.policy.images)):
        if cut and (then := found.state[key]) != now:
            raise checkpoint.CheckpointError(
                f"{str(folder.path)!r} was trained with {then} {what} and goes on with as many, got {now}"
            )
    moved, moves = found.state.get("dual", "the rules of an earlier version"), repr(trainer.lagrangian.dual)
    if cut and moved != moves and any(recipe.at_most is not None for recipe in trainer.recipes):
        why = f"was trained with multipliers that move by {moved}, and here they go by {moves}"
        raise checkpoint.CheckpointError(f"{str(folder.path)!r} {why}")
    for message in fitting.changes(folder.about, trainer.recipe, trainer.data) if trainer.rank == 0 else ():
        warnings.warn(message, stacklevel=3)
    threads = torch.get_num_threads()
    if cut and trainer.device.type == "cpu" and (then := found.state.get("threads", threads)) != threads:
        why = f"sums are rounded otherwise; OMP_NUM_THREADS={then} gives the run that was begun, to the bit"
        warnings.warn(f"the run was trained with {then} threads and goes on with {threads}: {why}", stacklevel=3)
    if not cut:
        found.state["own"] = [_own(trainer)]  # nothing is drawn by looking
    try:
        load(trainer, found.state)
    except (ValueError, KeyError) as error:
        raise checkpoint.CheckpointError(f"{str(found.path)!r} cannot be taken up here: {error}") from error
    wrote, kept = found.state["records"], folder.history(damaged=True)
    trainer.history[:] = (
        kept[:wrote] if len(kept) >= wrote else kept[: len(kept) // trainer.runs.size * trainer.runs.size]
    )
    if cut and trainer.rank == 0 and len(trainer.history) < wrote:
        lost = f"{wrote - len(trainer.history)} of {wrote} records are lost, and with them what they say of best errors"
        warnings.warn(f"the history of {str(folder.path)!r} is damaged: {lost} and seconds", stacklevel=3)


def identity(recipes: Sequence[Recipe]) -> tuple[str, list[dict[str, Any]]]:
    """What a checkpoint must agree in with who takes it up."""
    return "+".join(r.digest() for r in recipes), [r.to_dict() for r in recipes]
