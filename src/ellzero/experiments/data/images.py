"""A folder of images by class, as bytes: `train/CLASS/…` and `test/CLASS/…` (or `val/`), or `CLASS/…` split by chance.

Images are decoded by Pillow, an extra. It does not know what is in them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ellzero.experiments.data.importing import OwnError

_EVERY = 5  # of so many images of a class one is to test on, where the folder does not say which
_GREY, _COLOUR = ("1", "L"), ("P", "RGB", "RGBA", "LA", "CMYK", "YCbCr")
Listed = list[tuple[Path, int]]  # files, each with the number of its class


def read_folder(home: Path) -> tuple[Any, Any, Any, Any, tuple[str, ...]]:
    """Images (N, C, H, W) and labels to train and to test on, and the names of the classes."""
    try:
        from PIL import Image
    except ImportError:
        raise OwnError("reading images needs Pillow, which is not installed: pip install 'ellzero[images]'") from None
    endings = set(Image.registered_extensions())
    if not home.is_dir():
        raise OwnError(f"`data` must be FILE.npz or a folder of images, got the file {str(home)!r}")
    folders = _folders(home)
    held_out = next((folders[name] for name in ("test", "val") if name in folders), None)
    if "train" in folders and held_out is not None:
        classes = tuple(_folders(folders["train"]))
        other = [name for name in _folders(held_out) if name not in classes]
        if other:
            raise OwnError(
                f"{str(held_out)!r} must have the classes of `train/` ({', '.join(classes)}), got {other[0]!r}"
            )
        train, test = (_listed(folder, classes, endings) for folder in (folders["train"], held_out))
    else:
        classes = tuple(folders)
        train, test = _split(home, _listed(home, classes, endings))
    if len(classes) < 2:
        raise OwnError(f"{str(home)!r} must have a folder of images for each class, and has {len(classes)} of them")
    for what, files in (("train", train), ("test", test)):
        if not files:
            raise OwnError(f"{str(home)!r} must have images to {what} on, and none was found")
    x = _decoded(Image, [file for file, _ in (*train, *test)])
    y = np.array([label for _, label in (*train, *test)])
    n = len(train)
    return x[:n], y[:n], x[n:], y[n:], classes


def _folders(home: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(home.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _listed(home: Path, classes: tuple[str, ...], endings: set[str]) -> Listed:
    found = [(file, k) for k, name in enumerate(classes) for file in sorted((home / name).glob("**/*"))]
    return [(file, k) for file, k in found if file.suffix.lower() in endings and not file.name.startswith(".")]


def _split(home: Path, files: Listed) -> tuple[Listed, Listed]:
    """The same each time: by a generator of its own, class by class."""
    draw, held_out = np.random.default_rng(0), set[int]()
    for label in sorted({label for _, label in files}):
        own = [k for k, (_, other) in enumerate(files) if other == label]
        held_out |= set(draw.permutation(own)[: len(own) // _EVERY].tolist())
    told = (
        f"has no `train/` and `test/`: one of {_EVERY} images of each class, {len(held_out)} in all, drawn with seed 0"
    )
    warnings.warn(f"{str(home)!r} {told}, are to test on, and never trained on", stacklevel=2)
    chosen: tuple[Listed, Listed] = [], []
    for k, entry in enumerate(files):
        chosen[k in held_out].append(entry)
    return chosen


def _decoded(image: Any, files: list[Path]) -> Any:
    size, mode, out = None, "L", None
    for decode in (False, True):  # headers first: a wrong size is told before all are decoded
        for k, file in enumerate(files):
            try:
                with image.open(file) as opened:
                    size = size or opened.size
                    if opened.size != size:
                        w, h = opened.size
                        raise OwnError(
                            f"all images must have one size: {str(file)!r} is {w}×{h} and {str(files[0])!r} is "
                            f"{size[0]}×{size[1]}; resize them before"
                        )
                    if opened.mode not in (*_GREY, *_COLOUR):
                        raise OwnError(f"{str(file)!r} must have 8 bits for each colour, got the mode {opened.mode!r}")
                    mode = "RGB" if opened.mode in _COLOUR else mode
                    if decode:
                        pixels = np.asarray(opened.convert(mode))
                        out = np.empty((len(files), *pixels.shape), np.uint8) if out is None else out
                        out[k] = pixels
            except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
                if isinstance(error, OwnError):
                    raise
                raise OwnError(f"{str(file)!r} cannot be read as an image: {error}") from error
    assert out is not None
    return out[:, None] if out.ndim == 3 else out.transpose(0, 3, 1, 2)
