"""Keys and values in 12 bits a number: what is kept, where it lies, and that both kernels write just that."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.attention import PackedQKV
from graftlm.kernels.bits12.kv_codec import DIMS, bytes_of, pack, unpack, words_of
from graftlm.kernels.gpu.attention.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.elementwise import store_kv
from graftlm.kernels.kv_store import CompactKV, LayerKV, allocate_kv, token_bytes
from graftlm.kernels.norm import Norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 0x5A5A5A5A
of_each_size = pytest.mark.parametrize("dim", DIMS)


def vectors(*shape: int, dim: int = 128, seed: int = 0) -> torch.Tensor:
    """bfloat16 [*shape, dim]: ordinary vectors, spread ones, with outliers, tiny and huge ones, with zeros."""
    torch.manual_seed(seed)
    kinds = torch.randint(6, (*shape, 1))
    x = torch.randn(*shape, dim)
    x = torch.where(kinds == 1, x * torch.exp2(torch.randn(*shape, dim) * 8), x)
    x = torch.where((kinds == 2) & (torch.rand(*shape, dim) < 0.02), x * 3e4, x)
    x = torch.where(kinds == 3, x * 2.0 ** torch.randint(-125, 120, (*shape, 1)), x)
    x = torch.where((kinds == 4) & (torch.rand(*shape, dim) < 0.5), 0.0, x)
    return torch.where(kinds == 5, x * 1e-38, x).bfloat16()  # subnormals, numbers that become zero


def largest_power(x: torch.Tensor) -> torch.Tensor:
    """The power of two of the largest number of each vector, float64 [..., 1]."""
    return torch.exp2(torch.floor(torch.log2(x.double().abs().amax(-1, keepdim=True))))


@of_each_size
def test_numbers_are_kept_down_to_two_to_the_minus_14_of_the_largest_power_and_rounded_below(dim: int) -> None:
    x = (
        torch.randn(400, dim).sign()
        * torch.exp2(torch.rand(400, dim) * -30)
        * 2.0 ** torch.arange(-50, 50, 0.25)[:, None]
    )
    x = x.bfloat16()
    kept, power = unpack(*pack(x)).double(), largest_power(x)
    near = x.double().abs() >= power * 2.0**-14
    assert 0.3 < near.float().mean() < 0.7
    assert torch.equal(kept[near], x.double()[near])
    assert ((kept - x.double()).abs() <= power * 2.0**-22).all()
    assert (kept * x.double() >= 0).all()
    assert (kept[~near] == 0).any() and (kept[~near] != x.double()[~near]).any()


def test_every_number_beside_a_one_is_rounded_to_the_nearest_multiple() -> None:
    below = torch.arange(0x3F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # all from 0 to 1
    x = torch.ones(-(-len(below) // 127), 128, dtype=torch.bfloat16)
    x[:, :127] = torch.nn.functional.pad(below, (0, 127 * len(x) - len(below))).view(len(x), 127)
    exact, kept = x.double(), unpack(*pack(x)).double()
    multiples = torch.floor(exact * 2**21 + 0.5) / 2**21
    assert torch.equal(kept, torch.where(exact >= 2.0**-14, exact, multiples))


@of_each_size
def test_what_was_kept_once_is_kept_again_to_the_bit(dim: int) -> None:
    words, exponents = pack(vectors(500, dim=dim))
    kept = unpack(words, exponents)
    again = pack(kept.bfloat16())
    assert torch.equal(kept.bfloat16().float(), kept)
    assert torch.equal(again[0], words) and torch.equal(again[1], exponents)


@of_each_size
def test_where_a_number_lies(dim: int) -> None:
    x, half = torch.zeros(dim, dtype=torch.bfloat16), dim // 2
    x[0], x[half + 5], x[half - 2] = 1.0, -1.5, -(2.0**-14)  # fields 0x780, 0x7C0, 0x080
    words, exponent = pack(x)
    assert exponent == 127
    assert {i: w for i, w in enumerate((words.long() & 0xFFFFFFFF).tolist()) if w} == {
        0: 0x80,
        3: 0xC0 << 8,  # dimensions 4 to 7 of the second half: the second word of the first group's
        half // 2 - 3: 0x80 << 16,  # the last four dimensions of the first half
        half // 2: 0x07,
        half // 2 + 1: 0x87 << 8 + 4,
        half // 2 + half // 4 - 1: 0x80 << 16,
    }


def test_zeros_stay_and_numbers_below_normal_ones_become_zero() -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    x[1, 3], x[2, 3], x[2, 4] = 2.0**-130, 2.0**-126, 2.0**-127
    words, exponents = pack(x)
    assert exponents.tolist() == [0, 0, 1]
    assert unpack(words, exponents).nonzero().tolist() == [[2, 3]]
    assert unpack(words, exponents)[2, 3] == 2.0**-126


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_does_not_become_finite(value: float) -> None:
    x = torch.ones(128, dtype=torch.bfloat16)
    x[77] = value
    words, exponent = pack(x)
    assert exponent == 255
    assert unpack(words, exponent).isfinite().logical_not().nonzero().tolist() == [[77]]


def compact_store(num_slots: int, num_kv_heads: int, dim: int) -> CompactKV:
    store = CompactKV([LayerKV(num_kv_heads, dim, dim)], num_slots, DEVICE)
    for tensor, poison in ((store.k[0], POISON), (store.v[0], POISON), (store.exponents[0], POISON & 0xFF)):
        tensor.fill_(poison)
    return store


def check_store(store: CompactKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Whether it holds k and v at their slots, as `pack` gives them, and poison everywhere else."""
    others = torch.ones(store.num_slots, dtype=torch.bool, device=DEVICE)
    others[slots.long()] = False
    for i, (x, held) in enumerate(((k, store.k[0]), (v, store.v[0]))):
        words, exponents = pack(x.cpu())
        assert torch.equal(held[slots.long()].cpu(), words)
        assert torch.equal(store.exponents[0][:, slots.long(), i].T.cpu(), exponents)
        assert (held[others] == POISON).all()
    assert (store.exponents[0][:, others] == POISON & 0xFF).all()


