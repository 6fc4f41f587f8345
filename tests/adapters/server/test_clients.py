"""Clients that others wrote, against a real server: what they send is understood, what they get they can read.

ChatOpenAI has a file of its own; lm-eval's command is in docs/serve.md.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import graftlm as gl
from tests.served import Served

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; the network has no part in this

QUESTION = "Mara is 20 years old. How old is Mara?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::pydantic.warnings.PydanticDeprecatedSince20"
)


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def expected() -> str:
    return str(gl.Runtime.shared("sprout", dtype="float32").generate(MESSAGES, temperature=0, max_tokens=8).text)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


@pytest.mark.filterwarnings("ignore")
def test_litellm(server: Served, expected: str) -> None:
    import litellm

    to: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 8}
    answer = litellm.completion("openai/sprout", messages=MESSAGES, **to)
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    pieces = litellm.completion("openai/sprout", messages=MESSAGES, stream=True, **to)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion("openai/sprout", messages=MESSAGES, **{**to, "temperature": -1})


@pytest.mark.filterwarnings("ignore")
def test_dspy_lm(server: Served) -> None:
    import dspy

    lm = dspy.LM(
        "openai/sprout", api_base=f"{server.url}/v1", api_key="none", max_tokens=60, temperature=0, cache=False
    )
    with dspy.context(lm=lm):
        answer = dspy.Predict("question -> answer")(question=QUESTION)
        chosen = dspy.Predict("text -> positive: bool")(text="I love it.")
    assert isinstance(answer.answer, str)
    assert chosen.positive in (True, False)
    text = dspy.LM(
        "openai/sprout", api_base=f"{server.url}/v1", api_key="none", model_type="text", max_tokens=8, cache=False
    )
    assert len(text("Mara is")) == 1


def test_guidance_openai(server: Served, expected: str) -> None:
    import guidance
    from guidance import assistant, gen, models, user

    lm = models.OpenAI("sprout", base_url=f"{server.url}/v1", api_key="none", echo=False)
    with user():
        lm += QUESTION
    with assistant():
        lm += gen("age", max_tokens=8, temperature=0)
    assert lm["age"] == expected
    with user():
        lm += "Who is it?"
    with assistant():
        lm += guidance.json("person", schema=Person)
    assert Person.model_validate_json(lm["person"])


def test_llama_index_openai_like(server: Served, expected: str) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool

    given: dict[str, Any] = {"model": "sprout", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    given |= {"context_window": 4096, "max_retries": 0}
    llm = module.OpenAILike(**given, is_chat_model=True, is_function_calling_model=True, max_tokens=60)
    assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content.startswith(expected)
    pieces = llm.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert "".join(piece.delta for piece in pieces).startswith(expected)
    answer = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="Weather in Oslo?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, set(call.tool_kwargs)) == ("weather", {"city"})
    assert isinstance(llm.structured_predict(Person, PromptTemplate("Mara is 20.")), Person)
    text = module.OpenAILike(**given, is_chat_model=False, max_tokens=8)
    own = gl.Runtime.shared("sprout", dtype="float32").generate("Mara is", temperature=0, max_tokens=8).text
    assert text.complete("Mara is").text == own


SGLANG_ROUTER = {
    "/v1/chat/completions": '{"messages":[{"role":"user","content":"hi"}],"model":"sprout","logprobs":false,'
    '"max_completion_tokens":4,"stream":false,"tool_choice":"auto","tools":[{"type":"function","function":{"name":'
    '"weather","parameters":{"type":"object","properties":{}}}}],"no_stop_trim":false,"ignore_eos":false,'
    '"continue_final_message":false,"skip_special_tokens":true,"separate_reasoning":true,"stream_reasoning":true,'
    '"return_hidden_states":false}',
    "/v1/completions": '{"model":"sprout","prompt":"hi","max_tokens":4,"stream":false,"echo":false,'
    '"no_stop_trim":false,"ignore_eos":false,"skip_special_tokens":true,"return_hidden_states":false}',
}
"""What sglang-router 0.3.2 made of a client's request with three fields."""


@pytest.mark.parametrize("path", SGLANG_ROUTER)
def test_what_sglang_router_writes_is_understood(server: Served, path: str) -> None:
    answer = httpx.post(
        f"{server.url}{path}", content=SGLANG_ROUTER[path], headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


def test_a_runtime_of_graftlm_at_this_server(server: Served) -> None:
    @gl.program
    def card(s: Any) -> None:
        s += "Name: " + gl.gen("name", stop="\n", max_tokens=8, temperature=0)
        s += "\nAge: " + gl.gen("age", regex="[0-9]+", max_tokens=4, temperature=0)

    with gl.Runtime("sprout", base_url=f"{server.url}/v1", api_key="none") as there:
        state = card.run(runtime=there)
        here = card.run(runtime=gl.Runtime.shared("sprout", dtype="float32"))
        assert state["age"].isdigit()
        assert (state["name"].strip(), state["age"]) == (here["name"].strip(), here["age"])


def test_a_small_model_proves_that_its_turns_are_continued(server: Served) -> None:
    @gl.program(num_api_spec_tokens=32, temperature=0)
    def card(s: Any) -> None:
        s += gl.user('Text: Ann is a cook from Oslo. As JSON, such as {"name": "Bob", "city": "Rome"}:')
        with s.assistant():
            s += '{"name": "' + gl.gen("name", stop='"', max_tokens=8)
            s += '", "city": "' + gl.gen("city", stop='"', max_tokens=8) + '"}'

    with gl.Runtime("sprout", base_url=f"{server.url}/v1") as there:
        card.run(runtime=there).wait()
        assert there.endpoint is not None
        assert there.endpoint.capabilities.continue_turn == "continue_final_message"  # it cannot count, but copy
