"""Bodies of rules whose NFA is kept: calls are filled in anew for each grammar."""

from __future__ import annotations

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Rule
from graftlm.core.grammar.automata.nfa.kept_blocks import share
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda


def test_a_kept_rule_follows_the_bodies_that_it_is_given() -> None:
    body = ast.concat(ast.literal("("), Rule("inner"), ast.optional(Rule("outer")), ast.literal(")"))
    share(body)
    for text in (b"a", b"b"):
        dpda = build_dpda(Rule("outer"), {"outer": body, "inner": ast.Literal(text)})
        assert dpda.matches(b"(" + text + b"(" + text + b"))")
        assert not dpda.matches(b"(a(b))")
    called = {"outer": body, "inner": ast.concat(ast.literal("a"), ast.optional(Rule("inner")))}
    assert build_dpda(Rule("outer"), called).matches(b"(aa(aaa))")
