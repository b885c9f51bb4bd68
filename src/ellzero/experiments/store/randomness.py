"""The state of every global random generator, taken and put back. It does not know what is drawn from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state of every global random generator: Python's, numpy's, torch's on the CPU and, on a GPU, that one's.

    Args:
        device: where the run is.

    Returns:
        Tensors and plain data, for `save`.

    Example:
        >>> before = random_state()
        >>> drawn = random.random(), torch.rand(3)
        >>> set_random_state(before)
        >>> random.random() == drawn[0], torch.equal(torch.rand(3), drawn[1])
        (True, True)
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 (the global one is meant)
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Puts every global random generator back where it was.

    Args:
        state: from `random_state`.
        device: where the run is.

    Raises:
        ValueError: the state was taken on the other kind of device; nothing is changed.
    """
    cuda = torch.device(device).type == "cuda"
    if cuda != ("cuda" in state):
        there, here = ("a GPU", "the CPU") if "cuda" in state else ("the CPU", "a GPU")
        raise ValueError(f"`state` must be of the kind of device that the run is on, got one of {there} for {here}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if cuda:
        torch.cuda.set_rng_state(state["cuda"], device)
