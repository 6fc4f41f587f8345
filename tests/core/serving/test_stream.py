"""`Runtime.complete`: one thread, one request, and the answer that it waits for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.errors import EngineError, RequestTooLong
from graftlm.core.request import Chunk, Request
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, random_prompt, tiny_model

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def rt() -> Iterator[Runtime]:
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=2048)) as made:
        yield made


def test_the_answer_is_that_of_a_future(rt: Runtime) -> None:
    prompt = random_prompt(20)
    done = rt.complete(Request(prompt, SHORT))
    assert done.token_ids == rt.submit(Request(prompt, SHORT)).result().token_ids
    assert done.usage.completion_tokens == 8


def test_what_ends_a_request_is_raised(rt: Runtime) -> None:
    with pytest.raises(RequestTooLong):
        rt.complete(Request(random_prompt(3000), SHORT))
    assert rt.complete(Request("a", SHORT)).usage.completion_tokens == 8


def test_closing_the_runtime_ends_the_wait(rt: Runtime) -> None:
    began = threading.Event()
    closing = threading.Thread(target=lambda: (began.wait(), rt.close()))
    closing.start()
    with pytest.raises(EngineError, match="closed"):
        rt.complete(Request("a", LONG, stream=True, on_chunk=lambda chunk: began.set()))
    closing.join()


def test_an_interrupted_wait_frees_the_request(rt: Runtime) -> None:
    main, sent = threading.main_thread().ident, threading.Event()

    def interrupt(chunk: Chunk) -> None:
        if not sent.is_set():
            sent.set()
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets background jobs ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            rt.complete(Request("a", LONG, stream=True, on_chunk=interrupt))
    finally:
        signal.signal(signal.SIGINT, before)
    rt._thread.call(lambda engine: engine.step() and engine.check_integrity())
    assert rt.stats().slots_in_use == 0


def test_on_the_engines_own_thread_it_raises_instead_of_waiting_for_itself(rt: Runtime) -> None:
    met: list[BaseException] = []

    def ask(chunk: Chunk) -> None:
        try:
            rt.complete(Request("b", SHORT))
        except EngineError as error:
            met.append(error)

    rt.complete(Request("a", SHORT, stream=True, on_chunk=ask))
    assert "complete() was called in on_chunk" in str(met[0])
