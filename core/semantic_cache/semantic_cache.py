"""SemanticCache: answers to earlier prompts that say nearly the same, found by embeddings."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.chat.messages import Message
from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.sharing import blocks_of
from graftlm.core.request import Chunk, Completion, Listener, Request, Submission, Usage
from graftlm.core.semantic_cache.index import GraphIndex, Kind, ProductIndex, check_kind, grown
from graftlm.core.semantic_cache.meaning import Embed, embedder_of, unit_rows
from graftlm.core.semantic_cache.wording import is_text_task, marks

if TYPE_CHECKING:
    from graftlm.core.runtime import Runtime

DEFAULT_SIMILARITY = 0.8
"""Cosine from which on two texts count as one; see docs/semantic-cache.md."""

_NOT_IN_KEY = {"timeout", "max_retries"}  # parameters that do not change an answer


@dataclass(frozen=True)
class Found:
    """An earlier prompt, the cosine to it, and its answer."""

    text: str
    similarity: float
    completion: Completion


@dataclass
class _Entry:
    text: str
    completion: Completion
    expires_s: float


class _Context:
    """The entries of one context by number, and the index of their embeddings."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}
        self.index: ProductIndex | GraphIndex = ProductIndex()


class SemanticCache:
    """Keeps answers, and gives them to later prompts that differ only in how their last paragraph is worded.

    embedder          "model", a function of a list of texts, or an embeddings object of LangChain, LlamaIndex or
                      sentence-transformers
    similarity        least cosine of two embeddings, 0 to 1
    ttl_s             seconds until an answer is forgotten; None keeps it
    namespace         answers of another namespace are never given
    any_temperature   also keep answers of requests with a temperature above 0
    max_entries       answers that are kept; the one unused for longest goes first
    strict_words      both texts must have the same words in one order, after wordings of English that mean one thing
                      became one; see `wording.marks`
    index             "numpy" searches by a product, "faiss" through a graph of neighbours (pip install
                      'graftlm[semantic]'); "auto" takes the graph from 8,000 entries of a context on if faiss is there

    Everything but the last paragraph of the last user message must be equal: other messages, model, tools, schema and
    sampling parameters. One cache may serve several runtimes.
    """

    def __init__(
        self,
        *,
        embedder: Any = "model",
        similarity: float = DEFAULT_SIMILARITY,
        ttl_s: float | None = None,
        namespace: str = "",
        any_temperature: bool = False,
        max_entries: int = 10_000,
        strict_words: bool = True,
        index: Kind = "auto",
    ) -> None:
        if not (_is_number(similarity) and 0 <= similarity <= 1):
            raise ConfigError(f"similarity is {similarity!r}; it must lie between 0 and 1")
        if not (ttl_s is None or (_is_number(ttl_s) and ttl_s > 0)):
            raise ConfigError(f"ttl_s is {ttl_s!r}; it must be a number of seconds above 0, or None")
        if not isinstance(max_entries, int) or isinstance(max_entries, bool) or max_entries < 1:
            raise ConfigError(f"max_entries is {max_entries!r}; it must be a whole number, at least 1")
        self.embedder = embedder
        self.similarity = float(similarity)
        self.ttl_s = ttl_s
        self.namespace = namespace
        self.any_temperature = any_temperature
        self.max_entries = max_entries
        self.strict_words = strict_words
        self.index: Kind = check_kind(index)
        self.hits = self.misses = 0
        self._size: int | None = None
        self._entries: OrderedDict[tuple[Any, int], _Entry] = OrderedDict()
        self._by_key: dict[Any, _Context] = {}
        self._next = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all answers."""
        with self._lock:
            self._entries.clear()
            self._by_key.clear()
            self._size = None

    def find(self, key: Any, text: str, row: np.ndarray) -> Found | None:
        """Return the nearest answer of `key` within the limit; None without one. Counts a hit or a miss."""
        key = self._with_marks(key, text)
        with self._lock:
            self._forget_expired(key)
            context = self._by_key.get(key)
            if context is not None:
                number, cosine = context.index.nearest(row)
                if cosine >= self.similarity - 1e-6:
                    entry = context.entries[number]
                    self._entries.move_to_end((key, number))
                    self.hits += 1
                    return Found(entry.text, min(1.0, cosine), entry.completion)
            self.misses += 1
            return None

    def keep(self, key: Any, text: str, row: np.ndarray, completion: Completion) -> None:
        """Keep an answer."""
        key = self._with_marks(key, text)
        expires_s = time.monotonic() + self.ttl_s if self.ttl_s is not None else np.inf
        with self._lock:
            if self._size not in (None, len(row)):
                return  # cleared, and filled by another embedder meanwhile
            self._size = len(row)
            number, self._next = self._next, self._next + 1
            entry = self._entries[key, number] = _Entry(text, completion, expires_s)
            context = self._by_key.setdefault(key, _Context())
            context.entries[number] = entry
            context.index.add(number, row)
            context.index = grown(context.index, self.index)
            while len(self._entries) > self.max_entries:
                self._drop(next(iter(self._entries)))

    def embed(self, embed: Embed, texts: list[str]) -> np.ndarray:
        """Return the embeddings of texts, float32 [num_texts, size]. Raises: ConfigError for another size."""
        return unit_rows(embed(texts), texts, self._size)

    def _with_marks(self, key: Any, text: str) -> Any:
        """Return a key with the words that must agree, so that few embeddings are compared."""
        return (key, marks(text)) if self.strict_words else key

    def _forget_expired(self, key: Any) -> None:
        context, now = self._by_key.get(key), time.monotonic()
        if context is None or self.ttl_s is None:
            return
        # Entries expire in the order in which they were added.
        for number in [*takewhile(lambda number: context.entries[number].expires_s <= now, context.entries)]:
            self._drop((key, number))

    def _drop(self, place: tuple[Any, int]) -> None:
        del self._entries[place]
        key, number = place
        context = self._by_key[key]
        del context.entries[number]
        context.index.remove(number)
        if not context.entries:
            del self._by_key[key]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class SemanticFront:
    """The cache in front of one runtime: answers known requests and keeps the answers to others."""

    def __init__(self, cache: SemanticCache, runtime: Runtime) -> None:
        if not isinstance(cache, SemanticCache):
            raise ConfigError(f"semantic_cache is {cache!r}; give gl.SemanticCache(...)")
        self.cache = cache
        self._runtime = runtime
        self._embed: Embed | None = embedder_of(cache.embedder, runtime)

    def unknown(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Answer what the cache knows; return the other submissions, whose answers it will keep."""
        asked = [(one, split) for one in submissions if (split := self._split(one)) is not None]
        if not asked or self._embed is None:
            return list(submissions)
        rows = self.cache.embed(self._embed, [text for _, (_, text) in asked])
        answered: set[int] = set()
        for (submission, (key, text)), row in zip(asked, rows, strict=True):
            found = self.cache.find(key, text, row)
            if found is None:
                submission.listener = _Keeping(submission.listener, self.cache, key, text, row)
            else:
                answered.add(id(submission))
                _deliver(submission, found)
        return [one for one in submissions if id(one) not in answered]

    def _split(self, submission: Submission) -> tuple[Any, str] | None:
        """Return all that must be equal, and the text that is compared; None for a request that is not kept."""
        request = submission.request
        sampling = request.sampling
        if sampling.temperature > 0 and not self.cache.any_temperature:
            return None
        if request.score_ids is not None or request.want_logits or request.pin or sampling.on_unsupported == "check":
            return None
        parts = _last_paragraph(request)
        if parts is None or not parts[1].strip():
            return None
        options = tuple(
            (f.name, _frozen(getattr(sampling, f.name))) for f in fields(sampling) if f.name not in _NOT_IN_KEY
        )
        tools = _frozen(request.tools), _frozen(request.tool_fields), repr(request.thinking), request.thinking_budget
        model = self._runtime.model_name, self._runtime.base_url, self._identity
        key: tuple[Any, ...] = (self.cache.namespace, request.namespace, model, options, tools, parts[0])
        if self.cache.strict_words and is_text_task(repr(parts[0])):
            key = (*key, parts[1])  # "Translate this:", and then the text: its wording is its content
        return key, parts[1]

    @property
    def _identity(self) -> Any:
        """Return the fingerprint of a model on disk; the object of a loaded one."""
        model = self._runtime.model
        return self._runtime.fingerprint if isinstance(model, str) and self._runtime.endpoint is None else _ById(model)


