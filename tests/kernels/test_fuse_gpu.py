"""Fusions for GPUs, whose kernels run in Triton's interpreter without one."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core import fuse_layers
from graftlm.core.config import EngineConfig
from graftlm.core.fuse_gpu import PackedProjections, fuse_gpu
from graftlm.core.fuse_layers import FusedLayer
from graftlm.core.model import KVStore, PagedRunner, load_model
from graftlm.core.pages import Extent
from graftlm.core.plan import PlanRow, StepPlan
from graftlm.core.qualify import batch_dependence
from graftlm.core.request import Request, Sequence
from graftlm.kernels.halved_product import product_halves
from graftlm.kernels.triton_attention import TritonAttention
from tests.models import byte_tokenizer, random_prompt, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _without_what_is_fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.model.fuse_cpu", lambda model, fusions: 0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3", "gpt2"])
def test_a_fused_model_computes_what_it_did_and_can_be_put_back(kind: str) -> None:
    model = tiny_model(kind).to(DEVICE)
    ids = torch.tensor([random_prompt(6)], device=DEVICE)
    names = [name for name, _ in model.named_parameters()]
    with torch.inference_mode():
        before = model(ids).logits
        fusions = fuse_gpu(model)
        fused = model(ids).logits
        fusions.undo()
        after = model(ids).logits
    assert float((fused - before).norm() / before.norm()) < 1e-5
    assert torch.equal(after, before)
    assert [name for name, _ in model.named_parameters()] == names


def test_projections_of_a_llama_are_packed() -> None:
    model = tiny_model("llama").to(DEVICE)
    fusions = fuse_gpu(model)
    assert fusions.num_packed == 4  # two layers: qkv, and gate and up
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedProjections)
    fusions.undo()


def test_a_norm_with_other_arithmetic_keeps_its_own() -> None:
    model = tiny_model("gemma3").to(DEVICE)
    fusions = fuse_gpu(model)
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms and not any("forward" in vars(m) for m in norms)  # it scales by 1 + weight
    fusions.undo()


@pytest.mark.parametrize("max_rows", [0, 64])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "qwen3_moe", "gpt2"])
def test_whole_layers_run_fused_in_the_paged_lane(kind: str, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.model._fuse", lambda model, device, strict: fuse_gpu(model, max_rows=max_rows))
    model = tiny_model(kind)
    config = EngineConfig(device=DEVICE.type, max_model_len=8)
    loaded = load_model(model, config, byte_tokenizer(), attention_factory=TritonAttention)
    assert loaded.lane == "paged"  # its ragged logits are those of the model before anything was fused
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)
    loaded.release()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    ("logits_rows", "computed"),
    [([12, 20], 2), ([20], 2), ([3, 12, 20], 3), (list(range(21)), 21)],  # rows end at tokens 12 and 20
)
@pytest.mark.parametrize("strict", [False, True])
def test_the_last_layer_ends_with_the_tokens_whose_logits_are_wanted(
    logits_rows: list[int], computed: int, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlm.core.model._fuse", lambda model, device, strict: fuse_gpu(model, strict=strict))
    config = EngineConfig(device=DEVICE.type, strict=strict, max_model_len=64)
    loaded = load_model(tiny_model("qwen3"), config, byte_tokenizer(), attention_factory=TritonAttention)
    attention = TritonAttention(KVStore(loaded.kv_layout, 32, loaded.dtype, DEVICE))
    attention.strict = strict
    runner = PagedRunner(loaded, attention)
    prompts = [random_prompt(13), random_prompt(8)]
    plan = prefill_plan(prompts)
    everything = runner.forward(plan)
    finished: list[int] = []
    finish = FusedLayer._finish
    monkeypatch.setattr(
        FusedLayer, "_finish", lambda self, x, attended: (finished.append(len(x)), finish(self, x, attended))[1]
    )
    few = runner.forward(replace(plan, logits_rows=torch.tensor(logits_rows)))
    assert finished == [21, computed]
    expected = everything[logits_rows]
    assert float((few - expected).norm() / expected.norm()) < 1e-5
    loaded.release()


@pytest.mark.parametrize(("num_tokens", "halved"), [(64, 0), (65, 2), (257, 0)])
def test_sums_of_some_rows_come_in_halves(num_tokens: int, halved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", intermediate_size=128)  # two layers, twice as many inputs of a sum as outputs
    config = EngineConfig(device=DEVICE.type, max_model_len=8)
    halves: list[int] = []
    monkeypatch.setattr(fuse_layers, "product_halves", lambda x, w: (halves.append(len(x)), product_halves(x, w))[1])
    logits: list[torch.Tensor] = []
    for max_rows in (0, 64):
        monkeypatch.setattr(
            "graftlm.core.model._fuse", lambda model, device, strict, rows=max_rows: fuse_gpu(model, max_rows=rows)
        )
        loaded = load_model(model, config, byte_tokenizer(), attention_factory=TritonAttention)
        halves.clear()
        runner = PagedRunner(loaded, TritonAttention(KVStore(loaded.kv_layout, num_tokens, loaded.dtype, DEVICE)))
        first = num_tokens // 2
        logits.append(runner.forward(prefill_plan([random_prompt(first), random_prompt(num_tokens - first)])))
        loaded.release()
    assert halves == [num_tokens] * halved
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < 1e-5


def gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gates, ups = torch.nn.functional.linear(x, weight).chunk(2, -1)
    return torch.nn.functional.silu(gates) * ups


@pytest.fixture
def gated_from_nine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are inside products of nine rows and more: rows that are many take an interpreter long."""
    monkeypatch.setattr(fuse_layers, "can_gate", lambda weight: True)
    monkeypatch.setattr(fuse_layers, "is_gated", lambda num_rows: num_rows >= 9)
    monkeypatch.setattr(fuse_layers, "ONE_OF_EACH", (9, 20))