@of_each_size
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 5, 37])  # programs of one token, of 4, of 16
def test_keys_and_values_are_stored_as_they_are_defined(num_tokens: int, index: torch.dtype, dim: int) -> None:
    k, v = (vectors(num_tokens, 3, dim=dim, seed=seed).to(DEVICE) for seed in (1, 2))
    k[-1, 1, 5], v[-1, 2, -29], v[0, 0, dim // 2] = float("inf"), float("-inf"), float("nan")
    store, slots = (
        compact_store(num_tokens + 4, 3, dim),
        torch.randperm(num_tokens + 4, device=DEVICE)[:num_tokens].to(index),
    )
    store_kv(k, v, store.k[0], store.v[0], slots, exponents=store.exponents[0])
    check_store(store, slots, k, v)


@pytest.mark.parametrize("norm", [False, True])
# packed where heads are turned, and afterwards
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 128), (128, 96), (256, 256), (256, 64)])
@pytest.mark.parametrize("num_tokens", [1, 5, 37])
def test_heads_are_turned_as_for_a_plain_store_and_stored_as_they_are_defined(
    num_tokens: int, dim: int, rotary: int, norm: bool
) -> None:
    heads, kv_heads = 3, 2
    qkv = vectors(num_tokens, heads + 2 * kv_heads, dim=dim, seed=3).clamp(-1e4, 1e4).flatten(1).to(DEVICE)
    angle = torch.randn(num_tokens, rotary // 2, device=DEVICE)
    cos, sin = (torch.cat([f(angle)] * 2, -1).bfloat16() for f in (torch.cos, torch.sin))
    norms = [Norm(torch.randn(dim, device=DEVICE).bfloat16(), 1e-5) if norm else None for _ in "qk"]
    rotation = (heads, kv_heads, dim, cos, sin, *norms)
    plain = [torch.empty(num_tokens, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    expected = rotate_store(PackedQKV(qkv.clone(), *rotation), *plain, torch.arange(num_tokens, device=DEVICE))
    store, slots = (
        compact_store(num_tokens + 4, kv_heads, dim),
        torch.randperm(num_tokens + 4, device=DEVICE)[:num_tokens],
    )
    packed = PackedQKV(qkv, *rotation)
    found = rotate_store(packed, store.k[0], store.v[0], slots.int(), exponents=store.exponents[0])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    check_store(store, slots, *plain)


def test_a_compact_store_takes_three_quarters_and_a_byte_a_vector() -> None:
    layer, other = LayerKV(2, 128, 128), LayerKV(1, 256, 256)
    store = CompactKV([other, layer], 10)
    assert [x.shape for x in (store.k[1], store.v[1])] == [(10, 2, 48)] * 2
    assert [x.shape for x in (store.k[0], store.v[0])] == [(10, 1, 96)] * 2
    assert store.k[0].dtype is torch.int32 and store.dtype is torch.bfloat16
    assert store.exponents[1].shape == (2, 10, 2) and store.exponents[1].dtype is torch.uint8
    assert store.num_bytes == sum(x.nbytes for x in [*store.records, *store.exponents]) == 10 * 2 * (2 * 193 + 385)
    assert token_bytes(layer, torch.bfloat16, compact=True) == 2 * 2 * 193
    assert [bytes_of(dim) for dim in DIMS] == [97, 193, 385]
    assert token_bytes(layer, torch.bfloat16) == 2 * 2 * 256


def test_the_words_of_a_key_and_a_value_lie_side_by_side() -> None:
    store, words = CompactKV([LayerKV(2, 256, 256)], 10), words_of(256)
    store.records[0].copy_(torch.arange(10 * 2 * 2 * words).view(10, 2, 2 * words))
    first = 7 * 2 * words  # of slot 3, head 1
    assert store.k[0][3, 1].tolist() == list(range(first, first + words))
    assert store.v[0][3, 1].tolist() == list(range(first + words, first + 2 * words))


@pytest.mark.parametrize(
    ("layer", "dtype", "message"),
    [
        (LayerKV(2, 128, 128), torch.float16, "a compact KV store is for bfloat16, not for torch.float16"),
        (LayerKV(2, 96, 96), torch.bfloat16, r"for heads of 64, 128 or 256 dimensions, not of 96 \(K\) and 96 \(V\)"),
        (LayerKV(2, 128, 64), torch.bfloat16, r"not of 128 \(K\) and 64 \(V\)"),
    ],
)
def test_a_compact_store_of_another_kind_is_refused(layer: LayerKV, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_kv([layer], 10, dtype, compact=True)
