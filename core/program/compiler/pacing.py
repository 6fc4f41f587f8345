"""Pacing: model calls of planned runs, depth first within the KV pool; branches that are done give their KV back."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from graftlm.core.program.compiler.plan import Budget, CallTree, Open, Plan, pool_of, usable_tokens
from graftlm.core.program.compiler.trace import DEFAULT_ANSWER, common_length
from graftlm.core.request import Completion, Request

if TYPE_CHECKING:
    from graftlm.core.program.branch import Branch
    from graftlm.core.program.expression import Expression
    from graftlm.core.program.interpreter import Call
    from graftlm.core.program.run import Run

Place = tuple[int, tuple[int, ...], int]
"""A call: the number of its run, the path of its branch, its number there. Sorted, calls are in depth-first order."""


NUM_SIBLINGS = 8
"""Open branches of a fork that are compared with one that is done: the texts that they begin with in common stay."""


@dataclass(eq=False)
class Asked:
    """A call of a planned run.

    after    the call that it continues; None if there is none, or an unplanned one
    missing  calls that continue this one and have not returned their KV
    tokens   what its KV counts for in the budget
    kept     token ids of the sequences whose KV it may leave in the cache
    length   tokens of the sequence that later calls continue
    """

    call: Open
    branch: Branch
    after: Asked | None
    missing: int
    tokens: int = 0
    kept: list[np.ndarray] = field(default_factory=list)
    length: int = 0
    done: bool = False

    @property
    def place(self) -> Place:
        place: Place = self.call.place
        return place


class Pacer:
    """Starts the calls of all planned runs on one backend. Everything but `end` runs on the interpreter's thread."""

    def __init__(self, backend: Any, pool: int) -> None:
        self.budget = Budget(pool)
        self._drop = getattr(backend, "drop_cached", None)
        self._due: dict[Place, tuple[Asked, Call]] = {}
        self._asked: dict[Place, Asked] = {}
        self._prompts: defaultdict[Any, dict[Place, np.ndarray]] = defaultdict(dict)  # of open calls, by their fork
        self._posted = False

    def call(self, place: Place, tree: CallTree, branch: Branch, call: Call) -> None:
        """Take a call that is due; it starts when its KV fits."""
        asked = self._asked[place] = self._new(place, tree, branch, call)
        self.budget.add(asked.call)
        self._due[place] = asked, call
        if call.requests:
            self._prompts[_fork(place)][place] = call.requests[0].prompt.ids
        self._post(branch)

    def _post(self, branch: Branch) -> None:
        if not self._posted:
            self._posted = True
            branch.run.interpreter.post(self._start)

    def _start(self) -> None:
        """Start due calls in depth-first order, as far as the pool allows it; one at least if none runs."""
        self._posted = False
        for place in sorted(self._due):
            asked, call = self._due[place]
            if not self.budget.may_start(asked.call) and self.budget.running:
                return
            del self._due[place]
            self.budget.start(asked.call)
            asked.tokens = asked.call.tokens
            asked.branch.run.interpreter.call(replace(call, on_done=partial(self._done, asked, call)))

    def release_run(self, number: int) -> None:
        """Forget the calls of a run that is done, and the KV of its branches."""
        for place in [place for place in self._asked if place[0] == number]:
            asked = self._asked.pop(place)
            self.budget.end(asked.call)
            self._release(asked)
        for fork in [fork for fork in self._prompts if fork[0] == number]:
            del self._prompts[fork]
        for expected in [one for one in self.budget.open if one.place[0] == number]:
            self.budget.forget(expected)

    def _new(self, place: Place, tree: CallTree, branch: Branch, call: Call) -> Asked:
        number, path, index = place
        planned = tree.calls.get((path, index))
        if planned is None:
            tokens = max((_length(request) for request in call.requests), default=0)
            return Asked(Open(place, tokens, tokens), branch, None, 1)
        after = self._asked.get((number, *planned.after)) if planned.after is not None else None
        key = planned.key
        return Asked(Open(place, planned.tokens, tree.chain[key]), branch, after, len(tree.next[key]))

    def _done(self, asked: Asked, call: Call, future: Future[Any]) -> None:
        """Count the KV of a call that has ended, resume its branch, and start others once its forks are due."""
        budget, failed = self.budget, future.cancelled() or future.exception() is not None
        budget.end(asked.call)
        asked.done = True
        self._prompts[_fork(asked.place)].pop(asked.place, None)
        if not failed:
            self._count(asked, call.requests, future.result())
        if failed or not asked.missing:
            asked.missing = 0
            self._ended(asked)
        call.on_done(future)
        self._post(asked.branch)

    def _count(self, asked: Asked, requests: Sequence[Request], result: Any) -> None:
        prompt = requests[0].prompt.ids if requests else np.zeros(0, np.int32)
        if isinstance(result, Completion):
            answers = [one.token_ids for one in result.completions or [result]]
            asked.kept = [np.concatenate([prompt, np.asarray(ids, np.int32)]) for ids in answers]
            asked.length = len(asked.kept[0])
        else:
            asked.kept = [_scored(request) for request in requests]
            asked.length = len(prompt)
        if asked.after is not None and asked.after.kept:
            used = sum(len(ids) for ids in asked.kept) - len(asked.kept) * asked.after.length
            self.budget.live += max(used, 0) - asked.tokens
            asked.tokens = max(used, 0)

    def _ended(self, asked: Asked) -> None:
        """Return the KV of a call that nothing continues, and of those before it that then are at their end too."""
        one: Asked | None = asked
        while one is not None and one.done and one.missing <= 0:
            self._release(one)
            one = one.after
            if one is not None:
                one.missing -= 1

    def _release(self, asked: Asked) -> None:
        self.budget.live -= asked.tokens
        asked.tokens = 0
        kept, asked.kept = asked.kept, []
        if self._drop is None or asked.branch.parent is None:
            return  # what a run begins with may be what the next one begins with
        keep = asked.after.length if asked.after is not None else 0
        siblings = list(islice(self._prompts[_fork(asked.place)].values(), NUM_SIBLINGS))
        for ids in kept:
            self._drop(ids, max([keep, *(common_length(ids, prompt) for prompt in siblings)]))


