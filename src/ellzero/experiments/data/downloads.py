"""Where data files come from: a folder of the user's, or a public mirror.

A `File` says what a file must be, to the byte. `contents` finds files in a folder, unpacked or in their archive,
fetches what is missing, and hands on nothing whose SHA-256 is not the original's. A download gets its name only when it
is complete and checked. Nothing here knows what is in the files.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pooch  # type: ignore[import-untyped]
import requests
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
    """What a public file must be, and where it is offered.

    Args:
        path: below the data folder, and in its archive.
        size: in bytes.
        sha256: digest of its contents, in hex.
        urls: mirrors, in the order in which they are asked.
        archive: the `.tar.gz` that holds it, if it is not offered by itself.
    """

    path: str
    size: int
    sha256: str
    urls: tuple[str, ...] = ()
    archive: File | None = None

    def checked(self, data: bytes, name: str) -> bytes:
        """The same bytes, if they are this file's.

        Raises:
            DataError: they are not; `name` is what the error calls them.
        """
        if len(data) != self.size:
            what = "cut off" if len(data) < self.size else "not the original"
            raise DataError(f"{name} is {what}: it has {len(data):,} bytes instead of {self.size:,}; {_REMEDY}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.sha256:
            raise DataError(f"{name} is corrupted: its SHA-256 is {digest} instead of {self.sha256}; {_REMEDY}")
        return data


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder that data files are looked up in and downloaded to.

    Args:
        data_dir: the folder; if absent, what `$ELLZERO_DATA` names; if that is not set, the user's cache.

    Raises:
        DataError: there is no such folder. (The cache is made when it is needed.)

    Example:
        >>> data_folder(".").is_dir()
        True
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

    A file that lies there by itself is preferred to the same in an archive. What is there and is wrong is refused, and
    never overwritten: it may be the user's.

    Args:
        files: which.
        folder: where; see `data_folder`.

    Raises:
        DataError: a file is cut off or corrupted, or no mirror gives it.
    """
    found: dict[File, bytes] = {}
    for file in files:
        path = folder / file.path
        if path.is_file() or file.archive is None:
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


def _download(file: File, path: Path) -> None:
    failures = []
    for url in file.urls:
        # Shown where somebody looks, a terminal. The face is the one that pooch asks for.
        bar = tqdm(desc=path.name, total=file.size, unit="B", unit_scale=True, disable=None)
        fetch = pooch.HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, timeout=_TIMEOUT)
        try:
            with bar, writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as unfinished:
                    fetch(url, str(unfinished), None)
                    digest = pooch.file_hash(unfinished)
                    if digest != file.sha256:
                        raise ValueError(f"the SHA-256 of what it gave is {digest} instead of {file.sha256}")
            return
        except (requests.RequestException, ValueError) as error:
            failures.append(f"\n  {url}: {error}")
        except FileError as error:
            raise DataError(str(error)) from error
    raise DataError(
        f"{path.name} is not in {path.parent}, and no mirror gave it:{''.join(failures)}\n"
        f"Put it there by hand, or set ${VARIABLE} to the folder that holds `{file.path}`."
    )
