"""What the processes draft before they are ready covers both kinds of automata."""

from __future__ import annotations

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.drafting import worker
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.core.grammar.vocabularies import bpe_vocabulary


def test_usual_schemas_are_drafted_as_automata_with_forced_texts() -> None:
    drafted = [worker._draft(JsonSchema(schema), Options(), bpe_vocabulary()) for schema in worker._usual(3)]
    assert [type(found.automaton) for found, _ in drafted] == [Dfa, Dpda]
    for found, grammar in drafted:
        assert found.automaton is not None and grammar is not None
        assert found.forced is not None and found.forced.ids(found.automaton.start)


def test_usual_schemas_differ_from_number_to_number() -> None:
    names = [set(schema["properties"]) for number in range(worker._ROUNDS) for schema in worker._usual(number)]
    assert not names[0] & names[2] and names[0] < names[1]
    assert len({frozenset(of_one) for of_one in names}) == 2 * worker._ROUNDS
