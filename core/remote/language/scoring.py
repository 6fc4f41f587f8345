"""Log-probabilities of given texts, where /completions echoes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graftlm.core.config import SamplingParams
from graftlm.core.errors import RemoteError
from graftlm.core.program.select import Selection
from graftlm.core.remote.endpoint import gather
from graftlm.core.remote.ledger.usage import Count
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.remote.transport.request_body import Query

if TYPE_CHECKING:
    from graftlm.core.remote.endpoint import Endpoint

_GREEDY = SamplingParams(temperature=0, max_tokens=1)  # some servers refuse 0 tokens


async def score_choices(
    endpoint: Endpoint,
    prompt: str,
    choices: Sequence[str],
    method: str,
    count: Count,
    deadline_s: float | None = None,
) -> Selection:
    """Choose by `method` from the log-probabilities of all choices after the prompt."""
    conditional = await _score(endpoint, prompt, choices, count, deadline_s)
    alone = None
    if method == "unconditional_likelihood_normalized":
        alone = await _score(endpoint, "", choices, count, deadline_s)
    return Selection.scored(choices, method, conditional, alone)


async def _score(
    endpoint: Endpoint, prompt: str, choices: Sequence[str], count: Count, deadline_s: float | None
) -> list[list[float]]:
    """Return the log-probabilities of each choice's tokens, by one concurrent request each."""
    prompts = [RemotePrompt(prompt + choice) for choice in choices]
    extra = {"echo": True, "logprobs": 1}
    bodies = await gather(endpoint.body(Query(p, _GREEDY, count, deadline_s, extra=extra)) for p in prompts)
    return [
        _logprobs_after(body, len(prompt), len(prompt + choice), endpoint)
        for body, choice in zip(bodies, choices, strict=True)
    ]


def _logprobs_after(body: Mapping[str, Any], start: int, end: int, endpoint: Endpoint) -> list[float]:
    """Return the log-probabilities of the tokens with a character in [start, end); a text's first token counts 0."""
    try:
        given = body["choices"][0]["logprobs"]
        tokens, values = given["tokens"], given["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        raise RemoteError(
            f"{endpoint.config.base_url} echoed a text without its log-probabilities; "
            "set capabilities={'echo': False}"
        ) from None
    position, found = 0, []
    for token, value in zip(tokens, values, strict=False):
        if position < end and position + len(token) > start:
            found.append(0.0 if value is None else float(value))
        position += len(token)
    return found
