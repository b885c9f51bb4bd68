"""Warnings that point to the user's own line. It lies in the lowest room, as all others warn, and knows no gates."""

from __future__ import annotations

import sys
import warnings

_OTHERS = ("ellzero", "torch", "accelerate", "lightning", "transformers")  # packages whose lines nobody would look at


def warn(message: str) -> None:
    """Warns at the line that led here: the nearest that is neither of this package nor of torch and its trainers."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OTHERS:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
