"""Processor: prompts as callers give them to the PromptInputs that engines compute."""

from __future__ import annotations

import marshal
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graftlm.core.chat.messages import Message
from graftlm.core.errors import ConfigError, GraftError, failure_of
from graftlm.core.media.items import MediaText
from graftlm.core.prompt_input import PromptInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.text.tokenizer import Tokenizer

Tools = list[dict[str, Any]] | None
"""Functions that a chat template lists, in the form of the OpenAI API."""


class Processor(Protocol):
    """Renders prompts for one model. A prompt is text, token ids, messages or a PromptInput."""

    def encode(self, prompt: Any, tools: Tools = None, *, add_generation_prompt: bool = True) -> PromptInput:
        """Render one prompt. Raises ConfigError for a prompt that the model cannot take."""
        ...

    def encode_batch(self, prompts: Sequence[tuple[Any, Tools]]) -> list[PromptInput | GraftError]:
        """Render several prompts, each with its tools. A prompt that cannot be rendered gives its error instead."""
        ...


class TextProcessor:
    """The processor of a text model: its tokenizer and chat template.

    max_tokens  returns the context in tokens; longer texts are refused without encoding the whole of them.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: Callable[[], int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._max_tokens = max_tokens

    def encode(self, prompt: Any, tools: Tools = None, *, add_generation_prompt: bool = True) -> PromptInput:
        """Tokenise one prompt.

        prompt                 text taken as is, token ids (a list or an array), a PromptInput, or messages, rendered
                               with the chat template.
        add_generation_prompt  whether rendered messages end with the header of the model's turn.
        Raises ConfigError if the prompt is empty, of another kind, or contains a lone surrogate.
        """
        (encoded,) = self._encode([self._render(prompt, tools, add_generation_prompt)])
        if isinstance(encoded, GraftError):
            raise encoded
        return encoded

    def encode_batch(self, prompts: Sequence[tuple[Any, Tools]]) -> list[PromptInput | GraftError]:
        """Tokenise prompts, each with its tools: all texts among them in one batch.

        The ids are those of each whole prompt, whatever prefix it shares with others. An error is its prompt's own.
        """
        return self._encode([self._try_render(prompt, tools) for prompt, tools in prompts])

    def _encode(self, prompts: Sequence[str | PromptInput | GraftError]) -> list[PromptInput | GraftError]:
        """Tokenise the texts among `prompts` in one batch; return the other items as they are."""
        media = self.tokenizer.media
        if media is not None:
            with_media = iter(media.encode([p for p in prompts if isinstance(p, MediaText)], self._encode_texts))
            prompts = [next(with_media) if isinstance(prompt, MediaText) else prompt for prompt in prompts]
        encoded = iter(self._encode_texts([prompt for prompt in prompts if isinstance(prompt, str)]))
        results: list[PromptInput | GraftError] = []
        for prompt in prompts:
            ids = next(encoded) if isinstance(prompt, str) else prompt
            results.append(PromptInput(ids) if isinstance(ids, np.ndarray) else ids)
        return results

    def _encode_texts(self, texts: list[str]) -> Sequence[NDArray[np.int32] | GraftError]:
        most = None
        if self._max_tokens is not None and any(len(text) > _SHORT_CHARS for text in texts):
            most = self._max_tokens()
        return self.tokenizer.encode_texts(texts, most)

    def _try_render(self, prompt: Any, tools: Tools) -> str | PromptInput | GraftError:
        try:
            return self._render(prompt, tools, True)
        except Exception as error:
            return failure_of(error)

    def _render(self, prompt: Any, tools: Tools, add_generation_prompt: bool) -> str | PromptInput:
        """Return the text of a prompt, rendered if it is messages, or the ids that it gives."""
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError("the prompt is empty; give at least one token")
            return prompt
        if isinstance(prompt, Message | Mapping):
            prompt = [prompt]
        if isinstance(prompt, PromptInput):
            if prompt.spans and self.tokenizer.media is None:
                raise ConfigError("the prompt has spans of other values than text, and this model reads text only")
            return prompt if prompt.spans else replace(prompt, ids=_checked_ids(prompt.ids))
        if not isinstance(prompt, Sequence | np.ndarray):
            raise ConfigError(
                f"the prompt is a {type(prompt).__name__}; give text, a list of token ids or a list of messages"
            )
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty; give at least one token or message")
        if isinstance(prompt[0], Message | Mapping):
            return self.tokenizer.render(prompt, tools, add_generation_prompt=add_generation_prompt)
        return PromptInput(_checked_ids(prompt))


_SHORT_CHARS = 1 << 12
"""Texts up to this length are encoded before their number of tokens is checked."""

_LARGEST_ID = np.iinfo(np.int32).max
_MARSHALLED = np.dtype([("kind", "u1"), ("value", "<i4")])


def _packed(ids: list[Any]) -> NDArray[Any]:
    """Return the array that numpy makes of a list; of 32-bit integers in a quarter of numpy's time.

    marshal writes such an integer as "i" and four bytes, after a header of five bytes. If every fifth byte is an "i",
    from the first item to the last, the list has no other items.
    """
    try:
        written = marshal.dumps(ids, 0)
    except ValueError:  # an item that marshal cannot write
        return np.asarray(ids)
    if len(written) != _MARSHALLED.itemsize * (1 + len(ids)):
        return np.asarray(ids)
    items = np.frombuffer(written, _MARSHALLED)[1:]
    return items["value"] if (items["kind"] == ord("i")).all() else np.asarray(ids)


def _checked_ids(ids: Any) -> NDArray[np.int32]:
    """Return token ids as int32 [num_tokens]; raise ConfigError for other items and for ids out of range."""
    if isinstance(ids, bytes | bytearray | memoryview):
        raise ConfigError("the prompt is bytes; decode it to text, or give token ids or messages")
    try:
        checked = _packed(ids) if type(ids) is list and type(ids[0]) is int else np.asarray(ids)
    except ValueError:  # the items are lists of several lengths
        checked = np.empty(0, object)
    if checked.ndim != 1 or checked.dtype.kind not in "iu":
        other = next((one for one in ids if not isinstance(one, int | np.integer)), ids[0])
        raise ConfigError(f"the prompt's list holds {reprlib.repr(other)}; give token ids (integers) or messages")
    # One pass over the ids: NumPy releases the GIL in each, and another thread may take it.
    unsigned = checked.view(np.uint32) if checked.dtype == np.int32 else checked
    if unsigned.max() > _LARGEST_ID or (unsigned is checked and checked.min() < 0):
        wrong = checked.min() if checked.min() < 0 else checked.max()
        raise ConfigError(f"the prompt holds token id {wrong}; ids are 0 or more, and at most {_LARGEST_ID:,}")
    return checked.astype(np.int32)
