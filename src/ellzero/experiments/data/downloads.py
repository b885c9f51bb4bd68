"""What a data set is, and where its files come from: a folder of the user's, or a public mirror.

`contents` hands on nothing whose SHA-256 is not the original's, and a download gets its name only when it is complete
and checked. Nothing here knows what is in the files.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import pooch  # type: ignore[import-untyped]
import requests
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from ellzero.out.files import FileError, replacing, writing

VARIABLE = "ELLZERO_DATA"
_TIMEOUT = 30  # seconds without an answer, after which the next mirror is asked
_CHUNK = 1 << 16
_REMEDY = "delete it, and it will be downloaded again"


@final
class DataError(RuntimeError):
    """A data file is missing, cut off or corrupted. The message names it."""


@final
@dataclass(frozen=True)
class File:
    """What a public file must be, and where it is offered."""

    path: str  # below the data folder, and in its archive
    size: int
    sha256: str
    urls: tuple[str, ...] = ()  # mirrors, in the order in which they are asked
    archive: File | None = None  # the `.tar.gz` that holds it, if it is not offered by itself
    by_hand: str = ""  # how to get it where no mirror offers it: a sentence

    def checked(self, data: bytes, name: str) -> bytes:
        """The same bytes, if they are this file's; else a DataError, which calls them by `name`."""
        if len(data) != self.size:
            what = "cut off" if len(data) < self.size else "not the original"
            raise DataError(f"{name} is {what}: it has {len(data):,} bytes instead of {self.size:,}; {_REMEDY}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.sha256:
            raise DataError(f"{name} is corrupted: its SHA-256 is {digest} instead of {self.sha256}; {_REMEDY}")
        return data


Bytes = NDArray[np.uint8]
# Training images (N, C, H, W) and labels (N,), test images and labels; of text characters, and those that follow.
Split = tuple[Bytes, Bytes, Bytes, Bytes]


class Facts(NamedTuple):
    """A data set. Each writes down its own, in a file of its own."""

    shape: tuple[int, ...]  # of an image: channels, height, width; of text: how many characters are read at once
    classes: tuple[str, ...]  # of text: its characters
    mean: tuple[float, ...]  # per channel, of the training pixels in [0, 1], as the papers' code has it
    std: tuple[float, ...]
    read: Callable[[Sequence[tuple[bytes, str]]], Split]  # of the contents of `files`, each with its name for errors
    files: tuple[File, ...] = ()  # none if it comes with the library

    @property
    def is_text(self) -> bool:
        return len(self.shape) == 1

    def held_out(self, count: int) -> Facts:
        """The same with its last training images to test on: to choose settings by."""

        def read(found: Sequence[tuple[bytes, str]]) -> Split:
            x, y, _, _ = self.read(found)
            return x[:-count], y[:-count], x[-count:], y[-count:]

        return self._replace(read=read)


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder that data files are looked up in and downloaded to: `data_dir`, else what `$ELLZERO_DATA` names, else
    the user's cache, which is made when it is needed.
    """
    for name, value in (("`data_dir`", data_dir), (f"${VARIABLE}", os.environ.get(VARIABLE))):
        if value:
            folder = Path(value).expanduser()
            if not folder.is_dir():
                raise DataError(f"{name} must be a folder that exists, got {str(folder)!r}")
            return folder
    return Path(pooch.os_cache("ellzero"))


def contents(files: Sequence[File], folder: Path) -> list[bytes]:
    """The contents of files, from the folder where it has them, and downloaded into it where not.

    A file that lies there by itself is preferred to the same in an archive. What is there and is wrong is refused by a
    DataError, and never overwritten: it may be the user's.
    """
    found: dict[File, bytes] = {}
    for file in files:
        if (folder / file.path).is_file() or file.archive is None:
            found[file] = _fetched(file, folder)
    for archive in {file.archive for file in files if file not in found and file.archive is not None}:
        members = {file.path: file for file in files if file.archive == archive and file not in found}
        name = str(folder / archive.path)
        # The checked bytes themselves are unpacked, in memory: a file that changes meanwhile is not used.
        packed = io.BytesIO(_fetched(archive, folder))
        try:
            with tarfile.open(fileobj=packed, mode="r:gz") as tar:
                for member in tar:  # one pass: a seek backwards would decompress all again
                    if member.name in members and (stream := tar.extractfile(member)) is not None:
                        file = members.pop(member.name)
                        found[file] = file.checked(stream.read(), f"{file.path} in {name}")
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise DataError(f"{name} cannot be unpacked: {error}") from error
        if members:
            raise DataError(f"{name} lacks {', '.join(members)}")
    return [found[file] for file in files]


def _fetched(file: File, folder: Path) -> bytes:
    path = folder / file.path
    if not path.exists():
        _download(file, path)
    return file.checked(path.read_bytes(), str(path))


def _fetch(url: str, to: Path, size: int, bar: tqdm) -> None:
    """Not by pooch's downloader, which takes whatever comes until the disk is full."""
    with requests.get(url, stream=True, timeout=_TIMEOUT) as answer, to.open("wb") as out:
        answer.raise_for_status()
        for chunk in answer.iter_content(_CHUNK):
            if out.tell() + len(chunk) > size:
                raise ValueError(f"it gives more than the {size:,} bytes of the file")
            out.write(chunk)
            bar.update(len(chunk))


def _download(file: File, path: Path) -> None:
    failures = []
    for url in file.urls:
        # Shown where somebody looks, a terminal.
        bar = tqdm(desc=path.name, total=file.size, unit="B", unit_scale=True, disable=None)
        try:
            with bar, writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as unfinished:
                    _fetch(url, unfinished, file.size, bar)
                    digest = pooch.file_hash(unfinished)
                    if digest != file.sha256:
                        raise ValueError(f"the SHA-256 of what it gave is {digest} instead of {file.sha256}")
            return
        except (requests.RequestException, ValueError) as error:
            failures.append(f"\n  {url}: {error}")
        except FileError as error:
            raise DataError(str(error)) from error
    raise DataError(
        f"{path.name} is not in {path.parent}, and no mirror {'gave it:' if failures else 'offers it.'}"
        f"{''.join(failures)}\n{file.by_hand}{' ' * bool(file.by_hand)}"
        f"Put it there by hand, or set ${VARIABLE} to the folder that holds `{file.path}`."
    )
