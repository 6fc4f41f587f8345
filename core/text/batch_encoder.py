"""Text to ids for many prompts at once, in which no prefix that prompts share is encoded twice."""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftlm.core.errors import ConfigError
from graftlm.core.text.safe_cuts import SafeCuts, read_safe_cuts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.text.tokenizer import Tokenizer

CACHE_BYTES = 64 << 20
KEPT_CHARS = 1 << 18
"""Texts up to so many characters are kept beside the cache, to find what the next one shares: 3 MB at most."""
BLOCK_CHARS = 512
"""A block ends at the first safe cut behind so many characters. Prompts that share a prefix share its blocks."""
LONG_CHARS = 1 << 18
"""Texts longer than this are encoded in pieces of this size, so that one beyond its limit of tokens ends early."""
LONGEST_BLOCK = 1 << 20
"""Characters of one block that a tokenizer is given: its memory is 300 bytes for each of them."""


class Block(NamedTuple):
    """A piece of a text between two safe cuts.

    continues  whether it is encoded as text that goes on, without the space that some tokenizers put before a text.
    """

    text: str
    continues: bool


class Encoded(NamedTuple):
    """A text with its blocks and ids, which nobody changes.

    cuts  the safe cuts at which its blocks end
    ends  where each block ends, in characters of the text;  id_ends  in its ids, int32 [num_tokens]
    """

    cuts: SafeCuts
    text: str
    blocks: list[Block]
    ends: list[int]
    id_ends: list[int]
    ids: NDArray[np.int32]


