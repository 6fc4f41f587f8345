"""The language of an item: which items are left beside those that are there."""

from __future__ import annotations

import math

import pytest

from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.schema.distinct.item_language import ItemLanguage, as_read


def language(pattern: str, *, is_whole: bool = True) -> ItemLanguage:
    found = ItemLanguage.of(parse(pattern), is_whole)
    assert found is not None
    return found


def seen(*texts: str) -> tuple[tuple[bytes, str], ...]:
    return tuple((text.encode(), text if text[0] == '"' else as_read(text)) for text in texts)


@pytest.mark.parametrize(("pattern", "num_texts"), [("true|false|null", 3), ('"[a-c]{2}"', 9), ('"a*"', math.inf)])
def test_the_texts_of_an_item_are_counted(pattern: str, num_texts: float) -> None:
    assert language(pattern).num_texts == num_texts


def test_an_item_may_begin_while_one_that_begins_so_is_left() -> None:
    items = language('"ab"|"ac"|"b"')
    assert items.has_more(b'"a', seen('"ab"')) and not items.has_more(b'"a', seen('"ab"', '"ac"'))
    assert items.has_more(b"", seen('"ab"', '"ac"')) and not items.has_more(b"", seen('"ab"', '"ac"', '"b"'))


def test_numbers_of_one_value_are_one_item() -> None:
    items = language(r"-?[0-3](\.0{1,2})?")
    assert not items.has_more(b"1.0", seen("1")) and items.has_more(b"2.0", seen("0", "1"))


def test_what_lies_outside_of_the_automaton_is_always_left() -> None:
    items = language("1|2", is_whole=False)
    assert items.has(b"[3]") and items.may_begin(b"{") and items.has_more(b"", seen("1", "2"))
    assert not items.has(b"3") and not items.may_begin(b"3")


def test_the_shortest_endings_come_first() -> None:
    items = language('"(xyz|x|xy)"')
    assert list(items.endings(b'"x', 3)) == [b'"', b'y"', b'yz"']
    assert list(items.endings(b'"q', 3)) == []


def test_a_begun_item_may_run_out_where_few_ways_lead_on() -> None:
    items = language('"a"|"b[0-9]*"')
    assert items.may_run_out(b'"') and not items.may_run_out(b'"b')