def _last_paragraph(request: Request) -> tuple[Any, str] | None:
    """Split a prompt into all before the last paragraph of its last message, and that paragraph; None for token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        blocks = blocks_of(prompt) or ("",)
        return ("".join(blocks[:-1]),), blocks[-1]
    if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(one, Mapping | Message) for one in prompt):
        return None
    turns = [one if isinstance(one, Mapping) else dict(vars(one)) for one in prompt]
    last = turns[-1]
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return None
    blocks = blocks_of(last["content"]) or ("",)
    before = _frozen([*turns[:-1], {**last, "content": "".join(blocks[:-1])}])
    return (before,), blocks[-1]


@dataclass(frozen=True)
class _ById:
    """An object that equals itself only; the key that holds it keeps it alive."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value


def _frozen(value: Any) -> Any:
    """Return a hashable value that is equal for equal values only."""
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return (type(value).__name__, value)
    try:
        return json.dumps(value)  # the order of keys is part of a schema
    except (TypeError, ValueError):
        if isinstance(value, Mapping):
            return tuple((_frozen(key), _frozen(one)) for key, one in value.items())
        return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else _ById(value)


class _Keeping:
    """A listener that keeps the answer before it passes it on."""

    def __init__(self, listener: Listener, cache: SemanticCache, key: Any, text: str, row: np.ndarray) -> None:
        self._listener = listener
        self._keep: Callable[[Completion], None] = lambda done: cache.keep(key, text, row, done)
        self.on_chunk = listener.on_chunk
        self.on_error = listener.on_error

    def on_finish(self, completion: Completion) -> None:
        if completion.finish_reason in ("stop", "length", "tool_calls"):
            self._keep(completion)
        self._listener.on_finish(completion)


def _deliver(submission: Submission, found: Found) -> None:
    """Give a found answer to the caller of another request. Nothing was computed, so its usage is zero."""
    done, listener = found.completion, submission.listener
    origin: dict[str, Any] = {"cached_from": found.text, "similarity": found.similarity}
    done = replace(
        done, usage=Usage(), request_id=submission.request.id, miss=None, timing=None, **origin,
        completions=[replace(one, usage=Usage(), **origin) for one in done.completions],
    )  # fmt: skip
    if submission.request.stream:
        for index, one in enumerate(done.completions or [done]):
            listener.on_chunk(Chunk(one.text, one.token_ids, one.logprobs, one.finish_reason, done.usage, index))
    listener.on_finish(done)
