"""Answers of pipelines as JSON values that can be compared: what a framework numbers anew each time is left out."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """An answer as a JSON value that can be compared. Ids and metadata of messages are left out."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers, and nan is not equal to itself
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if hasattr(value, "content") and hasattr(value, "response_metadata"):  # a message of LangChain
        calls = [{"name": call["name"], "args": call["args"]} for call in getattr(value, "tool_calls", ())]
        return {"content": as_json(value.content), "tool_calls": as_json(calls)} if calls else as_json(value.content)
    if hasattr(value, "source_nodes") and hasattr(value, "response"):  # of LlamaIndex, which numbers its nodes anew
        return as_json(value.response)
    if hasattr(value, "raw") and hasattr(value, "delta"):  # LlamaIndex's answer of a model, with all that a server said
        return str(value)
    if hasattr(value, "model_dump"):
        return as_json(value.model_dump(mode="json"))
    if hasattr(value, "toDict"):  # a prediction of DSPy
        return as_json(value.toDict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_json(dataclasses.asdict(value))
    return _ADDRESS.sub("", str(value))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object, which differs between processes."""


def as_text(value: Any) -> str:
    value = as_json(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
