"""Guidance programs on `GraftModel` and on Guidance's own Transformers class, same weights, same process.

Three programs with instructions of usual length: a character sheet behind worked examples (400 words), a
ReAct loop behind worked traces (1,000 words), ten questions about one text of 1,000 words. Each is run over and over by
itself, where the one KV sequence that the stock class keeps is always the right one, and all three in turn on one model
object, as an application with more than one prompt does. The loop reads which tool to call before it goes on; all else
is read when everything was asked. "lazy" is `GraftModel(lazy=True)`, the same programs.

Guidance 0.3 fails on current transformers; for the baseline its one call that does, cropping a cache, is mended. It
fails, too, on threads that share a model: where we use sixteen, it runs one program after the other, and as that is
linear, a quarter of them is timed.

Guesses ahead (`speculation`) are off on our side: random weights soon write one word over and over, and guesses of that
come true more often than with a trained model.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from guidance import gen, models, select

from bench.frameworks._words import word_model, word_tokenizer
from bench.harness import Options, Row, Timing, paired, rate_row, timed
from graftlm import Runtime
from graftlm.ab.engines.frameworks import mend_crop
from graftlm.adapters.guidance import GraftModel

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "grey", "geese")
THREADS = 16
TOOLS = ("search", "calculate", "finish")


def prose(num_words: int, seed: int) -> str:
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(num_words))


def character(lm: Any, seed: int) -> list[Any]:
    """Build a character sheet: JSON with generated values."""
    lm += f"The following are character profiles for a game. {prose(400, 0)}\nCharacter number {seed}:\n{{\n"
    lm += '    "id": "' + gen("id", regex="[a-z0-9]{8}") + '",\n    "description": "'
    lm += gen("description", stop='"', max_tokens=20) + '",\n    "age": ' + gen("age", regex="[1-9][0-9]?")
    lm += ',\n    "armor": "' + select(["leather", "chainmail", "plate"], name="armor") + '",\n    "weapon": "'
    lm += select(["sword", "axe", "mace", "spear", "bow", "crossbow"], name="weapon") + '",\n    "class": "'
    lm += gen("class", regex="[a-z ]{3,12}") + '",\n    "strength": ' + gen("strength", regex="[0-9]{1,2}") + ",\n"
    return [lm + '    "items": ["' + gen("item", list_append=True, regex="[a-z]{4,9}") + '"]\n}']


def react(lm: Any, seed: int) -> list[Any]:
    """Run a loop of thoughts, tools and observations on one transcript."""
    lm += f"Answer with tools. {prose(1000, 1)}\nQuestion {seed}: what is it?\n"
    for step in range(4):
        lm += f"Thought {step}: " + gen(f"thought{step}", stop="\n", max_tokens=12) + "\n"
        lm += "Act: " + select(list(TOOLS), name=f"act{step}") + "[" + gen(f"arg{step}", regex="[a-z]{3,8}") + "]\n"
        tool, argument = lm[f"act{step}"], lm[f"arg{step}"]
        lm += f"Observation: {tool} of {argument}: {prose(10, 100 * seed + step)}\n"
    return [lm]


def branches(lm: Any, seed: int) -> list[Any]:
    """Ten short questions about one text."""
    base = lm + f"Text: {prose(1000, 2)}\nReader {seed}.\n"
    return [base + f"Question {i}: {WORDS[i]}? Answer: " + gen("a", regex="[a-z ]{12,30}") for i in range(10)]


def in_turn(lm: Any, seed: int) -> list[Any]:
    """Run all three, one after the other."""
    return [*character(lm, seed), *react(lm, seed), *branches(lm, seed)]


Program = Callable[[Any, int], list[Any]]
PROGRAMS: dict[str, Program] = {
    "character": character,
    "react": react,
    "branches": branches,
    "all in turn": in_turn,
}


def read(program: Program, lm: Any, seed: int) -> list[str]:
    """Run a program and read the texts it wrote."""
    return [str(one) for one in program(lm, seed)]


def threaded(program: Program, lm: Any, seeds: Iterator[int]) -> None:
    threads = [threading.Thread(target=read, args=(program, lm, next(seeds))) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def append_times(lm: Any, num_words: int, repeats: int) -> float:
    """Return the seconds to append a line to a transcript of a number of words; the minimum of several runs."""
    base = lm + prose(num_words, 1)
    base += "\nNow: " + select(["yes", "no"])
    return min(timed(lambda: base + "another line of text\n") for _ in range(repeats))


def token_cost(runtime: Runtime, lm: Any, options: Options) -> Row:
    """Return the extra cost of a token of free text beside the bare runtime, in milliseconds."""
    number = options.choose(16, 128)
    base = lm + prose(100, 4) + "\n"
    prompt = str(base)
    jobs = {
        "guided": lambda: str(base + gen("text", max_tokens=number)),
        "bare": lambda: runtime.generate(prompt, temperature=0, max_tokens=number, ignore_eos=True),
    }
    times = paired(jobs, options.choose(2, 7))
    added = statistics.median(a - b for a, b in zip(times["guided"].samples, times["bare"].samples, strict=True))
    return Row("guidance", "a token, above the bare runtime", added / number * 1e3, "ms", floor=0.5, at_most=True)


def compared(options: Options, ours: GraftModel, lazy: GraftModel, stock: Any) -> list[Row]:
    """Measure each program alone and on sixteen threads."""
    rows: list[Row] = []
    seeds = count(1)
    for name, program in PROGRAMS.items():

        def once(lm: Any, p: Any = program) -> Callable[[], Any]:
            return lambda: read(p, lm, next(seeds))

        alone, threads = (4, 15) if program is in_turn else (None, None)
        times = paired({"ours": once(ours), "lazy": once(lazy), "stock": once(stock)}, options.repeats)
        unit = "programs/s"
        rows.append(rate_row("guidance", f"{name}, alone", unit, 1, times["ours"], times["stock"], floor=alone))
        rows.append(rate_row("guidance", f"{name}, alone, lazy", unit, 1, times["lazy"], times["stock"], floor=alone))
        many = paired(
            {
                "ours": lambda p=program: threaded(p, ours, seeds),
                "lazy": lambda p=program: threaded(p, lazy, seeds),
                "stock": lambda p=program: [read(p, stock, next(seeds)) for _ in range(options.choose(1, 4))],
            },
            options.choose(1, options.repeats),
            warm=False,
        )
        serial = Timing(tuple(s * THREADS / options.choose(1, 4) for s in many["stock"].samples))
        for what, who in (("16 threads", "ours"), ("16 threads, lazy", "lazy")):
            rows.append(rate_row("guidance", f"{name}, {what}", unit, THREADS, many[who], serial, floor=threads))
    return rows


def run(options: Options) -> Sequence[Row]:
    mend_crop()
    tokenizer = word_tokenizer()
    model = word_model(tokenizer)
    stock = models.Transformers(model, tokenizer, echo=False, enable_monitoring=False)
    with Runtime(model, tokenizer=tokenizer, dtype="float32", speculation="off") as runtime:
        ours = GraftModel(runtime=runtime, echo=False)
        runtime.load()
        rows = compared(options, ours, GraftModel(runtime=runtime, echo=False, lazy=True), stock)
        short, long = append_times(ours, 100, 20), append_times(ours, 4000, 20)
        rows.append(
            Row("guidance", "append to 4,000 words, against 100", long * 1e3, "ms", short * 1e3, long / short, 2, True)
        )
        rows.append(token_cost(runtime, ours, options))
        stats = runtime.stats()
        rows.append(Row("guidance", "largest batch", stats.largest_batch, "sequences", floor=12))
    return rows
