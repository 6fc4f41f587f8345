"""Answers of pipelines as comparable JSON values, without the ids that a framework renumbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Set
from typing import Any


def as_json(value: Any, unread: set[str] | None = None) -> Any:
    """Return an answer as a comparable JSON value. Ids and metadata of messages are left out.

    unread  a set that gets the types of objects that have no text but an address; only the type is compared
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers, and nan is not equal to itself
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if (parts := _parts(value)) is not None:
        if isinstance(parts, dict):
            return {str(key): as_json(one, unread) for key, one in parts.items()}
        return [as_json(one, unread) for one in parts] if isinstance(parts, list) else as_json(parts, unread)
    text = _ADDRESS.sub("", given := str(value))
    if text != given and unread is not None:
        unread.add(type(value).__name__)
    return text


def _parts(value: Any) -> Any:
    """Return the parts of an answer: a dict, a list or one value; None for an object without parts."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Set):
        return sorted(value, key=as_text)
    if hasattr(value, "content") and hasattr(value, "response_metadata"):  # a message of LangChain
        calls = [{"name": call["name"], "args": call["args"]} for call in getattr(value, "tool_calls", ())]
        return {"content": value.content, "tool_calls": calls} if calls else value.content
    if hasattr(value, "source_nodes") and hasattr(value, "response"):  # LlamaIndex renumbers its nodes
        return "" if value.response is None else value.response
    if hasattr(value, "raw") and hasattr(value, "delta"):  # LlamaIndex, with the server's raw data
        return str(value)
    if hasattr(value, "model_dump"):  # a pydantic object; its own dump would give a message with its id
        return dict(value)
    if hasattr(value, "toDict"):  # a prediction of DSPy
        return value.toDict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # an array of NumPy or PyTorch, whose text omits the middle
        return value.tolist()
    return None


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object, which differs between processes."""


def as_text(value: Any) -> str:
    value = as_json(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
