import asyncio
import gc
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal

import pytest
from llama_index.core import PromptTemplate, SummaryIndex
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import Document
from llama_index.core.selectors import PydanticSingleSelector
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, RootModel

from graftlm.adapters.llama_index import GraftCallError, GraftLLM
from graftlm.core.errors import GraftError
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")  # LlamaIndex's own


class Ticket(BaseModel):
    """A support ticket."""

    label: Literal["bug", "question"]
    urgent: bool
    count: int
    tags: list[Literal["a", "b"]] = Field(max_length=3)


class Branch(BaseModel):
    """A part of a tree."""

    name: str = Field(max_length=2)
    price: Decimal = Field(max_digits=3, decimal_places=1)
    parts: list["Branch"] = Field(max_length=2)


PROMPT = PromptTemplate("Read the ticket: {text}")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def colour(name: Literal["red", "blue"]) -> str:
    """Pick a colour."""
    return f"picked {name}"


ADD, COLOUR = FunctionTool.from_defaults(add), FunctionTool.from_defaults(colour)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(max_position_embeddings=16384), tokenizer=byte_tokenizer()) as runtime:
        yield runtime


@pytest.fixture
def llm(runtime: Runtime) -> GraftLLM:
    runtime.clear_cache()
    runtime.reset_stats()
    return GraftLLM(runtime=runtime, temperature=1.0, max_tokens=150)


# -- objects -----------------------------------------------------------------------------------------------------


async def test_random_weights_give_valid_objects_in_one_batch(llm: GraftLLM) -> None:
    tickets = await asyncio.gather(*(llm.astructured_predict(Ticket, PROMPT, text=str(i)) for i in range(200)))
    assert {type(ticket) for ticket in tickets} == {Ticket}
    assert len({str(ticket) for ticket in tickets}) > 100
    assert llm.runtime_for().stats().largest_batch >= 64


def test_the_sync_call_gives_the_object_with_its_own_parameters(llm: GraftLLM) -> None:
    first = llm.structured_predict(Ticket, PROMPT, {"temperature": 0}, text="it crashes")
    assert first == llm.structured_predict(Ticket, PROMPT, {"temperature": 0}, text="it crashes")


async def test_streams_give_partial_objects_and_the_whole_one_last(llm: GraftLLM) -> None:
    *partial, last = llm.stream_structured_predict(Ticket, PROMPT, text="x")
    assert partial and isinstance(last, Ticket)
    items = [item async for item in await llm.astream_structured_predict(Ticket, PROMPT, text="x")]
    assert isinstance(items[-1], Ticket)


def test_the_stream_of_a_list_ends_with_the_list(llm: GraftLLM) -> None:
    class Numbers(RootModel[list[int]]):
        pass

    *_, last = llm.stream_structured_predict(Numbers, PROMPT, {"max_tokens": 20}, text="x")
    assert isinstance(last, Numbers)


def test_a_budget_below_the_shortest_object_raises(llm: GraftLLM) -> None:
    with pytest.raises(GraftError, match="raise max_tokens"):
        llm.structured_predict(Ticket, PROMPT, {"max_tokens": 5}, text="x")


async def test_a_structured_llm_chats_completes_and_streams(llm: GraftLLM) -> None:
    structured = llm.as_structured_llm(Ticket)
    messages = [ChatMessage("x")]
    assert isinstance(structured.chat(messages).raw, Ticket)
    assert isinstance((await structured.achat(messages)).raw, Ticket)
    assert isinstance(structured.complete("x").raw, Ticket)
    assert isinstance(list(structured.stream_chat(messages))[-1].raw, Ticket)


def test_a_query_engine_answers_with_an_object(llm: GraftLLM) -> None:
    index = SummaryIndex.from_documents([Document(text="the ticket says it crashes")])
    engine = index.as_query_engine(llm=llm, output_cls=Ticket, response_mode="compact")
    assert isinstance(engine.query("what is it?").response, Ticket)


def test_the_function_mode_goes_over_a_tool_call(llm: GraftLLM) -> None:
    forced = llm.model_copy(update={"pydantic_program_mode": PydanticProgramMode.FUNCTION})
    assert isinstance(forced.structured_predict(Ticket, PROMPT, {"max_tokens": 400}, text="x"), Ticket)


def test_a_class_that_contains_itself_is_kept(llm: GraftLLM) -> None:
    for seed in range(4):
        options = {"max_tokens": 400, "temperature": 1.5, "seed": seed}
        assert isinstance(llm.structured_predict(Branch, PROMPT, options, text="x"), Branch)


def test_a_tool_that_takes_such_an_object_gets_one(llm: GraftLLM) -> None:
    def plant(branch: Branch) -> str:
        """Plant it."""
        return "planted"

    tool = FunctionTool.from_defaults(plant)
    for seed in range(4):
        answer = llm.chat_with_tools([tool], "grow", tool_required=True, max_tokens=400, temperature=1.5, seed=seed)
        (call,) = llm.get_tool_calls_from_response(answer)
        assert Branch.model_validate(call.tool_kwargs["branch"])


def test_the_text_mode_parses_free_text_and_fails_on_random_weights(llm: GraftLLM) -> None:
    free = llm.model_copy(update={"pydantic_program_mode": PydanticProgramMode.LLM})
    with pytest.raises(ValueError):
        free.structured_predict(Ticket, PROMPT, {"max_tokens": 20}, text="x")


