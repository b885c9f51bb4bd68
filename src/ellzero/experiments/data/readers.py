"""Readers of the two formats that the public data sets come in: bytes in, arrays out.

MNIST is in idx files (a magic number, the sizes, the pixels), CIFAR in binary files of records (label bytes, then the
red, green and blue planes). A file that is not as long as its header or its records say is refused by name. Nothing
here knows where files lie, or which they are.
"""

from __future__ import annotations

import gzip
import zlib
from math import prod

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_CIFAR_PIXELS = (3, 32, 32)


class DataError(RuntimeError):
    """A data file is missing, cut off or corrupted. The message names it."""


def read_idx(data: bytes, name: str) -> Bytes:
    """Reads an idx file of unsigned bytes, compressed by gzip or not.

    Args:
        data: the file's contents.
        name: what to call it in an error.

    Returns:
        The array, of as many dimensions as the file says.

    Raises:
        DataError: it is no such file, or shorter or longer than its header says.

    Example:
        >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]), "labels").tolist()
        [5, 0, 4]
    """
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{name} is cut off or corrupted: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{name} is no idx file of bytes: it begins with 0x{data[:4].hex()}, and must with 0x000008")
    header = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4))
    if len(data) != header + prod(shape):
        raise DataError(
            f"{name} is cut off or corrupted: it has {len(data):,} bytes, and by its header {header + prod(shape):,}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_cifar(data: bytes, name: str, labels: int = 1) -> tuple[Bytes, Bytes]:
    """Reads a file of CIFAR's binary version: records of label bytes and 3 × 32 × 32 pixels.

    Args:
        data: the file's contents.
        name: what to call it in an error.
        labels: label bytes of a record: 1 in CIFAR-10; 2 in CIFAR-100, coarse and fine.

    Returns:
        Images (N, 3, 32, 32) and labels (N, `labels`).

    Raises:
        DataError: it is no whole number of records.

    Example:
        >>> x, y = read_cifar(bytes([7]) + bytes(3072), "one.bin")
        >>> x.shape, y.tolist()
        ((1, 3, 32, 32), [[7]])
    """
    record = labels + prod(_CIFAR_PIXELS)
    if not data or len(data) % record:
        raise DataError(f"{name} is cut off or corrupted: {len(data):,} bytes are not whole records of {record:,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, *_CIFAR_PIXELS), records[:, :labels]