class BlockCache:
    """The ids of blocks, least recently used ones dropped beyond `max_bytes`. Any thread may use it."""

    _OVERHEAD_BYTES = 300  # of a dictionary's entry, a key's tuple and an array's header

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._ids: OrderedDict[Block, NDArray[np.int32]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def get_many(self, blocks: Sequence[Block]) -> dict[Block, NDArray[np.int32]]:
        """The ids of those blocks that are known."""
        found = {}
        with self._lock:
            for block in blocks:
                ids = self._ids.get(block)
                if ids is not None:
                    self._ids.move_to_end(block)
                    found[block] = ids
        return found

    def put_many(self, encoded: dict[Block, NDArray[np.int32]]) -> None:
        with self._lock:
            for block, ids in encoded.items():
                size = self._size(block, ids)
                if block in self._ids or size > self.max_bytes:
                    continue
                self._ids[block] = ids
                self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._size(*self._ids.popitem(last=False))

    def _size(self, block: Block, ids: NDArray[np.int32]) -> int:
        return self._OVERHEAD_BYTES + getsizeof(block.text) + int(ids.nbytes)


class BatchEncoder:
    """Encodes texts block by block, all new blocks of a batch in one call of the tokenizer's core.

    That call releases the GIL and runs on the threads of the `tokenizers` package, which honours TOKENIZERS_PARALLELISM
    and RAYON_NUM_THREADS and stays on one thread in a forked process. The ids are those of the whole texts: blocks end
    only where `safe_cuts` proves that a text may be cut. A tokenizer without a core of that package, or one that its
    owner has set to truncate, pad or split special tokens, encodes text by text.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = CACHE_BYTES, block_chars: int = BLOCK_CHARS) -> None:
        self.tokenizer = tokenizer
        self.cache = BlockCache(max_bytes)
        self.block_chars = block_chars
        self._lock = threading.Lock()
        self._cuts: SafeCuts | None = None
        self._vocab_size = -1
        self._said_slow = False
        self._last: tuple[str, list[Block]] = "", []  # a text and its blocks, which nobody changes
        self._last_alone: Encoded | None = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of each text as the tokenizer gives them without special tokens of its own: int32 [num_tokens].

        Every text must be writable as UTF-8.
        """
        if not texts:
            return []
        backend = self.tokenizer.backend
        if backend is None:
            self._say_slow_once()
            return [np.asarray(self.tokenizer.encode_one(text), dtype=np.int32) for text in texts]
        cuts = self._safe_cuts(backend)
        if len(texts) == 1:
            return [self._encode_alone(texts[0], backend, cuts)]
        split: list[list[Block]] = [[]] * len(texts)
        wanted: dict[Block, None] = {}
        before, blocks = self._last
        for i in sorted(range(len(texts)), key=texts.__getitem__):  # neighbours share the longest prefixes
            num_shared = _num_shared(_ends(blocks), before, texts[i])
            before, blocks = texts[i], self._blocks(texts[i], cuts, blocks[: num_shared + 1])
            split[i] = blocks
            wanted |= dict.fromkeys(blocks)
        if len(before) <= KEPT_CHARS:
            self._last = before, blocks
        known = self._ids_of(list(wanted), backend)
        return [_joined([known[block] for block in blocks]) for blocks in split]

    def encode_long(self, text: str, most: int) -> NDArray[np.int32] | None:
        """Return the ids of a text in bounded pieces; None once there are more than `most`.

        Raises ConfigError for a text that cannot be cut into blocks of at most LONGEST_BLOCK characters.
        """
        backend = self.tokenizer.backend
        if backend is None:
            return self.encode([text])[0]
        blocks = self._blocks(text, self._safe_cuts(backend), [])
        longest = max(len(block.text) for block in blocks)
        if longest > LONGEST_BLOCK:
            raise ConfigError(
                f"the text has {longest:,} characters without a place where it can be cut into words, the tokenizer "
                f"takes {LONGEST_BLOCK:,}; shorten it"
            )
        parts: list[NDArray[np.int32]] = []
        num_tokens = start = 0
        while start < len(blocks):
            stop, num_chars = start, 0
            while stop < len(blocks) and num_chars < LONG_CHARS:
                num_chars += len(blocks[stop].text)
                stop += 1
            known = self._ids_of(blocks[start:stop], backend)
            parts += [known[block] for block in blocks[start:stop]]
            num_tokens += sum(len(part) for part in parts[start:])
            if num_tokens > most:
                return None
            start = stop
        return _joined(parts)

    def clear(self) -> None:
        """Forget all texts."""
        self.cache = BlockCache(self.cache.max_bytes)
        self._last, self._last_alone = ("", []), None

    def _encode_alone(self, text: str, backend: Any, cuts: SafeCuts) -> NDArray[np.int32]:
        """`encode` of one text. A caller alone often shares its prefix with the one before: those ids are joined."""
        last = self._last_alone
        if last is None or last.cuts is not cuts:
            last = Encoded(cuts, "", [], [], [], np.zeros(0, dtype=np.int32))
        num_shared = _num_shared(last.ends, last.text, text)
        blocks = self._blocks(text, cuts, last.blocks[: num_shared + 1])
        if num_shared and (len(blocks) < num_shared or blocks[num_shared - 1] is not last.blocks[num_shared - 1]):
            num_shared = 0  # some of them were taken back
        ends, id_ends = last.ends[:num_shared], last.id_ends[:num_shared]
        end, id_end = (ends[-1], id_ends[-1]) if num_shared else (0, 0)
        parts = [last.ids[:id_end]]
        known = self._ids_of(blocks[num_shared:], backend)
        for block in blocks[num_shared:]:
            parts.append(known[block])
            ends.append(end := end + len(block.text))
            id_ends.append(id_end := id_end + len(parts[-1]))
        ids = _joined(parts)
        if len(text) <= KEPT_CHARS:
            self._last_alone = Encoded(cuts, text, blocks, ends, id_ends, ids)
        return ids.copy()  # a caller may write to its own

    def _ids_of(self, blocks: list[Block], backend: Any) -> dict[Block, NDArray[np.int32]]:
        known = self.cache.get_many(blocks)
        new = [block for block in dict.fromkeys(blocks) if block not in known]
        if new:
            encoded = self._encode_blocks(backend, new)
            self.cache.put_many(encoded)
            known |= encoded
        return known

    def _blocks(self, text: str, cuts: SafeCuts, begun: list[Block]) -> list[Block]:
        """Cut a text into blocks. `begun` are the blocks of a text that begins alike; only its last may differ."""
        blocks = begun[:-1]
        start = sum(len(block.text) for block in blocks)
        continues = bool(begun) and begun[-1].continues
        while start < len(text):
            cut = cuts.next(text, start + self.block_chars) if len(text) - start > self.block_chars else None
            end, restarts = (len(text), False) if cut is None else (cut[0], cut[1] and cuts.restarts)
            if continues and (reset := cuts.next_reset(text, start, end)) is not None:
                at, may_cut = reset
                if may_cut:
                    end, restarts = at, True
                else:  # it begins no block of its own, so the text before it has to go with it
                    start, continues = _unsplit(blocks, start)
            blocks.append(Block(text[start:end], continues))
            start, continues = end, not restarts
        return blocks

    def _encode_blocks(self, backend: Any, blocks: list[Block]) -> dict[Block, NDArray[np.int32]]:
        going_on = self.tokenizer.continuation_backend or backend
        encoded: dict[Block, NDArray[np.int32]] = {}
        for core, part in (
            (backend, [block for block in blocks if not block.continues]),
            (going_on, [block for block in blocks if block.continues]),
        ):
            texts = [block.text for block in part]
            if len(texts) == 1 and len(texts[0]) < 4 * BLOCK_CHARS:  # it holds the GIL, for 5 ms at most
                results = [core.encode(texts[0], add_special_tokens=False)]
            else:
                results = core.encode_batch_fast(texts, add_special_tokens=False) if texts else []
            encoded |= {b: np.array(r.ids, dtype=np.int32) for b, r in zip(part, results, strict=True)}
        return encoded

    def _say_slow_once(self) -> None:
        with self._lock:
            said, self._said_slow = self._said_slow, True
        if not said:
            kind = type(self.tokenizer.hf).__name__
            warnings.warn(
                f"prompts are tokenised one by one, more slowly: {kind} has no fast core or is set to truncate, pad or "
                "split special tokens",
                stacklevel=2,
            )

    def _safe_cuts(self, backend: Any) -> SafeCuts:
        """Read again when tokens were added, which changes where a text may be cut and what its ids are."""
        vocab_size = backend.get_vocab_size(with_added_tokens=True)
        with self._lock:
            if self._cuts is None or vocab_size != self._vocab_size:
                self.clear()
                puts_space = self.tokenizer.continuation_backend is not None
                self._cuts = read_safe_cuts(backend, self._likely_specials(), puts_space=puts_space)
                self._vocab_size = vocab_size
            return self._cuts

    def _likely_specials(self) -> list[str]:
        """The special tokens that prompts hold: named ones, and those that the chat template writes."""
        hf = self.tokenizer.hf
        template = str(getattr(hf, "chat_template", None) or "")
        named = [str(token) for token in hf.all_special_tokens]
        written = [token.content for token in hf.added_tokens_decoder.values() if token.content in template]
        return [*named, *written]


def _ends(blocks: list[Block]) -> list[int]:
    return list(accumulate(len(block.text) for block in blocks))


def _num_shared(ends: list[int], text: str, other: str) -> int:
    """How many blocks of `text` `other` begins with: all but the last at most, as a cut looks two characters ahead.

    ends  where the blocks end in `text`
    """
    last = max(len(ends) - 1, 0)
    return bisect_left(ends, True, hi=last, key=lambda end: not other.startswith(text[: end + 2]))


def _unsplit(blocks: list[Block], start: int) -> tuple[int, bool]:
    """Take back the blocks that go on, up to the one before them. -> where that begins, and that it does not go on"""
    while blocks:
        block = blocks.pop()
        start -= len(block.text)
        if not block.continues:
            break
    return start, False


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.zeros(0, dtype=np.int32)
