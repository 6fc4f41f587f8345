"""python -m bench.gpu.shapes SHAPE...: model shapes with random weights on one GPU (docs/gpu-figures.md).

Decode of 32 rows of 1,500 tokens, 128 of 1,000 and 8 of 12,000; 64 sampled answers of 128 tokens to 512; 256 requests
of mixed lengths; and 16 answers of 48 tokens to 512, then the same again; `--only prefill` has 8 prompts of 8,192;
`--only shared` 256 that share 2,190 tokens, beside others that share none.
Prompts are token ids. Each shape runs in a process of its own, and beside it, with `--peers FOLDER`, vLLM in
FOLDER/site_vllm; `--weights FORMAT` quantises both engines' weights. `--profile` adds the kernels of GraftLM's decode
steps by time. Shapes are the ones here and those of published.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.shape_engines import SHAPE_ENGINES, Ids
from bench.harness import ROOT
from graftlm.kernels.jit import python_process

Shape = dict[str, Any]

SHAPES: dict[str, Shape] = {
    "gemma3-4b": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_144,
        "sliding_window": 1024, "query_pre_attn_scalar": 256, "max_position_embeddings": 131_072,
    },
    "gemma2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256_000,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 16_384,
    },
    "llama3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "llama3-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
        "rope_theta": 500_000.0, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "phi4-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200_064, "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True, "pad_token_id": 0,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40_960, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150_000.0,
        "max_position_embeddings": 131_072, "initial_context_length": 4_096, "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "vocab_size": 102_400,
        "max_position_embeddings": 163_840, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Arguments of AutoConfig.for_model. The special tokens belong to the tokenizer for tests."""

DECODE = ((32, 1_500), (128, 1_000), (8, 12_000))
NEW = 128
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 5_000, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 4_096,
}  # fmt: skip
DIVISOR = 100
"""--tiny divides lengths and numbers of requests by this."""


