"""The tree has the shape that docs/engineering.md describes, and keeps the rules of size.

The rules hold for the layers (core, kernels, adapters, plugins) and for graftlm/:

| rule        | limit                                                                                                |
|-------------|------------------------------------------------------------------------------------------------------|
| `folder`    | at most 16 files, `__init__.py` not counted                                                          |
| `function`  | at most 80 lines, nested functions included                                                          |
| `class`     | at most 20 methods; properties are not counted                                                       |
| `signature` | at most 8 parameters; `self` and `cls` are not counted                                               |
| `fragment`  | a file under 60 lines with a single importer belongs to that importer                                |
| `reason`    | a folder's `__init__.py` states in at least two sentences what it serves, how often and its cost |

Compiled code (Triton, Gluon, numba) is exempt from `function` and `signature`: its arguments are buffers and strides.

`tests/size_exceptions.txt` lists the exceptions, one a line: rule, place, reason. An offender that is not listed fails
its test. A listed place that no longer offends must be deleted from the file; the failure prints the lines to delete.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs/engineering.md").read_text()
LAYERS = ("core", "kernels", "adapters", "plugins")
MAX_FILES, MAX_FUNCTION_LINES, MAX_METHODS, MAX_PARAMETERS, MIN_FILE_LINES = 16, 80, 20, 8, 60
EXCEPTIONS = ROOT / "tests/size_exceptions.txt"
ACROSS = {"adapters/server/hostile"}  # folders of tests that attack a whole server
# Decorators of compiled code.
COMPILED = {"triton.jit", "gluon.jit", "njit", "loop", "inner"}


def sources(layer: str) -> list[Path]:
    """The layer's Python files, relative to the repository; links to other layers are not followed."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / layer).rglob("*.py") if "__pycache__" not in path.parts)


def rooms(layer: str) -> set[str]:
    return {str(path.parent) for path in sources(layer)}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_map_lists_every_room_once(layer: str) -> None:
    section = MAP.partition("## The folders")[2].partition("\n## ")[0]
    listed = re.findall(rf"^\| `({layer}(?:/\w+)*)/` \|", section, flags=re.MULTILINE)
    assert sorted(listed) == sorted(rooms(layer))


def test_every_path_on_the_map_exists() -> None:
    paths = re.findall(r"`((?:adapters|bench|core|docs|graftlm|kernels|plugins|tests)/[\w./-]*)`", MAP)
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_file_name_on_the_map_exists() -> None:
    names = set(re.findall(r"`(\w+\.py)`", MAP))
    known = {path.name for layer in (*LAYERS, "tests") for path in sources(layer)}
    assert names - known == set()


def test_a_layer_is_no_package_of_its_own() -> None:
    # A top-level kernels/__init__.py would shadow the package of that name that transformers looks for.
    assert [layer for layer in LAYERS if (ROOT / layer / "__init__.py").exists()] == []


@pytest.mark.parametrize("layer", LAYERS)
def test_every_room_has_its_tests_and_every_folder_of_tests_a_room(layer: str) -> None:
    tested = {
        str(path.parent.relative_to("tests"))
        for path in sources("tests")
        if path.name.startswith("test_") and path.is_relative_to(f"tests/{layer}")
    }
    assert rooms(layer) - tested == set()
    assert tested - rooms(layer) - {layer, *ACROSS} == set()


@pytest.mark.parametrize("layer", LAYERS)
def test_every_file_that_the_code_names_exists(layer: str) -> None:
    known = [f"/{path}" for each in (*LAYERS, "tests", "bench", "graftlm") for path in sources(each)]
    missing = [
        f"{path} names {name}"
        for path in sources(layer)
        for name in re.findall(r"(?<![\w./-])[\w/]+\.py\b", (ROOT / path).read_text())
        if not any(each.endswith(f"/{name}") for each in known)
    ]
    assert missing == []


Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse((ROOT / path).read_text()) for layer in (*LAYERS, "graftlm") for path in sources(layer)}


def decorators(function: Function) -> set[str]:
    return {ast.unparse(each).partition("(")[0] for each in function.decorator_list}


def functions(tree: ast.AST, prefix: str = "", in_class: bool = False) -> Iterator[tuple[str, Function, bool]]:
    """Yield the qualified name and node of each function, and whether it is a method; skip compiled code."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            if not decorators(node) & COMPILED:
                yield prefix + node.name, node, in_class
                yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.", in_class=True)
        else:
            yield from functions(node, prefix, in_class)


def host_functions() -> Iterator[tuple[str, Function, bool]]:
    """Yield place, node and whether it is a method, of each function that Python runs."""
    for path, tree in modules().items():
        if not path.is_relative_to("kernels/cpu/loops"):
            for name, node, is_method in functions(tree):
                yield f"{path}:{name}", node, is_method


def crowded_folders() -> set[str]:
    counts = Counter(str(path.parent) for path in modules() if path.name != "__init__.py")
    return {folder for folder, count in counts.items() if count > MAX_FILES}


def long_functions() -> set[str]:
    return {
        place
        for place, node, _ in host_functions()
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    }


def large_classes() -> set[str]:
    large = set()
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, Function)]
                names = {each.name for each in methods if not decorators(each) & {"property", "cached_property"}}
                if len(names) > MAX_METHODS:
                    large.add(f"{path}:{node.name}")
    return large


def wide_signatures() -> set[str]:
    wide = set()
    for place, node, is_method in host_functions():
        each = node.args
        count = len(each.posonlyargs) + len(each.args) + len(each.kwonlyargs)
        if count - (is_method and "staticmethod" not in decorators(node)) > MAX_PARAMETERS:
            wide.add(place)
    return wide


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "graftlm" else ("graftlm", *parts)).removesuffix(".__init__")


def named_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports or names in a string, as lazy imports do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def fragments() -> set[str]:
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in modules().items():
        for name in named_modules(tree):
            importers[name].add(path)
    return {
        str(path)
        for path in modules()
        if path.name not in ("__init__.py", "__main__.py")
        if len((ROOT / path).read_text().splitlines()) < MIN_FILE_LINES
        if len(importers[module_name(path)] - {path}) == 1
    }


def folders_without_a_reason() -> set[str]:
    return {
        str(path.parent)
        for path, tree in modules().items()
        if path.name == "__init__.py"
        if len(re.findall(r"\.(?:\s|$)", ast.get_docstring(tree) or "")) < 2
    }


RULES = {
    "folder": crowded_folders,
    "function": long_functions,
    "class": large_classes,
    "signature": wide_signatures,
    "fragment": fragments,
    "reason": folders_without_a_reason,
}


def listed_exceptions() -> dict[str, str]:
    """Return the lines of the list of exceptions by rule and place."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line and not line.startswith("#")]
    return {" ".join(line.split()[:2]): line for line in lines}


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rules_of_size(rule: str) -> None:
    found = {f"{rule} {place}" for place in RULES[rule]()}
    listed = listed_exceptions()
    assert sorted(found - set(listed)) == [], (
        f"over the limit of the rule {rule!r}, which tests/test_layout.py describes"
    )
    mended = [listed[each] for each in sorted(listed) if each.startswith(f"{rule} ") and each not in found]
    assert mended == [], f"delete these lines from {EXCEPTIONS.name}"


def test_each_listed_exception_has_a_known_rule_and_a_reason() -> None:
    assert [
        line for line in listed_exceptions().values() if len(line.split()) < 3 or line.split()[0] not in RULES
    ] == []
