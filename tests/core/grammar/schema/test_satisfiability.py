"""Which rules derive a text at all."""

from __future__ import annotations

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Rule
from graftlm.core.grammar.schema.satisfiability import WithoutRules, unending

A = ast.literal("a")


def test_a_rule_that_needs_itself_derives_no_text() -> None:
    rules = {"list": ast.concat(A, Rule("list")), "word": A}
    assert unending(rules) == ["list"]


def test_one_way_that_ends_is_enough_wherever_the_rule_stands() -> None:
    rules = {
        "tree": ast.alternation(ast.concat(Rule("pair"), A), Rule("leaf")),
        "pair": ast.concat(Rule("tree"), Rule("tree")),
        "leaf": A,
    }
    assert unending(rules) == []
    assert unending(dict(reversed(rules.items()))) == []


def test_rules_that_need_one_another_derive_no_text() -> None:
    rules = {"a": ast.concat(A, Rule("b")), "b": ast.alternation(Rule("a"), ast.concat(Rule("c"), Rule("b"))), "c": A}
    assert unending(rules) == ["a", "b"]


def test_what_may_be_left_out_needs_no_end() -> None:
    rules = {"item": ast.concat(A, ast.optional(Rule("item"))), "row": ast.repeat(Rule("row"), 2)}
    assert unending(rules) == ["row"]


def test_a_walk_ends_only_by_edges_that_do() -> None:
    walk = ast.Graph((((A, 1), (Rule("walk"), 2)), (), ()), frozenset({2}))
    around = ast.Graph((((A, 1), (Rule("walk"), 2)), ((A, 2),), ()), frozenset({2}))
    assert unending({"walk": walk}) == ["walk"]
    assert unending({"walk": around}) == []


def test_surrogates_are_no_text() -> None:
    assert unending({"lone": ast.CharSet(((0xD800, 0xDFFF),)), "some": ast.CharSet(((0xD800, 0xE000),))}) == ["lone"]


def test_what_names_a_rule_that_is_known_to_end_ends() -> None:
    rules = {"value": ast.concat(ast.literal("a"), ast.Rule("any")), "loop": ast.Rule("loop"), "any": ast.Rule("any")}
    assert unending(rules, ["any"]) == ["loop"]
    assert unending(rules) == ["value", "loop", "any"]


def test_what_is_left_without_rules_is_shared_as_before() -> None:
    node: ast.Node = ast.alternation(Rule("endless"), ast.literal("a"))
    for _ in range(60):
        node = ast.optional(ast.concat(node, ast.literal("b"), node))  # 2 ** 60 places
    left = WithoutRules(["endless"]).node(node)
    assert isinstance(left, ast.Repeat) and isinstance(left.item, ast.Concat)
    assert left.item.items[0] is left.item.items[2]
    assert WithoutRules(["endless"]).node(ast.concat(ast.literal("b"), Rule("endless"))) == ast.NOTHING
