"""Steps that are launched before the last one's tokens are known give the tokens of steps that wait for them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.errors import EngineError, GrammarError, RequestCancelled
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Chunk, Completion, Request, Submission
from graftlm.core.runtime import Runtime
from graftlm.core.sampling.device_sampler import DeviceSampler, Drawn
from graftlm.core.scheduling import step_loop
from graftlm.core.sequence import Sequence, SequenceGroup
from graftlm.kernels.wire_plan import WirePlan
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

NEW = 12
ALWAYS_AHEAD, NEVER_AHEAD = (2.0, 0.0), (-1.0, 0.0)
"""What a wait costs, if it costs more than any step, or less than nothing."""

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["red", "green"]}},
    "required": ["a", "b"],
}


def runtime(kind: str = "llama", **options: Any) -> Runtime:
    options.setdefault("cache", CacheConfig(max_tokens=4096))
    options.setdefault("overlap", True)
    return Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), **options)


def family(num: int, shared: int = 40, own: int = 9) -> list[list[int]]:
    start = random_prompt(shared, seed=1)
    return [start + random_prompt(own + i % 5, seed=100 + i) for i in range(num)]


def mixed_load() -> list[Request]:
    """Every kind of request that a step can hold, of prompts that share a beginning."""
    kinds: list[dict[str, Any]] = [
        GREEDY,
        {"temperature": 0.8, "seed": 3, "max_tokens": 9, "ignore_eos": True},
        {"temperature": 1.1, "seed": 4, "top_k": 7, "max_tokens": 15, "ignore_eos": True},
        {"temperature": 1.0, "seed": 5, "top_p": 0.8, "max_tokens": 11},
        {"temperature": 1.0, "seed": 6, "min_p": 0.05, "max_tokens": 10},
        {"temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9, "max_tokens": 10},
        {"temperature": 0, "max_tokens": 14, "repetition_penalty": 1.3, "ignore_eos": True},
        {"temperature": 0, "max_tokens": 6, "logprobs": True, "ignore_eos": True},
        {"temperature": 1.0, "seed": 8, "max_tokens": 7, "n": 3},
        {"temperature": 1.0, "seed": 9, "max_tokens": 40, "json_schema": SCHEMA},
        {"temperature": 0, "max_tokens": 8, "regex": "[a-f]{3,6}"},
        {"temperature": 1.0, "seed": 10, "max_tokens": 20, "min_tokens": 5},
        {"temperature": 0, "max_tokens": 30, "stop": ("e", "\x11")},
    ]
    prompts = family(3 * len(kinds))
    return [Request(prompt, SamplingParams(**kinds[i % len(kinds)])) for i, prompt in enumerate(prompts)]


def said(completion: Completion) -> list[tuple[list[int], str, str]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in completion.completions or [completion]]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": CacheConfig(max_tokens=2048, enabled=False)},
        {"max_step_tokens": 16, "max_batch": 8},
        {"cache": CacheConfig(max_tokens=160), "max_batch": 4},
        {"cache": CacheConfig(max_tokens=2048, page_size=16)},
    ],
    ids=["plain", "no cache", "chunked", "evicting", "pages of 16"],
)
def test_greedy_tokens_equal_transformers(kind: str, options: dict[str, Any]) -> None:
    prompts = family(7) + [random_prompt(23, seed=5)]
    expected = [greedy_reference(tiny_model(kind), p, NEW) for p in prompts]
    with runtime(kind, **options) as rt:
        for _ in range(2):
            assert [c.token_ids for c in rt.generate(prompts, **GREEDY)] == expected
        rt._thread.call(lambda engine: engine.check_integrity())


@pytest.mark.parametrize(
    "options",
    [{}, {"max_step_tokens": 24, "max_batch": 6}, {"cache": CacheConfig(max_tokens=400), "max_batch": 12}],
    ids=["roomy", "chunked", "tight"],
)
def test_a_mixed_load_gets_the_answers_of_steps_that_wait(options: dict[str, Any]) -> None:
    answers = []
    for overlap in (False, True):
        with runtime(overlap=overlap, **options) as rt:
            answers.append([said(future.result()) for future in rt.submit_many(mixed_load())])
            rt._thread.call(lambda engine: engine.check_integrity())
            stats = rt.stats()
            assert (stats.slots_in_use, stats.slots_free + stats.slots_cached) == (0, stats.slots_total)
    assert answers[0] == answers[1]


def test_a_cold_batch_computes_its_shared_prefix_once() -> None:
    prompts = family(32, shared=200, own=10)
    with runtime() as rt:
        rt.generate(prompts, **GREEDY)
        stats = rt.stats()
    assert stats.computed_tokens <= 1.01 * (200 + sum(len(p) - 200 for p in prompts))


def test_what_was_said_is_cached_with_its_last_known_token() -> None:
    prompt = random_prompt(30)
    with runtime() as rt:
        said = rt.generate(prompt, **GREEDY).token_ids
        longer = [*prompt, *said, 7]
        again = rt.generate(longer, **GREEDY)
    assert again.usage.cached_tokens >= len(longer) - 2
    assert again.token_ids == greedy_reference(tiny_model(), longer, NEW)


# -- one step at a time -------------------------------------------------------------------------------------------


class Listener:
    def __init__(self) -> None:
        self.completion: Completion | None = None
        self.error: BaseException | None = None

    def on_chunk(self, chunk: Chunk) -> None: ...

    def on_finish(self, completion: Completion) -> None:
        self.completion = completion

    def on_error(self, error: BaseException) -> None:
        self.error = error


def stepping(rt: Runtime, body: Callable[[Any], None]) -> None:
    """Run `body` on the engine's thread, which takes no steps of its own meanwhile."""
    rt.load()
    rt._thread.call(body)


