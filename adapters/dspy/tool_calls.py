"""The JSON schema of a field of type `dspy.ToolCalls`: calls of the tools that a program passes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import dspy


def calls_schema(signature: type[dspy.Signature], inputs: Mapping[str, Any]) -> str:
    """Return the schema as text: names of the tools among `inputs`, arguments as the tools declare them.

    "" if no output field holds calls, or no tools are passed.
    """
    if not any(field.annotation is dspy.ToolCalls for field in signature.output_fields.values()):
        return ""
    tools = [tool for value in inputs.values() for tool in _tools_in(value)]
    if not tools:
        return ""
    calls = {"type": "array", "items": {"anyOf": [_call(tool) for tool in tools]}}
    return json.dumps({"type": "object", "properties": {"tool_calls": calls}, "required": ["tool_calls"]})


def _tools_in(value: Any) -> Iterable[dspy.Tool]:
    values = value if isinstance(value, list | tuple) else [value]
    return (each for each in values if isinstance(each, dspy.Tool))


def _call(tool: dspy.Tool) -> dict[str, Any]:
    function = tool.format_as_litellm_function_call()["function"]
    arguments = {**function["parameters"], "additionalProperties": tool.has_kwargs}
    call = {"name": {"const": function["name"]}, "args": arguments}
    return {"type": "object", "properties": call, "required": list(call)}
