"""python -m bench.gpu.rank_drift [--seconds 60] [--steps 100000]: both ranks' residuals, compared after random steps.

Requests of random lengths come and go, sampled and greedy, so that steps have any number of rows and prompts come
between decode steps. Every sum over the ranks, with the residual after it, is folded into a digest on each rank; the
digests are equal as long as no bit of any residual of any step differs. A model of two layers in float32: a step takes
the host's time. `--tiny` runs on CPUs. Kernels of the ranks wait for each other, so a card that other processes use
too slows a step many times.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.patched_follower import apply
from bench.gpu.tensor_parallel import EXACT, TINY, prompts_of, write_model

MOST = 64
"""Requests at once."""
SHAPE = {**EXACT, "num_hidden_layers": 2, "vocab_size": 8192}
PROMPT, ANSWER = 600, 1000
"""Tokens of the longest prompt and of the longest answer."""


def lines_of(path: Path) -> dict[int, int]:
    """Read the digests of a rank, by the number of steps."""
    pairs = (line.split() for line in path.read_text().splitlines() if line.count(" ") == 1)
    return {int(steps): int(number) for steps, number in pairs}


def compared(folder: Path, ranks: int) -> tuple[str, bool]:
    """Compare the digests that all ranks have written by now. -> in words, whether some are there and none differ"""
    digests = [lines_of(folder / f"rank-{rank}") for rank in range(ranks)]
    common = sorted(set.intersection(*map(set, digests)))
    different = [at for at in common if len({one[at] for one in digests}) > 1]
    found = f"they differ from step {different[0]:,} on" if different else "all equal"
    words = f"digests compared at {len(common)} places up to step {max(common, default=0):,}: {found}"
    return words, bool(common) and not different


def run(
    runtime: Any, seconds: float, steps: int, vocab: int, longest: tuple[int, int], seed: int, report: Callable[[], str]
) -> int:
    """Submit random requests until the time or the steps are over.

    longest  tokens of a prompt, and of an answer
    report   said every 10 s
    -> steps
    """
    import graftlm as gl

    rng, began, number = random.Random(seed), time.monotonic(), 0
    open_requests: deque[Any] = deque()
    wanted, said = MOST, began
    while time.monotonic() - began < seconds and runtime.stats().steps < steps:
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{runtime.stats().steps:,} steps after {said - began:.0f} s; {report()}", flush=True)
        if len(open_requests) >= wanted:
            open_requests.popleft().result()
            if rng.random() < 0.1:
                wanted = int(MOST ** rng.random())  # most steps are of few rows, which are quick
            continue
        number += 1
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 8 == 0 else {"temperature": 0.0}
        sampling = gl.SamplingParams(max_tokens=rng.randint(1, longest[1]), ignore_eos=True, **sampled)
        (prompt,) = prompts_of(1, rng.randint(1, longest[0]), vocab, number % 50)
        open_requests.append(runtime.submit(gl.Request(prompt, sampling)))
    for request in open_requests:
        request.result()
    return int(runtime.stats().steps)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.rank_drift", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stacks", action="store_true", help="print every 40 s what all threads do")
    given = parser.parse_args()
    import graftlm as gl

    shape = TINY if given.tiny else SHAPE
    options: dict[str, Any] = {"device": "cpu"} if given.tiny else {"dtype": given.dtype}
    longest = (40, 20) if given.tiny else (PROMPT, ANSWER)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, torch.float32, 0.05)
        apply(["digest", *["stacks"] * given.stacks], Path(folder))
        cache = gl.CacheConfig(max_tokens=150_000)
        with gl.Runtime(folder, tensor_parallel=given.ranks, cache=cache, quiet=True, **options) as runtime:
            runtime.load()
            print(runtime.stats().execution, flush=True)
            began = time.monotonic()
            steps = run(
                runtime, given.seconds, given.steps, shape["vocab_size"], longest, given.seed,
                lambda: compared(Path(folder), given.ranks)[0],
            )  # fmt: skip
            print(f"{steps:,} steps, up to {MOST} rows, in {time.monotonic() - began:.0f} s", flush=True)
            time.sleep(1.0)
        words, equal = compared(Path(folder), given.ranks)
    print(words, flush=True)
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