def queue(rt: Runtime, engine: Any, prompt: list[int], **sampling: Any) -> tuple[Listener, SequenceGroup]:
    listener = Listener()
    request = Request(prompt, SamplingParams(**sampling))
    (prepared,) = rt._source.prepare([request])
    submission = Submission(request, listener, *prepared)  # type: ignore[misc]
    engine.add([submission])
    return listener, engine.requests._groups[submission.id]


def test_a_step_makes_few_objects_that_the_garbage_collector_counts() -> None:
    num_rows = 40
    made: list[int] = []

    def body(engine: Any) -> None:
        for i in range(num_rows):
            queue(rt, engine, random_prompt(9, seed=i), **GREEDY)
        for _ in range(3):
            engine.step()
        forward = engine.runner.forward

        def counted(plan: WirePlan) -> torch.Tensor:
            made.append(gc.get_count()[0])  # the rows of two steps live now, and one of them is new
            return forward(plan)

        engine.runner.forward = counted
        gc.collect()
        engine.step()

    with runtime() as rt, collecting_nothing():
        stepping(rt, body)
    assert made[0] < 2.5 * num_rows


@contextmanager
def collecting_nothing() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_an_ended_request_held_is_freed_without_the_garbage_collector() -> None:
    def num_sequences() -> int:
        rt.generate([5], temperature=0, max_tokens=1)  # the kernels keep the plan of the last step
        return sum(type(thing) is Sequence for thing in gc.get_objects())

    with runtime() as rt:
        rt.generate(family(4), **GREEDY)
        gc.collect()
        before = num_sequences()
        with collecting_nothing():
            rt.generate(family(4), **GREEDY | {"n": 2, "temperature": 1})
            assert num_sequences() == before


@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_that_turns_out_bad_while_a_step_is_made_ends_its_own_request_only(overlap: bool) -> None:
    bad: Future[Any] = Future()
    with runtime(overlap=overlap) as rt:

        def body(engine: Any) -> tuple[Listener, Listener]:
            schedule = engine.scheduler.schedule

            def schedule_late() -> Any:  # it is compiled after grammars were opened, before the rows are chosen
                if not bad.done():
                    bad.set_exception(GrammarError("nothing can satisfy this"))
                return schedule()

            engine.scheduler.schedule = schedule_late
            good, _ = queue(rt, engine, random_prompt(9), **GREEDY)
            failed = Listener()
            request = Request(random_prompt(8, seed=5), SamplingParams(**GREEDY))
            engine.add([Submission(request, failed, PromptInput(np.array(request.prompt, np.int32)), bad)])
            while not engine.idle:
                engine.step()
            engine.check_integrity()
            return good, failed

        rt.load()
        good, failed = rt._thread.call(body)
    assert good.completion is not None and good.completion.token_ids == greedy_reference(
        tiny_model(), random_prompt(9), NEW
    )
    assert isinstance(failed.error, GrammarError)


def recording(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch, events: list[str], prompt: list[int], **sampling: Any
) -> Callable[[Any], None]:
    """Run a request step by step and write down when steps are launched and read."""

    def body(engine: Any) -> None:
        forward, result = engine.runner.forward, Drawn.result

        def launched(plan: WirePlan) -> torch.Tensor:
            events.append("launch")
            return forward(plan)

        def read(drawn: Drawn) -> Any:
            events.append("read")
            return result(drawn)

        monkeypatch.setattr(engine.runner, "forward", launched)
        monkeypatch.setattr(Drawn, "result", read)
        _, group = queue(rt, engine, prompt, **sampling)
        if (grammar := group.sequences[0].grammar) is not None:
            grammar.result()
        while not engine.idle:
            engine.step()

    return body


