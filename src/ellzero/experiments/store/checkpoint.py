"""Checkpoints: a run's state in a folder, of which a crash at any moment leaves the newest complete one readable.

A checkpoint is one safetensors file, `step-….safetensors`: the tensors of the state, and in the header, as JSON, the
containers and numbers around them, the recipe, and a SHA-256 of it all. There is no pickle and no code in it, and any
tool that reads safetensors can open it. A file gets its name when it is on the disk to the last byte. One process
writes to a folder at a time. What the state means is the business of `training`; here it is tensors and plain data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ellzero.experiments.recipe import differences
from ellzero.out.files import FileError, remove_leftovers, write_bytes, writing
from ellzero.out.saving import installed_version, serialized

FORMAT, FORMAT_VERSION = "ellzero.checkpoint", 1


@final
class CheckpointError(Exception):
    """A checkpoint could not be written or read, or is not this run's; the message says what to do about it."""


@final
@dataclass(frozen=True)
class Checkpoint:
    """What `load` found.

    Args:
        path: the file.
        step: of the run, as given to `save`.
        state: as given to `save`, with its tensors on the CPU.
        messages: a sentence for each newer file that could not be read; tell the user.
    """

    path: Path
    step: int
    state: dict[str, Any]
    messages: tuple[str, ...] = ()


