"""Outputs of a random model under random budgets: every output must be valid."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import numpy as np

from bench.grammar import _constraints, _vocabularies
from bench.harness import Options, Row
from graftlm import Choices, Grammar, JsonSchema, Regex, Vocabulary
from graftlm.core.grammar.spec import Spec


def write(grammar: Grammar, vocabulary: Vocabulary, rng: np.random.Generator, budget: int) -> tuple[bytes, int]:
    """Write at most `budget` tokens, as the engine does: sample, jump over forced tokens, end in time.

    A token's weight is drawn anew at every step, so all that is allowed comes up.
    -> the text, and how many tokens were forced
    """
    matcher = grammar.matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    ids: list[int] = []
    num_forced = 0
    while len(ids) < budget and not matcher.finished:
        forced = matcher.forced(ids)
        if forced and matcher.advance(forced) == len(forced):
            if len(ids) + len(forced) + matcher.min_tokens_to_accept() <= budget:
                ids += forced
                num_forced += len(forced)
                continue
            matcher.rollback(len(forced))
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.vocab_size])
        token_id = int(allowed[np.argmax(rng.gumbel(size=len(allowed)) + 2.0 * rng.standard_normal(len(allowed)))])
        if token_id in vocabulary.eos_token_ids:
            break
        if matcher.advance([token_id]) != 1:
            raise AssertionError(f"token {token_id} is in the mask but not accepted")
        if len(ids) + 1 + matcher.min_tokens_to_accept() > budget:
            matcher.rollback(1)
            ids += matcher.ending(ids)
            break
        ids.append(token_id)
    return vocabulary.decode(ids), num_forced


def problem(spec: Spec, data: bytes) -> str | None:
    """Return the reason why `data` violates `spec`, by code outside this library; None if it satisfies it."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return str(error)
    match spec:
        case Regex(pattern):
            return None if re.fullmatch(pattern, text) else "does not match"
        case Choices(options=options):
            return None if text in options else "is no choice"
        case JsonSchema(schema=schema):
            return _json_problem(schema, text)
        case _:
            raise TypeError(spec)


def _json_problem(schema: Any, text: str) -> str | None:
    from jsonschema import Draft202012Validator, FormatChecker

    try:
        value = json.loads(text, parse_float=exact)
    except ValueError as error:
        return str(error)
    schema = json.loads(json.dumps(closed(schema)), parse_float=Decimal)
    formats = FormatChecker(sorted(set(FormatChecker.checkers) - {"time"}))  # that one wants no offset
    with localcontext(prec=1000):
        found = next(iter(Draft202012Validator(schema, format_checker=formats).iter_errors(value)), None)
    return None if found is None else found.message


def exact(text: str) -> Decimal | float:
    """Return a JSON number: a float beyond all exponents, else a Decimal, of which 0.07 is a multiple of 0.01."""
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all bounds
        return float(text)


def closed(schema: Any) -> Any:
    """Return `schema` with the objects closed that strict mode closes; allOf must be closed as a whole."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: item if name in ("enum", "const", "allOf") else closed(item) for name, item in schema.items()}
    if "allOf" in schema:
        return {**inner, "unevaluatedProperties": False}
    if isinstance(schema.get("properties"), dict) and "type" in schema and "additionalProperties" not in schema:
        return {**inner, "additionalProperties": False}
    return inner


def failures(vocabulary: Vocabulary, num_texts: int, seed: int) -> list[str]:
    """Generate `num_texts` outputs over all constraints; return the violations."""
    specs = _constraints.everything()
    grammars = {name: Grammar.compile(spec, vocabulary) for name, spec in specs.items()}
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for i in range(num_texts):
        name = list(specs)[i % len(specs)]
        least = grammars[name].matcher().min_tokens_to_accept()
        budget = max(1, least + int(rng.integers(0, 40 if i % 2 else 200)))
        data, _ = write(grammars[name], vocabulary, rng, budget)
        reason = problem(specs[name], data)
        if reason is not None:
            wrong.append(f"{name} ({grammars[name].engine}, budget {budget}): {data!r}: {reason}")
    return wrong


def run(options: Options) -> Sequence[Row]:
    num_texts = options.choose(500, 10_000)
    wrong = failures(_vocabularies.vocabulary("32k"), num_texts, seed=0)
    for line in wrong[:20]:
        print(line)
    shape = {"texts": num_texts, "constraints": len(_constraints.everything()), "vocabulary": 32_000}
    return [Row("validity", "valid texts", 100 * (1 - len(wrong) / num_texts), "%", floor=100, shape=shape)]
