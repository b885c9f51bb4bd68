"""Makes `examples/quickstart.ipynb` from `docs/quickstart.md`: text as text, examples as code, no outputs.

    python tools/make_notebook.py

One source, so that the two cannot drift apart; `tests/test_docs.py` holds the file against it; its cells run as the
examples of the page.
"""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "quickstart.md", ROOT / "examples" / "quickstart.ipynb"


def cells(page: str) -> list[dict[str, Any]]:
    parts = re.split(r"```python\n(.*?)```\n?", page, flags=re.DOTALL)  # text and code in turn
    made = []
    for number, part in enumerate(parts):
        if number % 2:
            examples = doctest.DocTestParser().get_examples(part)
            text = "".join(example.source for example in examples)
            more = {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            text = re.sub(r"\]\(([\w-]+\.md)", r"](../docs/\1", part)
            more = {"cell_type": "markdown"}
        if text.strip():
            source = text.strip().splitlines(keepends=True)
            made.append({**more, "id": f"cell-{number}", "metadata": {}, "source": source})
    return made


def notebook(page: str) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells(page), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
