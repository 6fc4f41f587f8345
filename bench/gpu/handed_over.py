"""The cost of submitting prompts as text, as messages or through a framework, beside the same prompts as ids.

256 requests of a system prompt of 2,190 tokens and 40 own tokens, 16 new ones each; 256 cold texts of 512 tokens; 64
chats of four turns. A way runs once unmeasured, and what reaches the runtime is recorded. The baseline submits these
requests at once, as token ids. Before every round the prefix cache and the tokenizer's cache of texts are emptied; the
best of three rounds counts.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bench.frameworks._ways import WAYS, Answers, Work, in_threads
from bench.gpu.model import TEMPLATE
from bench.gpu.workloads import Figures, Sizes
from graftlm.core.config import SamplingParams
from graftlm.core.request import Completion, Request
from graftlm.plugins import manager
from graftlm.plugins.hookspecs import hookimpl

ROUNDS = 3
SHARED, OWN, COLD, CHATS, TURNS, SAID = 2_190, 40, 512, 64, 4, 128
COUNTED = ("steps", "computed_tokens", "schedule_s", "forward_s", "sample_s", "commit_s")
FEW = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "grey", "geese")


@dataclass(eq=False)
class Timeline:
    """The submission and finish times of a runtime's requests. Also a plugin that observes them."""

    handed_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    answered: list[tuple[Request, Completion]] = field(default_factory=list)

    @hookimpl
    def graftlm_request_finished(self, request: Request, completion: Completion) -> None:
        self.finished_s.append(time.perf_counter())
        self.answered.append((request, completion))


@contextmanager
def observed(runtime: Any) -> Iterator[Timeline]:
    """Record submissions to the engine's thread, and finished requests."""
    timeline, thread = Timeline(), runtime._thread
    original = thread.add

    def add(submissions: Sequence[Any]) -> None:
        timeline.handed_s.append(time.perf_counter())
        original(submissions)

    registry = manager.load()
    registry.add(f"bench-{id(timeline)}", timeline)
    thread.add = add
    try:
        yield timeline
        thread.call(lambda engine: None)  # observers are notified after the caller
    finally:
        del thread.add
        registry.remove(f"bench-{id(timeline)}")


def compared(runtime: Any, answer: Answers, waves: int = 1) -> Figures:
    """Measure the seconds of a way and of its prompts as ids, and split the way's seconds.

    waves  hand-overs that wait for each other's answers, of equally many requests.

    before_s  until the first request is handed over
    engine_s  from there until the last one has finished
    after_s   until the way returns
    """
    given = recorded(runtime, answer)
    size = len(given) // waves
    as_ids = [given[i : i + size] for i in range(0, len(given), size)]

    def baseline() -> None:
        for part in as_ids:
            for future in runtime.submit_many([Request(ids, sampling) for ids, sampling in part]):
                future.result()

    baseline()
    ids_s, rounds = [], []
    for _ in range(ROUNDS):
        ids_s.append(_cold(runtime, baseline)["total_s"])
        rounds.append(_cold(runtime, answer))
    best = min(rounds, key=lambda figures: figures["total_s"])
    return {**best, "ids_s": min(ids_s), "of_ids": best["total_s"] / min(ids_s), "requests": float(len(given))}


def recorded(runtime: Any, answer: Answers) -> list[tuple[list[int], SamplingParams]]:
    """Return the requests that a way submits: the token ids and the sampling of each."""
    with observed(runtime) as seen:
        answer()
    return [(_ids(runtime, request), _sampling(request, done)) for request, done in seen.answered]


def ids_from_threads(runtime: Any, answer: Answers, threads: int) -> float:
    """Return the seconds of a way's token ids from several threads, without its framework; the best of rounds."""
    given = recorded(runtime, answer)

    def job() -> None:
        in_threads(lambda one: runtime.complete(Request(*one)), given, threads)

    job()
    return min(_cold(runtime, job)["total_s"] for _ in range(ROUNDS))


