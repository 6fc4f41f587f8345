"""Errors that LlamaIndex does not mistake for an answer that failed to parse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_index.core
from graftlm.core.errors import ConfigError, GraftError, GrammarError, RequestTooLong

_REMEDY = (
    "LlamaIndex packs prompts by the tokens of OpenAI's models; set Settings.tokenizer = llm.tokenize before documents "
    "are split"
)


class GraftCallError(GraftError, RuntimeError):
    """An invalid call: a parameter, message, tool or schema is wrong. The cause is the runtime's own error.

    It is no ValueError: LlamaIndex's `refine` treats every ValueError as a failed parse, continues with the next chunk,
    and returns "Empty Response" in the end.
    """


def is_default_tokenizer(tokenizer: Callable[[str], Any]) -> bool:
    """Return True for LlamaIndex's default, a partial over tiktoken's `encode`."""
    owner = getattr(getattr(tokenizer, "func", None), "__self__", None)
    return isinstance(tokenizer, functools.partial) and type(owner).__module__.startswith("tiktoken")


@contextmanager
def call_errors() -> Iterator[None]:
    """Raise the runtime's ValueErrors from the block as GraftCallError.

    The error of a prompt that is too long names `Settings.tokenizer` if that is LlamaIndex's default.
    """
    try:
        yield
    except RequestTooLong as error:
        current = llama_index.core.global_tokenizer
        if current is not None and is_default_tokenizer(current):
            error.args = (f"{error}; {_REMEDY}", *error.args[1:])
        raise
    except (ConfigError, GrammarError) as error:
        raise GraftCallError(str(error)) from error
