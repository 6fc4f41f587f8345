"""python -m bench runtime soak --seconds N: a mixed load with faults, and the laws that must hold after it.

Threads and an event loop send every kind of request to one runtime whose KV pool is a fifth of the load, so that
cached prefixes are evicted and running requests retracted: greedy, sampled, constrained, scored, streamed, cancelled,
timed out, too long, wrong. Steps, kernels, allocations, compilations and detokenizers fail now and then, and so do
matchers and listeners of single requests. Every request must end, each answer must be the one that the request gets
alone, slots must be conserved, memory must stay flat, and no thread may be left.

Memory is that of the process, without what the C library holds free, which the engine gives back whenever it is idle.
The loops of grammars are loaded, and what oneDNN keeps for each number of rows is made, before the load begins: a
bounded cache that fills is no leak. For the same reason the C library has one arena for all threads, not one for each,
whose gaps grow for an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import psutil
import torch

from graftlm import (
    CacheConfig,
    ConfigError,
    EngineError,
    Request,
    RequestTimeout,
    RequestTooLong,
    Runtime,
    SamplingParams,
)
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.cache import _shared as grammars
from graftlm.core.scheduling import step_loop
from graftlm.kernels.cpu.linear.packed_linear import num_rows_multiplied
from tests.faults import InjectedExit, InjectedFault, failing
from tests.models import byte_tokenizer, tiny_model

NUM_THREADS = 16
NUM_TASKS = 8
POOL_TOKENS = 480
CROWD_EVERY_S = 5.0
PATIENCE_S = 60.0
"""Seconds after which an open request counts as hung."""

MEMORY_GROWTH = 0.01
"""Allowed growth of memory after the first tenth of the run, as a share."""
WHOLE_RUN = 100_000
MEMORY_SLACK = 4_000_000
"""Additional allowed growth, in bytes, in short runs, whose first tenth does not cover all kinds of requests."""

_M_ARENA_MAX = -8  # of malloc.h


class Fault(NamedTuple):
    """A method that raises at each n-th call. of: whose it is, by the engine"""

    of: Callable[[Any], Any]
    name: str
    every: int
    kind: type[BaseException] = InjectedFault


FAULTS = {
    "step": Fault(lambda engine: engine.runner, "forward", 1301),
    "step as one compiled call": Fault(lambda engine: engine.runner._stack, "run", 1103),
    "layout of a step": Fault(lambda engine: step_loop, "build_plan", 1201, InjectedExit),
    "sampler": Fault(lambda engine: engine.sampler, "sample", 1801, InjectedExit),
    "allocation of KV": Fault(lambda engine: engine.cache.pool, "allocate", 499),
    "detokenizer": Fault(lambda engine: engine.writer.tokenizer, "detokenizer", 211),
    "compilation": Fault(lambda engine: grammars, "_compiler", 11),
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {"regex": "[a-f]{4,9}"},
    {"choices": ("north", "north-east", "south")},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}},
]


class Raising:
    """A constraint of a plugin whose matcher raises."""

    finished = accepting = False

    def matcher(self) -> Raising:
        return self

    def fill_mask(self, row: Any) -> bool:
        raise ValueError("a plugin's matcher")

    def advance(self, ids: Sequence[int]) -> int:
        return len(ids)

    def rollback(self, n: int) -> None: ...

    def forced(self, context: Sequence[int]) -> list[int]:
        return []

    def min_tokens_to_accept(self) -> int:
        return 0


class Soak:
    """One runtime, its requests and their outcomes."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        dice = random.Random(0)
        starts = [[dice.randrange(3, 250) for _ in range(n)] for n in (5, 60, 90)]
        self.prompts = [dice.choice(starts) + [dice.randrange(3, 250) for _ in range(i % 30 + 1)] for i in range(48)]
        self.options = [GREEDY | CONSTRAINTS[i % len(CONSTRAINTS)] for i in range(len(self.prompts))]
        self.sent = 0
        pairs = zip(self.prompts, self.options, strict=True)
        self.answers = [runtime.generate(prompt, **options).token_ids for prompt, options in pairs]
        long = SamplingParams.from_options(**GREEDY | {"max_tokens": 160})
        self.crowd = [Request([dice.randrange(3, 250) for _ in range(60)], long) for _ in range(3)]
        self.crowd_answers = [runtime.submit(request).result().token_ids for request in self.crowd]
        self._fill_caches(dice)
        self.ended: Counter[str] = Counter()
        self.hung = 0
        self.may_start = threading.Event()
        self.may_start.set()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def _fill_caches(self, dice: random.Random) -> None:
        """Load the loops of grammars; run steps of every number of rows that oneDNN is given: prompts and batches."""
        jit.wait()
        for num_rows in sorted({num_rows_multiplied(n) for n in range(1, POOL_TOKENS - 16)}):
            self.runtime.generate([dice.randrange(3, 250) for _ in range(num_rows)], max_tokens=1)
        for size in range(1, NUM_THREADS + 1):
            self.runtime.generate([[dice.randrange(3, 250), 5] for _ in range(size)], **GREEDY | {"max_tokens": 2})

    def one(self, dice: random.Random) -> None:
        """Send one request of a random kind and see it through."""
        self.may_start.wait()
        kind = dice.choice(list(KINDS))
        self.see_through(kind, lambda: KINDS[kind](self, dice))

    def see_through(self, kind: str, send: Callable[[], str | Exception | None]) -> None:
        self.begin()
        try:
            self.count(kind, send())
        except Exception as error:
            self.count(kind, error)

    def begin(self) -> None:
        with self._lock:
            self.sent += 1

    def count(self, kind: str, outcome: str | Exception | None) -> None:
        """Record the end of a request; `outcome` is the error, None without one."""
        faulty = isinstance(outcome, EngineError) and isinstance(outcome.__cause__, InjectedFault | InjectedExit)
        with self._lock:
            self.ended[kind if outcome is None else "ended by a fault" if faulty else "wrong"] += 1
            if isinstance(outcome, TimeoutError) and not isinstance(outcome, RequestTimeout):
                self.hung += 1
            elif outcome is not None and not faulty:
                self.wrong.append(f"{kind}: {outcome if isinstance(outcome, str) else repr(outcome)}")

    def check(self, index: int, ids: list[int]) -> str | None:
        return None if ids == self.answers[index] else f"request {index} got {ids}, alone it gets {self.answers[index]}"

    def answer(self, dice: random.Random) -> str | None:
        i = dice.randrange(len(self.prompts))
        request = Request(self.prompts[i], SamplingParams.from_options(**self.options[i]))
        return self.check(i, self.runtime.submit(request).result(PATIENCE_S).token_ids)

    def crowd_in(self, goes_on: Callable[[], bool]) -> None:
        """Every few seconds, send requests that outgrow the pool together; nobody else starts one meanwhile."""
        while goes_on():
            self.may_start.clear()
            try:
                self.see_through("crowd", self.crowded)
            finally:
                self.may_start.set()
            time.sleep(CROWD_EVERY_S)

    def crowded(self) -> str | None:
        done = [future.result(PATIENCE_S).token_ids for future in self.runtime.submit_many(self.crowd)]
        return None if done == self.crowd_answers else f"a crowd got {done}, alone they get {self.crowd_answers}"

    def streamed(self, dice: random.Random) -> str | None:
        i = dice.randrange(len(self.prompts))
        with self.runtime.stream(self.prompts[i], **self.options[i]) as chunks:
            return self.check(i, [token for chunk in chunks for token in chunk.token_ids])

    def closed_stream(self, dice: random.Random) -> None:
        with self.runtime.stream(dice.choice(self.prompts), max_tokens=60, ignore_eos=True) as chunks:
            for _ in range(dice.randint(0, 3)):
                next(chunks, None)

    def sampled(self, dice: random.Random) -> None:
        params = SamplingParams(n=dice.randint(1, 3), max_tokens=dice.randint(1, 16), top_p=0.9, ignore_eos=True)
        self.runtime.submit(Request(dice.choice(self.prompts), params)).result(PATIENCE_S)

    def scored(self, dice: random.Random) -> None:
        self.runtime.submit(Request(dice.choice(self.prompts), score_ids=[5, 6, 7])).result(PATIENCE_S)

    def cancelled(self, dice: random.Random) -> None:
        future = self.runtime.submit(Request(dice.choice(self.prompts), SamplingParams(max_tokens=60, ignore_eos=True)))
        time.sleep(dice.random() / 100)
        future.cancel()
        with suppress(CancelledError):
            future.result(PATIENCE_S)

    def timed_out(self, dice: random.Random) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, timeout=0.001)
        expect(RequestTimeout, self.runtime, Request(dice.choice(self.prompts), params))

    def too_long(self, dice: random.Random) -> None:
        expect(RequestTooLong, self.runtime, Request(dice.choice(self.prompts) * 200, SamplingParams(max_tokens=4)))

    def bad_input(self, dice: random.Random) -> None:
        params = SamplingParams(constraint=dice.choice([object(), 5]), max_tokens=4)
        expect(ConfigError, self.runtime, Request(dice.choice(self.prompts), params))

    def compiled(self, dice: random.Random) -> str | None:
        if dice.random() < 0.005:
            grammars.clear()
        pattern = f"[a-f]{{3}}{dice.randrange(1000)}"
        params = SamplingParams(regex=pattern, max_tokens=20)
        done = self.runtime.submit(Request(dice.choice(self.prompts), params)).result(PATIENCE_S)
        return None if re.fullmatch(pattern, done.text) else f"{done.text!r} is not of {pattern!r}"

    def raising_matcher(self, dice: random.Random) -> Exception | None:
        params = SamplingParams(constraint=Raising(), max_tokens=20, ignore_eos=True)
        error = expect(EngineError, self.runtime, Request(dice.choice(self.prompts), params))
        return None if isinstance(error.__cause__, ValueError) else error

    def raising_listener(self, dice: random.Random) -> Exception | None:
        def fail(chunk: Any) -> None:
            raise KeyError("a listener")

        params = SamplingParams(max_tokens=20, ignore_eos=True)
        error = expect(Exception, self.runtime, Request(dice.choice(self.prompts), params, stream=True, on_chunk=fail))
        return None if isinstance(error, KeyError) else error

    async def awaited(self, dice: random.Random) -> None:
        """Send one request on an event loop, and perhaps cancel its task."""
        while not self.may_start.is_set():
            await asyncio.sleep(0.01)
        i = dice.randrange(len(self.prompts))
        self.begin()
        task = asyncio.ensure_future(self.runtime.agenerate(self.prompts[i], **self.options[i]))
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() / 50)
            task.cancel()
        try:
            self.count("awaited", self.check(i, (await asyncio.wait_for(task, PATIENCE_S)).token_ids))
        except asyncio.CancelledError:
            self.count("awaited, cancelled", None)
        except Exception as error:
            self.count("awaited", error)


