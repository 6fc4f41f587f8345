"""What one caller's code raises ends that caller's request and no other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.errors import ConfigError, EngineError, GraftError, RemoteError, RequestTooLong
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.spec import Regex
from graftlm.core.grammar.vocabulary import Vocabulary
from graftlm.core.request import Chunk, Completion, OpenRequest, Request
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, random_prompt, tiny_model

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def runtime(**options: Any) -> Runtime:
    return Runtime(tiny_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=2048), **options)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def shared(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    made = runtime(overlap=request.param)
    yield made.load()
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive(), "the engine's thread does not end"


@pytest.fixture
def rt(shared: Runtime) -> Runtime:
    """A runtime that answers: a test that left its engine's thread waiting fails those after it, and hangs none."""
    assert shared._thread.unavailable(max_step_s=15) is None
    return shared


def check_idle(rt: Runtime) -> None:
    rt._thread.call(lambda engine: engine.check_integrity())
    assert rt.stats().slots_in_use == 0


# -- tasks ---------------------------------------------------------------------------------------------------------


def test_a_task_that_raises_used_to_take_the_engine_and_the_tasks_behind_it(
    rt: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    rt.load()._thread.post(lambda engine: gate.wait(120))
    rt._thread.post(lambda engine: 1 / 0)
    behind = rt.submit(Request("x", LONG))
    gate.set()
    assert behind.result(120).finish_reason == "length"
    assert "ZeroDivisionError" in caplog.text


def test_an_engine_that_does_not_take_a_hand_over_tells_each_of_its_listeners(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rt.load()._thread.engine
    with monkeypatch.context() as patched:
        patched.setattr(engine, "add", lambda submissions: 1 / 0)
        futures = rt.submit_many([Request("x", LONG), Request("y", LONG)])
        for future in futures:
            with pytest.raises(EngineError, match="did not take the request: ZeroDivisionError") as caught:
                future.result(120)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert rt.generate("x", max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_a_request_that_cannot_be_admitted_fails_alone_in_its_hand_over(rt: Runtime) -> None:
    broken = Request("x", LONG, score_ids=["no id"])  # type: ignore[list-item]
    good, bad, last = rt.submit_many([Request("a", LONG), broken, Request("b", LONG)])
    with pytest.raises(EngineError):
        bad.result(120)
    assert good.result(120).finish_reason == last.result(120).finish_reason == "length"
    check_idle(rt)


def test_one_request_may_be_submitted_twice_and_each_is_cancelled_by_itself(rt: Runtime) -> None:
    request = Request(random_prompt(9), SamplingParams(max_tokens=400, ignore_eos=True))
    first, second = rt.submit_many([request, request])
    first.cancel()
    assert len(second.result(120).token_ids) == 400
    check_idle(rt)


@pytest.mark.parametrize("ask", [lambda rt, request: rt.submit_many([request, request]), Runtime.submit_stream])
def test_an_interrupt_behind_a_hand_over_used_to_leave_requests_that_nobody_waits_for(
    rt: Runtime, ask: Callable[[Runtime, Request], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[OpenRequest] = []
    gate = threading.Event()

    def post(task: Any, **options: Any) -> None:
        patched.undo()
        post_unhurt(task, **options)
        post_unhurt(lambda engine: taken.extend(engine.requests.open))
        raise KeyboardInterrupt

    rt.load()._thread.post(lambda engine: gate.wait(120))
    with monkeypatch.context() as patched:
        post_unhurt = rt._thread.post
        patched.setattr(rt._thread, "post", post)
        with pytest.raises(KeyboardInterrupt):
            ask(rt, Request(random_prompt(9), SamplingParams(max_tokens=400, ignore_eos=True)))
    gate.set()
    assert rt._thread.call(lambda engine: engine.requests.open) == [] != taken
    check_idle(rt)


# -- matchers and listeners ----------------------------------------------------------------------------------------


class Faulty:
    """A constraint and its matcher, one method of which raises when it is called for the n-th time."""

    finished = accepting = False

    def __init__(self, method: str, n: int = 1, kind: type[BaseException] = ValueError) -> None:
        self._method, self._left, self._kind = method, n, kind

    def matcher(self) -> Faulty:
        return self._call("matcher", self)

    def fill_mask(self, row: Any) -> bool:
        return self._call("fill_mask", False)

    def advance(self, ids: Any) -> int:
        return self._call("advance", len(ids))

    def rollback(self, n: int) -> None:
        return self._call("rollback", None)

    def forced(self, context: Any) -> list[int]:
        return self._call("forced", [])

    def fork(self) -> Faulty:
        return self._call("fork", self)

    def options(self, context: Any) -> list[list[int]]:
        return self._call("options", [])

    def min_tokens_to_accept(self) -> int:
        return 0

    def _call(self, method: str, result: Any) -> Any:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                raise self._kind(f"{method} is broken")
        return result


@pytest.mark.parametrize(
    ("method", "n"), [("matcher", 1), ("fill_mask", 3), ("advance", 3), ("forced", 2), ("options", 2), ("fork", 1)]
)
def test_a_matcher_that_raises_used_to_end_the_engine_for_all(rt: Runtime, method: str, n: int) -> None:
    # greedy: a sampled end of text would end it before the method is called so often
    sampling = SamplingParams(
        max_tokens=30, constraint=Faulty(method, n), ignore_eos=True, n=2 if method == "fork" else 1, temperature=0
    )
    others = rt.submit_many([Request(random_prompt(20, seed=i), LONG) for i in range(2)])
    broken = rt.submit(Request(random_prompt(30), sampling))
    with pytest.raises(EngineError, match=f"ValueError: {method} is broken") as caught:
        broken.result(120)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [len(other.result(120).token_ids) for other in others] == [40, 40]
    check_idle(rt)


def test_a_matcher_that_raises_while_drafts_are_made_ends_its_request_alone() -> None:
    with runtime(overlap=False) as rt:
        repeating = [7, 8, 9, 10] * 6  # drafts come from what repeats itself
        other = rt.submit(Request(random_prompt(20), LONG))
        sampling = SamplingParams(max_tokens=60, constraint=Faulty("rollback"), ignore_eos=True, temperature=0)
        broken = rt.submit(Request(repeating, sampling))
        try:
            broken.result(120)  # a tiny model may write nothing that was drafted
        except EngineError as error:
            assert isinstance(error.__cause__, ValueError)
        assert len(other.result(120).token_ids) == 40
        check_idle(rt)


@pytest.mark.parametrize("name", ["on_finish", "on_error"])
def test_a_listener_that_raises_ends_nothing_but_its_own_request(
    rt: Runtime, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, result: Any) -> None:
        raise ValueError("a listener of a plugin")

    with monkeypatch.context() as patched:
        patched.setattr(f"graftlm.core.serving.stream.StreamListener.{name}", fail)
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, timeout=1e-9 if name == "on_error" else None)
        stream = rt.submit_stream(Request(random_prompt(5), sampling))
        other = rt.submit(Request(random_prompt(20), LONG))  # it ends last, even where this thread is held up before it
        assert len(other.result(120).token_ids) == 40
        check_idle(rt)
    stream.close()
    assert "a listener of a plugin" in caplog.text


@pytest.mark.parametrize("constraint", [object(), 5, "[a-z]+", {"type": "object"}])
def test_a_constraint_that_is_none_used_to_be_an_attribute_error(rt: Runtime, constraint: Any) -> None:
    with pytest.raises(ConfigError, match="constraint is .*; give gl.Regex, gl.Choices, gl.JsonSchema"):
        rt.generate("x", constraint=constraint, max_tokens=3)


# -- the engine's own thread ---------------------------------------------------------------------------------------


@gl.program
def a_program(s: gl.ProgramState) -> None:
    s += "x" + gl.gen("a", max_tokens=3)


CALLS: dict[str, Callable[[Runtime], Any]] = {
    "generate()": lambda rt: rt.generate("x"),
    "score()": lambda rt: rt.score("x", "y"),
    "select()": lambda rt: rt.select("x", ["a", "b"]),
    "warm()": lambda rt: rt.warm("x"),
    "stream()": lambda rt: rt.stream("x"),
    "reset_stats()": lambda rt: rt.reset_stats(),
    "clear_cache()": lambda rt: rt.clear_cache(),
    "load": lambda rt: rt.load(),
    "a future's result()": lambda rt: rt.submit(Request("x", LONG)).result(),
    "a future's exception()": lambda rt: rt.logits([1, 2]).exception(60),
    "concurrent.futures.wait()": lambda rt: wait([rt.submit(Request("x", LONG))]),
    "concurrent.futures.wait() or as_completed()": lambda rt: next(as_completed([rt.logits([1, 2])])),
    "state['a']": lambda rt: a_program.run(runtime=rt)["a"],
    "state.text": lambda rt: a_program.run(runtime=rt).text,
    "state.wait()": lambda rt: a_program.run(runtime=rt).wait(),
    "batch()": lambda rt: a_program.batch([{}, {}], runtime=rt),
    "reading a stream": lambda rt: next(a_program.stream(runtime=rt)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_waiting_call_in_a_callback_used_to_wait_for_itself_forever(rt: Runtime, name: str) -> None:
    heard: Future[BaseException | None] = Future()

    def on_chunk(chunk: Chunk) -> None:
        if not heard.done():
            try:
                CALLS[name](rt)
            except BaseException as error:
                heard.set_result(error)

    done = rt.submit(Request("x", SamplingParams(max_tokens=3, ignore_eos=True), stream=True, on_chunk=on_chunk))
    try:
        error = heard.result(120)
    except TimeoutError:
        pytest.fail(f"{name} in a callback waits for itself")
    done.result(120)
    assert (
        isinstance(error, EngineError) and str(error).startswith(name.removesuffix("()")) and "submit()" in str(error)
    )
    assert rt.generate("x", max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_what_is_known_already_is_read_in_a_callback(rt: Runtime) -> None:
    done = a_program.run(runtime=rt)
    expected = done["a"], done.text
    heard: Future[tuple[Any, ...]] = Future()

    def on_chunk(chunk: Chunk) -> None:
        if not heard.done():
            heard.set_result((done["a"], done.text, done.wait(), "a" in done))

    rt.submit(Request("x", SamplingParams(max_tokens=3, ignore_eos=True), stream=True, on_chunk=on_chunk)).result(120)
    assert heard.result(120) == (*expected, True, True)


def test_submitting_and_closing_in_a_callback_work() -> None:
    made = runtime()
    again: list[Future[Completion]] = []
    first = made.submit(Request("x", SamplingParams(max_tokens=3, ignore_eos=True)))
    first.add_done_callback(lambda _: again.append(made.submit(Request("y", LONG))))
    first.result(120)
    made.stats()
    while not again:
        pass
    assert again[0].result(120).finish_reason == "length"
    last = made.submit(Request("z", LONG, stream=True, on_chunk=lambda chunk: made.close()))
    with pytest.raises(EngineError, match="closed"):
        last.result(120)
    made.close()


# -- runtimes that are shared --------------------------------------------------------------------------------------


def test_a_path_used_to_make_a_second_engine(tmp_path: Path) -> None:
    first = Runtime.shared(tmp_path)
    assert Runtime.shared(tmp_path / ".." / tmp_path.name) is not first
    assert Runtime.shared(Path(str(tmp_path))) is first and Runtime.shared(str(tmp_path)) is first
    assert pickle.loads(pickle.dumps(first)) is first
    first.close()


def test_a_closed_runtime_used_to_keep_its_model() -> None:
    model = tiny_model()
    runtime = Runtime.shared(model, tokenizer=byte_tokenizer())
    runtime.generate("x", max_tokens=1)
    alive = weakref.ref(model)
    runtime.close()
    del model, runtime
    for _ in range(100):  # a thread of another test may hold a frame for a moment
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.1)
    assert alive() is None


# -- processes -----------------------------------------------------------------------------------------------------


def errors(kind: type[GraftError] = GraftError) -> Iterator[type[GraftError]]:
    for below in kind.__subclasses__():
        yield below
        yield from errors(below)


@pytest.mark.parametrize("kind", [GraftError, *errors()], ids=lambda kind: kind.__name__)
def test_every_error_crosses_a_process(kind: type[GraftError]) -> None:
    measured = issubclass(kind, RequestTooLong) and not issubclass(kind, RemoteError)
    options = {"length": 5, "limit": 3} if measured else {}
    error = kind("the cause", **options)
    error.__dict__["pointer"] = "/a"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (kind, "the cause", error.__dict__)


def test_a_completion_crosses_a_process(rt: Runtime) -> None:
    done = rt.generate("x", max_tokens=3, top_logprobs=2, logprobs=True, n=2, temperature=0.5, seed=1)
    assert pickle.loads(pickle.dumps(done)) == done


def _compile_in_child(cache: GrammarCache, vocabulary: Vocabulary, results: Any) -> None:
    results.put(cache.submit(Regex("[0-9]{3}"), vocabulary).result(120).engine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_grammar_compiled_after_a_fork_used_to_hang() -> None:
    vocabulary = Vocabulary.from_tokenizer(byte_tokenizer())
    cache = GrammarCache()
    cache.get(Regex("[a-z]{2}"), vocabulary)  # starts the workers, which a fork does not have
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_compile_in_child, args=(cache, vocabulary, results))
    child.start()
    try:
        assert results.get(timeout=120) == "fsm"
    finally:
        child.kill()
        child.join()
