"""Models whose thinking and calls are marked by special tokens: Mistral's pairs, GPT-OSS's channels."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import graftlm as gl
from graftlm.adapters.server import Server, ServerSettings
from graftlm.core.chat.harmony import ChannelFormat, learn_channels
from graftlm.core.chat.messages import Message, ToolCall
from graftlm.core.chat.thinking import ThinkingFormat, learn_thinking, split_thinking
from graftlm.core.text.tokenizer import Tokenizer
from graftlm.testing import ScriptedModel
from tests.core.chat.families import gpt_oss, mistral

ASK = [{"role": "user", "content": "Weather in Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
THOUGHT = "Ask the tool."
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
CALL_BY_ROLE = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
FAMILIES: dict[str, tuple[Any, dict[str, str]]] = {
    "gpt_oss": (
        gpt_oss,
        {
            "text": f"{ANALYSIS}<|channel|>final<|message|>Sun.",
            "call": f"{ANALYSIS}{CALL}",
            "json": f'{ANALYSIS}<|channel|>final<|message|>{{"city":"Rome"}}',
            "plain": "<|channel|>final<|message|>Sun.",
        },
    ),
    "mistral": (
        mistral,
        {
            "text": f"[THINK]{THOUGHT}[/THINK]Sun.",
            "call": f'[THINK]{THOUGHT}[/THINK][TOOL_CALLS]weather[ARGS]{{"city": "Rome"}}',
            "json": f'[THINK]{THOUGHT}[/THINK]{{"city":"Rome"}}',
            "plain": "Sun.",
        },
    ),
}


class Family:
    """A served model that answers as `answer` says."""

    def __init__(self, name: str) -> None:
        make, self.scripts = FAMILIES[name]
        self.answer = "text"
        self.model = ScriptedModel(self._rest)
        self.runtime = self.model.runtime(tokenizer=make()).load()

    def _rest(self, prompt: str) -> str:
        """The answer without its beginning that the prompt ends with."""
        script = self.scripts[self.answer]
        return next((script[end:] for end in range(len(script), 0, -1) if prompt.endswith(script[:end])), script)

    async def post(self, path: str = "/v1/chat/completions", **given: Any) -> httpx.Response:
        server = Server(self.runtime, ServerSettings(model_names=("m",)))
        body = {"messages": ASK, "temperature": 0, "max_tokens": 200, "model": "m", **given}
        transport = httpx.ASGITransport(server)
        async with (
            server._lifespan(None),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):  # type: ignore[arg-type]
            answer = await client.post(path, json={name: value for name, value in body.items() if value is not None})
        assert answer.status_code == 200, answer.text
        return answer

    async def message(self, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = (await self.post(**given)).json()["choices"][0]["message"]
        return found

    async def deltas(self, **given: Any) -> list[dict[str, Any]]:
        text = (await self.post(stream=True, **given)).text
        return [json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    family = Family(request.param)
    yield family
    family.runtime.close()


async def test_thinking_is_apart_whole_and_streamed_and_counted(family: Family) -> None:
    family.answer = "text"
    answer = (await family.post()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Sun.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(THOUGHT)}  # a token a byte
    deltas = await family.deltas()
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == THOUGHT
    assert "".join(d.get("content") or "" for d in deltas) == "Sun."
    family.answer = "plain"
    message = await family.message()
    assert (message["reasoning_content"], message["content"]) == (None, "Sun.")


async def test_a_schema_begins_behind_the_thinking(family: Family) -> None:
    family.answer = "json"
    message = await family.message(response_format=FORMAT)
    assert message["reasoning_content"] == THOUGHT
    assert json.loads(message["content"]) == {"city": "Rome"}
    family.answer = "text"  # free text is not allowed: the answer is JSON all the same
    message = await family.message(response_format=FORMAT)
    assert message["reasoning_content"] == THOUGHT
    assert set(json.loads(message["content"])) == {"city"}
    family.answer = "plain"
    assert set(json.loads((await family.message(response_format=FORMAT))["content"])) == {"city"}


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_are_read_behind_the_thinking(family: Family, choice: str) -> None:
    family.answer = "call"
    message = await family.message(tools=TOOLS, tool_choice=choice)
    assert message["reasoning_content"] == THOUGHT
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Rome"})
    assert message["content"] is None
    deltas = await family.deltas(tools=TOOLS, tool_choice=choice)
    calls = [d["tool_calls"][0] for d in deltas if d.get("tool_calls")]
    assert calls[0]["function"]["name"] == "weather"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    family.answer = "text"
    message = await family.message(tools=TOOLS, tool_choice=choice)
    assert message["reasoning_content"] == THOUGHT
    assert (message.get("tool_calls") is not None) == (choice == "required")
    assert choice == "required" or message["content"] == "Sun."


async def test_a_budget_ends_the_thinking(family: Family) -> None:
    family.answer = "json"
    answer = (await family.post(response_format=FORMAT, thinking_budget=4)).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"].rstrip() == THOUGHT[:4].rstrip()
    assert set(json.loads(message["content"])) == {"city"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


async def test_the_other_dialects_have_blocks_of_thinking(family: Family) -> None:
    family.answer = "text"
    blocks = (await family.post("/v1/messages")).json()["content"]
    assert [(b["type"], b.get("thinking") or b.get("text")) for b in blocks] == [
        ("thinking", THOUGHT),
        ("text", "Sun."),
    ]
    response = (await family.post("/v1/responses", messages=None, input=ASK, max_tokens=None)).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
    said = (await family.post("/api/chat", stream=False, temperature=None, max_tokens=None)).json()["message"]
    assert (said["thinking"], said["content"]) == (THOUGHT, "Sun.")


def test_langchain_llama_index_and_dspy_have_their_blocks(family: Family) -> None:
    import dspy
    from langchain_core.messages import AIMessage
    from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock

    from graftlm.adapters.dspy import Engine
    from graftlm.adapters.langchain import ChatGraftLM
    from graftlm.adapters.llama_index import GraftLLM

    family.answer = "text"
    answer = ChatGraftLM(runtime=family.runtime).invoke("hi")
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_token_details"] == {"reasoning": len(THOUGHT)}
    said = GraftLLM(runtime=family.runtime).chat([ChatMessage(role="user", content="hi")]).message
    assert [block.content for block in said.blocks if isinstance(block, ThinkingBlock)] == [THOUGHT]
    assert said.content == "Sun."
    engine = Engine(family.runtime)
    (text,) = dspy.LM(engine.model_string, engine=engine, cache=False)("hi")
    assert (text["text"] if isinstance(text, dict) else text) == "Sun."
    family.answer = "call"
    called = ChatGraftLM(runtime=family.runtime).bind_tools(TOOLS).invoke("hi")
    assert isinstance(called, AIMessage)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Rome"})]


def test_a_guidance_program_writes_the_markers_as_special_tokens(family: Family) -> None:
    from guidance import assistant, gen, user
    from guidance._ast import SpecialToken

    from graftlm.adapters.guidance import GraftModel

    family.answer = "text"
    before, after = family.scripts["text"].split(THOUGHT)
    begin, end = (re.split(r"(<\|\w+\|>|\[/?\w+\])", part.removesuffix("Sun.")) for part in (before, after))
    ids = family.runtime.tokenizer.complete.convert_tokens_to_ids

    def written(parts: list[str]) -> Any:
        nodes = [SpecialToken(id=ids(part)) if part[0] in "<[" else part for part in parts if part]
        return functools.reduce(operator.add, nodes, "")

    with user():
        lm = GraftModel(runtime=family.runtime, echo=False) + "Weather?"
    with assistant():
        said = lm + written(begin) + gen("thought", max_tokens=40) + written(end) + gen("answer", max_tokens=20)
    assert (said["thought"], said["answer"]) == (THOUGHT, "Sun.")
    assert str(said).endswith(family.scripts["text"])
    text = "".join(end)
    with pytest.raises(gl.GrammarError, match="special token"), assistant():
        lm + (before + gen("thought", max_tokens=9, stop=text) + text)


def test_an_agent_sees_its_own_thinking_and_calls_again(family: Family) -> None:
    turns = [
        Message("user", "hi"),
        Message("assistant", "", (ToolCall("abcdefghi", "weather", {"city": "Rome"}),), thinking=THOUGHT),
        Message("tool", "sun", tool_call_id="abcdefghi"),
    ]
    assert THOUGHT in family.runtime.tokenizer.render(turns)
    both = family.runtime.tokenizer.render(
        [turns[0], Message(*["assistant", "Wait."], turns[1].tool_calls, thinking="Hm.")]
    )
    assert "Hm." in both
    assert "Wait." in both


CHANNELS = learn_channels(Tokenizer(gpt_oss()), {})
BEGIN, MIDDLE = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>Sun.", THOUGHT, "Sun."),
        (f"{ANALYSIS}{CALL}", THOUGHT, f'{BEGIN}weather{MIDDLE}{{"city": "Rome"}}'),
        (f"{ANALYSIS}{CALL_BY_ROLE}", THOUGHT, f'{BEGIN}weather{MIDDLE}{{"city": "Rome"}}'),
        (f"{ANALYSIS}{ANALYSIS}<|channel|>commentary<|message|>Wait.<|end|>", f"{THOUGHT}\n\n{THOUGHT}", "Wait."),
        ("<|channel|>analysis<|message|>cut in the mid", "cut in the mid", ""),
        ("<|channel|>analysis<|mess", "", ""),
        ("No header at all.", "", "No header at all."),
    ],
)
def test_channels_are_split_the_same_whole_and_in_any_pieces(text: str, thought: str, content: str) -> None:
    assert isinstance(CHANNELS, ChannelFormat)
    assert split_thinking(CHANNELS, text) == (thought, content)
    for size in (1, 2, 5):
        reader = CHANNELS.reader()
        pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)] + [reader.finish()]
        assert ("".join(t for t, _ in pieces), "".join(c for _, c in pieces)) == (thought, content)


def test_tokens_are_counted_where_markers_are_no_single_tokens() -> None:
    tokenizer = Tokenizer(gpt_oss())
    form = ThinkingFormat("<think>", "</think>", starts="before")
    assert form.num_tokens(tokenizer, tokenizer.encode("<think>abc</think>\n\nd")) == pytest.approx(3, abs=8)
    assert form.num_tokens(tokenizer, tokenizer.encode("abc")) == 0


def test_a_family_of_a_plugin_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftlm.plugins import builtin, hookspecs, manager

    class Acme:
        @staticmethod
        @hookspecs.hookimpl
        def graftlm_register_thinking(register: hookspecs.Register) -> None:
            register("acme", lambda tokenizer, options: ThinkingFormat("<a>", "</a>"))

    registry = manager.Registry()
    registry.add("graftlm", builtin)
    registry.add("acme", Acme)
    monkeypatch.setattr(manager, "load", lambda: registry)
    assert learn_thinking(Tokenizer(mistral())) == ThinkingFormat("<a>", "</a>")
    registry.remove("acme")
    assert isinstance(learn_thinking(Tokenizer(mistral())), ThinkingFormat)


def test_special_tokens_are_required_as_tokens_and_never_spelled() -> None:
    """Characters that look like a marker stay text; a grammar asks for the token."""
    with ScriptedModel(lambda prompt: "x").runtime(tokenizer=mistral()) as runtime:
        from graftlm.core.chat.tool_format import ToolFormat
        from graftlm.core.chat.tool_grammar import tool_constraint
        from graftlm.core.chat.tools import Tool
        from graftlm.core.constraint import compile_constraint

        form = ToolFormat.learn(runtime.tokenizer)
        given = tool_constraint(form, [Tool("weather", PARAMETERS, "")], "required")
        sampling = gl.SamplingParams(constraint=given["constraint"])
        grammar = compile_constraint(sampling, runtime.tokenizer).result()
        forced = grammar.matcher().forced([])
        assert runtime.tokenizer.decode(forced, skip_special=False).startswith("[TOOL_CALLS]weather[ARGS]{")
        assert runtime.tokenizer.is_special(forced[0])
        spelled = runtime.tokenizer.encode("[TOOL_CALLS")
        assert grammar.matcher().advance(spelled) == 0
