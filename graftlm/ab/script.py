"""A user's script as a pipeline: only the calls of one constructor are replaced."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graftlm.ab.engines.frameworks import framework_of_package
from graftlm.ab.measure.failures import CaughtErrors
from graftlm.core.errors import ConfigError
from graftlm.text_files import read_text

ENGINE = "__graftlm_engine__"
_TEXT_CLASSES = {"OpenAI", "HuggingFacePipeline", "LlamaCpp", "VLLM", "Ollama"}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")


@dataclass(frozen=True)
class Script:
    """A script whose calls of one constructor give the engine under comparison.

    The script runs as `python script.py` would run it; its printed text is its answer.

    max_tokens  the constructor's argument; None without it, or if it is no number
    unused      names of the constructor's other arguments, which no engine gets
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

        Raises: ConfigError if there is no such call, or if it belongs to no framework with engines by name.
        """
        try:
            tree = ast.parse(read_text(path), str(path))
        except SyntaxError as error:
            raise ConfigError(f"{str(path)!r} is not Python: {error}") from error
        swap = _Swap(constructor, _imported(tree))
        swap.visit(tree)
        if not swap.calls:
            found = ", ".join(sorted(swap.others)) or "none"
            raise ConfigError(
                f"{str(path)!r} calls no {constructor!r}; constructors of known frameworks that it calls: {found}"
            )
        framework = framework_of_package(swap.found)
        if framework is None or framework == "native":
            raise ConfigError(
                f"--swap {constructor}: {swap.found!r} belongs to none of LangChain, DSPy, LlamaIndex, Guidance"
            )
        if framework == "langchain" and swap.found.rpartition(".")[2] in _TEXT_CLASSES:
            raise ConfigError(
                f"--swap {constructor}: {swap.found!r} completes texts; engines by name are LangChain's chat models"
            )
        given = {keyword.arg: keyword.value for call in swap.calls for keyword in call.keywords if keyword.arg}
        limits = [value.value for key in _LIMITS if isinstance(value := given.get(key), ast.Constant)]
        unused = ["the positional ones"] * any(call.args for call in swap.calls)
        unused += sorted(key for key in given if key not in _LIMITS)
        _drop_missing(tree)
        caught = CaughtErrors()
        names = caught.watch(tree)
        program = compile(tree, str(path), "exec", dont_inherit=True)  # without our `from __future__`
        return cls(path, framework, program, next(iter(limits), None), tuple(unused), names, caught)  # type: ignore[arg-type]

    def run(self, llm: Any) -> str:
        """Run the script once with `llm` as the constructor's value; return its printed text.

        Raises: ConfigError if it prints nothing.
        """
        with _as_main(self.path) as (names, taken):
            names |= {ENGINE: lambda *a, **k: llm, **self.names}
            try:
                exec(self.program, names)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise RuntimeError(f"the script ended with status {error.code}") from error
        text = taken()
        if not text.strip():
            raise ConfigError(f"the script {str(self.path)!r} printed nothing; what it prints is what is compared")
        return text


@contextlib.contextmanager
def _as_main(path: Path) -> Iterator[tuple[dict[str, Any], Callable[[], str]]]:
    """Prepare the interpreter for a script; yields the names of its module, and a function that returns its output."""
    # As in a new process: a text stream over bytes, whose encoding can be set.
    taken = io.BytesIO()
    printed = io.TextIOWrapper(taken, "utf-8", "backslashreplace", newline="\n", write_through=True)
    arguments, sys.argv = sys.argv, [str(path)]
    folder = str(path.resolve().parent)
    sys.path.append(folder)
    ours = sys.modules["__main__"]
    main = sys.modules["__main__"] = ModuleType("__main__")  # pydantic resolves the script's names in it
    names = vars(main)
    names["__file__"] = str(path)
    try:
        with contextlib.redirect_stdout(printed):
            yield names, lambda: taken.getvalue().decode(printed.encoding, "replace")
    finally:
        printed.flush()
        sys.argv = arguments
        sys.path.remove(folder)
        sys.modules["__main__"] = ours


class _Swap(ast.NodeTransformer):
    """A transformer that replaces calls of `constructor`.

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
        is_name = full.replace(".", "").isidentifier()
        if is_name and framework_of_package(full) and full.rpartition(".")[2][:1].isupper():
            self.others.add(full)
        return node


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return local names and the full names of their imports: {"models": "guidance.models"}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                root = a.name.partition(".")[0]
                names[a.asname or root] = a.name if a.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _drop_missing(tree: ast.Module) -> None:
    """Drop imports of frameworks' modules that are not installed: the replaced class came from them."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            for i, statement in enumerate(body if isinstance(body, list) else ()):
                gone = False
                if isinstance(statement, ast.Import):
                    statement.names = [alias for alias in statement.names if not _is_missing(alias.name)]
                    gone = not statement.names
                elif isinstance(statement, ast.ImportFrom) and not statement.level:
                    gone = _is_missing(statement.module)
                if gone:
                    body[i] = ast.copy_location(ast.Pass(), statement)  # type: ignore[index]


def _is_missing(module: str | None) -> bool:
    if not module or not framework_of_package(module):
        return False
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of a package above it
        return True
