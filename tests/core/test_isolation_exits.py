"""What is raised on the engine's thread and is no Exception: KeyboardInterrupt, SystemExit, a panic in Rust.

In a request's own code it ends that request, in a step the request that was alone in it (others run again), in a task
that task. Anywhere else it ends the engine, and every request is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from graftlm.core.config import SamplingParams
from graftlm.core.errors import EngineError
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime
from graftlm.core.scheduling.steps_ahead import StepsAhead
from graftlm.plugins import manager
from tests.core.test_isolation import LONG, Faulty, check_idle, runtime
from tests.faults import failing
from tests.models import random_prompt


class Panic(BaseException):
    """As pyo3's PanicException: derived from BaseException."""


KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, Panic]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def rt(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with runtime(overlap=request.param) as made:
        yield made.load()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[BaseException]:
    return request.param


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind("on the engine's thread")

    return fail


def others(rt: Runtime) -> list[Future[Completion]]:
    return rt.submit_many([Request(random_prompt(20, seed=i), LONG) for i in range(2)])


def check_unhurt(rt: Runtime, futures: list[Future[Completion]]) -> None:
    assert [len(future.result(120).token_ids) for future in futures] == [40, 40]
    check_idle(rt)


@pytest.mark.parametrize("method", ["matcher", "fill_mask", "advance", "forced", "options"])
def test_in_a_matcher_it_used_to_end_the_engine(rt: Runtime, method: str, kind: type[BaseException]) -> None:
    unhurt = others(rt)
    broken = rt.submit(
        Request(
            "x", SamplingParams(max_tokens=30, temperature=0, constraint=Faulty(method, kind=kind), ignore_eos=True)
        )
    )
    with pytest.raises(EngineError, match=f"{kind.__name__}: {method} is broken") as caught:
        broken.result(120)
    assert isinstance(caught.value.__cause__, kind)
    check_unhurt(rt, unhurt)


def test_a_callers_own_on_chunk_gives_it_to_the_caller(rt: Runtime, kind: type[BaseException]) -> None:
    unhurt = others(rt)
    broken = rt.submit(Request("x", LONG, stream=True, on_chunk=raising(kind)))
    with pytest.raises(kind, match="on the engine's thread"):
        broken.result(120)
    check_unhurt(rt, unhurt)


def test_a_futures_callback_raises_it(rt: Runtime, kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    unhurt = others(rt)
    future = rt.submit(Request("x", LONG))
    future.add_done_callback(raising(kind))
    assert future.result(120).finish_reason == "length"
    check_unhurt(rt, unhurt)
    assert kind.__name__ in caplog.text


def test_an_observer_raises_it(
    rt: Runtime, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Observer:
        graftlm_request_finished = staticmethod(manager.hookspecs.hookimpl(lambda request, completion: raising(kind)()))

    hooks = manager.load()._hooks
    hooks.register(Observer(), name="raising")
    try:
        check_unhurt(rt, others(rt))
    finally:
        hooks.unregister(name="raising")
    assert kind.__name__ in caplog.text


def test_a_task_raises_it_to_who_waits_for_it(rt: Runtime, kind: type[BaseException]) -> None:
    unhurt = others(rt)
    with pytest.raises(kind):
        rt._thread.call(raising(kind))
    rt._thread.post(raising(kind))
    check_unhurt(rt, unhurt)


def test_in_a_step_it_ends_the_request_that_is_alone_in_it(
    rt: Runtime, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepsAhead, "run", lambda ahead, plan, num_steps: None)
    engine: Any = rt._thread.engine
    with failing(engine.runner, "forward", every=2, once=True, kind=kind):
        with pytest.raises(EngineError, match=f"a step of this sequence alone failed: {kind.__name__}") as caught:
            rt.submit(Request("x", LONG)).result(120)
        assert isinstance(caught.value.__cause__, kind)
    with failing(engine.runner, "forward", every=2, once=True, kind=kind):
        check_unhurt(rt, others(rt))


def test_between_the_steps_it_ends_the_engine_and_everybody_is_told(kind: type[BaseException]) -> None:
    made = runtime().load()
    engine: Any = made._thread.engine
    with failing(engine.scheduler, "schedule", every=3, once=True, kind=kind):
        futures = others(made)
        for future in futures:
            with pytest.raises(EngineError, match=f"the engine stopped: {kind.__name__}"):
                future.result(120)
    with pytest.raises(EngineError, match="the engine stopped"):
        made.generate("x")
    made.close()
    assert not made._thread._thread.is_alive()  # type: ignore[union-attr]
