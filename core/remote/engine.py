"""RemoteEngine: requests answered by an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError, EngineError, RemoteError, RequestCancelled
from graftlm.core.metrics import Stats
from graftlm.core.remote.endpoint import Endpoint
from graftlm.core.remote.language.checking import Language
from graftlm.core.remote.language.continuation import continuation
from graftlm.core.remote.ledger.usage import RemoteUsage
from graftlm.core.remote.transport import loop
from graftlm.core.remote.transport.answer import Answer, until_stop
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.remote.transport.request_body import Query, constraint_kind
from graftlm.core.request import Chunk, Completion, Request, Submission
from graftlm.core.scheduling.stop_strings import StopMatcher

_PATIENCE_AT_CLOSE_S = 5.0


class RemoteEngine:
    """An engine that runs a task for each request on the loop of endpoints, and calls its listener there."""

    idle = True
    any_thread = True

    def __init__(
        self, endpoint: Endpoint, *, finished: Callable[[Request, Completion], None] = lambda request, completion: None
    ) -> None:
        self._endpoint = endpoint
        self._finished = finished
        self._running: dict[int, asyncio.Task[Completion]] = {}  # used on the loop alone
        self._stats = Stats()

    def add(self, submissions: Sequence[Submission]) -> None:
        loop.post(partial(self._begin, submissions))

    def step(self) -> bool:
        return False

    def cancel(self, submission_id: int) -> None:
        """Close the request's connection."""
        loop.post(partial(self._cancel, submission_id))

    def fail_all(self, error: BaseException) -> None:
        """End every request and every background task with `error`."""
        with suppress(TimeoutError):
            loop.run(self._endpoint.close(error)).result(_PATIENCE_AT_CLOSE_S)

    def stats(self) -> Stats:
        """Return the counters over all calls, including the calls of programs."""
        spent = self._endpoint.spent
        return replace(
            self._stats,
            requests=spent.api_calls,
            prompt_tokens=spent.prompt_tokens,
            cached_tokens=spent.cached_tokens,
            computed_tokens=spent.prompt_tokens - spent.cached_tokens,
            completion_tokens=spent.completion_tokens,
        )

    def reset_stats(self) -> None:
        raise ConfigError("the figures of an endpoint are its bill; they are not reset")

    def clear_cache(self) -> None:
        raise RemoteError("the cache of an endpoint cannot be cleared from here")

    def unpin(self, pin: int) -> None:
        """Do nothing: an endpoint pins no prefixes."""

    def close(self) -> None:
        self.fail_all(EngineError("the runtime was closed before the request finished"))

    def _begin(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            running = self._running[submission.id] = self._endpoint.task(self._answer(submission))
            running.add_done_callback(partial(self._ended, submission))

    def _cancel(self, submission_id: int) -> None:
        running = self._running.get(submission_id)
        if running is not None:
            running.cancel()

    def _ended(self, submission: Submission, running: asyncio.Task[Completion]) -> None:
        self._running.pop(submission.id, None)
        listener = submission.listener
        if running.cancelled():
            listener.on_error(RequestCancelled("the request was cancelled"))
        elif (error := running.exception()) is not None:
            listener.on_error(error)
        else:
            self._finished(submission.request, running.result())
            listener.on_finish(running.result())

    # -- one request -------------------------------------------------------------------------------------------

    async def _answer(self, submission: Submission) -> Completion:
        request, sampling = submission.request, submission.request.sampling
        if request.score_ids is not None or request.want_logits or request.pin:
            raise RemoteError(
                f"{self._endpoint.config.base_url} gives neither logits nor scores of tokens, and keeps no prefix; "
                "use a model in this process for score, logits and warm"
            )
        prompt = RemotePrompt.of(request.prompt, request.tools, request.tool_fields)
        deadline_s = None if sampling.timeout is None else submission.arrived_s + sampling.timeout
        if sampling.constrained and not prompt.tools:
            return await self._constrained(submission, prompt)
        ledger = Ledger()
        query = Query(prompt, sampling, ledger.count, deadline_s)
        kind = constraint_kind(sampling) if sampling.constrained else None
        if kind is not None:
            await self._endpoint.probes.constraint(kind, True, ledger.count)
        if request.stream:
            answers = await self._stream(submission, query, ledger)
        else:
            answers = await self._endpoint.ask(query)
        if kind is not None:
            await self._check(answers, sampling)
        return _completion(request, answers, ledger.usage)

    async def _check(self, answers: Sequence[Answer], sampling: SamplingParams) -> None:
        """Raise RemoteError for an answer that calls no tool and does not meet the constraint."""
        language = await Language.of(sampling)
        for answer in answers:
            text = answer.text
            if not answer.tool_calls and answer.finish_reason != "length" and language.measure(text)[0] != text:
                raise RemoteError(
                    f"{self._endpoint.config.base_url} called no tool and wrote {text[:80]!r}, which is not of "
                    f"{language.shown}; leave the tools out where an answer of that form is wanted"
                )

    async def _constrained(self, submission: Submission, prompt: RemotePrompt) -> Completion:
        """Return an answer that meets its constraint; a stream receives it as one piece, once checked."""
        if prompt.ids is not None:
            raise ConfigError("a constraint at an endpoint needs a prompt of text or messages; this one is token ids")
        request = submission.request
        sink = submission.listener.on_chunk if request.stream else None
        completion = await continuation(self._endpoint, prompt, request.sampling, sink=sink)
        return replace(completion, request_id=request.id)

    async def _stream(self, submission: Submission, query: Query, ledger: Ledger) -> list[Answer]:
        sampling, listener = submission.request.sampling, submission.listener
        matchers = [StopMatcher(sampling.stop) for _ in range(sampling.n)]
        answers: list[Answer] = []
        async with aclosing(self._endpoint.ask_stream(query)) as pieces:
            async for piece in pieces:
                if piece.answers is not None:
                    answers = piece.answers
                    continue
                text = matchers[piece.index].push(piece.text).text
                thinking = (piece.so_far.thinking if piece.so_far is not None else "") or None
                if text or thinking:
                    listener.on_chunk(Chunk(text, [], index=piece.index, tool_calls=(), thinking=thinking))
        for index, answer in enumerate(answers):
            rest, reason = matchers[index].flush(), _cut(answer, sampling.stop).finish_reason
            calls = answer.tool_calls
            listener.on_chunk(Chunk(rest, [], None, reason, ledger.usage, index, tool_calls=calls))
        return answers


class Ledger:
    """The accumulated cost of one request."""

    def __init__(self) -> None:
        self.usage = RemoteUsage()

    def count(self, usage: RemoteUsage) -> None:
        self.usage += usage


def _completion(request: Request, answers: Sequence[Answer], usage: RemoteUsage) -> Completion:
    stop = request.sampling.stop
    texts = [_cut(answer, stop) for answer in answers]
    each = [
        Completion(
            cut.text,
            [],
            cut.finish_reason,
            usage,
            logprobs=list(cut.logprobs) if cut.logprobs is not None and request.sampling.logprobs else None,
            request_id=request.id,
            stop=answer.stopped_by(stop),
            tool_calls=answer.tool_calls,
            thinking=answer.thinking or None,
        )
        for answer, cut in zip(answers, texts, strict=True)
    ]
    return replace(each[0], completions=each) if len(each) > 1 else each[0]


def _cut(answer: Answer, stops: Sequence[str]) -> Answer:
    """Cut the answer before a stop string that the server left in its text."""
    if not stops:
        return answer
    text, reason = until_stop(answer.text, stops, answer.finish_reason)
    return replace(answer, text=text, finish_reason=reason)
