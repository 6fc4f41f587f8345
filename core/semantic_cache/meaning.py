"""Meaning: embeddings of texts, and the words that two texts of one meaning must have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.runtime import Runtime

Embed = Callable[[list[str]], Any]

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?|\d+(?:[.,:/-]\d+)*|[%$€£<>=+*]")
_POLITE = r"(?:please,? |(?:can|could|would|will) you (?:please )?|i (?:want|would like|need) to know )"
_QUESTION = r"(?:how|why|when|where|who|whom|whose|what|which)\b"
_REQUEST = re.compile(
    rf"^{_POLITE}*(?:(?:tell|show)(?: me)?|explain(?: to me)?|say|let me know)(?: (?:if|whether)\b| (?={_QUESTION}))"
    rf"|^{_POLITE}+(?={_QUESTION})"
)
_OBJECT = re.compile(rf"^{_POLITE}*(?:tell me|give me|name) (?=the\b|a\b|an\b)")
_HOW = re.compile(r"\bhow (?:(?:do|can|could) (?:i|we|you|one)|to)\b")
_FRONTED = re.compile(
    r"^((?:in|on|at|for|with|without|if|unless|after|before|during|under|by|from|until|within|since) [^,?!.]+), +"
    r"([^,?!.]+)[?!.]*$"
)
_ABLE = re.compile(r"^(?:is it possible for ([^,?!.]+?) to|(?:is|are|am) ([^,?!.]+?) able to) ")
_DROPPED = frozenset(["a", "an", "the", "do", "does", "is", "are", "am", "please"])
_SAME = {"which": "what", "what's": "what", "who's": "who", "where's": "where", "how's": "how"}


def marks(text: str) -> tuple[str, ...]:
    """Return the words that must be equal, and in one order, in texts of one meaning.

    Left out are articles, forms of "do" and "be" in the present, politeness and what asks for an answer ("tell me",
    "explain how"). A phrase before a comma counts as if it stood at the end. All other words count, those of question,
    tense, negation and place included: "why" and "how", "did" and "does", "from A to B" and "from B to A" differ.
    """
    text = " ".join(text.lower().replace("’", "'").split())
    text = _OBJECT.sub("what ", _REQUEST.sub("", text).strip())
    text = _ABLE.sub(lambda found: f"can {found[1] or found[2]} ", text)
    fronted = _FRONTED.match(text)
    if fronted is not None:
        text = f"{fronted[2]} {fronted[1]}"
    found: list[str] = []
    for word in _WORD.findall(_HOW.sub("how", text)):
        if word.endswith("n't"):
            found.append("not")
            word = word[:-3]
        if word not in _DROPPED:
            found.append(_SAME.get(word, word))
    return tuple(found)


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


class ModelEmbedder:
    """Embeds texts by the served model's hidden state after each, seen through its output layer.

    The logits are a linear image of the last hidden state; `size` random projections of them keep their angles. The
    prompt's KV is cached on the way. A language model's hidden state says how the text goes on rather than its
    meaning, so take a higher limit than for an embedding model.
    """

    def __init__(self, runtime: Runtime, size: int = 256) -> None:
        self._runtime = runtime
        self._size = size
        self._projection: np.ndarray | None = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        ids = [self._runtime.tokenizer.encode(text) for text in texts]
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
