"""Speculation against a model by rule: values are those of a program without it, sampled ones have the same law.

SPECULATED_PROGRAMS=10000 SPECULATED_DRAWS=20000 in the environment compares as many.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.config import SamplingParams
from graftlm.core.remote.ledger.usage import RemoteUsage
from graftlm.core.remote.speculation.live import Follow, Told
from graftlm.core.remote.speculation.surplus import Ahead
from graftlm.core.remote.speculation.text import RemoteText
from graftlm.core.remote.transport.answer import Answer, first_stop, token_ends
from graftlm.core.remote.transport.prompt import RemotePrompt
from tests.core.remote.models import Model, babbles, continues

NUM_PROGRAMS = int(os.environ.get("SPECULATED_PROGRAMS", "200"))
NUM_DRAWS = int(os.environ.get("SPECULATED_DRAWS", "1500"))


@dataclass(frozen=True)
class Gen:
    max_tokens: int = 8
    stop: tuple[str, ...] = ()
    temperature: float = 0.0


Part = str | Gen
T = TypeVar("T")


@dataclass
class Direct:
    """A model, asked without a server in between."""

    model: Model
    tells_tokens: bool = True
    keeps_stop: bool = False
    finish: str | None = None  # what it always says to have ended by
    rng: random.Random = field(default_factory=random.Random)
    num_calls: int = 0
    num_tokens: int = 0
    usage: RemoteUsage = field(default_factory=RemoteUsage)

    def count(self, usage: RemoteUsage) -> None:
        self.usage += usage

    async def ask(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        *,
        stops: tuple[str, ...],
        tokens: bool = False,
        follow: Follow | None = None,
    ) -> Answer:
        self.num_calls += 1
        written: list[str] = []
        finish: Any = "length"
        assert sampling.max_tokens is not None
        while len(written) < sampling.max_tokens:
            draw = self.rng.random() if sampling.temperature else None
            token = self.model(prompt.text + "".join(written), draw)
            if token is None:
                finish = "stop"
                break
            written.append(token)
            at, end = first_stop("".join(written), stops)
            if follow is not None:
                await asyncio.sleep(0)
                so_far = "".join(written)[:at]
                follow(Answer(so_far, "length", token_ends=token_ends(written, so_far) if self.tells_tokens else None))
            if end:
                self.num_tokens += len(written)
                return Answer("".join(written)[: end if self.keeps_stop else at], "stop", len(written))
        self.num_tokens += len(written)
        text, finish = "".join(written), self.finish or finish
        return Answer(text, finish, len(written), token_ends(written, text) if self.tells_tokens else None)


def run(parts: Sequence[Part], direct: Direct, num_spec_tokens: int | None, *, live: bool = False) -> list[str]:
    """The values of a program. With `live` they are told, and taken from answers, while these are written."""
    readers: list[asyncio.Task[None]] = []

    def start(reading: Coroutine[Any, Any, None]) -> None:
        readers.append(asyncio.ensure_future(reading))

    async def go() -> list[str]:
        text = RemoteText(direct.ask, direct.count, num_spec_tokens, start=start if live else None)
        values = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                text.write(part)
                continue
            sampling = SamplingParams(temperature=part.temperature, max_tokens=part.max_tokens, stop=part.stop)
            told = Told(str, part.stop) if live else None
            written = await text.generate(sampling, ahead_of(parts[i + 1 :]), told=told)
            assert told is None or written.text.startswith(told.text)
            text.append(written.text)
            values.append(written.text)
        text.drop("end of program")
        if readers:
            await asyncio.gather(*readers)
        return values

    return runner.run(go()) if live else drive(go())


runner = asyncio.Runner()


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def ahead_of(parts: Sequence[Part]) -> Ahead:
    tokens = sum(len(p.encode()) if isinstance(p, str) else p.max_tokens for p in parts)
    return Ahead(tokens, any(isinstance(p, Gen) for p in parts), complete=True)


# -- greedy: the same values -----------------------------------------------------------------------------------------

CHARACTERS = [*"abcab \n:;,", " "]
PIECES = ["a", "ab", "b:", " c", "\n", ": ", "cab", ";", " ", ",\n"]
STOPS = ["\n", ";", "a", "ab", "b:", " ", ": ", "\n\n", "c a", ","]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Model, bool, list[Part]]:
    """A model, whether its tokens are known, and a program whose texts often are what the model would write.

    A token of several characters may span where a text ends; only where tokens are known can that be seen.
    """
    tells = draw(st.booleans())
    vocabulary = PIECES if tells and draw(st.booleans()) else CHARACTERS
    model = babbles(vocabulary, draw(st.integers(0, 10**6)), end=draw(st.sampled_from([6, 12, 40])))
    parts: list[Part] = ["Q"]
    plain = Direct(model)
    for _ in range(draw(st.integers(1, 5))):
        stops = tuple(draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True)))
        parts.append(Gen(draw(st.integers(1, 9)), stops))
        text = "".join(joined(parts, run(parts, plain, None)))
        kind = draw(st.sampled_from(["what follows", "what follows", "almost", "nothing", "any"]))
        following = next_characters(model, text, draw(st.integers(1, 6)))
        if kind == "what follows":
            parts.append(following or ":")
        elif kind == "almost":
            parts.append(following[:-1] + draw(st.sampled_from("ab ;")))
        elif kind == "any":
            parts.append(draw(st.text("ab :;\n", min_size=1, max_size=4)))
    return model, tells, parts


def joined(parts: Sequence[Part], values: Sequence[str]) -> list[str]:
    remaining = iter(values)
    return [part if isinstance(part, str) else next(remaining) for part in parts]


def next_characters(model: Model, text: str, num: int) -> str:
    written = ""
    while len(written) < num and (token := model(text + written, None)) is not None:
        written += token
    return written[:num]


@settings(max_examples=NUM_PROGRAMS)
@given(programs(), st.integers(1, 40), st.booleans(), st.booleans(), st.sampled_from([None, None, "stop", "length"]))
def test_greedy_values_are_those_of_the_plain_program(
    program: tuple[Model, bool, list[Part]], num_spec_tokens: int, keeps_stop: bool, live: bool, finish: str | None
) -> None:
    model, tells, parts = program
    plain, fewer = Direct(model, tells, keeps_stop, finish), Direct(model, tells, keeps_stop, finish)
    assert run(parts, fewer, num_spec_tokens, live=live) == run(parts, plain, None)
    usage = fewer.usage
    assert 0 <= usage.spec_tokens_used + usage.spec_tokens_wasted <= fewer.num_tokens
    assert plain.usage.calls_saved == 0


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("stops", [("\n",), ("\nJ", ";"), ("ob", "b\n")])
def test_every_budget_and_limit_gives_the_plain_values(stops: tuple[str, ...], tells: bool) -> None:
    model = continues("Name: Bob\nJob: cook; Age: 31\n\nName: Joe\nJob: none\n")
    for limit, budget in itertools.product(range(1, 12), (1, 2, 3, 4, 5, 7, 9, 12, 16, 29)):
        parts = ["Name: ", Gen(limit, stops), "\nJob: ", Gen(limit, ("\n", ";")), "; Age: ", Gen(limit, stops)]
        assert run(parts, Direct(model, tells), budget) == run(parts, Direct(model, tells), None), (limit, budget)


def test_a_layout_that_the_model_writes_takes_one_call() -> None:
    direct = Direct(continues("Name: Bob\nJob: cook\nAge: 31\n"))
    parts = ["Name: ", Gen(8, ("\n",)), "\nJob: ", Gen(8, ("\n",)), "\nAge: ", Gen(8, ("\n",)), "\n"]
    assert run(parts, direct, 64) == ["Bob", "cook", "31"]
    assert (direct.num_calls, direct.usage.calls_saved, direct.usage.misses) == (1, 2, {})
    # the first value is " Bob", whose call was due anyway; after it "\nJob: cook\nAge: 31\n" is 11 tokens
    assert (direct.usage.spec_tokens_used, direct.usage.spec_tokens_wasted) == (11, 0)


def test_what_nothing_used_is_wasted_and_says_why() -> None:
    direct = Direct(continues("A: 1; B: 2"))
    run(["A: ", Gen(4, (";",)), " C:", Gen(4)], direct, 16)
    assert direct.usage.misses == {"another text": 1}
    assert direct.usage.spec_tokens_wasted > 0 and direct.num_calls == 2


@pytest.mark.parametrize(
    ("second", "reason"),
    [(Gen(4, (";",), temperature=0.5), "another sampling"), (Gen(4, (";",)), "another text")],
)
def test_another_sampling_makes_its_own_call(second: Gen, reason: str) -> None:
    direct = Direct(continues("A: 1; B: 2; C: 3;"))
    middle = "; B: " if reason == "another sampling" else "; X:"
    run(["A: ", Gen(4, (";",)), middle, second], direct, 16)
    assert (direct.usage.misses, direct.num_calls) == ({reason: 1}, 2)


# -- sampled: the same law -------------------------------------------------------------------------------------------


def flips(prompt: str, draw: float | None) -> str | None:
    """Words and marks with chances that depend on what stands before."""
    assert draw is not None
    last = prompt[-1:]
    if last == "\n":
        return "J" if draw < 0.7 else "K"
    if last in "JK":
        return ":"
    if last == ":":
        return "a" if draw < 0.5 + 0.2 * ("b\n" in prompt) else "b"
    return "\n" if draw < 0.5 else "a" if draw < 0.7 else "b"


PROGRAMS: list[list[Part]] = [
    ["N:", Gen(4, ("\n",), 1.0), "\nJ:", Gen(4, ("\n",), 1.0)],
    ["N:", Gen(4, ("\nJ",), 1.0), "\n", Gen(4, ("\n",), 1.0)],  # the text is shorter than the stop
    ["N:", Gen(4, ("\n",), 1.0), Gen(2, (), 1.0)],  # nothing covers the stop
]


@pytest.mark.parametrize("parts", PROGRAMS)
@pytest.mark.parametrize(("budget", "live"), [(2, False), (5, False), (20, False), (20, True)])
def test_sampled_values_have_the_law_of_the_plain_program(parts: list[Part], budget: int, live: bool) -> None:
    num = NUM_DRAWS

    def law(num_spec_tokens: int | None, seed: int) -> Counter[tuple[str, ...]]:
        direct = Direct(flips, rng=random.Random(seed))
        return Counter(tuple(run(parts, direct, num_spec_tokens, live=live)) for _ in range(num))

    plain, other, fewer = law(None, 1), law(None, 2), law(budget, 3)
    noise = distance(plain, other, num)
    assert distance(plain, fewer, num) < 1.6 * noise + 0.01


def few(prompt: str, draw: float | None) -> str | None:
    """As `flips`, with values of one letter or of two, so that 20,000 draws tell a law from another."""
    assert draw is not None
    if prompt[-1:] in "ab":
        return "\n" if draw < 0.7 else "a"
    return flips(prompt, draw)


def law_of_two() -> dict[tuple[str, ...], float]:
    """The exact law of two values of `few`; the second depends on the first."""

    def value(of_a: float) -> dict[str, float]:
        return {"a": of_a * 0.7, "aa": of_a * 0.3, "b": (1 - of_a) * 0.7, "ba": (1 - of_a) * 0.3}

    first = value(0.5)
    return {(a, b): p * q for a, p in first.items() for b, q in value(0.7 if a == "b" else 0.5).items()}


@pytest.mark.parametrize(("budget", "live"), [(None, False), (5, False), (20, False), (20, True)])
def test_two_sampled_values_have_the_exact_law(budget: int | None, live: bool) -> None:
    direct, parts = Direct(few, rng=random.Random(11)), ["N:", Gen(2, ("\n",), 1.0), "\nJ:", Gen(2, ("\n",), 1.0)]
    drawn = Counter(tuple(run(parts, direct, budget, live=live)) for _ in range(NUM_DRAWS))
    exact = law_of_two()
    assert drawn.keys() <= exact.keys()
    away = sum(abs(drawn[key] / NUM_DRAWS - p) for key, p in exact.items()) / 2
    assert away < 0.02 * max(1.0, (20_000 / NUM_DRAWS) ** 0.5)
    assert (direct.num_calls < 1.6 * NUM_DRAWS) == (budget == 20)


def distance(a: Counter[tuple[str, ...]], b: Counter[tuple[str, ...]], num: int) -> float:
    """Total variation between two laws, from as many draws of each."""
    return sum(abs(a[key] - b[key]) for key in a.keys() | b.keys()) / (2 * num)


def test_sampled_forks_are_independent() -> None:
    async def pairs(temperature: float) -> int:
        direct = Direct(flips, rng=random.Random(7))
        same = 0
        for _ in range(300):
            text = RemoteText(direct.ask, direct.count, 12)
            sampling = SamplingParams(temperature=temperature, max_tokens=4, stop=("\n",))
            text.write("N:")
            text.append((await text.generate(sampling, Ahead(12, True, True))).text)
            values = []
            for child in (text.branch(first=True), text.branch(first=False)):
                child.write("\nJ:")
                values.append((await child.generate(sampling, Ahead(complete=True))).text)
            same += values[0] == values[1]
        return same

    assert drive(pairs(1.0)) < 200  # of 300, where shared text made them equal in most
