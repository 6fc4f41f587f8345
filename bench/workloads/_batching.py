"""BatchingEngine: transformers' continuous batching behind the engine hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from graftlm.ab.engines.plain_engine import PlainEngine, checked, completion_of, prompt_of
from graftlm.ab.engines.servers import BATCH_TOKENS, NUM_BLOCKS
from graftlm.core.errors import EngineError
from graftlm.core.request import Completion, Submission, Usage

if TYPE_CHECKING:
    from graftlm.core.config import EngineConfig
    from graftlm.core.text.tokenizer import Tokenizer

POLL_S = 0.05
SETTLE_S = 5.0


class BatchingEngine(PlainEngine):
    """An engine over transformers' batch manager, which supports neither constraints nor scores.

    Stop strings are searched in each partial answer; a request that has produced one is cancelled.
    """

    def __init__(self, model: str, config: EngineConfig, tokenizer: Tokenizer) -> None:
        import transformers

        super().__init__(model, config, tokenizer)
        sizes: Any = (
            {} if self.model.device.type == "cuda" else {"num_blocks": NUM_BLOCKS, "max_batch_tokens": BATCH_TOKENS}
        )
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=list(tokenizer.eos_token_ids), pad_token_id=tokenizer.eos_token_ids[0]
        )
        self._open = ExitStack()
        self._manager: Any = self._open.enter_context(
            self.model.continuous_batching_context_manager(
                generation, timeout=5, warmup=False,
                continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
            )
        )  # fmt: skip
        self._running: dict[str, Submission] = {}
        self._matched: dict[str, int] = {}
        self._processor = self._started()
        self._processor.cache.search_prefix_match = self._counting(self._processor.cache.search_prefix_match)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self._running

    def step(self) -> bool:
        """Submit the waiting requests, then take one result."""
        while self.waiting:
            self._begin(self.waiting.popleft())
        result = self._manager.get_result(timeout=POLL_S) if self._running else None
        submission = self._running.get(result.request_id) if result is not None else None
        if result is None or submission is None:
            return True
        if result.error is not None:
            self._running.pop(result.request_id).listener.on_error(EngineError(result.error))
            return True
        ids, stop = list(result.generated_tokens), submission.request.sampling.stop
        found = bool(stop) and any(one in self.tokenizer.decode(ids) for one in stop)
        if found or result.is_finished():
            if not result.is_finished():
                self._manager.cancel_request(result.request_id)
            self.counters.largest_batch = max(self.counters.largest_batch, len(self._running))
            del self._running[result.request_id]
            num_prompt, num_cached = len(prompt_of(submission)), self._matched.pop(result.request_id, 0)
            sampling = submission.request.sampling
            self.finish(submission, completion_of(self.tokenizer, ids, sampling, num_prompt, num_cached))
        return True

    def _begin(self, submission: Submission) -> None:
        request = submission.request
        if request.pin:
            submission.listener.on_finish(Completion("", [], "length", Usage()))
            return
        if submission.grammar is not None or request.score_ids is not None or request.want_logits:
            wanted = "constraints" if submission.grammar is not None else "scores of given text"
            submission.listener.on_error(EngineError(f"transformers' continuous batching has no {wanted}; use hf"))
            return
        try:
            checked(request.sampling)
        except EngineError as error:
            submission.listener.on_error(error)
            return
        ids = prompt_of(submission)
        limit = request.sampling.max_tokens or self.model.config.max_position_embeddings - len(ids)
        ends = -1 if request.sampling.ignore_eos else None
        name = self._manager.add_request(
            ids, max_new_tokens=limit, streaming=bool(request.sampling.stop), eos_token_id=ends
        )
        self._running[name] = submission

    def cancel(self, submission_id: int) -> None:
        super().cancel(submission_id)
        for name in [name for name, one in self._running.items() if one.id == submission_id]:
            self._manager.cancel_request(name)
            del self._running[name]

    def fail_all(self, error: BaseException) -> None:
        super().fail_all(error)
        while self._running:
            self._running.popitem()[1].listener.on_error(error)

    def clear_cache(self) -> None:
        """Wait until cancelled requests have freed their blocks, then evict the cached blocks."""
        deadline = time.monotonic() + SETTLE_S
        while self._processor.has_pending_requests() and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        self._processor.cache.evict_cached_blocks()

    def close(self) -> None:
        self._open.close()

    def _started(self) -> Any:
        """Wait for the manager's batch processor, which a thread of the manager creates."""
        while (processor := self._manager.batch_processor) is None:
            if not self._manager.is_running():
                raise EngineError("transformers' continuous batching ended while it started; its log says why")
            time.sleep(POLL_S / 10)
        return processor

    def _counting(self, match: Callable[[str, list[int]], int]) -> Callable[[str, list[int]], int]:
        """Wrap the manager's prefix match so that the lengths of cached prefixes are noted."""

        def counted(request_id: str, prompt_ids: list[int]) -> int:
            found = match(request_id, prompt_ids)
            self._matched[request_id] = self._matched.get(request_id, 0) + found
            return found

        return counted


def build_batching(
    model: str, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None]
) -> BatchingEngine:
    return BatchingEngine(model, config, tokenizer)
