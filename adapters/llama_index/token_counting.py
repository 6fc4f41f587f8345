"""The tokenizer with which LlamaIndex counts tokens when it packs chunks into prompts."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import llama_index.core
from graftlm.core.errors import GraftError

if TYPE_CHECKING:
    from graftlm.adapters.llama_index.llm import GraftLLM

_PROBE = "The quick brown fox jumps over 13 lazy dogs, doesn't it?\nNaïve: {'price': 12.50}\n" * 4
_TOLERANCE = 1.02
_logger = logging.getLogger(__name__)
_compared: set[tuple[int, str]] = set()


def count_tokens_with(llm: GraftLLM) -> None:
    """Let LlamaIndex count tokens with the model's tokenizer.

    LlamaIndex's default, the tokenizer of an OpenAI model, is replaced. A tokenizer that the user has set stays; if it
    counts fewer tokens than the model, full prompts overflow, and a warning says so once.
    """
    current = llama_index.core.global_tokenizer
    if getattr(current, "__self__", None) is llm:
        return
    try:
        if current is None or _is_default(current) or isinstance(getattr(current, "__self__", None), type(llm)):
            llm.tokenize("")  # an endpoint may have no tokenizer
            llama_index.core.Settings.tokenizer = llm.tokenize
            _logger.info("LlamaIndex counts tokens as %s does; set Settings.tokenizer to change that", llm.model)
        elif (id(current), llm.model) not in _compared:
            _compared.add((id(current), llm.model))
            _compare(current, llm)
    except GraftError:
        return


def _is_default(tokenizer: Callable[[str], Any]) -> bool:
    """Return True for LlamaIndex's default, a partial over tiktoken's `encode`."""
    owner = getattr(getattr(tokenizer, "func", None), "__self__", None)
    return isinstance(tokenizer, functools.partial) and type(owner).__module__.startswith("tiktoken")


def _compare(current: Callable[[str], Any], llm: GraftLLM) -> None:
    counted, really = len(current(_PROBE)), len(llm.tokenize(_PROBE))
    if really > counted * _TOLERANCE:
        warnings.warn(
            f"Settings.tokenizer counts {counted} tokens in a text in which {llm.model!r} reads {really}, so prompts "
            "that LlamaIndex packs full do not fit the model; set Settings.tokenizer = llm.tokenize",
            stacklevel=3,
        )
