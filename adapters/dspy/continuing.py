"""Continuation of incomplete endpoint replies: a missing field or a cut value is appended, not requested anew."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from graftlm.core.chat.messages import Message
from graftlm.core.config import SamplingParams
from graftlm.core.errors import RemoteError
from graftlm.core.remote.endpoint import Endpoint
from graftlm.core.remote.language.continuation import continuation
from graftlm.core.remote.ledger.usage import RemoteUsage, uncounted
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.request import Completion

_WANTED = re.compile(
    r"Respond with the corresponding output fields, starting with the field (.*) ending with the marker"
)
_FIELD = re.compile(r"\[\[ ## (\w+) ## \]\]")
_HEADER = re.compile(rf"^[ \t]*{_FIELD.pattern}", re.MULTILINE)
_BEGUN = re.compile(r"\n[ \t]*\[\[?(?: ?#[^\n]*)?\Z")  # a header that the token limit cut
_LAST = "completed"


@dataclass(frozen=True)
class Reply:
    """The fields that a reply must contain, in order; without fields, one JSON value."""

    fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, messages: Sequence[Message], sampling: SamplingParams) -> Reply | None:
        """Return the fields that the prompt requires; None for a prompt without ChatAdapter's instruction."""
        if sampling.json_schema is not None:
            return cls()
        wanted = _WANTED.search(messages[-1].text) if messages else None
        return cls(tuple(_FIELD.findall(wanted[1]))) if wanted is not None else None

    def lacks(self, text: str, *, cut: bool, continues: bool) -> tuple[str, str] | None:
        """Return the part of a reply to keep, and the header to continue it with; None if the reply is complete.

        cut        True if the token limit ended the reply.
        continues  True if the endpoint can continue inside a value; otherwise the value is written anew.
        """
        if not self.fields:
            return (text, "") if cut and continues and not _is_json(text) else None
        whole = _BEGUN.sub("", text) if cut and not continues else text
        cut, text = cut and whole == text, whole
        headers = list(_HEADER.finditer(text))
        names = [header[1] for header in headers]
        missing = [name for name in self.fields if name not in names]
        if cut and _LAST not in names and headers:
            last = headers[-1]
            return (text, "") if continues else (text[: last.start()].rstrip(), _header(text[: last.start()], last[1]))
        if not missing:
            return None
        kept = text[: headers[names.index(_LAST)].start()] if _LAST in names else text
        return kept.rstrip(), _header(kept, missing[0])


async def mended(
    endpoint: Endpoint, reply: Reply, messages: Sequence[Message], sampling: SamplingParams, asked: Future[Completion]
) -> Completion:
    """Return the completion with its incomplete replies continued, in at most `max_attempts` requests each.

    A reply that is still incomplete stays so: DSPy then falls back to another format.
    """
    completion = await asyncio.wrap_future(asked)
    if not completion.completions:
        return await _mend(endpoint, reply, messages, sampling, completion)
    none = RemoteUsage()  # the sum below counts the usage of the first request once
    each = [
        await _mend(endpoint, reply, messages, sampling, replace(one, usage=none)) for one in completion.completions
    ]
    usage = sum((one.usage for one in each), start=completion.usage)
    return replace(each[0], completions=each, usage=usage)


async def _mend(
    endpoint: Endpoint, reply: Reply, messages: Sequence[Message], sampling: SamplingParams, completion: Completion
) -> Completion:
    prompt = RemotePrompt.of(list(messages))
    free = replace(sampling, n=1, json_schema=None, logprobs=False, top_logprobs=0)
    for _ in range(endpoint.config.max_attempts):
        cut = completion.finish_reason == "length"
        if reply.lacks(completion.text, cut=cut, continues=True) is None:
            break
        try:
            continues = await endpoint.probes.continue_turn(uncounted) != "none"
            lack = reply.lacks(completion.text, cut=cut, continues=continues)
            if lack is None:
                break
            kept, header = lack
            more = await continuation(endpoint, replace(prompt, text=kept + header), free, num_given=len(header))
        except RemoteError:
            break
        completion = replace(
            completion,
            text=kept + header + more.text,
            finish_reason=more.finish_reason,
            usage=completion.usage + more.usage,
            text_complete=more.finish_reason != "length",
        )
    if reply.fields and completion.finish_reason == "length":
        completion = replace(completion, text=_BEGUN.sub("", completion.text))
    return completion


def _header(before: str, name: str) -> str:
    return ("\n\n" if before.strip() else "") + f"[[ ## {name} ## ]]"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