KINDS: dict[str, Callable[[Soak, random.Random], str | Exception | None]] = {
    "answer": Soak.answer,
    "streamed": Soak.streamed,
    "closed stream": Soak.closed_stream,
    "sampled": Soak.sampled,
    "scored": Soak.scored,
    "compiled": Soak.compiled,
    "cancelled": Soak.cancelled,
    "timed out": Soak.timed_out,
    "too long": Soak.too_long,
    "bad input": Soak.bad_input,
    "raising matcher": Soak.raising_matcher,
    "raising listener": Soak.raising_listener,
}


def expect(kind: type[Exception], runtime: Runtime, request: Request) -> Exception:
    """Return the error that the request ends with, of this kind; raises any other."""
    try:
        done = runtime.submit(request).result(PATIENCE_S)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, the request gave {done}")


def soak(seconds: float, num_requests: int | None = None) -> dict[str, Any]:
    """Run the load for a time, or until a number of requests have been sent.

    -> what became of the requests, and `broken`: the laws that did not hold
    """
    before = set(threading.enumerate())
    process = psutil.Process()
    memory: list[int] = []
    config = CacheConfig(max_tokens=POOL_TOKENS)
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), cache=config, dtype="float32", max_batch=16) as runtime:
        load = Soak(runtime.load())
        stop = time.monotonic() + seconds

        def goes_on() -> bool:
            return time.monotonic() < stop and (num_requests is None or load.sent < num_requests)

        def call(seed: int) -> None:
            dice = random.Random(seed)
            while goes_on():
                load.one(dice)

        async def tasks() -> None:
            async def go_on(seed: int) -> None:
                dice = random.Random(seed)
                while goes_on():
                    await load.awaited(dice)

            await asyncio.gather(*(go_on(1000 + i) for i in range(NUM_TASKS)))

        callers = [threading.Thread(target=call, args=(seed,), daemon=True) for seed in range(NUM_THREADS)]
        callers.append(threading.Thread(target=lambda: asyncio.run(tasks()), daemon=True))
        callers.append(threading.Thread(target=load.crowd_in, args=(goes_on,), daemon=True))
        engine: Any = runtime._thread.engine
        with ExitStack() as faults:
            evicted = faults.enter_context(counted(engine.cache.tree, "evict"))
            failed = {
                part: faults.enter_context(failing(fault.of(engine), fault.name, every=fault.every, kind=fault.kind))
                for part, fault in FAULTS.items()
            }
            for caller in callers:
                caller.start()
            tenths = 0
            while goes_on():
                time.sleep(0.05)
                passed = 1 - (stop - time.monotonic()) / seconds
                if num_requests is not None:
                    passed = max(passed, load.sent / num_requests)
                if passed * 10 >= tenths + 1:
                    tenths += 1
                    gc.collect()
                    with suppress(OSError, AttributeError):
                        ctypes.CDLL(None).malloc_trim(0)
                    memory.append(process.memory_info().rss)
            for caller in callers:
                caller.join(2 * PATIENCE_S)
        hung = sum(caller.is_alive() for caller in callers) + load.hung
        runtime._thread.call(lambda engine: engine.check_integrity())
        stats = runtime.stats()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("graftlm")]
    left = [name for name in left if not name.startswith(("graftlm grammar", "graftlm slow grammar"))]  # of the process
    growth = memory[-1] - memory[0]
    may_grow = MEMORY_GROWTH * memory[0] + (MEMORY_SLACK if load.sent < WHOLE_RUN else 0)
    lost = load.sent - load.ended.total()
    laws = {
        f"{hung} requests or callers hang": hung > 0,
        f"{lost} requests were lost": lost != 0,
        f"{len(load.wrong)} requests ended wrongly: {load.wrong[:3]}": bool(load.wrong),
        f"{stats.slots_in_use} slots are in use": stats.slots_in_use > 0,
        "slots were lost": stats.slots_free + stats.slots_cached != stats.slots_total,
        f"memory grew by {growth:,} bytes after the first tenth": growth > may_grow,
        f"threads are left: {left}": bool(left),
        "nothing was retracted": stats.retracted == 0,
        "nothing was evicted": not evicted,
        f"no fault was met at: {[part for part, calls in failed.items() if not calls]}": not all(failed.values()),
    }
    return {
        "requests": load.sent,
        "hung": hung,
        "lost": lost,
        "wrong": len(load.wrong),
        "ended": dict(load.ended),
        "steps": stats.steps,
        "faults": {part: len(calls) for part, calls in failed.items()},
        "retracted": stats.retracted,
        "evictions": len(evicted),
        "memory_bytes": memory,
        "growth": round(growth / memory[0], 4),
        "broken": [law for law, is_broken in laws.items() if is_broken],
    }


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[int]]:
    """Record the lengths of the results of `owner.name`."""
    original, lengths = getattr(owner, name), list[int]()

    def called(*args: Any) -> Any:
        result = original(*args)
        lengths.extend([len(result)] if result else [])
        return result

    setattr(owner, name, called)
    try:
        yield lengths
    finally:
        delattr(owner, name)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench runtime soak")
    parser.add_argument("--seconds", type=float, default=60.0, help="end after so long")
    parser.add_argument("--requests", type=int, help="end once so many have been sent")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is too small for more, whose waiting would cost the callers
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    result = soak(options.seconds, options.requests)
    print(json.dumps(result, indent=2))
    return 1 if result["broken"] else 0
