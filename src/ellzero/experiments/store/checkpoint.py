"""Checkpoints: a run's state in a folder, of which a crash at any moment leaves the newest complete one readable.

A checkpoint is one safetensors file without pickle and code: the tensors of the state, and in the header, as JSON, what
is around them, the recipes, and a SHA-256 of it all. It gets its name when it is on the disk to the last byte. One
process writes to a folder at a time. What the state means is not known here.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ellzero.experiments.recipe import differences
from ellzero.out.files import FileError, remove_leftovers, write_bytes, writing
from ellzero.out.saving import checksum, installed_version, serialized

FORMAT, FORMAT_VERSION = "ellzero.checkpoint", 1
Recipes = Sequence[Mapping[str, Any]]  # of a stack, as plain data


@final
class CheckpointError(Exception):
    """A checkpoint could not be written or read, or is not this run's; the message says what to do about it."""


class _DamagedError(Exception):
    """A file is cut off, changed or unreadable; an older one may do."""


@final
@dataclass(frozen=True)
class Checkpoint:
    """What `load` found."""

    path: Path
    step: int
    state: dict[str, Any]  # as given to `save`, with its tensors on the CPU
    messages: tuple[str, ...] = ()  # a sentence for each newer file that could not be read; tell the user


def save(
    folder: Path,
    state: Mapping[str, Any],
    *,
    step: int,
    recipe_digest: str | None = None,
    recipes: Recipes | None = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint, all or nothing, and then removes all but the last `keep`; one of the same step is replaced.

    A state is nested dictionaries (keys: str, int, None), lists and tuples of tensors, str, int, float, bool and None.
    The digest says which recipes it belongs to, and these, in what others differ. A CheckpointError says that it cannot
    be written; older checkpoints are still there then.
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")
    if not isinstance(state, Mapping):
        raise TypeError(f"`state` must be a dictionary, got {type(state).__name__}")
    tensors: dict[str, Tensor] = {}
    tree, target = _flatten(state, "state", tensors), _file(folder, step)
    header = json.dumps({"step": step, "recipe_digest": recipe_digest, "recipe": recipes, "state": tree})
    about = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "ellzero": installed_version()}
    about |= {"torch": torch.__version__, "header": header, "sha256": checksum(header, tensors)}
    data = serialized(tensors, about)
    try:
        with writing(folder):
            folder.mkdir(exist_ok=True)  # not those above it: the run's folder is gone if it is not there
            remove_leftovers(folder, "step-*")  # first, because the disk may be full of them
            write_bytes(target, data)
            older = [number for number in steps(folder) if number < step]
            for number in older[: max(0, len(older) + 1 - keep)]:
                _file(folder, number).unlink(missing_ok=True)
    except FileError as error:
        found: list[int] = []
        with suppress(OSError):  # a folder that cannot be read either
            found = steps(folder)
        kept = f"the checkpoint of step {found[-1]} is still there" if found else "there is no older one"
        raise CheckpointError(f"{error}; a checkpoint needs {len(data) / 1e6:.1f} MB; {kept}") from error
    return target


