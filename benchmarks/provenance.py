"""Stores a benchmark's numbers with what is needed to repeat them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from ellzero.experiments.store.provenance import provenance


def write(path: Path, name: str, numbers: dict[str, Any], options: dict[str, Any], device: str = "cpu") -> None:
    """Writes the numbers with options, commit, versions, machine and seed."""
    here = provenance(torch.device(device)) | {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "seed": 0}
    settings = {k: v for k, v in options.items() if k != "json"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, "options": settings, **here, **numbers}, indent=2) + "\n")
