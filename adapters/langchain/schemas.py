"""The JSON schemas of what LangChain's users give: tools, and what structured output is to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import EnumMeta
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from graftlm.core.errors import ConfigError
from graftlm.core.grammar.pydantic_schema import class_schema

Schema = dict[str, Any] | type
ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool

_FUNCTION_FORMS = ("name", "function", "toolSpec")
"""Keys that a schema of LangChain's other forms has: OpenAI's functions, Anthropic's and Bedrock's tools."""


def openai_tool(tool: ToolLike, strict: bool | None) -> dict[str, Any]:
    """A tool as LangChain describes it to OpenAI, with the whole schema of its arguments.

    LangChain writes definitions out, and one that contains itself becomes any value; of a schema without `properties`
    it leaves nothing.
    """
    try:
        described = convert_to_openai_tool(tool, strict=strict)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{tool!r} is no tool: {error}; give a function, a LangChain tool, a pydantic class or a JSON schema"
        ) from error
    if "function" not in described:  # a tool of OpenAI's own, which is refused where it is read
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
    """`schema` out of OpenAI's `response_format`, if it is one; a dict always with a title."""
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
    """The schema as LangChain writes it, for its tracers. ConfigError where it has none."""
    if isinstance(schema, EnumMeta):  # which LangChain takes for a function that makes a member
        raise ConfigError(f"{schema!r} is no object; give a pydantic class with a field of it, or bind(choices=[...])")
    try:
        return convert_to_json_schema(schema)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{schema!r} has no JSON schema: {error}; give a pydantic class, a TypedDict or a dict"
        ) from error


def kept_schema(schema: Schema) -> dict[str, Any]:
    """The schema that an answer is kept to: a dict's own, and that of a pydantic class with all of its definitions."""
    if isinstance(schema, dict) and not schema.keys() & {*_FUNCTION_FORMS}:
        return schema
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return class_schema(schema)[0]
    return langchain_schema(schema)


def _contains_itself(schema: dict[str, Any]) -> bool:
    """Whether a definition leads back to itself."""
    leads = {name: set(_definitions_in(inner)) for name, inner in schema.get("$defs", {}).items()}
    while ends := [name for name, others in leads.items() if not others & leads.keys()]:
        for name in ends:
            del leads[name]
    return bool(leads)


def _definitions_in(node: Any) -> Iterator[str]:
    """The names of the definitions that a schema refers to."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2]
        for inner in node.values():
            yield from _definitions_in(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _definitions_in(inner)
