"""DSPy over plain transformers, on every path that GraftLM's class has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import dspy
import pytest

from graftlm.ab.classes.dspy import engines
from tests.models import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return engines(4)["hf"](str(folder))


def test_asynchronous_calls_answer_as_waiting_ones(lm: Any) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(lm.acall("Hello"), lm.acall("Hello"))

    assert asyncio.run(both()) == [lm("Hello"), lm("Hello")]


def test_streams_answer_as_calls(lm: Any) -> None:
    async def streamed(program: Any) -> str:
        async for chunk in dspy.streamify(program)(text="Hello"):
            if isinstance(chunk, dspy.Prediction):
                return str(chunk.answer)
        raise AssertionError("the stream ended without a prediction")

    class Ask(dspy.Module):
        def forward(self, text: str) -> Any:
            return dspy.Prediction(answer=lm(text)[0])

        async def aforward(self, text: str) -> Any:
            return dspy.Prediction(answer=(await lm.acall(text))[0])

    (expected,) = lm("Hello")
    assert asyncio.run(streamed(Ask())) == expected
