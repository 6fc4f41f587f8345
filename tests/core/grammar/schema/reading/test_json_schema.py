"""What a schema admits, keyword by keyword, and what it refuses to promise."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.spec import JsonSchema
from tests.grammars import BYTES, admits, allows, compact, compiled

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    wanted = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False}


def check(schema: Any, good: list[Any], bad: list[Any], **options: Any) -> None:
    grammar = compiled(schema, **options)
    assert [value for value in good if not allows(grammar, compact(value))] == []
    assert [value for value in bad if allows(grammar, compact(value))] == []


def test_properties_come_in_the_order_of_the_schema() -> None:
    grammar = compiled(closed(b=INTEGER, a=STRING))
    assert allows(grammar, '{"b":1,"a":"x"}')
    assert not allows(grammar, '{"a":"x","b":1}')


def test_properties_that_are_not_required_may_be_left_out_without_stray_commas() -> None:
    grammar = compiled(closed(["b"], a=INTEGER, b=INTEGER, c=INTEGER))
    for text in ('{"b":1}', '{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}'):
        assert allows(grammar, text), text
    for text in ("{}", '{"a":1}', '{,"b":1}', '{"b":1,}', '{"a":1"b":1}', '{"c":1,"b":1}'):
        assert not allows(grammar, text), text


def test_an_object_without_required_properties_may_be_empty() -> None:
    check(closed([], a=INTEGER, b=INTEGER), [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"b": 1, "a": 1}])


def test_thirty_optional_properties_stay_small() -> None:
    grammar = compiled(closed([], **{f"field{i}": INTEGER for i in range(30)}))
    assert grammar.engine == "fsm"
    assert allows(grammar, '{"field0":1,"field29":2}')
    assert grammar.num_bytes < 1 << 20


def test_strict_mode_closes_objects_that_declare_properties() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}}
    assert compiled(schema).engine == "fsm"
    assert not admits(schema, {"a": 1, "b": 2})
    assert admits(schema, {"a": 1, "b": 2}, strict=False)
    assert admits({"type": "object"}, {"b": [1, {}]})


def test_additional_properties_follow_the_declared_ones_and_cannot_repeat_their_names() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}}
    check(schema, [{}, {"a": 1}, {"a": 1, "x": True, "aa": False}, {"": True}], [{"a": True}, {"x": 1}])
    grammar = compiled(schema)
    assert not allows(grammar, '{"x":true,"a":1}')
    assert not allows(grammar, '{"a":1,"a":true}')
    assert not allows(grammar, '{"\\u0061":true}')


def test_names_that_fit_a_pattern_take_its_schema_and_the_rest_the_other() -> None:
    schema = {
        "type": "object",
        "properties": {"x-known": {"type": "integer", "minimum": 3}},
        "patternProperties": {"^x-": INTEGER, "s$": {"type": "integer", "maximum": 9}},
        "additionalProperties": {"type": "null"},
    }
    good = [{}, {"x-known": 4}, {"x-a": 100}, {"as": 9}, {"x-s": 9}, {"other": None}]
    check(schema, good, [{"x-known": 2}, {"x-a": None}, {"as": 10}, {"x-s": 10}, {"other": 1}])


def test_names_can_be_restricted() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3},
        "additionalProperties": INTEGER,
    }
    check(schema, [{}, {"abc": 1}], [{"abcd": 1}, {"A": 1}, {"": 1}])


def test_bounds_on_the_number_of_properties() -> None:
    check({"type": "object", "additionalProperties": INTEGER, "maxProperties": 2}, [{}, {"a": 1, "b": 1}],
          [{"a": 1, "b": 1, "c": 1}])  # fmt: skip
    check(closed([], a=INTEGER, b=INTEGER, c=INTEGER) | {"minProperties": 1, "maxProperties": 2},
          [{"a": 1}, {"b": 1, "c": 1}, {"a": 1, "c": 1}], [{}, {"a": 1, "b": 1, "c": 1}])  # fmt: skip


def test_a_property_can_need_another() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}}
    check(schema, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}])


@pytest.mark.parametrize("low", [0, 1, 2, 5])
@pytest.mark.parametrize("high", [None, 2, 5])
def test_arrays_keep_their_bounds(low: int, high: int | None) -> None:
    if high is not None and low > high:
        return
    grammar = compiled({"type": "array", "items": INTEGER, "minItems": low, **({"maxItems": high} if high else {})})
    for length in range(8):
        expected = low <= length and (high is None or length <= high)
        assert allows(grammar, compact([7] * length)) == expected, length


def test_items_by_position() -> None:
    schema = {"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "null"}, "maxItems": 4}
    check(schema, [[], [1], [1, "a"], [1, "a", None, None]], [["a"], [1, 2], [1, "a", 3], [1, "a", None, None, None]])
    check({"type": "array", "items": [INTEGER], "additionalItems": False}, [[], [1]], [[1, 2], ["a"]])


def test_lengths_count_characters_and_not_bytes() -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    check(schema, ["ab", "éé", "😀😀😀", "\n\\"], ["a", "abcd", "😀", ""])


def test_lengths_and_patterns_hold_together() -> None:
    check({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["a", "abc"], ["", "abcd", "A"])
    check(
        {"type": "string", "pattern": "^(ab|cde)*$", "minLength": 2, "maxLength": 6}, ["ab", "cdeab"], ["", "abababab"]
    )
    check({"type": "string", "pattern": "[0-9]", "maxLength": 3}, ["1", "a1b"], ["", "abc", "abc1"])


def test_a_pattern_is_searched_for_and_its_special_characters_are_escaped_in_json() -> None:
    check({"type": "string", "pattern": 'a"b'}, ['a"b', 'xa"by'], ["ab"])
    check({"type": "string", "pattern": r"^[\\\n]$"}, ["\\", "\n"], ["n", "x"])


def test_classes_take_only_what_every_dialect_agrees_on() -> None:
    check({"type": "string", "pattern": r"^\d$"}, ["4"], ["٤"])
    check({"type": "string", "pattern": r"^\W$"}, ["-"], ["é", "a"])
    check({"type": "string", "pattern": r"^.$"}, ["é"], ["\n", "\u2028"])


def test_strings_have_one_spelling_but_for_the_slash() -> None:
    grammar = compiled(STRING)
    for text in ('"é"', r'"\n\t\"\\\/\u001f"', '"/"', '"😀"', '"\u2028\x7f"'):
        assert allows(grammar, text), text
    for text in (r'"\u00e9"', r'"\u0041"', r'"\ud83d\ude00"', r'"\ud800"', '"\n"', r'"\x"', '"'):
        assert not allows(grammar, text), text
    assert not allows(grammar, b'"\xed\xa0\x80"')


def test_constants_are_written_exactly() -> None:
    values = ['a"b', "c\\d", "é", "\n", 1, 2.5, None, True, {"k": [1, "x"]}, [], {}]
    check({"enum": values}, values, ["a", 2, False, {"k": [1]}, "c\\\\d"])
    check({"const": 2.0}, [2.0, 2], [2.5])


def test_alternatives_and_several_types() -> None:
    check({"anyOf": [INTEGER, {"type": "null"}]}, [1, None], ["a", 1.5])
    check({"type": ["integer", "string"], "maxLength": 1}, [100, "a"], ["ab", None])
    check({"type": "string", "nullable": True}, ["a", None], [1])


def test_one_of_is_kept_where_the_alternatives_exclude_each_other() -> None:
    a, b = closed(kind={"const": "a"}, x=INTEGER), closed(kind={"const": "b"}, y=INTEGER)
    check({"oneOf": [a, b]}, [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}], [{"kind": "a", "y": 1}])
    check({"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 4}]}, [4, 5], ["a"])


def test_alternatives_of_one_of_that_overlap_exclude_what_they_share() -> None:
    check({"oneOf": [INTEGER, {"type": "number", "minimum": 5}]}, [1, 5.5], [5, 6, 4.5, "a"])
    check({"oneOf": [STRING, {"type": "string", "pattern": "^a"}]}, ["b", ""], ["a", "ab"])
    a = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    b = {"type": "object", "properties": {"b": INTEGER}}
    check({"oneOf": [a, b]}, [{}, {"b": 1}], [{"a": 1, "b": 1}, {"a": 1}])
    check({"oneOf": [a, b]}, [{"a": 1, "b": "x"}, {"c": 1}], [{"a": 1}, {"a": 1, "b": 1}], strict=False)


def test_all_of_merges_objects() -> None:
    base = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
    more = {"properties": {"b": STRING, "a": {"maximum": 5}}, "required": ["b"]}
    check(
        {"allOf": [base, more]},
        [{"a": 1, "b": ""}, {"a": 5, "b": ""}],
        [{"a": 6, "b": ""}, {"a": 1}, {"a": 0, "b": ""}],
    )


def test_what_is_allowed_can_be_said_by_what_is_not() -> None:
    check({"not": {"type": ["object", "array", "string"]}}, [1, None, True], ["a", [], {}])
    check({"type": "number", "not": {"minimum": 3}}, [2, -1.5], [3, 4])
    check({"type": "string", "not": {"enum": ["a", "b"]}}, ["c", "ab", ""], ["a", "b"])
    check({"type": "string", "not": {"pattern": "^x-"}, "maxLength": 4}, ["ax-", "x"], ["x-", "x-a", "aaaaa"])
    check({"type": "integer", "not": {"multipleOf": 3}}, [1, 10], [0, 3, 9])
    check({"type": "array", "items": INTEGER, "not": {"items": {"minimum": 3}}}, [[1], [3, 1]], [[], [3], [5, 9]])
    given = {"type": "object", "properties": {"a": {"type": "integer"}, "b": INTEGER}}
    check({**given, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, {"a": 1, "b": 1}])
    check({**given, "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, [{}, {"a": 2}], [{"a": 1}])
    check({**given, "not": {"maxProperties": 1}}, [{"a": 1, "b": 1}], [{}, {"a": 1}])


def test_conditions_choose_what_holds() -> None:
    schema = closed(["kind"], kind={"enum": ["a", "b", "c"]}, x=INTEGER, y=INTEGER)
    is_a, is_b = ({"properties": {"kind": {"const": kind}}} for kind in "ab")
    schema["allOf"] = [{"if": is_a, "then": {"required": ["x"]}}, {"if": is_b, "then": {"required": ["y"]}}]
    good = [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}, {"kind": "c"}, {"kind": "a", "x": 1, "y": 2}]
    check(schema, good, [{"kind": "a"}, {"kind": "a", "y": 1}, {"kind": "b", "x": 1}])
    check({"if": INTEGER, "then": {"minimum": 3}, "else": STRING}, [3, "a"], [2, None, 3.5])


def test_forty_conditions_stay_small() -> None:
    kinds = [f"k{i}" for i in range(40)]
    schema = closed(["kind"], kind={"enum": kinds}, **{f"x{kind}": INTEGER for kind in kinds})
    schema["allOf"] = [
        {"if": {"properties": {"kind": {"const": kind}}}, "then": {"required": [f"x{kind}"]}} for kind in kinds
    ]
    grammar = compiled(schema)
    assert grammar.engine == "fsm"
    assert allows(grammar, '{"kind":"k7","xk7":1}') and not allows(grammar, '{"kind":"k7","xk8":1}')


def test_members_can_depend_on_members_and_their_values() -> None:
    given = closed([], card=INTEGER, address=STRING)
    check({**given, "dependentRequired": {"card": ["address"]}}, [{}, {"address": "x"}], [{"card": 1}])
    filled = {"properties": {"address": {"minLength": 1, "type": "string"}}, "required": ["address"]}
    check({**given, "dependentSchemas": {"card": filled}}, [{"address": ""}, {"card": 1, "address": "x"}],
          [{"card": 1}, {"card": 1, "address": ""}])  # fmt: skip


def test_items_can_be_counted() -> None:
    schema = {"type": "array", "items": INTEGER, "contains": {"minimum": 5}}
    check(schema, [[5], [1, 7, 2]], [[], [1, 2]])
    check({**schema, "minContains": 2, "maxContains": 3}, [[5, 1, 5], [5, 5, 5]], [[5], [5, 5, 5, 5], [1]])
    check({**schema, "minContains": 0, "maxContains": 1, "maxItems": 2}, [[], [1, 5]], [[5, 5], [1, 1, 1]])


def test_patterns_of_several_schemas_meet() -> None:
    first = {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False}
    check({"allOf": [first, {"patternProperties": {"b$": {"minimum": 3}}}]},
          [{"a": 1}, {"ab": 3}, {}], [{"ab": 1}, {"b": 3}, {"a": "x"}])  # fmt: skip


def test_patterns_that_exclude_each_other_may_be_many() -> None:
    kinds = {f"^k{i}(x|$)": {"type": "integer", "minimum": i} for i in range(15)}
    check({"type": "object", "patternProperties": kinds, "additionalProperties": False},
          [{"k3": 3}, {"k14x": 14, "k1": 1}], [{"k3": 2}, {"k14": 13}, {"k15": 15}, {"a": 1}])  # fmt: skip


def test_patterns_that_include_each_other_may_be_many() -> None:
    nested = {"^" + "abcdefgh"[: i + 1]: {"type": "integer", "minimum": i} for i in range(8)}
    check({"type": "object", "patternProperties": nested, "additionalProperties": False},
          [{"abc": 2}, {"ax": 0}, {"abcdefgh": 7}], [{"abc": 1}, {"abcdefgh": 6}, {"b": 1}])  # fmt: skip


def test_patterns_that_match_in_too_many_combinations_are_refused() -> None:
    kinds = {letter: {"minimum": i} for i, letter in enumerate("abcdefg")}
    with pytest.raises(GrammarError, match="7 patterns .* names can match more than 64"):
        compiled({"type": "object", "patternProperties": kinds})


def test_patterns_of_equal_schemas_may_match_in_any_combination() -> None:
    kinds = {f"k{i}": INTEGER for i in range(80)} | {"(?<end>z)$": STRING, "^(?<end>z)": STRING}
    schema = {"type": "object", "patternProperties": kinds, "additionalProperties": {"type": "null"}}
    check(schema, [{"k1": 1}, {"ak12k79": 1, "b": None}, {"z": "", "az": "", "za": ""}],
          [{"k1": None}, {"b": 1}, {"z": None}, {"zk1": 1}, {"k": 1}])  # fmt: skip


def test_patterns_that_one_of_two_schemas_tells_apart_are_kept_apart() -> None:
    kinds = {f"^k{i}": INTEGER for i in range(20)}
    schema = {"type": "object", "patternProperties": kinds, "allOf": [{"patternProperties": {"^k1": {"minimum": 3}}}]}
    check(schema, [{"k1": 3, "k2": 1}], [{"k1": 2}, {"k12": 2}, {"k2": "x"}])


def test_members_and_items_that_nothing_looks_at_can_be_restricted() -> None:
    base = {"$defs": {"base": {"type": "object", "properties": {"a": INTEGER}}}, "$ref": "#/$defs/base"}
    given = {**base, "properties": {"b": INTEGER}, "unevaluatedProperties": False}
    check(given, [{"b": 1, "a": 1}, {"a": 1}, {}][1:], [{"c": 1}, {"a": 1, "c": 1}], strict=False)
    either = {"type": "object", "unevaluatedProperties": False}
    either["anyOf"] = [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": INTEGER}}]
    check(either, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {}], [{"c": 1}, {"a": "x"}], strict=False)
    items = {"type": "array", "prefixItems": [INTEGER], "contains": STRING, "unevaluatedItems": False}
    check(items, [[1, "a"], [1, "a", "b"]], [[1], [1, "a", 2]], strict=False)


def test_alternatives_that_look_at_the_same_members_are_no_more_cases() -> None:
    names = [f"k{i}" for i in range(8)]
    choices = [
        {"oneOf": [{"properties": {name: {"const": bit}}, "required": [name]} for bit in (0, 1)]} for name in names
    ]
    schema = {"type": "object", "allOf": choices, "unevaluatedProperties": False}
    good = {name: i % 2 for i, name in enumerate(names)}
    check(schema, [good], [{**good, "k3": 2}, {**good, "other": 1}, {"k0": 0}], strict=False)


def test_members_may_depend_on_any_number_of_conditions() -> None:
    conditions = [
        {"if": {"properties": {"kind": {"const": i}}, "required": ["kind"]}, "then": {"properties": {f"p{i}": INTEGER}}}
        for i in range(30)
    ]
    schema = {
        "type": "object",
        "properties": {"kind": INTEGER, "p0": True},
        "allOf": [
            {"$ref": "#/$defs/note"},
            *conditions,
            {"if": {"required": ["all"]}, "then": {"additionalProperties": True}},
        ],
        "unevaluatedProperties": False,
        "$defs": {"note": {"patternProperties": {"^x-": True, "^p7$": True}}},
    }
    good = [{}, {"kind": 3, "p3": 1}, {"kind": 40}, {"p0": "x", "x-a": 1}, {"p7": 1}, {"kind": 1, "p2": "x", "all": 0}]
    check(schema, good, [{"kind": 3, "p4": 1}, {"p3": 1}, {"kind": 3, "p3": "x"}, {"a": 1}], strict=False)


def test_definitions_are_followed() -> None:
    schema = {"$defs": {"p/q": closed(x=INTEGER)}, **closed(a={"$ref": "#/$defs/p~1q"}, b={"$ref": "#/$defs/p~1q"})}
    check(schema, [{"a": {"x": 1}, "b": {"x": 2}}], [{"a": {}, "b": {}}])
    assert compiled(schema).engine == "fsm"


def test_a_definition_that_contains_itself_takes_a_stack() -> None:
    node = closed(value=INTEGER, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    assert compiled(schema).engine == "pda"
    check(schema, [{"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}], [{"value": 1}])


def test_boolean_schemas() -> None:
    check(True, [1, "a", [{}]], [])
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        compiled(False)
    check(closed(["a"], a=INTEGER, never=False), [{"a": 1}], [{"a": 1, "never": 1}])


def test_whitespace_is_none_one_space_or_some() -> None:
    schema = closed(a=INTEGER, b={"type": "array", "items": INTEGER})
    tight, single, loose = '{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{\n  "a" : 1 ,\n\t"b":[ 1,2 ]\n}'
    expected = {"compact": [True, False, False], "single": [False, True, False], "flexible": [True, True, True]}
    for whitespace, wanted in expected.items():
        grammar = compiled(schema, whitespace=whitespace)
        assert [allows(grammar, text) for text in (tight, single, loose)] == wanted, whitespace
    assert not allows(compiled(schema, whitespace="flexible"), '{"a":' + " " * 21 + '1,"b":[]}')


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=10)
    age: int | None = Field(default=None, ge=0, lt=40)
    tags: list[str] = []


def test_a_pydantic_class_is_a_closed_object_in_its_own_order() -> None:
    grammar = compiled(JsonSchema(Pet))
    assert grammar.engine == "fsm"
    text = '{"kind":"cat","name":"Tom","age":3,"tags":["a"]}'
    assert allows(grammar, text)
    assert Pet.model_validate_json(text).age == 3
    assert not allows(grammar, '{"kind":"cow","name":"Tom"}')


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"propertes": {}}, "/propertes", "did you mean 'properties'"),
        ({"properties": {"x": {"minLenght": 3}}}, "/properties/x/minLenght", "did you mean 'minLength'"),
        ({"type": "strin"}, "/type", "did you mean 'string'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "", r"minimum \(5\) is above maximum \(3\)"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "", r"minLength \(5\) is above maxLength \(3\)"),
        ({"type": "string", "minLength": -1}, "/minLength", "not a whole number"),
        ({"type": "array", "uniqueItems": 1}, "/uniqueItems", "1 is not true or false"),  # it was dropped
        ({"prefixItems": [True], "items": [True]}, "/items", "a list of schemas stands beside 'prefixItems'"),
        ({"type": "null", "properties": [{}], "unevaluatedProperties": False}, "/properties", "is not an object"),
        ({"type": "string", "minLength": 10**12}, "/minLength", "beyond the longest text"),
        ({"type": "string", "pattern": "(a"}, "/pattern", "not closed"),
        ({"type": "string", "format": "date-tim"}, "/format", "did you mean 'date-time'"),
        ({"type": "string", "format": "color"}, "/format", "known: date, time"),
        ({"type": "string", "enum": [1]}, "/enum", "no value of 'enum' fits"),
        ({"enum": []}, "/enum", "give at least one"),
        ({"required": "a"}, "/required", "not a list of property names"),
        ({"properties": []}, "/properties", "not an object"),
        ({"properties": {"a": 3}}, "/properties/a", "not a schema"),
        ({"anyOf": []}, "/anyOf", "give at least one"),
        ({"$ref": "#/$defs/nope", "$defs": {"nop": {}}}, "/$ref", "did you mean 'nop'"),
        ({"$ref": "https://example.org/a.json"}, "/$ref", "nothing is fetched"),
        ({"$ref": "#"}, "", "contains itself and has no way to end"),
        ({"type": "number", "multipleOf": 0}, "/multipleOf", "not above 0"),
        ({"items": {"type": "integer", "multipleOf": 999_983}}, "/items/multipleOf", "999,983 states"),
        (
            {"items": {"type": "object", "minProperties": 3, "propertyNames": {"enum": ["a", "b"]}}, "minItems": 1},
            "/items/minProperties",
            "cannot be kept",
        ),
        ({"type": "string", "pattern": r"(a+)\1"}, "/pattern", "backreference"),
        ({"not": {}}, "", "its keywords exclude every value"),
        ({"oneOf": [INTEGER, INTEGER]}, "", "its keywords exclude every value"),
        (closed(a={"if": True, "then": False}), "/properties/a", "nothing can satisfy"),
        (closed(["a", "b"], a=INTEGER), "/required", "'b' is not declared"),
        (
            {"allOf": [closed(a=INTEGER), closed(["b"], b=INTEGER)]},
            "/required",
            "'a' is declared in one schema of allOf",
        ),
        ({"allOf": [INTEGER, STRING]}, "", "nothing can satisfy"),
        (closed(a=closed(b={"allOf": [INTEGER, STRING]})), "/properties/a/properties/b", "nothing can satisfy"),
    ],
)
def test_a_mistake_is_an_error_with_its_place(schema: Any, pointer: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        compiled(schema)
    assert caught.value.pointer == pointer


def test_with_warn_what_cannot_be_kept_is_left_out_and_listed() -> None:
    schema = closed(
        a={"type": "array", "items": {"type": "integer", "multipleOf": 99991}}, b={"type": "string", "minlength": 3}
    )
    grammar = compiled(schema, on_unsupported="warn")
    assert allows(grammar, '{"a":[1],"b":""}')
    assert [(issue.pointer, issue.keyword) for issue in grammar.warnings] == [
        ("/properties/a/items/multipleOf", "multipleOf"),
        ("/properties/b/minlength", "minlength"),
    ]


def test_keywords_that_the_standard_does_not_know_are_annotations_and_listed() -> None:
    notes = {"ui:widget": "slider", "markdownDescription": "m", "enumNames": ["x"], "self": {}, "comment": "c"}
    grammar = compiled({**INTEGER, **notes, "example": 5, "x-order": 3, "title": "t"})
    assert allows(grammar, "7") and grammar.warnings == ()
    assert {issue.keyword for issue in grammar.annotations} == {*notes, "example", "x-order"}
    assert grammar.annotations[0].pointer == "/ui:widget"


def test_a_condition_is_an_annotation_in_drafts_that_lack_it_only() -> None:
    schema = {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}, "else": {"minimum": 2}}
    grammar = compiled(schema)
    assert [text for text in "123456789" if allows(grammar, text)] == [*"234567"] and grammar.annotations == ()
    old = compiled({"$schema": DRAFT4, **schema})
    assert allows(old, "9") and [issue.keyword for issue in old.annotations] == ["if"]


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("propertes", "properties"),
        ("maxlength", "maxLength"),
        ("requried", "required"),
        ("additional_properties", "additionalProperties"),
        ("addtionalProperites", "additionalProperties"),
        ("tpye", "type"),
        ("mixItems", "maxItems"),
        ("anyof", "anyOf"),
        ("then ", "then"),
    ],
)
def test_a_near_miss_of_a_keyword_that_constrains_is_an_error_unless_it_is_marked_as_a_note(
    keyword: str, meant: str
) -> None:
    with pytest.raises(GrammarError, match=f"did you mean '{meant}'"):
        compiled({"items": {keyword: 3}})
    assert compiled({**INTEGER, f"x-{keyword}": 3, f"_{keyword}": 3, f"${keyword}": 3}).warnings == ()


@pytest.mark.parametrize(
    "keyword",
    ["form", "info", "note", "file", "readonly", "decription", "names", "typeof", "tsAdditionalProperties", "uiItems"],
)
def test_words_that_resemble_short_keywords_or_notes_are_annotations(keyword: str) -> None:
    assert [issue.keyword for issue in compiled({**INTEGER, keyword: 3}).annotations] == [keyword]


def test_a_format_that_nobody_checks_is_an_annotation() -> None:
    grammar = compiled({"type": "string", "format": "html-selector"})
    assert allows(grammar, '"x"') and [issue.pointer for issue in grammar.annotations] == ["/format"]
    check({"type": "string", "format": "url"}, ["http://a.b/c"], ["a b"])


@pytest.mark.parametrize("most", [2**31 - 1, 2**31, 2**63 - 1])
def test_an_upper_bound_that_no_text_reaches_binds_nothing(most: int) -> None:
    check({"type": "string", "maxLength": most, "minLength": 2}, ["ab"], ["a"])
    check({"type": "array", "maxItems": most, "items": INTEGER}, [[], [1, 2]], [["a"]])
    check({"type": "object", "maxProperties": most, "additionalProperties": INTEGER}, [{}, {"a": 1}], [{"a": "b"}])


DRAFT4, DRAFT7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"


def test_each_draft_is_read_by_its_own_rules() -> None:
    check({"$schema": DRAFT4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3])
    check({"$schema": DRAFT4, "type": "array", "items": [INTEGER], "additionalItems": False}, [[1]], [[1, 2]])
    beside = {"$ref": "#/definitions/a", "maximum": 3, "definitions": {"a": INTEGER}}
    check({"$schema": DRAFT7, **beside}, [5], ["a"])
    check(beside, [3], [5])
    by_id = {"items": {"$ref": "#b"}, "type": "array"}
    check({**by_id, "$schema": DRAFT4, "definitions": {"b": {"id": "#b", **INTEGER}}}, [[1]], [["a"]])
    check({**by_id, "$schema": DRAFT7, "definitions": {"b": {"$id": "#b", **INTEGER}}}, [[1]], [["a"]])


def test_a_keyword_that_is_newer_than_the_draft_restricts_nothing() -> None:
    with_const = closed(["a"], a={"type": "integer", "const": 1})
    check({"$schema": DRAFT7, **with_const}, [{"a": 1}], [{"a": 2}])
    check({"$schema": DRAFT4, **with_const}, [{"a": 1}, {"a": 2}], [{"a": "x"}])
    issues = compiled({"$schema": DRAFT4, **with_const}).annotations
    assert [(issue.pointer, issue.keyword) for issue in issues] == [("/properties/a/const", "const")]
    # else one of these would seem to exclude the other
    both = {"oneOf": [{"type": "integer", "const": 1}, {"type": "integer", "const": 2}]}
    check(both, [1, 2], [3])
    with pytest.raises(GrammarError, match="nothing can satisfy this"):
        compiled({"$schema": DRAFT4, **both})
    check({"$schema": DRAFT7, "type": "array", "items": INTEGER, "prefixItems": [{"type": "null"}]}, [[1]], [[None]])


def test_a_draft_before_draft_4_is_refused_with_what_to_write_instead() -> None:
    old = {"$schema": "http://json-schema.org/draft-03/schema#", "type": "integer", "divisibleBy": 3}
    with pytest.raises(GrammarError, match=r"multipleOf for 'divisibleBy'") as caught:  # 4 was accepted
        compiled(old)
    assert caught.value.pointer == "/$schema"
    with pytest.raises(GrammarError, match="before draft 4") as caught:
        compiled({"$ref": "old.json"}, documents={"old.json": old})
    assert caught.value.pointer == "old.json#/$schema"


def test_references_may_lead_into_documents_that_the_caller_gives() -> None:
    documents = {
        "https://example.org/a.json": {"$defs": {"x": INTEGER}, "items": {"$ref": "b.json"}, "type": "array"},
        "https://example.org/b.json": {"$ref": "a.json#/$defs/x"},
    }
    grammar = compiled(JsonSchema({"$ref": "https://example.org/a.json"}, documents=documents))
    assert allows(grammar, "[1,2]") and not allows(grammar, '["a"]')
    same = Grammar.compile(JsonSchema({"$ref": "https://example.org/b.json"}), BYTES, documents=documents)
    assert allows(same, "3") and not allows(same, "[3]")
    with pytest.raises(GrammarError, match=r"pass the other schema as documents=\{'https://example.org/c.json'"):
        compiled(JsonSchema({"$ref": "https://example.org/c.json"}, documents=documents))


def test_a_dynamic_reference_is_kept_where_only_one_target_is_possible() -> None:
    tree = {
        "$id": "https://example.org/tree",
        "$dynamicAnchor": "node",
        **closed(["value"], value=INTEGER, next={"$dynamicRef": "#node"}),
    }
    check(tree, [{"value": 1}, {"value": 1, "next": {"value": 2}}], [{"value": 1, "next": {}}])
    check({"$recursiveAnchor": True, "type": "array", "items": {"$recursiveRef": "#"}}, [[], [[], [[]]]], [[1]])
    beside = {"$id": "strict", "$defs": {"t": tree, "u": {"$id": "other", "$dynamicAnchor": "node"}}}
    check(
        {**beside, "$ref": "https://example.org/tree"}, [{"value": 1, "next": {"value": 2}}], [{"value": 1, "next": 1}]
    )


def test_a_dynamic_reference_leads_where_every_way_to_it_came_from_first() -> None:
    items = {
        "$id": "list",
        "type": "array",
        "items": {"$dynamicRef": "#item"},
        "$defs": {"i": {"$dynamicAnchor": "item"}},
    }
    texts = {"$id": "texts", "$ref": "list", "$defs": {"i": {"$dynamicAnchor": "item", **STRING}}}
    base = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/",
        "$defs": {"list": items, "texts": texts},
    }
    check({**base, "$ref": "texts"}, [["a"], []], [[1]])
    check({**base, "$ref": "list"}, [[1, "a"]], [1])
    with pytest.raises(GrammarError, match="several targets"):
        compiled({**base, "anyOf": [{"$ref": "texts"}, {"$ref": "list"}]})


@pytest.mark.parametrize("draft", ["2020-12", "2019-09"])
def test_a_schema_of_schemas_may_be_a_part(draft: str) -> None:
    schema = closed(["schema"], schema={"$ref": f"https://json-schema.org/draft/{draft}/schema"})
    good = {"properties": {"a": {"minimum": 1}}, "type": "object"}
    check(schema, [{"schema": good}, {"schema": True}], [{"schema": {"properties": {"a": {"minimum": "1"}}}}])


def test_a_schema_without_type_that_speaks_of_one_is_of_that_type_in_strict_mode() -> None:
    assert compiled({"properties": {"a": INTEGER}}).engine == "fsm"
    check({"minimum": 3}, [3], [2, "a"])
    check({"minimum": 3}, [3, "a", None], [2], strict=False)


def test_an_implied_type_excludes_no_value_that_the_standard_admits() -> None:
    check({"not": {"minimum": 3}}, [2], [3, "a", None, []])
    check({"not": {"$ref": "#/$defs/short"}, "$defs": {"short": {"maxLength": 3}}}, ["abcd"], ["abc", 1, {}])
    check({"not": {"propertyNames": {"not": {"pattern": "b"}}}}, [{"abc": 1}], [{}, {"ac": 1}, 0])
    named = {"type": "object", "properties": {"a": {"minLength": 2}}, "required": ["a"]}
    check({"if": named, "then": False, "else": {}}, [{"a": "x"}], [{"a": "xy"}, {"a": 1}])
    member = {"properties": {"a": INTEGER}, "required": ["a"]}
    check({"oneOf": [{"type": "null"}, member]}, [{"a": 1}], [None, {"a": "x"}, 1])  # null has both
    never = {"required": ["a", "b"], "maxProperties": 1}  # of objects: other values have it
    check({"oneOf": [{}, never]}, [{}, {"c": 1}], [1, None, [1], "a"])
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        compiled({"oneOf": [member, {"maxLength": 1}]})  # an object with `a` has both, as has a short string


def test_an_alternative_with_an_implied_type_is_told_apart_from_one_that_contains_itself() -> None:
    either = {"oneOf": [{"$ref": "#/$defs/branch"}, {"$ref": "#/$defs/leaf"}]}
    branch = {"type": "object", "patternProperties": {"^[a-z]$": either}, "additionalProperties": False}
    schema = {"$ref": "#/$defs/branch", "$defs": {"branch": branch, "leaf": {"required": ["a", "B"]}}}
    check(schema, [{}, {"b": {}}, {"b": {"a": {"b": {}}}}], [1, {"b": 1}, {"B": {}}])


def test_alternatives_told_apart_by_a_member_need_no_type() -> None:
    kinds = [{"properties": {"kind": {"const": kind}, "x": INTEGER}, "required": ["kind"]} for kind in ("a", "b")]
    check({"oneOf": kinds}, [{"kind": "a", "x": 1}, {"kind": "b"}], [{"kind": "c"}, {"x": 1}, 1, None])


def test_a_schema_nested_deeper_than_the_limit_is_refused() -> None:
    schema: dict[str, Any] = INTEGER
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="deeper than 64"):
        compiled(schema)
