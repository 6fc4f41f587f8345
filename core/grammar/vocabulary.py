"""The tokens that a grammar is matched against: their bytes, the trie over them and how text becomes them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.jit import Int32Array
    from graftlm.core.grammar.masks.slices import Slices
    from graftlm.core.grammar.masks.trie import TokenIndex, Trie

Encode = Callable[[str], Sequence[int]]

_MAX_REMEMBERED = 1 << 13
_LONGEST_REMEMBERED = 64
"""Texts between two values of a JSON object, whose ids are kept: grammars share many of them."""
SPECIAL = b"\xff"
"""Precedes the name of a special token that a grammar may require: no UTF-8 text contains this byte."""
_LONGEST_JOINED = 8
"""Bytes behind a token among which the end of its word is sought: punctuation, mostly."""


class Vocabulary:
    """The bytes of every token id, and the ids that end a sequence.

    tokens         bytes by token id; b"" for ids that no text may contain (special, unused and padding ids)
    eos_token_id   the id or ids that end a sequence; their bytes are ignored
    encode         text to its canonical ids, without special tokens; None takes the longest token at each place
    ends_word      whether two texts, one behind the other, have the ids that each has alone; None: not known
    vocab_size     width of the model's logits when larger than `len(tokens)`; the ids between are never allowed
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        eos_token_id: int | Sequence[int] | None = None,
        encode: Encode | None = None,
        ends_word: Callable[[str, str], bool] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        self.vocab_size = max(len(tokens), vocab_size or 0)
        for token_id in ends:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"eos_token_id {token_id} is not in the vocabulary of {self.vocab_size} tokens; "
                    f"pass an id from 0 to {self.vocab_size - 1}"
                )
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(ends)))
        self.tokens: list[bytes] = [bytes(token) for token in tokens]
        self.tokens += [b""] * (self.vocab_size - len(tokens))
        for token_id in self.eos_token_ids:
            self.tokens[token_id] = b""
        self._encode = encode
        self._ends_word = ends_word
        self._index: TokenIndex | None = None
        self._lock = threading.Lock()
        self._spelled: dict[bytes, tuple[int, ...]] = {}
        self._holding: dict[bytes, Int32Array] = {}

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, vocab_size: int | None = None, markers: Collection[str] = ()
    ) -> Vocabulary:
        """Read a Hugging Face tokenizer, or a `graftlm.core.text.tokenizer.Tokenizer`.

        markers  names of special tokens that grammars of this vocabulary may require, as SPECIAL and their name
        """
        from graftlm.core.text.tokenizer import Tokenizer
        from graftlm.core.text.word_encoder import WordEncoder

        tok = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_hf(tokenizer)
        encoder = WordEncoder(tok)
        tokens = tok.token_bytes
        if markers:
            tokens = [b"" if SPECIAL in token else token for token in tokens]
            for name in markers:
                (token_id,) = tok.encode_continuation(name)
                tokens[token_id] = SPECIAL + name.encode()
        return cls(
            tokens,
            eos_token_id=tok.eos_token_ids,
            encode=encoder,
            ends_word=encoder.ends_word,
            vocab_size=vocab_size,
        )

    @property
    def num_words(self) -> int:
        """Length of a mask row: int32 words."""
        return (self.vocab_size + 31) // 32

    @cached_property
    def no_tokens(self) -> Int32Array:
        """The mask row that allows none: int32 [num_words], not to be written to."""
        return np.zeros(self.num_words, np.int32)

    @cached_property
    def end_ids(self) -> Int32Array:
        """`eos_token_ids`: int32, not to be written to."""
        return np.array(self.eos_token_ids, np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """Names the vocabulary by content: equal for equal tokens and end-of-sequence ids."""
        digest = hashlib.blake2b(repr(self.eos_token_ids).encode(), digest_size=16)
        digest.update(np.fromiter(map(len, self.tokens), np.int32, len(self.tokens)).tobytes())
        digest.update(b"".join(self.tokens))
        return digest.hexdigest()

    @cached_property
    def single_bytes(self) -> npt.NDArray[np.bool_]:
        """bool [256]: the byte is a token of its own."""
        found = np.zeros(256, bool)
        found[[token[0] for token in self.tokens if len(token) == 1]] = True
        found[SPECIAL[0]] = True  # in no text: only whole special tokens contain it
        return found

    @cached_property
    def has_all_bytes(self) -> bool:
        """Whether each byte is a token of its own."""
        return bool(self.single_bytes.all())

    @property
    def trie(self) -> Trie:
        """The trie over all tokens."""
        return self._indexed().trie

    @cached_property
    def slices(self) -> Slices:
        """Tokens that stay inside a class of characters."""
        from graftlm.core.grammar.masks.slices import Slices

        return Slices(self._indexed().tokens, self.vocab_size)

    def holding(self, signs: bytes) -> Int32Array:
        """The tokens that hold one of these bytes, as a mask row: int32 [num_words], not to be written to."""
        found = self._holding.get(signs)
        if found is None:
            tokens = self._indexed().tokens
            is_sign, bits = np.zeros(256, bool), np.zeros(32 * self.num_words, np.uint8)
            is_sign[list(signs)] = True
            if len(tokens.ids):
                bits[tokens.ids[np.logical_or.reduceat(is_sign[tokens.data], tokens.offsets[:-1])]] = 1
            found = self._holding[signs] = np.packbits(bits, bitorder="little").view(np.int32)
        return found

    def prepare(self) -> None:
        """Build now what every grammar needs: about a second for 128k tokens, at the first time on a machine."""
        self.slices.prepare()
        _ = self.has_all_bytes
        if self._encode is not None:
            self._encode("{")  # reads how the tokenizer ends words

    def _indexed(self) -> TokenIndex:
        if self._index is None:
            from graftlm.core.grammar.masks.trie import TokenIndex

            with self._lock:  # a request that comes while the index is being built waits for it
                if self._index is None:
                    self._index = TokenIndex.of(self.tokens, self.fingerprint)
        return self._index

    def decode(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of `token_ids`, special ids left out."""
        return b"".join([self.tokens[token_id] for token_id in token_ids])

    def encode(self, data: bytes) -> list[int]:
        """The canonical ids of `data`; what is left of a character cut in two is spelled by single bytes.

        Raises ConfigError when no tokens spell `data`.
        """
        if len(data) > _LONGEST_REMEMBERED:
            return self._spell(data)
        found = self._spelled.get(data)
        if found is None:
            found = tuple(self._spell(data))
            if len(self._spelled) >= _MAX_REMEMBERED:
                self._spelled.clear()
            self._spelled[data] = found
        return list(found)

    def joins(self, token_id: int, data: bytes) -> bool:
        """Whether the ids of `data` behind this token may be others than those of `data` alone."""
        token = self.tokens[token_id] if 0 <= token_id < self.vocab_size else b""
        if not token or not data or token.startswith(SPECIAL) or data.startswith(SPECIAL):
            return False
        if self._ends_word is None or not (token.isascii() and data.isascii()):
            return True
        return not self._ends_word(token.decode(), data.decode())

    def num_joined(self, token_id: int, data: bytes) -> int:
        """How many bytes of `data`, which this token joins, may be in one word with it: the ids of the others are those
        that they have alone. All where that is not known.
        """
        token = self.tokens[token_id]
        if self._ends_word is not None and token.isascii() and data.isascii():
            before, text = token.decode(), data.decode()
            for end in range(1, min(len(text), _LONGEST_JOINED)):
                if self._ends_word(before + text[:end], text[end:]):
                    return end
        return len(data)

    def _spell(self, data: bytes) -> list[int]:
        if self._encode is not None and data.isascii():
            ids = list(self._encode(data.decode()))
            return ids if self.decode(ids) == data else self._longest(data)
        marker = data.find(SPECIAL)
        if marker >= 0 and (found := self.trie.longest_prefix(data, marker)) is not None:
            behind = marker + len(self.tokens[found])
            return [*self.encode(data[:marker]), found, *self.encode(data[behind:])]
        start = 0
        while start < len(data) and data[start] & 0xC0 == 0x80:  # the rest of a character that began before
            start += 1
        text = data[start:].decode(errors="replace").rstrip("\ufffd")
        whole = text.encode()
        if self._encode is None or not data.startswith(whole, start):
            return self._longest(data)
        ids = list(self._encode(text)) if text else []
        if self.decode(ids) != whole:  # text that only looks like a special token, or cannot be spelled back
            return self._longest(data)
        head = [token_id for i in range(start) for token_id in self._longest(data[i : i + 1])]
        return [*head, *ids, *self._longest(data[start + len(whole) :])]

    def _longest(self, data: bytes) -> list[int]:
        ids: list[int] = []
        position = 0
        while position < len(data):
            found = self.trie.longest_prefix(data, position)
            if found is None:
                raise ConfigError(
                    f"no token of the vocabulary spells byte {data[position]:#04x}; "
                    "use a tokenizer with byte fallback or a constraint within its alphabet"
                )
            ids.append(found)
            position += len(self.tokens[found])
        return ids
