"""Answer: one choice of a completion or a chat completion, whole or assembled from a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from graftlm.core.errors import RemoteError, shortened
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.ledger.usage import RemoteUsage
from graftlm.core.remote.transport.failures import no_answer, words_of
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.request import FinishReason, TokenLogprob

_CUT = ("length", "max_tokens", "max_output_tokens", "model_length", "max_length")
_CALLS = ("tool_calls", "function_call", "tool_use")
_REFUSED = ("content_filter", "safety", "recitation", "refusal", "sensitive", "prohibited_content")
_FAILED = (
    "error",
    "abort",
    "aborted",
    "cancelled",
    "timeout",
    "failed",
    "network_error",
    "insufficient_system_resource",
)


def finish_of(reason: object) -> FinishReason | None:
    """Normalise a server's finish_reason; an unknown one is an end, None a failure."""
    word = str(reason or "stop").lower()
    if word in _REFUSED or word in _FAILED:
        return None
    return "length" if word in _CUT else "tool_calls" if word in _CALLS else "stop"


@dataclass(frozen=True)
class Answer:
    """One text that an endpoint returned.

    finish_reason  "length" if the limit ended it, "stop" if the model did, or a stop string.
    num_tokens     None if the endpoint did not report it, or returned several answers.
    token_ends     the offset in characters after each token; None if the tokens are unknown.
    tool_calls     in the shape of the OpenAI API.
    stop           the stop string or token id that ended the text, if the server names it.
    only_turn      True at an endpoint that cannot continue a turn: text after a value cannot be requested.
    thinking       the thinking that the endpoint reports beside the text; "" for none
    """

    text: str
    finish_reason: FinishReason
    num_tokens: int | None = None
    token_ends: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    stop: str | int | None = None
    only_turn: bool = False
    thinking: str = ""

    def stopped_by(self, stops: Sequence[str]) -> str | int | None:
        """Return the stop that ended the text: one that is left in it, else the one that the server names."""
        at, end = first_stop(self.text, stops)
        return self.text[at:end] if end else self.stop

    @property
    def ended(self) -> bool:
        """True if the model ended by itself, provided that no stop string was sent."""
        return self.finish_reason != "length"


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int]:
    """Return start and end of the first complete stop string; (len(text), 0) if there is none."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    end, at = min(found, default=(0, len(text)))
    return at, end


def until_stop(text: str, stops: Sequence[str], finish_reason: FinishReason) -> tuple[str, FinishReason]:
    """Return the text before the first complete stop string, which some servers leave in, and its finish reason."""
    at, end = first_stop(text, stops)
    return text[:at], "stop" if end else finish_reason


def cut_before(answer: Answer, at: int) -> Answer:
    """Return the answer from a character on."""
    if at == 0:
        return answer
    ends = answer.token_ends
    if ends is not None:
        ends = tuple(end - at for end in ends if end > at)
    return replace(answer, text=answer.text[at:], num_tokens=None, token_ends=ends, logprobs=None)


P = ParamSpec("P")
T = TypeVar("T")


def _readable(read: Callable[P, T]) -> Callable[P, T]:
    """Let a reader of an endpoint's words raise RemoteError where they have another form than those of the API."""

    @wraps(read)
    def reading(*args: P.args, **options: P.kwargs) -> T:
        try:
            return read(*args, **options)
        except RemoteError:
            raise
        except (TypeError, AttributeError, LookupError, ValueError, OverflowError, RecursionError) as error:
            words = next((arg for arg in args if isinstance(arg, Mapping)), None)
            raise RemoteError(
                f"the endpoint answered what is not of the API's form ({error}): {shortened(words, 300)}"
            ) from error

    return reading


