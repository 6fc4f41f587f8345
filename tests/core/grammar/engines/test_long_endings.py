"""An ending that no search finds is searched once, when the constraint is compiled."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.automata import endings
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.engines import fsm
from graftlm.core.grammar.matcher import ends_within
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import BYTES


@pytest.mark.parametrize("least", [70, 3000])
def test_the_ending_of_a_long_minimum_is_searched_when_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(endings, "MAX_PLACES", 20_000)
    searches = []
    search = fsm.shortest_ending
    monkeypatch.setattr(fsm, "shortest_ending", lambda *given: searches.append(given) or search(*given))
    matcher = GrammarCache().get(JsonSchema({"type": "string", "minLength": least}), BYTES).matcher()
    assert len(searches) == 1
    assert not ends_within(matcher, 60)
    assert matcher.min_tokens_to_accept() >= least
    assert len(searches) == 1
