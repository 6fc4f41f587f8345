"""The first constrained token after a model was loaded: on a fresh machine, and in a second process.

Each row is a process of its own, on sprout and on a small Llama with 128,000 synthetic tokens. The baseline is a
process that gets nothing ready beside the loading of the model. On a fresh machine both compile the kernels of the CPU
as well; rows of the second process are medians of `--repeats` processes, in turn with their baseline.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.harness import ROOT, Options, Row
from graftlm.kernels.jit import python_process

CHILD = """
import json, sys, time
import graftlm as gl
import torch, graftlm.core.constraint as constraint  # not timed, in neither process
model, prepared = sys.argv[1], sys.argv[2] == "prepared"
if not prepared:
    constraint.prepare_constraints = lambda tokenizer: None
started = time.perf_counter()
runtime = gl.Runtime(model, device="cpu")
runtime.load()
loaded = time.perf_counter()
runtime.generate("Mara is", max_tokens=1, temperature=0)
free = time.perf_counter()
runtime.generate("Mara is", regex=r"a (baker|doctor), \\\\d{1,3} years old", max_tokens=1, temperature=0)
regex = time.perf_counter()
schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}}
runtime.generate("Mara is", json_schema=schema, max_tokens=1, temperature=0, close_on_length=False)
closed = time.perf_counter()
runtime.generate("Mara is", json_schema={"type": "object"}, max_tokens=1, temperature=0, close_on_length=False)
print(json.dumps({"load": loaded - started, "free": free - loaded, "regex": regex - free,
                  "schema": closed - regex, "open schema": time.perf_counter() - closed}))
runtime.close()
"""

WAIT = "from graftlm.core.grammar.automata import jit; jit.wait()"


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"sprout": "sprout"}
        if not options.quick:
            models["128k tokens"] = model_of_many_tokens(Path(folder) / "model")
        for name, model in models.items():
            for machine, floor in (("fresh machine", 0.3), ("second process", 0.1)):
                found: dict[str, list[dict[str, float]]] = {"unprepared": [], "prepared": []}
                for _ in range(1 if machine == "fresh machine" else options.choose(1, options.repeats)):
                    for prepared, runs in found.items():
                        runs.append(_measure(model, prepared, Path(folder) / f"{name}-{prepared}"))
                theirs, ours = map(_medians, found.values())
                what = f"{name}, {machine}"
                rows.append(Row("first", f"load: {what}", ours["load"], "s", theirs["load"]))
                for key in ("regex", "schema", "open schema"):
                    limit = None if key == "schema" else floor
                    label = f"first {key}: {what}"
                    rows.append(Row("first", label, ours[key], "s", theirs[key], floor=limit, at_most=True))
    return rows


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _measure(model: str, prepared: str, caches: Path) -> dict[str, float]:
    """Return the seconds of a process with its disk caches in `caches`: load, a free token, a constrained one."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GRAFTLM_CACHE_DIR": str(caches / "graftlm"),
    }
    command = ["-c", CHILD, model, prepared]
    done = python_process.run(command, env=environment, check=True, capture_output=True, text=True)
    python_process.run(["-c", WAIT], env=environment, check=True)  # for what a later process finds on disk
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {prepared}: {measured}", file=sys.stderr, flush=True)
    return measured


def model_of_many_tokens(folder: Path, num_tokens: int = 128_000, **sizes: int) -> str:
    """Save a tiny Llama with a byte-level BPE tokenizer of `num_tokens` random merges; `sizes` go to its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.models import tiny_model

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng, merges, seen = np.random.default_rng(0), [], set(letters)
    tokens = list(letters)
    for x, y in rng.random((4 * num_tokens, 2)):
        if len(tokens) == num_tokens - 1:
            break
        left, right = tokens[int(x * x * len(tokens))], tokens[int(y * y * len(tokens))]
        if len(left + right) <= 20 and left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append((left, right))
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    tiny_model("llama", vocab_size=num_tokens, eos_token_id=num_tokens - 1, **sizes).save_pretrained(folder)
    return str(folder)
