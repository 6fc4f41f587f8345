"""What an engine really computed: counted at plain transformers models, read from GraftLM's runtimes."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from graftlm.core.runtime import Runtime

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """Counts over one run.

    calls            answers written
    prompt_tokens    tokens of all prompts, as asked for
    computed_tokens  those of them that were run through the model
    largest_batch    the most sequences in one forward
    """

    calls: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    largest_batch: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was not computed."""
        return 1 - self.computed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.computed_tokens + other.computed_tokens,
            max(self.largest_batch, other.largest_batch),
        )


class Meter:
    """Counts the work of one engine: make it before the engine, `attach` when the engine has loaded all it needs.

    GraftLM's runtimes count for themselves. Where the engine has none, transformers models are counted by their
    forwards: a pass over several tokens is a prompt, whose tokens before that pass came from a cache; a pass over one
    token behind a past is decoding.
    """

    def __init__(self) -> None:
        from graftlm.core.runtime import Runtime

        self._lock = threading.Lock()
        self._forwards = Work()
        self._others = weakref.WeakSet(alive(Runtime))
        self._runtimes: list[Runtime] = []
        self._hooks: list[RemovableHandle] = []

    def attach(self) -> None:
        """Find the engine's models and runtimes and start counting; what the runtimes cached so far is forgotten."""
        from transformers import GenerationMixin

        self._runtimes = self._new_runtimes()
        for runtime in self._runtimes:
            runtime.clear_cache()
            runtime.reset_stats()
        models: list[Any] = [] if self._runtimes else alive(GenerationMixin)
        self._hooks = [model.register_forward_pre_hook(self._count, with_kwargs=True) for model in models]

    def _new_runtimes(self) -> list[Runtime]:
        from graftlm.core.runtime import Runtime

        return [runtime for runtime in alive(Runtime) if runtime not in self._others and not runtime.closed]

    def work(self) -> Work:
        """The counts so far; any thread may ask."""
        total = self._forwards
        for runtime in self._runtimes:
            stats = runtime.stats()
            total += Work(stats.requests, stats.prompt_tokens, stats.computed_tokens, stats.largest_batch)
        return total

    def close(self) -> None:
        """Stop counting and close the engine's runtimes."""
        for hook in self._hooks:
            hook.remove()
        for runtime in self._new_runtimes():
            runtime.close()

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return
        rows, width = ids.shape
        past = kwargs.get("past_key_values")
        num_past = past.get_seq_length() if past is not None else 0
        mask = kwargs.get("attention_mask")
        if num_past > 0:
            prompt = width > 1
            step = Work(rows * prompt, rows * (num_past + width) * prompt, rows * width * prompt, rows)
        else:
            num_tokens = int(mask.sum()) if mask is not None and mask.shape == ids.shape else rows * width
            step = Work(rows, num_tokens, num_tokens, rows)
        with self._lock:
            self._forwards += step


def alive(kind: type[T]) -> list[T]:
    """Every object of `kind` in the process."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
