"""Random texts of the grammar of a Python type."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from graftlm.core.grammar import Grammar, JsonSchema, Vocabulary
from tests.models import byte_tokenizer


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(byte_tokenizer())


@cache
def _classes() -> np.ndarray:
    """Return the class of each token: blanks, quotes and digits come as often as all letters do."""
    found = np.full(vocabulary().num_words * 32, 5)
    for i in range(128):
        char = chr(i)
        found[i] = 0 if char == '"' else 1 if char.isdigit() else 2 if char in " \\" else 3 if char.isalpha() else 4
    return found


def texts_of(kind: Any, count: int = 20, seed: int = 0) -> list[bytes]:
    """Return random texts of at most 60 tokens and the shortest end from there."""
    grammar = Grammar.compile(JsonSchema(kind), vocabulary(), bounded_numbers=True)
    rng = np.random.default_rng(seed)
    return [_text(grammar, rng) for _ in range(count)]


def assert_read(kind: Any, count: int = 20) -> None:
    """Let pydantic read random texts of the grammar of `kind`."""
    reader = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    for text in texts_of(kind, count):
        reader.validate_json(text)


def admits(kind: Any, value: Any) -> bool:
    """Return True if the grammar of `kind` admits `value`, written compactly."""
    matcher = Grammar.compile(JsonSchema(kind), vocabulary()).matcher()
    data = list(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    return matcher.advance(data) == len(data) and matcher.accepting


def _text(grammar: Grammar, rng: np.random.Generator) -> bytes:
    matcher = grammar.matcher()
    ids: list[int] = []
    row = np.zeros(vocabulary().num_words, np.int32)
    while len(ids) < 60 and not matcher.finished:
        row[:] = 0
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        classes = _classes()[allowed]
        token = int(rng.choice(allowed[classes == rng.choice(np.unique(classes))]))
        if token in vocabulary().eos_token_ids:
            break
        assert matcher.advance([token]) == 1
        ids.append(token)
    if not matcher.accepting:
        ids += matcher.ending(ids)
    return vocabulary().decode(ids)
