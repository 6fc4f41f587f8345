"""The JSON schemas of LangChain's tools and of its structured output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import EnumMeta
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from graftlm.core.errors import ConfigError
from graftlm.core.grammar.python_types.pydantic_schema import class_schema

Schema = dict[str, Any] | type
ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool

_FUNCTION_FORMS = ("name", "function", "toolSpec")
"""Keys of the other forms of a LangChain schema: OpenAI's functions, Anthropic's and Bedrock's tools."""


def openai_tool(tool: ToolLike, strict: bool | None) -> dict[str, Any]:
    """Return LangChain's OpenAI description of a tool, with the complete schema of its arguments.

    LangChain inlines definitions, replaces recursive ones by any value, and drops a schema without `properties`.
    """
    try:
        described = convert_to_openai_tool(tool, strict=strict)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{tool!r} is no tool: {error}; give a function, a LangChain tool, a pydantic class or a JSON schema"
        ) from error
    if "function" not in described:  # a built-in tool of OpenAI, which is refused later
        return described
    own = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if isinstance(own, dict):
        bare = not own.keys() & {*_FUNCTION_FORMS, "properties"}
        whole = {name: value for name, value in own.items() if name not in ("title", "description")}
        changed = bool(bare and whole)
    elif changed := isinstance(own, type) and issubclass(own, BaseModel):
        whole, closed = class_schema(own)
        changed = closed or _contains_itself(whole)
    if not changed:
        return described
    return {**described, "function": {**described["function"], "parameters": whole}}


def named_schema(schema: Schema) -> Schema:
    """Return the schema inside OpenAI's `response_format`, or `schema` itself; a dict always has a title."""
    match schema:
        case {"type": "json_schema", "json_schema": {"name": name, "schema": dict(inner)}} | {
            "name": name,
            "schema": dict(inner),
        }:
            return {**inner, "title": name}
        case dict() if not schema.keys() & {"title", *_FUNCTION_FORMS}:
            return {"title": "Answer", **schema}
    return schema


def langchain_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema in LangChain's form, for tracers. Raises ConfigError for a type without one."""
    if isinstance(schema, EnumMeta):  # LangChain would treat an Enum class as a function
        raise ConfigError(f"{schema!r} is no object; give a pydantic class with a field of it, or bind(choices=[...])")
    try:
        return convert_to_json_schema(schema)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{schema!r} has no JSON schema: {error}; give a pydantic class, a TypedDict or a dict"
        ) from error


def kept_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema of the answer's grammar: a dict unchanged, a pydantic class with all of its definitions."""
    if isinstance(schema, dict) and not schema.keys() & {*_FUNCTION_FORMS}:
        return schema
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return class_schema(schema)[0]
    return langchain_schema(schema)


def _contains_itself(schema: dict[str, Any]) -> bool:
    """Return True if a definition refers to itself, directly or through other definitions."""
    leads = {name: set(_definitions_in(inner)) for name, inner in schema.get("$defs", {}).items()}
    while ends := [name for name, others in leads.items() if not others & leads.keys()]:
        for name in ends:
            del leads[name]
    return bool(leads)


def _definitions_in(node: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2]
        for inner in node.values():
            yield from _definitions_in(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _definitions_in(inner)
