"""Share of forced tokens in real answers, and whether the tokenisation stays canonical.

The answers are replayed: where nothing is forced, the model is taken to write the tokenizer's own next token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bench.grammar import _constraints, _engines, _vocabularies
from bench.grammar._answers import ANSWERS, FORCED_PERCENT, compact
from bench.harness import Options, Row
from graftlm import Grammar, JsonSchema, Vocabulary


def replay(grammar: Grammar, vocabulary: Vocabulary, data: bytes, judge: Any = None) -> tuple[list[int], int, int]:
    """Write `data`. -> its tokens, how many of them were forced, how often `judge` (llguidance) forced others."""
    matcher = grammar.matcher()
    ids: list[int] = []
    num_forced = num_different = 0
    canonical = vocabulary.encode(data)
    while len(vocabulary.decode(ids)) < len(data):
        forced = matcher.forced(ids)
        if judge is not None:
            num_different += forced != judge.compute_ff_tokens()
        new = forced or canonical[len(ids) : len(ids) + 1]
        if ids + new != canonical[: len(ids) + len(new)]:
            return ids + new, num_forced, num_different
        num_forced += len(forced)
        ids += new
        if matcher.advance(new) != len(new) or (judge is not None and judge.try_consume_tokens(new) != len(new)):
            raise AssertionError(f"{vocabulary.decode(new)!r} is refused after {vocabulary.decode(ids)!r}")
    return ids, num_forced, num_different


def run(options: Options) -> Sequence[Row]:
    vocabulary = _vocabularies.vocabulary("128k")
    rows = []
    for name, answers in ANSWERS.items():
        schema = _constraints.CLOSED[name]
        grammar = Grammar.compile(JsonSchema(schema), vocabulary)
        total = forced = different = wrong = 0
        for answer in answers:
            data = compact(answer)
            judge = _engines.llguidance_json(json.dumps(schema), vocabulary)
            ids, num_forced, num_different = replay(grammar, vocabulary, data, judge)
            total, forced, different = total + len(ids), forced + num_forced, different + num_different
            wrong += ids != vocabulary.encode(data)
        shape = {"answers": len(answers), "tokens": total, "vocabulary": vocabulary.vocab_size}
        share = 100 * forced / total
        rows += [
            Row("forced", f"{name}: tokens forced", share, "%", floor=FORCED_PERCENT[name], shape=shape),
            Row("forced", f"{name}: not as llguidance", different, "steps", floor=0, at_most=True, shape=shape),
            Row("forced", f"{name}: not canonical", wrong, "texts", floor=0, at_most=True, shape=shape),
        ]
    return rows
