"""Nodes are simplified as they are built."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from graftlm.core.grammar import ast

A, B, COMMA = ast.literal("a"), ast.literal("b"), ast.literal(",")
RULE, LETTERS = ast.Rule("r"), ast.chars("xyz")


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((RULE, LETTERS), ast.Concat((RULE, LETTERS))),
        ((A, B), ast.literal("ab")),
        ((RULE, ast.EMPTY), RULE),
        ((RULE, ast.NOTHING), ast.NOTHING),
        ((RULE, ast.concat(LETTERS, A)), ast.Concat((RULE, LETTERS, A))),
        ((ast.concat(RULE, A), ast.concat(B, RULE)), ast.Concat((RULE, ast.literal("ab"), RULE))),
        ((), ast.EMPTY),
    ],
)
def test_a_row_is_flat_and_its_neighbouring_literals_are_one(items: tuple[ast.Node, ...], expected: ast.Node) -> None:
    assert ast.concat(*items) == expected


def test_states_of_a_walk_that_only_pass_on_are_joined() -> None:
    member = ast.concat(RULE, LETTERS)
    rows = [[(ast.EMPTY, 1), (A, 2)], [(member, 3)], [(COMMA, 4)], [(A, 0)], [(B, 3)]]
    assert ast.graph(rows, {3}) == ast.Graph((((member, 1), (ast.literal("a,b"), 1)), ((A, 0),)), frozenset({1}))


def test_states_that_only_pass_on_to_each_other_lead_nowhere() -> None:
    assert ast.graph([[(A, 1), (B, 2)], [(ast.EMPTY, 1)], []], {2}) == B


def test_edges_of_a_walk_that_are_equal_are_one() -> None:
    rows = [[(A, 1), (ast.literal("a"), 1), (B, 1), (A, 0)], [(A, 0)]]
    assert ast.graph(rows, {1}) == ast.Graph((((A, 1), (B, 1), (A, 0)), ((A, 0),)), frozenset({1}))


def test_nodes_are_equal_by_what_they_are_made_of_and_know_their_hash() -> None:
    one, other = (ast.Graph((((A, 1),), ()), frozenset({1})) for _ in range(2))
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert one != ast.Graph((((B, 1),), ()), frozenset({1}))
    assert ast.Literal(b"a") != ast.Rule("a")


def test_a_node_from_another_process_has_the_hash_of_an_equal_node_here() -> None:
    code = """
import pickle, sys
from graftlm.core.grammar import ast
node = ast.concat(ast.Rule("r"), ast.optional(ast.literal("b")))
hash(node)
sys.stdout.buffer.write(pickle.dumps(node))
"""
    other = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, check=True)
    node = ast.concat(RULE, ast.optional(B))
    assert {node: "here"}[pickle.loads(done.stdout)] == "here"
