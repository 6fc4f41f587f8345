"""Fusions for GPUs, whose kernels run in Triton's interpreter without one."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from graftlm.core.config import EngineConfig
from graftlm.core.execution.paged import PagedRunner
from graftlm.core.fusion.gpu_layers import FusedLayer, LayerAroundAttention
from graftlm.core.fusion.gpu_modules import PackedProjections, fuse_gpu
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.load import load_model
from graftlm.core.model.qualify import batch_dependence
from graftlm.kernels import linear_dispatch
from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.gpu.attention.backend import TritonAttention
from graftlm.kernels.kv_store import allocate_kv
from graftlm.kernels.linear_kernels import Bits12, LinearKernel, Role, Rows, Run
from graftlm.kernels.weight import PlainWeight, Weight, hold_as, weight_of
from graftlm.kernels.wire_plan import Extent, Row, WirePlan
from tests.models import byte_tokenizer, random_prompt, tiny_model

KINDS = ["gemma2", "gemma3", "glm4", "granite", "olmo2", "cohere", "starcoder2", "gpt_oss"]
"""Families whose layers have other norms, sums, gates or rotations than Llama's."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE_KV_HEAD = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Quicker where heads are beside the point: the interpreter runs the programs of a grid one by one."""


@pytest.fixture(autouse=True)
def _without_what_is_fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.model.load.fuse_cpu", lambda model, fusions: 0)


def varied_model(kind: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model in which biases are not 0, and weights of norms not 1."""
    model = tiny_model(kind, **overrides)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def load_fused(
    model: torch.nn.Module, *, qualified: bool = True, max_rows: int | None = None, strict: bool = False
) -> LoadedModel:
    """A model for steps of the paged lane, fused as on a GPU.

    qualified  whether that lane is chosen, by what the model computes in it, or given
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "graftlm.core.model.load._fuse",
            lambda loaded, config, *, unchanged: fuse_gpu(loaded.model, max_rows=max_rows, strict=strict),
        )
        if not qualified:
            patch.setattr("graftlm.core.model.lane.qualify", lambda *_, **__: None)
        config = EngineConfig(device=DEVICE.type, strict=strict, max_model_len=64 if strict else 8)
        return load_model(model, config, byte_tokenizer(), attention_factory=TritonAttention)


def runner_of(loaded: LoadedModel, num_slots: int) -> PagedRunner:
    return PagedRunner(loaded, TritonAttention(allocate_kv(loaded.kv_layout, num_slots, loaded.dtype, DEVICE)))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3", "gpt2"])
def test_a_fused_model_computes_what_it_did_and_can_be_put_back(kind: str) -> None:
    model = varied_model(kind).to(DEVICE)
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
    model = varied_model("llama").to(DEVICE)
    fusions = fuse_gpu(model)
    assert fusions.num_packed == 4  # two layers: qkv, and gate and up
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedProjections)
    fusions.undo()


