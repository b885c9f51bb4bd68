"""The command that hands a network over: `compact` writes that of a run as .safetensors, .pt2 or .onnx.

Each file is read back and compared with the network before it gets its name. Of a run nothing changes but its
compact.safetensors. The run may still be going on: what is written is its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from tyro.conf import arg

from ellzero.cli.app import FAILED, CommandError, app, foreseen, quiet, say, warn
from ellzero.cli.opening import COMPACT, Index, RunPath, choose, loading, open_run, restored, size, small_network
from ellzero.experiments import data, networks
from ellzero.experiments.train.building import network as dense_network
from ellzero.out.files import replacing
from ellzero.out.saving import load, save

Fresh = Callable[[], nn.Module]  # makes a dense network of the same class, to read .safetensors into
Check = Callable[[Tensor], Tensor]  # what a file computes


@app.command
def compact(
    run: RunPath,
    to: Annotated[
        tuple[str, ...] | None,
        arg(metavar="FILE [FILE ...]", help_behavior_hint="(default: compact.safetensors in RUN)"),
    ] = None,
    index: Index = None,
) -> None:
    """Write the compact network of a run to files. The run's data are not needed.

    For example: ellzero compact runs/demo-seed0 --to small.pt2 small.onnx

    Args:
        run: folder of a run, finished or not.
        to: files; the ending says the format: .safetensors (for `ellzero.load`), .pt2 (torch.export) or .onnx. Each is
            read back and compared with the network before it gets its name.
        index: which run of a stack, from 0.
    """
    if to == ():
        raise CommandError("`--to` must be followed by at least one file, such as `--to small.onnx`, got none")
    folder = open_run(run)
    number = choose(folder, index)
    recipe = folder.recipes[number]
    files = [folder.path / COMPACT] if to is None else [Path(file) for file in to]
    for file in files:
        _refuse(file)
    trainer = restored(folder)
    small = small_network(trainer.network(number))
    if recipe.recalibrate and not trainer.done and networks.find(recipe.network).has_batch_norm:
        warn("the run is not finished: batch-norm statistics are those of training, and gathered anew at its end alone")
    fresh = partial(dense_network, recipe, len(data.KNOWN[recipe.data].classes))
    example = data.scaled(data.stand_in(recipe.data, 3).train_x)
    parameters, before = size(small), size(fresh())
    say(f"{recipe.name}, seed {recipe.seed}: {parameters:,} of {before:,} parameters ({parameters / before:.2%}).")
    for file in files:
        how = _export(small, file, example, fresh)
        say(f"{file} ({file.stat().st_size / 1e6:.2f} MB; {how})")
        if file.suffix == ".safetensors":
            say(*(f"    {line}" for line in loading(recipe, file)))


def _refuse(path: Path) -> None:
    """Says no to a file that cannot be written, before any work is done for it."""
    if path.suffix not in _WRITERS:
        raise CommandError(f"`--to` must be a file that ends in {', '.join(_WRITERS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise CommandError(f"`--to` must lie in a folder that exists, got {str(path)!r}")
    if path.is_dir():
        raise CommandError(f"`--to` must be a file, got the folder {str(path)!r}")


def _export(network: nn.Module, path: Path, example: Tensor, fresh: Fresh) -> str:
    """Writes a network to a file that takes batches of any size; says how the file was checked.

    Raises:
        CommandError: a package is missing, the disk is full, or the file does not compute what the network does;
            there is none then.
    """
    with foreseen(), replacing(path) as unfinished:
        reader, how = _WRITERS[path.suffix](network, unfinished, example, fresh)
        if reader is not None:
            _compare(network, reader, example, path)
    return how


def _compare(network: nn.Module, reader: Check, example: Tensor, path: Path) -> None:
    for count in dict.fromkeys((1, 2, len(example))):
        with torch.no_grad():
            ours, theirs = network(example[:count]), reader(example[:count])
        scale, worst = float(ours.abs().max()), float((ours - theirs).abs().max())
        if ours.shape != theirs.shape or not worst <= 1e-4 * max(scale, 1.0):
            raise CommandError(
                f"{path.name} was not written: with a batch of {count} its outputs differ from the network's by "
                f"{worst:.3g}, where the largest is {scale:.3g}",
                FAILED,
            )


# ---------------------------------------------------------------- formats: each writes a file, and reads it back


def _safetensors(network: nn.Module, path: Path, example: Tensor, fresh: Fresh) -> tuple[Check | None, str]:
    save(network, path)
    return load(fresh(), path).eval(), "loaded into a fresh network, same outputs"


def _pt2(network: nn.Module, path: Path, example: Tensor, fresh: Fresh) -> tuple[Check | None, str]:
    with quiet():
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        return torch.export.load(path).module(), "loaded by torch.export, same outputs"


def _onnx(network: nn.Module, path: Path, example: Tensor, fresh: Fresh) -> tuple[Check | None, str]:
    try:
        import onnx  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
        import onnxscript  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"writing ONNX needs packages that are not installed ({error.name}): pip install 'ellzero[onnx]'", FAILED
        ) from error
    with quiet():
        program: Any = torch.onnx.export(
            network, (example,), dynamo=True, verbose=False, input_names=["input"], output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
        program.save(str(path), external_data=False)
    try:
        import onnxruntime  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None, "not checked: onnxruntime is not installed"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), "run by onnxruntime, same outputs"


_WRITERS = {".safetensors": _safetensors, ".pt2": _pt2, ".onnx": _onnx}
