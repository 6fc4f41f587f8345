"""An automaton of plain text, written inside a JSON string."""

from __future__ import annotations

import json

import pytest

from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.schema.text.spelled_automaton import spelled

TEXTS = ["", "a", "é😀", '"', "\\", '\\"a', "\n", "\t\r", "\x00", "\x1f", "\x0b", "ab\n", "\x7f"]


@pytest.mark.parametrize("pattern", ["(?s:.*)", r'["\\]*', r"[\x00-\x1f]", "a|é😀", r"(?:a|b|\n){3}"])
def test_each_text_has_its_escapes_and_no_other_spelling(pattern: str) -> None:
    plain = product.product(parse(pattern))
    written = spelled(plain)
    for text in TEXTS:
        inside = json.dumps(text, ensure_ascii=False)[1:-1]
        assert product.matches(written, inside) == product.matches(plain, text)
    assert not any(product.matches(written, text) for text in ('"', "\\", "\n", "\x00"))
