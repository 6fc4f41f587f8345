"""Real parts that fail at their n-th call: who is told, who is not hurt, and what it costs the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graftlm.core.config import SamplingParams
from graftlm.core.errors import EngineError
from graftlm.core.grammar.cache import _shared as grammars
from graftlm.core.request import Chunk, Request
from graftlm.core.runtime import Runtime
from graftlm.core.scheduling import step_loop
from graftlm.testing import byte_tokenizer
from tests.core.test_isolation import Faulty, check_idle
from tests.faults import InjectedFault, failing
from tests.models import greedy_reference, random_prompt, tiny_model

MODEL = tiny_model()
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def rt(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options: dict[str, Any] = {"overlap": request.param, "speculation": "off", "dtype": "float32"}
    with Runtime(MODEL, tokenizer=byte_tokenizer(), **options) as made:
        yield made.load()


def at_once(
    rt: Runtime, requests: list[Request], each: Callable[[int, int], None] = lambda i, steps: None
) -> list[Any]:
    """Answer requests that the engine meets in one step. -> completions and errors; each: told the step of each end"""
    entered, gate = threading.Event(), threading.Event()
    rt._thread.post(lambda engine: (entered.set(), gate.wait(300)))
    entered.wait(300)  # what the engine's thread finds here it runs before the next step; of later ones, all
    rt._thread.post(lambda engine: (engine.clear_cache(), engine.reset_stats()))
    futures = [rt.submit(request) for request in requests]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: each(i, rt.stats().steps))
    gate.set()
    answers = [future.exception(60) or future.result() for future in futures]
    rt._thread.call(lambda engine: None)  # a future wakes who waits for it before it calls back
    return answers


def greedy(seed: int) -> Request:
    return Request(random_prompt(20, seed=seed), GREEDY)


def check_right(rt: Runtime) -> None:
    """Nothing of a fault is left: slots, cached KV and answers are as they were."""
    done = at_once(rt, [greedy(seed) for seed in range(3)])
    assert [one.token_ids for one in done] == [greedy_reference(MODEL, random_prompt(20, seed=i), 12) for i in range(3)]
    check_idle(rt)


PARTS: dict[str, Callable[[Runtime, Any], tuple[Any, str]]] = {
    "a step": lambda rt, engine: (engine.runner, "forward"),
    "an attention kernel": lambda rt, engine: (engine.runner.attention, "forward"),
    "the layout of a step": lambda rt, engine: (step_loop, "build_plan"),
    "the sampler": lambda rt, engine: (engine.sampler, "sample"),
    "an allocation of KV": lambda rt, engine: (engine.cache.pool, "allocate"),
    "a detokenizer": lambda rt, engine: (rt.tokenizer, "detokenizer"),
}


@pytest.mark.parametrize("nth", [1, 2, 3, 7])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_once_ends_its_own_request_and_no_other_and_leaves_nothing_behind(
    rt: Runtime, part: str, nth: int
) -> None:
    owner, name = PARTS[part](rt, rt._thread.engine)
    with failing(owner, name, every=nth, once=True) as failed:
        done = at_once(rt, [greedy(seed) for seed in range(3)])
    errors = [one for one in done if isinstance(one, BaseException)]
    assert all(isinstance(error, EngineError) and isinstance(error.__cause__, InjectedFault) for error in errors)
    own = part in ("an allocation of KV", "a detokenizer")  # which belong to one request; a step is run again
    assert len(errors) == (1 if own and failed else 0)
    check_right(rt)


def test_a_compilation_that_fails_ends_the_requests_that_wait_for_it_and_the_next_one_compiles_again(
    rt: Runtime,
) -> None:
    constrained = Request(random_prompt(9), SamplingParams(max_tokens=30, regex="[a-f]{3}[0-9]"))
    grammars.clear()
    with failing(grammars, "_compiler", every=1, once=True):
        broken, done = at_once(rt, [constrained, greedy(1)])
    assert isinstance(broken, EngineError) and isinstance(broken.__cause__, InjectedFault)
    assert done.token_ids == greedy_reference(MODEL, random_prompt(20, seed=1), 12)
    assert rt.submit(constrained).result(60).text_complete
    check_right(rt)


def test_a_text_that_the_tokenizer_raises_at_ends_its_own_request_of_a_submission(rt: Runtime) -> None:
    texts = ["one", "two", "three"]
    encoder = rt.tokenizer._batch_encoder
    encode = encoder.encode

    def faulty(given: list[str]) -> Any:
        if "two" in given:
            raise InjectedFault("two")
        return encode(given)

    encoder.encode = faulty  # type: ignore[method-assign]
    try:
        first, second, third = [future.exception(60) for future in rt.submit_many([Request(t, GREEDY) for t in texts])]
    finally:
        del encoder.encode
    assert first is None and third is None
    assert isinstance(second, EngineError) and isinstance(second.__cause__, InjectedFault)
    check_right(rt)


def raising_listener(chunk: Chunk) -> None:
    raise ValueError("a listener's own")


def faulty(method: str) -> Request:
    return Request(random_prompt(30), SamplingParams(constraint=Faulty(method, 3), temperature=0))


FAILING: dict[str, Callable[[], Request]] = {
    "fill_mask": lambda: faulty("fill_mask"),
    "advance": lambda: faulty("advance"),
    "forced": lambda: faulty("forced"),
    "a listener": lambda: Request(random_prompt(30), GREEDY, stream=True, on_chunk=raising_listener),
    "too long": lambda: Request(random_prompt(30) * 100, GREEDY),
    "timeout": lambda: Request(random_prompt(30), SamplingParams(max_tokens=400, ignore_eos=True, timeout=1e-9)),
    "no token of the model": lambda: Request([10**6], GREEDY),
    "an impossible budget": lambda: Request(random_prompt(30), SamplingParams(max_tokens=1, json_schema=LONG_TEXT)),
}
LONG_TEXT = {"type": "string", "minLength": 9}


@pytest.mark.parametrize("kind", FAILING)
def test_a_request_that_fails_costs_the_others_at_most_one_step(rt: Runtime, kind: str) -> None:
    others = [greedy(seed) for seed in range(4)]
    alone: dict[int, int] = {}
    beside: dict[int, int] = {}
    expected = at_once(rt, others, alone.__setitem__)
    *done, failed = at_once(rt, [*others, FAILING[kind]()], beside.__setitem__)
    assert isinstance(failed, Exception)
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    assert all(alone[i] <= beside[i] <= alone[i] + 1 for i in range(4)), (alone, beside)
    check_idle(rt)
