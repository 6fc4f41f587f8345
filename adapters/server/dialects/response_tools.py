"""The tools of a response as functions of a chat: functions, namespaces of functions, and custom tools.

Coding agents send namespaces, and tools that OpenAI's servers run, by default. A model can call none of the latter
here: they are left out, and the header x-ignored-fields lists them, so that the agent's other tools work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftlm.core.chat.tool_parser import read_arguments
from graftlm.core.errors import ConfigError

HOSTED = frozenset(
    ("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation")
    + ("local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search", "web_search_preview")
)
"""Types of tools without parameters: OpenAI's servers run them, or its models are trained on their calls."""

_NO_FIELDS = frozenset(("type", "strict", "defer_loading", "allowed_callers", "output_schema"))
"""Fields of a function without an effect on its calls: every schema is kept, and all tools are loaded."""

_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class Origin:
    """The tool that a function of the chat stands for. custom: it takes text, the function's member `input`"""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


@dataclass
class ResponseTools:
    """The tools of one request.

    functions  the tools of the chat request
    shown      the tools that the response object repeats
    origins    the tool of each function that has another name or another kind of input, by the function's name
    ignored    paths of the tools that are left out
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, tools: Sequence[Mapping[str, Any]]) -> ResponseTools:
        """Read the tools of a body. Raises ConfigError with a tool's index."""
        read = cls()
        for index, tool in enumerate(tools):
            read._add(tool, f"tools[{index}]", None)
        return read

    def _add(self, tool: Any, path: str, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace" and namespace is None:
            name, inside = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inside, list):
                raise ConfigError(f"{path} is a namespace without a name or without a list of tools; give both")
            for index, each in enumerate(inside):
                self._add(each, f"{path}.tools[{index}]", name)
            self.shown.append(dict(tool))
        elif isinstance(kind, str) and (kind in HOSTED or kind.startswith(_DATED)):
            self.ignored.append(f"{path}.{kind}")
        elif kind in ("function", "custom"):
            self._add_function(tool, path, namespace)
        else:
            known = "function, custom, namespace"
            raise ConfigError(f"{path} has type {kind!r}; this server calls tools of type {known}: leave it out")

    def _add_function(self, tool: Mapping[str, Any], path: str, namespace: str | None) -> None:
        origin = Origin(str(tool.get("name") or ""), namespace, custom=tool["type"] == "custom")
        if not origin.name:
            raise ConfigError(f"{path} has no name; give it one")
        function = {name: value for name, value in tool.items() if name not in _NO_FIELDS and value is not None}
        if origin.custom:
            form = function.pop("format", None) or {"type": "text"}
            if form != {"type": "text"}:
                message = (
                    f"{path}.format is {str(form)[:80]!r}; a custom tool takes any text here: leave the format out"
                )
                raise ConfigError(message)
            function["parameters"] = _TEXT
        self.functions.append({"type": "function", "function": {**function, "name": origin.function}})
        if namespace is None:
            self.shown.append({"strict": None, "parameters": None, **tool} if not origin.custom else dict(tool))
        if origin.custom or namespace is not None:
            self.origins[origin.function] = origin

    def choice(self, choice: Any) -> Any:
        """Return `tool_choice` with the names of functions. Raises ConfigError for a tool that is left out."""
        if not isinstance(choice, Mapping):
            return choice
        kind = choice.get("type")
        if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
            left = [one for one in map(self.choice, choice["tools"]) if one is not None]
            return {**choice, "tools": left}
        if isinstance(kind, str) and kind in HOSTED:
            raise ConfigError(f"tool_choice is a tool of type {kind!r}, which this server does not run; choose another")
        if isinstance(choice.get("name"), str):
            return {**choice, "name": Origin(choice["name"], choice.get("namespace")).function}
        return choice


_DATED = ("web_search_2", "web_search_preview_2")
"""Beginnings of types that end in a date."""


def call_item(origin: Origin | None, name: str, arguments: str) -> dict[str, Any]:
    """Return the fields of a call that say what is called, in the form of its tool."""
    if origin is None:
        return {"type": "function_call", "name": name, "arguments": arguments}
    apart = {"namespace": origin.namespace} if origin.namespace is not None else {}
    if not origin.custom:
        return {"type": "function_call", "name": origin.name, **apart, "arguments": arguments}
    value, error = read_arguments(arguments or "{}")
    text = arguments if error else str(value.get("input", ""))
    return {"type": "custom_tool_call", "name": origin.name, **apart, "input": text}
