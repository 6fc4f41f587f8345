"""Nodes that were sent: equal small ones are one object, large ones are not kept."""

from __future__ import annotations

import pickle

from graftlm.core.grammar import ast

DIGITS = ast.plus(ast.chars("0123456789"))
LARGE = ast.literal("x" * 65)


def sent(node: ast.Node) -> ast.Node:
    found: ast.Node = pickle.loads(pickle.dumps(node))
    assert found == node
    return found


def test_equal_small_nodes_are_one_object_when_they_are_read_back() -> None:
    year = ast.concat(DIGITS, ast.literal("-"), ast.Rule("month"))
    assert sent(year) is sent(ast.concat(DIGITS, ast.literal("-"), ast.Rule("month")))
    walk = ast.graph([[(DIGITS, 1)], [(ast.literal(","), 0)]], {1})
    assert sent(walk) is sent(walk)


def test_large_nodes_and_what_holds_them_are_objects_of_their_own() -> None:
    of_many = ast.Alternation(tuple(ast.literal(f"{i}") for i in range(65)))
    for node in (LARGE, ast.concat(DIGITS, LARGE), ast.optional(LARGE), of_many, ast.concat(of_many, DIGITS)):
        assert sent(node) is not sent(node)
