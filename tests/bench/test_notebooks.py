"""The notebooks are the pages, whose examples tests/test_docs.py runs."""

from __future__ import annotations

import ast
import json

import pytest

from bench.notebooks import FOLDER, PAGES, notebook


@pytest.mark.parametrize("page", PAGES)
def test_a_notebook_is_its_page(page: str) -> None:
    assert (FOLDER / f"{page}.ipynb").read_text() == notebook(page), "run python -m bench.notebooks"


@pytest.mark.parametrize("page", PAGES)
def test_every_code_cell_compiles(page: str) -> None:
    cells = json.loads(notebook(page))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    for source in code:
        compile(source, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
