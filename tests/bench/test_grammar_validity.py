"""Whatever a model without sense writes under any budget is valid: a small run of the bench case."""

from __future__ import annotations

from bench.grammar import validity
from graftlm import Vocabulary

WORDS = ['{"', '":', '",', '"}', "},", "]}", " the", "er", "in", "12", "00", "tru", "nul", "\\n", '\\"', "é", "中"]


def test_three_hundred_texts_under_random_budgets_are_valid() -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    vocabulary = Vocabulary([*tokens, b""], eos_token_id=len(tokens))
    assert validity.failures(vocabulary, 300, seed=3) == []
