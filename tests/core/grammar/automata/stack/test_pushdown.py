import gc
import json
import random
from itertools import pairwise

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products.product import without_products
from graftlm.core.grammar.automata.stack.positions import END, INFINITE, Positions
from graftlm.core.grammar.automata.stack.pushdown import Pushdown
from graftlm.core.grammar.automata.stack.shortest import ShortestTexts
from graftlm.core.grammar.compile import language_of
from graftlm.core.grammar.spec import JsonSchema, Options

A, B, DIGIT = ast.literal("a"), ast.literal("b"), ast.chars("0123456789")
NESTED = {"nested": ast.concat(A, ast.optional(ast.Rule("nested")), B)}  # a^n b^n

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}


def ending(pushdown: Pushdown, begun: bytes) -> bytes | None:
    place = pushdown.walk(pushdown.start, begun)
    return None if place is None else pushdown.ending(place)


def test_what_was_opened_is_closed() -> None:
    pushdown = Pushdown(ast.Rule("nested"), NESTED)
    assert [ending(pushdown, begun) for begun in (b"", b"a", b"aaa", b"aab")] == [b"ab", b"b", b"bbb", b"b"]
    assert ending(pushdown, b"ba") is None and ending(pushdown, b"abb") is None


def test_the_shorter_of_two_ways_to_read_a_text_ends_it() -> None:
    rules = {"long": ast.literal("{x: 12345}"), "short": ast.literal("{x: 12}")}
    pushdown = Pushdown(ast.alternation(ast.Rule("long"), ast.Rule("short")), rules)
    assert (ending(pushdown, b"{x: 12"), ending(pushdown, b"{x: 123")) == (b"}", b"45}")


def test_counted_repeats_end_once_they_are_full() -> None:
    pushdown = Pushdown(ast.concat(ast.repeat(DIGIT, 3, 5_000), ast.Rule("end")), {"end": B})
    assert [ending(pushdown, begun) for begun in (b"1", b"123", b"1" * 5_000)] == [b"00b", b"b", b"b"]
    assert ending(pushdown, b"1" * 5_001) is None


def test_a_difference_ends_outside_of_what_it_leaves_out() -> None:
    names = ast.Difference(ast.plus(ast.chars("ab")), ast.alternation(A, ast.literal("ab"), ast.literal("aa")))
    pushdown = Pushdown(ast.concat(ast.Rule("open"), names), {"open": ast.literal("<")})
    assert [ending(pushdown, begun) for begun in (b"<", b"<a", b"<aa")] == [b"b", b"aa", b"a"]


def test_an_intersection_that_nothing_matches_has_no_length() -> None:
    both = ast.Intersection((ast.plus(A), ast.plus(B)))
    assert ShortestTexts({}, Positions()).length(both) == INFINITE
    assert ShortestTexts({}, Positions()).length(ast.alternation(both, ast.literal("abc"))) == 3


def test_nested_products_try_only_bytes_that_their_parts_tell_apart() -> None:
    anything = ast.star(ast.ANY_CHAR)
    with_a, with_b = (ast.concat(anything, char, anything) for char in (A, B))
    positions = Positions()
    both = ast.Intersection((ast.Difference(with_a, ast.literal("ab")), ast.Difference(with_b, A)))
    texts = ShortestTexts({}, positions)
    assert texts.length(both) == 2 and texts.text(positions.rest(both, 0, END)) == b"ba"
    assert len(positions.product(both)._steps) < 200


def test_an_ending_of_one_part_that_the_others_take_is_found_without_a_search() -> None:
    anything = ast.star(ast.ANY_CHAR)
    positions = Positions()
    key = ast.Intersection(
        (ast.concat(anything, ast.repeat(DIGIT, 64, 64), anything), ast.repeat(ast.ANY_CHAR, 2, 4096))
    )
    other = ast.Difference(key, ast.literal("0" * 64))
    assert ShortestTexts({}, positions).length(key) == 64 and len(positions.product(key)._states) == 1
    assert ShortestTexts({}, positions).length(other) == 64 and len(positions.product(other)._states) > 1


def test_a_rule_that_never_ends_has_no_length() -> None:
    rules = {"endless": ast.concat(A, ast.Rule("endless")), "ends": ast.alternation(ast.Rule("endless"), B)}
    assert ShortestTexts(rules).of_rule == {"endless": INFINITE, "ends": 1}


def test_rules_whose_lengths_are_known_are_not_measured_again() -> None:
    rules = {"known": ast.literal("abc"), "new": ast.concat(ast.Rule("known"), ast.literal("d"))}
    assert ShortestTexts(rules, known={"known": 7}).of_rule == {"known": 7, "new": 8}


@pytest.mark.parametrize("inside_first", [True, False])
def test_rules_that_nest_far_and_come_back_to_the_first_are_all_measured(inside_first: bool) -> None:
    names = list(map(str, range(100)))
    rules = {name: ast.concat(ast.literal("a"), ast.Rule(after)) for name, after in pairwise(names)}
    rules["99"] = ast.alternation(ast.Rule("0"), ast.literal("bb"))
    in_order = dict(reversed(rules.items())) if inside_first else rules
    assert ShortestTexts(in_order).of_rule == {name: 101 - i for i, name in enumerate(names)}


