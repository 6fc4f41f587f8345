"""The continuation of a prompt, or of a chat's answer that ended too early, outside of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from graftlm.core.config import SamplingParams
from graftlm.core.remote.language.values import Values, nothing_ahead
from graftlm.core.remote.ledger.usage import uncounted
from graftlm.core.remote.speculation.text import RemoteText
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.request import Chunk, Completion

if TYPE_CHECKING:
    from graftlm.core.remote.endpoint import Endpoint


async def continuation(
    endpoint: Endpoint,
    prompt: RemotePrompt,
    sampling: SamplingParams,
    *,
    num_given: int = 0,
    sink: Callable[[Chunk], None] | None = None,
) -> Completion:
    """Generate what follows `prompt`, or its open turn; only this is generated and paid.

    num_given  characters at the turn's end that the model has not written; an endpoint that cannot continue a turn
               is told to begin with them.
    sink       is given the value as chunks.
    Raises RemoteError where neither can be had.
    """
    values = Values(endpoint, uncounted, sink)
    text = RemoteText(values.ask, values.note)
    text.text, text.messages = prompt.text, prompt.messages
    text.num_values, text.value_end = int(prompt.text != ""), len(prompt.text) - num_given
    value = await values.gen(text, sampling, nothing_ahead, None)
    return value.completion
