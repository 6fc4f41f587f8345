import pickle

import numpy as np

from graftlm.core.grammar.automata.array_automaton import ArrayAutomaton
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.nodes import nodes

EDGES = [[0, 2, 0x61, 0x61], [0, 1, 0x62, 0x7A], [2, 1, 0x61, 0x7A]]
ROWS = (((0x61, 0x61, 2), (0x62, 0x7A, 1)), (), ((0x61, 0x7A, 1),))


def automaton(ends: list[int]) -> ArrayAutomaton:
    return ArrayAutomaton(3, np.array(EDGES, np.int32), np.array(ends, np.int32))


def test_edges_in_an_array_are_rows_to_whoever_asks_for_them() -> None:
    found = automaton([1])
    assert (found.rows, found.accepting) == (ROWS, frozenset({1}))
    assert (found.num_states, found.num_edges, found.is_nothing) == (3, 3, False)


def test_the_dfa_is_that_of_the_rows() -> None:
    of_edges, of_rows = Dfa.compile(automaton([1])), Dfa.compile(nodes.Automaton(ROWS, frozenset({1})))
    assert of_edges.table.tolist() == of_rows.table.tolist()
    assert of_edges.accepting.tolist() == of_rows.accepting.tolist()


def test_automata_with_the_same_arrays_are_equal() -> None:
    assert automaton([1]) == automaton([1])
    assert hash(automaton([1])) == hash(automaton([1]))
    assert automaton([1]) != automaton([2])


def test_one_that_accepts_nothing_is_nothing() -> None:
    assert automaton([]).is_nothing


def test_a_pickle_holds_the_arrays() -> None:
    found = pickle.loads(pickle.dumps(automaton([1])))
    assert isinstance(found, ArrayAutomaton)
    assert found == automaton([1])
