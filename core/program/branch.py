"""Branch: one growing text of a program, and the queue of expressions to append to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graftlm.core.chat.messages import ImagePart, VideoPart
from graftlm.core.errors import EngineError, RequestCancelled
from graftlm.core.program.expression import (
    Expression,
    Gen,
    Hold,
    Image,
    Module,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    Video,
    parts_of,
)
from graftlm.core.program.interpreter import Call
from graftlm.core.program.select import Scoring, Selection, gather
from graftlm.core.program.transcript import Transcript
from graftlm.core.request import Chunk, Completion, Request, Usage

if TYPE_CHECKING:
    from graftlm.core.program.run import Run

Variable = Future[Any]


@dataclass(frozen=True)
class Fork(Expression):
    """Branches that continue from here independently."""

    children: tuple[Branch, ...]


class Branch:
    """One sequence of expressions, appended in order. Text, tokens and variables grow and never change.

    User threads queue expressions. The interpreter's thread executes them one at a time, and suspends the branch at
    each model call until the answer arrives. `run.changed` guards everything that both threads use.
    """

    def __init__(self, run: Run, parent: Branch | None = None) -> None:
        self.run = run
        self.parent = parent
        self.path: tuple[int, ...] = run.place  # numbers of the forks from the first branch to this one
        self.num_children = 0
        if parent is not None:
            self.path = (*parent.path, parent.num_children)
            parent.num_children += 1
        self.error: BaseException | None = None
        self._usage = Usage()
        self.variables: dict[str, Variable] = dict(parent.variables) if parent is not None else {}
        self.details: dict[str, Completion | Selection] = {}
        self._inherited = frozenset(self.variables)
        self._transcript: Transcript | None = None
        self._held: list[Text] = []  # texts of a compiled program, whose order is decided at their end
        self._num_groups = 0
        self.last_call: Request | None = None
        self.held_kv: Any = None
        self._scopes: dict[str, int] = {}  # name -> where the scope's text begins
        self._queue: deque[tuple[Expression, Variable | None]] = deque()
        self._suspended = parent is not None  # until a model call ends, or until the parent reaches the fork
        self._posted = False
        self.busy = False
        self.num_busy = 0  # busy branches among this one and all that were forked from it
        if parent is not None:
            self._set_busy(True)

    @property
    def text(self) -> str:
        return self._transcript.text + self._arranged if self._transcript is not None else ""

    @property
    def messages(self) -> list[dict[str, str]]:
        return self._transcript.messages if self._transcript is not None else []

    @property
    def usage(self) -> Usage:
        """Return the usage of all model calls in this branch and in the branches forked from it."""
        return self._usage

    def prepare(self) -> None:
        """Load the tokenizer and the model on the program's thread, so that the interpreter's does not block."""
        _ = self.run.backend.tokenizer

    @property
    def own_variables(self) -> list[str]:
        """Names that were defined after the fork."""
        return [name for name in self.variables if name not in self._inherited]

    # -- for user threads, under run.changed -------------------------------------------------------------------

    def append(self, expression: Expression) -> None:
        """Queue an expression. In a failed branch its variables fail at once."""
        with self.run.changed:
            for part in parts_of(expression):
                variable = self._declare(part)
                if self.run.pacing is not None:
                    self.run.pacing.appended(self, part)
                if self.error is not None:
                    _drop(part, variable, self.error)
                else:
                    self._queue.append((part, variable))
            if self._queue and not self._suspended:
                self._post()
            self.run.changed.notify_all()

    def define(self, name: str, variable: Variable) -> None:
        """Define a variable with a value."""
        with self.run.changed:
            self.variables[name] = variable
            self.run.changed.notify_all()

    def fork(self, num_children: int) -> tuple[Branch, ...]:
        """Queue a fork; the children accept expressions at once."""
        with self.run.changed:
            children = tuple(type(self)(self.run, self) for _ in range(num_children))
            self.append(Fork(children))
        return children

    def wait(self) -> None:
        """Block until this branch and all forks from it have executed their queues."""
        self.run.wait_for(lambda: self.num_busy == 0, "join()")

    def fail(self, error: BaseException) -> None:
        """End the branch: every queued expression fails with the error."""
        with self.run.changed:
            self.error = error
            self.run.record_error(error)
            while self._queue:
                _drop(*self._queue.popleft(), error)
            self._suspended = False
            self._set_busy(False)
            self.run.changed.notify_all()

    def _declare(self, part: Expression) -> Variable | None:
        if isinstance(part, Gen | Select | ScopeEnd) and part.name is not None:
            self.variables[part.name] = Future()
            return self.variables[part.name]
        return None

    def _post(self) -> None:
        self._set_busy(True)
        if not self._posted:
            self._posted = True
            self.run.interpreter.post(self._advance)

    def _set_busy(self, busy: bool) -> None:
        if busy == self.busy:
            return
        self.busy = busy
        branch: Branch | None = self
        while branch is not None:
            branch.num_busy += 1 if busy else -1
            branch = branch.parent
        self.run.notify_if_done()

    # -- on the interpreter's thread ---------------------------------------------------------------------------

    def _advance(self) -> None:
        """Execute queued expressions up to the next model call."""
        while True:
            with self.run.changed:
                if self._suspended or not self._queue:
                    self._posted = False
                    self._set_busy(self._suspended)
                    self.run.changed.notify_all()
                    return
                part, variable = self._queue.popleft()
            try:
                if self.run.cancelled:
                    raise RequestCancelled("the program was cancelled")
                if self._transcript is None:
                    self._transcript = self._new_transcript()
                self._execute(part, variable, self._transcript)
            except BaseException as error:
                _drop(part, variable, error)
                self.fail(error)

    def _execute(self, part: Expression, variable: Variable | None, transcript: Transcript) -> None:
        if isinstance(part, Hold):  # no part of the text
            self.held_kv = _hold_kv(part, self)
            return
        if self.run.part_order is not None:
            if isinstance(part, Text):
                self._held.append(part)
                return
            if self._held:
                transcript.write(self._arranged)
                self._held, self._num_groups = [], self._num_groups + 1
        match part:
            case Text(text):
                transcript.write(text)
            case Module(name, text):
                transcript.write_module(name, text)
            case Gen():
                self._generate(part, variable, transcript)
            case Select():
                self._select(part, variable, transcript)
            case RoleBegin(role):
                transcript.begin(role)
            case RoleEnd():
                transcript.end()
            case Fork(children):
                for child, copied in zip(children, transcript.fork(len(children)), strict=True):
                    child._start(self, copied)
            case ScopeBegin(name):
                self._scopes[name] = transcript.settle()
            case ScopeEnd(name):
                transcript.settle()
                self._resolve(variable, transcript.text[self._scopes.pop(name) :])
            case Image(image, options):
                transcript.write_media(ImagePart(image, mm_processor_kwargs=options), self.run.backend.model_name)
            case Video(video, num_frames):
                transcript.write_media(VideoPart(video, num_frames), self.run.backend.model_name)

    @property
    def _arranged(self) -> str:
        """Return the text of the texts that are held."""
        order = self.run.part_order
        return "" if order is None or not self._held else order.arrange((self.path, self._num_groups), self._held)

    def _new_transcript(self) -> Transcript:
        return Transcript(self.run.backend.tokenizer)

    def _start(self, parent: Branch, transcript: Transcript) -> None:
        """Continue from the current state of `parent`."""
        self._transcript = transcript
        self.details, self._scopes = dict(parent.details), dict(parent._scopes)
        self.last_call = parent.last_call
        with self.run.changed:
            self._suspended = False
            self._post()

    def _resolve(self, variable: Variable | None, value: Any) -> None:
        if variable is not None:
            variable.set_result(value)

    # -- model calls -------------------------------------------------------------------------------------------

    def _generate(self, part: Gen, variable: Variable | None, transcript: Transcript) -> None:
        on_chunk = self.run.on_chunk
        sampling = part.sampling(self.run.defaults)
        # a constraint starts at a whole character
        request = Request(transcript.prompt(whole=sampling.constrained), sampling, stream=on_chunk is not None)
        if on_chunk is not None:
            request.on_chunk = lambda chunk: on_chunk(replace(chunk, name=part.name))

        def on_done(completion: Completion) -> None:
            self._count(completion.usage)
            transcript.write_generated(completion)
            if part.name is not None:
                self.details[part.name] = completion
            values = [read_value(part, each.text) for each in completion.completions or [completion]]
            self._resolve(variable, values if sampling.n > 1 else values[0])

        self._call([request], lambda futures: futures[0], on_done, part, variable)

    def _select(self, part: Select, variable: Variable | None, transcript: Transcript) -> None:
        scoring = Scoring(self.run.backend.tokenizer, transcript.prompt(whole=True), part.choices, part.method)

        def on_done(selection: Selection) -> None:
            self._count(selection.usage)
            transcript.write_selected(selection)
            if part.name is not None:
                self.details[part.name] = selection
            if self.run.on_chunk is not None:
                chunk = Chunk(selection.choice, [], name=part.name, finish_reason="stop", usage=selection.usage)
                self.run.on_chunk(chunk)
            self._resolve(variable, selection.choice)

        self._call(scoring.requests, lambda futures: gather(futures, scoring.finish), on_done, part, variable)

    def _call(
        self,
        requests: Sequence[Request],
        combine: Callable[[list[Future[Completion]]], Future[Any]],
        on_done: Callable[[Any], None],
        part: Expression,
        variable: Variable | None,
    ) -> None:
        """Submit requests and suspend the branch, without a thread, until the future of `combine` is done."""

        def submitted(futures: list[Future[Completion]]) -> Future[Any]:
            future = combine(futures)
            self.run.begin_call(future)
            return future

        self._suspended = True
        self.last_call = requests[0]
        self.run.call(Call(self.run.backend, requests, submitted, self._resuming(on_done, part, variable)), self)

    def _resuming(
        self, on_done: Callable[[Any], None], part: Expression, variable: Variable | None
    ) -> Callable[[Future[Any]], None]:
        """Return the callback of a model call: it passes the result to `on_done`, or ends the branch with the error."""

        def resume(future: Future[Any]) -> None:
            self.run.end_call(future)
            if self.error is not None:
                return
            try:
                on_done(future.result())
            except BaseException as error:
                cause = RequestCancelled("the program was cancelled") if isinstance(error, CancelledError) else error
                _drop(part, variable, cause)
                self.fail(cause)
            with self.run.changed:
                self._suspended = False
            self._advance()

        return resume

    def _count(self, usage: Usage) -> None:
        with self.run.changed:
            branch: Branch | None = self
            while branch is not None:
                branch._usage += usage
                branch = branch.parent


def _hold_kv(part: Hold, branch: Branch) -> Any:
    """Hold the KV of the last model call in place of an earlier hold, or end that. -> what ends it, or None"""
    if branch.held_kv is not None:
        branch.held_kv.release()
    hold = getattr(branch.run.backend, "hold", None)
    if part.ends or hold is None or branch.last_call is None:
        return None
    return hold(branch.last_call, part.seconds, label=part.label)


def _drop(part: Expression, variable: Variable | None, error: BaseException) -> None:
    """Fail the variable or the children of an expression that is not executed."""
    if variable is not None and not variable.done():
        variable.set_exception(error)
    if isinstance(part, Fork):
        for child in part.children:
            child.fail(error)


def read_value(part: Gen, text: str) -> Any:
    """Return the value of a gen's variable; raise EngineError if the text is not a value of its type."""
    try:
        return part.value(text)
    except (ValueError, KeyError) as error:
        kind = part.dtype.__name__ if part.dtype is not None else "value"
        raise EngineError(
            f"gen {part.name!r} wrote {text!r}, which is no {kind}; raise max_tokens or change its constraint"
        ) from error
