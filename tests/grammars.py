"""Grammars over single bytes: small to compile, and exact about which texts they allow."""

from __future__ import annotations

import json
from typing import Any

from graftlm import Grammar, JsonSchema, Vocabulary
from graftlm.core.grammar.spec import Spec

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], eos_token_id=256)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def allows(grammar: Grammar, text: str | bytes) -> bool:
    """Whether `text` as a whole is in the language of a grammar over BYTES."""
    data = text.encode() if isinstance(text, str) else text
    matcher = grammar.matcher()
    return matcher.advance(list(data)) == len(data) and matcher.accepting


def compiled(spec: Spec | dict[str, Any] | bool, **options: Any) -> Grammar:
    return Grammar.compile(JsonSchema(spec) if isinstance(spec, (dict, bool)) else spec, BYTES, **options)


def admits(schema: dict[str, Any] | bool, value: Any, **options: Any) -> bool:
    """Whether the compact JSON of `value` is in the language of `schema`."""
    return allows(compiled(schema, **options), compact(value))
