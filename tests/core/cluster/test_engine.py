"""The engine over replicas. The replicas are real, on event loops of this process; each dies when a test says so."""

from __future__ import annotations

import asyncio
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.cluster.engine import RESTARTS, ReplicaEngine
from graftlm.core.cluster.replica import Event, Key, Replica
from graftlm.core.errors import EngineError, ModelError
from graftlm.core.metrics import Stats
from graftlm.core.request import Begun, Chunk, Request
from graftlm.plugins import manager
from graftlm.plugins.hookspecs import Register, hookimpl
from tests.models import byte_tokenizer, tiny_model

HEADS = [f"House {name}. " + "Keep to the rules of the house. " * 5 for name in "abcd"]
PROMPTS = [f"{head}Question {i}?" for i in range(4) for head in HEADS]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


class LoopMember:
    """A replica on an event loop of its own. What passes is pickled, as between processes."""

    def __init__(self, heard: Callable[[list[Event] | BaseException], None], seed: int = 0) -> None:
        self._heard = heard
        self.dead = self.deadly = False
        self._posting = threading.Lock()
        self._stopped = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

        async def make() -> Replica:
            options = {"tokenizer": byte_tokenizer(), "dtype": "float32"}
            return Replica(tiny_model(seed=seed, max_position_embeddings=4096), options)  # type: ignore[arg-type]

        self.replica = self._post(make()).result()

    def load(self) -> dict[str, str]:
        facts = self._post(self.replica.load()).result()
        self._post(self._listen())
        return facts  # type: ignore[no-any-return]

    async def _listen(self) -> None:
        async for events in self.replica.events():
            if self.dead:
                return
            self._heard(pickle.loads(pickle.dumps(events)))

    def add(self, requests: list[tuple[Key, Request]]) -> None:
        if self.deadly:
            self.die()
            return
        self._post(self.replica.add(pickle.loads(pickle.dumps(requests))))

    def cancel(self, keys: list[Key]) -> None:
        self._post(self.replica.cancel(keys))

    def stats(self) -> Stats:
        if self.dead:
            raise EngineError("dead")
        return self._post(self.replica.stats()).result()  # type: ignore[no-any-return]

    def call(self, method: str, *arguments: Any) -> None:
        self._post(getattr(self.replica, method)(*arguments)).result()

    def die(self) -> None:
        """As a killed process does: at once, in the middle of anything."""
        self.dead = True
        self._heard(EngineError("killed"))

    def kill(self) -> None:
        self.dead = True
        if self._thread.is_alive():
            self.replica.runtime.close()
            with self._posting:
                if not self._stopped:
                    self.loop.call_soon_threadsafe(self.loop.stop)
                self._stopped = True
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(asyncio.sleep(0))  # what was scheduled before the end becomes a task
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _post(self, coroutine: Any) -> Future[Any]:
        """What is posted after the end would never run, nor be awaited: it is refused."""
        with self._posting:
            if self._stopped:
                coroutine.close()
                raise EngineError("the replica was killed")
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class LoopCluster:
    """`facts_of` may change what a replica tells of itself, or raise; `restarts` allows replicas after the first.

    deadly  whatever reaches a replica ends it
    alike   False gives each replica other weights, as rounding that differs gives other tokens
    """

    def __init__(self, num: int, facts_of: Callable[[int, dict[str, str]], dict[str, str]] = lambda i, facts: facts):
        self.members: list[LoopMember] = []
        self.num = num
        self.restarts = True
        self.deadly = False
        self.alike = True
        self.closed = False
        self._facts_of = facts_of
        self._lock = threading.Lock()

    def start(self, heard: Callable[[list[Event] | BaseException], None]) -> tuple[LoopMember, dict[str, str]]:
        with self._lock:
            number = len(self.members)
            if self.closed or (number >= self.num and not self.restarts):
                raise EngineError("no room for another replica")
            member = LoopMember(heard, 0 if self.alike else number)
            member.deadly = self.deadly
            self.members.append(member)
            if self.closed:
                member.kill()
            return member, self._facts_of(number, {**member.load(), "fingerprint": "same"})

    def close(self) -> None:
        self.closed = True
        for member in list(self.members):
            member.kill()