def test_a_character_that_is_cut_is_finished() -> None:
    pushdown = Pushdown(ast.concat(ast.char_set([(0x1F600, 0x1F64F)]), ast.Rule("end")), {"end": B})
    assert "😀".encode() == b"\xf0\x9f\x98\x80"
    assert ending(pushdown, b"\xf0\x9f") == b"\x98\x80b"


def test_texts_may_nest_deeper_than_calls() -> None:
    pushdown = Pushdown(ast.Rule("nested"), NESTED)
    assert ending(pushdown, b"a" * 20_000) == b"b" * 20_000


@pytest.mark.parametrize("seed", range(20))
def test_every_beginning_of_a_tree_ends_as_a_tree(seed: int) -> None:
    language = language_of(JsonSchema(TREE), Options(), context_free=True)
    pushdown = Pushdown(language.node, language.rules)
    rng = random.Random(seed)

    def tree(depth: int) -> dict[str, object]:
        children = [tree(depth - 1) for _ in range(rng.randrange(3))] if depth else []
        return {"name": rng.choice(["", "ä", '"x"', "😀\n"]), "children": children}

    text = json.dumps(tree(3), ensure_ascii=False, separators=(",", ":")).encode()
    for cut in range(len(text) + 1):
        place = pushdown.walk(pushdown.start, text[:cut])
        assert place is not None
        finished = text[:cut] + pushdown.ending(place)
        assert set(json.loads(finished)) == {"name", "children"}
        assert len(finished) == cut + pushdown.distance(place)


def random_node(rng: random.Random, depth: int) -> ast.Node:
    if not depth or rng.random() < 0.2:
        return rng.choice([A, B, ast.literal("ab"), ast.literal("aäb"), ast.chars("ab"), ast.chars("bä"), ast.EMPTY])
    parts = [random_node(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    match rng.randrange(5):
        case 0 | 1:
            return ast.concat(*parts)
        case 2:
            return ast.alternation(*parts)
        case 3:
            return ast.repeat(parts[0], *rng.choice([(0, None), (0, 1), (1, 3), (2, None)]))
        case _:
            return ast.Difference(ast.alternation(*parts), ast.alternation(A, ast.literal("ab"), ast.EMPTY))


@pytest.mark.parametrize("seed", range(60))
def test_a_pushdown_without_rules_walks_like_an_automaton(seed: int) -> None:
    rng = random.Random(seed)
    node = random_node(rng, 4)
    try:
        dfa = Dfa.compile(without_products(node), counters=False)
    except GrammarError:  # nothing matches
        pushdown = Pushdown(node, {})
        assert pushdown.distance(pushdown.start) >= INFINITE
        return
    pushdown = Pushdown(node, {})
    for _ in range(40):
        state, place = dfa.start, pushdown.start
        for _ in range(6):
            data = rng.choice(["a", "b", "ab", "ba", "ä", "aä", "bab"]).encode()[: rng.randrange(1, 4)]
            after = dfa.walk(state, data)
            following = pushdown.walk(place, data)
            alive = following is not None and pushdown.distance(following) < INFINITE
            assert (after is not None) == alive
            if after is None or following is None:
                break
            state, place = after, following
            assert pushdown.distance(place) == dfa.ending_bound(state)
            assert place.accepting == bool(dfa.accepting[state[0]])


def test_places_of_a_long_text_give_the_collector_nothing_to_look_at() -> None:
    pushdown = Pushdown(ast.concat(ast.repeat(ast.alternation(DIGIT, A), 0, 5_000), ast.Rule("end")), {"end": B})
    gc.collect()
    before = len(gc.get_objects())
    place = pushdown.walk(pushdown.start, b"1a" * 2_000)
    gc.collect()
    assert place is not None and len(gc.get_objects()) - before < 50


def test_a_rule_that_calls_itself_before_anything_else_is_read_in_the_ways_that_end() -> None:
    endless = Pushdown(ast.concat(B, ast.Rule("endless")), {"endless": ast.concat(ast.Rule("endless"), A)})
    assert ending(endless, b"b") is None
    left = {"left": ast.alternation(ast.concat(ast.Rule("left"), A), B)}  # b, ba, baa, ...
    begun = Pushdown(ast.concat(ast.literal("<"), ast.Rule("left"), ast.literal(">")), left)
    assert [ending(begun, text) for text in (b"<", b"<b", b"<baa")] == [b"b>", b">", b">"]


def test_rules_nest_deeper_than_they_are_followed_at_once() -> None:
    rules = {f"r{i}": ast.concat(ast.Rule(f"r{i + 1}"), ast.Rule("end")) for i in range(40)}
    deep = Pushdown(ast.concat(A, ast.Rule("r0")), {**rules, "r40": B, "end": ast.literal(">")})
    assert [ending(deep, text) for text in (b"a", b"ab", b"ab>")] == [b"b" + b">" * 40, b">" * 40, b">" * 39]
