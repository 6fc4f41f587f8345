from __future__ import annotations

import random

from hypothesis import given, strategies as st

from graftlm.core.scheduling.stop_strings import StopMatcher


def run(stop: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown, matched = StopMatcher(stop), "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
    return shown + matcher.flush(), matched


def test_a_stop_string_over_several_pieces_is_found_and_not_shown() -> None:
    assert run(["###"], ["answer #", "#", "# more"]) == ("answer ", "###")


def test_text_that_may_begin_a_stop_string_is_held_back_and_then_shown() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("a\n") == ("a", None)
    assert matcher.push("b") == ("\nb", None)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "c"], ["xabcd"]) == ("xab", "c")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert run(["c", "bc"], ["abc"]) == ("a", "bc")


def test_held_text_is_given_back_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_without_stop_strings_all_text_passes() -> None:
    assert run([], ["a", "b"]) == ("ab", None)


def test_after_a_match_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["."])
    matcher.push("a.b")
    assert matcher.push("c") == ("", ".")
    assert matcher.flush() == ""


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_the_answer_does_not_depend_on_how_the_text_is_cut(stop: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run(stop, pieces) == run(stop, list(text)) == run(stop, [text])


@given(stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), text=st.text("abc", max_size=20))
def test_shown_text_is_the_beginning_of_the_text_and_holds_no_stop_string(stop: list[str], text: str) -> None:
    shown, matched = run(stop, [text])
    assert text.startswith(shown)
    assert not any(s in shown for s in stop)
    assert shown == text if matched is None else text.startswith(shown + matched)


def test_many_long_stop_strings_cost_one_transition_a_character() -> None:
    stops = [f"{'a' * 500}{i}" for i in range(200)]
    matcher = StopMatcher(stops)
    text = "a" * 20_000
    shown = "".join(matcher.push(text[i : i + 7]).text for i in range(0, len(text), 7))
    assert len(shown) == len(text) - 500
    assert matcher.push("199 more") == ("", "a" * 500 + "1")


def test_samples_share_the_automaton() -> None:
    first = StopMatcher(["ab" * 3000])
    second = StopMatcher(first.automaton)
    assert first.push("xaba").text == "x"
    assert second.push("y").text == "y"
    assert first.flush() == "aba"


def test_random_stops_match_as_a_search_of_the_whole_text_does() -> None:
    rng = random.Random(5)
    for _ in range(300):
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choice("abc") for _ in range(12))
        ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
        matcher, shown, matched = StopMatcher(stops), "", None
        for character in text:
            piece, matched = matcher.push(character)
            shown += piece
            if matched is not None:
                break
        if ends:
            assert (shown, matched) == (text[: min(ends)[1]], min(ends)[2])
        else:
            assert shown + matcher.flush() == text
