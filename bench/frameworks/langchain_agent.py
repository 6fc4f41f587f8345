"""Tokens that an agent's turns compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool

from bench.harness import Options, Row
from graftlm import Runtime
from graftlm.adapters.langchain import ChatGraftLM

CASE = "langchain_agent"


def run(options: Options) -> Sequence[Row]:
    with Runtime(options.model or "sprout", dtype="float32") as runtime:
        runtime.load()
        return [agent_loop(runtime)]


def agent_loop(runtime: Runtime) -> Row:
    """Five turns of tool calls: what each computes beyond its new messages (the tail of a forced call never ran)."""

    @tool
    def find_person(name: str) -> str:
        """Look a person up."""
        return f"{name} is 34 and lives in Dorvik."

    llm = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=120)
    bound = llm.bind_tools([find_person], tool_choice="find_person")
    messages: list[Any] = [("system", "Look people up, one at a time. " * 20), ("human", "How old is Mara Velin?")]
    known, worst = 0, 0
    for turn in range(5):
        before = runtime.stats().computed_tokens
        answer = bound.invoke(messages)
        usage = answer.usage_metadata
        assert usage is not None
        if turn:
            worst = max(worst, runtime.stats().computed_tokens - before - (usage["input_tokens"] - known))
        known = usage["total_tokens"]
        (call,) = answer.tool_calls
        result = ToolMessage(find_person.invoke(call["args"]), tool_call_id=call["id"])
        messages += [answer, result, ("human", "And Teo Brandt?")]
    what = "agent loop of 5 turns: tokens computed in a turn beyond its new ones"
    return Row(CASE, what, worst, "tokens, worst turn", floor=8, at_most=True)
