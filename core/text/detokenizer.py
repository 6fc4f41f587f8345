"""Token ids to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW = 6  # ids of context that decide how a tokenizer without exact bytes joins the next one


class _Utf8(codecs.BufferedIncrementalDecoder):
    """Python's decoder of UTF-8, whose `buffer` holds the bytes of a character that is not whole yet."""

    def _buffer_decode(self, input: Any, errors: str, final: bool) -> tuple[str, int]:
        return codecs.utf_8_decode(input, errors, final)


class Detokenizer:
    """Turn ids into text piece by piece, never showing part of a character.

    The text goes on after a prompt: a leading space of the first token is kept. Bytes that are no UTF-8 become
    U+FFFD as soon as they cannot become a character. Special tokens add nothing, or with `special` their names.

    before   the last ids of the prompt: a character that they begin and do not finish is part of this text
    special  True for the names of all special tokens, or the names that are shown
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, special: bool | frozenset[str] = False
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._table = self._table_of(special)
        self._pieces: list[str] = []
        self._decoder = _Utf8("replace") if tokenizer.exact_bytes else None
        if self._decoder is not None and len(before):
            self._decoder.buffer = unfinished_bytes(tokenizer, before)
        self._window: list[int] = []  # without exact bytes: recent ids, of which the first _num_shown are in the text
        self._num_shown = 0

    @property
    def text(self) -> str:
        """All whole characters so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the characters they complete."""
        if self._decoder is None:
            return self._push_window(ids)
        table = self._table
        data = b"".join([table[i] for i in ids if i < len(table)])
        if data.isascii() and not self._decoder.buffer:  # as most text is
            return self._add(data.decode("ascii"))
        return self._add(self._decoder.decode(data))

    def flush(self, *, cut: bool = False) -> str:
        """Return the text that is still held back, at the end: bytes of a broken character become U+FFFD.

        cut  the text was cut here and may go on, so an unfinished character is left out instead
        """
        if self._decoder is not None:
            return self._add("" if cut else self._decoder.decode(b"", final=True))
        text = self._hidden_text()
        self._window, self._num_shown = [], 0
        return self._add(text.rstrip(_REPLACEMENT) if cut else text)

    def _add(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _push_window(self, ids: Iterable[int]) -> str:
        """Decode through the tokenizer itself: the text that the hidden ids add to the shown ones of the window."""
        self._window.extend(i for i in ids if self._is_shown(i))
        text = self._hidden_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._num_shown :][-_WINDOW:]
        self._num_shown = len(self._window)
        return self._add(text)

    def _hidden_text(self) -> str:
        shown = self._tokenizer.decode(self._window[: self._num_shown], not self._special)
        return self._tokenizer.decode(self._window, not self._special)[len(shown) :]

    def _is_shown(self, token_id: int) -> bool:
        if isinstance(self._special, bool):
            return self._special or not self._tokenizer.is_special(token_id)
        return bool(self._table[token_id : token_id + 1] != [b""])

    def _table_of(self, special: bool | frozenset[str]) -> list[bytes]:
        if isinstance(special, bool):
            return self._tokenizer.shown_bytes if special else self._tokenizer.token_bytes
        return self._tokenizer.bytes_with(special)


MAX_UNFINISHED = 3
"""Bytes, and so tokens at most, of a character that is not finished: UTF-8 has characters of up to four bytes."""


def unfinished_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return the bytes of the character that `ids` begin and do not finish; b"" if they end with a whole one.

    Of a tokenizer without exact bytes nothing is known: b"".
    """
    if not tokenizer.exact_bytes:
        return b""
    table, data = tokenizer.token_bytes, b""
    for token_id in reversed(ids[-MAX_UNFINISHED:]):
        piece = table[token_id] if 0 <= token_id < len(table) else b""
        data = piece + data
        if not piece or len(data) >= MAX_UNFINISHED or data[-1] < 0x80:
            break
    decoder = _Utf8("replace")
    decoder.decode(data[-MAX_UNFINISHED:])
    return decoder.buffer
