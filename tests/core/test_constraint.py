"""From a request's constraint to its grammar: which engine, and what becomes of a keyword that no mask can keep."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.constraint import shown_whitespace
from graftlm.core.grammar.compile import Grammar, compile_fsm
from graftlm.core.model.source import ModelSource
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
        cases: list[tuple[dict[str, Any], int]] = [({}, 18), ({"bounded_numbers": False}, 40)]
        for options, num_digits in cases:
            assert runtime.generate("x", json_schema={"type": "integer"}, **options).text == "1" * num_digits

            @gl.program
            def count(s, options=options):  # type: ignore[no-untyped-def]
                s += "x" + gl.gen("n", dtype=int, **options)

            assert count.run(runtime=runtime)["n"] == int("1" * num_digits)


SHOWN = {"name": "Bob", "tags": [1, 2]}
NAMED = {
    "type": "object",
    "properties": {"name": {"const": "Al"}, "tags": {"const": [3]}},
    "required": ["name", "tags"],
}


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("no JSON", "compact"),
        (json.dumps(SHOWN, separators=(",", ":")), "compact"),
        (json.dumps(SHOWN), "single"),
        (json.dumps(SHOWN, indent=2), "flexible"),
        (json.dumps(SHOWN, indent=2) + "\nnow like " + json.dumps(SHOWN), "single"),
    ],
)
def test_json_was_compact_where_the_prompt_shows_spaces(shown: str, written: str) -> None:
    tokenizer = ScriptedModel().runtime().tokenizer
    assert shown_whitespace(shown, tokenizer) == written
    assert shown_whitespace([{"role": "user", "content": shown}], tokenizer) == written
    assert shown_whitespace(tokenizer.encode_continuation(shown), tokenizer) == written


def test_whitespace_and_strictness_of_a_schema_are_options_of_a_request() -> None:
    answer = {"name": "Al", "tags": [3]}
    pretty, extra = json.dumps(answer, indent=2), json.dumps(answer | {"more": 1}, separators=(",", ":"))
    with ScriptedModel(lambda prompt: pretty).runtime() as runtime:
        assert runtime.generate("x", json_schema=NAMED).text == json.dumps(answer, separators=(",", ":"))
        assert runtime.generate("x", json_schema=NAMED, whitespace="single").text == json.dumps(answer)
        assert runtime.generate("x", json_schema=NAMED, whitespace="flexible").text == pretty
        assert runtime.generate(json.dumps(SHOWN, indent=4), json_schema=NAMED).text == pretty
    with ScriptedModel(lambda prompt: extra).runtime() as runtime:
        assert "more" not in runtime.generate("x", json_schema=NAMED).text
        assert runtime.generate("x", json_schema=NAMED, strict_schema=False).text == extra


def test_a_wrong_constraint_is_reported_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`graftlm generate --regex '('` loaded for 36 s before it said so."""
    go_on = threading.Event()
    build = ModelSource.build_engine
    monkeypatch.setattr(ModelSource, "build_engine", lambda *given: go_on.wait(60) and build(*given))
    with gl.Runtime("sprout") as runtime:
        try:
            with pytest.raises(gl.GrammarError, match="the group is not closed"):
                runtime.generate("a", regex="(")
            with pytest.raises(gl.GrammarError, match="unknown type"):
                runtime.stream("a", json_schema={"type": "strin"})
            assert not runtime._thread.loaded
        finally:
            go_on.set()
