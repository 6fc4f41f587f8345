"""Capabilities of an endpoint: set by the user, documented by its host, or detected from its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from graftlm.core.config import reject_unknown
from graftlm.core.errors import ConfigError, RemoteError, RemoteTooLong

ContinueTurn = Literal["continue_final_message", "prefix", "bare", "template", "none"]
"""Ways to continue an open assistant turn.

continue_final_message  this field is true and `add_generation_prompt` false (vLLM, SGLang, llama.cpp)
prefix                  the last message has "prefix": true (DeepSeek, Mistral)
bare                    a trailing assistant message is enough (Ollama, llama.cpp, older Claude models)
template                the chat is rendered with the given tokenizer's template and sent to /completions
none                    not supported: such a message begins a new turn, or is refused
"""

ConstraintField = Literal[
    "structured_outputs", "regex", "response_format", "json_schema", "json_object", "grammar", "none"
]
"""Fields that hold a constraint: vLLM's, SGLang's, OpenAI's, and the two of llama.cpp, whose grammars are GBNF."""
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]

_UNKNOWN = re.compile(
    r"unsupported|not supported|no longer|does not support|unrecogni[sz]ed|unknown|unexpected|not permitted|forbidden"
    r"|not allowed|deprecated|extra",
    re.IGNORECASE,
)
_WRONG = re.compile(_UNKNOWN.pattern + r"|invalid|must|too (?:long|many)|array|at most|only", re.IGNORECASE)
_NAMED = {"n": re.compile(r"['\"`]n['\"`]|\bn (?:must|should|is|>|!=)|\bn=")}
_MOST_STOPS = 4  # OpenAI's limit, which other servers share


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of an endpoint; None is not detected yet, and detected on first use.

    completions       whether the endpoint has /completions, for plain text.
    continue_turn     the way to continue an assistant turn; see ContinueTurn.
    logprobs          whether an answer can include log-probabilities, and so its tokens.
    echo              whether /completions scores a given text.
    regex, choices, json_schema, grammar
                      the field for this constraint; "none": answers are checked by the client instead.
    n                 whether one request can return several answers.
    max_stops         maximum number of stop strings; None sets no limit.
    max_tokens_field  the name of the token limit of a chat;  text_max_tokens_field: of a text.
    returns_text      whether an answer begins with the given text that it continues (Mistral).
    omit              fields that the endpoint refuses, and that are not sent.
    """

    completions: bool | None = None
    continue_turn: ContinueTurn | None = None
    logprobs: bool | None = None
    echo: bool | None = None
    regex: ConstraintField | None = None
    choices: ConstraintField | None = None
    json_schema: ConstraintField | None = None
    grammar: ConstraintField | None = None
    n: bool | None = None
    max_stops: int | None = None
    max_tokens_field: MaxTokensField = "max_tokens"
    text_max_tokens_field: MaxTokensField = "max_tokens"
    returns_text: bool | None = None
    omit: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, host: str) -> Self:
        """Build the initial capabilities: a known host's, overridden by the user's."""
        reject_unknown(list(given or {}), [f.name for f in fields(cls)], "capability")
        known = replace(cls(), **_known_host(host))
        return replace(known, **(given or {}))

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed or (isinstance(value, int) and not isinstance(value, bool)):
                shown = ", ".join(repr(option) for option in allowed)
                raise ConfigError(f"the capability {name} is {value!r}; it must be one of {shown}")
        if isinstance(self.omit, str) or not all(isinstance(name, str) for name in self.omit):
            raise ConfigError(f"the capability omit is {self.omit!r}; it must be a list of names of fields")
        object.__setattr__(self, "omit", tuple(self.omit))
        if self.max_stops is not None and (not isinstance(self.max_stops, int) or self.max_stops < 0):
            raise ConfigError(f"the capability max_stops is {self.max_stops!r}; it must be a whole number, or None")


_SWITCH = (None, True, False)
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("completions", "logprobs", "echo", "n", "returns_text"), _SWITCH),
    **dict.fromkeys(("regex", "choices", "json_schema", "grammar"), (None, *get_args(ConstraintField))),
    "continue_turn": (None, *get_args(ContinueTurn)),
    "max_tokens_field": get_args(MaxTokensField),
    "text_max_tokens_field": get_args(MaxTokensField),
}


def _known_host(host: str) -> dict[str, Any]:
    """Return the capabilities that a hosted API documents; the rest is detected."""
    if host.endswith(("openai.com", "openai.azure.com")):
        return {"continue_turn": "none", "max_stops": 4, "max_tokens_field": "max_completion_tokens"}
    return {}


def learned(error: RemoteError, sent: Mapping[str, Any], known: Capabilities) -> dict[str, Any]:
    """Return fields of Capabilities with which a refused request may succeed; {} if the refusal implies none.

    sent   the refused body.
    known  the capabilities of the request.
    A field is omitted only if that changes no answer: the client cuts at stop strings and requests further answers
    individually, and a temperature of 1 is an endpoint's default.
    """
    said = str(error)
    if error.status not in (400, 422) or isinstance(error, RemoteTooLong):
        return {}
    chat = "messages" in sent
    names: tuple[MaxTokensField, ...] = get_args(MaxTokensField)
    for limit, other in zip(names, reversed(names), strict=True):
        if limit in sent and (_names(said, other) or _names(said, limit) and _UNKNOWN.search(said)):
            return {"max_tokens_field" if chat else "text_max_tokens_field": other}
    for name in ("stop", "n", "stream_options", "temperature"):
        if name not in sent or not _names(said, name) or not _WRONG.search(said):
            continue
        if name == "temperature" and sent[name] != 1:
            continue
        if name == "stop" and len(sent[name]) > _MOST_STOPS:
            return {"max_stops": _MOST_STOPS}
        return {"omit": (*known.omit, name)}
    return {}


def _names(said: str, name: str) -> bool:
    """Return True if a refusal names this field as a whole word."""
    pattern = _NAMED.get(name) or re.compile(rf"(?<![\w-]){name}(?![\w-])")
    return pattern.search(said) is not None
