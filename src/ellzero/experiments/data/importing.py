"""Code of the user's by its name, `MODULE:NAME`: found from the working folder too, and run with errors of one line.

This file does not know what the code is for.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

_WORD = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
NAME = f"{_WORD}:{_WORD}"
_OTHERS = str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<"


@final
class OwnError(ValueError):
    """Code or data of the user's cannot be used: in one line what it is, why, and what to do."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing  # it is not there at all


def is_code(word: str) -> bool:
    """Whether a word names code of the user's."""
    return re.fullmatch(NAME, word) is not None


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Turns what the user's code raises into an OwnError that says where in it; `doing` says what was tried."""
    try:
        yield
    except OwnError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise OwnError(f"{doing} failed: {' '.join(said.split())}{where}") from error


def find(name: str) -> Any:
    """What `MODULE:NAME` names."""
    where, _, what = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        with told(f"importing `{where}`"):
            module = importlib.import_module(where)
    except OwnError as error:
        lacks = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if lacks and f"{where}.".startswith(f"{lacks}."):
            hint = f": write `{where[:-3]}:{what}`" * where.endswith(".py")
            raise OwnError(
                f"there is no module `{lacks}` here or among the installed packages{hint}", missing=True
            ) from None
        raise
    try:
        return reduce(getattr, what.split("."), module)
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        has = f"; it has {', '.join(public[:6])}" if public else ""
        raise OwnError(f"module `{where}` has no `{what}`{has}", missing=True) from None


def call(name: str, *args: Any) -> Any:
    """What the function or class gives."""
    function = find(name)
    if not callable(function):
        raise OwnError(f"`{name}` must be a function or a class, got {type(function).__name__}")
    with told(f"calling `{name}`{' without arguments' * (not args)}"):
        return function(*args)


def checksum(name: str) -> dict[str, str]:
    """The file that `MODULE:NAME` comes from, and its SHA-256."""
    find(name)
    file = sys.modules[name.partition(":")[0]].__file__ or ""
    content = Path(file).read_bytes() if os.path.isfile(file) else b""
    return {"file": file, "sha256": hashlib.sha256(content).hexdigest()}


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """A block in which what Python, numpy and torch draw on the CPU is a function of `key`; then all is as before."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    ours, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (users draw there)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which reaches GPUs
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002
        torch.set_rng_state(torchs)
