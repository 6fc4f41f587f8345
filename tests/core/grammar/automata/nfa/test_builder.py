"""The NFA builder: rules are called by symbols, or written out where they are named."""

from __future__ import annotations

from graftlm.core.grammar.automata.nfa.builder import NfaBuilder
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Rule


def test_words_share_the_states_of_their_prefix() -> None:
    words = nodes.alternation(*map(nodes.literal, ("abcx", "abcy", "abcz")))
    assert len(NfaBuilder(100).build(words).edges) == 6


def test_a_body_calls_the_rules_of_its_own_grammar() -> None:
    body = nodes.concat(nodes.literal("("), Rule("inner"), nodes.optional(Rule("outer")), nodes.literal(")"))
    for text in (b"a", b"b"):
        dpda = build_dpda(Rule("outer"), {"outer": body, "inner": nodes.Literal(text)})
        assert dpda.matches(b"(" + text + b"(" + text + b"))")
        assert not dpda.matches(b"(a(b)")
    called = {"outer": body, "inner": nodes.concat(nodes.literal("a"), nodes.optional(Rule("inner")))}
    assert build_dpda(Rule("outer"), called).matches(b"(aa(aaa))")
