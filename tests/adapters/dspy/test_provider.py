"""`dspy.LM("graftlm/MODEL")`: a model string alone reaches a model in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMConfigurationError

import graftlm as gl
from graftlm.adapters.dspy import GraftAdapter

PASSAGE = "Mara Velin is a baker. She lives in Dorvik."


@pytest.fixture
def lm() -> dspy.LM:
    return dspy.LM("graftlm/sprout", temperature=0, max_tokens=40, cache=False)


class Age(dspy.Signature):
    passage: str = dspy.InputField()
    place: str = dspy.OutputField()
    age: int = dspy.OutputField()


def test_a_model_string_is_answered_by_the_processs_runtime(lm: dspy.LM) -> None:
    before = gl.Runtime.shared("sprout").stats().requests
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Age)(passage=PASSAGE).age, int)
    with dspy.context(lm=lm, adapter=GraftAdapter()):
        answers = dspy.Predict(Age)(passage=PASSAGE, config={"n": 2, "temperature": 1.0})
        assert len(answers.completions.place) == 2
        assert isinstance(asyncio.run(dspy.Predict(Age).acall(passage=PASSAGE)).age, int)
    assert gl.Runtime.shared("sprout").stats().requests > before
    assert lm.history[-1]["usage"]["prompt_tokens"] > 100


def test_a_model_string_streams(lm: dspy.LM) -> None:
    with dspy.context(lm=lm, adapter=GraftAdapter()):
        listener = dspy.streaming.StreamListener(signature_field_name="place")
        stream: Any = dspy.streamify(dspy.Predict(Age), stream_listeners=[listener], async_streaming=False)
        *chunks, last = stream(passage=PASSAGE)
    assert "".join(chunk.chunk for chunk in chunks) == last.place


def test_a_model_string_of_no_model_is_an_error_of_dspy() -> None:
    with pytest.raises(LMConfigurationError, match="no-such-model"):
        dspy.LM("graftlm/no-such-model", cache=False)("hello")
