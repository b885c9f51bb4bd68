"""Saving what comes out: `save(small, path)` writes a compact network, `load(fresh, path)` makes a dense one into it.

The file is safetensors with a header of plain JSON: no pickle, no code. The network's class is the user's to bring.
This file knows how a smaller network differs from a dense one, not why it does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors
from torch import Tensor, nn

from ellzero.gated.module import Gated
from ellzero.graph.axes import EPS
from ellzero.graph.plan import set_size
from ellzero.graph.resizing import resize, resizer
from ellzero.graph.standins.heads import pad
from ellzero.graph.standins.layers import (
    CONTRACTING,
    Closed,
    Nothing,
    Scatter,
    Select,
    following,
    put_closed,
    put_nothing,
    put_scatter,
    put_select,
)
from ellzero.graph.standins.norms import RootMeanSquare
from ellzero.graph.standins.slim import Slim, put_slim
from ellzero.graph.stored import settings_of
from ellzero.graph.tracing import canonical_names
from ellzero.graph.trials import fingerprint
from ellzero.out.files import write_bytes

FORMAT, FORMAT_VERSION = "ellzero.compact", 1
M = TypeVar("M", bound=nn.Module)


@cache  # each checkpoint asks, and it is read from a file
def installed_version() -> str:
    """The version of this package, as installed."""
    try:
        return version("ellzero")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, with the same bytes for the same contents: its own writer puts metadata in any order."""
    data = safetensors(dict(tensors), dict(metadata))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start]) | {"__metadata__": dict(sorted(metadata.items()))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[start:]


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """A SHA-256 of a header and of tensors, with their names, types and shapes."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Structure:
    """How a network differs from the dense one beyond the shapes of its tensors: plain data, the file's header."""

    network: str  # name of the class, for messages
    selects: list[str] = field(default_factory=list)  # layers with a `Select` in front
    closed: dict[str, int | None] = field(default_factory=dict)  # `Closed` layers: their outputs, None for an identity
    tied: dict[str, str] = field(default_factory=dict)  # further name of a tensor: the name that it is stored under
    groups: dict[str, int] = field(default_factory=dict)  # of every convolution: its shapes alone do not say them
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)  # numbers that other modules keep, such as of heads
    eps: dict[str, dict[str, float | None]] = field(default_factory=dict)  # of norms that follow their width
    scatters: list[str] = field(default_factory=list)  # layers with a `Scatter` behind, which has their bias
    gone: dict[str, int] = field(default_factory=dict)  # modules of blocks that are gone, as `put_nothing` takes them
    slims: dict[str, dict[str, int]] = field(default_factory=dict)  # modules with a `Slim`: its numbers
    widths: dict[str, int] = field(default_factory=dict)  # of what each `Select` picks from

    def plausible(self) -> bool:
        """Whether all is of the types above, as a file may not have it."""
        if [type(value) for value in vars(self).values()] != [str, list, *[dict] * 5, list, *[dict] * 3]:
            return False
        words = [*self.selects, *self.scatters, *self.tied.values()]
        numbers = [*self.groups.values(), *self.gone.values(), *self.widths.values()]
        if {type(kept) for kept in (*self.sizes.values(), *self.eps.values(), *self.slims.values())} - {dict}:
            return False
        if {type(eps) for kept in self.eps.values() for eps in kept.values()} - {float, type(None)}:
            return False
        if any(kept.keys() != {"whole", "width"} for kept in self.slims.values()):
            return False
        stored = (*self.sizes.values(), *self.slims.values())
        numbers += [size for sizes in stored for size in sizes.values()]
        if {type(outputs) for outputs in self.closed.values()} - {int, type(None)}:
            return False
        return {type(word) for word in words} <= {str} and {type(number) for number in numbers} <= {int}


