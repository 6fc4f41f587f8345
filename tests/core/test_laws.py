"""The laws of the runtime under a mixed load: every request ends, nothing leaks, greedy answers do not change."""

import random
import threading
from concurrent.futures import CancelledError

import pytest

from graftlm.core.config import CacheConfig, SamplingParams
from graftlm.core.errors import GraftError, RequestTimeout, RequestTooLong
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
}
PREFIXES = [random_prompt(length, seed=length) for length in (5, 40, 70)]


def prompt(dice: random.Random) -> list[int]:
    return dice.choice(PREFIXES) + random_prompt(dice.randint(1, 20), seed=dice.randint(0, 5))


def one_call(runtime: Runtime, dice: random.Random, greedy: list[tuple[list[int], Completion]]) -> str:
    """Make one request of a random kind and see it through; returns how it ended."""
    kind = dice.choice(["greedy", "greedy", "sampled", "schema", "stream", "cancel", "timeout", "too long", "score"])
    ids = prompt(dice)
    if kind == "greedy":
        greedy.append((ids, runtime.generate(ids, temperature=0, max_tokens=8, ignore_eos=True)))
    elif kind == "sampled":
        done = runtime.generate(ids, n=dice.randint(1, 3), max_tokens=dice.randint(1, 12), top_p=0.9)
        assert len(done.completions or [done]) >= 1
    elif kind == "schema":
        done = runtime.generate(ids, json_schema=SCHEMA, max_tokens=dice.randint(30, 50))
        assert done.text_complete and done.text.startswith('{"a":')
    elif kind == "stream":
        with runtime.stream(ids, max_tokens=20, ignore_eos=True) as chunks:
            for _ in range(dice.randint(0, 4)):
                next(chunks, None)
    elif kind == "cancel":
        future = runtime.submit(Request(ids, SamplingParams(max_tokens=60, ignore_eos=True)))
        future.cancel()
        with pytest.raises(CancelledError):
            future.result()
    elif kind == "timeout":
        with pytest.raises(RequestTimeout):
            runtime.generate(ids, max_tokens=400, ignore_eos=True, timeout=0.0001)
    elif kind == "too long":
        with pytest.raises(RequestTooLong):
            runtime.generate(ids * 100, max_tokens=4)
    else:
        assert len(runtime.score(ids, [1, 2, 3]).logprobs) == 3
    return kind


@pytest.mark.parametrize(
    "options",
    [
        {"cache": CacheConfig(max_tokens=4000)},
        {"cache": CacheConfig(max_tokens=520), "max_batch": 6, "max_step_tokens": 48},
        {"cache": CacheConfig(max_tokens=2000, page_size=8, eviction="lfu"), "max_step_tokens": 64},
        {"cache": CacheConfig(max_tokens=1500), "max_batch": 6, "max_step_tokens": 48, "overlap": True},
    ],
    ids=["roomy", "tight", "pages", "overlap"],
)
def test_a_mixed_load_from_eight_threads_ends_leaks_nothing_and_changes_no_answer(options: dict[str, object]) -> None:
    greedy: list[tuple[list[int], Completion]] = []
    ended: list[str] = []
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        try:
            ended.extend(one_call(runtime, dice, greedy) for _ in range(14))
        except BaseException as error:
            failures.append(error)

    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), **options) as runtime:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads), "a request never ended"
        runtime._thread.call(lambda engine: engine.check_integrity())
        stats = runtime.stats()
    assert failures == []
    assert len(ended) == 8 * 14
    assert stats.slots_in_use == 0
    assert stats.slots_free + stats.slots_cached == stats.slots_total
    model = tiny_model("llama")
    for ids, completion in greedy:
        assert completion.token_ids == greedy_reference(model, ids, 8)


def test_closing_in_the_middle_of_a_load_ends_every_request() -> None:
    runtime = Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=4000)).load()
    requests = [Request(random_prompt(20, seed=i), SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(30)]
    futures = runtime.submit_many(requests)
    runtime.close()
    for future in futures:
        with pytest.raises(GraftError, match="closed before"):
            future.result(timeout=120)
