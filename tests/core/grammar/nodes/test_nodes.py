"""Nodes are simplified as they are built."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from graftlm.core.grammar.nodes import nodes

A, B, COMMA = nodes.literal("a"), nodes.literal("b"), nodes.literal(",")
RULE, LETTERS = nodes.Rule("r"), nodes.chars("xyz")


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((RULE, LETTERS), nodes.Concat((RULE, LETTERS))),
        ((A, B), nodes.literal("ab")),
        ((RULE, nodes.EMPTY), RULE),
        ((RULE, nodes.NOTHING), nodes.NOTHING),
        ((RULE, nodes.concat(LETTERS, A)), nodes.Concat((RULE, LETTERS, A))),
        ((nodes.concat(RULE, A), nodes.concat(B, RULE)), nodes.Concat((RULE, nodes.literal("ab"), RULE))),
        ((), nodes.EMPTY),
    ],
)
def test_a_row_is_flat_and_its_neighbouring_literals_are_one(
    items: tuple[nodes.Node, ...], expected: nodes.Node
) -> None:
    assert nodes.concat(*items) == expected


def test_states_of_a_walk_that_only_pass_on_are_joined() -> None:
    member = nodes.concat(RULE, LETTERS)
    rows = [[(nodes.EMPTY, 1), (A, 2)], [(member, 3)], [(COMMA, 4)], [(A, 0)], [(B, 3)]]
    assert nodes.graph(rows, {3}) == nodes.Graph((((member, 1), (nodes.literal("a,b"), 1)), ((A, 0),)), frozenset({1}))


def test_states_that_only_pass_on_to_each_other_lead_nowhere() -> None:
    assert nodes.graph([[(A, 1), (B, 2)], [(nodes.EMPTY, 1)], []], {2}) == B


def test_edges_of_a_walk_that_are_equal_are_one() -> None:
    rows = [[(A, 1), (nodes.literal("a"), 1), (B, 1), (A, 0)], [(A, 0)]]
    assert nodes.graph(rows, {1}) == nodes.Graph((((A, 1), (B, 1), (A, 0)), ((A, 0),)), frozenset({1}))


def test_nodes_are_equal_by_what_they_are_made_of_and_know_their_hash() -> None:
    one, other = (nodes.Graph((((A, 1),), ()), frozenset({1})) for _ in range(2))
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert one != nodes.Graph((((B, 1),), ()), frozenset({1}))
    assert nodes.Literal(b"a") != nodes.Rule("a")


def test_a_node_from_another_process_has_the_hash_of_an_equal_node_here() -> None:
    code = """
import pickle, sys
from graftlm.core.grammar.nodes import nodes
node = nodes.concat(nodes.Rule("r"), nodes.optional(nodes.literal("b")))
hash(node)
sys.stdout.buffer.write(pickle.dumps(node))
"""
    other = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, check=True)
    node = nodes.concat(RULE, nodes.optional(B))
    assert {node: "here"}[pickle.loads(done.stdout)] == "here"


def test_automata_with_the_same_edges_are_equal() -> None:
    rows = [[(0x61, 0x61, 2), (0x62, 0x7A, 1)], [], [(0x61, 0x7A, 1)]]
    found = nodes.Automaton.of(rows, [1])
    assert found.edges.tolist() == [[0, 2, 0x61, 0x61], [0, 1, 0x62, 0x7A], [2, 1, 0x61, 0x7A]]
    assert found.rows == rows and not found.is_nothing
    assert found == nodes.Automaton.of(rows, [1]) != nodes.Automaton.of(rows, [2])
    assert hash(found) == hash(nodes.Automaton.of(rows, [1])) and nodes.Automaton.of(rows, []).is_nothing
