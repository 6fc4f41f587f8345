"""Translation of DSPy's lm15 requests to native ones, and of completions to lm15 responses."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from dspy import lm15
from graftlm.core import errors
from graftlm.core.chat.messages import ContentPart, ImagePart, Message, TextPart, ToolCall, VideoPart
from graftlm.core.chat.thinking import Thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import AnswerReader, ParsedAnswer
from graftlm.core.chat.tools import Tool
from graftlm.core.request import Chunk, Completion, TokenLogprob, Usage

PROVIDER = "graftlm"
DEFAULT_MAX_TOKENS = 1024
"""Default of `max_tokens`, in tokens, if neither the LM nor the call sets it; fewer if the context ends before."""

SUPPORTED_PARAMS = frozenset(
    {
        "temperature",
        "max_tokens",
        "top_p",
        "top_k",
        "stop",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
    }
)
_CONSTRAINTS = ("regex", "choices", "json_schema", "grammar")
_KEEPING = ("on_unsupported", "max_retries", "bounded_numbers")
_NATIVE_EXTENSIONS = frozenset({*_CONSTRAINTS, *_KEEPING, "scaffold", "n", "select"})
_HEADER = "[[ ## "
_FIELDS = re.compile(r"Respond with a JSON object in the following order of fields: (.+)\.\s*\Z", re.DOTALL)
_FIELD = re.compile(r"`(\w+)`(?: \(must be formatted as a valid Python (.+?)\))?(?=, then `|\Z)", re.DOTALL)
_TYPES = {"": "string", "str": "string", "int": "integer", "float": "number", "bool": "boolean"}


# -- requests --------------------------------------------------------------------------------------------------


def native_messages(request: lm15.Request) -> list[Message]:
    """Return the conversation of a request, its system text first.

    Raises lm15's UnsupportedFeatureError for audio, video, documents and other parts without text.
    """
    messages = [] if request.system is None else [Message("system", _content(request.system))]
    for message in request.messages:
        if message.role == "tool":
            messages.extend(_tool_results(message))
        elif message.role == "assistant":
            messages.append(_assistant(message))
        else:
            role = "system" if message.role == "developer" else message.role
            messages.append(Message(role, _content(message.parts)))
    return messages


def native_tools(request: lm15.Request) -> list[Tool]:
    """Return the tools that the model may call."""
    choice = request.config.tool_choice
    if choice is not None and choice.mode == "none":
        return []
    allowed = [tool for tool in request.tools if choice is None or not choice.allowed or tool.name in choice.allowed]
    for tool in allowed:
        if not isinstance(tool, lm15.FunctionTool):
            raise unsupported(f"the built-in tool {tool.name!r} runs at a provider; give a function", "tools")
    return [Tool(tool.name, tool.parameters, tool.description or "") for tool in allowed]


def native_extensions(config: lm15.Config) -> dict[str, Any]:
    """Return the options for this engine in `Config.extensions["graftlm"]`, besides lm15's own fields."""
    extensions = config.extensions or {}
    for name in extensions:
        if name not in (PROVIDER, "logit_bias"):
            raise unsupported(f"the setting {name!r} means nothing to this engine; leave it out", name)
    native = extensions.get(PROVIDER) or {}
    for name in native:
        if name not in _NATIVE_EXTENSIONS:
            known = ", ".join(sorted(_NATIVE_EXTENSIONS))
            raise unsupported(f"unknown extension graftlm.{name}; known: {known}", name)
    return dict(native)


