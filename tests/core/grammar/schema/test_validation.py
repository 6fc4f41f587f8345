"""Texts judged by jsonschema in a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.schema import validation
from graftlm.core.grammar.schema.validation import Validator
from graftlm.core.grammar.spec import Issue, JsonSchema

DRAFT_4 = "http://json-schema.org/draft-04/schema#"


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    made = Validator(seconds=60)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"items": {"multipleOf": 7}}, "[14]", "[15]"),
        ({"type": "integer", "nullable": True}, "null", '"a"'),
        ({"items": [{"type": "integer"}], "additionalItems": False}, "[1]", "[1,2]"),
        ({"minimum": 3, "exclusiveMinimum": True}, "4", "3"),
        ({"exclusiveMaximum": 3}, "2", "3"),
        ({"dependencies": {"a": ["b"]}}, '{"b":1}', '{"a":1}'),
        ({"pattern": r"^\p{Lu}+$"}, '"ÄB"', '"Äb"'),
        ({"pattern": r"^x(?i)[\w-.]$"}, '"x-"', '"X-"'),
        ({"patternProperties": {r"^\P{L}": False}}, '{"a":1}', '{"1":1}'),
        ({"patternProperties": {r"^\p{L}": True}, "additionalProperties": False}, '{"a":1}', '{"1":1}'),
        ({"format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"contentMediaType": "application/json", "contentSchema": {"minimum": 3}}, '"4"', '"2"'),
        ({"$schema": DRAFT_4, "maximum": 3, "exclusiveMaximum": True}, "2", "3"),
        ({"$schema": DRAFT_4, "type": "string", "contentMediaType": "application/json"}, '"no JSON"', "1"),
    ],
)
def test_it_reads_schemas_as_the_grammar_does(validator: Validator, schema: Any, right: str, wrong: str) -> None:
    assert validator.complaint(JsonSchema(schema), right) is None
    assert validator.complaint(JsonSchema(schema), wrong)


def test_other_documents_are_known(validator: Validator) -> None:
    spec = JsonSchema({"$ref": "urn:age"}, documents={"urn:age": {"minimum": 3}})
    assert validator.complaint(spec, "2") == "/: 2 is less than the minimum of 3"


def test_a_format_that_nothing_checks_is_an_error(validator: Validator) -> None:
    spec = JsonSchema({"format": "shade"})
    with pytest.raises(GrammarError, match="format 'shade' is checked by nothing installed"):
        validator.complaint(spec, '"x"', [Issue("/format", "format", "")])


def test_a_pattern_that_takes_for_ever_ends_in_an_error_and_the_next_text_is_judged() -> None:
    hostile = JsonSchema({"pattern": r"^(a+)+\1$"})
    validator = Validator(seconds=3)
    with pytest.raises(GrammarError, match="took longer than 3 s"):
        validator.complaint(hostile, '"' + "a" * 40 + '!"')
    validator._seconds = 60
    assert validator.complaint(hostile, '"aa"') is None
    validator.close()


def test_without_jsonschema_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "find_spec", lambda name: None)
    assert importlib.util.find_spec("jsonschema") is not None
    with pytest.raises(ConfigError, match=r"pip install 'jsonschema\[format\]'"):
        validation.require_validator()
