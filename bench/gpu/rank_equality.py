"""python -m bench.gpu.rank_equality [KIND ...]: greedy float32 tokens on several GPUs beside those on one, by family.

Small models with random weights: prompts alone, again from the cache, in a batch, and in chunks after the cache was
cleared. The answers of one GPU come first, of several families at once; then each family on all ranks, in a process
of its own with a limit of time, whose result is printed as it comes. Where a token differs, the gap between the two
likeliest tokens of one GPU is printed too: sums of ranks round in another order. `--only 1` and `--only 2` with one
folder of `--answers` split the work over two calls, and what is there is not computed again. `--cpu` runs on CPUs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu import patched_follower
from bench.harness import ROOT
from graftlm.kernels.jit import python_process

KINDS = (
    "llama", "qwen2", "qwen3", "mixtral", "gpt_oss", "deepseek_v3", "gemma2", "gemma3", "phi3", "glm4", "qwen3_moe",
    "mistral", "olmo2", "cohere2", "granite", "starcoder2", "qwen3_next",
    "gemma4",
)  # fmt: skip
ON_GPU = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Large enough for the kernels of Hopper."""
LENGTHS = (5, 60, 300)
NEW = 24
STACKS_S = 40
"""Seconds between two prints of what all threads of a rank do."""


def answers(kind: str, ranks: int, cpu: bool, stacks: bool) -> dict[str, Any]:
    """Return the answers of one family, and the gaps of its likeliest tokens."""
    import graftlm as gl
    from tests.models import FIXED, byte_tokenizer, random_prompt, tiny_model

    began = time.monotonic()

    def say(text: str) -> None:
        print(f"    {kind} on {ranks}, {time.monotonic() - began:.1f} s: {text}", flush=True)

    sizes = {} if cpu else {name: size for name, size in ON_GPU.items() if name not in FIXED.get(kind, ())}
    greedy: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    greedy |= {"logprobs": True, "top_logprobs": 2}
    prompts = [random_prompt(length, length) for length in LENGTHS]
    options: dict[str, Any] = {"device": "cpu", "strict": True} if cpu else {"max_batch": 16}
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(kind, **sizes).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        if stacks and ranks > 1:
            patched_follower.apply(["stacks"], Path(folder))
        cache = gl.CacheConfig(max_tokens=20_000)
        say("model written")
        with gl.Runtime(
            folder, dtype="float32", tensor_parallel=ranks, cache=cache, quiet=True, max_step_tokens=128, **options
        ) as runtime:
            runtime.load()
            say(f"loaded, {runtime.stats().execution}")
            found = [runtime.generate(prompt, **greedy) for prompt in prompts]
            say("alone")
            found += runtime.generate(prompts * 3, **greedy)
            runtime.clear_cache()
            found += runtime.generate(prompts * 3, **greedy)
            say("in batches")
    say("closed")
    gaps = [[one.top[0][2] - one.top[1][2] for one in answer.logprobs or []] for answer in found]
    return {"tokens": [answer.token_ids for answer in found], "gaps": gaps}


def verdict(one: dict[str, Any], several: dict[str, Any]) -> str:
    """Compare the answers of one GPU with those of all ranks."""
    pairs = list(zip(one["tokens"], several["tokens"], strict=True))
    wrong = [number for number, (a, b) in enumerate(pairs) if a != b]
    if not wrong:
        return f"EQUAL, {len(pairs)} of {len(pairs)} answers"
    first = wrong[0]
    at = next(i for i, (a, b) in enumerate(zip(*pairs[first], strict=True)) if a != b)
    gap = one["gaps"][first][at]
    return f"DIFFERENT, {len(wrong)} of {len(pairs)} answers; answer {first} from token {at} on, gap {gap:.2e}"


def child(kind: str, ranks: int, given: argparse.Namespace, out: Path, limit: float) -> str:
    """Run one family in a process of its own. -> what went wrong, if anything did"""
    command = ["-m", "bench.gpu.rank_equality", kind, "--job", str(ranks), "--out", str(out)]
    process = python_process.start(
        command + ["--cpu"] * given.cpu + ["--stacks"] * given.stacks,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no answer in {limit:.0f} s"
    return f"exit status {code}" if code else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.rank_equality", description=__doc__)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a family")
    parser.add_argument("--at-once", type=int, default=4, help="families at once")
    parser.add_argument("--only", type=int, help="answers of this number of GPUs alone")
    parser.add_argument("--answers", type=Path, help="folder that keeps the answers")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--stacks", action="store_true", help=f"print every {STACKS_S} s what all threads do")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        if given.stacks:  # a dump beside running threads may end the process
            faulthandler.dump_traceback_later(STACKS_S, repeat=True)
        try:
            found = answers(given.kinds[0], given.job, given.cpu, given.stacks)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        Path(given.out).write_text(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:
        kept = given.answers or Path(folder)
        kept.mkdir(exist_ok=True)
        for ranks in sorted({1, given.ranks}):
            if given.only in (None, ranks):
                list(pool.map(lambda kind, ranks=ranks: compute(kind, ranks, given, kept), given.kinds))
        return int(not all([compare(kind, given.ranks, kept) for kind in given.kinds]))


def compute(kind: str, ranks: int, given: argparse.Namespace, kept: Path) -> None:
    """Compute the answers of one family, if they are not there."""
    out, began = kept / f"{kind}-{ranks}", time.monotonic()
    if not out.exists():
        trouble = child(kind, ranks, given, out, given.limit if ranks > 1 else 3 * given.limit)
        print(f"{kind} on {ranks}: {trouble or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)


def compare(kind: str, ranks: int, kept: Path) -> bool:
    """Print whether the answers of one family are equal. -> whether they are"""
    files = [kept / f"{kind}-{number}" for number in (1, ranks)]
    missing = [file.name for file in files if not file.exists()]
    words = f"NO RESULT of {', '.join(missing)}"
    if not missing:
        words = verdict(*(json.loads(file.read_text()) for file in files))
    print(f"{kind}: {words}", flush=True)
    return words.startswith("EQUAL")


if __name__ == "__main__":
    sys.exit(main())
