"""Every format of the KV store: what `append` keeps, and copies that leave a store and come back."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.bits12 import kv_codec
from graftlm.kernels.kv_store import (
    FP8,
    CompactKV,
    Float8KV,
    Int8KV,
    KVStore,
    LayerKV,
    PlainKV,
    allocate_kv,
    quantize,
    token_bytes,
)
from graftlm.kernels.wire_plan import Extent

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = (LayerKV(2, 64, 64), LayerKV(3, 128, 128))
SCALES = [torch.rand(2, layer.num_kv_heads, device=DEVICE) + 0.5 for layer in LAYOUT]
FORMATS = {
    "plain": (PlainKV, {"dtype": torch.float32}),
    "bfloat16": (PlainKV, {"dtype": torch.bfloat16}),
    "fp8": (Float8KV, {"dtype": FP8, "scales": SCALES}),
    "int8": (Int8KV, {"dtype": torch.int8}),
    "12 bits": (CompactKV, {"dtype": torch.bfloat16, "compact": True}),
}


def store_of(form: str, num_slots: int) -> KVStore:
    return allocate_kv(LAYOUT, num_slots, device="cpu" if form == "int8" else DEVICE, **FORMATS[form][1])


def filled(form: str, num_slots: int) -> KVStore:
    store = store_of(form, num_slots)
    slots = torch.arange(num_slots, device=store.device)
    generator = torch.Generator().manual_seed(3)
    for index, layer in enumerate(LAYOUT):
        size = num_slots, layer.num_kv_heads, layer.k_dim
        k, v = (torch.randn(size, generator=generator).bfloat16().to(store.device) for _ in "kv")
        store.append(index, slots, k, v)
    return store


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_of_some_slots_is_written_into_others_to_the_last_bit(form: str) -> None:
    source, target = filled(form, 40), filled(form, 30)
    taken, places = [Extent(30, 34), Extent(3, 10)], [Extent(5, 6), Extent(20, 30)]
    before = target.read([Extent(0, 30)])
    copy = [tuple(part.to("cpu") for part in parts) for parts in source.read(taken)]
    target.write(places, copy)
    after = target.read(places)
    for mine, theirs in zip(after, copy, strict=True):
        assert all(same_bits(a.cpu(), b) for a, b in zip(mine, theirs, strict=True))
    untouched = [*range(5), *range(6, 20)]
    for old, new in zip(before, target.read([Extent(0, 30)]), strict=True):
        assert all(same_bits(a[untouched], b[untouched]) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_takes_the_bytes_that_the_pool_counts_for_its_tokens(form: str) -> None:
    store = store_of(form, 10)
    per_token = sum(token_bytes(layer, store.dtype, form == "12 bits") for layer in LAYOUT)
    copied = sum(part.nbytes for parts in store.read([Extent(2, 6)]) for part in parts)
    assert (copied, store.num_bytes) == (4 * per_token, 10 * per_token)


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_has_a_class_of_its_own(form: str) -> None:
    assert type(store_of(form, 4)) is FORMATS[form][0]


def test_a_copy_of_another_length_format_or_layout_is_refused() -> None:
    store = filled("plain", 10)
    copy = store.read([Extent(0, 4)])
    with pytest.raises(ValueError, match="a copy for 5 slots"):
        store.write([Extent(0, 5)], copy)
    with pytest.raises(ValueError, match="bfloat16"):
        store.write([Extent(0, 4)], filled("bfloat16", 10).read([Extent(0, 4)]))
    with pytest.raises(ValueError):
        store.write([Extent(0, 4)], copy[:1])


def test_append_keeps_what_the_format_defines() -> None:
    k, v = torch.randn(2, 5, 2, 64).bfloat16().to(DEVICE)
    layer, slots = LAYOUT[:1], torch.tensor([7, 1, 3, 0, 9], device=DEVICE)
    compact = CompactKV(layer, 10, DEVICE)
    compact.append(0, slots, k, v)
    words, exponents = kv_codec.pack(k)
    assert torch.equal(compact.k[0][slots], words) and torch.equal(compact.exponents[0][:, slots, 0].T, exponents)
    float8 = Float8KV(layer, 10, [torch.tensor([[0.5, 2.0], [1.0, 1e-6]], device=DEVICE)], DEVICE)
    float8.append(0, slots, k, v)
    assert torch.equal(float8.k[0][slots, 1].float(), (k[:, 1].float() / 2).to(FP8).float())
    assert float8.v[0][slots, 1].float().abs().max() == 448.0  # saturated
    int8 = Int8KV(layer, 10)
    int8.append(0, slots.cpu(), k.cpu(), v.cpu())
    whole, scale = quantize(v.cpu())
    assert torch.equal(int8.v[0][slots.cpu()], whole) and torch.equal(int8.token_scales[0][1][slots.cpu()], scale)
