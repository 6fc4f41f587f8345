"""JSON from a text with GraftLM, Guidance and Outlines, all on the same weights in the same process.

Each as it does best: Outlines decodes all texts as one padded batch; Guidance, whose models answer one call at a time,
jumps over forced text as GraftLM does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import guidance

from bench.frameworks._transformers import same_weights
from bench.grammar import _extraction
from bench.harness import Options, Row, paired, rate_row
from graftlm import PluginError
from graftlm.demo.pipelines.guidance import mend_crop

COMPACT = (",", ":")


def run(options: Options) -> Sequence[Row]:
    prompts = _extraction.prompts(options.choose(8, 64))
    texts: dict[str, list[str]] = {}
    with same_weights(options) as (runtime, model, tokenizer):
        by_guidance = _guidance(model, tokenizer)
        by_outlines = _outlines(model, tokenizer)

        def graftlm() -> None:
            runtime.clear_cache()
            answers = runtime.generate(
                prompts, json_schema=_extraction.PERSON, max_tokens=_extraction.MAX_TOKENS, temperature=0
            )
            texts["graftlm"] = [answer.text for answer in answers]

        def with_guidance() -> None:
            texts["guidance"] = [by_guidance(prompt) for prompt in prompts]

        def with_outlines() -> None:
            texts["outlines"] = by_outlines(prompts)

        times = paired(
            {"graftlm": graftlm, "guidance": with_guidance, "outlines": with_outlines},
            options.repeats,
            warm=not options.quick,
        )
    rows: list[Row] = []
    for name in ("guidance", "outlines"):
        shape = {"requests": len(prompts), "their valid": _extraction.num_valid(texts[name])}
        rows += [
            rate_row(
                "rivals", f"against {name}", "requests/s", len(prompts), times["graftlm"], times[name], floor=5,
                shape=shape,
            ),
            Row("rivals", f"valid, beside {name}'s", _extraction.num_valid(texts["graftlm"]), "texts",
                _extraction.num_valid(texts[name]), floor=len(prompts), shape=shape),
            Row("rivals", f"objects as {name}'s", _same(texts["graftlm"], texts[name]), "texts", shape=shape),
        ]  # fmt: skip
    return rows


def _guidance(model: Any, tokenizer: Any) -> Callable[[str], str]:
    mend_crop()
    llm = guidance.models.Transformers(model, tokenizer, echo=False, enable_monitoring=False)

    def answer(prompt: str) -> str:
        lm = llm + prompt
        lm += guidance.json("answer", schema=_extraction.PERSON, separators=COMPACT, max_tokens=_extraction.MAX_TOKENS)
        return str(lm["answer"])

    return answer


def _outlines(model: Any, tokenizer: Any) -> Callable[[Sequence[str]], list[str]]:
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
    """How many answers hold the same values."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return sum(value(a) == value(b) for a, b in zip(ours, theirs, strict=True))
