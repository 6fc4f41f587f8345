"""`on_unsupported="check"`: validates finished outputs by their schema and retries invalid ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from graftlm.core.config import SamplingParams
from graftlm.core.errors import GrammarError, failure_of
from graftlm.core.request import Chunk, Completion, Listener, Request, Submission, Usage

Check = Callable[[str], str | None]
"""Validates an output: returns the violation, or None."""

_SEED_STEP = 1_000_003
_workers = ThreadPoolExecutor(2, thread_name_prefix="graftlm check")


def _new_workers() -> None:
    global _workers
    _workers = ThreadPoolExecutor(2, thread_name_prefix="graftlm check")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_workers)


class CheckedListener:
    """A listener that forwards only valid outputs to the caller's listener, and holds chunks until then.

    ask_again  submits a request in place of an earlier submission
    first      the first submission, set once the request is submitted
    """

    def __init__(
        self, request: Request, listener: Listener, ask_again: Callable[[Request, CheckedListener], None]
    ) -> None:
        self.first: Submission | None = None
        self._request = request
        self._listener = listener
        self._ask_again = ask_again
        self._slots = list(range(request.sampling.n))  # indices of the answers that the current try produces
        self._answers: dict[int, Completion] = {}
        self._chunks: dict[int, list[Chunk]] = {}
        self._num_tries = 0
        self._spent = Usage()

    @classmethod
    def wrap(
        cls, request: Request, listener: Listener, ask_again: Callable[[Request, CheckedListener], None]
    ) -> Listener:
        """Return a CheckedListener over `listener`, or `listener` itself if the mask enforces everything."""
        sampling = request.sampling
        constrained = sampling.json_schema is not None or sampling.constraint is not None
        if sampling.on_unsupported != "check" or not constrained:
            return listener
        from graftlm.core.grammar.schema.validation import require_validator

        require_validator()
        return cls(request, listener, ask_again)

    def on_chunk(self, chunk: Chunk) -> None:
        slot = self._slots[chunk.index]
        self._chunks.setdefault(slot, []).append(replace(chunk, index=slot))

    def on_error(self, error: BaseException) -> None:
        self._listener.on_error(error)

    def on_finish(self, completion: Completion) -> None:
        if completion.finish_reason == "cancelled":
            self._listener.on_finish(completion)
        else:
            _workers.submit(self._judge, completion)

    def _judge(self, completion: Completion) -> None:
        try:
            assert self.first is not None
            check = _check_of(self.first)
            failed: list[tuple[int, str, str]] = []
            for slot, answer in zip(self._slots, completion.completions or [completion], strict=True):
                # a stop string or the token limit may have cut the output: no value to validate
                whole = answer.text_complete and not isinstance(answer.stop, str)
                wrong = check(answer.text) if check is not None and whole else None
                if wrong is None:
                    self._answers[slot] = replace(answer, checked=check is not None and whole, completions=[])
                else:
                    failed.append((slot, wrong, answer.text))
            if failed:
                self._spent += completion.usage
                self._try_again(failed)
            else:
                self._deliver(completion)
        except BaseException as error:
            self._listener.on_error(failure_of(error))

    def _try_again(self, failed: list[tuple[int, str, str]]) -> None:
        sampling = self._request.sampling
        if getattr(getattr(self._listener, "future", None), "cancelled", bool)():
            return
        if self._num_tries == sampling.max_retries:
            _, wrong, text = failed[0]
            raise GrammarError(
                f"the model's answer breaks its schema where the mask cannot keep it, asked {self._num_tries + 1} "
                f"times; the last answer {text[:80]!r}: {wrong}; loosen the schema, raise max_retries or temperature"
            )
        self._num_tries += 1
        self._slots = [slot for slot, _, _ in failed]
        for slot in self._slots:
            self._chunks.pop(slot, None)
        self._ask_again(replace(self._request, sampling=self._sampling(sampling)), self)

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of the next try, at a temperature above 0: a greedy answer would repeat."""
        seed = None if sampling.seed is None else sampling.seed + self._num_tries * _SEED_STEP
        return replace(sampling, n=len(self._slots), seed=seed, temperature=sampling.temperature or 1.0)

    def _deliver(self, completion: Completion) -> None:
        answers = [self._answers[slot] for slot in sorted(self._answers)]
        whole = replace(
            answers[0],
            checked=all(answer.checked for answer in answers),
            usage=self._spent + completion.usage if self._num_tries else completion.usage,
            completions=answers if len(answers) > 1 else [],
        )
        for slot in sorted(self._chunks):
            for chunk in self._chunks[slot]:
                self._listener.on_chunk(chunk)
        self._listener.on_finish(whole)


def _check_of(submission: Submission) -> Check | None:
    """Return the check of a submission's outputs, behind their thinking; None if the mask enforces the whole schema."""
    check, thinking = _content_check_of(submission), submission.request.thinking
    if check is None or thinking is None:
        return check
    from graftlm.core.chat.thinking import split_thinking

    return lambda text: check(split_thinking(thinking, text)[1])


def _content_check_of(submission: Submission) -> Check | None:
    """Return the check of the content that the model writes behind its thinking."""
    from graftlm.core.constraint import spec_of
    from graftlm.core.grammar.cache import compile_cached
    from graftlm.core.grammar.schema import validation
    from graftlm.core.grammar.spec import JsonSchema
    from graftlm.core.remote.language.checking import bytes_vocabulary

    sampling = submission.request.sampling
    spec = spec_of(sampling)
    if not isinstance(spec, JsonSchema):
        found: Check | None = getattr(spec, "check", None)
        return found
    if submission.grammar is not None:
        grammar = submission.grammar.result()
    else:  # an endpoint
        grammar = compile_cached(spec, bytes_vocabulary(), whitespace="flexible", on_unsupported="check")
    return partial(validation.complaint, spec, unkept=grammar.warnings) if grammar.warnings else None
