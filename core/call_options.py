"""Keywords of an adapter, divided into its own, its runtime's options and sampling parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from graftlm.core.answer_format import schema_of_format
from graftlm.core.chat.messages import Message, ToolCall
from graftlm.core.chat.thinking import learn_thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_grammar import ToolChoice, tool_constraint
from graftlm.core.chat.tools import Tool, named_apart
from graftlm.core.config import EngineConfig, SamplingParams, reject_unknown, with_own_names
from graftlm.core.errors import ConfigError
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime

SAMPLING = tuple(field.name for field in fields(SamplingParams))
"""Names of the sampling parameters, constraints included."""

RUNTIME_OPTIONS = frozenset(field.name for kind in (EngineConfig, EndpointConfig) for field in fields(kind)) - {
    "model"
} | {
    name
    for name, parameter in inspect.signature(Runtime.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
"""Names of the options that `Runtime` takes beside the model."""


def keywords_of(*callables: Callable[..., Any]) -> set[str]:
    """Return the names of the keyword parameters of `callables`."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = (p for call in callables for p in inspect.signature(call).parameters.values())
    return {p.name for p in parameters if p.kind in named} - {"self"}


def sort_keywords(given: Mapping[str, Any], own: Iterable[str], owner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a constructor's keywords into those of the object and the options of its runtime.

    own    names that the object takes, its framework's included; they win where a runtime option has the same name.
    owner  the name of the object's class, for the error.

    Raises ConfigError for a keyword of neither kind, with the nearest name of either.
    """
    known = set(own)
    given = with_own_names(given)
    reject_unknown(list(given), sorted(known | RUNTIME_OPTIONS), f"{owner} parameter")
    return (
        {name: value for name, value in given.items() if name in known},
        {name: value for name, value in given.items() if name not in known},
    )


def check_given(runtime: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `runtime`, given to an adapter, is a runtime, and no options were given beside it."""
    if not hasattr(runtime, "submit_many"):
        raise ConfigError(f"runtime is {runtime!r}; give a graftlm.Runtime, or the name of a model as model=")
    if options:
        raise ConfigError(
            f"runtime= was given together with {', '.join(sorted(options))}; set these where the Runtime is built"
        )


def shared_runtime(
    model: Any,
    options: Mapping[str, Any],
    base_url: str | None = None,
    api_key: str | None = None,
    max_retries: int = 2,
) -> Runtime:
    """Return the runtime of this process for `model`: in process, or at the endpoint `base_url`.

    max_retries  the framework's knob; it sets the endpoint's own loop, so that no retry is retried.
    """
    if base_url is None:
        return Runtime.shared(model, **options)
    return Runtime.shared(model, base_url=base_url, api_key=api_key, **{"max_retries": max_retries, **options})


@dataclass(frozen=True)
class ToolRequest:
    """The parts of a request that tools determine.

    messages  the conversation, as the model reads calls and results.
    listed    the tools, for the chat template or the endpoint.
    fields    further fields for an endpoint, such as tool_choice.
    sampling  the constraint of the answer.
    form      the format in which calls are parsed from the answer; None if its text contains no calls.
    """

    messages: list[Message]
    listed: list[dict[str, Any]] | None
    fields: dict[str, Any]
    sampling: dict[str, Any]
    form: ToolFormat | None


def tool_request(
    runtime: Any,
    messages: Sequence[Message],
    tools: tuple[Tool, ...],
    choice: Any = None,
    *,
    parallel: bool | None = None,
    answer: Any = None,
    **keeping: Any,
) -> ToolRequest:
    """Let the model of `runtime` call `tools`; the arguments, and `keeping`, are those of `tool_constraint`.

    An endpoint takes tools, calls and results natively, and reports its calls beside its text.
    Raises: ConfigError for two tools of one name, or a choice that names none of them.
    """
    named_apart(tools)
    if getattr(runtime, "endpoint", None) is None:
        form = ToolFormat.learn(runtime.tokenizer)
        prepared, listed = form.prepare(messages, tools)
        sampling = tool_constraint(form, tools, choice, parallel=parallel, answer=answer, **keeping)
        writes_calls = bool(tools) and ToolChoice.read(choice, tools, parallel=parallel).mode != "none"
        return ToolRequest(prepared, listed, {}, sampling, form if writes_calls else None)
    sampling = {} if answer is None else {"json_schema": answer}
    read = ToolChoice.read(choice, tools, parallel=parallel)
    if not tools:
        return ToolRequest(list(messages), None, {}, sampling, None)
    fields: dict[str, Any] = {} if choice is None else {"tool_choice": read.mode}
    if read.mode == "required" and len(read.tools) == 1 < len(tools):
        fields["tool_choice"] = {"type": "function", "function": {"name": read.tools[0].name}}
    else:
        tools = read.tools
    if not read.parallel:
        fields["parallel_tool_calls"] = False
    return ToolRequest(list(messages), [tool.to_openai() for tool in tools], fields, sampling, None)


def with_thinking(runtime: Any, request: Request, options: Mapping[str, Any] | None = None) -> Request:
    """Return a request of messages with the markers of its model's thinking.

    options  arguments of the chat template; an endpoint gets them as `chat_template_kwargs`
    Raises ConfigError if the template refuses them.
    """
    if getattr(runtime, "endpoint", None) is not None:
        fields = {**request.tool_fields, "chat_template_kwargs": dict(options)} if options else request.tool_fields
        return replace(request, tool_fields=fields)
    tokenizer = runtime.tokenizer
    thinking = learn_thinking(tokenizer, options) if tokenizer.has_chat_template else None
    if not options:
        return request if thinking is None else replace(request, thinking=thinking)
    text = tokenizer.render(request.prompt, request.tools, options=options)
    return replace(request, prompt=text, tools=None, thinking=thinking)


def shown_fields(settings: Any, kind: Any, first: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields in the repr of a pydantic object: `first`, and those of `kind` that are not at their default.

    kind  the pydantic class whose fields are shown; fields of its subclasses belong to a framework and are skipped.
    """
    yield first, getattr(settings, first)
    for name, field in kind.model_fields.items():
        value = getattr(settings, name)
        if name != first and field.repr and value is not None and value != field.get_default(call_default_factory=True):
            yield name, value


def sampling_set_on(settings: object) -> dict[str, Any]:
    """Return the attributes of `settings` that are sampling parameters and not None."""
    return {
        name: value
        for name in _sampling_fields(cast(Hashable, type(settings)))
        if (value := getattr(settings, name)) is not None
    }


@functools.cache
def _sampling_fields(kind: Any) -> tuple[str, ...]:
    """Return the sampling parameters that objects of a pydantic class have."""
    return tuple(name for name in SAMPLING if name in kind.model_fields)


def sampling_params(*given: Mapping[str, Any]) -> SamplingParams:
    """Merge sampling parameters; of two mappings the later one wins.

    None leaves a parameter at its default, except `max_tokens`: None is then the rest of the context, which is
    also the default here. `top_logprobs` implies `logprobs`. Raises ConfigError for an unknown name.
    """
    options: dict[str, Any] = {"max_tokens": None}
    for mapping in given:
        options.update(mapping)
    if options.get("top_logprobs"):
        options["logprobs"] = True
    kept = {name: value for name, value in options.items() if value is not None or name == "max_tokens"}
    return SamplingParams.from_options(**kept)


def answer_schema(response_format: Any, schema_of: Callable[[type], Any]) -> Any:
    """Return the JSON schema of the answer that a `response_format` asks for; None for free text.

    response_format  None, {"type": "text" | "json_object" | "json_schema", ...} as in OpenAI's API, a JSON schema, or
                     a class that `schema_of` turns into one.
    Raises: ConfigError for anything else, and for a field of such a dict that is unknown.
    """
    match response_format:
        case None:
            return None
        case {"type": "text" | "json_object" | "json_schema"}:
            return schema_of_format(response_format)
        case type():
            return schema_of(response_format)
        case {"title": _} | {"properties": _}:
            return response_format
    raise ConfigError(
        f"response_format is {str(response_format)[:80]!r}; give {{'type': 'json_schema', 'json_schema': "
        "{'name': ..., 'schema': ...}}}, {'type': 'json_object'}, or a pydantic class"
    )


def hold_for_tools(runtime: Runtime, asked: Request | Completion, calls: Sequence[ToolCall]) -> None:
    """Keep the KV of a conversation where it is cheapest while its caller runs the tools that an answer calls.

    The expected pause is the mean of earlier ones of the same tools. No calls: nothing is held.
    """
    if calls:
        runtime.hold(asked, label=", ".join(sorted({call.name for call in calls})))
