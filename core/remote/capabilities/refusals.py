"""Capabilities from refusals: fields that an endpoint wants under another name, or not at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from graftlm.core.errors import RemoteError, RemoteTooLong
from graftlm.core.remote.capabilities.capabilities import Capabilities, MaxTokensField

_UNKNOWN = re.compile(
    r"unsupported|not supported|no longer|does not support|unrecogni[sz]ed|unknown|unexpected|not permitted|forbidden"
    r"|not allowed|deprecated|extra",
    re.IGNORECASE,
)
_WRONG = re.compile(_UNKNOWN.pattern + r"|invalid|must|too (?:long|many)|array|at most|only", re.IGNORECASE)
_NAMED = {"n": re.compile(r"['\"`]n['\"`]|\bn (?:must|should|is|>|!=)|\bn=")}
_MOST_STOPS = 4  # OpenAI's limit, which others have taken over


def learned(error: RemoteError, sent: Mapping[str, Any], known: Capabilities) -> dict[str, Any]:
    """Fields of Capabilities with which the same request may succeed; {} if the refusal tells of none.

    sent   the refused body.
    known  what it was made with.
    Only what changes no answer is left out: stop strings are cut here, further answers are asked for one by one, and
    a temperature of 1 is what an endpoint takes by itself.
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
    """Return True if a refusal names this field, and not only one whose name has it as a part."""
    pattern = _NAMED.get(name) or re.compile(rf"(?<![\w-]){name}(?![\w-])")
    return pattern.search(said) is not None
