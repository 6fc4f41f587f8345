"""`on_unsupported="check"`: what the mask cannot keep is judged on the finished text, and asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import graftlm as gl
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_grammar import tool_constraint
from graftlm.core.chat.tools import Tool
from graftlm.testing import ScriptedModel

STEPS = {"type": "integer", "multipleOf": 99991}  # needs more states than any automaton gets
FORM = ToolFormat()


def answering(*texts: str) -> Callable[[str], str]:
    """A script that gives these answers, one after the other, then the last one again."""
    left = list(texts)
    return lambda prompt: left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def runtime(model: ScriptedModel) -> Iterator[gl.Runtime]:
    with model.runtime() as made:
        yield made


def test_an_answer_that_fails_is_asked_for_again(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("7", "8", "99991")
    done = runtime.generate("x", json_schema=STEPS, on_unsupported="check")
    assert (done.text, done.checked, len(model.requests)) == ("99991", True, 3)
    assert done.usage.completion_tokens >= 7  # of all three


def test_the_number_of_tries_is_bounded(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("7")
    with pytest.raises(gl.GrammarError, match="asked 2 times; the last answer '7': /: 7 is not a multiple of 99991"):
        runtime.generate("x", json_schema=STEPS, on_unsupported="check", max_retries=1)
    assert len(model.requests) == 2


def test_a_greedy_request_samples_when_it_is_tried_again(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("7", "0")
    runtime.generate("x", json_schema=STEPS, on_unsupported="check", temperature=0, seed=3)
    assert [request.sampling.temperature for request in model.requests] == [0, 1]
    assert len({request.sampling.seed for request in model.requests}) == 2


def test_a_schema_that_the_mask_keeps_is_not_checked(runtime: gl.Runtime, model: ScriptedModel) -> None:
    model.script = answering("7")
    assert not runtime.generate("x", json_schema={"type": "integer"}, on_unsupported="check").checked


def test_of_several_answers_only_those_that_fail_are_asked_for_again(model: ScriptedModel, runtime: gl.Runtime) -> None:
    answers = iter(["7", "0"])
    model.script = lambda prompt: next(answers)
    done = runtime.generate("x", json_schema=STEPS, on_unsupported="check", n=3)
    assert [one.text for one in done.completions] == ["0", "0", "0"]
    assert [request.sampling.n for request in model.requests] == [3, 3]


def test_a_stream_waits_for_the_verdict(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("77", "99991")
    chunks = list(runtime.stream("x", json_schema=STEPS, on_unsupported="check"))
    assert "".join(chunk.text for chunk in chunks) == "99991"
    assert chunks[-1].finish_reason == "stop"


def test_event_loops_and_programs_check_too(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("7", "0", "7", "99991")
    options = {"json_schema": STEPS, "on_unsupported": "check"}
    assert asyncio.run(runtime.agenerate("x", **options)).text == "0"

    @gl.program
    def step(s):  # type: ignore[no-untyped-def]
        s += "Step: " + gl.gen("step", **options)

    assert step.run(runtime=runtime)["step"] == "99991"


def test_a_text_that_a_stop_string_cuts_is_not_checked(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("12345")
    done = runtime.generate("x", json_schema=STEPS, on_unsupported="check", stop="3")
    assert (done.text, done.checked) == ("12", False)


def test_a_misspelled_keyword_still_raises(runtime: gl.Runtime) -> None:
    with pytest.raises(gl.GrammarError, match="did you mean 'minimum'"):
        runtime.generate("x", json_schema={"type": "integer", "minimun": 3}, on_unsupported="check")


def test_calls_of_tools_are_checked(model: ScriptedModel, runtime: gl.Runtime) -> None:
    tool = Tool("step", {"type": "object", "properties": {"by": STEPS}, "required": ["by"]})
    constraint = tool_constraint(FORM, [tool], "any", parallel=False, on_unsupported="check")

    def call(by: int) -> str:
        return f'{FORM.begin}step{FORM.middle}{{"by": {by}}}{FORM.end}'

    model.script = answering(call(7), call(99991))
    done = runtime.generate("x", **constraint, on_unsupported="check", max_tokens=None)
    assert (done.text, done.checked) == (call(99991), True)


def test_a_cancelled_request_is_not_tried_again(model: ScriptedModel, runtime: gl.Runtime) -> None:
    model.script = answering("7")
    model.hold()
    future = runtime.submit(gl.Request("x", gl.SamplingParams(json_schema=STEPS, on_unsupported="check")))
    model.wait_for(1)
    future.cancel()
    model.release()
    runtime.generate("y", max_tokens=1)
    assert len(model.requests) == 2
