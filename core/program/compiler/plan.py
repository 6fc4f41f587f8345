"""Plan: the memory and the steps that a program needs, breadth first and depth first, computed from its traces."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.trace import Key, Trace, traces

if TYPE_CHECKING:
    from graftlm.core.program.compiler.pacing import PlanPacing
    from graftlm.core.program.program import Program

SPARE = 1 / 16
"""Share of the pool that a plan leaves free: slots are taken ahead of the tokens, and evicted in pieces."""


@dataclass(frozen=True)
class PlannedCall:
    """A model call: its own KV in tokens (new prompt tokens and its answer), its answer, the call that it continues.

    name   of its variable; None without one
    reads  True if its prompt may depend on an answer that the program's code has read
    """

    key: Key
    tokens: int
    answer: int
    after: Key | None
    name: str | None = None
    reads: bool = False


@dataclass(frozen=True)
class Course:
    """One order of the calls: the most tokens of KV that are needed at once, and the steps until the last answer."""

    peak_tokens: int
    steps: int


class CallTree:
    """The calls of a program by key, with their successors."""

    def __init__(self, calls: Iterable[PlannedCall]) -> None:
        self.calls = {call.key: call for call in calls}
        self.next: defaultdict[Key | None, list[Key]] = defaultdict(list)
        self._in_branch: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for call in self.calls.values():
            self.next[call.after].append(call.key)
            self._in_branch[call.key[0]] += 1

    @cached_property
    def chain(self) -> dict[Key, int]:
        """Tokens of the largest chain of calls from each call to an end, the call included."""
        found: dict[Key, int] = {}
        for key in sorted(self.calls, key=lambda key: (len(key[0]), key[1]), reverse=True):
            found[key] = self.calls[key].tokens + max((found.get(after, 0) for after in self.next[key]), default=0)
        return found

    @cached_property
    def total(self) -> int:
        """Tokens of all calls together."""
        return sum(call.tokens for call in self.calls.values())

    @cached_property
    def fan_out(self) -> int:
        """The most calls that continue one."""
        return max((len(after) for after in self.next.values()), default=0)

    @cached_property
    def depth(self) -> int:
        """Calls on the longest chain."""
        longest: dict[Key | None, int] = {None: 0}
        for key in sorted(self.calls, key=lambda key: (len(key[0]), key[1])):
            longest[key] = longest.get(self.calls[key].after, 0) + 1
        return max(longest.values())

    def is_last(self, key: Key) -> bool:
        """Return True if no other call follows in the call's branch."""
        return key[1] == self._in_branch[key[0]] - 1


class Open(NamedTuple):
    """A call that is due or running: its place in the depth-first order, its tokens, those of its largest chain."""

    place: tuple[Any, ...]
    tokens: int
    chain: int


class Budget:
    """The KV that running calls hold of a pool, and the calls that are due or running, depth first.

    live  tokens of KV that are needed now
    """

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.live = 0
        self.running: dict[tuple[Any, ...], Open] = {}
        self.open: list[Open] = []
        self._largest = 0  # chain of a call so far

    def add(self, call: Open) -> None:
        """Note a call that is due, or will be soon."""
        self._largest = max(self._largest, call.chain)
        index = bisect_left(self.open, call)
        if index == len(self.open) or self.open[index] != call:
            self.open.insert(index, call)

    def may_start(self, call: Open) -> bool:
        """Return True if every due and running call can still end, one after the other, once `call` runs."""
        free = self.pool - self.live - call.tokens
        if free < 0 or free >= self._largest:
            return free >= 0
        for other in self.open:
            started = other.place in self.running or other == call
            if other.chain - (other.tokens if started else 0) > free:
                return False
            free += other.tokens if started else 0  # its KV returns with its end
        return True

    def start(self, call: Open) -> None:
        self.running[call.place] = call
        self.live += call.tokens

    def end(self, call: Open) -> None:
        """Note that a call is done; its KV stays until `live` is lowered."""
        self.running.pop(call.place, None)
        self.forget(call)

    def forget(self, call: Open) -> None:
        index = bisect_left(self.open, call)
        if index < len(self.open) and self.open[index] == call:
            del self.open[index]


def course(tree: CallTree, pool: int | None) -> Course:
    """Simulate the calls: all that are due at once (None), or depth first within a pool of `pool` tokens.

    A call takes a step for its prompt and one for each token of its answer. Breadth first, KV stays until the end, as
    in a prefix cache; depth first, a branch returns its KV when its last call and its forks have ended.
    """
    budget = Budget(tree.total if pool is None else pool)
    calls = {key: Open(key, call.tokens, tree.chain[key]) for key, call in tree.calls.items()}
    due = sorted(tree.next[None])
    running: list[tuple[int, Key]] = []
    waits = {key: len(after) for key, after in tree.next.items() if key is not None}
    now = peak = 0
    for key in due:
        budget.add(calls[key])
    while due or running:
        while due and (pool is None or budget.may_start(calls[due[0]]) or not running):
            key = due.pop(0)
            budget.start(calls[key])
            heapq.heappush(running, (now + 1 + tree.calls[key].answer, key))
        peak, now = max(peak, budget.live), running[0][0]
        while running and running[0][0] == now:
            _, key = heapq.heappop(running)
            budget.end(calls[key])
            for after in tree.next[key]:
                insort(due, after)
                budget.add(calls[after])
            ended: Key | None = key if pool is not None else None
            while ended is not None and not waits.get(ended, 0):
                budget.live -= tree.calls[ended].tokens
                ended = tree.calls[ended].after
                if ended is not None:
                    waits[ended] -= 1
    return Course(peak, now)


