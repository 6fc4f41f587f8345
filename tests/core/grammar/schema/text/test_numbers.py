"""Bounds and multiples of numbers as languages of their decimal text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bench.grammar.validity import write
from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.schema.algebra.shapes import Number
from graftlm.core.grammar.schema.text import numbers
from tests.grammars import BYTES, allows, compiled

BOUNDS = st.none() | st.decimals(-1500, 1500, places=2) | st.integers(-20, 120).map(Decimal)
TEXTS = st.from_regex(r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,3})?", fullmatch=True)


def matches(node: Node, text: str) -> bool:
    return product.matches(node, text)


@settings(max_examples=60)
@given(st.booleans(), BOUNDS, BOUNDS, st.booleans(), st.booleans(), st.lists(TEXTS, min_size=20, max_size=40))
def test_a_text_is_within_bounds_when_its_value_is(
    integer: bool, low: Decimal | None, high: Decimal | None, after: bool, before: bool, texts: list[str]
) -> None:
    shape = Number(integer, low, high, after and low is not None, before and high is not None)
    node = numbers.number(shape)
    edges = [f"{bound}{digits}" for bound in (low, high) if bound is not None for digits in ("", "0", "1")]
    for text in [*texts, *(edge for edge in edges if "." in edge)]:
        value = Decimal(text)
        if value == 0 and text[0] == "-" or re.fullmatch("-0[.]?0*", text):
            continue  # bounded numbers are written without "-0"
        expected = not (integer and "." in text)
        expected = expected and (low is None or (value > low if after else value >= low))
        expected = expected and (high is None or (value < high if before else value <= high))
        assert matches(node, text) == expected, (shape, text)


@pytest.mark.parametrize("step", ["1", "2", "3", "7", "10", "0.01", "0.5", "2.5", "0.25", "12", "100"])
@pytest.mark.parametrize("integer", [True, False])
def test_a_text_is_a_multiple_when_its_value_is(step: str, integer: bool) -> None:
    node = numbers.number(Number(integer, multiple_of=(Decimal(step),)))
    for text in ("0", "1", "2", "5", "10", "12", "-21", "35", "100", "0.5", "2.50", "0.01", "-7.25", "1.005", "3.000"):
        expected = Decimal(text) % Decimal(step) == 0 and not (integer and "." in text)
        assert matches(node, text) == expected, text


def test_a_free_number_has_every_spelling_of_json() -> None:
    node = numbers.number(Number())
    for text in ("0", "-0", "1.50", "-12e7", "1E+2", "0.1e-05"):
        assert matches(node, text), text
    for text in ("01", ".5", "1.", "+1", "1e", "-", "0x1", "NaN"):
        assert not matches(node, text), text


def test_a_free_integer_has_one_zero() -> None:
    node = numbers.number(Number(integer=True))
    assert [text for text in ("0", "7", "-7", "10") if not matches(node, text)] == []
    assert [text for text in ("-0", "01", "-", "1.0", "1e3") if matches(node, text)] == []


def test_bounds_on_large_numbers_stay_small() -> None:
    node = numbers.number(Number(True, Decimal(-(2**63)), Decimal(2**63 - 1)))
    assert Dfa.compile(node).num_states < 500
    assert matches(node, "9223372036854775807") and not matches(node, "9223372036854775808")


def test_a_step_that_needs_too_many_states_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"multipleOf 1009, 2003 needs 2,021,027 states.*rounder step"):
        numbers.number(Number(multiple_of=(Decimal(1009), Decimal(2003))))


OR_NESTED: list[Callable[[dict[str, Any]], Any]] = [
    lambda schema: schema,
    lambda schema: {"anyOf": [schema, {"type": "array", "items": {"$ref": "#"}}]},  # for llguidance
]


@pytest.mark.parametrize("form", OR_NESTED, ids=["fsm", "llguidance"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "9" * 18, "-" + "9" * 18], ["9" * 19, "-" + "9" * 19]),
        ({"type": "integer", "minimum": 5}, ["5", "9" * 18], ["4", "9" * 19]),
        ({"type": "integer", "minimum": 10**20}, ["1" + "0" * 20, "9" * 21], ["9"]),
        ({"type": "integer", "multipleOf": 5}, ["5", "9" * 17 + "5"], ["9" * 18 + "5"]),
        ({"type": "number"}, ["-0.5", "1.2345678901234567", "9" * 17, "1e5", "12.5E-99"], ["9" * 18, "1e100"]),
        ({"type": "number"}, ["0." + "1" * 17, "1234567.8901234567"], ["0." + "1" * 18, "1234567.89012345678"]),
        ({"type": "number", "minimum": 0}, ["0", "0.5", "9" * 17], ["-1", "9" * 18, "1.23456789012345678"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "9" * 17], ["0", "-1", "9" * 18]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["1", "0." + "1" * 16], ["1.1", "0." + "1" * 30]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 5}, ["4." + "9" * 14], ["4." + "9" * 16]),
        ({"type": "number", "exclusiveMaximum": 5}, ["4." + "9" * 14, "-1"], ["4." + "9" * 16, "5"]),
        ({"type": "number", "minimum": 10**20}, ["1" + "0" * 20], ["9"]),
        ({"type": "number", "multipleOf": 7}, ["-14", "7" * 18], ["7" * 19, "8"]),
        ({"type": "number", "multipleOf": 97, "minimum": 0}, ["0", "97", "97" * 9], ["97" * 10, "-97"]),
        ({"type": "number", "multipleOf": 0.125}, ["-1.625", "9" * 12 + ".5"], ["9" * 13 + ".5", "0.1"]),
        ({"type": "integer", "multipleOf": 7.0}, ["14", "7" * 14], ["7" * 15]),
        (
            {"type": "number", "not": {"type": "integer"}},
            ["-0.5", "1." + "0" * 13 + "1"],
            ["2.0", "1." + "0" * 15 + "1"],
        ),
        ({"type": "number", "not": {"multipleOf": 2}}, ["3", "9" * 15, "2.000001"], ["4", "9" * 16, "2.0000001"]),
        ({"type": "integer", "not": {"multipleOf": 2}}, ["3", "9" * 18], ["4", "9" * 19]),
    ],
)
def test_bounded_numbers_are_those_that_readers_hold(
    schema: dict[str, Any], good: list[str], bad: list[str], form: Callable[[dict[str, Any]], Any]
) -> None:
    bounded = compiled(form(schema), bounded_numbers=True)
    assert [text for text in good if not allows(bounded, text)] == []
    assert [text for text in bad if allows(bounded, text)] == []

    free = compiled(form(schema))
    assert all(allows(free, text) for text in good)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 7},
        {"multipleOf": 7.0},
        {"multipleOf": 2.5},
        {"multipleOf": 7, "minimum": 0, "maximum": 1e20},
        {"multipleOf": 7, "minimum": 1e17},
        {"not": {"type": "integer"}},
        {"not": {"type": "integer"}, "minimum": 0, "maximum": 1e25},
        {"not": {"multipleOf": 0.003}},
        {"multipleOf": 0.5, "not": {"type": "integer"}},
        {"exclusiveMinimum": 4.1, "exclusiveMaximum": 4.2},
    ],
    ids=str,
)
def test_bounded_numbers_are_valid_to_a_reader_with_float64(schema: dict[str, Any]) -> None:
    items = {"type": "array", "minItems": 5, "maxItems": 5, "items": {"type": "number", **schema}}
    grammar = compiled(items, bounded_numbers=True)
    budget = grammar.matcher().min_tokens_to_accept() + 100
    for seed in range(20):
        text, _ = write(grammar, BYTES, np.random.default_rng(seed), budget)
        jsonschema.validate(json.loads(text), items, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 1e308}, 10**308, 10**308 - 1),
        ({"maximum": -1e308}, -(10**308), 1 - 10**308),
        ({"minimum": 1e200, "maximum": 1e201}, 10**201, 10**201 + 1),
        ({"exclusiveMinimum": 1e308}, 10**308 + 1, 10**308),
        ({"exclusiveMaximum": -1e308}, -(10**308) - 1, -(10**308)),
        ({"minimum": int("12" * 100), "maximum": int("12" * 99 + "21")}, int("12" * 99 + "19"), int("12" * 99 + "22")),
    ],
)
def test_bounds_of_hundreds_of_digits_are_kept(bounds: dict[str, float], inside: int, outside: int) -> None:
    grammar = compiled({"type": "number", **bounds})
    assert allows(grammar, str(inside)) and not allows(grammar, str(outside))


def test_bounds_of_hundreds_of_zeros_after_the_point_are_kept() -> None:
    node = numbers.number(Number(minimum=Decimal("1e-300"), maximum=Decimal("2e-200")))
    texts = [f"0.{'0' * num_zeros}{digits}" for num_zeros, digits in ((299, 1), (299, "09"), (199, 2), (199, 21))]
    assert [matches(node, text) for text in (*texts, "0", "0.1")] == [True, False, True, False, False, False]


def test_integers_of_many_digits_within_bounds_are_all_kept() -> None:
    low, high = 10**60 - 12, 10**60 + 123
    node = numbers.number(Number(integer=True, minimum=Decimal(low), maximum=Decimal(high)))
    kept = [number for number in range(low - 50, high + 50) if matches(node, str(number))]
    assert kept == list(range(low, high + 1))


def test_numbers_between_zero_and_a_tiny_bound_are_not_read_as_zero() -> None:
    above = compiled({"type": "number", "exclusiveMinimum": 0, "maximum": 5e-324}, bounded_numbers=True)
    below = compiled({"type": "number", "exclusiveMaximum": 0, "minimum": -5e-324}, bounded_numbers=True)
    zeros = "0" * 323
    for grammar, sign in ((above, ""), (below, "-")):
        texts = [f"{sign}0.{zeros}{digits}" for digits in ("5", "50", "2", "6", "05")]
        assert [allows(grammar, text) for text in texts] == [True, True, False, False, False]


def test_twenty_items_that_are_no_multiples_take_few_states() -> None:
    grammar = compiled({"type": "array", "minItems": 20, "items": {"type": "number", "not": {"multipleOf": 7}}})
    assert allows(grammar, f"[{','.join(['6'] * 19)},7.5]")
    assert not allows(grammar, f"[{','.join(['6'] * 19)},7]")
