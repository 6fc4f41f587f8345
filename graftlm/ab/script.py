"""A user's script as a pipeline: one constructor call in it is replaced, nothing else changes."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graftlm.ab.caught import CaughtErrors
from graftlm.ab.engines import framework_of_package
from graftlm.core.errors import ConfigError

ENGINE = "__graftlm_engine__"
_TEXT_CLASSES = {"OpenAI", "HuggingFacePipeline", "LlamaCpp", "VLLM", "Ollama"}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")


@dataclass(frozen=True)
class Script:
    """A script whose calls of one constructor give the engine under comparison.

    The script runs as `python script.py` would run it; what it prints is its answer.

    max_tokens  what the constructor was given as the most tokens per call; None if it was not, or not as a number
    unused      the other arguments of the constructor, which no engine is given
    """

    path: Path
    framework: str
    program: Any
    max_tokens: int | None
    unused: tuple[str, ...]
    names: Mapping[str, Any]
    caught: CaughtErrors

    @classmethod
    def load(cls, path: Path, constructor: str) -> Script:
        """Read the script and replace its calls of `constructor`, such as "ChatOpenAI" or "dspy.LM".

        Raises: ConfigError if there is no such call, or if it belongs to no framework whose engines are known.
        """
        try:
            tree = ast.parse(path.read_text(), str(path))
        except SyntaxError as error:
            raise ConfigError(f"{str(path)!r} is not Python: {error}") from error
        swap = _Swap(constructor, _imported(tree))
        swap.visit(tree)
        if not swap.calls:
            found = ", ".join(sorted(swap.others)) or "none"
            raise ConfigError(
                f"{str(path)!r} calls no {constructor!r}; constructors of known frameworks that it calls: {found}"
            )
        full = swap.found
        framework = framework_of_package(full)
        if framework is None or framework == "native":
            raise ConfigError(
                f"--swap {constructor}: {full!r} belongs to none of LangChain, DSPy, LlamaIndex, Guidance"
            )
        name = full.rpartition(".")[2]
        if framework == "langchain" and name in _TEXT_CLASSES:
            raise ConfigError(
                f"--swap {constructor}: {full!r} completes texts; engines by name are LangChain's chat models"
            )
        given = {keyword.arg: keyword.value for call in swap.calls for keyword in call.keywords if keyword.arg}
        limits = [given[key].value for key in _LIMITS if isinstance(given.get(key), ast.Constant)]  # type: ignore[attr-defined]
        unused = sorted(key for key in given if key not in _LIMITS)
        if any(call.args for call in swap.calls):
            unused.insert(0, "the positional ones")
        _drop_missing(tree)
        caught = CaughtErrors()
        names = caught.watch(tree)
        program = compile(tree, str(path), "exec", dont_inherit=True)  # else our `from __future__` holds there too
        return cls(path, framework, program, limits[0] if limits else None, tuple(unused), names, caught)

    def run(self, llm: Any) -> str:
        """Run the script once with `llm` as what the constructor returns; what it printed.

        Raises: ConfigError if it prints nothing.
        """
        # As a process has it: with bytes below the text, and an encoding that may be set.
        taken = io.BytesIO()
        printed = io.TextIOWrapper(taken, "utf-8", "backslashreplace", newline="\n", write_through=True)
        arguments, sys.argv = sys.argv, [str(self.path)]
        folder = str(self.path.resolve().parent)
        sys.path.append(folder)
        ours = sys.modules["__main__"]
        main = sys.modules["__main__"] = ModuleType("__main__")  # where pydantic, for one, looks up names of the script
        names = vars(main)
        names |= {"__file__": str(self.path), ENGINE: lambda *a, **k: llm, **self.names}
        try:
            with contextlib.redirect_stdout(printed), contextlib.suppress(_CleanExit):
                _executed(self.program, names)
        finally:
            sys.argv = arguments
            sys.path.remove(folder)
            sys.modules["__main__"] = ours
        printed.flush()
        text = taken.getvalue().decode(printed.encoding, "replace")
        if not text.strip():
            raise ConfigError(f"the script {str(self.path)!r} printed nothing; what it prints is what is compared")
        return text


class _CleanExit(Exception):
    """The script called sys.exit() without an error."""


def _executed(program: Any, names: dict[str, Any]) -> None:
    try:
        exec(program, names)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise RuntimeError(f"the script ended with status {error.code}") from error
        raise _CleanExit from None


class _Swap(ast.NodeTransformer):
    """Replaces what is called as `constructor`.

    calls   the calls that were replaced; `found` is their full name
    others  full names of other calls into known frameworks that look like constructors
    """

    def __init__(self, constructor: str, names: Mapping[str, str]) -> None:
        self._wanted, self._names = constructor, names
        self.calls: list[ast.Call] = []
        self.found = ""
        self.others: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        written = ast.unparse(node.func)
        root, dot, rest = written.partition(".")
        if root not in self._names:
            return node
        full = self._names[root] + dot + rest
        if self._wanted in (written, full) or full.endswith("." + self._wanted):
            self.calls.append(node)
            self.found = full
            return ast.Call(ast.Name(ENGINE, ast.Load()), node.args, node.keywords)
        if (
            full.replace(".", "").isidentifier()
            and framework_of_package(full)
            and full.rpartition(".")[2][:1].isupper()
        ):
            self.others.add(full)
        return node


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local names and what they were imported as: {"models": "guidance.models"}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _drop_missing(tree: ast.Module) -> None:
    """Drop imports of frameworks' modules that are not installed: only the replaced class was wanted of them."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body: list[ast.stmt] = found if isinstance(found := getattr(node, name, None), list) else []
            for i, statement in enumerate(body):
                if isinstance(statement, ast.Import):
                    statement.names = [alias for alias in statement.names if not _is_missing(alias.name)]
                    gone = not statement.names
                else:
                    gone = (
                        isinstance(statement, ast.ImportFrom) and not statement.level and _is_missing(statement.module)
                    )
                if gone:
                    body[i] = ast.copy_location(ast.Pass(), statement)


def _is_missing(module: str | None) -> bool:
    return bool(module and framework_of_package(module) and not _is_there(module))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