def test_a_step_is_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with runtime() as rt:
        stepping(rt, recording(rt, monkeypatch, events, random_prompt(9), **GREEDY | {"max_tokens": 3}))
    # three tokens need three steps: the last one is known to be the last
    assert events == ["launch", "launch", "read", "launch", "read", "read"]


WORDS = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": ["red", "green"]}, "c": {"type": "integer"}},
    "required": ["a", "b", "c"],
}


def constrained_load() -> list[Request]:
    """Texts with and without forced tokens, ended by their grammar, a stop or their length, and closed there."""
    kinds: list[dict[str, Any]] = [
        {"json_schema": WORDS, "max_tokens": 60},
        {"json_schema": WORDS, "max_tokens": 34, "temperature": 1.5},
        {"json_schema": WORDS, "max_tokens": 31, "temperature": 1.2, "top_k": 9},
        {"json_schema": WORDS, "max_tokens": 25, "close_on_length": False, "temperature": 1.0},
        {"regex": "([a-f]{2}, ){3,9}end", "max_tokens": 30, "temperature": 1.0, "n": 2},
        {"regex": "[a-z ]*", "max_tokens": 20, "stop": ("e", "q"), "temperature": 1.0},
        {"choices": ["alpha one", "alpha two", "beta"], "max_tokens": 20},
        {"temperature": 0, "max_tokens": 20, "ignore_eos": True},
        {"regex": "[0-9]{4,20}", "max_tokens": 12, "logprobs": True},
    ]
    return [Request(p, SamplingParams(seed=i, **kinds[i % len(kinds)])) for i, p in enumerate(family(2 * len(kinds)))]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_step_tokens": 24, "max_batch": 6}, {"cache": CacheConfig(max_tokens=400), "max_batch": 8}],
    ids=["roomy", "chunked", "tight"],
)
@pytest.mark.parametrize(
    "host_time", [ALWAYS_AHEAD, step_loop.HOST_TIME, NEVER_AHEAD], ids=["always", "by what was seen", "never"]
)
def test_rows_under_a_grammar_get_the_same_answers_when_they_run_ahead(
    host_time: tuple[float, float], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "HOST_TIME", host_time)
    answers = []
    for overlap in (False, True):
        with runtime(overlap=overlap, **options) as rt:
            answers.append([said(future.result()) for future in rt.submit_many(constrained_load())])
            rt._thread.call(lambda engine: engine.check_integrity())
            assert rt.stats().slots_in_use == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("host_time", "ahead"), [(ALWAYS_AHEAD, True), (NEVER_AHEAD, False)])
def test_a_row_under_a_grammar_is_launched_before_its_last_token_is_read_unless_that_loses_more(
    host_time: tuple[float, float], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "HOST_TIME", host_time)
    events: list[str] = []
    with runtime() as rt:
        body = recording(rt, monkeypatch, events, random_prompt(9), temperature=0, max_tokens=3, regex="[a-f]{9}")
        stepping(rt, body)
    assert events == (["launch", "launch", "read", "launch", "read", "read"] if ahead else ["launch", "read"] * 3)


def test_an_ending_in_the_place_of_a_token_that_ran_ahead_is_not_cached_as_if_it_had_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_loop, "HOST_TIME", ALWAYS_AHEAD)
    prompt = random_prompt(30, seed=3)
    with runtime() as rt:
        closed = rt.generate(prompt, regex="([a-z]{3}[0-9]{6})*!", max_tokens=24, seed=1, close_on_length=True)
        assert closed.finish_reason == "length" and closed.text.endswith("!")
        longer = [*prompt, *closed.token_ids, 7]
        again = rt.generate(longer, **GREEDY)
    assert again.usage.cached_tokens > len(prompt)
    assert again.token_ids == greedy_reference(tiny_model(), longer, NEW)


def test_a_text_that_ends_has_run_one_step_more_and_leaks_nothing() -> None:
    prompt = random_prompt(11, seed=2)
    tokens = greedy_reference(tiny_model(), prompt, NEW)
    end = tokens[4]
    with runtime() as rt:
        done = rt.generate(prompt, temperature=0, max_tokens=NEW, stop_token_ids=[end], ignore_eos=True)
        stats = rt.stats()
        rt._thread.call(lambda engine: engine.check_integrity())
    expected = tokens[: tokens.index(end) + 1]
    assert done.token_ids == expected
    assert stats.steps == len(expected) + 1
    assert stats.slots_in_use == 0


