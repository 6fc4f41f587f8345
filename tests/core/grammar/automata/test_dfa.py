"""Automata: counters beside the states, forced runs, limits, and what cannot match at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.endings import shortest_ending
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import Limits


def compiled(pattern: str) -> Dfa:
    return Dfa.compile(parse(pattern))


def json_string(minimum: int, maximum: int | None) -> nodes.Node:
    return parse(rf'"([^"\\\x00-\x1f]|\\["\\nt]){{{minimum},{"" if maximum is None else maximum}}}"')


def test_a_long_string_bound_costs_a_counter_and_no_states() -> None:
    unbounded, bounded = Dfa.compile(json_string(0, None)), Dfa.compile(json_string(0, 4000))
    assert bounded.num_states <= unbounded.num_states + 1
    assert [(loop.minimum, loop.maximum) for loop in bounded.loops] == [(0, 4000)]


def test_twenty_bounded_fields_cost_twenty_times_one() -> None:
    fields = [nodes.concat(nodes.literal(f'"field{i}":'), json_string(0, 400), nodes.literal(",")) for i in range(20)]
    assert Dfa.compile(nodes.concat(*fields)).num_states < 800


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 20), (1, 20), (19, 20), (20, 20), (20, None), (2, 3000)])
def test_a_counter_admits_the_lengths_between_its_bounds(minimum: int, maximum: int | None) -> None:
    dfa = Dfa.compile(json_string(minimum, maximum))
    assert len(dfa.loops) == 1
    for length in [0, 1, 2, 3, 18, 19, 20, 21, 40, 2999, 3000, 3001]:
        expected = minimum <= length and (maximum is None or length <= maximum)
        assert dfa.matches(('"' + "é" * length + '"').encode()) == expected, length


def test_counters_nest() -> None:
    dfa = compiled(r"(\[[^\]]{2,40}\]){10,12}x")
    assert dfa.num_registers == 2
    for rounds in range(8, 15):
        for inner in (1, 2, 40, 41):
            text = "[ab]" * (rounds - 1) + "[" + "y" * inner + "]x"
            assert dfa.matches(text.encode()) == (10 <= rounds <= 12 and 2 <= inner <= 40)


@pytest.mark.parametrize(
    "pattern",
    [
        r"([a-zé]{3,60})*",
        r"[a-zé]{10,60}[a-zé]\d",
        r"([a-zé]|[a-zé][a-zé]){10,40}",
        r"([a-zé]{9,30}x?){10,30}",
        r'"[a-zé]{0,400}"|"[a-zé]{3,50}"|"abc\."',
        r"[a-zé]{9,20}[a-zé]{9,20}",
        r"(a[a-zé]{10,20}B|c){9,15}",
        r"(é{2,3};|[a-zé]{9,12},){9,20}[A-Z]{9,}",
    ],
)
def test_counters_and_unrolling_agree_where_counts_are_ambiguous(pattern: str) -> None:
    node = parse(pattern)
    dfa, unrolled = Dfa.compile(node), Dfa.compile(node, counters=False)
    for n in range(70):
        for text in (
            "a" * n,
            "é" * n,
            "a" * n + "1",
            "a" * n + "x" + "b" * n,
            "a" + "b" * n + "b" * n,
            '"' + "a" * n + '"',
        ):
            assert dfa.matches(text.encode()) == unrolled.matches(text.encode()), text


LEAVES = st.sampled_from(["a", "b", "[ab]", "[^b]", r"\w", "ab", "é", "[é-ü]"])
COUNTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 12), st.integers(0, 12)).map(lambda t: f"(?:{t[0]}){{{t[1]},{t[1] + t[2]}}}"),
        st.tuples(inner, st.integers(9, 14)).map(lambda t: f"(?:{t[0]}){{{t[1]},}}"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]}{t[1]}"),
        st.tuples(inner, inner).map(lambda t: f"(?:{t[0]}|{t[1]})"),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(COUNTED, st.lists(st.tuples(st.sampled_from(["a", "b", "é", "ab", "-"]), st.integers(0, 30)), max_size=4))
def test_an_automaton_with_counters_is_the_same_language_as_one_without(
    pattern: str, parts: list[tuple[str, int]]
) -> None:
    node = parse(pattern)
    try:
        unrolled = Dfa.compile(node, Limits(states=5_000, seconds=2), counters=False)
        counted = Dfa.compile(node, Limits(states=5_000, seconds=2))
    except GrammarError:
        return
    text = "".join(piece * count for piece, count in parts).encode()
    for end in range(0, len(text) + 1):
        assert unrolled.matches(text[:end]) == counted.matches(text[:end])


@settings(max_examples=60)
@given(COUNTED, st.binary(max_size=12))
def test_every_place_has_a_shortest_ending_that_is_accepted(pattern: str, noise: bytes) -> None:
    try:
        dfa = Dfa.compile(parse(pattern), Limits(states=5_000, seconds=2))
    except GrammarError:
        return
    place = dfa.start
    for byte in noise:  # any byte picks one of the ways on
        ways = dfa.ways_on(place[0])
        if not ways:
            break
        after = dfa.step(place, ways[byte % len(ways)])
        assert after is not None
        place = after
    ending = shortest_ending(dfa, place)
    last = dfa.walk(place, ending)
    assert last is not None and dfa.accepting[last[0]]


def test_an_ending_is_as_short_as_it_can_be() -> None:
    dfa = compiled(r'\{"a":"[^"]{30,}"(,"b":\d+)?\}')
    place = dfa.walk(dfa.start, b'{"a":"xy')
    assert place is not None
    assert len(shortest_ending(dfa, place)) == 28 + len('"}')


def test_singular_states_make_one_run() -> None:
    dfa = compiled("id: (north|south)-0{3}!")
    data, place = dfa.run(dfa.start)
    assert data == b"id: "
    after = dfa.walk(place, b"n")
    assert after is not None
    assert dfa.run(after)[0] == b"orth-000!"


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [("a{40,90}b", b"a", b"a" * 39), ("([a-c]xyz){3,50}!", b"bx", b"yz"), ("([a-c]-){0,2}=+!", b"a-b-", b"=")],
)
def test_a_run_counts_the_repeats_that_it_passes(pattern: str, text: bytes, expected: bytes) -> None:
    dfa = compiled(pattern)
    place = dfa.walk(dfa.start, text)
    assert place is not None
    data, after = dfa.run(place)
    assert data == expected and after == dfa.walk(place, data)


def test_an_accepting_state_is_never_singular() -> None:
    dfa = compiled("ab?")
    assert dfa.run(dfa.start)[0] == b"a"


@pytest.mark.parametrize(
    "node", [nodes.NOTHING, nodes.concat(nodes.literal("a"), nodes.NOTHING), nodes.CharSet(((0xD800, 0xDFFF),))]
)
def test_a_language_without_texts_is_an_error(node: nodes.Node) -> None:
    with pytest.raises(GrammarError, match="no text matches"):
        Dfa.compile(node)


def test_parts_that_cannot_match_leave_no_dead_ends() -> None:
    dead = nodes.Concat((nodes.literal("ab"), nodes.CharSet(((0xD800, 0xDFFF),))))
    dfa = Dfa.compile(nodes.Alternation((dead, nodes.literal("ac"))))
    assert dfa.run(dfa.start)[0] == b"ac"


def test_a_pattern_with_too_many_states_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"more than 1,000 states.*limits\.states"):
        Dfa.compile(parse("(a|b)*a(a|b){12}"), Limits(states=1_000))


def test_a_pattern_that_takes_too_long_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"took longer than 0\.0?1 s.*limits\.seconds"):
        Dfa.compile(parse("(a|b)*a(a|b){18}"), Limits(states=10_000_000, seconds=0.01))


def test_nested_repeats_cannot_exhaust_memory() -> None:
    with pytest.raises(GrammarError, match="places|more than 400,000 states"):
        Dfa.compile(parse("(((a{1000}b?){1000})c?){1000}"))


def test_a_list_of_choices_compiles_to_its_trie() -> None:
    words = [f"item{i:05}" for i in range(5_000)]
    dfa = Dfa.compile(nodes.alternation(*map(nodes.literal, words)))
    assert dfa.matches(b"item04999") and not dfa.matches(b"item05000")
    assert dfa.num_states < 6_000