@contextmanager
def replicas(cluster: LoopCluster, **options: Any) -> Iterator[gl.Runtime]:
    """A runtime whose engine is a ReplicaEngine over `cluster`."""

    class Plugin:
        @hookimpl
        def graftlm_register_engines(self, register: Register) -> None:
            def build(model: Any, config: Any, *, tokenizer: Any, wake: Callable[[], None]) -> ReplicaEngine:
                return ReplicaEngine(
                    cluster, cluster.num, wake=wake, seed=config.seed, step_tokens=config.max_step_tokens
                )

            build.takes_constraints = False  # type: ignore[attr-defined]
            register("loops", build, "replicas on event loops")

    registry = manager.load()
    registry.add("loops", Plugin())
    try:
        model = tiny_model(max_position_embeddings=4096)
        with gl.Runtime(model, tokenizer=byte_tokenizer(), engine="loops", **options) as runtime:
            yield runtime
    finally:
        cluster.close()
        registry.remove("loops")


def alone() -> gl.Runtime:
    return gl.Runtime(tiny_model(max_position_embeddings=4096), tokenizer=byte_tokenizer(), dtype="float32")


def until(reached: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_replicas_answer_as_one_runtime_and_share_the_prefixes_out() -> None:
    with alone() as one:
        expected = [answer.token_ids for answer in one.generate(PROMPTS, **GREEDY)]
        shorter = one.stats().computed_tokens
    cluster = LoopCluster(2)
    with replicas(cluster, max_step_tokens=512) as runtime:
        assert [answer.token_ids for answer in runtime.generate(PROMPTS, **GREEDY)] == expected
        stats = runtime.stats()
        each = [member.stats().computed_tokens for member in cluster.members]
    assert stats.requests == len(PROMPTS)
    assert stats.computed_tokens == sum(each)
    assert sum(each) <= 1.3 * shorter
    assert min(each) > 0


def test_seeds_are_fixed_before_a_request_leaves() -> None:
    with replicas(LoopCluster(2), seed=3) as runtime:
        first = runtime.generate(PROMPTS[:4], max_tokens=8, temperature=1.0)
    with replicas(LoopCluster(1), seed=3) as runtime:
        second = runtime.generate(PROMPTS[:4], max_tokens=8, temperature=1.0)
    assert [a.token_ids for a in first] == [a.token_ids for a in second]


@pytest.mark.parametrize("chunks_before", [0, 1, 5, 11])
def test_a_stream_survives_the_death_of_its_replica_without_a_gap_or_a_repeat(chunks_before: int) -> None:
    with alone() as one:
        expected = one.generate(PROMPTS[0], max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    cluster = LoopCluster(2)
    with replicas(cluster) as runtime:
        runtime.load()
        options = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}
        stream = runtime.stream(PROMPTS[0], **options)
        read = [next(stream) for _ in range(chunks_before)]
        busy = next((m for m in cluster.members if m.stats().requests), cluster.members[0])
        busy.die()
        read += list(stream)
    assert [i for chunk in read for i in chunk.token_ids] == expected.token_ids
    assert "".join(chunk.text for chunk in read) == expected.text
    assert read[-1].usage is not None


def test_replicas_that_round_differently_continue_each_others_streams() -> None:
    cluster = LoopCluster(2)
    cluster.alike = False
    plain: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    rich = gl.SamplingParams(logprobs=True, top_logprobs=2, n=2, ignore_eos=True, **plain)
    kinds = [rich, gl.SamplingParams(regex="[a-z]{36}END", **plain), gl.SamplingParams(ignore_eos=True, **plain)]
    with replicas(cluster) as runtime:
        runtime.load()
        chunks: list[list[Chunk]] = [[] for _ in range(12)]
        requests = [
            Request(PROMPTS[i], kinds[i % 3], stream=True, on_chunk=chunks[i].append) for i in range(len(chunks))
        ]
        futures = runtime.submit_many(requests)
        until(lambda: all(len(each) >= 4 for each in chunks))
        before = runtime.stats().completion_tokens
        cluster.members[0].die()
        assert runtime.stats().completion_tokens >= before  # a counter never decreases
        done = [future.result(60) for future in futures]
        assert runtime.stats().completion_tokens >= before
    for i, answer in enumerate(done):
        for index, one in enumerate(answer.completions or [answer]):
            own = [chunk for chunk in chunks[i] if chunk.index == index]
            assert [token for chunk in own for token in chunk.token_ids] == one.token_ids
            assert "".join(chunk.text for chunk in own) == one.text
            assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == [one.finish_reason]
            if kinds[i % 3].logprobs:
                assert [token for chunk in own for token in chunk.logprobs or ()] == one.logprobs
            if kinds[i % 3].regex:
                assert re.fullmatch("[a-z]{36}END", one.text)
            else:
                assert len(one.token_ids) == 40


@pytest.mark.parametrize("reason", ["stop", "length", None])
def test_an_answer_continues_from_any_of_its_tokens(reason: Any) -> None:
    """The ends of answers too: a stop string, an end of the budget, one that is delivered before the death."""
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    with alone() as one:
        free = one.generate(PROMPTS[0], **options)
        if reason == "stop":
            options["stop"] = [free.text[8:10]]
        expected = one.generate(PROMPTS[0], **options)
        for cut in (1, len(expected.token_ids) - 1, len(expected.token_ids)):
            begun = Begun(expected.token_ids[:cut])
            if reason and cut == len(expected.token_ids):
                begun.finish_reason = expected.finish_reason
            chunks: list[Chunk] = []
            request = Request(
                PROMPTS[0],
                gl.SamplingParams.from_options(**options),
                stream=True,
                on_chunk=chunks.append,
                begun=(begun,),
            )
            found = one.submit(request).result(60)
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert (found.finish_reason, found.stop) == (expected.finish_reason, expected.stop)
            assert [i for chunk in chunks for i in chunk.token_ids] == expected.token_ids[cut:]


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.1])
def test_every_request_is_answered_whenever_a_replica_dies(after_s: float) -> None:
    with alone() as one:
        expected = [answer.token_ids for answer in one.generate(PROMPTS, **GREEDY)]
    cluster = LoopCluster(2)
    with replicas(cluster) as runtime:
        runtime.load()
        futures = runtime.submit_many([Request(p, gl.SamplingParams(**GREEDY)) for p in PROMPTS])
        time.sleep(after_s)
        cluster.members[0].die()
        assert [future.result(60).token_ids for future in futures] == expected
        until(lambda: len(cluster.members) == 3)  # another one takes its place
        assert runtime.generate(PROMPTS[0], **GREEDY).token_ids == expected[0]


