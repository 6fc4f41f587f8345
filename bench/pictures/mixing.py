"""python -m bench.pictures.mixing: random requests with equal texts about pictures of one size, never mixed up.

Every answer is compared with that of transformers to the same question. Rounds of up to 200 requests are submitted at
once or one by one, with one picture, two in either order, or none; some requests are cancelled, the caches are emptied
now and then, and the pool and the features are so small that prefixes within pictures and encoder outputs are evicted.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import CancelledError
from typing import Any

import graftlm as gl
from bench.pictures.families import Answer, Messages, _before_end, _Family, ask
from graftlm.testing.random_vision import random_picture

TEXTS = ("What is it?", "And now?")
NUM_PICTURES = 16
NUM_PAIRS = 40
MAX_TOKENS = 5


def main() -> int:
    """Print the requests that were compared; return 1 if any answer belongs to another request."""
    parser = argparse.ArgumentParser("python -m bench.pictures.mixing", description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="?", default="qwen2_5_vl")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    started = time.perf_counter()
    counts = mixed_up(given.family, given.requests, given.device)
    print(f"{given.family}: {counts}, {time.perf_counter() - started:.0f} s")
    return int(counts["wrong"] > 0 or not counts["cancelled"])


def mixed_up(family: str, num_requests: int, device: str = "cpu", seed: int = 0) -> dict[str, int]:
    """Return the numbers of right, wrong and cancelled answers, of distinct answers, encoder runs and retractions."""
    rng = random.Random(seed)
    beside = _Family(family, device)
    questions = _questions(beside, rng)
    longest = max(count for _, (_, count) in questions) + MAX_TOKENS
    counts = dict.fromkeys(("right", "wrong", "cancelled", "retracted", "encoded"), 0)
    counts["distinct"] = len({tuple(ids) for _, (ids, _) in questions})
    pool = gl.CacheConfig(max_tokens=5 * longest // 2)
    options = {"cache": pool, "max_model_len": longest, "max_batch": 24, "max_step_tokens": 48}
    with beside.runtime(media_cache_bytes=8_000, **options) as runtime:
        asked = 0
        while asked < num_requests:
            chosen = rng.choices(questions, k=min(rng.choice((1, 7, 50, 200)), num_requests - asked))
            asked += len(chosen)
            for name, count in _round(runtime, chosen, rng).items():
                counts[name] += count
            if rng.random() < 0.1:
                runtime.clear_cache()
        runtime._thread.call(lambda engine: engine.check_integrity(), "check_integrity()")
        counts["retracted"], counts["encoded"] = runtime.stats().retracted, runtime.stats().images_encoded
    return counts


def _questions(beside: _Family, rng: random.Random) -> list[tuple[Messages, Answer]]:
    """Return questions with the answers of transformers; pictures have one size."""
    pictures = [random_picture(1000 + seed, 60, 60) for seed in range(NUM_PICTURES)]
    prompts = [ask(text, picture) for text in TEXTS for picture in pictures]
    for _ in range(NUM_PAIRS // 2):
        first, second = rng.sample(pictures, 2)
        prompts += [ask(TEXTS[0], first, second), ask(TEXTS[0], second, first)]
    prompts += [ask(text) for text in TEXTS]
    return [(prompt, beside.own(prompt, MAX_TOKENS)) for prompt in prompts]


def _round(runtime: gl.Runtime, chosen: list[tuple[Messages, Answer]], rng: random.Random) -> dict[str, int]:
    params = gl.SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    requests = [gl.Request(prompt, params) for prompt, _ in chosen]
    futures: list[Any] = (
        runtime.submit_many(requests) if rng.random() < 0.7 else [runtime.submit(request) for request in requests]
    )
    for future in rng.sample(futures, len(futures) // 20):
        future.cancel()
    counts = {"right": 0, "wrong": 0, "cancelled": 0}
    for future, (_, expected) in zip(futures, chosen, strict=True):
        try:
            done = future.result()
        except CancelledError:
            counts["cancelled"] += 1
            continue
        same = (_before_end(done.token_ids), done.usage.prompt_tokens) == expected
        counts["right" if same else "wrong"] += 1
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
