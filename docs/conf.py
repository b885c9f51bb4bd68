"""Sphinx configuration. The pages are Markdown; the reference comes from the docstrings."""

import re
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import Any

project = "ellzero"
author = "The ellzero authors"
release = version = version_of("ellzero")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nitpicky = False  # torch's names are not resolved: the documentation builds without a network

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# The callbacks are subclasses of theirs; the documentation builds without them.
autodoc_mock_imports = [name for name in ("lightning", "transformers") if find_spec(name) is None]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"  # `single` backticks mean code in our docstrings
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"ellzero {release}"


def _bars_are_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """|g| is a size or an absolute value in our docstrings, not a substitution of reStructuredText."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[i] = re.sub(r"(`[^`]*`)|\|", lambda m: m[1] or r"\|", line)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _bars_are_bars)