@pytest.mark.usefixtures("gated_from_nine")
@pytest.mark.parametrize(("num_tokens", "gated"), [(8, 0), (9, 2), (65, 2)])
def test_gates_are_inside_the_product_where_that_is_faster(
    num_tokens: int, gated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    monkeypatch.setattr(fuse_layers, "wide_gate", lambda x, w: (rows.append(len(x)), gate(x, w))[1])
    monkeypatch.setattr("graftlm.core.model._fuse", lambda model, device, strict: fuse_gpu(model, max_rows=64))
    config = EngineConfig(device=DEVICE.type, max_model_len=8)
    loaded = load_model(tiny_model("llama"), config, byte_tokenizer(), attention_factory=TritonAttention)
    assert rows[:4] == [9, 20] * 2  # what its kernels give is looked at first, in each layer
    rows.clear()
    runner = PagedRunner(loaded, TritonAttention(KVStore(loaded.kv_layout, num_tokens, loaded.dtype, DEVICE)))
    runner.forward(prefill_plan([random_prompt(num_tokens)]))
    assert rows == [num_tokens] * gated
    loaded.release()


@pytest.mark.usefixtures("gated_from_nine")
def test_a_gate_that_is_wrong_for_many_rows_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_layers, "wide_gate", lambda x, w: gate(x, w) * (1.0 if len(x) < 20 else 1.001))
    model = tiny_model("llama").to(DEVICE)
    fusions = fuse_gpu(model, max_rows=64)
    layers = [module.forward for module in model.modules() if isinstance(vars(module).get("forward"), FusedLayer)]
    assert len(layers) == 2
    assert not any(layer.gates for layer in layers)
    fusions.undo()


