"""The engine whose device is a clock: real scheduling, steps that take what the table says, tokens that masks allow."""

from __future__ import annotations

import pytest

from bench.frameworks._paced import DECODE_S, PROMPT_TOKEN_S, WRITTEN, paced_runtime


def test_steps_take_the_time_of_the_table() -> None:
    with paced_runtime() as (runtime, clock):
        ids = list(range(100, 300))
        done = runtime.generate(ids, max_tokens=5, temperature=0, ignore_eos=True)
        assert list(done.token_ids) == [WRITTEN] * 5
        prompt_s = max(DECODE_S[1], len(ids) * PROMPT_TOKEN_S)
        # a step may have been launched before the last token was read
        assert clock.busy_s == pytest.approx(prompt_s + 4 * DECODE_S[1], abs=1.01 * DECODE_S[1])
        stats = runtime.stats()
        runtime.generate(ids, max_tokens=1, temperature=0)
        assert runtime.stats().cached_tokens - stats.cached_tokens == len(ids) - 1


def test_what_a_grammar_forces_is_written() -> None:
    with paced_runtime() as (runtime, _):
        assert runtime.generate("Is it so? ", regex="yes|no", max_tokens=8).text in ("yes", "no")
