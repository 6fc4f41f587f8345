"""The cache folder of a machine: compiled loops, tries of vocabularies.

    ~/.cache/graftlm            or $XDG_CACHE_HOME/graftlm, or $GRAFTLM_CACHE_DIR; empty disables the cache
      loops-3f9a.../            published with `publish`: complete, never changed, checked with `is_intact`
      vocabularies/9c1b....npz  written with `save_arrays`, checked by `load_arrays`

Cached files are executed, so no other user may write there: folders are created with mode 0700; a folder that other
users can write or exchange, that belongs to another user, or that is a link is not used, and links in it are not
followed. Files appear under their name only when they are complete. A damaged file is deleted and counts as missing.
Everything works without the folder, more slowly.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_MANIFEST = "MANIFEST"
_DIGEST_BYTES = 32
_OPENED = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_BINARY", "O_NONBLOCK"))
"""Flags of opened files: links are refused, and a pipe does not block."""


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed package, which names of files depend on.

    importlib.metadata.version parses the whole description as an email. Raises PackageNotFoundError.
    """
    text = metadata.distribution(package).read_text("METADATA") or ""
    head = text.partition("\n\n")[0].splitlines()
    found = next((line.partition(":")[2].strip() for line in head if line.startswith("Version:")), None)
    return found or metadata.version(package)


def private_folder(*parts: str) -> Path | None:
    """Return the folder `parts` of the cache, created on demand; None if no folder is safe from other users."""
    root = os.environ.get("GRAFTLM_CACHE_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "graftlm")
    if not root or not os.path.isabs(root):
        return None
    folder = Path(root)
    if not _is_reached_safely(folder):
        return None
    for part in ("", *parts):
        folder /= part
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            return None
        if not stat.S_ISDIR(found.st_mode) or not _is_private(found):
            return None
    return folder


def _is_reached_safely(folder: Path) -> bool:
    """Return True if the folders above `folder` keep other users from replacing it.

    In a sticky folder such as /tmp only owners rename entries. A user's own group may write: it often has one member.
    """
    if not hasattr(os, "getgid"):
        return True
    parent = folder.parent.resolve()
    for above in (parent, *parent.parents):
        try:
            found = above.lstat()
        except OSError:
            continue  # created below, by this user
        writable = found.st_mode & (0o002 if found.st_gid in (0, os.getgid()) else 0o022)
        if writable and not found.st_mode & stat.S_ISVTX:
            return False
    return True


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write `arrays` to `path` atomically; a full or read-only disk changes nothing."""
    buffer, named = io.BytesIO(), dict[str, Any](arrays)
    np.savez(buffer, **named)
    data = buffer.getvalue()
    replace_file(path, lambda file: file.write(hashlib.sha256(data).digest() + data))


def replace_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Let `fill` write a file that becomes `path` once it is complete; a full or read-only disk changes nothing."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".building-", delete=False) as file:
            try:
                fill(cast(BinaryIO, file))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError:
        return


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]] | None:
    """Load the arrays of `save_arrays` from `path`; None if it is missing. A damaged file is deleted."""
    data = _read_own(path)
    if data is None:
        return None
    arrays = None
    if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
        with suppress(Exception), np.load(io.BytesIO(data[_DIGEST_BYTES:]), allow_pickle=False) as file:
            arrays = dict(file)  # zipfile and numpy raise errors of many kinds for bytes that no `save_arrays` wrote
    with suppress(OSError):  # another process may have deleted it
        if arrays is None:
            path.unlink(missing_ok=True)
        else:
            os.utime(path)  # `trim` keeps the last used files
    return arrays


def _read_own(path: Path) -> bytes | None:
    """Return the content of a plain file that only this user can write; None for links, folders, pipes and errors."""
    with opened(path) as file, suppress(OSError):
        return file.read() if file is not None else None
    return None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | None]:
    """Open a plain file that only this user can write; None for links, folders, pipes and errors."""
    file = _private_file(path)
    with nullcontext() if file is None else file:
        yield file


def _private_file(path: Path) -> BinaryIO | None:
    try:
        number = os.open(path, os.O_RDONLY | _OPENED)
    except OSError:
        return None
    with suppress(OSError):
        found = os.fstat(number)
        if stat.S_ISREG(found.st_mode) and _is_private(found):
            return open(number, "rb")
    os.close(number)
    return None


def _is_private(found: os.stat_result) -> bool:
    return not found.st_mode & 0o022 and found.st_uid in (_user(), -1)


def publish(folder: Path, build: Callable[[Path], None]) -> bool:
    """Let `build` fill a new folder, then move it to `folder`. -> whether an intact `folder` exists now

    Processes that publish the same folder at the same time each build it; the first one stays.
    """
    try:
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    except OSError:
        return False
    try:
        build(building)
        (building / _MANIFEST).write_text(_digests(building))
        if not is_intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)
    except OSError:
        pass
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return is_intact(folder)


def is_intact(folder: Path) -> bool:
    """Return True if `folder` was published and still has exactly its published files."""
    try:
        if not all(_is_own(path) for path in (folder, *folder.rglob("*"))):
            return False
        return (folder / _MANIFEST).read_text() == _digests(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _is_own(path: Path) -> bool:
    """Return True if `path`, in a private folder, belongs to this user and is not a link."""
    found = path.lstat()
    return not stat.S_ISLNK(found.st_mode) and found.st_uid in (_user(), -1)


def trim(folder: Path, keep: int, used: Path | None = None) -> None:
    """Delete all but the `keep` last used entries of `folder`. `used` is in use now."""
    try:
        if used is not None:
            os.utime(used)
        entries = sorted(folder.iterdir(), key=lambda entry: entry.lstat().st_mtime, reverse=True)
    except OSError:
        return
    for entry in entries[keep:]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink(missing_ok=True)


def _digests(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else -1
