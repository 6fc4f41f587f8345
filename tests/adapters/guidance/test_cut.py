"""A token limit that falls inside a character: whole characters are handed over, the rest is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guidance import gen

from graftlm import Runtime
from graftlm.adapters.guidance import GraftModel
from graftlm.testing import ScriptedModel


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """Its tokens are bytes, so that a limit can fall inside a character."""
    with ScriptedModel(lambda prompt: "naïve").runtime() as made:
        yield made


def at_once(runtime: Runtime, grammar: Any) -> Any:
    return GraftModel(runtime=runtime, echo=False) + grammar


def streamed(runtime: Runtime, grammar: Any) -> Any:
    return list(GraftModel(runtime=runtime, echo=False).stream() + grammar)[-1]


@pytest.mark.parametrize("run", [at_once, streamed])
@pytest.mark.parametrize(
    ("grammar", "text", "captured"),
    [
        (gen("x", max_tokens=3), "na", "na"),
        (gen("x", max_tokens=4), "naï", "naï"),
        (gen("x", max_tokens=3) + "!", "na!", "na"),
        ("<" + gen("x", max_tokens=3) + ">", "<na>", "na"),
    ],
)
def test_what_is_cut_is_held_back(
    runtime: Runtime, run: Callable[..., Any], grammar: Any, text: str, captured: Any
) -> None:
    lm = run(runtime, grammar)
    assert (str(lm), lm["x"]) == (text, captured)
