"""Guidance grammars on the compressed automaton, beside guidance's own parser, token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from guidance import gen, select

from graftlm.adapters.guidance.engine import GraftEngine, GraftState, Grammar
from graftlm.adapters.guidance.fsm import FsmParser
from graftlm.adapters.guidance.parser import Parser
from graftlm.core.runtime import Runtime
from tests.adapters.guidance.guidance_plugin import tame_model, trained_tokenizer

GRAMMARS = {
    "regex": gen("x", regex="[a-z ]{2,9}") + "." + gen("y", regex="[0-9]+"),
    "free": gen("x"),
    "limit": gen("x", max_tokens=4),
    "stop": gen("x", stop="."),
    "stop and limit": gen("x", stop="\n", max_tokens=6, list_append=True),
    "stop that follows": gen("x", stop='"', max_tokens=5) + '",\n "age": ' + gen("y", regex="[1-9][0-9]?"),
    "stop without a name": gen(stop=";", max_tokens=4) + "; " + select(["ab", "abc"], name="z"),
}
PROMPTS = ("", "A thought: ", 'say: "', "a\n", "caf\u00e9 ", "http:", "\n\n")
SIGNS = (b"\n", b'"', b".", b";", b"\xc3")


@pytest.fixture(scope="module")
def engine() -> Iterator[GraftEngine]:
    tokenizer = trained_tokenizer()
    with Runtime(tame_model(tokenizer), tokenizer=tokenizer, dtype="float32") as runtime:
        yield GraftEngine(runtime)


def parser_of(engine: GraftEngine, grammar: Any, prompt: str) -> Any:
    state = GraftState()
    state.prompt = prompt
    return engine._parser(grammar, state, True)[0]


def allowed(parser: Any, num_tokens: int) -> list[int] | None:
    row = np.zeros((num_tokens + 31) // 32, np.int32)
    if not parser.fill_mask(row):
        return None
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:num_tokens]).tolist()


def told(parser: Any) -> tuple[bytes, dict[str, Any]]:
    text, captures = b"", {}
    for step in parser.steps:
        new, found = step.told()
        text += new
        captures |= {k: v for k, v in found.items() if not isinstance(v, list)}
        for name in (k for k, v in found.items() if isinstance(v, list)):
            captures[name] = captures.get(name, []) + found[name]
    return text, captures


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(12))
def test_every_step_is_that_of_guidances_parser(engine: GraftEngine, name: str, seed: int) -> None:
    pick = random.Random(f"{name} {seed}")
    node, prompt = GRAMMARS[name], pick.choice(PROMPTS)
    ours, theirs = parser_of(engine, Grammar(node), prompt), parser_of(engine, node.ll_grammar(), prompt)
    assert isinstance(ours, FsmParser) and isinstance(theirs, Parser) and ours.tokens == theirs.tokens
    token_bytes = engine.runtime.tokenizer.token_bytes
    eos = engine.runtime.tokenizer.eos_token_ids
    for _ in range(12):
        candidates = allowed(ours, len(token_bytes))
        assert candidates == allowed(theirs, len(token_bytes))
        candidates = candidates or list(range(len(token_bytes)))
        signs = [i for i in candidates if any(sign in token_bytes[i] for sign in SIGNS)]
        token_id = pick.choice(signs if signs and pick.random() < 0.3 else candidates)
        for parser in (ours, theirs):
            if token_id in eos:
                parser.end_of_text(token_id)
            elif not parser.stopped:
                parser.advance([token_id])
                parser._rebuild = False
                parser.advance(parser.forced(parser.tokens))
        if ours.stopped or theirs.stopped:
            break
    assert ours.stopped == theirs.stopped
    assert [i for i in ours.tokens if i not in eos] == [i for i in theirs.tokens if i not in eos]
    text, captures = told(theirs)
    assert told(ours) == (text, captures if ours.stopped else {})


@pytest.mark.parametrize("name", GRAMMARS)
def test_tokens_that_are_taken_back_leave_nothing_behind(engine: GraftEngine, name: str) -> None:
    pick = random.Random(name)
    num_tokens = len(engine.runtime.tokenizer.token_bytes)
    parser, fresh = (parser_of(engine, Grammar(GRAMMARS[name]), 'say: "') for _ in range(2))
    taken: list[int] = []
    for _ in range(6):
        if parser.stopped:
            break
        consumed = [pick.choice(allowed(parser, num_tokens) or range(num_tokens))]
        parser.advance(consumed)
        ahead = parser.fork()
        before = (parser.tokens.copy(), told(parser), parser.num_forced, parser.stopped, allowed(ahead, num_tokens))
        guessed = [pick.choice(allowed(ahead, num_tokens) or range(num_tokens))] * 3
        parser.rollback(parser.advance(guessed))
        assert before == (parser.tokens, told(parser), parser.num_forced, parser.stopped, allowed(parser, num_tokens))
        taken += consumed
    fresh.advance(taken)
    assert (parser.tokens, told(parser)) == (fresh.tokens, told(fresh))


def test_more_tokens_than_were_consumed_cannot_be_taken_back(engine: GraftEngine) -> None:
    with pytest.raises(ValueError, match="cannot undo 1 tokens"):
        parser_of(engine, Grammar(gen("x")), "a").rollback(1)