def sampling_options(request: lm15.Request) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that a request sets, constraints included; `max_tokens` is unchanged."""
    config = request.config
    for name in ("service_tier", "user_id", "store"):
        if getattr(config, name) is not None:
            raise unsupported(f"{name} is a provider's setting; a model in this process has none", name)
    if config.cache is not None and config.cache != lm15.CacheConfig(prefix=config.cache.prefix):
        raise unsupported("prefixes are always reused; prompt_cache can only be CacheConfig()", "prompt_cache")
    options: dict[str, Any] = {"stop": config.stop}
    for name in ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "max_tokens"):
        value = getattr(config, name)
        if value is not None:
            options[name] = value
    if config.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": config.logprobs}
    native = native_extensions(config)
    if bias := (config.extensions or {}).get("logit_bias"):
        options["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
    options |= {name: native[name] for name in (*_CONSTRAINTS, *_KEEPING, "n") if name in native}
    if config.response_format is not None:
        options["json_schema"] = _schema(request)
    return options


def deterministic(options: dict[str, Any]) -> bool:
    """Return True if a request with these options has exactly one answer, so that equal requests can share it."""
    return options.get("temperature") == 0 or options.get("seed") is not None


def _schema(request: lm15.Request) -> dict[str, Any]:
    response_format = request.config.response_format
    assert response_format is not None
    if response_format["type"] == "json_object":
        last = _content(request.messages[-1].parts)
        return asked_object(last if isinstance(last, str) else "")
    schema: dict[str, Any] = response_format["schema"]
    return schema


def _content(parts: str | Sequence[Any]) -> str | tuple[ContentPart, ...]:
    if isinstance(parts, str):
        return parts
    native = tuple(_part(part) for part in parts)
    if all(isinstance(part, TextPart) for part in native):
        return "".join(part.text for part in native if isinstance(part, TextPart))
    return native


def _part(part: Any) -> ContentPart:
    match part:
        case lm15.TextPart() | lm15.RefusalPart():
            return TextPart(part.text)
        case lm15.CitationPart():
            return TextPart(part.text or "")
        case lm15.DataPart():
            return TextPart(json.dumps(part.value, ensure_ascii=False))
        case lm15.ImagePart() | lm15.VideoPart():
            return _media(part)
    raise unsupported(f"a message holds a part of type {part.type!r}, which this model cannot read", part.type)


def _media(part: lm15.ImagePart | lm15.VideoPart) -> ImagePart | VideoPart:
    content = part.url or part.path
    if part.data is not None:
        content = f"data:{part.media_type};base64,{part.data}"
    if content is None:
        raise unsupported(
            f"a message names its {part.type} by the file id {part.file_id!r}, which no model here can look up; send "
            "its bytes",
            part.type,
        )
    if isinstance(part, lm15.VideoPart):
        return VideoPart(content, mime_type=part.media_type)
    return ImagePart(content, part.media_type, part.detail)


def _assistant(message: lm15.Message) -> Message:
    calls = tuple(ToolCall(p.id, p.name, dict(p.input)) for p in message.parts if isinstance(p, lm15.ToolCallPart))
    # Reasoning is not sent back to the model, as in chat templates.
    rest = [p for p in message.parts if not isinstance(p, lm15.ToolCallPart | lm15.ThinkingPart)]
    return Message("assistant", _content(rest), tool_calls=calls)


def _tool_results(message: lm15.Message) -> Iterator[Message]:
    for part in message.parts:
        if isinstance(part, lm15.ToolResultPart):
            yield Message("tool", _content(part.content), tool_call_id=part.id, name=part.name)
        else:
            yield Message("tool", _content([part]))


def asked_object(prompt: str) -> dict[str, Any]:
    """Return the schema of the object that a prompt of DSPy's JSONAdapter describes; without one, any object.

    JSONAdapter sends no schema if a field is an open dict, such as the arguments of ReAct's tools. The last sentence of
    its prompt then names the fields and their types.
    """
    found = _FIELDS.search(prompt)
    fields = {name: _type_of(kind) for name, kind in _FIELD.findall(found.group(1))} if found else {}
    if not fields:
        return {"type": "object"}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _type_of(annotation: str) -> dict[str, Any]:
    """Return the schema of a type as DSPy prints it; {} for a type that the text does not determine."""
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    if annotation.startswith("Literal["):
        with suppress(ValueError, SyntaxError):
            return {"enum": list(ast.literal_eval(annotation.removeprefix("Literal")))}
    return {"type": "object"} if annotation.startswith("dict") else {}


# -- responses -------------------------------------------------------------------------------------------------


def template_options(request: lm15.Request) -> dict[str, Any]:
    """Return the arguments of the chat template that `reasoning` stands for."""
    reasoning = request.config.reasoning
    if reasoning is None:
        return {}
    if reasoning.effort == "off":
        return {"enable_thinking": False, "thinking": False}
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": reasoning.effort}


def response(model: str, completion: Completion, calls: Sequence[ToolCall] = (), thinking: str = "") -> lm15.Response:
    """Build the lm15 response. With n > 1 the other texts are in its `provider_data["graftlm"]["texts"]`."""
    parts: list[Any] = [lm15.ThinkingPart(thinking)] if thinking else []
    parts += [lm15.TextPart(completion.text)] if completion.text or not calls else []
    parts += [lm15.ToolCallPart(call.id, call.name, call.arguments) for call in calls]
    return lm15.Response(
        id=f"{PROVIDER}-{completion.request_id}",
        model=model,
        message=lm15.Message(role="assistant", parts=tuple(parts)),
        finish_reason="tool_call" if calls else finish_reason(completion.finish_reason),
        usage=usage(completion.usage),
        logprobs=None if completion.logprobs is None else tuple(token_logprobs(completion.logprobs)),
        provider_data=provider_data(completion),
    )


def check_calls(answer: ParsedAnswer) -> None:
    """Raise EngineError for a malformed tool call, which lm15 cannot represent."""
    for call in answer.invalid:
        raise errors.EngineError(
            f"the call of tool {call.name!r} cannot be used: {call.error}; it is {call.arguments!r}"
        )


def provider_data(completion: Completion) -> dict[str, Any] | None:
    if len(completion.completions) < 2:
        return None
    return {PROVIDER: {"texts": [one.text for one in completion.completions]}}


def texts(answer: lm15.Response) -> list[str]:
    """Return all texts of a response: one, or n."""
    all_of_them = ((answer.provider_data or {}).get(PROVIDER) or {}).get("texts")
    return list(all_of_them) if all_of_them else [answer.text or ""]


def finish_reason(reason: str | None) -> Any:
    return {"length": "length", "tool_calls": "tool_call"}.get(reason or "", "stop")


def usage(native: Usage) -> lm15.Usage:
    return lm15.Usage(
        input_tokens=native.prompt_tokens,
        output_tokens=native.completion_tokens,
        total_tokens=native.total_tokens,
        cache_read_tokens=native.cached_tokens,
        reasoning_tokens=native.reasoning_tokens,
    )


def token_logprobs(tokens: Iterable[TokenLogprob]) -> Iterator[lm15.TokenLogprob]:
    """Yield tokens in lm15's form; a forced token has log-probability 0."""
    for token in tokens:
        itself, *others = token.candidates
        top = tuple(
            lm15.TopLogprob(token=one.token, logprob=one.logprob, bytes=tuple(one.data), token_id=one.token_id)
            for one in others
        )
        yield lm15.TokenLogprob(
            token=itself.token, logprob=itself.logprob, bytes=tuple(itself.data), token_id=itself.token_id, top=top
        )


