"""python -m bench.gpu.tensor_parallel [--ranks 1,2] [--exact]: one model over several GPUs, beside one GPU in one run.

The shape of Llama 3.1 8B with random weights: a decode step of 1, 16, 64 and 256 rows (prompts of 512 tokens from the
cache, 128 new ones), and prefill of 8 prompts of 8,192 tokens. `--exact` compares instead: greedy tokens of a float32
model on several GPUs with those of one, alone and in a batch. `--shape 70b` takes the shape of Llama 3.1 70B, whose
layers have equal weights, on several GPUs only. `--profile` adds the kernels of decode steps by time, on rank 0.
`--tiny` runs a small model on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu import patched_follower
from bench.harness import ROOT
from graftlm.kernels.jit import python_process

NEW = 128
PROMPT, LONG = 512, 8192
ROWS = (1, 16, 64, 256)
EXACT = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000, "max_position_embeddings": 4096}  # fmt: skip
TINY = {**EXACT, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
LARGE = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 32_768,
         "rope_theta": 500_000.0}  # fmt: skip
LARGEST = {**LARGE, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
           "num_attention_heads": 64}  # fmt: skip
SHARED = (256, 2000, 64, 16)
"""Requests, tokens that all share, tokens of each alone, and of its answer."""
FIGURES = ("decode", "prefill", "shared")


def write_model(folder: Path, shape: dict[str, Any], dtype: torch.dtype, spread: float) -> None:
    """Write a Llama with random weights, a file for each layer; the layers of a large one are equal, to save time."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from graftlm.testing.byte_tokenizer import BOS, IM_END, PAD, byte_tokenizer

    config = LlamaConfig(**shape, bos_token_id=BOS, eos_token_id=IM_END, pad_token_id=PAD, dtype=dtype)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def some(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device=device) * spread).to(dtype).cpu()

    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    ones = torch.ones(hidden, dtype=dtype)
    layer: dict[str, torch.Tensor] = {}
    for number in range(1 if shape is LARGEST else config.num_hidden_layers):  # the others are read from it
        if not layer or shape is not LARGE:
            layer = {f"{name}.weight": some(*size) for name, size in sizes.items()}
            layer |= {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones.clone()}
        named = {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
        save_file(named, folder / f"layer-{number:03}.safetensors", metadata={"format": "pt"})
    ends = {
        "model.embed_tokens.weight": some(vocab, hidden),
        "lm_head.weight": some(vocab, hidden),
        "model.norm.weight": ones.clone(),
    }
    save_file(ends, folder / "ends.safetensors", metadata={"format": "pt"})
    weight_map = {name: "ends.safetensors" for name in ends}
    for number in range(1 if shape is LARGEST else config.num_hidden_layers):
        weight_map |= {f"model.layers.{number}.{name}": f"layer-{number:03}.safetensors" for name in layer}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def prompts_of(num: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    numbers = np.random.default_rng(seed).integers(300, vocab, (num, length))
    found: list[list[int]] = numbers.tolist()
    return found


def note(figures: dict[str, Any], name: str, figure: float) -> None:
    """Keep a figure and print it, so that a run that is cut off has its first ones."""
    figures[name] = figure
    print(json.dumps({name: figure}), flush=True)


def print_kernels(run: Any, steps: int, top: int = 14, sequence: int = 20) -> None:
    """Print the kernels of this process by their microseconds a step, the longest first, and some in their order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    times, counts = Counter[str](), Counter[str]()
    for event in found.events():
        times[event.name[:90]] += event.device_time / steps
        counts[event.name[:90]] += 1
    print(f"    {sum(times.values()):9.1f} us {sum(counts.values()) / steps:7.1f}  all kernels", flush=True)
    for name, us in times.most_common(top):
        print(f"    {us:9.1f} us {counts[name] / steps:7.1f}  {name}", flush=True)
    kernels = sorted(found.events(), key=lambda event: event.time_range.start)
    middle = kernels[len(kernels) // 2 :][:sequence]
    for event in middle:
        began, ended = (at - middle[0].time_range.start for at in (event.time_range.start, event.time_range.end))
        print(f"    {began:9.1f} to {ended:7.1f}  {event.name[:90]}", flush=True)


def measure(folder: str, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measure one number of ranks in this process. -> figures by name"""
    import graftlm as gl

    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    figures: dict[str, Any] = {"ranks": ranks}
    with gl.Runtime(folder, tensor_parallel=ranks, quiet=True, speculation="off", **options["runtime"]) as runtime:
        runtime.load()
        figures["start_s"] = round(time.perf_counter() - began, 1)
        stats = runtime.stats()
        figures["slots"], figures["execution"], figures["kv"] = stats.slots_total, stats.execution, stats.kv
        engine: Any = runtime._thread.engine
        own = getattr(engine.runner, "own", engine.runner)
        figures["graphs"] = len(getattr(own, "graphs", ()))
        runtime.generate(prompts_of(2, 40, options["vocab"], 9), max_tokens=8, **greedy)
        print(json.dumps(figures), flush=True)
        for rows in options["rows"]:
            prompts = prompts_of(rows, options["prompt"], options["vocab"], rows)
            runtime.generate(prompts, max_tokens=2, **greedy)
            if "decode" in options["only"]:
                best = 1e9
                for _ in range(2):
                    at = time.perf_counter()
                    answers = runtime.generate(prompts, max_tokens=options["new"], **greedy)
                    best = min(best, time.perf_counter() - at)
                assert all(len(answer.token_ids) == options["new"] for answer in answers)
                note(figures, f"decode_{rows}_ms", round(1e3 * best / options["new"], 3))
        if "prefill" in options["only"]:
            best = 1e9
            for seed in (77, 78):
                prompts = prompts_of(8, options["long"], options["vocab"], seed)
                at = time.perf_counter()
                runtime.generate(prompts, max_tokens=1, **greedy)
                best = min(best, time.perf_counter() - at)
            note(figures, "prefill_tokens_per_s", round(8 * options["long"] / best))
        if "shared" in options["only"]:
            count, shared, own, new = options["shared"]
            best = 1e9
            for seed in (5, 6, 7):
                runtime.clear_cache()
                (prefix,) = prompts_of(1, shared, options["vocab"], seed)
                prompts = [prefix + rest for rest in prompts_of(count, own, options["vocab"], 100 + seed)]
                at = time.perf_counter()
                runtime.generate(prompts, max_tokens=new, **greedy)
                best = min(best, time.perf_counter() - at)
            note(figures, "shared_requests_per_s", round(count / best))
        if options["profile"] and torch.cuda.is_available():
            for rows in options["rows"]:
                prompts = prompts_of(rows, options["prompt"], options["vocab"], rows)
                runtime.generate(prompts, max_tokens=2, **greedy)
                print_kernels(lambda p=prompts: runtime.generate(p, max_tokens=17, **greedy), 16)
    return figures


def exact(folder: str, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the greedy tokens of prompts of several lengths: alone, in a batch, from the cache."""
    import graftlm as gl

    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 48}
    prompts = [prompts_of(1, length, options["vocab"], length)[0] for length in (7, 100, 700, 2500)]
    tokens: dict[str, Any] = {}
    with gl.Runtime(folder, tensor_parallel=ranks, dtype="float32", quiet=True, seed=1) as runtime:
        tokens["alone"] = [runtime.generate(prompt, **greedy).token_ids for prompt in prompts]
        tokens["cached"] = [answer.token_ids for answer in runtime.generate(prompts, **greedy)]
        runtime.clear_cache()
        tokens["batch"] = [answer.token_ids for answer in runtime.generate(prompts * 5, **greedy)]
        tokens["regex"] = runtime.generate("A", regex="[a-f]{8,12}", temperature=0).text
        print(ranks, runtime.stats().execution, flush=True)
    return tokens


def _child(given: argparse.Namespace, ranks: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run one number of ranks in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        job = json.dumps({"folder": folder, "ranks": ranks, "options": options, "exact": given.exact, "out": out.name})
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = ["-m", "bench.gpu.tensor_parallel", "--job", job]
        python_process.run(command, env=environment, cwd=ROOT)
        text = Path(out.name).read_text()
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.tensor_parallel", description=__doc__)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shape", choices=("8b", "70b"), default="8b")
    parser.add_argument("--only", default=",".join(FIGURES), help="figures, of decode, prefill, shared")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", help="for the model's files; one in memory is fastest")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        job = json.loads(given.job)
        run = exact if job["exact"] else measure
        if job["options"]["equal_layers"]:
            patched_follower.apply(["equal_layers"], Path(job["folder"]))
        Path(job["out"]).write_text(json.dumps(run(job["folder"], job["ranks"], job["options"])))
        return 0
    shape = TINY if given.tiny else EXACT if given.exact else LARGEST if given.shape == "70b" else LARGE
    if shape is LARGEST and "1" in given.ranks.split(","):
        parser.error("--shape 70b needs several GPUs; add --ranks 2")
    divisor = 16 if given.tiny else 1
    rows = [int(number) for number in given.rows.split(",")]
    options = {
        "rows": rows, "prompt": PROMPT // divisor, "new": NEW // divisor, "long": LONG // divisor // divisor,
        "vocab": shape["vocab_size"], "runtime": {"device": "cpu"} if given.tiny else {},
        "only": given.only.split(","), "profile": given.profile, "equal_layers": shape is LARGEST,
        "shared": [max(number // divisor, 2) for number in SHARED],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        began = time.perf_counter()
        large = shape is LARGE or shape is LARGEST
        write_model(Path(folder), shape, torch.bfloat16 if large else torch.float32, 0.02 if large else 0.05)
        print(f"model written in {time.perf_counter() - began:.0f} s", flush=True)
        found = [_child(given, int(ranks), folder, options) for ranks in given.ranks.split(",")]
    if given.exact:
        print(
            "tokens equal:",
            {name: all(name in one and one[name] == found[0][name] for one in found) for name in found[0]},
        )
        return 0
    print(json.dumps(found, indent=1))
    by_ranks = {one.get("ranks", 0): one for one in found}
    one = by_ranks.pop(1, {})
    for ranks, several in by_ranks.items():
        for name in one.keys() & several.keys():
            if name.startswith(FIGURES):
                factor = one[name] / several[name]
                factor = factor if name.startswith("decode") else 1 / factor
                print(f"{name}: {ranks} GPUs are {factor:.2f} times as fast as one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