def config_of(shape: Shape, *, tiny: bool) -> Any:
    """Return the transformers configuration of a shape; two small layers with `tiny`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from graftlm.testing.byte_tokenizer import BOS, IM_END, PAD

    special = {"bos_token_id": BOS, "eos_token_id": IM_END, "pad_token_id": PAD}
    fields = shape | special | ({k: v for k, v in TINY.items() if k in shape or k == "layer_types"} if tiny else {})
    if tiny and "layer_types" in shape:
        fields["layer_types"] = shape["layer_types"][2:4]
    elif "sliding_window" not in shape and "layer_types" not in shape:
        fields.pop("layer_types", None)
    config = AutoConfig.for_model(**fields)
    made: Any = AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [made.__name__]
    return config


class Measured:
    """One engine that runs a shape, and its figures. longest: tokens of the longest context"""

    def __init__(
        self, engine: str, shape: Shape, *, tiny: bool, kv: str = "auto", longest: int = 0, weights: str = "bf16"
    ) -> None:
        self.divisor = DIVISOR if tiny else 1
        self.failed = False
        config = config_of(shape, tiny=tiny)
        self.vocabulary = config.vocab_size
        self.engine = SHAPE_ENGINES[engine](config, max(16_384, longest + 2 * NEW) // self.divisor, kv, weights)
        began = time.perf_counter()
        how = self.engine.start()
        self.engine.answer([[5, 6, 7]], [{"max_tokens": 1}])
        self.figures: dict[str, Any] = {"how": how, "start_s": round(time.perf_counter() - began, 1)}

    def generate(self, prompts: Sequence[Ids], **sampling: Any) -> None:
        self.engine.answer(prompts, [sampling] * len(prompts))

    def ids(self, rng: np.random.Generator, length: int) -> Ids:
        drawn: Ids = rng.integers(min(1000, self.vocabulary // 2), self.vocabulary - 1, length).tolist()
        return drawn

    def rows(self, rows: int) -> int:
        """Return the number of rows, divided with --tiny, but at least two if there were several."""
        return max(rows // self.divisor, min(rows, 2))

    def decode(self, rows: int, context: int) -> float:
        """Return milliseconds of a decode step: an answer of NEW + 1 tokens less one of 1, both of cached prompts."""
        rows, context = self.rows(rows), max(context // self.divisor, 8)
        rng = np.random.default_rng(rows)
        prompts = [self.ids(rng, context) for _ in range(rows)]
        self.engine.flush()
        self.generate(prompts, max_tokens=2)
        # The least of each: the least difference would be one whose first time was held up.
        times = [[self._seconds(prompts, new) for new in (1, NEW + 1)] for _ in range(3)]
        first, whole = map(min, zip(*times, strict=True))
        return 1e3 * (whole - first) / NEW

    def _seconds(self, prompts: Sequence[Ids], new: int) -> float:
        began = time.perf_counter()
        self.generate(prompts, max_tokens=new)
        return time.perf_counter() - began

    def sampled(self, seed: int) -> float:
        """Return tokens a second of 64 answers of 128 tokens to prompts of 512, at temperature 0.8, top_p 0.95."""
        rng = np.random.default_rng(seed)
        count, length, new = (max(n // self.divisor, 2) for n in (64, 512, 128))
        prompts = [self.ids(rng, length) for _ in range(count)]
        # A seed of its own for each: with one for all, logits that are nearly even give every row the same token, and
        # rows of the same token read the same few experts.
        sampling = {"max_tokens": new, "temperature": 0.8, "top_p": 0.95}
        self.engine.flush()
        began = time.perf_counter()
        self.engine.answer(prompts, [{**sampling, "seed": seed * count + i} for i in range(count)])
        return count * new / (time.perf_counter() - began)

    def mixed(self, seed: int) -> float:
        """Return requests a second: prompts lognormal(6.2, 0.9) in 32..6,000, answers lognormal(4.3, 0.8) in 4..400."""
        rng = np.random.default_rng(seed)
        count = max(256 // self.divisor, 4)
        lengths = np.clip(rng.lognormal(6.2, 0.9, count), 32, 6000).astype(int) // self.divisor + 1
        answers = np.clip(rng.lognormal(4.3, 0.8, count), 4, 400).astype(int)
        prompts = [self.ids(rng, n) for n in lengths]
        samplings = [{"max_tokens": int(new)} for new in answers]
        self.engine.flush()
        began = time.perf_counter()
        self.engine.answer(prompts, samplings)
        return count / (time.perf_counter() - began)

    def prefill(self) -> float:
        """Return tokens a second of 8 prompts of 8,192 tokens, the best of three turns."""
        rng = np.random.default_rng(5)
        count, length, best = max(8 // self.divisor, 2), 8192 // self.divisor, float("inf")
        for _ in range(4):
            self.engine.flush()
            best = min(best, self._seconds([self.ids(rng, length) for _ in range(count)], 1))
        return count * length / best

    def answers(self) -> dict[str, float]:
        """Return seconds of 16 answers of 48 tokens to prompts of 512 tokens, and of the same requests again."""
        rng = np.random.default_rng(3)
        count, length, new = (max(n // self.divisor, 2) for n in (16, 512, 48))
        self.generate([self.ids(rng, length) for _ in range(count)], max_tokens=new)
        best = {"first": float("inf"), "again": float("inf")}
        for _ in range(3):
            prompts = [self.ids(rng, length) for _ in range(count)]
            for which in best:
                best[which] = min(best[which], round(self._seconds(prompts, new), 4))
        return best

    def shared(self) -> dict[str, float]:
        """Return seconds of 256 prompts with 2,190 common tokens and 64 of their own, 16 new ones each, beside prompts
        that share none, of which a quarter runs; and computed tokens beside the fewest possible.
        """
        rng = np.random.default_rng(7)
        count, shared, own, new = (max(n // self.divisor, 2) for n in (256, 2190, 64, 16))
        common = self.ids(rng, shared)
        prompts = [common + self.ids(rng, own) for _ in range(count)]
        apart = [self.ids(rng, shared + own) for _ in range(max(count // 4, 1))]
        found = {"with_s": float("inf"), "without_s": float("inf")}
        for turn in range(3):
            for name, asked in (("with_s", prompts), ("without_s", apart)):
                self.engine.flush()
                before = self.engine.computed()
                seconds = self._seconds(asked, new) * count / len(asked)
                found[name] = min(found[name], round(seconds, 3)) if turn else found[name]
                if asked is prompts:
                    found["computed"] = self.engine.computed() - before
        best = shared + count * own
        return found | {"ratio": found["with_s"] / found["without_s"], "computed of best": found["computed"] / best}

    def profile(self, rows: int, context: int, top: int = 15) -> list[tuple[str, float, float]]:
        """Return (kernel, microseconds of a decode step, launches): the whole step, then the longest first."""
        from torch.profiler import ProfilerActivity, profile

        rng = np.random.default_rng(rows)
        prompts = [self.ids(rng, context // self.divisor) for _ in range(self.rows(rows))]
        steps = 16
        self.generate(prompts, max_tokens=2)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.generate(prompts, max_tokens=steps + 1)
        times, counts = Counter[str](), Counter[str]()
        for event in found.events():
            name = event.name[:90]
            times[name] += event.device_time / steps
            counts[name] += 1
        whole = sum(times.values())
        return [("all kernels", whole, sum(counts.values()) / steps)] + [
            (name, time, counts[name] / steps) for name, time in times.most_common(top)
        ]

    def run(self, name: str, measure: Callable[[], Any]) -> None:
        """Store and print one figure, or the reason why there is none."""
        try:
            self.figures[name] = measure()
        except Exception as error:
            self.figures[name] = f"{type(error).__name__}: {str(error)[:200]}"
            self.failed = True
        print(f"{name:24} {self.figures[name]}", flush=True)


def sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read rows and context of each decode measurement, from ROWSxCONTEXT,..."""
    found = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    return tuple((rows, context) for rows, context in found)


