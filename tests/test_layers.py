"""Imports go one way: plugins <- kernels <- core <- adapters, and the front door is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import graftlm

ROOT = Path(__file__).parents[1]
LAYERS = ["plugins", "kernels", "core", "adapters"]
MAY_IMPORT = {layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)} | {"graftlm": {"plugins", "core"}}
# The exception tree and the starter of Python processes import nothing, so every layer may use them.
FOR_ALL = ("graftlm.core.errors", "graftlm.kernels.jit.python_process")
# The command line starts the server, which is an adapter.
COMMANDS = (ROOT / "graftlm/cli.py", "graftlm.adapters.server")
# Scripts of a user's kind: run by path, never imported.
SCRIPTS = ROOT / "graftlm/demo/pipelines"


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported at run time, at any depth; not those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for layer, allowed in MAY_IMPORT.items()
        for path in (ROOT / layer).rglob("*.py")
        if not path.is_relative_to(SCRIPTS)
        for name in imports(ast.parse(path.read_text()))
        if name.startswith(tuple(f"graftlm.{other}" for other in LAYERS if other not in allowed))
        if not name.startswith(FOR_ALL) and not (path == COMMANDS[0] and name.startswith(COMMANDS[1]))
    ]
    assert wrong == []


def test_importing_graftlm_loads_neither_torch_nor_a_framework() -> None:
    code = "import graftlm, sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = ast.literal_eval(subprocess.check_output([sys.executable, "-c", code], text=True))
    heavy = {"torch", "numpy", "transformers", "langchain_core", "dspy", "guidance", "llama_index", "pluggy", "typer"}
    assert heavy & set(loaded) == set()


def test_every_public_name_resolves_and_is_the_one_that_type_checkers_see() -> None:
    tree = ast.parse((ROOT / "graftlm/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {(node.module, a.name) for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert typed == {(module, name) for name, module in graftlm._MODULE_OF.items()}
    assert all(callable(getattr(graftlm, name)) for _, name in typed)
    assert {name for _, name in typed} <= set(dir(graftlm))
