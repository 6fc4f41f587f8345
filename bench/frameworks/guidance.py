"""Guidance programs on `GraftModel` and on Guidance's own Transformers class, same weights, same process.

Guidance 0.3 fails on current transformers; for the baseline its one call that does, cropping a cache, is mended.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from guidance import gen, models, select

from bench.frameworks._words import word_model, word_tokenizer
from bench.harness import Options, Row, paired, rate_row, timed
from graftlm import Runtime
from graftlm.adapters.guidance import GraftModel
from graftlm.demo.pipelines.guidance import mend_crop

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "grey", "geese")
TOOLS = ("search", "calculate", "finish")


def prose(num_words: int, seed: int) -> str:
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(num_words))


def character(lm: Any, seed: int) -> Any:
    """A character sheet: JSON written around what is generated."""
    lm += f"The following is a character profile for a game. {prose(120, 0)}\nCharacter number {seed}:\n{{\n"
    lm += '    "id": "' + gen("id", regex="[a-z0-9]{8}") + '",\n    "description": "'
    lm += gen("description", stop='"', max_tokens=20) + '",\n    "age": ' + gen("age", regex="[1-9][0-9]?")
    lm += ',\n    "armor": "' + select(["leather", "chainmail", "plate"], name="armor") + '",\n    "weapon": "'
    lm += select(["sword", "axe", "mace", "spear", "bow", "crossbow"], name="weapon") + '",\n    "class": "'
    lm += gen("class", regex="[a-z ]{3,12}") + '",\n    "strength": ' + gen("strength", regex="[0-9]{1,2}") + ",\n"
    return lm + '    "items": ["' + gen("item", list_append=True, regex="[a-z]{4,9}") + '"]\n}'


def react(lm: Any, seed: int) -> Any:
    """A loop of thoughts, tools and observations on one transcript."""
    lm += f"Answer with tools. {prose(200, 0)}\nQuestion {seed}: what is it?\n"
    for step in range(4):
        lm += f"Thought {step}: " + gen(f"thought{step}", stop="\n", max_tokens=12) + "\n"
        lm += "Act: " + select(list(TOOLS), name=f"act{step}") + "[" + gen(f"arg{step}", regex="[a-z]{3,8}") + "]\n"
        lm += f"Observation: {prose(10, 100 * seed + step)}\n"
    return lm


def branches(lm: Any, seed: int) -> list[Any]:
    """Ten short questions about one text."""
    base = lm + f"Text: {prose(300, 0)}\nReader {seed}.\n"
    return [base + f"Question {i}: {WORDS[i]}? Answer: " + gen("a", regex="[a-z ]{12,30}") for i in range(10)]


def threaded(program: Callable[[Any, int], Any], lm: Any, num_threads: int) -> None:
    threads = [threading.Thread(target=program, args=(lm, i)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def append_times(lm: Any, num_words: int, repeats: int) -> float:
    """Seconds to append a line to a transcript of so many words; the least of several."""
    base = lm + prose(num_words, 1)
    base += "\nNow: " + select(["yes", "no"])
    return min(timed(lambda: base + "another line of text\n") for _ in range(repeats))


def run(options: Options) -> Sequence[Row]:
    mend_crop()
    tokenizer = word_tokenizer()
    model = word_model(tokenizer)
    rows: list[Row] = []
    stock = models.Transformers(model, tokenizer, echo=False, enable_monitoring=False)
    with Runtime(model, tokenizer=tokenizer, dtype="float32") as runtime:
        ours = GraftModel(runtime=runtime, echo=False)
        runtime.load()
        programs: dict[str, Callable[[Any, int], Any]] = {"character": character, "react": react, "branches": branches}
        ratios = []
        for name, program in programs.items():
            count = iter(range(1000))
            times = paired(
                {
                    "ours": lambda p=program, c=count: p(ours, next(c)),
                    "stock": lambda p=program, c=count: p(stock, next(c)),
                },
                options.repeats,
            )
            row = rate_row("guidance", f"{name}, alone", "programs/s", 1, times["ours"], times["stock"], floor=4)
            ratios.append(row.ratio)
            rows.append(row)
            # stock Guidance fails on threads that share a model: it runs them one after the other
            seeds = range(2000, 2016)
            many = paired(
                {
                    "ours": lambda p=program: threaded(p, ours, 16),
                    "stock": lambda p=program, s=seeds: [p(stock, i) for i in s],
                },
                options.choose(1, options.repeats),
                warm=not options.quick,
            )
            rows.append(
                rate_row("guidance", f"{name}, 16 threads", "programs/s", 16, many["ours"], many["stock"], floor=15)
            )
            runtime.clear_cache()
        short, long = append_times(ours, 100, 20), append_times(ours, 4000, 20)
        rows.append(
            Row("guidance", "append to 4,000 words, against 100", long * 1e3, "ms", short * 1e3, long / short, 2, True)
        )
        stats = runtime.stats()
        rows.append(Row("guidance", "largest batch", stats.largest_batch, "sequences", floor=12))
    return rows