def test_cancelling_while_a_token_is_on_its_way_frees_the_slots_and_others_go_on() -> None:
    prompts = family(2, shared=20)
    outcome: list[Any] = []
    with runtime() as rt:

        def body(engine: Any) -> None:
            cancelled, group = queue(rt, engine, prompts[0], **GREEDY)
            kept, _ = queue(rt, engine, prompts[1], **GREEDY)
            for _ in range(5):
                engine.step()
            assert group.sequences[0].progress.num_in_flight == 1
            engine.cancel(group.id)
            engine.check_integrity()
            while not engine.idle:
                engine.step()
                engine.check_integrity()
            outcome.extend([cancelled, kept])

        stepping(rt, body)
    cancelled, kept = outcome
    assert isinstance(cancelled.error, RequestCancelled) and cancelled.completion is None
    assert kept.completion.token_ids == greedy_reference(tiny_model(), prompts[1], NEW)


def test_a_sequence_retracted_with_a_token_on_its_way_keeps_it() -> None:
    prompt = random_prompt(14, seed=9)
    outcome: list[Listener] = []
    with runtime() as rt:

        def body(engine: Any) -> None:
            listener, group = queue(rt, engine, prompt, **GREEDY)
            for _ in range(4):
                engine.step()
            (sequence,) = group.sequences
            assert sequence.progress.num_in_flight == 1
            engine.scheduler._retract(sequence)
            while not engine.idle:
                engine.step()
                engine.check_integrity()
            outcome.append(listener)

        stepping(rt, body)
    assert outcome[0].completion is not None
    assert outcome[0].completion.token_ids == greedy_reference(tiny_model(), prompt, NEW)


def test_a_failing_launch_fails_its_requests_and_the_next_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(9)
    with runtime() as rt:
        runner = rt.load()._thread.engine.runner
        with monkeypatch.context() as patched:
            patched.setattr(runner, "forward", lambda plan: 1 / 0)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                rt.generate(prompt, **GREEDY)
        assert rt.generate(prompt, **GREEDY).token_ids == greedy_reference(tiny_model(), prompt, NEW)
        rt._thread.call(lambda engine: engine.check_integrity())


def test_logits_that_are_not_finite_fail_their_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = DeviceSampler.draw

    def broken(self: DeviceSampler, logits: torch.Tensor, sequences: Any, masks: Any) -> Drawn:
        logits = logits.clone()
        logits[[i for i, sequence in enumerate(sequences) if sequence.tokens[0] == 5]] = float("nan")
        return draw(self, logits, sequences, masks)

    monkeypatch.setattr(DeviceSampler, "draw", broken)
    with runtime() as rt:
        bad, good = rt.submit_many(
            [Request([5, 6, 7], SamplingParams(**GREEDY)), Request([6, 7], SamplingParams(**GREEDY))]
        )
        with pytest.raises(EngineError, match="not finite"):
            bad.result()
        assert good.result().token_ids == greedy_reference(tiny_model(), [6, 7], NEW)
        rt._thread.call(lambda engine: engine.check_integrity())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", ["launch", "read"])
def test_a_device_that_stops_working_closes_the_runtime_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, moment: str
) -> None:
    def lost(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with runtime(overlap=overlap) as rt:
        requests = [Request(random_prompt(9, seed=i), SamplingParams(**GREEDY)) for i in range(5)]

        def break_down(engine: Any) -> None:
            engine.spec = engine.steps.spec = replace(engine.spec, check_device=lost, close=lost)
            if moment == "launch":
                monkeypatch.setattr(engine.runner, "forward", lost)
            else:
                monkeypatch.setattr(engine.sampler, "results" if overlap else "sample", lost)

        rt._thread.post(break_down)
        for future in rt.submit_many(requests):
            with pytest.raises(EngineError, match="illegal memory access"):
                future.result(timeout=120)
        rt._thread.join(120)
        assert rt.closed
        with pytest.raises(EngineError, match="illegal memory access"):
            rt.generate("later", **GREEDY)


def test_a_text_that_ends_at_its_length_is_published_while_its_last_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(21, seed=4)
    published: list[int] = []
    with runtime() as rt:

        def body(engine: Any) -> None:
            result = Drawn.result

            def read(drawn: Drawn) -> Any:
                published.append(engine.cache.tree.num_tokens)
                return result(drawn)

            monkeypatch.setattr(Drawn, "result", read)
            queue(rt, engine, prompt, **GREEDY)
            while not engine.idle:
                engine.step()
                engine.check_integrity()
            published.append(engine.cache.tree.num_tokens)

        stepping(rt, body)
    whole = len(prompt) + NEW - 1  # the last token never runs
    assert published[-3:] == [len(prompt), whole, whole]
