"""Continuation of a prompt, or of a chat's incomplete answer, outside of a program."""

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
    """Generate the continuation of `prompt` or of its open turn.

    num_given  characters at the turn's end that the model did not generate; an endpoint that cannot continue a turn
               is instructed to begin with them.
    sink       receives the value as chunks.
    Raises RemoteError if the endpoint supports neither.
    """
    values = Values(endpoint, uncounted, sink)
    text = RemoteText(values.ask, values.note)
    text.text, text.messages = prompt.text, prompt.messages
    text.num_values, text.value_end = int(prompt.text != ""), len(prompt.text) - num_given
    value = await values.gen(text, sampling, nothing_ahead, None)
    return value.completion
