"""Plain data in JSON files: written whole, read with a sentence about what is wrong. It does not know what it means."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from ellzero.out.files import write_text
from ellzero.out.saving import installed_version


@final
class FolderError(Exception):
    """A folder is no run, is damaged, or is in use; the message says which."""


def plain(value: Any) -> Any:
    """The same data as JSON can hold it: NaN and infinity become None, tuples lists."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def text(content: Any, indent: int | None = None) -> str:
    """Plain data as a JSON file holds it."""
    return json.dumps(plain(content), indent=indent, allow_nan=False) + "\n"


def write(path: Path, content: Any, indent: int | None = None) -> None:
    """Writes plain data as a JSON file, whole or not at all; a FileError says why it cannot."""
    write_text(path, text(content, indent))


def read(path: Path) -> Any:
    """What a JSON file holds; a FolderError says that it cannot be read, or is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FolderError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        raise FolderError(f"{str(path)!r} is damaged: {error}") from error


def read_format(path: Path, kind: str, version: int) -> dict[str, Any]:
    """What a JSON file holds that says its own format by the keys `format` and `format_version`; a FolderError where
    it says another.
    """
    content = read(path)
    if not isinstance(content, dict) or content.get("format") != kind:
        raise FolderError(f"{str(path)!r} is damaged or something else: it does not say format {kind!r}")
    if content.get("format_version") != version:
        raise FolderError(
            f"{str(path)!r} has version {content.get('format_version')} of the format, and this ellzero "
            f"({installed_version()}) reads version {version}"
        )
    return content
