"""Compiled grammars are kept: compiled once, within a number of bytes, errors not remembered."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graftlm.core.errors import ConfigError, GrammarError, Overloaded, RequestCancelled
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.cache import (
    NUM_THREADS,
    QUICK,
    Compilation,
    GrammarCache,
    compile_cached,
    submit_compile,
)
from graftlm.core.grammar.compile import Grammar, compile_spec
from graftlm.core.grammar.matcher import Matcher
from graftlm.core.grammar.spec import Choices, JsonSchema, Limits, Options, Regex, Spec
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.grammars import BYTES

ROOT = Path(__file__).parents[3]


class Counting:
    """The compiler, held back until it is let go."""

    def __init__(self) -> None:
        self.compiled: list[Spec] = []
        self.go = threading.Event()

    def __call__(self, spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
        self.compiled.append(spec)
        self.go.wait(120)
        return compile_spec(spec, vocabulary, options)


def test_a_constraint_is_compiled_once_however_many_ask_at_the_same_time() -> None:
    compiler = Counting()
    cache = GrammarCache(compiler=compiler)
    futures = [cache.submit(Regex("a+"), BYTES) for _ in range(8)]
    compiler.go.set()
    assert len({id(future.result(120)) for future in futures}) == 1
    assert compiler.compiled == [Regex("a+")]
    assert (cache.num_misses, cache.num_hits) == (1, 7)


def test_options_vocabulary_and_order_of_properties_tell_grammars_apart() -> None:
    cache = GrammarCache()
    ab = JsonSchema({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    ba = JsonSchema({"properties": {"b": {"type": "null"}, "a": {"type": "null"}}})
    other = Vocabulary([*BYTES.tokens, b"ab"], eos_token_id=256)
    asked = [
        cache.get(ab, BYTES),
        cache.get(ba, BYTES),
        cache.get(ab, BYTES, whitespace="single"),
        cache.get(ab, other),
    ]
    assert len(set(map(id, asked))) == 4
    assert cache.get(ab, BYTES) is asked[0]


def test_the_least_recently_used_go_when_there_are_too_many_bytes() -> None:
    size = compile_spec(Choices(["a"]), BYTES, Options()).num_bytes
    cache = GrammarCache(max_bytes=int(2.5 * size))
    a, b = cache.get(Choices(["a"]), BYTES), cache.get(Choices(["b"]), BYTES)
    cache.get(Choices(["a"]), BYTES)
    cache.get(Choices(["c"]), BYTES)
    cache.close()
    assert len(cache) == 2 and cache.num_bytes <= cache.max_bytes
    assert cache.submit(Choices(["a"]), BYTES).result() is a
    assert b.matcher().advance([ord("b")]) == 1  # who holds a grammar keeps it


def test_a_failure_reaches_everyone_and_is_not_remembered() -> None:
    cache = GrammarCache()
    first = cache.submit(Regex("("), BYTES)
    with pytest.raises(GrammarError, match="not closed"):
        first.result(120)
    second = cache.submit(Regex("("), BYTES)
    assert second is not first
    assert isinstance(second.exception(120), GrammarError)


def test_cancelling_the_promise_of_others_does_nothing() -> None:
    compiler = Counting()
    future = GrammarCache(compiler=compiler).submit(Regex("a"), BYTES)
    assert not future.cancel()
    compiler.go.set()
    assert future.result(120).engine == "fsm"


def test_an_unknown_option_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean 'strict'"):
        GrammarCache().submit(Regex("a"), BYTES, stric=True)
    with pytest.raises(ConfigError, match="max_bytes"):
        GrammarCache(max_bytes=-1)


def test_the_cache_of_the_process_is_shared() -> None:
    assert compile_cached(Regex("xyz"), BYTES) is submit_compile(Regex("xyz"), BYTES).result()


def test_memory_is_counted_now_and_then_where_many_grammars_are_kept() -> None:
    counted = 0

    class Small:
        def matcher(self) -> Matcher:
            raise AssertionError

        @property
        def num_bytes(self) -> int:
            nonlocal counted
            counted += 1
            return 10

    cache = GrammarCache(max_bytes=5_000, compiler=lambda spec, vocabulary, options: Grammar("small", Small()))
    for i in range(1_000):
        cache.get(Choices([str(i)]), BYTES)
    cache.close()
    assert len(cache) <= 560 and counted < 12 * 1_000


EXIT = """
from graftlm.core.grammar.cache import submit_compile
from graftlm.core.grammar.spec import Limits, Regex
from tests.grammars import BYTES