def measure(given: argparse.Namespace) -> int:
    """Measure one shape on one engine, in this process."""
    from bench.gpu.published import PUBLISHED, fitted

    (name,) = given.shapes
    shape = SHAPES.get(name) or PUBLISHED[name]
    shape = fitted(shape, given.layers) if given.layers else shape
    shape = shape | ({"num_experts": given.experts} if given.experts else {})
    longest = max(n for _, n in given.decode)
    measured = Measured(given.engine, shape, tiny=given.tiny, kv=given.kv, longest=longest, weights=given.weights)
    print(f"{name}: first token after {measured.figures['start_s']} s; {measured.figures['how']}", flush=True)
    only = given.only.split(",")
    if "decode" in only:
        for rows, context in given.decode:
            measured.run(f"decode {rows} x {context}, ms", lambda at=(rows, context): round(measured.decode(*at), 3))
            if given.profile and given.engine == "graftlm":
                for kernel, us, launches in measured.profile(rows, context):
                    print(f"    {us:9.1f} us {launches:7.1f}  {kernel}", flush=True)
    if "prefill" in only:
        measured.run("prefill, tokens/s", lambda: round(measured.prefill()))
    if "answers" in only:
        measured.run("answers, s", measured.answers)
    if "shared" in only:
        measured.run("shared", measured.shared)
    if "sampled" in only:
        measured.run("sampled, tokens/s", lambda: round(max(measured.sampled(seed) for seed in (1, 2)), 1))
    if "mixed" in only:
        measured.run("mixed, requests/s", lambda: round(max(measured.mixed(seed) for seed in (1, 2)), 2))
    if given.output:
        given.output.write_text(json.dumps({"shape": name, **measured.figures}, indent=1) + "\n")
    return int(
        any(str(value).partition(":")[0].endswith(("Error", "Exception")) for value in measured.figures.values())
    )


def compare(given: argparse.Namespace) -> int:
    """Measure each shape on each engine, a process each; write all figures after every process."""
    engines: dict[str, dict[str, str]] = {"graftlm": {}}
    if given.peers is not None:
        engines["vllm"] = {"PYTHONPATH": os.pathsep.join([str(given.peers / "site_vllm"), str(ROOT)])}
    found: dict[str, dict[str, Any]] = {}
    for name in given.shapes:
        for engine, environment in engines.items():
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "figures.json"
                command = ["-m", "bench.gpu.shapes", name, "--engine", engine, "--only", given.only]
                command += ["--decode", ",".join(f"{rows}x{context}" for rows, context in given.decode)]
                command += ["--json", str(output), *(["--tiny"] if given.tiny else [])]
                command += ["--layers", str(given.layers)] if given.layers else []
                command += ["--experts", str(given.experts)] if given.experts else []
                command += ["--profile"] if given.profile else []
                command += ["--kv", given.kv, "--weights", given.weights]
                with (Path(folder) / "errors").open("w+") as errors:
                    code = python_process.run(command, env=os.environ | environment, cwd=ROOT, stderr=errors).returncode
                    errors.seek(0)
                    told = "".join(errors.readlines()[-5:])
                figures = json.loads(output.read_text()) if output.exists() else {"failed": f"exit {code}: {told}"}
                found.setdefault(name, {})[engine] = figures
                print(f"{name} {engine}: {figures}", flush=True)
                if given.output:
                    given.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("failed" in figures["graftlm"] for figures in found.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.shapes", description=__doc__)
    from bench.gpu.published import PUBLISHED

    names = {**SHAPES, **PUBLISHED}
    parser.add_argument("shapes", nargs="+", choices=names, metavar="SHAPE", help=", ".join(names))
    parser.add_argument("--engine", choices=SHAPE_ENGINES, help="one shape on this engine, in this process")
    parser.add_argument("--peers", type=Path, help="folder with site_vllm: measure vLLM too")
    parser.add_argument("--only", default="decode,sampled,mixed,answers", help="sections, with commas")
    parser.add_argument("--decode", type=sizes, default=DECODE, help="ROWSxCONTEXT with commas, as 1x500,32x1500")
    parser.add_argument("--profile", action="store_true", help="the kernels of decode steps, by time")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has")
    parser.add_argument("--kv", default="auto", help="CacheConfig.dtype of GraftLM: model, compact, fp8")
    parser.add_argument("--weights", default="bf16", help="bf16, fp8, fp8-rows, awq, int4-128 or mxfp4")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts, on any device")
    parser.add_argument("--json", type=Path, dest="output", help="write the figures to this file")
    given = parser.parse_args(arguments)
    if given.engine and len(given.shapes) > 1:
        parser.error(f"--engine runs one shape, {len(given.shapes)} were given; leave --engine out")
    return measure(given) if given.engine else compare(given)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # nothing is torn down: the card is free when the process is gone
