"""Two replicas on Ray beside one runtime: tokens computed, answers, the way of a token, and a replica that is killed.

Prompts have four prefixes. A prefix is computed once per replica that gets it, so the replicas together should compute
what one runtime with one cache computes.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import graftlm as gl
from bench.harness import Options, Row
from graftlm.core.request import Completion, Request

PREFIXES = [f"House {name}. " + "Keep to the rules of this house. " * 40 for name in "abcd"]
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
KILLED_AFTER_S = (0.0, 0.02, 0.1, 0.3, 1.0)
ENDS_S = 300.0


def run(options: Options) -> Sequence[Row]:
    prompts = [f"{head}Question {i}?" for i in range(options.choose(4, 16)) for head in PREFIXES]
    with gl.Runtime("sprout", dtype="float32") as one:
        expected = [answer.token_ids for answer in one.generate(prompts, **GREEDY)]
        alone = one.stats().computed_tokens
        with gl.Runtime("sprout", dtype="float32", engine="ray", replicas=2) as two:
            answers = [answer.token_ids for answer in two.generate(prompts, **GREEDY)]
            shared = two.stats().computed_tokens
            ways = [_way_ms(one, two) for _ in range(options.choose(20, 60))]
            equal, ended, answered, times = 0, 0, 0, options.choose(KILLED_AFTER_S[1::2], KILLED_AFTER_S)
            for after_s in times:
                done = _killed(two, prompts, after_s)
                ended += len(done)
                answered += sum(isinstance(one, Completion) for one in done)
                equal += sum(
                    isinstance(one, Completion) and one.token_ids == ids
                    for one, ids in zip(done, expected, strict=True)
                )
            deaths = two.stats().restarts
    assert deaths == len(times), f"{deaths} replicas died of {len(times)}"
    num = len(times) * len(prompts)
    ways.sort()
    same = sum(a == b for a, b in zip(answers, expected, strict=True)) / len(prompts)
    more = 100 * (shared / alone - 1)
    what = f"{len(prompts)} prompts with 4 prefixes, 2 replicas"
    return [
        Row("replicas", f"{what}: computed tokens beside one cache", more, "% more", floor=2, at_most=True),
        Row("replicas", f"{what}: float32 answers equal to one runtime's", 100 * same, "%", floor=100),
        Row(
            "replicas",
            "one token above in process",
            statistics.median(ways),
            "ms",
            floor=4,
            at_most=True,
            low=ways[0],
            high=ways[-1],
        ),
        Row("replicas", f"kill -9 at {len(times)} moments: requests that ended", 100 * ended / num, "%", floor=100),
        Row("replicas", "answered", 100 * answered / num, "%", floor=100),
        Row("replicas", "answered as without", 100 * equal / num, "%", floor=100),
    ]


def _way_ms(one: gl.Runtime, two: gl.Runtime) -> float:
    """Return the extra milliseconds of a token from a replica beside one in this process."""

    def token_ms(runtime: gl.Runtime) -> float:
        started = time.perf_counter()
        runtime.generate("Mara is", max_tokens=1)
        return 1e3 * (time.perf_counter() - started)

    return token_ms(two) - token_ms(one)


def _killed(runtime: gl.Runtime, prompts: list[str], after_s: float) -> list[Completion | BaseException]:
    """Return the outcomes of requests during which one replica is killed; wait for its replacement."""
    engine: Any = runtime.load()._thread.engine
    runtime.clear_cache()
    futures: list[Future[Completion]] = runtime.submit_many([Request(p, gl.SamplingParams(**GREEDY)) for p in prompts])
    time.sleep(after_s)
    os.kill(next(iter(engine.members.values())).pid, signal.SIGKILL)
    done = [future.exception(ENDS_S) or future.result() for future in futures]
    end_s = time.monotonic() + ENDS_S
    while runtime.stats().replicas < 2:
        assert time.monotonic() < end_s, "no other replica was started"
        time.sleep(0.1)
    return done