def test_requests_wait_for_a_new_replica_where_all_have_died() -> None:
    with alone() as one:
        expected = [answer.token_ids for answer in one.generate(PROMPTS, **GREEDY)]
    cluster = LoopCluster(2)
    with replicas(cluster) as runtime:
        runtime.load()
        futures = runtime.submit_many([Request(p, gl.SamplingParams(**GREEDY)) for p in PROMPTS])
        for member in cluster.members[:2]:
            member.die()
        assert [future.result(60).token_ids for future in futures] == expected
        until(lambda: runtime.stats().replicas == 2)
        assert runtime.stats().restarts == 2


def test_a_replica_that_dies_of_every_request_is_not_started_for_ever() -> None:
    cluster = LoopCluster(1)
    with replicas(cluster) as runtime:
        runtime.load()
        cluster.deadly = cluster.members[0].deadly = True
        for _ in range(2):
            with pytest.raises(EngineError, match="the request ended 2 replicas: killed"):
                runtime.generate(PROMPTS[0], **GREEDY)
        until(lambda: runtime.unavailable(1.0))
        assert runtime.unavailable(1.0) == "the engine stopped: no replica is left: killed"
        assert len(cluster.members) == 1 + RESTARTS
        with pytest.raises(EngineError, match="no replica is left"):
            runtime.generate(PROMPTS[0], **GREEDY)


def test_with_no_replica_left_requests_end_with_the_cause() -> None:
    cluster = LoopCluster(2)
    with replicas(cluster) as runtime:
        runtime.load()
        cluster.restarts = False
        futures = runtime.submit_many([Request(p, gl.SamplingParams(max_tokens=2000)) for p in PROMPTS])
        until(lambda: any(member.stats().running for member in cluster.members))
        for member in cluster.members:
            member.die()
        errors = [future.exception(60) for future in futures]
        assert {type(error) for error in errors} == {EngineError}
        with pytest.raises(EngineError, match="no replica is left"):
            runtime.generate("x", max_tokens=1)


def test_a_cancelled_request_ends_there_too() -> None:
    cluster = LoopCluster(1)
    with replicas(cluster) as runtime:
        runtime.load()
        (member,) = cluster.members
        with runtime.stream(PROMPTS[0], max_tokens=3000, ignore_eos=True) as stream:
            next(stream)
            assert member.stats().slots_in_use > 0
        until(lambda: member.stats().slots_in_use == 0)