def steps(folder: Path) -> list[int]:
    """The numbers of the checkpoints in a folder, rising, read or not; none where there is no folder."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{9,})\.safetensors", name)))


def load(path: Path, recipe_digest: str | None = None, recipes: Recipes | None = None) -> Checkpoint:
    """Reads the newest checkpoint of a folder that is complete and undamaged, or one file; of any recipe, or of the one
    with this digest. A CheckpointError says that there is none, or none that can be read, or of another recipe.
    """
    candidates = [_file(path, step) for step in reversed(steps(path))] if path.is_dir() else [path]
    if not candidates or not candidates[0].exists():
        raise CheckpointError(f"`path` must be a checkpoint or a folder with one, and there is none at {str(path)!r}")
    damages: list[str] = []
    for candidate in candidates:
        try:
            header, state = _read(candidate)
        except _DamagedError as damage:
            damages.append(f"{candidate.name} is damaged ({damage})")
            continue
        if recipe_digest is not None and header["recipe_digest"] != recipe_digest:
            _refuse_recipe(candidate, header["recipe"], recipes)
        messages = (f"{damage} and is passed over for {candidate.name}" for damage in damages)
        return Checkpoint(candidate, header["step"], state, tuple(messages))
    raise CheckpointError(f"no checkpoint in {str(path)!r} can be read: {'; '.join(damages)}")


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def _refuse_recipe(path: Path, theirs: Recipes | None, ours: Recipes | None) -> NoReturn:
    found = [] if theirs is None or ours is None else differences(_fields(theirs), _fields(ours))
    raise CheckpointError(
        f"{str(path)!r} is a checkpoint of another recipe: {'; '.join(found) or 'it does not say in what it differs'}. "
        f"Resume with its own recipe, or train in another folder"
    )


def _fields(stack: Recipes) -> dict[str, Any]:
    """All fields but names, which are no part of a digest; those of a stack with the number of the run: `1.seed`."""
    numbered = [(f"{run}." if len(stack) > 1 else "", fields) for run, fields in enumerate(stack)]
    return {number + name: value for number, fields in numbered for name, value in fields.items() if name != "name"}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and state of a file, proven to be what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            version = metadata.get("format_version")
            if metadata.get("format") == FORMAT and version != str(FORMAT_VERSION) and str(version).isdecimal():
                raise CheckpointError(
                    f"{str(path)!r} has version {version} of the format, written by ellzero {metadata.get('ellzero')}, "
                    f"and this one reads version {FORMAT_VERSION}"
                )
            # Copies: what comes out of the file is a view of it, and would go with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("format") != FORMAT:
            raise _DamagedError(f"its header says format {metadata.get('format')!r}, not {FORMAT!r}")
        if checksum(metadata["header"], tensors) != metadata["sha256"]:
            raise _DamagedError("its checksum is wrong")
        header = json.loads(metadata["header"])
        return header, _unflatten(header["state"], tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError(str(error)) from error


# JSON knows no tuples, no tensors and no keys but strings: dictionaries are stored as {"dict": [[key, value], ...]},
# tuples as {"tuple": [...]}, tensors as {"tensor": name}. Floats survive: Python writes as many digits as it takes.


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            if value.layout != torch.strided or value.is_meta:
                found = f"{value.layout} on {value.device}"
                raise TypeError(f"`{path}` must be a plain dense tensor, got one that is {found}")
            name = f"{len(tensors)}:{path.removeprefix('state.')}"  # numbered, because a key may have dots in it
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
        case Mapping():
            for key in value:
                if type(key) not in (str, int, type(None)):
                    raise TypeError(f"`{path}` must have keys of str, int or None, got {key!r}")
            return {"dict": [[key, _flatten(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
        case tuple():
            return {"tuple": [_flatten(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
        case list():
            return [_flatten(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"`{path}` must be a tensor or plain data, got {type(value).__name__}")


def _unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    match tree:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: _unflatten(item, tensors) for key, item in items}
        case {"tuple": items}:
            return tuple(_unflatten(item, tensors) for item in items)
        case list():
            return [_unflatten(item, tensors) for item in tree]
    return tree


def random_state(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state of every global random generator: Python's, numpy's, torch's on the CPU and, on a GPU, that one's."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (the global one is meant)
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (kind, numbers, int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Puts every global random generator back where it was; a ValueError where that was another kind of device."""
    cuda = torch.device(device).type == "cuda"
    if cuda != ("cuda" in state):
        there, here = ("a GPU", "the CPU") if "cuda" in state else ("the CPU", "a GPU")
        raise ValueError(f"`state` must be of the kind of device that the run is on, got one of {there} for {here}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if cuda:
        torch.cuda.set_rng_state(state["cuda"], device)
