"""Escapes are read as characters of a string: masks are what brute force finds over all short texts of such bytes."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.masks.masks import Masks, StackMasks
from graftlm.core.grammar.masks.self_loops import self_loop
from graftlm.core.grammar.masks.slices import JSON_NAME, JSON_STRING, CharClass
from graftlm.core.grammar.nodes.rules import written_out
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import JsonSchema, Options
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.automata.stack.test_dpda import of_schema
from tests.core.grammar.masks.test_masks import STRING, readable, walk_at_random
from tests.core.grammar.masks.test_stack_masks import readable as readable_by_stack
from tests.core.grammar.vocabularies import allowed, allowed_at

ALPHABET = [b"a", b"\\", b"n", b"/", b'"', b"u", b"0", b",", "é".encode(), b"\xc3", b"\xa9"]
ODD = [
    b"\\n" * 9,
    b"a\\n" * 5 + b'"',
    b"\\\\" * 4 + b"\\",
    b'\\"a\\"',
    b"\\u000a",
    b"a\\u001fb",
    b"\\u0041",
    b'\\u000a"',
]


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """All texts of up to three pieces that matter to escapes, each byte, and longer ones."""
    texts = {b"".join(parts) for size in (1, 2, 3) for parts in product(ALPHABET, repeat=size)}
    tokens = sorted(texts | {bytes([byte]) for byte in range(256)}) + ODD + [b""]
    return Vocabulary(tokens, eos_token_id=len(tokens) - 1)


STRINGS = [
    STRING % "*",
    STRING % "{2,6}",
    STRING % "{0,40}",
    STRING % "{3,}",
    r'"([^"\\]|\\[n"])*"',  # some escapes
    r'"([^"\\]|\\.)*"',  # all of them
    r'"([^"\\]|\\n|\\ux)*"',  # and another one
    r'"([^"\\]|\\n)*\\x"',  # one that ends the repeat
    r'"([^"\\]|\\[né])*"',  # beyond ASCII
    r'"[^"]*"',  # a backslash is a character
    r'"([a-z]|\\n){2,9}"',
    r'"([a-z]{1,3}\\n){2,9}"',  # escapes that are no characters
    r'"([^"\\]|\\\\)*"',
    r'"([^"\\]|\\n){1,3}([^"\\]|\\/){1,3}"',
]


@pytest.mark.parametrize("pattern", STRINGS)
@pytest.mark.parametrize("counters", [True, False])
@settings(max_examples=6)
@given(choices=st.lists(st.integers(0, 10**6), min_size=3, max_size=9))
def test_masks_inside_strings_are_what_brute_force_finds(pattern: str, counters: bool, choices: list[int]) -> None:
    tokens = vocabulary()
    dfa = Dfa.compile(parse(pattern), counters=counters)
    masks, longest = Masks(dfa, tokens), tokens.trie.max_depth
    for loop in [self_loop(dfa, state, longest) for state in range(1, dfa.num_states)]:
        if loop is not None:
            tokens.slices.build(loop.chars)
    for place in walk_at_random(dfa, tokens, choices):
        assert allowed_at(masks, place) == readable(dfa, tokens, place)


@pytest.mark.parametrize("member", [{}, {"maxLength": 5}, {"minLength": 2, "maxLength": 3}, {"pattern": "^[^x]*$"}])
@pytest.mark.parametrize(
    "text", ["", "a", "\\\\", "a\\", "a\\n", "\\u", "\\u00", "é", "aaa", "aaaaa", "\\n\\n\\n\\n\\"]
)
def test_masks_of_a_stack_automaton_are_what_brute_force_finds(member: dict[str, object], text: str) -> None:
    tree = {"type": "object", "properties": {"s": {"type": "string", **member}, "k": {"$ref": "#"}}, "required": ["s"]}
    dpda = build_dpda(*of_schema(tree))
    place = dpda.walk(dpda.start, f'{{"s":"{text}'.encode())
    if place is not None:
        assert allowed_at(StackMasks(dpda, vocabulary()), place) == readable_by_stack(dpda, place, vocabulary())


def test_strings_and_names_of_a_schema_have_the_slices_that_are_made_beforehand() -> None:
    found: set[CharClass] = set()
    for member in (
        {"type": "string"},
        {"type": "string", "pattern": "^.+$"},
        {"type": "string", "pattern": r"^[^\0]*$"},
    ):
        language = language_of(JsonSchema(member), Options())
        regular = written_out(language.node, language.rules)
        assert regular is not None
        dfa = Dfa.compile(regular)
        loops = [self_loop(dfa, state) for state in range(1, dfa.num_states)]
        found |= {loop.chars for loop in loops if loop is not None}
    assert {JSON_STRING, JSON_NAME} <= found


def test_tokens_of_characters_and_escapes_are_inside_a_slice() -> None:
    tokens = vocabulary()
    inside = tokens.slices.build(JSON_STRING)
    lengths = {tokens.tokens[i]: int(n) for i, n in enumerate(inside.lengths) if n}
    assert {b"a": 1, b"\\": 1, b"\\n": 1, b"\\\\": 1, b"a\\n": 2, b"\\na": 2, b"\\\\\\": 2}.items() <= lengths.items()
    assert lengths[b"\\n" * 9] == 9 and lengths["\\né".encode()] == 2
    assert not lengths.keys() & {b'"', b'a"', b"\\a", b"\\u", b"\\u000a", b"\xc3", b"\\\xc3", b"a\xc3", b"\xa9a"}
    at_most_one = {tokens.tokens[i] for i in allowed(inside.row(1))}
    assert {b"a", b"\\", b"\\n"} <= at_most_one and b"a\\" not in at_most_one
    leaving = inside.leaving(bytes(byte in b'"\\' for byte in range(128)) + bytes(byte in b"u" for byte in range(128)))
    walked = {tokens.tokens[i] for i in (*leaving.nodes[:, 3], *leaving.twins[:, 1]) if i >= 0}
    assert {b'"', b'a"', b'\\n"', b"\\u", b"a\\u", b"\\u000a", b"a\xc3", b"\\n\xc3"} <= walked
    assert not walked & {b"a", b"\\", b"\\n", b"\\a", b"a\\0", b"\\\xc3", b"\\\xc3\xa9"}


def test_escapes_need_not_be_the_same_in_all_states_of_a_repeat() -> None:
    dfa = Dfa.compile(parse(r'"([^"\\]|\\[nt])([^"\\]|\\n)*"'), counters=False)
    place = dfa.walk(dfa.start, b'"a')
    assert place is not None
    loop = self_loop(dfa, place[0], 20)
    assert loop is not None and np.flatnonzero(np.frombuffer(loop.chars.escaped, np.uint8)).tolist() == [ord("n")]
    plain = self_loop(Dfa.compile(parse("[a-z]*")), 1)
    assert plain is not None and plain.chars.escaped == b""