@pytest.mark.parametrize("max_rows", [0, 64])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "qwen3_moe", "gpt2"])
def test_whole_layers_run_fused_in_the_paged_lane(kind: str, max_rows: int) -> None:
    model = varied_model(kind, num_hidden_layers=2 if kind == "llama" else 1)
    loaded = load_fused(model, max_rows=max_rows)
    assert loaded.lane == "paged"  # its ragged logits are those of the model before anything was fused
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)
    loaded.release()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "qwen3_5_text", "lfm2", "lfm2_moe", "granitemoehybrid", "kimi_linear", "bamba"]
)
def test_both_kinds_of_layers_of_a_hybrid_run_fused(kind: str) -> None:
    loaded = load_fused(varied_model(kind), max_rows=64)
    turns = kind not in ("granitemoehybrid", "kimi_linear")
    around = "" if turns else ", 1 of them around their own attention"
    assert loaded.execution == f"paged, 2 of 2 layers fused{around}, 1 layers with a state"
    packed = [m for m in loaded.model.modules() if isinstance(m, PackedProjections)]
    # of attention that is no latent one, and of a delta rule
    assert len(packed) == (2 if kind.startswith("qwen3") else 1)
    loaded.release()
    assert not any("forward" in vars(m) for m in loaded.model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_families_run_fused(kind: str) -> None:
    model = varied_model(
        kind, **ONE_KV_HEAD, **({} if kind in ("gemma2", "gemma3", "gpt_oss") else {"num_hidden_layers": 1})
    )
    loaded = load_fused(model, max_rows=64)
    expected = f"paged, {len(loaded.layers)} of {len(loaded.layers)} layers fused"
    assert loaded.execution.partition(": decode steps are not one call")[0] == expected  # on a CPU these layers are not
    loaded.release()


@pytest.mark.parametrize("strict", [False, True])
def test_the_last_layer_ends_with_the_tokens_whose_logits_are_wanted(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_fused(varied_model("qwen3", **ONE_KV_HEAD), qualified=False, strict=strict)
    runner = runner_of(loaded, 21)
    runner.attention.strict = strict
    plan = prefill_plan([random_prompt(13), random_prompt(8)])
    finished: list[int] = []
    finish = FusedLayer._finish
    monkeypatch.setattr(
        FusedLayer, "_finish", lambda self, x, *others: (finished.append(len(x)), finish(self, x, *others))[1]
    )
    everything = runner.forward(plan)
    assert finished == [21, 21]
    for logits_rows, computed in ([12, 20], 2), ([20], 2), ([3, 12, 20], 3):  # rows end at tokens 12 and 20
        finished.clear()
        few = runner.forward(replace(plan, logits_rows=np.array(logits_rows)))
        assert finished == [21, computed]
        expected = everything[logits_rows]
        assert float((few - expected).norm() / expected.norm()) < 1e-5
    loaded.release()


def gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gates, ups = torch.nn.functional.linear(x, weight).chunk(2, -1)
    return torch.nn.functional.silu(gates) * ups


class Torch:
    """Takes the place of a kernel: torch's product for `numbers` of rows. Notes how many rows it is given."""

    def __init__(self, kernel: LinearKernel, numbers: range, probes: tuple[int, ...], given: list[int]) -> None:
        self.name, self.roles, self.reads, self.probes = kernel.name, kernel.roles, kernel.reads, probes
        self._numbers, self._given = numbers, given

    def rows(self, weight: Weight, few: int) -> Rows:
        return (self._numbers,)

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        def run(x: torch.Tensor) -> torch.Tensor:
            self._given.append(len(x))
            values = weight.dense()
            if role == "gate_up":
                return gate(x, values)
            if role == "qkv":  # in two parts
                halves = zip(x.chunk(2, -1), values.chunk(2, -1), strict=True)
                return torch.stack([torch.nn.functional.linear(*half) for half in halves])
            product = torch.nn.functional.linear(x, values, bias)
            return product[None] if role == "add" else product

        return run


def use(monkeypatch: pytest.MonkeyPatch, name: str, numbers: range, probes: tuple[int, ...]) -> list[int]:
    """Let torch multiply these numbers of rows in place of a kernel. -> how many rows it was given"""
    given: list[int] = []
    table = tuple(Torch(x, numbers, probes, given) if x.name == name else x for x in linear_dispatch.MEASURED)
    monkeypatch.setattr(linear_dispatch, "MEASURED", table)
    return given


def test_gates_are_inside_the_product_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = use(monkeypatch, "tiled_gate", range(9, 100), (9, 20))
    loaded = load_fused(varied_model("llama", **ONE_KV_HEAD), qualified=False, max_rows=16)
    assert rows[:4] == [9, 20] * 2  # the kernel's result is compared first, in each layer
    for num_tokens, gated in (8, 0), (9, 2), (17, 2):
        rows.clear()
        runner_of(loaded, num_tokens).forward(prefill_plan([random_prompt(num_tokens)]))
        assert rows == [num_tokens] * gated
    loaded.release()


def test_weights_of_few_rows_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = use(monkeypatch, "prefetch", range(1, 9), (4, 8))
    loaded = load_fused(varied_model("llama", **ONE_KV_HEAD), qualified=False, max_rows=8)
    for num_tokens, used in (3, 2), (8, 2), (9, 0):
        rows.clear()
        runner_of(loaded, num_tokens).forward(prefill_plan([random_prompt(num_tokens)]))
        assert rows == [num_tokens] * 3 * used  # qkv, out and down of each layer
    loaded.release()


class Codes(Torch):
    """Stands for the kernel of weights in 12 bits: torch's product times `factor`, for one row."""

    factor = 1.0

    def rows(self, weight: Weight, few: int) -> Rows:
        return (range(1, 2),) if isinstance(weight, Bits12Weight) else ()

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        run = super().make(weight, role, bias, activation)
        return (lambda x: self.factor * run(x)) if run is not None else None


@pytest.mark.parametrize(("factor", "num_compact"), [(1.0, 8), (1.1, 0)])
def test_a_layer_reads_weights_in_12_bits_unless_that_changes_its_output(
    monkeypatch: pytest.MonkeyPatch, factor: float, num_compact: int
) -> None:
    kernel = Codes(Bits12(), range(1, 2), (), [])
    kernel.factor = factor
    monkeypatch.setattr(linear_dispatch, "MEASURED", (kernel,))
    model = varied_model("llama", **ONE_KV_HEAD).to(DEVICE)
    linears = [module for module in model.modules() if weight_of(module) is not None]
    for module in linears:
        hold_as(module, Bits12Weight)
    fusions = fuse_gpu(model, max_rows=8)
    assert (fusions.num_fused, fusions.num_compact) == (2, num_compact)  # qkv, out, gates and down of two layers
    fusions.undo()
    assert all(type(weight_of(module)) is PlainWeight for module in linears)


def prefill_plan(prompts: list[list[int]]) -> WirePlan:
    """A step that computes whole prompts, each in slots of its own, and wants all logits."""
    ends = list(itertools.accumulate(len(p) for p in prompts))
    starts = [0, *ends[:-1]]
    rows = [Row(start, end - start, 0, (Extent(start, end),)) for start, end in zip(starts, ends, strict=True)]
    return WirePlan.of(rows, [token for p in prompts for token in p], range(ends[-1]))


def test_a_layer_that_computes_something_else_keeps_its_own_forward_and_says_why() -> None:
    model = varied_model("bitnet", **ONE_KV_HEAD, num_hidden_layers=1).to(DEVICE)
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda hidden_states, **options: own(2 * hidden_states, **options)
    fusions = fuse_gpu(model)
    assert not any(isinstance(layer.forward, FusedLayer) for layer in model.model.layers)
    assert fusions.unfused == ["BitNetDecoderLayer computes something else between its modules"]
    fusions.undo()


@pytest.mark.parametrize("kind", ["bitnet", "deepseek_v2", "deepseek_v3"])  # norms within attention, and latents
def test_a_layer_is_fused_around_attention_that_no_kernel_has(kind: str) -> None:
    model = varied_model(kind, num_hidden_layers=2)
    loaded = load_fused(model, max_rows=64)
    assert loaded.execution.startswith("paged, 2 of 2 layers fused, 2 of them around their own attention")
    assert all(isinstance(layer.forward, LayerAroundAttention) for layer in model.model.layers)
    loaded.release()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_strict_model_computes_what_it_did(kind: str) -> None:
    model = varied_model(kind, num_hidden_layers=1)
    loaded = load_fused(model, strict=True)
    assert loaded.lane == "paged"
    assert isinstance(model.model.layers[0].forward, FusedLayer)
    loaded.release()


@pytest.mark.gpu  # the products of Triton's interpreter do depend on where a row is
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_strict_logits_are_the_same_to_the_last_bit_in_every_batch(kind: str, dtype: Any) -> None:
    config = EngineConfig(device=DEVICE.type, dtype=dtype, strict=True, max_model_len=8 if kind == "mistral" else 512)
    loaded = load_model(varied_model(kind), config, byte_tokenizer(), attention_factory=TritonAttention)
    assert loaded.lane == "paged"
    assert batch_dependence(loaded, TritonAttention) is None
    loaded.release()


GEMMA4: dict[str, dict[str, Any]] = {
    "dense, keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts beside the MLP": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32
    },
    "inputs of layers, shared keys": {
        "hidden_size_per_layer_input": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", GEMMA4)
def test_the_layers_of_every_form_of_gemma_4_run_fused(form: str) -> None:
    model = varied_model("gemma4", **{"hidden_size_per_layer_input": 0, "global_head_dim": 32} | GEMMA4[form])
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    loaded = load_fused(model, max_rows=64)
    number = len(model.model.layers)
    assert loaded.execution.startswith(f"paged, {number} of {number} layers fused"), loaded.execution
    around = [isinstance(layer.forward, LayerAroundAttention) for layer in model.model.layers]
    assert around == [False, True, True, True][:number] if number > 2 else not any(around)  # those that share keys
    if "experts" in form:
        assert all(layer.forward.mlp.router is not None for layer in model.model.layers)
    loaded.release()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("kind", ["mamba2", "gemma4"])
def test_norms_with_gates_and_heads_of_several_sizes_give_what_they_gave(kind: str) -> None:
    model = tiny_model(kind, num_hidden_layers=2).to(DEVICE)
    ids = torch.tensor([random_prompt(7)], device=DEVICE)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        fusions = fuse_gpu(model, max_rows=64)
        found = model(input_ids=ids, use_cache=False).logits
    fusions.undo()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
