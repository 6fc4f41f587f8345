"""transformers' continuous batching: paged attention by torch, a scheduler, KV of equal beginnings shared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench.gpu.model import random_weights
from bench.gpu.workloads import Answer, Ids

PATIENCE_S = 60.0
"""Seconds without an answer after which the run has failed."""


class ContinuousBatching:
    """One manager for the whole run, as a server would hold it."""

    started: dict[str, float] = {}

    def __init__(self, folder: str | None) -> None:
        import transformers

        self.model, _ = random_weights(folder)
        self.model.set_attn_implementation("paged|sdpa")  # flash attention is a package of its own
        config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        sizes: dict[str, Any] = (
            {} if folder is not None else {"num_blocks": 64, "max_batch_tokens": 512}
        )  # else all memory there is
        pool = transformers.ContinuousBatchingConfig(**sizes)
        self._open = ExitStack()
        self.manager = self._open.enter_context(
            self.model.continuous_batching_context_manager(
                config, timeout=5, warmup=False, continuous_batching_config=pool
            )
        )
        self.about = {"version": transformers.__version__, "attention": str(self.model.config._attn_implementation)}

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        if schema is not None:
            raise NotImplementedError("transformers does not constrain its text")
        asked = self.manager.add_requests(list(prompts), max_new_tokens=max_tokens)
        done: dict[str, Answer] = {}
        while len(done) < len(asked):
            result = self.manager.get_result(timeout=PATIENCE_S)
            if result is None:
                raise RuntimeError(f"{len(asked) - len(done)} of {len(asked)} requests got no answer")
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                done[result.request_id] = Answer(list(result.generated_tokens))
        return [done[request] for request in asked]

    def flush(self) -> None:
        """Do nothing: flushing is not supported, but no section repeats an earlier one's prompts."""

    def close(self) -> None:
        self._open.close()


def start(folder: str | None) -> ContinuousBatching:
    return ContinuousBatching(folder)