def _ids(runtime: Any, request: Request) -> list[int]:
    ids: list[int] = runtime.processor.encode(request.prompt, request.tools).ids.tolist()
    return ids


def _sampling(request: Request, done: Completion) -> SamplingParams:
    """Return the sampling of a baseline request. Guidance's constraints serve one request only: they are dropped."""
    given = request.sampling
    if type(given.constraint).__module__.partition(".adapters.")[2].startswith("guidance"):
        return replace(given, constraint=None, ignore_eos=True, max_tokens=done.usage.completion_tokens)
    return given


def _cold(runtime: Any, job: Callable[[], Any]) -> Figures:
    runtime.clear_cache()
    runtime.reset_stats()
    runtime.tokenizer._batch_encoder.clear()
    with observed(runtime) as seen:
        started = time.perf_counter()
        job()
        ended = time.perf_counter()
    first, last = seen.handed_s[0], seen.finished_s[-1]
    return {
        "total_s": ended - started,
        "before_s": first - started,
        "engine_s": last - first,
        "after_s": ended - last,
        "hand_overs": float(len(seen.handed_s)),
        **{f"engine.{name}": getattr(runtime.stats(), name) for name in COUNTED},
    }


class Writer:
    """Return texts of an approximate number of tokens, from words that are tokens of the vocabulary."""

    def __init__(self, hf: Any, seed: int) -> None:
        self._pick = random.Random(seed)
        found = sorted(piece[1:] for piece in hf.get_vocab() if re.fullmatch(r"\u0120[a-z]{3,9}", piece))
        self._words = found if len(found) > len(FEW) else FEW

    def text(self, num_tokens: int) -> str:
        return " ".join(self._pick.choices(self._words, k=num_tokens))


def chats(runtime: Any, work: Work, turns: int) -> Answers:
    """Return conversations as messages, all of which are submitted at each turn."""

    def answer() -> list[str]:
        held: list[list[dict[str, str]]] = [[{"role": "system", "content": work.system}] for _ in work.questions]
        for turn in range(turns):
            for chat, question in zip(held, work.questions, strict=True):
                chat.append({"role": "user", "content": f"{turn}. {question}"})
            done = runtime.generate(held, **work.options)
            for chat, one in zip(held, done, strict=True):
                chat.append({"role": "assistant", "content": one.text})
        return [chat[-1]["content"] for chat in held]

    return answer


def sections() -> dict[str, Callable[[Any, Sizes], Figures]]:
    """Return the measurements by name, each of an engine of bench.gpu and the sizes."""

    def runtime_of(engine: Any) -> Any:
        if not engine.runtime.tokenizer.has_chat_template:
            engine.runtime.tokenizer.hf.chat_template = TEMPLATE
        return engine.runtime

    def work(engine: Any, sizes: Sizes, shared: int, own: int, count: int) -> Work:
        writer = Writer(engine.runtime.tokenizer.hf, 1)
        return Work(
            writer.text(shared // sizes.by), [writer.text(own // sizes.by + 1) for _ in range(count)], sizes.shared_new
        )

    def way(engine: Any, sizes: Sizes, make: Callable[[Any, Work], Answers]) -> Figures:
        runtime = runtime_of(engine)
        return compared(runtime, make(runtime, work(engine, sizes, SHARED, OWN, sizes.sharers)))

    def cold(engine: Any, sizes: Sizes) -> Figures:
        runtime = runtime_of(engine)
        return compared(runtime, WAYS["text"](runtime, work(engine, sizes, 0, COLD, sizes.sharers)))

    def four_turns(engine: Any, sizes: Sizes) -> Figures:
        runtime = runtime_of(engine)
        return compared(runtime, chats(runtime, work(engine, sizes, 64, SAID, CHATS // sizes.by), TURNS), TURNS)

    ways = {name: lambda engine, sizes, make=make: way(engine, sizes, make) for name, make in WAYS.items()}
    return {"cold": cold, "chats": four_turns, **ways}
