"""The tree has the shape that docs/engineering.md describes: rooms, files of a readable length, tests beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs/engineering.md").read_text()
LAYERS = ("core", "kernels", "adapters", "plugins")
MAX_LINES = 400


def sources(layer: str) -> list[Path]:
    """The layer's Python files, relative to the repository; links to other layers are not followed."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / layer).rglob("*.py") if "__pycache__" not in path.parts)


def rooms(layer: str) -> set[str]:
    return {str(path.parent) for path in sources(layer)}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_map_lists_every_room_once(layer: str) -> None:
    section = MAP.partition("## The rooms")[2].partition("\n## ")[0]
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


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {
        str(path): len((ROOT / path).read_text().splitlines())
        for layer in (*LAYERS, "graftlm")
        for path in sources(layer)
    }
    too_long = {path: length for path, length in lengths.items() if length > MAX_LINES}
    assert too_long == {}


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
    assert tested - rooms(layer) - {layer} == set()


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
