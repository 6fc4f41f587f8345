"""How KV is kept: which models and cards get 12 bits a number, what the others are told, and the comparison."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.engine_builder import build_runner
from graftlm.core.errors import ConfigError
from graftlm.core.kv import kv_format as module, memory
from graftlm.core.kv.kv_format import KVFormat, kv_format
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model import lane
from graftlm.core.model.load import load_model
from graftlm.core.runtime import Runtime
from graftlm.kernels.attention import Attention, LayerSpec
from graftlm.kernels.bits12 import kv_codec
from graftlm.kernels.kv_store import CompactKV, KVStore
from graftlm.kernels.wire_plan import WirePlan, slots_of
from graftlm.plugins import manager
from tests.models import byte_tokenizer, tiny_model

GPU = torch.device("cuda", 0)
PLAIN, COMPACT = KVFormat(torch.bfloat16), KVFormat(torch.bfloat16, compact=True)
LAYER = LayerSpec(8, 2, 128, 128)


@pytest.fixture(scope="module")
def on_cpu() -> LoadedModel:
    return load_model(tiny_model(), EngineConfig(device="cpu"), byte_tokenizer())


@pytest.fixture
def loaded(on_cpu: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model that can keep KV in 12 bits, on a Hopper GPU."""
    has_card(monkeypatch, (9, 0))
    monkeypatch.setattr(module, "gluon_kernel", lambda name: SimpleNamespace(MAX_GROUP=8))
    return replace(on_cpu, device=GPU, dtype=torch.bfloat16, layers=(LAYER, LAYER))


def test_heads_of_64_are_kept_in_12_bits_by_default_where_memory_is_slow(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(loaded, layers=(LAYER, LayerSpec(8, 2, 64, 64)))
    wide = replace(loaded, layers=(LAYER, LayerSpec(8, 2, 256, 256)))
    for rate, expected in ((3.35e12, COMPACT), (4.8e12, PLAIN), (0.0, PLAIN)):
        monkeypatch.setattr(module, "memory_rate", lambda device, rate=rate: rate)
        assert kv_format(narrow, config()) == expected
        assert kv_format(wide, config()) == COMPACT


def has_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")


def config(dtype: Any = "auto", **options: Any) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(dtype=dtype), **options)


def test_a_cpu_keeps_kv_in_the_models_own_dtype(on_cpu: LoadedModel) -> None:
    assert kv_format(on_cpu, config()) == kv_format(on_cpu, config("model")) == KVFormat(torch.float32)


def test_a_model_that_can_keeps_kv_in_12_bits_unless_its_own_dtype_is_asked_for(loaded: LoadedModel) -> None:
    assert kv_format(loaded, config()) == kv_format(loaded, config("compact")) == COMPACT
    assert kv_format(loaded, config(attention="triton")) == COMPACT
    assert kv_format(loaded, config("model")) == PLAIN
    assert kv_format(loaded, config("fp8")) == KVFormat(torch.float8_e4m3fn)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_heads_of_64_and_256_dimensions_are_kept_in_12_bits_too_beside_others(
    loaded: LoadedModel, head_dim: int
) -> None:
    given = replace(loaded, layers=(LAYER, LayerSpec(8, 2, head_dim, head_dim, window=64)))
    assert kv_format(given, config("compact")) == COMPACT
    assert COMPACT.bytes_per_token(given) == 2 * 2 * (193 + head_dim * 3 // 2 + 1)


def test_a_card_newer_than_the_one_that_was_measured_has_to_be_asked(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_card(monkeypatch, (10, 0))
    assert kv_format(loaded, config()) == PLAIN
    assert kv_format(loaded, config("compact")) == COMPACT


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"lane": "serial"}, {}, "tiny runs in the serial lane"),
        ({"device": torch.device("cpu")}, {}, "tiny runs on cpu"),
        ({"dtype": torch.float16}, {}, "tiny computes in float16"),
        ({}, {"strict": True}, "strict=True"),
        ({}, {"attention": "flashinfer"}, "attention='flashinfer'"),
        ({}, {"attention": "of a plugin"}, "attention='of a plugin'"),
        ({"layers": (LAYER, LayerSpec(8, 2, 80, 80))}, {}, "tiny has heads of 80 dimensions"),
        ({"layers": (LAYER, LayerSpec(8, 2, 192, 128))}, {}, "tiny has heads of 192 and 128 dimensions"),
        ({"layers": (LAYER, LayerSpec(9, 1, 128, 128))}, {}, "9 query heads share a KV head, and at most 8 can"),
    ],
)
def test_what_cannot_be_compact_is_refused_with_its_reason_and_left_alone_by_itself(
    loaded: LoadedModel, changes: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    given = replace(loaded, name="tiny", **changes)
    assert kv_format(given, config(**options)) == KVFormat(given.dtype)
    with pytest.raises(ConfigError) as refused:
        kv_format(given, config("compact", **options))
    assert str(refused.value).startswith(f"CacheConfig.dtype is 'compact', but {reason}; KV in 12 bits is for models")
    assert str(refused.value).endswith("leave it out")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((8, 0), "the card is a card"), ((7, 5), "the kernels need compute capability 8.0, a card has 7.5")],
)
def test_an_older_card_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str
) -> None:
    has_card(monkeypatch, capability)
    assert kv_format(loaded, config()) == PLAIN
    with pytest.raises(ConfigError, match=f"but {reason}; .* on a Hopper GPU or a newer one"):
        kv_format(loaded, config("compact"))


