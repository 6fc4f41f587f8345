"""One table of all engines: each figure, GraftLM's ratio to the best peer, and its share of what the card allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

CAVEAT = (
    "vLLM and SGLang are cut-down builds, not the stock packages: files and GPU code for other chips, types and head "
    "sizes were taken out. The kernels that stay are those of the wheels. Weights are random: no text has a meaning."
)
OWN = "graftlm"
NAMES = {
    "graftlm": "GraftLM",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "hf": "transformers",
    "hf_batching": "transformers, continuous batching",
}


@dataclass(frozen=True)
class Figure:
    """A row: `key` of section `section`, in `unit`. Ratios say how many times as fast GraftLM is."""

    section: str
    key: str
    what: str
    unit: str
    less_is_better: bool = False


FIGURES = (
    Figure("a1", "ms_per_step", "decode, batch 1", "ms/step", True),
    Figure("a16", "ms_per_step", "decode, batch 16", "ms/step", True),
    Figure("a64", "ms_per_step", "decode, batch 64", "ms/step", True),
    Figure("a256", "ms_per_step", "decode, batch 256", "ms/step", True),
    Figure("strict", "ms_per_step_1", "strict, batch 1", "ms/step", True),
    Figure("strict", "ms_per_step_16", "strict, batch 16", "ms/step", True),
    Figure("strict", "ms_per_step_64", "strict, batch 64", "ms/step", True),
    Figure("strict", "ms_per_step_256", "strict, batch 256", "ms/step", True),
    Figure("a256", "tokens_per_s", "256 x 512 in, 128 out", "tokens/s"),
    Figure("b", "requests_per_s", "256 x 2,000 shared + 64, 16 out", "requests/s"),
    Figure("c", "requests_per_s", "tree of 16 x 4 x 3, 64 out", "requests/s"),
    Figure("d", "requests_per_s", "32 chats of 4 turns", "requests/s"),
    Figure("e", "tokens_per_s", "64 x JSON schema", "tokens/s"),
    Figure("e", "free_tokens_per_s", "the same, free text", "tokens/s"),
    Figure("f", "tokens_per_s", "prefill 8 x 8,192", "tokens/s"),
    Figure("g", "tokens_per_s", "prefill 4 x 16,000", "tokens/s"),
    Figure("ids-threads", "of_ids", "the ids below from 64 threads", "of ids", True),
    Figure("text", "of_ids", "256 prompts of 2,190 shared + 40, as text", "of ids", True),
    Figure("messages", "of_ids", "the same as messages", "of ids", True),
    Figure("langchain-batch", "of_ids", "the same, ChatGraftLM.batch", "of ids", True),
    Figure("langchain-abatch", "of_ids", "the same, ChatGraftLM.abatch", "of ids", True),
    Figure("langchain-chain", "of_ids", "the same, (prompt | llm).batch", "of ids", True),
    Figure("langchain-threads", "of_ids", "the same, 64 threads, invoke", "of ids", True),
    Figure("langchain-256-threads", "of_ids", "the same, 256 threads, invoke", "of ids", True),
    Figure("dspy", "of_ids", "the same, DSPy Evaluate, 64 threads", "of ids", True),
    Figure("llama-index", "of_ids", "the same, LlamaIndex, achat awaited", "of ids", True),
    Figure("guidance", "of_ids", "64 of them, Guidance, 16 threads", "of ids", True),
    Figure("cold", "of_ids", "256 x 512 cold, as text", "of ids", True),
    Figure("chats", "of_ids", "64 chats of 4 turns, as messages", "of ids", True),
    Figure("start", "process_to_first_token_s", "process start to first token", "s", True),
    Figure("start", "weights_to_first_token_s", "weights in memory to first token", "s", True),
)


def value(found: Mapping[str, Any], engine: str, figure: Figure) -> float | None:
    figures = found["engines"].get(engine, {}).get("figures", {})
    number = (figures.get(figure.section) or {}).get(figure.key)
    return None if number is None else float(number)


def ratio(figure: Figure, ours: float | None, theirs: float | None) -> float | None:
    """Return the speed of `ours` relative to the peer."""
    if not ours or not theirs:
        return None
    return theirs / ours if figure.less_is_better else ours / theirs


def best_peer(found: Mapping[str, Any], figure: Figure) -> float | None:
    others = [value(found, engine, figure) for engine in found["engines"] if engine != OWN]
    known = [number for number in others if number]
    if not known:
        return None
    return min(known) if figure.less_is_better else max(known)


def rows(found: Mapping[str, Any]) -> Iterator[tuple[Figure, dict[str, float | None], float | None, float | None]]:
    """Yield each figure that any engine has: values by engine, ratio to the best peer, share of the limit."""
    for figure in FIGURES:
        values = {engine: value(found, engine, figure) for engine in found["engines"]}
        if all(number is None for number in values.values()):
            continue
        limit = found.get("limits", {}).get(figure.section, {}).get(figure.key)
        ours = values.get(OWN)
        yield figure, values, ratio(figure, ours, best_peer(found, figure)), ratio(figure, ours, limit)


def number(of: float | None) -> str:
    if of is None:
        return ""
    return f"{of:,.0f}" if abs(of) >= 1000 else f"{of:#.3g}" if abs(of) < 100 else f"{of:.1f}"


def table(found: Mapping[str, Any]) -> Table:
    drawn = Table(title=found.get("gpu", {}).get("name", "no GPU: a trial run, its times mean nothing"))
    drawn.add_column("what")
    drawn.add_column("unit")
    for heading in (*found["engines"], "to the best peer", "limit", "of the limit"):
        drawn.add_column(heading, justify="right")
    for figure, values, to_peer, of_limit in rows(found):
        limit = found.get("limits", {}).get(figure.section, {}).get(figure.key)
        drawn.add_row(
            figure.what,
            figure.unit,
            *(number(values[engine]) for engine in found["engines"]),
            "" if to_peer is None else f"{to_peer:.2f}x",
            number(limit),
            "" if of_limit is None else f"{of_limit:.0%}",
        )
    return drawn


def markdown(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the same table in the form of docs/gpu-figures.md, line by line."""
    engines = found["engines"]
    versions = {engine: its.get("about", {}).get("version", "") for engine, its in engines.items() if engine != OWN}
    names = [f"{NAMES[engine]} {versions.get(engine, '')}".strip() for engine in engines]
    headings = ["what", *names, "to the best of them", "limit", "of the limit"]
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for figure, values, to_peer, of_limit in rows(found):
        limit = found.get("limits", {}).get(figure.section, {}).get(figure.key)
        cells = [f"{figure.what}, {figure.unit}", *(number(values[engine]) for engine in engines)]
        cells += ["" if to_peer is None else f"{to_peer:.2f}x", number(limit)]
        cells += ["" if of_limit is None else f"{100 * of_limit:.0f} %"]
        yield f"| {' | '.join(cells)} |"


