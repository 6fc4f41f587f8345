"""Values that items which must differ cannot do without, beside all assignments written out."""

from __future__ import annotations

from itertools import product

from hypothesis import given, strategies as st

from graftlm.core.grammar.schema.algebra.needed_values import MAX_PLACES, needed_values, num_different

PLACES = st.lists(st.frozensets(st.sampled_from("abcd"), max_size=4), max_size=4)


def assignments(places: list[frozenset[str]]) -> list[set[str]]:
    """The values of every way to give each place one of its own."""
    return [set(values) for values in product(*places) if len(set(values)) == len(values)]


@given(PLACES)
def test_needed_values_are_those_of_every_assignment(places: list[frozenset[str]]) -> None:
    found = assignments(places)
    assert needed_values(places) == (set.intersection(*found) if found else set())


@given(PLACES)
def test_places_can_differ_as_far_as_there_is_an_assignment(places: list[frozenset[str]]) -> None:
    longest = max(number for number in range(len(places) + 1) if assignments(places[:number]))
    assert num_different(places) == longest


def test_of_very_many_places_nothing_is_called_needed() -> None:
    places = [frozenset({str(i)}) for i in range(MAX_PLACES + 1)]
    assert needed_values(places[1:]) == {str(i) for i in range(1, MAX_PLACES + 1)}
    assert needed_values(places) == frozenset()