def save(small: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a compact network to a file that `load` reads.

    Parameters and buffers are written as they are, buffers that are not in the state dict included; tied weights are
    written once. The file appears when it is complete: a crash half-way leaves what was there before. A checksum goes
    with it, the kinds and settings of the layers, and, of what `compact` or `fold` returned, outputs on a fixed input.

    Args:
        small: what `compact` or `fold` returned, or any plain module.
        path: where to.

    Raises:
        TypeError: `small` is gated still, or `path` is not a path.
        ValueError: a module of `small` keeps state that is not a tensor (`get_extra_state`), or `path` ends as files of
            another format do.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(nn.Linear(3, 2), Path(folder, "small.safetensors"))
        ...     load(nn.Linear(4, 5), Path(folder, "small.safetensors"))
        Linear(in_features=3, out_features=2, bias=True)
    """
    if not isinstance(small, nn.Module):
        raise TypeError(f"`small` must be an nn.Module, got {type(small).__name__}")
    if any(isinstance(m, Gated) for m in small.modules()):
        raise TypeError("`small` has gates still; compact it first: `save(compact(gated), path)`")
    target = _as_path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"`path` must lie in a folder that exists, got {str(target)!r}")
    if target.is_dir():
        raise IsADirectoryError(f"`path` must be a file, got the folder {str(target)!r}")
    if target.suffix in _OTHERS:
        raise ValueError(f"`path` must not end in {target.suffix}, which says another format; try `.safetensors`")
    if stateful := [key for key, value in small.state_dict().items() if not isinstance(value, Tensor)]:
        raise ValueError(f"`small` keeps state that is not a tensor, which the file cannot hold: {', '.join(stateful)}")

    members = {_at_home(name, small): tensor for name, tensor in members_of(small).items()}
    names = {_at_home(name, small): _at_home(first, small) for name, first in canonical_names(small).items()}
    # Copies: safetensors wants its tensors contiguous and in memory of their own.
    tensors = {name: members[name].detach().to("cpu", copy=True).contiguous() for name in dict.fromkeys(names.values())}
    structure = _structure(small, {n: first for n, first in names.items() if n != first})
    about = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "ellzero": installed_version()}
    about |= {"structure": json.dumps(asdict(structure)), "layers": json.dumps(fingerprint.layers(small))}
    about["outputs"] = json.dumps(fingerprint.answers(small))
    write_bytes(target, serialized(tensors, about | {"sha256": checksum(_header(about), tensors)}))


def _structure(small: nn.Module, tied: dict[str, str]) -> Structure:
    """How a network differs from a dense one."""
    structure = Structure(type(small).__qualname__, tied=tied)
    settings = Counter(id(own) for module in small.modules() for _, own in settings_of(module))
    shared = {number for number, count in settings.items() if count > 1}  # a module that lost heads has its own
    for layer, module in small.named_modules(remove_duplicate=False):
        if isinstance(module, Select | Scatter):
            kind = structure.selects if isinstance(module, Select) else structure.scatters
            kind.append(layer.rpartition(".")[0])
            if isinstance(module, Select) and module.width is not None:
                structure.widths[layer.rpartition(".")[0]] = module.width
        elif isinstance(module, Slim):
            structure.slims[layer.rpartition(".")[0]] = _sizes(module)
        elif isinstance(module, Closed | Nothing):
            (structure.gone if module.silent else structure.closed)[layer] = module.outputs
        elif type(module) is nn.Identity:
            structure.closed[layer] = None
        elif isinstance(module, _GROUPED):
            structure.groups[layer] = module.groups
        elif (resizer(module) is None or not members_of(module)) and (sizes := _sizes(module, shared)):
            structure.sizes[layer] = sizes
        if eps := eps_of(module):
            structure.eps[layer] = eps
    return structure


def load(model: M, path: str | os.PathLike[str]) -> M:
    """Makes a fresh dense model into the network that a file holds, in place.

    Every parameter and buffer is replaced by the file's, in the file's dtype and on the device of the one it replaces
    (on the CPU for one on the meta device); the layers' attributes, `Select`s and `Closed` layers follow. Mode, hooks
    and `requires_grad` stay as they are.

    Args:
        model: a dense network of the class that was attached to, with the same arguments; its numbers do not matter.
        path: a file that `save` wrote.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a plain module, or `path` not a path.
        ValueError: the file is not one that `save` wrote, or is damaged, or it is of another network: other shapes,
            other layers, other outputs. The model is untouched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module, got {type(model).__name__}")
    if any(isinstance(m, Gated) for m in model.modules()):
        raise TypeError("`model` must be a fresh dense network of the user's own class, got one with gates")
    if any(isinstance(m, Select | Scatter | Closed | Nothing | Slim) for m in model.modules()):
        raise ValueError("`model` must be a fresh dense network, got one that was made smaller already")
    source = _as_path(path)
    structure, tensors, layers, answers = _read(source)
    names = {name: name for name in tensors} | structure.tied  # of each member the name that its tensor is stored under

    def refuse(what: str) -> NoReturn:
        raise ValueError(
            f"`path` is the file of another network than `model` (a `{structure.network}` was saved, this is a "
            f"`{type(model).__qualname__}`): {what} in {str(source)!r}"
        )

    _check(model, structure, tensors, names, refuse)
    if layers is not None:
        gone = [name for name in structure.closed if members_of(model.get_submodule(name))]
        gone += [name for name, _ in model.named_modules(remove_duplicate=False) if _lies_in(name, structure.gone)]
        if (differs := fingerprint.difference(layers, fingerprint.layers(model), gone)) is not None:
            refuse(differs)
    if answers is not None and (trial := fingerprint.copied(model)) is not None:
        _fill(trial, structure, {name: tensor.clone() for name, tensor in tensors.items()}, names)
        if (differs := fingerprint.deviation(trial, answers)) is not None:
            refuse(differs)
    _fill(model, structure, tensors, names)
    return model


def _fill(model: nn.Module, structure: Structure, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    members = members_of(model)
    for layer, outputs in structure.closed.items():
        if outputs is not None or members_of(model.get_submodule(layer)):  # an identity of the user's is one already
            put_closed(model, layer, outputs)
    for layer, number in structure.gone.items():
        put_nothing(model, layer, number)
    modules = dict(model.named_modules(remove_duplicate=False))
    new: dict[str, Tensor] = {}
    changed: dict[int, tuple[str, nn.Module]] = {}
    for name, stored in names.items():
        if name not in members:  # the index of a `Select`
            continue
        layer, _, key = name.rpartition(".")
        module, old = modules[layer], members[name]
        if stored not in new:
            moved = tensors[stored].to("cpu" if old.device.type == "meta" else old.device)
            new[stored] = nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved
        if old.shape != new[stored].shape:
            changed[id(module)] = (layer, module)
        setattr(module, key, new[stored])  # not by `_parameters`: recurrent layers keep a list of their own
    for layer, module in changed.values():
        if layer in structure.groups:
            module.groups = structure.groups[layer]  # type: ignore[assignment]
        resize(module)
    for layer, sizes in structure.sizes.items():
        for key, size in sizes.items():
            if 0 <= size < _sizes(modules[layer]).get(key, 0):
                set_size(modules[layer], key, size)
    for layer, kept in structure.eps.items():
        for key in kept.keys() & eps_of(modules[layer]).keys():
            setattr(modules[layer], key, kept[key])
    for layer, slim in structure.slims.items():
        put_slim(modules[layer], **slim)
    for layer in {id(modules[layer]): layer for layer in structure.selects}.values():  # a shared layer once
        put_select(modules[layer], tensors[names[_inside(layer, "select.index")]], structure.widths.get(layer))
    for layer in {id(modules[layer]): layer for layer in structure.scatters}.values():
        outputs = members[_inside(layer, "weight")].shape[0]
        put_scatter(modules[layer], tensors[names[_inside(layer, "scatter.index")]], outputs)
    pad(modules.values())


_OTHERS = {".pt", ".pth", ".pt2", ".ckpt", ".pkl", ".bin", ".onnx", ".npz"}  # who opens one expects what it says
_GROUPED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _as_path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` must be a str or a path, got {type(path).__name__}")
    return Path(path)


def _sizes(module: nn.Module, shared: Collection[int] = ()) -> dict[str, int]:
    """The whole numbers that a module keeps, and those in its settings but for `shared` ones, by their `id`."""
    kept = {f"{name}.": vars(own) for name, own in settings_of(module) if id(own) not in shared}
    return {
        prefix + key: value
        for prefix, numbers in {"": vars(module), **kept}.items()
        for key, value in numbers.items()
        if type(value) is int and key[0] != "_"
    }


def eps_of(module: nn.Module) -> dict[str, float | None]:
    """What a norm that follows its width, of torch or of one's own, adds under the root."""
    follows = resizer(module) is None or isinstance(module, nn.RMSNorm | RootMeanSquare)
    kept = {key: value for key, value in vars(module).items() if EPS.search(key)} if follows else {}
    return {key: value for key, value in kept.items() if type(value) in (float, type(None))}


def _at_home(name: str, model: nn.Module) -> str:
    """A name as in the dense network: a `Scatter` has the bias of its layer."""
    path, _, key = name.rpartition(".")
    if key == "bias" and path.endswith(".scatter") and isinstance(model.get_submodule(path), Scatter):
        return f"{path.removesuffix('.scatter')}.{key}"
    return name


def members_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _inside(layer: str, name: str) -> str:
    """The full name of what a layer has; a model may be one layer, without a name of its own."""
    return f"{layer}.{name}" if layer else name


def _lies_in(name: str, layers: Iterable[str]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def _most(module: nn.Module) -> int:
    """The largest number that `put_nothing` may take in the place of a module."""
    return int(module.weight.shape[0]) if isinstance(module, CONTRACTING) else 16  # entries of a tuple


def _header(metadata: Mapping[str, str]) -> str:
    return "\n".join(metadata[key] for key in ("structure", "layers", "outputs"))


def _read(path: Path) -> tuple[Structure, dict[str, Tensor], fingerprint.Layers | None, dict[str, Any] | None]:
    """What a file holds; layers and outputs are None where it does not say them, as those of before do not."""
    if path.is_dir():
        raise IsADirectoryError(f"`path` must be a file, got the folder {str(path)!r}")
    if not path.exists():
        raise FileNotFoundError(f"`path` must be a file that `save` wrote, and there is no {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its header says format {metadata.get('format')!r}, not {FORMAT!r}")
            if metadata.get("format_version") != str(FORMAT_VERSION):
                raise ValueError(
                    f"it has version {metadata.get('format_version')} of the format, written by ellzero "
                    f"{metadata.get('ellzero')}, and this one reads version {FORMAT_VERSION}"
                )
            structure = Structure(**json.loads(metadata["structure"]))
            if not structure.plausible():
                raise ValueError(f"its header is damaged: {metadata['structure'][:80]}")
            # Copies: what comes out of the file is a view of it, and would change with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        new = metadata.keys() & {"sha256", "layers", "outputs"}
        if new and checksum(_header(metadata), tensors) != metadata["sha256"]:
            raise ValueError("it is damaged: its checksum is wrong")
        layers, answers = (json.loads(metadata.get(key, "null")) for key in ("layers", "outputs"))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"`path` must be a file that `save` wrote, got {str(path)!r}: {error}") from error
    return structure, tensors, layers, answers


def _check(
    model: nn.Module,
    structure: Structure,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Refuses tensors that do not fit, before anything is changed."""
    modules, members = dict(model.named_modules(remove_duplicate=False)), members_of(model)
    kept = (structure.selects, structure.closed, structure.gone, structure.groups, structure.sizes, structure.eps)
    for layer in (layer for layers in (*kept, structure.scatters, structure.slims) for layer in layers):
        if layer not in modules:
            refuse(f"there is a layer `{layer}`")
    expected = set(members)
    for layer, outputs in structure.closed.items():
        behind = tuple(f"{layer}.{child}." for child in following(modules[layer]))
        expected = {name for name in expected if name.startswith(behind) or not name.startswith(f"{layer}.")}
        if outputs is not None:
            if not isinstance(modules[layer], CONTRACTING):
                refuse(f"`{layer}` is a linear or convolutional layer")
            if not 0 <= outputs <= members[f"{layer}.weight"].shape[0]:
                refuse(f"`{layer}` has {outputs} outputs")
            expected |= {f"{layer}.bias"} & members.keys() if outputs else set()
        elif isinstance(modules[layer], CONTRACTING):
            refuse(f"`{layer}` is an identity")
    expected = {name for name in expected if not _lies_in(name, structure.gone)}
    if odd := [layer for layer, number in structure.gone.items() if not 0 <= number <= _most(modules[layer])]:
        refuse(f"{_few(odd)} gave as much before it was gone")
    if odd := [layer for layer, slim in structure.slims.items() if not 0 < slim["width"] != slim["whole"] > 0]:
        refuse(f"{_few(odd)} is shown another width than its input has")
    for layer, groups in structure.groups.items():
        if not isinstance(conv := modules[layer], _GROUPED) or not 1 <= groups <= conv.groups:
            refuse(f"`{layer}` is a convolution in {groups} groups")
    selects = {_inside(layer, "select.index"): layer for layer in structure.selects}
    scatters = {_inside(layer, "scatter.index"): layer for layer in structure.scatters}
    expected |= {*selects, *scatters}
    if expected != stored.keys():
        missing, unexpected = sorted(expected - stored.keys()), sorted(stored.keys() - expected)
        refuse(f"missing {_few(missing)}, unexpected {_few(unexpected)}")
    for name, first in stored.items():
        new, old = tensors.get(first), members.get(name)
        if new is None:
            refuse(f"`{name}` is tied to `{first}`, which is missing")
        if old is None:  # the index of a `Select`
            continue
        if new.ndim != old.ndim or any(n > o for n, o in zip(new.shape, old.shape, strict=True)):
            refuse(f"`{name}` has shape {tuple(new.shape)}, which does not fit into {tuple(old.shape)}")
        if new.is_floating_point() != old.is_floating_point() or new.is_complex() != old.is_complex():
            refuse(f"`{name}` is of {new.dtype}, here it is of {old.dtype}")
    for dim, kind, picks in ((0, nn.Linear, scatters), (1, CONTRACTING, selects)):
        for name, layer in picks.items():
            if not isinstance(modules[layer], kind) or layer in structure.closed:
                refuse(f"`{layer}` is a {'linear' if dim == 0 else 'linear or convolutional'} layer")
            index, weight = tensors[stored[name]], _inside(layer, "weight")
            most, left = members[weight].shape[dim], tensors[stored[weight]].shape[dim]
            most = min(most, structure.widths.get(layer, most)) if dim else most
            if index.dtype != torch.int64 or index.shape != (left,) or not bool(((index >= 0) & (index < most)).all()):
                refuse(f"`{name}` does not pick {left} of at most {most} {'inputs' if dim else 'outputs'}")


def _few(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
