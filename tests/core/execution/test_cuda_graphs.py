"""The graph runner's choices and buffers, with graphs that run their kernels anew instead of replaying a capture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from graftlm.core.config import CacheConfig
from graftlm.core.execution.cuda_graphs import READ, SHARED_READ, Captured, GraphRunner, ReplayCost, Shape
from graftlm.core.runtime import Runtime
from graftlm.kernels.gpu.attention.step_buffers import Layout
from graftlm.kernels.wire_plan import WirePlan
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures graphs of its own")


def small_model() -> PreTrainedModel:
    """One KV head: the interpreter runs the programs of a grid one by one."""
    return tiny_model(num_attention_heads=2, num_key_value_heads=1)


@dataclass
class Rerun:
    """Stands in for a captured graph: reads the same buffers, writes the same logits."""

    runner: GraphRunner
    shape: Shape
    logits: torch.Tensor

    def replay(self) -> None:
        runner, (num_rows, prefix) = self.runner, self.shape
        runner.attention.bind(runner.step, Layout(num_rows, num_rows, 1, prefix))
        self.logits.copy_(runner._run(num_rows, runner.eager))


class Rerunning(GraphRunner):
    replayed: list[tuple[int, str]]

    def _capture(self, shape: Shape, pool: Any) -> Captured:
        num_logits = min(shape.num_rows, len(self.logits_rows))
        logits = torch.full((num_logits, self.eager.loaded.vocab_size), float("nan"))
        return Captured(Rerun(self, shape, logits), logits)  # type: ignore[arg-type]

    def forward(self, plan: WirePlan) -> torch.Tensor:
        if self._fits(plan):
            self.replayed.append((plan.num_tokens, "decode" if plan.is_decode else "mixed"))
        return super().forward(plan)


@pytest.fixture
def rt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setattr(Rerun, "pool", lambda self: None, raising=False)
    options: dict[str, Any] = {"attention": "triton", "overlap": True, "max_batch": 8}
    with Runtime(small_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=600), **options) as made:
        engine: Any = made.load()._thread.engine
        paged = engine.runner
        # slot 600 is the scratch slot, behind those of the pool
        engine.steps.runner = Rerunning(paged, paged.attention, max_batch=8, max_len=512, scratch=600)
        engine.runner.replayed = []
        yield made


def test_decode_steps_are_replayed_padded_to_the_next_size(rt: Runtime) -> None:
    prompts = [random_prompt(70, seed=1) + random_prompt(3 + i, seed=i) for i in range(5)]
    answers = rt.generate(prompts, temperature=0, max_tokens=4, ignore_eos=True)
    assert [a.token_ids for a in answers] == [greedy_reference(small_model(), p, 4) for p in prompts]
    engine: Any = rt._thread.engine
    # the first prompt's prefill goes ahead of its siblings'
    assert engine.runner.replayed == [(73, "mixed"), (23, "mixed"), (5, "decode"), (5, "decode"), (4, "decode")]


def test_a_few_tokens_of_some_rows_are_rows_of_a_decode_step(rt: Runtime) -> None:
    prompts = [random_prompt(40, seed=1) + random_prompt(4 + i, seed=i) for i in range(4)]
    first = [a.token_ids for a in rt.generate(prompts, temperature=0, max_tokens=4, ignore_eos=True)]
    engine: Any = rt._thread.engine
    engine.runner.replayed.clear()
    longer = [[*p, *said, 9, 8, 7] for p, said in zip(prompts, first, strict=True)]
    answers = rt.generate(longer, temperature=0, max_tokens=3, ignore_eos=True)
    assert [a.token_ids for a in answers] == [greedy_reference(small_model(), p, 3) for p in longer]
    num_tokens, kind = engine.runner.replayed[0]
    assert kind == "mixed" and num_tokens <= 4 * 5


def test_a_step_of_more_tokens_than_logits_is_replayed(rt: Runtime) -> None:
    prompts = [random_prompt(20 + i, seed=i) for i in range(4)]
    answers = rt.generate(prompts, temperature=0, max_tokens=2, ignore_eos=True)
    assert [a.token_ids for a in answers] == [greedy_reference(small_model(), p, 2) for p in prompts]
    engine: Any = rt._thread.engine
    assert engine.runner.replayed[0] == (86, "mixed")
    assert engine.runner.sizes[-1] > 86 > len(engine.runner.logits_rows)


def test_scores_of_more_tokens_than_a_graph_has_logits_are_computed_without_one(rt: Runtime) -> None:
    text = random_prompt(80, seed=3)
    with Runtime(small_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=600)) as plain:
        expected = plain.score([5], text)
    assert rt.score([5], text).logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    engine: Any = rt._thread.engine
    assert engine.runner.replayed == []


def test_a_shared_prefix_counts_as_read_once(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = random_prompt(200, seed=1)
    first = rt.generate([[*prefix, 7]] * 2, temperature=0, max_tokens=1)[0]
    assert first.usage.prompt_tokens == 201
    engine: Any = rt._thread.engine
    engine.runner.replayed.clear()
    # 5 rows of 4 tokens behind 200 that they share: 4,000 reads of the prefix count a third, 30 others in full
    cost = engine.runner.cost
    reads = cost._kv_numbers * (READ * 30 + SHARED_READ * 4_000)
    monkeypatch.setattr("graftlm.core.execution.cuda_graphs.LAUNCH", cost._per_token * 20 + reads)
    monkeypatch.setattr("graftlm.kernels.gpu.attention.step_buffers.MIN_PREFIX_READS", 1000)
    prompts = [prefix + random_prompt(4, seed=2 + i) for i in range(5)]
    answers = rt.generate(prompts, temperature=0, max_tokens=2, ignore_eos=True)
    assert [a.token_ids for a in answers] == [greedy_reference(small_model(), p, 2) for p in prompts]
    assert engine.runner.replayed[0] == (20, "mixed")


def test_forced_tokens_are_replayed_with_the_others(rt: Runtime) -> None:
    enums = {name: {"enum": ["red", "green"]} for name in ("a", "b")}
    schema = {"type": "object", "properties": enums, "required": ["a", "b"]}
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    with Runtime(small_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=600)) as plain:
        expected = [plain.generate(p, temperature=0, max_tokens=40, json_schema=schema).text for p in prompts]
    done = rt.generate(prompts, temperature=0, max_tokens=40, json_schema=schema)
    assert [d.text for d in done] == expected
    engine: Any = rt._thread.engine
    assert any(kind == "mixed" for _, kind in engine.runner.replayed)


LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def test_smaller_layers_are_worth_graphs_of_more_tokens() -> None:
    large = ReplayCost(SimpleNamespace(**LLAMA_8B))
    small = ReplayCost(SimpleNamespace(**{**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}))
    assert [large.fits(n) for n in (1_024, 1_280)] == [True, False]
    assert small.fits(1_536)


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    active = ReplayCost(SimpleNamespace(**{**LLAMA_8B, "intermediate_size": 8 * 768}))
    mixture = {**LLAMA_8B, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    found = ReplayCost(SimpleNamespace(**mixture))
    assert [found.fits(n) for n in range(1, 4_000)] == [active.fits(n) for n in range(1, 4_000)]


def test_steps_of_layers_with_other_heads_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rerun, "pool", lambda self: None, raising=False)
    sizes: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    model = tiny_model("gemma4", hidden_size_per_layer_input=0, **sizes)
    prompts = [random_prompt(20 + i, seed=i) for i in range(2)]
    options: dict[str, Any] = {"attention": "triton", "overlap": True, "max_batch": 4}
    with Runtime(model, tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=200), **options) as made:
        engine: Any = made.load()._thread.engine
        engine.steps.runner = Rerunning(engine.runner, engine.runner.attention, max_batch=4, max_len=128, scratch=200)
        engine.runner.replayed = []
        answers = made.generate(prompts, temperature=0, max_tokens=3, ignore_eos=True)
        assert [kind for _, kind in engine.runner.replayed] == ["mixed", "decode", "decode"]
    assert [a.token_ids for a in answers] == [greedy_reference(model, p, 3) for p in prompts]