def split_at_headers(text: str) -> list[str]:
    """Split text before every field header and after its line.

    DSPy's listeners miss a field whose header and end arrive in one delta, as forced text often does.
    """
    pieces: list[str] = []
    for i, piece in enumerate(text.split(_HEADER)):
        if i == 0:
            pieces.append(piece)
            continue
        head, end, rest = piece.partition(" ## ]]")
        pieces += [_HEADER + head + end, rest]
    return [piece for piece in pieces if piece]


class Events:
    """The stream events of one answer; tool calls are separated from text."""

    def __init__(self, model: str, form: ToolFormat | None, thinking: Thinking | None = None) -> None:
        self._model = model
        self._reader = AnswerReader(form, thinking)

    def start(self) -> lm15.StreamStartEvent:
        return lm15.StreamStartEvent(id=f"{PROVIDER}-stream", model=self._model)

    def of(self, chunk: Chunk) -> Iterator[Any]:
        yield from self._deltas(chunk)
        if chunk.usage is not None:
            yield self._end(chunk)

    def _deltas(self, chunk: Chunk) -> Iterator[Any]:
        logprobs = tuple(token_logprobs(chunk.logprobs or ()))
        deltas = self._reader.read(chunk)
        if self._reader.thought:
            yield lm15.StreamDeltaEvent(lm15.ThinkingDelta(self._reader.thought))
        for delta in deltas:
            if delta.index is None:
                for piece in split_at_headers(delta.text):
                    yield lm15.StreamDeltaEvent(lm15.TextDelta(piece, logprobs=logprobs))
                    logprobs = ()
            else:
                part = lm15.ToolCallDelta(delta.text, part_index=delta.index + 1, id=delta.id, name=delta.name)
                yield lm15.StreamDeltaEvent(part)

    def _end(self, chunk: Chunk) -> lm15.StreamEndEvent:
        check_calls(ParsedAnswer("", invalid=tuple(self._reader.invalid)))
        called = bool(self._reader.calls)
        assert chunk.usage is not None
        return lm15.StreamEndEvent(
            finish_reason="tool_call" if called else finish_reason(chunk.finish_reason),
            usage=usage(chunk.usage),
        )


# -- errors ----------------------------------------------------------------------------------------------------


def translate(error: errors.GraftError) -> lm15.LM15Error:
    """Return the lm15 error that DSPy converts: a context overflow, a bad request, a timeout or a server error."""
    kind: type[lm15.LM15Error]
    match error:
        case errors.RequestTooLong():
            kind = lm15.ContextLengthError
        case errors.ConfigError() | errors.GrammarError():
            kind = lm15.InvalidRequestError
        case errors.RequestTimeout():
            kind = lm15.TimeoutError
        case errors.ModelError() | errors.PluginError():
            kind = lm15.ConfigurationError
        case errors.RemoteError():
            return _remote(error)
        case _:
            kind = lm15.ProviderError  # DSPy never retries this class: the same step would fail again
    return kind(str(error), provider=PROVIDER)


def _remote(error: errors.RemoteError) -> lm15.LM15Error:
    """Return an endpoint's refusal as the error that tells DSPy whether and when to retry."""
    if error.code in ("insufficient_quota", "billing_hard_limit_reached"):
        return lm15.BillingError(str(error), provider=PROVIDER)
    if error.code == "context_length_exceeded":
        return lm15.ContextLengthError(str(error), provider=PROVIDER)
    if error.status == 429:
        return lm15.RateLimitError(str(error), provider=PROVIDER, retry_after=error.retry_after_s)
    if error.status in (401, 403):
        return lm15.AuthError(str(error), provider=PROVIDER)
    if error.status is not None and 400 <= error.status < 500:
        return lm15.InvalidRequestError(str(error), provider=PROVIDER)
    # DSPy repeats a request only after a ServerError; a permanent failure needs another class, or it is paid again.
    kind = lm15.ServerError if error.transient else lm15.ProviderError
    return kind(str(error), provider=PROVIDER)


def unsupported(message: str, feature: str) -> lm15.UnsupportedFeatureError:
    """Return the error that DSPy raises as LMUnsupportedFeatureError."""
    return lm15.UnsupportedFeatureError(message, provider=PROVIDER, feature=feature)
