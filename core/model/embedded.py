"""The embedded model, sprout: where its files are, and whether they are whole.

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
    """The folder of the embedded model; nothing is read."""
    return Path(graftlm.__file__).parent / "sprout"


def listed_files(folder: Path) -> list[ListedFile]:
    """Read the list of files. Raises ModelError if it is missing or not as written."""
    path = folder / SHA256_LIST
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        parts = [line.split(maxsplit=2) for line in lines]
        return [ListedFile(name, digest, int(size)) for digest, size, name in parts]
    except (OSError, ValueError) as error:
        raise ModelError(f"embedded model: cannot read {path} ({error}); {_RESTORE}") from error


def sprout_path(folder: Path | None = None) -> Path:
    """The folder of the embedded model, after a look at which files there are and their sizes.

    Cheap: no file is opened but the list. Raises ModelError that names a missing or truncated file.
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
    """As `sprout_path`, and compare every checksum: reads all files. Raises ModelError on the first difference."""
    folder = sprout_path(folder)
    for listed in listed_files(folder):
        digest = hashlib.sha256((folder / listed.name).read_bytes()).hexdigest()
        if digest != listed.sha256:
            raise ModelError(
                f"embedded model: {folder / listed.name} is corrupted (sha256 {digest[:16]}..., expected "
                f"{listed.sha256[:16]}...); {_RESTORE}"
            )
    return folder
