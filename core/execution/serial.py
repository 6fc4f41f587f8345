"""The serial lane: one sequence at a time over the model's own cache.

For models that cannot share a ragged batch: recurrent ones, those with position biases inside their attention, any
whose attention cannot be taken over. Prefixes are reused as snapshots, deep copies of the model's cache, because a
recurrent state cannot be cut back to fewer tokens. A snapshot is taken where the engine publishes (end of a prompt,
end of an answer) and where a prompt leaves a path that another prompt took, as a radix tree would split a node.
"""

from __future__ import annotations

import copy
import inspect
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from graftlm.core.execution.cache_name import cache_in, cache_name
from graftlm.core.execution.paged import accepts_logits_to_keep
from graftlm.core.model.qualify import starts_afresh_when_stretched

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.wire_plan import WirePlan

Extension = Literal["chunks", "tokens", "recompute"]
MIN_BRANCH = 16
"""Tokens that two prompts must share before the place where they part is worth a snapshot."""

SINGLE_TOKEN_COST = 4
"""How many tokens of a long forward take about as long as a forward of one."""


@dataclass(eq=False)
class LaneState:
    """One sequence in the lane: its tokens so far, and the model's cache after the first `length` of them."""

    tokens: array[int]
    namespace: str = ""
    num_prompt_tokens: int = 0
    cache: Any = None
    length: int = 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of the model's cache after `tokens`. Never run: a sequence that starts from it copies it again."""

    tokens: NDArray[np.int32]
    cache: Any
    num_bytes: int


