"""The stored templates give the frameworks' own prompts, byte for byte."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

dspy = pytest.importorskip("dspy")

from bench.sprout import tasks_dspy  # noqa: E402
from bench.sprout.maker import Maker  # noqa: E402
from bench.sprout.tasks_dspy import Example, Field, Signature, prompt  # noqa: E402
from bench.sprout.wires import Wires, build, fill, react_key  # noqa: E402

OUTPUTS = ("str", "int", "bool", "list")
LITERAL = ("str", "lit3")


@pytest.fixture(scope="module")
def wires() -> Wires:
    return Wires(build(combinations=[OUTPUTS, LITERAL]))


@pytest.fixture
def make(wires: Wires) -> Maker:
    return Maker(random.Random(0), "test", wires)


def contents(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


SIGNATURE = Signature(
    ("passage", "name"),
    (Field("reasoning", "str"), Field("age", "int"), Field("married", "bool"), Field("languages", "list")),
    "Extract the fields.",
)
DEMO = Example(("Tarel is 40.", "Tarel"), ("The text says: Tarel is 40.", 40, False, ["Latin", "Greek"]))
REQUEST = Example(("Mosk is 7.\n- Mosk is a cat.", "Mosk"), ("", 7, True, []))


def dspy_signature() -> Any:
    fields: dict[str, Any] = {name: (str, dspy.InputField()) for name in SIGNATURE.inputs}
    hints = {"str": str, "int": int, "bool": bool, "list": list[str]}
    fields |= {field.name: (hints[field.kind], dspy.OutputField()) for field in SIGNATURE.outputs}
    return dspy.Signature(fields, SIGNATURE.objective)


@pytest.mark.parametrize(("adapter", "live"), [("chat", dspy.ChatAdapter()), ("json", dspy.JSONAdapter())])
def test_dspy_prompts_with_a_demo_are_the_adapters_own(make: Maker, adapter: str, live: Any) -> None:
    names = (*SIGNATURE.inputs, *(field.name for field in SIGNATURE.outputs))
    demo = dict(zip(names, (*DEMO.inputs, *DEMO.outputs), strict=True))
    inputs = dict(zip(SIGNATURE.inputs, REQUEST.inputs, strict=True))
    expected = live.format(dspy_signature(), [demo], inputs)
    assert contents(prompt(make, adapter, SIGNATURE, [DEMO], REQUEST)) == contents(expected)


@pytest.mark.parametrize(("adapter", "live"), [("chat", dspy.ChatAdapter()), ("json", dspy.JSONAdapter())])
def test_a_demo_without_its_reasoning_is_marked_as_dspy_marks_it(make: Maker, adapter: str, live: Any) -> None:
    incomplete = Example(DEMO.inputs, (None, *DEMO.outputs[1:]))
    known = {"age": 40, "married": False, "languages": ["Latin", "Greek"]}
    demo = dict(zip(SIGNATURE.inputs, DEMO.inputs, strict=True)) | known
    inputs = dict(zip(SIGNATURE.inputs, REQUEST.inputs, strict=True))
    expected = live.format(dspy_signature(), [demo], inputs)
    assert contents(prompt(make, adapter, SIGNATURE, [incomplete], REQUEST)) == contents(expected)


def test_literals_and_descriptions_are_shown_as_dspy_shows_them(make: Maker) -> None:
    outputs = (Field("job", "str"), Field("mood", "lit3", ("sad", "calm", "proud")))
    signature = Signature(("text",), outputs, "Find it.", ("a text",), ("the job", "only the mood"))
    live = dspy.Signature(
        {
            "text": (str, dspy.InputField(desc="a text")),
            "job": (str, dspy.OutputField(desc="the job")),
            "mood": (Literal["sad", "calm", "proud"], dspy.OutputField(desc="only the mood")),
        },
        "Find it.",
    )
    expected = dspy.ChatAdapter().format(live, [], {"text": "T"})
    assert contents(prompt(make, "chat", signature, [], Example(("T",), ("", "")))) == contents(expected)


def test_the_objective_of_a_signature_string_is_dspys() -> None:
    signature = Signature(("passage", "question"), (Field("reasoning", "str"), Field("answer", "str")), "")
    live = dspy.ChainOfThought("passage, question -> answer").predict.signature
    assert signature.default_objective() == live.instructions


def test_the_replies_that_sprout_learns_are_parsed_by_dspy() -> None:
    expected = dict(zip((f.name for f in SIGNATURE.outputs), DEMO.outputs, strict=True))
    chat = tasks_dspy.chat_reply(SIGNATURE, DEMO.outputs)
    assert dspy.ChatAdapter().parse(dspy_signature(), chat) == expected
    assert dspy.JSONAdapter().parse(dspy_signature(), tasks_dspy.json_reply(SIGNATURE, DEMO.outputs)) == expected


def test_a_react_trajectory_is_written_as_dspy_writes_it(wires: Wires) -> None:
    def lookup(name: str) -> str:
        """Look up by name."""
        return ""

    agent = dspy.ReAct("question -> answer", tools=[lookup])
    episode = {"thought_0": "T", "tool_name_0": "lookup", "tool_args_0": {"name": "A"}, "observation_0": "O"}
    trajectory = agent._format_trajectory(episode)
    assert trajectory == tasks_dspy._step(0, "T", "lookup", '{"name": "A"}', "O")
    live = dspy.ChatAdapter().format(agent.react.signature, [], {"question": "Q?", "trajectory": trajectory})
    names = {
        "zzin0": "question",
        "zzout0": "answer",
        "zztool0": "lookup",
        "zzabout0": "Look up by name",
        "zzarg00": "name",
        "zzval0": "Q?",
        "zzval1": trajectory,
    }
    template = wires.react[react_key((("str",),))]
    assert [fill(template["system"], names), fill(template["request"], names)] == [m["content"] for m in live]


def test_langchain_prompts_are_the_templates_own(wires: Wires) -> None:
    from langchain_core.messages import convert_to_openai_messages
    from langchain_core.prompts import ChatPromptTemplate

    from bench.sprout.wires import _LANGCHAIN_PROMPTS

    live = ChatPromptTemplate.from_messages(_LANGCHAIN_PROMPTS["rag"])
    expected = convert_to_openai_messages(live.invoke({"context": "C {x}", "question": "Q?"}).to_messages())
    assert contents(wires.messages("rag", context="C {x}", question="Q?")) == contents(expected)


@pytest.mark.parametrize(
    ("name", "live"),
    [
        ("li_qa_chat", "CHAT_TEXT_QA_PROMPT"),
        ("li_tree_chat", "CHAT_TREE_SUMMARIZE_PROMPT"),
    ],
)
def test_llama_index_prompts_are_the_synthesizers_own(wires: Wires, name: str, live: str) -> None:
    from llama_index.core.prompts import chat_prompts

    made = getattr(chat_prompts, live).format_messages(context_str="C", query_str="Q?")
    assert contents(wires.messages(name, context="C", query="Q?")) == [(m.role.value, m.content) for m in made]


def test_a_tool_schema_is_langchains(make: Maker) -> None:
    from langchain_core.tools import tool
    from langchain_core.utils.function_calling import convert_to_openai_tool

    from bench.sprout.tasks_tools import _schema

    @tool
    def get_weather(location: str) -> str:
        """Get the weather."""
        return ""

    made = _schema(make, "get_weather", "Get the weather.", {"location": "str"}, ("langchain",))
    assert made == convert_to_openai_tool(get_weather)
    assert list(made["function"]) == list(convert_to_openai_tool(get_weather)["function"])
