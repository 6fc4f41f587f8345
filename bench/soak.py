"""python -m bench runtime soak --seconds N: a mixed load with faults, and the laws that must hold after it.

Threads and an event loop send every kind of request to one runtime whose KV pool is a fifth of the load: greedy,
sampled, constrained, scored, streamed, cancelled, timed out, too long, wrong. Steps fail now and then, and so do
matchers and listeners of single requests. Every request must end, each answer must be the one that the request gets
alone, slots must be conserved, memory must stay flat, and no thread may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import psutil

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
from tests.faults import InjectedFault, failing
from tests.models import byte_tokenizer, tiny_model

NUM_THREADS = 8
NUM_TASKS = 4
POOL_TOKENS = 400
STEPS_PER_FAULT = 60
PATIENCE_S = 60.0
"""A request that has not ended after so long counts as hung."""

MEMORY_GROWTH = 0.01
MEMORY_SLACK = 8_000_000
"""What memory may grow by after the first tenth of the time: a share of it, and bytes for the allocator's own noise."""

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
    """One runtime, the requests it is sent, and what became of them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        dice = random.Random(0)
        starts = [[dice.randrange(3, 250) for _ in range(n)] for n in (5, 60, 90)]
        self.prompts = [dice.choice(starts) + [dice.randrange(3, 250) for _ in range(i % 30 + 1)] for i in range(48)]
        self.options = [GREEDY | CONSTRAINTS[i % len(CONSTRAINTS)] for i in range(len(self.prompts))]
        pairs = zip(self.prompts, self.options, strict=True)
        self.answers = [runtime.generate(prompt, **options).token_ids for prompt, options in pairs]
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def one(self, dice: random.Random) -> None:
        """Send one request of a random kind and see it through."""
        kind = dice.choice(list(KINDS))
        try:
            outcome = KINDS[kind](self, dice)
        except EngineError as error:
            outcome = "fault" if isinstance(error.__cause__, InjectedFault) else f"{kind}: {error!r}"
        except Exception as error:
            outcome = f"{kind}: {error!r}"
        self.count(kind, outcome)

    def count(self, kind: str, outcome: str | None) -> None:
        with self._lock:
            self.ended[kind if outcome is None else "ended by a fault" if outcome == "fault" else "wrong"] += 1
            if outcome not in (None, "fault"):
                self.wrong.append(str(outcome))

    def check(self, index: int, ids: list[int]) -> str | None:
        return None if ids == self.answers[index] else f"request {index} got {ids}, alone it gets {self.answers[index]}"

    def answer(self, dice: random.Random) -> str | None:
        i = dice.randrange(len(self.prompts))
        request = Request(self.prompts[i], SamplingParams.from_options(**self.options[i]))
        return self.check(i, self.runtime.submit(request).result(PATIENCE_S).token_ids)

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

    def raising_matcher(self, dice: random.Random) -> str | None:
        params = SamplingParams(constraint=Raising(), max_tokens=20, ignore_eos=True)
        cause = expect(EngineError, self.runtime, Request(dice.choice(self.prompts), params)).__cause__
        return None if isinstance(cause, ValueError) else "fault" if isinstance(cause, InjectedFault) else repr(cause)

    def raising_listener(self, dice: random.Random) -> str | None:
        def fail(chunk: Any) -> None:
            raise KeyError("a listener")

        params = SamplingParams(max_tokens=20, ignore_eos=True)
        error = expect(Exception, self.runtime, Request(dice.choice(self.prompts), params, stream=True, on_chunk=fail))
        if isinstance(error, KeyError):
            return None
        return "fault" if isinstance(error.__cause__, InjectedFault) else repr(error)

    async def awaited(self, dice: random.Random) -> None:
        """Send one request on an event loop, and perhaps cancel its task."""
        i = dice.randrange(len(self.prompts))
        task = asyncio.ensure_future(self.runtime.agenerate(self.prompts[i], **self.options[i]))
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() / 50)
            task.cancel()
        try:
            self.count("awaited", self.check(i, (await asyncio.wait_for(task, PATIENCE_S)).token_ids))
        except asyncio.CancelledError:
            self.count("awaited, cancelled", None)
        except Exception as error:
            self.count("awaited", "fault" if isinstance(error.__cause__, InjectedFault) else f"awaited: {error!r}")


KINDS: dict[str, Callable[[Soak, random.Random], str | None]] = {
    "answer": Soak.answer,
    "streamed": Soak.streamed,
    "closed stream": Soak.closed_stream,
    "sampled": Soak.sampled,
    "scored": Soak.scored,
    "cancelled": Soak.cancelled,
    "timed out": Soak.timed_out,
    "too long": Soak.too_long,
    "bad input": Soak.bad_input,
    "raising matcher": Soak.raising_matcher,
    "raising listener": Soak.raising_listener,
}


def expect(kind: type[Exception], runtime: Runtime, request: Request) -> Exception:
    """The error that the request ends with, of this kind; raises any other."""
    try:
        done = runtime.submit(request).result(PATIENCE_S)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, the request gave {done}")


def soak(seconds: float) -> dict[str, Any]:
    """Run the load for so long. -> what became of the requests, and `broken`: the laws that did not hold"""
    before = set(threading.enumerate())
    process = psutil.Process()
    memory: list[int] = []
    config = CacheConfig(max_tokens=POOL_TOKENS)
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), cache=config, dtype="float32", max_batch=8) as runtime:
        load = Soak(runtime.load())
        stop = time.monotonic() + seconds

        def call(seed: int) -> None:
            dice = random.Random(seed)
            while time.monotonic() < stop:
                load.one(dice)

        async def tasks() -> None:
            async def go_on(seed: int) -> None:
                dice = random.Random(seed)
                while time.monotonic() < stop:
                    await load.awaited(dice)

            await asyncio.gather(*(go_on(1000 + i) for i in range(NUM_TASKS)))

        callers = [threading.Thread(target=call, args=(seed,), daemon=True) for seed in range(NUM_THREADS)]
        callers.append(threading.Thread(target=lambda: asyncio.run(tasks()), daemon=True))
        engine: Any = runtime._thread.engine
        with failing(engine.runner, "forward", every=STEPS_PER_FAULT) as faults:
            for caller in callers:
                caller.start()
            for _ in range(10):
                time.sleep(max(seconds / 10, 0.01))
                gc.collect()
                memory.append(process.memory_info().rss)
            for caller in callers:
                caller.join(2 * PATIENCE_S)
        hung = sum(caller.is_alive() for caller in callers)
        runtime._thread.call(lambda engine: engine.check_integrity())
        stats = runtime.stats()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("graftlm")]
    left = [name for name in left if not name.startswith(("graftlm-grammar", "graftlm grammar"))]  # of the process
    growth = memory[-1] - memory[0]
    laws = {
        f"{hung} callers hang": hung > 0,
        f"{len(load.wrong)} requests ended wrongly: {load.wrong[:3]}": bool(load.wrong),
        f"{stats.slots_in_use} slots are in use": stats.slots_in_use > 0,
        "slots were lost": stats.slots_free + stats.slots_cached != stats.slots_total,
        f"memory grew by {growth:,} bytes": growth > MEMORY_GROWTH * memory[0] + MEMORY_SLACK,
        f"threads are left: {left}": bool(left),
        "no step failed": not faults,
    }
    return {
        "requests": load.ended.total(),
        "ended": dict(load.ended),
        "steps": stats.steps,
        "failed_steps": len(faults),
        "retracted": stats.retracted,
        "memory_bytes": memory,
        "broken": [law for law, is_broken in laws.items() if is_broken],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench runtime soak")
    parser.add_argument("--seconds", type=float, default=60.0)
    result = soak(parser.parse_args(arguments).seconds)
    print(json.dumps(result, indent=2))
    return 1 if result["broken"] else 0
