"""Every notebook in docs/notebooks runs from top to bottom and is kept without output."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # the frameworks' own warnings are not what a notebook is about
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as loop:
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                source, name = "".join(cell["source"]), f"{path.stem} {cell['id']}"
                # as in Jupyter: what is defined in a cell can be asked for its source
                linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
                code = compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    loop.run(result)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_output(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