def test_structured_predictions_are_events(llm: GraftLLM) -> None:
    class Events(BaseEventHandler):
        names: list[str] = []

        def handle(self, event: Any, **kwargs: Any) -> None:
            self.names.append(type(event).__name__.removesuffix("Event"))

    handler = Events(names=[])
    get_dispatcher().add_event_handler(handler)
    try:
        llm.structured_predict(Ticket, PROMPT, text="x")
        asyncio.run(llm.astructured_predict(Ticket, PROMPT, text="x"))
    finally:
        get_dispatcher().event_handlers.remove(handler)
    assert handler.names.count("LLMStructuredPredictStart") == handler.names.count("LLMStructuredPredictEnd") == 2
    assert handler.names.count("LLMChatStart") == handler.names.count("LLMChatEnd") == 2


def test_a_pydantic_selector_gets_a_number(llm: GraftLLM) -> None:  # its schema does not say of how many
    selector = PydanticSingleSelector.from_defaults(llm=llm)
    result = selector.select([f"about topic {i}" for i in range(5)], "which?")
    assert isinstance(result.selections[0].index, int)


def test_a_response_format_of_another_kind_raises(llm: GraftLLM) -> None:
    with pytest.raises(GraftCallError, match="response_format is"):
        llm.chat([ChatMessage("x")], response_format={"type": "yaml"})
    with pytest.raises(GraftCallError, match="output_cls is <class 'dict'>; give a pydantic class"):
        llm.structured_predict(dict, PROMPT, text="x")


# -- tools -------------------------------------------------------------------------------------------------------


def test_a_required_tool_is_always_called(llm: GraftLLM) -> None:
    for _ in range(5):
        response = llm.chat_with_tools([ADD, COLOUR], "go", tool_required=True)
        (call,) = llm.get_tool_calls_from_response(response)  # allow_parallel_tool_calls is False
        {"add": add, "colour": colour}[call.tool_name](**call.tool_kwargs)
        blocks = [b for b in response.message.blocks if b.block_type == "tool_call"]
        assert [b.tool_call_id for b in blocks] == [call.tool_id]


def test_a_tool_without_parameters_is_called_without_arguments(llm: GraftLLM) -> None:
    def now() -> str:
        """Tell the time."""
        return "noon"

    answer = llm.predict_and_call([FunctionTool.from_defaults(now)], "what time is it?", temperature=1.5)
    assert str(answer) == "noon"


def test_a_function_that_is_no_tool_raises(llm: GraftLLM) -> None:
    with pytest.raises(GraftCallError, match="is no tool; give a BaseTool, such as FunctionTool.from_defaults"):
        llm.chat_with_tools([add], "go")


def test_parallel_calls_have_ids_of_their_own(llm: GraftLLM) -> None:
    response = llm.chat_with_tools([COLOUR], "go", tool_required=True, allow_parallel_tool_calls=True, max_tokens=600)
    ids = [call.tool_id for call in llm.get_tool_calls_from_response(response)]
    assert len(ids) == len(set(ids)) >= 1


def test_no_call_raises_only_where_one_was_asked_for(llm: GraftLLM) -> None:
    response = llm.chat_with_tools([ADD], "go", tool_choice="none", max_tokens=5)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="at least one tool call"):
        llm.get_tool_calls_from_response(response)


async def test_streamed_calls_equal_those_of_chat(llm: GraftLLM) -> None:
    call = {"tools": [ADD], "user_msg": "go", "tool_required": True, "temperature": 0}
    whole = llm.get_tool_calls_from_response(llm.chat_with_tools(**call))
    *_, last = llm.stream_chat_with_tools(**call)
    *_, alast = [r async for r in await llm.astream_chat_with_tools(**call)]
    for response in (last, alast):
        calls = llm.get_tool_calls_from_response(response)
        assert [(c.tool_name, c.tool_kwargs) for c in calls] == [(c.tool_name, c.tool_kwargs) for c in whole]


async def test_predict_and_call_runs_the_tool(llm: GraftLLM) -> None:
    answer = llm.predict_and_call([COLOUR], "go", tool_required=True)
    assert str(answer).startswith("picked")
    assert str(await llm.apredict_and_call([COLOUR], "go", tool_required=True)).startswith("picked")


# -- agents ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tidy() -> Iterator[None]:
    """Agents keep their memory in a database that nobody closes; see that it goes within the test."""
    yield
    gc.collect()


unclosed = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning", "ignore:is_running called"
)


@unclosed
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_its_tools(llm: GraftLLM, tidy: None, streaming: bool) -> None:
    class Once(GraftLLM):
        """Calls a tool in its first turn and speaks in its second, as a trained model would."""

        def _prepare_chat_with_tools(self, tools: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = super()._prepare_chat_with_tools(tools, *args, **kwargs)
            answered = any(message.role.value == "tool" for message in prepared["messages"])
            return {**prepared, "tool_choice": "none" if answered else "required"}

    agent = FunctionAgent(tools=[COLOUR], llm=Once(runtime=llm.runtime, max_tokens=60), streaming=streaming)
    result = await agent.run("pick a colour")
    assert [call.tool_name for call in result.tool_calls] == ["colour"]
    assert str(result.tool_calls[0].tool_output).startswith("picked")


@unclosed
async def test_a_workflow_of_two_agents_runs(llm: GraftLLM, tidy: None) -> None:
    agents = [
        FunctionAgent(name=name, description=name, tools=[COLOUR], llm=GraftLLM(runtime=llm.runtime, max_tokens=20))
        for name in ("first", "second")
    ]
    result = await AgentWorkflow(agents=agents, root_agent="first").run("hello")
    assert result.response.content is not None


@unclosed
async def test_a_react_agent_runs_to_its_answer(llm: GraftLLM, tidy: None) -> None:
    agent = ReActAgent(tools=[COLOUR], llm=GraftLLM(runtime=llm.runtime, temperature=0, max_tokens=20))
    result = await agent.run("hello", max_iterations=2, early_stopping_method="generate")
    assert result.response is not None
