"""Grammars in EBNF, as GBNF and xgrammar write it."""

from __future__ import annotations

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.spec import Lark
from tests.grammars import allows, compiled

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
    ("text", "engine", "taken", "refused"),
    [
        (CHESS, "fsm", ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O-O Qa1xb2#\n10. exd8=Q Kf1+\n"], ["1. e4 e5\n", ""]),
        (JSON, "pda", ['{"a":[1,{"b":null}]}', '"\\u00e9\\n"', "-0.5"], ["[1,]", "01", '"\n"', "{}{}"]),
        ('root ::= "(" root ")" | "x"', "pda", ["x", "((x))"], ["(x", ""]),
        ('root ::= root "+" t | t\nt ::= [0-9]+', "fsm", ["1", "12+3+4"], ["+1", "1+"]),
        (
            r'root ::= "\x41\u00e9\U0001F600\"\\\n" [\]\-\x30-\x32^]',
            "fsm",
            ['Aé😀"\\\n]', 'Aé😀"\\\n1'],
            ['Aé😀"\\\n3'],
        ),
        ("root ::= [^a-c] . [-x]", "fsm", ["d\n-", "éax"], ["aax", "d-"]),
        ('root ::= "a"{2} "b"{,2} "c"{1,}', "fsm", ["aac", "aabbcc"], ["aabbbc", "aa"]),
        ('root ::=\n  "a" |\n  "b"\n  | other # c\n\nother ::= ""\n', "fsm", ["a", "b", ""], ["c"]),
        ("\troot::=a_b\n a_b ::= 'x' | \"y\"".replace("'x'", '"x"'), "fsm", ["x", "y"], ["a_b"]),
    ],
)
def test_grammars(text: str, engine: str, taken: list[str], refused: list[str]) -> None:
    grammar = compiled(Lark(text))
    assert grammar.engine == engine
    assert [allows(grammar, one) for one in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('root ::= "a" b', "line 1, column 14", "no rule 'b'"),
        ('start ::= "a"', "line 1, column 1", "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "defined twice"),
        ('root ::= "a', "line 1, column 10", "no closing"),
        ("root ::= [a-", "line 1, column 10", "no closing ]"),
        ('root ::= ("a"\nb ::= "b"', "line 1, column 10", "not closed: 'b' stands where"),
        ('root ::= "a" )', "line 1, column 14", "begins nothing here"),
        ("root ::= [z-a]", "line 1, column 10", "runs backwards"),
        ("root ::= []", "line 1, column 10", "no character"),
        (r'root ::= "\q"', "line 1, column 11", "no known escape"),
        (r'root ::= "\x4"', "line 1, column 11", "needs 2 hex"),
        (r'root ::= "\ud800"', "line 1, column 11", "UTF-8"),
        ('root ::= "a"**', "line 1, column 14", "repeat of a repeat"),
        ("root ::= *", "line 1, column 10", "nothing to repeat"),
        ('root ::= "a"{2,1}', "line 1, column 13", "swap"),
        ("root ::= <think>", "line 1, column 10", "token of the vocabulary"),
        ('root ::= "a" root', "line 1, column 1", "no text that ends"),
    ],
)
def test_an_error_says_where_what_and_what_to_do(text: str, where: str, what: str) -> None:
    with pytest.raises(GrammarError, match=what) as error:
        compiled(Lark(text))
    assert str(error.value).startswith(f"{where}: ")


def test_a_grammar_that_one_byte_does_not_decide_goes_to_llguidance() -> None:
    grammar = compiled(Lark('root ::= "a" root "a" | "b" root "b" | "a" | "b"'))
    assert grammar.engine == "llguidance"
    assert [allows(grammar, text) for text in ("aba", "abbba", "ab", "")] == [True, True, False, False]
