"""From a prompt and its sampling parameters to the body of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.remote.capabilities.capabilities import Capabilities, ConstraintField
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.ledger.usage import Count
from graftlm.core.remote.transport.gbnf import choices_to_gbnf, grammar_to_gbnf, regex_to_gbnf
from graftlm.core.remote.transport.prompt import RemotePrompt

CHAT, COMPLETIONS = "/chat/completions", "/completions"

_NEUTRAL = {
    "top_p": 1.0,
    "top_k": (0, -1),
    "min_p": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "seed": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Neutral values of parameters; other values are sent. Parameters that OpenAI's API lacks have vLLM's names."""

_FIELDS: Mapping[str, Mapping[ConstraintField, Callable[[Any], dict[str, Any]]]] = {
    "regex": {
        "structured_outputs": lambda value: {"structured_outputs": {"regex": value}},
        "regex": lambda value: {"regex": value},
        "grammar": lambda value: _gbnf(regex_to_gbnf(value)),
    },
    "choices": {
        "structured_outputs": lambda value: {"structured_outputs": {"choice": value}},
        "regex": lambda value: {"regex": "|".join(f"({re.escape(choice)})" for choice in value)},
        "grammar": lambda value: _gbnf(choices_to_gbnf(value)),
    },
    "json_schema": {
        "response_format": lambda value: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}
        },
        "structured_outputs": lambda value: {"structured_outputs": {"json": value}},
        "json_schema": lambda value: {"json_schema": value},
        "json_object": lambda value: {"response_format": {"type": "json_object", "schema": value}},
    },
    "grammar": {
        "structured_outputs": lambda value: {"structured_outputs": {"grammar": value}},
        "grammar": lambda value: _gbnf(grammar_to_gbnf(value)),
    },
}
"""The fields that constrain an answer, by kind: vLLM's, SGLang's, OpenAI's, llama.cpp's and its Python server's."""


@dataclass(frozen=True)
class Query:
    """A request to an endpoint.

    count       receives the cost.
    deadline_s  a time of `time.monotonic()`, for all attempts.
    stops       replaces the stop strings of `sampling`.
    extra       further fields of the body.
    """

    prompt: RemotePrompt
    sampling: SamplingParams
    count: Count
    deadline_s: float | None = None
    stops: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def request_body(
    query: Query, config: EndpointConfig, capabilities: Capabilities, *, stream: bool = False
) -> tuple[str, dict[str, Any]]:
    """Build the path and the body of a request."""
    prompt, sampling = query.prompt, query.sampling
    body: dict[str, Any] = {"model": config.model, "temperature": sampling.temperature}
    chat = prompt.messages is not None
    if chat:
        body["messages"] = _messages(prompt, capabilities, body)
        if prompt.tools:
            body |= {"tools": [_tool(tool) for tool in prompt.tools], **prompt.tool_fields}
    else:
        body["prompt"] = list(prompt.ids) if prompt.ids is not None else prompt.text
    if sampling.max_tokens is not None:
        body[capabilities.max_tokens_field if chat else capabilities.text_max_tokens_field] = sampling.max_tokens
    elif not chat:
        raise ConfigError("max_tokens is None, and /completions would take 16 then; give a number")
    if sampling.logprobs or sampling.top_logprobs:
        num = sampling.top_logprobs
        body |= {"logprobs": True, "top_logprobs": num} if chat else {"logprobs": max(1, num)}
    stops = sampling.stop if query.stops is None else query.stops
    if stops:
        body["stop"] = list(stops[: capabilities.max_stops])
    if sampling.n > 1 and capabilities.n is not False:
        body["n"] = sampling.n
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value not in (neutral if isinstance(neutral, tuple) else (neutral,)):
            body[name] = value
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.allowed_token_ids is not None:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    for name in ("include_stop", "special_tokens"):
        if getattr(sampling, name):
            raise ConfigError(f"{name} needs a model in this process; leave it out for an endpoint")
    if (kind := constraint_kind(sampling)) is not None:
        body |= constraint_in(getattr(capabilities, kind), sampling)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    for name in capabilities.omit:
        if name != "temperature" or sampling.temperature == 1:  # other values change the answer
            body.pop(name, None)
    return (CHAT if chat else COMPLETIONS), body | dict(config.extra_body or {}) | dict(query.extra)


def constraint_kind(sampling: SamplingParams) -> str | None:
    """Return the kind of the constraint of `sampling`; None without one that endpoints support."""
    return next((kind for kind in _FIELDS if getattr(sampling, kind) is not None), None)


def constraint_fields(kind: str) -> tuple[ConstraintField, ...]:
    """Return the fields that may hold a constraint of this kind, the likeliest first."""
    return tuple(_FIELDS[kind])


def constraint_in(field: ConstraintField | None, sampling: SamplingParams) -> dict[str, Any]:
    """Return `field` with the constraint of `sampling`; {} if it cannot hold it, so that answers are checked."""
    kind = constraint_kind(sampling)
    shape = _FIELDS[kind].get(field or "none") if kind is not None else None
    if kind is None or shape is None:
        return {}
    value = getattr(sampling, kind)
    return shape(_whole_schema(value) if kind == "json_schema" else list(value) if kind == "choices" else value)


def _gbnf(grammar: str | None) -> dict[str, Any]:
    """Return the field of a grammar; {} for a constraint that GBNF cannot express: answers are checked."""
    return {} if grammar is None else {"grammar": grammar}


def _whole_schema(given: Any) -> Mapping[str, Any]:
    """Return the schema of a pydantic class, a type or a text, as an object even if it allows any value."""
    from graftlm.core.grammar.schema.reading.keywords import UNSUPPORTED
    from graftlm.core.grammar.spec import JsonSchema

    schema = given if isinstance(given, JsonSchema) else JsonSchema(given)
    if not isinstance(schema.schema, dict):
        return {}
    return _without(UNSUPPORTED, schema.schema) if UNSUPPORTED in schema.text else schema.schema


def _without(mark: str, schema: Any) -> Any:
    """Return a schema without the keyword `mark`, which only our own reader knows."""
    if isinstance(schema, dict):
        kept = {key: item for key, item in schema.items() if key != mark or not isinstance(item, str)}
        return {key: _without(mark, item) for key, item in kept.items()}
    return [_without(mark, item) for item in schema] if isinstance(schema, list) else schema


def _messages(prompt: RemotePrompt, capabilities: Capabilities, body: dict[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns, the open one last, and set the fields that continue it."""
    messages = list(prompt.messages or ())
    if prompt.text:
        open_turn: dict[str, Any] = {"role": "assistant", "content": prompt.text}
        if capabilities.continue_turn == "continue_final_message":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        elif capabilities.continue_turn == "prefix":
            open_turn["prefix"] = True
        messages.append(open_turn)
    return messages


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as the API takes it: its function inside of an object with a type."""
    return tool if "function" in tool else {"type": "function", "function": dict(tool)}