@dataclass(frozen=True)
class Plan:
    """The KV and the steps of a program, from traces over sample inputs. `program` runs it by the plan.

    pool     KV slots that the plan may use; None if the runtime's pool is not known before it is loaded
    notes    the parts of the plan that are estimates, with the reason of each
    """

    source: Program
    calls: tuple[PlannedCall, ...]
    num_inputs: int
    pool: int | None
    notes: tuple[str, ...] = ()

    @cached_property
    def tree(self) -> CallTree:
        return CallTree(self.calls)

    @cached_property
    def breadth_first(self) -> Course:
        return course(self.tree, None)

    @cached_property
    def depth_first(self) -> Course:
        """The course within the pool; within the least memory that any order needs if the pool is larger or unknown."""
        least = max((self.tree.chain[key] for key in self.tree.next[None]), default=0)
        usable = None if self.pool is None else usable_tokens(self.pool)
        fits = usable is None or usable >= self.breadth_first.peak_tokens
        return course(self.tree, least if fits or usable is None else usable)

    @property
    def order(self) -> Literal["breadth first", "depth first"]:
        """The order in which `program` submits calls."""
        if self.pool is None or self.breadth_first.peak_tokens <= usable_tokens(self.pool):
            return "breadth first"
        return "depth first"

    @property
    def peak_tokens(self) -> int:
        """Tokens of KV that the planned order needs at once."""
        return (self.depth_first if self.order == "depth first" else self.breadth_first).peak_tokens

    @property
    def steps(self) -> int:
        """Steps of the planned order, at most: answers may end before their limit."""
        return (self.depth_first if self.order == "depth first" else self.breadth_first).steps

    @cached_property
    def program(self) -> Program:
        """The program, run by this plan: depth first where its KV would not fit otherwise; dead branches give back."""
        return self.source._derived(plan=self)

    @cached_property
    def pacing(self) -> PlanPacing:
        """The order of the calls of `program`."""
        from graftlm.core.program.compiler.pacing import PlanPacing

        return PlanPacing(self)

    def svg(self) -> str:
        """Return a drawing of the calls: a tree from the prompt to the last answers, as the text of an SVG file."""
        from graftlm.core.program.compiler.drawing import tree_svg

        return tree_svg(self.tree)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.source, self.calls, self.num_inputs, self.pool, self.notes)

    def __str__(self) -> str:
        tree = self.tree
        lines = [
            f"plan of {self.source._name.lstrip('_')} over {_count(self.num_inputs, 'input')}: "
            f"{_count(len(tree.calls), 'call')}, {tree.depth} after one another, at most {tree.fan_out} from one",
        ]
        for name, one in (("breadth first", self.breadth_first), ("depth first", self.depth_first)):
            lines.append(f"  {name:13}  {one.peak_tokens:>8,} tokens at once  {one.steps:>8,} steps")
        pool = "not known before the runtime is loaded" if self.pool is None else f"{self.pool:,} tokens"
        lines.append(f"  pool {pool}: {self.order}")
        if self.pool is not None and self.order == "depth first" and self.peak_tokens > usable_tokens(self.pool):
            lines.append("  no order fits: some KV will be computed again; raise CacheConfig.max_tokens")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def usable_tokens(pool: int) -> int:
    """Return the part of a pool that a plan may fill."""
    return pool - int(pool * SPARE)


def make_plan(program: Program, inputs: Iterable[Mapping[str, Any]], runtime: Any, pool: int | None) -> Plan:
    """Trace `program` over `inputs` and plan it for `pool` KV slots; None reads the runtime's."""
    found = traces(program, inputs, runtime)
    if pool is None:
        pool = pool_of(program._run_of(runtime, {}).backend)
    elif not isinstance(pool, int) or isinstance(pool, bool) or pool < 1:
        raise ConfigError(f"pool is {pool!r}; it must be a whole number of KV slots, at least 1, or None")
    merged: dict[Key, PlannedCall] = {}
    for trace in found:
        for key, call in trace.calls.items():
            tokens = call.new_tokens + call.answer
            before = merged.get(key)
            if before is not None:
                tokens = max(tokens, before.tokens)
            after = call.after if call.after in trace.calls else None
            answer = max(call.answer, before.answer if before else 0)
            merged[key] = PlannedCall(key, tokens, answer, after, call.name, bool(call.reads))
    return Plan(program, tuple(merged.values()), len(found), pool, tuple(_notes(found)))


def pool_of(backend: Any) -> int | None:
    """Return the KV slots of a runtime; None if they are not known yet."""
    slots = backend.stats().slots_total if hasattr(backend, "stats") else 0
    cache = getattr(getattr(backend, "config", None), "cache", None)
    return slots or getattr(cache, "max_tokens", None)


def _notes(found: list[Trace]) -> list[str]:
    notes = []
    shapes = {frozenset(trace.calls) for trace in found}
    if len(shapes) > 1:
        notes.append("inputs differ in their calls; the plan has the calls of all")
    reading = {name: call for trace in found for call in trace.calls.values() for name in call.reads}
    if reading:
        first = next(iter(reading))
        num = max(sum(bool(call.reads) for call in trace.calls.values()) for trace in found)
        notes.append(
            f"{_count(num, 'call')} after the program reads {first}: prompts and forks there may depend on the answer, "
            "so these figures are estimates"
        )
    for number, trace in enumerate(found):
        if trace.stopped is not None:
            reason = f"{type(trace.stopped).__name__}: {trace.stopped}"
            notes.append(
                f"input {number} is traced up to call {len(trace.calls)}: its code raised {reason}, because an answer "
                "was a stand-in; the calls after it are not planned"
            )
    return notes


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
