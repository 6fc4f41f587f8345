"""Waves of a large batch: the engine starts the first prompts while the next ones are tokenised."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graftlm.core.chat.messages import Message
from graftlm.core.request import Request

WAVE_CHARS = 1 << 16
"""Characters of new text in a wave, about 16,000 tokens: more than one step computes, and tokenised within a few
steps: 180 ms passed before the engine had the first of 64 chats of 4,600 characters each. A batch with less text is
submitted at once."""
_GRAIN = 512  # granularity of shared prefixes, in characters


def waves(requests: Sequence[Request]) -> Iterator[slice]:
    """Cut a batch, in its order, where `WAVE_CHARS` of text are reached. A shared prefix counts once.

    The cuts depend on the prompts alone, so that equal batches are cut alike.
    """
    texts = [_text(request.prompt) for request in requests]
    if sum(map(len, texts)) <= WAVE_CHARS:
        yield slice(0, len(texts))
        return
    new = _new_chars(texts)
    start = filled = 0
    for i, num_chars in enumerate(new):
        filled += num_chars
        if filled >= WAVE_CHARS and i + 1 < len(new):
            yield slice(start, i + 1)
            start, filled = i + 1, 0
    yield slice(start, len(new))


def _new_chars(texts: Sequence[str]) -> list[int]:
    """Return the characters of each text after its common prefix with its neighbour in alphabetical order."""
    new = [0] * len(texts)
    before = ""
    for i in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[i]
        grains = range(_GRAIN, min(len(before), len(text)) + 1, _GRAIN)
        shared = bisect_left(grains, True, key=lambda end: not text.startswith(before[:end])) * _GRAIN
        before, new[i] = text, len(text) - shared
    return new


def _text(prompt: Any) -> str:
    """Return the text of a prompt that is to be tokenised; of its messages, without their template."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Message | Mapping):
        return ""  # token ids, or an invalid prompt that is refused later
    return "\n".join(message.text if isinstance(message, Message) else _content(message) for message in prompt)


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else "" if content is None else str(content)
