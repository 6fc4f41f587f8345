"""After a step has failed, only the sequence that fails alone ends; the others get the answers that they get alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.errors import EngineError
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Chunk, Request
from graftlm.core.runtime import Runtime
from graftlm.core.scheduling import step_loop
from graftlm.core.scheduling.step_retry import StepRetry
from graftlm.core.scheduling.steps_ahead import StepsAhead
from graftlm.core.sequence import Sequence
from graftlm.kernels.wire_plan import WirePlan
from graftlm.testing import byte_tokenizer
from tests.core.test_isolation import check_idle
from tests.core.test_isolation_faults import at_once
from tests.models import greedy_reference, random_prompt, tiny_model

MODEL = tiny_model()
NEW = 9
POISON = 251
"""The first token of the prompt that a step fails at."""


class Poisoned(RuntimeError):
    """What the model raises at the poisoned prompt."""


def request(seed: int, length: int = 20, **sampling: Any) -> Request:
    options: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True} | sampling
    return Request(random_prompt(length, seed=seed), SamplingParams(**options))


def poisoned(length: int = 20) -> Request:
    made = request(99, length)
    return Request([POISON, *made.prompt[1:]], made.sampling)


@contextmanager
def poison(engine: Any, owner: Any, name: str, at_token: int) -> Iterator[Counter[int]]:
    """Let steps raise that take a poisoned sequence to token `at_token` or further. -> failed steps by request"""
    original, failed = getattr(owner, name), Counter[int]()

    def called(first: Any, *others: Any, **options: Any) -> Any:
        rows = first if isinstance(first, list) else first.rows
        if isinstance(first, WirePlan):
            by_number = {sequence.number: sequence for sequence in engine.scheduler.running}
            sequences = [by_number[int(number)] for number in first.sequences]
        else:
            sequences = [row.sequence for row in rows]
        reached = [(s, s.progress.num_computed + row.num_new) for s, row in zip(sequences, rows, strict=True)]
        if any(sequence.tokens[0] == POISON and stop >= at_token for sequence, stop in reached):
            failed.update(sequence.request.id for sequence, _ in reached)
            raise Poisoned("at the poisoned prompt")
        return original(first, *others, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, called)
        yield failed


PARTS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "layout": lambda engine: (step_loop, "build_plan"),
    "forward": lambda engine: (engine.runner, "forward"),
    "drawing": lambda engine: (engine.sampler, "sample_async"),
    "results": lambda engine: (engine.sampler, "sample" if engine.spec.device_sampler is None else "results"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sync": {"overlap": False},
    "overlap": {"overlap": True},
    "chunked": {"max_step_tokens": 16, "max_batch": 5},
    "tight": {"cache": CacheConfig(max_tokens=128)},
    "pages": {"cache": CacheConfig(max_tokens=1024, page_size=16), "overlap": True},
    "no cache": {"cache": CacheConfig(max_tokens=1024, enabled=False)},
}


@pytest.fixture(scope="module", params=OPTIONS)
def rt(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options = {"cache": CacheConfig(max_tokens=1024), "speculation": "off"} | OPTIONS[request.param]
    with Runtime(MODEL, tokenizer=byte_tokenizer(), dtype="float32", **options) as made:
        yield made.load()


@pytest.mark.parametrize("at_token", [1, 24], ids=["prompt", "decode"])
@pytest.mark.parametrize("part", PARTS)
def test_only_the_request_that_a_step_fails_at_ends(
    rt: Runtime, part: str, at_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepsAhead, "run", lambda ahead, plan, num_steps: None)
    engine = rt._thread.engine
    with poison(engine, *PARTS[part](engine), at_token):
        *done, culprit = at_once(rt, [*map(request, range(6)), poisoned()])
    assert isinstance(culprit, EngineError) and isinstance(culprit.__cause__, Poisoned)
    assert str(culprit) == "a step of this sequence alone failed: Poisoned: at the poisoned prompt"
    assert [one.token_ids for one in done] == [
        greedy_reference(MODEL, random_prompt(20, seed=i), NEW) for i in range(6)
    ]
    check_idle(rt)
    assert not rt._thread.engine.scheduler.retry.active  # type: ignore[union-attr]


def test_of_steps_that_are_run_at_once_too_only_that_request_ends() -> None:
    options: dict[str, Any] = {"speculation": "off", "dtype": "float32", "overlap": False}
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), **options) as rt:
        at_once(rt, [*map(request, range(7))])  # how long a step takes is known then
        engine: Any = rt._thread.engine
        if engine.ahead is None:
            pytest.skip("no compiled steps on this CPU")
        with poison(engine, engine.ahead.runner, "decode", 21) as failed, poison(engine, engine.runner, "forward", 21):
            *done, culprit = at_once(rt, [*map(request, range(6)), poisoned()])
        assert failed and isinstance(culprit, EngineError) and isinstance(culprit.__cause__, Poisoned)
        assert [one.token_ids for one in done] == [
            greedy_reference(MODEL, random_prompt(20, seed=i), NEW) for i in range(6)
        ]
        check_idle(rt)


@pytest.mark.parametrize(("num_others", "most"), [(3, 1), (15, 2), (63, 3)])
def test_others_lose_one_step_of_four_two_of_sixteen_three_of_sixty_four(
    num_others: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepsAhead, "run", lambda ahead, plan, num_steps: None)
    requests = [*map(request, range(num_others)), poisoned()]
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), max_batch=64) as rt:
        engine: Any = rt.load()._thread.engine
        with poison(engine, engine.runner, "forward", 22) as failed:
            *done, culprit = at_once(rt, requests)
            steps = rt.stats()
    assert isinstance(culprit, EngineError)
    assert all(len(one.token_ids) == NEW for one in done)
    assert max(failed[r.id] for r in requests[:-1]) == most
    assert steps.failed_steps == most + 1
    assert steps.failed == 1


def test_a_model_that_always_fails_ends_every_request_alone() -> None:
    with Runtime(tiny_model(), tokenizer=byte_tokenizer()) as rt:
        runner = rt.load()._thread.engine.runner  # type: ignore[union-attr]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runner, "forward", lambda plan: 1 / 0)
            done = at_once(rt, [request(i) for i in range(9)])
        assert all(isinstance(one, EngineError) and isinstance(one.__cause__, ZeroDivisionError) for one in done)
        assert at_once(rt, [request(1)])[0].token_ids == greedy_reference(MODEL, random_prompt(20, seed=1), NEW)
        check_idle(rt)


def test_texts_scores_streams_samples_and_constraints_go_on_as_if_no_step_had_failed() -> None:
    def load(streamed: list[int]) -> list[Request]:
        def hear(chunk: Chunk) -> None:
            streamed.extend(chunk.token_ids)

        prompts = [random_prompt(20, seed=i) for i in range(6)]
        return [
            request(0),
            Request(prompts[1], SamplingParams(max_tokens=NEW, ignore_eos=True, seed=5, n=3)),
            Request(prompts[2], SamplingParams(regex="[a-f]{4}[0-9]{2}", max_tokens=12, seed=1)),
            Request(prompts[3], SamplingParams(choices=("north", "north-east", "south"), max_tokens=12, seed=1)),
            Request(prompts[4], score_ids=prompts[5]),
            Request(prompts[5], request(0).sampling, stream=True, on_chunk=hear),
        ]

    def said(one: Any) -> Any:
        scores = [round(s.logprob, 2) for s in one.logprobs or []]
        return [(c.token_ids, c.text) for c in one.completions or [one]], scores

    options: dict[str, Any] = {"max_step_tokens": 32, "dtype": "float32"}
    expected_stream, stream = list[int](), list[int]()
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), **options) as rt:
        expected = [said(one) for one in at_once(rt.load(), load(expected_stream))]
        engine: Any = rt._thread.engine
        with poison(engine, engine.runner, "forward", 3):
            *done, culprit = at_once(rt, [*load(stream), poisoned(), poisoned(24)])
        check_idle(rt)
    assert isinstance(culprit, EngineError)
    assert [said(one) for one in done[:-1]] == expected
    assert stream == expected_stream


@pytest.mark.filterwarnings("ignore:.*runs in the serial lane")
def test_in_the_serial_lane_a_cache_that_a_failure_left_behind_is_not_used() -> None:
    model = tiny_model("mamba2")
    with Runtime(model, tokenizer=byte_tokenizer(), dtype="float32") as rt:
        assert rt.load().stats().execution.startswith("serial")
        right = [one.token_ids for one in at_once(rt, [request(i) for i in range(3)])]
        runner: Any = rt._thread.engine.runner  # type: ignore[union-attr]
        call = runner._call

        def broken(ids: Any, cache: Any, *others: Any, **options: Any) -> Any:
            result = call(ids, cache, *others, **options)  # the model's cache has gone on already
            if POISON in ids:
                raise Poisoned("late")
            return result

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runner, "_call", broken)
            *done, culprit = at_once(rt, [*(request(i) for i in range(3)), poisoned()])
        assert isinstance(culprit, EngineError)
        assert [one.token_ids for one in done] == right
        check_idle(rt)


def test_scores_are_not_counted_twice_when_a_prompt_is_retracted_halfway() -> None:
    ids = random_prompt(40, seed=3)
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), max_step_tokens=16, dtype="float32") as rt:
        expected = rt.submit(Request(random_prompt(9), score_ids=ids)).result(60).logprobs
        engine: Any = rt._thread.engine

        def retract(given: Any) -> None:
            (sequence,) = engine.scheduler.running
            engine.scheduler._retract(sequence)

        forward, calls = engine.runner.forward, []

        def forward_and_retract(plan: Any) -> Any:
            calls.append(plan)
            if len(calls) == 2:
                rt._thread.post(retract)
            return forward(plan)

        rt._thread.call(lambda engine: engine.clear_cache())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine.runner, "forward", forward_and_retract)
            again = rt.submit(Request(random_prompt(9), score_ids=ids)).result(60).logprobs
        assert rt.stats().retracted == 1
    assert again is not None and expected is not None and len(again) == len(expected) == 40
    np.testing.assert_allclose([s.logprob for s in again], [s.logprob for s in expected], atol=1e-4)


def sequences(num: int) -> list[Sequence]:
    return [Sequence(request(i), PromptInput(np.arange(5))) for i in range(num)]


def test_a_failed_part_is_cut_again_before_the_parts_behind_it() -> None:
    retry, made = StepRetry(), sequences(9)
    assert retry.failed(dict.fromkeys(made, 5)) is None
    assert list(retry.part() or []) == made[:3]
    assert retry.failed(dict.fromkeys(made[:3], 5)) is None
    assert list(retry.part() or []) == made[:1]
    assert retry.failed({made[0]: 5}) is made[0]
    for sequence in made[1:3]:
        sequence.progress.status, sequence.progress.num_computed = "running", 5
    assert list(retry.part() or []) == made[3:6]
    for sequence in made[3:]:
        retry.forget(sequence)
    assert retry.part() is None and not retry.active