@_readable
def read_answers(body: Mapping[str, Any], config: EndpointConfig) -> list[Answer]:
    """Return the answers in a body with status 200, by their index; raise RemoteError if it holds none."""
    choices = body.get("choices")
    if not isinstance(choices, Sequence) or not choices or not all(isinstance(c, Mapping) for c in choices):
        raise no_answer(config, "without choices", body)
    counts = body.get("usage")
    num_tokens = _number(counts, "completion_tokens") if isinstance(counts, Mapping) and len(choices) == 1 else None
    ordered = sorted(choices, key=lambda choice: choice.get("index") or 0)
    return [_read(choice, num_tokens, config) for choice in ordered]


@_readable
def read_usage(body: Mapping[str, Any], prompt: RemotePrompt) -> RemoteUsage:
    """Return the token usage of a body; estimated at four bytes per token if the endpoint reports none."""
    given = body.get("usage")
    counts = given if isinstance(given, Mapping) else {}
    num_prompt, completion = _number(counts, "prompt_tokens"), _number(counts, "completion_tokens")
    estimated = num_prompt is None or completion is None
    if num_prompt is None:
        num_prompt = -(-prompt.num_bytes // 4)
    if completion is None:
        completion = sum(_estimate(choice) for choice in body.get("choices") or () if isinstance(choice, Mapping))
    details = counts.get("prompt_tokens_details")
    cached = _number(details if isinstance(details, Mapping) else {}, "cached_tokens")
    if cached is None:
        cached = _number(counts, "prompt_cache_hit_tokens")  # DeepSeek
    details = counts.get("completion_tokens_details")
    thinking = _number(details if isinstance(details, Mapping) else counts, "reasoning_tokens")
    return RemoteUsage(
        prompt_tokens=num_prompt,
        cached_tokens=cached or 0,
        completion_tokens=completion,
        reasoning_tokens=thinking or 0,
        estimated=int(estimated),
        cached_unknown=int(cached is None),
    )


def _estimate(choice: Mapping[str, Any]) -> int:
    message = choice.get("message")
    text = _content(message.get("content") if isinstance(message, Mapping) else choice.get("text")) or ""
    ends = _read_logprobs(choice.get("logprobs"), text)[1]
    return len(ends) if ends is not None else -(-len(text.encode()) // 4)


class StreamedAnswers:
    """The pieces of a stream, assembled into the body of an unstreamed response."""

    def __init__(self, num: int) -> None:
        self._choices = [_Pieces() for _ in range(num)]
        self._usage: Any = None

    @_readable
    def push(self, piece: Mapping[str, Any]) -> list[tuple[int, str, Answer]]:
        """Add a piece; return for each choice in it the index, the added text, and the answer so far.

        The thinking of the answer so far is the added one.
        """
        if isinstance(piece.get("usage"), Mapping):
            self._usage = piece["usage"]
        added = []
        choices = [c for c in piece.get("choices") or () if isinstance(c, Mapping)]
        given = [choice.get("index") for choice in choices]
        if len(set(given)) < len(given):
            given = list(range(len(given)))
        for choice, index in zip(choices, given, strict=True):
            if index is None:  # servers without indices send one answer after the other
                index = next((i for i, c in enumerate(self._choices) if c.finish_reason is None), 0)
            if 0 <= index < len(self._choices):
                pieces = self._choices[index]
                before, text = len(pieces.thinking), pieces.push(choice)
                added.append((index, text, replace(pieces.so_far, thinking=pieces.thinking[before:])))
        return added

    @property
    def begun(self) -> bool:
        return self._usage is not None or any(pieces.text or pieces.finish_reason for pieces in self._choices)

    @property
    def body(self) -> Mapping[str, Any]:
        """The pieces so far in the form of a response body, without empty answers."""
        begun = [(i, c) for i, c in enumerate(self._choices) if i == 0 or c.text or c.finish_reason]
        return {"choices": [c.choice(i) for i, c in begun], "usage": self._usage}

    def check_complete(self, config: EndpointConfig) -> None:
        """Raise RemoteError if the stream ended before the answer did."""
        for i, pieces in enumerate(self._choices):
            if pieces.finish_reason is None and (i == 0 or pieces.text):
                raise RemoteError(
                    f"{config.base_url} ended its stream without a finish_reason after {pieces.text[-80:]!r}; "
                    "ask again, or without a stream"
                )


class _Pieces:
    """One choice of a stream."""

    def __init__(self) -> None:
        self.text = self.thinking = ""
        self.finish_reason: str | None = None
        self._logprobs: list[Mapping[str, Any]] = []
        self._calls: dict[tuple[int, str], dict[str, Any]] = {}
        self._call_at: dict[int, tuple[int, str]] = {}
        self._chat = self._begun = False
        self._stop: str | int | None = None
        self._ends: list[int] = []

    @property
    def so_far(self) -> Answer:
        ends = tuple(self._ends) if self._ends and self._ends[-1] == len(self.text) else None
        return Answer(self.text, "length", token_ends=ends)

    def push(self, choice: Mapping[str, Any]) -> str:
        delta = choice.get("delta")
        if not delta and not self._begun:
            delta = choice.get("message")  # a whole message from a server that does not stream
        self._begun = True
        self._chat = self._chat or isinstance(delta, Mapping) or isinstance(choice.get("message"), Mapping)
        text = _content(delta.get("content") if isinstance(delta, Mapping) else choice.get("text")) or ""
        self.text += text
        self.thinking += _thinking_of(delta)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._stop = stop_of(choice) if self._stop is None else self._stop
        if isinstance(choice.get("logprobs"), Mapping):
            self._logprobs.append(choice["logprobs"])
            for token in _tokens(choice["logprobs"]) or ():
                self._ends.append((self._ends[-1] if self._ends else 0) + len(token))
        for call in (delta.get("tool_calls") if isinstance(delta, Mapping) else None) or ():
            self._push_call(call)
        return text

    def _push_call(self, call: Mapping[str, Any]) -> None:
        """Add a piece of a call. Servers without distinct call numbers begin each call with its id and name."""
        index, given, function = int(call.get("index") or 0), str(call.get("id") or ""), call.get("function") or {}
        at = self._call_at.get(index)
        if at is None or (function.get("name") and given not in ("", at[1])):
            at = self._call_at[index] = (index, given)
        whole = self._calls.setdefault(at, {"id": given, "type": "function", "function": {"name": "", "arguments": ""}})
        whole["id"] = whole["id"] or given
        for name, piece in function.items():
            if name in whole["function"] and piece is not None:
                whole["function"][name] += piece if isinstance(piece, str) else json.dumps(piece)

    def choice(self, index: int) -> Mapping[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": self.finish_reason, "stop_reason": self._stop}
        if self._logprobs:
            names = {name for piece in self._logprobs for name, values in piece.items() if isinstance(values, list)}
            lists = {n: [given for piece in self._logprobs if isinstance(given := piece.get(n), list)] for n in names}
            choice["logprobs"] = {n: [value for given in lists[n] for value in given] for n in names}
        if self._chat:
            calls = [self._calls[at] for at in sorted(self._calls, key=lambda at: at[0])]
            said = {"content": self.text, "tool_calls": calls, "reasoning_content": self.thinking}
            return choice | {"message": said}
        return choice | {"text": self.text}


def _number(counts: Mapping[str, Any], name: str) -> int | None:
    value = counts.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read(choice: Mapping[str, Any], num_tokens: int | None, config: EndpointConfig) -> Answer:
    message = choice.get("message")
    said = message if isinstance(message, Mapping) else {}
    content = _content(said.get("content") if said else choice.get("text"))
    reason = choice.get("finish_reason")
    if str(reason).lower() in _REFUSED or (content is None and said.get("refusal")):
        why = said.get("refusal") or f"finish_reason is {reason}"
        raise RemoteError(f"{config.base_url} refused to answer ({why}); change the prompt")
    finish = finish_of(reason)
    if finish is None:
        why = words_of(choice.get("error"))
        said_why = f" ({why})" if why else ""
        raise RemoteError(f"{config.base_url} ended its answer with finish_reason {reason!r}{said_why}; ask again")
    calls = tuple(call for call in said.get("tool_calls") or () if isinstance(call, Mapping))
    thinking = _thinking_of(said)
    if content is None and (calls or thinking):
        content = ""
    if content is None:
        hint = "; its limit went into thoughts, raise max_tokens" if finish == "length" else "; change the prompt"
        raise RemoteError(f"{config.base_url} answered no text (its content is null, finish_reason {reason!r}){hint}")
    logprobs, ends = _read_logprobs(choice.get("logprobs"), content)
    counted = num_tokens if num_tokens or not content else None
    return Answer(content, finish, counted, ends, logprobs, calls, stop_of(choice), thinking=thinking)


def _thinking_of(said: Any) -> str:
    """Return the thinking in a message or a piece of one, in the field of any server; "" for none."""
    if not isinstance(said, Mapping):
        return ""
    found = (said.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return next((text for text in found if isinstance(text, str) and text), "")


def stop_of(choice: Mapping[str, Any]) -> str | int | None:
    """Return the stop string or token id that a choice names, in the field of any server."""
    found = (choice.get(name) for name in ("stop_reason", "matched_stop", "stop_sequence", "stopping_word"))
    return next((one for one in found if isinstance(one, str | int) and not isinstance(one, bool) and one != ""), None)


def _content(given: Any) -> str | None:
    """Return the text of a message's content, which may consist of parts; None if there is none."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in given]
        given = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(given, str):
        return None
    # surrogate halves of a character that were split in JSON
    return given if given.isascii() else given.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_logprobs(given: Any, text: str) -> tuple[tuple[TokenLogprob, ...] | None, tuple[int, ...] | None]:
    """Return the tokens of a text, in the shape of either API, and their ends if they spell the text."""
    tokens = _tokens(given)
    if tokens is None:
        return None, None
    content = given.get("content")
    if isinstance(content, Sequence):
        return tuple(map(_chat_logprob, content)), token_ends(tokens, text)
    values = list(given.get("token_logprobs") or [None] * len(tokens))
    tops = [list((top or {}).items()) for top in given.get("top_logprobs") or [None] * len(tokens)]
    logprobs = tuple(
        TokenLogprob(-1, token, value, tuple((-1, str(t), float(v)) for t, v in top if v is not None))
        for token, value, top in zip(tokens, values, tops, strict=False)
    )
    return logprobs, token_ends(tokens, text)


def _chat_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    """Read a token in the shape of the chat API, with the bytes that the endpoint states."""
    top = [one for one in entry.get("top_logprobs") or () if one.get("logprob") is not None]
    return TokenLogprob(
        -1,
        str(entry.get("token", "")),
        entry.get("logprob"),
        tuple((-1, str(one.get("token")), float(one["logprob"])) for one in top),
        _bytes_of(entry),
        tuple(map(_bytes_of, top)),
    )


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes that an entry states; the bytes of its text if it states none or invalid ones."""
    given = entry.get("bytes")
    if isinstance(given, list) and all(isinstance(one, int) and 0 <= one < 256 for one in given):
        return bytes(given)
    return str(entry.get("token", "")).encode("utf-8", "replace")


def _tokens(given: Any) -> list[str] | None:
    """Return the tokens of the log-probabilities of either API."""
    if not isinstance(given, Mapping):
        return None
    if isinstance(given.get("content"), Sequence):
        return [str(entry.get("token", "")) for entry in given["content"]]
    return [str(token) for token in given["tokens"]] if isinstance(given.get("tokens"), Sequence) else None


def token_ends(tokens: Sequence[str], text: str) -> tuple[int, ...] | None:
    """Return the offset after each token; None unless they spell `text`, apart from an end token."""
    ends: list[int] = []
    position = 0
    for token in tokens:
        if not text.startswith(token, position):
            break
        position += len(token)
        ends.append(position)
    return tuple(ends) if position == len(text) and len(ends) >= len(tokens) - 1 else None
