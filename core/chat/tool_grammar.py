"""The grammar of an answer that may call tools: free text, tool calls, or a final JSON object."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import parse_answer
from graftlm.core.chat.tools import Tool
from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.spec import Composite, Issue, JsonSchema, Limits, OnUnsupported, Options, Whitespace

_MEMBERS = frozenset(
    {"$ref", "additionalProperties", "allOf", "anyOf", "if", "minProperties", "not", "oneOf", "patternProperties"}
) | {"dependentSchemas", "propertyNames", "unevaluatedProperties"}
"""Keywords that constrain members which `properties` does not list."""


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the next answer may call.

    mode      "auto": calls or text; "required": at least one call; "none": text.
    tools     the tools that may be called.
    parallel  whether one answer may contain several calls.
    """

    mode: Literal["auto", "required", "none"] = "auto"
    tools: tuple[Tool, ...] = ()
    parallel: bool = True

    @classmethod
    def read(cls, choice: Any, tools: tuple[Tool, ...], *, parallel: bool | None = None) -> ToolChoice:
        """Read a `tool_choice` in any of its usual forms.

        choice  None, "auto", "none", "any", "required", True, False, a tool's name, or a dict that names a tool or,
                as {"type": "allowed_tools", ...}, several. A tool's name forces exactly one call of that tool.
        Raises: ConfigError for anything else, listing the names of the tools.
        """
        names = [tool.name for tool in tools]
        if isinstance(choice, Mapping):
            if choice.get("type") == "allowed_tools":
                return cls._allowed(choice, tools, parallel)
            choice = _named(choice) or choice.get("type") or choice
        many = parallel is not False
        match choice:
            case None | "auto":
                return cls("auto" if tools else "none", tools, many)
            case "none" | False:
                return cls("none", tools, many)
            case "any" | "required" | True if tools:
                return cls("required", tools, many)
            case str() if choice in names:
                return cls("required", (tools[names.index(choice)],), False)
        known = ", ".join(map(repr, names)) or "none were given"
        raise ConfigError(f"tool_choice is {choice!r}; use 'auto', 'none', 'any' or the name of a tool ({known})")

    @classmethod
    def _allowed(cls, choice: Mapping[str, Any], tools: tuple[Tool, ...], parallel: bool | None) -> ToolChoice:
        """Read OpenAI's "allowed_tools": a subset of the tools, in the mode "auto" or "required"."""
        given = choice.get("allowed_tools", choice)
        listed = given.get("tools") if isinstance(given, Mapping) else None
        names = [_named(each) for each in listed] if isinstance(listed, list) else []
        unknown = [name for name in names if name not in {tool.name for tool in tools}]
        if not names or unknown or given.get("mode") not in ("auto", "required"):
            raise ConfigError(
                f"tool_choice is {str(choice)[:99]}; give {{'type': 'allowed_tools', 'allowed_tools': {{'mode': 'auto' "
                "or 'required', 'tools': [{'type': 'function', 'function': {'name': ...}}]}} with names of the tools"
            )
        return cls(given["mode"], tuple(tool for tool in tools if tool.name in names), parallel is not False)


def _named(choice: Any) -> Any:
    """Return the name in `{"function": {"name": ...}}` or `{"name": ...}`; None without one."""
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else None
    return inner.get("name") if isinstance(inner, Mapping) else None


def tool_constraint(
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: Any = None,
    *,
    parallel: bool | None = None,
    answer: Any = None,
    on_unsupported: OnUnsupported = "error",
    bounded_numbers: bool = True,
) -> dict[str, Any]:
    """Return the sampling parameters that constrain an answer to tool calls and text.

    choice    as in `ToolChoice.read`.
    parallel  False allows at most one call.
    answer    a JSON schema; an answer that calls no tool is then JSON of this schema instead of free text.
    on_unsupported  "warn" drops schema keywords that no grammar can enforce; "check" drops them and validates
                    the finished calls and the answer.
    bounded_numbers  as in SamplingParams.

    The answer is valid even if it reaches max_tokens: the shortest valid ending is forced in time.
    """
    allowed = ToolChoice.read(choice, tuple(tools), parallel=parallel)
    schema = None if answer is None else answer if isinstance(answer, JsonSchema) else JsonSchema(answer)
    if allowed.mode == "none" and schema is not None:
        return {"json_schema": schema, "close_on_length": True}
    if not allowed.tools:
        return {}
    size = sum(len(tool.schema_text) for tool in allowed.tools)
    build = _constraint if size <= KEPT_CHARS else _constraint.__wrapped__
    with limited(Limits()):
        constraint = build(form, allowed, schema, on_unsupported, bounded_numbers)
    return {"constraint": constraint, "close_on_length": True}


KEPT_CHARS = 1 << 16
"""Size of all parameters up to which the grammar of tools is cached, for later requests with the same tools."""


