"""BlockFolder: blocks of KV as files of one folder, which processes share and which outlives them.

    FOLDER/                       mode 0700, owned by this user
      <context>/                  digest of everything that changes a number: weights, versions, formats, kernels
        context.txt               the same in words
        b<key>-<digest>-<tokens>  one block: header, ids and bytes, under a crc32
        s<key>-<digest>-<tokens>  a state of layers that have one, after these tokens

A file's name holds the key before its tokens and a digest of both, so a name stands for a whole prefix. Files appear
under their names when they are complete and are never changed, so a reader may map them. A file whose header, ids or
checksum are not those expected is deleted and counts as missing. Two threads read and write; only they touch files,
after the folder was listed once.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import queue
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graftlm.core.kv.tiers.block_index import BLOCK_BYTES, BLOCK_TOKENS, common_ids

log = logging.getLogger("graftlm.cache")

_HEADER = struct.Struct("<8s16s16sIIQ")  # magic, context, key, crc32, ids, bytes
_MAGIC = b"graftkv1"
_TRIM_AFTER = 64
"""Files written between two looks at the size of the folder."""
_QUEUE = 256
"""Blocks that wait to be written, at most; more are not written."""
_COMPARED = 4
"""Files after one key whose ids are compared with a prompt that has none of them whole."""
_RESCAN_S = 2.0
_PAUSE_S = 60.0
"""Seconds without writes after one has failed."""
BLOCK, STATE = "b", "s"


class FileKey(NamedTuple):
    """The identity of a file: `kind` BLOCK or STATE, the key before its ids, and these ids as bytes of int32."""

    kind: str
    key: bytes
    ids: bytes

    @property
    def name(self) -> str:
        digest = hashlib.blake2b(self.key + self.ids, digest_size=16).hexdigest()
        return f"{self.kind}{self.key.hex()}-{digest}-{len(self.ids) // 4}"


class Reading:
    """Files that are read into rows. `found` are those that were whole, once `done`."""

    def __init__(self, files: list[tuple[FileKey, Any]]) -> None:
        self.files = files
        self.found: list[Any] = []
        self.began_s = time.monotonic()
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """Block until all files were read, or for so long."""
        self._ended.wait(timeout_s)

    def end(self) -> None:
        """Let `done` be true."""
        self._ended.set()


class BlockFolder:
    """The files of one context.

    root       the folder that a user named, checked by `check_folder`
    context    everything that changes a number, in words
    num_bytes  of all files in root, at most
    """

    def __init__(self, root: Path, context: str, num_bytes: int) -> None:
        self.root = root
        self.num_bytes = num_bytes
        self.saved_tokens = self.loaded_tokens = self.num_dropped = self.held_bytes = 0
        self._digest = hashlib.blake2b(context.encode(), digest_size=16).digest()
        self.folder = root / self._digest.hex()
        self._names: dict[bytes, dict[str, int]] = {}  # by key and kind: names and their tokens
        self._ids: dict[str, bytes] = {}
        self._scanned_ns, self._scanned_s, self._scanning = -1, 0.0, False
        self._paused_until_s = 0.0
        self._num_written = 0
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.num_queued = 0
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            described = self.folder / "context.txt"
            if not described.exists():
                _write(described, context.encode())
        self._scan()
        self._threads = [
            threading.Thread(target=_serve, args=(tasks,), daemon=True, name=f"graftlm cache {what}")
            for what, tasks in (("reads", self._reads), ("writes", self._writes))
        ]
        for thread in self._threads:
            thread.start()
        self._writes.put(self._trim)

    # -- lookups -----------------------------------------------------------------------------------------------

    def block(self, key: bytes, ids: bytes) -> FileKey | None:
        """Return the file with the most of `ids`, at most a full block's, after `key`; other ids may follow them."""
        names = self._names.get(BLOCK.encode() + key)
        if not names:
            return None
        best = _longest(BLOCK, key, ids[:BLOCK_BYTES], names)
        if best is not None and len(best.ids) == len(ids):
            return best
        most = len(best.ids) // 4 if best is not None else 0
        for name in list(names)[-_COMPARED:]:
            held = self._ids_of(key, name)
            if held is not None and (common := common_ids(held, ids)) > most:
                best, most = FileKey(BLOCK, key, held), common
        return best

    def state(self, key: bytes, ids: bytes) -> FileKey | None:
        """Return the file with the state after the most of `ids`, less than a block's, perhaps none, after `key`."""
        names = self._names.get(STATE.encode() + key)
        return _longest(STATE, key, ids[: BLOCK_BYTES - 4], names) if names else None

    def holds(self, file: FileKey) -> bool:
        return file.name in self._names.get(file.kind.encode() + file.key, ())

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks of this context."""
        kind = ord(BLOCK)
        return sum(sum(list(names.values())) for key, names in list(self._names.items()) if key[0] == kind)

    def refresh(self) -> None:
        """List the folder again, on a thread, if other processes have written to it."""
        now = time.monotonic()
        if self._scanning or now - self._scanned_s < _RESCAN_S:
            return
        self._scanned_s, self._scanning = now, True
        self._reads.put(self._scan)

    # -- files -------------------------------------------------------------------------------------------------

    def read(self, files: list[tuple[FileKey, np.ndarray, Any]]) -> Reading:
        """Begin to read files into rows, uint8 [num_bytes]; the third of each is given back in `found`."""
        reading = Reading([(file, token) for file, _, token in files])

        def run() -> None:
            try:
                for file, row, token in files:
                    if self._read(file, row):
                        reading.found.append(token)
                        self.loaded_tokens += len(file.ids) // 4 if file.kind == BLOCK else 0
            finally:
                reading.end()

        self._reads.put(run)
        return reading

    def write(self, file: FileKey, row: np.ndarray, written: Callable[[], None]) -> bool:
        """Begin to write a row; False if too much waits. `written` is called on another thread when it was read."""
        if self.num_queued >= _QUEUE or time.monotonic() < self._paused_until_s:
            return False
        self.num_queued += 1
        self._names.setdefault(file.kind.encode() + file.key, {})[file.name] = len(file.ids) // 4

        def run() -> None:
            try:
                self._write(file, row)
            finally:
                self.num_queued -= 1
                written()

        self._writes.put(run)
        return True

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most so long, and end the threads."""
        limit = time.monotonic() + timeout_s
        self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _read(self, file: FileKey, row: np.ndarray) -> bool:
        path = self.folder / file.name
        try:
            number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError:
            self._forget(file)
            return False
        try:
            size = os.fstat(number).st_size
            if size == _HEADER.size + len(file.ids) + len(row):
                with mmap.mmap(number, size, access=mmap.ACCESS_READ) as data:
                    crc = self._checksum(file, memoryview(data)[_HEADER.size + len(file.ids) :])
                    head = data[: _HEADER.size + len(file.ids)]
                    if head == self._head(file, crc, len(row)):
                        row[:] = np.frombuffer(data, np.uint8, len(row), len(head))
                        with suppress(OSError):
                            os.utime(path)
                        return True
        except (OSError, ValueError, BufferError) as error:
            log.warning("the cached block %s could not be read: %s", path, error)
        finally:
            os.close(number)
        self.num_dropped += 1
        self._forget(file)
        with suppress(OSError):
            path.unlink()
        return False

    def _write(self, file: FileKey, row: np.ndarray) -> None:
        if time.monotonic() < self._paused_until_s:
            self._forget(file)
            return
        try:
            if not (self.folder / file.name).exists():
                head = self._head(file, self._checksum(file, row.data), len(row))
                _write(self.folder / file.name, head, row.data)
                self.held_bytes += len(head) + len(row)
            self.saved_tokens += len(file.ids) // 4 if file.kind == BLOCK else 0
        except OSError as error:
            self._forget(file)
            self._paused_until_s = time.monotonic() + _PAUSE_S
            log.warning(
                "KV could not be kept in %s, prompts will be computed again: %s; free space there, make it writable "
                "or choose another CacheConfig.folder",
                self.root,
                error,
            )
        self._num_written += 1
        if self._num_written % _TRIM_AFTER == 0:
            self._trim()

    def _head(self, file: FileKey, crc: int, size: int) -> bytes:
        return _HEADER.pack(_MAGIC, self._digest, file.key, crc, len(file.ids), size) + file.ids

    def _checksum(self, file: FileKey, data: memoryview) -> int:
        return zlib.crc32(data, zlib.crc32(self._digest + file.kind.encode() + file.key + file.ids))

    def _ids_of(self, key: bytes, name: str) -> bytes | None:
        """Return the ids of a block's file; None if they are not those of its name: it is deleted then."""
        held = self._ids.get(name)
        if held is None:
            with suppress(OSError, struct.error), open(self.folder / name, "rb", buffering=0) as file:
                num_ids = _HEADER.unpack(file.read(_HEADER.size))[4]
                held = file.read(min(num_ids, BLOCK_BYTES))
            if held is None or FileKey(BLOCK, key, held).name != name:
                self._names.get(BLOCK.encode() + key, {}).pop(name, None)
                with suppress(OSError):
                    (self.folder / name).unlink()
                return None
            self._ids[name] = held
        return held

    def _forget(self, file: FileKey) -> None:
        names = self._names.get(file.kind.encode() + file.key)
        if names is not None:
            names.pop(file.name, None)

    def _scan(self) -> None:
        """List the files of this context, if it has changed since the last time."""
        try:
            changed_ns = self.folder.stat().st_mtime_ns
            if changed_ns != self._scanned_ns:
                for name in os.listdir(self.folder):
                    kind, rest = name[:1], name[1:].split("-")
                    if kind in (BLOCK, STATE) and len(rest) == 3 and rest[2].isdigit():
                        with suppress(ValueError):
                            key = kind.encode() + bytes.fromhex(rest[0])
                            self._names.setdefault(key, {})[name] = int(rest[2])
                self._scanned_ns = changed_ns
        except OSError as error:
            log.warning("the cache folder %s could not be listed: %s", self.folder, error)
        finally:
            self._scanning = False

    def _trim(self) -> None:
        """Delete the files used least recently, of all contexts, beyond `num_bytes`, and old unfinished ones."""
        found: list[tuple[float, int, Path]] = []
        now = time.time()
        for folder in [entry for entry in _entries(self.root) if entry.is_dir(follow_symlinks=False)]:
            for entry in _entries(Path(folder.path)):
                with suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(".") and now - stat.st_mtime > 3600:
                        os.unlink(entry.path)
                    elif entry.name[:1] in (BLOCK, STATE):
                        found.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        self.held_bytes = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if self.held_bytes <= self.num_bytes:
                break
            with suppress(OSError):
                path.unlink()
                self.held_bytes -= size
                self.num_dropped += 1


def _longest(kind: str, key: bytes, ids: bytes, names: dict[str, int]) -> FileKey | None:
    for num_tokens in sorted(set(list(names.values())), reverse=True):
        if num_tokens * 4 <= len(ids) and num_tokens <= BLOCK_TOKENS:
            file = FileKey(kind, key, ids[: 4 * num_tokens])
            if file.name in names:
                return file
    return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that appears under its name when it is complete."""
    building = path.parent / f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}"
    number = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(number, "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]
        os.replace(building, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(building)
        raise


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:
            log.exception("a task of the cache folder failed")
