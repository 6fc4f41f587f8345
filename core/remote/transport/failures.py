"""Failures of requests to an endpoint, and whether a request may be repeated."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import RemoteError, RemoteTooLong

if TYPE_CHECKING:
    from graftlm.core.remote.config import EndpointConfig

MAX_RETRY_AFTER_S = 120.0
"""Longest wait before a retry, in seconds; a longer requested wait is an error that states it."""

_MAX_QUOTED = 500  # characters of an endpoint's own message

_TOO_LONG_CODES = ("context_length_exceeded", "exceed_context_size_error", "context_window_exceeded")
_TOO_LONG = re.compile(
    r"""context[ _-]?(?:length|size|window)\b.{0,60}\b(?:exceed|overflow|is\ \d|of\ (?:only\ )?\d|\(\d)
    | (?:exceed|longer\ than|too\ large\ for|greater\ than|beyond).{0,60}context
    | maximum\ (?:context|prompt|model|input|sequence)\ length
    | (?:input|prompt|model|sequence)\ length\b.{0,40}\bexceeds?
    | longer\ than\ the\ (?:maximum\ )?model
    | (?:prompt|input|request|conversation)\ is\ too\ long
    | too\ many\ (?:input\ |prompt\ )?tokens
    | token\ count\b.{0,60}\bexceeds?
    | exceed\w*\ (?:the\ )?(?:model\ )?(?:token\ limit|maximum\ number\ of\ (?:input\ )?tokens|max\ length)
    | must\ have\ less\ than\ \d+\ tokens
    | tokens`?\ \+\ `?max_new_tokens
    | reduce\ the\ length\ of\ (?:the|your)\ (?:messages|prompt|input)
    | range\ of\ input\ length
    | the\ context\ is\ \d
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
"""Messages of servers for requests over the context: OpenAI, Azure, vLLM, SGLang, llama.cpp, Ollama, LM Studio, TGI,
TensorRT-LLM, Anthropic, Gemini, Mistral, Cohere, Bedrock, xAI, Groq, Moonshot, DashScope, OpenRouter."""
_PER_TIME = re.compile(r"per (?:second|minute|hour|day)|\bTPM\b|rate[ _-]?limit", re.IGNORECASE)

_NEVER_AGAIN = ("insufficient_quota", "context_length_exceeded", "billing_hard_limit_reached")
_AGAIN = (408, 409, 429)
_REMEDIES = {
    400: "change what it refuses, or say what it can do in capabilities=",
    401: "check api_key, or the variable GRAFTLM_API_KEY",
    402: "add credit to the account, or ask another endpoint",
    403: "check what the key is allowed to do",
    404: "check base_url (usually it ends in /v1) and the model's name",
    413: "shorten the prompt",
    422: "change what it refuses, or say what it can do in capabilities=",
    429: "lower max_in_flight or raise max_retries",
}


@dataclass(frozen=True)
class Failure:
    """One failed attempt.

    kind     "timeout", "stale" (a kept connection that the server had closed before it took the request) or "other".
    again    whether the same request may succeed later.
    wait_s   wait that the endpoint requested, in seconds; None for the default backoff.
    """

    error: RemoteError
    again: bool
    wait_s: float | None = None
    kind: str = "other"

    def __post_init__(self) -> None:
        self.error.transient = self.again


def failure_of(error: Exception, config: EndpointConfig, *, begun: bool = False) -> Failure:
    """Classify an error of the SDK or of reading a stream.

    begun  whether a part of the answer was received: a retry would be billed twice.
    The SDK's exception holds the request with its key, so neither it nor its cause is chained.
    """
    import openai

    if isinstance(error, TimeoutError | openai.APITimeoutError):
        text = f"{config.base_url} did not answer within {config.timeout:g} s; raise timeout="
        return Failure(RemoteError(text), not begun, kind="timeout")
    if isinstance(error, openai.APIStatusError):
        return _of_status(error, config)
    if isinstance(error, openai.APIConnectionError):
        return _of_connection(error.__cause__ or error, config, begun)
    if isinstance(error, openai.APIError):  # an error inside a stream
        message, code = words_of(error.body) or str(error), error.code
        kind = _kind(None, code, message)
        return Failure(kind(_says(config, None, message, code), code=code), not begun and kind is RemoteError)
    if isinstance(error, UnicodeEncodeError):
        text = f"the request holds a lone surrogate ({error.object[error.start]!r}), which UTF-8 cannot write"
        return Failure(RemoteError(f"{text}; read its text with errors='replace', or remove it"), False)
    if isinstance(error, TypeError) and "JSON serializable" in str(error):
        return Failure(RemoteError(f"the request holds what JSON cannot write ({error}); leave it out"), False)
    if isinstance(error, ValueError):
        text = f"{config.base_url} sent what is no JSON: {_shorten(config.redact(str(error)))}"
        return Failure(RemoteError(f"{text}; check that it is an OpenAI-compatible API"), False)  # may have been billed
    return _of_connection(error, config, begun)


def retry_after_s(headers: Mapping[str, str], now_s: float | None = None) -> float | None:
    """Return the wait that headers request in milliseconds, in seconds or by a date; None without a valid one."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        given = headers.get(name)
        if given is None:
            continue
        try:
            wait_s = float(given) * unit
        except ValueError:
            try:
                wait_s = parsedate_to_datetime(given).timestamp() - (time.time() if now_s is None else now_s)
            except (ValueError, TypeError):
                continue
        if math.isfinite(wait_s):
            return max(0.0, wait_s)
    return None


def no_answer(config: EndpointConfig, what: str, found: Any) -> RemoteError:
    """Build the error of a response with status 200 without a completion."""
    message = words_of(found.get("error")) if isinstance(found, Mapping) else None
    if message:
        return _kind(None, None, message)(_says(config, None, message, None))
    shown = _shorten(config.redact(repr(found)))
    return RemoteError(f"{config.base_url} answered {what}: {shown}; check that it is an OpenAI-compatible API")


def _of_status(error: Any, config: EndpointConfig) -> Failure:
    status: int = error.status_code
    headers: Mapping[str, str] = error.response.headers
    code = error.code or (error.body.get("type") if isinstance(error.body, Mapping) else None)
    code = str(code) if code is not None else None
    wait_s = retry_after_s(headers)
    told = headers.get("x-should-retry")
    again = status in _AGAIN or status >= 500 if told not in ("true", "false") else told == "true"
    if code in _NEVER_AGAIN or (wait_s is not None and wait_s > MAX_RETRY_AFTER_S):
        again = False
    message = words_of(error.body) or words_of(_text_of(error.response))
    kind = _kind(status, code, message)
    if kind is RemoteTooLong:
        again = False
    failure = kind(_says(config, status, message, code, wait_s), status=status, code=code, retry_after_s=wait_s)
    return Failure(failure, again, wait_s)


def _kind(status: int | None, code: str | None, message: str | None) -> type[RemoteError]:
    """Return RemoteTooLong for an error that says that the request exceeds the model's context, else RemoteError."""
    if code in _TOO_LONG_CODES:
        return RemoteTooLong
    said = message or ""
    exceeds = status in (None, 400, 413, 422, 500) and _TOO_LONG.search(said) and not _PER_TIME.search(said)
    return RemoteTooLong if exceeds else RemoteError


def _of_connection(cause: BaseException, config: EndpointConfig, begun: bool) -> Failure:
    said = f"{type(cause).__name__}: {_shorten(config.redact(str(cause)))}"
    if begun:
        return Failure(RemoteError(f"{config.base_url} broke its answer off ({said}); ask again"), False)
    stale = "without sending a response" in said
    text = f"{config.base_url} cannot be reached ({said}); check base_url and that the server runs"
    return Failure(RemoteError(text), True, kind="stale" if stale else "other")


def _says(
    config: EndpointConfig, status: int | None, message: str | None, code: str | None, wait_s: float | None = None
) -> str:
    kind = " ".join(str(part) for part in (status, code) if part is not None) or "an error"
    text = f"{config.base_url}, model {config.model!r}, answered {kind}"
    if message:
        text += f": {_shorten(config.redact(message)).rstrip('.')}"
    if wait_s is not None and wait_s > MAX_RETRY_AFTER_S:
        return f"{text}; it asks to wait {wait_s:,.0f} s, and {MAX_RETRY_AFTER_S:.0f} s is the most that is waited"
    if code == "insufficient_quota":
        return f"{text}; the account has no credit left"
    if _kind(status, code, message) is RemoteTooLong:
        return f"{text}; shorten the prompt, or lower max_tokens"
    remedy = _REMEDIES.get(status or 0, "ask again later, or raise max_retries" if (status or 500) >= 500 else None)
    return f"{text}; {remedy}" if remedy is not None else text


def words_of(body: Any) -> str | None:
    """Return the message of an error: in "message", in "detail", or the body itself."""
    if isinstance(body, Mapping):
        found = next((body[name] for name in ("message", "detail", "error") if body.get(name)), None)
        return words_of(found) if found is not None else str(dict(body)) if body else None
    if isinstance(body, list) and len(body) == 1 and isinstance(body[0], Mapping) and body[0].get("error"):
        return words_of(body[0])  # Gemini
    return str(body).strip() or None if body is not None else None


def _text_of(response: Any) -> str | None:
    try:
        return str(response.text)
    except Exception:  # a body that was not read
        return None


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 1] + "…"