limits = Limits(states=1 << 30, memory_bytes=1 << 40, seconds=600)
futures = [submit_compile(Regex(f"(a|b)*a(a|b){{{i + 30}}}"), BYTES, limits=limits) for i in range(64)]
try:
    futures[0].result(1)
except TimeoutError:
    print(sum(future.done() for future in futures))
"""


def test_a_process_that_exits_while_it_compiles_used_to_finish_every_constraint_first() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")  # each of them takes ten minutes


def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    compiler = Counting()
    cache = GrammarCache(compiler=compiler)
    held = [cache.submit(Regex(f"h{i}"), BYTES) for i in range(NUM_THREADS)]
    while len(compiler.compiled) < NUM_THREADS:
        time.sleep(0.001)
    dropped, shared = cache.submit(Regex("d"), BYTES), cache.submit(Regex("s"), BYTES)
    cache.submit(Regex("s"), BYTES)
    for future in (dropped, shared, held[0]):
        assert isinstance(future, Compilation)
        future.abandon()
    compiler.go.set()
    assert shared.result(120).matcher()
    assert held[1].result(120).matcher()
    assert isinstance(held[0].exception(120), RequestCancelled)
    assert isinstance(dropped.exception(120), RequestCancelled)
    assert Regex("d") not in compiler.compiled
    assert cache.get(Regex("d"), BYTES).matcher()


def test_a_compilation_used_to_go_on_after_its_last_request_had_ended() -> None:
    limits = Limits(states=1 << 30, memory_bytes=1 << 40, seconds=600)
    future = GrammarCache().submit(Regex("(a|b)*a(a|b){30}"), BYTES, limits=limits)
    assert isinstance(future, Compilation)
    time.sleep(2 * QUICK.seconds)
    future.abandon()
    assert isinstance(future.exception(60), RequestCancelled)


def test_a_request_that_comes_while_a_compilation_is_given_up_gets_its_grammar() -> None:
    begun, given_up, compiled = threading.Event(), threading.Event(), []

    def compiler(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
        compiled.append(spec)
        if len(compiled) == 1:
            begun.set()
            assert given_up.wait(120)
            try:
                check()
            finally:
                cache.submit(spec, vocabulary)  # after the check, before the cache learns of it
        return compile_spec(spec, vocabulary, options)

    cache = GrammarCache(compiler=compiler)
    future = cache.submit(Regex("[ab]"), BYTES)
    assert isinstance(future, Compilation) and begun.wait(120)
    future.abandon()
    given_up.set()
    assert future.result(120).matcher()
    assert len(compiled) == 2


def test_a_full_queue_refuses_new_constraints_and_serves_known_ones() -> None:
    compiler = Counting()
    cache = GrammarCache(compiler=compiler)
    cache.max_queued = 3
    waiting = [cache.submit(Regex(f"q{i}"), BYTES) for i in range(4)]
    with pytest.raises(Overloaded, match="4 constraints are being compiled"):
        cache.submit(Regex("new"), BYTES)
    assert cache.submit(Regex("q0"), BYTES) is waiting[0]
    compiler.go.set()
    assert all(future.result(120).matcher() for future in waiting)
    assert cache.get(Regex("new"), BYTES).matcher()


def test_slow_constraints_let_quick_ones_pass() -> None:
    slow, done = threading.Event(), []

    def compiler(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
        if spec != Regex("quick"):
            end_s = time.thread_time() + 2 * QUICK.seconds
            while time.thread_time() < end_s or not slow.is_set():
                check()
        done.append(spec)
        return compile_spec(spec, vocabulary, options)

    cache = GrammarCache(compiler=compiler)
    futures = [cache.submit(Regex(f"slow{i}"), BYTES) for i in range(2 * NUM_THREADS)]
    assert cache.submit(Regex("quick"), BYTES).result(60).matcher()
    assert done == [Regex("quick")]
    slow.set()
    assert all(future.result(60).matcher() for future in futures)


def test_large_constraints_leave_nothing_in_the_caches_of_parts() -> None:
    with pytest.raises(GrammarError):
        GrammarCache().get(Regex("(" + "|".join(f"word{i}" for i in range(4000)) + ")(?P<x>"), BYTES)
    held = [
        value.cache_info().currsize
        for name, module in list(sys.modules.items())
        if name.startswith("graftlm.core.grammar.")
        for value in vars(module).values()
        if hasattr(value, "cache_parameters") and value.cache_parameters()["maxsize"] is not None
    ]
    assert held
    assert sum(held) < 100