def notes(found: Mapping[str, Any]) -> Iterator[str]:
    """Return the notes below the table: reasons of missing engines or figures, and GraftLM's own checks."""
    for engine, its in found["engines"].items():
        if "from" in its:
            yield f"{engine}: {its['from']}"
        for name, reason in its.get("errors", {}).items():
            yield f"{engine}, {name}: {reason}"
        for line in its.get("log", []):
            yield f"    {line}"
    own = found["engines"].get(OWN, {}).get("figures", {})
    eager, strict, structured = (own.get(name) for name in ("eager", "strict", "e"))
    if eager:
        yield (
            f"without CUDA graphs, batch {eager['batch']}: {number(eager['ms_per_step'])} ms/step; "
            f"{eager['same_answers']} of {eager['answers']} answers are those with graphs"
        )
    if strict:
        costs = []
        for key, ms in strict.items():
            batch = key.removeprefix("ms_per_step_")
            plain = own.get(f"a{batch}", {}).get("ms_per_step")
            if batch != key:
                costs.append(f"batch {batch} {number(ms)} ms/step" + (f" ({ms / plain:.2f}x)" if plain else ""))
        yield (
            f"strict: {', '.join(costs)}; {strict['same_cached']} of {strict['answers']} answers the same from the "
            f"cache, {strict['same_alone']} of {strict['answers_alone']} alone"
        )
    if structured:
        yield f"JSON schema: {structured['whole_texts']} of {structured['texts']} texts are whole"
    if any(engine in found["engines"] for engine in ("vllm", "sglang")):
        yield CAVEAT


def show(found: Mapping[str, Any], console: Console) -> None:
    console.print(table(found))
    for line in notes(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