def save(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    recipe_digest: str | None = None,
    recipe: Any = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint, all or nothing, and removes all but the last `keep`.

    The new one is on the disk, with its name, before an older one is removed. What killed writes left is removed first.

    Args:
        folder: where to; made if it does not exist.
        state: nested dictionaries (keys: str, int, None), lists and tuples of tensors, str, int, float, bool and None.
        step: number of the checkpoint; the highest is the newest. One with the same number is replaced.
        recipe_digest: says which recipe the state belongs to; `load` refuses another.
        recipe: the recipe as plain data (`Recipe.to_dict()`, or a list of them), to say then in what they differ.
        keep: how many checkpoints remain, this one included.

    Returns:
        The file.

    Raises:
        TypeError: `state` holds something else; nothing is written.
        ValueError: `step` or `keep` do not make sense.
        CheckpointError: the folder cannot be written to, or the disk is full. Older checkpoints are still there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in range(5):
        ...         path = save(folder, {"w": torch.ones(2) * step, "lr": 0.1}, step=step, keep=2)
        ...     path.name, steps(folder), load(folder).state
        ('step-000000004.safetensors', [3, 4], {'w': tensor([4., 4.]), 'lr': 0.1})
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")
    data = _encode(state, step, recipe_digest, recipe)
    home = Path(folder)
    target = _file(home, step)
    try:
        with writing(home):
            home.mkdir(parents=True, exist_ok=True)
            remove_leftovers(home, "step-*")  # first, because the disk may be full of them
            write_bytes(target, data)
            older = [number for number in steps(home) if number < step]
            for number in older[: max(0, len(older) + 1 - keep)]:
                _file(home, number).unlink(missing_ok=True)
    except FileError as error:
        found: list[int] = []
        with suppress(OSError):  # a folder that cannot be read either
            found = steps(home)
        kept = f"the checkpoint of step {found[-1]} is still there" if found else "there is no older one"
        raise CheckpointError(f"{error}; a checkpoint needs {len(data) / 1e6:.1f} MB; {kept}") from error
    return target


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The numbers of the checkpoints in a folder, rising, read or not; none where there is no folder."""
    home = Path(folder)
    names = [path.name for path in home.iterdir()] if home.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{9,})\.safetensors", name)))


def load(path: str | os.PathLike[str], recipe_digest: str | None = None, recipe: Any = None) -> Checkpoint:
    """Reads the newest checkpoint of a folder that is complete and undamaged; or one file.

    Args:
        path: the folder, or one file in it.
        recipe_digest: of the run that is to go on; None for any.
        recipe: its recipe as plain data, to say in what it differs.

    Returns:
        The checkpoint. Where newer files are damaged, its `messages` say so.

    Raises:
        CheckpointError: there is none, none can be read, or it is of another recipe or of another format.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(folder, {"w": torch.ones(2)}, step=1)
        ...     newest = save(folder, {"w": torch.ones(2)}, step=2)
        ...     _ = newest.write_bytes(newest.read_bytes()[:-1])
        ...     found = load(folder)
        >>> found.step, found.messages
        (1, ('step-000000002.safetensors is damaged (...) and is passed over for step-000000001.safetensors',))
    """
    source = Path(path)
    candidates = [_file(source, step) for step in reversed(steps(source))] if source.is_dir() else [source]
    if not candidates or not candidates[0].exists():
        raise CheckpointError(f"`path` must be a checkpoint or a folder with one, and there is none at {str(source)!r}")
    damages: list[str] = []
    for candidate in candidates:
        try:
            header, state = _read(candidate)
        except _DamagedError as damage:
            damages.append(f"{candidate.name} is damaged ({damage})")
            continue
        if recipe_digest is not None and header["recipe_digest"] != recipe_digest:
            _refuse_recipe(candidate, header["recipe"], recipe)
        messages = (f"{damage} and is passed over for {candidate.name}" for damage in damages)
        return Checkpoint(candidate, header["step"], state, tuple(messages))
    raise CheckpointError(f"no checkpoint in {str(source)!r} can be read: {'; '.join(damages)}")


def _file(folder: str | os.PathLike[str], step: int) -> Path:
    return Path(folder) / f"step-{step:09d}.safetensors"


def _refuse_recipe(path: Path, theirs: Any, ours: Any) -> NoReturn:
    found = [] if theirs is None or ours is None else differences(_fields(theirs), _fields(ours))
    raise CheckpointError(
        f"{str(path)!r} is a checkpoint of another recipe: {'; '.join(found) or 'it does not say in what it differs'}. "
        f"Resume with its own recipe, or train in another folder"
    )


def _fields(recipe: Any) -> dict[str, Any]:
    """All fields but names, which are no part of a digest; those of a stack with the number of the run: `1.seed`."""
    stack = recipe if isinstance(recipe, list) else [recipe]
    numbered = [(f"{run}." if len(stack) > 1 else "", fields) for run, fields in enumerate(stack)]
    return {number + name: value for number, fields in numbered for name, value in fields.items() if name != "name"}


# ---------------------------------------------------------------- the file


class _DamagedError(Exception):
    """A file is cut off, changed or unreadable; an older one may do."""


def _encode(state: Mapping[str, Any], step: int, recipe_digest: str | None, recipe: Any) -> bytes:
    if not isinstance(state, Mapping):
        raise TypeError(f"`state` must be a dictionary, got {type(state).__name__}")
    tensors: dict[str, Tensor] = {}
    tree = _flatten(state, "state", tensors)
    header = json.dumps({"step": step, "recipe_digest": recipe_digest, "recipe": recipe, "state": tree})
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "ellzero": installed_version(),
        "torch": torch.__version__,
        "header": header,
        "sha256": _checksum(header, tensors),
    }
    return serialized(tensors, metadata)


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
        if _checksum(metadata["header"], tensors) != metadata["sha256"]:
            raise _DamagedError("its checksum is wrong")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _DamagedError(str(error)) from error
    header = json.loads(metadata["header"])
    return header, _unflatten(header["state"], tensors)


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# JSON knows no tuples, no tensors and no keys but strings: dictionaries are stored as {"dict": [[key, value], ...]},
# tuples as {"tuple": [...]}, tensors as {"tensor": name}. Floats survive: Python writes as many digits as it takes.


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            if value.layout != torch.strided or value.is_meta:
                raise TypeError(
                    f"`{path}` must be a plain dense tensor, got one that is {value.layout} on {value.device}"
                )
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
