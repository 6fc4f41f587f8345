"""Lark grammars: what is taken, by which engine, and what an error says."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from bench.grammar.validity import write
from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import Lark
from tests.grammars import BYTES, allows, compiled

CALCULATOR = r"""
    start: sum | NAME "=" sum  -> assign

    ?sum: product
        | sum "+" product   -> add
        | sum "-" product

    ?product: atom | product "*" atom
    ?atom: NUMBER | "-" atom | NAME | "(" sum ")"   // not the last

    %import common.CNAME -> NAME
    %import common.NUMBER
"""


def judged(text: str, *texts: str) -> list[bool]:
    grammar = compiled(Lark(text))
    return [allows(grammar, one) for one in texts]


def test_what_does_not_recur_is_an_automaton_and_exact() -> None:
    # always the longest match of T, as a lexer has it, would leave no text at all
    grammar = compiled(Lark('start: T "b"\nT: /[ab]+/\n'))
    assert grammar.engine == "fsm"
    assert [allows(grammar, text) for text in ("ab", "bb", "abab", "b", "aba")] == [True, True, True, False, False]
    assert grammar.matcher().min_tokens_to_accept() == 2


def test_rules_that_begin_with_themselves_are_kept_by_a_pushdown_automaton() -> None:
    assert compiled(Lark(CALCULATOR)).engine == "pda"
    texts = ("1+2*3", "x=(1-2)*-y", "((1))", "1+", "(1", "=1", "x=y=1")
    assert judged(CALCULATOR, *texts) == [True, True, True, False, False, False, False]
    indirect = 'start: item "."\nitem: list "]" | "x"\nlist: item "," | "["\n'
    assert compiled(Lark(indirect)).engine in ("fsm", "pda")
    assert judged(indirect, "x.", "[].", "x,].", "[],].", "x].", "x,.") == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        ('start: "a"i "b"\n', ["ab", "Ab"], ["aB"]),
        ('start: "a".."c"\n', ["a", "c"], ["d", "ab"]),
        ('start: ["a"] "b"{2,3} "c"~2\n', ["bbcc", "abbbcc"], ["bcc", "bbc"]),
        ('start: "a"\n   | "b"\n\n   # a note "x" | [\n', ["a", "b"], [""]),
        ('start: | "a"\n', ["", "a"], ["b"]),
        ('start: item-1\n!item-1: "a" // a note\n', ["a"], ["item"]),
        ("start: A\nA: /[a-c]+/ & /[b-x]+/\n", ["b", "cb"], ["a", "x"]),
        ("start: /é\\u4e2d\\/[^\\]\\-a-c]/\n", ["é中/d", "é中/é"], ["é中/a", "é中/]", "é中/-"]),
        ('start: "\\"\\\\\\u00e9😀"\n', ['"\\é😀'], ["é"]),
        ("start: /\\w+\\s\\S/\n", ["aé_1 x", "नि y"], ["a  x ", "-x y"]),
        ("start: /(?i)ab/ | /CD/i\n", ["aB", "cd", "CD"], ["ac"]),
        ("start[capture]: INT\n%import common (INT, WORD)\n", ["12"], ["a"]),
    ],
)
def test_notations(text: str, taken: list[str], refused: list[str]) -> None:
    assert compiled(Lark(text)).engine == "fsm"
    assert judged(text, *taken, *refused) == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('start: "a" b\nb: c1 | d\nc1: "c"', "line 2, column 9", "no rule 'd'.*define it"),
        ("start: itme\nitem: /a/", "line 1, column 8", "did you mean 'item'"),
        ('foo: "a"', "line 1, column 1", "no rule 'start'.*foo"),
        ('start: "a"\nstart: "b"', "line 2, column 1", r"defined twice \(first in line 1.*join"),
        ('start: "abc', "line 1, column 8", 'no closing ".*close it'),
        ("start: /abc", "line 1, column 8", "no closing /"),
        ('start: "a"\nb: ("a" | "b"\n', "line 2, column 4", "is not closed.*the end of the line.*'\\)'"),
        ('start: "a") "b"', "line 1, column 11", "line should end"),
        ("start: /a(/", "line 1, column 10", "not closed; add"),
        ('start: "\\q"', "line 1, column 9", "no JSON string.*known escapes"),
        ('start: "\\ud800"', "line 1, column 8", "surrogate"),
        ('start: "a"{3,2}', "line 1, column 11", "minimum above its maximum; swap"),
        ('start: "a"{-1,}', "line 1, column 11", "below 0"),
        ('start: "a"{2000000000}', "line 1, column 11", "above 16,777,216"),
        ('start: "a"~2..5', "line 1, column 11", r"\{2,5\}"),
        ("start: fooBar", "line 1, column 8", "mixes cases"),
        ('start: A\nA: "a" b\nb: "b"', "line 2, column 8", "names the rule b; name that in upper case"),
        ('start: "a" & "b"', "line 1, column 12", "give its name in upper case"),
        ("start: FOO\n%import common.FOO", "line 2, column 16", "common has no FOO; it has DIGIT"),
        ("start: FOO\n%import python.FOO", "line 2, column 1", "only %import common"),
        ("%declare FOO\nstart: FOO", "line 1, column 1", "%declare is not kept; define"),
        ('start: sep{"a"}\n', "line 1, column 12", "a repeat"),
        ("start: <|end|>", "line 1, column 8", "by number"),
        ("start: @other", "line 1, column 8", "write its rules into this one"),
        ('start: %json {"type":', "line 1, column 22", "no JSON"),
        ('a[lazyy]: "a"\nstart: a', "line 1, column 3", "no attribute 'lazyy'; known are"),
        ('start: "🎉" é', "line 1, column 12", "'é' begins nothing"),
        ("start: " + "(" * 100_000 + '"a"' + ")" * 100_000, "line 1, column 37", "nest deeper than 29"),
    ],
)
def test_an_error_says_where_what_and_what_to_do(text: str, where: str, what: str) -> None:
    with pytest.raises(GrammarError, match=what) as error:
        compiled(Lark(text))
    assert str(error.value).startswith(f"{where}: ")
    assert error.value.position is not None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('start: "a" start', "line 1, column 1: the rule 'start'.*itself"),
        ("start: start", "line 1, column 1: the rule 'start'.*itself"),
        ('start: "x" | a\na: "x" b\nb: "y" a\n', "line 2, column 1: the rule 'a'.*needs 'b' again"),
        ('start: "x" | a\na: a "x"\n', "line 2, column 1: the rule 'a'.*itself"),
    ],
)
def test_a_rule_whose_texts_never_end_is_refused(text: str, where: str) -> None:
    with pytest.raises(GrammarError, match=f"{where}.*add an alternative"):
        compiled(Lark(text))


def test_terminals_that_leave_no_text_are_refused() -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        compiled(Lark("start: A\nA: /[a-c]+/ & /[x-z]+/\n"))


def test_a_rule_that_nothing_leads_to_is_noted() -> None:
    grammar = compiled(Lark('start: "a"\nfoo: bar\nbar: "b"\n%import common.INT\n'))
    assert [(issue.pointer, issue.keyword) for issue in grammar.annotations] == [
        ("line 2, column 1", "foo"),
        ("line 3, column 1", "bar"),
    ]
    assert "is not used" in str(grammar.annotations[0])


def test_what_only_llguidance_knows_goes_there() -> None:
    grammar = compiled(Lark('start: "a" "b"\n%ignore / +/\n'))
    assert grammar.engine == "llguidance" and allows(grammar, "a  b")
    grammar = compiled(Lark('start: "x" | call\ncall: %json {"type": "integer"}\n'))
    assert grammar.engine == "llguidance" and allows(grammar, "12") and allows(grammar, "x")
    lazy = compiled(Lark("start: a /[0-9]/\na[lazy]: /[ab]*b/\n"))
    assert allows(lazy, "aab1") and not allows(lazy, "abab1")


def test_a_text_of_an_ambiguous_grammar_ends_within_its_budget() -> None:
    grammar = compiled(Lark('start: "(" start start ")" | start start "." | "x"\n'))
    rng = np.random.default_rng(0)
    for budget in range(1, 40):
        data, _ = write(grammar, BYTES, rng, budget)
        assert len(data) <= budget and allows(grammar, data)


def test_rules_that_lead_to_one_another_without_end_do_not_overflow_the_stack() -> None:
    # in a process of its own: what overflows a stack ends the process
    script = (
        "from tests.grammars import compiled\n"
        "from graftlm import GrammarError, Lark\n"
        "rules = ''.join(f'r{i}: \"a\" r{i + 1}\\n' for i in range(50_000))\n"
        "try:\n"
        "    compiled(Lark('start: r0 INT\\n' + rules + 'r50000: \"b\"\\n%import common.INT\\n%ignore / /\\n'))\n"
        "except GrammarError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "lies more than 1,000 rules and groups deep in 'start'; flatten" in done.stdout


def test_hundreds_of_rules_that_begin_with_one_another_are_left_as_they_are() -> None:
    rules = "".join(
        f'r{i}: r{(i + 1) % 300} "a" | r{(7 * i + 3) % 300} "b" | "c" r{(13 * i + 5) % 300}\n | "z{i}"\n'
        for i in range(300)
    )
    grammar = compiled(Lark(f"start: r0\n{rules}"))
    assert grammar.engine == "llguidance"
    assert allows(grammar, "z1a") and allows(grammar, "cz5") and not allows(grammar, "z1")


def test_large_terminals_joined_by_and_are_left_to_llguidance() -> None:
    terminals = "".join(f"A{i}: (A{i + 1} | A{i + 1} A{i + 1}) & /.*x.*/\n" for i in range(12))
    grammar = compiled(Lark(f"start: A0\n{terminals}A12: /[a-z]{{1,50}}/\n"))
    assert grammar.engine == "llguidance" and allows(grammar, "axb") and not allows(grammar, "ab")
