"""The workloads of every engine, in token ids, with the same seeds for all engines.

Needs NumPy only: it runs inside each engine's own process. A section empties the prefix cache before each of its
rounds, draws other prompts for every round, and reports the round that was fastest.

    a  decode          1, 16, 64 and 256 requests of 512 tokens, 128 new ones each
    b  shared prefix   256 requests of 2,000 common and 64 own tokens, 16 new ones each
    c  tree            16 questions of 128 tokens after 512 common ones; three times over, four branches of 16 tokens
                       answer with 64 new ones each and one of them goes on
    d  chat            32 conversations of four turns, 256 tokens said and 64 answered
    e  JSON schema     64 requests of 128 tokens, up to 96 new ones that satisfy SCHEMA; and the same without it
    f  prefill         8 requests of 8,192 tokens, one new one each
    g  long prompts    4 requests of 16,000 tokens, one new one each
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

Ids = list[int]
Figures = dict[str, float]

LOWEST, HIGHEST = 1_000, 120_000
"""Prompts are drawn from these ids: no special tokens, and few of the short ones."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "house": {"enum": ["red", "green", "blue", "white"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "alive": {"type": "boolean"},
        "wand": {
            "type": "object",
            "properties": {"wood": {"type": "string", "maxLength": 16}, "length": {"type": "number"}},
            "required": ["wood", "length"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c", "d"]}, "minItems": 3, "maxItems": 6},
    },
    "required": ["name", "house", "age", "alive", "wand", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Answer:
    """The answer of an engine. `num_cached` prompt tokens came from its prefix cache; None if unreported."""

    ids: Ids
    num_cached: int | None = None
    text: str | None = None


class Engine(Protocol):
    """One engine under test. Greedy, at most 256 requests at once."""

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        """Answer all prompts: exactly `max_tokens` tokens each, or at most that many that satisfy `schema`."""
        ...

    def flush(self) -> None:
        """Empty the prefix cache."""
        ...


@dataclass(frozen=True)
class Sizes:
    """The sizes of the sections."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    prompt: int = 512
    new: int = 128
    sharers: int = 256
    shared: int = 2_000
    own: int = 64
    shared_new: int = 16
    questions: int = 16
    common: int = 512
    question: int = 128
    branch: int = 16
    answer: int = 64
    chats: int = 32
    said: int = 256
    documents: int = 64
    document: int = 128
    text: int = 96
    long_prompts: int = 8
    long: int = 8_192
    longest_prompts: int = 4
    longest: int = 16_000
    rounds: int = 2
    levels: int = 3
    branches: int = 4
    turns: int = 4
    vocabulary: tuple[int, int] = (LOWEST, HIGHEST)
    by: int = 1  # what these were divided by

    def divided(self, by: int, vocabulary: tuple[int, int]) -> Sizes:
        """Return smaller sizes for a tiny model of bytes: to try an engine, not to time it."""
        names = ["prompt", "new", "sharers", "shared", "own", "questions", "common", "question", "answer", "chats"]
        names += ["said", "documents", "document", "long_prompts", "long", "longest_prompts", "longest"]
        smaller = {name: max(getattr(self, name) // by, 2) for name in names}
        batches = tuple(sorted({max(batch // by, 1) for batch in self.batches}))
        return replace(self, **smaller, batches=batches, text=2 * self.text, vocabulary=vocabulary, rounds=1, by=by)


class Draw:
    """Prompts of one round, one after the other from one seed."""

    def __init__(self, seed: int, sizes: Sizes) -> None:
        self._rng = np.random.default_rng(seed)
        self._range = sizes.vocabulary

    def ids(self, length: int) -> Ids:
        drawn: Ids = self._rng.integers(*self._range, length).tolist()
        return drawn

    def several(self, count: int, length: int) -> list[Ids]:
        return [self.ids(length) for _ in range(count)]


def timed(
    engine: Engine, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None
) -> tuple[float, list[Answer]]:
    """Return the seconds and the answers."""
    started = time.perf_counter()
    answers = engine.generate(prompts, max_tokens, schema)
    return time.perf_counter() - started, answers


def hit_rate(prompts: Sequence[Ids], answers: Sequence[Answer]) -> Figures:
    """Return the share of prompt tokens taken from the prefix cache, if the engine reports it."""
    told = [answer.num_cached for answer in answers if answer.num_cached is not None]
    if len(told) < len(answers):
        return {}
    return {"hit_rate": sum(told) / max(1, sum(map(len, prompts)))}


def fastest(one_round: Callable[[Engine, Sizes, int], Figures], engine: Engine, sizes: Sizes) -> Figures:
    rounds = [one_round(engine, sizes, index) for index in range(sizes.rounds)]
    return min(rounds, key=lambda figures: figures["total_s"])


def decode(engine: Engine, sizes: Sizes, batch: int) -> Figures:
    """Measure decoding; `ms_per_step` excludes the time of the same shape with one new token."""

    def one_round(engine: Engine, sizes: Sizes, index: int) -> Figures:
        draw = Draw(100 + 10 * batch + index, sizes)
        first, second = draw.several(batch, sizes.prompt), draw.several(batch, sizes.prompt)
        engine.flush()
        prefill_s, _ = timed(engine, first, 1)
        engine.flush()
        total_s, answers = timed(engine, second, sizes.new)
        written = sum(len(answer.ids) for answer in answers)
        if written != batch * sizes.new:
            raise ValueError(f"{written} tokens were written, {batch * sizes.new} were asked for")
        return {
            "total_s": total_s,
            "prefill_s": prefill_s,
            "tokens_per_s": written / total_s,
            "ms_per_step": (total_s - prefill_s) / (sizes.new - 1) * 1e3,
        }

    return fastest(one_round, engine, sizes)


def shared_prefix(engine: Engine, sizes: Sizes, index: int) -> Figures:
    draw = Draw(200 + index, sizes)
    common = draw.ids(sizes.shared)
    prompts = [common + own for own in draw.several(sizes.sharers, sizes.own)]
    engine.flush()
    total_s, answers = timed(engine, prompts, sizes.shared_new)
    return {"total_s": total_s, "requests_per_s": len(prompts) / total_s, **hit_rate(prompts, answers)}


def tree(engine: Engine, sizes: Sizes, index: int) -> Figures:
    draw = Draw(300 + index, sizes)
    common = draw.ids(sizes.common)
    paths = [common + question for question in draw.several(sizes.questions, sizes.question)]
    asked: list[Ids] = []
    answered: list[Answer] = []
    engine.flush()
    started = time.perf_counter()
    for level in range(sizes.levels):
        prompts = [path + draw.ids(sizes.branch) for path in paths for _ in range(sizes.branches)]
        answers = engine.generate(prompts, sizes.answer)
        asked += prompts
        answered += answers
        kept = [i * sizes.branches + (i + level) % sizes.branches for i in range(sizes.questions)]
        paths = [prompts[i] + list(answers[i].ids) for i in kept]
    total_s = time.perf_counter() - started
    return {"total_s": total_s, "requests_per_s": len(asked) / total_s, **hit_rate(asked, answered)}


def chat(engine: Engine, sizes: Sizes, index: int) -> Figures:
    draw = Draw(400 + index, sizes)
    chats: list[Ids] = [[] for _ in range(sizes.chats)]
    asked: list[Ids] = []
    answered: list[Answer] = []
    engine.flush()
    started = time.perf_counter()
    for _ in range(sizes.turns):
        chats = [chat + draw.ids(sizes.said) for chat in chats]
        answers = engine.generate(chats, sizes.answer)
        asked += chats
        answered += answers
        chats = [chat + list(answer.ids) for chat, answer in zip(chats, answers, strict=True)]
    total_s = time.perf_counter() - started
    return {"total_s": total_s, "requests_per_s": len(asked) / total_s, **hit_rate(asked, answered)}


def structured(engine: Engine, sizes: Sizes) -> Figures:
    """Measure answers under a schema; `free_tokens_per_s` is without it. The grammar is compiled during warm-up.

    Texts differ in length, so the fastest round is the one that wrote the most tokens a second.
    """
    draw = Draw(500, sizes)
    engine.generate([draw.ids(sizes.own)], sizes.text, SCHEMA)
    rounds: list[Figures] = []
    for _ in range(sizes.rounds):
        prompts, others = (draw.several(sizes.documents, sizes.document) for _ in range(2))
        engine.flush()
        total_s, answers = timed(engine, prompts, sizes.text, SCHEMA)
        engine.flush()
        free_s, _ = timed(engine, others, sizes.text)
        written = sum(len(answer.ids) for answer in answers)
        figures = {
            "total_s": total_s,
            "tokens": written,
            "tokens_per_s": written / total_s,
            "requests_per_s": len(prompts) / total_s,
            "free_tokens_per_s": sizes.documents * sizes.text / free_s,
            "texts": len(answers),
            "whole_texts": sum(_parses(answer.text) for answer in answers),
        }
        rounds.append(figures)
    return max(rounds, key=lambda figures: figures["tokens_per_s"])


def _prefill(engine: Engine, prompts: Sequence[Ids]) -> Figures:
    engine.flush()
    total_s, _ = timed(engine, prompts, 1)
    return {"total_s": total_s, "tokens_per_s": sum(map(len, prompts)) / total_s}


def prefill(engine: Engine, sizes: Sizes, index: int) -> Figures:
    return _prefill(engine, Draw(600 + index, sizes).several(sizes.long_prompts, sizes.long))


def long_prefill(engine: Engine, sizes: Sizes, index: int) -> Figures:
    return _prefill(engine, Draw(700 + index, sizes).several(sizes.longest_prompts, sizes.longest))


def sections(sizes: Sizes) -> dict[str, Callable[[Engine], Figures]]:
    """Return the measurements by the name of their figures: the section's letter, and the batch of a decode."""
    found: dict[str, Callable[[Engine], Figures]] = {}
    for batch in sizes.batches:
        found[f"a{batch}"] = partial(decode, sizes=sizes, batch=batch)
    for letter, one_round in (("b", shared_prefix), ("c", tree), ("d", chat)):
        found[letter] = partial(fastest, one_round, sizes=sizes)
    found["e"] = partial(structured, sizes=sizes)
    for letter, one_round in (("f", prefill), ("g", long_prefill)):
        found[letter] = partial(fastest, one_round, sizes=sizes)
    return found


def warm_up(engine: Engine, sizes: Sizes) -> Figures:
    """Run a small batch, a full one, a long prompt and the schema, so that kernels compile before the measurements."""
    draw = Draw(1, sizes)
    medium = min(300, sizes.prompt)
    engine.generate(draw.several(8, medium), 8)
    engine.generate(draw.several(max(sizes.batches), medium), 8)
    engine.generate(draw.several(2, sizes.long), 2)
    with suppress(NotImplementedError):  # which the section says, too
        engine.generate([draw.ids(sizes.own)], sizes.text, SCHEMA)
    return {}


def _parses(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except ValueError:
        return False
    return True
