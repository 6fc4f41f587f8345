"""A field of type `dspy.ToolCalls` may call the tools that a program gives, and nothing else."""

from __future__ import annotations

import json
from typing import Any, Literal

import dspy
import jsonschema
import pytest

from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.adapters.dspy.adapter import calls_schema
from graftlm.adapters.dspy.scaffold import Scaffold


def weather(city: Literal["Bern", "Oslo"], days: int = 1) -> str:
    """Look the weather up."""
    return f"sun in {city} for {days}"


def ping() -> str:
    """Answer."""
    return "pong"


def anything(**given: Any) -> str:
    """Take all."""
    return str(given)


class Act(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def admits(tools: list[dspy.Tool], *calls: tuple[str, dict[str, Any]]) -> bool:
    schema = json.loads(calls_schema(Act, {"question": "x", "tools": tools}))
    value = {"tool_calls": [{"name": name, "args": arguments} for name, arguments in calls]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_names_and_arguments_are_those_of_the_tools() -> None:
    tools = [dspy.Tool(weather), dspy.Tool(ping)]
    assert admits(tools, ("weather", {"city": "Oslo"}), ("ping", {}), ("weather", {"city": "Bern", "days": 2}))
    assert not admits(tools, ("sun", {}))
    assert not admits(tools, ("weather", {}))
    assert not admits(tools, ("ping", {"made": "up"}))
    assert admits([dspy.Tool(anything)], ("anything", {"given": 1, "made": "up"}))


def test_without_tools_or_a_field_of_calls_there_is_no_schema() -> None:
    assert calls_schema(Act, {"question": "x", "tools": []}) == ""
    assert calls_schema(dspy.Signature("tools -> answer"), {"tools": [dspy.Tool(ping)]}) == ""
    assert calls_schema(Act, {"tools": dspy.Tool(ping)}) == calls_schema(Act, {"tools": [dspy.Tool(ping)]})


def test_every_call_can_be_executed() -> None:
    tools = {"weather": weather, "ping": ping}
    lm = GraftLM("sprout", temperature=1.0, max_tokens=200, cache=False)
    with dspy.context(lm=lm, adapter=GraftAdapter(use_json_adapter_fallback=False)):
        calls = []
        for seed in range(4):
            config = {"seed": seed}
            answer = dspy.Predict(Act)(question="Oslo?", tools=[*map(dspy.Tool, tools.values())], config=config)
            calls += answer.calls.tool_calls
    assert calls and all(call.execute(tools) for call in calls)


def test_other_tools_of_one_signature_have_a_scaffold_of_their_own() -> None:
    adapter = GraftAdapter()
    texts = [
        adapter.scaffold(Act, calls_schema(Act, {"tools": [dspy.Tool(tool)]})) for tool in (weather, ping, weather)
    ]
    assert texts[0] == texts[2] != texts[1]
    assert "weather" in texts[0] and "weather" not in texts[1]


def test_arguments_that_no_grammar_keeps_are_told() -> None:
    def strange(value: int) -> str:
        return str(value)

    tool = dspy.Tool(strange, args={"value": {"type": "strin"}})
    calls = json.loads(calls_schema(Act, {"tools": [tool]}))
    with pytest.warns(UserWarning, match="'calls'.*may call what is no tool.*did you mean 'string'"):
        (field,) = Scaffold.of(Act, calls).fields
    assert field.kind == "schema" and "strin'" not in str(field.value)
