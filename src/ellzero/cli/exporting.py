"""A network as a file in another format: `torch.export` (.pt2) and ONNX, each proven on inputs before it gets its name.

Knows formats, and nothing of gates, recipes or runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ellzero.cli.app import FAILED, CommandError, foreseen, quiet
from ellzero.out.files import replacing
from ellzero.out.saving import load, save

Check = Callable[[Tensor], Tensor]


def refuse(path: Path) -> None:
    """Says no to a file that cannot be written, before any work is done for it.

    Raises:
        CommandError: another ending, or a folder that is not there.
    """
    if path.suffix not in _WRITERS:
        raise CommandError(f"`--to` must be a file that ends in {', '.join(_WRITERS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise CommandError(f"`--to` must lie in a folder that exists, got {str(path)!r}")
    if path.is_dir():
        raise CommandError(f"`--to` must be a file, got the folder {str(path)!r}")


def export(network: nn.Module, path: Path, example: Tensor, fresh: Callable[[], nn.Module]) -> str:
    """Writes a network to a file whose ending says the format; the number of examples in a batch stays free.

    Args:
        network: plain, in evaluation.
        path: one that `refuse` lets through.
        example: a batch of at least 3 inputs.
        fresh: makes a dense network of the same class, to read .safetensors into.

    Returns:
        What was done to check the file, in words.

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
        scale = float(ours.abs().max())
        worst = float((ours - theirs).abs().max())
        if ours.shape != theirs.shape or not worst <= 1e-4 * max(scale, 1.0):
            raise CommandError(
                f"{path.name} was not written: with a batch of {count} its outputs differ from the network's by "
                f"{worst:.3g}, where the largest is {scale:.3g}",
                FAILED,
            )


def _safetensors(
    network: nn.Module, path: Path, example: Tensor, fresh: Callable[[], nn.Module]
) -> tuple[Check | None, str]:
    save(network, path)
    again = load(fresh(), path).eval()
    return again, "loaded into a fresh network, same outputs"


def _pt2(network: nn.Module, path: Path, example: Tensor, fresh: Callable[[], nn.Module]) -> tuple[Check | None, str]:
    with quiet():
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        again = torch.export.load(path).module()
    return again, "loaded by torch.export, same outputs"


def _onnx(network: nn.Module, path: Path, example: Tensor, fresh: Callable[[], nn.Module]) -> tuple[Check | None, str]:
    try:
        import onnx  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
        import onnxscript  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"writing ONNX needs packages that are not installed ({error.name}): pip install 'ellzero[onnx]'", FAILED
        ) from error
    with quiet():
        program: Any = torch.onnx.export(
            network,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
        program.save(str(path), external_data=False)
    try:
        import onnxruntime  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None, "not checked: onnxruntime is not installed"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def reader(x: Tensor) -> Tensor:
        outputs: Sequence[Any] = session.run(None, {"input": x.numpy()})
        return torch.from_numpy(outputs[0])

    return reader, "run by onnxruntime, same outputs"


_WRITERS = {".safetensors": _safetensors, ".pt2": _pt2, ".onnx": _onnx}
