"""CaughtErrors: errors that the user's own file catches, which may make one engine look quick: it was never asked."""

from __future__ import annotations

import ast
import sys
import threading
from typing import Any

from graftlm.ab.failures import told

NAME = "__graftlm_caught__"


class CaughtErrors:
    """Notes what the `except` clauses of one file catch, from `watch` on until `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def watch(self, tree: ast.Module) -> dict[str, Any]:
        """Let every `except` clause of the tree note its error first; the names that the file must be run with."""
        _Noting().visit(tree)
        ast.fix_missing_locations(tree)
        return {NAME: self._note}

    def clear(self) -> None:
        with self._lock:
            self._errors = []

    def told(self) -> list[str]:
        """Type and text of each error, in order."""
        with self._lock:
            return [told(error) for error in self._errors]

    def _note(self) -> None:
        error = sys.exception()
        with self._lock:
            if error is not None and all(error is not one for one in self._errors):
                self._errors.append(error)


class _Noting(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        note = ast.Expr(ast.Call(ast.Name(NAME, ast.Load()), [], []))
        node.body.insert(0, ast.copy_location(note, node))
        return node
