"""FolderTier: brings blocks of files into host memory, and writes prompts that are reused, or long, to files."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from graftlm.core.kv.radix import Node, path_of
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS, BlockIndex, Entry, Ids, common_ids, extend_keys, first_key
from graftlm.core.kv.tiers.folder import BLOCK, STATE, BlockFolder, FileKey, Reading

if TYPE_CHECKING:
    import numpy as np
    import torch

    from graftlm.core.kv.prefix_cache import PrefixCache
    from graftlm.core.kv.tiers.loads import HostTier
    from graftlm.core.kv.tiers.saves import Saves

LEAST_READ = 32
"""Tokens that files must hold beyond memory to be read: fewer are computed as fast."""

LONG = 256
"""Tokens of one node that are written although no other prompt has used them yet."""

AT_REST = 16
"""Blocks copied out at once when the engine comes to rest, so that the next request does not wait for more."""

DEADLINE_S = 5.0
"""Seconds that a prompt waits for files before it is computed."""

CLOSE_S = 8.0
"""Seconds that closing waits for files to be written."""


class FolderTier:
    """The files behind host memory: rows of host memory are read from and written to files by two threads."""

    def __init__(self, cache: PrefixCache, host: HostTier, saves: Saves, files: BlockFolder) -> None:
        self.cache = cache
        self.host = host
        self.saves = saves
        self.files = files
        self._readings: deque[Reading] = deque()
        self._candidates: dict[Node, object] = {}
        self._copied: deque[tuple[torch.cuda.Event | None, BlockIndex, Entry, FileKey]] = deque()
        self._written: deque[Entry] = deque()  # from the writing thread

    @property
    def reading(self) -> bool:
        return bool(self._readings)

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, ids: Ids, keys: list[bytes], have: int) -> Reading | None:
        """Begin to read files with tokens of `ids` that neither the tree, which has `have`, nor host memory holds.

        None if there are too few. keys: of blocks of `ids`, extended as far as needed
        """
        index, wanted, gain = self.saves.index, list[FileKey](), 0
        extend_keys(keys, ids, have // BLOCK_TOKENS)
        stop = have
        for block in range(have // BLOCK_TOKENS, -(-len(ids) // BLOCK_TOKENS)):
            start = block * BLOCK_TOKENS
            data = ids[start : start + BLOCK_TOKENS].tobytes()
            held, file = index.find(keys[block], data), self.files.block(keys[block], data)
            in_memory = held.num_tokens if held is not None else 0
            in_file = common_ids(file.ids, data) if file is not None else 0
            if file is not None and in_file > in_memory:
                wanted.append(file)
                gain += in_file - in_memory
            stop = max(stop, start + max(in_file, in_memory))
            if max(in_file, in_memory) < BLOCK_TOKENS:
                break
            extend_keys(keys, ids, block + 1)
        if self.cache.states is not None:
            state = self._state(ids, keys, stop)
            if state is None and not len(self.saves.states):
                return None
            wanted += [state] if state is not None else []
            gain += LEAST_READ if state is not None else 0
        self.files.refresh()
        return self._begin(wanted) if gain >= LEAST_READ else None

    def poll(self) -> None:
        """Let lookups find what was read, and hand rows whose copies have ended to the writing thread."""
        while self._readings and self._readings[0].done:
            reading = self._readings.popleft()
            whole = set(map(id, reading.found))
            for file, entry in reading.files:
                index = self.saves.index if file.kind == BLOCK else self.saves.states
                entry.readers -= 1
                if id(entry) in whole:
                    index.show(entry, replaces=file.kind == BLOCK)
                else:
                    index.drop(entry)
        while self._written:
            self._written.popleft().readers -= 1
        while self._copied and (self._copied[0][0] is None or self._copied[0][0].query()):
            _, index, entry, file = self._copied.popleft()
            row = self._row(index, entry)
            if not self.files.write(file, row, lambda entry=entry: self._written.append(entry)):  # type: ignore[misc]
                entry.readers -= 1

    def wait(self) -> None:
        """Block until the next files were read, for a moment, where nothing else can run."""
        if self._readings:
            self._readings[0].wait(0.02)
        self.poll()

    def late(self, reading: Reading) -> bool:
        """Whether a prompt has waited long enough for files."""
        return not reading.done and time.monotonic() - reading.began_s > DEADLINE_S

    def _state(self, ids: Ids, keys: list[bytes], stop: int) -> FileKey | None:
        """Return the file with the last state within the first `stop` tokens."""
        extend_keys(keys, ids, stop // BLOCK_TOKENS)
        for block in range(stop // BLOCK_TOKENS, -1, -1):
            file = self.files.state(keys[block], ids[block * BLOCK_TOKENS : stop].tobytes())
            if file is not None:
                held = self.saves.states.ending(keys[block], file.ids)
                return file if held is None or held.ids != file.ids else None
        return None

    def _begin(self, wanted: list[FileKey]) -> Reading | None:
        files = []
        for file in wanted:
            index = self.saves.index if file.kind == BLOCK else self.saves.states
            entry = index.reserve(file.key, file.ids)
            if entry is None:
                break
            entry.readers += 1
            files.append((file, self._row(index, entry), entry))
        if not files:
            return None
        self._readings.append(self.files.read(files))
        return self._readings[-1]

    # -- writing -----------------------------------------------------------------------------------------------

    def used(self, node: Node, *, reused: bool) -> None:
        """Note a prompt's nodes: `reused` ones are written to files, of others those of many tokens."""
        step = node
        while step.parent is not None:
            if not step.in_files and (reused or step.num_tokens >= LONG):
                self._candidates[step] = None
            step = step.parent

    def evicted(self, node: Node) -> bool:
        """Whether a node that is evicted is to be written."""
        return self._candidates.pop(node, self) is not self

    def copied(self, event: torch.cuda.Event | None, index: BlockIndex, entry: Entry, file: FileKey) -> None:
        """Write a row once `event` has passed. The entry has one reader more until then."""
        self._copied.append((event, index, entry, file))

    def rest(self, limit: int = AT_REST) -> None:
        """Copy out about `limit` blocks that are to be written."""
        self.poll()
        while self._candidates and limit > 0:
            node = next(iter(self._candidates))
            del self._candidates[node]
            if node.parent is not None:
                limit -= self._save(node)
        if self._copied:
            self.host.copier.synchronize()
            self.poll()

    def close(self) -> None:
        """Write all that is to be written, and end the threads."""
        limit_s = time.monotonic() + CLOSE_S
        while self._candidates and time.monotonic() < limit_s:
            self.rest()
            while self.files.num_queued > AT_REST and time.monotonic() < limit_s:
                time.sleep(0.001)
        self.files.close(max(limit_s - time.monotonic(), 0.0))

    def _save(self, node: Node) -> int:
        """Copy the blocks and states up to the end of a node to host memory, and have them written. -> how many"""
        ids, extents = path_of(node)
        keys = [first_key(node.namespace)]
        extend_keys(keys, ids, len(ids) // BLOCK_TOKENS)
        node.in_files = True
        num_saved = 0
        for block in range(-(-len(ids) // BLOCK_TOKENS)):
            start, stop = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, len(ids))
            file = FileKey(BLOCK, keys[block], ids[start:stop].tobytes())
            if not self.files.holds(file):
                num_saved += self.saves.block(file.key, file.ids, extents, (start, stop), file) is not None
                self.saves.flush()
        state = FileKey(STATE, keys[-1], ids[(len(keys) - 1) * BLOCK_TOKENS :].tobytes())
        if node.state is not None and not self.files.holds(state):
            num_saved += self.saves.state(node, state)
        return num_saved

    def _row(self, index: BlockIndex, entry: Entry) -> np.ndarray:
        rows = self.host.rows if index is self.saves.index else self.host.state_rows
        assert rows is not None
        return rows.row(entry.row).numpy()