@lru_cache(maxsize=128)
def _constraint(
    form: ToolFormat,
    choice: ToolChoice,
    answer: JsonSchema | None,
    on_unsupported: OnUnsupported,
    bounded_numbers: bool,
) -> Composite:
    """Return the grammar of the answer. Equal arguments give the same object, so that it is compiled once."""
    language = _Language(form, on_unsupported, bounded_numbers)
    text = _text(form) if answer is None else language.json(answer, single_spaces=False)
    text = nodes.concat(form.node(form.header), text)
    if choice.mode == "none":
        return language.spec(text)
    call = nodes.alternation(*(language.call(tool) for tool in choice.tools))
    most = None if choice.parallel and form.several else 1
    calls = nodes.separated(call, form.node(form.separator), 1, most)
    if choice.mode == "required":
        return language.spec(calls)
    if answer is None and form.marker and not form.header:
        return language.spec(nodes.concat(text, nodes.optional(calls)))
    return language.spec(nodes.alternation(text, calls))


class _Language:
    """Builds grammar nodes from schemas, and collects the rules of schemas that are not regular."""

    def __init__(self, form: ToolFormat, on_unsupported: OnUnsupported, bounded_numbers: bool) -> None:
        self._bounded_numbers = bounded_numbers
        self._form = form
        self._on_unsupported = on_unsupported
        self._rules: dict[str, nodes.Node] = {}
        self._schemas: dict[str | None, JsonSchema] = {}
        self._unkept: dict[JsonSchema, tuple[Issue, ...]] = {}

    def call(self, tool: Tool) -> nodes.Node:
        form = self._form
        try:
            arguments = self.json(_arguments(tool), tool.name, single_spaces=form.single_spaces)
        except GrammarError as error:
            message = f"tools: parameters of {tool.name!r}: {error}"
            raise GrammarError(message, pointer=error.pointer, position=error.position) from error
        return nodes.concat(form.node(f"{form.begin}{tool.name}{form.middle}"), arguments, form.node(form.end))

    def json(self, schema: JsonSchema, name: str | None = None, *, single_spaces: bool) -> nodes.Node:
        """Return the node of the arguments of the tool `name`, or of an answer if `name` is None."""
        from graftlm.core.grammar.schema.lowering import lower_schema

        whitespace: Whitespace = "single" if single_spaces else "compact"
        self._schemas[name] = schema
        lowered = lower_schema(
            schema,
            Options(whitespace=whitespace, on_unsupported=self._on_unsupported, bounded_numbers=self._bounded_numbers),
        )
        if lowered.issues and self._on_unsupported == "check":
            self._unkept[schema] = lowered.issues
        elif lowered.issues:
            for issue in lowered.issues:
                warnings.warn(f"the constraint is not kept exactly: {issue}", stacklevel=2)
        self._rules.update(lowered.rules)
        return lowered.node

    def spec(self, node: nodes.Node) -> Composite:
        check = partial(_complaint, self._form, self._schemas, self._unkept) if self._unkept else None
        form = self._form
        return Composite(node, tuple(self._rules.items()), check, form.special, has_header=bool(form.header))


def _arguments(tool: Tool) -> JsonSchema:
    """Return the schema of a call's arguments: an object, and an empty one where the tool declares no parameters."""
    schema = {"type": "object", **tool.parameters}
    if schema.keys().isdisjoint(_MEMBERS) and schema.get("properties") == {}:
        schema["additionalProperties"] = False
    return JsonSchema(schema)


def _complaint(
    form: ToolFormat,
    schemas: Mapping[str | None, JsonSchema],
    unkept: Mapping[JsonSchema, tuple[Issue, ...]],
    text: str,
) -> str | None:
    """Return the violations of the tools' schemas in the calls of an answer, and of the schema of None in its text."""
    from graftlm.core.grammar.schema.validation import complaint

    answer = parse_answer(form, text)
    values: list[tuple[str | None, str]] = [(call.name, json.dumps(call.arguments)) for call in answer.calls]
    if None in schemas and not answer.calls:
        values.append((None, answer.content))
    for name, value in values:
        schema = schemas[name]
        try:
            wrong = complaint(schema, value, unkept[schema]) if schema in unkept else None
        except GrammarError as error:  # a pattern that is no regular expression, say
            raise error if name is None else GrammarError(f"tools: parameters of {name!r}: {error}") from error
        if wrong:
            return wrong if name is None else f"arguments of {name!r}: {wrong}"
    return None


def _text(form: ToolFormat) -> nodes.Node:
    """Return the node of free text that contains no prefix of a call."""
    anything = nodes.star(nodes.ANY_CHAR)
    if form.marker in form.special or form.header:  # no text contains a special token
        return anything
    if form.marker:
        return nodes.Difference(anything, nodes.concat(anything, nodes.literal(form.marker), anything))
    return nodes.Difference(anything, nodes.concat(nodes.literal(form.begin.strip()[:1]), anything))
