"""What a draft becomes is what compiling at once gives."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.compile import compile_spec
from graftlm.core.grammar.drafting.draft import draft, finished, from_draft
from graftlm.core.grammar.schema.algebra.shapes import Shape
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import Choices, JsonSchema, Limits, Options, Regex, Spec
from tests.grammars import BYTES, allows

FIELDS: dict[str, Any] = {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 30}}
OPEN = JsonSchema({"type": "object", "properties": {**FIELDS, "c": {}}, "x-note": 1})
CASES: dict[str, tuple[Spec, str, str]] = {
    "regex": (Regex(r"[a-z]{3,40}-\d+"), "fsm", "abc-1"),
    "choices": (Choices(["no", "yes"]), "fsm", "yes"),
    "closed": (JsonSchema({"type": "object", "properties": FIELDS}), "fsm", '{"a":1,"b":"x"}'),
    "open": (OPEN, "pda", '{"a":1,"c":[{}]}'),
    "unique": (JsonSchema({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}), "fsm", "[2,1]"),
}


@pytest.mark.parametrize("protocol", [pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("name", CASES)
def test_a_draft_that_was_sent_makes_the_grammar_that_compiling_makes(name: str, protocol: int) -> None:
    spec, engine, text = CASES[name]
    assert pickle.loads(pickle.dumps(spec, protocol)) == spec
    sent = pickle.loads(pickle.dumps(draft(spec, Options()), protocol))
    one, other = from_draft(sent, spec, BYTES, Options()), compile_spec(spec, BYTES, Options())
    assert one.engine == other.engine == engine and type(one.compiled) is type(other.compiled)
    assert one.source == other.source == (spec, Options())
    assert one.annotations == other.annotations and one.warnings == other.warnings
    assert allows(one, text) and not allows(one, text[:-1])
    rows = [np.zeros(BYTES.num_words, np.int32) for _ in range(2)]
    matchers = [one.matcher(), other.matcher()]
    for byte in text.encode():
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill_mask(row)
        assert rows[0].tolist() == rows[1].tolist()
        assert matchers[0].min_tokens_to_accept() == matchers[1].min_tokens_to_accept()
        for matcher in matchers:
            matcher.advance([byte])


def test_what_takes_too_many_states_is_drafted_for_llguidance() -> None:
    spec, options = JsonSchema({"type": "object", "properties": FIELDS}), Options(limits=Limits(states=20))
    found = draft(spec, options)
    assert found.automaton is None and found.error is not None and "20 states" in str(found.error)
    assert finished(found, BYTES).engine == compile_spec(spec, BYTES, options).engine == "llguidance"


def test_a_schema_that_takes_too_many_states_used_to_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pointers: list[str] = []
    read = SchemaReader.read

    def counted(reader: SchemaReader, schema: Any, pointer: str) -> Shape:
        pointers.append(pointer)
        return read(reader, schema, pointer)

    monkeypatch.setattr(SchemaReader, "read", counted)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "uniqueItems": True}
    assert draft(JsonSchema(schema), Options(limits=Limits(states=10))).lark
    assert sorted(pointers) == ["", "/items"]


def test_a_constraint_that_cannot_be_kept_is_the_same_error() -> None:
    for spec in (Regex("("), JsonSchema({"properties": {"a": {"type": "strin"}}}), Regex("(?!)")):
        errors = []
        for drafter in (draft, None):
            with pytest.raises(GrammarError) as caught:
                compile_spec(spec, BYTES, Options(), drafter)
            errors.append((str(caught.value), caught.value.pointer, caught.value.position))
        assert errors[0] == errors[1]


def test_what_schemas_have_alike_is_kept_once() -> None:
    dates = {"type": "string", "format": "date"}
    kept = []
    for name in ("from", "until"):
        schema = JsonSchema({"properties": {name: dates, "more": {"type": "object"}}})
        language = draft(schema, Options(limits=Limits(states=20))).language
        node, rules, *_ = pickle.loads(language)
        kept.append({id(item) for item in parts([node, *rules.values()]) if isinstance(item, ast.Concat)})
    assert len(kept[0] & kept[1]) > 20  # those of a date, among others


def parts(nodes: list[ast.Node]) -> list[ast.Node]:
    def more(child: ast.Node) -> ast.Node:
        nodes.append(child)
        return child

    for node in nodes:
        ast.map_children(more, node)
    return nodes