class SnapshotStore:
    """Snapshots by namespace and tokens, least recently used out first, bounded by count and bytes."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self.num_bytes = 0
        self._snapshots: OrderedDict[tuple[str, bytes], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    def longest(self, tokens: NDArray[np.int32], namespace: str) -> Snapshot | None:
        """The longest snapshot that `tokens` begin with."""
        fitting = [
            (len(snapshot.tokens), key)
            for key, snapshot in self._snapshots.items()
            if key[0] == namespace and _common(snapshot.tokens, tokens) == len(snapshot.tokens)
        ]
        if not fitting:
            return None
        _, key = max(fitting)
        self._snapshots.move_to_end(key)
        return self._snapshots[key]

    def branch(self, tokens: NDArray[np.int32], namespace: str) -> int:
        """How many tokens the nearest snapshot shares with `tokens`, whether or not it ends there."""
        shared = [_common(s.tokens, tokens) for (space, _), s in self._snapshots.items() if space == namespace]
        return max(shared, default=0)

    def add(self, tokens: NDArray[np.int32], namespace: str, cache: Any) -> None:
        """Keep a copy of `cache`; does nothing if there is one already or it is too large to keep."""
        key = (namespace, tokens.tobytes())
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return
        num_bytes = sum(t.numel() * t.itemsize for t in _tensors(cache))
        if num_bytes > self.max_bytes or self.max_count < 1:
            return
        while len(self._snapshots) >= self.max_count or self.num_bytes + num_bytes > self.max_bytes:
            _, oldest = self._snapshots.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
        self._snapshots[key] = Snapshot(tokens.copy(), copy.deepcopy(cache), num_bytes)
        self.num_bytes += num_bytes


class SerialRunner:
    """Runs the rows of a step one after the other, each over its own cache.

    `extension` is how tokens are added to a cache, found out by trial at construction: "chunks" of any length,
    single "tokens" where a model starts afresh on longer ones, or "recompute" where it keeps no cache at all.

    stretches_at  tokens from which on the frequencies of the rotary embedding depend on the length; None where they
                  never do. A prompt that is longer runs in one call, from its first token: a chunk or a snapshot would
                  have the frequencies of its own length. An answer that grows longer goes on, or starts afresh at that
                  token, as the model's `generate` does.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_snapshots: int = 32,
        max_bytes: int = 1 << 30,
        stretches_at: int | None = None,
    ) -> None:
        self.loaded = loaded
        self.stretches_at = stretches_at
        self.snapshots = SnapshotStore(max_snapshots, max_bytes)
        self._states: dict[int, LaneState] = {}
        self._parameters = frozenset(inspect.signature(loaded.model.forward).parameters)
        self._cache_name = cache_name(loaded.model.forward)
        self._keeps = accepts_logits_to_keep(loaded.model)
        self._starts_afresh = stretches_at is not None and starts_afresh_when_stretched(loaded.model)
        self.extension: Extension = "chunks"
        self.extension = self._find_extension()

    # -- prefixes ----------------------------------------------------------------------------------------------

    def start(
        self, number: int, ids: NDArray[np.int32], namespace: str = "", *, first_logit: int, num_prompt: int
    ) -> int:
        """Take in a sequence by its number, before the first of its steps.

        ids          all its tokens, of which the first `num_prompt` are its prompt
        first_logit  the first position whose logits are wanted: that token must run
        -> length of the longest useful snapshot that it begins with
        """
        self._states[number] = LaneState(array("i", ids.astype(np.int32, copy=False).tobytes()), namespace, num_prompt)
        found = self._usable(ids[:first_logit], namespace)
        return len(found.tokens) if found is not None else 0

    def publish(self, number: int) -> None:
        """Keep a snapshot of what a sequence has computed so far."""
        state = self._states[number]
        if state.cache is not None and not self._stretched(state.length):
            tokens = np.array(state.tokens[: state.length], dtype=np.int32)
            self.snapshots.add(tokens, state.namespace, state.cache)

    def release(self, number: int) -> None:
        """Drop a sequence and its cache, if it is here."""
        self._states.pop(number, None)

    # -- forward -----------------------------------------------------------------------------------------------

    def forward(self, plan: WirePlan) -> torch.Tensor:
        """Compute the step. -> logits [num_logits, vocab_size] of `plan.logits_rows`."""
        wanted: list[torch.Tensor] = []
        ends = plan.ends
        num_logits_of = np.diff(np.searchsorted(plan.logits_rows, np.array([0, *ends]))).tolist()
        with torch.inference_mode():
            for row, number, num_logits in zip(plan.rows, plan.sequences.tolist(), num_logits_of, strict=True):
                state, stop = self._states[number], row.kv_len
                new = plan.input_ids[row.start : row.stop]
                state.tokens[row.past : stop] = array("i", new.astype(np.int32).tobytes())
                first_logit, num_prompt = max(stop - num_logits, row.past), state.num_prompt_tokens
                if self._stretched(num_prompt) and stop < num_prompt:
                    if num_logits:  # scores of a part: the whole prompt runs for each
                        whole = self._run(state, num_prompt, first_logit)
                        wanted.append(whole[:num_logits])
                    continue  # otherwise the prompt runs with its last part
                logits = self._run(state, stop, first_logit)
                if num_logits:
                    wanted.append(logits[-num_logits:])
        if not wanted:
            return torch.empty(0, self.loaded.vocab_size, device=self.loaded.device, dtype=torch.float32)
        return torch.cat(wanted)

    def _run(self, state: LaneState, stop: int, first_logit: int) -> torch.Tensor:
        """Compute up to token `stop`. -> logits of tokens [first_logit, stop), at least of the last one."""
        ids = np.array(state.tokens[:stop], dtype=np.int32)
        namespace = state.namespace
        first_logit = min(first_logit, stop - 1)
        if state.cache is None or state.length > first_logit or not self._continues(state.length, stop):
            found = None if self._stretched(stop) else self._usable(ids[:first_logit], namespace)
            state.cache, state.length = (None, 0) if found is None else (copy.deepcopy(found.cache), len(found.tokens))
        # Where this prompt leaves another's path, a snapshot serves the next one that comes this way.
        wanting = state.length < first_logit and not self._stretched(stop)
        branch = self.snapshots.branch(ids[:first_logit], namespace) if wanting else 0
        if branch >= state.length + MIN_BRANCH and self.extension == "chunks":
            self._extend(state, ids[:branch], branch - 1)
            self.snapshots.add(ids[:branch], namespace, state.cache)
        return self._extend(state, ids, first_logit)

    def _usable(self, tokens: NDArray[np.int32], namespace: str) -> Snapshot | None:
        """The longest snapshot that `tokens` begin with, if to go on from it costs less than to start afresh."""
        if self._stretched(len(tokens) + 1):
            return None
        found = self.snapshots.longest(tokens, namespace)
        return found if found is not None and self._pays(len(found.tokens), len(tokens) + 1) else None

    def _stretched(self, length: int) -> bool:
        return self.stretches_at is not None and length > self.stretches_at

    def _continues(self, length: int, stop: int) -> bool:
        """Whether a cache of `length` tokens is extended to `stop` tokens."""
        stretched_now = self._stretched(stop) and not self._stretched(length)
        return self._pays(length, stop) and not (stretched_now and self._starts_afresh)

    def _pays(self, length: int, stop: int) -> bool:
        """Whether to extend a cache of `length` tokens to `stop` rather than compute all of them at once."""
        return self.extension != "tokens" or stop - length <= max(stop // SINGLE_TOKEN_COST, 1)

    def _extend(self, state: LaneState, ids: NDArray[np.int32], first_logit: int) -> torch.Tensor:
        """Advance `state` to all of `ids`. -> logits of tokens [first_logit, len(ids))."""
        stop = len(ids)
        if self.extension == "recompute":
            state.length = stop
            return self._call(ids, None, 0, stop - first_logit, use_cache=False)[0]
        pieces: list[torch.Tensor] = []
        while state.length < stop:
            whole = self.extension == "chunks" or state.length == 0
            last = stop if whole else state.length + 1
            num_logits = max(last - max(first_logit, state.length), 0)
            logits, state.cache = self._call(ids[state.length : last], state.cache, state.length, max(num_logits, 1))
            if num_logits:
                pieces.append(logits[-num_logits:])
            state.length = last
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _call(
        self, ids: NDArray[np.int32], cache: Any, past: int, num_logits: int, *, use_cache: bool = True
    ) -> tuple[torch.Tensor, Any]:
        """One call of the model with new tokens `ids` after `past` others. -> logits [num_logits, V] and its cache."""
        device = self.loaded.device
        options: dict[str, Any] = {"use_cache": use_cache} if "use_cache" in self._parameters else {}
        if self._keeps:
            options["logits_to_keep"] = num_logits
        if "position_ids" in self._parameters:
            options["position_ids"] = torch.arange(past, past + len(ids), device=device)[None]
        if cache is not None and self._cache_name is not None:
            options[self._cache_name] = cache
        output: Any = self.loaded.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device), **options)
        return output.logits[0, -num_logits:], cache_in(getattr(output, "__dict__", {}))

    def _find_extension(self) -> Extension:
        """Compare the ways of adding tokens to a cache with one forward of all of them."""
        high = max(min(self.loaded.vocab_size, 30_000), 2)
        ids = np.random.default_rng(0).integers(0, high, 19).astype(np.int32)
        tolerance = 1e-3 if self.loaded.dtype in (torch.float32, torch.float64) else 6e-2
        ways: tuple[Extension, ...] = ("chunks", "tokens")
        with torch.inference_mode():
            reference = self._call(ids, None, 0, len(ids), use_cache=False)[0].float()
            for way in ways:
                self.extension = way
                state = LaneState(array("i"))
                try:
                    # A first chunk, a second one from a copy as after a snapshot, and single tokens.
                    pieces = [self._extend(state, ids[:7], 0)]
                    state = copy.deepcopy(state)
                    pieces += [self._extend(state, ids[:stop], state.length) for stop in (16, 17, 18, 19)]
                except Exception:  # a cache that this model cannot continue from: try the next way
                    continue
                error = float((torch.cat(pieces).float() - reference).norm() / reference.norm())
                if state.cache is not None and error < tolerance:
                    return way
        return "recompute"


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if differing.size else length


def _tensors(thing: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors a cache object holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for item in thing.values():
            yield from _tensors(item, seen)
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from _tensors(item, seen)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (nn.Module, type)):
        for item in vars(thing).values():
            yield from _tensors(item, seen)
