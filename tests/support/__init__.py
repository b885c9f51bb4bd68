"""What tests share."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = "ELLZERO_TESTS_FINISHED"  # the environment variable with the folder of finished runs; processes inherit it


def into_nothing(figure: Any, *files: Path) -> None:
    """In place of `figures.render`: the figure is laid out and drawn once, into nothing, and its files hold a word."""
    figure.draw_without_rendering()
    for file in files:
        file.write_text("drawn", encoding="utf-8")
