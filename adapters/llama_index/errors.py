"""Errors that LlamaIndex does not take for an answer that could not be parsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graftlm.core.errors import ConfigError, GraftError, GrammarError


class GraftCallError(GraftError, RuntimeError):
    """A call cannot be made: a parameter, message, tool or schema is wrong. The cause is the runtime's own error.

    It is no ValueError, because LlamaIndex's `refine` takes every ValueError for an answer that does not parse, goes on
    with the next chunk and gives "Empty Response" in the end.
    """


@contextmanager
def call_errors() -> Iterator[None]:
    """Raise the runtime's ValueErrors from the block as GraftCallError."""
    try:
        yield
    except (ConfigError, GrammarError) as error:
        raise GraftCallError(str(error)) from error
