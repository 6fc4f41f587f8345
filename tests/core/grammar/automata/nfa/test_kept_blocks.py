"""Bodies of rules whose NFA is kept: calls are filled in anew for each grammar."""

from __future__ import annotations

from graftlm.core.grammar.automata.nfa.kept_blocks import share
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Rule


def test_a_kept_rule_follows_the_bodies_that_it_is_given() -> None:
    body = nodes.concat(nodes.literal("("), Rule("inner"), nodes.optional(Rule("outer")), nodes.literal(")"))
    share(body)
    for text in (b"a", b"b"):
        dpda = build_dpda(Rule("outer"), {"outer": body, "inner": nodes.Literal(text)})
        assert dpda.matches(b"(" + text + b"(" + text + b"))")
        assert not dpda.matches(b"(a(b))")
    called = {"outer": body, "inner": nodes.concat(nodes.literal("a"), nodes.optional(Rule("inner")))}
    assert build_dpda(Rule("outer"), called).matches(b"(aa(aaa))")
