"""KV in float8: stored divided by a scale, read back by every kernel."""

import pytest
import torch

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.kv.kv_format import KVFormat, kv_format
from graftlm.core.model.kv_scales import kv_scales
from graftlm.core.model.load import load_model
from graftlm.kernels.attention import LayerSpec, PackedQKV
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.gpu.attention.backend import TritonAttention
from graftlm.kernels.kv_store import FP8, Float8KV, LayerKV
from tests.kernels.gpu.attention.test_attention import DEVICE, error, plan_of, reference
from tests.models import byte_tokenizer, tiny_model

HEADS, KV_HEADS, DIM = 4, 2, 64
SCALES = torch.tensor([[0.5, 0.0625], [0.25, 2.0]], device=DEVICE)


def attention_over_fp8(num_slots: int) -> tuple[TritonAttention, Float8KV]:
    store = Float8KV([LayerKV(KV_HEADS, DIM, DIM)], num_slots, [SCALES], DEVICE)
    for x in (store.k[0], store.v[0]):
        x.copy_(torch.randn(x.shape).to(FP8))
    return TritonAttention(store), store


def exact(scale: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Random numbers [num_tokens, KV_HEADS, DIM] that float8 holds as they are: Triton's interpreter rounds wrongly."""
    x = torch.randn(num_tokens, KV_HEADS, DIM, device=DEVICE).to(FP8).float()
    return torch.where(x.abs() < 2**-6, 0, x) * scale[:, None]


@pytest.mark.parametrize("strict", [False, True])
def test_every_row_attends_to_what_the_store_holds_times_its_scale(strict: bool) -> None:
    torch.manual_seed(0)
    plan = plan_of((1, 70), (1, 5), (9, 40), (6, 0))
    attention, store = attention_over_fp8(140)
    attention.strict = strict
    q = torch.randn(plan.num_tokens, HEADS, DIM, device=DEVICE)
    k, v = (exact(scale, plan.num_tokens) for scale in SCALES)
    attention.prepare(plan)
    out = attention.forward(0, q, k, v, plan, AttentionParams(0.05))
    slots = torch.from_numpy(plan.out_slots).to(DEVICE)
    for new, held, scale in ((k, store.k[0], SCALES[0]), (v, store.v[0], SCALES[1])):
        assert torch.equal(held.float()[slots] * scale[:, None], new)
    keys, values = (x[0].float() * s[:, None] for x, s in ((store.k, SCALES[0]), (store.v, SCALES[1])))
    for row in plan.rows:
        here, there = slice(row.start, row.stop), slice(*row.extents[0])
        positions = torch.arange(row.past, row.kv_len, device=DEVICE)
        options = {"scale": 0.05, "window": None, "softcap": None, "sinks": None}
        assert error(out[here], reference(q[here], keys[there], values[there], positions, **options)) < 1e-4


def test_packed_queries_keys_and_values_are_stored_scaled_too() -> None:
    torch.manual_seed(0)
    plan = plan_of((5, 0))
    attention, store = attention_over_fp8(5)
    new = [exact(scale, 5) for scale in SCALES]
    qkv = torch.cat([torch.randn(5, HEADS, DIM, device=DEVICE), *new], 1).flatten(1)
    one, zero = torch.ones(5, DIM, device=DEVICE), torch.zeros(5, DIM, device=DEVICE)
    packed = PackedQKV(qkv, HEADS, KV_HEADS, DIM, one, zero)  # turned by no angle
    attention.prepare(plan)
    attention.forward_packed(0, packed, plan, AttentionParams(0.1))
    for held, scale, wanted in zip((store.k[0], store.v[0]), SCALES, new, strict=True):
        assert torch.equal(held.float() * scale[:, None], wanted)


def test_scales_leave_room_above_what_a_sample_holds() -> None:
    loaded = load_model(tiny_model("llama"), EngineConfig(device=DEVICE.type, max_model_len=64), byte_tokenizer())
    scales = kv_scales(loaded)
    assert [s.shape for s in scales] == [(2, 2), (2, 2)]
    assert all((torch.log2(s) % 1 == 0).all() for s in scales)  # powers of two


def test_kv_in_float8_takes_a_quarter_of_float32_and_needs_a_gpu() -> None:
    loaded = load_model(tiny_model("llama"), EngineConfig(device="cpu", max_model_len=64), byte_tokenizer())
    config = EngineConfig(cache=CacheConfig(dtype="fp8"))
    with pytest.raises(ConfigError, match="runs on cpu; KV in float8 is for models in the paged lane on a GPU"):
        kv_format(loaded, config)
    loaded.device = torch.device("cuda")
    assert kv_format(loaded, config) == KVFormat(FP8)
    assert KVFormat(FP8).bytes_per_token(loaded) * 4 == loaded.bytes_per_token
    assert "no KV in float8" in str(TorchAttention(Float8KV((), 0, ())).supports(LayerSpec(4, 2, 16, 16)))
