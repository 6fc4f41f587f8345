"""From a request's constraint to its grammar: which engine, and what becomes of a keyword that no mask can keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.grammar.compile import Grammar, compile_fsm
from graftlm.plugins.hookspecs import hookimpl
from graftlm.plugins.manager import load
from graftlm.testing import ScriptedModel

SCHEMA = {
    "type": "string",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "array", "uniqueItems": True},
}


@pytest.fixture
def compiled_by_acme() -> Iterator[list[Any]]:
    """The constraints that the grammar engine "acme" was given."""
    given: list[Any] = []

    class Acme:
        @hookimpl
        def graftlm_register_grammars(self, register: Any) -> None:
            def factory(spec: Any, vocabulary: Any, options: Any) -> Grammar:
                given.append(spec)
                return compile_fsm(spec, vocabulary, options)

            register("acme", factory)

    load().add("acme", Acme())
    yield given
    load().remove("acme")


def test_a_runtimes_grammar_engine_compiles_its_constraints(compiled_by_acme: list[Any]) -> None:
    with ScriptedModel(lambda prompt: "17").runtime(grammar_engine="acme") as runtime:
        assert runtime.generate("x", regex="[0-9]+").text == "17"
    assert compiled_by_acme == [gl.Regex("[0-9]+")]


def test_an_unknown_grammar_engine_is_named_by_the_first_constraint() -> None:
    with ScriptedModel().runtime(grammar_engine="nope") as runtime:
        assert runtime.generate("x").text == "!"
        with pytest.raises(gl.PluginError, match="no plugin offers grammars 'nope'; known: .*fsm"):
            runtime.generate("x", regex="a")


def test_a_keyword_that_no_mask_can_keep_raises_or_is_left_out_with_a_warning() -> None:
    with ScriptedModel(lambda prompt: '"[1,1]"').runtime() as runtime:
        with pytest.raises(gl.GrammarError, match="contentMediaType"):
            runtime.generate("x", json_schema=SCHEMA)
        with pytest.warns(UserWarning, match="not kept exactly.*uniqueItems"):
            assert runtime.generate("x", json_schema=SCHEMA, on_unsupported="warn").text == '"[1,1]"'


def test_numbers_that_nothing_bounds_are_bounded_unless_that_is_switched_off() -> None:
    with ScriptedModel(lambda prompt: "1" * 40).runtime() as runtime:
        for options, num_digits in (({}, 18), ({"bounded_numbers": False}, 40)):
            assert runtime.generate("x", json_schema={"type": "integer"}, **options).text == "1" * num_digits

            @gl.program
            def count(s, options=options):  # type: ignore[no-untyped-def]
                s += "x" + gl.gen("n", dtype=int, **options)

            assert count.run(runtime=runtime)["n"] == int("1" * num_digits)
