import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.text import json_text
from graftlm.core.grammar.schema.text.name_trie import names_but

LISTS = [["a"], [""], ["ab", "abc", "b"], ["é", "è", "e"], ['a"b', "a\\", "a\n", "a/b"], ["\U0001f600", "\U0001f601x"]]


@pytest.mark.parametrize("names", LISTS)
def test_the_automaton_of_names_has_the_language_of_the_nodes(names: list[str]) -> None:
    automaton, node = names_but(names), json_text.other_names(names)
    assert product.is_empty(nodes.Difference(automaton, node))
    assert product.is_empty(nodes.Difference(node, automaton))


def test_a_state_of_the_trie_has_an_edge_for_each_letter_and_for_those_between() -> None:
    automaton = names_but(["ab", "ad"])
    first, after_a = automaton.rows[0], automaton.rows[len(automaton.rows) - 3]
    assert [(low, high) for low, high, _ in first if 0x5D <= low <= 0x7F] == [(0x5D, 0x60), (0x61, 0x61), (0x62, 0x7F)]
    assert [low for low, _, _ in after_a if 0x5D <= low <= 0x7F] == [0x5D, 0x62, 0x63, 0x64, 0x65]
    assert automaton.num_states - 1 not in automaton.ends


def test_a_name_that_utf8_cannot_write_is_refused() -> None:
    with pytest.raises(GrammarError, match="lone surrogate"):
        names_but(["a", "\ud800"])


def test_a_listed_letter_takes_one_state() -> None:
    few, more = (Dfa.compile(names_but(names)).num_states for names in (["ab"], ["ab", "cd", "ef"]))
    assert more - few == 2 * 2
