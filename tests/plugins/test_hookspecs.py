"""docs/plugins.md says what the hookspecs say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from graftlm.plugins import hookspecs

PAGE = (Path(__file__).parents[2] / "docs/plugins.md").read_text()
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("graftlm_")}


def test_the_page_has_exactly_the_hooks_that_exist() -> None:
    assert set(re.findall(r"^\| `(graftlm_\w+)\(", PAGE, re.MULTILINE)) == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_the_page_gives_each_hook_its_arguments(name: str) -> None:
    assert f"`{name}({', '.join(inspect.signature(HOOKS[name]).parameters)})`" in PAGE


@pytest.mark.parametrize("name", [name for name in HOOKS if "register" in name])
def test_the_page_gives_each_factory_its_contract(name: str) -> None:
    (contract,) = re.findall(r"factory\(.*", inspect.getdoc(HOOKS[name]) or "")
    assert f"`{contract}`" in PAGE


@pytest.mark.parametrize("kind", hookspecs.CALLS)
def test_factories_are_called_as_their_hook_says(kind: hookspecs.Kind) -> None:
    assert f"factory({hookspecs.CALLS[kind]}) -> " in (inspect.getdoc(HOOKS[f"graftlm_register_{kind}"]) or "")
