"""Pydantic reads every text that the schema of a Python type admits."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import (
    UUID4,
    Field,
    FileUrl,
    HttpUrl,
    IPvAnyAddress,
    MongoDsn,
    PostgresDsn,
    TypeAdapter,
    WebsocketUrl,
)

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
    Decimal,
    Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    Annotated[Decimal, Field(max_digits=3)],
    Annotated[Decimal, Field(max_digits=2, decimal_places=2)],
    Annotated[Decimal, Field(gt=0, lt=1, decimal_places=3)],
    Annotated[Decimal, Field(multiple_of=Decimal("0.05"), max_digits=4, decimal_places=2)],
    HttpUrl,
    WebsocketUrl,
    FileUrl,
    PostgresDsn,
    MongoDsn,
    UUID4,
    IPvAnyAddress,
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_any_text_of_the_schema_is_a_value_of_the_type(kind: Any) -> None:
    reader = TypeAdapter(kind)
    vocabulary = Vocabulary.from_tokenizer(byte_tokenizer())
    grammar = Grammar.compile(JsonSchema(kind), vocabulary, bounded_numbers=True)
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
        (Decimal, -12.5),
        (Annotated[Decimal, Field(max_digits=6, decimal_places=2)], 9999.99),
        (Annotated[Decimal, Field(max_digits=3)], 0.25),
        (Annotated[Decimal, Field(max_digits=3)], 999),
        (HttpUrl, "https://www.example.org:8080/a-b/c?d=1#e"),
        (HttpUrl, "http://localhost"),
        (FileUrl, "file:///etc/hosts"),
        (MongoDsn, "mongodb+srv://db.example.org/test"),
        (UUID4, "0190163d-8694-4d2f-8d3c-0d7d1a5e2f10"),
        (IPvAnyAddress, "10.0.0.1"),
        (IPvAnyAddress, "::1"),
    ],
    ids=str,
)
def test_ordinary_values_stay_possible(kind: Any, value: Any) -> None:
    matcher = Grammar.compile(JsonSchema(kind), Vocabulary.from_tokenizer(byte_tokenizer())).matcher()
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
