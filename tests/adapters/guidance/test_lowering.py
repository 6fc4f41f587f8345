"""Which guidance grammars are regular, and how their captures are read."""

from __future__ import annotations

from typing import Any

import pytest
from guidance import gen, json as gen_json, regex as regex_node, select, string, substring
from guidance.library import capture

from graftlm.adapters.guidance.lowering import leading_text, lower

REGULAR = {
    "regex": gen("x", regex="[0-9]+"),
    "choice": select(["a", "ab"], name="x"),
    "lexemes apart": gen("x", regex="[0-9]+") + ", " + gen("y", regex="[a-z]+"),
    "a lexeme of fixed length": gen("x", regex="[a-z]{3}") + "a",
    "one temperature": gen("x", regex="a+", temperature=0.5) + "b" + gen("y", regex="c+", temperature=0.5),
    "a choice of pieces": select([string("a") + regex_node("[0-9]"), "b"], name="x"),
    "free text": gen("x"),
    "free text with a limit": gen("x", max_tokens=5),
    "free text up to a stop": gen("x", stop="\n", max_tokens=5),
    "free text up to the stop that follows": gen("x", stop='"', max_tokens=5) + '", ' + gen("y", regex="[0-9]"),
}
NOT_REGULAR: dict[str, Any] = {
    "free text that could go on": gen("x", max_tokens=5) + "a",
    "free text behind something": select(["a", "b"]) + gen("x", max_tokens=5),
    "a stop that is not what follows": gen("x", stop=";") + "a",
    "a long stop": gen("x", stop="\n\n"),
    "a stop of several bytes": gen("x", stop="\u00e9"),
    "a stop that is a pattern": gen("x", stop_regex="[.;]"),
    "a stop that is captured": gen("x", stop=";", save_stop_text=True),
    "a limit": gen("x", regex="[a-z]+", max_tokens=3),
    "a suffix": gen("x", regex="[a-z]+", suffix=";"),
    "a lexeme that could go on": gen("x", regex="[a-z]+") + "a",
    "a choice that could go on": select(["a", "ab"], name="x") + "b",
    "what may be empty between": gen("x", regex="[a-z]+") + gen("y", regex="[0-9]*") + "a",
    "two temperatures": gen("x", regex="a", temperature=0.5) + "b" + gen("y", regex="c"),
    "a schema": gen_json("x", schema={"type": "object"}),
    "substring": substring("a b c", name="x"),
    "a capture in a capture": capture("a" + gen("y", regex="b"), "x"),
    "a broken pattern": gen("x", regex="["),
}


@pytest.mark.parametrize("name", REGULAR)
def test_regular_grammars_become_automata(name: str) -> None:
    assert lower(REGULAR[name]) is not None


@pytest.mark.parametrize("name", NOT_REGULAR)
def test_other_grammars_stay_with_llguidance(name: str) -> None:
    assert lower(NOT_REGULAR[name]) is None


def test_captures_are_read_in_order() -> None:
    found = lower(gen("x", regex="[0-9]+", list_append=True) + "-" + select(["ab", "a"], name="y") + ";")
    assert found is not None
    assert found.read(b"12-ab;") == {"x": [b"12"], "y": b"ab"}


def test_a_list_collects_its_items() -> None:
    item = gen("x", regex="[a-z]", list_append=True)
    found = lower(item + "," + item)
    assert found is not None and found.read(b"a,b") == {"x": [b"a", b"b"]}


def test_free_text_ends_at_its_first_stop() -> None:
    found = lower(gen("x", stop='"') + '", ' + gen("y", regex='[0-9"]'))
    assert found is not None and found.read(b'a b", "') == {"x": b"a b", "y": b'"'}


def test_free_text_that_was_cut_within_a_character_is_read() -> None:
    found = lower(gen("x", max_tokens=5))
    assert found is not None and found.read("\u00e9\u00e9".encode()[:3]) == {"x": "\u00e9\u00e9".encode()[:3]}


def test_a_temperature_is_the_rules_own_and_zero_without() -> None:
    hot, cold = lower(gen("x", regex="a", temperature=0.7)), lower(gen("x", regex="a"))
    assert hot is not None and cold is not None and (hot.temperature, cold.temperature) == (0.7, 0.0)


def test_text_at_the_beginning_is_not_part_of_the_grammar() -> None:
    text, rest = leading_text("one " + string("two ") + gen("x", regex="a") + " three")
    assert text == "one two " and lower(rest) is lower(gen("x", regex="a") + " three")
