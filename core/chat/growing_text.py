"""GrowingText: an append-only text, and its token ids, which never change once the model has computed their KV."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.errors import ConfigError
from graftlm.core.prompt_input import PromptInput, Span
from graftlm.core.text.detokenizer import MAX_UNFINISHED, unfinished_bytes
from graftlm.core.text.processor import TextProcessor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.chat.messages import ImagePart, VideoPart
    from graftlm.core.text.tokenizer import Tokenizer


class GrowingText:
    """Constant and generated text in one sequence.

    Constant text is tokenised only when `tokens` is called, so that adjacent pieces are tokenised together. Generated
    token ids are kept as they were sampled, so that the prefix cache finds their KV again. Where a limit ended them
    inside a character, the text holds whole characters only: a generation that follows goes on from the ids, and
    constant text takes the place of the unfinished character.

    Modules are tokenised one by one; so is the text before the first of them, which is a module as well.
    """

    def __init__(self) -> None:
        self.text = ""
        self._ids = np.zeros(0, dtype=np.int32)  # of the text before `_pending`
        self._pending = ""
        self._parts: tuple[ImagePart | VideoPart, ...] = ()  # whose markers `_pending` holds, in order
        self._spans: tuple[Span, ...] = ()  # of `_ids`
        self._wrote = False  # whether the model wrote a part of the text
        self._modules: tuple[tuple[str, str], ...] = ()  # names and texts at the beginning of the text
        self._sizes: tuple[int, ...] = ()  # tokens of each, once they are in `_ids`

    def copy(self) -> GrowingText:
        return copy(self)

    def write(self, text: str) -> None:
        """Append constant text."""
        self.text += text
        self._pending += text

    def write_module(self, name: str, text: str) -> None:
        """Append a module. Raises ConfigError unless it comes first, after others, or after constant text alone."""
        if self._wrote or self._spans or self._parts:
            raise ConfigError(f"module {name!r} stands after what the model wrote, or a picture; put it before")
        if self._modules and (self._pending or len(self._ids) > sum(self._sizes)):
            before = self._modules[-1][0]
            raise ConfigError(
                f"text stands between modules {before!r} and {name!r}; put it into one of them, or after the last one"
            )
        if any(name == other for other, _ in self._modules):
            raise ConfigError(f"module {name!r} stands in the prompt twice; give each module a name of its own")
        if not self._modules and self.text:
            self._modules = (("", self.text),)
        self._ids, self._pending, self._sizes = np.zeros(0, dtype=np.int32), "", ()
        self._modules += ((name, text),)
        self.text += text

    def expect_media(self, part: ImagePart | VideoPart) -> None:
        """Announce a picture or a video; the text that the chat template writes for it follows as constant text."""
        self._parts += (part,)

    def write_generated(self, tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> None:
        """Append an output that the model generated after `tokens()`."""
        self._wrote = True
        kept, self._pending = align(tokenizer, token_ids, text, self._ids[-MAX_UNFINISHED:].tolist())
        self._extend(kept)
        self.text += text

    def write_scored(self, text: str, all_ids: NDArray[np.int32]) -> None:
        """Append a text that was scored as the end of `all_ids`."""
        self.text += text
        self._wrote = True
        self._ids = all_ids

    def tokens(self, tokenizer: Tokenizer, *, whole: bool = False) -> NDArray[np.int32]:
        """Return the token ids of the whole text, int32 [num_tokens]. An empty text has at most a BOS.

        whole  drop the ids of an unfinished character at the end
        """
        if self._modules and not self._sizes:
            self._put_modules(tokenizer)
        if (whole or self._pending) and len(self._ids):
            self._drop_unfinished(tokenizer)
        if not self._pending and len(self._ids):
            return self._ids
        if self._parts:
            self._put_media(tokenizer)
        elif len(self._ids):
            self._extend(tokenizer.encode_continuation(self._pending))
        elif self._pending:
            self._ids = TextProcessor(tokenizer).encode(self._pending).ids  # reuses the ids of prefixes seen before
        else:
            self._extend(tokenizer.encode(""))
        self._pending = ""
        return self._ids

    def prompt_input(self, tokenizer: Tokenizer, *, whole: bool = False) -> PromptInput:
        """Return the prompt of the whole text, with its pictures. The arguments are those of `tokens`."""
        ids = self.tokens(tokenizer, whole=whole)
        if self._sizes:
            return self._composed(ids)
        return PromptInput(ids) if tokenizer.media is None else tokenizer.media.prompt(ids, self._spans)

    def _put_modules(self, tokenizer: Tokenizer) -> None:
        """Tokenise the modules, each as a text of its own."""
        found = [TextProcessor(tokenizer).encode(text).ids for _, text in self._modules]
        self._sizes, self._ids = tuple(map(len, found)), np.concatenate(found)

    def _composed(self, ids: NDArray[np.int32]) -> PromptInput:
        """Return the prompt of the modules and the text after them. Raises ConfigError if there is none."""
        last = self._modules[-1][0]
        if self._spans:
            raise ConfigError(f"a picture stands in a prompt with module {last!r}; write its text without gl.module")
        *stops, end = np.cumsum(self._sizes)
        if len(ids) <= end:
            raise ConfigError(f"the model was called right after module {last!r}; append text after it")
        return PromptInput.composed(np.split(ids[:end], stops), ids[end:])

    def _put_media(self, tokenizer: Tokenizer) -> None:
        """Tokenise constant text with pictures. Raises ConfigError for one that cannot be read."""
        media = tokenizer.media
        assert media is not None
        behind = len(self._ids)

        def encode(text: str) -> NDArray[np.int32]:
            ids = tokenizer.encode_continuation(text) if behind else TextProcessor(tokenizer).encode(text).ids
            return np.asarray(ids, np.int32)

        ids, spans = media.ids(self._pending, media.load(self._parts), encode, offset=behind)
        self._extend(ids.tolist())
        self._spans += spans
        self._parts = ()

    def fix_all_but_last(self, tokenizer: Tokenizer) -> None:
        """Tokenise the text except for its last token, which the text that follows may change."""
        if not self._pending:
            return
        ids = self.tokens(tokenizer)
        last = tokenizer.whole_text(int(ids[-1])) if len(ids) > 1 and ids[-1] >= 0 else None
        if last:
            self._ids, self._pending = ids[:-1], last

    def _drop_unfinished(self, tokenizer: Tokenizer) -> None:
        """Drop the last ids that spell an unfinished character; tokenise whole characters among them again."""
        left = len(unfinished_bytes(tokenizer, self._ids[-MAX_UNFINISHED:].tolist()))
        if not left:
            return
        rest = b""
        while left or rest and rest[0] & 0xC0 == 0x80:
            rest, self._ids = tokenizer.token_bytes[int(self._ids[-1])] + rest, self._ids[:-1]
            if left:
                dropped = min(left, len(rest))
                rest, left = rest[: len(rest) - dropped], left - dropped
        self._pending = rest.decode() + self._pending

    def _extend(self, ids: Sequence[int]) -> None:
        self._ids = np.concatenate([self._ids, np.asarray(ids, dtype=np.int32)])


def align(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, before: Sequence[int] = ()
) -> tuple[list[int], str]:
    """Split a generated text into the longest prefix of `token_ids` that spells a prefix of it, and the remaining text.

    Ids and text differ if a stop string ends inside a token, and by the end token, which spells nothing.

    before  the ids that precede the text; they may contain the first bytes of its first character
    """
    if not tokenizer.exact_bytes:
        return [], text
    written = [i for i, token_id in enumerate(token_ids) if not tokenizer.is_special(token_id)]
    whole = list(token_ids[: written[-1] + 1]) if written else []
    detokenizer = tokenizer.detokenizer(before)
    shown = detokenizer.push(whole)
    if shown == text or shown + detokenizer.flush() == text:
        return whole, ""
    data, table = text.encode(), tokenizer.token_bytes
    position, kept, kept_position = len(unfinished_bytes(tokenizer, before)), 0, 0
    for index, token_id in enumerate(token_ids):
        piece = table[token_id] if token_id < len(table) else b""
        if not data.startswith(piece, position):
            break
        position += len(piece)
        if piece and (position == len(data) or data[position] & 0xC0 != 0x80):  # a whole character ends here
            kept, kept_position = index + 1, position
    return list(token_ids[:kept]), data[kept_position:].decode()
