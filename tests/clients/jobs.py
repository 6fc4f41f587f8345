"""A small job with each client: an answer, a stream, a tool and a schema. Arguments: the server, names of clients.

It imports nothing of GraftLM. The exit status is the number of jobs that failed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

URL = sys.argv[1]
ASK: list[Any] = [{"role": "user", "content": "Mara is a baker. What is Mara?"}]
RAIN: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "the weather of a city", "parameters": PARAMETERS}


class Person(BaseModel):
    name: str
    job: str


def openai_chat() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    chat: Any = client.chat.completions
    tools = [{"type": "function", "function": FUNCTION}]
    given = {"model": "sprout", "temperature": 0, "max_tokens": 80}
    text = chat.create(messages=ASK, **given).choices[0].message.content
    assert "baker" in text
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat.create(messages=ASK, stream=True, **given)]
    assert "".join(pieces) == text
    called = chat.create(messages=RAIN, tools=tools, tool_choice="required", **given).choices[0].message.tool_calls
    assert "city" in json.loads(called[0].function.arguments)
    assert chat.parse(messages=ASK, response_format=Person, **given).choices[0].message.parsed.name


def openai_responses() -> None:
    import openai

    responses: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").responses
    given = {"model": "sprout", "temperature": 0, "max_output_tokens": 80}
    first = responses.create(input=ASK, **given)
    assert "baker" in first.output_text
    assert responses.create(input="And?", previous_response_id=first.id, **given).output_text
    with responses.stream(input=ASK, **given) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    called = responses.create(input=RAIN, tools=tools, tool_choice="required", **given).output[0]
    assert "city" in json.loads(called.arguments)
    assert responses.parse(input=ASK, text_format=Person, **given).output_parsed.name


def anthropic_messages() -> None:
    import anthropic

    messages: Any = anthropic.Anthropic(base_url=URL, api_key="none").messages
    given = {"model": "sprout", "max_tokens": 80}
    assert messages.create(messages=ASK, **given).content[0].text
    with messages.stream(messages=ASK, **given) as stream:
        assert "".join(stream.text_stream)
    tools = [{"name": "weather", "description": "the weather of a city", "input_schema": PARAMETERS}]
    called = messages.create(messages=RAIN, tools=tools, tool_choice={"type": "any"}, **given)
    assert "city" in called.content[-1].input
    assert messages.count_tokens(messages=ASK, model="sprout").input_tokens > 5


def ollama_chat() -> None:
    import ollama

    client: Any = ollama.Client(host=URL)
    options = {"temperature": 0, "num_predict": 80}
    text = client.chat("sprout", ASK, options=options).message.content
    assert "baker" in text
    assert "".join(one.message.content for one in client.chat("sprout", ASK, options=options, stream=True)) == text
    found = client.chat("sprout", ASK, format=Person.model_json_schema(), options=options).message.content
    assert Person.model_validate_json(found)
    tools = [{"type": "function", "function": FUNCTION}]
    assert client.chat("sprout", RAIN, tools=tools, options=options).message
    assert [model.model for model in client.list().models] == ["sprout"]


def litellm_chat() -> None:
    import litellm

    given: Any = {"model": "openai/sprout", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 80}
    given |= {"temperature": 0}
    assert "baker" in litellm.completion(messages=ASK, **given).choices[0].message.content
    chunks = litellm.completion(messages=ASK, stream=True, **given)
    assert "baker" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    tools = [{"type": "function", "function": FUNCTION}]
    called = litellm.completion(messages=RAIN, tools=tools, tool_choice="required", **given)
    assert "city" in json.loads(called.choices[0].message.tool_calls[0].function.arguments)
    found = litellm.completion(messages=ASK, response_format=Person, **given).choices[0].message.content
    assert Person.model_validate_json(found)


def agents_run() -> None:
    """The Agents SDK in its default mode: the Responses API, with tracing off and no other option."""
    import asyncio

    import agents
    import openai

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sun in {city}"

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))

    def agent(tool_choice: str | None = None, **given: Any) -> Any:
        settings = agents.ModelSettings(temperature=0, max_tokens=80, tool_choice=tool_choice)
        return agents.Agent(name="helper", model="sprout", model_settings=settings, **given)

    async def run() -> None:
        assert "baker" in (await agents.Runner.run(agent(), ASK)).final_output
        events = [event.type async for event in agents.Runner.run_streamed(agent(), ASK).stream_events()]
        assert "raw_response_event" in events
        caller = agent("required", tools=[weather], tool_use_behavior="stop_on_first_tool")
        assert "sun in" in (await agents.Runner.run(caller, RAIN)).final_output
        assert (await agents.Runner.run(agent(output_type=Person), ASK)).final_output.name

    asyncio.run(run())


def pydantic_ai_run() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model: Any = kind("sprout", provider=provider)
        settings: Any = {"temperature": 0, "max_tokens": 80}
        agent = Agent(model, model_settings=settings)
        text = agent.run_sync(ASK[0]["content"]).output
        assert "baker" in text
        stream = agent.run_stream_sync(ASK[0]["content"])
        assert list(stream.stream_text())[-1] == text
        assert (
            Agent(model, output_type=NativeOutput(Person), model_settings=settings).run_sync("Mara is a baker.").output
        )
        assert Agent(model, output_type=Person, model_settings=settings).run_sync("Mara is a baker.").output.name


def instructor_create() -> None:
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    given: Any = {"model": "sprout", "messages": ASK, "response_model": Person, "temperature": 0, "max_tokens": 80}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        assert instructor.from_openai(client, mode=mode).chat.completions.create(**given, max_retries=0).name
    partial = instructor.from_openai(client).chat.completions.create_partial(**given, max_retries=0)
    assert [*partial][-1].name


def agent_framework_run() -> None:
    """Microsoft's Agent Framework: an answer, a stream, a tool, a schema and a session, on responses and on chat."""
    import asyncio

    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sun in {city}"

    async def run(kind: Any) -> None:
        options: Any = {"temperature": 0, "max_tokens": 80}
        agent: Any = Agent(kind("sprout", api_key="none", base_url=f"{URL}/v1"), default_options=options)
        text = (await agent.run(ASK[0]["content"])).text
        assert "baker" in text
        stream = agent.run(ASK[0]["content"], stream=True)
        assert [update async for update in stream]
        assert (await stream.get_final_response()).text == text
        called = await agent.run(RAIN[0]["content"], tools=[weather], options={"tool_choice": "required"})
        assert "function_result" in [part.type for message in called.messages for part in message.contents]
        assert (await agent.run(ASK[0]["content"], options={"response_format": Person})).value.name
        session = agent.create_session()
        await agent.run("Mara is a baker.", session=session)
        assert "baker" in (await agent.run("What is Mara?", session=session)).text

    for kind in (OpenAIChatClient, OpenAIChatCompletionClient):
        asyncio.run(run(kind))


