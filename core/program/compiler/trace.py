"""Trace: the expressions and model calls of a program, recorded with stand-ins for the model's answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError
from graftlm.core.program.branch import Branch, Fork
from graftlm.core.program.expression import Expression, Gen, Select
from graftlm.core.request import Completion, Request, TokenLogprob, Usage

if TYPE_CHECKING:
    from graftlm.core.program.interpreter import Call
    from graftlm.core.program.program import Program
    from graftlm.core.program.run import Run
    from graftlm.core.text.tokenizer import Tokenizer

DEFAULT_ANSWER = 256
"""Tokens assumed for an answer without `max_tokens`."""

Key = tuple[tuple[int, ...], int]
"""A model call: the path of its branch, and its number in the branch."""


@dataclass(frozen=True)
class TracedCall:
    """One model call of a trace.

    name        the variable; None without one
    prompt      token ids, int32 [num_prompt_tokens]
    answer      limit of the answer in tokens
    new_tokens  prompt tokens that the call before it in its branch, or in the branch forked from, does not have
    after       the call whose answer this one continues; None for the first call of a run
    reads       answers that the program's code had read before, such as "state['x']": the prompt may depend on them
    """

    key: Key
    name: str | None
    prompt: np.ndarray
    answer: int
    new_tokens: int
    after: Key | None
    reads: tuple[str, ...] = ()


@dataclass
class Trace:
    """The calls and expressions of one traced run.

    branches  the expressions of each branch by its path, in order
    stopped   the error that ended the program's code; None if it ran to its end
    """

    calls: dict[Key, TracedCall] = field(default_factory=dict)
    branches: dict[tuple[int, ...], list[Expression]] = field(default_factory=lambda: defaultdict(list))
    stopped: BaseException | None = None


class Tracer:
    """Records the run that it paces, and answers its model calls by stand-ins, without a model.

    A free text gets filler tokens up to `max_tokens`, a constrained one the shortest valid text, a choice its first
    option.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.trace = Trace()
        self._tokenizer = tokenizer
        self._reads: dict[str, None] = {}
        self._names: set[str] = set()
        self._asked: defaultdict[tuple[int, ...], list[tuple[Gen | Select, tuple[str, ...]]]] = defaultdict(list)
        self._forked_after: dict[tuple[int, ...], Key | None] = {}
        self._ends: dict[Key, np.ndarray] = {}
        self._done: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._lock = threading.Lock()

    # -- Pacing ------------------------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Do nothing: no model is needed."""

    def appended(self, branch: Branch, part: Expression) -> None:
        with self._lock:
            path = branch.path
            self.trace.branches[path].append(part)
            if isinstance(part, Gen | Select):
                self._asked[path].append((part, tuple(self._reads)))
                if part.name is not None:
                    self._names.add(f"state[{part.name!r}]")
            elif isinstance(part, Fork):
                for child in part.children:
                    self._forked_after[child.path] = self._last(path)

    def reads(self, run: Run, name: str) -> None:
        with self._lock:
            if name in self._names or name in ("state.text", "state.messages"):
                self._reads[name] = None

    def call(self, branch: Branch, call: Call) -> None:
        with self._lock:
            path = branch.path
            number = self._done[path]
            self._done[path] += 1
            part, reads = self._asked[path][number]
            key = (path, number)
            after = (path, number - 1) if number else self._forked_after.get(path)
        futures = [self._answer(request, len(self._ends) + i) for i, request in enumerate(call.requests)]
        prompt = call.requests[0].prompt.ids if call.requests else np.zeros(0, np.int32)
        before = self._ends.get(after) if after is not None else None
        new = len(prompt) - (0 if before is None else common_length(prompt, before))
        if isinstance(part, Select):
            answer = sum(len(request.score_ids or ()) for request in call.requests)
            self._ends[key] = prompt
        else:
            answer = (call.requests[0].sampling.max_tokens or DEFAULT_ANSWER) * call.requests[0].sampling.n
            futures[0].add_done_callback(lambda done: self._ended(key, prompt, done))
        self.trace.calls[key] = TracedCall(key, part.name, prompt, answer, new, after, reads)
        branch.run.interpreter.answer(call, futures)

    def end(self, run: Run) -> None:
        """Do nothing: the trace is complete when the run is done."""

    # -- stand-ins ---------------------------------------------------------------------------------------------

    def _last(self, path: tuple[int, ...]) -> Key | None:
        """Return the last call that was appended to a branch, or before its fork."""
        asked = len(self._asked[path])
        return (path, asked - 1) if asked else self._forked_after.get(path)

    def _ended(self, key: Key, prompt: np.ndarray, done: Future[Completion]) -> None:
        if done.exception() is None:
            self._ends[key] = np.concatenate([prompt, np.asarray(done.result().token_ids, np.int32)])

    def _answer(self, request: Request, number: int) -> Future[Completion]:
        future: Future[Completion] = Future()
        if request.score_ids is not None:
            scores = [TokenLogprob(token_id, "", -1.0) for token_id in request.score_ids]
            future.set_result(Completion("", [], "stop", Usage(), logprobs=scores))
        elif request.sampling.constrained:
            from graftlm.core.constraint import compile_constraint

            compiled = compile_constraint(request.sampling, self._tokenizer)
            compiled.add_done_callback(lambda done: _resolve(future, self._shortest, request, done))
        else:
            _resolve(future, self._filler, request, number)
        return future

    def _shortest(self, request: Request, compiled: Future[Any]) -> Completion:
        ids = compiled.result().matcher().ending([])
        return self._completion(request, list(ids))

    def _filler(self, request: Request, number: int) -> Completion:
        words = self._tokenizer.encode_continuation(f" [{number}]" + " ..." * 4)
        length = request.sampling.max_tokens or DEFAULT_ANSWER
        return self._completion(request, (words * (length // len(words) + 1))[:length])

    def _completion(self, request: Request, ids: list[int]) -> Completion:
        one = Completion(self._tokenizer.decode(ids), ids, "stop", Usage(completion_tokens=len(ids)))
        copies = [one] * request.sampling.n if request.sampling.n > 1 else []
        return Completion(one.text, ids, "stop", one.usage, completions=copies)


def _resolve(future: Future[Completion], make: Any, request: Request, given: Any) -> None:
    try:
        future.set_result(make(request, given))
    except BaseException as error:
        future.set_exception(error)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two id arrays."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def traces(program: Program, inputs: Iterable[Mapping[str, Any]], runtime: Any) -> list[Trace]:
    """Trace a program over each of `inputs`, which runs its Python code once for each, on this thread.

    Raises: ConfigError without inputs, for an input that is no dict, and for a model behind an API.
    """
    found = []
    for item in inputs:
        if not isinstance(item, Mapping):
            raise ConfigError(f"an input is {item!r}; give a dict of the program's arguments")
        run, function = program._prepare((), item, runtime)
        if getattr(run.backend, "endpoint", None) is not None:
            raise ConfigError(
                f"{run.backend.model_name} is behind an API, whose cache and KV are not ours to plan; "
                "trace the program with a runtime in this process"
            )
        tracer = Tracer(run.backend.tokenizer)
        run.pacing = tracer
        run.execute(function)
        run.when_done().result()
        tracer.trace.stopped = run.raised or run.error
        found.append(tracer.trace)
    if not found:
        raise ConfigError("the sample of inputs is empty; give at least one dict of the program's arguments")
    return found
