"""Rules in nodes: replaced, and written out where no rule contains itself."""

from __future__ import annotations

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Rule
from graftlm.core.grammar.nodes.rules import MAX_NODES, Substitution, written_out

A, B = nodes.literal("a"), nodes.literal("b")


def test_nodes_are_shared_as_before_once_rules_are_replaced() -> None:
    node: nodes.Node = nodes.alternation(Rule("endless"), A)
    for _ in range(60):
        node = nodes.optional(nodes.concat(node, B, node))  # 2 ** 60 occurrences
    left = Substitution({"endless": nodes.NOTHING})(node)
    assert isinstance(left, nodes.Repeat) and isinstance(left.item, nodes.Concat)
    assert left.item.items[0] is left.item.items[2]
    assert Substitution({"endless": nodes.NOTHING})(nodes.concat(B, Rule("endless"))) == nodes.NOTHING


def test_rules_in_rules_are_written_out_and_neighbours_joined() -> None:
    rules = {"pair": nodes.concat(Rule("one"), B), "one": A}
    assert written_out(nodes.concat(Rule("pair"), Rule("one")), rules) == nodes.literal("aba")


def test_a_language_that_contains_itself_is_not_written_out() -> None:
    rules = {"list": nodes.concat(A, nodes.optional(Rule("more"))), "more": Rule("list")}
    assert written_out(Rule("list"), rules) is None
    assert written_out(A, rules) == A  # it names none of them


def test_a_rule_that_is_missing_is_left_to_the_engine_that_names_it() -> None:
    assert written_out(Rule("missing"), {}) is None


def test_a_language_that_doubles_with_each_rule_is_not_written_out() -> None:
    rules: dict[str, nodes.Node] = {"r0": A}
    for i in range(1, 40):
        rules[f"r{i}"] = nodes.concat(Rule(f"r{i - 1}"), B, Rule(f"r{i - 1}"))
    assert written_out(Rule("r3"), rules) == nodes.literal("abababababababa")
    assert MAX_NODES < 2**39 and written_out(Rule("r39"), rules) is None
