"""Reading of text files that a user names on the command line."""

from __future__ import annotations

from pathlib import Path

from graftlm.core.errors import ConfigError


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises: ConfigError for a file that cannot be read, or that is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{str(path)!r} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start:,}; "
            "save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
