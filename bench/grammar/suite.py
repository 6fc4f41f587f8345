"""The official JSON Schema test suite, drafts 2020-12 and 7: right and wrongly accepted instances by engine.

An engine is right about an instance when it accepts the valid and rejects the invalid; a schema that it refuses counts
as nothing right. Instances are compact JSON with their members in the order of the suite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.harness import ROOT, Options, Row
from graftlm import Grammar, GrammarError, JsonSchema, Vocabulary

SUITE = ROOT / "tests" / "data" / "json_schema_suite"
DRAFTS = ("draft2020-12", "draft7")
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], eos_token_id=256)

Accepts = Callable[[bytes], bool]
Compile = Callable[[Any], Accepts]


@dataclass
class Score:
    """The results of one engine on the instances. `lets_through` names invalid ones that it accepted."""

    num_right: int = 0
    num_refused: int = 0
    num_rejected: int = 0
    num_instances: int = 0
    lets_through: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)


def groups(draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema of a draft with its instances, and where it stands."""
    for path in sorted((SUITE / draft).rglob("*.json")):
        for group in json.loads(path.read_text()):
            yield f"{path.relative_to(SUITE)}: {group['description']}", group


def judge(compile_schema: Compile, draft: str) -> Score:
    """Check every instance of a draft with one engine."""
    score = Score()
    for place, group in groups(draft):
        score.num_instances += len(group["tests"])
        try:
            accepts = compile_schema(group["schema"])
        except GrammarError as error:
            score.num_refused += len(group["tests"])
            score.refusals[place] = str(error)
            continue
        for test in group["tests"]:
            accepted = accepts(instance(test["data"]))
            score.num_right += accepted == test["valid"]
            score.num_rejected += test["valid"] and not accepted
            if accepted and not test["valid"]:
                score.lets_through.append(f"{place}: {test['description']}")
    return score


def graftlm(schema: Any, **options: Any) -> Accepts:
    """GraftLM as it comes; `strict=False` to follow the specification about open objects."""
    grammar = Grammar.compile(JsonSchema(schema), BYTES, **options)

    def accepts(data: bytes) -> bool:
        matcher = grammar.matcher()
        return matcher.advance(list(data)) == len(data) and matcher.accepting

    return accepts


def llguidance(schema: Any) -> Accepts:
    """llguidance alone, with its own reading of schemas."""
    from llguidance import LLMatcher

    from graftlm.core.grammar.engines.byte_tokenizer import tokenizer_of

    text = json.dumps(schema)
    if isinstance(schema, dict):
        source = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    else:
        source = LLMatcher.grammar_from_json_schema(text)
    start = LLMatcher(tokenizer_of(BYTES), source, log_level=0)
    if start.is_error():
        raise GrammarError(start.get_error())
    start.compute_bitmask()  # lazy construction counts as compilation

    def accepts(data: bytes) -> bool:
        matcher = start.deep_copy()
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()

    return accepts


def instance(value: Any) -> bytes:
    """Return `value` as compact JSON, the form that engines check."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    for draft in DRAFTS:
        ours, strict = judge(partial(graftlm, strict=False), draft), judge(graftlm, draft)
        theirs = judge(llguidance, draft)
        for line in ours.lets_through + strict.lets_through:
            print("accepted though invalid:", line)
        shape = {"draft": draft, "instances": ours.num_instances}
        ratio = ours.num_right / theirs.num_right
        rows += [
            Row("suite", f"{draft}: right, open objects", ours.num_right, "instances", theirs.num_right, ratio, 1,
                shape=shape),
            Row("suite", f"{draft}: right, strict", strict.num_right, "instances", theirs.num_right, shape=shape),
            Row("suite", f"{draft}: schemas refused, their instances", ours.num_refused, "instances",
                theirs.num_refused, shape=shape),
            Row("suite", f"{draft}: valid but rejected", ours.num_rejected, "instances", theirs.num_rejected,
                shape=shape),
            Row("suite", f"{draft}: invalid but accepted", len(ours.lets_through) + len(strict.lets_through),
                "instances", len(theirs.lets_through), floor=0, at_most=True, shape=shape),
        ]  # fmt: skip
    return rows
