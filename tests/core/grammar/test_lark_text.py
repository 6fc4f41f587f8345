"""Constraints written as the text of a grammar: notations, positions of errors, bounds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import Lark
from tests.grammars import allows, compiled

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
CHESS = r"""
# the text as a whole
root ::= (
    "1. " move " " move "\n"
    ([1-9] [0-9]? ". " move " " move "\n")+   # more of them
)
move ::= (pawn | non-pawn | castle) [+#]?
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
non-pawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
castle ::= "O-O" "-O"?
"""
JSON = r"""
root   ::= value
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array  ::= "[" (value
    ("," value)*
  )? "]"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
"""


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        (CALCULATOR, ["1+2*3", "x=(1-2)*-y", "((1))"], ["1+", "(1", "=1", "x=y=1"]),
        ('start: "a"i "b"\n', ["ab", "Ab"], ["aB"]),
        ('start: ["a"] "b"{2,3} "c"~2\n', ["bbcc", "abbbcc"], ["bcc", "bbc"]),
        ("start: A\nA: /[a-c]+/ & /[b-x]+/\n", ["b", "cb"], ["a", "x"]),
        ('start: "a" "b"\n%ignore / +/\n', ["a  b", "ab"], ["a"]),
        ('start: "x" | call\ncall: %json {"type": "integer"}\n', ["12", "x"], ["1.5"]),
        ("start: a /[0-9]/\na[lazy]: /[ab]*b/\n", ["aab1"], ["abab1"]),
        ('start: "a" start "a" | "b" start "b" | "c"', ["aca", "abcba"], ["acb", ""]),
    ],
)
def test_lark(text: str, taken: list[str], refused: list[str]) -> None:
    grammar = compiled(Lark(text))
    assert grammar.engine == "llguidance"
    assert [allows(grammar, one) for one in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O-O Qa1xb2#\n10. exd8=Q Kf1+\n"], ["1. e4 e5\n", ""]),
        (JSON, ['{"a":[1,{"b":null}]}', '"\\u00e9\\n"', "-0.5"], ["[1,]", "01", '"\n"', "{}{}"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", ""]),
        ('root ::= root "+" t | t\nt ::= [0-9]+', ["1", "12+3+4"], ["+1", "1+"]),
        (r'root ::= "\x41\u00e9\U0001F600\"\\\n" [\]\-\x30-\x32^]', ['Aé😀"\\\n]', 'Aé😀"\\\n1'], ['Aé😀"\\\n3']),
        (r'root ::= "\u0041bc" [\u002d\u0041-\u0043]', ["Abc-", "AbcB"], ["Abc,", "Ä", "AbcD"]),
        ("root ::= [a&&b~~/[]", ["&", "~", "/", "[", "a"], ["", "c"]),
        ("root ::= [^a-c] . [-x]", ["d\n-", "éax"], ["aax", "d-"]),
        ('root ::= .{2} ""', ["\n\n"], ["\n"]),
        ('root ::= "a"{2} "b"{0,2} "c"{1,}', ["aac", "aabbcc"], ["aabbbc", "aa"]),
        ('root ::=\n  "a" |\n  "b"\n  | other # c\n\nother ::= ""\n', ["a", "b", ""], ["c"]),
        ('\troot::=a_b\n a_b ::= "x" | "y"', ["x", "y"], ["a_b"]),
    ],
)
def test_ebnf(text: str, taken: list[str], refused: list[str]) -> None:
    grammar = compiled(Lark(text))
    assert [allows(grammar, one) for one in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('start: "a" b\nb: c1 | d\nc1: "c"', "line 2, column 4", 'unknown name: "d".*define it'),
        ("start: itme\nitem: /a/", "line 1, column 8", "did you mean 'item'"),
        ('foo: "a"', "line 1, column 1", "no start rule.*name one"),
        ('start: "a"\nstart: "b"', "line 2, column 8", "duplicate rule.*join"),
        ('start: "abc', "line 1, column 12", "close strings"),
        ('start: "a"\nb: ("a" | "b"\n', "line 2, column 14", r"Expected token '\)'"),
        ("start: /a(/", "line 1, column 8", "unclosed group.*Rust"),
        ('start: "🎉" é', "line 1, column 12", "close strings"),
        ("start: /(?=a)b/", "line 1, column 8", "look-around.*without lookarounds"),
        ('start: "a"{3,2}', "line 1, column 8", "range end.*swap"),
        ('start: A\nA: "a" b\nb: "b"', "line 2, column 4", "may name terminals only"),
        ('start: A\nA: A "b" | "c"', "line 2, column 4", "only rules may contain themselves"),
        ('start: "a" & "b"', "line 1, column 8", "upper case"),
        ("start: FOO\n%import common.FOO", "line 2, column 1", "common.DIGIT"),
        ("%declare FOO\nstart: FOO", "line 1, column 1", "write the rule out"),
        ("start: <|end|>", "line 1, column 8", "by their numbers"),
        ('start: %json {"type":', "line 1, column 1", "whole JSON value"),
        ("start: " + "(" * 100_000 + '"a"' + ")" * 100_000, "line 1, column 37", "rules of their own"),
    ],
)
def test_an_error_in_lark_has_a_position_and_a_remedy(text: str, where: str, what: str) -> None:
    with pytest.raises(GrammarError, match=what) as error:
        compiled(Lark(text))
    assert str(error.value).startswith(f"{where}: ")
    assert error.value.position is not None


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('root ::= "a" b', "line 1, column 14", "no rule 'b'"),
        ('root ::= item # c\nitems ::= "a"', "line 1, column 10", "did you mean 'items'"),
        ('start ::= "a"', "line 1, column 1", "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "defined twice"),
        ('root ::= "a', "line 1, column 10", "not closed"),
        ("root ::= [a-", "line 1, column 10", "not closed"),
        ('root ::= ("a"', "line 1, column 14", r"Expected '\)'"),
        ('root ::= "\\u0041" # c\n  )', "line 2, column 3", "Expected"),
        ("root ::= [z-a]", "line 1, column 10", "runs backwards"),
        ("root ::= []", "line 1, column 10", "matches nothing"),
        (r'root ::= "\q"', "line 1, column 11", "no known escape"),
        (r'root ::= "\x4"', "line 1, column 11", "needs 2 hex"),
        (r'root ::= "\ud800"', "line 1, column 11", "UTF-8"),
        (r'root ::= "a\x01"', "line 1, column 10", r"class \[\\x01\]"),
        ('root ::= "a"**', "line 1, column 14", "Expected"),
        ('root ::= "a"{2,1}', "line 1, column 13", "swap"),
        ('root ::= "a"{,1}', "line 1, column 13", "holds counts"),
        ('root ::= b\n# c\n1 ::= "a"\nb ::= 1', "line 1, column 1", "."),
    ],
)
def test_an_error_in_ebnf_has_a_position_and_a_remedy(text: str, where: str, what: str) -> None:
    with pytest.raises(GrammarError, match=what) as error:
        compiled(Lark(text))
    assert str(error.value).startswith(f"{where}: ")
    assert error.value.position is not None


def test_rules_that_the_converter_would_name_alike_are_an_error() -> None:
    with pytest.raises(GrammarError, match="must differ in more than case"):
        compiled(Lark('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"'))


def test_a_rule_without_any_text_is_refused() -> None:
    with pytest.raises(GrammarError, match="no text goes on"):
        compiled(Lark("start: start"))


@pytest.mark.parametrize("text", ['start: "a" start', 'root ::= "a" root', 'start: "a"{1000000000}'])
def test_a_text_that_never_ends_is_written_up_to_the_limit_of_the_parser(text: str) -> None:
    matcher = compiled(Lark(text)).matcher()
    forced = matcher.forced([])
    assert 1_000 < len(forced) < 100_000 and set(forced) == {ord("a")}
    assert not matcher.accepting and matcher.ending([]) == []


def test_too_many_terminals_are_refused_before_llguidance_compares_them() -> None:
    with pytest.raises(GrammarError, match="20,001 strings and patterns, the limit is 20,000; put alternatives"):
        compiled(Lark("start: " + " | ".join(f'"w{i}"' for i in range(20_001))))
    words = " | ".join(f'"w{i}"' for i in range(3_000))
    assert allows(compiled(Lark(f"start: WORD+\nWORD: {words}")), "w17w2999")


def test_many_rules_of_an_ebnf_grammar_in_one_chain_are_refused() -> None:
    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(900))
    rules = "".join(f'q{i} ::= "a"\n' for i in range(1_000))
    with pytest.raises(GrammarError, match="1,902 rules, 902 deep"):
        compiled(Lark(f'root ::= r0\n{chain}r900 ::= "b"\n{rules}'))


@pytest.mark.parametrize("is_ebnf", [False, True])
def test_rules_that_lead_to_one_another_without_end_do_not_overflow_the_stack(is_ebnf: bool) -> None:
    # in a process of its own: an overflow of the stack ends the process
    sign, start = ("::=", "root") if is_ebnf else (":", "start")
    script = (
        "from tests.grammars import compiled\n"
        "from graftlm import GrammarError, Lark\n"
        f"rules = ''.join(f'r{{i}} {sign} \"a\" r{{i + 1}}\\n' for i in range(50_000))\n"
        "try:\n"
        f"    compiled(Lark('{start} {sign} r0\\n' + rules + 'r50000 {sign} \"b\"\\n'))\n"
        "except GrammarError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"lies more than 1,000 rules and groups deep in '{start}'; flatten" in done.stdout
