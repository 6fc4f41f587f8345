"""Objects that only say what their members are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.lowering import lower_schema
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.grammars import allows, compact, compiled

NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize("required", [names for size in range(3) for names in combinations(NAMES, size)])
@pytest.mark.parametrize("additional", [False, {"type": "boolean"}])
def test_every_selection_of_members_in_order_is_allowed_if_it_has_the_required_ones(
    required: tuple[str, ...], additional: Any
) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in NAMES},
        "required": list(required),
        "additionalProperties": additional,
    }
    grammar = compiled(JsonSchema(schema))
    for names in (names for size in range(5) for names in combinations(NAMES, size)):
        value = dict.fromkeys(names, 1)
        assert allows(grammar, compact(value)) == set(required).issubset(names)
        more = {**value, "e": True, "f": False}
        assert allows(grammar, compact(more)) == (bool(additional) and set(required).issubset(names))


def test_a_member_that_no_value_fits_is_left_out_and_one_that_is_required_is_an_error() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}, "b": {"type": "null"}}}
    grammar = compiled(JsonSchema(schema))
    assert allows(grammar, '{"b":null}') and not allows(grammar, '{"a":1}') and not allows(grammar, '{"a":"1"}')


def test_objects_share_the_edges_that_they_have_alike() -> None:
    objects = {name: {"properties": {name + letter: {} for letter in "abc"}} for name in ("one", "other")}
    lowered = lower_schema(JsonSchema({"properties": objects}), Options())
    one, other = (graph.rows for rule in lowered.rules.values() for graph in graphs_in(rule) if len(graph.rows) == 7)
    assert [[target for _, target in row] for row in one] == [[1, 3, 5], [2], [3, 4], [4], [5, 6], [6], []]
    assert one[1] != other[1]
    assert one[2] is other[2] and one[4] is other[4]


def test_members_that_objects_have_alike_are_one_node() -> None:
    objects = {name: {"properties": {"a": {}, name: {}, "b": {"type": "null"}}} for name in ("one", "other")}
    lowered = lower_schema(JsonSchema({"properties": objects}), Options())
    one, other = (graph.rows for rule in lowered.rules.values() for graph in graphs_in(rule) if len(graph.rows) == 7)
    assert one[1][0][0] is other[1][0][0] and one[5][0][0] is other[5][0][0]
    assert one[3][0][0] != other[3][0][0]


def test_a_member_that_no_value_fits_is_left_out_of_each_object_that_may_lack_it() -> None:
    impossible = {"type": "string", "enum": [1]}
    properties = {"a": impossible, "b": {"type": "null"}}
    schema = {"properties": {"one": {"properties": properties}, "other": {"properties": properties}}}
    grammar = compiled(JsonSchema(schema))
    assert allows(grammar, '{"one":{"b":null},"other":{"b":null}}')
    assert not allows(grammar, '{"one":{"a":1}}') and not allows(grammar, '{"other":{"a":"1"}}')
    needing = {
        "properties": {"one": {"properties": properties}, "other": {"properties": properties, "required": ["a"]}}
    }
    grammar = compiled(JsonSchema(needing))
    assert allows(grammar, '{"one":{"b":null}}') and not allows(grammar, '{"other":{"b":null}}')


def graphs_in(node: nodes.Node) -> Iterator[nodes.Graph]:
    if isinstance(node, nodes.Graph):
        yield node
        for row in node.rows:
            for item, _ in row:
                yield from graphs_in(item)
    elif isinstance(node, nodes.Concat):
        for item in node.items:
            yield from graphs_in(item)
