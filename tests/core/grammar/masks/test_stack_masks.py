"""Masks of a pushdown automaton hold exactly the tokens that it can read, whatever lies on its stack."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.engines.pda import PdaGrammar
from graftlm.core.grammar.masks.masks import StackMasks
from graftlm.core.grammar.masks.slices import JSON_STRING
from graftlm.core.grammar.masks.stack_walk import (
    allow_tokens,
)
from graftlm.core.grammar.masks.trie import Trie
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.nodes.nodes import Rule
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.automata.stack.test_dpda import LANGUAGES, LIST, TREE, of_schema
from tests.core.grammar.vocabularies import allowed_at

PIECES = ['{"', '"}', '":', '":[', "',", '"]', "]]", "]]]]", "}}", "}]}", "[[", "[[[", '[{"', "],", "],[", "]]:", "]x"]
PIECES += ['{"v":1', ',"k":[{"v":', '"}],"', "12", ":(", "))", "0:", '","', "true", 'null,"', "  ", '": {"', "é", "\\n"]


def vocabulary() -> Vocabulary:
    tokens = [bytes([i]) for i in range(256)] + [piece.encode() for piece in PIECES] + [b"[", b""]
    return Vocabulary(tokens, eos_token_id=len(tokens) - 1)


VOCABULARY = vocabulary()


MORE = [
    b"ab",
    b"abcde",
    b'ab"',
    b'abcd",',
    b"a\\",
    b'a\\"b',
    b"a\xc3",
    b"\xc3a",
    b'\xc3"',
    b"\xe2\x82",
    b"\x82\xac",
    b"\xe2\x82\xac\xc3\xa9",
]
WORDS = Vocabulary([*VOCABULARY.tokens[:-1], *MORE, b""], eos_token_id=len(VOCABULARY.tokens) + len(MORE) - 1)


def readable(dpda: Dpda, place: Place, vocabulary: Vocabulary = VOCABULARY) -> set[int]:
    """By brute force: each token walked on its own."""
    found = {i for i, token in enumerate(vocabulary.tokens) if token and dpda.walk(place, token) is not None}
    return found | set(vocabulary.eos_token_ids) if dpda.accepts(place) else found


AUTOMATA = [build_dpda(*language) for language in LANGUAGES]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(AUTOMATA), st.lists(st.integers(0, 10_000), max_size=30))
def test_masks_of_random_texts_are_what_brute_force_finds(dpda: Dpda, choices: list[int]) -> None:
    masks, place = StackMasks(dpda, VOCABULARY), dpda.start
    for choice in choices:
        tokens = readable(dpda, place)
        assert allowed_at(masks, place) == tokens
        with_bytes = sorted(tokens - set(VOCABULARY.eos_token_ids))
        if not with_bytes:
            break
        after = dpda.walk(place, VOCABULARY.tokens[with_bytes[choice % len(with_bytes)]])
        assert after is not None
        place = after


@pytest.mark.parametrize("bounds", [{"maxLength": 9}, {"minLength": 3, "maxLength": 4}, {"minLength": 5}])
@pytest.mark.parametrize("text", [b"", b"a", b"a\\n", "é\u20ac".encode(), b"abcd", b"abcdefgh", b"\xe2\x82", b"\\u0"])
def test_masks_of_strings_of_bounded_length_are_what_brute_force_finds(bounds: dict[str, int], text: bytes) -> None:
    tree = {"type": "object", "properties": {"s": {"type": "string", **bounds}, "k": {"$ref": "#"}}, "required": ["s"]}
    dpda = build_dpda(*of_schema(tree))
    place = dpda.walk(dpda.start, b'{"s":"' + text)
    if place is not None:
        assert allowed_at(StackMasks(dpda, WORDS), place) == readable(dpda, place, WORDS)


def test_only_tokens_that_leave_a_string_by_its_exits_are_walked() -> None:
    inside = WORDS.slices.build(JSON_STRING)
    leaving = inside.leaving(bytes(byte in b'"' for byte in range(128)))
    walked = [*leaving.nodes[:, 3], *leaving.twins[:, 1]]
    found = {WORDS.tokens[token] for token in walked if token >= 0}
    assert {b'ab"', b'","', b"a\xc3", b"\xe2\x82"} <= found
    assert not found & {b"ab", b"\n", b"a\\", b"\xc3a", b"\x80", b"\xff", b'\xc3"'}


def test_a_mask_is_computed_once_for_all_stacks_that_no_token_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Place] = []

    def counted(trie: Trie, dpda: Dpda, place: Place, row: MaskRow) -> tuple[int, int]:
        computed.append(place)
        return allow_tokens(trie, dpda, place, row)

    monkeypatch.setattr("graftlm.core.grammar.masks.stack_walk.allow_tokens", counted)
    dpda = build_dpda(*of_schema(TREE))
    masks = StackMasks(dpda, VOCABULARY)
    inside = [dpda.walk(dpda.start, b'{"v":1,"k":[' + b'{"v":2,"k":[' * depth + b'{"v') for depth in range(6)]
    assert len({len(place or ()) for place in inside}) == 6
    rows = [masks.row(place) for place in inside if place is not None]
    assert all(row is rows[0] for row in rows)
    assert len(computed) == 1


def test_a_token_that_closes_more_than_is_open_is_not_allowed() -> None:
    dpda = build_dpda(Rule("list"), LIST)
    masks = StackMasks(dpda, VOCABULARY)
    four = VOCABULARY.tokens.index(b"]]]]")
    for depth in range(1, 8):
        place = dpda.walk(dpda.start, b"[" * depth)
        assert place is not None and (four in allowed_at(masks, place)) == (depth >= 4)


def test_thousands_of_open_brackets_are_not_all_remembered() -> None:
    grammar = PdaGrammar(build_dpda(Rule("list"), LIST), VOCABULARY)
    matcher = grammar.matcher()
    row = np.zeros(VOCABULARY.num_words, np.int32)
    for _ in range(2_000):
        matcher.fill_mask(row)
        assert matcher.advance([VOCABULARY.tokens.index(b"[")]) == 1
        assert matcher.forced([]) == [] and matcher.min_tokens_to_accept() > 0
    kept = [*grammar.masks._digests, *grammar._runs, *grammar._endings]
    assert sum(map(len, kept)) < 20_000
    assert matcher.advance(matcher.ending([])) and matcher.accepting


def test_threads_that_want_one_row_get_one() -> None:
    grammar = PdaGrammar(AUTOMATA[2], VOCABULARY)
    place = grammar.dpda.walk(grammar.dpda.start, b'[{"a":"')
    assert place is not None
    rows: list[object] = []
    threads = [threading.Thread(target=lambda: rows.append(grammar.masks.row(place))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows) == 8 and all(row is rows[0] for row in rows)
