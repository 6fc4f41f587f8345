"""xgrammar given our reading of constraints: the same masks as our own engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.grammar import _constraints
from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.engines.ebnf import to_ebnf
from graftlm.core.grammar.spec import Composite, JsonSchema, Regex
from tests.grammars import BYTES, allows, compact, compiled

pytest.importorskip("xgrammar")

PLAIN = ["flat", "optional", "some required", "map beside fields", "map of few", "percent", "cents", "short text"]
PLAIN += ["odd names", "constants", "tagged union", "pair", "matrix"]


def bits(row: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("name", PLAIN)
def test_its_masks_are_those_of_our_automaton(name: str) -> None:
    spec = JsonSchema(_constraints.CLOSED[name])
    theirs, ours = compiled(spec, engine="xgrammar").matcher(), compiled(spec).matcher()
    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = np.zeros(BYTES.num_words, np.int32), np.zeros(BYTES.num_words, np.int32)
        theirs.fill_mask(a)
        ours.fill_mask(b)
        assert bits(a) == bits(b)
        assert theirs.accepting == ours.accepting
        going_on = sorted(bits(b) - {256})
        if not going_on:
            assert theirs.finished and ours.finished
            break
        token_id = int(rng.choice(going_on))
        assert theirs.advance([token_id]) == ours.advance([token_id]) == 1


def test_what_it_would_leave_out_is_kept() -> None:
    schema = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}
    grammar = compiled(schema, engine="xgrammar")
    assert grammar.engine == "xgrammar"
    assert allows(grammar, '"ab"') and not allows(grammar, '"abc"')
    unique = compiled({"type": "array", "uniqueItems": True}, engine="xgrammar")
    assert unique.engine == "xgrammar" and allows(unique, "[1,2]") and not allows(unique, "[1,1]")


def test_rules_that_contain_themselves_are_followed() -> None:
    grammar = compiled(_constraints.CONTEXT_FREE["linked list"], engine="xgrammar")
    assert allows(grammar, compact({"value": 1, "next": {"value": 2, "next": None}}))
    assert not allows(grammar, compact({"value": 1, "next": {}}))


def test_it_goes_back_forks_forces_and_ends() -> None:
    matcher = compiled(Regex("ab(cd|e)f"), engine="xgrammar").matcher()
    assert matcher.forced_bytes() == b"ab" and matcher.forced([]) == [97, 98]
    assert matcher.advance([97, 98, 101, 120]) == 3
    twin = matcher.fork()
    assert twin.ending([]) == [102] and twin.advance([102, 256]) == 2 and twin.finished
    twin.rollback(3)
    assert twin.advance([99]) == 1 and matcher.advance([99]) == 0
    with pytest.raises(ValueError, match="cannot undo"):
        matcher.rollback(4)


def test_ebnf_says_what_it_cannot() -> None:
    with pytest.raises(GrammarError, match="no rule 'x'"):
        to_ebnf(ast.Rule("x"), {})
    with pytest.raises(GrammarError, match="matches no text"):
        to_ebnf(ast.NOTHING, {})
    with pytest.raises(GrammarError, match="not UTF-8"):
        compiled(Composite(ast.Literal(b"\xff")), engine="xgrammar")
