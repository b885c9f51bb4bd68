"""Stores a benchmark's numbers with what is needed to repeat them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def write(path: Path, name: str, numbers: dict[str, Any], options: dict[str, Any]) -> None:
    """Writes the numbers with options, commit, versions, machine and seed."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    record = {
        "benchmark": name,
        "options": {k: str(v) for k, v in options.items() if k != "json"},
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "seed": 0,
        **numbers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
