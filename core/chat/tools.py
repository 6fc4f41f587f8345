"""Tool: a function that the model may call, described by the JSON schema of its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graftlm.core.config import near_name
from graftlm.core.errors import ConfigError

_SCHEMAS = frozenset({"input_schema", "inputSchema"})
"""Names of a tool's parameters in Anthropic's API and in the Model Context Protocol."""


@dataclass(frozen=True, init=False)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object.

    Two tools are equal when their names, their descriptions and the JSON texts of their schemas are equal.
    """

    name: str
    description: str
    schema_text: str

    def __init__(self, name: str, parameters: Mapping[str, Any] | None = None, description: str = "") -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[^\s\"\\]+", name):
            raise ConfigError(f"a tool is named {name!r}; give a name without spaces, quotes and backslashes")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ConfigError(f"the parameters of tool {name!r} are {str(parameters)[:80]!r}; give a JSON schema")
        if not isinstance(description or "", str):
            raise ConfigError(f"the description of tool {name!r} is {str(description)[:80]!r}; give text")
        schema = dict(parameters) if parameters else {"type": "object", "properties": {}}
        if schema.get("type", "object") != "object":
            raise ConfigError(
                f"the parameters of tool {name!r} have type {schema['type']!r}; a tool takes a JSON object"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "description", description or "")
        object.__setattr__(self, "schema_text", json.dumps(schema, ensure_ascii=False))

    @classmethod
    def from_openai(cls, tool: Mapping[str, Any]) -> Tool:
        """Read `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`.

        Raises: ConfigError for another form, and for a field that is a misspelling of one of these.
        """
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or "name" not in function:
            raise ConfigError(
                f"a tool is {str(tool)[:80]!r}; "
                "give {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
        for name in function.keys() - {"name", "description", "parameters"}:
            meant = "parameters" if name in _SCHEMAS else near_name(name, ("parameters", "description"), 0.75)
            if meant is not None:
                raise ConfigError(f"tools has a field {name!r} in tool {function['name']!r}; did you mean {meant!r}?")
        return cls(function["name"], function.get("parameters"), function.get("description") or "")

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return dict(json.loads(self.schema_text))

    def to_openai(self) -> dict[str, Any]:
        """Return the form that chat templates read. The order of keys is fixed, so equal tools render equally."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def named_apart(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Return the tools of one request. Raises ConfigError if two have one name, which makes calls ambiguous."""
    found = tuple(tools)
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"tools has {names.count(twice)} tools named {twice!r}; give each a name of its own")
    return found
