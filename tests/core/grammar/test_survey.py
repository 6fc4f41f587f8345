from graftlm.core.grammar import ast
from graftlm.core.grammar.survey import Survey, survey

A = ast.Rule("a")


def test_places_are_counted_as_often_as_a_node_is_written() -> None:
    node = ast.concat(ast.literal("abc"), ast.repeat(ast.concat(ast.literal("xy"), A), 2, 4), ast.chars("pq"), A)
    assert survey(node) == Survey(3 + 4 * (2 + 1) + 4 + 1, ("a", "a"), ("a",), True)


def test_a_survey_is_kept_with_its_node() -> None:
    node = ast.concat(ast.literal("abc"), A)
    assert survey(node) is survey(node)


def test_a_node_that_holds_what_has_no_text_may_not_end() -> None:
    lone = ast.CharSet(((0xD800, 0xDFFF),))
    around = ast.Graph((((ast.literal("a"), 0),),), frozenset())
    empty = ast.Automaton(((),), frozenset())
    for part in (lone, around, empty, ast.NOTHING):
        assert not survey(ast.Concat((A, part))).ends
    assert survey(ast.CharSet(((0xD800, 0xE000),))).ends
