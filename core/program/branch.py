"""Branch: one growing text of a program, and the expressions that wait to be appended to it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graftlm.core.chat.chat import Chat, chat_format
from graftlm.core.chat.growing_text import GrowingText
from graftlm.core.errors import ConfigError, EngineError, RequestCancelled
from graftlm.core.program.expression import (
    Expression,
    Gen,
    Image,
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
from graftlm.core.request import Chunk, Completion, Request, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from graftlm.core.program.run import Run
    from graftlm.core.text.tokenizer import Tokenizer

Variable = Future[Any]


@dataclass(frozen=True)
class Fork(Expression):
    """Branches that go on from here, each its own way."""

    children: tuple[Branch, ...]


class Branch:
    """Appends expressions in order; text, tokens and variables grow and never change.

    User threads put expressions into the queue. The interpreter's thread takes them out, one at a time, and lets go
    at each call to the model until the answer is there. What both touch is guarded by `run.changed`.

    Token ids are kept as they were computed or generated, so that the KV of everything before is found again.
    """

    def __init__(self, run: Run, parent: Branch | None = None) -> None:
        self.run = run
        self.parent = parent
        self._text = GrowingText()
        self.error: BaseException | None = None
        self.usage = Usage()
        self.chat: Chat | None = None
        self.variables: dict[str, Variable] = dict(parent.variables) if parent is not None else {}
        self.details: dict[str, Completion | Selection] = {}
        self._inherited = frozenset(self.variables)
        self._turn: str | None = None  # constant content of the open turn, where the template may trim it
        self._scopes: dict[str, int] = {}
        self._queue: deque[tuple[Expression, Variable | None]] = deque()
        self._waiting = parent is not None  # for an answer of the model, or for the parent to come to the fork
        self._posted = False
        self.busy = False
        self.num_busy = 0  # of this branch and all that forked from it
        if parent is not None:
            self._set_busy(True)

    @property
    def text(self) -> str:
        """The text, with what of the open turn may still be trimmed."""
        return self._text.text + (self._turn or "")

    @property
    def own_variables(self) -> list[str]:
        """Names that the branch defined after it forked off."""
        return [name for name in self.variables if name not in self._inherited]

    # -- for user threads, under run.changed -------------------------------------------------------------------

    def append(self, expression: Expression) -> None:
        """Queue an expression. After an error its variables get that error at once."""
        with self.run.changed:
            for part in parts_of(expression):
                variable = self._declare(part)
                if self.error is not None:
                    self._drop(part, variable, self.error)
                else:
                    self._queue.append((part, variable))
            if self._queue and not self._waiting:
                self._post()
            self.run.changed.notify_all()

    def define(self, name: str, variable: Variable) -> None:
        """Give a name a variable that is resolved already."""
        with self.run.changed:
            self.variables[name] = variable
            self.run.changed.notify_all()

    def fork(self, num_children: int) -> tuple[Branch, ...]:
        """Queue a fork; the children take expressions from now on."""
        with self.run.changed:
            children = tuple(Branch(self.run, self) for _ in range(num_children))
            self.append(Fork(children))
        return children

    def wait(self) -> None:
        """Block until nothing that was queued here, and in forks from here, is left to do."""
        self.run.wait_for(lambda: self.num_busy == 0)

    def fail(self, error: BaseException) -> None:
        """End the branch: all that waits in it gets the error."""
        with self.run.changed:
            self.error = error
            self.run.note(error)
            while self._queue:
                self._drop(*self._queue.popleft(), error)
            self._waiting = False
            self._set_busy(False)
            self.run.changed.notify_all()

    def _declare(self, part: Expression) -> Variable | None:
        if isinstance(part, Gen | Select | ScopeEnd) and part.name is not None:
            self.variables[part.name] = Future()
            return self.variables[part.name]
        return None

    def _drop(self, part: Expression, variable: Variable | None, error: BaseException) -> None:
        if variable is not None and not variable.done():
            variable.set_exception(error)
        if isinstance(part, Fork):
            for child in part.children:
                child.fail(error)

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
        self.run.rest()

    # -- on the interpreter's thread ---------------------------------------------------------------------------

    def _advance(self) -> None:
        """Append what is queued, up to the next call to the model."""
        while True:
            with self.run.changed:
                if self._waiting or not self._queue:
                    self._posted = False
                    self._set_busy(self._waiting)
                    self.run.changed.notify_all()
                    return
                part, variable = self._queue.popleft()
            try:
                if self.run.cancelled:
                    raise RequestCancelled("the program was cancelled")
                self._execute(part, variable)
            except BaseException as error:
                self._drop(part, variable, error)
                self.fail(error)

    def _execute(self, part: Expression, variable: Variable | None) -> None:
        match part:
            case Text(text):
                self._write(text)
            case Gen():
                self._generate(part, variable)
            case Select():
                self._select(part, variable)
            case RoleBegin(role):
                self._begin(role)
            case RoleEnd():
                self._end()
            case Fork(children):
                self._fork(children)
            case ScopeBegin(name):
                self._settle()
                self._scopes[name] = len(self._text.text)
            case ScopeEnd(name):
                self._settle()
                self._resolve(variable, self._text.text[self._scopes.pop(name) :])
            case Image() | Video():
                kinds = f"{type(part).__name__.lower()}s"
                raise ConfigError(f"{self.run.backend.model_name} reads text only, not {kinds}; use a model that sees")

    def _resolve(self, variable: Variable | None, value: Any) -> None:
        if variable is not None:
            variable.set_result(value)

    # -- text and turns ----------------------------------------------------------------------------------------

    def _write(self, text: str) -> None:
        if self.chat is not None and self.chat.open and text:
            self._text.write(self.chat.gap())
            self.chat.write(text)
            if self.chat.held:
                return
            if self._turn is not None:
                self._turn += text
                return
        self._text.write(text)

    def _settle(self) -> None:
        """Let the open turn's constant text stand as it is: something else follows in the same turn."""
        if self._turn is not None:
            turn, self._turn = self._turn, None
            self._text.write(turn)

    def _begin(self, role: str) -> None:
        if self.chat is None:
            self.chat = Chat(chat_format(self._tokenizer))
        self._text.write(self.chat.begin(role))
        self._turn = "" if self.chat.trims and not self.chat.held else None

    def _end(self) -> None:
        assert self.chat is not None
        constant = self.chat.messages[-1]["content"] if self.chat.held else self._turn
        content = constant.strip() if constant is not None and self.chat.trims else None
        if self._turn is not None:
            self._text.write(self._turn if content is None else content)
            self._turn = None
        self._text.write(self.chat.end(content))

    # -- tokens and forks --------------------------------------------------------------------------------------

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.run.backend.tokenizer

    def _tokens(self) -> NDArray[np.int32]:
        """The whole text as ids, for the model to go on from."""
        self._settle()
        if self.chat is not None and self.chat.held:
            raise ConfigError(
                "the chat template of this model writes a system message inside the next turn, "
                "so the model cannot write in it; begin a user turn first"
            )
        ids = self._text.tokens(self._tokenizer)
        if not len(ids):
            raise ConfigError("the model was called before there was any text; append a prompt first")
        return ids

    def _fork(self, children: tuple[Branch, ...]) -> None:
        self._settle()
        self._text.fix_all_but_last(self._tokenizer)
        for child in children:
            child._start(self)

    def _start(self, parent: Branch) -> None:
        """Go on from where the parent is."""
        self._text = parent._text.copy()
        self.chat = parent.chat.copy() if parent.chat is not None else None
        self.details, self._scopes = dict(parent.details), dict(parent._scopes)
        with self.run.changed:
            self._waiting = False
            self._post()

    # -- calls to the model ------------------------------------------------------------------------------------

    def _generate(self, part: Gen, variable: Variable | None) -> None:
        sink = self.run.sink
        sampling = part.sampling(self.run.defaults)
        request = Request(self._tokens(), sampling, stream=sink is not None)
        if sink is not None:
            request.on_chunk = lambda chunk: sink(replace(chunk, name=part.name))

        def ended(future: Future[Any]) -> None:
            completion: Completion = future.result()
            self._count(completion.usage)
            self._text.write_generated(self._tokenizer, completion.text, completion.token_ids)
            if self.chat is not None and self.chat.open:
                self.chat.write(completion.text)
            if part.name is not None:
                self.details[part.name] = completion
            values = [_value(part, each.text) for each in completion.completions or [completion]]
            self._resolve(variable, values if sampling.n > 1 else values[0])

        self._call([request], lambda futures: futures[0], ended, part, variable)

    def _select(self, part: Select, variable: Variable | None) -> None:
        scoring = Scoring(self._tokenizer, self._tokens(), part.choices, part.method)

        def ended(future: Future[Any]) -> None:
            selection: Selection = future.result()
            self._count(selection.usage)
            self._text.write_scored(selection.choice, selection.token_ids)
            if self.chat is not None and self.chat.open:
                self.chat.write(selection.choice)
            if part.name is not None:
                self.details[part.name] = selection
            if self.run.sink is not None:
                self.run.sink(Chunk(selection.choice, [], name=part.name, finish_reason="stop", usage=selection.usage))
            self._resolve(variable, selection.choice)

        self._call(scoring.requests, lambda futures: gather(futures, scoring.finish), ended, part, variable)

    def _call(self, requests: Any, started: Any, ended: Any, part: Expression, variable: Variable | None) -> None:
        """Hand requests over and wait, without a thread, until they are answered."""

        def begun(futures: list[Future[Completion]]) -> Future[Any]:
            future: Future[Any] = started(futures)
            self.run.begin_call(future)
            return future

        def resume(future: Future[Any]) -> None:
            self.run.end_call(future)
            if self.error is not None:
                return
            try:
                ended(future)
            except BaseException as error:
                cause = RequestCancelled("the program was cancelled") if isinstance(error, CancelledError) else error
                self._drop(part, variable, cause)
                self.fail(cause)
            with self.run.changed:
                self._waiting = False
            self._advance()

        self._waiting = True
        self.run.call(Call(self.run.backend, requests, begun, resume))

    def _count(self, usage: Usage) -> None:
        with self.run.changed:
            branch: Branch | None = self
            while branch is not None:
                branch.usage += usage
                branch = branch.parent


def _value(part: Gen, text: str) -> Any:
    try:
        return part.value(text)
    except (ValueError, KeyError) as error:
        kind = part.dtype.__name__ if part.dtype is not None else "value"
        raise EngineError(
            f"gen {part.name!r} wrote {text!r}, which is no {kind}; raise max_tokens or change its constraint"
        ) from error
