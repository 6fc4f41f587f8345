"""The keyword that marks a constraint of a Python type which no JSON schema can hold."""

from __future__ import annotations

from typing import Any, Final

from graftlm.core.grammar.schema.reading.keywords import UNSUPPORTED

__all__ = ["NOTHING", "UNSUPPORTED", "refused"]

NOTHING: Final[dict[str, Any]] = {"not": {}}


def refused(described: dict[str, Any], message: str) -> dict[str, Any]:
    """Return `described` with a mark that the reader of schemas refuses with `message`."""
    return {**described, UNSUPPORTED: message}
