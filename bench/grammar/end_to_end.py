"""JSON from a text, end to end: with jump-forward, without it, and without any constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.grammar import _extraction
from bench.harness import Options, Row, paired, rate_row
from graftlm import Completion, Request, Runtime, SamplingParams


def run(options: Options) -> Sequence[Row]:
    model = options.model or "sprout"
    prompts = _extraction.prompts(options.choose(16, 64))
    with (
        Runtime(model, dtype="float32") as jumping,
        Runtime(model, dtype="float32", jump_forward=False) as stepping,
    ):
        return _compare(jumping, stepping, prompts, options.repeats)


def _compare(jumping: Runtime, stepping: Runtime, prompts: list[str], repeats: int) -> list[Row]:
    schema: dict[str, Any] = {"json_schema": _extraction.PERSON, "max_tokens": _extraction.MAX_TOKENS}
    answers: dict[str, list[Completion]] = {}
    lengths = [len(c.token_ids) for c in jumping.generate(prompts, temperature=0, **schema)]

    def constrained(name: str, runtime: Runtime, cached: bool) -> None:
        if not cached:
            runtime.clear_cache()
        answers[name] = runtime.generate(prompts, temperature=0, **schema)

    def free(cached: bool) -> None:
        """Generate without a constraint as many tokens as each constrained request had."""
        if not cached:
            jumping.clear_cache()
        requests = [
            Request(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        answers["free"] = [future.result() for future in jumping.submit_many(requests)]

    rows: list[Row] = []
    shape = {"requests": len(prompts), "tokens": sum(lengths), "fields": len(_extraction.PERSON["properties"])}
    for cached in (False, True):
        functions: dict[str, Callable[[], None]] = {
            "jumping": lambda c=cached: constrained("jumping", jumping, c),
            "stepping": lambda c=cached: constrained("stepping", stepping, c),
            "free": lambda c=cached: free(c),
        }
        times = paired(functions, repeats)
        where = "texts cached" if cached else "with prefill"
        for baseline, name, floor in (
            ("stepping", "without jump-forward", 1.4),
            ("free", "unconstrained", 1.2),
        ):
            rows.append(
                rate_row(
                    "end_to_end", f"{where}, against {name}", "requests/s", len(prompts), times["jumping"],
                    times[baseline], floor=floor, shape=shape,
                )
            )  # fmt: skip
    if (total := sum(len(c.token_ids) for c in answers["free"])) != sum(lengths):
        raise AssertionError(f"{total} tokens without a constraint, {sum(lengths)} with it")
    texts = {name: [c.text for c in completions] for name, completions in answers.items()}
    forced = sum(c.usage.forced_tokens for c in answers["jumping"])
    same = sum(a == b for a, b in zip(texts["jumping"], texts["stepping"], strict=True))
    return [
        *rows,
        Row("end_to_end", "tokens forced", 100 * forced / sum(lengths), "%", shape=shape),
        Row("end_to_end", "as without jump-forward", same, "texts", floor=len(prompts), shape=shape),
        Row("end_to_end", "valid", _extraction.num_valid(texts["jumping"]), "texts",
            _extraction.num_valid(texts["free"]), floor=len(prompts), shape=shape),
    ]  # fmt: skip
