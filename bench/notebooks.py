"""python -m bench.notebooks: write docs/notebooks/*.ipynb, the pages of DSPy and Guidance as notebooks."""

from __future__ import annotations

import json
import re
from typing import Any

from bench.harness import ROOT

PAGES = ("dspy", "guidance")
FOLDER = ROOT / "docs/notebooks"
_BLOCK = re.compile(r"(<!-- skip:[^\n]*-->\n)?```(\w+)\n(.*?)```\n", re.DOTALL)


def notebook(page: str) -> str:
    """Return the notebook of a page as JSON text: prose between code cells, one per example that runs."""
    text = (ROOT / f"docs/{page}.md").read_text()
    parts: list[tuple[str, str]] = []
    position = 0
    for block in _BLOCK.finditer(text):
        code = block[2] == "python" and block[1] is None
        parts += [
            ("markdown", text[position : block.start()]),
            ("code" if code else "markdown", block[3 if code else 0]),
        ]
        position = block.end()
    parts.append(("markdown", text[position:]))
    kept = [(kind, source.strip()) for kind, source in parts if source.strip()]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    cells = [_cell(i, kind, source) for i, (kind, source) in enumerate(kept)]
    body = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": source.splitlines(keepends=True)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        (FOLDER / f"{page}.ipynb").write_text(notebook(page))


if __name__ == "__main__":
    main()
