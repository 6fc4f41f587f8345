"""The fields of a body that need the prompt's token ids: `truncate_prompt_tokens` and `prompt_logprobs`, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.request import Completion, Request

if TYPE_CHECKING:
    from graftlm.adapters.server.endpoints.body import Body
    from graftlm.core.runtime import Runtime


def needs_prompt_ids(body: Body) -> bool:
    """Return True if a field needs the ids. Raises ConfigError for fields that exclude each other."""
    if body.prompt_logprobs is not None and body.stream:
        raise ConfigError("prompt_logprobs cannot be streamed; leave out stream, or prompt_logprobs")
    return body.prompt_logprobs is not None or body.truncate_prompt_tokens is not None


def prompt_ids(body: Body, runtime: Runtime, prompt: Any, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Return the ids of a prompt: its last `truncate_prompt_tokens`; -1 truncates to the context less one token."""
    encoded = runtime.processor.encode(prompt, tools)
    if encoded.spans:
        raise ConfigError("prompt_logprobs and truncate_prompt_tokens need a prompt of text alone; leave them out")
    ids: list[int] = encoded.ids.tolist()
    given = body.truncate_prompt_tokens
    return ids if given is None else ids[-(runtime.max_model_len - 1 if given == -1 else given) :]


def scoring(ids: Sequence[int], num_top: int, request: Request) -> Request:
    """Return the request for the log-probabilities of a prompt of the same caller."""
    scored = SamplingParams(logprobs=True, top_logprobs=num_top, timeout=request.sampling.timeout)
    rest = list(ids[1:] or ids[:1])
    return Request(list(ids[:1]), scored, namespace=request.namespace, score_ids=rest, priority=request.priority)


@dataclass(frozen=True)
class PromptScore:
    """The prompt of a chat and the request that scores it."""

    ids: list[int]
    request: Request
    num_top: int

    def logprobs(self, scored: Completion) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of the prompt in vLLM's form."""
        return prompt_logprobs_of(self.ids, scored, self.num_top)

    @classmethod
    def of(cls, body: Body, runtime: Runtime, request: Request) -> tuple[Request, PromptScore | None]:
        """Return the request of a chat with its prompt as ids, and the score of these if the body asks for one."""
        ids = prompt_ids(body, runtime, request.prompt, request.tools)
        request = replace(request, prompt=ids, tools=None)
        if body.prompt_logprobs is None:
            return request, None
        return request, cls(ids, scoring(ids, body.prompt_logprobs, request), body.prompt_logprobs)


def prompt_logprobs_of(ids: Sequence[int], scored: Completion, num_top: int) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form, None for its first token.

    Each entry has the token itself and the `num_top` likeliest by their ids; `rank` is None below these.
    """
    entries: list[dict[str, Any] | None] = [None]
    for one in (scored.logprobs or []) if len(ids) > 1 else []:
        found: dict[str, Any] = {}
        for rank, (token_id, text, logprob) in enumerate(one.top[:num_top], 1):
            found[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": text}
        own = {"logprob": one.logprob, "rank": None, "decoded_token": one.token}
        found.setdefault(str(one.token_id), own)
        entries.append(found)
    return entries
