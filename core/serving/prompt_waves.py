"""Waves of a large batch: the engine starts the first prompts while the next ones are tokenised."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from graftlm.core.chat.messages import ImagePart, Message, VideoPart
from graftlm.core.media.limits import IMAGE_PARTS, VIDEO_PARTS
from graftlm.core.request import Request

WAVE_CHARS = 1 << 16
"""Characters of new text in a wave, about 16,000 tokens: more than one step computes, and tokenised within a few
steps: 180 ms passed before the engine had the first of 64 chats of 4,600 characters each. A batch with less text is
submitted at once."""
PICTURE_CHARS = WAVE_CHARS // 8
"""Characters that a new picture counts as: a step has room for about eight, and threads that process more of them
beside a step slow it down, as they share Python's lock: 64 questions about 8 pictures began with one picture at 39 ms,
and its step took 145 ms."""

_GRAIN = 512  # granularity of shared prefixes, in characters


def waves(requests: Sequence[Request], known: Callable[[Any], bool] = lambda _: False) -> Iterator[slice]:
    """Cut a batch, in its order, where `WAVE_CHARS` of text are reached. A shared prefix and a picture count once.

    known  whether a picture, as a part of a message gives it, is processed already: it counts as no text
    """
    texts = [_text(request.prompt) for request in requests]
    pictures = _new_pictures(requests, known)
    if sum(map(len, texts)) + PICTURE_CHARS * sum(pictures) <= WAVE_CHARS:
        yield slice(0, len(texts))
        return
    new = _new_chars(texts)
    start = filled = 0
    for i, num_chars in enumerate(new):
        filled += num_chars + PICTURE_CHARS * pictures[i]
        if filled >= WAVE_CHARS and i + 1 < len(new):
            yield slice(start, i + 1)
            start, filled = i + 1, 0
    yield slice(start, len(new))


def _new_pictures(requests: Sequence[Request], known: Callable[[Any], bool]) -> list[int]:
    """Return the unknown pictures and videos of each request, as a number; one object counts once, in the first."""
    seen: set[int | str | bytes] = set()
    counts = []
    for request in requests:
        found = {
            _identity(part): part
            for message in messages_of(request.prompt)
            for part in _parts(message)
            if _media_of(part) is not None
        }
        counts.append(sum(not known(_source(part)) for identity, part in found.items() if identity not in seen))
        seen.update(found)
    return counts


def messages_of(prompt: Any) -> Sequence[Any]:
    """Return the messages of a prompt; none of a text, of token ids, or of an invalid prompt."""
    chat = isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Message | Mapping)
    return prompt if chat else ()


def _parts(message: Any) -> Sequence[Any]:
    content = message.content if isinstance(message, Message) else message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _media_of(part: Any) -> Any:
    """Return the picture or video of a part of a message; None for text."""
    if isinstance(part, ImagePart | VideoPart):
        return part.image if isinstance(part, ImagePart) else part.video
    kind = part.get("type") if isinstance(part, Mapping) else None
    return part.get(kind, part) if kind in (*IMAGE_PARTS, *VIDEO_PARTS) else None


def _source(part: Any) -> Any:
    found = _media_of(part)
    return found.get("url", found) if isinstance(found, Mapping) else found


def _identity(part: Any) -> int | str | bytes:
    found = _source(part)
    return found if isinstance(found, str | bytes) else id(found)


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
    return "\n".join(
        message.text if isinstance(message, Message) else _content(message) for message in messages_of(prompt)
    )


def _content(message: Any) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else "" if content is None else str(content)
