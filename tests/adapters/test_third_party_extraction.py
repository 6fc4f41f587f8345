"""Extractors, memories and judges that others wrote on LangChain's interface, unchanged, over `ChatGraftLM`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import BaseModel

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.testing import ScriptedModel

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say about LangGraph's names


class Person(BaseModel):
    """A person."""

    name: str
    job: str


@contextmanager
def scripted(script: Callable[[str], str]) -> Iterator[tuple[ChatGraftLM, ScriptedModel]]:
    model = ScriptedModel(script)
    with model.runtime() as runtime:
        yield ChatGraftLM(runtime=runtime, temperature=0, max_tokens=200), model


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_trustcall_extracts_and_patches() -> None:
    trustcall = pytest.importorskip("trustcall", reason="install graftlm[test-third-party]")

    def script(prompt: str) -> str:
        if "PatchDoc" not in prompt:
            name = next(name for name in ("Mara", "Tom") if name in prompt)
            return call("Person", f'{{"name": "{name}", "job": "baker"}}')
        patch = '{"op": "replace", "path": "/job", "value": "smith"}'
        return call("PatchDoc", f'{{"json_doc_id": "Person", "planned_edits": "a new job", "patches": [{patch}]}}')

    with scripted(script) as (llm, _):
        extractor = trustcall.create_extractor(llm, tools=[Person], tool_choice="Person")
        asked = [{"messages": [("user", f"{name} is a baker.")]} for name in ("Mara", "Tom")]
        assert [found["responses"] for found in extractor.batch(asked)] == [
            [Person(name="Mara", job="baker")],
            [Person(name="Tom", job="baker")],
        ]
        known = {"Person": {"name": "Mara", "job": "baker"}}
        found = extractor.invoke({"messages": [("user", "Mara is a smith now.")], "existing": known})
        assert found["responses"] == [Person(name="Mara", job="smith")]


def test_langmem_keeps_facts_and_sums_a_conversation_up() -> None:
    langmem = pytest.importorskip("langmem", reason="install graftlm[test-third-party]")
    from langmem.short_term import summarize_messages

    def script(prompt: str) -> str:
        return call("Person", '{"name": "Mara", "job": "baker"}') if "Person" in prompt else "Mara bakes."

    with scripted(script) as (llm, _):
        manager = langmem.create_memory_manager(llm, schemas=[Person], instructions="Note people.")
        (memory,) = manager.invoke({"messages": [{"role": "user", "content": "Mara is a baker."}]})
        assert memory.content == Person(name="Mara", job="baker")
        messages: list[Any] = []
        for i in range(6):
            messages += [HumanMessage(f"Mara is a baker {i}.", id=f"h{i}"), AIMessage("Noted.", id=f"a{i}")]
        done = summarize_messages(
            messages,
            running_summary=None,
            model=llm,
            max_tokens=200,
            max_tokens_before_summary=100,
            max_summary_tokens=60,
            token_counter=llm.get_num_tokens_from_messages,
        )
        assert done.running_summary is not None and done.running_summary.summary == "Mara bakes."


def test_metrics_of_deepeval_get_the_objects_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DEEPEVAL_TELEMETRY_OPT_OUT", "YES")
    pytest.importorskip("deepeval", reason="pip install deepeval")
    from deepeval.metrics import AnswerRelevancyMetric
    from deepeval.models import DeepEvalBaseLLM
    from deepeval.test_case import LLMTestCase

    def script(prompt: str) -> str:
        if "'verdict'" in prompt or '"verdict"' in prompt:
            return '{"verdicts":[{"verdict":"yes"},{"verdict":"no","reason":"beside the point"}]}'
        return (
            '{"statements":["Mara lives in Dorvik.","Bread is good."]}' if "statements" in prompt else '{"reason":"."}'
        )

    with scripted(script) as (llm, model):

        class Judge(DeepEvalBaseLLM):  # type: ignore[misc]
            def load_model(self, *_: Any, **__: Any) -> Any:
                return llm

            def generate(self, prompt: str, schema: Any = None) -> Any:
                return llm.with_structured_output(schema).invoke(prompt) if schema else llm.invoke(prompt).content

            async def a_generate(self, prompt: str, schema: Any = None) -> Any:
                return self.generate(prompt, schema)

            def get_model_name(self, *_: Any) -> str:
                return "GraftLM"

        metric = AnswerRelevancyMetric(model=Judge(), async_mode=False, include_reason=False)
        metric.measure(LLMTestCase(input="Where?", actual_output="Mara lives in Dorvik."), _show_indicator=False)
        assert metric.score == 0.5 and len(model.prompts) == 2
