"""Whatever the schema of an output type admits, pydantic reads."""

from __future__ import annotations

import datetime
import json
from typing import Any, Literal

import dspy
import numpy as np
import pytest
from pydantic import TypeAdapter

from graftlm.adapters.dspy.schema import OutputSchema, asked_object
from graftlm.core.grammar import Grammar, JsonSchema, Vocabulary
from tests.models import byte_tokenizer

TYPES: list[Any] = [
    dict[int, str],
    dict[float, bool],
    dict[bool, int],
    dict[str, dict[int, int]],
    dict[datetime.date, int],
    datetime.timedelta,
    list[datetime.timedelta],
    complex,
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_any_text_of_the_schema_is_a_value_of_the_type(kind: Any) -> None:
    reader = TypeAdapter(kind)
    schema = reader.json_schema(schema_generator=OutputSchema)
    vocabulary = Vocabulary.from_tokenizer(byte_tokenizer())
    grammar = Grammar.compile(JsonSchema(schema), vocabulary)
    rng = np.random.default_rng(0)
    for _ in range(20):
        reader.validate_json(_written(grammar, vocabulary, rng))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (dict[int, str], {"-12": "a", "0": ""}),
        (dict[float, bool], {"1.5": True}),
        (dict[bool, int], {"true": 1}),
        (datetime.timedelta, "P3DT4H5M6S"),
        (datetime.timedelta, "-PT90M"),
        (complex, "1.5-2j"),
    ],
    ids=str,
)
def test_ordinary_values_stay_possible(kind: Any, value: Any) -> None:
    schema = TypeAdapter(kind).json_schema(schema_generator=OutputSchema)
    matcher = Grammar.compile(JsonSchema(schema), Vocabulary.from_tokenizer(byte_tokenizer())).matcher()
    data = list(json.dumps(value, separators=(",", ":")).encode())
    assert matcher.advance(data) == len(data) and matcher.accepting


def _written(grammar: Grammar, vocabulary: Vocabulary, rng: np.random.Generator) -> bytes:
    """A random text of the grammar: at most 60 tokens as they come, then the shortest end."""
    matcher = grammar.matcher()
    ids: list[int] = []
    row = np.zeros(vocabulary.num_words, np.int32)
    while len(ids) < 60 and not matcher.finished:
        row[:] = 0
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token in vocabulary.eos_token_ids:
            break
        assert matcher.advance([token]) == 1
        ids.append(token)
    if not matcher.accepting:
        ids += matcher.ending(ids)
    return vocabulary.decode(ids)


class Every(dspy.Signature):
    """Every kind of type that DSPy prints."""

    question: str = dspy.InputField()
    thought: str = dspy.OutputField()
    tool: Literal["a`b", "it's, then `c`", "(d)"] = dspy.OutputField()
    count: int = dspy.OutputField()
    share: float = dspy.OutputField()
    sure: bool = dspy.OutputField()
    arguments: dict[str, Any] = dspy.OutputField()
    names: list[str] = dspy.OutputField()


def test_the_fields_of_an_object_without_a_schema_are_read_from_the_prompt_of_json_adapter() -> None:
    prompt = dspy.JSONAdapter().format(Every, [], {"question": "x"})[-1]["content"]
    schema = asked_object(prompt)
    assert schema["properties"] == {
        "thought": {"type": "string"},
        "tool": {"enum": ["a`b", "it's, then `c`", "(d)"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "arguments": {"type": "object"},
        "names": {},
    }
    assert schema["required"] == list(schema["properties"])
    assert asked_object("Answer as JSON.") == {"type": "object"}
