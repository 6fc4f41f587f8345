"""JSON from a text with GraftLM, Guidance and Outlines, all on the same weights in the same process.

Each as it does best: Outlines decodes all texts as one padded batch; Guidance, whose models answer one call at a time,
jumps over forced text as GraftLM does. Twice: the texts alone, which share nothing, and after a few worked examples, as
extraction is usually asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import guidance

from bench.frameworks._transformers import same_weights
from bench.grammar import _extraction
from bench.harness import Options, Row, paired, rate_row
from graftlm import PluginError
from graftlm.ab.engines.frameworks import mend_crop

COMPACT = (",", ":")


NUM_EXAMPLES = 4

Ask = Callable[[Sequence[str]], list[str]]


def run(options: Options) -> Sequence[Row]:
    texts = _extraction.prompts(options.choose(8, 64))
    examples = _extraction.prompts(NUM_EXAMPLES, seed=1)
    rows: list[Row] = []
    with same_weights(options) as (runtime, model, tokenizer):

        def graftlm(prompts: Sequence[str]) -> list[str]:
            runtime.clear_cache()
            answers = runtime.generate(
                list(prompts), json_schema=_extraction.PERSON, max_tokens=_extraction.MAX_TOKENS, temperature=0
            )
            return [answer.text for answer in answers]

        engines: dict[str, Ask] = {
            "graftlm": graftlm,
            "guidance": _guidance(model, tokenizer),
            "outlines": _outlines(model, tokenizer),
        }
        worked = "\n\n".join(map("".join, zip(examples, graftlm(examples), strict=True)))
        for what, prompts in (
            ("texts alone", texts),
            (f"after {NUM_EXAMPLES} examples", [f"{worked}\n\n{text}" for text in texts]),
        ):
            rows += _compare(what, prompts, engines, options)
    return rows


def _compare(what: str, prompts: Sequence[str], engines: Mapping[str, Ask], options: Options) -> list[Row]:
    texts: dict[str, list[str]] = {}

    def ask(name: str) -> None:
        texts[name] = engines[name](prompts)

    times = paired({name: partial(ask, name) for name in engines}, options.repeats, warm=False)
    rows: list[Row] = []
    for name in ("guidance", "outlines"):
        shape = {"requests": len(prompts), "their valid": _extraction.num_valid(texts[name])}
        rows += [
            rate_row(
                "rivals", f"{what}, against {name}", "requests/s", len(prompts), times["graftlm"], times[name], floor=5,
                shape=shape,
            ),
            Row("rivals", f"{what}: valid, beside {name}'s", _extraction.num_valid(texts["graftlm"]), "texts",
                _extraction.num_valid(texts[name]), floor=len(prompts), shape=shape),
            Row("rivals", f"{what}: objects as {name}'s", _same(texts["graftlm"], texts[name]), "texts", shape=shape),
        ]  # fmt: skip
    return rows


def _guidance(model: Any, tokenizer: Any) -> Ask:
    mend_crop()
    llm = guidance.models.Transformers(model, tokenizer, echo=False, enable_monitoring=False)

    def answer(prompt: str) -> str:
        lm = llm + prompt
        lm += guidance.json("answer", schema=_extraction.PERSON, separators=COMPACT, max_tokens=_extraction.MAX_TOKENS)
        return str(lm["answer"])

    return lambda prompts: [answer(prompt) for prompt in prompts]


def _outlines(model: Any, tokenizer: Any) -> Ask:
    try:
        import outlines
    except ImportError as error:
        raise PluginError("this case compares with outlines, which is not installed: pip install outlines") from error
    wanted = outlines.types.JsonSchema(_extraction.PERSON, whitespace_pattern="")
    generator = outlines.Generator(outlines.from_transformers(model, tokenizer), wanted)

    def answer(prompts: Sequence[str]) -> list[str]:
        texts: list[str] = generator.batch(list(prompts), max_new_tokens=_extraction.MAX_TOKENS, do_sample=False)
        return texts

    return answer


def _same(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Return the number of answers with equal values."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return sum(value(a) == value(b) for a, b in zip(ours, theirs, strict=True))
