from __future__ import annotations

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
