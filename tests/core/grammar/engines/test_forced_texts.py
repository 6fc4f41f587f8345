"""Forced texts that were worked out beforehand are what the grammar would find."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from graftlm.core.grammar.compile import compile_spec
from graftlm.core.grammar.drafting.draft import Draft, automaton_grammar, draft, finished
from graftlm.core.grammar.engines.automaton import AutomatonGrammar
from graftlm.core.grammar.engines.forced_texts import ForcedText, ForcedTexts
from graftlm.core.grammar.spec import Choices, JsonSchema, Options, Regex
from tests.core.grammar.vocabularies import bpe_vocabulary
from tests.grammars import BYTES

FIELDS: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 9},
    "kind": {"enum": ["red", "green"]},
    "count": {"type": "integer", "minimum": 0, "maximum": 300},
    "when": {"type": "string", "format": "date"},
    "ok": {"type": "boolean"},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "closed": {"type": "object", "properties": FIELDS, "required": list(FIELDS)},
    "open": {"type": "object", "properties": {**FIELDS, "any": {}}, "required": [*FIELDS, "any"]},
}


def _drafted(spec: JsonSchema) -> Draft:
    """A draft as it comes from another process, once all of its forced texts have."""
    found = draft(spec, Options())
    grammar = automaton_grammar(found, bpe_vocabulary())
    assert grammar is not None
    sent: Draft = pickle.loads(pickle.dumps(replace(found, forced=grammar.forced_at_start())))
    assert sent.forced is not None
    sent.forced.replace(pickle.loads(pickle.dumps(grammar.forced_texts())))
    return sent


def test_texts_are_found_by_their_place() -> None:
    known = [ForcedText(3, 9, b"ab", (7, 8)), ForcedText(5, 2, b"c", (1,)), ForcedText(70000, 1, b"", (4,))]
    texts = pickle.loads(pickle.dumps(ForcedTexts.of(known)))
    for one in known:
        assert texts.run((one.state, 0, 0)) == (one.text, (one.after, 0, 0))
        assert texts.ids((one.state,)) == one.ids
    for place in ((4,), (1,), (70001,), (2,), (3, 1), (9,)):
        assert texts.run(place) is None and texts.ids(place) is None
    assert ForcedTexts.of([]).run((0,)) is None and ForcedTexts.of([]).ids((1,)) is None
    assert texts.num_bytes > ForcedTexts.of([]).num_bytes


def test_texts_are_replaced_where_they_are_used() -> None:
    first, second = ForcedText(3, 9, b"ab", (7, 8)), ForcedText(2, 4, b"longer", (1, 2, 3))
    texts = ForcedTexts.of([first])
    texts.replace(ForcedTexts.of([second, first]))
    for one in (first, second):
        assert texts.run((one.state,)) == (one.text, (one.after,)) and texts.ids((one.state,)) == one.ids


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_draft_for_a_vocabulary_has_the_forced_texts_of_its_grammar(name: str) -> None:
    vocabulary, spec = bpe_vocabulary(), JsonSchema(SCHEMAS[name])
    found = _drafted(spec)
    plain = compile_spec(spec, vocabulary, Options()).compiled
    known = finished(found, vocabulary).compiled
    assert isinstance(plain, AutomatonGrammar) and isinstance(known, AutomatonGrammar)
    assert plain.forced(plain.automaton.start, -1) == known.forced(known.automaton.start, -1)
    none, num_found = plain.automaton.start[1:], 0
    for state in range(1, plain.automaton.num_states):
        place = (state, *none)
        ids = found.forced.ids(place)
        if ids is not None:
            assert plain.run(place) == found.forced.run(place) == known.run(place)
            assert plain.forced(place, -1) == ids == known.forced(place, -1)
            num_found += 1
    assert num_found >= len(FIELDS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_forced_at_the_start_is_known_by_itself(name: str) -> None:
    vocabulary = bpe_vocabulary()
    found = draft(JsonSchema(SCHEMAS[name]), Options())
    grammar = automaton_grammar(found, vocabulary)
    assert grammar is not None
    start, texts = grammar.automaton.start, grammar.forced_at_start()
    assert texts.ids(start) == grammar.forced_texts().ids(start) and texts.run(start) == grammar.run(start)
    assert texts.num_bytes < grammar.forced_texts().num_bytes


def test_what_is_long_or_nothing_at_the_start_is_not_kept() -> None:
    for spec in (Regex("[ab]+"), Choices(["x" * 3000]), Choices(["a", "b"])):
        grammar = automaton_grammar(draft(spec, Options()), bpe_vocabulary())
        assert grammar is not None and grammar.forced_at_start().ids(grammar.automaton.start) is None


def test_known_texts_are_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, spec = bpe_vocabulary(), JsonSchema(SCHEMAS["closed"])
    found = _drafted(spec)
    monkeypatch.setattr(AutomatonGrammar, "_healed", lambda *_: pytest.fail("it was encoded again"))
    matcher = finished(found, vocabulary).matcher()
    assert matcher.advance(matcher.forced([])) > 0


def test_long_texts_are_left_to_whoever_asks() -> None:
    vocabulary = bpe_vocabulary()
    spec = JsonSchema({"type": "object", "properties": {"a": {"const": "x" * 3000}}, "required": ["a"]})
    found = _drafted(spec)
    assert found.forced is not None and found.forced.run((1,)) is None
    matcher = finished(found, vocabulary).matcher()
    assert vocabulary.decode(matcher.forced([])).startswith(b'{"a":"xxx')


def test_drafts_for_no_vocabulary_have_none() -> None:
    found = draft(JsonSchema(SCHEMAS["closed"]), Options())
    assert found.forced is None and finished(found, BYTES).engine == "fsm"
