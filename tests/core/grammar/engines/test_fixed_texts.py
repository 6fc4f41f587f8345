"""Text that cannot be otherwise is counted, however it is put together."""

from __future__ import annotations

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node, Rule
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.engines.fixed_texts import MAX_FIXED, check_fixed_texts
from graftlm.core.grammar.spec import JsonSchema, Limits
from tests.grammars import BYTES

HALF, FEW = ast.Literal(b"x" * (MAX_FIXED // 2)), ast.literal("ab")
FREE = ast.star(ast.ANY_CHAR)


@pytest.mark.parametrize(
    "node",
    [
        ast.Concat((HALF, Rule("few"), HALF)),
        ast.repeat(FEW, MAX_FIXED, None),
        ast.Concat((FREE, ast.Concat((FREE, HALF, HALF, FEW)), FREE)),
        ast.optional(ast.repeat(ast.concat(Rule("few"), FEW), MAX_FIXED)),
        ast.Graph((((ast.repeat(Rule("few"), MAX_FIXED), 1),), ()), frozenset({1})),
    ],
)
def test_a_long_part_that_cannot_be_otherwise_is_refused(node: Node) -> None:
    with pytest.raises(GrammarError, match="bytes or more of the text cannot be otherwise"):
        check_fixed_texts(node, {"few": FEW})


@pytest.mark.parametrize(
    "node",
    [
        ast.Concat((HALF, HALF)),
        ast.Concat((HALF, FREE, HALF, FEW)),
        ast.Concat((HALF, ast.alternation(FEW, HALF), HALF)),
        ast.repeat(ast.alternation(FEW, ast.literal("c")), MAX_FIXED),
        ast.optional(Rule("self")),
    ],
)
def test_where_there_is_a_choice_it_may_be_long(node: Node) -> None:
    check_fixed_texts(node, {"self": ast.concat(HALF, ast.optional(Rule("self")))})


def test_definitions_that_double_each_other_are_refused_and_not_written_out() -> None:
    definitions = {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for i in range(40)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": {"type": "null"}}}
    with pytest.raises(GrammarError, match="no text of less than 2 GiB"):
        Grammar.compile(JsonSchema(schema), BYTES, limits=Limits(seconds=60))
