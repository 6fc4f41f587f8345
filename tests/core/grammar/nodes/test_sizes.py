from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.sizes import Survey, survey

A = nodes.Rule("a")


def test_places_are_counted_as_often_as_a_node_is_written() -> None:
    node = nodes.concat(
        nodes.literal("abc"), nodes.repeat(nodes.concat(nodes.literal("xy"), A), 2, 4), nodes.chars("pq"), A
    )
    assert survey(node) == Survey(3 + 4 * (2 + 1) + 4 + 1, ("a", "a"), ("a",), True)


def test_a_survey_is_kept_with_its_node() -> None:
    node = nodes.concat(nodes.literal("abc"), A)
    assert survey(node) is survey(node)


def test_a_node_that_holds_what_has_no_text_may_not_end() -> None:
    lone = nodes.CharSet(((0xD800, 0xDFFF),))
    around = nodes.Graph((((nodes.literal("a"), 0),),), frozenset())
    empty = nodes.Automaton.of([[]], [])
    for part in (lone, around, empty, nodes.NOTHING):
        assert not survey(nodes.Concat((A, part))).ends
    assert survey(nodes.CharSet(((0xD800, 0xE000),))).ends
