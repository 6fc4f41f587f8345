"""What the processes draft before they are ready covers both kinds of automata."""

from __future__ import annotations

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.drafting import worker
from graftlm.core.grammar.drafting.draft import draft
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.vocabularies import bpe_vocabulary


def test_usual_schemas_are_drafted_as_automata_with_forced_texts() -> None:
    found = [draft(JsonSchema(schema), Options(), bpe_vocabulary()) for schema in worker._USUAL]
    assert [type(one.automaton) for one in found] == [Dfa, Dpda]
    for one in found:
        assert one.forced is not None and one.forced.ids(one.automaton.start)
