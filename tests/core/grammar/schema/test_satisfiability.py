"""Which rules derive a text at all."""

from __future__ import annotations

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Rule
from graftlm.core.grammar.schema.satisfiability import unending

A = nodes.literal("a")


def test_a_rule_that_needs_itself_derives_no_text() -> None:
    rules = {"list": nodes.concat(A, Rule("list")), "word": A}
    assert unending(rules) == ["list"]


def test_one_way_that_ends_is_enough_wherever_the_rule_stands() -> None:
    rules = {
        "tree": nodes.alternation(nodes.concat(Rule("pair"), A), Rule("leaf")),
        "pair": nodes.concat(Rule("tree"), Rule("tree")),
        "leaf": A,
    }
    assert unending(rules) == []
    assert unending(dict(reversed(rules.items()))) == []


def test_rules_that_need_one_another_derive_no_text() -> None:
    rules = {
        "a": nodes.concat(A, Rule("b")),
        "b": nodes.alternation(Rule("a"), nodes.concat(Rule("c"), Rule("b"))),
        "c": A,
    }
    assert unending(rules) == ["a", "b"]


def test_what_may_be_left_out_needs_no_end() -> None:
    rules = {"item": nodes.concat(A, nodes.optional(Rule("item"))), "row": nodes.repeat(Rule("row"), 2)}
    assert unending(rules) == ["row"]


def test_a_walk_ends_only_by_edges_that_do() -> None:
    walk = nodes.Graph((((A, 1), (Rule("walk"), 2)), (), ()), frozenset({2}))
    around = nodes.Graph((((A, 1), (Rule("walk"), 2)), ((A, 2),), ()), frozenset({2}))
    assert unending({"walk": walk}) == ["walk"]
    assert unending({"walk": around}) == []


def test_surrogates_are_no_text() -> None:
    assert unending({"lone": nodes.CharSet(((0xD800, 0xDFFF),)), "some": nodes.CharSet(((0xD800, 0xE000),))}) == [
        "lone"
    ]


def test_what_names_a_rule_that_is_known_to_end_ends() -> None:
    rules = {
        "value": nodes.concat(nodes.literal("a"), nodes.Rule("any")),
        "loop": nodes.Rule("loop"),
        "any": nodes.Rule("any"),
    }
    assert unending(rules, ["any"]) == ["loop"]
    assert unending(rules) == ["value", "loop", "any"]