def test_a_triton_without_what_the_kernel_is_written_in_is_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gluon_kernel", lambda name: None)
    monkeypatch.setattr(module, "triton_version", lambda: (3, 5))
    assert kv_format(loaded, config()) == PLAIN
    with pytest.raises(ConfigError, match=r"but Triton 3\.5 is installed; .* with Triton 3\.6 or newer"):
        kv_format(loaded, config("compact"))


def test_a_pool_holds_a_third_more_tokens_in_12_bits(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [form.bytes_per_token(loaded) for form in (PLAIN, COMPACT)]
    assert tokens == [2 * 2 * 2 * 128 * 2, 2 * 2 * 2 * (128 * 12 // 8 + 1)]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**6)
    assert [memory.pool_size(loaded, CacheConfig(memory_share=0.5), size) for size in tokens] == [244, 323]


def test_an_engine_says_how_kv_is_kept() -> None:
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=64), device="cpu") as runtime:
        assert runtime.stats().kv == ""
        assert runtime.load().stats().kv == "float32"
    assert [str(form) for form in (PLAIN, COMPACT)] == ["bfloat16", "bfloat16 in 12 bits"]


# ---- the comparison at a start -----------------------------------------------------------------------------------


class Definition(Attention):
    """Attention over either store by their definitions; `wrong` spoils what it reads of a compact one."""

    wrong = ""

    def __init__(self, store: KVStore) -> None:
        self.store = store

    def supports(self, layer: LayerSpec) -> str | None:
        return None

    def prepare(self, plan: WirePlan) -> None:
        self.slots = plan.out_slots

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: WirePlan, params: Any
    ) -> torch.Tensor:
        if self.wrong == "breaks" and isinstance(self.store, CompactKV):
            raise RuntimeError("no such kernel")
        self.store.append(layer, torch.from_numpy(self.slots), k.contiguous(), v.contiguous())
        out, group = torch.empty(q.shape, dtype=q.dtype), q.shape[1] // k.shape[1]
        for row in plan.rows:
            here = slice(row.start, row.start + row.num_new)
            slots = torch.from_numpy(slots_of(row.extents, 0, row.kv_len))
            keys, values = (self.read(layer, i, slots).repeat_interleave(group, 1) for i in (0, 1))
            scores = torch.einsum("qhd,khd->hqk", q[here].float(), keys) * params.scale
            ahead = torch.arange(row.kv_len)[None] > torch.arange(row.past, row.kv_len)[:, None]
            shares = scores.masked_fill(ahead, float("-inf")).softmax(-1)
            out[here] = torch.einsum("hqk,khd->qhd", shares, values).to(q.dtype)
        return out

    def read(self, layer: int, i: int, slots: torch.Tensor) -> torch.Tensor:
        held = (self.store.k, self.store.v)[i][layer][slots]
        if not isinstance(self.store, CompactKV):
            return held.float()
        exponents = self.store.exponents[layer][:, slots, i]
        return kv_codec.unpack(held, (exponents + (3 if self.wrong == "exponents" else 0)).T)


def load_over_12_bits(monkeypatch: pytest.MonkeyPatch, attention: Any = Definition) -> LoadedModel:
    monkeypatch.setattr(lane, "may_be_compact", lambda loaded, config: True)
    monkeypatch.setattr(lane, "stack_layers", lambda *_: None)  # on a CPU, over KV in the model's dtype
    found = tiny_model(head_dim=128).bfloat16()
    return load_model(found, EngineConfig(device="cpu"), byte_tokenizer(), attention_factory=attention)


def test_a_model_is_qualified_with_kv_in_12_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[KVStore] = []

    class Noted(Definition):
        def __init__(self, store: KVStore) -> None:
            super().__init__(store)
            stores.append(store)

    loaded = load_over_12_bits(monkeypatch, Noted)
    assert (loaded.lane, loaded.kv_reason) == ("paged", None)
    filled = [store for store in stores if store.num_slots]
    assert isinstance(filled[0], CompactKV)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("exponents", "a ragged batch differs from the model's own forward in layer 0 by "),
        ("breaks", "a ragged batch fails: RuntimeError: no such kernel"),
    ],
)
def test_a_model_whose_attention_over_12_bits_is_wrong_keeps_its_own_dtype(
    monkeypatch: pytest.MonkeyPatch, wrong: str, reason: str
) -> None:
    monkeypatch.setattr(Definition, "wrong", wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_over_12_bits(monkeypatch)
    assert loaded.lane == "paged"
    assert loaded.kv_reason is not None and loaded.kv_reason.startswith(reason)
    with pytest.warns(UserWarning, match=f"KV is kept in bfloat16, not in 12 bits a number: {reason}"):
        build_runner(loaded, config(attention="torch"), manager.load().attention)


def test_a_model_that_runs_in_the_serial_lane_anyway_says_nothing_of_12_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Definition):
        def prepare(self, plan: WirePlan) -> None:
            raise RuntimeError("no such kernel")

    with pytest.warns(UserWarning, match="serial lane, one sequence at a time: a ragged batch fails"):
        loaded = load_over_12_bits(monkeypatch, Breaks)
    assert loaded.kv_reason is None


def test_a_model_with_such_a_reason_keeps_its_own_dtype(loaded: LoadedModel) -> None:
    assert kv_format(replace(loaded, kv_reason="attention over it is another"), config("compact")) == PLAIN
