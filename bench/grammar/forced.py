"""How many tokens of real answers the grammar writes by itself, and whether the text stays canonical.

The answers are replayed: where nothing is forced, the model is taken to write the tokenizer's own next token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bench.grammar import _constraints, _engines, _vocabularies
from bench.harness import Options, Row
from graftlm import Grammar, JsonSchema, Vocabulary

ADDRESS = {"street": "12 Navy Yard Rd", "city": "Arlington", "zip": "22202"}
ANSWERS: dict[str, list[Any]] = {
    "flat": [
        {"name": "Ada Lovelace", "age": 36, "email": "ada@engine.org", "active": True, "score": 98.5, "role": "admin"},
        {"name": "Søren K.", "age": 42, "email": "sk@example.dk", "active": False, "score": -3.25, "role": "guest"},
        {"name": 'O\'Neil "Ted" Smith', "age": 7, "email": "t@x.io", "active": True, "score": 0, "role": "user"},
    ],
    "nested": [
        {
            "order_id": "A-10293",
            "customer": {"first_name": "Grace", "last_name": "Hopper", "address": ADDRESS},
            "items": [
                {"sku": "SKU-1", "quantity": 2, "unit_price": 19.99},
                {"sku": "SKU-99", "quantity": 1, "unit_price": 5},
            ],
            "tags": ["gift", "express"],
        },
        {
            "order_id": "B-1",
            "customer": {"first_name": "Li", "last_name": "Wei", "address": {**ADDRESS, "city": "上海"}},
            "items": [],
            "tags": [],
        },
    ],
    "employee": [
        {
            "employee_id": 1042,
            "first_name": "Maria",
            "last_name": "Gonzalez",
            "preferred_name": None,
            "work_email": "maria.gonzalez@example.com",
            "phone_number": "+1 555 0100",
            "department": "engineering",
            "job_title": "Site Reliability Engineer",
            "seniority_level": "senior",
            "manager_id": 17,
            "start_date": "2019-04-15",
            "is_remote": True,
            "office_location": "Lisbon, Portugal",
            "annual_salary": 91250.5,
            "currency_code": "EUR",
            "skills": ["kubernetes", "python", "incident response"],
            "languages_spoken": ["Portuguese", "English"],
            "performance_rating": 4,
            "vacation_days_remaining": 11,
            "emergency_contact": {"contact_name": "Jose", "relationship": "brother", "contact_phone": "+351 555"},
        }
    ],
}
FLOORS = {"flat": 25, "nested": 34, "employee": 39}


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
            data = json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()
            judge = _engines.llguidance_json(json.dumps(schema), vocabulary)
            ids, num_forced, num_different = replay(grammar, vocabulary, data, judge)
            total, forced, different = total + len(ids), forced + num_forced, different + num_different
            wrong += ids != vocabulary.encode(data)
        shape = {"answers": len(answers), "tokens": total, "vocabulary": vocabulary.vocab_size}
        share = 100 * forced / total
        rows += [
            Row("forced", f"{name}: tokens forced", share, "%", floor=FLOORS[name], shape=shape),
            Row("forced", f"{name}: not as llguidance", different, "steps", floor=0, at_most=True, shape=shape),
            Row("forced", f"{name}: not canonical", wrong, "texts", floor=0, at_most=True, shape=shape),
        ]
    return rows