def test_what_a_replica_refuses_is_the_requests_own_error() -> None:
    with replicas(LoopCluster(1)) as runtime:
        with pytest.raises(gl.GrammarError):
            runtime.generate("x", regex="a((")
        with pytest.raises(gl.RequestTooLong):
            runtime.generate("x " * 5000)
        assert runtime.generate("Age: ", regex="[0-9]{3}", max_tokens=8).text.isdigit()


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_listener_that_raises_used_to_end_the_engine_for_all(kind: type[BaseException]) -> None:
    def fail(given: Any) -> None:
        raise kind("a caller's code")

    cluster = LoopCluster(1)
    with replicas(cluster) as runtime:
        params = gl.SamplingParams.from_options(**GREEDY | {"max_tokens": 2000})
        raising = runtime.submit(Request(PROMPTS[0], params, stream=True, on_chunk=fail))
        with pytest.raises(kind, match="a caller's code"):
            raising.result(60)
        until(lambda: cluster.members[0].stats().slots_in_use == 0)  # it ended there too
        done = runtime.submit(Request(PROMPTS[1], gl.SamplingParams(max_tokens=60, ignore_eos=True)))
        done.add_done_callback(fail)
        assert done.result(60).finish_reason == "length"
        assert runtime.generate(PROMPTS[2], **GREEDY).finish_reason == "length"


def test_a_request_that_cannot_be_pickled_used_to_end_the_engine_for_all() -> None:
    with replicas(LoopCluster(1)) as runtime:
        fit, unfit = gl.SamplingParams.from_options(**GREEDY), gl.SamplingParams(constraint=threading.Lock())
        first, second = runtime.submit_many([Request(PROMPTS[0], fit), Request(PROMPTS[1], unfit)])
        with pytest.raises(EngineError, match="cannot be sent to a replica: .*must survive pickle"):
            second.result(60)
        assert first.result(60).finish_reason == "length"


def test_requests_above_the_bound_wait_at_home_and_are_answered() -> None:
    cluster = LoopCluster(2)
    with replicas(cluster, max_step_tokens=64) as runtime:
        answers = runtime.generate(PROMPTS, **GREEDY)
        assert [answer.finish_reason for answer in answers] == ["length"] * len(PROMPTS)
        assert runtime.stats().waiting == 0


def test_a_pinned_prefix_is_unpinned_where_it_is() -> None:
    cluster = LoopCluster(2)
    with replicas(cluster) as runtime:
        pin = runtime.warm(PROMPTS[0])
        runtime.clear_cache()
        assert runtime.stats().slots_cached > 0
        pin.unpin()
        runtime.clear_cache()
        until(lambda: runtime.stats().slots_cached == 0)


def test_the_pins_of_a_replica_go_with_it() -> None:
    with replicas(LoopCluster(2)) as runtime:
        engine: Any = runtime.load()._thread.engine
        pin = runtime.warm(PROMPTS[0])
        ((replica, _),) = engine._pins.values()
        engine.members[replica].die()
        until(lambda: not engine._pins)
        pin.unpin()
        assert runtime.generate(PROMPTS[0], **GREEDY).finish_reason == "length"


def test_replicas_that_differ_are_refused_by_name() -> None:
    def facts_of(number: int, facts: dict[str, str]) -> dict[str, str]:
        return {**facts, "versions": f"torch {number}", "node": f"node {number}"}

    with replicas(LoopCluster(2, facts_of)) as runtime, pytest.raises(ModelError, match=r"versions: torch \d on node"):
        runtime.load()


def test_a_replica_that_cannot_start_ends_the_load_with_its_reason() -> None:
    def facts_of(number: int, facts: dict[str, str]) -> dict[str, str]:
        raise ModelError("no room for the weights")

    with replicas(LoopCluster(2, facts_of)) as runtime, pytest.raises(ModelError, match="no room"):
        runtime.load()


def test_more_replicas_than_one_need_an_engine_for_them() -> None:
    with pytest.raises(gl.ConfigError, match="use engine='ray'"):
        gl.Runtime("sprout", replicas=2)
    with suppress(gl.GraftError):
        gl.Runtime("sprout", engine="ray", replicas=2).close()
