import pytest

from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.schema.text import json_text
from graftlm.core.grammar.schema.text.names import names_but

LISTS = [["a"], [""], ["ab", "abc", "b"], ["é", "è", "e"], ['a"b', "a\\", "a\n", "a/b"], ["\U0001f600", "\U0001f601x"]]


@pytest.mark.parametrize("names", LISTS)
def test_the_automaton_of_names_has_the_language_of_the_nodes(names: list[str]) -> None:
    automaton, node = names_but(names), json_text.other_names(names)
    assert product.is_empty(ast.Difference(automaton, node))
    assert product.is_empty(ast.Difference(node, automaton))


def test_a_listed_letter_takes_one_state() -> None:
    few, more = (Dfa.compile(names_but(names)).num_states for names in (["ab"], ["ab", "cd", "ef"]))
    assert more - few == 2 * 2
