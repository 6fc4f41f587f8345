"""Errors that LlamaIndex does not mistake for an answer that failed to parse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graftlm.core.errors import ConfigError, GraftError, GrammarError


class GraftCallError(GraftError, RuntimeError):
    """An invalid call: a parameter, message, tool or schema is wrong. The cause is the runtime's own error.

    It is no ValueError: LlamaIndex's `refine` treats every ValueError as a failed parse, continues with the next chunk,
    and returns "Empty Response" in the end.
    """


@contextmanager
def call_errors() -> Iterator[None]:
    """Raise the runtime's ValueErrors from the block as GraftCallError."""
    try:
        yield
    except (ConfigError, GrammarError) as error:
        raise GraftCallError(str(error)) from error