def _fork(place: Place) -> tuple[int, tuple[int, ...]]:
    return place[0], place[1][:-1]


def _length(request: Request) -> int:
    sampling = request.sampling
    answer = len(request.score_ids or ()) or (sampling.max_tokens or DEFAULT_ANSWER) * sampling.n
    return len(request.prompt.ids) + answer


def _scored(request: Request) -> np.ndarray:
    return np.concatenate([request.prompt.ids, np.asarray(request.score_ids or [], np.int32)])


class PlanPacing:
    """Runs programs by a plan. One object serves all runs of the planned program, on any runtime."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._numbers: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
        self._calls: WeakKeyDictionary[Branch, int] = WeakKeyDictionary()

    def begin(self, run: Run) -> None:
        """Load the runtime, whose pool the plan has to fit."""
        if self._top(run) is run:
            load = getattr(run.backend, "load", None)
            if load is not None:
                load()
            _pacer(run.backend, self.plan)
            self._numbers[run] = next(_run_numbers)

    def appended(self, branch: Branch, part: Expression) -> None:
        """Do nothing: calls are ordered when they are due."""

    def reads(self, run: Run, name: str) -> None:
        """Do nothing: a read waits as without a plan."""

    def call(self, branch: Branch, call: Call) -> None:
        index = self._calls.get(branch, 0)
        self._calls[branch] = index + 1
        place = (self._numbers[self._top(branch.run)], branch.path, index)
        _pacer(branch.run.backend, self.plan).call(place, self.plan.tree, branch, call)

    def end(self, run: Run) -> None:
        number = self._numbers.pop(run, None)
        if number is not None:
            run.interpreter.post(partial(_pacer(run.backend, self.plan).release_run, number))

    def _top(self, run: Run) -> Run:
        while run.outer is not None and run.outer.pacing is self:
            run = run.outer
        return run


_run_numbers = itertools.count()
_pacers: WeakKeyDictionary[Any, Pacer] = WeakKeyDictionary()
_lock = threading.Lock()


def _pacer(backend: Any, plan: Plan) -> Pacer:
    """Return the pacer of a backend, made at its first planned run; the smallest pool of all plans holds."""
    with _lock:
        pools = [usable_tokens(pool) for pool in (pool_of(backend), plan.pool) if pool]
        pacer = _pacers.get(backend)
        if pacer is None:
            pacer = _pacers[backend] = Pacer(backend, min(pools, default=1 << 62))
        return pacer
