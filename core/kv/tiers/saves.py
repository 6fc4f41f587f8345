"""Saves: blocks and states of the radix tree on their way into host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graftlm.core.kv.radix import Node, path_of
from graftlm.core.kv.tiers.block_copier import Run
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS, BlockIndex, Entry, extend_keys, first_key
from graftlm.kernels.wire_plan import Extent, clip_range

if TYPE_CHECKING:
    from graftlm.core.kv.prefix_cache import PrefixCache
    from graftlm.core.kv.tiers.folder import FileKey
    from graftlm.core.kv.tiers.folder_tier import FolderTier
    from graftlm.core.kv.tiers.loads import HostTier


class _Block(NamedTuple):
    entry: Entry
    extents: list[Extent]
    file: FileKey | None


class Saves:
    """The contents of host memory, and the copies into it.

    index, states  blocks, and states of layers that have one
    folder         has blocks written to files, where there is one
    """

    def __init__(self, cache: PrefixCache, host: HostTier) -> None:
        self.cache = cache
        self.host = host
        self.index = BlockIndex(host.rows.num_ready)
        self.states = BlockIndex(host.state_rows.num_ready if host.state_rows is not None else 0)
        self.folder: FolderTier | None = None
        self.num_tokens = 0
        self._pending: list[_Block] = []

    def extend(self) -> None:
        """Use the rows that have become ready."""
        for index, rows in ((self.index, self.host.rows), (self.states, self.host.state_rows)):
            if rows is not None and index.num_rows < rows.num_ready:
                index.extend(rows.num_ready)

    def leaf(self, leaf: Node, keep: int, file_of: type[FileKey] | None = None) -> None:
        """Note the blocks of a leaf whose tokens from `keep` on are evicted. Their slots must stay until `flush`."""
        ids, extents = path_of(leaf)
        first = (len(ids) - leaf.num_tokens + keep) // BLOCK_TOKENS
        keys = [first_key(leaf.namespace)]
        extend_keys(keys, ids, len(ids) // BLOCK_TOKENS)
        entries: list[Entry] = []
        for block in range(first, -(-len(ids) // BLOCK_TOKENS)):
            start, stop = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, len(ids))
            data = ids[start:stop].tobytes()
            file = file_of("b", keys[block], data) if file_of is not None else None
            entry = self.block(keys[block], data, extents, (start, stop), file)
            if entry is not None:
                entries.append(entry)
        for entry in reversed(entries):  # the first blocks of a prefix are the last to go
            self.index.touch(entry)

    def block(
        self, key: bytes, ids: bytes, extents: list[Extent], part: tuple[int, int], file: FileKey | None
    ) -> Entry | None:
        """Note one block, tokens [start, stop) of those in `extents`; None if no row is free.

        file  to write it to, once it is in host memory
        """
        entry = self.index.covers(key, ids)
        if entry is not None:
            if file is not None:
                self._pending.append(_Block(entry, [], file))
                entry.readers += 1
            return entry
        entry = self.index.add(key, ids)
        if entry is not None:
            self._pending.append(_Block(entry, clip_range(extents, *part), file))
            entry.readers += file is not None
            self.num_tokens += part[1] - part[0]
        return entry

    def flush(self) -> None:
        """Launch the copies of all noted blocks; their slots may be given to others afterwards."""
        pending, self._pending = self._pending, []
        capacity = self.host.copier.capacity
        for at in range(0, len(pending), capacity):
            blocks = pending[at : at + capacity]
            runs: list[Run] = []
            for row, block in enumerate(blocks):
                offset = 0
                for start, stop in block.extents:
                    runs.append(Run(row, offset, start, stop - start))
                    offset += stop - start
            copies = [i for i, block in enumerate(blocks) if block.extents]
            event = None
            if copies:
                places = {row: place for place, row in enumerate(copies)}
                pieces = self.host.rows.pieces([blocks[i].entry.row for i in copies])
                event = self.host.copier.save([run._replace(row=places[run.row]) for run in runs], pieces)
            for block in blocks:
                if block.file is not None and self.folder is not None:
                    self.folder.copied(event, self.index, block.entry, block.file)

    def state(self, node: Node, file: FileKey | None = None) -> bool:
        """Copy the state of a node to host memory, if the slot holds it; False if it is there already or cannot be."""
        states, copier, rows = self.cache.states, self.host.state_copier, self.host.state_rows
        if states is None or copier is None or rows is None or not states.holds(node):
            return False
        ids, _ = path_of(node)
        keys = [first_key(node.namespace)]
        extend_keys(keys, ids, len(ids) // BLOCK_TOKENS)
        key, rest = keys[-1], ids[(len(keys) - 1) * BLOCK_TOKENS :].tobytes()
        entry = self.states.ending(key, rest)
        event = None
        if entry is not None and entry.ids == rest:
            self.states.touch(entry)
        else:
            entry = self.states.add(key, rest, replaces=False)
            if entry is None:
                return False
            assert node.state is not None
            event = copier.save([Run(0, 0, node.state, 1)], rows.pieces([entry.row]))
        if file is not None and self.folder is not None:
            entry.readers += 1
            self.folder.copied(event, self.states, entry, file)
        return True
