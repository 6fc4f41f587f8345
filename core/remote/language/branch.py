"""RemoteBranch: one growing text of a program whose model is behind an API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graftlm.core.config import SamplingParams
from graftlm.core.program.branch import Branch, Fork, Variable, read_value
from graftlm.core.program.expression import Expression, Gen, RoleBegin, RoleEnd, Select, Text
from graftlm.core.program.transcript import Transcript
from graftlm.core.remote.language.layout import ahead_of
from graftlm.core.remote.language.transcript import RemoteTranscript
from graftlm.core.remote.language.values import Value, Values
from graftlm.core.remote.ledger.usage import RemoteUsage
from graftlm.core.remote.speculation.surplus import Ahead
from graftlm.core.remote.speculation.text import RemoteText
from graftlm.core.request import Chunk, Usage

if TYPE_CHECKING:
    from graftlm.core.program.run import Run
    from graftlm.core.program.select import Selection
    from graftlm.core.remote.endpoint import Endpoint

_PATIENCE_S, _PAUSE_S = 0.005, 0.0005
"""Seconds that a speculating call waits for the program to append more parts, and interval of the checks."""


class RemoteBranch(Branch):
    """A branch that keeps text and turns in the endpoint's form, without token ids."""

    def __init__(self, run: Run, parent: Branch | None = None) -> None:
        super().__init__(run, parent)
        endpoint = getattr(run.backend, "endpoint", None)
        assert endpoint is not None
        self._endpoint: Endpoint = endpoint
        self._usage: Usage = RemoteUsage()
        self._values = Values(endpoint, self._count, run.on_chunk)
        self._children: list[RemoteBranch] = []

    @property
    def usage(self) -> Usage:
        """The usage, with the rest of a surplus counted as wasted."""
        return self._usage + sum((branch._pending for branch in self._all()), start=RemoteUsage())

    @property
    def _pending(self) -> RemoteUsage:
        return RemoteUsage() if self._transcript is None else self._remote.remote.pending

    def _all(self) -> list[RemoteBranch]:
        return [self, *(branch for child in self._children for branch in child._all())]

    def prepare(self) -> None:
        """Prepare the endpoint for requests."""
        self.run.backend.load()  # type: ignore[attr-defined]

    @property
    def _remote(self) -> RemoteTranscript:
        assert isinstance(self._transcript, RemoteTranscript)
        return self._transcript

    def _new_transcript(self) -> Transcript:
        values, endpoint = self._values, self._endpoint
        spec_tokens = self.run.num_api_spec_tokens
        text = RemoteText(values.ask, values.note, spec_tokens, endpoint.num_tokens_of, self._reader)
        return RemoteTranscript(endpoint, text)

    def _start(self, parent: Branch, transcript: Transcript) -> None:
        assert isinstance(parent, RemoteBranch) and isinstance(transcript, RemoteTranscript)
        transcript.remote.bind(self._values.ask, self._values.note, self._reader)
        parent._children.append(self)
        super()._start(parent, transcript)

    # -- model calls -------------------------------------------------------------------------------------------

    def _generate(self, part: Gen, variable: Variable | None, transcript: Transcript) -> None:
        remote = self._remote
        remote.check_writable(f"gen {part.name!r}")
        sampling = part.sampling(self.run.defaults)

        def on_done(value: Value) -> None:
            remote.written(value.text)
            if part.name is not None:
                self.details[part.name] = value.completion
            values = [read_value(part, text) for text in value.texts]
            self._resolve(variable, values if sampling.n > 1 else values[0])

        self._run(self._values.gen(remote.remote, sampling, self._look_ahead, part), on_done, part, variable)

    def _select(self, part: Select, variable: Variable | None, transcript: Transcript) -> None:
        remote = self._remote
        remote.check_writable(f"select {part.name!r}")
        sampling = replace(SamplingParams.from_options(**self.run.defaults), temperature=0.0, stop=(), n=1)

        def on_done(selection: Selection) -> None:
            remote.written(selection.choice)
            if part.name is not None:
                self.details[part.name] = selection
            if self.run.on_chunk is not None:
                chunk = Chunk(selection.choice, [], name=part.name, finish_reason="stop", usage=selection.usage)
                self.run.on_chunk(chunk)
            self._resolve(variable, selection.choice)

        call = self._values.select(remote.remote, part, sampling, self._look_ahead)
        self._run(call, on_done, part, variable)

    def _run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        on_done: Callable[[Any], None],
        part: Expression,
        variable: Variable | None,
    ) -> None:
        """Suspend the branch until a coroutine on the loop of endpoints has ended."""
        resume = self._resuming(on_done, part, variable)
        self._suspended = True
        future = self._endpoint.start(coroutine)
        self.run.begin_call(future)
        future.add_done_callback(lambda done: self.run.interpreter.post(partial(resume, done)))

    @property
    def _reader(self) -> Callable[[Coroutine[Any, Any, None]], None] | None:
        """The function that reads answers in the background, if values are streamed; else None."""
        return None if self.run.on_chunk is None else self._read_beside

    def _read_beside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Read an answer to its end, so that its cost is reported; the run ends after that."""
        future = self._endpoint.start(coroutine)
        self.run.begin_call(future)
        self._hold(1)

        def done(future: Future[None]) -> None:
            self.run.end_call(future)
            self._hold(-1)

        future.add_done_callback(done)

    def _hold(self, num: int) -> None:
        with self.run.changed:
            branch: Branch | None = self
            while branch is not None:
                branch.num_busy += num
                branch = branch.parent
            self.run.notify_if_done()
            self.run.changed.notify_all()

    # -- looking ahead -----------------------------------------------------------------------------------------

    async def _look_ahead(self) -> Ahead:
        """Return the parts of this turn that the program has appended, after a short wait for more."""
        waited_s = 0.0
        while True:
            with self.run.changed:
                ahead = self._queued()
                settled = ahead.complete or self.run.num_reading > 0
            if settled or waited_s >= _PATIENCE_S:
                return ahead
            await asyncio.sleep(_PAUSE_S)
            waited_s += _PAUSE_S

    def _queued(self) -> Ahead:
        parts: list[Text | Gen | Select] = []
        for part, _ in self._queue:
            match part:
                case Text() | Gen() | Select():
                    parts.append(part)
                case RoleEnd() | RoleBegin():
                    return ahead_of(parts, self.run.defaults, complete=True)
                case Fork(children):
                    ahead = ahead_of(parts, self.run.defaults, complete=True)
                    each = [child._queued() for child in children if isinstance(child, RemoteBranch)]
                    return replace(
                        ahead,
                        num_tokens=ahead.num_tokens + max(child.num_tokens for child in each),
                        generates=ahead.generates or any(child.generates for child in each),
                        complete=all(child.complete for child in each),
                    )
        return ahead_of(parts, self.run.defaults, complete=self.run.returned)
