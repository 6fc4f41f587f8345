"""GraftLM on a model whose weights are in memory already, with default options but for the peers' context."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

from bench.gpu.handed_over import sections
from bench.gpu.model import random_weights
from bench.gpu.workloads import Answer, Draw, Figures, Ids, Sizes, decode, timed, warm_up

OPTIONS: dict[str, Any] = {"max_model_len": 16_384}
STRICT_BATCHES = (1, 16, 64, 256)


class GraftLM:
    def __init__(self, folder: str | None) -> None:
        self.model, self.tokenizer = random_weights(folder)
        self.options = OPTIONS if folder is not None else {"max_batch": 16}
        began = time.perf_counter()
        self.runtime = self.open()
        self.generate([[5, 6, 7]], 1)
        self.started = {"weights_to_first_token_s": time.perf_counter() - began}
        stats = self.runtime.stats()
        runner = self.runtime._thread.engine.runner
        self.about = {"runner": type(runner).__name__, "slots": f"{stats.slots_total:,}", "kv": stats.kv}

    def open(self, **options: Any) -> Any:
        from graftlm import Runtime

        return Runtime(self.model, tokenizer=self.tokenizer, **self.options, **options).load()

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": schema is None}
        done = self.runtime.generate(list(prompts), json_schema=schema, **options)
        return [Answer(c.token_ids, c.usage.cached_tokens, c.text) for c in done]

    def flush(self) -> None:
        self.runtime.clear_cache()

    def close(self) -> None:
        self.runtime.close()


def start(folder: str | None) -> GraftLM:
    return GraftLM(folder)


def eager(engine: GraftLM, sizes: Sizes) -> Figures:
    """Decode without CUDA graphs: measure their gain, and whether the tokens are equal."""
    batch = sizes.batches[min(1, len(sizes.batches) - 1)]
    prompts = Draw(900, sizes).several(batch, sizes.prompt)
    engine.flush()
    with_graphs = engine.generate(prompts, sizes.new)
    runner = engine.runtime._thread.engine.runner
    graphs = getattr(runner, "graphs", None)
    if not graphs:
        raise NotImplementedError(f"{type(runner).__name__} holds no graphs here")
    runner.graphs = {}
    try:
        engine.flush()
        without = engine.generate(prompts, sizes.new)
        first = decode(engine, sizes, batch)
    finally:
        runner.graphs = graphs
    same = sum(a.ids == b.ids for a, b in zip(with_graphs, without, strict=True))
    return {"batch": batch, "ms_per_step": first["ms_per_step"], "same_answers": same, "answers": len(without)}


def strict(engine: GraftLM, sizes: Sizes) -> Figures:
    """Measure a step with `strict=True`, and check that a batch answers as each request alone."""
    engine.runtime.close()
    gc.unfreeze()  # frozen objects are never freed, including the previous runtime's KV pool
    gc.collect()
    engine.runtime = engine.open(strict=True)
    warm_up(engine, sizes)
    figures: Figures = {}
    for batch in [b for b in sizes.batches if b in STRICT_BATCHES] or sizes.batches[:1]:
        figures[f"ms_per_step_{batch}"] = decode(engine, sizes, batch)["ms_per_step"]
    prompts = Draw(901, sizes).several(min(16, max(sizes.batches)), sizes.prompt)
    engine.flush()
    _, together = timed(engine, prompts, sizes.new)
    _, cached = timed(engine, prompts, sizes.new)
    engine.flush()
    alone = [engine.generate([prompt], sizes.new)[0] for prompt in prompts[:4]]
    figures["same_cached"] = sum(a.ids == b.ids for a, b in zip(together, cached, strict=True))
    figures["same_alone"] = sum(a.ids == b.ids for a, b in zip(together, alone, strict=False))
    figures["answers"], figures["answers_alone"] = len(together), len(alone)
    return figures


EXTRAS = {**sections(), "eager": eager, "strict": strict}
