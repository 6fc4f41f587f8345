"""Lazy model objects: `+` returns at once, reading waits, and nothing else changes."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import guidance
import pytest
from guidance import assistant, gen, select, user
from guidance.models._base._model import _event_queues

from graftlm.adapters.guidance import GraftModel
from graftlm.adapters.guidance.lazy import Task
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime
from tests.adapters.guidance.guidance_plugin import tame_model, trained_tokenizer
from tests.adapters.guidance.test_model import PROGRAMS


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    tokenizer = trained_tokenizer()
    with Runtime(tame_model(tokenizer), tokenizer=tokenizer, dtype="float32", max_model_len=2048) as one:
        yield one


@pytest.fixture(autouse=True)
def nobody_watches() -> Iterator[None]:
    """A stream that an earlier test left half-read would make every `+` of this thread wait."""
    token = _event_queues.set(())
    yield
    _event_queues.reset(token)


@pytest.fixture(scope="module")
def eager(runtime: Runtime) -> GraftModel:
    return GraftModel(runtime=runtime, echo=False)


@pytest.fixture(scope="module")
def lazy(runtime: Runtime) -> GraftModel:
    return GraftModel(runtime=runtime, echo=False, lazy=True)


def captured(lm: Any) -> dict[str, Any]:
    return {name: lm[name] for name in lm._interpreter.state.captures}


@pytest.mark.parametrize("name", PROGRAMS)
def test_lazy_programs_write_what_eager_ones_write(lazy: GraftModel, eager: GraftModel, name: str) -> None:
    later, now = PROGRAMS[name](lazy), PROGRAMS[name](eager)
    assert str(later) == str(now) and captured(later) == captured(now)
    for variable in captured(now):
        assert later.log_prob(variable) == pytest.approx(now.log_prob(variable), abs=1e-4)


def test_branches_off_one_base_share_a_batch(lazy: GraftModel, eager: GraftModel, runtime: Runtime) -> None:
    def branches(model: GraftModel) -> list[Any]:
        base = model + "one beginning for all of them " * 8
        return [base + f"{i}: " + gen("x", regex="[a-z ]{400}") + "; " + gen("y", regex="[a-z]{8}") for i in range(10)]

    alone = [str(lm) for lm in branches(eager)]
    runtime.clear_cache()
    runtime.reset_stats()
    gate = threading.Event()
    runtime._thread.post(lambda engine: gate.wait(120))
    together = branches(lazy)
    gate.set()
    assert [str(lm) for lm in together] == alone
    assert runtime.stats().largest_batch >= 8


def test_appending_returns_before_the_model_has_written(lazy: GraftModel, runtime: Runtime) -> None:
    gate = threading.Event()

    @guidance.guidance(stateless=True)
    def line(lm: Any) -> Any:
        return lm + gen("x", regex="[a-z]{4}")

    runtime._thread.post(lambda engine: gate.wait(120))
    lm = lazy + "wait " + line() + "\n" + select(["p", "q"], name="y")
    assert "_task" in vars(lm)
    gate.set()
    assert len(lm["x"]) == 4 and lm["y"] in "pq" and "_task" not in vars(lm)


def test_roles_are_those_of_the_time_of_appending(lazy: GraftModel, eager: GraftModel) -> None:
    def program(lm: Any) -> Any:
        with user():
            lm += "Name a letter."
        with assistant():
            lm += gen("x", regex="[a-z]")
        with user():
            lm += "Another."
        with assistant():
            lm += gen("y", regex="[a-z]")
        return lm

    later, now = program(lazy), program(eager)
    assert str(later) == str(now) and captured(later) == captured(now)


def test_a_function_that_reads_a_variable_gets_it(lazy: GraftModel) -> None:
    @guidance.guidance
    def twice(lm: Any) -> Any:
        lm += gen("x", regex="[0-9]{2}")
        return lm + " again " + lm["x"]

    lm = lazy + "number " + twice()
    assert str(lm) == f"number {lm['x']} again {lm['x']}"


def test_what_goes_wrong_is_raised_where_it_is_read(lazy: GraftModel) -> None:
    lm = lazy + gen("x", regex="[")
    after = lm + "more"
    for broken in (lm, after, lm):
        with pytest.raises(ValueError):
            str(broken)


def test_what_goes_wrong_unread_is_logged(lazy: GraftModel, caplog: pytest.LogCaptureFixture) -> None:
    lm = lazy + gen("x", regex="[")
    vars(lm)["_task"]._made.exception()
    with caplog.at_level(logging.WARNING, "graftlm.adapters.guidance.lazy"):
        del lm
        while not caplog.records:
            gc.collect()
    assert "nobody read it" in caplog.text


def test_seeds_are_dealt_in_the_order_of_the_program(runtime: Runtime) -> None:
    def texts(seed: int) -> list[str]:
        base = GraftModel(runtime=runtime, echo=False, lazy=True, seed=seed) + "dice: "
        return [str(lm) for lm in [base + gen("x", regex="[a-z]{6}", temperature=2.0) for _ in range(6)]]

    first = texts(1)
    assert first == texts(1) != texts(2) and len(set(first)) > 1


def test_a_lazy_object_streams_and_copies_and_has_usage(lazy: GraftModel) -> None:
    lm = lazy + "x " + gen("x", regex="[a-z]{5}")
    copied = lm.copy().set("y", "z")
    assert copied["x"] == lm["x"] and copied["y"] == "z" and "y" not in lm
    assert (lazy + "x " + gen("x", regex="[a-z]{5}"))._get_usage().round_trips == 1
    states = [str(state) for state in (lazy + "x " + gen("x", regex="[a-z]{5}")).stream() + gen("y", regex="[0-9]{6}")]
    assert len(set(states)) > 1


def test_many_readers_of_one_object_read_the_same(lazy: GraftModel) -> None:
    lm = lazy + "shared " + gen("x", regex="[a-z]{8}")
    seen: list[str] = []
    threads = [threading.Thread(target=lambda: seen.append(lm["x"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8 and len(set(seen)) == 1


def test_a_chain_keeps_its_thread() -> None:
    gate = threading.Event()

    def append(base: list[int], _: Any) -> list[int]:
        gate.wait(120)
        return [*base, threading.get_ident()]

    first = Task.start(append, [], None, None)
    second = Task(lambda _, item: append(first.result(), item), None, None, copy_context())
    assert first._followed_by(second)
    gate.set()
    made = second.result()
    assert made[0] == made[1] != threading.get_ident()


def test_what_a_lazy_object_lacks_is_an_attribute_error(lazy: GraftModel) -> None:
    lm = lazy + "a" + gen("x", regex="[a-z]")
    assert not hasattr(lm, "no_such_field") and lm.get("no such variable") is None
    with pytest.raises(TypeError):
        lm + 3  # type: ignore[operator]


def test_lazy_and_echo_exclude_each_other(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="echo=False"):
        GraftModel(runtime=runtime, lazy=True)
