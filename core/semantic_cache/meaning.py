"""Meaning: embeddings of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.runtime import Runtime

Embed = Callable[[list[str]], Any]


def embedder_of(given: Any, runtime: Runtime) -> Embed:
    """Return the function that embeds a list of texts.

    given  a function of a list of texts, an `Embeddings` object of LangChain, a `BaseEmbedding` of LlamaIndex, an
           object with `encode` (sentence-transformers), or "model": the served model itself
    """
    if given == "model":
        return ModelEmbedder(runtime)
    for name in ("embed_documents", "get_text_embedding_batch", "encode"):
        method = getattr(given, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    if callable(given):
        return given  # type: ignore[no-any-return]
    raise ConfigError(
        f"embedder is {given!r}; give 'model', a function of a list of texts, or an embeddings object of LangChain, "
        "LlamaIndex or sentence-transformers"
    )


_IN_ONE_WORD = 'This sentence : "{}" means in one word:"'


class ModelEmbedder:
    """Embeds texts by the served model's hidden state before a word for it, through the output layer.

    The logits are a linear image of the last hidden state; `size` random projections of them keep their angles. The
    prompt's KV is cached on the way. Without the frame, the state says how the text goes on rather than its meaning.
    Source: PromptEOL, arXiv 2307.16645.
    """

    def __init__(self, runtime: Runtime, size: int = 256) -> None:
        self._runtime = runtime
        self._size = size
        self._projection: np.ndarray | None = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        ids = [self._runtime.tokenizer.encode(_IN_ONE_WORD.format(text)) for text in texts]
        logits = np.stack([future.result() for future in [self._runtime.logits(one) for one in ids]])
        logits -= logits.mean(axis=1, keepdims=True)
        if self._projection is None:
            shape = logits.shape[1], self._size
            self._projection = np.random.default_rng(0).standard_normal(shape, np.float32) / self._size**0.5
        projected: np.ndarray = logits @ self._projection
        return projected


def unit_rows(values: Any, texts: Sequence[str], size: int | None) -> np.ndarray:
    """Return embeddings of length 1, float32 [num_texts, size].

    size  of the embeddings before; None for the first. Raises: ConfigError for another size or number
    """
    rows = np.asarray(values, np.float32)
    if rows.ndim != 2 or len(rows) != len(texts):
        raise ConfigError(
            f"the embedder returned an array of shape {rows.shape} for {len(texts)} texts; "
            "return one row of numbers for each"
        )
    if size is not None and rows.shape[1] != size:
        raise ConfigError(
            f"the embedder returned {rows.shape[1]} numbers, the entries of this cache have {size}; "
            "use one embedder for a cache, or clear() it"
        )
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)
