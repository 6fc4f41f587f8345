"""The embedded model, sprout: the location and integrity of its files.

`graftlm/sprout/` is an ordinary Hugging Face folder; `SHA256SUMS` beside the files lists checksum,
size in bytes and name of each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import graftlm
from graftlm.core.errors import ModelError

SHA256_LIST = "SHA256SUMS"
_RESTORE = (
    "restore it with `pip install --force-reinstall --no-deps graftlm`, or in a git checkout with "
    "`git checkout -- graftlm/sprout`"
)


@dataclass(frozen=True)
class ListedFile:
    """One line of the list: a file of the folder, its checksum (hex) and size."""

    name: str
    sha256: str
    num_bytes: int


def sprout_folder() -> Path:
    """Return the folder of the embedded model without reading it."""
    return Path(graftlm.__file__).parent / "sprout"


def listed_files(folder: Path) -> list[ListedFile]:
    """Read the list of files. Raises ModelError if it is missing or malformed."""
    path = folder / SHA256_LIST
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        parts = [line.split(maxsplit=2) for line in lines]
        return [ListedFile(name, digest, int(size)) for digest, size, name in parts]
    except (OSError, ValueError) as error:
        raise ModelError(f"embedded model: cannot read {path} ({error}); {_RESTORE}") from error


def sprout_path(folder: Path | None = None) -> Path:
    """Return the folder of the embedded model, after a check of its files' names and sizes.

    Only the list of files is opened. Raises ModelError with the name of a missing or truncated file.
    """
    folder = folder or sprout_folder()
    for listed in listed_files(folder):
        path = folder / listed.name
        if not path.is_file():
            raise ModelError(f"embedded model: {path} is missing; {_RESTORE}")
        if (size := path.stat().st_size) != listed.num_bytes:
            raise ModelError(f"embedded model: {path} is {size:,} bytes, expected {listed.num_bytes:,}; {_RESTORE}")
    return folder


def verify_sprout(folder: Path | None = None) -> Path:
    """Return `sprout_path` after a check of every file's checksum. Raises ModelError on the first difference."""
    folder = sprout_path(folder)
    for listed in listed_files(folder):
        digest = hashlib.sha256((folder / listed.name).read_bytes()).hexdigest()
        if digest != listed.sha256:
            raise ModelError(
                f"embedded model: {folder / listed.name} is corrupted (sha256 {digest[:16]}..., expected "
                f"{listed.sha256[:16]}...); {_RESTORE}"
            )
    return folder