@pytest.mark.parametrize(("num_tokens", "used"), [(3, 2), (64, 2), (65, 0)])
def test_products_of_few_rows_are_read_without_a_pause(
    num_tokens: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        called.append("product")
        return torch.nn.functional.linear(x, weight, bias)

    def parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        called.append("parts")
        return torch.nn.functional.linear(x, weight)[None]

    monkeypatch.setattr(fuse_layers, "can_flow", lambda weight: True)
    monkeypatch.setattr(fuse_layers, "flow_product", product)
    monkeypatch.setattr(fuse_layers, "flow_parts", parts)
    monkeypatch.setattr("graftlm.core.model._fuse", lambda model, device, strict: fuse_gpu(model, max_rows=64))
    config = EngineConfig(device=DEVICE.type, max_model_len=8)
    loaded = load_model(tiny_model("llama"), config, byte_tokenizer(), attention_factory=TritonAttention)
    called.clear()
    runner = PagedRunner(loaded, TritonAttention(KVStore(loaded.kv_layout, num_tokens, loaded.dtype, DEVICE)))
    runner.forward(prefill_plan([random_prompt(num_tokens)]))
    assert called == ["product", "parts", "parts"] * used
    loaded.release()


@pytest.mark.parametrize("wrong", ["flow_product", "flow_parts"])
def test_a_product_that_is_wrong_for_some_rows_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias) * (1.001 if len(x) == 64 and wrong == "flow_product" else 1)

    def parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)[None] * (1.001 if len(x) == 64 and wrong == "flow_parts" else 1)

    monkeypatch.setattr(fuse_layers, "can_flow", lambda weight: True)
    monkeypatch.setattr(fuse_layers, "flow_product", product)
    monkeypatch.setattr(fuse_layers, "flow_parts", parts)
    model = tiny_model("llama").to(DEVICE)
    fusions = fuse_gpu(model, max_rows=64)
    layers = [module.forward for module in model.modules() if isinstance(vars(module).get("forward"), FusedLayer)]
    assert len(layers) == 2
    assert not any(layer.flows for layer in layers)
    fusions.undo()


def prefill_plan(prompts: list[list[int]]) -> StepPlan:
    """A step that computes whole prompts, each in slots of its own, and wants all logits."""
    ends = list(itertools.accumulate(len(p) for p in prompts))
    starts = [0, *ends[:-1]]
    num_tokens = ends[-1]
    return StepPlan(
        rows=tuple(
            PlanRow(Sequence(Request(p), np.array(p, np.int32)), start, len(p), 0, (Extent(start, end),))
            for p, start, end in zip(prompts, starts, ends, strict=True)
        ),
        input_ids=torch.tensor([token for p in prompts for token in p]),
        positions=torch.cat([torch.arange(len(p)) for p in prompts]),
        out_slots=torch.arange(num_tokens),
        logits_rows=torch.arange(num_tokens),
        num_logits_per_row=tuple(map(len, prompts)),
        kind="mixed",
    )


def test_a_layer_with_another_sum_keeps_its_own_forward() -> None:
    model = tiny_model("granite", residual_multiplier=0.5).to(DEVICE)
    fusions = fuse_gpu(model)
    assert not any(isinstance(layer.forward, FusedLayer) for layer in model.model.layers)
    fusions.undo()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_strict_model_computes_what_it_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.model._fuse", lambda model, device, strict: fuse_gpu(model, strict=strict))
    config = EngineConfig(device=DEVICE.type, strict=True, max_model_len=64)
    loaded = load_model(tiny_model(kind), config, byte_tokenizer(), attention_factory=TritonAttention)
    assert loaded.lane == "paged"
    loaded.release()


@pytest.mark.gpu  # the products of Triton's interpreter do depend on where a row is
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_strict_logits_are_the_same_to_the_last_bit_in_every_batch(kind: str, dtype: Any) -> None:
    config = EngineConfig(device=DEVICE.type, dtype=dtype, strict=True, max_model_len=8 if kind == "mistral" else 512)
    loaded = load_model(tiny_model(kind), config, byte_tokenizer(), attention_factory=TritonAttention)
    assert loaded.lane == "paged"
    assert batch_dependence(loaded, TritonAttention) is None
    loaded.release()
