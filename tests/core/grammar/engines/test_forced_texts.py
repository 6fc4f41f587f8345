"""Forced texts that were worked out beforehand are what the grammar would find."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from graftlm.core.grammar.compile import compile_spec
from graftlm.core.grammar.drafting.draft import draft, finished
from graftlm.core.grammar.engines.automaton import AutomatonGrammar
from graftlm.core.grammar.engines.forced_texts import ForcedText, ForcedTexts
from graftlm.core.grammar.spec import JsonSchema, Options
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


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_draft_for_a_vocabulary_has_the_forced_texts_of_its_grammar(name: str) -> None:
    vocabulary, spec = bpe_vocabulary(), JsonSchema(SCHEMAS[name])
    found = pickle.loads(pickle.dumps(draft(spec, Options(), vocabulary)))
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


def test_known_texts_are_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, spec = bpe_vocabulary(), JsonSchema(SCHEMAS["closed"])
    found = draft(spec, Options(), vocabulary)
    monkeypatch.setattr(AutomatonGrammar, "_healed", lambda *_: pytest.fail("it was encoded again"))
    matcher = finished(found, vocabulary).matcher()
    assert matcher.advance(matcher.forced([])) > 0


def test_long_texts_are_left_to_whoever_asks() -> None:
    vocabulary = bpe_vocabulary()
    spec = JsonSchema({"type": "object", "properties": {"a": {"const": "x" * 3000}}, "required": ["a"]})
    found = draft(spec, Options(), vocabulary)
    assert found.forced is not None and found.forced.run((1,)) is None
    matcher = finished(found, vocabulary).matcher()
    assert vocabulary.decode(matcher.forced([])).startswith(b'{"a":"xxx')


def test_drafts_for_no_vocabulary_have_none() -> None:
    found = draft(JsonSchema(SCHEMAS["closed"]), Options())
    assert found.forced is None and finished(found, BYTES).engine == "fsm"
