"""Where a result comes from: commit, versions, device, date, command. It does not know what the result is."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ellzero.out.latency.meter import device_name
from ellzero.out.saving import installed_version


def provenance(device: torch.device | str) -> dict[str, Any]:
    """What is needed to repeat a result on this device, in words by name.

    `commit` is that of the source tree this file is tracked in, or `$COMMIT`, or None; it ends in "-dirty" where the
    tree has changes.
    """
    return {
        "commit": _commit() or os.environ.get("COMMIT"),
        "ellzero": installed_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(torch.device(device)),
        "date": datetime.date.today().isoformat(),
        "command": _command(sys.argv),
    }


def in_common(abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where several results come from, as one: what differs, such as the device, names them all."""
    keys = dict.fromkeys(key for about in abouts for key in about)
    values = {key: dict.fromkeys(about.get(key) for about in abouts) for key in keys}
    return {k: next(iter(v)) if len(v) == 1 else ", ".join(map(str, v)) for k, v in values.items()}


@cache
def _commit() -> str | None:
    """Asked once: a process runs the code that it was started with, whatever is committed meanwhile."""
    file = Path(__file__)
    git = ["git", "-C", str(file.parent)]
    try:
        # Installed into a virtual environment that lies in some other repository, it is not that one's commit.
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", file.name], capture_output=True, check=False)
        if tracked.returncode:
            return None
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # there is no git
        return None


def _command(argv: Sequence[str]) -> str:
    program = Path(argv[0]) if argv and argv[0] else Path("python")
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*words, *argv[1:]])
