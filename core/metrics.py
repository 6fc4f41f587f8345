"""Counters of an engine, and the report of a prompt's match in the prefix cache."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graftlm.core.execution.step_plan import StepPlan
    from graftlm.core.request import OpenRequest


STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of tokens in a step, those of vLLM's histogram."""


class StepTokens(tuple[int, ...]):
    """Numbers of steps with up to each of STEP_BOUNDS tokens, then of larger ones, then the tokens of all steps."""

    def __new__(cls, counts: Iterable[int] = (0,) * (len(STEP_BOUNDS) + 2)) -> StepTokens:
        return super().__new__(cls, counts)

    def __add__(self, other: Iterable[int]) -> StepTokens:  # type: ignore[override]
        return StepTokens(map(add, self, other))

    def ran(self, num_tokens: int, num_steps: int) -> StepTokens:
        """Return the counts with `num_steps` steps more, of `num_tokens` each."""
        counts = list(self)
        counts[bisect_left(STEP_BOUNDS, num_tokens)] += num_steps
        counts[-1] += num_tokens * num_steps
        return StepTokens(counts)


@dataclass
class Counters:
    """Counters that the engine's thread updates; names in `_s` are seconds.

    computed_tokens  prompt tokens that were computed; a retracted request counts again when it is recomputed
    cached_tokens    prompt tokens taken from the prefix cache
    failed_steps     steps that raised; their sequences were rerun in parts, and sequences that failed alone ended
    images           pictures and videos in the prompts of started requests, of `image_tokens` tokens
    drafted_tokens   draft tokens that were verified; `accepted_tokens` of them were accepted
    step_tokens      steps by the number of their tokens
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    steps: int = 0
    largest_batch: int = 0
    retracted: int = 0
    failed: int = 0
    failed_steps: int = 0
    cancelled: int = 0
    shared_prefix_steps: int = 0
    images: int = 0
    image_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    step_tokens: StepTokens = StepTokens()

    def ran(self, plan: StepPlan, num_steps: int, seconds: float) -> None:
        """Count `num_steps` steps over the rows of `plan` that took `seconds` together."""
        self.steps += num_steps
        self.step_tokens = self.step_tokens.ran(plan.num_tokens, num_steps)
        self.largest_batch = max(self.largest_batch, len(plan.rows))
        self.shared_prefix_steps += num_steps * bool(len(plan.wire.prefix_lens))
        self.drafted_tokens += plan.num_drafts
        self.forward_s += seconds

    def reset(self) -> None:
        for f in fields(Counters):
            setattr(self, f.name, f.default)


@dataclass
class TierStats:
    """A cache tier: the tokens and bytes that it holds, the tokens saved in it and loaded from it since the start.

    dropped_blocks  of up to 64 tokens, that made room for newer ones
    capacity        bytes that it may hold; host memory grows in the first seconds while a GPU's driver registers it
    """

    tokens: int = 0
    bytes: int = 0
    saved_tokens: int = 0
    loaded_tokens: int = 0
    dropped_blocks: int = 0
    capacity: int = 0


@dataclass
class Stats(Counters):
    """A snapshot of an engine: its counters, and its KV slots. slots_free + slots_cached + slots_in_use == slots_total.

    states_total   slots for states, in a model that has layers with a state: `states_free` are free, `states_cached`
                   hold checkpoints of cached prefixes, each other one the state of a running sequence
    weights  the dtype that the model computes in, such as "bfloat16"; "" before the model is loaded
    kv       the format of keys and values: "bfloat16", "bfloat16 in 12 bits", "float8_e4m3fn"; "" before
    execution  how the model runs and why not faster: "paged, 32 of 32 layers fused", "serial: ..."; "" before
    images_encoded  runs of the model's encoder, one for each picture that was not known; `image_bytes` of its outputs
                    are kept
    no_images  the reason for which pictures are refused; "" where they are read
    running, waiting  sequences of requests that are open
    open     the open requests; empty for an engine in another process
    tiers    by name ("host", "folder") the cache tiers that are configured
    semantic_hits, semantic_misses, semantic_entries  answers from the semantic cache, prompts it knew no answer to, and
                   answers it holds
    replicas, restarts  number of live replicas, and number of replacements of dead ones
    """

    slots_total: int = 0
    slots_free: int = 0
    slots_cached: int = 0
    slots_in_use: int = 0
    states_total: int = 0
    states_free: int = 0
    states_cached: int = 0
    weights: str = ""
    kv: str = ""
    execution: str = ""
    images_encoded: int = 0
    image_bytes: int = 0
    no_images: str = ""
    running: int = 0
    waiting: int = 0
    open: list[OpenRequest] = field(default_factory=list)
    semantic_hits: int = 0
    semantic_misses: int = 0
    semantic_entries: int = 0
    replicas: int = 0
    restarts: int = 0
    tiers: dict[str, TierStats] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Return the hit rate and the counters that are not 0, as notebooks show them."""
        from graftlm.core.text.html import table

        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("open", "tiers", "step_tokens")}
        counts = {name: value for name, value in values.items() if value}
        tiers = {f"{name} tier, tokens": tier.tokens for name, tier in self.tiers.items()}
        return table({"hit_rate": f"{100 * self.hit_rate:.1f} %", **counts, **tiers})

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens, 0 where there were none."""
        total = self.cached_tokens + self.computed_tokens
        return self.cached_tokens / total if total else 0.0


@dataclass(frozen=True)
class PrefixMiss:
    """The point where a prompt leaves the cached prefix: the end of the shared part, and both continuations.

    num_without_state  the last tokens of the shared part, which were computed again, because no state of the model's
                       recurrent layers was kept among them
    """

    num_cached: int
    shared_tail: tuple[int, ...]
    cached_next: tuple[int, ...]
    prompt_next: tuple[int, ...]
    num_without_state: int = 0

    @property
    def hints(self) -> list[str]:
        """Return remarks for the report."""
        if not self.num_without_state:
            return []
        return [f"{self.num_without_state} more tokens were known, but no state of the model was kept among them"]


@dataclass(frozen=True)
class CacheReport:
    """A report on a request's match in the prefix cache.

    `shared_text` ends where the two prompts part (its last 80 characters); `cached_text` and `prompt_text`
    are how the nearest cached prompt and this prompt go on. Both are empty where nothing was cached.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    shared_text: str = ""
    cached_text: str = ""
    prompt_text: str = ""
    hints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens came from the cache"]
        if self.cached_text:
            lines.append(f"after  …{self.shared_text!r}")
            lines.append(f"cached  {self.cached_text!r}")
            lines.append(f"prompt  {self.prompt_text!r}")
        return "\n".join(lines + self.hints)
