"""Time and memory of one constraint: checked in every phase of compiling, not by counts of states alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from graftlm import JsonSchema, Regex, Vocabulary
from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar import Grammar, Limits, budget
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.budget import (
    CREDIT_S,
    LONG_SHARE,
    RECENT_S,
    SHARE,
    TURN_S,
    Unwanted,
    Yielding,
    check,
    limited,
    while_waited_for,
)
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse
from tests.grammars import BYTES, compiled

EXPLODING = "(a|b)*a(a|b){18}"
NO_TIME = Limits(states=10_000_000, seconds=1e-6)


def test_outside_of_a_budget_nothing_is_limited() -> None:
    check(1 << 60)


def test_an_inner_budget_ends_no_later_than_the_outer_one() -> None:
    with limited(NO_TIME), limited(Limits()), pytest.raises(GrammarError, match="longer than 5 s"):
        check()


class Clocks:
    """A thread's processor time, and the time, as a test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processor = self.wall = 100.0
        monkeypatch.setattr(budget.time, "thread_time", lambda: self.processor)
        monkeypatch.setattr(budget.time, "monotonic", lambda: self.wall)


def test_time_that_a_thread_waits_for_a_busy_machine_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        clocks = Clocks(patched)
        with limited(Limits(seconds=5)), limited(Limits(seconds=7)):
            clocks.wall, clocks.processor = 149.0, 104.9
            check()
            clocks.processor = 105.1
            with pytest.raises(GrammarError, match="longer than 7 s to compile; .* raise limits.seconds"):
                check()


def test_a_thread_that_gets_no_processor_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        clocks = Clocks(patched)
        with limited(Limits(seconds=5), share=0.5):
            clocks.wall = 162.4
            check()
            clocks.wall = 162.6
            with pytest.raises(GrammarError, match="longer than 125 s by the clock .* this machine is busy; try again"):
                check()


def test_memory_is_limited_where_states_are_not() -> None:
    with pytest.raises(GrammarError, match="more than 1,000,000 bytes.*raise limits.memory_bytes"):
        compiled(Regex(EXPLODING), limits=Limits(states=10_000_000, memory_bytes=1_000_000))
    with pytest.raises(ConfigError, match="memory_bytes is 0"):
        Limits(memory_bytes=0)


def test_a_product_is_limited_as_well() -> None:
    both = nodes.Intersection((parse("[ab]{0,90}x*"), parse("(ab?){0,70}x")))
    with limited(Limits(memory_bytes=20_000)), pytest.raises(GrammarError, match="more than 20,000 bytes"):
        product.product(both)


def test_so_is_the_search_for_spellings_with_few_tokens() -> None:
    words = Vocabulary([b"ab", b"abc", b"c", b""], eos_token_id=3)
    with pytest.raises(GrammarError, match="longer than 1e-06 s"):
        Grammar.compile(Regex("(ab|abc)*"), words, limits=NO_TIME)


def test_a_schema_whose_automaton_takes_too_long_has_time_left_for_llguidance() -> None:
    schema = JsonSchema({"type": "string", "pattern": "^(a|b)*a(a|b){22}$"})
    assert compiled(schema, limits=Limits(states=10_000_000, seconds=2)).engine == "llguidance"


def test_no_vocabulary_is_needed_to_say_that_time_is_spent() -> None:
    with pytest.raises(GrammarError, match="simplify it or raise limits.seconds"):
        Grammar.compile(Regex(EXPLODING), BYTES, limits=NO_TIME)


def _nested(schema: dict[str, Any], wrap: Callable[[dict[str, Any]], dict[str, Any]], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        schema = wrap(schema)
    return schema


@pytest.mark.parametrize(
    ("wrap", "good", "bad"),
    [
        (lambda inner: {"type": "array", "items": inner}, b"[" * 60 + b"1" + b"]" * 60, b"[" * 59 + b"1"),
        (lambda inner: {"oneOf": [inner, {"type": "array"}]}, b"1", b'"a"'),
        (lambda inner: {"anyOf": [inner, {"type": "array"}]}, b"[1,[2]]", b"{}"),
    ],
)
def test_schemas_may_nest_as_deep_as_the_limit(wrap: Any, good: bytes, bad: bytes) -> None:
    schema = JsonSchema(_nested({"type": "integer"}, wrap, 60))
    grammar = Grammar.compile(schema, BYTES, limits=Limits(seconds=60))
    matcher = grammar.matcher()
    assert matcher.advance(list(good)) == len(good) and matcher.accepting
    assert grammar.matcher().advance(list(bad)) != len(bad)


class Paused:
    """Compilations beside requests, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.slept_s = 0.0
        self.is_busy = False
        monkeypatch.setattr(budget.time, "sleep", self._sleep)
        monkeypatch.setattr(budget.time, "monotonic", lambda: self.now_s)
        self.yielding = Yielding(lambda: self.is_busy)

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds

    def share_of(self, num_turns: int) -> float:
        """Work for some turns and return the share of the time that was work."""
        worked_s, slept_s = num_turns * 1.01 * TURN_S, self.slept_s
        for _ in range(num_turns):
            self.now_s += 1.01 * TURN_S
            check()
        return worked_s / (worked_s + self.slept_s - slept_s)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Paused:
    return Paused(monkeypatch)


def test_compilations_pause_while_requests_run_and_share_the_time_that_is_left(paused: Paused) -> None:
    with paused.yielding(), limited(Limits(seconds=1000)):
        assert paused.share_of(100) == 1
        paused.is_busy = True
        assert paused.share_of(100) == pytest.approx(SHARE, rel=0.02)
        paused.is_busy = False
        paused.now_s += 2 * RECENT_S
        paused.slept_s = 0
        check()
    check()
    assert not paused.slept_s


def test_compilations_that_work_on_beside_requests_get_less(paused: Paused) -> None:
    paused.is_busy = True
    with paused.yielding(), limited(Limits(seconds=1000)):
        assert paused.share_of(round(0.9 * CREDIT_S / TURN_S)) == pytest.approx(SHARE, rel=0.1)
        paused.share_of(round(CREDIT_S / TURN_S))
        assert paused.share_of(200) == pytest.approx(LONG_SHARE, rel=0.1)
        paused.now_s += CREDIT_S / LONG_SHARE
        assert paused.share_of(100) == pytest.approx(SHARE, rel=0.02)


def test_a_compilation_that_nobody_waits_for_takes_the_credit_along(paused: Paused) -> None:
    paused.is_busy = True
    gone = SimpleNamespace(num_waiting=1)
    with suppress(Unwanted), paused.yielding(), limited(Limits(seconds=1000)), while_waited_for(gone):
        assert paused.share_of(100) > LONG_SHARE
        gone.num_waiting = 0
        check()
    with paused.yielding(), limited(Limits(seconds=1000)):
        assert paused.share_of(100) == pytest.approx(LONG_SHARE, rel=0.2)