def langchain_traced() -> None:
    """LangChain under OpenTelemetry: the spans of a chain hold the model and the tokens that the server counted."""
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    LangChainInstrumentor().instrument(tracer_provider=provider)
    given: Any = {"base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 80, "stream_usage": True}
    model: Any = ChatOpenAI(model="sprout", **given)
    chain = ChatPromptTemplate.from_messages([("user", "Mara is a {job}. What is Mara?")]) | model
    text = str(chain.invoke({"job": "baker"}).content)
    assert "baker" in text
    assert "".join(str(chunk.content) for chunk in chain.stream({"job": "baker"})) == text
    tool = {"type": "function", "function": FUNCTION}
    assert "city" in model.bind_tools([tool], tool_choice="required").invoke(RAIN).tool_calls[0]["args"]
    assert model.with_structured_output(Person, method="json_schema").invoke(ASK).name
    spans: list[Any] = [one.attributes for one in exporter.get_finished_spans() if one.name == "ChatOpenAI"]
    assert len(spans) == 4, [one.name for one in exporter.get_finished_spans()]
    for span in spans:
        assert span["llm.model_name"] == "sprout"
        assert span["llm.token_count.prompt"] > 0 and span["llm.token_count.completion"] > 0


JOBS: dict[str, list[Callable[[], None]]] = {
    "openai": [openai_chat, openai_responses],
    "anthropic": [anthropic_messages],
    "ollama": [ollama_chat],
    "litellm": [litellm_chat],
    "openai-agents": [agents_run],
    "pydantic-ai-slim": [pydantic_ai_run],
    "instructor": [instructor_create],
    "agent-framework": [agent_framework_run],
    "langchain-openai": [langchain_traced],
}

DISTRIBUTIONS = {"agent-framework": "agent-framework-core"}
"""The distribution of a client that is not named as the client."""


def main() -> int:
    failed = 0
    for package in sys.argv[2:] or JOBS:
        for job in JOBS[package]:
            started = time.monotonic()
            try:
                job()
                how = "passed"
            except Exception:
                how, failed = "FAILED", failed + 1
                traceback.print_exc()
            name = f"{package} {version(DISTRIBUTIONS.get(package, package))}"
            print(f"{name}: {job.__name__} {how} in {time.monotonic() - started:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
